// Attention of new tokens over their texts: each over the keys that it sees, in the order of their positions.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "attention.h"

enum {
    SPLIT = KEYS_TOGETHER, // keys whose weights are summed together,
    BLOCK = 64,            // keys that are transposed together,
    WIDENED = 128          // and values that are widened together, of as many numbers as a register tile has
};
enum { TILE = 6 };               // rows that share a register tile
enum { FEW = QUERY_HEADS_HELD }; // rows whose scores a core holds at a time
enum { MOST_PARTIAL = 1 << 24 }; // numbers of attention over splits that wait to be merged

// Rows that look at the same keys: some query heads of tokens, all of one KV head.
typedef struct {
    const Attention *a;
    const SequenceKV *text;
    int64_t kv_head, first_token, tokens; // of the text
    int64_t token_in_pass;                // the text's first one
} Rows;

// How attention reads keys and values: as they are, widened to float32, or in pairs of bfloat16 that the processor
// multiplies: two numbers of a key, and the same number of the values in two neighbouring positions. Codes of a quantised
// cache are read in such pairs, too, as whole numbers of 16 bits. Queries and weights are rounded to such numbers, so that
// all sums are exact: the largest, 512 x 32,767 x 127, has 31 bits.
typedef enum { FLOAT_CACHE, BF16_CACHE, PAIRED_CACHE, CODED_CACHE } Cache;

enum { LARGEST_WORD = 32767 };
_Static_assert(
    (int64_t)LARGEST_WORD * 127 * MOST_CODED_DIM < INT32_MAX && MOST_CODED_DIM >= KEYS_TOGETHER, "sums have 31 bits");

INLINE Cache cache_of(const Rows *rows) {
    const Attention *a = rows->a;
    if (rows->text->key_scales) return CODED_CACHE;
    if (BF16_PAIRS_MULTIPLY && a->is_bf16 && a->dim % 2 == 0) return PAIRED_CACHE;
    return a->is_bf16 ? BF16_CACHE : FLOAT_CACHE;
}

INLINE int in_pairs(Cache cache) { return cache == PAIRED_CACHE || cache == CODED_CACHE; }

// Numbers of LANES keys, or pairs of them, to a column of `out` per key; as many as there are lanes, unless `part`.
INLINE void transposed_tile(const int part, const Cache cache, const void *from, const int32_t *slots, int64_t slot,
    int64_t at, int64_t keys, int64_t numbers, float *out) {
    vec rows[LANES];
    UNROLL(16)
    for (int key = 0; key < LANES; key++) {
        const int64_t here = at + slots[part && key >= keys ? 0 : key] * slot;
        if (part && key >= keys) rows[key] = (vec){0};
        else if (cache == PAIRED_CACHE) rows[key] = load((const uint16_t *)from + here, 0, 0, part ? numbers : LANES);
        else rows[key] = load(from, here, cache == BF16_CACHE, part ? numbers : LANES);
    }
    transpose(rows);
    UNROLL(16)
    for (int n = 0; n < LANES; n++)
        if (!part || n < numbers) memcpy(out + n * BLOCK, &rows[n], sizeof(vec));
}

// The same of 2 LANES numbers that are widened, which takes half as many exchanges as one after another.
INLINE void transposed_words(const uint16_t *from, const int32_t *slots, int64_t slot, int64_t at, float *out) {
    vec rows[LANES];
    UNROLL(16)
    for (int key = 0; key < LANES; key++) rows[key] = load(from + at + slots[key] * slot, 0, 0, LANES);
    transpose(rows);
    UNROLL(16)
    for (int n = 0; n < LANES; n++) {
        const uvec lower = (uvec)rows[n] << 16, upper = (uvec)rows[n] & 0xffff0000u;
        memcpy(out + 2 * n * BLOCK, &lower, sizeof lower);
        memcpy(out + (2 * n + 1) * BLOCK, &upper, sizeof upper);
    }
}

// Fours of codes of LANES keys, or of the `keys` and `fours` that there are, in pairs to two columns each.
INLINE void transposed_codes(
    const int part, const int8_t *from, const int32_t *slots, int64_t slot, int64_t keys, int64_t fours, float *out) {
    vec rows[LANES];
    UNROLL(16)
    for (int key = 0; key < LANES; key++)
        rows[key] = part && key >= keys ? (vec){0} : load(from + slots[key] * slot, 0, 0, part ? fours : LANES);
    transpose(rows);
    UNROLL(16)
    for (int n = 0; n < LANES; n++) {
        if (part && n >= fours) continue;
        store(out, 2 * n * BLOCK, 0, (vec)odd_codes((uvec)rows[n]), LANES);
        store(out, (2 * n + 1) * BLOCK, 0, (vec)even_codes((uvec)rows[n]), LANES);
    }
}

// The keys of codes in some slots as [dim / 2, BLOCK]: of each four, the first and the third are a pair.
INLINE void coded_block(const Rows *rows, const int32_t *slots, int64_t count, float *out) {
    const int64_t slot = rows->text->key_slot, fours = rows->a->dim / 4;
    const int8_t *from = (const int8_t *)rows->text->keys + rows->kv_head * rows->text->key_head;
    for (int64_t first = 0; first < BLOCK && first < count; first += LANES)
        for (int64_t i = 0; i < fours; i += LANES) {
            float *to = out + 2 * i * BLOCK + first;
            const int64_t keys = count - first, left = fours - i;
            if (keys >= LANES && left >= LANES)
                transposed_codes(0, from + 4 * i, slots + first, slot, LANES, LANES, to);
            else transposed_codes(1, from + 4 * i, slots + first, slot, keys, left, to);
        }
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
            if (cache == BF16_CACHE && keys >= LANES && numbers >= 2 * LANES) {
                transposed_words(from, slots + first, slot, at, to);
                i += LANES;
                continue;
            }
            if (keys >= LANES && numbers >= LANES)
                transposed_tile(0, cache, from, slots + first, slot, at, keys, numbers, to);
            else transposed_tile(1, cache, from, slots + first, slot, at, keys, numbers, to);
        }
}

