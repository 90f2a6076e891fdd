// Products of a few rows with packed weights, and norms.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "native.h"

enum { PANEL = 2 * LANES };      // outputs of a product that stand beside each other
enum { PANELS_HELD = 1 << 19 };  // bytes of weights that a core holds
enum { AHEAD = 128 };            // vectors of weights that are fetched ahead
enum { FEW_GROUPS = 4 };         // of rows, up to which a panel is read once for all of them

typedef enum { FLOAT_WEIGHTS, BF16_WEIGHTS, BF16_PAIRS, BYTE_WEIGHTS } Kind;

// How many words of weights ahead a tile fetches, for the even vectors of a step and for the odd ones.
typedef struct {
    int64_t words[2];
} Ahead;

// Write the sums of a tile.
ONCE void finish(
    int rows, int panels, const vec *sums, const Product *p, int64_t row, int64_t panel, const Out *out) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < panels * 2; i++) {
            const int64_t column = panel * PANEL + i * LANES, left = p->outputs - column;
            if (left <= 0) break;
            vec y = sums[r * panels * 2 + i];
            const int64_t at = (row + r) * p->outputs + column;
            if (p->scales) y *= load(p->scales, column, 0, left);
            if (p->bias) y += load(p->bias, column, 0, left);
            if (out->add) y += load(out->add, at, out->add_is_bf16, left);
            store(out->y, at, out->y_is_bf16, y, left);
        }
}

INLINE vec of_bytes(const int8_t *from) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#endif
}

// Rows [rows, inputs] of x with `panels` panels from `panel` on. With BF16_PAIRS x is bfloat16, otherwise float32. Weights
// that are read again soon are fetched to a cache where they stay; others would only drive out what each step needs:
// states, caches of texts, draft heads.
INLINE void tile(
    const Kind kind, const int again, const int rows, const int panels, const Product *p, const void *x, int64_t row, int64_t panel,
    const Ahead *ahead, const Out *out) {
    vec sums[MOST_ROWS * 2];
    const int64_t inputs = p->inputs, words = kind == FLOAT_WEIGHTS ? inputs : (inputs + 1) / 2;
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
    const float *wide = (const float *)x + row * inputs;
    const uint16_t *narrow = (const uint16_t *)x + row * inputs;
#pragma GCC unroll 28
    for (int i = 0; i < rows * panels * 2; i++) sums[i] = (vec){0};
    const int64_t whole = kind == FLOAT_WEIGHTS ? words : inputs / 2;
    for (int64_t k = 0; kind == BYTE_WEIGHTS && k < inputs; k++) {
        vec both[8];
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            const int8_t *at = (const int8_t *)p->weight + ((panel + (i >> 1)) * inputs + k) * PANEL + (i & 1) * LANES;
            __builtin_prefetch(at + 4 * ahead->words[i & 1] / panels, 0, 2);
            both[i] = of_bytes(at);
        }
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++) sums[r * panels * 2 + i] += wide[r * inputs + k] * both[i];
    }
    for (int64_t k = 0; kind != BYTE_WEIGHTS && k < whole; k++) {
        uvec both[8];
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            const uint32_t *at = weight + ((i >> 1) * words + k) * PANEL + (i & 1) * LANES;
            __builtin_prefetch(at + ahead->words[i & 1] / panels, 0, again ? 2 : 0);
            memcpy(&both[i], at, sizeof(uvec));
        }
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++) {
                vec *to = &sums[r * panels * 2 + i];
                if (kind == FLOAT_WEIGHTS) {
                    *to += wide[r * inputs + k] * (vec)both[i];
                } else if (kind == BF16_WEIGHTS) {
                    *to += wide[r * inputs + 2 * k] * (vec)(both[i] << 16);
                    *to += wide[r * inputs + 2 * k + 1] * (vec)(both[i] & 0xffff0000u);
                } else {
#if defined(__AVX512BF16__)
                    uint32_t pair;
                    memcpy(&pair, narrow + r * inputs + 2 * k, 4);
                    *to = (vec)_mm512_dpbf16_ps((__m512)*to, (__m512bh)both[i], (__m512bh)_mm512_set1_epi32((int)pair));
#endif
                }
            }
    }
    if ((kind == BF16_WEIGHTS || kind == BF16_PAIRS) && inputs & 1) {
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            uvec both;
            memcpy(&both, weight + ((i >> 1) * words + whole) * PANEL + (i & 1) * LANES, sizeof both);
            const vec low = (vec)(both << 16);
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++)
                sums[r * panels * 2 + i] +=
                    (kind == BF16_WEIGHTS ? wide[r * inputs + inputs - 1] : widened(narrow[r * inputs + inputs - 1])) * low;
        }
    }
    if (!p->scales && !p->bias && !out->add && !out->y_is_bf16 && (panel + panels) * PANEL <= p->outputs) {
        float *y = (float *)out->y + row * p->outputs + panel * PANEL;
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++)
                memcpy(y + r * p->outputs + i * LANES, &sums[r * panels * 2 + i], sizeof(vec));
        return;
    }
    vec done[MOST_ROWS * 2];  // a copy, so that the sums themselves stay in registers
#pragma GCC unroll 28
    for (int i = 0; i < rows * panels * 2; i++) done[i] = sums[i];
    finish(rows, panels, done, p, row, panel, out);
}

