// Products of a few rows with packed weights, and norms.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "native.h"

enum { PANEL = 2 * LANES };      // outputs of a product that stand beside each other
enum { PANELS_HELD = 1 << 19 };  // bytes of weights that a core holds
enum { AHEAD = 128 };            // vectors of weights that are fetched ahead
enum { FEW_GROUPS = 4 };         // of rows, up to which a panel is read once for all of them

// A word of weights has one number, two of bfloat16, or four bytes; codes and bytes may come in blocks, as native.h
// has them. BF16_PAIRS and BYTE_FOURS are multiplied as they are, with inputs that stand in words like theirs.
typedef enum { FLOAT_WEIGHTS, BF16_WEIGHTS, BF16_PAIRS, BYTE_WEIGHTS, BYTE_FOURS, CODES, BYTE_BLOCKS } Kind;

// How many words of weights ahead a tile fetches, for the even vectors of a step and for the odd ones.
typedef struct {
    int64_t words[2];
} Ahead;

// Write the sums of a tile.
ONCE void finish(
    int rows, int panels, const vec *sums, const Product *p, int64_t row, int64_t panel, const Out *out) {
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < panels * 2; i++) {
            const int64_t column = panel * PANEL + i * LANES, left = p->outputs - column;
            if (left <= 0) break;
            vec y = sums[r * panels * 2 + i];
            const int64_t at = (row + r) * p->outputs + column;
            if (p->scales) y *= load(p->scales, column, 0, left);
            if (p->bias) y += load(p->bias, column, 0, left);
            if (out->add) y += load(out->add, at, out->add_is_bf16, left);
            store(out->y, at, out->y_is_bf16, y, left);
        }
}

enum { NIBBLE_WORDS = BLOCK_INPUTS / 8, BYTE_WORDS = BLOCK_INPUTS / 4 };  // of codes in a block, of bytes

INLINE int64_t words_of_row(const Kind kind, int64_t inputs) {
    if (kind == CODES) return inputs / BLOCK_INPUTS * (1 + NIBBLE_WORDS);
    if (kind == BYTE_BLOCKS) return inputs / BLOCK_INPUTS * (1 + BYTE_WORDS);
    const int64_t each = kind == FLOAT_WEIGHTS ? 1 : kind == BF16_WEIGHTS || kind == BF16_PAIRS ? 2 : 4;
    return (inputs + each - 1) / each;
}

enum { ABOVE = 128 };  // by which a byte is more than the weight that it stands for

INLINE vec byte_of(uvec words, int number) {
    return __builtin_convertvector((ivec)(words >> 8 * number & 0xff) - ABOVE, vec);
}

// Inputs that are rounded to bytes: words of four, their sum, and what one stands for.
enum { BEHIND_FOURS = 2 };

#if defined(__AVX512VNNI__)
// Rows of `inputs` numbers in such words; there are zeros behind the last input.
static void to_fours(const void *given, int64_t rows, int64_t inputs, uint32_t *fours) {
    const float *x = given;
    const int64_t words = words_of_row(BYTE_FOURS, inputs);
    for (int64_t r = 0; r < rows; r++, x += inputs, fours += words + BEHIND_FOURS) {
        vec most = {0};
        for (int64_t i = 0; i < inputs; i += LANES) {
            const vec part = load(x, i, 0, inputs - i);
            most = larger(larger(part, -part), most);
        }
        const float step = largest_of(most) / 127, rate = step > 0 ? 1 / step : 0;
        ivec total = {0};
        for (int64_t i = 0; i < words * 4; i += LANES) {
            const int64_t left = words * 4 - i;
            const ivec number = (ivec)_mm512_cvtps_epi32((__m512)(load(x, i, 0, inputs - i) * rate));
            total += number;
            _mm512_mask_cvtepi32_storeu_epi8((int8_t *)fours + i, mask_of(left), (__m512i)number);
        }
        int32_t sum = 0;
        for (int lane = 0; lane < LANES; lane++) sum += total[lane];
        memcpy(fours + words, &sum, 4), memcpy(fours + words + 1, &step, 4);
    }
}
#endif

// Inputs for codes: blocks of pairs, each with the sum of its inputs behind it.
enum { PAIRS_AND_SUM = BLOCK_INPUTS / 2 + 1 };