static void transposed_keys(const Rows *rows, const int32_t *slots, int64_t count, float *out) {
    switch (cache_of(rows)) {
        case FLOAT_CACHE: transposed_block(FLOAT_CACHE, rows, slots, count, out); break;
        case BF16_CACHE: transposed_block(BF16_CACHE, rows, slots, count, out); break;
        case PAIRED_CACHE: transposed_block(PAIRED_CACHE, rows, slots, count, out); break;
        default: coded_block(rows, slots, count, out);
    }
}

// What a core's cache should hold soon: keys and values of a block, each side by side, `step` bytes with each number of
// all keys of a tile. One after another while others are multiplied: the processor waits where too many are asked for at
// once.
typedef struct {
    const char *keys, *values;
    int64_t step;
} Ahead;

// Those of step `n`; `nearest` to the cache that is nearest to the core, where float32 takes a tenth less time.
INLINE void fetch(const Ahead *ahead, int64_t n, const int nearest) {
    enum { LINE = 64 };
    UNROLL(4)
    for (int64_t at = (n * ahead->step + LINE - 1) / LINE * LINE; at < (n + 1) * ahead->step; at += LINE) {
        if (nearest) __builtin_prefetch(ahead->keys + at, 0, 3), __builtin_prefetch(ahead->values + at, 0, 3);
        else __builtin_prefetch(ahead->keys + at, 0, 2), __builtin_prefetch(ahead->values + at, 0, 2);
    }
}

// scores [count, width] of queries [count, dim], with rows of SPLIT numbers.
INLINE void single_score_tile(const int count, const float *queries, int64_t dim, const float *keys, float scaling,
    const Ahead *ahead, int width, float *scores) {
    for (int first = 0; first < width; first += WIDE * LANES) {
        vec sums[TILE * WIDE];
        UNROLL(24)
        for (int i = 0; i < count * WIDE; i++) sums[i] = (vec){0};
        for (int64_t k = 0; k < dim; k++) {
            vec key[WIDE];
            if (ahead) fetch(ahead, first / (WIDE * LANES) * dim + k, 1);
            UNROLL(4)
            for (int i = 0; i < WIDE; i++) key[i] = load(keys, k * BLOCK + first + i * LANES, 0, LANES);
            UNROLL(6)
            for (int r = 0; r < count; r++) {
                UNROLL(4)
                for (int i = 0; i < WIDE; i++)
                    sums[r * WIDE + i] = fused(splat(queries[r * dim + k]), key[i], sums[r * WIDE + i]);
            }
        }
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            UNROLL(4)
            for (int i = 0; i < WIDE; i++)
                store(scores, r * SPLIT + first + i * LANES, 0, sums[r * WIDE + i] * scaling, LANES);
        }
    }
}

// Of the numbers of keys that rows see.
INLINE void fewest_and_most(const int count, const int32_t *seen, int64_t *least, int64_t *most) {
    *least = *most = seen[0];
    for (int r = 1; r < count; r++) {
        *least = seen[r] < *least ? seen[r] : *least;
        *most = seen[r] > *most ? seen[r] : *most;
    }
}

// A tile's numbers of the values in some slots from number `first` on, widened, as [count, WIDE x LANES]; zeros behind those
// that there are.
INLINE void widened_tile(
    const Rows *rows, const int32_t *slots, int64_t count, int64_t first, const int is_bf16, float *out) {
    const int64_t slot = rows->text->value_slot, left = rows->a->value_dim - first;
    const int64_t head = rows->kv_head * rows->text->value_head + first;
    for (int64_t k = 0; k < count; k++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) {
            const int64_t numbers = left - i * LANES, at = head + slots[k] * slot + i * LANES;
            vec widened = {0};
            if (numbers >= LANES) widened = load(rows->text->values, at, is_bf16, LANES);
            else if (numbers > 0) widened = load(rows->text->values, at, is_bf16, numbers);
            store(out, (k * WIDE + i) * LANES, 0, widened, LANES);
        }
    }
}

// Add to up to a tile's numbers [count, `left`] of rows the weighted sums of values in float32, `stride` numbers from one to
// the next, `seen` of them for each row; `out` has rows of `dim` numbers, weights have rows of SPLIT. They begin with zeros
// unless `go_on`.
INLINE void single_value_tile(const int count, const float *values, int64_t stride, int64_t dim, int64_t left,
    const int32_t *seen, const float *weights, int go_on, float *out) {
    int64_t least, most, k = 0;
    fewest_and_most(count, seen, &least, &most);
    vec sums[TILE * WIDE];
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) {
            sums[r * WIDE + i] = (vec){0};
            if (go_on && i * LANES < left) sums[r * WIDE + i] = load(out, r * dim + i * LANES, 0, left - i * LANES);
        }
    }
    for (; k < least; k++) {
        vec value[WIDE];
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) value[i] = load(values, k * stride + i * LANES, 0, LANES);
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            UNROLL(4)
            for (int i = 0; i < WIDE; i++)
                sums[r * WIDE + i] = fused(splat(weights[r * SPLIT + k]), value[i], sums[r * WIDE + i]);
        }
    }
    // What a row does not see may be no number, which a weight of zero would not hide.
    for (; k < most; k++) {
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            if (k >= seen[r]) continue;
            const vec weight = splat(weights[r * SPLIT + k]);
            UNROLL(4)
            for (int i = 0; i < WIDE; i++)
                sums[r * WIDE + i] = fused(weight, load(values, k * stride + i * LANES, 0, LANES), sums[r * WIDE + i]);
        }
    }
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++)
            if (i * LANES < left) store(out, r * dim + i * LANES, 0, sums[r * WIDE + i], left - i * LANES);
    }
}

// Add products of pairs to `count` rows of WIDE sums; a row's pair stands in every word of a vector.
INLINE void add_pairs(const int count, const uint16_t *of_rows, int64_t stride, const uvec *pairs, vec *sums) {
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        uint32_t pair;
        memcpy(&pair, of_rows + r * stride, 4);
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) sums[r * WIDE + i] = dot_pairs(sums[r * WIDE + i], (uvec){0} + pair, pairs[i]);
    }
}

