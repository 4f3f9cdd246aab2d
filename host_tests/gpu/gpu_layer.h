// A golden layer on the GPU: the instance, its weights and a batch in device memory.

#ifndef MOXIE_HOST_TESTS_GPU_LAYER_H
#define MOXIE_HOST_TESTS_GPU_LAYER_H

#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/weights.h"

#include "host_tests/layer.h"

#include <check.h>
#include <cuda_runtime_api.h>

// What the suites run through: first those that fp8 takes: weights [E, N, K], sizes that 16
// divides.
extern const char *const gpu_layers[];
#define GPU_LAYERS     8
#define GPU_LAYERS_FP8 5

// Of the keys.
struct gpu_options {
    int32_t capture; // capture_routed_experts
    int32_t fp8;     // 1: the weights become fp8_channel
    int32_t mxfp4;   // 1: they become mxfp4; sizes that 32 divides
    int32_t none;    // 1: the runner is the host's own
    int32_t copies;  // of the layer's tokens, one behind the other; 0: one
};

struct gpu_layer {
    struct layer layer;       // with all copies of its tokens
    unsigned char *copied[4]; // x, ids, weights and outputs; NULL where there is one copy
    struct mock_host mock;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    struct layer_weights_view weights;
    struct layer_batch batch;
    moxie_step step;
    float *y; // host
    size_t y_bytes;
    cudaStream_t stream;
    uint64_t allocate_calls; // of the host's allocator
    int64_t scale_dims[2][2];
    int64_t packed_dims[2][2][3]; // of mxfp4's values and scales
    double bound;                 // of the error against the golden output
};

void must(cudaError_t st);
// Bytes of 0xff in device memory.
void *gpu_poisoned(size_t bytes);
// The tensor's bytes move to memory of the current device, which cudaFree gives back.
void gpu_upload(moxie_tensor *tensor);
// The compact host tensor's bytes over the first of the device tensor's.
void gpu_refill(const moxie_tensor *tensor, const moxie_tensor *from);
// A layer's weights as fp8_channel in host memory, which the second gives back; the shapes of the
// scales lie in `scale_dims` [2].
void gpu_quantise_weights(struct layer_weights_view *weights, int64_t (*scale_dims)[2]);
void gpu_free_quantised(const struct layer_weights_view *weights);
// The same as mxfp4; the shapes of values and scales lie in `dims` [2].
void gpu_pack_weights(struct layer_weights_view *weights, int64_t (*dims)[2][3]);
// All tensors of a layer's weights; with `scale_dims` [2] they become fp8_channel first, and the
// shapes of the scales lie there.
void gpu_upload_weights(struct layer_weights_view *weights, int64_t (*scale_dims)[2]);
void gpu_free_weights(struct layer_weights_view *weights);

void gpu_layer_open(struct gpu_layer *gpu, const char *name, struct gpu_options options);
void gpu_layer_close(struct gpu_layer *gpu);
// MOXIE_OK, or the test fails with the error's text.
void gpu_accept(const struct gpu_layer *gpu, int32_t answer);
// One forward in stream order.
void gpu_launch(struct gpu_layer *gpu);
// The same with y poisoned before and fetched after.
void gpu_forward(struct gpu_layer *gpu);
void gpu_poison(struct gpu_layer *gpu);
void gpu_fetch(struct gpu_layer *gpu);

// How many the kernels can run on; says on standard output why where there are none. Not after this
// process has used one.
int gpu_devices(void);
// Runs a suite, each test in a process of its own; 77 where there are fewer devices than that.
int gpu_suite(const char *name, int devices_least, void (*add)(TCase *tests));

#endif