#if defined(__AVX512BF16__)
static void to_pairs_and_sums(const void *given, int64_t rows, int64_t inputs, uint32_t *blocks) {
    const uint16_t *x = given;
    for (int64_t i = 0; i < rows * inputs; i += BLOCK_INPUTS, blocks += PAIRS_AND_SUM) {
        __m512i pairs;
        memcpy(&pairs, x + i, sizeof pairs);
        memcpy(blocks, &pairs, sizeof pairs);
        const __m512bh ones = (__m512bh)_mm512_set1_epi16(0x3f80);
        const float total = sum((vec)_mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)pairs, ones));
        memcpy(blocks + PAIRS_AND_SUM - 1, &total, 4);
    }
}
#endif

// The words of some panels from `weight` on, one vector for each LANES outputs, and fetch those that come later.
INLINE void words_at(
    const uint32_t *weight, const int again, const int panels, int64_t words, const Ahead *ahead, uvec *both) {
#pragma GCC unroll 8
    for (int i = 0; i < panels * 2; i++) {
        const uint32_t *at = weight + (i >> 1) * words * PANEL + (i & 1) * LANES;
        __builtin_prefetch(at + ahead->words[i & 1] / panels, 0, again ? 2 : 0);
        memcpy(&both[i], at, sizeof(uvec));
    }
}

// `tile` where weights are codes, to its sums. Where the processor multiplies bfloat16, x is what `to_pairs_and_sums`
// makes: the codes of a block are multiplied as bfloat16 numbers, and their sum by the step. Elsewhere weights are
// restored.
INLINE void tile_of_codes(
    const int rows, const int panels, const Product *p, const void *x, int64_t row, int64_t panel, const Ahead *ahead,
    vec *sums) {
    const int64_t blocks = p->inputs / BLOCK_INPUTS, words = words_of_row(CODES, p->inputs);
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
#if defined(__AVX512BF16__)
    const uint32_t *pairs = (const uint32_t *)x + row * blocks * PAIRS_AND_SUM;
    // The numbers -8 to 7, twice, since a code that is looked up has a bit of the next one above it.
    const __m256i once = _mm256_setr_epi16(
        (int16_t)0xc100, (int16_t)0xc0e0, (int16_t)0xc0c0, (int16_t)0xc0a0, (int16_t)0xc080, (int16_t)0xc040,
        (int16_t)0xc000, (int16_t)0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0);
    const __m512i numbers = _mm512_inserti64x4(_mm512_castsi256_si512(once), once, 1);
#else
    const float *wide = (const float *)x + row * p->inputs;
#endif
    for (int64_t b = 0; b < blocks; b++, weight += (1 + NIBBLE_WORDS) * PANEL) {
        uvec both[8];
        vec steps[8], centres[8];
        words_at(weight, 1, panels, words, ahead, both);
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) steps[i] = (vec)(both[i] << 16), centres[i] = (vec)(both[i] & 0xffff0000u);
#if defined(__AVX512BF16__)
        vec parts[MOST_ROWS * 2];
#pragma GCC unroll 28
        for (int i = 0; i < rows * panels * 2; i++) parts[i] = (vec){0};
#endif
        for (int w = 0; w < NIBBLE_WORDS; w++) {
            words_at(weight + (1 + w) * PANEL, 1, panels, words, ahead, both);
#if defined(__AVX512BF16__)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __m512bh codes[8];
#pragma GCC unroll 8
                for (int i = 0; i < panels * 2; i++)
                    codes[i] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)both[i], 4 * j), numbers);
#pragma GCC unroll 14
                for (int r = 0; r < rows; r++) {
                    const int pair = (int)pairs[(r * blocks + b) * PAIRS_AND_SUM + w * 4 + j];
#pragma GCC unroll 8
                    for (int i = 0; i < panels * 2; i++) {
                        vec *to = &parts[r * panels * 2 + i];
                        *to = (vec)_mm512_dpbf16_ps((__m512)*to, codes[i], (__m512bh)_mm512_set1_epi32(pair));
                    }
                }
            }
#else
#pragma GCC unroll 8
            for (int n = 0; n < 8; n++) {
#pragma GCC unroll 8
                for (int i = 0; i < panels * 2; i++) {
                    const ivec code = (ivec)(both[i] >> (4 * (n >> 1) + 16 * (n & 1)) & 15);
                    const vec weights = fused(__builtin_convertvector(code - 8, vec), steps[i], centres[i]);
#pragma GCC unroll 14
                    for (int r = 0; r < rows; r++) {
                        vec *to = &sums[r * panels * 2 + i];
                        *to = fused(splat(wide[r * p->inputs + b * BLOCK_INPUTS + w * 8 + n]), weights, *to);
                    }
                }
            }
