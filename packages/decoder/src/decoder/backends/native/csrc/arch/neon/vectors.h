// NEON, with 8 numbers to a vector as two registers, so that bits are those of the generic set.

#include <arm_neon.h>

enum { LANES = 8, MOST_ROWS = 6, WIDE = 2 };
#define EACH_NUMBER_OF_ROWS(X, kind) X(kind, 1, 4) X(kind, 2, 2) X(kind, 3, 1) X(kind, 4, 1) X(kind, 5, 1) X(kind, 6, 1)

#include "../types.h"

typedef struct {
    float32x4_t of[2];
} Both;

INLINE Both both_of(vec x) {
    Both both;
    memcpy(&both, &x, sizeof both);
    return both;
}

INLINE vec joined(float32x4_t low, float32x4_t high) {
    const Both both = {{low, high}};
    vec x;
    memcpy(&x, &both, sizeof x);
    return x;
}

INLINE vec all_widened(halves x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE vec larger(vec x, vec y) { return choose(x > y, x, y); }

INLINE vec swapped(vec x, int step) {
    const Both both = both_of(x);
    if (step == 4) return joined(both.of[1], both.of[0]);
    if (step == 1) return joined(vrev64q_f32(both.of[0]), vrev64q_f32(both.of[1]));
    return joined(vextq_f32(both.of[0], both.of[0], 2), vextq_f32(both.of[1], both.of[1], 2));
}

INLINE vec to_whole(vec x) { return joined(vrndnq_f32(both_of(x).of[0]), vrndnq_f32(both_of(x).of[1])); }

INLINE ivec nearest(vec x) { return __builtin_convertvector(to_whole(x), ivec); }

INLINE vec fused(vec a, vec b, vec c) {
    const Both x = both_of(a), y = both_of(b), z = both_of(c);
    return joined(vfmaq_f32(z.of[0], x.of[0], y.of[0]), vfmaq_f32(z.of[1], x.of[1], y.of[1]));
}

INLINE int none(ivec where) {
    int32x4_t both[2];
    memcpy(both, &where, sizeof both);
    return !vmaxvq_u32(vreinterpretq_u32_s32(vorrq_s32(both[0], both[1])));
}

INLINE void transpose(vec *rows) {
    vec columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) columns[lane][i] = rows[i][lane];
    memcpy(rows, columns, sizeof columns);
}

// Numbers of 16 bits in pairs: words of 32 bits in two registers.
typedef struct {
    int16x8_t of[2];
} Registers;

INLINE Registers words_in(uvec x) {
    Registers both;
    memcpy(&both, &x, sizeof both);
    return both;
}

INLINE int32x4_t pair_products(int16x8_t a, int16x8_t b) {
    return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}

INLINE ivec dot_words(ivec sum, uvec a, uvec b) {
    const Registers x = words_in(a), y = words_in(b);
    const int32x4_t both[2] = {pair_products(x.of[0], y.of[0]), pair_products(x.of[1], y.of[1])};
    ivec products;
    memcpy(&products, both, sizeof products);
    return (ivec)((uvec)sum + (uvec)products);
}

INLINE void code_quads(const int8_t *a, const int8_t *b, const int8_t *c, const int8_t *d, uvec *out) {
    const int8x16x2_t ab = vzipq_s8(vld1q_s8(a), vld1q_s8(b)), cd = vzipq_s8(vld1q_s8(c), vld1q_s8(d));
    for (int half = 0; half < 2; half++) {
        const int16x8x2_t quads = vzipq_s16(vreinterpretq_s16_s8(ab.val[half]), vreinterpretq_s16_s8(cd.val[half]));
        memcpy(out + half, &quads, sizeof quads);
    }
}

#include "../without_masks.h"
