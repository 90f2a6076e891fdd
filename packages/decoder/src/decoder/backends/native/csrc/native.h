// What the files of the library share: vectors of numbers, products with packed weights, and norms.
//
// Numbers are float32 or bfloat16 in memory and float32 in sums. `native.py` compiles the files and describes the calls.

#ifndef NATIVE_H
#define NATIVE_H

#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, MOST_ROWS = 14, WIDE = 4 };  // 32 registers of 16 numbers
#else
enum { LANES = 8, MOST_ROWS = 4, WIDE = 2 };  // 16 registers of 8 numbers
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))
// What is added and multiplied in one place only has one order, whatever the compiler makes of it.
#define ONCE static __attribute__((noinline))
// What the files call of each other, and nobody else.
#define INNER __attribute__((visibility("hidden")))

// ---------------------------------------------------------------------------------------------------------- numbers

INLINE vec splat(float x) { return x - (vec){0}; }

INLINE vec choose(ivec where, vec yes, vec no) { return (vec)((where & (ivec)yes) | (~where & (ivec)no)); }

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

// GCC's own conversion of vectors takes four instructions.
INLINE vec all_widened(halves x) {
#if defined(__AVX512F__)
    return (vec)((uvec)_mm512_cvtepu16_epi32((__m256i)x) << 16);
#else
    return (vec)((uvec)_mm256_cvtepu16_epi32((__m128i)x) << 16);
#endif
}

// To the nearest bfloat16, ties to even; NaN stays NaN.
INLINE halves rounded(vec x) {
    uvec bits = (uvec)x, up = bits + 0x7fff + (bits >> 16 & 1);
    uvec nan = (uvec)((bits & 0x7fffffff) > 0x7f800000);
    const uvec kept = ((up & ~nan) | ((bits | 0x400000) & nan)) >> 16;
#if defined(__AVX512F__)
    return (halves)_mm512_cvtepi32_epi16((__m512i)kept);
#else
    return __builtin_convertvector(kept, halves);
#endif
}

// LANES numbers from place `at` on, or the `count` that there are. Masks need no call that would empty all registers.
#if defined(__AVX512BW__) && defined(__AVX512VL__)
INLINE __mmask16 mask_of(int64_t count) { return (__mmask16)_bzhi_u32(0xffff, count < LANES ? (uint32_t)count : LANES); }

INLINE vec load(const void *from, int64_t at, int is_bf16, int64_t count) {
    if (is_bf16) return all_widened((halves)_mm256_maskz_loadu_epi16(mask_of(count), (const uint16_t *)from + at));
    return (vec)_mm512_maskz_loadu_ps(mask_of(count), (const float *)from + at);
}

INLINE void store(void *to, int64_t at, int is_bf16, vec x, int64_t count) {
    if (is_bf16) _mm256_mask_storeu_epi16((uint16_t *)to + at, mask_of(count), (__m256i)rounded(x));
    else _mm512_mask_storeu_ps((float *)to + at, mask_of(count), (__m512)x);
}
#else
INLINE vec load(const void *from, int64_t at, int is_bf16, int64_t count) {
    if (is_bf16) {
        halves x = {0};
        memcpy(&x, (const uint16_t *)from + at, count >= LANES ? sizeof x : (size_t)count * 2);
        return all_widened(x);
    }
    vec x = {0};
    memcpy(&x, (const float *)from + at, count >= LANES ? sizeof x : (size_t)count * 4);
    return x;
}

INLINE void store(void *to, int64_t at, int is_bf16, vec x, int64_t count) {
    if (is_bf16) {
        halves y = rounded(x);
        memcpy((uint16_t *)to + at, &y, count >= LANES ? sizeof y : (size_t)count * 2);
    } else {
        memcpy((float *)to + at, &x, count >= LANES ? sizeof x : (size_t)count * 4);
    }
}
#endif

INLINE vec larger(vec x, vec y) {  // y where either is no number
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)x, (__m512)y);
#else
    return (vec)_mm256_max_ps((__m256)x, (__m256)y);
#endif
}

// The lanes that are `step` apart change places.
INLINE vec swapped(vec x, int step) {
    ivec order;
    for (int lane = 0; lane < LANES; lane++) order[lane] = lane ^ step;
    return __builtin_shuffle(x, order);
}

// Lanes in a fixed order.
INLINE float sum(vec x) {
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) x += swapped(x, step);
    return x[0];
}

INLINE float largest_of(vec x) {
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) x = larger(x, swapped(x, step));
    return x[0];
}

INLINE vec to_whole(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (vec)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}

