// Prints a hash of what each function of the native library makes of fixed inputs, for the instruction set that is named
// and a number of threads.
//
// Sets with vectors of the same size print the same lines on any processor; lines of quantised products are the same for
// all sets. `tests/decoder/test_native_targets.py` builds it for several targets and compares what they print.

#include "library.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int use_instructions(const char *name);
int panel_width(void);
int quantised_width(void);
int rows_together(void);
const Format *weight_format(int number);
void pack_weights(int format, const uint8_t *from, int64_t outputs, int64_t inputs, uint8_t *to, int threads);
void unpack_rows(
    int format, const uint8_t *packed, int64_t inputs, const int64_t *rows, int64_t count, float *to, int threads);
#define DECLARED(result, name, parameters, arguments) result name parameters;
EACH_FUNCTION(DECLARED)

enum { MOST = 1 << 22 };

static uint64_t seed = 1;
static int threads;

static uint32_t random_bits(void) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static float random_float(void) { return (float)(random_bits() % 65536) / 32768 - 1; }

static uint16_t random_bf16(void) { return (uint16_t)((random_bits() & 0x807f) | (0x7c + random_bits() % 3) << 7); }

static uint16_t random_half(void) { return (uint16_t)((random_bits() & 0x83ff) | (4 + random_bits() % 8) << 10); }

static void *memory(int64_t bytes) {
    // No place behind it is readable for sanitizers.
    void *found = malloc(bytes ? (size_t)bytes : 1);
    if (!found) exit(2);
    return found;
}

static float *floats(int64_t count) {
    float *numbers = memory(count * 4);
    for (int64_t i = 0; i < count; i++) numbers[i] = random_float();
    return numbers;
}

static int8_t *codes(int64_t count) {
    int8_t *found = memory(count);
    for (int64_t i = 0; i < count; i++) found[i] = (int8_t)(random_bits() % 255 - 127);
    return found;
}

static uint16_t *bf16s(int64_t count) {
    uint16_t *numbers = memory(count * 2);
    for (int64_t i = 0; i < count; i++) numbers[i] = random_bf16();
    return numbers;
}

static void print(const char *what, int64_t rows, const void *numbers, int64_t bytes) {
    uint64_t hash = 14695981039346656037u;
    for (int64_t i = 0; i < bytes; i++) hash = (hash ^ ((const uint8_t *)numbers)[i]) * 1099511628211u;
    printf("%s %lld %016llx\n", what, (long long)rows, (unsigned long long)hash);
}

// ----------------------------------------------------------------------------------------------- quantised products

// Random blocks, with scales that are small numbers.
static uint8_t *random_blocks(const Format *f, int64_t count) {
    uint8_t *blocks = memory(count * f->bytes);
    for (int64_t i = 0; i < count * f->bytes; i++) blocks[i] = (uint8_t)random_bits();
    for (int64_t b = 0; b < count; b++) {
        uint8_t *block = blocks + b * f->bytes;
        const uint16_t halves[2] = {random_half(), random_half()};
        if (!strcmp(f->name, "MXFP4")) block[0] = (uint8_t)(118 + random_bits() % 7);
        else if (!strcmp(f->name, "Q6_K")) memcpy(block + f->bytes - 2, halves, 2);
        else memcpy(block, halves, f->head_bytes / quantised_width());
    }
    return blocks;
}

static void quantised_products(void) {
    enum { INPUTS = 512, OUTPUTS = 75 };
    for (int number = 0; weight_format(number); number++) {
        const Format *f = weight_format(number);
        const int64_t panels = (OUTPUTS + quantised_width() - 1) / quantised_width(), blocks = INPUTS / f->inputs;
        uint8_t *from = random_blocks(f, OUTPUTS * blocks), *packed = memory(panels * blocks * f->packed_bytes);
        memset(packed, 0, panels * blocks * f->packed_bytes);
        pack_weights(number, from, OUTPUTS, INPUTS, packed, threads);
        const int64_t rows[3] = {74, 0, 16};
        float *unpacked = memory(3 * INPUTS * 4);
        unpack_rows(number, packed, INPUTS, rows, 3, unpacked, threads);
        print("unpacked", number, unpacked, 3 * INPUTS * 4);
        Quantised all = {1, {{number, OUTPUTS, packed}}};
        float *bias = floats(OUTPUTS);
        const PackedWeight p = {INPUTS, OUTPUTS, &all, bias, QUANTISED};
        for (int64_t count = 1; count <= 37; count = count * 3 / 2 + 1) {
            float *x = floats(count * INPUTS), *y = memory(count * OUTPUTS * 4);
            x[0] = 50, x[1] = 0;
            linear(&p, x, count, 0, y, threads);
            print(f->name, count, y, count * OUTPUTS * 4);
            free(x), free(y);
        }
        free(from), free(packed), free(unpacked), free(bias);
    }
}

