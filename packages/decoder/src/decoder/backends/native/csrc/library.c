// The functions of the library: those of the fastest instruction set that was compiled and that the processor has.

#include "library.h"
#include "formats/formats.h"
#include "pool.h"

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>

// Compilers that have its instructions may not know its name.
static __attribute__((unused)) int has_avxvnni(void) {
    uint32_t a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>

static __attribute__((unused)) int has_i8mm(void) {
    int has = 0;
    size_t size = sizeof has;
    return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &has, &size, NULL, 0) && has;
}
#endif

// SETS lists those that were compiled, the fastest first: X(avx512bf16) X(avx2), say.
#define DECLARED(name) extern PRIVATE const InstructionSet name##_set;
#define X DECLARED
SETS
#undef X

#define FOUND_avx512bf16 (FOUND_avx512 && __builtin_cpu_supports("avx512bf16"))
#define FOUND_avx512                                                                                                   \
    (FOUND_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&                          \
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&                                    \
        __builtin_cpu_supports("avx512vnni"))
#define FOUND_avxvnni (FOUND_avx2 && has_avxvnni())
#define FOUND_avx2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define FOUND_neon (getauxval(AT_HWCAP) >> 20 & 1) // dotprod
#define FOUND_i8mm (FOUND_neon && getauxval(AT_HWCAP2) >> 13 & 1)
#elif defined(__aarch64__) && defined(__APPLE__)
#define FOUND_neon 1 // all of Apple's have dotprod
#define FOUND_i8mm has_i8mm()
#else
#define FOUND_i8mm 0
#define FOUND_neon 1
#endif
#define FOUND_generic 1

    // Set `number` of those that were compiled, NULL where the processor does not have it; the last one has the name "".
    static const InstructionSet *
    set_at(int number) {
    static const InstructionSet last = {.name = ""};
    int at = 0;
#define X(name)                                                                                                        \
    if (at++ == number) return FOUND_##name ? &name##_set : NULL;
    SETS
#undef X
        return &last;
}

static const InstructionSet *in_use;

// Use an instruction set from now on, or the fastest one if `name` is NULL; returns 0, or 1 where there is none.
// Weights that were packed for another set are of another width.
int use_instructions(const char *name) {
    for (int number = 0;; number++) {
        const InstructionSet *const set = set_at(number);
        if (set && !set->name[0]) return 1;
        if (!set || (name && strcmp(set->name, name) != 0)) continue;
        in_use = set;
        return 0;
    }
}

__attribute__((constructor)) static void choose(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    use_instructions(NULL);
}

// NULL where the processor has none of those that were compiled: no other function may be called then.
const char *instructions(void) { return in_use ? in_use->name : NULL; }

int multiplies_bf16(void) { return in_use->multiplies_bf16; }
int panel_width(void) { return in_use->panel_width; }
int rows_together(void) { return in_use->rows_together; }

