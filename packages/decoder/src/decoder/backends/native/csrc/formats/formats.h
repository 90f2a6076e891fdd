// Quantised weight formats of GGUF files: how their blocks are laid out for products, which `quantised.c` makes by the
// `tiles.c` of an instruction set.
//
// A row of the table below says all that is to know of a format. Weights keep their codes and scales; what changes is
// where these stand: the codes of SIDE outputs lie interleaved, in the order in which integer products read them. The
// layout is the same for all instruction sets.
//
// A product rounds inputs to eight bits in parts of PART, as llama.cpp's Q8_0. The sum of a part is exact in integers;
// parts are added by one fused multiply-add each (two where a format has minima), the first part first. So the bits of
// an output depend on its own row of inputs and on nothing else: not on the number of rows, and not on the instruction
// set.

#ifndef FORMATS_H
#define FORMATS_H

#include "../library.h"

#include <stdint.h>
#include <string.h>

enum {
    SIDE = 16,      // outputs that lie interleaved
    PART = 32,      // inputs that are rounded together
    WORDS = 8,      // of four inputs, in a part
    LONGEST = 256,  // inputs of a block
    ROWS_HELD = 16, // of a tile
    FETCHED = 4096, // bytes of weights ahead that a tile fetches
};

// PART inputs: `step` times whole numbers from -127 to 127, and their sums, for what all codes of a weight share.
typedef struct {
    int8_t codes[PART];
    float step, total;   // total: step times the sum of the codes
    int32_t sum;         // of all codes,
    int32_t halves[2];   // and of the first and the last 16
    int16_t pairs[3][2]; // of those at places 0, 1 and at places 2, 3 of all words: in either half, and in both
} Input;

_Static_assert(sizeof(Input) == 64, "a part of the inputs fills a line of the cache");

// How the codes of a format become weights: (code - centre) * scale + minimum.
//
// bits     of a code. With 8 it is a signed byte, and the centre stands for what products add to make it unsigned.
// shift    2^shift is the centre; NONE: there is none.
// minimum  whether a block has one.
// scales   whole numbers in a part by which the block's scale is multiplied; they are signed where there are two,
// minima   and by which its minimum is.
// values   what codes stand for, where not for themselves.
typedef struct {
    int bits, shift, minimum, scales, minima, values;
} Layout;

enum { NONE = -1 };
enum { THEMSELVES, NONLINEAR, FLOATS_OF_FOUR_BITS };

//  name, number in GGUF files, inputs and bytes of a block there, and the layout's fields
#define EACH_FORMAT(X)                                                                                                 \
    X(Q4_0, 2, 32, 18, 4, 3, 0, 0, 0, THEMSELVES)                                                                      \
    X(Q4_1, 3, 32, 20, 4, NONE, 1, 0, 0, THEMSELVES)                                                                   \
    X(Q5_0, 6, 32, 22, 5, 4, 0, 0, 0, THEMSELVES)                                                                      \
    X(Q5_1, 7, 32, 24, 5, NONE, 1, 0, 0, THEMSELVES)                                                                   \
    X(Q8_0, 8, 32, 34, 8, 7, 0, 0, 0, THEMSELVES)                                                                      \
    X(Q4_K, 12, 256, 144, 4, NONE, 1, 1, 1, THEMSELVES)                                                                \
    X(Q5_K, 13, 256, 176, 5, NONE, 1, 1, 1, THEMSELVES)                                                                \
    X(Q6_K, 14, 256, 210, 6, 5, 0, 2, 0, THEMSELVES)                                                                   \
    X(IQ4_NL, 20, 32, 18, 4, 7, 0, 0, 0, NONLINEAR)                                                                    \
    X(MXFP4, 39, 32, 17, 4, 4, 0, 0, 0, FLOATS_OF_FOUR_BITS)

#define PLACE_OF(name, ...) AT_##name,
enum { EACH_FORMAT(PLACE_OF) FORMATS };

