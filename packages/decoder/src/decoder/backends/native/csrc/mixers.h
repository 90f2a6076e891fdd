// Layers that go on from a state, in mixers.c.

#ifndef MIXERS_H
#define MIXERS_H

#include "native.h"

// How the tokens of a text follow each other in a pass: those that are run again, and then the new ones.
typedef struct {
    int32_t *above; // [tokens, width - 1], which tokens its convolution sees; -1 is the last one before the state
    int32_t *from;  // the parent of each, -1 for those behind the state
    int32_t *place; // by token, behind that of the state: where its own state stands
    int32_t *last;  // by token, behind that of the state: its last child, -1 where there is none
    int64_t places;
    int64_t row, mixed; // new tokens, and tokens, of the texts before
    float *states;      // by thread and place, LANES columns of a head's state
} Scan;

// Returns NULL where there was no memory. The mixers of a model have states of one shape.
PRIVATE Scan *make_scans(const Mixer *m, const RecurrentState *texts, int64_t count, int threads);

PRIVATE void drop_scans(Scan *scans, int64_t count);

// The part of a layer before its last product, which reads `out` [rows, values x dim], in stages.
PRIVATE void share_mixer(
    const Layer *l, const Pass *p, const Scan *scans, int64_t count, void *out, int is_bf16, Worker *w);

#endif
