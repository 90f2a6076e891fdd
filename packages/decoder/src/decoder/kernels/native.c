// The parts of a decoder layer on a CPU: products of a few rows with packed weights, norms, rotations and attention.
//
// Every number here is a sum whose order follows from its own row alone: over the inputs of a product, over the keys of
// a text by their positions. How many rows a call has, how threads share them and where tiles end changes no bit.

#include "native.h"

enum { PANEL = 2 * LANES };        // outputs of a product that stand beside each other
enum { CHUNK = 8 * MOST_ROWS };    // rows that go through a layer together, so that they stay in a core's cache
enum { SPLIT = 256, BLOCK = 64 };  // keys whose weights are summed together, and keys that are transposed together
enum { TILE = 6 };                 // rows of attention that share a register tile
enum { FEW = 48 };                 // rows of attention whose scores a core holds at a time
enum { MOST_DIM = 256 };
enum { PANELS_HELD = 1 << 19 };  // bytes of weights that a core holds
enum { AHEAD = 128 };            // vectors of weights that are fetched ahead
enum { MOST_PARTIAL = 1 << 24 };  // numbers of attention over splits that wait to be merged

// --------------------------------------------------------------------------------------------------------- products

typedef enum { FLOAT_WEIGHTS, BF16_WEIGHTS, BF16_PAIRS, BYTE_WEIGHTS } Kind;

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

// Rows [rows, inputs] of x with `panels` panels from `panel` on. With BF16_PAIRS x is bfloat16, otherwise float32.
INLINE void tile(
    const Kind kind, const int rows, const int panels, const Product *p, const void *x, int64_t row, int64_t panel,
    const Out *out) {
    vec sums[MOST_ROWS * 2];
    const int64_t inputs = p->inputs, words = kind == FLOAT_WEIGHTS ? inputs : (inputs + 1) / 2;
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
    const float *wide = (const float *)x + row * inputs;
    const uint16_t *narrow = (const uint16_t *)x + row * inputs;
#pragma GCC unroll 24
    for (int i = 0; i < rows * panels * 2; i++) sums[i] = (vec){0};
    const int64_t whole = kind == FLOAT_WEIGHTS ? words : inputs / 2;
    for (int64_t k = 0; kind == BYTE_WEIGHTS && k < inputs; k++) {
        vec both[8];
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            const int8_t *at = (const int8_t *)p->weight + ((panel + (i >> 1)) * inputs + k) * PANEL + (i & 1) * LANES;
            __builtin_prefetch(at + 4 * AHEAD / panels * LANES);
            both[i] = of_bytes(at);
        }
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++) sums[r * panels * 2 + i] += wide[r * inputs + k] * both[i];
    }
    for (int64_t k = 0; kind != BYTE_WEIGHTS && k < whole; k++) {
        uvec both[8];
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            const uint32_t *at = weight + ((i >> 1) * words + k) * PANEL + (i & 1) * LANES;
            __builtin_prefetch(at + AHEAD / panels * LANES);
            memcpy(&both[i], at, sizeof(uvec));
        }
#pragma GCC unroll 12
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
#pragma GCC unroll 12
            for (int r = 0; r < rows; r++)
                sums[r * panels * 2 + i] +=
                    (kind == BF16_WEIGHTS ? wide[r * inputs + inputs - 1] : widened(narrow[r * inputs + inputs - 1])) * low;
        }
    }
    if (!p->scales && !p->bias && !out->add && !out->y_is_bf16 && (panel + panels) * PANEL <= p->outputs) {
        float *y = (float *)out->y + row * p->outputs + panel * PANEL;
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++)
                memcpy(y + r * p->outputs + i * LANES, &sums[r * panels * 2 + i], sizeof(vec));
        return;
    }
    vec done[MOST_ROWS * 2];  // a copy, so that the sums themselves stay in registers
#pragma GCC unroll 24
    for (int i = 0; i < rows * panels * 2; i++) done[i] = sums[i];
    finish(rows, panels, done, p, row, panel, out);
}

// With few registers, few rows take several panels at once, so that sums need not wait for each other. With many,
// reading one panel after the other was measured to be the faster, by up to a tenth.
#define ROWS(count, together)                                                           \
    case count:                                                                         \
        for (; panel + together <= end; panel += together)                              \
            tile(kind, count, together, p, x, row, panel, out);                         \
        for (; panel < end; panel++) tile(kind, count, 1, p, x, row, panel, out);       \
        break;

INLINE void panels_of(const Kind kind, const Product *p, const void *x, int64_t rows, const Out *out, int64_t first,
                      int64_t last) {
    const int64_t words = kind == FLOAT_WEIGHTS ? p->inputs : (p->inputs + 1) / 2, fit = PANELS_HELD / (words * PANEL * 4);
    // For many rows as many panels as stay in a core's cache.
    const int64_t block = rows <= MOST_ROWS ? last - first : fit > 1 ? fit : 1;
    for (int64_t begin = first; begin < last; begin += block) {
        const int64_t end = begin + block < last ? begin + block : last;
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            int64_t panel = begin;
            switch (rows - row < MOST_ROWS ? rows - row : MOST_ROWS) {
#if defined(__AVX512F__)
                ROWS(1, 1) ROWS(2, 1) ROWS(3, 1) ROWS(4, 1) ROWS(5, 1) ROWS(6, 1)
                ROWS(7, 1) ROWS(8, 1) ROWS(9, 1) ROWS(10, 1) ROWS(11, 1) ROWS(12, 1)
#else
                ROWS(1, 4) ROWS(2, 2) ROWS(3, 1) ROWS(4, 1)
#endif
            }
        }
    }
}

void share(
    const Product *p, const void *x, int x_is_bf16 __attribute__((unused)), int64_t rows, const Out *out, int thread, int threads) {
    const int64_t panels = (p->outputs + PANEL - 1) / PANEL;
    const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
    if (p->kind == FLOATS) panels_of(FLOAT_WEIGHTS, p, x, rows, out, first, last);
    else if (p->kind == BYTES) panels_of(BYTE_WEIGHTS, p, x, rows, out, first, last);
#if defined(__AVX512BF16__)
    else if (x_is_bf16) panels_of(BF16_PAIRS, p, x, rows, out, first, last);
#endif
    else panels_of(BF16_WEIGHTS, p, x, rows, out, first, last);
}

