// How tokens are chosen from logits: penalty, temperature and min-p, then noise keyed by seed, position and token.
//
// The target's own token must be exactly the one that `sampling/` defines in double precision. Noise in single precision
// is enough to find the few tokens that it can be, and to rank drafts.

#include "native.h"

typedef uint64_t words __attribute__((vector_size(8 * LANES)));
typedef int64_t signed_words __attribute__((vector_size(8 * LANES)));

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

// SplitMix64's finaliser.
#define MIXED(z)                                                                                                       \
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;                                                                           \
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;                                                                           \
    z = z ^ z >> 31;

static uint64_t key_of(uint64_t seed, int64_t position) {
    uint64_t z = seed + GOLDEN;
    MIXED(z)
    z += (uint64_t)(position + 1) * GOLDEN;
    MIXED(z)
    return z;
}

// Natural logarithm of positive numbers, within a few units of the last place.
INLINE vec logarithm(vec x) {
    const ivec power = ((ivec)x - 0x3f3504f3) >> 23; // so that what is left is between sqrt(1/2) and sqrt(2)
    const vec n = __builtin_convertvector(power, vec), r = (vec)((ivec)x - (power << 23)) - 1;
    vec p = splat(7.0376836292e-2f);
    p = fused(p, r, splat(-1.1514610310e-1f));
    p = fused(p, r, splat(1.1676998740e-1f));
    p = fused(p, r, splat(-1.2420140846e-1f));
    p = fused(p, r, splat(1.4249322787e-1f));
    p = fused(p, r, splat(-1.6668057665e-1f));
    p = fused(p, r, splat(2.0000714765e-1f));
    p = fused(p, r, splat(-2.4999993993e-1f));
    p = fused(p, r, splat(3.3333331174e-1f));
    const vec square = r * r;
    return r + fused(p, r * square, -fused(n, splat(2.12194440e-4f), square * 0.5f)) + n * 0.693359375f;
}

// The random words of the tokens `ids` at a position.
INLINE words words_of(uint64_t key, signed_words ids) {
    words z = (words)(ids + 1) * GOLDEN + key;
    MIXED(z)
    return z;
}

// The Gumbel noise of such words, within some 1e-5.
INLINE vec noise(words z) {
    const signed_words odd = (signed_words)(z >> 11 | 1); // of the uniform u, in units of 2^-53
    const vec u = __builtin_convertvector(odd, vec) * 0x1p-53f;
    const vec v = __builtin_convertvector(((int64_t)1 << 53) - odd, vec) * 0x1p-53f;
    // -log(1 - u); what 1 - u loses for small u is made up for.
    const vec lost = choose(v == 1, splat(1), 1 - v);
    return -logarithm(choose(v == 1, u, -logarithm(v) * u / lost));
}

// Noise above FAR is rare: its words are below this one, e^-FAR of all.
static const float FAR = 8;
static const uint64_t RARE = 0x0016000000000000u;

// The repetition penalty, and then the temperature.
INLINE double processed(const Sampling *c, double x, int penalised) {
    if (penalised) {
        const double less = x / c->penalty, more = x * c->penalty;
        x = c->penalty > 1 ? (less < more ? less : more) : (less > more ? less : more);
    }
    return c->temperature == 1 ? x : x / c->temperature;
}

// Whether any of LANES tokens is penalised.
INLINE int any(const uint8_t *penalised, int64_t count) {
    uint64_t two[2] = {0, 0};
    memcpy(two, penalised, count < LANES ? (size_t)count : LANES);
    return (two[0] | two[1]) != 0;
}

INLINE int no_word(signed_words where) {
    ivec halves_of_it[2];
    memcpy(halves_of_it, &where, sizeof where);
    return none(halves_of_it[0] | halves_of_it[1]);
}

// The highest score of all tokens; NaN where logits hold what is no number, or too large.
static double best_score(const Sampling *c, const void *logits, int is_bf16, int64_t vocab) {
    const uint8_t *penalised = c->penalised;
    const int64_t whole = vocab / LANES * LANES;
    vec most = splat(-INFINITY);
    double best = -INFINITY;
    ivec wrong = {0};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const vec x = i < whole ? load(logits, i, is_bf16, LANES) : load(logits, i, is_bf16, vocab - i);
        wrong |= x != x;
        if (i == whole || (penalised && any(penalised + i, LANES))) {
            for (int lane = 0; lane < LANES && i + lane < vocab; lane++) {
                const double score = processed(c, x[lane], penalised && penalised[i + lane]);
                best = score > best ? score : best;
            }
        } else {
            most = larger(x, most);
        }
    }
    const float unpenalised = largest_of(most);
    if (processed(c, unpenalised, 0) > best) best = processed(c, unpenalised, 0);
    return none(wrong) && best < 1e9 && best > -1e9 ? best : NAN;
}