#endif
        }
#if defined(__AVX512BF16__)
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++) {
            float total;
            memcpy(&total, pairs + (r * blocks + b) * PAIRS_AND_SUM + PAIRS_AND_SUM - 1, 4);
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++) {
                vec *to = &sums[r * panels * 2 + i];
                *to = fused(parts[r * panels * 2 + i], steps[i], fused(splat(total), centres[i], *to));
            }
        }
#endif
    }
}

// `tile` where weights are bytes in blocks, to its sums: with the weights restored, those of bfloat16 bit for bit.
INLINE void tile_of_blocks(
    const int again, const int rows, const int panels, const Product *p, const void *x, int64_t row, int64_t panel,
    const Ahead *ahead, vec *sums) {
    const int64_t inputs = p->inputs, words = words_of_row(BYTE_BLOCKS, inputs);
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
#if defined(__AVX512BF16__)
    const uint16_t *narrow = (const uint16_t *)x + row * inputs;
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
#else
    const float *wide = (const float *)x + row * inputs;
#endif
    for (int64_t k = 0; k < inputs; weight += PANEL) {
        uvec whole[8];
        vec steps[8];
        words_at(weight, again, panels, words, ahead, whole);
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) steps[i] = (vec)whole[i];
#if defined(__AVX512BF16__)
        vec others[8];
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            others[i] = (vec)_mm512_permutexvar_ps(_mm512_add_epi32(twice, _mm512_set1_epi32(8)), (__m512)steps[i]);
            steps[i] = (vec)_mm512_permutexvar_ps(twice, (__m512)steps[i]);
        }
#endif
        for (int w = 0; w < BYTE_WORDS; w++, k += 4) {
            weight += PANEL;
            words_at(weight, again, panels, words, ahead, whole);
#pragma GCC unroll 2
            for (int j = 0; j < 2; j++) {
#if defined(__AVX512BF16__)
                __m512bh both[8];
#endif
#pragma GCC unroll 8
                for (int i = 0; i < panels * 2; i++) {
                    const uint32_t *at = weight + (i >> 1) * words * PANEL + (i & 1) * LANES + j * LANES / 2;
#if defined(__AVX512BF16__)
                    __m128i first, second;
                    memcpy(&first, at, sizeof first), memcpy(&second, at + LANES / 4, sizeof second);
                    const vec low = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)) * steps[i];
                    const vec high = (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second)) * others[i];
                    both[i] = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
#else
                    halves two;
                    memcpy(&two, at, sizeof two);
                    const uvec pair = __builtin_convertvector(two, uvec);
                    const vec even = __builtin_convertvector((ivec)(pair << 24) >> 24, vec) * steps[i];
                    const vec odd = __builtin_convertvector((ivec)(pair << 16) >> 24, vec) * steps[i];
#pragma GCC unroll 14
                    for (int r = 0; r < rows; r++) {
                        vec *to = &sums[r * panels * 2 + i];
                        *to += wide[r * inputs + k + 2 * j] * even;
                        *to += wide[r * inputs + k + 2 * j + 1] * odd;
                    }
#endif
                }
#if defined(__AVX512BF16__)
#pragma GCC unroll 14
                for (int r = 0; r < rows; r++) {
                    uint32_t pair;
                    memcpy(&pair, narrow + r * inputs + k + 2 * j, 4);
#pragma GCC unroll 8
                    for (int i = 0; i < panels * 2; i++) {
                        vec *to = &sums[r * panels * 2 + i];
                        *to = (vec)_mm512_dpbf16_ps((__m512)*to, both[i], (__m512bh)_mm512_set1_epi32((int)pair));
                    }
                }
#endif
            }
        }
    }
}