int multiplies_bf16(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

int panel_width(void) { return PANEL; }

int rows_together(void) { return CHUNK; }

int rows_held(void) { return FEW; }

int keys_together(void) { return SPLIT; }

int most_dim(void) { return MOST_DIM; }

void linear(const Product *p, const void *x, int64_t rows, int is_bf16, void *y, int threads) {
    const Out out = {y, NULL, is_bf16, 0};
#pragma omp parallel num_threads(threads)
    share(p, x, is_bf16, rows, &out, omp_get_thread_num(), omp_get_num_threads());
}

// ------------------------------------------------------------------------------------------------------------ layers

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

typedef struct {
    Product qkv, o, gate_up, down;
    const float *norm_in, *norm_between;
    const float *head_norm;  // [heads + kv_heads, dim], NULL where queries and keys have no norm
    int64_t size, heads, kv_heads, dim;
    float eps, head_eps;
} Layer;

// Queries and keys are normalised, if they have a norm, and rotated; values are left as they are.
ONCE void turn(const Layer *l, float *heads, const float *cosines, const float *sines, void *out, int64_t at, int is_bf16) {
    const int64_t dim = l->dim, half = dim / 2, turned = l->heads + l->kv_heads, all = l->qkv.outputs / dim;
    for (int64_t head = 0; head < all; head++, heads += dim, at += dim) {
        if (head < turned) {
            if (l->head_norm) norm(heads, 0, l->head_norm + head * dim, l->head_eps, dim, heads, 0);
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t left = half - i;
                const vec a = load(heads, i, 0, left), b = load(heads, i + half, 0, left);
                const vec first = a * load(cosines, i, 0, left) - b * load(sines, i, 0, left);
                const vec second = b * load(cosines, i + half, 0, left) + a * load(sines, i + half, 0, left);
                store(out, at + i, is_bf16, first, left);
                store(out, at + half + i, is_bf16, second, left);
            }
        } else {
            for (int64_t i = 0; i < dim; i += LANES) store(out, at + i, is_bf16, load(heads, i, 0, dim - i), dim - i);
        }
    }
}

// Rows [rows, size] to queries, keys and values [rows, heads + 2 kv_heads, dim], as one of the threads that share them.
// Angles are [rows, dim]; `scratch` has room for CHUNK rows of the layer's input and of its queries, keys and values.
static void share_before_attention(
    const Layer *l, const void *x, int64_t rows, const float *cosines, const float *sines, void *out, float *scratch,
    int is_bf16, int thread, int all) {
    float *normed = scratch, *heads = scratch + CHUNK * l->size;
    const int64_t width = l->qkv.outputs;
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        for (int64_t r = thread; r < count; r += all)
            norm(row_of(x, (first + r) * l->size, is_bf16), is_bf16, l->norm_in, l->eps, l->size,
                 row_of(normed, r * l->size, is_bf16), is_bf16);
#pragma omp barrier
        const Out to = {heads, NULL, 0, 0};
        share(&l->qkv, normed, is_bf16, count, &to, thread, all);
#pragma omp barrier
        for (int64_t r = thread; r < count; r += all)
            turn(l, heads + r * width, cosines + (first + r) * l->dim, sines + (first + r) * l->dim, out,
                 (first + r) * width, is_bf16);
    }
}

void before_attention(
    const Layer *l, const void *x, int64_t rows, const float *cosines, const float *sines, void *out, float *scratch,
    int is_bf16, int threads) {
#pragma omp parallel num_threads(threads)
    share_before_attention(l, x, rows, cosines, sines, out, scratch, is_bf16, omp_get_thread_num(), omp_get_num_threads());
}

// What attention gave [rows, heads x dim] and the layer's input [rows, size] to the layer's output, as one of the threads
// that share them. `scratch` has room for CHUNK rows of twice the layer's size and of one and a half times the outputs
// of gate and up. The output may take the input's place.
static void share_behind_attention(
    const Layer *l, const void *attended, const void *x, int64_t rows, void *y, float *scratch, int is_bf16, int thread,
    int all) {
    const int64_t width = l->down.inputs;
    float *hidden = scratch, *normed = hidden + CHUNK * l->size, *gate_up = normed + CHUNK * l->size;
    float *gated = gate_up + CHUNK * 2 * width;
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        const Out to_hidden = {hidden, row_of(x, first * l->size, is_bf16), 0, is_bf16};
        share(&l->o, row_of(attended, first * l->o.inputs, is_bf16), is_bf16, count, &to_hidden, thread, all);
#pragma omp barrier
        for (int64_t r = thread; r < count; r += all)
            norm(hidden + r * l->size, 0, l->norm_between, l->eps, l->size,
                 row_of(normed, r * l->size, is_bf16), is_bf16);
#pragma omp barrier
        const Out to_gate_up = {gate_up, NULL, 0, 0};
        share(&l->gate_up, normed, is_bf16, count, &to_gate_up, thread, all);
#pragma omp barrier
        const int64_t pieces = (width + LANES - 1) / LANES;
        for (int64_t r = 0; r < count; r++)
            for (int64_t piece = pieces * thread / all; piece < pieces * (thread + 1) / all; piece++) {
                const int64_t i = piece * LANES, left = width - i;
                const vec gate = load(gate_up, r * 2 * width + i, 0, left);
                const vec up = load(gate_up, r * 2 * width + width + i, 0, left);
                store(gated, r * width + i, is_bf16, silu(gate) * up, left);
            }
#pragma omp barrier
        const Out to_y = {row_of(y, first * l->size, is_bf16), hidden, is_bf16, 0};
        share(&l->down, gated, is_bf16, count, &to_y, thread, all);
#pragma omp barrier
    }
}