// `single_score_tile` of queries and keys in pairs.
INLINE void paired_score_tile(const int count, const uint16_t *queries, int64_t dim, const float *keys, float scaling,
    const Ahead *ahead, float *scores) {
    _Static_assert(!BF16_PAIRS_MULTIPLY || BLOCK == WIDE * LANES, "a block of keys is one tile wide");
    vec sums[TILE * WIDE];
    UNROLL(24)
    for (int i = 0; i < count * WIDE; i++) sums[i] = (vec){0};
    for (int64_t k = 0; k < dim; k += 2) {
        uvec key[WIDE];
        if (ahead) fetch(ahead, k / 2, 0);
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) key[i] = (uvec)load(keys, k / 2 * BLOCK + i * LANES, 0, LANES);
        add_pairs(count, queries + k, dim, key, sums);
    }
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) store(scores, r * SPLIT + i * LANES, 0, sums[r * WIDE + i] * scaling, LANES);
    }
}

// `single_value_tile` of weights and values in pairs of neighbouring positions. The last position that a row sees stands
// alone if it is the first of a pair.
INLINE void paired_value_tile(const int count, const Rows *rows, const int32_t *slots, const int32_t *seen,
    const uint16_t *weights, int go_on, float *out) {
    int64_t least, most;
    fewest_and_most(count, seen, &least, &most);
    const int64_t dim = rows->a->value_dim, slot = rows->text->value_slot;
    const uint16_t *values = (const uint16_t *)rows->text->values + rows->kv_head * rows->text->value_head;
    for (int64_t first = 0; first < dim; first += WIDE * LANES) {
        vec sums[TILE * WIDE];
        uvec pairs[WIDE];
        const int64_t left = dim - first;
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            UNROLL(4)
            for (int i = 0; i < WIDE; i++) {
                sums[r * WIDE + i] = (vec){0};
                if (go_on && i * LANES < left)
                    sums[r * WIDE + i] = load(out, r * dim + first + i * LANES, 0, left - i * LANES);
            }
        }
        int64_t k = 0;
        for (; k + 1 < least; k += 2) {
            pairs_of(values + slots[k] * slot + first, values + slots[k + 1] * slot + first, left, left, pairs);
            add_pairs(count, weights + k, 2 * SPLIT, pairs, sums);
        }
        // What a row does not see may be no number, which a weight of zero would not hide.
        for (; k < most; k += 2) {
            const uint16_t *a = values + slots[k] * slot + first;
            const uint16_t *b = k + 1 < most ? values + slots[k + 1] * slot + first : a;
            UNROLL(6)
            for (int r = 0; r < count; r++) {
                if (k >= seen[r]) continue;
                pairs_of(a, b, left, k + 1 < seen[r] ? left : 0, pairs);
                add_pairs(1, weights + r * 2 * SPLIT + k, 0, pairs, sums + r * WIDE);
            }
        }
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            UNROLL(4)
            for (int i = 0; i < WIDE; i++)
                if (i * LANES < left) store(out, r * dim + first + i * LANES, 0, sums[r * WIDE + i], left - i * LANES);
        }
    }
}

// The two numbers from `pair` on, in every word.
INLINE uvec every_word(const void *pair) {
    uint32_t word;
    memcpy(&word, pair, 4);
    return (uvec){0} + word;
}

// `single_score_tile` of queries and codes in pairs. A sum is multiplied by its row's factor and its key's scale.
INLINE void coded_score_tile(const int count, const int16_t *queries, int64_t dim, const float *keys,
    const float *factors, const float *scales, const Ahead *ahead, int width, float *scores) {
    for (int first = 0; first < width; first += WIDE * LANES) {
        ivec sums[TILE * WIDE];
        UNROLL(24)
        for (int i = 0; i < count * WIDE; i++) sums[i] = (ivec){0};
        for (int64_t k = 0; k < dim / 2; k++) {
            uvec key[WIDE];
            if (ahead) fetch(ahead, first / (WIDE * LANES) * (dim / 2) + k, 0);
            UNROLL(4)
            for (int i = 0; i < WIDE; i++) key[i] = (uvec)load(keys, k * BLOCK + first + i * LANES, 0, LANES);
            UNROLL(6)
            for (int r = 0; r < count; r++) {
                UNROLL(4)
                for (int i = 0; i < WIDE; i++)
                    sums[r * WIDE + i] = dot_words(sums[r * WIDE + i], every_word(queries + r * dim + 2 * k), key[i]);
            }
        }
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            UNROLL(4)
            for (int i = 0; i < WIDE; i++) {
                const int at = first + i * LANES;
                const vec score = __builtin_convertvector(sums[r * WIDE + i], vec) * factors[r];
                store(scores, r * SPLIT + at, 0, score * load(scales, at, 0, LANES), LANES);
            }
        }
    }
}

// A tile's codes of the values in some slots from number `first` on, in pairs of neighbouring positions, as
// [pairs, WIDE x LANES]. The last one stands in the places of those that are missing in its four, which nobody reads or whose
// weights are zero.
INLINE void paired_codes(const Rows *rows, const int32_t *slots, int64_t count, int64_t first, float *out) {
    const int64_t left = rows->a->value_dim - first;
    const int8_t *values = (const int8_t *)rows->text->values + rows->kv_head * rows->text->value_head + first;
    int8_t some[4][WIDE * LANES] = {{0}};
    for (int64_t k = 0; k < count; k += 4) {
        const int8_t *of[4];
        for (int64_t i = 0; i < 4; i++) {
            of[i] = values + slots[k + i < count ? k + i : count - 1] * rows->text->value_slot;
            if (left < WIDE * LANES) of[i] = memcpy(some[i], of[i], left);
        }
        uvec fours[WIDE];
        code_quads(of[0], of[2], of[1], of[3], fours);
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) {
            store(out, (k / 2 * WIDE + i) * LANES, 0, (vec)odd_codes(fours[i]), LANES);
            store(out, ((k / 2 + 1) * WIDE + i) * LANES, 0, (vec)even_codes(fours[i]), LANES);
        }
    }
}

