// The layers of a model: what stands before and behind attention, and all layers of a pass in one call.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "attention.h"
#include "experts.h"
#include "mixers.h"

#include <float.h>

// Which of a product's heads is the one that stands in a place of [queries, keys, values, gates]: a query's gate comes
// from behind it.
INLINE int64_t head_at(const Layer *l, int64_t place) {
    if (!l->gated) return place;
    const int64_t ungated = l->heads + 2 * l->kv_heads;
    return place < l->heads ? 2 * place : place < ungated ? place + l->heads : 2 * (place - ungated) + 1;
}

// Queries and keys are normalised, if they have a norm, and rotated; values and gates are left as they are.
ONCE void rotate(
    const Layer *l, float *all, const float *cosines, const float *sines, void *out, int64_t at, int is_bf16) {
    const int64_t dim = l->dim, half = l->rotary_dim / 2, normed = l->heads + l->kv_heads, count = l->qkv.outputs / dim;
    for (int64_t head = 0; head < count; head++, at += dim) {
        float *own = all + head_at(l, head) * dim;
        if (head < normed && l->head_norm) norm(own, 0, l->head_norm + head * dim, l->head_eps, dim, own, 0);
        for (int64_t i = 0; head < normed && i < half; i += LANES) {
            const int64_t left = half - i;
            const vec a = load(own, i, 0, left), b = load(own, i + half, 0, left);
            const vec first = fused(a, load(cosines, i, 0, left), -(b * load(sines, i, 0, left)));
            const vec second = fused(b, load(cosines, i + half, 0, left), a * load(sines, i + half, 0, left));
            store(out, at + i, is_bf16, first, left);
            store(out, at + half + i, is_bf16, second, left);
        }
        for (int64_t i = head < normed ? l->rotary_dim : 0; i < dim; i += LANES)
            store(out, at + i, is_bf16, load(own, i, 0, dim - i), dim - i);
    }
}

// Write what a quantised cache keeps of a key or a value: codes, and a scale to place `at`. `CacheForm.encode` computes the
// same.
static void encode(const void *x, int64_t dim, int is_bf16, int8_t *codes, void *scales, int64_t at) {
    typedef int8_t bytes __attribute__((vector_size(LANES)));
    vec top = {0}, none = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec numbers = load(x, i, is_bf16, dim - i);
        top = larger(larger(numbers, -numbers), top), none += numbers * 0;
    }
    store(scales, at, is_bf16, splat(largest_of(top) / 127), 1);
    float scale = load(scales, at, is_bf16, 1)[0];
    const int fails = sum(none) != 0; // one of them is no number, or infinite
    if (scale < FLT_MIN) scale = FLT_MIN;
    store(scales, at, is_bf16, splat(fails ? NAN : scale), 1);
    for (int64_t i = 0; i < dim; i += LANES) {
        const vec whole = fails ? (vec){0} : to_whole(load(x, i, is_bf16, dim - i) / scale);
        const vec code = -larger(splat(-127), -larger(splat(-127), whole));
        const bytes narrow = __builtin_convertvector(__builtin_convertvector(code, ivec), bytes);
        memcpy(codes + i, &narrow, dim - i < LANES ? dim - i : LANES);
    }
}

// Write the keys and values of a new token, which stand behind its queries, to its text's cache.
static void write_kv(const Attention *a, int64_t row) {
    const int size = a->is_bf16 ? 2 : 4;
    const SequenceKV *t = a->texts;
    int64_t token = row;
    while (token >= t->count) token -= t++->count;
    const int64_t slot = t->length - t->first + token;
    const char *pairs = (const char *)a->queries + (row * a->query_token + a->heads * a->dim) * size;
    for (int64_t g = 0; g < a->kv_heads; g++) {
        const int64_t key = g * t->key_head + slot * t->key_slot, value = g * t->value_head + slot * t->value_slot;
        const char *new_key = pairs + g * a->dim * size, *new_value = new_key + a->kv_heads * a->dim * size;
        if (t->key_scales) {
            const int64_t scale = g * t->scale_head + slot;
            encode(new_key, a->dim, a->is_bf16, (int8_t *)t->keys + key, (void *)t->key_scales, scale);
            encode(new_value, a->dim, a->is_bf16, (int8_t *)t->values + value, (void *)t->value_scales, scale);
            continue;
        }
        memcpy((char *)t->keys + key * size, new_key, a->dim * size);
        memcpy((char *)t->values + value * size, new_value, a->dim * size);
    }
}