void behind_attention(
    const Layer *l, const void *attended, const void *x, int64_t rows, void *y, float *scratch, int is_bf16, int threads) {
#pragma omp parallel num_threads(threads)
    share_behind_attention(l, attended, x, rows, y, scratch, is_bf16, omp_get_thread_num(), omp_get_num_threads());
}

// --------------------------------------------------------------------------------------------------------- attention

// One text's new tokens. Their keys and values [kv_heads, slots, dim] stand in its cache behind those of its first
// `length` tokens; distances are in numbers.
typedef struct {
    const void *keys, *values;
    int64_t key_layer, key_head, key_slot, value_layer, value_head, value_slot;
    int64_t length, count;
    const uint8_t *mask;  // [count, count], which new token sees which; NULL where each sees those before it
} Text;

typedef struct {
    const Text *texts;
    const void *queries;  // [tokens of all texts, .., dim], `query_token` numbers from one token to the next
    void *out;            // [tokens of all texts, heads, value_dim]
    int64_t query_token, heads, kv_heads, dim, value_dim;
    float scaling;
    int32_t is_bf16;
} Attention;

// Rows that look at the same keys: some query heads of tokens, all of one KV head.
typedef struct {
    const Attention *a;
    const Text *text;
    int64_t kv_head, first_token, tokens;  // of the text
    int64_t token_in_pass;                 // the text's first one
} Rows;

// What a row has seen so far: its largest score, the sum of weights, and the weighted sum of values. The weight of a
// score is two to the power of what it is below the largest.
typedef struct {
    float largest, total;
} State;

INLINE void transpose(vec *rows) {
#if defined(__AVX512F__)
    // Of two rows, of four, and then of quarters of vectors, which have instructions of their own.
    __m512 two[16], four[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        two[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        two[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        const __m512d a = (__m512d)two[i / 2 * 4 + i % 2], b = (__m512d)two[i / 2 * 4 + i % 2 + 2];
        four[i / 2 * 4 + i % 2 * 2] = (__m512)_mm512_unpacklo_pd(a, b);
        four[i / 2 * 4 + i % 2 * 2 + 1] = (__m512)_mm512_unpackhi_pd(a, b);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 even = _mm512_shuffle_f32x4(four[i], four[4 + i], 0x88), odd = _mm512_shuffle_f32x4(four[i], four[4 + i], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(four[8 + i], four[12 + i], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(four[8 + i], four[12 + i], 0xdd);
        rows[i] = (vec)_mm512_shuffle_f32x4(even, even2, 0x88);
        rows[4 + i] = (vec)_mm512_shuffle_f32x4(odd, odd2, 0x88);
        rows[8 + i] = (vec)_mm512_shuffle_f32x4(even, even2, 0xdd);
        rows[12 + i] = (vec)_mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
    return;
#endif
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2) {
        ivec low, high;
        for (int lane = 0; lane < LANES; lane++) {
            low[lane] = lane & step ? LANES + lane - step : lane;
            high[lane] = lane & step ? LANES + lane : lane + step;
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            if (i & step) continue;
            const vec a = rows[i], b = rows[i + step];
            rows[i] = __builtin_shuffle(a, b, low);
            rows[i + step] = __builtin_shuffle(a, b, high);
        }
    }
}

// How attention reads keys and values: as they are, widened to float32, or in pairs of bfloat16 that the processor
// multiplies: two numbers of a key, and the same number of the values in two neighbouring positions.
typedef enum { FLOAT_CACHE, BF16_CACHE, PAIRED_CACHE } Cache;

INLINE Cache cache_of(const Attention *a) {
#if defined(__AVX512BF16__)
    if (a->is_bf16 && a->dim % 2 == 0) return PAIRED_CACHE;
#endif
    return a->is_bf16 ? BF16_CACHE : FLOAT_CACHE;
}

// Numbers of LANES keys, or pairs of them, to a column of `out` per key; as many as there are lanes, unless `part`.
INLINE void transposed_tile(
    const int part, const Cache cache, const void *from, const int32_t *slots, int64_t slot, int64_t at, int64_t keys,
    int64_t numbers, float *out) {
    vec rows[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) {
        const int64_t here = at + slots[part && key >= keys ? 0 : key] * slot;
        if (part && key >= keys) rows[key] = (vec){0};
        else if (cache == PAIRED_CACHE) rows[key] = load((const uint16_t *)from + here, 0, 0, part ? numbers : LANES);
        else rows[key] = load(from, here, cache == BF16_CACHE, part ? numbers : LANES);
    }
    transpose(rows);
#pragma GCC unroll 16
    for (int n = 0; n < LANES; n++)
        if (!part || n < numbers) memcpy(out + n * BLOCK, &rows[n], sizeof(vec));
}

// The keys in some slots as [dim, BLOCK], or in pairs as [dim / 2, BLOCK]; there are any numbers behind the last one.
INLINE void transposed_block(const Cache cache, const Rows *rows, const int32_t *slots, int64_t count, float *out) {
    const int64_t each = cache == PAIRED_CACHE ? 2 : 1, dim = rows->a->dim / each;
    const int64_t slot = rows->text->key_slot, head = rows->kv_head * rows->text->key_head;
    const void *from = rows->text->keys;
    for (int64_t first = 0; first < BLOCK && first < count; first += LANES)
        for (int64_t i = 0; i < dim; i += LANES) {
            const int64_t keys = count - first, numbers = dim - i, at = head + i * each;
            float *to = out + i * BLOCK + first;
            if (keys >= LANES && numbers >= LANES) transposed_tile(0, cache, from, slots + first, slot, at, keys, numbers, to);
            else transposed_tile(1, cache, from, slots + first, slot, at, keys, numbers, to);
        }
}

static void transposed_keys(const Rows *rows, const int32_t *slots, int64_t count, float *out) {
    switch (cache_of(rows->a)) {
        case FLOAT_CACHE: transposed_block(FLOAT_CACHE, rows, slots, count, out); break;
        case BF16_CACHE: transposed_block(BF16_CACHE, rows, slots, count, out); break;
        default: transposed_block(PAIRED_CACHE, rows, slots, count, out);
    }
}

// scores [count, BLOCK] of queries [count, dim], with rows of SPLIT numbers.
INLINE void single_score_tile(const int count, const float *queries, int64_t dim, const float *keys, float scaling, float *scores) {
    for (int first = 0; first < BLOCK; first += WIDE * LANES) {
        vec sums[TILE * WIDE];
#pragma GCC unroll 24
        for (int i = 0; i < count * WIDE; i++) sums[i] = (vec){0};
        for (int64_t k = 0; k < dim; k++) {
            vec key[WIDE];
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++) key[i] = load(keys, k * BLOCK + first + i * LANES, 0, LANES);
#pragma GCC unroll 6
            for (int r = 0; r < count; r++)
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++) sums[r * WIDE + i] += queries[r * dim + k] * key[i];
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++)
                store(scores, r * SPLIT + first + i * LANES, 0, sums[r * WIDE + i] * scaling, LANES);
    }
}

// Weighted sums [count, value_dim] of the values in some slots, `seen` of them for each row; weights have rows of SPLIT
// numbers. They go on from what stands in `out`, if `go_on`.
INLINE void single_value_tile(
    const int count, const Rows *rows, const int32_t *slots, const int32_t *seen, const float *weights, int go_on,
    float *out) {
    int64_t least = seen[0], most = seen[0];
    for (int r = 1; r < count; r++) {
        least = seen[r] < least ? seen[r] : least;
        most = seen[r] > most ? seen[r] : most;
    }
    const int64_t dim = rows->a->value_dim, slot = rows->text->value_slot;
    const int64_t head = rows->kv_head * rows->text->value_head;
    const int is_bf16 = rows->a->is_bf16;
    for (int64_t first = 0; first < dim; first += WIDE * LANES) {
        vec sums[TILE * WIDE];
        const int64_t left = dim - first;
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++) {
                sums[r * WIDE + i] = (vec){0};
                if (go_on && i * LANES < left)
                    sums[r * WIDE + i] = load(out, r * dim + first + i * LANES, 0, left - i * LANES);
            }
#define OVER_KEYS(number)                                                                         \
    for (int64_t k = 0; k < least; k++) {                                                         \
        const int64_t at = head + slots[k] * slot + first;                                        \
        vec value[WIDE];                                                                          \
        _Pragma("GCC unroll 4") for (int i = 0; i < WIDE; i++) value[i] = number;                 \
        _Pragma("GCC unroll 6") for (int r = 0; r < count; r++)                                   \
            _Pragma("GCC unroll 4") for (int i = 0; i < WIDE; i++)                                \
                sums[r * WIDE + i] += weights[r * SPLIT + k] * value[i];                          \
    }
        if (left >= WIDE * LANES) {
            if (is_bf16) OVER_KEYS(load(rows->text->values, at + i * LANES, 1, LANES))
            else OVER_KEYS(load(rows->text->values, at + i * LANES, 0, LANES))
        } else {
            OVER_KEYS(i * LANES < left ? load(rows->text->values, at + i * LANES, is_bf16, left - i * LANES) : (vec){0})
        }
        // What a row does not see may be no number, which a weight of zero would not hide.
        for (int64_t k = least; k < most; k++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++) {
                if (i * LANES >= left) break;
                const int64_t at = head + slots[k] * slot + first + i * LANES;
                const vec value = load(rows->text->values, at, is_bf16, left - i * LANES);
#pragma GCC unroll 6
                for (int r = 0; r < count; r++)
                    if (k < seen[r]) sums[r * WIDE + i] += weights[r * SPLIT + k] * value;
            }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++)
                if (i * LANES < left) store(out, r * dim + first + i * LANES, 0, sums[r * WIDE + i], left - i * LANES);
    }
}

