// Ranks as threads over one golden layer, each with a GPU of its own: opens them all, runs a
// scenario on each, closes them.

#ifndef MOXIE_HOST_TESTS_GPU_CREW_H
#define MOXIE_HOST_TESTS_GPU_CREW_H

#include "host_tests/gpu/gpu_layer.h"

// The key `transport` of every rank, and timeout_ms where a wait is to end. NCCL has no more than
// that to join the ranks, too, which over sockets takes it seconds, and its stand-in no time.
#ifndef GPU_TRANSPORT
#define GPU_TRANSPORT "auto"
#define GPU_SHORT_MS  2000
#elif defined(FAKE_NCCL)
#define GPU_SHORT_MS 400
#else
#define GPU_SHORT_MS 10000
#endif

struct gpu_crew;

struct gpu_member {
    struct layer_rank rank;
    struct gpu_crew *crew;
    int32_t index;
    int64_t first, tokens; // its part of the layer's tokens
    struct layer_weights_view weights;
    int64_t scale_dims[2][2];
    int64_t packed_dims[2][2][3];         // of mxfp4's values and scales
    struct layer_batch batch;             // on the device; room for every token of the layer
    int64_t rank_tokens[MOXIE_RANKS_MAX]; // of the next step; crew.parts at first
    moxie_step step;
    cudaStream_t stream;
    float *y; // host: its part of crew.y
};

// A captured layer.
struct gpu_graph {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

struct gpu_crew {
    const char *layer_name;
    int32_t ranks;
    const char *dispatcher;
    int32_t fp8;   // 1: the weights become fp8_channel
    int32_t mxfp4; // 1: they become mxfp4; sizes that 32 divides
    // Sets further keys before open; may be NULL.
    void (*configure)(struct gpu_member *member);
    // What each rank does.
    void (*scenario)(struct gpu_member *member);
    // Set: what dispatcher_create answers is for this to judge, and no scenario is run.
    void (*created)(struct gpu_member *member, int32_t answer);
    void *arg;

    struct layer layer;
    struct mock_group *group;
    int64_t parts[MOXIE_RANKS_MAX];
    float *y; // f32 [tokens, hidden], poisoned with NaN before the scenarios start
};

// Of so many, how many have a device of their own; not before the test's process is there.
int32_t gpu_crew_ranks(int32_t most);
// Runs it all; crew->y and crew->layer stay until gpu_crew_fini.
void gpu_crew_run(struct gpu_crew *crew);
void gpu_crew_fini(struct gpu_crew *crew);

// MOXIE_OK, or the test fails with the error's text.
void gpu_member_accept(const struct gpu_member *member, int32_t answer);
// What the library answers, in words in member->rank.mock.
int32_t gpu_member_begin(struct gpu_member *member);
int32_t gpu_member_run(struct gpu_member *member);
int32_t gpu_member_poll(struct gpu_member *member);
// One layer in stream order, y poisoned before.
void gpu_member_launch(struct gpu_member *member);
// Waits, and brings y to member->y.
void gpu_member_fetch(struct gpu_member *member);
// A scenario: begin, launch, fetch.
void gpu_member_forward(struct gpu_member *member);
// Makes `tokens` of the layer, from `first` on, the rank's next batch.
void gpu_member_take(struct gpu_member *member, int64_t first, int64_t tokens);
// Begins a step and captures its layer.
void gpu_member_capture(struct gpu_member *member, struct gpu_graph *graph);
void gpu_graph_free(struct gpu_graph *graph);
// Fails the test when crew->y differs from the golden output by more than `bound`.
void gpu_crew_expect_golden(const struct gpu_crew *crew, double bound);
// Keys: every rank may bring all tokens of the layer.
void gpu_member_all_tokens(struct gpu_member *member);
void gpu_member_two_slots(struct gpu_member *member);
void gpu_member_short_timeout(struct gpu_member *member);
// Every rank has come here.
void gpu_member_meet(struct gpu_member *member);
// Fails the test when a row of member->y is not zero.
void gpu_member_expect_zero(const struct gpu_member *member);
double gpu_seconds_since(int64_t began_ns);

#endif
