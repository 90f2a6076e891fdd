// Products of a few rows with packed weights, and norms.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "native.h"
#include "formats/formats.h"

enum { PANELS_HELD = 1 << 19 }; // bytes of weights that a core holds
enum { AHEAD = 128 };           // vectors of weights that are fetched ahead
enum { FEW_GROUPS = 4 };        // of rows, up to which a panel is read once for all of them

// A word of weights has one number, or two of bfloat16. BF16_PAIRS are multiplied as they are, with inputs of bfloat16.
typedef enum { FLOAT_WEIGHTS, BF16_WEIGHTS, BF16_PAIRS } Kind;

// How many words of weights ahead a tile fetches, for the even vectors of a step and for the odd ones.
typedef struct {
    int64_t words[2];
} Ahead;

// Write the sums of a tile.
ONCE void finish(
    int rows, int panels, const vec *sums, const PackedWeight *p, int64_t row, int64_t panel, const Out *out) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < panels * 2; i++) {
            const int64_t column = panel * PANEL + i * LANES, left = p->outputs - column;
            if (left <= 0) break;
            vec y = sums[r * panels * 2 + i];
            const int64_t at = (row + r) * p->outputs + column;
            if (p->bias) y += load(p->bias, column, 0, left);
            if (out->add) y += load(out->add, at, out->add_is_bf16, left);
            store(out->y, at, out->y_is_bf16, y, left);
        }
}

INLINE int64_t words_of_row(const Kind kind, int64_t inputs) {
    return kind == FLOAT_WEIGHTS ? inputs : (inputs + 1) / 2;
}

// The words of some panels from `weight` on, one vector for each LANES outputs, and fetch those that come later, to the
// nearest cache. A Xeon takes 1.5 times as long with the hint for what is read once (NTA), and as long with that for the
// second cache, with which a Zen 4 takes up to twice as long.
INLINE void words_at(const uint32_t *weight, const int panels, int64_t words, const Ahead *ahead, uvec *both) {
    UNROLL(8)
    for (int i = 0; i < panels * 2; i++) {
        const uint32_t *at = weight + (i >> 1) * words * PANEL + (i & 1) * LANES;
        __builtin_prefetch(at + ahead->words[i & 1] / panels, 0, 3);
        memcpy(&both[i], at, sizeof(uvec));
    }
}

// Add products of one number of each row, `inputs` apart, with one weight of each output.
INLINE void add_products(
    const int rows, const int panels, const float *x, int64_t inputs, const vec *weights, vec *sums) {
    UNROLL(14)
    for (int r = 0; r < rows; r++) {
        const vec number = splat(x[r * inputs]);
        UNROLL(8)
        for (int i = 0; i < panels * 2; i++)
            sums[r * panels * 2 + i] = fused(number, weights[i], sums[r * panels * 2 + i]);
    }
}

// Add products of a pair of each row, `inputs` apart, with one pair of each output.
INLINE void add_pairs(
    const int rows, const int panels, const uint16_t *x, int64_t inputs, const uvec *weights, vec *sums) {
    UNROLL(14)
    for (int r = 0; r < rows; r++) {
        uint32_t pair;
        memcpy(&pair, x + r * inputs, 4);
        UNROLL(8)
        for (int i = 0; i < panels * 2; i++) {
            vec *to = &sums[r * panels * 2 + i];
            *to = dot_pairs(*to, weights[i], (uvec){0} + pair);
        }
    }
}

// Numbers of x from `k` on with the weights of one word per output.
INLINE void add_word(const Kind kind, const int rows, const int panels, const float *x, int64_t inputs,
    const int numbers, const uvec *words, vec *sums) {
    UNROLL(2)
    for (int n = 0; n < numbers; n++) {
        vec weights[8];
        UNROLL(8)
        for (int i = 0; i < panels * 2; i++)
            weights[i] = kind == FLOAT_WEIGHTS ? (vec)words[i] : (vec)(n ? words[i] & 0xffff0000u : words[i] << 16);
        add_products(rows, panels, x + n, inputs, weights, sums);
    }
}