#if defined(__AVX512BF16__)
_Static_assert(BLOCK == WIDE * LANES, "a block of keys is one tile wide");

// Add products of pairs to `count` rows of WIDE sums; a row's pair stands in every word of a vector.
#define ADD_PAIRS(pair_of_row, pairs)                                                                             \
    _Pragma("GCC unroll 6") for (int r = 0; r < count; r++) {                                                     \
        const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)pair_of_row);                                      \
        _Pragma("GCC unroll 4") for (int i = 0; i < WIDE; i++)                                                    \
            sums[r * WIDE + i] = (vec)_mm512_dpbf16_ps((__m512)sums[r * WIDE + i], pair, (__m512bh)pairs[i]);     \
    }

INLINE uint32_t pair_at(const uint16_t *from) {
    uint32_t pair;
    memcpy(&pair, from, 4);
    return pair;
}

// `single_score_tile` of queries and keys in pairs.
INLINE void paired_score_tile(
    const int count, const uint16_t *queries, int64_t dim, const float *keys, float scaling, float *scores) {
    vec sums[TILE * WIDE];
#pragma GCC unroll 24
    for (int i = 0; i < count * WIDE; i++) sums[i] = (vec){0};
    for (int64_t k = 0; k < dim; k += 2) {
        vec key[WIDE];
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++) key[i] = load(keys, k / 2 * BLOCK + i * LANES, 0, LANES);
        ADD_PAIRS(pair_at(queries + r * dim + k), key)
    }
#pragma GCC unroll 6
    for (int r = 0; r < count; r++)
#pragma GCC unroll 4
        for (int i = 0; i < WIDE; i++) store(scores, r * SPLIT + i * LANES, 0, sums[r * WIDE + i] * scaling, LANES);
}

// Numbers of two values side by side, two vectors of LANES pairs each.
INLINE void paired(__m512i a, __m512i b, vec *out) {
    uvec low, high;
    for (int lane = 0; lane < LANES; lane++) {
        low[lane] = (uint32_t)(lane | (lane + 32) << 16);
        high[lane] = low[lane] + (LANES | LANES << 16);
    }
    out[0] = (vec)_mm512_permutex2var_epi16(a, (__m512i)low, b);
    out[1] = (vec)_mm512_permutex2var_epi16(a, (__m512i)high, b);
}

