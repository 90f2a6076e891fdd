// The instructions of AVX-512 and AVX-VNNI that the library uses, computed by those of AVX2.
//
// Where the folder of this file comes before the compiler's own headers, and the compiler is told of AVX2, FMA, F16C and
// BMI2 alone, the files of `arch/avx512` and `arch/avxvnni` become code that any such processor runs. Each function does
// what Intel's manual says of the instruction, for the numbers that the library gives it.

#ifndef EMULATED_INSTRUCTIONS_H
#define EMULATED_INSTRUCTIONS_H

#include_next <immintrin.h>
#include <stdint.h>
#include <string.h>

// What compilers define when they are told of instructions; GCC's own headers undo a definition of before.
#if defined(EMULATED_avx512bf16)
#undef __AVX512BF16__
#define __AVX512BF16__ 1
#elif defined(EMULATED_avxvnni)
#undef __AVXVNNI__
#define __AVXVNNI__ 1
#endif

#define EMULATED static inline __attribute__((always_inline))

// ---------------------------------------------------------------------------------- products of bytes and words (VNNI)

// sum + the products of pairs of signed numbers of 16 bits.
EMULATED __m256i emulated_half_dpwssd(__m256i sum, __m256i a, __m256i b) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
}
#define _mm256_dpwssd_avx_epi32 emulated_half_dpwssd

// sum + the products of four unsigned bytes with four signed ones: those at even places, and those at odd ones.
EMULATED __m256i emulated_half_dpbusd(__m256i sum, __m256i a, __m256i b) {
    const __m256i even =
        _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(0xff)), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
    return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
#define _mm256_dpbusd_avx_epi32 emulated_half_dpbusd

// ------------------------------------------------------------------------------------------- a register of AVX-512

typedef union {
    __m512 ps;
    __m512d pd;
    __m512i si;
    __m512bh bh;
    __m256 half_ps[2];
    __m256d half_pd[2];
    __m256i half_si[2];
    __m128 quarter_ps[4];
    __m128i quarter_si[4];
    uint32_t word[16];
    uint16_t part[32];
} EmulatedRegister;

typedef float EmulatedFloats __attribute__((vector_size(64)));
typedef uint32_t EmulatedWords __attribute__((vector_size(64)));
typedef uint16_t EmulatedNarrow __attribute__((vector_size(32)));
typedef uint8_t EmulatedBytes __attribute__((vector_size(16)));

// ---------------------------------------------------------------------------- what AVX2 has for halves of a register

#define BY_HALVES(name, kind, type, half)                                                                              \
    EMULATED type emulated_##name(type a, type b) {                                                                    \
        const EmulatedRegister x = {.kind = a}, y = {.kind = b};                                                       \
        return (EmulatedRegister){                                                                                     \
            .half_##kind = {half(x.half_##kind[0], y.half_##kind[0]), half(x.half_##kind[1], y.half_##kind[1])}}       \
            .kind;                                                                                                     \
    }
BY_HALVES(max_ps, ps, __m512, _mm256_max_ps)
BY_HALVES(unpacklo_ps, ps, __m512, _mm256_unpacklo_ps)
BY_HALVES(unpackhi_ps, ps, __m512, _mm256_unpackhi_ps)
BY_HALVES(unpacklo_pd, pd, __m512d, _mm256_unpacklo_pd)
BY_HALVES(unpackhi_pd, pd, __m512d, _mm256_unpackhi_pd)
BY_HALVES(unpacklo_epi8, si, __m512i, _mm256_unpacklo_epi8)
BY_HALVES(unpackhi_epi8, si, __m512i, _mm256_unpackhi_epi8)
BY_HALVES(unpacklo_epi16, si, __m512i, _mm256_unpacklo_epi16)
BY_HALVES(unpackhi_epi16, si, __m512i, _mm256_unpackhi_epi16)
BY_HALVES(shuffle_epi8, si, __m512i, _mm256_shuffle_epi8)
#define _mm512_max_ps emulated_max_ps
#define _mm512_unpacklo_ps emulated_unpacklo_ps
#define _mm512_unpackhi_ps emulated_unpackhi_ps
#define _mm512_unpacklo_pd emulated_unpacklo_pd
#define _mm512_unpackhi_pd emulated_unpackhi_pd
#define _mm512_unpacklo_epi8 emulated_unpacklo_epi8
#define _mm512_unpackhi_epi8 emulated_unpackhi_epi8
#define _mm512_unpacklo_epi16 emulated_unpacklo_epi16
#define _mm512_unpackhi_epi16 emulated_unpackhi_epi16
#define _mm512_shuffle_epi8 emulated_shuffle_epi8