// Rows [rows, inputs] of x with `panels` panels from `panel` on. With BF16_PAIRS x is bfloat16, with BYTE_FOURS what
// `to_fours` makes, otherwise float32. Weights that are read again soon are fetched to a cache where they stay; others
// would only drive out what each step needs: states, caches of texts, draft heads.
INLINE void tile(
    const Kind kind, const int again, const int rows, const int panels, const Product *p, const void *x, int64_t row,
    int64_t panel, const Ahead *ahead, const Out *out) {
    vec sums[MOST_ROWS * 2];
    const int64_t inputs = p->inputs, words = words_of_row(kind, inputs);
    const uint32_t *weight = (const uint32_t *)p->weight + panel * words * PANEL;
    const float *wide = (const float *)x + row * inputs;
    const uint16_t *narrow = (const uint16_t *)x + row * inputs;
    const uint32_t *fours __attribute__((unused)) = (const uint32_t *)x + row * (words + BEHIND_FOURS);
#pragma GCC unroll 28
    for (int i = 0; i < rows * panels * 2; i++) sums[i] = (vec){0};
    if (kind == CODES) tile_of_codes(rows, panels, p, x, row, panel, ahead, sums);
    if (kind == BYTE_BLOCKS) tile_of_blocks(again, rows, panels, p, x, row, panel, ahead, sums);
    // Words whose numbers are all inputs.
    const int64_t whole = kind == CODES || kind == BYTE_BLOCKS         ? 0
                          : kind == BF16_WEIGHTS || kind == BF16_PAIRS ? inputs / 2
                          : kind == BYTE_WEIGHTS                       ? inputs / 4
                                                                       : words;
    for (int64_t k = 0; k < whole; k++) {
        uvec both[8];
        words_at(weight + k * PANEL, again, panels, words, ahead, both);
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++) {
                vec *to = &sums[r * panels * 2 + i];
                if (kind == FLOAT_WEIGHTS) {
                    *to += wide[r * inputs + k] * (vec)both[i];
                } else if (kind == BF16_WEIGHTS) {
                    *to += wide[r * inputs + 2 * k] * (vec)(both[i] << 16);
                    *to += wide[r * inputs + 2 * k + 1] * (vec)(both[i] & 0xffff0000u);
                } else if (kind == BYTE_WEIGHTS) {
#pragma GCC unroll 4
                    for (int n = 0; n < 4; n++) *to += wide[r * inputs + 4 * k + n] * byte_of(both[i], n);
                } else if (kind == BYTE_FOURS) {
#if defined(__AVX512VNNI__)
                    const __m512i four = _mm512_set1_epi32((int)fours[r * (words + BEHIND_FOURS) + k]);
                    *to = (vec)_mm512_dpbusd_epi32((__m512i)*to, (__m512i)both[i], four);
#endif
                } else {
#if defined(__AVX512BF16__)
                    uint32_t pair;
                    memcpy(&pair, narrow + r * inputs + 2 * k, 4);
                    *to = (vec)_mm512_dpbf16_ps((__m512)*to, (__m512bh)both[i], (__m512bh)_mm512_set1_epi32((int)pair));
#endif
                }
            }
    }
    if ((kind == BF16_WEIGHTS || kind == BF16_PAIRS) && inputs & 1) {
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            uvec both;
            memcpy(&both, weight + ((i >> 1) * words + whole) * PANEL + (i & 1) * LANES, sizeof both);
            const vec low = (vec)(both << 16);
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++)
                sums[r * panels * 2 + i] +=
                    (kind == BF16_WEIGHTS ? wide[r * inputs + inputs - 1] : widened(narrow[r * inputs + inputs - 1])) * low;
        }
    }
    for (int64_t k = whole * 4; kind == BYTE_WEIGHTS && k < inputs; k++)
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            uvec both;
            memcpy(&both, weight + ((i >> 1) * words + whole) * PANEL + (i & 1) * LANES, sizeof both);
#pragma GCC unroll 14
            for (int r = 0; r < rows; r++) sums[r * panels * 2 + i] += wide[r * inputs + k] * byte_of(both, k & 3);
        }
#if defined(__AVX512VNNI__)
#pragma GCC unroll 14
    for (int r = 0; kind == BYTE_FOURS && r < rows; r++) {
        int32_t total;
        float step;
        memcpy(&total, fours + r * (words + BEHIND_FOURS) + words, 4);
        memcpy(&step, fours + r * (words + BEHIND_FOURS) + words + 1, 4);
#pragma GCC unroll 8
        for (int i = 0; i < panels * 2; i++) {
            vec *to = &sums[r * panels * 2 + i];
            *to = __builtin_convertvector((ivec)*to - total * ABOVE, vec) * step;
        }
    }