// `single_value_tile` of weights and values in pairs of neighbouring positions. The last position that a row sees stands alone
// if it is the first of a pair.
INLINE void paired_value_tile(
    const int count, const Rows *rows, const int32_t *slots, const int32_t *seen, const uint16_t *weights, int go_on,
    float *out) {
    int64_t least = seen[0], most = seen[0];
    for (int r = 1; r < count; r++) {
        least = seen[r] < least ? seen[r] : least;
        most = seen[r] > most ? seen[r] : most;
    }
    const int64_t dim = rows->a->value_dim, slot = rows->text->value_slot;
    const uint16_t *values = (const uint16_t *)rows->text->values + rows->kv_head * rows->text->value_head;
    for (int64_t first = 0; first < dim; first += WIDE * LANES) {
        vec sums[TILE * WIDE];
        const int64_t left = dim - first;
        const __mmask32 low = _bzhi_u32(~0u, left < 32 ? left : 32), high = _bzhi_u32(~0u, left < 32 ? 0 : left < 64 ? left - 32 : 32);
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++) {
                sums[r * WIDE + i] = (vec){0};
                if (go_on) sums[r * WIDE + i] = load(out, r * dim + first + i * LANES, 0, i * LANES < left ? left - i * LANES : 0);
            }
        int64_t k = 0;
        for (; k + 1 < least; k += 2) {
            const uint16_t *a = values + slots[k] * slot + first, *b = values + slots[k + 1] * slot + first;
            vec pairs[WIDE];
            paired(_mm512_maskz_loadu_epi16(low, a), _mm512_maskz_loadu_epi16(low, b), pairs);
            paired(_mm512_maskz_loadu_epi16(high, a + 32), _mm512_maskz_loadu_epi16(high, b + 32), pairs + 2);
            ADD_PAIRS(pair_at(weights + r * 2 * SPLIT + k), pairs)
        }
        // What a row does not see may be no number, which a weight of zero would not hide.
        for (; k < most; k += 2) {
            const uint16_t *a = values + slots[k] * slot + first;
            const uint16_t *b = k + 1 < most ? values + slots[k + 1] * slot + first : a;
#pragma GCC unroll 6
            for (int r = 0; r < count; r++) {
                if (k >= seen[r]) continue;
                const uint32_t both = k + 1 < seen[r] ? ~0u : 0;
                vec pairs[WIDE];
                paired(_mm512_maskz_loadu_epi16(low, a), _mm512_maskz_loadu_epi16(low & both, b), pairs);
                paired(_mm512_maskz_loadu_epi16(high, a + 32), _mm512_maskz_loadu_epi16(high & both, b + 32), pairs + 2);
                const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)pair_at(weights + r * 2 * SPLIT + k));
#pragma GCC unroll 4
                for (int i = 0; i < WIDE; i++)
                    sums[r * WIDE + i] = (vec)_mm512_dpbf16_ps((__m512)sums[r * WIDE + i], pair, (__m512bh)pairs[i]);
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < count; r++)
#pragma GCC unroll 4
            for (int i = 0; i < WIDE; i++)
                if (i * LANES < left) store(out, r * dim + first + i * LANES, 0, sums[r * WIDE + i], left - i * LANES);
    }
}
#endif

// A function for each number of rows: inlined together they would not keep their sums in registers.
#define FOR_ROWS(N, tile, cached)                                                                                        \
    ONCE void tile##_scores_of_##N(const cached *queries, int64_t dim, const float *keys, float scaling, float *scores) { \
        tile##_score_tile(N, queries, dim, keys, scaling, scores);                                                       \
    }                                                                                                                    \
    ONCE void tile##_values_of_##N(const Rows *rows, const int32_t *slots, const int32_t *seen, const cached *weights,   \
                                   int go_on, float *out) {                                                              \
        tile##_value_tile(N, rows, slots, seen, weights, go_on, out);                                                    \
    }
#define FOR_ALL_ROWS(tile, cached)                                                  \
    FOR_ROWS(1, tile, cached) FOR_ROWS(2, tile, cached) FOR_ROWS(3, tile, cached)   \
    FOR_ROWS(4, tile, cached) FOR_ROWS(5, tile, cached) FOR_ROWS(6, tile, cached)
FOR_ALL_ROWS(single, float)
#if defined(__AVX512BF16__)
FOR_ALL_ROWS(paired, uint16_t)
#endif

#define BY_COUNT(count, call, ...)          \
    switch (count) {                        \
        case 1: call##1(__VA_ARGS__); break; \
        case 2: call##2(__VA_ARGS__); break; \
        case 3: call##3(__VA_ARGS__); break; \
        case 4: call##4(__VA_ARGS__); break; \
        case 5: call##5(__VA_ARGS__); break; \
        default: call##6(__VA_ARGS__);       \
    }

// Of up to TILE of `count` queries, in the form in which `gather_queries` leaves them.
static void scores_of(const Attention *a, int64_t count, const void *queries, const float *keys, float scaling, float *scores) {
#if defined(__AVX512BF16__)
    if (cache_of(a) == PAIRED_CACHE) {
        BY_COUNT(count, paired_scores_of_, queries, a->dim, keys, scaling, scores)
        return;
    }
#endif
    BY_COUNT(count, single_scores_of_, queries, a->dim, keys, scaling, scores)
}

// Of up to TILE of `count` rows, whose weights stand from number `first` on.
static void values_of(
    const Rows *rows, int64_t count, const int32_t *slots, const int32_t *seen, const float *weights, int64_t first,
    int go_on, float *out) {
#if defined(__AVX512BF16__)
    if (cache_of(rows->a) == PAIRED_CACHE) {
        BY_COUNT(count, paired_values_of_, rows, slots, seen, (const uint16_t *)weights + first, go_on, out)
        return;
    }
#endif
    BY_COUNT(count, single_values_of_, rows, slots, seen, weights + first, go_on, out)
}

