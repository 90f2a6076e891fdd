// How tokens are chosen from logits, in tokens.c.

#ifndef TOKENS_H
#define TOKENS_H

#include <stdint.h>

// How one text's tokens are chosen.
typedef struct {
    const uint8_t *penalised;  // by token; NULL where none is
    double penalty, temperature;
    double log_min_p;  // -INFINITY where nothing is filtered
    uint64_t seed;
    int32_t noisy;  // without noise the best one is chosen, and neither temperature nor min-p change it
} Choosing;

// The `width` best of `vocab` drafts at a position, the best first, with their scores; of those that are not among
// them, -INFINITY. `ids` are the tokens that the logits are of, NULL where they are all. Tokens `drafted` before are
// penalised as those of the text are. The logits are written over.
INNER void best_drafts(
    const Choosing *c, int64_t position, float *logits, const int64_t *ids, int64_t vocab, const int64_t *drafted,
    int64_t depth, int64_t width, float *scores, int64_t *tokens);

#endif
