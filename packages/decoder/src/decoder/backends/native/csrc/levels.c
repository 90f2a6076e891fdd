// The levels of draft heads behind several texts, in one call: heads, their logits, and which drafts go on.
//
// What `drafters/levels.py` does with PyTorch's operators; here a level takes little more than reading its weights. A
// draft may be off by a rounding.

#include "native.h"
#include "formats/formats.h"

// As glibc has had them from the beginning, so that a library that is compiled on a new system loads on an old one.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5\n.symver log, log@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver exp, exp@GLIBC_2.17\n.symver log, log@GLIBC_2.17");
#endif

// A branch that goes on, or its next state.
typedef struct {
    int64_t text, parent; // the row of the state that it goes on from
    double likely;
    int64_t depth, tokens[MOST_LEVELS];
} Branch;

// Where the state of a text's branch, its candidates and the numbers of a level stand.
typedef struct {
    const Drafter *d;
    const Drafts *texts;
    int64_t count, rows, most_width, number;
    Branch *branches, *next;
    float *states, *next_states, *features, *read, *gated, *normed, *logits, *scores;
    int64_t *tokens;
    double **out;
} Level;

// The log-probabilities of `width` scores among themselves.
static void log_softmax(const float *scores, int64_t width, double *out) {
    double total = 0;
    for (int64_t n = 0; n < width; n++) total += exp((double)scores[n] - scores[0]);
    for (int64_t n = 0; n < width; n++) out[n] = (double)scores[n] - scores[0] - log(total);
}

// Write the candidates of `branches` of a text, and choose which go on; returns how many do.
static int64_t go_on(Level *l, int64_t text, int64_t first, int64_t branches, int last, Branch *next) {
    const Drafts *t = &l->texts[text];
    const int64_t width = t->width, all = branches * width;
    double likely[all], *out = l->out[text];
    for (int64_t b = 0; b < branches; b++) {
        const float *scores = l->scores + (first + b) * l->most_width;
        log_softmax(scores, width, likely + b * width);
        for (int64_t n = 0; n < width; n++) {
            *out++ = scores[n];
            likely[b * width + n] += l->branches[first + b].likely;
            if (!(likely[b * width + n] > -INFINITY)) likely[b * width + n] = -INFINITY; // NaN stands for taken ones
        }
    }
    for (int64_t b = 0; b < branches; b++)
        for (int64_t n = 0; n < width; n++) *out++ = (double)l->tokens[(first + b) * l->most_width + n];
    l->out[text] = out;
    if (last) return 0;
    const int64_t most = !l->d->conditioned ? 1 : t->beam < all ? t->beam : all;
    for (int64_t kept = 0; kept < most; kept++) {
        int64_t best = 0;
        while (isnan(likely[best])) best++; // taken already
        for (int64_t n = best + 1; n < all; n++)
            if (likely[n] > likely[best]) best = n;
        const Branch *from = &l->branches[first + best / width];
        Branch *to = &next[kept];
        *to = *from;
        to->parent = first + best / width, to->likely = likely[best];
        if (l->d->conditioned) {
            to->tokens[to->depth++] = l->tokens[to->parent * l->most_width + best % width];
            if (t->beam > 1) *l->out[text]++ = (double)best;
        }
        likely[best] = NAN;
    }
    return most;
}

// Choose the branches of the next level.
static void turn_over(Level *l) {
    const int64_t number = l->number;
    int64_t rows = 0, made = 0;
    if (number || !l->texts[0].given) {
        float *const old = l->states;
        if (l->d->chained) l->states = l->next_states, l->next_states = old;
    } else {
        for (int64_t row = 0; row < l->rows; row++) {
            const Drafts *t = &l->texts[row];
            for (int64_t n = 0; n < t->width; n++) {
                l->scores[row * l->most_width + n] = (float)t->out[n];
                l->tokens[row * l->most_width + n] = (int64_t)t->out[t->width + n];
            }
        }
    }
    for (int64_t text = 0; text < l->count; text++) {
        const int64_t first = rows;
        while (rows < l->rows && l->branches[rows].text == text) rows++;
        if (rows == first) continue;
        made += go_on(l, text, first, rows - first, number + 1 == l->texts[text].levels, l->next + made);
    }
    Branch *const old = l->branches;
    l->branches = l->next, l->next = old, l->rows = made;
}

// The state that a branch goes on from.
static const float *state_of(const Level *l, int64_t row) {
    const Branch *b = &l->branches[row];
    return l->states + (l->d->chained ? b->parent : b->text) * l->d->size;
}

// What a head reads of a branch: its normalised state, and the embedding of its last token.
static void read_branch(const Level *l, const Head *head, int64_t row) {
    const Drafter *d = l->d;
    const Branch *b = &l->branches[row];
    const int64_t inputs = head->readers.inputs;
    norm(state_of(l, row), 0, head->norm_in, head->eps, d->size, l->features + row * inputs, 0);
    if (!d->conditioned) return;
    const int64_t newest = b->depth ? b->tokens[b->depth - 1] : l->texts[b->text].newest;
    float *to = l->features + row * inputs + d->size;
    const int is_bf16 = d->embeddings_are == BF16;
    const void *embedding = to;
    if (d->embeddings_are >= QUANTISED) unpack_row(d->embeddings_are - QUANTISED, d->embeddings, d->size, newest, to);
    else embedding = row_of(d->embeddings, newest * d->size, is_bf16);
    norm(embedding, is_bf16, d->ones, d->embedding_eps, d->size, to, 0);
}

