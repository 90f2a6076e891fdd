// What callers see of the library: its structures and functions. structures.py reads them from here, so they are
// declared in the forms that stand here already.
//
// The functions exist once for each instruction set that was compiled; library.c calls those of the set in use.

#ifndef LIBRARY_H
#define LIBRARY_H

#include <stddef.h>
#include <stdint.h>

// What the library's files call of each other, and nobody else.
#define PRIVATE __attribute__((visibility("hidden")))

// --------------------------------------------------------------------------------------------------------- products

// x W^T, and b if there is one. Weights are packed in panels of `panel_width` outputs, in words of 32 bits:
//
// FP32      float32, input after input.
// BF16      bfloat16 in pairs of inputs, of which the lower half of a word is the first.
// QUANTISED weights of GGUF files, which `formats/formats.h` describes; `weight` points to a `Quantised`. x may always be
//           bfloat16.
typedef struct {
    int64_t inputs, outputs;
    const void *weight;
    const float *bias;
    int32_t kind;
} PackedWeight;

enum { FP32, BF16, QUANTISED };

// Some outputs of a QUANTISED product: a format of `formats/` and its packed weights. All parts but the last have whole
// panels, of `quantised_width` outputs.
typedef struct {
    int64_t format, outputs;
    const uint8_t *weight;
} QuantisedPart;

enum { MOST_PARTS = 3 };

typedef struct {
    int64_t count;
    QuantisedPart parts[MOST_PARTS];
} Quantised;

// A weight format of GGUF files.
typedef struct {
    const char *name;
    int32_t number;       // in GGUF files
    int32_t inputs;       // of a block
    int32_t bytes;        // of a block in a file
    int32_t packed_bytes; // of a block of `quantised_width` outputs,
    int32_t head_bytes;   // and of what stands before its parts: its scales, and minima
    int32_t infinite;     // the exponent, as bits of a scale, of what is no number
} Format;

// -------------------------------------------------------------------------------------------------- layers and texts

// An expert: down (gated by act(gate)). With SQUARED there is no up, which has no inputs then.
typedef struct {
    PackedWeight gate, up, down;
} Expert;

// How experts are gated: act(gate) up, (up + 1) gate sigmoid(alpha gate), or the square of gate where that is above zero.
enum { SILU, GELU, CLAMPED, SQUARED };
enum { SOFTMAX, SIGMOID }; // how weights are made of logits
enum { MOST_EXPERTS = 1024, MOST_GROUPS = 64 };

// The experts of a layer, of which each row chooses some. Of equal ones it takes the first.
typedef struct {
    const Expert *experts;            // `count`, and behind them the one that all rows share
    int64_t count, used;              // used: by each row
    PackedWeight router, shared_gate; // without inputs where there is none; of one output
    const float *correction;          // [count], what is added to scores for choosing alone; NULL for none
    int64_t groups, groups_used;      // of experts next to each other; only those in the best groups are chosen
    int32_t scoring, normalised;      // normalised: whether the weights of a row's experts add up to `scaling`
    int32_t activation, shared;
    float scaling, limit, alpha; // CLAMPED: gate is at most limit, and up at most that far from zero
} Experts;

// A layer that goes on from a state behind the token before: a gated delta rule, Mamba2, or a convolution alone. Numbers
// that a convolution reads are its channels: queries and keys [keys, key_dim] each, in Mamba C and B, and values
// [values, dim]. Without keys there is nothing behind the convolution, and its inputs are multiplied by others first.
typedef struct {
    PackedWeight gates; // what decays and rates are made of; without outputs where `qkv` gives these, too
    // Where in a token's inputs stand: [keys] queries and [keys] keys, and [values] values, gates, decays, rates and what
    // values are multiplied by.
    const int64_t *from;
    const float *conv, *conv_bias;   // [width, channels]; NULL where there is none
    const float *decay, *decay_bias; // [values]
    const float *skip;               // [values], how much of values is added to what queries read; NULL for nothing
    const float *factors;            // of the norm [values x dim]
    int64_t keys, values, key_dim, dim;
    int64_t width; // tokens that the convolution sees, at most MOST_WIDTH
    int64_t group; // numbers that are normalised together, 0 where there is no norm
    float eps;
    int32_t delta;       // whether values are corrected by what is stored under their keys
    int32_t gates_first; // whether gates come before the norm
} Mixer;

enum { MOST_WIDTH = 8 };

// What such layers keep of one text, and its new tokens.
typedef struct {
    const float *before; // [mixers, state]
    float *after;        // where the states behind the first `folded` tokens go; NULL where none are written
    float *kept;         // [mixers, room, inputs] of tokens behind `before`
    int64_t room;
    const int32_t *replayed; // [replays], where the inputs of the tokens stand that are run again, in order
    int64_t replays, folded, count;
    const int32_t *parents; // [count] of the new tokens, -1 for those behind all that are run again
    const int32_t *slots;   // [count], where their inputs are kept; -1 nowhere
} RecurrentState;