// A layer with rows [rows, size], or what stands before attention in it or behind: `attended` is what attention gave
// [rows, heads x dim]. Angles are [rows, rotary_dim]. `texts` are those whose caches get keys and values; NULL for none.
typedef struct {
    const Layer *l;
    const void *x, *attended;
    const Attention *texts;
    int64_t rows;
    const float *cosines, *sines;
    void *out;
    float *scratch;
    int is_bf16;
} Rows;

// Queries, keys, values and gates [rows, heads + 2 kv_heads + .., dim]. `scratch` has room for CHUNK rows of the layer's
// input and of these.
static void share_before_attention(const void *argument, Worker *w) {
    const Rows *all = argument;
    const Layer *l = all->l;
    const int64_t width = l->qkv.outputs, rotary_dim = l->rotary_dim;
    const int is_bf16 = all->is_bf16;
    float *normed = all->scratch, *heads = normed + CHUNK * l->size;
    for (int64_t first = 0; first < all->rows; first += CHUNK) {
        const int64_t count = all->rows - first < CHUNK ? all->rows - first : CHUNK;
        EACH_PIECE(r, count, w)
        norm(row_of(all->x, (first + r) * l->size, is_bf16), is_bf16, l->norm_in, l->eps, l->size,
            row_of(normed, r * l->size, is_bf16), is_bf16);
        const Out to = {heads, NULL, 0, 0};
        share(&l->qkv, normed, is_bf16, count, &to, w);
        EACH_PIECE(r, count, w) {
            rotate(l, heads + r * width, all->cosines + (first + r) * rotary_dim, all->sines + (first + r) * rotary_dim,
                all->out, (first + r) * width, is_bf16);
            if (all->texts) write_kv(all->texts, first + r);
        }
    }
}

void before_attention(const Layer *l, const void *x, int64_t rows, const float *cosines, const float *sines, void *out,
    float *scratch, int is_bf16, int threads) {
    const Rows all = {l, x, NULL, NULL, rows, cosines, sines, out, scratch, is_bf16};
    pool_run(share_before_attention, &all, threads);
}

// What attention gave [rows, heads x dim] times the gates behind the values of [rows, heads + .., dim].
typedef struct {
    const Layer *l;
    const void *heads;
    int64_t rows;
    void *attended;
    int is_bf16;
} Gates;

static void share_gates(const void *argument, Worker *w) {
    const Gates *g = argument;
    const int64_t size = g->l->heads * g->l->dim, width = g->l->qkv.outputs, gates = width - size;
    EACH_PIECE(r, g->rows, w)
    for (int64_t i = 0; i < size; i += LANES) {
        const vec x = load(g->attended, r * size + i, g->is_bf16, size - i);
        const vec by = load(g->heads, r * width + gates + i, g->is_bf16, size - i);
        store(g->attended, r * size + i, g->is_bf16, gated_by(x, by), size - i);
    }
}

void gate_attended(const Layer *l, const void *heads, int64_t rows, void *attended, int is_bf16, int threads) {
    const Gates gates = {l, heads, rows, attended, is_bf16};
    pool_run(share_gates, &gates, threads);
}

// x and `own` times what the layer multiplies it by, behind its norm if it has one; `own` is written over.
static void add_own(
    const Layer *l, float *own, const float *weight, const void *x, int x_is_bf16, void *y, int y_is_bf16) {
    if (weight) norm(own, 0, weight, l->eps, l->size, own, 0);
    for (int64_t i = 0; i < l->size; i += LANES) {
        const int64_t left = l->size - i;
        store(y, i, y_is_bf16, fused(splat(l->residual), load(own, i, 0, left), load(x, i, x_is_bf16, left)), left);
    }
}

// Gate and up [rows, 2 x width] to what is gated [rows, width].
typedef struct {
    const float *gate_up;
    void *gated;
    int64_t width;
    int gelu, is_bf16;
} Gating;

