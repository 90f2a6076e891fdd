// How tokens are chosen from logits: bias, penalties, temperature and filters, then noise keyed by seed, position and
// token; and their log-probabilities.
//
// The target's own token must be exactly the one that `sampling/` defines in double precision. Noise in single precision
// is enough to find the few tokens that it can be, and to rank drafts.

#include "native.h"

typedef uint64_t words __attribute__((vector_size(4 * LANES)));
typedef int64_t signed_words __attribute__((vector_size(4 * LANES)));
typedef float narrow __attribute__((vector_size(2 * LANES)));

// A word for each of LANES tokens, in two vectors: of larger ones than the processor's compilers make loops through
// memory.
typedef struct {
    words half[2];
} Words;

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

INLINE Words mixed(Words z) {
    MIXED(z.half[0])
    MIXED(z.half[1])
    return z;
}

// What is mixed for the first LANES tokens.
INLINE Words first_words(uint64_t key) {
    Words first;
    for (int lane = 0; lane < LANES; lane++)
        first.half[lane / (LANES / 2)][lane % (LANES / 2)] = key + (uint64_t)(lane + 1) * GOLDEN;
    return first;
}

// The random words of LANES tokens from `id` on.
INLINE Words words_from(const Words *first, int64_t id) {
    const uint64_t on = (uint64_t)id * GOLDEN;
    return mixed((Words){{first->half[0] + on, first->half[1] + on}});
}

// The random words of the `count` tokens `ids`, and any behind them.
INLINE Words words_of(uint64_t key, const int64_t *ids, int64_t count) {
    Words z = {0};
    memcpy(&z, ids, count < LANES ? (size_t)count * 8 : sizeof z);
    for (int i = 0; i < 2; i++) z.half[i] = (z.half[i] + 1) * GOLDEN + key;
    return mixed(z);
}

INLINE vec in_floats(signed_words a, signed_words b) {
    const narrow both[2] = {__builtin_convertvector(a, narrow), __builtin_convertvector(b, narrow)};
    vec x;
    memcpy(&x, both, sizeof x);
    return x;
}

// The Gumbel noise of such words, within some 1e-5.
INLINE vec noise(Words z) {
    const int64_t all = (int64_t)1 << 53; // what the uniform u is in units of
    const signed_words a = (signed_words)(z.half[0] >> 11 | 1), b = (signed_words)(z.half[1] >> 11 | 1);
    const vec u = in_floats(a, b) * 0x1p-53f, v = in_floats(all - a, all - b) * 0x1p-53f;
    // -log(1 - u); what 1 - u loses for small u is made up for.
    const vec lost = choose(v == 1, splat(1), 1 - v);
    return -logarithm(choose(v == 1, u, -logarithm(v) * u / lost));
}

// Noise above FAR is rare: its words are below this one, e^-FAR of all.
static const float FAR = 8;
static const uint64_t RARE = 0x0016000000000000u;
// All noise is between these: u is from 2^-53 to 1 - 2^-53.
static const float LEAST_NOISE = -3.7f, MOST_NOISE = 36.8f;

INLINE int none_rare(Words z) { return none((ivec)((z.half[0] < RARE) | (z.half[1] < RARE))); }

// The score of a token: bias, penalties, and then the temperature.
INLINE double processed(const Sampling *c, double x, int64_t id) {
    if (c->special && c->special[id]) {
        if (c->bias) x += c->bias[id];
        if (c->penalised && c->penalised[id]) {
            const double less = x / c->penalty, more = x * c->penalty;
            x = c->penalty > 1 ? (less < more ? less : more) : (less > more ? less : more);
        }
        if (c->counts && c->counts[id]) x = x - c->counts[id] * c->frequency - c->presence;
    }
    return c->temperature == 1 ? x : x / c->temperature;
}

