// One rank of a kill run, in a process of its own: it lives by its host's duties, checks all it
// sees, and meets its fate.

#ifndef MOXIE_HOST_TESTS_MORTAL_H
#define MOXIE_HOST_TESTS_MORTAL_H

#include "host_tests/board.h"
#include "host_tests/fate.h"
#include "host_tests/layer.h"

#define RUN_MS  90000 // a run that takes longer hangs
#define LOOK_US 300   // between two looks at the board
#define SUBSETS (1 << FATES_MAX)

// What all runs came to. Shared by every process.
struct tally {
    _Atomic int64_t runs, killed, stopped, in_create, verdicts, harmless, left_out;
    _Atomic int64_t slowest_ms; // verdict, past timeout_ms
};

struct world {
    struct ordeal ordeal;
    struct board *board;
    struct tally *tally;
    struct layer layer;
    int64_t count; // floats of the layer's output
    float *wants;  // [SUBSETS, count]: bit f of the subset: the rank of fate f is lost
};

// Puts the instants into the transport of this process and those forked from it.
void mortal_init(void);
// The rank's whole life, up to its natural end.
void mortal_live(const struct world *world, int32_t index);
// 1 when there is shared memory of that name.
int mortal_is_left_behind(const char *name);

#endif
