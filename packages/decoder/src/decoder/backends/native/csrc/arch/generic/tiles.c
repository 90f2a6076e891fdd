// Products with quantised weights for any processor, as all instruction sets have to compute them.

#include "native.h"
#include "formats/formats.h"

// The codes of a part, less their centre, and what they and their minimum are multiplied by.
typedef struct {
    int16_t codes[PART][SIDE];
    int16_t scales[2][SIDE]; // whole numbers, for either half
    float scale[SIDE], minimum[SIDE];
} Weights;

static void read_weights(const Layout *l, const uint8_t *block, const uint8_t *part, Weights *to) {
    const uint8_t *codes = part + SIDE * (l->scales + l->minima);
    for (int o = 0; o < SIDE; o++) {
        for (int i = 0; i < PART; i++) to->codes[i][o] = (int16_t)code_at(l, codes, i / 4, i % 4, o);
        for (int i = 0; i < 2; i++) to->scales[i][o] = l->scales == 2 ? (int8_t)part[SIDE * i + o] : 1;
        to->scale[o] = scale_at(l, block + 2 * o) * (l->scales == 1 ? (float)part[o] : 1);
        if (l->minimum) to->minimum[o] = scale_at(l, block + 2 * SIDE + 2 * o);
        if (l->minima) to->minimum[o] *= part[SIDE * l->scales + o];
    }
}

static void add_part(const Layout *l, const Weights *w, const Input *x, float *sums) {
    int32_t whole[2][SIDE] = {{0}};
    for (int i = 0; i < PART; i++)
        for (int o = 0; o < SIDE; o++) whole[i / 16][o] += x->codes[i] * w->codes[i][o];
    for (int o = 0; o < SIDE; o++) {
        const int32_t both = whole[0][o] * w->scales[0][o] + whole[1][o] * w->scales[1][o];
        sums[o] = fmaf((float)both, w->scale[o] * x->step, sums[o]);
        if (l->minimum) sums[o] = fmaf(w->minimum[o], x->total, sums[o]);
    }
}

static void tile(int format, const uint8_t *panel, int64_t blocks, const Input *x, int rows, float *sums) {
    const Format *f = &weight_formats[format];
    const Layout *l = layouts[format];
    Weights w;
    memset(sums, 0, (size_t)rows * SIDE * sizeof *sums);
    for (int64_t block = 0; block < blocks; block++, panel += f->packed_bytes) {
        const uint8_t *part = panel + HEAD_BYTES(l->minimum);
        for (int p = 0; p < f->inputs / PART; p++, x += rows, part += PART_BYTES(l->bits, l->scales, l->minima)) {
            read_weights(l, panel, part, &w);
            for (int r = 0; r < rows; r++) add_part(l, &w, x + r, sums + r * SIDE);
        }
    }
}

#define TILE(name, ...)                                                                                                \
    static void tile_##name(const uint8_t *panel, int64_t blocks, const Input *x, int rows, float *sums) {             \
        tile(AT_##name, panel, blocks, x, rows, sums);                                                                 \
    }
EACH_FORMAT(TILE)

#define ENTRY(name, ...) tile_##name,
const Tile tile_table[FORMATS] = {EACH_FORMAT(ENTRY)};