EMULATED __m512 emulated_fmadd_ps(__m512 a, __m512 b, __m512 c) {
    const EmulatedRegister x = {.ps = a}, y = {.ps = b}, z = {.ps = c};
    return (EmulatedRegister){.half_ps = {_mm256_fmadd_ps(x.half_ps[0], y.half_ps[0], z.half_ps[0]),
                                  _mm256_fmadd_ps(x.half_ps[1], y.half_ps[1], z.half_ps[1])}}
        .ps;
}
#define _mm512_fmadd_ps emulated_fmadd_ps

// To the nearest whole number, the only rounding that is asked for.
EMULATED __m512 emulated_round_ps(__m512 a) {
    enum { NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    const EmulatedRegister x = {.ps = a};
    return (EmulatedRegister){
        .half_ps = {_mm256_round_ps(x.half_ps[0], NEAREST), _mm256_round_ps(x.half_ps[1], NEAREST)}}
        .ps;
}
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(a, how)                                                                                   \
    ({                                                                                                                 \
        _Static_assert((how) == (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), "another rounding");                  \
        emulated_round_ps(a);                                                                                          \
    })

EMULATED __m512i emulated_cvtps_epi32(__m512 a) {
    const EmulatedRegister x = {.ps = a};
    return (EmulatedRegister){.half_si = {_mm256_cvtps_epi32(x.half_ps[0]), _mm256_cvtps_epi32(x.half_ps[1])}}.si;
}
#define _mm512_cvtps_epi32 emulated_cvtps_epi32

EMULATED __m512 emulated_cvtph_ps(__m256i a) {
    return (EmulatedRegister){
        .half_ps = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}}
        .ps;
}
#define _mm512_cvtph_ps emulated_cvtph_ps

EMULATED __m512i emulated_dpwssd(__m512i sum, __m512i a, __m512i b) {
    EmulatedRegister to = {.si = sum}, x = {.si = a}, y = {.si = b};
    for (int i = 0; i < 2; i++) to.half_si[i] = emulated_half_dpwssd(to.half_si[i], x.half_si[i], y.half_si[i]);
    return to.si;
}
#define _mm512_dpwssd_epi32 emulated_dpwssd

EMULATED __m512i emulated_dpbusd(__m512i sum, __m512i a, __m512i b) {
    EmulatedRegister to = {.si = sum}, x = {.si = a}, y = {.si = b};
    for (int i = 0; i < 2; i++) to.half_si[i] = emulated_half_dpbusd(to.half_si[i], x.half_si[i], y.half_si[i]);
    return to.si;
}
#define _mm512_dpbusd_epi32 emulated_dpbusd

// ---------------------------------------------------------------------------------------------- places in a register

// Two quarters of a, then two of b.
EMULATED __m512 emulated_quarters(__m512 a, __m512 b, int which) {
    const EmulatedRegister x = {.ps = a}, y = {.ps = b};
    return (EmulatedRegister){.quarter_ps = {x.quarter_ps[which & 3], x.quarter_ps[which >> 2 & 3],
                                  y.quarter_ps[which >> 4 & 3], y.quarter_ps[which >> 6 & 3]}}
        .ps;
}
#undef _mm512_shuffle_f32x4
#define _mm512_shuffle_f32x4 emulated_quarters
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4(a, b, which) ((__m512i)emulated_quarters((__m512)(a), (__m512)(b), which))