// 2^(n + f) of a whole n <= 126 and a fraction f, at most 1/2 from zero; 0 where n is small.
INLINE vec power_of(vec n, vec f) {
    vec p = splat(1.5403530393e-4f);  // the series of 2^f: powers of log 2 over factorials
    p = p * f + 1.3333558146e-3f;
    p = p * f + 9.6181291076e-3f;
    p = p * f + 5.5504108665e-2f;
    p = p * f + 2.4022650696e-1f;
    p = p * f + 6.9314718056e-1f;
    p = p * f + 1.0f;
#if defined(__AVX512F__)
    return (vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    const ivec low = n < -126;
    return choose(low, (vec){0}, p * (vec)((__builtin_convertvector(choose(low, (vec){0}, n), ivec) + 127) << 23));
#endif
}

// 2^x for x <= 0, within 2 units of the last place; 0 below -200.
INLINE vec power_of_two(vec x) {
    x = larger(splat(-200), x);
    const vec n = to_whole(x);
    return power_of(n, x - n);
}

// a b + c, rounded once.
INLINE vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// x / (1 + e^-x).
INLINE vec silu(vec x) {
    const vec y = -larger(splat(-87), -larger(splat(-87), x));  // from -87 to 87
    const vec n = to_whole(y * -1.44269504f);
    // -y / log 2 - n: the second product is what the first one lacks of the logarithm's digits.
    const vec f = fused(y, splat(-1.92596303e-8f), fused(y, splat(-1.44269504f), -n));
    return x / (1 + power_of(n, f));
}

INLINE void *row_of(const void *x, int64_t at, int is_bf16) { return (char *)x + at * (is_bf16 ? 2 : 4); }

// --------------------------------------------------------------------------------------------------- products, norms

// x W^T, and b if there is one. Weights are packed in panels of PANEL outputs, in words of 32 bits:
//
// FLOATS    float32, input after input.
// HALVES    bfloat16 in pairs of inputs, of which the lower half of a word is the first.
// BYTES     fours of inputs, the lowest byte first, each 128 more than its weight, with a scale per output.
// NIBBLES   blocks of BLOCK_INPUTS inputs. For each output a word with two bfloat16 numbers, the step in the lower half
//           and the centre in the upper one, then four words of eight codes: the lower half has those of the even
//           inputs, the upper half those of the odd ones, the first in the lowest bits. A weight is
//           step * (code - 8) + centre. x is bfloat16 where `multiplies_bf16`.
// BLOCKS    blocks of as many inputs. For each output a word with its step, a power of two in float32, then signed bytes,
//           four inputs in LANES words: of two inputs those of all outputs, an output's two beside each other, and then
//           the other two. A weight is step * byte, which bfloat16 holds. x is bfloat16 where `multiplies_bf16`.
// QUANTISED weights of GGUF files, which `formats/formats.h` describes; `weight` points to a `Quantised`. x may always be
//           bfloat16.
typedef struct {
    int64_t inputs, outputs;
    const void *weight;
    const float *bias, *scales;
    int32_t kind;
} Product;

enum { FLOATS, HALVES, BYTES, NIBBLES, BLOCKS, QUANTISED };
enum { BLOCK_INPUTS = 32 };

// Some outputs of a QUANTISED product: a format of `formats/` and its packed weights. All parts but the last have whole
// panels, of `quantised_width` outputs.
typedef struct {
    int64_t format, outputs;
    const uint8_t *weight;
} QuantisedPart;

enum { MOST_PARTS = 3 };

typedef struct {
    int64_t count;
    QuantisedPart parts[MOST_PARTS];
} Quantised;

_Static_assert(sizeof(Quantised) == 8 + 24 * MOST_PARTS, "as native.py has it");

// Where a product goes: to `y` [rows, outputs], with `add` [rows, outputs] added if there is one.
typedef struct {
    void *y;
    const void *add;
    int32_t y_is_bf16, add_is_bf16;
} Out;

// A thread's share of a product. x is bfloat16 only where `multiplies_bf16`, or with QUANTISED weights.
INNER void share(const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads);

// Panels [first, last), of `quantised_width` outputs, of a QUANTISED product.
INNER void quantised_panels(
    const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int64_t first, int64_t last);
int quantised_width(void);

// Some columns of a matrix: [first, last).
typedef struct {
    int64_t first, last;
} Columns;

// A thread's share of a product whose outputs are two halves, gate and up. Returns the columns of a half, some of them
// for each thread, in which this thread may read both. Where no panel belongs to both halves it has computed these
// columns itself, and waits for no other thread.
INNER Columns share_halves(
    const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads);

// x / sqrt(mean(x^2) + eps) * weight.
INNER void norm(const void *x, int x_is_bf16, const float *weight, float eps, int64_t size, void *y, int y_is_bf16);

#endif
