// Threads that share the work of a call.
//
// A call is a function that each of its threads runs from beginning to end. Its work stands in stages, one after the
// other, and a stage is cut into pieces, of some 10 to 50 microseconds, that whoever is free takes:
//
//     static void share_norms(const void *argument, Worker *w) {
//         const Norms *n = argument;
//         EACH_PIECE(row, n->rows, w) norm(row_of(n, row), ..);  // the first stage
//         share(n->product, .., w);                              // further ones, in a function
//     }
//
//     pool_run(share_norms, &norms, threads);
//
// No thread goes on behind a stage before all of its pieces are finished, so what a stage has written the next ones may
// read. A thread that the system has put aside holds the others only if it is in the middle of a piece: those without a
// piece are left behind, and pass over what was done without them. Therefore
//
// - all that a call writes it writes in pieces, for which a single one will do;
// - how many stages there are, and of how many pieces, must follow from what no stage of the call writes;
// - which thread computes a piece, and how many threads there are, must not change what comes out.

#ifndef POOL_H
#define POOL_H

#include "library.h"

// One of the threads of a call.
typedef struct {
    int number, threads; // its own, and of the call at most, by which to cut stages and memory
    // The pool's own: whether it holds a piece, whether it leaves the call; of one that is alone its next piece; when it
    // last let others run, in nanoseconds.
    int alone, is_caller, holds, leaves;
    uint32_t stage;
    int64_t next, since;
} Worker;

// Run `share` in up to `threads` threads, of which the caller's is one. Several threads may call at once: while one call
// has the pool, others run in their own thread alone.
PRIVATE void pool_run(void (*share)(const void *argument, Worker *w), const void *argument, int threads);

// The next piece of a stage that this thread is to compute, having finished the one before; -1 behind the stage.
PRIVATE int64_t next_piece(Worker *w, int64_t pieces);

#define EACH_PIECE(piece, pieces, w) for (int64_t piece; (piece = next_piece(w, pieces)) >= 0;)

#endif