#undef _mm512_permute_ps
#define _mm512_permute_ps(a, which)                                                                                    \
    ({                                                                                                                 \
        const EmulatedRegister of = {.ps = a};                                                                         \
        (EmulatedRegister){                                                                                            \
            .half_ps = {_mm256_permute_ps(of.half_ps[0], which), _mm256_permute_ps(of.half_ps[1], which)}}             \
            .ps;                                                                                                       \
    })

EMULATED __m512i emulated_broadcast(__m128i a) { return (EmulatedRegister){.quarter_si = {a, a, a, a}}.si; }
#define _mm512_broadcast_i32x4 emulated_broadcast

EMULATED __m512i emulated_permutex2var_epi16(__m512i a, __m512i places, __m512i b) {
    const EmulatedRegister x = {.si = a}, y = {.si = b}, at = {.si = places};
    EmulatedRegister to;
    for (int i = 0; i < 32; i++) to.part[i] = (at.part[i] & 32 ? y : x).part[at.part[i] & 31];
    return to.si;
}
#define _mm512_permutex2var_epi16 emulated_permutex2var_epi16

// ------------------------------------------------------------------------------------------------------------ widths

EMULATED __m512i emulated_cvtepu16_epi32(__m256i a) {
    return (__m512i) __builtin_convertvector((EmulatedNarrow)a, EmulatedWords);
}
EMULATED __m512i emulated_cvtepu8_epi32(__m128i a) {
    return (__m512i) __builtin_convertvector((EmulatedBytes)a, EmulatedWords);
}
EMULATED __m256i emulated_cvtepi32_epi16(__m512i a) {
    return (__m256i) __builtin_convertvector((EmulatedWords)a, EmulatedNarrow);
}
#define _mm512_cvtepu16_epi32 emulated_cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated_cvtepu8_epi32
#define _mm512_cvtepi32_epi16 emulated_cvtepi32_epi16

// ------------------------------------------------------------------------------------------------------ masks, memory

EMULATED __m512i emulated_loadu(const void *from) {
    EmulatedRegister to;
    memcpy(&to, from, sizeof to);
    return to.si;
}
#define _mm512_loadu_si512 emulated_loadu

// Places that the mask leaves out are not touched. Most masks leave none out.
#define MASKED_LOAD(name, type, result, mask_type)                                                                     \
    EMULATED result emulated_##name(mask_type mask, const void *from) {                                                \
        enum { COUNT = sizeof(result) / sizeof(type) };                                                                \
        type to[COUNT] = {0};                                                                                          \
        if (mask == (mask_type)~0u) memcpy(to, from, sizeof to);                                                       \
        else                                                                                                           \
            for (int i = 0; i < COUNT; i++)                                                                            \
                if (mask >> i & 1) memcpy(to + i, (const type *)from + i, sizeof(type));                               \
        result made;                                                                                                   \
        memcpy(&made, to, sizeof made);                                                                                \
        return made;                                                                                                   \
    }
MASKED_LOAD(maskz_loadu_ps, float, __m512, __mmask16)
MASKED_LOAD(maskz_loadu_16, uint16_t, __m256i, __mmask16)
MASKED_LOAD(maskz_loadu_32, uint16_t, __m512i, __mmask32)
#define _mm512_maskz_loadu_ps emulated_maskz_loadu_ps
#define _mm256_maskz_loadu_epi16 emulated_maskz_loadu_16
#define _mm512_maskz_loadu_epi16 emulated_maskz_loadu_32

#define MASKED_STORE(name, type, given)                                                                                \
    EMULATED void emulated_##name(void *to, __mmask16 mask, given x) {                                                 \
        type from[16];                                                                                                 \
        memcpy(from, &x, sizeof from);                                                                                 \
        if (mask == 0xffff) memcpy(to, from, sizeof from);                                                             \
        else                                                                                                           \
            for (int i = 0; i < 16; i++)                                                                               \
                if (mask >> i & 1) memcpy((type *)to + i, from + i, sizeof(type));                                     \
    }
