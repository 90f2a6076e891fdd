// The functions of the library: those of the fastest instruction set that was compiled and that the processor has.

#include "library.h"
#include "formats/formats.h"
#include "pool.h"

#include <string.h>

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
#define FOUND_avx2 (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#define FOUND_neon (getauxval(AT_HWCAP) >> 20 & 1) // dotprod
#else
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

typedef struct {
    int format;
    const uint8_t *packed;
    int64_t inputs;
    const int64_t *rows;
    int64_t count;
    float *to;
} Unpacking;

static void share_unpacking(const void *argument, Worker *w) {
    const Unpacking *u = argument;
    EACH_PIECE(r, u->count, w) unpack_row(u->format, u->packed, u->inputs, u->rows[r], u->to + r * u->inputs);
}

// Rows of packed weights, by their numbers, to `to` [count, inputs].
void unpack_rows(
    int format, const uint8_t *packed, int64_t inputs, const int64_t *rows, int64_t count, float *to, int threads) {
    const Unpacking u = {format, packed, inputs, rows, count, to};
    pool_run(share_unpacking, &u, threads);
}