// Whether any of LANES tokens is special.
INLINE int any(const uint8_t *special, int64_t count) {
    if (!special) return 0;
    uint64_t two[2] = {0, 0};
    memcpy(two, special, count < LANES ? (size_t)count : LANES);
    return (two[0] | two[1]) != 0;
}

INLINE const uint8_t *special_from(const Sampling *c, int64_t id) { return c->special ? c->special + id : NULL; }

INLINE vec logits_from(const void *logits, int is_bf16, int64_t vocab, int64_t i) {
    const int64_t left = vocab - i;
    return left >= LANES ? load(logits, i, is_bf16, LANES) : load(logits, i, is_bf16, left);
}

// The highest score of all tokens; NaN where logits hold what is no number, or too large.
static double best_score(const Sampling *c, const void *logits, int is_bf16, int64_t vocab) {
    vec most = splat(-INFINITY);
    double best = -INFINITY;
    ivec wrong = {0};
    for (int64_t i = 0; i < vocab; i += LANES) {
        const int64_t left = vocab - i;
        const vec x = logits_from(logits, is_bf16, vocab, i);
        wrong |= x != x;
        if (left < LANES || any(special_from(c, i), left)) {
            for (int lane = 0; lane < LANES && lane < left; lane++) {
                const double score = processed(c, x[lane], i + lane);
                best = score > best ? score : best;
            }
        } else {
            most = larger(x, most);
        }
    }
    const double plain = largest_of(most) / c->temperature;
    if (plain > best) best = plain;
    return none(wrong) && best < 1e9 && best > -1e9 ? best : NAN;
}

// Four numbers in double precision, whatever a set's LANES are: sums of them have the same bits everywhere.
typedef double reals __attribute__((vector_size(32)));
typedef int64_t real_bits __attribute__((vector_size(32)));
typedef uint64_t real_words __attribute__((vector_size(32)));
typedef float four __attribute__((vector_size(16)));

INLINE int no_real(real_bits where) {
    ivec any = {0};
    memcpy(&any, &where, sizeof where);
    return none(any);
}

INLINE double sum_of_reals(reals x) { return (x[0] + x[2]) + (x[1] + x[3]); }

// e^x for x <= 0, within a few units of the last place; 0 where that is no ordinary number.
INLINE reals exponential(reals x) {
    const reals shifted = x * 0x1.71547652b82fep+0 + 0x1.8p52; // whose last bits are the power of two
    const reals n = shifted - 0x1.8p52;
    const reals r = x - n * 0x1.62e42fefa0000p-1 - n * 0x1.cf79abc9e3b39p-40;
    // The series of e^r by pairs of its terms, so that few of them wait for each other.
    const reals r2 = r * r, r4 = r2 * r2;
    const reals p0 = (1 + r) + (0.5 + r * (1.0 / 6)) * r2;
    const reals p4 = (1.0 / 24 + r * (1.0 / 120)) + (1.0 / 720 + r * (1.0 / 5040)) * r2;
    const reals p8 = (1.0 / 40320 + r * (1.0 / 362880)) + (1.0 / 3628800 + r * (1.0 / 39916800)) * r2;
    const reals p12 = 1.0 / 479001600 + r * (1.0 / 6227020800);
    const reals p = (p0 + p4 * r4) + (p8 + p12 * r4) * (r4 * r4);
    return (reals)(((real_words)p + ((real_words)shifted << 52)) & (real_words)(x > -700));
}

// The scores of four tokens from `id` on, of which x are the logits; -INFINITY behind the last token.
INLINE reals scores_of(const Sampling *c, four x, int64_t id, int64_t vocab, int special) {
    const int64_t left = vocab - id;
    reals score = __builtin_convertvector(x, reals);
    if (c->temperature != 1) score /= c->temperature;
    if (!special && left >= 4) return score;
    for (int64_t lane = 0; lane < 4; lane++) score[lane] = lane < left ? processed(c, x[lane], id + lane) : -INFINITY;
    return score;
}

INLINE four four_of(const vec *x, int64_t first) {
    four part;
    memcpy(&part, (const char *)x + 4 * first, sizeof part);
    return part;
}

