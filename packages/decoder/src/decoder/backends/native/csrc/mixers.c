// Layers that go on from a state: gated delta rules, Mamba2, and convolutions alone.
//
// A state is never written behind a token that may not stay. What is kept of such a token is its inputs, and where the
// text goes on with it, the next pass runs it again from the last state that was written: that costs no more memory
// traffic than going on from that state, which is read in any case. Each token is computed from the state behind its
// parent, with the same operations wherever it stands, so that its bits are those of plain decoding.

#include "mixers.h"

// ------------------------------------------------------------------------------------------------------------- sizes

INLINE int64_t channels_of(const Mixer *m) { return 2 * m->keys * m->key_dim + m->values * m->dim; }

INLINE int64_t panels_of_head(const Mixer *m) { return m->keys ? (m->dim + LANES - 1) / LANES : 0; }

// The numbers of LANES columns of a head's state.
INLINE int64_t panel_of(const Mixer *m) { return m->key_dim * LANES; }

// Of a state: the inputs of the convolution, and by head and panel [key_dim, LANES].
INLINE int64_t state_of(const Mixer *m) {
    return (m->width - 1) * channels_of(m) + m->values * panels_of_head(m) * panel_of(m);
}

// Of a token's inputs: those of the convolution, and by head decay and rate.
INLINE int64_t kept_of(const Mixer *m) { return channels_of(m) + 2 * m->values; }

// Of a token behind the convolution: queries, keys and values, decays, rates, and products of queries with keys.
INLINE int64_t mixed_of(const Mixer *m) { return kept_of(m) + m->keys; }

void mixer_sizes(const Layer *l, int64_t *sizes) {
    const Mixer *m = l->mixer;
    sizes[0] = state_of(m), sizes[1] = kept_of(m);
    sizes[2] = l->qkv.outputs + m->gates.outputs + m->values * m->dim;
    sizes[3] = mixed_of(m);
}

// ----------------------------------------------------------------------------------------------------------- scans

void drop_scans(Scan *scans, int64_t count) {
    for (int64_t n = 0; scans && n < count; n++) free(scans[n].above), free(scans[n].states);
    free(scans);
}

// Which tokens the convolution of each sees, and in which places states stand: the last child of a token takes over its
// place, the others begin with copies.
static int make_scan(const Mixer *m, const RecurrentState *t, int threads, Scan *c) {
    const int64_t rows = t->replays + t->count, seen = m->width - 1;
    int32_t *all = malloc((rows * (seen + 4) + 3) * sizeof(int32_t));
    if (!(c->above = all)) return 1;
    c->from = all + rows * seen, c->place = c->from + rows, c->last = c->place + rows + 1;
    int32_t *const unused = c->last + rows + 1;
    for (int64_t r = 0; r <= rows; r++) c->last[r] = -1;
    for (int64_t r = 0; r < rows; r++) {
        const int32_t above = r < t->replays ? -1 : t->parents[r - t->replays];
        const int32_t parent = (int32_t)(r < t->replays ? r - 1 : above < 0 ? t->replays - 1 : t->replays + above);
        c->from[r] = parent, c->last[parent + 1] = (int32_t)r;
        for (int64_t j = 0; j < seen; j++) {
            // Of tokens before the state there are the last ones, the newest of which is -1.
            const int64_t nearer = seen - 1 - j;
            if (!nearer) c->above[r * seen + j] = parent;
            else if (parent >= 0) c->above[r * seen + j] = c->above[parent * seen + j + 1];
            else c->above[r * seen + j] = (int32_t)(-1 - nearer);
        }
    }
    int32_t held = 0;
    c->place[0] = 0, c->places = 1;
    for (int64_t r = 0; r < rows; r++) {
        const int32_t parent = c->from[r], above = c->place[parent + 1];
        const int is_last = c->last[parent + 1] == r, writes = c->last[r + 1] >= 0 || r + 1 == t->folded;
        c->place[r + 1] = is_last || !writes ? above : held ? unused[--held] : (int32_t)c->places++;
        if (is_last && !writes) unused[held++] = above;
    }
    c->states = malloc((threads * c->places * panel_of(m) + 1) * sizeof(float));
    return !c->states;
}

