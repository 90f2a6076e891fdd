// Products with the weights of `formats/`: rounding inputs, and panels of outputs for all rows of a call.

#include "native.h"
#include "formats/formats.h"

#if defined(__AVX2__)
#include "arch/rounding.h"
#else

typedef int8_t bytes __attribute__((vector_size(LANES)));

INLINE ivec whole_swapped(ivec x, int step) { return (ivec)swapped((vec)x, step); }

// Sums of those at places 0, 1 and at places 2, 3 of the words of a half of a part, in lanes 0 and 2.
INLINE ivec sums_of_places(const ivec *numbers) {
    enum { VECTORS = PART / 2 / LANES };
    ivec total = numbers[0];
    for (int i = 1; i < VECTORS; i++) total += numbers[i];
    UNROLL(2)
    for (int step = LANES / 2; step > 2; step /= 2) total += whole_swapped(total, step);
    return total + whole_swapped(total, 1);
}

// A part of 32 inputs: rounded to the nearest of 127 steps to either side of zero.
INLINE void round_part(const void *x, int64_t at, int is_bf16, Input *to) {
    vec numbers[PART / LANES];
    ivec whole[PART / LANES], most = {0};
    for (int i = 0; i < PART / LANES; i++) {
        numbers[i] = load(x, at + i * LANES, is_bf16, LANES);
        // As whole numbers: what is no number is the largest, and makes the step none.
        const ivec size = (ivec)numbers[i] & 0x7fffffff;
        most = (ivec)choose(size > most, (vec)size, (vec)most);
    }
    UNROLL(4)
    for (int step = LANES / 2; step; step /= 2) {
        const ivec other = whole_swapped(most, step);
        most = (ivec)choose(other > most, (vec)other, (vec)most);
    }
    float size = ((vec)most)[0];
    if (size < 1e-30f) size = 0; // its inverse would not be a number
    to->step = size / 127;
    const vec rate = splat(to->step > 0 ? 127 / size : 0);
    for (int i = 0; i < PART / LANES; i++) {
        whole[i] = __builtin_convertvector(to_whole(numbers[i] * rate), ivec);
        const bytes codes = __builtin_convertvector(whole[i], bytes);
        memcpy(to->codes + i * LANES, &codes, sizeof codes);
        // What is no number is a code of some kind, of which the sums are as well.
        whole[i] = __builtin_convertvector(codes, ivec);
    }
    for (int half = 0; half < 2; half++) {
        const ivec sums = sums_of_places(whole + half * (PART / LANES / 2));
        to->pairs[half][0] = (int16_t)sums[0], to->pairs[half][1] = (int16_t)sums[2];
        to->halves[half] = sums[0] + sums[2];
    }
    for (int i = 0; i < 2; i++) to->pairs[2][i] = (int16_t)(to->pairs[0][i] + to->pairs[1][i]);
    to->sum = to->halves[0] + to->halves[1];
    to->total = to->step * (float)to->sum;
}

#endif

static void finish(const PackedWeight *p, const float *sums, int rows, int64_t row, int64_t column, const Out *out) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < SIDE; i += LANES) {
            const int64_t left = p->outputs - column - i, at = (row + r) * p->outputs + column + i;
            if (left <= 0) break;
            vec y = load(sums, r * SIDE + i, 0, LANES);
            if (p->bias) y += load(p->bias, column + i, 0, left);
            if (out->add) y += load(out->add, at, out->add_is_bf16, left);
            store(out->y, at, out->y_is_bf16, y, left);
        }
}

// Some rows of rounded inputs with panels [first, last) of the outputs.
static void multiply(
    const PackedWeight *p, const Input *x, int64_t row, int rows, const Out *out, int64_t first, int64_t last) {
    const Quantised *q = p->weight;
    float sums[ROWS_HELD * SIDE];
    for (int64_t part = 0, begin = 0; part < q->count; part++) {
        const QuantisedPart *of = &q->parts[part];
        const Format *f = &weight_formats[of->format];
        const int64_t blocks = p->inputs / f->inputs, end = begin + (of->outputs + SIDE - 1) / SIDE;
        const Tile tile = tile_table[of->format];
        for (int64_t panel = first > begin ? first : begin; panel < last && panel < end; panel++) {
            tile(of->weight + (panel - begin) * blocks * f->packed_bytes, blocks, x, rows, sums);
            finish(p, sums, rows, row, panel * SIDE, out);
        }
        begin = end;
    }
}

enum { PANELS_HELD = 1 << 18 }; // weights, about, that a core holds while one group of rows follows another

// Rows are multiplied in as few groups as can be, which are as even as can be.
static int64_t rows_of_group(int64_t rows) {
    const int64_t groups = (rows + ROWS_HELD - 1) / ROWS_HELD;
    return groups ? (rows + groups - 1) / groups : 1;
}

void round_inputs(const void *x, int x_is_bf16, int64_t rows, int64_t size, Input *inputs) {
    const int64_t each = rows_of_group(rows), parts = size / PART;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t first = row / each * each, together = rows - first < each ? rows - first : each;
        Input *to = inputs + first * parts + (row - first);
        for (int64_t part = 0; part < parts; part++, to += together)
            round_part(x, row * size + part * PART, x_is_bf16, to);
    }
}

void quantised_panels(
    const PackedWeight *p, const Input *x, int64_t rows, const Out *out, int64_t first, int64_t last) {
    const int64_t each = rows_of_group(rows), held = PANELS_HELD / (p->inputs * SIDE);
    const int64_t step = rows <= each ? last - first : held > 1 ? held : 1;
    for (int64_t panel = first; panel < last; panel += step)
        for (int64_t row = 0; row < rows; row += each)
            multiply(p, x + row * (p->inputs / PART), row, (int)(rows - row < each ? rows - row : each), out, panel,
                panel + step < last ? panel + step : last);
}
