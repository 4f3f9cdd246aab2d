// Several ranks as threads of this process, with a bootstrap that never waits for ever.

#ifndef MOXIE_HOSTS_CLI_CONFORM_CREW_H
#define MOXIE_HOSTS_CLI_CONFORM_CREW_H

#include "hosts/cli/conform_stage.h"

#define CREW_RANKS_MAX 4

struct seat;

// What a crew does, the same on every rank.
struct crew_job {
    const char *dispatcher; // NULL: auto
    int32_t ranks, dp_size;
    int64_t tokens[CREW_RANKS_MAX]; // each rank's
    // Changes settings and specs of a rank; may be NULL.
    void (*prepare)(struct seat *seat);
    // Plays: the configuration is open and accepted, nothing is created.
    int (*play)(struct seat *seat);
};

struct crew {
    const struct crew_job *job;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    const void *sent[CREW_RANKS_MAX];
    uint64_t bytes;
    int32_t arrived;
    uint64_t round;
    int32_t broken;       // a rank has failed: every gather fails from here on
    int32_t first_broken; // that rank
};

struct seat {
    struct crew *crew;
    int32_t rank;
    struct check check;
    struct stage stage;
};

// Runs the job and takes over the verdict of the rank that failed first.
int crew_run(const struct crew_job *job, struct check *check);

// Whether a configuration of so many ranks is accepted.
int crew_accepted(const struct crew_job *job, struct check *check, int *accepted);

// The bootstrap, for plays that gather something themselves.
int32_t crew_all_gather(struct seat *seat, const void *send, void *recv, uint64_t bytes);

// Creates what a layer needs on this rank.
int crew_create(struct seat *seat);
// begin_forward of these counts by rank, with the list or without, and forward of the seat's
// tokens.
int crew_forward(struct seat *seat, const int64_t *counts);

// Calls `visit` for each registered dispatcher that sums over ranks; skips when there is none.
int crew_each_dispatcher(struct check *check, int (*visit)(const char *name, struct check *check));

#endif
