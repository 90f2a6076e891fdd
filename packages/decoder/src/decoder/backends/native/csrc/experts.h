// Experts in a layer, in experts.c.

#ifndef EXPERTS_H
#define EXPERTS_H

#include "native.h"

// What the experts that rows [rows, size] choose give, with `add` [rows, size] added, to `y`, as one of the threads that
// share it, which all have finished. There are at most CHUNK rows; `scratch` has room for `expert_numbers` of them.
INNER void share_experts(const Experts *e, const void *x, const float *add, int64_t rows, void *y, float *scratch,
    int is_bf16, int thread, int all);

#endif