Scan *make_scans(const Mixer *m, const RecurrentState *texts, int64_t count, int threads) {
    Scan *scans = calloc(count, sizeof(Scan));
    int64_t row = 0, mixed = 0;
    for (int64_t n = 0; scans && n < count; n++) {
        scans[n].row = row, scans[n].mixed = mixed;
        row += texts[n].count, mixed += texts[n].replays + texts[n].count;
        if (!make_scan(m, &texts[n], threads, &scans[n])) continue;
        drop_scans(scans, count);
        return NULL;
    }
    return scans;
}

// ------------------------------------------------------------------------------------- convolutions, decays and rates

// One text in one layer.
typedef struct {
    const Layer *l;
    const Mixer *m;
    const RecurrentState *t;
    const Scan *c;
    const float *before; // this layer's state, and where the next one goes
    float *after, *kept;
    float *inputs, *gates; // of the new tokens, what products gave
    float *mixed;          // of all tokens, `mixed_of`
    float *out;            // of the new tokens [values, dim]
} Mixing;

// Where `size` numbers of a token for the convolution stand: in its inputs from `from` on, in what is kept from `at` on.
INLINE const float *inputs_at(const Mixing *x, int64_t row, int64_t from, int64_t at) {
    if (row < 0) return x->before + (x->m->width - 1 + row) * channels_of(x->m) + at;
    if (row < x->t->replays) return x->kept + x->t->replayed[row] * kept_of(x->m) + at;
    return x->inputs + (row - x->t->replays) * x->l->qkv.outputs + from;
}

INLINE float *mixed_at(const Mixing *x, int64_t row) { return x->mixed + row * mixed_of(x->m); }

// The inputs of a new token's convolution, some of which are multiplied first, to what is kept of it.
static void keep_inputs(const Mixing *x, int64_t token, int64_t from, int64_t times, int64_t at, int64_t size) {
    float *row = x->inputs + token * x->l->qkv.outputs;
    for (int64_t i = 0; times >= 0 && i < size; i += LANES) {
        const int64_t left = size - i;
        store(row, from + i, 0, load(row, from + i, 0, left) * load(row, times + i, 0, left), left);
    }
    if (x->t->slots[token] >= 0)
        memcpy(x->kept + x->t->slots[token] * kept_of(x->m) + at, row + from, size * sizeof(float));
}

static void convolve(const Mixing *x, int64_t row, int64_t from, int64_t at, int64_t size) {
    const Mixer *m = x->m;
    const int64_t seen = m->width - 1, channels = channels_of(m);
    const float *taps[MOST_WIDTH];
    for (int64_t j = 0; j < seen; j++) taps[j] = inputs_at(x, x->c->above[row * seen + j], from, at);
    taps[seen] = inputs_at(x, row, from, at);
    for (int64_t i = 0; i < size; i += LANES) {
        const int64_t left = size - i;
        vec y = m->conv_bias ? load(m->conv_bias, at + i, 0, left) : (vec){0};
        for (int64_t j = 0; j <= seen; j++)
            y = fused(load(m->conv, j * channels + at + i, 0, left), load(taps[j], i, 0, left), y);
        store(mixed_at(x, row), at + i, 0, m->keys ? silu(y) : y, left);
    }
}

// Keep what the convolution will see behind the last token whose state is written.
static void write_convolved(const Mixing *x, int64_t from, int64_t at, int64_t size) {
    const int64_t seen = x->m->width - 1, last = x->t->folded - 1;
    for (int64_t j = 0; x->after && j < seen; j++) {
        const int64_t row = j + 1 < seen ? x->c->above[last * seen + j + 1] : last;
        memcpy(x->after + j * channels_of(x->m) + at, inputs_at(x, row, from, at), size * sizeof(float));
    }
}

