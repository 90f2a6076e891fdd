// Products with quantised weights for processors with products of bytes (VNNI): unsigned codes times inputs.
//
// The words of LANES outputs of a part stay in registers while all rows are multiplied; then come the next LANES of
// SIDE. Sums of outputs wait in memory. A set's `tiles.c` has these functions:
//
// from_halves    numbers of 16 bits to those of 32.
// widened_bytes  LANES unsigned bytes.
// looked_up      for codes of four bits, bytes of a table.
// dot_bytes      sum + products of the fours of codes with those of inputs.

#ifndef VNNI_H
#define VNNI_H

enum {
    SIDES = SIDE / LANES,
    HALF = WORDS / 2,
    TOGETHER = LANES == 16 ? 4 : 1, // rows, of which sums stay in registers beside the words: there are 32, or 16
};

typedef struct {
    uvec words[WORDS]; // unsigned codes of LANES outputs, plus the centre
    vec scale, minimum;
    vec scales[2]; // whole numbers
} Weights;

INLINE vec scales_at(const Layout l, const uint8_t *at) {
    halves bits;
    memcpy(&bits, at, sizeof bits);
    return l.values == FLOATS_OF_FOUR_BITS ? all_widened(bits) : from_halves(bits);
}

INLINE vec bytes_at(const uint8_t *at) { return __builtin_convertvector(widened_bytes(at), vec); }

INLINE vec whole_at(const uint8_t *at) { return __builtin_convertvector((widened_bytes(at) ^ 0x80) - 0x80, vec); }

INLINE uvec bits_at(const uint8_t *at) {
    uvec bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

// Codes of word w: `high` has their upper bits.
INLINE uvec with_high(const int bits, const int w, uvec code, uvec high) {
    const int left = bits == 5 ? 4 - w : 4 - w % 4 * 2; // from where they are to the fifth bit
    const uvec moved = left >= 0 ? high << left : high >> -left;
    return code | (moved & (bits == 5 ? 0x10101010 : 0x30303030));
}

INLINE void read_words(const Layout l, const uint8_t *codes, Weights *to) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    UNROLL(8)
    for (int w = 0; w < WORDS; w++) {
        uvec code = bits_at(codes + 64 * (l.bits == 8 ? w : w / 2));
        if (l.bits == 8) code ^= 0x80808080;
        else code = (w % 2 ? code >> 4 : code) & 0x0f0f0f0f;
        if (l.bits == 5 || l.bits == 6)
            code = with_high(l.bits, w, code, bits_at(codes + CODE_BYTES(4) + (l.bits == 6 ? 64 * (w / 4) : 0)));
        to->words[w] = l.values ? looked_up(values[l.values == FLOATS_OF_FOUR_BITS], code) : code;
    }
}

// Those of the outputs of SIDE from number `first` on.
INLINE void read_weights(const Layout l, const uint8_t *block, const uint8_t *part, const int first, Weights *to) {
    to->scale = scales_at(l, block + 2 * first);
    if (l.scales == 1) to->scale *= bytes_at(part + first);
    if (l.scales == 2) to->scales[0] = whole_at(part + first), to->scales[1] = whole_at(part + SIDE + first);
    if (l.minimum) to->minimum = scales_at(l, block + 2 * (SIDE + first));
    if (l.minima) to->minimum *= bytes_at(part + SIDE * l.scales + first);
    read_words(l, part + SIDE * (l.scales + l.minima) + 4 * first, to);
}

INLINE uvec broadcast(const void *at) {
    uint32_t word;
    memcpy(&word, at, 4);
    return (uvec){0} + word;
}

// Sums of a part begin with the bits of a float, BIAS. While they stay below 2^22 they are then the bits of BIAS plus the
// sum, and a subtraction makes a float of it, where a conversion would take the time of a product.
#define BIAS 0x1.8p23f

INLINE vec less_bias(ivec sum) { return (vec)sum - BIAS; }

// The bias, less the centre of all codes: `pairs` are sums of the inputs.
INLINE ivec start_of(const Layout l, const int16_t *pairs) {
    const ivec bias = (ivec)splat(BIAS);
    if (l.shift == NONE) return bias;
    const uint32_t negative = 0x10000 - (1 << l.shift); // of 16 bits
    return dot_words(bias, (uvec){0} + (negative << 16 | negative), broadcast(pairs));
}

// Add the products of some rows. Sums of a part are exact and are rounded once: halves, and their products with a scale of
// a byte, are below 2^24. Those of halves and rows take turns, so that none waits for its last product.
INLINE void add_rows(const Layout l, const Weights *w, const Input *x, const int rows, vec *to) {
    ivec first[TOGETHER], second[TOGETHER];
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        first[r] = start_of(l, x[r].pairs[l.scales == 2 ? 0 : 2]);
        second[r] = l.scales == 2 ? start_of(l, x[r].pairs[1]) : (ivec){0};
    }
    UNROLL(4)
    for (int i = 0; i < HALF; i++) {
        UNROLL(4)
        for (int r = 0; r < rows; r++) first[r] = dot_bytes(first[r], w->words[i], broadcast(x[r].codes + 4 * i));
        UNROLL(4)
        for (int r = 0; r < rows; r++)
            second[r] = dot_bytes(second[r], w->words[HALF + i], broadcast(x[r].codes + 4 * (HALF + i)));
    }
    UNROLL(4)
    for (int r = 0; r < rows; r++) {
        const vec whole = l.scales == 2 ? fused(less_bias(second[r]), w->scales[1], less_bias(first[r]) * w->scales[0])
                                        : less_bias(first[r] + second[r]);
        to[r] = fused(whole, w->scale * x[r].step, to[r]);
        if (l.minimum) to[r] = fused(w->minimum, splat(x[r].total), to[r]);
    }
}

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, const int rows,
    float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    vec held[SIDES][ROWS_HELD];
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < SIDES; side++) held[side][r] = (vec){0};
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x += rows) {
            const uint8_t *part = panel + head + p * part_bytes;
            fetch_ahead(part, part_bytes);
            UNROLL(2)
            for (int side = 0; side < SIDES; side++) {
                Weights w;
                read_weights(l, panel, part, side * LANES, &w);
                int r = 0;
                for (; r + TOGETHER <= rows; r += TOGETHER) add_rows(l, &w, x + r, TOGETHER, &held[side][r]);
                for (; TOGETHER > 1 && r < rows; r++) add_rows(l, &w, x + r, 1, &held[side][r]);
            }
        }
    for (int r = 0; r < rows; r++)
        for (int side = 0; side < SIDES; side++) store(sums, r * SIDE + side * LANES, 0, held[side][r], LANES);
}

#include "arch/table.h"

#endif
