// Vectors of the compiler, for any processor: the reference for sets with as many lanes, whose bits are these.

#if !defined(REFERENCE_LANES)
#define REFERENCE_LANES 8
#endif

enum { LANES = REFERENCE_LANES, MOST_ROWS = 4, WIDE = LANES / 4 };
#define EACH_NUMBER_OF_ROWS(X, kind) X(kind, 1, 2) X(kind, 2, 1) X(kind, 3, 1) X(kind, 4, 1)

#include "../types.h"

INLINE vec all_widened(halves x) { return (vec)(__builtin_convertvector(x, uvec) << 16); }

INLINE vec larger(vec x, vec y) { return choose(x > y, x, y); }

INLINE vec swapped(vec x, int step) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = x[lane ^ step];
    return y;
}

INLINE vec to_whole(vec x) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = rintf(x[lane]);
    return y;
}

INLINE ivec nearest(vec x) { return __builtin_convertvector(to_whole(x), ivec); }

INLINE vec fused(vec a, vec b, vec c) {
    vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = fmaf(a[lane], b[lane], c[lane]);
    return y;
}

INLINE int none(ivec where) {
    int32_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= where[lane];
    return !any;
}

INLINE void transpose(vec *rows) {
    vec columns[LANES];
    for (int i = 0; i < LANES; i++)
        for (int lane = 0; lane < LANES; lane++) columns[lane][i] = rows[i][lane];
    memcpy(rows, columns, sizeof columns);
}

#include "../words.h"

#include "../without_masks.h"