// Some numbers that the convolution sees, of all tokens.
static void mix(const Mixing *x, int64_t from, int64_t times, int64_t at, int64_t size) {
    for (int64_t token = 0; token < x->t->count; token++) keep_inputs(x, token, from, times, at, size);
    for (int64_t row = 0; row < x->t->replays + x->t->count; row++) convolve(x, row, from, at, size);
    write_convolved(x, from, at, size);
}

// Multiply so that the sum of squares is that of `scale`, and return the sum of products with `y`, if it is given.
static float scaled(float *x, int64_t size, float scale, const float *y) {
    vec squares = {0}, products = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = load(x, i, 0, size - i);
        squares = fused(part, part, squares);
    }
    const float factor = scale == 0 ? 1 : scale / sqrtf(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < size; i += LANES) {
        const vec part = load(x, i, 0, size - i) * factor;
        store(x, i, 0, part, size - i);
        if (y) products = fused(part, load(y, i, 0, size - i), products);
    }
    return y ? sum(products) : 0;
}

// A head of queries and its keys.
static void mix_keys(const Mixing *x, int64_t head) {
    const Mixer *m = x->m;
    const int64_t query = head * m->key_dim, key = query + m->keys * m->key_dim;
    mix(x, m->from[head], -1, query, m->key_dim);
    mix(x, m->from[m->keys + head], -1, key, m->key_dim);
    for (int64_t row = 0; row < x->t->replays + x->t->count; row++) {
        float *to = mixed_at(x, row);
        scaled(to + key, m->key_dim, m->delta ? 1 : 0, NULL);
        to[kept_of(m) + head] = scaled(to + query, m->key_dim, m->delta ? 1 / sqrtf((float)m->key_dim) : 0, to + key);
    }
}

INLINE float softplus(float x) { return x > 20 ? x : log1pf(expf(x)); }

// Decays and rates of all heads.
static void mix_gates(const Mixing *x) {
    const Mixer *m = x->m;
    const int64_t at = channels_of(m), size = 2 * m->values * (int64_t)sizeof(float);
    const int64_t width = m->gates.outputs ? m->gates.outputs : x->l->qkv.outputs;
    for (int64_t row = 0; row < x->t->replays; row++)
        memcpy(mixed_at(x, row) + at, x->kept + x->t->replayed[row] * kept_of(m) + at, size);
    for (int64_t token = 0; token < x->t->count; token++) {
        const float *given = (m->gates.outputs ? x->gates : x->inputs) + token * width;
        float *decays = mixed_at(x, x->t->replays + token) + at, *rates = decays + m->values;
        for (int64_t head = 0; head < m->values; head++) {
            const int64_t *from = m->from + 2 * (m->keys + m->values) + head;
            const float step = softplus(given[from[0]] + m->decay_bias[head]);
            decays[head] = expf(m->decay[head] * step);
            rates[head] = m->delta ? 1 / (1 + expf(-given[from[m->values]])) : step;
        }
        if (x->t->slots[token] >= 0) memcpy(x->kept + x->t->slots[token] * kept_of(m) + at, decays, size);
    }
}

// ------------------------------------------------------------------------------------------------------------ states

// One token over LANES columns of a head's state [key_dim, LANES]: what its query reads behind it, and the state.
typedef struct {
    const float *query, *key;
    float decay, rate, product;
    vec value;
} Token;

enum { SUMS = 4 }; // that need not wait for each other

INLINE vec all_of(const vec *sums) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

INLINE vec step(const int delta, const int reads, const int writes, const Token *t, int64_t key_dim, float *state) {
    vec stored[SUMS] = {{0}}, read[SUMS] = {{0}};
    if (delta || reads)
        for (int64_t i = 0; i < key_dim; i += SUMS) {
            UNROLL(4)
            for (int64_t j = 0; j < SUMS; j++) {
                if (i + j >= key_dim) break;
                const vec row = load(state, (i + j) * LANES, 0, LANES);
                if (delta) stored[j] = fused(splat(t->key[i + j]), row, stored[j]);
                if (reads) read[j] = fused(splat(t->query[i + j]), row, read[j]);
            }
        }
    const vec change = (delta ? t->value - t->decay * all_of(stored) : t->value) * t->rate;
    for (int64_t i = 0; writes && i < key_dim; i++)
        store(state, i * LANES, 0, fused(splat(t->key[i]), change, t->decay * load(state, i * LANES, 0, LANES)), LANES);
    return reads ? fused(splat(t->product), change, t->decay * all_of(read)) : (vec){0};
}