typedef struct {
    PackedWeight qkv, o, gate_up, down;
    const float *norm_in, *norm_before_mlp;
    const float *head_norm; // [heads + kv_heads, dim], NULL where queries and keys have no norm
    int64_t size, heads, kv_heads, dim;
    float eps, head_eps;
    const float *norm_behind_attention, *norm_behind_mlp; // NULL where what they would normalise is added as it is
    int32_t kind, place;    // of the pass's kinds of layers its own, and where it stands there
    int32_t gelu;           // whether gates are GELU in place of SiLU
    int32_t gated;          // whether each query has a gate behind it, by which what it attended to is multiplied
    int64_t rotary_dim;     // numbers of a head that are rotated, the first ones
    const float *sinks;     // [heads], see `Attention`
    const Experts *experts; // beside gate_up and down, or in their place; NULL where there are none
    const Mixer *mixer;     // what stands in place of attention; `qkv` gives its inputs. NULL for attention
    float residual;         // what is added is multiplied by it
} Layer;

// One text's new tokens. Their keys and values [kv_heads, slots, dim] stand in its cache behind those of its tokens from
// position `first` to `length`; distances are in numbers. A quantised cache holds codes of one byte, from -127 to 127, and
// for each key and value in a slot a scale, float32 or bfloat16 as the pass is, by which its codes are
// multiplied; `dim` is then a multiple of four. `run_layers` writes those of the new tokens, `attend` finds them there.
typedef struct {
    const void *keys, *values;
    int64_t key_layer, key_head, key_slot, value_layer, value_head, value_slot;
    int64_t first, length, count;
    const uint8_t *mask; // [count, count], which new token sees which; NULL where each sees those before it
    const void *key_scales, *value_scales; // [kv_heads, slots]; NULL where keys and values are numbers themselves
    int64_t scale_layer, scale_head;
} SequenceKV;

typedef struct {
    const SequenceKV *texts;
    const void *queries; // [tokens of all texts, .., dim], `query_token` numbers from one token to the next
    void *out;           // [tokens of all texts, heads, value_dim]
    int64_t query_token, heads, kv_heads, dim, value_dim;
    float scaling;
    int32_t is_bf16;
    const float *sinks; // [heads], scores that take part in each softmax; NULL where there are none
    int64_t step, back; // a token sees those from `back` before the last multiple of `step` on; step 0: all before it
    float softcap;      // c, where a score s becomes c tanh(s / c); 0 for none
} Attention;

// Some layers of a pass over the new tokens of several texts.
typedef struct {
    const Layer *const *layers;
    int64_t first, last; // of the model's layers, those to run
    int64_t rows;        // tokens of all texts
    void *states;        // [rows, size], which the layers change
    void *heads; // [rows, heads + 2 kv_heads + .., dim] of one layer, `heads_layer` numbers behind those of the last
    int64_t heads_layer;
    const float *const *cosines, *const *sines; // by kind of layer [rows, rotary_dim]
    float *scratch;
    int64_t kinds;                  // whose angles, and whose keys and values, are their own
    const RecurrentState *memories; // by text; NULL where no layer has a mixer
    float *mixed;                   // room for what `mixer_sizes` says
} Pass;

// ------------------------------------------------------------------------------------------------- tokens and drafts

// How one text's tokens are chosen.
typedef struct {
    const uint8_t *special;   // by token: whether its score takes more than the temperature; NULL where no token's does
    const uint8_t *penalised; // by token, and so are bias and counts; NULL where there are none
    const double *bias;
    const int32_t *counts; // in the output
    double penalty, frequency, presence, temperature;
    int64_t top_k;         // 0 where it filters nothing,
    double top_p;          // and here 1,
    double log_min_p, eta; // -INFINITY and 0
    uint64_t seed;
    int32_t do_sample; // without noise the best one is chosen; where nobody samples, nothing is filtered
} Sampling;

// A head: state + change, and for a gated one + down (silu(gate) * up).
typedef struct {
    PackedWeight readers; // of change, or of change, gate and up: they read the same
    PackedWeight down;    // without inputs where the head is not gated
    const float *norm_in, *norm_out;
    float eps;
} Head;

typedef struct {
    const Head *heads;
    int64_t count, size;        // of heads, and of a state
    int32_t conditioned;        // whether they also read the token before
    int32_t chained;            // whether a head goes on from the state of the one before
    int32_t vocabulary_is_bf16; // what the product with its rows takes
    int32_t embeddings_are;     // FP32, BF16, or QUANTISED and more by the place of their format
    const void *embeddings;
    const float *ones; // [size]
    float embedding_eps, logit_scale;
    PackedWeight vocabulary;
    const int64_t *ids; // the tokens drafted; NULL where they are all
} Drafter;