#define LAYOUT_OF(name, number, inputs, bytes, bits, shift, minimum, scales, minima, values)                           \
    static const Layout LAYOUT_##name __attribute__((unused)) = {bits, shift, minimum, scales, minima, values};
EACH_FORMAT(LAYOUT_OF)

// Bytes of what stands before the parts of a block of SIDE outputs (scales, minima, of 16 bits each), and of a part:
// its whole numbers, then codes (or their lower four bits), then the bits above.
#define HEAD_BYTES(minimum) (2 * SIDE * (1 + (minimum)))
#define CODE_BYTES(bits) (PART * SIDE * ((bits) == 8 ? 8 : 4) / 8)
#define HIGH_BYTES(bits) (PART * SIDE * ((bits) == 8 ? 0 : (bits)-4) / 8)
#define PART_BYTES(bits, scales, minima) (SIDE * ((scales) + (minima)) + CODE_BYTES(bits) + HIGH_BYTES(bits))

// The codes of a part: those of word w and output o at 64 (w / 2) + 4 o, the even word's in the lower bits; bytes at
// 64 w + 4 o. Of the bits above four, one: bit w at 4 o; two: bits 2 (w % 4) at 64 (w / 4) + 4 o.

// What codes of four bits stand for in the formats whose codes do not stand for themselves, plus the centre.
#define NONLINEAR_VALUES 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
#define VALUES_OF_FOUR_BITS 16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4

// `rows` rows of inputs, up to ROWS_HELD, with SIDE outputs of `blocks` blocks from `panel` on, to `sums` [rows, SIDE].
// Inputs [parts, rows]: a part of all rows stands together, as it is read.
typedef void (*Tile)(const uint8_t *panel, int64_t blocks, const Input *x, int rows, float *sums);

extern PRIVATE const Format weight_formats[FORMATS];

extern PRIVATE const Layout *const layouts[FORMATS];

// An instruction set's tiles, the weights [inputs] of one output, rows of `size` numbers as inputs, in groups of rows as `quantised_panels` takes them, and
// panels [first, last), of SIDE outputs, of a product.
#if defined(IN_SET)
extern PRIVATE const Tile tile_table[FORMATS];
PRIVATE void unpack_row(int format, const uint8_t *packed, int64_t inputs, int64_t output, float *to);
PRIVATE void round_inputs(const void *x, int x_is_bf16, int64_t rows, int64_t size, Input *inputs);
PRIVATE void quantised_panels(
    const PackedWeight *p, const Input *x, int64_t rows, const Out *out, int64_t first, int64_t last);
#endif

// Fetch what comes FETCHED bytes behind a part of so many, to the nearest cache: `words_at` says why.
static inline void fetch_ahead(const uint8_t *part, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(part + FETCHED + at, 0, 3);
}

// A number of half precision. The exponent's bias is 112 less than in single precision, which a product with 2^112 adds,
// to numbers too small for an exponent as well.
static inline float half(uint16_t x) {
    const uint32_t size = (uint32_t)(x & 0x7fff) << 13;
    float number;
    uint32_t bits;
    memcpy(&number, &size, 4);
    number *= 0x1p112f;
    memcpy(&bits, &number, 4);
    if ((x & 0x7c00) == 0x7c00) bits = 0x7f800000 | (size & 0x7fffff); // infinite, or no number
    bits |= (uint32_t)(x & 0x8000) << 16;
    memcpy(&number, &bits, 4);
    return number;
}

// A scale or a minimum.
static inline float scale_at(const Layout *l, const uint8_t *at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    if (l->values != FLOATS_OF_FOUR_BITS) return half(bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float scale;
    memcpy(&scale, &wide, 4);
    return scale;
}

// Less its centre, what the code of word w, place j and output o of a part stands for.
PRIVATE int code_at(const Layout *l, const uint8_t *codes, int w, int j, int o);

// Panel `panel` of weights [outputs, inputs] as a file has them to where all panels stand, `to`, which is zero.
PRIVATE void pack_panel(int format, const uint8_t *from, int64_t outputs, int64_t inputs, int64_t panel, uint8_t *to);

#endif