#define STEP(name, delta, reads, writes)                                                                               \
    ONCE vec name(const Token *t, int64_t key_dim, float *state) {                                                     \
        return step(delta, reads, writes, t, key_dim, state);                                                          \
    }
STEP(delta_rule, 1, 1, 1)
STEP(delta_rule_reads, 1, 1, 0)
STEP(delta_rule_writes, 1, 0, 1)
STEP(mamba, 0, 1, 1)
STEP(mamba_reads, 0, 1, 0)
STEP(mamba_writes, 0, 0, 1)

static vec (*const steps[2][2][2])(const Token *, int64_t, float *) = {
    {{NULL, mamba_writes}, {mamba_reads, mamba}},
    {{NULL, delta_rule_writes}, {delta_rule_reads, delta_rule}},
};

// All tokens over LANES columns of a head.
static void run_panel(const Mixing *x, int64_t head, int64_t panel, float *states) {
    const Mixer *m = x->m;
    const int64_t size = panel_of(m), place = (head * panels_of_head(m) + panel) * size, lane = panel * LANES;
    const int64_t at = (m->width - 1) * channels_of(m) + place, of_key = head / (m->values / m->keys);
    const int64_t key = (m->keys + of_key) * m->key_dim, value = 2 * m->keys * m->key_dim + head * m->dim + lane;
    const int64_t left = m->dim - lane, rows = x->t->replays + x->t->count;
    memcpy(states, x->before + at, size * sizeof(float));
    for (int64_t row = 0; row < rows; row++) {
        const float *own = mixed_at(x, row), *gates = own + channels_of(m);
        const int64_t token = row - x->t->replays, from = x->c->place[x->c->from[row] + 1], to = x->c->place[row + 1];
        const int reads = token >= 0, writes = x->c->last[row + 1] >= 0 || row + 1 == x->t->folded;
        const Token t = {own + of_key * m->key_dim, own + key, gates[head], gates[m->values + head],
            own[kept_of(m) + of_key], load(own, value, 0, left)};
        float *state = states + to * size;
        if (!reads && !writes) continue;
        if (from != to && writes) memcpy(state, states + from * size, size * sizeof(float));
        const vec y = steps[m->delta][reads][writes](&t, m->key_dim, writes ? state : states + from * size);
        if (reads) {
            const vec skipped = m->skip ? t.value * m->skip[head] : (vec){0};
            store(x->out, (token * m->values + head) * m->dim + lane, 0, y + skipped, left);
        }
        if (x->after && row + 1 == x->t->folded) memcpy(x->after + at, state, size * sizeof(float));
    }
}

// ----------------------------------------------------------------------------------------------------------- outputs

INLINE float *out_at(const Mixing *x, int64_t token) {
    return x->m->keys ? x->out + token * x->m->values * x->m->dim : mixed_at(x, x->t->replays + token);
}

static void gate(const Mixing *x, int64_t token) {
    const Mixer *m = x->m;
    const float *inputs = x->inputs + token * x->l->qkv.outputs;
    for (int64_t head = 0; head < m->values; head++) {
        float *own = out_at(x, token) + head * m->dim;
        for (int64_t i = 0; i < m->dim; i += LANES) {
            const int64_t left = m->dim - i;
            const vec by = load(inputs, m->from[2 * m->keys + m->values + head] + i, 0, left);
            store(own, i, 0, load(own, i, 0, left) * (m->keys ? silu(by) : by), left);
        }
    }
}