#endif
    if (!p->scales && !p->bias && !out->add && !out->y_is_bf16 && (panel + panels) * PANEL <= p->outputs) {
        float *y = (float *)out->y + row * p->outputs + panel * PANEL;
#pragma GCC unroll 14
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
            for (int i = 0; i < panels * 2; i++)
                memcpy(y + r * p->outputs + i * LANES, &sums[r * panels * 2 + i], sizeof(vec));
        return;
    }
    vec done[MOST_ROWS * 2];  // a copy, so that the sums themselves stay in registers
#pragma GCC unroll 28
    for (int i = 0; i < rows * panels * 2; i++) done[i] = sums[i];
    finish(rows, panels, done, p, row, panel, out);
}

// With few registers, few rows take several panels at once, so that sums need not wait for each other. With many,
// reading one panel after the other was measured to be the faster, by up to a tenth.
#define ROWS(count, together)                                                                   \
    case count:                                                                                 \
        for (; panel + together <= end; panel += together)                                      \
            tile(kind, again, count, together, p, x, row, panel, ahead, out);                   \
        for (; panel < end; panel++) tile(kind, again, count, 1, p, x, row, panel, ahead, out); \
        break;

// Rows [row, row + count] with the panels up to `end`.
INLINE void panels_with(const Kind kind, const int again, const Product *p, const void *x, int64_t row, int64_t count,
                        int64_t panel, int64_t end, const Ahead *ahead, const Out *out) {
    switch (count) {
#if defined(__AVX512F__)
        ROWS(1, 1) ROWS(2, 1) ROWS(3, 1) ROWS(4, 1) ROWS(5, 1) ROWS(6, 1) ROWS(7, 1)
        ROWS(8, 1) ROWS(9, 1) ROWS(10, 1) ROWS(11, 1) ROWS(12, 1)
        ROWS(13, 1) ROWS(14, 1)
#else
        ROWS(1, 4) ROWS(2, 2) ROWS(3, 1) ROWS(4, 1)
#endif
    }
}

INLINE void panels_of(const Kind kind, const Product *p, const void *x, int64_t rows, const Out *out, int64_t first,
                      int64_t last) {
    const int64_t words = words_of_row(kind, p->inputs);
    const int64_t panel = words * PANEL, fit = PANELS_HELD / (panel * 4);
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS, each = groups ? (rows + groups - 1) / groups : 0;
    // For many rows as many panels as stay in a core's cache. For a few groups of rows one: the first two groups fetch
    // half of the next panel each, if it stays there, too, so that all of them compute while memory is read.
    const int64_t block = groups <= 1 ? last - first : groups <= FEW_GROUPS ? 1 : fit > 1 ? fit : 1;
    const int next = groups > 1 && groups <= FEW_GROUPS && fit > 0;
    for (int64_t begin = first; begin < last; begin += block) {
        const int64_t end = begin + block < last ? begin + block : last;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t row = group * each, count = rows - row < each ? rows - row : each;
            Ahead ahead = {{AHEAD * LANES, AHEAD * LANES}};
            if (next) ahead = (Ahead){{group == 0 ? panel : 0, group == 1 ? panel : 0}};
            if (groups > 1 || kind == BYTE_WEIGHTS || kind == BYTE_FOURS || kind == CODES)
                panels_with(kind, 1, p, x, row, count, begin, end, &ahead, out);
            else
                panels_with(kind, 0, p, x, row, count, begin, end, &ahead, out);
        }
    }
}

enum { IN_OTHER_WORDS = 1 << 18 };  // words of inputs on a thread's stack

// `panels_of` with BYTE_FOURS or CODES, whose inputs come in other words: `convert` makes them for some rows at a time.
INLINE void panels_of_converted(
    const Kind kind, const Product *p, const char *x, int64_t row_bytes, int64_t row_words,
    void (*convert)(const void *, int64_t, int64_t, uint32_t *), int64_t rows, const Out *out, int64_t first,
    int64_t last) {
    const int64_t room = IN_OTHER_WORDS / row_words, fit = room > 1 ? room : 1;
    const int64_t most = FEW_GROUPS * MOST_ROWS < fit ? FEW_GROUPS * MOST_ROWS : fit;
    const int64_t together = rows < most ? rows : most;
    uint32_t words[(together + !together) * row_words];
    for (int64_t row = 0; row < rows; row += together) {
        const int64_t count = rows - row < together ? rows - row : together, at = row * p->outputs;
        const Out here = {row_of(out->y, at, out->y_is_bf16), out->add ? row_of(out->add, at, out->add_is_bf16) : NULL,
                          out->y_is_bf16, out->add_is_bf16};
        convert(x + row * row_bytes, count, p->inputs, words);
        panels_of(kind, p, words, count, &here, first, last);
    }
}

