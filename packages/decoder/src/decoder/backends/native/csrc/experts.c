// Experts: which of them a row goes to, and their products for the rows that they share.
//
// Every number is a sum whose order follows from its own row alone: products' rows do not depend on their number, and
// what experts give is added in the order in which the row chose them. Which rows share an expert changes no bit.

#include "experts.h"

// Where things stand in the memory of a call, for some rows.
typedef struct {
    float *scores, *weights;               // [rows, count], [rows, used]
    int32_t *ids, *places, *starts, *rows; // [rows, used] twice; [count + 1] and [rows x used], by expert
    int32_t *groups;                       // those that have rows, behind them -1
    float *x;                              // [rows x used, size], by expert
    float *gate, *up, *gated, *out;        // by expert, and behind them those of the shared one
    int64_t numbers;
} Room;

static int64_t shared_width(const Experts *e) { return e->shared ? e->experts[e->count].gate.outputs : 0; }

// Experts that rows may go to, with the shared one.
static int64_t groups_at_most(const Experts *e, int64_t rows) {
    return (rows * e->used < e->count ? rows * e->used : e->count) + !!e->shared;
}

static Room room_at(const Experts *e, int64_t rows, float *scratch) {
    const int64_t pairs = rows * e->used, size = e->experts->gate.inputs, width = e->experts->gate.outputs;
    const int64_t gated = pairs * width + rows * shared_width(e);
    const int64_t sizes[] = {rows * e->count, pairs, pairs, pairs, e->count + 1, pairs, groups_at_most(e, rows),
        pairs * size, gated, gated, gated, (pairs + (e->shared ? rows : 0)) * e->experts->down.outputs};
    float *at[sizeof sizes / sizeof *sizes], *next = scratch;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) at[i] = next, next += sizes[i];
    return (Room){at[0], at[1], (int32_t *)at[2], (int32_t *)at[3], (int32_t *)at[4], (int32_t *)at[5],
        (int32_t *)at[6], at[7], at[8], at[9], at[10], at[11], next - scratch};
}

int64_t expert_numbers(const Experts *e, int64_t rows) { return room_at(e, rows < CHUNK ? rows : CHUNK, NULL).numbers; }

// ---------------------------------------------------------------------------------------------------------- routing

// The places of the `used` largest of `count` scores, the largest first; of equal ones those that come first.
static void largest_places(const float *scores, int64_t count, int64_t used, int32_t *places) {
    for (int64_t i = 0; i < count; i++) {
        int64_t at = i < used ? i : used;
        if (at == used && !(scores[i] > scores[places[used - 1]])) continue;
        if (at == used) at--;
        for (; at > 0 && scores[i] > scores[places[at - 1]]; at--) places[at] = places[at - 1];
        places[at] = (int32_t)i;
    }
}

// Scores of experts outside of the best groups are made the lowest. A group is as good as its two best together.
static void keep_groups(const Experts *e, float *scores) {
    const int64_t each = e->count / e->groups;
    float of_groups[MOST_GROUPS];
    int32_t best[MOST_GROUPS], two[2];
    uint8_t kept[MOST_GROUPS] = {0};
    for (int64_t group = 0; group < e->groups; group++) {
        largest_places(scores + group * each, each, 2, two);
        of_groups[group] = scores[group * each + two[0]] + scores[group * each + two[1]];
    }
    largest_places(of_groups, e->groups, e->groups_used, best);
    for (int64_t i = 0; i < e->groups_used; i++) kept[best[i]] = 1;
    for (int64_t i = 0; i < e->count; i++)
        if (!kept[i / each]) scores[i] = -INFINITY;
}

// e^(x - largest) of `count` numbers; returns their sum.
ONCE float exponentials(const float *x, int64_t count, float largest, float *to) {
    float total = 0;
    for (int64_t i = 0; i < count; i += LANES) {
        const vec power = power_of_two((load(x, i, 0, count - i) - largest) * 1.44269504f);
        store(to, i, 0, power, count - i);
    }
    for (int64_t i = 0; i < count; i++) total += to[i];
    return total;
}

