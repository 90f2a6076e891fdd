// Vectors of the compiler, for any processor: the reference for sets with as many lanes, whose bits are these.

#if !defined(REFERENCE_LANES)
#define REFERENCE_LANES 8
#endif

enum { LANES = REFERENCE_LANES, MOST_ROWS = 4, WIDE = LANES / 4 };
#define EACH_NUMBER_OF_ROWS(X, kind) X(kind, 1, 2) X(kind, 2, 1) X(kind, 3, 1) X(kind, 4, 1)

#include "../types.h"

INLINE vec all_widened(halves x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE vec larger(vec x, vec y) { return choose(x > y, x, y); }

INLINE vec swapped(vec x, int step) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = x[lane ^ step];
    return y;
}

INLINE vec to_whole(vec x) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = rintf(x[lane]);
    return y;
}

INLINE ivec nearest(vec x) { return __builtin_convertvector(to_whole(x), ivec); }

INLINE vec fused(vec a, vec b, vec c) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = fmaf(a[lane], b[lane], c[lane]);
    return y;
}

INLINE int none(ivec where) {
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= where[lane];
    return !any;
}

INLINE void transpose(vec *rows) {
    vec columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) columns[lane][i] = rows[i][lane];
    memcpy(rows, columns, sizeof columns);
}

#include "../words.h"

#if defined(REFERENCE_BF16)
#define BF16_PAIRS_ELSEWHERE
#endif

#include "../without_masks.h"

#if defined(REFERENCE_BF16)
// What processors with products of bfloat16 do: those of the upper halves first, each sum rounded once, no subnormal numbers.
enum { BF16_PAIRS_MULTIPLY = 1 };

INLINE float no_subnormal(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

INLINE vec dot_pairs(vec sum, uvec a, uvec b) {
    for (int lane = 0; lane < LANES; lane++)
        for (int half = 1; half >= 0; half--) {
            const float x = no_subnormal(widened((uint16_t)(a[lane] >> 16 * half)));
            const float y = no_subnormal(widened((uint16_t)(b[lane] >> 16 * half)));
            sum[lane] = no_subnormal(fmaf(x, y, no_subnormal(sum[lane])));
        }
    return sum;
}

INLINE void narrowed_both(vec first, vec second, uint16_t *to) {
    const halves both[2] = {rounded(first), rounded(second)};
    memcpy(to, both, sizeof both);
}

INLINE void pairs_of(const uint16_t *a, const uint16_t *b, int64_t count_a, int64_t count_b, uvec *pairs) {
    for (int i = 0; i < WIDE * LANES; i++) {
        const uint32_t first = i < count_a ? a[i] : 0, second = i < count_b ? b[i] : 0;
        pairs[i / LANES][i % LANES] = first | second << 16;
    }
}
#endif