// `single_value_tile` of weights and codes in pairs, of which the weights of those that a row does not see are zero. Sums
// stay whole numbers, in the places of `out`.
INLINE void coded_value_tile(const int count, const float *values, int64_t pairs, int64_t dim, int64_t left,
    const int16_t *weights, int go_on, float *out) {
    ivec sums[TILE * WIDE];
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) {
            sums[r * WIDE + i] = (ivec){0};
            if (go_on && i * LANES < left)
                sums[r * WIDE + i] = (ivec)load(out, r * dim + i * LANES, 0, left - i * LANES);
        }
    }
    for (int64_t k = 0; k < pairs; k++) {
        uvec value[WIDE];
        UNROLL(4)
        for (int i = 0; i < WIDE; i++) value[i] = (uvec)load(values, (k * WIDE + i) * LANES, 0, LANES);
        UNROLL(6)
        for (int r = 0; r < count; r++) {
            const uvec weight = every_word(weights + r * 2 * SPLIT + 2 * k);
            UNROLL(4)
            for (int i = 0; i < WIDE; i++) sums[r * WIDE + i] = dot_words(sums[r * WIDE + i], weight, value[i]);
        }
    }
    UNROLL(6)
    for (int r = 0; r < count; r++) {
        UNROLL(4)
        for (int i = 0; i < WIDE; i++)
            if (i * LANES < left) store(out, r * dim + i * LANES, 0, (vec)sums[r * WIDE + i], left - i * LANES);
    }
}

// A function for each number of rows: inlined together they would not keep their sums in registers.
#define FOR_ROWS(N)                                                                                                    \
    ONCE void single_scores_of_##N(const float *queries, int64_t dim, const float *keys, float scaling,                \
        const Ahead *ahead, int width, float *scores) {                                                                \
        single_score_tile(N, queries, dim, keys, scaling, ahead, width, scores);                                       \
    }                                                                                                                  \
    ONCE void paired_scores_of_##N(                                                                                    \
        const uint16_t *queries, int64_t dim, const float *keys, float scaling, const Ahead *ahead, float *scores) {   \
        paired_score_tile(N, queries, dim, keys, scaling, ahead, scores);                                              \
    }                                                                                                                  \
    ONCE void single_values_of_##N(const float *values, int64_t stride, int64_t dim, int64_t left,                     \
        const int32_t *seen, const float *weights, int go_on, float *out) {                                            \
        single_value_tile(N, values, stride, dim, left, seen, weights, go_on, out);                                    \
    }                                                                                                                  \
    ONCE void paired_values_of_##N(                                                                                    \
        const Rows *rows, const int32_t *slots, const int32_t *seen, const uint16_t *weights, int go_on, float *out) { \
        paired_value_tile(N, rows, slots, seen, weights, go_on, out);                                                  \
    }                                                                                                                  \
    ONCE void coded_scores_of_##N(const int16_t *queries, int64_t dim, const float *keys, const float *factors,        \
        const float *scales, const Ahead *ahead, int width, float *scores) {                                           \
        coded_score_tile(N, queries, dim, keys, factors, scales, ahead, width, scores);                                \
    }                                                                                                                  \
    ONCE void coded_values_of_##N(const float *values, int64_t pairs, int64_t dim, int64_t left,                       \
        const int16_t *weights, int go_on, float *out) {                                                               \
        coded_value_tile(N, values, pairs, dim, left, weights, go_on, out);                                            \
    }
FOR_ROWS(1)
FOR_ROWS(2)
FOR_ROWS(3)
FOR_ROWS(4)
FOR_ROWS(5)
FOR_ROWS(6)

// Of so many rows those that the next tile takes: a tile of one row has too few sums to keep a core busy.
INLINE int64_t tile_of(int64_t count) { return count <= TILE ? count : count < 2 * TILE ? (count + 1) / 2 : TILE; }

#define BY_COUNT(count, call, ...)                                                                                     \
    switch (count) {                                                                                                   \
        case 1: call##1(__VA_ARGS__); break;                                                                           \
        case 2: call##2(__VA_ARGS__); break;                                                                           \
        case 3: call##3(__VA_ARGS__); break;                                                                           \
        case 4: call##4(__VA_ARGS__); break;                                                                           \
        case 5: call##5(__VA_ARGS__); break;                                                                           \
        default: call##6(__VA_ARGS__);                                                                                 \
    }

// Queries side by side, as float32, as they are for pairs, or as whole numbers, by which factor each is then multiplied.
typedef struct {
    const void *numbers;
    const float *factors;
} Queries;

INLINE Queries queries_from(const Rows *rows, Queries q, int64_t row) {
    return (Queries){row_of(q.numbers, row * rows->a->dim, in_pairs(cache_of(rows))), q.factors + row};
}

// Of up to TILE queries with the first `width` keys of a block; `scales` are those of the keys, if they have any.
static void scores_of(const Rows *rows, int64_t count, Queries q, const float *keys, const float *scales, float scaling,
    const Ahead *ahead, int width, float *scores) {
    const int64_t dim = rows->a->dim;
    switch (cache_of(rows)) {
        case CODED_CACHE:
            BY_COUNT(count, coded_scores_of_, q.numbers, dim, keys, q.factors, scales, ahead, width, scores)
            break;
        case PAIRED_CACHE: BY_COUNT(count, paired_scores_of_, q.numbers, dim, keys, scaling, ahead, scores) break;
        default: BY_COUNT(count, single_scores_of_, q.numbers, dim, keys, scaling, ahead, width, scores)
    }
}