// `tile` of words whose numbers are multiplied one by one, in float32.
INLINE void single_tile(const Kind kind, const int rows, const int panels, const PackedWeight *p, const float *x,
    int64_t panel, const Ahead *ahead, vec *sums) {
    enum { EACH_OF_FLOATS = 1, EACH_OF_HALVES = 2 };
    const int each = kind == FLOAT_WEIGHTS ? EACH_OF_FLOATS : EACH_OF_HALVES;
    const int64_t inputs = p->inputs, words = words_of_row(kind, inputs);
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
    uvec both[8];
    int64_t k = 0;
    for (; k + each <= inputs; k += each, weight += PANEL) {
        words_at(weight, panels, words, ahead, both);
        add_word(kind, rows, panels, x + k, inputs, each, both, sums);
    }
    if (k == inputs) return;
    words_at(weight, panels, words, ahead, both);
    vec weights[8];
    UNROLL(8)
    for (int i = 0; i < panels * 2; i++) weights[i] = (vec)(both[i] << 16);
    add_products(rows, panels, x + k, inputs, weights, sums);
}

// `tile` of pairs of bfloat16 numbers, which are multiplied as they are.
INLINE void paired_tile(const int rows, const int panels, const PackedWeight *p, const uint16_t *x, int64_t panel,
    const Ahead *ahead, vec *sums) {
    const int64_t inputs = p->inputs, words = words_of_row(BF16_PAIRS, inputs);
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
    uvec both[8];
    for (int64_t k = 0; k + 2 <= inputs; k += 2, weight += PANEL) {
        words_at(weight, panels, words, ahead, both);
        add_pairs(rows, panels, x + k, inputs, both, sums);
    }
    if (inputs % 2 == 0) return;
    words_at(weight, panels, words, ahead, both);
    UNROLL(14)
    for (int r = 0; r < rows; r++) {
        UNROLL(8)
        for (int i = 0; i < panels * 2; i++) {
            vec *to = &sums[r * panels * 2 + i];
            *to = fused(splat(widened(x[r * inputs + inputs - 1])), (vec)(both[i] << 16), *to);
        }
    }
}

// Rows [row, row + rows] of x with `panels` panels from `panel` on. With BF16_PAIRS x is bfloat16,
// otherwise float32.
INLINE void tile(const Kind kind, const int rows, const int panels, const PackedWeight *p, const void *x, int64_t row,
    int64_t panel, const Ahead *ahead, const Out *out) {
    vec sums[MOST_ROWS * 2];
    const float *wide = (const float *)x + row * p->inputs;
    UNROLL(28)
    for (int i = 0; i < rows * panels * 2; i++) sums[i] = (vec){0};
    if (kind == BF16_PAIRS) paired_tile(rows, panels, p, (const uint16_t *)x + row * p->inputs, panel, ahead, sums);
    else single_tile(kind, rows, panels, p, wide, panel, ahead, sums);
    if (!p->bias && !out->add && !out->y_is_bf16 && (panel + panels) * PANEL <= p->outputs) {
        float *y = (float *)out->y + row * p->outputs + panel * PANEL;
        UNROLL(14)
        for (int r = 0; r < rows; r++) {
            UNROLL(8)
            for (int i = 0; i < panels * 2; i++)
                memcpy(y + r * p->outputs + i * LANES, &sums[r * panels * 2 + i], sizeof(vec));
        }
        return;
    }
    vec done[MOST_ROWS * 2]; // a copy, so that the sums themselves stay in registers
    UNROLL(28)
    for (int i = 0; i < rows * panels * 2; i++) done[i] = sums[i];
    finish(rows, panels, done, p, row, panel, out);
}

// Some panels, from `panel` up to `end`, with some rows from `row` on.
typedef void (*Tiles)(
    const PackedWeight *p, const void *x, int64_t row, int64_t panel, int64_t end, const Ahead *ahead, const Out *out);

// A function for each number of rows. With few registers, few rows take `together` panels at once, so that sums need not
// wait for each other. With many, reading one panel after the other was measured to be the faster, by up to a tenth.
#define TILES(kind, rows, together)                                                                                    \
    static void kind##_##rows(const PackedWeight *p, const void *x, int64_t row, int64_t panel, int64_t end,           \
        const Ahead *ahead, const Out *out) {                                                                          \
        for (; panel + together <= end; panel += together) tile(kind, rows, together, p, x, row, panel, ahead, out);   \
        for (; together > 1 && panel < end; panel++) tile(kind, rows, 1, p, x, row, panel, ahead, out);                \
    }

#define ENTRY(kind, rows, together) [rows] = kind##_##rows,
#define TABLE(kind)                                                                                                    \
    EACH_NUMBER_OF_ROWS(TILES, kind)                                                                                   \
    static const Tiles kind##_tiles[MOST_ROWS + 1] = {EACH_NUMBER_OF_ROWS(ENTRY, kind)};
