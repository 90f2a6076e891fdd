// Attention over the texts of a pass, in attention.c.

#ifndef ATTENTION_H
#define ATTENTION_H

#include "native.h"

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

// What a row has seen so far, beside the weighted sum of values: its largest score, and the sum of weights. The weight of
// a score is two to the power of what it is below the largest.
typedef struct {
    float largest, total;
} State;

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

// Returns 0, or 1 where there was no memory.
INNER int make_plan(const Attention *a, int64_t count, int threads, Plan *plan);

INNER void drop_plan(Plan *plan);

// Attention as one of the threads that share it; all of them have finished only behind the next barrier.
INNER void share_attention(const Attention *a, const Plan *plan);

#endif