// Weighted sums of the values in some slots, `seen` of them for each of `count` rows. Weights stand in rows of SPLIT
// numbers, from number `first` on.
ONCE void add_values(const Rows *rows, int64_t count, const int32_t *slots, const int32_t *seen, const float *weights,
    int64_t first, int go_on, float *sums) {
    const Attention *a = rows->a;
    const int64_t dim = a->value_dim;
    const int coded = cache_of(rows) == CODED_CACHE;
    if (cache_of(rows) == PAIRED_CACHE) {
        for (int64_t r = 0, tile; r < count; r += tile) {
            const uint16_t *of_rows = (const uint16_t *)(weights + r * SPLIT) + first;
            tile = tile_of(count - r);
            BY_COUNT(tile, paired_values_of_, rows, slots, seen + r, of_rows, go_on, sums + r * dim)
        }
        return;
    }
    float widened[WIDENED * WIDE * LANES] __attribute__((aligned(64)));
    int64_t most = 0, at = 0;
    for (int64_t r = 0; r < count; r++) most = seen[r] > most ? seen[r] : most;
    // Numbers in float32 that stand one behind the other are read where they are.
    const int in_place = cache_of(rows) == FLOAT_CACHE && most && slots[most - 1] - slots[0] == most - 1;
    const float *in_cache = (const float *)rows->text->values + rows->kv_head * rows->text->value_head;
    do {
        const int64_t here = most - at < WIDENED ? most - at : WIDENED;
        int32_t some[FEW];
        for (int64_t r = 0; r < count; r++)
            some[r] = seen[r] < at ? 0 : seen[r] - at < here ? seen[r] - (int32_t)at : (int32_t)here;
        for (int64_t i = 0; i < dim; i += WIDE * LANES) {
            const int as_they_are = in_place && dim - i >= WIDE * LANES;
            const int64_t stride = as_they_are ? rows->text->value_slot : WIDE * LANES;
            const float *values = as_they_are ? in_cache + slots[at] * stride + i : widened;
            if (coded) paired_codes(rows, slots + at, here, i, widened);
            else if (a->is_bf16) widened_tile(rows, slots + at, here, i, 1, widened);
            else if (!as_they_are) widened_tile(rows, slots + at, here, i, 0, widened);
            for (int64_t r = 0, tile; r < count; r += tile) {
                const float *of_rows = weights + r * SPLIT + first + at;
                const int16_t *words = (const int16_t *)(weights + r * SPLIT) + first + at;
                float *to = sums + r * dim + i;
                tile = tile_of(count - r);
                if (coded) {
                    BY_COUNT(tile, coded_values_of_, values, (here + 1) / 2, dim, dim - i, words, go_on || at, to)
                    continue;
                }
                BY_COUNT(tile, single_values_of_, values, stride, dim, dim - i, some + r, of_rows, go_on || at, to)
            }
        }
        at += WIDENED;
    } while (at < most);
}

// The keys of a split that some rows look at, by position: those in `slots` are `common` to all of them, and those in
// `own`, SPLIT slots for each token, stand behind these on the way to that token. A row sees those of both from number
// `from` to number `seen`, and none sees what is before number `begin`. That one is even, and where there are own ones an
// even number is common, so that the same positions make a pair in every pass.
typedef struct {
    int32_t slots[SPLIT], own[FEW * SPLIT], from[FEW], seen[FEW];
    int64_t begin, common;
} Keys;

// Turn the scores of the keys that a row sees, SPLIT at most, to their weights; to bfloat16 in their place, if `paired`.
// Of a key that it does not see the weight is zero.
INLINE SoftmaxState softmax_block(int paired, float cap, float *scores, int64_t from, int64_t seen) {
    enum { TWO = 2 * LANES };
    const int64_t end = (seen + TWO - 1) / TWO * TWO;
    if (from >= seen) {
        memset(scores, 0, end * sizeof(float));
        return (SoftmaxState){-INFINITY, 0};
    }
    for (int64_t n = from; cap && n < seen; n += LANES)
        store(scores, n, 0, cap * tangent(load(scores, n, 0, seen - n) / cap), seen - n);
    for (int64_t n = 0; n < from; n++) scores[n] = -INFINITY;
    for (int64_t n = seen; n < end; n++) scores[n] = -INFINITY;
    vec top = splat(-INFINITY), total = {0};
    for (int64_t n = 0; n < end; n += LANES) top = larger(load(scores, n, 0, LANES), top);
    const float largest = largest_of(top);
    for (int64_t n = 0; n < end; n += TWO) {
        const vec first = power_of_two(load(scores, n, 0, LANES) - largest);
        const vec second = power_of_two(load(scores, n + LANES, 0, LANES) - largest);
        if (paired) {
            uint16_t *to = (uint16_t *)scores + n;
            uvec both;
            narrowed_both(first, second, to);
            memcpy(&both, to, sizeof both);
            total = dot_pairs(total, both, (uvec){0} + 0x3f803f80u); // ones
            continue;
        }
        store(scores, n, 0, first, LANES);
        store(scores, n + LANES, 0, second, LANES);
        total = total + first + second;
    }
    return (SoftmaxState){largest, sum(total)};
}

// The scales of keys or values in some slots.
INLINE void gather_scales(const Rows *rows, const void *scales, const int32_t *slots, int64_t count, float *out) {
    const int64_t head = rows->kv_head * rows->text->scale_head;
    const int is_bf16 = rows->a->is_bf16;
    for (int64_t n = 0; n < count; n += LANES) {
        if (n + LANES <= count && slots[n + LANES - 1] - slots[n] == LANES - 1) {
            store(out, n, 0, load(scales, head + slots[n], is_bf16, LANES), LANES);
            continue;
        }
        for (int64_t i = n; i < count && i < n + LANES; i++)
            out[i] = is_bf16 ? widened(((const uint16_t *)scales)[head + slots[i]])
                             : ((const float *)scales)[head + slots[i]];
    }
}

// The whole numbers of 16 bits that are nearest to x times a factor.
INLINE void store_words(int16_t *to, vec x, float factor, int64_t count) {
    const halves words = __builtin_convertvector(nearest(x * factor), halves);
    memcpy(to, &words, count >= LANES ? sizeof words : (size_t)count * 2);
}

// By what numbers are multiplied to become whole ones of 16 bits, if this is the largest of them, and by what these are
// multiplied to become the numbers. Where all of them are 0, so is the first; `wrong` is 0, or no number.
typedef struct {
    float to_words, step;
} Words;

INLINE Words words_up_to(float largest, float wrong) {
    if (wrong == 0 && largest > 1e-30f) return (Words){LARGEST_WORD / largest, largest / LARGEST_WORD};
    return (Words){0, wrong};
}

// Turn a query to whole numbers, in the order in which codes make pairs; returns what these are multiplied by.
INLINE float coded_query(const void *query, int64_t dim, int is_bf16, int16_t *to) {
    vec top = {0}, wrong = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec x = load(query, i, is_bf16, dim - i);
        top = larger(larger(x, -x), top), wrong += x * 0;
    }
    const Words words = words_up_to(largest_of(top), sum(wrong));
    for (int64_t i = 0; i < dim; i += LANES)
        store_words(to + i, words.to_words > 0 ? load(query, i, is_bf16, dim - i) : (vec){0}, words.to_words, dim - i);
    for (int64_t i = 0; i < dim; i += 4) {
        const int16_t second = to[i + 1];
        to[i + 1] = to[i + 2], to[i + 2] = second;
    }
    return words.step;
}