TABLE(FLOAT_WEIGHTS)
TABLE(BF16_WEIGHTS)
TABLE(BF16_PAIRS)

// Panels [first, last) with inputs as the kind of weights takes them.
static void panels_of(const Kind kind, const Tiles *tiles, const PackedWeight *p, const void *x, int64_t rows,
    const Out *out, int64_t first, int64_t last) {
    const int64_t panel = words_of_row(kind, p->inputs) * PANEL, fit = PANELS_HELD / (panel * 4);
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    // For many rows as many panels as stay in a core's cache. For a few groups of rows one: the first two groups fetch
    // half of the next panel each, if it stays there, too, so that all of them compute while memory is read.
    const int64_t block = groups <= 1 ? last - first : groups <= FEW_GROUPS ? 1 : fit > 1 ? fit : 1;
    const int next = groups > 1 && groups <= FEW_GROUPS && fit > 0;
    for (int64_t begin = first; begin < last; begin += block) {
        const int64_t end = begin + block < last ? begin + block : last;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = rows * group / groups, count = rows * (group + 1) / groups - row;
            Ahead ahead = {{AHEAD * LANES, AHEAD * LANES}};
            if (next) ahead = (Ahead){{group == 0 ? panel : 0, group == 1 ? panel : 0}};
            tiles[count](p, x, row, begin, end, &ahead, out);
        }
    }
}

// ----------------------------------------------------------------------------------------------------- rounded inputs

enum { ROUNDED = 1 << 14 }; // parts of inputs on a thread's stack, about

int64_t width_of(const PackedWeight *p) { return p->kind == QUANTISED ? SIDE : PANEL; }

int64_t panels_in(const PackedWeight *p) { return (p->outputs + width_of(p) - 1) / width_of(p); }

// Parts of a row of inputs where products read rounded ones, 0 where they read x.
static int64_t rounded_parts(const PackedWeight *p) { return p->kind == QUANTISED ? p->inputs / PART : 0; }

// How many rows are multiplied before the next ones are rounded.
static int64_t rows_at_once(const PackedWeight *p, int64_t rows) {
    const int64_t parts = rounded_parts(p), room = parts ? ROUNDED / parts : rows, fit = room > 1 ? room : 1;
    return rows < fit ? rows : fit;
}

// Panels [first, last) of a product; x is rounded where the product takes it so.
static void some_panels(
    const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int64_t first, int64_t last) {
    if (p->kind == QUANTISED) quantised_panels(p, x, rows, out, first, last);
    else if (p->kind == FP32) panels_of(FLOAT_WEIGHTS, FLOAT_WEIGHTS_tiles, p, x, rows, out, first, last);
    else if (BF16_PAIRS_MULTIPLY && x_is_bf16) panels_of(BF16_PAIRS, BF16_PAIRS_tiles, p, x, rows, out, first, last);
    else panels_of(BF16_WEIGHTS, BF16_WEIGHTS_tiles, p, x, rows, out, first, last);
}

static Out out_from(const PackedWeight *p, const Out *out, int64_t row) {
    const int64_t at = row * p->outputs;
    return (Out){row_of(out->y, at, out->y_is_bf16), out->add ? row_of(out->add, at, out->add_is_bf16) : NULL,
        out->y_is_bf16, out->add_is_bf16};
}

void multiply_panels(
    const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int64_t first, int64_t last) {
    const int64_t together = rows_at_once(p, rows), each = rounded_parts(p);
    Input rounded[together * each + 1];
    for (int64_t row = 0; row < rows; row += together) {
        const int64_t count = rows - row < together ? rows - row : together;
        const Out here = out_from(p, out, row);
        const void *from = row_of(x, row * p->inputs, x_is_bf16);
        if (each) round_inputs(from, x_is_bf16, count, p->inputs, rounded);
        some_panels(p, each ? (const void *)rounded : from, x_is_bf16, count, &here, first, last);
    }
}

// ------------------------------------------------------------------------------------------------- products in pieces

enum { WEIGHTS_OF_PIECE = 1 << 18 }; // of a few rows; with many rows fewer, down to a panel's