static void gate_columns(const void *argument, int64_t first_row, int64_t last_row, Columns columns) {
    const Gating *g = argument;
    const int64_t width = g->width;
    for (int64_t r = first_row; r < last_row; r++)
        for (int64_t i = columns.first; i < columns.last; i += LANES) {
            const int64_t left = columns.last - i;
            const vec gate = load(g->gate_up, r * 2 * width + i, 0, left);
            const vec up = load(g->gate_up, r * 2 * width + width + i, 0, left);
            store(g->gated, r * width + i, g->is_bf16, (g->gelu ? gelu(gate) : silu(gate)) * up, left);
        }
}

// Add what the gated product gives of `normed` to `hidden` [rows, size], to `out`, by way of `gate_up`. What is
// changed before it is added stands in `own`.
static void share_gated(const Layer *l, const void *normed, const float *hidden, int64_t rows, float *gate_up,
    float *own, void *out, int out_is_bf16, int is_bf16, Worker *w) {
    const int64_t size = l->size, width = l->down.inputs;
    const int waits = l->norm_behind_mlp || l->residual != 1;
    const Gating gating = {gate_up, gate_up + CHUNK * 2 * width, width, l->gelu, is_bf16};
    const Behind gate = {gate_columns, &gating};
    const Out to_gate_up = {gate_up, NULL, 0, 0}, to_own = {own, NULL, 0, 0}, to_out = {out, hidden, out_is_bf16, 0};
    share_halves(&l->gate_up, normed, is_bf16, rows, &to_gate_up, &gate, w);
    share(&l->down, gating.gated, is_bf16, rows, waits ? &to_own : &to_out, w);
    if (!waits) return;
    EACH_PIECE(r, rows, w)
    add_own(
        l, own + r * size, l->norm_behind_mlp, hidden + r * size, 0, row_of(out, r * size, out_is_bf16), out_is_bf16);
}

// The layer's output, which may take the input's place, of at most CHUNK rows.
static void share_chunk_behind_attention(const Rows *chunk, Worker *w) {
    const Layer *l = chunk->l;
    const int64_t size = l->size, rows = chunk->rows;
    const int is_bf16 = chunk->is_bf16, waits = l->norm_behind_attention || l->residual != 1;
    float *hidden = chunk->scratch, *normed = hidden + CHUNK * size, *gate_up = normed + CHUNK * size;
    // What is changed before it is added, where gate and up will stand.
    float *of_attention = gate_up;
    const Out to_hidden = {hidden, chunk->x, 0, is_bf16}, to_own = {of_attention, NULL, 0, 0};
    share(&l->o, chunk->attended, is_bf16, rows, waits ? &to_own : &to_hidden, w);
    EACH_PIECE(r, rows, w) {
        if (waits)
            add_own(l, of_attention + r * size, l->norm_behind_attention, row_of(chunk->x, r * size, is_bf16), is_bf16,
                hidden + r * size, 0);
        norm(hidden + r * size, 0, l->norm_before_mlp, l->eps, size, row_of(normed, r * size, is_bf16), is_bf16);
    }
    if (!l->experts) {
        share_gated(l, normed, hidden, rows, gate_up, normed, chunk->out, is_bf16, is_bf16, w);
        return;
    }
    float *own = gate_up + CHUNK * 3 * l->down.inputs; // experts read what is normed
    if (l->gate_up.outputs) share_gated(l, normed, hidden, rows, gate_up, own, hidden, 0, is_bf16, w);
    share_experts(l->experts, normed, l->residual, hidden, rows, chunk->out, gate_up, is_bf16, w);
}

// `scratch` has room for CHUNK rows as `behind_attention` says.
static void share_behind_attention(const void *argument, Worker *w) {
    const Rows *all = argument;
    const int64_t size = all->l->size;
    for (int64_t first = 0; first < all->rows; first += CHUNK) {
        Rows chunk = *all;
        chunk.rows = all->rows - first < CHUNK ? all->rows - first : CHUNK;
        chunk.x = row_of(all->x, first * size, all->is_bf16), chunk.out = row_of(all->out, first * size, all->is_bf16);
        chunk.attended = row_of(all->attended, first * all->l->o.inputs, all->is_bf16);
        share_chunk_behind_attention(&chunk, w);
    }
}

void behind_attention(const Layer *l, const void *attended, const void *x, int64_t rows, void *y, float *scratch,
    int is_bf16, int threads) {
    const Rows all = {l, x, attended, NULL, rows, NULL, NULL, y, scratch, is_bf16};
    pool_run(share_behind_attention, &all, threads);
}