// Turn a row's weights of the values that it sees, times the scales of these, to whole numbers in their place, with zeros
// for all others of SPLIT. Returns what their sums are multiplied by.
INLINE float coded_weights(float *weights, const float *scales, int64_t seen) {
    vec top = {0}, all = {0};
    int64_t n = 0;
    for (; n < seen; n += LANES) {
        const vec weight = load(weights, n, 0, LANES), product = weight * load(scales, n, 0, LANES);
        const vec own = choose(weight > 0, product, (vec){0}); // the scale of what is not seen may be no number
        store(weights, n, 0, own, LANES);
        top = larger(own, top), all += own;
    }
    const Words words = words_up_to(largest_of(top), sum(all) * 0);
    int16_t *to = (int16_t *)weights;
    for (int64_t i = 0; i < n; i += LANES)
        store_words(to + i, words.to_words > 0 ? load(weights, i, 0, LANES) : (vec){0}, words.to_words, LANES);
    memset(to + n, 0, (SPLIT - n) * sizeof *to);
    return words.step;
}

// What is wanted behind the block of keys that begins in this slot: the keys behind it, and its own values. Nothing where
// other numbers stand between them.
INLINE Ahead ahead_of(const Rows *rows, int64_t slot, int block) {
    const SequenceKV *t = rows->text;
    const int64_t size = cache_of(rows) == CODED_CACHE ? 1 : rows->a->is_bf16 ? 2 : 4, dim = rows->a->dim;
    if (t->key_slot != dim || t->value_slot != dim) return (Ahead){0};
    return (Ahead){(const char *)t->keys + (rows->kv_head * t->key_head + (slot + block) * dim) * size,
        (const char *)t->values + (rows->kv_head * t->value_head + slot * dim) * size,
        WIDE * LANES * size * (in_pairs(cache_of(rows)) ? 2 : 1)};
}

// Scores of the keys that are common to rows.
INLINE void score_common(
    const Rows *rows, Queries queries, int64_t count, const Keys *k, float scaling, float *scores) {
    float keys[MOST_DIM * BLOCK] __attribute__((aligned(64))), scales[SPLIT];
    if (cache_of(rows) == CODED_CACHE) gather_scales(rows, rows->text->key_scales, k->slots, k->common, scales);
    // A few rows take less time than the keys behind them need to arrive, which is a tile's, then: fetched further ahead they
    // would drive each other out of the nearest cache.
    const int block = count <= TILE ? WIDE * LANES : BLOCK;
    for (int64_t first = k->begin / block * block; first < k->common; first += block) {
        const int64_t last = first + block < k->common ? first + block : k->common;
        const Ahead ahead = ahead_of(rows, k->slots[first], block);
        transposed_keys(rows, k->slots + first, last - first, keys);
        for (int64_t r = 0, tile; r < count; r += tile) {
            tile = tile_of(count - r);
            scores_of(rows, tile, queries_from(rows, queries, r), keys, scales + first, scaling,
                r || !ahead.step ? NULL : &ahead, block, scores + r * SPLIT + first);
        }
    }
}

// Scores of the keys of each token's own.
INLINE void score_own(const Rows *rows, Queries queries, int64_t count, const Keys *k, float scaling, float *scores) {
    const int64_t per_token = rows->a->heads / rows->a->kv_heads;
    float keys[MOST_DIM * BLOCK] __attribute__((aligned(64))), few[TILE * SPLIT], scales[BLOCK];
    for (int64_t r = 0; r < count; r += per_token)
        for (int64_t first = k->common; first < k->seen[r]; first += BLOCK) {
            const int64_t extra = k->seen[r] - first < BLOCK ? k->seen[r] - first : BLOCK;
            const int32_t *own = k->own + r / per_token * SPLIT + first - k->common;
            transposed_keys(rows, own, extra, keys);
            if (cache_of(rows) == CODED_CACHE) gather_scales(rows, rows->text->key_scales, own, extra, scales);
            for (int64_t h = r, tile; h < r + per_token; h += tile) {
                tile = tile_of(r + per_token - h);
                scores_of(rows, tile, queries_from(rows, queries, h), keys, scales, scaling, NULL, BLOCK, few);
                for (int64_t n = 0; n < tile; n++)
                    memcpy(scores + (h + n) * SPLIT + first, few + n * SPLIT, extra * sizeof(float));
            }
        }
}

// Turn scores to weights. Those of codes become whole numbers; `steps` gets what sums of their products are multiplied by.
INLINE void weigh(const Rows *rows, int64_t count, const Keys *k, float *scores, SoftmaxState *states, float *steps) {
    const int64_t per_token = rows->a->heads / rows->a->kv_heads;
    const float cap = rows->a->softcap * 1.44269504f;
    const void *of_values = rows->text->value_scales;
    float scales[SPLIT] = {0};
    for (int64_t r = 0; r < count; r++)
        states[r] = softmax_block(cache_of(rows) == PAIRED_CACHE, cap, scores + r * SPLIT, k->from[r], k->seen[r]);
    if (cache_of(rows) != CODED_CACHE) return;
    gather_scales(rows, of_values, k->slots, k->common, scales);
    for (int64_t r = 0; r < count; r++) {
        const int64_t extra = k->seen[r] - k->common;
        if (extra > 0 && r % per_token == 0)
            gather_scales(rows, of_values, k->own + r / per_token * SPLIT, extra, scales + k->common);
        steps[r] = coded_weights(scores + r * SPLIT, scales, k->seen[r]);
    }
}

// Rows over the keys of a split. Fills states and sums of values.
ONCE void over_split(
    const Rows *rows, Queries queries, int64_t count, const Keys *k, SoftmaxState *states, float *sums) {
    const int64_t per_token = rows->a->heads / rows->a->kv_heads, dim = rows->a->value_dim;
    const float scaling = rows->a->scaling * 1.44269504f; // weights are powers of two
    float scores[FEW * SPLIT] __attribute__((aligned(64))), steps[FEW];
    score_common(rows, queries, count, k, scaling, scores);
    score_own(rows, queries, count, k, scaling, scores);
    weigh(rows, count, k, scores, states, steps);
    int32_t seen[FEW] = {0};
    const int32_t begin = (int32_t)k->begin;
    for (int64_t r = 0; r < count; r++) seen[r] = (k->seen[r] < k->common ? k->seen[r] : (int32_t)k->common) - begin;
    add_values(rows, count, k->slots + begin, seen, scores, begin, 0, sums);
    for (int64_t r = 0; r < count; r++) seen[r] = k->seen[r] - seen[r] - begin;
    for (int64_t r = 0; r < count; r += per_token)
        if (k->seen[r] > k->common)
            add_values(rows, per_token, k->own + r / per_token * SPLIT, seen + r, scores + r * SPLIT, k->common, 1,
                sums + r * dim);
    for (int64_t r = 0; cache_of(rows) == CODED_CACHE && r < count; r++)
        for (int64_t i = r * dim, end = i + dim; i < end; i += LANES) {
            const ivec whole = (ivec)load(sums, i, 0, end - i);
            store(sums, i, 0, __builtin_convertvector(whole, vec) * steps[r], end - i);
        }
}