MASKED_STORE(mask_storeu_ps, float, __m512)
MASKED_STORE(mask_storeu_epi16, uint16_t, __m256i)
#define _mm512_mask_storeu_ps emulated_mask_storeu_ps
#define _mm256_mask_storeu_epi16 emulated_mask_storeu_epi16

EMULATED __mmask16 emulated_test(__m512i a, __m512i b) {
    const EmulatedRegister x = {.si = a}, y = {.si = b};
    __mmask16 mask = 0;
    for (int i = 0; i < 16; i++) mask |= (__mmask16)(!!(x.word[i] & y.word[i]) << i);
    return mask;
}
#define _mm512_test_epi32_mask emulated_test

// ------------------------------------------------------------------------------------------------------------ numbers

// x 2^n for x from 1/2 to 2 and a whole n, rounded once: half of n first, which leaves a normal number.
EMULATED __m512 emulated_scalef(__m512 x, __m512 n) {
    const EmulatedFloats power = (EmulatedFloats)emulated_max_ps(n, (__m512)((EmulatedFloats){0} - 250));
    const EmulatedWords half = (EmulatedWords)emulated_cvtps_epi32(emulated_round_ps((__m512)(power * 0.5f)));
    const EmulatedWords rest = (EmulatedWords)emulated_cvtps_epi32((__m512)power) - half;
    return (__m512)((EmulatedFloats)x * (EmulatedFloats)((half + 127) << 23) * (EmulatedFloats)((rest + 127) << 23));
}
#define _mm512_scalef_ps emulated_scalef

// Products of bfloat16 numbers know no subnormal ones: they are read as zeros and become zeros.
EMULATED EmulatedFloats without_subnormal(EmulatedFloats x) {
    const EmulatedWords bits = (EmulatedWords)x;
    return (EmulatedFloats)(bits & ((EmulatedWords)((bits & 0x7f800000) != 0) | 0x80000000));
}

EMULATED __m512 emulated_dpbf16(__m512 sum, __m512bh a, __m512bh b) {
    const EmulatedWords x = (EmulatedWords)a, y = (EmulatedWords)b;
    const EmulatedFloats upper = (EmulatedFloats)emulated_fmadd_ps(
        (__m512)without_subnormal((EmulatedFloats)(x & 0xffff0000)),
        (__m512)without_subnormal((EmulatedFloats)(y & 0xffff0000)), (__m512)without_subnormal((EmulatedFloats)sum));
    return (__m512)without_subnormal(
        (EmulatedFloats)emulated_fmadd_ps((__m512)without_subnormal((EmulatedFloats)(x << 16)),
            (__m512)without_subnormal((EmulatedFloats)(y << 16)), (__m512)without_subnormal(upper)));
}
#define _mm512_dpbf16_ps emulated_dpbf16

// b's numbers in front of a's, to the nearest, ties to even.
EMULATED EmulatedNarrow emulated_to_bf16(__m512 x) {
    const EmulatedWords bits = (EmulatedWords)without_subnormal((EmulatedFloats)x);
    const EmulatedWords nan = (EmulatedWords)((bits & 0x7fffffff) > 0x7f800000), up = bits + 0x7fff + (bits >> 16 & 1);
    return __builtin_convertvector(((up & ~nan) | ((bits | 0x400000) & nan)) >> 16, EmulatedNarrow);
}

EMULATED __m512bh emulated_cvtne2ps_pbh(__m512 a, __m512 b) {
    return (EmulatedRegister){.half_si = {(__m256i)emulated_to_bf16(b), (__m256i)emulated_to_bf16(a)}}.bh;
}
#define _mm512_cvtne2ps_pbh emulated_cvtne2ps_pbh

#endif