// The tokens that `sampling/` may choose from `vocab` logits at a position, ascending, with their scores before noise:
// those whose approximate noise does not rule them out, or without noise the first of the best. Returns how many, or -1
// where there are more than `room`, or the logits hold what is no number or too large.
int64_t sample_candidates(const Sampling *c, int64_t position, const void *logits, int is_bf16, int64_t vocab,
    int64_t *ids, double *scores, int64_t room) {
    const uint8_t *penalised = c->penalised;
    const double best = best_score(c, logits, is_bf16, vocab);
    if (best != best) return -1;
    const double floor = c->do_sample ? best + c->log_min_p : best;
    // Logits below this one are below the floor, whatever roundings do.
    const double cut = floor * c->temperature - 1e-5 * (1 + fabs(floor * c->temperature));
    const int may_rise = penalised && c->penalty < 1;
    const uint64_t key = key_of(c->seed, position);
    const float margin = 1e-3f + 1e-6f * (float)(fabs(best) + 40), rate = (float)(1 / c->temperature);
    float highest = -INFINITY, sums[room];
    int64_t count = 0;
    signed_words tokens;
    for (int lane = 0; lane < LANES; lane++) tokens[lane] = lane;
    for (int64_t i = 0; i < vocab; i += LANES, tokens += LANES) {
        const int64_t left = vocab - i;
        const vec x = left >= LANES ? load(logits, i, is_bf16, LANES) : load(logits, i, is_bf16, left);
        if (!may_rise && none(x >= (float)cut)) continue;
        vec score = x * rate;
        if (penalised && any(penalised + i, left))
            for (int lane = 0; lane < LANES && lane < left; lane++)
                if (penalised[i + lane]) score[lane] = (float)processed(c, x[lane], 1);
        vec sum = score;
        if (c->do_sample) {
            const words random = words_of(key, tokens);
            if (none(score >= highest - margin - FAR) && no_word(random < RARE)) continue;
            sum += noise(random);
        }
        const ivec near = sum >= highest - margin;
        if (none(near)) continue;
        for (int lane = 0; lane < LANES && lane < left; lane++) {
            if (!near[lane]) continue;
            const double exact = processed(c, x[lane], penalised && penalised[i + lane]);
            if (!(exact >= floor) || exact == -INFINITY) continue;
            if (!c->do_sample) {
                ids[0] = i + lane, scores[0] = exact;
                return 1;
            }
            if (sum[lane] > highest) highest = sum[lane];
            if (count == room) {
                int64_t kept = 0;
                for (int64_t n = 0; n < count; n++)
                    if (sums[n] >= highest - margin)
                        ids[kept] = ids[n], scores[kept] = scores[n], sums[kept++] = sums[n];
                if (kept == room) return -1;
                count = kept;
            }
            ids[count] = i + lane, scores[count] = exact, sums[count++] = sum[lane];
        }
    }
    int64_t kept = 0;
    for (int64_t n = 0; n < count; n++)
        if (sums[n] >= highest - margin) ids[kept] = ids[n], scores[kept++] = scores[n];
    return kept;
}

// Eight numbers in double precision, whatever a set's LANES are: sums of them have the same bits everywhere.
typedef double reals __attribute__((vector_size(64)));
typedef int64_t real_bits __attribute__((vector_size(64)));
typedef float eight __attribute__((vector_size(32)));

INLINE int no_real(real_bits where) {
    ivec parts[16 / LANES], any = {0};
    memcpy(parts, &where, sizeof where);
    for (int part = 0; part < 16 / LANES; part++) any |= parts[part];
    return none(any);
}

// e^x for x <= 0, within a few units of the last place; 0 where that is no ordinary number.
INLINE reals exponential(reals x) {
    const reals shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52; // whose last bits are the power of two
    const reals n = shifted - 0x1.8p52;
    const reals r = x - n * 0x1.62e42fefa0000p-1 - n * 0x1.cf79abc9e3b39p-40;
    reals p = r * (1.0 / 6227020800) + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1;
    p = p * r + 1;
    return (reals)(((real_bits)p + ((real_bits)shifted << 52)) & (x > -700));
}