// Fetch the vectors in some neighbouring slots, of `dim` numbers each, to a core's cache.
INLINE void prefetch(const Attention *a, const void *from, int64_t head, int64_t slot, int64_t first, int64_t count, int64_t dim) {
    const int64_t size = a->is_bf16 ? 2 : 4, side_by_side = slot == dim;
    const int64_t pieces = side_by_side ? 1 : count, bytes = (side_by_side ? count : 1) * dim * size;
    const char *here = (const char *)from + (head + first * slot) * size;
    for (int64_t piece = 0; piece < pieces; piece++, here += slot * size)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(here + i);
}

// The keys of a split that some rows look at, by position: those in `slots` are `common` to all of them, and those in
// `own`, SPLIT slots for each token, stand behind these on the way to that token. A row sees the first `seen` of both.
// An even number is common where there are own ones, so that the same positions make a pair in every pass.
typedef struct {
    int32_t slots[SPLIT], own[FEW * SPLIT], seen[FEW];
    int64_t common;
} Keys;

// Turn the scores of the keys that a row sees, SPLIT at most, to their weights; to bfloat16 in their place, if `paired`.
INLINE State weigh(int paired __attribute__((unused)), float *scores, int64_t seen) {
    enum { TWO = 2 * LANES };
    const int64_t end = (seen + TWO - 1) / TWO * TWO;
    if (!end) return (State){-INFINITY, 0};
    for (int64_t n = seen; n < end; n++) scores[n] = -INFINITY;
    vec top = splat(-INFINITY), total = {0};
    for (int64_t n = 0; n < end; n += LANES) top = larger(load(scores, n, 0, LANES), top);
    const float largest = largest_of(top);
    for (int64_t n = 0; n < end; n += TWO) {
        const vec first = power_of_two(load(scores, n, 0, LANES) - largest);
        const vec second = power_of_two(load(scores, n + LANES, 0, LANES) - largest);
#if defined(__AVX512BF16__)
        if (paired) {
            const __m512bh both = _mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
            memcpy((uint16_t *)scores + n, &both, sizeof both);
            total = (vec)_mm512_dpbf16_ps((__m512)total, both, (__m512bh)_mm512_set1_epi16(0x3f80));  // ones
            continue;
        }
#endif
        store(scores, n, 0, first, LANES);
        store(scores, n + LANES, 0, second, LANES);
        total = total + first + second;
    }
    return (State){largest, sum(total)};
}

// Rows over the keys of a split. Fills states and sums of values.
ONCE void over_split(
    const Rows *rows, const void *queries, int64_t count, const Keys *k, State *states, float *sums) {
    const Attention *a = rows->a;
    const int paired = cache_of(a) == PAIRED_CACHE;
    const int64_t per_token = a->heads / a->kv_heads;
    const int32_t *slots = k->slots;
    const float scaling = a->scaling * 1.44269504f;  // weights are powers of two
    float scores[FEW * SPLIT] __attribute__((aligned(64)));
    float keys[MOST_DIM * BLOCK] __attribute__((aligned(64)));
    for (int64_t first = 0; first < k->common; first += BLOCK) {
        const int64_t last = first + BLOCK < k->common ? first + BLOCK : k->common;
        prefetch(a, rows->text->values, rows->kv_head * rows->text->value_head, rows->text->value_slot, slots[first],
                 last - first, a->value_dim);
        prefetch(a, rows->text->keys, rows->kv_head * rows->text->key_head, rows->text->key_slot, slots[first] + BLOCK,
                 last + BLOCK < k->common ? BLOCK : k->common - last, a->dim);
        transposed_keys(rows, slots + first, last - first, keys);
        for (int64_t r = 0; r < count; r += TILE)
            scores_of(a, count - r, row_of(queries, r * a->dim, paired), keys, scaling, scores + r * SPLIT + first);
    }
    for (int64_t r = 0; r < count; r += per_token)
        for (int64_t first = k->common; first < k->seen[r]; first += BLOCK) {
            const int64_t extra = k->seen[r] - first;
            float few[TILE * SPLIT];
            transposed_keys(rows, k->own + r / per_token * SPLIT + first - k->common, extra, keys);
            for (int64_t h = r; h < r + per_token; h += TILE) {
                scores_of(a, r + per_token - h, row_of(queries, h * a->dim, paired), keys, scaling, few);
                for (int64_t n = 0; n < TILE && h + n < r + per_token; n++)
                    memcpy(scores + (h + n) * SPLIT + first, few + n * SPLIT, (extra < BLOCK ? extra : BLOCK) * sizeof(float));
            }
        }
    for (int64_t r = 0; r < count; r++) states[r] = weigh(paired, scores + r * SPLIT, k->seen[r]);
    int32_t seen[FEW];
    for (int64_t r = 0; r < count; r++) seen[r] = k->seen[r] < k->common ? k->seen[r] : (int32_t)k->common;
    for (int64_t r = 0; r < count; r += TILE)
        values_of(rows, count - r, slots, seen + r, scores + r * SPLIT, 0, 0, sums + r * a->value_dim);
    for (int64_t r = 0; r < count; r++) seen[r] = k->seen[r] - seen[r];
    for (int64_t r = 0; r < count; r += per_token)
        for (int64_t h = r; k->seen[r] > k->common && h < r + per_token; h += TILE)
            values_of(rows, r + per_token - h, k->own + r / per_token * SPLIT, seen + h, scores + h * SPLIT, k->common, 1,
                      sums + h * a->value_dim);
}