// The first position that a token at this one sees.
INLINE int64_t first_seen(const Attention *a, int64_t position) {
    const int64_t first = a->step ? position / a->step * a->step - a->back : 0;
    return first < 0 ? 0 : first;
}

// The first position that any of the rows sees.
INLINE int64_t first_of_rows(const Rows *rows) {
    return first_seen(rows->a, rows->text->length + (rows->text->mask ? 0 : rows->first_token));
}

// What a token sees of a split from position `start` on, of which `text` keys are those of the text.
INLINE void look(const Rows *rows, int64_t token, int64_t start, int64_t text, int64_t place, Keys *keys) {
    const SequenceKV *t = rows->text;
    const int64_t per_token = rows->a->heads / rows->a->kv_heads;
    int64_t position = t->length + token, count = position + 1 - start; // of a token of a chain
    if (t->mask) {
        const uint8_t *sees = t->mask + token * t->count;
        const int64_t common = keys->common, bounded = rows->a->step;
        int32_t *own = keys->own + place * SPLIT;
        count = common;
        if (count < text) own[count++ - common] = (int32_t)(start + text - 1 - t->first);
        position = t->length - 1;
        for (int64_t node = 0; node < t->count && (bounded || count < SPLIT); node++)
            if (sees[node] && ++position >= start && count < SPLIT)
                own[count++ - common] = (int32_t)(t->length + node - t->first);
    }
    const int64_t from = first_seen(rows->a, position) - start;
    for (int64_t h = 0; h < per_token; h++) {
        keys->from[place * per_token + h] = (int32_t)(from < 0 ? 0 : from < SPLIT ? from : SPLIT);
        keys->seen[place * per_token + h] = (int32_t)(count < SPLIT ? count : SPLIT);
    }
}

// Tokens over the keys of a split from position `start` on. Rows are ordered by token; those of tokens before the split
// are left out.
static void attend_split(const Rows *rows, Queries queries, int64_t start, SoftmaxState *states, float *sums) {
    const SequenceKV *t = rows->text;
    const int64_t per_token = rows->a->heads / rows->a->kv_heads, value_dim = rows->a->value_dim;
    const int64_t text = t->length - start < 0 ? 0 : t->length - start < SPLIT ? t->length - start : SPLIT;
    const int64_t begin = first_of_rows(rows) - start;
    if (begin >= SPLIT) return;
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
    keys.begin = begin < 0 ? 0 : begin < keys.common ? begin & ~1 : keys.common & ~1;
    for (int64_t n = 0; n < keys.common; n++) {
        const int64_t slot = start + n - t->first; // what stands before the first one is not looked at
        keys.slots[n] = (int32_t)(slot < 0 ? 0 : slot);
    }
    for (int64_t token = first; token < rows->tokens; token++)
        look(rows, rows->first_token + token, start, text, token - first, &keys);
    const int64_t skipped = first * per_token;
    over_split(rows, queries_from(rows, queries, skipped), (rows->tokens - first) * per_token, &keys, states + skipped,
        sums + skipped * value_dim);
}

// Add what a row saw in a later split.
ONCE void merge(SoftmaxState *to, float *sums, SoftmaxState other, const float *others, int64_t dim) {
    if (other.total == 0) return; // it saw nothing there
    if (to->total == 0) {
        *to = other;
        memcpy(sums, others, dim * sizeof(float));
        return;
    }
    const float further = other.largest - to->largest;
    const float less = power_of_two(splat(further > 0 ? -further : further))[0];
    const float kept = further > 0 ? less : 1, added = further > 0 ? 1 : less;
    if (further > 0) to->largest = other.largest;
    to->total = to->total * kept + other.total * added;
    int64_t i = 0;
    for (; i + LANES <= dim; i += LANES)
        store(sums, i, 0, load(sums, i, 0, LANES) * kept + load(others, i, 0, LANES) * added, LANES);
    if (i < dim) store(sums, i, 0, load(sums, i, 0, dim - i) * kept + load(others, i, 0, dim - i) * added, dim - i);
}

static void gather_queries(const Rows *rows, void *queries, float *factors) {
    const Attention *a = rows->a;
    const Cache cache = cache_of(rows);
    const int64_t per_token = a->heads / a->kv_heads;
    for (int64_t token = 0; token < rows->tokens; token++)
        for (int64_t h = 0; h < per_token; h++) {
            const int64_t at = (rows->token_in_pass + rows->first_token + token) * a->query_token +
                               (rows->kv_head * per_token + h) * a->dim;
            const int64_t row = token * per_token + h, to = row * a->dim;
            if (cache == CODED_CACHE) {
                const void *query = row_of(a->queries, at, a->is_bf16);
                factors[row] = coded_query(query, a->dim, a->is_bf16, (int16_t *)queries + to);
                factors[row] *= a->scaling * 1.44269504f;
                continue;
            }
            for (int64_t i = 0; i < a->dim; i += LANES)
                store(queries, to + i, cache == PAIRED_CACHE, load(a->queries, at + i, a->is_bf16, a->dim - i),
                    a->dim - i);
        }
}