// By kind of layer how the work of attention is cut, or NULL where there was no memory.
static Plan *make_plans(const Pass *p, const Attention *a, int64_t count, int threads) {
    Plan *plans = malloc((p->kinds + 1) * sizeof(Plan));
    for (int64_t kind = 0; plans && kind < p->kinds; kind++)
        if (make_plan(&a[kind], count, threads, &plans[kind])) {
            while (kind--) drop_plan(&plans[kind]);
            free(plans);
            return NULL;
        }
    return plans;
}

// A pass, by layer attention over its texts, by kind how that is cut, and by text what mixers go on from.
typedef struct {
    const Pass *p;
    Attention *attention;
    const Plan *plans;
    const Scan *scans;
    int64_t count;
} Passing;

// What stands in a layer before its last product reads it, by attention.
static void share_attending(const Layer *l, const Pass *p, const Attention *a, const Plan *plan, Worker *w) {
    const Rows before = {l, p->states, NULL, a, p->rows, p->cosines[l->kind], p->sines[l->kind], (void *)a->queries,
        p->scratch, a->is_bf16};
    share_before_attention(&before, w);
    share_attention(a, plan, w);
    const Gates gates = {l, a->queries, p->rows, a->out, a->is_bf16};
    if (l->gated) share_gates(&gates, w);
}

static void share_layers(const void *argument, Worker *w) {
    const Passing *all = argument;
    const Pass *p = all->p;
    for (int64_t number = p->first; number < p->last; number++) {
        const Layer *l = p->layers[number];
        const Attention *a = &all->attention[number - p->first];
        if (l->mixer) share_mixer(l, p, all->scans, all->count, a->out, a->is_bf16, w);
        else share_attending(l, p, a, &all->plans[l->kind], w);
        const Rows behind = {l, p->states, a->out, NULL, p->rows, NULL, NULL, p->states, p->scratch, a->is_bf16};
        share_behind_attention(&behind, w);
    }
}

// The first layer of a pass that has a mixer, NULL if none has.
static const Mixer *first_mixer(const Pass *p) {
    for (int64_t number = p->first; number < p->last; number++)
        if (p->layers[number]->mixer) return p->layers[number]->mixer;
    return NULL;
}

// Attention in layer `i` of a pass, whose texts are described in `a`, to `own` and `texts`.
static void attention_of_layer(
    const Pass *p, int64_t i, const Attention *a, int64_t count, Attention *own, SequenceKV *texts) {
    const Layer *l = p->layers[p->first + i];
    *own = a[l->mixer ? 0 : l->kind];
    own->texts = texts, own->queries = row_of(p->heads, i * p->heads_layer, a->is_bf16), own->sinks = l->sinks;
    for (int64_t n = 0; !l->mixer && n < count; n++) {
        texts[n] = a[l->kind].texts[n];
        SequenceKV *t = &texts[n];
        const int size = t->key_scales ? 1 : a->is_bf16 ? 2 : 4;
        t->keys = (const char *)t->keys + l->place * t->key_layer * size;
        t->values = (const char *)t->values + l->place * t->value_layer * size;
        if (!t->key_scales) continue;
        t->key_scales = row_of(t->key_scales, l->place * t->scale_layer, a->is_bf16);
        t->value_scales = row_of(t->value_scales, l->place * t->scale_layer, a->is_bf16);
    }
}

// `a` describes by kind the texts of its first layer. Returns 0, or 1 where there was no memory.
int run_layers(const Pass *p, const Attention *a, int64_t count, int threads) {
    const int64_t layers = p->last - p->first;
    const Mixer *mixer = first_mixer(p);
    SequenceKV *texts = malloc(layers * count * sizeof(SequenceKV));
    Attention *attention = malloc(layers * sizeof(Attention));
    Plan *plans = make_plans(p, a, count, threads);
    Scan *scans = mixer ? make_scans(mixer, p->memories, count, threads) : NULL;
    const int fails = !texts || !attention || !plans || (mixer && !scans);
    for (int64_t i = 0; !fails && i < layers; i++) attention_of_layer(p, i, a, count, &attention[i], texts + i * count);
    const Passing all = {p, attention, plans, scans, count};
    if (!fails) pool_run(share_layers, &all, threads);
    for (int64_t kind = 0; plans && kind < p->kinds; kind++) drop_plan(&plans[kind]);
    free(plans), free(attention), free(texts), drop_scans(scans, count);
    return fails;
}