// Tokens over the keys of a split from position `start` on. Rows are ordered by token; those of tokens before the split
// are left out.
static void attend_split(const Rows *rows, const void *queries, int64_t start, State *states, float *sums) {
    const Text *t = rows->text;
    const int64_t per_token = rows->a->heads / rows->a->kv_heads, dim = rows->a->dim, value_dim = rows->a->value_dim;
    const int64_t text = t->length - start < 0 ? 0 : t->length - start < SPLIT ? t->length - start : SPLIT;
    Keys keys;
    int64_t first = 0;
    if (t->mask) {
        keys.common = text & ~1;
    } else {
        // Each sees what is before it.
        if (start - t->length > rows->first_token) first = start - t->length - rows->first_token;
        if (first >= rows->tokens) return;
        const int64_t all = t->length + rows->first_token + rows->tokens - start;
        keys.common = all < SPLIT ? all : SPLIT;
    }
    for (int64_t n = 0; n < keys.common; n++) keys.slots[n] = (int32_t)(start + n);
    for (int64_t token = first; token < rows->tokens; token++) {
        int64_t count = t->length + rows->first_token + token + 1 - start;
        if (t->mask) {
            const uint8_t *sees = t->mask + (rows->first_token + token) * t->count;
            int64_t position = t->length;
            count = keys.common;
            if (count < text) keys.own[(token - first) * SPLIT + count++ - keys.common] = (int32_t)(start + text - 1);
            for (int64_t node = 0; node < t->count && count < SPLIT; node++)
                if (sees[node] && position++ >= start)
                    keys.own[(token - first) * SPLIT + count++ - keys.common] = (int32_t)(t->length + node);
        }
        for (int64_t h = 0; h < per_token; h++)
            keys.seen[(token - first) * per_token + h] = (int32_t)(count < SPLIT ? count : SPLIT);
    }
    const int64_t skipped = first * per_token;
    over_split(rows, row_of(queries, skipped * dim, cache_of(rows->a) == PAIRED_CACHE), (rows->tokens - first) * per_token, &keys, states + skipped,
               sums + skipped * value_dim);
}

// Add what a row saw in a later split.
ONCE void merge(State *to, float *sums, State other, const float *others, int64_t dim) {
    if (other.total == 0) return;  // it saw nothing there
    const float largest = other.largest > to->largest ? other.largest : to->largest;
    const float kept = power_of_two(splat(to->largest - largest))[0], added = power_of_two(splat(other.largest - largest))[0];
    to->largest = largest;
    to->total = to->total * kept + other.total * added;
    for (int64_t i = 0; i < dim; i += LANES)
        store(sums, i, 0, load(sums, i, 0, dim - i) * kept + load(others, i, 0, dim - i) * added, dim - i);
}

// Queries of rows side by side, as float32, or as they are for pairs.
static void gather_queries(const Rows *rows, void *queries) {
    const Attention *a = rows->a;
    const int paired = cache_of(a) == PAIRED_CACHE;
    const int64_t per_token = a->heads / a->kv_heads;
    for (int64_t token = 0; token < rows->tokens; token++)
        for (int64_t h = 0; h < per_token; h++) {
            const int64_t at = (rows->token_in_pass + rows->first_token + token) * a->query_token +
                               (rows->kv_head * per_token + h) * a->dim;
            const int64_t to = (token * per_token + h) * a->dim;
            for (int64_t i = 0; i < a->dim; i += LANES)
                store(queries, to + i, paired, load(a->queries, at + i, a->is_bf16, a->dim - i), a->dim - i);
        }
}

static void write_outputs(const Rows *rows, const State *states, const float *sums) {
    const Attention *a = rows->a;
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    for (int64_t token = 0; token < rows->tokens; token++)
        for (int64_t h = 0; h < per_token; h++) {
            const int64_t row = token * per_token + h;
            const int64_t at = ((rows->token_in_pass + rows->first_token + token) * a->heads + rows->kv_head * per_token + h) * dim;
            for (int64_t i = 0; i < dim; i += LANES)
                store(a->out, at + i, a->is_bf16, load(sums, row * dim + i, 0, dim - i) / states[row].total, dim - i);
        }
}

// How the work on a text is cut: into tiles of tokens for each KV head, and where these are few, into splits, too.
typedef struct {
    int64_t tile, tiles, splits, units, rows;  // tokens of a tile; rows: of the text's partial results per split
    int64_t first_unit, first_token;
    int by_split;
    State *states;
    float *sums;
} Work;

// How the work on all texts is cut, and the memory for partial results.
typedef struct {
    Work *work;
    int64_t count, units;
    State *states;
    float *sums;
} Plan;

static void drop(Plan *plan) { free(plan->work), free(plan->states), free(plan->sums); }

// Returns 0, or 1 where there was no memory.
static int make_plan(const Attention *a, int64_t count, int threads, Plan *plan) {
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    int64_t tokens = 0, partial = 0;
    *plan = (Plan){.work = malloc(count * sizeof(Work)), .count = count};
    if (!plan->work) return 1;
    for (int64_t n = 0; n < count; n++) {
        const Text *t = &a->texts[n];
        Work *w = &plan->work[n];
        w->tile = FEW / per_token < 1 ? 1 : FEW / per_token < t->count || !t->count ? FEW / per_token : t->count;
        w->tiles = (t->count + w->tile - 1) / w->tile;
        w->splits = (t->length + t->count + SPLIT - 1) / SPLIT;
        w->rows = t->count * a->heads;
        w->by_split = w->splits > 1 && w->tiles * a->kv_heads < 4 * threads &&
                      (partial + w->splits * w->rows) * dim <= MOST_PARTIAL;
        w->first_unit = plan->units, w->first_token = tokens;
        w->units = a->kv_heads * w->tiles * (w->by_split ? w->splits : 1);
        plan->units += w->units, tokens += t->count;
        if (w->by_split) partial += w->splits * w->rows;
    }
    if (!partial) return 0;
    plan->sums = malloc(partial * dim * sizeof(float)), plan->states = malloc(partial * sizeof(State));
    if (!plan->sums || !plan->states) {
        drop(plan);
        return 1;
    }
    int64_t at = 0;
    for (int64_t n = 0; n < count; n++) {
        Work *w = &plan->work[n];
        w->states = plan->states + at, w->sums = plan->sums + at * dim;
        if (w->by_split) at += w->splits * w->rows;
    }
    return 0;
}