// State and change of a branch to its next state, gate and up to what is gated.
static void change_branch(const Level *l, const Head *head, int64_t row) {
    const int64_t size = l->d->size, width = head->down.inputs;
    const float *change = l->read + row * head->readers.outputs, *gate = change + size, *up = gate + width;
    const float *state = state_of(l, row);
    for (int64_t i = 0; i < size; i += LANES)
        store(l->next_states, row * size + i, 0, load(state, i, 0, size - i) + load(change, i, 0, size - i), size - i);
    for (int64_t i = 0; i < width; i += LANES)
        store(l->gated, row * width + i, 0, silu(load(gate, i, 0, width - i)) * load(up, i, 0, width - i), width - i);
}

static void rank_branch(const Level *l, int64_t row) {
    const Drafter *d = l->d;
    const Branch *b = &l->branches[row];
    const Drafts *t = &l->texts[b->text];
    const int64_t v = d->vocabulary.outputs;
    float *logits = l->logits + row * v;
    if (d->logit_scale != 1)
        for (int64_t i = 0; i < v; i++) logits[i] *= d->logit_scale;
    best_drafts(&t->choosing, t->position + l->number, logits, d->ids, v, b->tokens, b->depth, t->width,
        l->scores + row * l->most_width, l->tokens + row * l->most_width);
}

// Fill a level of all branches.
static void share_level(const void *argument, Worker *w) {
    const Level *l = argument;
    const Drafter *d = l->d;
    const int64_t at = l->number - l->texts[0].given, size = d->size, rows = l->rows;
    const Head *head = &d->heads[at < d->count ? at : d->count - 1];
    const int is_bf16 = d->vocabulary_is_bf16;
    EACH_PIECE(row, rows, w) read_branch(l, head, row);
    const Out to_read = {l->read, NULL, 0, 0};
    share(&head->readers, l->features, 0, rows, &to_read, w);
    EACH_PIECE(row, rows, w) change_branch(l, head, row);
    const Out to_state = {l->next_states, l->next_states, 0, 0};
    if (head->down.inputs) share(&head->down, l->gated, 0, rows, &to_state, w);
    EACH_PIECE(row, rows, w)
    norm(l->next_states + row * size, 0, head->norm_out, head->eps, size, row_of(l->normed, row * size, is_bf16),
        is_bf16);
    const Out to_logits = {l->logits, NULL, 0, 0};
    share(&d->vocabulary, l->normed, is_bf16, rows, &to_logits, w);
    EACH_PIECE(row, rows, w) rank_branch(l, row);
}

// Numbers of memory that `draft_levels` needs for so many branches at a time.
int64_t draft_numbers(const Drafter *d, int64_t branches, int64_t width) {
    const Head *h = d->heads;
    const int64_t of_head = h->readers.inputs + h->readers.outputs + h->down.inputs;
    return branches * (3 * d->size + of_head + d->vocabulary.outputs + width);
}

// `room` has `draft_numbers` for the branches of all texts. Returns 0, or 1 where there was no memory.
int draft_levels(const Drafter *d, const Drafts *texts, int64_t count, float *room, int threads) {
    int64_t most = 0, width = 0, levels = 0;
    for (int64_t text = 0; text < count; text++) {
        const Drafts *t = &texts[text];
        most += t->beam;
        width = t->width > width ? t->width : width;
        levels = t->levels > levels ? t->levels : levels;
    }
    const Head *h = d->heads;
    Level l = {.d = d, .texts = texts, .count = count, .rows = count, .most_width = width};
    l.states = room, l.next_states = l.states + most * d->size, l.normed = l.next_states + most * d->size;
    l.features = l.normed + most * d->size, l.read = l.features + most * h->readers.inputs;
    l.gated = l.read + most * h->readers.outputs, l.logits = l.gated + most * h->down.inputs;
    l.scores = l.logits + most * d->vocabulary.outputs;
    l.branches = malloc(2 * most * sizeof(Branch)), l.next = l.branches + most;
    l.tokens = malloc(most * width * sizeof(int64_t)), l.out = malloc(count * sizeof(double *));
    if (!l.branches || !l.tokens || !l.out || levels > MOST_LEVELS) {
        free(l.branches), free(l.tokens), free(l.out);
        return 1;
    }
    Branch *const branches = l.branches;
    for (int64_t text = 0; text < count; text++) {
        const Drafts *t = &texts[text];
        l.branches[text] = (Branch){.text = text, .parent = text};
        l.out[text] = t->out;
        for (int64_t i = 0; i < d->size; i += LANES)
            store(l.states, text * d->size + i, 0, load(t->state, i, t->state_is_bf16, d->size - i), d->size - i);
    }
    for (; l.number < levels && l.rows; l.number++) {
        if (l.number || !texts[0].given) pool_run(share_level, &l, threads);
        turn_over(&l);
    }
    free(branches), free(l.tokens), free(l.out);
    return 0;
}
