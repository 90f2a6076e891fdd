// Experts in a layer, in experts.c.

#ifndef EXPERTS_H
#define EXPERTS_H

#include "native.h"

// What the experts that rows [rows, size] choose give, times `scale` and with `add` [rows, size] added, to `y`, in stages.
// There are at most CHUNK rows; `scratch` has room for `expert_numbers` of them.
PRIVATE void share_experts(const Experts *e, const void *x, float scale, const float *add, int64_t rows, void *y,
    float *scratch, int is_bf16, Worker *w);

#endif