// A text, and what is drafted behind it. `out` gets level by level what `HeadLevels.read` takes. The first level may be
// given there; heads then draft the others.
typedef struct {
    Sampling choosing;
    int64_t position; // of the first draft
    const void *state;
    int32_t state_is_bf16;
    int32_t given;  // whether the first level is
    int64_t newest; // token
    int64_t levels, width, beam;
    double *out;
} Drafts;

enum { MOST_LEVELS = 64 }; // of heads
// Keys of attention that are summed together, query heads of a KV head, and numbers of a head that it takes at most; of
// codes these are fewer.
enum { KEYS_TOGETHER = 256, QUERY_HEADS_HELD = 48, MOST_DIM = 576, MOST_CODED_DIM = 512 };

// ---------------------------------------------------------------------------------------------------------- layouts

// name, bytes: callers compare these with their own, see `structures`.
// clang-format off
#define EACH_STRUCTURE(X)                                                                                          \
    X(PackedWeight, 40) X(QuantisedPart, 24) X(Quantised, 80) X(Format, 32) X(Expert, 120) X(Experts, 160) \
    X(Mixer, 160) X(RecurrentState, 80) X(Layer, 296) X(SequenceKV, 128) X(Attention, 104)  \
    X(Pass, 104) X(Sampling, 112) X(Head, 104) X(Drafter, 112) X(Drafts, 176)
// clang-format on

#define HAS_SIZE(name, bytes) _Static_assert(sizeof(name) == (bytes), "the size of " #name);
EACH_STRUCTURE(HAS_SIZE)
_Static_assert(
    offsetof(PackedWeight, kind) == 32 && offsetof(Quantised, parts) == 8 && offsetof(Format, number) == 8, "offsets");
_Static_assert(offsetof(Layer, norm_in) == 4 * sizeof(PackedWeight) && offsetof(Layer, eps) == 216, "offsets");
_Static_assert(
    offsetof(SequenceKV, mask) == 88 && offsetof(Attention, scaling) == 64 && offsetof(Pass, scratch) == 72, "offsets");
_Static_assert(offsetof(Drafter, embeddings) == 40 && offsetof(Drafter, vocabulary) == 64, "offsets");
_Static_assert(offsetof(Drafts, state) == 120 && offsetof(Drafts, newest) == 136, "offsets");

typedef struct {
    const char *name;
    int64_t bytes;
} Structure;

// -------------------------------------------------------------------------------------------------------- functions

