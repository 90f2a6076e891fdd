// Threads that share the work of a call, as pool.h describes.
//
// They spin for a while where they wait, and then sleep: beside other work a thread that only waits takes the processor
// from the one that it waits for. And they yield between pieces, before the system puts them aside within one.

#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>

// As glibc has had them from the beginning, so that a library that is compiled on a new system loads on an old one.
#if defined(__GLIBC__) && defined(__x86_64__)
#define OLD "GLIBC_2.2.5"
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLD "GLIBC_2.17"
#endif
#if defined(OLD)
#define AS_OLD(name) __asm__(".symver " #name ", " #name "@" OLD);
AS_OLD(pthread_create)
AS_OLD(pthread_join)
AS_OLD(pthread_sigmask)
#endif

enum { MOST_THREADS = 128 };
enum { SPIN = 50000 };   // nanoseconds, in which one waits before it sleeps
enum { TURN = 2000000 }; // and after which it lets others run: shorter than a system's, which would end within a piece

// Where threads sleep until something has changed.
typedef struct {
    pthread_cond_t changed;
    _Atomic int sleepers;
} Bed;

static struct {
    _Atomic int busy;        // whether a call has the pool
    _Atomic uint64_t ticket; // the number of the stage that is open, and in the lower half its next piece
    _Atomic int64_t done;    // pieces of it
    _Atomic uint32_t call;   // how many there have been
    _Atomic uint32_t inside; // how many helpers are in one, twice, and one more if others may come in
    _Atomic int stops;
    void (*share)(const void *argument, Worker *w);
    const void *argument;
    int threads;    // of the call at most
    uint32_t first; // stage of the call
    pthread_mutex_t mutex;
    Bed idle, waiting;    // of helpers outside of calls, and of threads in them
    int helpers, no_more; // no_more: the system gives no further ones
    pthread_t threads_of_helpers[MOST_THREADS];
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER,
    .idle.changed = PTHREAD_COND_INITIALIZER,
    .waiting.changed = PTHREAD_COND_INITIALIZER};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * (int64_t)1000000000 + t.tv_nsec;
}

static void pause_a_little(void) {
    for (int i = 0; i < 8; i++)
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#endif
}

// Wait until a condition holds, which threads that may make it true follow by `wake`.
#define WAIT_UNTIL(condition, bed)                                                                                     \
    for (int64_t begin = now(); !(condition);) {                                                                       \
        pause_a_little();                                                                                              \
        if (now() - begin < SPIN) continue;                                                                            \
        pthread_mutex_lock(&pool.mutex);                                                                               \
        (bed)->sleepers++;                                                                                             \
        while (!(condition)) pthread_cond_wait(&(bed)->changed, &pool.mutex);                                          \
        (bed)->sleepers--;                                                                                             \
        pthread_mutex_unlock(&pool.mutex);                                                                             \
    }

static void wake(Bed *bed) {
    if (!bed->sleepers) return;
    pthread_mutex_lock(&pool.mutex);
    pthread_cond_broadcast(&bed->changed);
    pthread_mutex_unlock(&pool.mutex);
}

static uint32_t stage_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }

// Open the stage behind this one.
static void open_next(uint32_t stage) {
    pool.done = 0;
    pool.ticket = (uint64_t)(stage + 1) << 32;
    wake(&pool.waiting);
}

// Between two pieces a thread holds nobody, so here it makes room for other work of the processor, if there is any. The
// caller's comes back where it was; helpers leave the call first, whose end would wait for them, and come in again.
static void let_others_run(Worker *w) {
    const int64_t time = now();
    if (time - w->since < TURN) return;
    w->since = time;
    if (w->is_caller) sched_yield();
    else w->leaves = 1;
}