// All tokens in fours: `id` is the first one's, `score` are their scores. Those whose logits are all below `least` are
// passed over, unless some of them are special.
#define EACH_FOUR(c, logits, is_bf16, vocab, least, id, score)                                                         \
    for (int64_t block_ = 0, special_; block_ < (vocab); block_ += LANES)                                              \
        for (vec x_ = logits_from(logits, is_bf16, vocab, block_), *once_ = &x_; once_; once_ = NULL)                  \
            if ((special_ = any(special_from(c, block_), (vocab)-block_)) || !none(x_ >= (least)))                     \
                for (int64_t id = block_; id < block_ + LANES && id < (vocab); id += 4)                                \
                    for (reals score = scores_of(c, four_of(&x_, id - block_), id, vocab, (int)special_),              \
                               *here_ = &score;                                                                        \
                         here_; here_ = NULL)

// Tokens whose scores are above `floor`, or equal to it where their ids are up to `last`: what filters leave.
typedef struct {
    double floor;
    int64_t last;
} Cut;

INLINE real_bits inside(const Cut *cut, reals score, int64_t id) {
    const real_bits ids = id + (real_bits){0, 1, 2, 3};
    return (score > -INFINITY) & ((score > cut->floor) | ((score == cut->floor) & (ids <= cut->last)));
}

// Logits below this one have scores below `floor`, whatever roundings do.
INLINE float below(const Sampling *c, double floor) {
    return (float)(floor * c->temperature - 1e-5 * (1 + fabs(floor * c->temperature)));
}

// By how far a score is below the best. Tokens of the last bin, 24 and more below, have next to none of the probability.
enum { BINS = 512, BINS_OF_ONE = 21 };
enum { FEW_WANTED = 256 }; // tokens of a bin that are found while all are looked at

INLINE reals bins_of(reals score, double best) {
    const reals bin = (best - score) * BINS_OF_ONE;
    const real_bits near = bin < BINS - 1;
    return (reals)(((real_bits)bin & near) | ((real_bits)(reals){BINS - 1, BINS - 1, BINS - 1, BINS - 1} & ~near));
}

typedef struct {
    double score;
    int64_t id;
} Ranked;

static int higher(const void *one, const void *other) {
    const Ranked *a = one, *b = other;
    if (a->score != b->score) return a->score > b->score ? -1 : 1;
    return a->id < b->id ? -1 : a->id > b->id;
}

