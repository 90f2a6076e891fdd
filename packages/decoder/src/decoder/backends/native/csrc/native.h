// What the files of an instruction set share: vectors of numbers, and what they call of each other.
//
// These files are compiled once for each instruction set, with SET as its name and its folder of arch/ among those where
// headers are found. Numbers are float32 or bfloat16 in memory and float32 in sums. Compilers must not join a product and
// a sum on their own (-ffp-contract=off): what is rounded once says so with `fused`, so that sets whose vectors have the
// same LANES have the same bits.

#ifndef NATIVE_H
#define NATIVE_H

#include "library.h"
#include "pool.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define IN_SET(name) PASTE(SET, name)

// The names of one set's functions for the linker.
#define linear IN_SET(linear)
#define linear_each IN_SET(linear_each)
#define before_attention IN_SET(before_attention)
#define behind_attention IN_SET(behind_attention)
#define expert_numbers IN_SET(expert_numbers)
#define run_experts IN_SET(run_experts)
#define run_block IN_SET(run_block)
#define route IN_SET(route)
#define gate_attended IN_SET(gate_attended)
#define mixer_sizes IN_SET(mixer_sizes)
#define attend IN_SET(attend)
#define run_layers IN_SET(run_layers)
#define sample_candidates IN_SET(sample_candidates)
#define log_probabilities IN_SET(log_probabilities)
#define rank_drafts IN_SET(rank_drafts)
#define draft_numbers IN_SET(draft_numbers)
#define draft_levels IN_SET(draft_levels)
#define share IN_SET(share)
#define share_halves IN_SET(share_halves)
#define multiply_panels IN_SET(multiply_panels)
#define panels_in IN_SET(panels_in)
#define pieces_of IN_SET(pieces_of)
#define width_of IN_SET(width_of)
#define share_experts IN_SET(share_experts)
#define quantised_panels IN_SET(quantised_panels)
#define round_inputs IN_SET(round_inputs)
#define unpack_row IN_SET(unpack_row)
#define unpack_rows IN_SET(unpack_rows)
#define norm IN_SET(norm)
#define make_plan IN_SET(make_plan)
#define drop_plan IN_SET(drop_plan)
#define share_attention IN_SET(share_attention)
#define make_scans IN_SET(make_scans)
#define drop_scans IN_SET(drop_scans)
#define share_mixer IN_SET(share_mixer)
#define best_drafts IN_SET(best_drafts)
#define tile_table IN_SET(tile_table)

#define INLINE static inline __attribute__((always_inline))
// Functions of their own, so that compilers need not find registers for many at once.
#define ONCE static __attribute__((noinline))

#define PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define UNROLL(times) PRAGMA(clang loop unroll_count(times))
#else
#define UNROLL(times) PRAGMA(GCC unroll times)
#endif

#define FUNCTION(result, name, parameters, arguments) PRIVATE result name parameters;
EACH_FUNCTION(FUNCTION)

// ---------------------------------------------------------------------------------------------------------- numbers

INLINE float widened(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float wide;
    memcpy(&wide, &bits, 4);
    return wide;
}

#include "vectors.h"

// An instruction set's `vectors.h` defines LANES, WIDE (vectors of an attention's tile), MOST_ROWS (of a product's tile), how
// many panels tiles of fewer than half of them (FEW_ROWS) and of others take at once,
// the types below by VECTORS(LANES), and these functions:
//
// all_widened    bfloat16 numbers.
// rounded        to the nearest bfloat16, ties to even; NaN stays NaN.
// load, store    LANES numbers from place `at` on, or the `count` that there are.
// larger         of two numbers; the second where either is no number.
// swapped        the lanes that are `step` apart change places.
// to_whole       the nearest whole number,
// nearest        and the same of 32 bits.
// times_power    x 2^n, for x from 1/2 to 2 and a whole n <= 126; 0 where n is small.
// fused          a b + c, rounded once.
// none           whether no lane is set.
// transpose      LANES vectors.
// dot_words      sum + products of the pairs of whole numbers of 16 bits in a with those in b; too large ones wrap around.
// code_quads     WIDE LANES codes of one byte of a, each with those of b, c and d behind it.
//
// BF16_PAIRS_MULTIPLY says whether there are products of pairs of bfloat16 numbers:
//
// dot_pairs      sum + products of the pairs of a with those of b.
// narrowed_both  two vectors to bfloat16, the first one's numbers in front.
// pairs_of       WIDE vectors of bfloat16 numbers, one of a beside one of b in each word; zeros behind those that there are.

INLINE vec splat(float x) { return x - (vec){0}; }

// Lanes in a fixed order.
INLINE float sum(vec x) {
    UNROLL(4)
    for (int step = LANES / 2; step; step /= 2) x += swapped(x, step);
    return x[0];
}