int64_t pieces_of(const PackedWeight *p, int64_t rows, int64_t units, int panels, int threads) {
    if (threads == 1) return units > 0;
    const int64_t fit = WEIGHTS_OF_PIECE / (panels * p->inputs * width_of(p) * (1 + rows / 8) + 1);
    const int64_t each = fit > 1 ? fit : 1, pieces = (units + each - 1) / each;
    const int64_t even = (pieces + threads - 1) / threads * threads;
    return even < units ? even : units;
}

// A product whose outputs are one part or two, and what is done `behind` the panels of a piece, if anything is.
static void share_parts(const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int parts,
    const Behind *behind, Worker *w) {
    const int64_t together = rows_at_once(p, rows), each = rounded_parts(p), units = panels_in(p) / parts;
    Input rounded[together * each + 1];
    for (int64_t row = 0; row < rows; row += together) {
        const int64_t count = rows - row < together ? rows - row : together;
        const int64_t pieces = pieces_of(p, count, units, parts, w->threads);
        const Out here = out_from(p, out, row);
        const void *from = row_of(x, row * p->inputs, x_is_bf16);
        int64_t made = 0;
        EACH_PIECE(piece, pieces, w) {
            if (each && !made++) round_inputs(from, x_is_bf16, count, p->inputs, rounded);
            const int64_t first = units * piece / pieces, last = units * (piece + 1) / pieces;
            for (int part = 0; part < parts; part++)
                some_panels(p, each ? (const void *)rounded : from, x_is_bf16, count, &here, part * units + first,
                    part * units + last);
            if (behind)
                behind->run(behind->argument, row, row + count, (Columns){first * width_of(p), last * width_of(p)});
        }
    }
}

void share(const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, Worker *w) {
    share_parts(p, x, x_is_bf16, rows, out, 1, NULL, w);
}

void share_halves(const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out,
    const Behind *behind, Worker *w) {
    const int64_t half = p->outputs / 2;
    if (half % width_of(p) == 0) {
        share_parts(p, x, x_is_bf16, rows, out, 2, behind, w);
        return;
    }
    share(p, x, x_is_bf16, rows, out, w); // a panel belongs to both halves
    EACH_PIECE(row, rows, w) behind->run(behind->argument, row, row + 1, (Columns){0, half});
}

typedef struct {
    const PackedWeight *p;
    const void *x;
    int64_t rows;
    int is_bf16;
    Out out;
} Linear;

static void share_linear(const void *argument, Worker *w) {
    const Linear *l = argument;
    share(l->p, l->x, l->is_bf16, l->rows, &l->out, w);
}

void linear(const PackedWeight *p, const void *x, int64_t rows, int is_bf16, void *y, int threads) {
    const Linear l = {p, x, rows, is_bf16, {y, NULL, is_bf16, 0}};
    pool_run(share_linear, &l, threads);
}

typedef struct {
    const PackedWeight *p;
    int64_t count;
    const void *x;
    int64_t rows;
    int is_bf16;
    void *y;
} LinearEach;

static void share_each(const void *argument, Worker *w) {
    const LinearEach *l = argument;
    const PackedWeight *p = l->p;
    const int64_t panels = panels_in(p), units = l->count * panels,
                  pieces = pieces_of(p, l->rows, units, 1, w->threads);
    EACH_PIECE(piece, pieces, w) {
        const int64_t last = units * (piece + 1) / pieces;
        for (int64_t unit = units * piece / pieces, end; unit < last; unit = end) {
            const int64_t number = unit / panels, begin = number * panels;
            end = last < begin + panels ? last : begin + panels;
            const Out out = {row_of(l->y, number * l->rows * p->outputs, l->is_bf16), NULL, l->is_bf16, 0};
            const void *x = row_of(l->x, number * l->rows * p->inputs, l->is_bf16);
            multiply_panels(p + number, x, l->is_bf16, l->rows, &out, unit - begin, end - begin);
        }
    }
}

void linear_each(const PackedWeight *p, int64_t count, const void *x, int64_t rows, int is_bf16, void *y, int threads) {
    const LinearEach l = {p, count, x, rows, is_bf16, y};
    pool_run(share_each, &l, threads);
}

void norm(const void *x, int x_is_bf16, const float *weight, float eps, int64_t size, void *y, int y_is_bf16) {
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = load(x, i, x_is_bf16, size - i);
        squares = fused(part, part, squares);
    }
    const float scale = 1 / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(y, i, y_is_bf16, load(x, i, x_is_bf16, size - i) * scale * load(weight, i, 0, size - i), size - i);
}
