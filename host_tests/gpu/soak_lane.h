// The forwards of a soaking rank: what it carries, how it is called, and what must come out.

#ifndef MOXIE_HOST_TESTS_SOAK_LANE_H
#define MOXIE_HOST_TESTS_SOAK_LANE_H

#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/gpu/soak.h"

// One forward in flight of one instance. Its tensors have room for every token of the layer.
struct soak_lane {
    struct soak_member *member;
    int32_t index, slot;
    struct soak_part part; // of the forward now
    int64_t rank_tokens[MOXIE_RANKS_MAX];
    struct layer_batch batch; // on the device
    moxie_step step;
    int32_t *valid; // on the device
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec; // NULL: not captured
    const moxie_rows *in, *out;
    int32_t *ids, *masked; // host [tokens, top_k]
    float *weights;        // host
    float *y, *want;       // host [tokens, hidden]
};

// One instance of a rank.
struct soak_member {
    struct layer_rank rank; // first: the host's ctx is its mock
    struct layer_weights_view weights;
    int64_t scale_dims[2][2];
};

// A rank's process.
struct soak_life {
    const struct soak_world *world;
    const struct soak_run *run;
    const struct soak_fate *fate; // or NULL
    struct board *board;
    struct board_seat *seat;
    struct soak_trace *trace;
    int32_t index;
    int32_t done; // forwards of this generation
    int32_t lanes_count;
    int32_t armed, countdown; // of a fate that counts instants
    struct soak_member members[SOAK_LANES_MAX];
    struct soak_lane lanes[SOAK_LANES_MAX];
    struct soak_member reference; // all experts on the CPU, of the same weights
};

#define SOAK_REQUIRE(life, condition, ...)                                                         \
    do {                                                                                           \
        if (!(condition)) board_complain((life)->board, (life)->index, __VA_ARGS__);               \
    } while (0)

#define SOAK_DEVICE(life, call)                                                                    \
    do {                                                                                           \
        cudaError_t soak_answer = (call);                                                          \
                                                                                                   \
        SOAK_REQUIRE(life, soak_answer == cudaSuccess, "%s: %s", #call,                            \
                     cudaGetErrorString(soak_answer));                                             \
    } while (0)

// A fate that counts instants of this kind meets one.
void soak_instant(struct soak_life *life, int32_t kind);

void soak_lanes_open(struct soak_life *life);
void soak_lanes_close(struct soak_life *life);
// Captures a graph of every lane, of all of the layer's tokens.
void soak_lanes_capture(struct soak_life *life);
// Draws the next forward, brings it to the device, and begins it; y is poisoned.
void soak_lanes_fill(struct soak_life *life);
void soak_lanes_begin(struct soak_life *life);
// The calls of all lanes. A wait that fails may be seen by a call, or by poll_error later: then
// *failed is the lane whose call it was, or -1.
int32_t soak_lanes_call(struct soak_life *life, int32_t *failed);
// Waits for the device, and brings y here.
void soak_lanes_fetch(struct soak_life *life);

void soak_lane_poison(struct soak_life *life, struct soak_lane *lane);
// 1: y is what the CPU makes of this forward without the experts of the ranks in the log; else the
// text says where it is not.
int soak_lane_is_right(struct soak_life *life, struct soak_lane *lane, char *text,
                       uint64_t capacity);
int soak_lane_is_zero(const struct soak_life *life, const struct soak_lane *lane);

#endif