INLINE float largest_of(vec x) {
    UNROLL(4)
    for (int step = LANES / 2; step; step /= 2) x = larger(x, swapped(x, step));
    return x[0];
}

// 2^(n + f) of a whole n <= 126 and a fraction f, at most 1/2 from zero; 0 where n is small.
INLINE vec power_of(vec n, vec f) {
    vec p = splat(1.5403530393e-4f); // the series of 2^f: powers of log 2 over factorials
    p = fused(p, f, splat(1.3333558146e-3f));
    p = fused(p, f, splat(9.6181291076e-3f));
    p = fused(p, f, splat(5.5504108665e-2f));
    p = fused(p, f, splat(2.4022650696e-1f));
    p = fused(p, f, splat(6.9314718056e-1f));
    p = fused(p, f, splat(1.0f));
    return times_power(p, n);
}

// 2^x for x <= 0, within 2 units of the last place; 0 below -200.
INLINE vec power_of_two(vec x) {
    x = larger(splat(-200), x);
    const vec n = to_whole(x);
    return power_of(n, x - n);
}

// x / (1 + e^-of).
INLINE vec gated_by(vec x, vec of) {
    const vec y = -larger(splat(-87), -larger(splat(-87), of)); // from -87 to 87
    const vec n = to_whole(y * -1.44269504f);
    // -y / log 2 - n: the second product is what the first one lacks of the logarithm's digits.
    const vec f = fused(y, splat(-1.92596303e-8f), fused(y, splat(-1.44269504f), -n));
    return x / (1 + power_of(n, f));
}

INLINE vec silu(vec x) { return gated_by(x, x); }

// GELU by its approximation with the hyperbolic tangent, of which 1 + tanh(y / 2) is 2 / (1 + e^-y).
INLINE vec gelu(vec x) { return gated_by(x, 1.59576912f * fused(x * x * x, splat(0.044715f), x)); }

// The hyperbolic tangent.
INLINE vec tangent(vec x) {
    const vec y = -larger(splat(-43), -larger(splat(-43), x)); // from -43 to 43
    const vec n = to_whole(y * -2.88539008f);
    const vec f = fused(y, splat(-3.85192606e-8f), fused(y, splat(-2.88539008f), -n));
    return 2 / (1 + power_of(n, f)) - 1;
}

INLINE void *row_of(const void *x, int64_t at, int is_bf16) { return (char *)x + at * (is_bf16 ? 2 : 4); }

// --------------------------------------------------------------------------------------------------- products, norms

// Where a product goes: to `y` [rows, outputs], with `add` [rows, outputs] added if there is one.
typedef struct {
    void *y;
    const void *add;
    int32_t y_is_bf16, add_is_bf16;
} Out;

// A product in one stage or several. x is bfloat16 only where `multiplies_bf16`, or with QUANTISED weights.
PRIVATE void share(const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, Worker *w);

// Some columns of a matrix: [first, last).
typedef struct {
    int64_t first, last;
} Columns;

// What is done with rows [first_row, last_row) behind some columns of a product.
typedef struct {
    void (*run)(const void *argument, int64_t first_row, int64_t last_row, Columns columns);
    const void *argument;
} Behind;

// A product whose outputs are two halves, gate and up. `behind` is called for columns of a half, once for each row and
// column, when both halves have them.
PRIVATE void share_halves(
    const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, const Behind *behind, Worker *w);

// A product's outputs stand in panels, of `width_of` outputs each. Those of [first, last) are a piece, or a part of one.
PRIVATE int64_t width_of(const PackedWeight *p);
PRIVATE int64_t panels_in(const PackedWeight *p);
PRIVATE void multiply_panels(
    const PackedWeight *p, const void *x, int x_is_bf16, int64_t rows, const Out *out, int64_t first, int64_t last);

// Into how many pieces `units` of so many panels are cut for some rows, if they can be as many for each thread.
PRIVATE int64_t pieces_of(const PackedWeight *p, int64_t rows, int64_t units, int panels, int threads);

// x / sqrt(mean(x^2) + eps) * weight.
PRIVATE void norm(const void *x, int x_is_bf16, const float *weight, float eps, int64_t size, void *y, int y_is_bf16);

enum { PANEL = 2 * LANES };     // outputs of a product that stand beside each other
enum { CHUNK = 8 * MOST_ROWS }; // rows that go through a layer together, so that they stay in a core's cache

// ------------------------------------------------------------------------------------------------------------ drafts

// The `width` best of `vocab` drafts at a position, the best first, with their scores; of those that are not among
// them, -INFINITY. `ids` are the tokens that the logits are of, NULL where they are all. Tokens `drafted` before are
// penalised as those of the text are. The logits are written over.
PRIVATE void best_drafts(const Sampling *c, int64_t position, float *logits, const int64_t *ids, int64_t vocab,
    const int64_t *drafted, int64_t depth, int64_t width, float *scores, int64_t *tokens);

#endif