// The first tokens inside, from the highest score down and of equal ones the first: `most` of them, or where that is 0,
// until they have a `share` of the probability. All others are outside `cut` then. Returns 0, or 1 where there is no
// memory.
static int keep_first(const Sampling *c, const void *logits, int is_bf16, int64_t vocab, double best, int64_t most,
    double share, Cut *cut) {
    double sums[BINS] = {0}, all = 0;
    int64_t counts[BINS] = {0};
    reals far = {0}; // of fours that belong to the last bin as a whole
    real_bits far_count = {0};
    EACH_FOUR(c, logits, is_bf16, vocab, below(c, cut->floor), id, score) {
        const real_bits stays = inside(cut, score, id);
        if (no_real(stays)) continue;
        const reals bins = bins_of(score, best);
        const reals weights = most ? (reals){1, 1, 1, 1} : exponential(score - best);
        if (no_real(bins < BINS - 1)) {
            far += (reals)((real_bits)weights & stays);
            far_count -= stays;
            continue;
        }
        UNROLL(4)
        for (int64_t lane = 0; lane < 4; lane++)
            if (stays[lane]) sums[(int)bins[lane]] += weights[lane], counts[(int)bins[lane]]++;
    }
    sums[BINS - 1] += sum_of_reals(far);
    for (int64_t lane = 0; lane < 4; lane++) counts[BINS - 1] += far_count[lane];
    for (int bin = 0; bin < BINS; bin++) all += sums[bin];
    const double enough = most ? (double)most : share * all;
    double so_far = 0;
    int last = 0;
    for (; last < BINS && so_far + sums[last] < enough; last++) so_far += sums[last];
    if (last == BINS) return 0;
    // Those of higher bins are kept, and some of this one: of many, a few best are found without sorting all.
    const int64_t wanted = most ? most - (int64_t)so_far : counts[last];
    const int few = wanted < counts[last] && wanted <= FEW_WANTED;
    Ranked *list = malloc((size_t)(counts[last] + 1) * sizeof(Ranked));
    if (!list) return 1;
    int64_t count = 0;
    const double least = last == BINS - 1 ? -INFINITY : best - (last + 1.0) / BINS_OF_ONE;
    EACH_FOUR(c, logits, is_bf16, vocab, below(c, least > cut->floor ? least : cut->floor), id, score) {
        const real_bits stays = inside(cut, score, id);
        if (no_real(stays) || (few && count == wanted && no_real(score > list[count - 1].score))) continue;
        const reals bins = bins_of(score, best);
        for (int64_t lane = 0; lane < 4; lane++) {
            if (!stays[lane] || (int)bins[lane] != last) continue;
            int64_t at = count;
            while (few && at && score[lane] > list[at - 1].score) at--; // of equal ones the first stays in front
            if (few && at == wanted) continue;
            count += !few || count < wanted;
            for (int64_t n = count - 1; n > at; n--) list[n] = list[n - 1];
            list[at] = (Ranked){score[lane], id + lane};
        }
    }
    if (!few) qsort(list, (size_t)count, sizeof(Ranked), higher);
    for (int64_t n = 0; n < count; n++) {
        *cut = (Cut){list[n].score, list[n].id};
        so_far += most ? 1 : exp(list[n].score - best);
        if (so_far >= enough) break;
    }
    free(list);
    return 0;
}

// What the filters leave, where `best` is the highest score. Returns 0, or 1 where there is no memory.
static int filters(const Sampling *c, const void *logits, int is_bf16, int64_t vocab, double best, Cut *cut) {
    // Of exact ties at the border, roundings of sums would decide.
    const double rounding = 1e-12;
    *cut = (Cut){-INFINITY, vocab};
    const int64_t most = c->top_k > 0 && c->top_k < vocab ? c->top_k : 0;
    if (most && keep_first(c, logits, is_bf16, vocab, best, most, 0, cut)) return 1;
    if (c->top_p < 1 && keep_first(c, logits, is_bf16, vocab, best, 0, c->top_p - rounding, cut)) return 1;
    if (best + c->log_min_p > cut->floor) *cut = (Cut){best + c->log_min_p, vocab};
    if (c->eta > 0) {
        reals sums = {0}, products = {0};
        EACH_FOUR(c, logits, is_bf16, vocab, below(c, cut->floor), id, score) {
            const real_bits stays = inside(cut, score, id);
            const reals apart = (reals)((real_bits)(score - best) & stays);
            const reals weight = (reals)((real_bits)exponential(apart) & stays);
            sums += weight;
            products += weight * apart;
        }
        const double all = log(sum_of_reals(sums)), entropy = all - sum_of_reals(products) / sum_of_reals(sums);
        const double rare = sqrt(c->eta) * exp(-entropy), floor = log(c->eta < rare ? c->eta : rare) + all;
        if (best + floor > cut->floor) *cut = (Cut){floor < 0 ? best + floor : best, vocab};
    }
    return 0;
}