// With few registers, few rows take several panels at once, so that sums need not wait for each other. With many,
// reading one panel after the other was measured to be the faster, by up to a tenth.
#define ROWS(count, together)                                                                   \
    case count:                                                                                 \
        for (; panel + together <= end; panel += together)                                      \
            tile(kind, again, count, together, p, x, row, panel, ahead, out);                   \
        for (; panel < end; panel++) tile(kind, again, count, 1, p, x, row, panel, ahead, out); \
        break;

// Rows [row, row + count] with the panels up to `end`.
INLINE void panels_with(const Kind kind, const int again, const Product *p, const void *x, int64_t row, int64_t count, int64_t panel,
                        int64_t end, const Ahead *ahead, const Out *out) {
    switch (count) {
#if defined(__AVX512F__)
        ROWS(1, 1) ROWS(2, 1) ROWS(3, 1) ROWS(4, 1) ROWS(5, 1) ROWS(6, 1) ROWS(7, 1)
        ROWS(8, 1) ROWS(9, 1) ROWS(10, 1) ROWS(11, 1) ROWS(12, 1)
        ROWS(13, 1) ROWS(14, 1)
#else
        ROWS(1, 4) ROWS(2, 2) ROWS(3, 1) ROWS(4, 1)
#endif
    }
}

INLINE void panels_of(const Kind kind, const Product *p, const void *x, int64_t rows, const Out *out, int64_t first,
                      int64_t last) {
    const int64_t of_bytes = (p->inputs + 3) / 4, of_pairs = (p->inputs + 1) / 2;
    const int64_t words = kind == FLOAT_WEIGHTS ? p->inputs : kind == BYTE_WEIGHTS ? of_bytes : of_pairs;
    const int64_t panel = words * PANEL, fit = PANELS_HELD / (panel * 4);
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, each = groups ? (rows + groups - 1) / groups : 0;
    // For many rows as many panels as stay in a core's cache. For a few groups of rows one: the first two groups fetch
    // half of the next panel each, if it stays there, too, so that all of them compute while memory is read.
    const int64_t block = groups <= 1 ? last - first : groups <= FEW_GROUPS ? 1 : fit > 1 ? fit : 1;
    const int next = groups > 1 && groups <= FEW_GROUPS && fit > 0;
    for (int64_t begin = first; begin < last; begin += block) {
        const int64_t end = begin + block < last ? begin + block : last;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * each, count = rows - row < each ? rows - row : each;
            Ahead ahead = {{AHEAD * LANES, AHEAD * LANES}};
            if (next) ahead = (Ahead){{group == 0 ? panel : 0, group == 1 ? panel : 0}};
            if (groups > 1 || kind == BYTE_WEIGHTS) panels_with(kind, 1, p, x, row, count, begin, end, &ahead, out);
            else panels_with(kind, 0, p, x, row, count, begin, end, &ahead, out);
        }
    }
}

// Panels [first, last) of a product.
static void some_panels(
    const Product *p, const void *x, int x_is_bf16 __attribute__((unused)), int64_t rows, const Out *out, int64_t first,
    int64_t last) {
    if (p->kind == FLOATS) panels_of(FLOAT_WEIGHTS, p, x, rows, out, first, last);
    else if (p->kind == BYTES) panels_of(BYTE_WEIGHTS, p, x, rows, out, first, last);
#if defined(__AVX512BF16__)
    else if (x_is_bf16) panels_of(BF16_PAIRS, p, x, rows, out, first, last);
#endif
    else panels_of(BF16_WEIGHTS, p, x, rows, out, first, last);
}

void share(const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads) {
    const int64_t panels = (p->outputs + PANEL - 1) / PANEL;
    some_panels(p, x, x_is_bf16, rows, out, panels * thread / threads, panels * (thread + 1) / threads);
}

Columns share_halves(
    const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads) {
    const int64_t half = p->outputs / 2, panels = half / PANEL;
    if (half % PANEL) {  // a panel belongs to both halves
        share(p, x, x_is_bf16, rows, out, thread, threads);
#pragma omp barrier
        const int64_t vectors = (half + LANES - 1) / LANES, last = vectors * (thread + 1) / threads * LANES;
        return (Columns){vectors * thread / threads * LANES, last < half ? last : half};
    }
    const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
    some_panels(p, x, x_is_bf16, rows, out, first, last);
    some_panels(p, x, x_is_bf16, rows, out, panels + first, panels + last);
    return (Columns){first * PANEL, last * PANEL};
}

int multiplies_bf16(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

int panel_width(void) { return PANEL; }

void linear(const Product *p, const void *x, int64_t rows, int is_bf16, void *y, int threads) {
    const Out out = {y, NULL, is_bf16, 0};
#pragma omp parallel num_threads(threads)
    share(p, x, is_bf16, rows, &out, omp_get_thread_num(), omp_get_num_threads());
}

__attribute__((noinline)) void norm(const void *x, int x_is_bf16, const float *weight, float eps, int64_t size, void *y, int y_is_bf16) {
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = load(x, i, x_is_bf16, size - i);
        squares += part * part;
    }
    const float scale = 1 / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(y, i, y_is_bf16, load(x, i, x_is_bf16, size - i) * scale * load(weight, i, 0, size - i), size - i);
}
