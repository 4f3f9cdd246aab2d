// A soak of the dispatchers of the GPU: what a seed decides, what the ranks of a run share with
// their launcher, and the life of one rank, a process that may be killed at any instant.

#ifndef MOXIE_HOST_TESTS_SOAK_H
#define MOXIE_HOST_TESTS_SOAK_H

#include "host_tests/board.h"
#include "host_tests/layer.h"

#define SOAK_RANKS_MAX BOARD_RANKS_MAX
#define SOAK_LANES_MAX 2
#define SOAK_FATES_MAX 2
#define SOAK_LOOK_US   300 // between two looks at the board

// ---- what a seed decides -----------------------------------------------------------------------

enum soak_instant {
    SOAK_AT_TIME,    // some microseconds after the calls of a forward began
    SOAK_AT_HALF,    // between two calls of a forward by halves
    SOAK_AT_GATHER,  // in create: at an all_gather, before or after its part is visible
    SOAK_AT_BIRTH,   // some microseconds after create began
    SOAK_AT_REGROUP, // some microseconds after set_active_ranks began
};

// When a rank is killed.
struct soak_fate {
    int32_t rank;
    int32_t instant;    // enum soak_instant
    int32_t generation; // set_active_ranks calls of its process before
    int32_t forward;    // of that generation
    int32_t countdown;  // SOAK_AT_HALF, SOAK_AT_GATHER: instants to survive
    int32_t delay_us;   // the others
};

struct soak_run {
    uint64_t seed;
    const char *layer, *dispatcher;
    int32_t ranks;
    int32_t slots;      // forwards in flight
    int32_t instances;  // of each rank, whose calls alternate
    int32_t rounds;     // of one forward; 1 when `halves`
    int32_t halves;     // 1: dispatch, run and combine by halves, 0: forward()
    int32_t fp8;        // 0: rows and weights of 16 bits, 1: fp8 weights, 2: rows too
    int32_t padding;    // MOXIE_PADDING_*
    int32_t listed;     // 1: every rank's tokens are told in step.rank_tokens
    int32_t graphs;     // 1: some forwards are replays of a graph
    int32_t recaptures; // 1: graphs are captured anew in every generation
    int32_t timeout_ms;
    int32_t forwards; // in a row, after every change of the ranks
    int32_t fates_count;
    struct soak_fate fates[SOAK_FATES_MAX];
};

// A lane is one forward in flight of one instance: instance lane / slots, slot lane % slots.
struct soak_at {
    int32_t generation, forward, lane;
};

// One rank's part of one forward.
struct soak_part {
    int64_t first, tokens; // rows of the layer
    int32_t masks;         // 1: tokens_valid is told
    int32_t valid;
    int32_t replays; // 1: a graph of all of the layer's tokens, of which `valid` are
    int32_t delay_us;
};

// `killed`: 1 when ranks shall die.
void soak_run_draw(uint64_t seed, int32_t ranks_max, int32_t killed, int32_t timeout_ms,
                   struct soak_run *run);
void soak_part_draw(const struct soak_run *run, int64_t layer_tokens, struct soak_at at,
                    int32_t rank, struct soak_part *part);
// The routing of `tokens` tokens, skewed: int32 [tokens, top_k], some of no expert, and f32.
void soak_routing_draw(const struct soak_run *run, const struct layer *layer, struct soak_at at,
                       int32_t rank, int32_t *ids, float *weights);
const struct soak_fate *soak_fate_of(const struct soak_run *run, int32_t rank);
// 1: the fate strikes, or may strike, while the dispatchers are created.
int soak_in_create(const struct soak_fate *fate);
// The run in words.
void soak_run_text(const struct soak_run *run, char *text, uint64_t capacity);

// ---- what ranks and launcher share -------------------------------------------------------------

// What all runs came to. Shared by every process.
struct soak_tally {
    _Atomic int64_t runs, killed, in_create, verdicts, forwards, replays, graphs;
    _Atomic int64_t slowest_ms; // verdict, from the call on
};

// Where a rank is; `step` points into the program, which every rank's process shares.
struct soak_trace {
    const char *volatile step;
    volatile int32_t generation, forward;
};

struct soak_world {
    struct soak_run run;
    struct layer layer;
    struct board *board;
    struct soak_trace *traces; // [ranks]
    struct soak_tally *tally;
    int64_t deadline_ns; // CLOCK_MONOTONIC: a run that takes longer hangs
};

// The rank's whole life, up to its natural end.
void soak_live(const struct soak_world *world, int32_t index);

#endif