static void some_panels_of_bytes(
    const Product *p, const void *x, int64_t rows, const Out *out, int64_t first, int64_t last) {
#if defined(__AVX512VNNI__)
    const int64_t words = words_of_row(BYTE_FOURS, p->inputs) + BEHIND_FOURS;
    panels_of_converted(BYTE_FOURS, p, x, p->inputs * 4, words, to_fours, rows, out, first, last);
#else
    panels_of(BYTE_WEIGHTS, p, x, rows, out, first, last);
#endif
}

static void some_panels_of_codes(
    const Product *p, const void *x, int64_t rows, const Out *out, int64_t first, int64_t last) {
#if defined(__AVX512BF16__)
    const int64_t words = p->inputs / BLOCK_INPUTS * PAIRS_AND_SUM;
    panels_of_converted(CODES, p, x, p->inputs * 2, words, to_pairs_and_sums, rows, out, first, last);
#else
    panels_of(CODES, p, x, rows, out, first, last);
#endif
}

// Panels [first, last) of a product.
static void some_panels(
    const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int64_t first, int64_t last) {
    if (p->kind == QUANTISED) quantised_panels(p, x, x_is_bf16, rows, out, first, last);
    else if (p->kind == FLOATS) panels_of(FLOAT_WEIGHTS, p, x, rows, out, first, last);
    else if (p->kind == BLOCKS) panels_of(BYTE_BLOCKS, p, x, rows, out, first, last);
    else if (p->kind == BYTES) some_panels_of_bytes(p, x, rows, out, first, last);
    else if (p->kind == NIBBLES) some_panels_of_codes(p, x, rows, out, first, last);
#if defined(__AVX512BF16__)
    else if (x_is_bf16) panels_of(BF16_PAIRS, p, x, rows, out, first, last);
#endif
    else panels_of(BF16_WEIGHTS, p, x, rows, out, first, last);
}

static int64_t width_of(const Product *p) { return p->kind == QUANTISED ? quantised_width() : PANEL; }

void share(const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads) {
    const int64_t width = width_of(p), panels = (p->outputs + width - 1) / width;
    some_panels(p, x, x_is_bf16, rows, out, panels * thread / threads, panels * (thread + 1) / threads);
}

Columns share_halves(
    const Product *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int thread, int threads) {
    const int64_t width = width_of(p), half = p->outputs / 2, panels = half / width;
    if (half % width) {  // a panel belongs to both halves
        share(p, x, x_is_bf16, rows, out, thread, threads);
#pragma omp barrier
        const int64_t vectors = (half + LANES - 1) / LANES, last = vectors * (thread + 1) / threads * LANES;
        return (Columns){vectors * thread / threads * LANES, last < half ? last : half};
    }
    const int64_t first = panels * thread / threads, last = panels * (thread + 1) / threads;
    some_panels(p, x, x_is_bf16, rows, out, first, last);
    some_panels(p, x, x_is_bf16, rows, out, panels + first, panels + last);
    return (Columns){first * width, last * width};
}

int multiplies_bf16(void) {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

int panel_width(void) { return PANEL; }

void linear(const Product *p, const void *x, int64_t rows, int is_bf16, void *y, int threads) {
    const Out out = {y, NULL, is_bf16, 0};
#pragma omp parallel num_threads(threads)
    share(p, x, is_bf16, rows, &out, omp_get_thread_num(), omp_get_num_threads());
}

__attribute__((noinline)) void norm(const void *x, int x_is_bf16, const float *weight, float eps, int64_t size, void *y, int y_is_bf16) {
    vec squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = load(x, i, x_is_bf16, size - i);
        squares += part * part;
    }
    const float scale = 1 / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES)
        store(y, i, y_is_bf16, load(x, i, x_is_bf16, size - i) * scale * load(weight, i, 0, size - i), size - i);
}