// Attention as one of the threads that share it; all of them have finished only behind the next barrier.
static void share_attention(const Attention *a, const Plan *plan) {
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    float queries[FEW * MOST_DIM] __attribute__((aligned(64)));
    float own[FEW * MOST_DIM], others[FEW * MOST_DIM];
    State own_states[FEW], other_states[FEW];
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < plan->units; unit++) {
        int64_t n = 0;
        while (n + 1 < plan->count && plan->work[n + 1].first_unit <= unit) n++;
        const Work *w = &plan->work[n];
        const int64_t place = unit - w->first_unit, splits = w->by_split ? w->splits : 1;
        const int64_t split = place % splits, tile = place / splits % w->tiles;
        Rows rows = {a, &a->texts[n], place / splits / w->tiles, tile * w->tile, w->tile, w->first_token};
        if (rows.first_token + rows.tokens > rows.text->count) rows.tokens = rows.text->count - rows.first_token;
        const int64_t all = rows.tokens * per_token;
        gather_queries(&rows, queries);
        if (w->by_split) {
            // Partial results stand by split, KV head and token.
            const int64_t at = split * w->rows + rows.kv_head * rows.text->count * per_token + rows.first_token * per_token;
            for (int64_t r = 0; r < all; r++) w->states[at + r] = (State){-INFINITY, 0};
            attend_split(&rows, queries, split * SPLIT, w->states + at, w->sums + at * dim);
            continue;
        }
        const int64_t end = rows.text->length + (rows.text->mask ? rows.text->count : rows.first_token + rows.tokens);
        for (int64_t start = 0; start < end; start += SPLIT) {
            State *to = start ? other_states : own_states;
            for (int64_t r = 0; r < all; r++) to[r] = (State){-INFINITY, 0};
            attend_split(&rows, queries, start, to, start ? others : own);
            if (start)
                for (int64_t r = 0; r < all; r++) merge(&own_states[r], own + r * dim, other_states[r], others + r * dim, dim);
        }
        write_outputs(&rows, own_states, own);
    }
    for (int64_t n = 0; n < plan->count; n++) {
        const Work *w = &plan->work[n];
        if (!w->by_split) continue;
#pragma omp for schedule(static) nowait
        for (int64_t place = 0; place < a->kv_heads * a->texts[n].count; place++) {
            const int64_t kv_head = place / a->texts[n].count, token = place % a->texts[n].count;
            const int64_t at = (kv_head * a->texts[n].count + token) * per_token;
            for (int64_t split = 1; split < w->splits; split++)
                for (int64_t r = at; r < at + per_token; r++) {
                    const int64_t other = split * w->rows + r;
                    merge(&w->states[r], w->sums + r * dim, w->states[other], w->sums + other * dim, dim);
                }
            const Rows rows = {a, &a->texts[n], kv_head, token, 1, w->first_token};
            write_outputs(&rows, w->states + at, w->sums + at * dim);
        }
    }
}

// Returns 0, or 1 where there was no memory.
int attend(const Attention *a, int64_t count, int threads) {
    Plan plan;
    if (make_plan(a, count, threads, &plan)) return 1;
#pragma omp parallel num_threads(threads)
    share_attention(a, &plan);
    drop(&plan);
    return 0;
}

// ------------------------------------------------------------------------------------------------------------ passes

// Write the keys and values of the new tokens, which stand behind their queries, to the texts' caches.
static void write_pairs(const Attention *a, int64_t count, int thread, int threads) {
    const int size = a->is_bf16 ? 2 : 4;
    for (int64_t n = 0, row = 0; n < count; n++) {
        const Text *t = &a->texts[n];
        for (int64_t token = 0; token < t->count; token++, row++) {
            if (row % threads != thread) continue;
            const char *pairs = (const char *)a->queries + (row * a->query_token + a->heads * a->dim) * size;
            for (int64_t g = 0; g < a->kv_heads; g++) {
                const int64_t key = g * t->key_head + (t->length + token) * t->key_slot;
                const int64_t value = g * t->value_head + (t->length + token) * t->value_slot;
                memcpy((char *)t->keys + key * size, pairs + g * a->dim * size, a->dim * size);
                memcpy((char *)t->values + value * size, pairs + (a->kv_heads + g) * a->dim * size, a->dim * size);
            }
        }
    }
}

// Some layers of a pass over the new tokens of several texts.
typedef struct {
    const Layer *const *layers;
    int64_t first, last;  // of the model's layers, those to run
    int64_t rows;         // tokens of all texts
    void *states;         // [rows, size], which the layers change
    void *heads;          // [rows, heads + 2 kv_heads, dim] of one layer, `heads_layer` numbers behind those of the last
    int64_t heads_layer;
    const float *cosines, *sines;  // [rows, dim]
    float *scratch;
} Pass;

// `a` describes the texts of layer 0. Returns 0, or 1 where there was no memory.
int run_layers(const Pass *p, const Attention *a, int64_t count, int threads) {
    Plan plan;
    Text *texts = malloc(count * sizeof(Text));
    if (!texts) return 1;
    if (make_plan(a, count, threads, &plan)) {
        free(texts);
        return 1;
    }
    Attention own = *a;
    own.texts = texts;
    const int is_bf16 = a->is_bf16;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t number = p->first; number < p->last; number++) {
            const Layer *l = p->layers[number];
            void *heads = row_of(p->heads, (number - p->first) * p->heads_layer, is_bf16);
            share_before_attention(l, p->states, p->rows, p->cosines, p->sines, heads, p->scratch, is_bf16, thread, all);
#pragma omp single
            {
                own.queries = heads;
                for (int64_t n = 0; n < count; n++) {
                    texts[n] = a->texts[n];
                    texts[n].keys = row_of(texts[n].keys, number * texts[n].key_layer, is_bf16);
                    texts[n].values = row_of(texts[n].values, number * texts[n].value_layer, is_bf16);
                }
            }
            write_pairs(&own, count, thread, all);
#pragma omp barrier
            share_attention(&own, &plan);
#pragma omp barrier
            share_behind_attention(l, own.out, p->states, p->rows, p->states, p->scratch, is_bf16, thread, all);
        }
    }
    drop(&plan), free(texts);
    return 0;
}
