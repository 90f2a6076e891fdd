// The layers of a model: what stands before and behind attention, and all layers of a pass in one call.
//
// Every number is a sum whose order follows from its own row alone. How many rows a call has, how threads share them and
// where tiles end changes no bit.

#include "attention.h"
#include "experts.h"
#include "mixers.h"

// Which of a product's heads is the one that stands in a place of [queries, keys, values, gates]: a query's gate comes
// from behind it.
INLINE int64_t head_at(const Layer *l, int64_t place) {
    if (!l->gated) return place;
    const int64_t ungated = l->heads + 2 * l->kv_heads;
    return place < l->heads ? 2 * place : place < ungated ? place + l->heads : 2 * (place - ungated) + 1;
}

// Queries and keys are normalised, if they have a norm, and rotated; values and gates are left as they are.
ONCE void turn(
    const Layer *l, float *all, const float *cosines, const float *sines, void *out, int64_t at, int is_bf16) {
    const int64_t dim = l->dim, half = l->turned / 2, normed = l->heads + l->kv_heads, count = l->qkv.outputs / dim;
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
        for (int64_t i = head < normed ? l->turned : 0; i < dim; i += LANES)
            store(out, at + i, is_bf16, load(own, i, 0, dim - i), dim - i);
    }
}

// Rows [rows, size] to queries, keys, values and gates [rows, heads + 2 kv_heads + .., dim], as one of the threads that
// share them. Angles are [rows, turned]; `scratch` has room for CHUNK rows of the layer's input and of these.
static void share_before_attention(const Layer *l, const void *x, int64_t rows, const float *cosines,
    const float *sines, void *out, float *scratch, int is_bf16, int thread, int all) {
    float *normed = scratch, *heads = scratch + CHUNK * l->size;
    const int64_t width = l->qkv.outputs;
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        for (int64_t r = thread; r < count; r += all)
            norm(row_of(x, (first + r) * l->size, is_bf16), is_bf16, l->norm_in, l->eps, l->size,
                row_of(normed, r * l->size, is_bf16), is_bf16);
#pragma omp barrier
        const Out to = {heads, NULL, 0, 0};
        share(&l->qkv, normed, is_bf16, count, &to, thread, all);
#pragma omp barrier
        for (int64_t r = thread; r < count; r += all)
            turn(l, heads + r * width, cosines + (first + r) * l->turned, sines + (first + r) * l->turned, out,
                (first + r) * width, is_bf16);
    }
}

void before_attention(const Layer *l, const void *x, int64_t rows, const float *cosines, const float *sines, void *out,
    float *scratch, int is_bf16, int threads) {
    (void)threads;
#pragma omp parallel num_threads(threads)
    share_before_attention(
        l, x, rows, cosines, sines, out, scratch, is_bf16, omp_get_thread_num(), omp_get_num_threads());
}

// Multiply what attention gave [rows, heads x dim] by the gates behind the values of [rows, heads + .., dim].
static void share_gates(
    const Layer *l, const void *heads, int64_t rows, void *attended, int is_bf16, int thread, int all) {
    const int64_t size = l->heads * l->dim, width = l->qkv.outputs, gates = width - size;
    for (int64_t r = thread; r < rows; r += all)
        for (int64_t i = 0; i < size; i += LANES) {
            const vec x = load(attended, r * size + i, is_bf16, size - i);
            const vec by = load(heads, r * width + gates + i, is_bf16, size - i);
            store(attended, r * size + i, is_bf16, gated_by(x, by), size - i);
        }
}

void gate_attended(const Layer *l, const void *heads, int64_t rows, void *attended, int is_bf16, int threads) {
    (void)threads;
#pragma omp parallel num_threads(threads)
    share_gates(l, heads, rows, attended, is_bf16, omp_get_thread_num(), omp_get_num_threads());
}