// What a token's queries have read, behind gate and norm, to `to`.
static void finish(const Mixing *x, int64_t token, void *to, int is_bf16) {
    const Mixer *m = x->m;
    const int64_t size = m->values * m->dim;
    float *own = out_at(x, token);
    if (m->gates_first) gate(x, token);
    for (int64_t i = 0; m->group && i < size; i += m->group)
        norm(own + i, 0, m->factors + i, m->eps, m->group, own + i, 0);
    if (!m->gates_first) gate(x, token);
    for (int64_t i = 0; i < size; i += LANES) store(to, i, is_bf16, load(own, i, 0, size - i), size - i);
}

// ------------------------------------------------------------------------------------------------------------ layers

// A text in a layer, whose numbers of all texts stand in `mixed`.
INLINE Mixing mixing_of(const Layer *l, const Pass *p, const Scan *scans, int64_t n) {
    const Mixer *m = l->mixer;
    const RecurrentState *t = &p->memories[n];
    const Scan *c = &scans[n];
    float *const inputs = p->mixed, *const gates = inputs + p->rows * l->qkv.outputs;
    float *const out = gates + p->rows * m->gates.outputs, *const mixed = out + p->rows * m->values * m->dim;
    return (Mixing){l, m, t, c, t->before + l->place * state_of(m), t->after ? t->after + l->place * state_of(m) : NULL,
        t->kept + l->place * t->room * kept_of(m), inputs + c->row * l->qkv.outputs, gates + c->row * m->gates.outputs,
        mixed + c->mixed * mixed_of(m), out + c->row * m->values * m->dim};
}

// What products make of the new tokens of all texts.
static void share_products(const Layer *l, const Pass *p, int is_bf16, Worker *w) {
    const Mixer *m = l->mixer;
    float *const inputs = p->mixed, *const gates = inputs + p->rows * l->qkv.outputs;
    for (int64_t first = 0; first < p->rows; first += CHUNK) {
        const int64_t count = p->rows - first < CHUNK ? p->rows - first : CHUNK;
        EACH_PIECE(r, count, w)
        norm(row_of(p->states, (first + r) * l->size, is_bf16), is_bf16, l->norm_in, l->eps, l->size,
            row_of(p->scratch, r * l->size, is_bf16), is_bf16);
        const Out to_inputs = {inputs + first * l->qkv.outputs, NULL, 0, 0};
        const Out to_gates = {gates + first * m->gates.outputs, NULL, 0, 0};
        share(&l->qkv, p->scratch, is_bf16, count, &to_inputs, w);
        if (m->gates.outputs) share(&m->gates, p->scratch, is_bf16, count, &to_gates, w);
    }
}

// One of the units that stand before the states of a text: heads of queries and keys, heads of values, and gates.
static void mix_unit(const Mixing *x, int64_t unit) {
    const Mixer *m = x->m;
    const int64_t head = unit - m->keys, *from = m->from + 2 * m->keys + head;
    if (unit < m->keys) mix_keys(x, unit);
    else if (head == m->values) mix_gates(x);
    else mix(x, from[0], m->keys ? -1 : from[4 * m->values], 2 * m->keys * m->key_dim + head * m->dim, m->dim);
}

void share_mixer(const Layer *l, const Pass *p, const Scan *scans, int64_t count, void *out, int is_bf16, Worker *w) {
    const Mixer *m = l->mixer;
    const int64_t units = m->keys + m->values + (m->keys > 0), panels = panels_of_head(m), each = m->values * panels;
    share_products(l, p, is_bf16, w);
    EACH_PIECE(unit, units * count, w) {
        const Mixing x = mixing_of(l, p, scans, unit / units);
        mix_unit(&x, unit % units);
    }
    EACH_PIECE(unit, each * count, w) {
        const Mixing x = mixing_of(l, p, scans, unit / each);
        float *const own = x.c->states + w->number * x.c->places * panel_of(m);
        run_panel(&x, unit % each / panels, unit % panels, own);
    }
    EACH_PIECE(row, p->rows, w) {
        int64_t n = 0;
        while (n + 1 < count && scans[n + 1].row <= row) n++;
        const Mixing x = mixing_of(l, p, scans, n);
        finish(&x, row - x.c->row, row_of(out, row * m->values * m->dim, is_bf16), is_bf16);
    }
}