// ------------------------------------------------------------------------------------------------- packed products

static int64_t words_of(int kind, int64_t inputs) { return kind == FP32 ? inputs : (inputs + 1) / 2; }

// The same weights for any width of panels: word `word` of output `output`.
static uint32_t word_of(int kind, int64_t inputs, int64_t output, int64_t word) {
    seed = (uint64_t)(output * 1000003 + word) * 0x9E3779B97F4A7C15u + (uint64_t)kind;
    random_bits();
    if (kind == FP32) {
        const float x = random_float();
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return bits;
    }
    const uint32_t low = random_bf16();
    return low | (2 * word + 1 >= inputs ? 0 : (uint32_t)random_bf16() << 16);
}

static void packed_products(void) {
    static const char *const names[] = {"float32", "bfloat16"};
    static const int64_t sizes[][2] = {{64, 75}, {129, 40}, {7, 3}, {320, 64}};
    for (int kind = FP32; kind <= BF16; kind++)
        for (int size = 0; size < 4; size++) {
            const int64_t inputs = sizes[size][0], outputs = sizes[size][1], width = panel_width();
            const int64_t panels = (outputs + width - 1) / width, words = words_of(kind, inputs);
            uint32_t *packed = memory(panels * width * words * 4);
            for (int64_t i = 0; i < panels * width * words; i++)
                packed[i] = word_of(kind, inputs, i / width / words * width + i % width, i / width % words);
            seed = (uint64_t)(kind * 10 + size);
            float *bias = floats(outputs);
            const PackedWeight p = {inputs, outputs, packed, bias, kind};
            for (int64_t rows = 1; rows <= 61; rows = rows * 3 / 2 + 1) {
                float *x = floats(rows * inputs), *y = memory(rows * outputs * 4);
                linear(&p, x, rows, 0, y, threads);
                print(names[kind], rows, y, rows * outputs * 4);
                free(x), free(y);
            }
            free(packed), free(bias);
        }
}

// ---------------------------------------------------------------------------------------------------- whole layers

static PackedWeight random_product(int64_t inputs, int64_t outputs) {
    const int64_t width = panel_width(), panels = (outputs + width - 1) / width, words = words_of(BF16, inputs);
    uint32_t *packed = memory(panels * width * words * 4);
    for (int64_t i = 0; i < panels * width * words; i++)
        packed[i] = word_of(BF16, inputs, i / width / words * width + i % width, i / width % words);
    return (PackedWeight){inputs, outputs, packed, NULL, BF16};
}