// x and the norm of `own`, which is written over.
static void add_normed(
    float *own, const float *weight, float eps, int64_t size, const void *x, int x_is_bf16, void *y, int y_is_bf16) {
    norm(own, 0, weight, eps, size, own, 0);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        store(y, i, y_is_bf16, load(x, i, x_is_bf16, left) + load(own, i, 0, left), left);
    }
}

// What attention gave [rows, heads x dim] and the layer's input [rows, size] to the layer's output, as one of the threads
// that share them. `scratch` has room for CHUNK rows of twice the layer's size and of one and a half times the outputs
// of gate and up. The output may take the input's place.
static void share_behind_attention(const Layer *l, const void *attended, const void *x, int64_t rows, void *y,
    float *scratch, int is_bf16, int thread, int all) {
    const int64_t width = l->down.inputs;
    float *hidden = scratch, *normed = hidden + CHUNK * l->size, *gate_up = normed + CHUNK * l->size;
    float *gated = gate_up + CHUNK * 2 * width;
    // What is normalised before it is added, where gate and up, and what was normed for them, have stood or will stand.
    float *of_attention = gate_up, *of_mlp = normed;
    for (int64_t first = 0; first < rows; first += CHUNK) {
        const int64_t count = rows - first < CHUNK ? rows - first : CHUNK;
        const void *from = row_of(x, first * l->size, is_bf16);
        const Out to_hidden = {hidden, from, 0, is_bf16}, to_norm = {of_attention, NULL, 0, 0};
        share(&l->o, row_of(attended, first * l->o.inputs, is_bf16), is_bf16, count,
            l->norm_behind_attention ? &to_norm : &to_hidden, thread, all);
#pragma omp barrier
        for (int64_t r = thread; r < count; r += all) {
            if (l->norm_behind_attention)
                add_normed(of_attention + r * l->size, l->norm_behind_attention, l->eps, l->size,
                    row_of(from, r * l->size, is_bf16), is_bf16, hidden + r * l->size, 0);
            norm(hidden + r * l->size, 0, l->norm_between, l->eps, l->size, row_of(normed, r * l->size, is_bf16),
                is_bf16);
        }
#pragma omp barrier
        if (l->experts) {
            share_experts(
                l->experts, normed, hidden, count, row_of(y, first * l->size, is_bf16), gate_up, is_bf16, thread, all);
            continue;
        }
        const Out to_gate_up = {gate_up, NULL, 0, 0};
        const Columns mine = share_halves(&l->gate_up, normed, is_bf16, count, &to_gate_up, thread, all);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = mine.first; i < mine.last; i += LANES) {
                const int64_t left = mine.last - i;
                const vec gate = load(gate_up, r * 2 * width + i, 0, left);
                const vec up = load(gate_up, r * 2 * width + width + i, 0, left);
                store(gated, r * width + i, is_bf16, (l->gelu ? gelu(gate) : silu(gate)) * up, left);
            }
#pragma omp barrier
        const Out to_own = {of_mlp, NULL, 0, 0}, to_y = {row_of(y, first * l->size, is_bf16), hidden, is_bf16, 0};
        share(&l->down, gated, is_bf16, count, l->norm_behind_mlp ? &to_own : &to_y, thread, all);
#pragma omp barrier
        if (!l->norm_behind_mlp) continue;
        for (int64_t r = thread; r < count; r += all)
            add_normed(of_mlp + r * l->size, l->norm_behind_mlp, l->eps, l->size, hidden + r * l->size, 0,
                row_of(y, (first + r) * l->size, is_bf16), is_bf16);
#pragma omp barrier
    }
}

void behind_attention(const Layer *l, const void *attended, const void *x, int64_t rows, void *y, float *scratch,
    int is_bf16, int threads) {
    (void)threads;
#pragma omp parallel num_threads(threads)
    share_behind_attention(l, attended, x, rows, y, scratch, is_bf16, omp_get_thread_num(), omp_get_num_threads());
}

