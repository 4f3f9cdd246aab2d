// A golden layer as a host would hand it over, and ranks (threads) that run it: what the suites of
// runner, dispatcher and forward share.

#ifndef MOXIE_HOST_TESTS_LAYER_H
#define MOXIE_HOST_TESTS_LAYER_H

#include "host_tests/golden.h"
#include "host_tests/mock_host.h"

struct layer {
    struct golden golden;
    int64_t tokens, hidden, intermediate, experts, top_k;
    int32_t order, orientation; // of w1, and of both
    struct golden_tensor x, ids, weights, want, w1, w2, w1_bias, w2_bias;
};

// Opens host_tests/golden/layers/<name>.safetensors.
void layer_open(struct layer *layer, const char *name);
void layer_close(struct layer *layer);
// Sets the keys that the layer's metadata decides; output_format is f32.
void layer_configure(const struct layer *layer, struct mock_host *mock);

// The weights of experts [first, first + count), pointing into the file.
struct layer_weights_view {
    moxie_weights weights;
    moxie_matrix w1, w2;
    int64_t dims[4][3];
};
void layer_weights_of(const struct layer *layer, int64_t first, int64_t count,
                      struct layer_weights_view *view);

// Tokens [first, first + tokens) as a batch; `y` is f32 [tokens, hidden].
struct layer_batch {
    moxie_batch batch;
    int64_t dims[4][2];
};
void layer_batch_of(const struct layer *layer, int64_t first, int64_t tokens, float *y,
                    struct layer_batch *batch);

// Tokens of `rank`, and its first, when `tokens` are split into contiguous parts, the first ones a
// token longer.
int64_t layer_part(int64_t tokens, int64_t ranks, int64_t rank);
int64_t layer_part_first(int64_t tokens, int64_t ranks, int64_t rank);
// Every rank's part of the layer's tokens.
void layer_parts(const struct layer *layer, int32_t ranks, int64_t parts[MOXIE_RANKS_MAX]);
// f32 [tokens, hidden], poisoned with NaN; the caller frees it.
float *layer_poisoned(const struct layer *layer);

// One rank: instance, runner and dispatcher, created or failing the test. Between init and open,
// further keys may be set on `mock`.
struct layer_rank {
    struct mock_host mock;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
};
void layer_rank_init(struct layer_rank *rank, const struct layer *layer, struct mock_group *group,
                     int32_t index);
// Everything but the dispatcher.
void layer_rank_prepare(struct layer_rank *rank, const struct layer *layer);
void layer_rank_open(struct layer_rank *rank, const struct layer *layer);
void layer_rank_close(struct layer_rank *rank);

#endif
