// The table of an instruction set's tiles, one for each format, of its function `tile`. That of one row is compiled apart.

#define TILE(name, number, inputs, ...)                                                                                \
    static void tile_##name(const uint8_t *panel, int64_t blocks, const Input *x, int rows, float *sums) {             \
        if (rows == 1) tile(LAYOUT_##name, inputs / PART, panel, blocks, x, 1, sums);                                  \
        else tile(LAYOUT_##name, inputs / PART, panel, blocks, x, rows, sums);                                         \
    }
EACH_FORMAT(TILE)

#define ENTRY(name, ...) tile_##name,
const Tile tile_table[FORMATS] = {EACH_FORMAT(ENTRY)};
