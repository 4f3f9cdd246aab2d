// What the files of the bench on a device with graphs share: a graph of forwards, what it reads and
// writes, and how it is replayed by all ranks together.

#ifndef MOXIE_HOSTS_CLI_BENCH_GRAPH_H
#define MOXIE_HOSTS_CLI_BENCH_GRAPH_H

#include "hosts/cli/bench_check.h"
#include "hosts/cli/rank.h"

struct layer_set {
    struct weights w1, w2;
    moxie_runner *runner;
};

struct rounds;
struct collectives;

struct graphs {
    struct rank *rank;
    struct device *device;
    const struct bench_job *job;
    int sets;
    struct layer_set set[BENCH_FORWARDS];
    struct memory x[BENCH_FORWARDS], y[BENCH_FORWARDS], ids[BENCH_FORWARDS];
    struct memory router_weights; // of every forward: all 1 / k
    struct memory delay;          // to fill it takes as long as the longest delay
    int64_t rank_tokens[BOOTSTRAP_RANKS_MAX];
    int32_t *drawn; // [BENCH_FORWARDS, tokens_max, k], what `ids` hold
    void *graph;
    void *ahead; // what goes before a timed graph; NULL: the graph itself
    void *before, *after;
    uint64_t replays;                // so far
    struct rounds *rounds;           // NULL: whole layers are timed
    struct collectives *collectives; // of NCCL; NULL: none
};

// One replay, over all ranks.
struct replayed {
    double total_us;             // of the graph
    double time_us, spread_us;   // of one forward: the slowest rank, and how far the fastest was
    double event_us;             // of two events in a row inside the graph
    double rows;                 // that leave a rank, of one forward: the mean
    double sent_most, came_most; // rows that leave one rank, that come to one
};

static inline uint64_t bench_row_bytes(const struct bench_job *job)
{
    return (uint64_t)job->shape.hidden * sizeof(uint16_t);
}

static inline int32_t *bench_drawn(const struct graphs *graphs, int forward)
{
    return graphs->drawn + forward * graphs->job->tokens_max * graphs->job->shape.top_k;
}

static inline int bench_last_forward(void)
{
    return BENCH_FORWARDS - 1;
}

// The tensors of one of the forwards.
struct forward bench_forward(const struct graphs *graphs, int forward);

// What `enqueue` puts into the stream becomes *graph.
int bench_capture(struct graphs *graphs, int (*enqueue)(struct graphs *, struct fault *),
                  void **graph, struct fault *fault);

// ---- Memory (bench_room.c) ---------------------------------------------------------------------

int bench_make_sets(struct graphs *graphs, struct fault *fault);
int bench_make_rows(struct graphs *graphs, struct fault *fault);
// `fill_bytes_per_s`: at which the device fills memory.
int bench_make_delay(struct graphs *graphs, double fill_bytes_per_s, struct fault *fault);
void bench_release(struct graphs *graphs);

// ---- The device itself (bench_rates.c) ---------------------------------------------------------

// What the driver's own copy and fill reach, in bytes a second; of a copy, read and written ones.
struct rates {
    double copy, fill;
};

int bench_measure_rates(struct graphs *graphs, struct rates *rates, struct fault *fault);

// ---- What was computed (bench_outputs.c) -------------------------------------------------------

// The first and the last row of every forward, or all of them, against the poison.
int bench_check_outputs(struct graphs *graphs, int64_t tokens, int all, struct fault *fault);
// The last token of the last forward of every rank, by plain loops. Collective.
int bench_check_numbers(struct graphs *graphs, int64_t tokens, double *relative_error,
                        struct fault *fault);

// ---- Rounds without experts (bench_rounds.c) ---------------------------------------------------

// After the dispatcher. Accepts layers, for which there is nothing to do.
int bench_rounds_open(struct graphs *graphs, struct fault *fault);
void bench_rounds_close(struct graphs *graphs);
// Rounds that also say where each row of a result lies; what is timed relies on it.
int bench_rounds_prepare(struct graphs *graphs, struct fault *fault);
// Rounds that are timed.
int bench_rounds_run(struct graphs *graphs, struct fault *fault);
// Of one forward of the last replay; nothing is changed where the whole graph is timed.
int bench_rounds_time(struct graphs *graphs, double *time_us, double *event_us,
                      struct fault *fault);
// y [H] of a token whose row is `x` and whose experts are `experts`.
int bench_rounds_expect(const struct graphs *graphs, const uint8_t *x, const int32_t *experts,
                        double *y, struct fault *fault);

// ---- NCCL's collectives (bench_nccl.c) ---------------------------------------------------------

// Where the library is not, or does not work, graphs->collectives stays as it is and `reason` says
// why. Collective.
int bench_nccl_open(struct graphs *graphs, char *reason, uint64_t reason_bytes,
                    struct fault *fault);
// `st`: the outcome of the bench so far. After a failure peers may be gone, for whom nobody must
// wait.
void bench_nccl_close(struct graphs *graphs, int st);
// Of one cell: captures, then replays in turns with Moxie, then the JSON of the times.
int bench_nccl_begin(struct graphs *graphs, int64_t tokens, struct fault *fault);
int bench_nccl_replay(struct graphs *graphs, int backwards, struct fault *fault);
json_t *bench_nccl_end(struct graphs *graphs);

// Launches `ahead`, then the timed `graph`, together with all other ranks; *total_us is this
// rank's.
int bench_replay_graph(struct graphs *graphs, void *ahead, void *graph, double *total_us,
                       struct fault *fault);

#endif
