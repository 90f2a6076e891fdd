// The table of weight formats: reading the blocks of a file, and packing them.

#include "formats.h"

#define INLINE static inline __attribute__((always_inline))

// A block of one output. Codes of eight bits are signed bytes. `scale` and `minimum` are half precision numbers, the
// minimum negated where it is subtracted; of the format whose scales are powers of two they are bfloat16.
typedef struct {
    uint8_t codes[LONGEST], scales[LONGEST / 16], minima[LONGEST / PART];
    uint16_t scale, minimum;
} Block;

typedef struct {
    uint16_t scale;
    uint8_t codes[16];
} BlockQ4_0;
typedef struct {
    uint16_t scale, minimum;
    uint8_t codes[16];
} BlockQ4_1;
typedef struct {
    uint16_t scale;
    uint8_t high[4], codes[16];
} BlockQ5_0;
typedef struct {
    uint16_t scale, minimum;
    uint8_t high[4], codes[16];
} BlockQ5_1;
typedef struct {
    uint16_t scale;
    uint8_t codes[32];
} BlockQ8_0;
typedef struct {
    uint16_t scale, minimum;
    uint8_t scales[12], codes[128];
} BlockQ4_K;
typedef struct {
    uint16_t scale, minimum;
    uint8_t scales[12], high[32], codes[128];
} BlockQ5_K;
typedef struct {
    uint8_t codes[128], high[64], scales[16];
    uint16_t scale;
} BlockQ6_K;
typedef struct {
    uint16_t scale;
    uint8_t codes[16];
} BlockIQ4_NL;
typedef struct {
    uint8_t exponent, codes[16];
} BlockMXFP4;