// Of one row: its logits to the experts that it goes to and their weights.
static void choose_experts(const Experts *e, const float *logits, int32_t *ids, float *weights) {
    const int64_t count = e->count, used = e->used;
    const int shares = e->scoring == SOFTMAX && e->correction; // of all experts, which are corrected then
    float scores[MOST_EXPERTS], chosen[MOST_EXPERTS], total = 0;
    if (count < 1) return; // compilers must see that there are scores
    for (int64_t i = 0; i < count; i += LANES) {
        const vec given = load(logits, i, 0, count - i);
        store(scores, i, 0, e->scoring == SIGMOID ? gated_by(splat(1), given) : given, count - i);
    }
    if (shares) {
        float largest = -INFINITY;
        for (int64_t i = 0; i < count; i++) largest = scores[i] > largest ? scores[i] : largest;
        const float all = exponentials(scores, count, largest, chosen);
        for (int64_t i = 0; i < count; i++) scores[i] = chosen[i] / all;
    }
    for (int64_t i = 0; i < count; i++) chosen[i] = scores[i] + (e->correction ? e->correction[i] : 0);
    if (e->groups > 1) keep_groups(e, chosen);
    largest_places(chosen, count, used, ids);
    for (int64_t j = 0; j < used; j++) weights[j] = scores[ids[j]];
    if (e->scoring == SOFTMAX && !shares) {
        const float largest = weights[0];
        total = exponentials(weights, used, largest, weights);
        if (!e->normalised) total = exponentials(scores, count, largest, scores);
    } else {
        for (int64_t j = 0; j < used; j++) total += weights[j];
        total = e->normalised ? total + 1e-20f : 1;
    }
    for (int64_t j = 0; j < used; j++) weights[j] = weights[j] / total * e->scaling;
}

static void share_routing(const Experts *e, const void *x, int64_t rows, const Room *room, int is_bf16, Worker *w) {
    const Out to = {room->scores, NULL, 0, 0};
    share(&e->router, x, is_bf16, rows, &to, w);
    EACH_PIECE(r, rows, w)
    choose_experts(e, room->scores + r * e->count, room->ids + r * e->used, room->weights + r * e->used);
}

// --------------------------------------------------------------------------------------------------------- products

// Which pairs of a row and one of its experts belong to each expert, and which experts have any.
static void sort_by_expert(const Experts *e, int64_t rows, const Room *room) {
    const int64_t pairs = rows * e->used;
    int32_t *starts = room->starts;
    memset(starts, 0, (size_t)(e->count + 1) * sizeof *starts);
    for (int64_t p = 0; p < pairs; p++) starts[room->ids[p] + 1]++;
    for (int64_t i = 0; i < e->count; i++) starts[i + 1] += starts[i];
    for (int64_t p = 0; p < pairs; p++) {
        const int32_t place = starts[room->ids[p]]++;
        room->places[p] = place, room->rows[place] = (int32_t)(p / e->used);
    }
    for (int64_t i = e->count; i > 0; i--) starts[i] = starts[i - 1];
    starts[0] = 0;
    int32_t *group = room->groups, *const end = group + groups_at_most(e, rows);
    if (e->shared) *group++ = (int32_t)e->count; // it has the most rows
    for (int64_t i = 0; i < e->count; i++)
        if (starts[i] < starts[i + 1]) *group++ = (int32_t)i;
    while (group < end) *group++ = -1;
}

// The rows of one expert: [first, first + rows) of those that are sorted; of the shared one all rows behind them.
typedef struct {
    const Expert *expert;
    const void *x;
    int64_t rows, first, at; // at: of the numbers that are gated
} Group;

static Group group_of(const Experts *e, const void *x, int64_t rows, const Room *room, int is_bf16, int64_t number) {
    const Expert *expert = &e->experts[number];
    const int64_t pairs = rows * e->used, width = e->experts->gate.outputs;
    if (number == e->count) return (Group){expert, x, rows, pairs, pairs * width};
    const int64_t first = room->starts[number], count = room->starts[number + 1] - first;
    return (Group){expert, row_of(room->x, first * expert->gate.inputs, is_bf16), count, first, first * width};
}

INLINE vec activated(const Experts *e, vec gate, vec up) {
    if (e->activation == SILU) return silu(gate) * up;
    if (e->activation == GELU) return gelu(gate) * up;
    if (e->activation == SQUARED) {
        const vec above = larger(splat(0), gate); // what is no number stays so
        return above * above;
    }
    gate = -larger(-gate, splat(-e->limit));
    up = -larger(-larger(up, splat(-e->limit)), splat(-e->limit));
    return (up + 1) * gated_by(gate, gate * e->alpha);
}

