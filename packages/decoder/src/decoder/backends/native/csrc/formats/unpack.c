// Rows of packed weights as numbers.

#include "native.h"
#include "formats/formats.h"

typedef int32_t Whole __attribute__((vector_size(16)));
typedef float Floats __attribute__((vector_size(16)));
typedef double Doubles __attribute__((vector_size(32)));

// Four codes.
INLINE Whole widened_codes(const uint8_t *codes) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    int32_t four;
    memcpy(&four, codes, 4);
    const Bytes given = (Bytes)(Whole){four, 0, 0, 0};
    return (Whole)__builtin_shufflevector(given, given, 0, 4, 4, 4, 1, 4, 4, 4, 2, 4, 4, 4, 3, 4, 4, 4);
}

// The codes of output o in a part, plus their centre: four at a time, as they lie.
INLINE void codes_of(const Layout l, const uint8_t *codes, int o, uint8_t *to) {
    static const uint8_t values[2][16] = {{NONLINEAR_VALUES}, {VALUES_OF_FOUR_BITS}};
    const uint8_t *high = codes + CODE_BYTES(l.bits) + 4 * o;
    UNROLL(8)
    for (int w = 0; w < WORDS; w++) {
        uint32_t four, above;
        memcpy(&four, codes + 64 * (l.bits == 8 ? w : w / 2) + 4 * o, 4);
        four = l.bits == 8 ? four ^ 0x80808080 : four >> w % 2 * 4 & 0x0f0f0f0f;
        if (l.bits == 5 || l.bits == 6) memcpy(&above, high + (l.bits == 6 ? 64 * (w / 4) : 0), 4);
        if (l.bits == 5) four |= (above >> w & 0x01010101) << 4;
        if (l.bits == 6) four |= (above >> w % 4 * 2 & 0x03030303) << 4;
        memcpy(to + 4 * w, &four, 4);
    }
    for (int i = 0; i < PART && l.values; i++) to[i] = values[l.values == FLOATS_OF_FOUR_BITS][to[i]];
}

// The weights of output o of SIDE in a block of `inputs`. A weight is rounded once, as by a fused multiply-add, which not
// every processor that this is compiled for has: in double precision products are exact, and so are nearly all sums.
INLINE void unpack_block(const Layout l, const int inputs, const uint8_t *at, int o, float *to) {
    const float scale = scale_at(&l, at + 2 * o), minimum = l.minimum ? scale_at(&l, at + 2 * SIDE + 2 * o) : 0;
    const uint8_t *part = at + HEAD_BYTES(l.minimum);
    for (int p = 0; p < inputs / PART; p++, part += PART_BYTES(l.bits, l.scales, l.minima), to += PART) {
        const double least = l.minima ? minimum * part[SIDE * l.scales + o] : minimum;
        float own[2] = {scale, scale}; // of either half
        if (l.scales == 1) own[0] = own[1] = scale * part[o];
        for (int i = 0; i < 2 && l.scales == 2; i++) own[i] = scale * (int8_t)part[SIDE * i + o];
        uint8_t codes[PART];
        codes_of(l, part + SIDE * (l.scales + l.minima), o, codes);
        UNROLL(8)
        for (int w = 0; w < WORDS; w++) {
            const Whole code = widened_codes(codes + 4 * w) - (l.shift == NONE ? 0 : 1 << l.shift);
            const float by = own[2 * w / WORDS];
            Floats weight = __builtin_convertvector(code, Floats) * by + 0; // + 0: no negative zeros
            if (l.minimum)
                weight = __builtin_convertvector(__builtin_convertvector(code, Doubles) * (double)by + least, Floats);
            memcpy(to + 4 * w, &weight, sizeof weight);
        }
    }
}

#define UNPACK(name, number, count, ...)                                                                               \
    static void unpack_##name(const uint8_t *at, int64_t inputs, int o, float *to) {                                   \
        for (int64_t i = 0; i < inputs; i += count, at += weight_formats[AT_##name].packed_bytes)                      \
            unpack_block(LAYOUT_##name, count, at, o, to + i);                                                         \
    }
EACH_FORMAT(UNPACK)

void unpack_row(int format, const uint8_t *packed, int64_t inputs, int64_t output, float *to) {
    typedef void (*Unpack)(const uint8_t *, int64_t, int, float *);
#define UNPACK_ENTRY(name, ...) unpack_##name,
    static const Unpack unpacks[FORMATS] = {EACH_FORMAT(UNPACK_ENTRY)};
    const Format *f = &weight_formats[format];
    unpacks[format](packed + output / SIDE * (inputs / f->inputs) * f->packed_bytes, inputs, (int)(output % SIDE), to);
}

typedef struct {
    int format;
    const uint8_t *packed;
    int64_t inputs;
    const int64_t *rows;
    int64_t count;
    float *to;
} Unpacking;

static void share_unpacking(const void *argument, Worker *w) {
    const Unpacking *u = argument;
    EACH_PIECE(r, u->count, w) unpack_row(u->format, u->packed, u->inputs, u->rows[r], u->to + r * u->inputs);
}

void unpack_rows(
    int format, const uint8_t *packed, int64_t inputs, const int64_t *rows, int64_t count, float *to, int threads) {
    const Unpacking u = {format, packed, inputs, rows, count, to};
    pool_run(share_unpacking, &u, threads);
}
