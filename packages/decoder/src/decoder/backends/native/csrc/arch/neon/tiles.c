// Products with quantised weights for processors with NEON and its products of fours of bytes.

#include "arch/neon/parts.h"

INLINE void tile(const Layout l, const int parts, const uint8_t *panel, int64_t blocks, const Input *x, const int rows,
    float *sums) {
    tile_of_rows(l, parts, panel, blocks, x, rows, sums);
}

#include "arch/table.h"