static void gate_panels(const Experts *e, const Group *g, const Room *room, int is_bf16, Columns panels) {
    const PackedWeight *gate = &g->expert->gate, *up = &g->expert->up;
    const int64_t width = gate->outputs, first = panels.first * width_of(gate), end = panels.last * width_of(gate);
    const int64_t last = end < width ? end : width;
    const Out to_gate = {room->gate + g->at, NULL, 0, 0}, to_up = {room->up + g->at, NULL, 0, 0};
    multiply_panels(gate, g->x, is_bf16, g->rows, &to_gate, panels.first, panels.last);
    if (up->inputs) multiply_panels(up, g->x, is_bf16, g->rows, &to_up, panels.first, panels.last);
    for (int64_t r = 0; r < g->rows; r++)
        for (int64_t i = first; i < last; i += LANES) {
            const int64_t at = g->at + r * width + i;
            const vec of_up = up->inputs ? load(room->up, at, 0, last - i) : splat(0);
            const vec gated = activated(e, load(room->gate, at, 0, last - i), of_up);
            store(room->gated, at, is_bf16, gated, last - i);
        }
}

static void down_panels(const Group *g, const Room *room, int is_bf16, Columns panels) {
    const PackedWeight *down = &g->expert->down;
    const Out to = {room->out + g->first * down->outputs, NULL, 0, 0};
    multiply_panels(down, row_of(room->gated, g->at, is_bf16), is_bf16, g->rows, &to, panels.first, panels.last);
}

// The panels of all experts, of gates and what they gate or of what is behind them.
static void share_groups(
    const Experts *e, const void *x, int64_t rows, const Room *room, int is_bf16, int is_down, Worker *w) {
    const PackedWeight *first = is_down ? &e->experts->down : &e->experts->gate;
    const int64_t groups = groups_at_most(e, rows), each = (rows * e->used + e->count - 1) / e->count;
    // The shared one may be of another width: as many pieces, larger or smaller.
    const int64_t pieces = pieces_of(first, each, panels_in(first), is_down ? 1 : 2, w->threads);
    EACH_PIECE(piece, groups * pieces, w) {
        const int32_t number = room->groups[piece / pieces];
        if (number < 0) continue;
        const Group g = group_of(e, x, rows, room, is_bf16, number);
        const int64_t panels = panels_in(is_down ? &g.expert->down : &g.expert->gate), at = piece % pieces;
        const Columns own = {panels * at / pieces, panels * (at + 1) / pieces};
        if (is_down) down_panels(&g, room, is_bf16, own);
        else gate_panels(e, &g, room, is_bf16, own);
    }
}

// Columns of what the experts of each row gave, in the order in which it chose them, behind the shared one's.
static void add_up(
    const Experts *e, float scale, const void *add, int64_t rows, const Room *room, void *y, int is_bf16, Columns own) {
    const int64_t size = e->experts->down.outputs, used = e->used, pairs = rows * used;
    for (int64_t r = 0; r < rows; r++) {
        const vec part = e->shared_gate.inputs ? gated_by(splat(1), splat(room->scores[r])) : splat(1);
        for (int64_t i = own.first; i < own.last; i += LANES) {
            const int64_t left = own.last - i;
            vec total = e->shared ? load(room->out, (pairs + r) * size + i, 0, left) * part : splat(0);
            for (int64_t j = 0; j < used; j++) {
                const vec gave = load(room->out, room->places[r * used + j] * size + i, 0, left);
                total = fused(splat(room->weights[r * used + j]), gave, total);
            }
            if (add) total = fused(splat(scale), total, load(add, r * size + i, 0, left));
            store(y, r * size + i, is_bf16, total, left);
        }
    }
}