// Write the keys and values of the new tokens, which stand behind their queries, to the texts' caches.
static void write_pairs(const Attention *a, int64_t count, int thread, int threads) {
    const int size = a->is_bf16 ? 2 : 4;
    for (int64_t n = 0, row = 0; n < count; n++) {
        const Text *t = &a->texts[n];
        for (int64_t token = 0; token < t->count; token++, row++) {
            if (row % threads != thread) continue;
            const int64_t slot = t->length - t->first + token;
            const char *pairs = (const char *)a->queries + (row * a->query_token + a->heads * a->dim) * size;
            for (int64_t g = 0; g < a->kv_heads; g++) {
                const int64_t key = g * t->key_head + slot * t->key_slot;
                const int64_t value = g * t->value_head + slot * t->value_slot;
                memcpy((char *)t->keys + key * size, pairs + g * a->dim * size, a->dim * size);
                memcpy((char *)t->values + value * size, pairs + (a->kv_heads + g) * a->dim * size, a->dim * size);
            }
        }
    }
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

// What stands in a layer before its last product reads it, by attention.
static void share_attending(const Layer *l, const Pass *p, const Attention *a, Attention *own, Text *texts,
    const Plan *plans, int64_t count, void *heads, int thread, int all) {
    const int is_bf16 = a->is_bf16;
    share_before_attention(
        l, p->states, p->rows, p->cosines[l->kind], p->sines[l->kind], heads, p->scratch, is_bf16, thread, all);
#pragma omp single
    {
        *own = a[l->kind];
        own->texts = texts, own->queries = heads, own->sinks = l->sinks;
        for (int64_t n = 0; n < count; n++) {
            texts[n] = a[l->kind].texts[n];
            texts[n].keys = row_of(texts[n].keys, l->place * texts[n].key_layer, is_bf16);
            texts[n].values = row_of(texts[n].values, l->place * texts[n].value_layer, is_bf16);
        }
    }
    write_pairs(own, count, thread, all);
#pragma omp barrier
    share_attention(own, &plans[l->kind]);
#pragma omp barrier
    if (!l->gated) return;
    share_gates(l, heads, p->rows, own->out, is_bf16, thread, all);
#pragma omp barrier
}

// The first layer of a pass that has a mixer, NULL if none has.
static const Mixer *first_mixer(const Pass *p) {
    for (int64_t number = p->first; number < p->last; number++)
        if (p->layers[number]->mixer) return p->layers[number]->mixer;
    return NULL;
}

// `a` describes by kind the texts of its first layer. Returns 0, or 1 where there was no memory.
int run_layers(const Pass *p, const Attention *a, int64_t count, int threads) {
    const Mixer *mixer = first_mixer(p);
    Text *texts = malloc(count * sizeof(Text));
    Plan *plans = make_plans(p, a, count, threads);
    Course *courses = mixer ? make_courses(mixer, p->memories, count, threads) : NULL;
    const int fails = !texts || !plans || (mixer && !courses);
    Attention own;
    (void)threads;
#pragma omp parallel num_threads(threads) if (!fails)
    {
        const int thread = omp_get_thread_num(), all = omp_get_num_threads();
        for (int64_t number = p->first; number < p->last && !fails; number++) {
            const Layer *l = p->layers[number];
            void *heads = row_of(p->heads, (number - p->first) * p->heads_layer, a->is_bf16);
            if (l->mixer) share_mixer(l, p, courses, count, a->out, a->is_bf16, thread, all);
            else share_attending(l, p, a, &own, texts, plans, count, heads, thread, all);
            share_behind_attention(l, a->out, p->states, p->rows, p->states, p->scratch, a->is_bf16, thread, all);
        }
    }
    for (int64_t kind = 0; plans && kind < p->kinds; kind++) drop_plan(&plans[kind]);
    free(plans), free(texts), drop_courses(courses, count);
    return fails;
}
