// What a seed decides: how many ranks, what they run, and which of them are killed or stopped at
// which instant.

#ifndef MOXIE_HOST_TESTS_FATE_H
#define MOXIE_HOST_TESTS_FATE_H

#include <stdint.h>

#define FATES_MAX 2

// Kinds of instants. A fate counts those of its kind and strikes at one of them.
enum instant {
    AT_SIGNAL,  // before or after a flag of dispatch or combine: between payload and flag, between
                // the flags of two peers
    AT_WAIT,    // about to look at the peers' flags
    AT_TIME,    // some microseconds after the forward began, wherever that is
    AT_REGROUP, // before or after a word of set_active_ranks
    AT_LOG,     // inside the host's log callback, while a failure is reported
    AT_GATHER,  // in create: at an all_gather, before or after this rank's part is visible
    AT_MEMORY,  // in create: before or after a piece of shared memory is made or opened
};

// When a stopped rank is woken.
enum wake {
    WAKE_NEVER,   // it was killed
    WAKE_SOON,    // some time after it stopped, perhaps before anyone noticed
    WAKE_AMID,    // while the survivors run forwards without it
    WAKE_LATE,    // when they have finished
    WAKE_HARMLESS // long before timeout_ms: nobody may notice
};

struct fate {
    int32_t rank;
    int32_t signal;     // SIGKILL or SIGSTOP
    int32_t instant;    // enum instant
    int32_t generation; // set_active_ranks calls of its process before
    int32_t forward;    // of that generation
    int32_t countdown;  // instants of its kind to survive
    int32_t delay_us;   // AT_TIME
    int32_t wake;       // enum wake
    int32_t wake_ms;    // WAKE_SOON, WAKE_HARMLESS: after the stop
};

struct ordeal {
    uint64_t seed;
    const char *layer, *dispatcher;
    int32_t ranks;
    int32_t slots;  // forwards in flight
    int32_t rounds; // of one forward; 1 when slots is 2
    int32_t threads;
    int32_t timeout_ms;
    int32_t gather_timeout_ms;
    int32_t lag_rank; // this one begins a wait late, or -1
    int32_t lag_ms;
    int32_t lag_combine; // 1: the wait for results, 0: the one for rows
    int32_t forwards;    // in a row, after every change of the ranks
    int32_t fates_count;
    struct fate fates[FATES_MAX];
};

void ordeal_from(uint64_t seed, struct ordeal *ordeal);
// The fate of a rank, or NULL.
const struct fate *ordeal_fate(const struct ordeal *ordeal, int32_t rank);
// 1: the fate strikes while the dispatchers are created.
int ordeal_in_create(const struct ordeal *ordeal);
// One line, for a failing run.
void ordeal_text(const struct ordeal *ordeal, char *text, uint64_t capacity);

#endif