static void write_outputs(const Rows *rows, const SoftmaxState *states, const float *sums) {
    const Attention *a = rows->a;
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    for (int64_t token = 0; token < rows->tokens; token++)
        for (int64_t h = 0; h < per_token; h++) {
            const int64_t row = token * per_token + h;
            const int64_t at =
                ((rows->token_in_pass + rows->first_token + token) * a->heads + rows->kv_head * per_token + h) * dim;
            float kept = 1, total = states[row].total;
            if (a->sinks) {
                const float above = a->sinks[rows->kv_head * per_token + h] * 1.44269504f - states[row].largest;
                kept = power_of_two(splat(above > 0 ? -above : 0))[0];
                total = total * kept + power_of_two(splat(above > 0 ? 0 : above))[0];
            }
            for (int64_t i = 0; i < dim; i += LANES)
                store(a->out, at + i, a->is_bf16, load(sums, row * dim + i, 0, dim - i) * kept / total, dim - i);
        }
}

void drop_plan(Plan *plan) { free(plan->work), free(plan->states), free(plan->sums); }

int make_plan(const Attention *a, int64_t count, int threads, Plan *plan) {
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    int64_t tokens = 0, partial = 0;
    *plan = (Plan){.work = malloc(count * sizeof(Work)), .count = count};
    if (!plan->work) return 1;
    for (int64_t n = 0; n < count; n++) {
        const SequenceKV *t = &a->texts[n];
        Work *w = &plan->work[n];
        w->tile = FEW / per_token < 1 ? 1 : FEW / per_token < t->count || !t->count ? FEW / per_token : t->count;
        w->tiles = (t->count + w->tile - 1) / w->tile;
        w->first_split = first_seen(a, t->length) / SPLIT;
        w->splits = (t->length + t->count + SPLIT - 1) / SPLIT - w->first_split;
        w->rows = t->count * a->heads;
        w->by_split = w->splits > 1 && w->tiles * a->kv_heads < 4 * threads &&
                      (partial + w->splits * w->rows) * dim <= MOST_PARTIAL;
        w->first_unit = plan->units, w->first_token = tokens;
        w->units = a->kv_heads * w->tiles * (w->by_split ? w->splits : 1);
        plan->units += w->units, tokens += t->count;
        w->first_merge = plan->merges;
        if (w->by_split) plan->merges += a->kv_heads * t->count;
        if (w->by_split) partial += w->splits * w->rows;
    }
    if (!partial) return 0;
    plan->sums = malloc(partial * dim * sizeof(float)), plan->states = malloc(partial * sizeof(SoftmaxState));
    if (!plan->sums || !plan->states) {
        drop_plan(plan);
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

// A unit of a text's work: some tokens of a KV head, over their keys or over a split of them.
static void attend_unit(const Attention *a, const Plan *plan, int64_t unit) {
    const int64_t per_token = a->heads / a->kv_heads, dim = a->value_dim;
    float queries[FEW * MOST_DIM] __attribute__((aligned(64)));
    float own[FEW * MOST_DIM], others[FEW * MOST_DIM], factors[FEW];
    SoftmaxState own_states[FEW], other_states[FEW];
    int64_t n = 0;
    while (n + 1 < plan->count && plan->work[n + 1].first_unit <= unit) n++;
    const Work *w = &plan->work[n];
    const int64_t place = unit - w->first_unit, splits = w->by_split ? w->splits : 1;
    const int64_t split = place % splits, tile = place / splits % w->tiles;
    Rows rows = {a, &a->texts[n], place / splits / w->tiles, tile * w->tile, w->tile, w->first_token};
    if (rows.first_token + rows.tokens > rows.text->count) rows.tokens = rows.text->count - rows.first_token;
    const int64_t all = rows.tokens * per_token;
    const Queries asking = {queries, factors};
    gather_queries(&rows, queries, factors);
    if (w->by_split) {
        // Partial results stand by split, KV head and token.
        const int64_t at = split * w->rows + (rows.kv_head * rows.text->count + rows.first_token) * per_token;
        for (int64_t r = 0; r < all; r++) w->states[at + r] = (SoftmaxState){-INFINITY, 0};
        attend_split(&rows, asking, (w->first_split + split) * SPLIT, w->states + at, w->sums + at * dim);
        return;
    }
    const int64_t end = rows.text->length + (rows.text->mask ? rows.text->count : rows.first_token + rows.tokens);
    const int64_t begin = first_of_rows(&rows) / SPLIT * SPLIT;
    for (int64_t start = begin; start < end; start += SPLIT) {
        SoftmaxState *to = start > begin ? other_states : own_states;
        for (int64_t r = 0; r < all; r++) to[r] = (SoftmaxState){-INFINITY, 0};
        attend_split(&rows, asking, start, to, start > begin ? others : own);
        if (start > begin)
            for (int64_t r = 0; r < all; r++)
                merge(&own_states[r], own + r * dim, other_states[r], others + r * dim, dim);
    }
    write_outputs(&rows, own_states, own);
}

// Merge what a token of a KV head saw in splits.
static void merge_splits(const Attention *a, const Plan *plan, int64_t number) {
    int64_t n = 0;
    while (n + 1 < plan->count && plan->work[n + 1].first_merge <= number) n++;
    const Work *w = &plan->work[n];
    const int64_t place = number - w->first_merge, count = a->texts[n].count, dim = a->value_dim;
    const int64_t per_token = a->heads / a->kv_heads, at = place * per_token;
    for (int64_t split = 1; split < w->splits; split++)
        for (int64_t r = at; r < at + per_token; r++) {
            const int64_t other = split * w->rows + r;
            merge(&w->states[r], w->sums + r * dim, w->states[other], w->sums + other * dim, dim);
        }
    const Rows rows = {a, &a->texts[n], place / count, place % count, 1, w->first_token};
    write_outputs(&rows, w->states + at, w->sums + at * dim);
}

void share_attention(const Attention *a, const Plan *plan, Worker *w) {
    EACH_PIECE(unit, plan->units, w) attend_unit(a, plan, unit);
    EACH_PIECE(number, plan->merges, w) merge_splits(a, plan, number);
}

typedef struct {
    const Attention *a;
    Plan plan;
} Attending;

static void share_attending(const void *argument, Worker *w) {
    const Attending *attending = argument;
    share_attention(attending->a, &attending->plan, w);
}

// Returns 0, or 1 where there was no memory.
int attend(const Attention *a, int64_t count, int threads) {
    Attending attending = {.a = a};
    if (make_plan(a, count, threads, &attending.plan)) return 1;
    pool_run(share_attending, &attending, threads);
    drop_plan(&attending.plan);
    return 0;
}