// A pass over two texts: a tree behind `length` tokens, whose cache may be quantised, and a prompt.
static void passes(int64_t length, int64_t new, int coded) {
    enum { SIZE = 48, HEADS = 6, KV_HEADS = 2, DIM = 12, WIDTH = 72, PROMPT = 5 };
    const int64_t all = HEADS + 2 * KV_HEADS, rows = new + PROMPT, together = rows_together();
    Layer layer = {
        .qkv = random_product(SIZE, all * DIM),
        .o = random_product(HEADS * DIM, SIZE),
        .gate_up = random_product(SIZE, 2 * WIDTH),
        .down = random_product(WIDTH, SIZE),
        .size = SIZE,
        .heads = HEADS,
        .kv_heads = KV_HEADS,
        .dim = DIM,
        .rotary_dim = DIM,
        .eps = 1e-5f,
        .head_eps = 1e-6f,
        .residual = coded ? 0.75f : 1,
    };
    seed = (uint64_t)(length * 100 + new);
    float *norm_in = floats(SIZE), *norm_before_mlp = floats(SIZE), *head_norm = floats((HEADS + KV_HEADS) * DIM);
    layer.norm_in = norm_in, layer.norm_before_mlp = norm_before_mlp, layer.head_norm = head_norm;
    const Layer *layers[2] = {&layer, &layer};
    const int64_t slots = length + new, of_layer = KV_HEADS *slots *DIM, of_prompt = KV_HEADS *PROMPT *DIM;
    void *keys = coded ? (void *)codes(2 * of_layer) : floats(2 * of_layer);
    void *values = coded ? (void *)codes(2 * of_layer) : floats(2 * of_layer);
    float *key_scales = floats(2 * KV_HEADS * slots), *value_scales = floats(2 * KV_HEADS * slots);
    float *prompt_keys = floats(2 * of_prompt), *prompt_values = floats(2 * of_prompt);
    uint8_t *mask = memory(new *new);
    for (int64_t i = 0; i < new *new; i++) mask[i] = i / new == i % new || (i % new < i / new &&i % new % 2 == 0);
    const SequenceKV texts[2] = {
        {keys, values, of_layer, slots * DIM, DIM, of_layer, slots * DIM, DIM, 0, length, new, mask,
            coded ? key_scales : NULL, coded ? value_scales : NULL, KV_HEADS *slots, slots},
        {prompt_keys, prompt_values, of_prompt, PROMPT * DIM, DIM, of_prompt, PROMPT * DIM, DIM, 0, 0, PROMPT, NULL,
            NULL, NULL, 0, 0},
    };
    float *states = floats(rows * SIZE), *heads = memory(rows * all * DIM * 4),
          *attended = memory(rows * HEADS * DIM * 4);
    float *cosines = floats(rows * DIM), *sines = floats(rows * DIM);
    const int64_t before = SIZE + all * DIM, behind = 2 * SIZE + 3 * WIDTH;
    float *scratch = memory(together * (before > behind ? before : behind) * 4);
    const Attention a = {texts, NULL, attended, all * DIM, HEADS, KV_HEADS, DIM, DIM, 0.3f, 0, NULL, 0, 0, 0};
    const float *const of_kind[2] = {cosines, sines};
    const Pass pass = {
        .layers = layers,
        .last = 2,
        .rows = rows,
        .states = states,
        .heads = heads,
        .cosines = &of_kind[0],
        .sines = &of_kind[1],
        .scratch = scratch,
        .kinds = 1,
    };
    if (run_layers(&pass, &a, 2, threads)) exit(2);
    print("states", length, states, rows * SIZE * 4);
    print("keys", length, keys, 2 * of_layer * (coded ? 1 : 4));
    print("scales", length, value_scales, 2 * KV_HEADS * slots * 4);
    const void *const held[] = {layer.qkv.weight, layer.o.weight, layer.gate_up.weight, layer.down.weight, norm_in,
        norm_before_mlp, head_norm, keys, values, key_scales, value_scales, prompt_keys, prompt_values, mask, states,
        heads, attended, cosines, sines, scratch};
    for (size_t i = 0; i < sizeof held / sizeof *held; i++) free((void *)held[i]);
}

// Experts of a layer, one of them shared, for rows alone and together.
static void experts(int scoring, int groups) {
    enum { SIZE = 48, WIDTH = 40, SHARED = 56, COUNT = 12, USED = 3, ROWS = 130 };
    Expert all[COUNT + 1];
    for (int64_t i = 0; i <= COUNT; i++) {
        const int64_t width = i < COUNT ? WIDTH : SHARED;
        all[i] = (Expert){random_product(SIZE, width), random_product(SIZE, width), random_product(width, SIZE)};
    }
    seed = (uint64_t)(scoring * 10 + groups);
    float *x = floats(ROWS * SIZE), *correction = floats(COUNT), *y = memory(ROWS * SIZE * 4),
          *alone = memory(SIZE * 4);
    const Experts e = {
        .experts = all,
        .count = COUNT,
        .used = USED,
        .router = random_product(SIZE, COUNT),
        .shared_gate = random_product(SIZE, 1),
        .correction = scoring == SIGMOID ? correction : NULL,
        .groups = groups,
        .groups_used = groups > 1 ? groups - 1 : 1,
        .scoring = scoring,
        .normalised = 1,
        .activation = scoring == SIGMOID ? SILU : CLAMPED,
        .shared = 1,
        .scaling = 2,
        .limit = 0.5f,
        .alpha = 1.7f,
    };
    float *scratch = memory(expert_numbers(&e, ROWS) * 4);
    run_block(&e, x, ROWS, y, scratch, 0, threads);
    print("experts", groups, y, ROWS * SIZE * 4);
    for (int64_t row = 0; row < ROWS; row += 43) {
        run_block(&e, x + row * SIZE, 1, alone, scratch, 0, threads);
        if (memcmp(alone, y + row * SIZE, SIZE * 4) != 0) exit(2);
    }
    for (int64_t i = 0; i <= COUNT; i++)
        free((void *)all[i].gate.weight), free((void *)all[i].up.weight), free((void *)all[i].down.weight);
    free((void *)e.router.weight), free((void *)e.shared_gate.weight);
    free(x), free(correction), free(y), free(alone), free(scratch);
}