int64_t next_piece(Worker *w, int64_t pieces) {
    if (w->alone) {
        if (w->next < pieces) return w->next++;
        w->next = 0;
        return -1;
    }
    if (w->holds && ++pool.done == pieces) open_next(w->stage);
    w->holds = 0;
    uint64_t ticket = pool.ticket;
    if (stage_of(ticket) == w->stage) let_others_run(w);
    while (stage_of(ticket) == w->stage && !w->leaves) {
        if ((int64_t)(uint32_t)ticket < pieces) {
            if (!atomic_compare_exchange_weak(&pool.ticket, &ticket, ticket + 1)) continue;
            w->holds = 1;
            return (int64_t)(uint32_t)ticket;
        }
        if (!pieces) {
            if (atomic_compare_exchange_weak(&pool.ticket, &ticket, (uint64_t)(w->stage + 1) << 32))
                wake(&pool.waiting);
            continue;
        }
        WAIT_UNTIL(stage_of(pool.ticket) != w->stage, &pool.waiting)
        break;
    }
    w->stage++;
    return -1;
}

// Come into the call if it is open.
static int enter(void) {
    uint32_t inside = pool.inside;
    while (inside & 1)
        if (atomic_compare_exchange_weak(&pool.inside, &inside, inside + 2)) return 1;
    return 0;
}

static void *help(void *given) {
    const int number = (int)(intptr_t)given;
    uint32_t seen = 0; // the call that is over for this helper
    for (;;) {
        WAIT_UNTIL(pool.stops || (pool.call != seen && (pool.inside & 1)), &pool.idle)
        if (pool.stops) return NULL;
        if (!enter()) continue;
        const uint32_t call = pool.call;
        Worker w = {.number = number, .threads = pool.threads, .since = now()};
        w.stage = pool.first;
        if (number < pool.threads) pool.share(pool.argument, &w);
        if (!w.leaves) seen = call;
        if (atomic_fetch_sub(&pool.inside, 2) == 2) wake(&pool.waiting);
        if (w.leaves) sched_yield();
    }
}

static void start_helpers(int wanted) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are for the program's own threads
    while (pool.helpers < wanted && !pool.no_more) {
        pthread_t *thread = &pool.threads_of_helpers[pool.helpers];
        pool.no_more = pthread_create(thread, NULL, help, (void *)(intptr_t)(pool.helpers + 1)) != 0; // fewer will do
        if (!pool.no_more && ++pool.helpers == MOST_THREADS) pool.no_more = 1;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pool_run(void (*share)(const void *argument, Worker *w), const void *argument, int threads) {
    Worker w = {.threads = threads, .is_caller = 1};
    w.alone = threads <= 1 || atomic_exchange(&pool.busy, 1);
    if (w.alone) {
        w.threads = 1;
        share(argument, &w);
        return;
    }
    if (pool.helpers < threads - 1 && !pool.no_more) start_helpers(threads - 1);
    pool.share = share, pool.argument = argument, pool.threads = threads;
    pool.first = w.stage = stage_of(pool.ticket);
    w.since = now();
    pool.call++;
    pool.inside = 1;
    wake(&pool.idle);
    share(argument, &w);
    pool.inside--;
    WAIT_UNTIL(!pool.inside, &pool.waiting)
    pool.busy = 0;
}

// A forked process has none of the helpers, nor the thread whose call had the pool.
static void forget_helpers(void) {
    pool.helpers = 0, pool.no_more = 0;
    pool.inside = 0;
    pool.done = 0;
    pool.ticket = (uint64_t)(stage_of(pool.ticket) + 1) << 32;
    pthread_mutex_init(&pool.mutex, NULL);
    for (Bed *bed = &pool.idle; bed <= &pool.waiting; bed++) {
        pthread_cond_init(&bed->changed, NULL);
        bed->sleepers = 0;
    }
    pool.busy = 0;
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(NULL, NULL, forget_helpers); }

__attribute__((destructor)) static void stop_helpers(void) {
    if (atomic_exchange(&pool.busy, 1)) return; // a thread goes on while the process ends
    pool.stops = 1;
    wake(&pool.idle);
    for (int i = 0; i < pool.helpers; i++) pthread_join(pool.threads_of_helpers[i], NULL);
}