// The log-probability of a token in the distribution that `sampling/` draws from, and those of the `most` likeliest
// tokens that it can draw, the likeliest first, of equal ones the first. Returns how many these are.
int64_t log_probabilities(const Sampling *c, const void *logits, int is_bf16, int64_t vocab, int64_t token,
    double *logprob, int64_t most, int64_t *ids, double *values) {
    const uint8_t *penalised = c->penalised;
    const double best = best_score(c, logits, is_bf16, vocab), floor = c->do_sample ? best + c->log_min_p : -INFINITY;
    int64_t found = 0;
    double own = -INFINITY;
    reals sums = {0};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const int64_t left = vocab - i;
        const vec x = left >= LANES ? load(logits, i, is_bf16, LANES) : load(logits, i, is_bf16, left);
        const int rises = penalised && any(penalised + i, left);
        for (int64_t first = 0; first < LANES && first < left; first += 8) {
            eight part;
            memcpy(&part, (const char *)&x + 4 * first, sizeof part);
            reals score = __builtin_convertvector(part, reals);
            if (c->temperature != 1) score /= c->temperature;
            for (int64_t lane = 0; lane < 8 && first + lane < left && rises; lane++)
                if (penalised[i + first + lane]) score[lane] = processed(c, part[lane], 1);
            for (int64_t lane = left - first; lane < 8; lane++) score[lane] = -INFINITY;
            const real_bits stays = score >= floor;
            if (no_real(stays)) continue;
            sums += (reals)((real_bits)exponential(score - best) & stays);
            if (token >= i + first && token < i + first + 8) own = score[token - i - first];
            if (!most || (found == most && no_real(score > values[most - 1]))) continue;
            for (int64_t lane = 0; lane < 8; lane++) {
                int64_t at = found;
                while (at && score[lane] > values[at - 1]) at--;
                if (at == most || !stays[lane] || score[lane] == -INFINITY) continue;
                found += found < most;
                for (int64_t n = found - 1; n > at; n--) values[n] = values[n - 1], ids[n] = ids[n - 1];
                values[at] = score[lane], ids[at] = i + first + lane;
            }
        }
    }
    const double total = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    const double all = best + log(total);
    *logprob = own - all;
    for (int64_t n = 0; n < found; n++) values[n] -= all;
    return found;
}

void best_drafts(const Sampling *c, int64_t position, float *logits, const int64_t *ids, int64_t vocab,
    const int64_t *drafted, int64_t depth, int64_t width, float *scores, int64_t *tokens) {
    const float rate = (float)(1 / c->temperature), penalty = (float)c->penalty;
    if (c->penalised)
        for (int64_t i = 0; i < vocab; i++) {
            const int64_t id = ids ? ids[i] : i;
            int is = c->penalised[id];
            for (int64_t n = 0; n < depth; n++) is |= drafted[n] == id;
            if (is) {
                const float less = logits[i] / penalty, more = logits[i] * penalty;
                logits[i] = penalty > 1 ? (less < more ? less : more) : (less > more ? less : more);
            }
        }
    float best = -INFINITY;
    vec most = splat(-INFINITY);
    const int64_t whole = vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) most = larger(load(logits, i, 0, LANES), most);
    for (int64_t i = whole; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
    best = largest_of(most) > best ? largest_of(most) : best;
    const float floor = c->do_sample ? (float)(best * rate + c->log_min_p) : -INFINITY;
    const uint64_t key = key_of(c->seed, position);
    for (int64_t n = 0; n < width; n++) scores[n] = -INFINITY, tokens[n] = ids ? ids[0] : 0;
    signed_words these;
    for (int lane = 0; lane < LANES; lane++) these[lane] = lane;
    for (int64_t i = 0; i < vocab; i += LANES, these += LANES) {
        const int64_t left = vocab - i;
        vec score = (left >= LANES ? load(logits, i, 0, LANES) : load(logits, i, 0, left)) * rate;
        if (none(score >= floor)) continue;
        if (c->do_sample) {
            signed_words own = these;
            if (ids) memcpy(&own, ids + i, left < LANES ? (size_t)left * 8 : sizeof own);
            const words random = words_of(key, own);
            if (none(score >= scores[width - 1] - FAR) && no_word(random < RARE)) continue;
            score = choose(score >= floor, score + noise(random), splat(-INFINITY));
        }
        if (none(score > scores[width - 1])) continue;
        for (int lane = 0; lane < LANES && lane < left; lane++) {
            int64_t at = width;
            while (at && score[lane] > scores[at - 1]) at--;
            if (at == width) continue;
            for (int64_t n = width - 1; n > at; n--) scores[n] = scores[n - 1], tokens[n] = tokens[n - 1];
            scores[at] = score[lane], tokens[at] = ids ? ids[i + lane] : i + lane;
        }
    }
}

// `best_drafts` of one row of logits, all of them, for callers outside.
void rank_drafts(
    const Sampling *c, int64_t position, float *logits, int64_t vocab, int64_t width, float *scores, int64_t *tokens) {
    best_drafts(c, position, logits, NULL, vocab, NULL, 0, width, scores, tokens);
}