static void attention_of_bf16(int64_t length, int64_t new, int64_t dim, int coded) {
    enum { HEADS = 4, KV_HEADS = 2 };
    seed = (uint64_t)(length * 1000 + dim);
    const int64_t slots = length + new;
    const int64_t numbers = KV_HEADS * slots * dim;
    void *keys = coded ? (void *)codes(numbers) : bf16s(numbers),
         *values = coded ? (void *)codes(numbers) : bf16s(numbers);
    uint16_t *scales = bf16s(KV_HEADS * slots);
    uint16_t *queries = bf16s(new *HEADS *dim), *out = memory(new *HEADS *dim * 2);
    const SequenceKV text = {keys, values, 0, slots * dim, dim, 0, slots * dim, dim, 0, length, new, NULL,
        coded ? scales : NULL, coded ? scales : NULL, 0, slots};
    const Attention a = {&text, queries, out, HEADS * dim, HEADS, KV_HEADS, dim, dim, 0.2f, 1, NULL, 0, 0, 0};
    if (attend(&a, 1, threads)) exit(2);
    print("attention", length, out, new *HEADS *dim * 2);
    free(keys), free(values), free(scales), free(queries), free(out);
}

// ---------------------------------------------------------------------------------------------------------- tokens

static void tokens(int64_t vocab, float scale) {
    seed = (uint64_t)vocab;
    float *logits = floats(vocab);
    for (int64_t i = 0; i < vocab; i++) logits[i] *= scale;
    uint8_t *penalised = memory(vocab);
    for (int64_t i = 0; i < vocab; i++) penalised[i] = random_bits() % 9 == 0;
    logits[vocab / 2] = -3000; // whose probability is none
    int64_t ids[64];
    double scores[64];
    double *bias = memory(vocab * 8);
    int32_t *counts = memory(vocab * 4);
    for (int64_t i = 0; i < vocab; i++)
        bias[i] = penalised[i] ? (double)(i % 7) - 3 : 0, counts[i] = penalised[i] ? (int32_t)(i % 3) : 0;
    for (int kind = 0; kind < 4; kind++) {
        const int do_sample = kind > 0;
        const Sampling c = {penalised, penalised, kind == 3 ? bias : NULL, kind > 1 ? counts : NULL, 1.1, 0.3, 0.2, 0.8,
            kind == 2 ? 40 : 0, kind > 1 ? 0.9 : 1, log(0.01), kind == 3 ? 0.01 : 0, 7, do_sample};
        const int64_t found = sample_candidates(&c, 11, logits, 0, vocab, ids, scores, 64);
        print("sample_candidates", found, ids, found > 0 ? found * 8 : 0);
        double logprob[9];
        const int64_t likely = log_probabilities(&c, logits, 0, vocab, ids[0], logprob, 8, ids, logprob + 1);
        print("likely", likely, ids, likely * 8);
        print("log-probabilities", kind, logprob, (likely + 1) * 8);
        float best[8];
        int64_t drafts[8];
        float *written = memory(vocab * 4);
        memcpy(written, logits, vocab * 4);
        rank_drafts(&c, 11, written, vocab, 8, best, drafts);
        print("drafts", kind, drafts, sizeof drafts);
        print("scores", kind, best, sizeof best);
        free(written);
    }
    free(logits), free(penalised), free(bias), free(counts);
}

int main(int count, char **arguments) {
    if (count != 3 || use_instructions(arguments[1])) {
        fprintf(
            stderr, "name an instruction set that this processor has and that was compiled, and how many threads\n");
        return 1;
    }
    threads = atoi(arguments[2]);
    quantised_products();
    packed_products();
    for (int coded = 0; coded < 2; coded++) passes(0, 3, coded), passes(40, 9, coded), passes(600, 17, coded);
    experts(SOFTMAX, 1), experts(SIGMOID, 3);
    attention_of_bf16(300, 7, 24, 0), attention_of_bf16(5, 1, 64, 0), attention_of_bf16(70, 3, 9, 0);
    attention_of_bf16(300, 7, 24, 1), attention_of_bf16(5, 1, 64, 1), attention_of_bf16(600, 3, 36, 1);
    tokens(5, 1), tokens(1000, 1), tokens(1003, 30);
    return 0;
}