#define SIZE_OF_BLOCK(name, number, inputs, bytes, bits, shift, minimum, scales, minima, values)                       \
    _Static_assert(sizeof(Block##name) == bytes, "a block of " #name);                                                 \
    _Static_assert(inputs % PART == 0 && inputs <= LONGEST, "a block of " #name);
EACH_FORMAT(SIZE_OF_BLOCK)

#define PACKED_BYTES(inputs, bits, minimum, scales, minima)                                                            \
    (HEAD_BYTES(minimum) + (inputs) / PART * PART_BYTES(bits, scales, minima))
#define ENTRY(name, number, inputs, bytes, bits, shift, minimum, scales, minima, values)                               \
    {#name, number, inputs, bytes, PACKED_BYTES(inputs, bits, minimum, scales, minima), HEAD_BYTES(minimum),           \
        (values) == FLOATS_OF_FOUR_BITS ? 0x7f80 : 0x7c00},
const Format weight_formats[FORMATS] = {EACH_FORMAT(ENTRY)};

#define LAYOUT_AT(name, ...) &LAYOUT_##name,
const Layout *const layouts[FORMATS] = {EACH_FORMAT(LAYOUT_AT)};

static const uint8_t nonlinear_values[16] = {NONLINEAR_VALUES}, values_of_four_bits[16] = {VALUES_OF_FOUR_BITS};

// ------------------------------------------------------------------------------------------------ blocks of a file

// Codes of four bits: those of the first half of a run in the lower bits, those of the second half in the upper ones.
static void spread(const uint8_t *from, int run, int inputs, uint8_t *codes) {
    for (int first = 0; first < inputs; first += run, from += run / 2, codes += run)
        for (int i = 0; i < run / 2; i++) codes[i] = from[i] & 15, codes[i + run / 2] = from[i] >> 4;
}

// Compilers make no vectors of what follows, so eight codes are one number.
INLINE void or_eight(uint8_t *codes, uint64_t bits) {
    uint64_t eight;
    memcpy(&eight, codes, sizeof eight);
    eight |= bits;
    memcpy(codes, &eight, sizeof eight);
}

// The fifth bits of PART codes, of which a byte has those of eight.
static void add_high_bits(const uint8_t *high, uint8_t *codes) {
    for (int i = 0; i < PART / 8; i++) {
        const uint64_t own =
            (uint64_t)high[i] * 0x0101010101010101 & 0x8040201008040201; // in byte j bit j, where it is set
        or_eight(codes + 8 * i, ((own + 0x7f7f7f7f7f7f7f7f) & 0x8080808080808080) >> 3);
    }
}

// Bits above the fourth of runs of 32 codes: of run r those from bit r * count on of each of 32 bytes.
INLINE void add_bits_of_runs(const uint8_t *high, const int runs, const int count, uint8_t *codes) {
    const uint64_t mask = ((1u << count) - 1) * 0x0101010101010101;
    for (int i = 0; i < 32; i += 8) {
        uint64_t eight;
        memcpy(&eight, high + i, sizeof eight);
        for (int r = 0; r < runs; r++) or_eight(codes + 32 * r + i, (eight >> r * count & mask) << 4);
    }
}

// Eight scales and eight minima of six bits each, in twelve bytes.
static void read_scales(const uint8_t *from, Block *to) {
    for (int i = 0; i < 4; i++) {
        to->scales[i] = from[i] & 63, to->minima[i] = from[i + 4] & 63;
        to->scales[i + 4] = (uint8_t)((from[i + 8] & 15) | from[i] >> 6 << 4);
        to->minima[i + 4] = (uint8_t)(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
}

enum { SIGN = 0x8000 };

static void read_Q4_0(const BlockQ4_0 *from, Block *to) {
    to->scale = from->scale;
    spread(from->codes, 32, 32, to->codes);
}

static void read_Q4_1(const BlockQ4_1 *from, Block *to) {
    to->scale = from->scale, to->minimum = from->minimum;
    spread(from->codes, 32, 32, to->codes);
}

static void read_Q5_0(const BlockQ5_0 *from, Block *to) {
    to->scale = from->scale;
    spread(from->codes, 32, 32, to->codes);
    add_high_bits(from->high, to->codes);
}

static void read_Q5_1(const BlockQ5_1 *from, Block *to) {
    to->scale = from->scale, to->minimum = from->minimum;
    spread(from->codes, 32, 32, to->codes);
    add_high_bits(from->high, to->codes);
}

static void read_Q8_0(const BlockQ8_0 *from, Block *to) {
    to->scale = from->scale;
    memcpy(to->codes, from->codes, sizeof from->codes);
}

static void read_Q4_K(const BlockQ4_K *from, Block *to) {
    to->scale = from->scale, to->minimum = from->minimum ^ SIGN;
    read_scales(from->scales, to);
    spread(from->codes, 64, 256, to->codes);
}

static void read_Q5_K(const BlockQ5_K *from, Block *to) {
    to->scale = from->scale, to->minimum = from->minimum ^ SIGN;
    read_scales(from->scales, to);
    spread(from->codes, 64, 256, to->codes);
    add_bits_of_runs(from->high, 8, 1, to->codes);
}

static void read_Q6_K(const BlockQ6_K *from, Block *to) {
    to->scale = from->scale;
    memcpy(to->scales, from->scales, sizeof from->scales);
    spread(from->codes, 128, 256, to->codes);
    add_bits_of_runs(from->high, 4, 2, to->codes);
    add_bits_of_runs(from->high + 32, 4, 2, to->codes + 128);
}

static void read_IQ4_NL(const BlockIQ4_NL *from, Block *to) {
    to->scale = from->scale;
    spread(from->codes, 32, 32, to->codes);
}

static void read_MXFP4(const BlockMXFP4 *from, Block *to) {
    // 2^(exponent - 128), since values are twice those of the format.
    to->scale = from->exponent > 1 ? (uint16_t)((from->exponent - 1) << 7) : (uint16_t)(0x20 << from->exponent);
    spread(from->codes, 32, 32, to->codes);
}

// --------------------------------------------------------------------------------------------------- packed blocks

// Put the block of output o of SIDE in its place.
INLINE void place(const Layout l, const int inputs, const Block *from, int o, uint8_t *to) {
    memcpy(to + 2 * o, &from->scale, 2);
    if (l.minimum) memcpy(to + 2 * SIDE + 2 * o, &from->minimum, 2);
    uint8_t *part = to + HEAD_BYTES(l.minimum);
    for (int p = 0; p < inputs / PART; p++, part += PART_BYTES(l.bits, l.scales, l.minima)) {
        for (int i = 0; i < l.scales; i++) part[SIDE * i + o] = from->scales[p * l.scales + i];
        if (l.minima) part[SIDE * l.scales + o] = from->minima[p];
        uint8_t *codes = part + SIDE * (l.scales + l.minima) + 4 * o, *high = codes + CODE_BYTES(l.bits);
        uint32_t words[WORDS], above[2] = {0}; // four codes each, in a word's bytes
        memcpy(words, from->codes + p * PART, sizeof words);
#pragma GCC unroll 8
        for (int w = 0; w < WORDS; w++) {
            const uint32_t four = words[w] >> 4 & 0x0f0f0f0f;
            if (l.bits == 5) above[0] |= four << w;
            if (l.bits == 6) above[w / 4] |= four << w % 4 * 2;
            if (l.bits == 8) memcpy(codes + 64 * w, &words[w], 4);
            else words[w] &= 0x0f0f0f0f;
        }
        for (int w = 0; l.bits != 8 && w < WORDS; w += 2) {
            const uint32_t both = words[w] | words[w + 1] << 4;
            memcpy(codes + 32 * w, &both, 4);
        }
        for (int i = 0; i < l.bits - 4 && l.bits != 8; i++) memcpy(high + 64 * i, &above[i], 4);
    }
}

#define PACK(name, number, count, bytes, ...)                                                                          \
    static void pack_##name(const uint8_t *from, int64_t outputs, int64_t inputs, int64_t panel, uint8_t *to) {        \
        const int64_t blocks = inputs / count, last = outputs < (panel + 1) * SIDE ? outputs : (panel + 1) * SIDE;     \
        to += panel * blocks * weight_formats[AT_##name].packed_bytes;                                                 \
        for (int64_t b = 0; b < blocks; b++, to += weight_formats[AT_##name].packed_bytes)                             \
            for (int64_t output = panel * SIDE; output < last; output++) {                                             \
                Block##name block;                                                                                     \
                Block read;                                                                                            \
                memcpy(&block, from + (output * blocks + b) * bytes, bytes);                                           \
                read_##name(&block, &read);                                                                            \
                place(LAYOUT_##name, count, &read, (int)(output % SIDE), to);                                          \
            }                                                                                                          \
    }
EACH_FORMAT(PACK)

void pack_panel(int format, const uint8_t *from, int64_t outputs, int64_t inputs, int64_t panel, uint8_t *to) {
    typedef void (*Pack)(const uint8_t *, int64_t, int64_t, int64_t, uint8_t *);
#define PACK_ENTRY(name, ...) pack_##name,
    static const Pack packs[FORMATS] = {EACH_FORMAT(PACK_ENTRY)};
    packs[format](from, outputs, inputs, panel, to);
}

int code_at(const Layout *l, const uint8_t *codes, int w, int j, int o) {
    const int at = 4 * o + j;
    if (l->bits == 8) return (int8_t)codes[64 * w + at];
    const uint8_t *high = codes + CODE_BYTES(l->bits);
    int code = codes[64 * (w / 2) + at] >> w % 2 * 4 & 15;
    if (l->bits == 5) code |= (high[at] >> w & 1) << 4;
    if (l->bits == 6) code |= (high[64 * (w / 4) + at] >> w % 4 * 2 & 3) << 4;
    if (l->values) code = (l->values == NONLINEAR ? nonlinear_values : values_of_four_bits)[code];
    return l->shift == NONE ? code : code - (1 << l->shift);
}