// The tokens that `sampling/` may choose from `vocab` logits at a position, ascending, with their scores before noise:
// those whose approximate noise does not rule them out, or without noise the first of the best. Returns how many, or -1
// where there are more than `room`, or no memory, or the logits hold what is no number or too large.
int64_t sample_candidates(const Sampling *c, int64_t position, const void *logits, int is_bf16, int64_t vocab,
    int64_t *ids, double *scores, int64_t room) {
    const double best = best_score(c, logits, is_bf16, vocab);
    Cut cut = {best, vocab};
    if (best != best || (c->do_sample && filters(c, logits, is_bf16, vocab, best, &cut))) return -1;
    const float least = below(c, cut.floor);
    const uint64_t key = key_of(c->seed, position);
    const float margin = 1e-3f + 1e-6f * (float)(fabs(best) + 40), rate = (float)(1 / c->temperature);
    float highest = c->do_sample ? (float)best + LEAST_NOISE : (float)best; // at least
    float sums[room];
    int64_t count = 0;
    const Words first = first_words(key);
    for (int64_t i = 0; i < vocab; i += LANES) {
        const int64_t left = vocab - i;
        const vec x = logits_from(logits, is_bf16, vocab, i);
        const int special = any(special_from(c, i), left);
        if (!special && none(x >= least)) continue;
        vec score = x * rate;
        if (special)
            for (int lane = 0; lane < LANES && lane < left; lane++)
                if (c->special[i + lane]) score[lane] = (float)processed(c, x[lane], i + lane);
        vec sum = score;
        if (c->do_sample) {
            if (none(score >= highest - margin - MOST_NOISE)) continue;
            const Words random = words_from(&first, i);
            if (none(score >= highest - margin - FAR) && none_rare(random)) continue;
            sum += noise(random);
        }
        const ivec near = sum >= highest - margin;
        if (none(near)) continue;
        for (int lane = 0; lane < LANES && lane < left; lane++) {
            if (!near[lane]) continue;
            const double exact = processed(c, x[lane], i + lane);
            if (!(exact > cut.floor || (exact == cut.floor && i + lane <= cut.last)) || exact == -INFINITY) continue;
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

// The log-probability of a token in the distribution that `sampling/` draws from, and those of the `most` likeliest
// tokens that it can draw, the likeliest first, of equal ones the first. Returns how many these are, or -1 where there is
// no memory.
int64_t log_probabilities(const Sampling *c, const void *logits, int is_bf16, int64_t vocab, int64_t token,
    double *logprob, int64_t most, int64_t *ids, double *values) {
    const double best = best_score(c, logits, is_bf16, vocab);
    Cut cut;
    if (filters(c, logits, is_bf16, vocab, best, &cut)) return -1;
    int64_t found = 0;
    double own = -INFINITY;
    reals sums = {0};
    EACH_FOUR(c, logits, is_bf16, vocab, below(c, cut.floor), id, score) {
        const real_bits stays = inside(&cut, score, id);
        if (no_real(stays)) continue;
        sums += (reals)((real_bits)exponential(score - best) & stays);
        if (token >= id && token < id + 4) own = score[token - id];
        if (!most || (found == most && no_real(score > values[most - 1]))) continue;
        for (int64_t lane = 0; lane < 4; lane++) {
            int64_t at = found;
            while (at && score[lane] > values[at - 1]) at--;
            if (at == most || !stays[lane]) continue;
            found += found < most;
            for (int64_t n = found - 1; n > at; n--) values[n] = values[n - 1], ids[n] = ids[n - 1];
            values[at] = score[lane], ids[at] = id + lane;
        }
    }
    const double all = log(sum_of_reals(sums));
    *logprob = own - best - all;
    for (int64_t n = 0; n < found; n++) values[n] = values[n] - best - all;
    return found;
}

// A draft's logit with bias and penalties, where the branch has its token `seen` times.
INLINE float changed(const Sampling *c, float x, int64_t id, int64_t seen) {
    if (c->bias) x += (float)c->bias[id];
    if (c->penalised && (c->penalised[id] || seen)) {
        const float penalty = (float)c->penalty, less = x / penalty, more = x * penalty;
        x = penalty > 1 ? (less < more ? less : more) : (less > more ? less : more);
    }
    const int64_t times = c->counts ? c->counts[id] + seen : 0;
    return times ? x - (float)times * (float)c->frequency - (float)c->presence : x;
}

// Whether nothing changes the eight tokens from `id` on; of biases it is not looked which tokens have one.
INLINE int all_as_they_are(const Sampling *c, int64_t id) {
    uint64_t words_of_it[4] = {0}, penalised = 0;
    if (c->counts) memcpy(words_of_it, c->counts + id, sizeof words_of_it);
    if (c->penalised) memcpy(&penalised, c->penalised + id, sizeof penalised);
    return !c->bias && !(words_of_it[0] | words_of_it[1] | words_of_it[2] | words_of_it[3] | penalised);
}

// `changed` for all tokens of a row; those of the branch are few, and found first.
static void change(
    const Sampling *c, float *logits, const int64_t *ids, int64_t vocab, const int64_t *drafted, int64_t depth) {
    int64_t at[depth + 1];
    float before[depth + 1];
    for (int64_t n = 0; n < depth; n++) {
        at[n] = ids ? 0 : drafted[n];
        while (ids && at[n] < vocab && ids[at[n]] != drafted[n]) at[n]++;
        if (at[n] < vocab) before[n] = logits[at[n]];
    }
    for (int64_t i = 0; i < vocab; i++) {
        if (!ids && i % 8 == 0) {
            while (i + 8 <= vocab && all_as_they_are(c, i)) i += 8;
            if (i == vocab) break;
        }
        logits[i] = changed(c, logits[i], ids ? ids[i] : i, 0);
    }
    for (int64_t n = 0; n < depth; n++) {
        int64_t seen = 0;
        for (int64_t m = 0; m < depth; m++) seen += drafted[m] == drafted[n];
        if (at[n] < vocab) logits[at[n]] = changed(c, before[n], drafted[n], seen);
    }
}

void best_drafts(const Sampling *c, int64_t position, float *logits, const int64_t *ids, int64_t vocab,
    const int64_t *drafted, int64_t depth, int64_t width, float *scores, int64_t *tokens) {
    const float rate = (float)(1 / c->temperature);
    if (c->bias || c->penalised || c->counts) change(c, logits, ids, vocab, drafted, depth);
    float best = -INFINITY;
    vec most = splat(-INFINITY);
    const int64_t whole = vocab / LANES * LANES;
    for (int64_t i = 0; i < whole; i += LANES) most = larger(load(logits, i, 0, LANES), most);
    for (int64_t i = whole; i < vocab; i++) best = logits[i] > best ? logits[i] : best;
    best = largest_of(most) > best ? largest_of(most) : best;
    float floor = (float)(best * rate + c->log_min_p);
    if (c->top_k > 0 || c->top_p < 1 || c->eta > 0) {
        Sampling plain = *c; // the logits are penalised by now
        plain.special = NULL;
        Cut cut;
        const double highest = best_score(&plain, logits, 0, vocab);
        if (highest == highest && !filters(&plain, logits, 0, vocab, highest, &cut))
            floor = (float)cut.floor * (cut.floor > 0 ? 1 - 1e-6f : 1 + 1e-6f);
    }
    const uint64_t key = key_of(c->seed, position);
    for (int64_t n = 0; n < width; n++) scores[n] = -INFINITY, tokens[n] = ids ? ids[0] : 0;
    const Words first = first_words(key);
    for (int64_t i = 0; i < vocab; i += LANES) {
        const int64_t left = vocab - i;
        vec score = (left >= LANES ? load(logits, i, 0, LANES) : load(logits, i, 0, left)) * rate;
        const ivec stays = score >= floor;
        if (none(stays)) continue;
        if (c->do_sample) {
            if (none(score >= scores[width - 1] - MOST_NOISE)) continue;
            const Words random = ids ? words_of(key, ids + i, left) : words_from(&first, i);
            if (none(score >= scores[width - 1] - FAR) && none_rare(random)) continue;
            score += noise(random);
        }
        score = choose(stays, score, splat(-INFINITY));
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
