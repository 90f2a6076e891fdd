// Attention over the texts of a pass, in attention.c.

#ifndef ATTENTION_H
#define ATTENTION_H

#include "native.h"

// What a row has seen so far, beside the weighted sum of values: its largest score, and the sum of weights. The weight of
// a score is two to the power of what it is below the largest.
typedef struct {
    float largest, total;
} SoftmaxState;

// How the work on a text is cut: into tiles of tokens for each KV head, and where these are few, into splits, too.
typedef struct {
    int64_t tile, tiles, first_split, splits, units, rows; // tokens of a tile; rows: of partial results per split
    int64_t first_unit, first_token, first_merge;
    int by_split;
    SoftmaxState *states;
    float *sums;
} Work;

// How the work on all texts is cut, and the memory for partial results.
typedef struct {
    Work *work;
    int64_t count, units, merges;
    SoftmaxState *states;
    float *sums;
} Plan;

// Returns 0, or 1 where there was no memory.
PRIVATE int make_plan(const Attention *a, int64_t count, int threads, Plan *plan);

PRIVATE void drop_plan(Plan *plan);

// Attention in two stages.
PRIVATE void share_attention(const Attention *a, const Plan *plan, Worker *w);

#endif