#define RETURN_void
#define RETURN_int return
#define RETURN_int64_t return
#define CALL(result, name, parameters, arguments)                                                                      \
    result name parameters { RETURN_##result in_use->name arguments; }
EACH_FUNCTION(CALL)

// Names and sizes of all structures, for callers in other languages; the last one has no name.
const Structure *structures(void) {
#define ENTRY(name, bytes) {#name, sizeof(name)},
    static const Structure all[] = {EACH_STRUCTURE(ENTRY){NULL, 0}};
    return all;
}

// The formats in order, for those who only have the library: NULL behind the last one.
const Format *weight_format(int number) { return number < FORMATS ? &weight_formats[number] : NULL; }

int quantised_width(void) { return SIDE; }

typedef struct {
    int format;
    const uint8_t *from;
    int64_t outputs, inputs;
    uint8_t *to;
} Packing;

static void share_packing(const void *argument, Worker *w) {
    const Packing *p = argument;
    EACH_PIECE(panel, (p->outputs + SIDE - 1) / SIDE, w)
    pack_panel(p->format, p->from, p->outputs, p->inputs, panel, p->to);
}

// Weights [outputs, inputs] as a file has them to panels; `to` is zero.
void pack_weights(int format, const uint8_t *from, int64_t outputs, int64_t inputs, uint8_t *to, int threads) {
    const Packing p = {format, from, outputs, inputs, to};
    pool_run(share_packing, &p, threads);
}

// Numbers [outputs, inputs] that become words of 32 bits in panels, see `PackedWeight`.
typedef struct {
    const void *from;
    int64_t outputs, inputs;
    uint32_t *to;
    int from_bf16, to_bf16;
} Numbers;

enum { WORDS_AT_ONCE = 16 }; // of an output: those of a panel then stay in the first cache

#define INLINE static inline __attribute__((always_inline))

// Some words of an output, `width` words from each other.
INLINE void put_words(const void *from, int64_t inputs, int64_t start, int64_t end, int64_t width, uint32_t *to,
    const int from_bf16, const int to_bf16) {
    const uint16_t *halves = from;
    const uint32_t *whole = from;
    for (int64_t i = start; i < end; i++) {
        if (!to_bf16) to[i * width] = whole[i];
        else if (2 * i + 1 == inputs) to[i * width] = from_bf16 ? halves[2 * i] : whole[2 * i] >> 16;
        else if (from_bf16) to[i * width] = halves[2 * i] | (uint32_t)halves[2 * i + 1] << 16;
        else to[i * width] = whole[2 * i] >> 16 | (whole[2 * i + 1] & 0xffff0000);
    }
}

INLINE void put_panels(const Numbers *n, Worker *w, const int from_bf16, const int to_bf16) {
    const int64_t width = in_use->panel_width, words = to_bf16 ? (n->inputs + 1) / 2 : n->inputs;
    const int64_t row_bytes = n->inputs * (from_bf16 ? 2 : 4);
    EACH_PIECE(panel, (n->outputs + width - 1) / width, w) {
        const int64_t first = panel * width, last = first + width < n->outputs ? first + width : n->outputs;
        for (int64_t start = 0; start < words; start += WORDS_AT_ONCE) {
            const int64_t end = start + WORDS_AT_ONCE < words ? start + WORDS_AT_ONCE : words;
            for (int64_t o = first; o < last; o++) {
                const void *row = (const char *)n->from + o * row_bytes;
                put_words(row, n->inputs, start, end, width, n->to + first * words + o - first, from_bf16, to_bf16);
            }
        }
    }
}

static void share_numbers(const void *argument, Worker *w) {
    const Numbers *n = argument;
    if (n->from_bf16) put_panels(n, w, 1, 1);
    else if (n->to_bf16) put_panels(n, w, 0, 1);
    else put_panels(n, w, 0, 0);
}

// Weights [outputs, inputs] to panels of bfloat16 or float32 numbers; float32 ones that become bfloat16 lose their lower
// halves. `to` is zero.
void pack_numbers(
    const void *from, int from_bf16, int64_t outputs, int64_t inputs, void *to, int to_bf16, int threads) {
    const Numbers n = {from, outputs, inputs, to, from_bf16, to_bf16};
    pool_run(share_numbers, &n, threads);
}

typedef struct {
    const uint8_t *numbers;
    int64_t count;
    int *other;
} Checking;

enum { CHECKED_AT_ONCE = 1 << 15 };

static void share_checking(const void *argument, Worker *w) {
    const Checking *c = argument;
    EACH_PIECE(piece, (c->count + CHECKED_AT_ONCE - 1) / CHECKED_AT_ONCE, w) {
        const int64_t start = piece * CHECKED_AT_ONCE;
        const int64_t end = start + CHECKED_AT_ONCE < c->count ? start + CHECKED_AT_ONCE : c->count;
        uint64_t seen[4] = {0}, eight[4]; // of eight numbers at a time
        int64_t i = start;
        for (; i + 8 <= end; i += 8) {
            memcpy(eight, c->numbers + 4 * i, sizeof eight);
            for (int j = 0; j < 4; j++) seen[j] |= eight[j];
        }
        memset(eight, 0, sizeof eight);
        memcpy(eight, c->numbers + 4 * i, 4 * (size_t)(end - i));
        for (int j = 0; j < 4; j++) seen[j] |= eight[j];
        const uint64_t lower = (seen[0] | seen[1] | seen[2] | seen[3]) & 0x0000ffff0000ffff;
        if (lower) __atomic_store_n(c->other, 1, __ATOMIC_RELAXED);
    }
}

// Whether all of `count` float32 numbers are bfloat16 numbers.
int all_bf16(const void *numbers, int64_t count, int threads) {
    int other = 0;
    const Checking c = {numbers, count, &other};
    pool_run(share_checking, &c, threads);
    return !other;
}
