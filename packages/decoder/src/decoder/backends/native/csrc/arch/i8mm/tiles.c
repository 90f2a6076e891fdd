// Products with quantised weights for processors with NEON and its products of matrices of bytes (i8mm).
//
// One instruction multiplies eight inputs of two rows by those of two outputs, twice as many as a product of fours. So two
// words of four outputs become two vectors, one for the outputs 0 and 1 and one for 2 and 3, and the sums of two rows stay
// in that order until a part ends. One row alone is multiplied by products of fours.

#include "arch/neon/parts.h"

INLINE int32x4_t firsts(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip1q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}

INLINE int32x4_t lasts(int32x4_t x, int32x4_t y) {
    return vreinterpretq_s32_s64(vzip2q_s64(vreinterpretq_s64_s32(x), vreinterpretq_s64_s32(y)));
}

// The eight inputs of each output one behind the other.
INLINE void join_words(Half *h) {
    UNROLL(2)
    for (int w = 0; w < HALF; w += 2) {
        UNROLL(4)
        for (int side = 0; side < SIDES; side++) {
            const int32x4_t x = vreinterpretq_s32_s8(h->words[w][side]);
            const int32x4_t y = vreinterpretq_s32_s8(h->words[w + 1][side]);
            h->words[w][side] = vreinterpretq_s8_s32(vzip1q_s32(x, y));
            h->words[w + 1][side] = vreinterpretq_s8_s32(vzip2q_s32(x, y));
        }
    }
}

// Add the exact products of a half for two rows to `sums`, where one has both rows of every first two outputs, and the
// other of every last two.
INLINE void add_half(const Layout l, const uint8_t *part, const int half, const Half *h, const Input *x,
    const Input *other, Whole *sums) {
    int8x16_t rows[HALF / 2];
    UNROLL(2)
    for (int i = 0; i < HALF / 2; i++) {
        const int at = 4 * HALF * half + 8 * i;
        rows[i] = vcombine_s8(vld1_s8(x->codes + at), vld1_s8(other->codes + at));
    }
    UNROLL(4)
    for (int side = 0; side < SIDES; side++) {
        int32x4_t sum[2];
        UNROLL(2)
        for (int two = 0; two < 2; two++) {
            sum[two] = l.scales == 2 ? vdupq_n_s32(0) : sums[two].of[side];
            UNROLL(2)
            for (int i = 0; i < HALF / 2; i++) sum[two] = vmmlaq_s32(sum[two], rows[i], h->words[2 * i + two][side]);
        }
        if (l.scales == 2) {
            const int32x4_t whole = whole_at(part + SIDE * half + 4 * side);
            sum[0] = vmlaq_s32(sums[0].of[side], sum[0], firsts(whole, whole));
            sum[1] = vmlaq_s32(sums[1].of[side], sum[1], lasts(whole, whole));
        }
        sums[0].of[side] = sum[0], sums[1].of[side] = sum[1];
    }
}

// Two rows at a time; the last one of an odd number with itself.
INLINE void tile_of_pairs(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x,
    const int rows, float *sums) {
    const int part_bytes = PART_BYTES(l.bits, l.scales, l.minima), head = HEAD_BYTES(l.minimum);
    Whole waiting[ROWS_HELD];
    memset(sums, 0, (size_t)rows * SIDE * sizeof *sums);
    for (int64_t block = 0; block < blocks; block++, panel += head + parts * part_bytes)
        for (int p = 0; p < parts; p++, x += rows) {
            const uint8_t *part = panel + head + p * part_bytes;
            fetch_ahead(part, part_bytes);
            memset(waiting, 0, (size_t)(rows + rows % 2) * sizeof *waiting);
            Half half;
            Shared shared;
            read_half(l, part, 0, &half);
            join_words(&half);
            for (int r = 0; r < rows; r += 2)
                add_half(l, part, 0, &half, x + r, x + (r + 1 < rows ? r + 1 : r), waiting + r);
            read_half(l, part, 1, &half);
            join_words(&half);
            read_shared(l, panel, part, &shared);
            for (int r = 0; r < rows; r += 2) {
                const int both = r + 1 < rows;
                Whole *of = waiting + r, last;
                add_half(l, part, 1, &half, x + r, x + r + both, of);
                UNROLL(4)
                for (int side = 0; side < SIDES; side++) {
                    last.of[side] = lasts(of[0].of[side], of[1].of[side]);
                    of[0].of[side] = firsts(of[0].of[side], of[1].of[side]);
                }
                add_part(l, &shared, x + r, of[0], sums + r * SIDE);
                if (both) add_part(l, &shared, x + r + 1, last, sums + (r + 1) * SIDE);
            }
        }
}

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, const int rows,
    float *sums) {
    if (rows == 1) tile_of_rows(l, parts, panel, blocks, x, 1, sums);
    else tile_of_pairs(l, parts, panel, blocks, x, rows, sums);
}

#include "arch/table.h"