// What the experts that rows have chosen, and the shared one, give of at most CHUNK rows.
static void share_chosen(const Experts *e, const void *x, float scale, const void *add, int64_t rows, void *y,
    const Room *room, int is_bf16, Worker *w) {
    const int64_t size = e->experts->gate.inputs, outputs = e->experts->down.outputs;
    EACH_PIECE(once, 1, w) sort_by_expert(e, rows, room);
    // Logits are not needed any more.
    const Out to_part = {room->scores, NULL, 0, 0};
    if (e->shared_gate.inputs) share(&e->shared_gate, x, is_bf16, rows, &to_part, w);
    EACH_PIECE(p, rows * e->used, w)
    memcpy(row_of(room->x, p * size, is_bf16), row_of(x, room->rows[p] * size, is_bf16), size * (is_bf16 ? 2 : 4));
    share_groups(e, x, rows, room, is_bf16, 0, w);
    share_groups(e, x, rows, room, is_bf16, 1, w);
    const int64_t vectors = (outputs + LANES - 1) / LANES, pieces = w->threads < vectors ? w->threads : vectors;
    EACH_PIECE(piece, pieces, w) {
        Columns own = {vectors * piece / pieces * LANES, vectors * (piece + 1) / pieces * LANES};
        if (own.last > outputs) own.last = outputs;
        add_up(e, scale, add, rows, room, y, is_bf16, own);
    }
}

void share_experts(const Experts *e, const void *x, float scale, const float *add, int64_t rows, void *y,
    float *scratch, int is_bf16, Worker *w) {
    const Room room = room_at(e, rows, scratch);
    share_routing(e, x, rows, &room, is_bf16, w);
    share_chosen(e, x, scale, add, rows, y, &room, is_bf16, w);
}

// The experts that rows have chosen, with their weights, or will choose, where `ids` is NULL.
typedef struct {
    const Experts *e;
    const void *x;
    int64_t rows;
    const int64_t *ids;
    const float *weights;
    void *y;
    float *scratch;
    int is_bf16;
} Block;

static void share_block(const void *argument, Worker *w) {
    const Block *b = argument;
    const Experts *e = b->e;
    const int64_t size = e->experts->gate.inputs, outputs = e->experts->down.outputs, used = e->used;
    for (int64_t first = 0; first < b->rows; first += CHUNK) {
        const int64_t count = b->rows - first < CHUNK ? b->rows - first : CHUNK;
        const Room room = room_at(e, count, b->scratch);
        const void *x = row_of(b->x, first * size, b->is_bf16);
        if (!b->ids) share_routing(e, x, count, &room, b->is_bf16, w);
        EACH_PIECE(once, b->ids != NULL, w) {
            for (int64_t p = 0; p < count * used; p++)
                room.ids[p] = (int32_t)b->ids[first * used + p], room.weights[p] = b->weights[first * used + p];
        }
        share_chosen(e, x, 1, NULL, count, row_of(b->y, first * outputs, b->is_bf16), &room, b->is_bf16, w);
    }
}

void run_experts(const Experts *e, const void *x, int64_t rows, const int64_t *ids, const float *weights, void *y,
    float *scratch, int is_bf16, int threads) {
    const Block block = {e, x, rows, ids, weights, y, scratch, is_bf16};
    pool_run(share_block, &block, threads);
}

void run_block(const Experts *e, const void *x, int64_t rows, void *y, float *scratch, int is_bf16, int threads) {
    const Block block = {e, x, rows, NULL, NULL, y, scratch, is_bf16};
    pool_run(share_block, &block, threads);
}

// As `route` has them.
typedef struct {
    const Experts *e;
    const void *x;
    int64_t rows;
    float *logits, *weights;
    int64_t *ids;
    int is_bf16;
} Routing;

static void share_route(const void *argument, Worker *w) {
    const Routing *all = argument;
    const Experts *e = all->e;
    const Out to = {all->logits, NULL, 0, 0};
    share(&e->router, all->x, all->is_bf16, all->rows, &to, w);
    EACH_PIECE(r, all->rows, w) {
        int32_t own[MOST_EXPERTS];
        choose_experts(e, all->logits + r * e->count, own, all->weights + r * e->used);
        for (int64_t j = 0; j < e->used; j++) all->ids[r * e->used + j] = own[j];
    }
}

void route(const Experts *e, const void *x, int64_t rows, float *logits, int64_t *ids, float *weights, int is_bf16,
    int threads) {
    const Routing all = {e, x, rows, logits, weights, ids, is_bf16};
    pool_run(share_route, &all, threads);
}
