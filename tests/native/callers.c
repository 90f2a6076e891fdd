// Several threads that call the library in a file at once, forked processes that do, and the library let go and loaded
// again: ends with status 0 where each call gave what it gives alone. "nofork" leaves out the processes.

#include "library.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { INPUTS = 64, OUTPUTS = 640, ROWS = 3, CALLERS = 4, TIMES = 300 };

static void (*multiply)(const PackedWeight *p, const void *x, int64_t rows, int is_bf16, void *y, int threads);
static float weights[INPUTS * OUTPUTS], x[CALLERS][ROWS * INPUTS], expected[CALLERS][ROWS * OUTPUTS];
static const PackedWeight product = {INPUTS, OUTPUTS, weights, NULL, FP32};

// Returns whether a product is not what one thread makes of it.
static int differs(int number, int threads) {
    float y[ROWS * OUTPUTS];
    multiply(&product, x[number], ROWS, 0, y, threads);
    return memcmp(y, expected[number], sizeof y) != 0;
}

static int forks, fork_differs(int generations);

static void *call(void *given) {
    const int number = *(const int *)given;
    intptr_t wrong = 0;
    for (int i = 0; i < TIMES; i++) {
        wrong += differs(number, 1 + (i + number) % 4);
        if (forks && number == 0 && i % 100 == 50) wrong += fork_differs(1);
    }
    return (void *)wrong;
}

// In threads that call at once, whether any product was wrong.
static int some_differ(void) {
    pthread_t callers[CALLERS];
    int numbers[CALLERS], wrong = 0;
    for (int n = 0; n < CALLERS; n++) {
        numbers[n] = n;
        if (pthread_create(&callers[n], NULL, call, &numbers[n])) exit(2);
    }
    for (int n = 0; n < CALLERS; n++) {
        void *found;
        pthread_join(callers[n], &found);
        wrong |= found != NULL;
    }
    return wrong;
}

// The same in a forked process, and in one that it forks.
static int fork_differs(int generations) {
    int status;
    const pid_t child = fork();
    if (!child) {
        alarm(60);
        forks = 0;
        _exit(differs(0, 3) || some_differ() || (generations && fork_differs(generations - 1)) || differs(1, 3));
    }
    return child < 0 || waitpid(child, &status, 0) != child || status != 0;
}

int main(int count, char **arguments) {
    if (count < 2) return 2;
    for (size_t i = 0; i < sizeof weights / sizeof *weights; i++) weights[i] = (float)(i * 7919 % 2003) - 1000;
    for (int n = 0; n < CALLERS; n++)
        for (int i = 0; i < ROWS * INPUTS; i++) x[n][i] = (float)((i + n) * 104729 % 1009) - 500;
    alarm(300); // a call that waits for ever
    for (int loads = 0; loads < 3; loads++) {
        void *library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
        if (!library) return fprintf(stderr, "%s\n", dlerror()), 2;
        *(void **)&multiply = dlsym(library, "linear");
        for (int n = 0; n < CALLERS; n++) multiply(&product, x[n], ROWS, 0, expected[n], 1);
        forks = count < 3;
        if (differs(2, 3) || some_differ() || differs(3, 3)) return 1;
        if (dlclose(library)) return 2;
    }
    return 0;
}