// Those that an instruction set has its own of: result, name, parameters, arguments.
//
// linear            x [rows, inputs] to y [rows, outputs]. x is bfloat16 only where `multiplies_bf16`, or with QUANTISED.
// linear_each       the same with `count` weights of one shape and kind, none of them QUANTISED: x [count, rows, inputs] to
//                   y [count, rows, outputs].
// before_attention  rows [rows, size] to queries, keys, values and gates [rows, heads + 2 kv_heads + .., dim]. Angles
//                   are [rows, rotary_dim]; `scratch` has room for `rows_together` rows of the layer's input and of its
//                   queries, keys, values and gates.
// behind_attention  what attention gave [rows, heads x dim] and the layer's input [rows, size] to the layer's output,
//                   which may take the input's place. `scratch` has room for `rows_together` rows of twice the layer's
//                   size and of its size, or of one and a half times the outputs of gate and up if these are more; where
//                   experts stand beside these, of both, and for experts at least of `expert_numbers`.
// expert_numbers    numbers of memory that so many rows need of `scratch`.
// run_experts       rows [rows, size] to what the experts `ids` [rows, used] give of them, times `weights`.
// run_block         rows to what the experts that they choose, and the shared one, give.
// route             rows to their logits [rows, count], the experts that they choose and the weights of these.
// gate_attended     multiply what attention gave [rows, heads x dim] by the gates in what `before_attention` gave.
// mixer_sizes       numbers of a mixer's state, of a token's inputs that are kept, and of the room in `mixed` for a new
//                   token and for any token, to `sizes`.
// attend            returns 0, or 1 where there was no memory.
// run_layers        `a` describes by kind the texts of its first layer. Returns 0, or 1 where there was no memory.
// sample_candidates the tokens that `sampling/` may choose from `vocab` logits at a position, ascending, with their scores
//                   before noise: those whose approximate noise does not rule them out, or without noise the first of the
//                   best. Returns how many, or -1 where there are more than `room`, or no memory, or the logits hold what
//                   is no number or too large.
// log_probabilities of a token in the distribution that `sampling/` draws from, and those of the `most` likeliest tokens
//                   that it can draw, the likeliest first, of equal ones the first. Returns how many these are, or
//                   -1 where there is no memory. `sample_candidates` must have found candidates in the logits.
// rank_drafts       the `width` best of `vocab` drafts at a position, the best first.
// draft_numbers     numbers of memory that `draft_levels` needs for so many branches at a time.
// draft_levels      `room` has `draft_numbers` for the branches of all texts. Returns 0, or 1 where there was no memory.
// unpack_rows       rows of packed weights, by their numbers, to `to` [count, inputs].
#define EACH_FUNCTION(X)                                                                                               \
    X(void, linear, (const PackedWeight *p, const void *x, int64_t rows, int is_bf16, void *y, int threads),           \
        (p, x, rows, is_bf16, y, threads))                                                                             \
    X(void, linear_each,                                                                                               \
        (const PackedWeight *p, int64_t count, const void *x, int64_t rows, int is_bf16, void *y, int threads),        \
        (p, count, x, rows, is_bf16, y, threads))                                                                      \
    X(void, before_attention,                                                                                          \
        (const Layer *l, const void *x, int64_t rows, const float *cosines, const float *sines, void *out,             \
            float *scratch, int is_bf16, int threads),                                                                 \
        (l, x, rows, cosines, sines, out, scratch, is_bf16, threads))                                                  \
    X(void, behind_attention,                                                                                          \
        (const Layer *l, const void *attended, const void *x, int64_t rows, void *y, float *scratch, int is_bf16,      \
            int threads),                                                                                              \
        (l, attended, x, rows, y, scratch, is_bf16, threads))                                                          \
    X(int64_t, expert_numbers, (const Experts *e, int64_t rows), (e, rows))                                            \
    X(void, run_experts,                                                                                               \
        (const Experts *e, const void *x, int64_t rows, const int64_t *ids, const float *weights, void *y,             \
            float *scratch, int is_bf16, int threads),                                                                 \
        (e, x, rows, ids, weights, y, scratch, is_bf16, threads))                                                      \
    X(void, run_block,                                                                                                 \
        (const Experts *e, const void *x, int64_t rows, void *y, float *scratch, int is_bf16, int threads),            \
        (e, x, rows, y, scratch, is_bf16, threads))                                                                    \
    X(void, route,                                                                                                     \
        (const Experts *e, const void *x, int64_t rows, float *logits, int64_t *ids, float *weights, int is_bf16,      \
            int threads),                                                                                              \
        (e, x, rows, logits, ids, weights, is_bf16, threads))                                                          \
    X(void, gate_attended,                                                                                             \
        (const Layer *l, const void *heads, int64_t rows, void *attended, int is_bf16, int threads),                   \
        (l, heads, rows, attended, is_bf16, threads))                                                                  \
    X(void, mixer_sizes, (const Layer *l, int64_t *sizes), (l, sizes))                                                 \
    X(int, attend, (const Attention *a, int64_t count, int threads), (a, count, threads))                              \
    X(int, run_layers, (const Pass *p, const Attention *a, int64_t count, int threads), (p, a, count, threads))        \
    X(int64_t, sample_candidates,                                                                                      \
        (const Sampling *c, int64_t position, const void *logits, int is_bf16, int64_t vocab, int64_t *ids,            \
            double *scores, int64_t room),                                                                             \
        (c, position, logits, is_bf16, vocab, ids, scores, room))                                                      \
    X(int64_t, log_probabilities,                                                                                      \
        (const Sampling *c, const void *logits, int is_bf16, int64_t vocab, int64_t token, double *logprob,            \
            int64_t most, int64_t *ids, double *values),                                                               \
        (c, logits, is_bf16, vocab, token, logprob, most, ids, values))                                                \
    X(void, rank_drafts,                                                                                               \
        (const Sampling *c, int64_t position, float *logits, int64_t vocab, int64_t width, float *scores,              \
            int64_t *tokens),                                                                                          \
        (c, position, logits, vocab, width, scores, tokens))                                                           \
    X(int64_t, draft_numbers, (const Drafter *d, int64_t branches, int64_t width), (d, branches, width))               \
    X(int, draft_levels, (const Drafter *d, const Drafts *texts, int64_t count, float *room, int threads),             \
        (d, texts, count, room, threads))                                                                              \
    X(void, unpack_rows,                                                                                               \
        (int format, const uint8_t *packed, int64_t inputs, const int64_t *rows, int64_t count, float *to,             \
            int threads),                                                                                              \
        (format, packed, inputs, rows, count, to, threads))

#define MEMBER(result, name, parameters, arguments) result(*name) parameters;

typedef struct {
    const char *name;
    int multiplies_bf16; // whether products take inputs in bfloat16
    int panel_width;     // outputs of a product that stand beside each other
    int rows_together;   // that go through a layer
    EACH_FUNCTION(MEMBER)
} InstructionSet;

#endif
