// What tiles of quantised weights for NEON share: codes, scales, and products of fours of bytes (dotprod).
//
// Codes less their centre are signed bytes, as inputs are. A part of SIDE outputs is read in halves, whose vectors stay in
// registers while all rows are multiplied; sums wait in memory.

#ifndef NEON_PARTS_H
#define NEON_PARTS_H

#include "native.h"
#include "formats/formats.h"

enum { HALF = WORDS / 2, SIDES = 4 }; // vectors of 4 outputs

typedef struct {
    int8x16_t words[HALF][SIDES];
} Half;

typedef struct {
    int32x4_t of[SIDES];
} Whole;

typedef struct {
    float32x4_t scale[SIDES], minimum[SIDES];
} Shared;

// Two bits of a code, or one, from where they are in `high` to the fifth bit.
INLINE uint8x16_t with_high(const int bits, const int w, uint8x16_t code, uint8x16_t high) {
    const int left = bits == 5 ? 4 - w : 4 - w % 4 * 2;
    const uint8x16_t moved = vshlq_u8(high, vdupq_n_s8((int8_t)left));
    return vorrq_u8(code, vandq_u8(moved, vdupq_n_u8(bits == 5 ? 0x10 : 0x30)));
}

// Word w of the outputs of one side, less the centre.
INLINE int8x16_t word_at(const Layout l, const uint8_t *codes, const int w, const int side) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    uint8x16_t code = vld1q_u8(codes + 64 * (l.bits == 8 ? w : w / 2) + 16 * side);
    if (l.bits == 8) return vreinterpretq_s8_u8(code);
    code = w % 2 ? vshrq_n_u8(code, 4) : vandq_u8(code, vdupq_n_u8(15));
    if (l.bits == 5 || l.bits == 6) {
        const uint8_t *high = codes + CODE_BYTES(4) + 16 * side + (l.bits == 6 ? 64 * (w / 4) : 0);
        code = with_high(l.bits, w, code, vld1q_u8(high));
    }
    if (l.values) code = vqtbl1q_u8(vld1q_u8(values[l.values == FLOATS_OF_FOUR_BITS]), code);
    if (l.shift != NONE) code = vsubq_u8(code, vdupq_n_u8((uint8_t)(1 << l.shift)));
    return vreinterpretq_s8_u8(code);
}

INLINE float32x4_t scale_of(const Layout l, const uint8_t *at) {
    uint16x4_t bits;
    memcpy(&bits, at, sizeof bits);
    if (l.values == FLOATS_OF_FOUR_BITS) return vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

INLINE float32x4_t bytes_at(const uint8_t *at) {
    uint8x8_t bytes = vdup_n_u8(0);
    memcpy(&bytes, at, 4);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

INLINE int32x4_t whole_at(const uint8_t *at) {
    int8x8_t bytes = vdup_n_s8(0);
    memcpy(&bytes, at, 4);
    return vmovl_s16(vget_low_s16(vmovl_s8(bytes)));
}

INLINE void read_shared(const Layout l, const uint8_t *block, const uint8_t *part, Shared *to) {
    UNROLL(4)
    for (int side = 0; side < SIDES; side++) {
        to->scale[side] = scale_of(l, block + 8 * side);
        if (l.scales == 1) to->scale[side] = vmulq_f32(to->scale[side], bytes_at(part + 4 * side));
        if (l.minimum) to->minimum[side] = scale_of(l, block + 2 * SIDE + 8 * side);
        if (l.minima) to->minimum[side] = vmulq_f32(to->minimum[side], bytes_at(part + SIDE * l.scales + 4 * side));
    }
}

INLINE void read_half(const Layout l, const uint8_t *part, const int half, Half *to) {
    UNROLL(4)
    for (int w = 0; w < HALF; w++) {
        UNROLL(4)
        for (int side = 0; side < SIDES; side++)
            to->words[w][side] = word_at(l, part + SIDE * (l.scales + l.minima), half * HALF + w, side);
    }
}

// Add the exact products of a half, times its whole numbers where there are two.
INLINE Whole behind_half(
    const Layout l, const uint8_t *part, const int half, const Half *h, const Input *x, Whole so_far) {
    const int8x16_t codes = vld1q_s8(x->codes + 4 * HALF * half);
    UNROLL(4)
    for (int side = 0; side < SIDES; side++) {
        int32x4_t sum = l.scales == 2 ? vdupq_n_s32(0) : so_far.of[side];
        sum = vdotq_laneq_s32(sum, h->words[0][side], codes, 0);
        sum = vdotq_laneq_s32(sum, h->words[1][side], codes, 1);
        sum = vdotq_laneq_s32(sum, h->words[2][side], codes, 2);
        sum = vdotq_laneq_s32(sum, h->words[3][side], codes, 3);
        if (l.scales == 2) sum = vmlaq_s32(so_far.of[side], sum, whole_at(part + SIDE * half + 4 * side));
        so_far.of[side] = sum;
    }
    return so_far;
}

// A row's sum of a part, times its scale, and the minimum, added to `sums`.
INLINE void add_part(const Layout l, const Shared *shared, const Input *in, Whole whole, float *sums) {
    UNROLL(4)
    for (int side = 0; side < SIDES; side++) {
        float *to = sums + 4 * side;
        const float32x4_t scale = vmulq_n_f32(shared->scale[side], in->step);
        float32x4_t sum = vfmaq_f32(vld1q_f32(to), vcvtq_f32_s32(whole.of[side]), scale);
        if (l.minimum) sum = vfmaq_f32(sum, shared->minimum[side], vdupq_n_f32(in->total));
        vst1q_f32(to, sum);
    }
}

// Each row by itself.
INLINE void tile_of_rows(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x,
    const int rows, float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    const Whole nothing = {{vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0), vdupq_n_s32(0)}};
    Whole waiting[ROWS_HELD];
    memset(sums, 0, (size_t)rows * SIDE * sizeof *sums);
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x += rows) {
            const uint8_t *part = panel + head + p * part_bytes;
            fetch_ahead(part, part_bytes);
            Half half;
            Shared shared;
            read_half(l, part, 0, &half);
            for (int r = 0; r < rows; r++) waiting[r] = behind_half(l, part, 0, &half, x + r, nothing);
            read_half(l, part, 1, &half);
            read_shared(l, panel, part, &shared);
            for (int r = 0; r < rows; r++)
                add_part(l, &shared, x + r, behind_half(l, part, 1, &half, x + r, waiting[r]), sums + r * SIDE);
        }
}

#endif
