// Scales of 4-bit weights in a GPU's memory: a runner looks at them before it is there, and where
// the host rewrote them.

#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <stdlib.h>
#include <string.h>

#ifndef REPEATS
#define REPEATS 200 // of 64 MiB that are written before a scale is
#endif
#define EXPERTS      2
#define HIDDEN       4096 // the scales of an expert take more than one piece
#define INTERMEDIATE 2048

// Weights of zeros.
struct scene {
    struct mock_host mock;
    struct said said;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_matrix matrices[2];
    moxie_weights weights;
    int64_t dims[2][3][3]; // of each matrix's values, scales and globals
    int64_t group;
};

static moxie_tensor zeros(int32_t ndim, int64_t *dims, uint32_t type)
{
    moxie_tensor tensor = tensor_make(NULL, ndim, dims, NULL, type);
    size_t bytes = (size_t)tensor_element_bytes(&tensor);
    void *memory = NULL;

    for (int32_t i = 0; i < ndim; i++)
        bytes *= (size_t)dims[i];
    must(cudaMalloc(&memory, bytes));
    must(cudaMemset(memory, 0, bytes));
    tensor.data = memory;
    tensor.device.type = MOXIE_DEVICE_CUDA;
    return tensor;
}

static void make_matrix(struct scene *s, int32_t which, int32_t format, int64_t n, int64_t k)
{
    int64_t(*dims)[3] = s->dims[which];
    moxie_matrix *matrix = &s->matrices[which];

    memcpy(dims[0], (int64_t[]){EXPERTS, n, k / 2}, sizeof dims[0]);
    memcpy(dims[1], (int64_t[]){EXPERTS, n, k / s->group}, sizeof dims[1]);
    dims[2][0] = EXPERTS;
    *matrix = (moxie_matrix){.struct_size = sizeof *matrix,
                             .format = format,
                             .order = which == 0 ? MOXIE_ORDER_GATE_UP : MOXIE_ORDER_PLAIN};
    matrix->values = zeros(3, dims[0], TENSOR_UINT8);
    matrix->scales = zeros(3, dims[1], format == MOXIE_FORMAT_MXFP4 ? TENSOR_UINT8 : TENSOR_E4M3);
    if (format == MOXIE_FORMAT_NVFP4)
        matrix->global_scales = zeros(1, dims[2], 1u << MOXIE_FORMAT_F32);
}

static void scene_open(struct scene *s, const char *format)
{
    static const struct registry none;
    const int32_t number = strcmp(format, "mxfp4") == 0 ? MOXIE_FORMAT_MXFP4 : MOXIE_FORMAT_NVFP4;

    memset(s, 0, sizeof *s);
    s->group = number == MOXIE_FORMAT_MXFP4 ? 32 : 16;
    said_init(&s->said);
    mock_host_init(&s->mock);
    s->mock.host.allocate = NULL;
    s->mock.host.release = NULL;
    mock_set_str(&s->mock, "device", "sm_90");
    mock_set_str(&s->mock, "weight_format", format);
    mock_set_i64(&s->mock, "hidden_size", HIDDEN);
    mock_set_i64(&s->mock, "intermediate_size", INTERMEDIATE);
    mock_set_i64(&s->mock, "num_experts", EXPERTS);
    mock_set_i64(&s->mock, "forward_tokens_max", 4);
    ACCEPTED(&s->said, instance_open(&s->mock.host, &none, &s->instance, &s->said.error));
    make_matrix(s, 0, number, 2 * INTERMEDIATE, HIDDEN);
    make_matrix(s, 1, number, HIDDEN, INTERMEDIATE);
    s->weights = (moxie_weights){
        .struct_size = sizeof s->weights, .w1 = &s->matrices[0], .w2 = &s->matrices[1]};
}

static void scene_close(struct scene *s)
{
    runner_destroy(s->runner);
    ACCEPTED(&s->said, instance_close(s->instance, &s->said.error));
    for (int32_t i = 0; i < 2; i++) {
        must(cudaFree(s->matrices[i].values.data));
        must(cudaFree(s->matrices[i].scales.data));
        must(cudaFree(s->matrices[i].global_scales.data));
    }
    mock_host_fini(&s->mock);
}

static int32_t create(struct scene *s)
{
    return runner_create(s->instance, 0, &s->weights, &s->runner, &s->said.error);
}

static int32_t updated(struct scene *s, int32_t expert)
{
    return runner_weights_updated(s->runner, &expert, 1, &s->said.error);
}

// The last block of the last row.
static unsigned char *last_scale(const struct scene *s, int32_t matrix, int64_t expert)
{
    const int64_t *dims = s->dims[matrix][1];

    return (unsigned char *)s->matrices[matrix].scales.data + (expert + 1) * dims[1] * dims[2] - 1;
}

static void put(unsigned char *at, unsigned char byte)
{
    must(cudaMemcpy(at, &byte, 1, cudaMemcpyHostToDevice));
}

START_TEST(damaged_scales_are_refused)
{
    static const char *const names[] = {"weights.w1.scales", "weights.w2.scales"};
    static const char *const formats[] = {"mxfp4", "nvfp4"};
    struct scene s;

    scene_open(&s, formats[_i]);
    for (int32_t matrix = 0; matrix < 2; matrix++) {
        put(last_scale(&s, matrix, 1), 0xff);
        SAID(&s.said, MOXIE_E_INVALID, create(&s), names[matrix], "expert 1, row 4095",
             "the checkpoint is damaged");
        put(last_scale(&s, matrix, 1), 0x70);
    }
    ACCEPTED(&s.said, create(&s));
    put(last_scale(&s, 1, 0), 0x7f | (_i == 0 ? 0x80 : 0));
    ACCEPTED(&s.said, updated(&s, 1));
    SAID(&s.said, MOXIE_E_INVALID, updated(&s, 0), names[1], "expert 0, row 4095");
    SAID(&s.said, MOXIE_E_INVALID, runner_weights_updated(s.runner, NULL, 0, &s.said.error),
         names[1]);
    scene_close(&s);
}
END_TEST

// 2^127 times 1.5 is a number, if not one that a GPU has, times 2 none.
START_TEST(values_decide_near_the_end)
{
    struct scene s;
    unsigned char *value;

    scene_open(&s, "mxfp4");
    put(last_scale(&s, 0, 0), 254);
    value = (unsigned char *)s.matrices[0].values.data + 2 * INTERMEDIATE * HIDDEN / 2 - 1;
    put(value, 0x30);
    SAID(&s.said, MOXIE_E_UNSUPPORTED, create(&s), "scale 254 of expert 0, row 4095, block 127",
         "2^21 at most");
    put(last_scale(&s, 0, 0), 148);
    ACCEPTED(&s.said, create(&s));
    put(last_scale(&s, 0, 0), 254);
    put(value, 0x40);
    SAID(&s.said, MOXIE_E_INVALID, updated(&s, 0), "scale 254 of expert 0, row 4095, block 127");
    scene_close(&s);
}
END_TEST

// A host writes weights on a stream of its own, which the default stream does not wait for.
START_TEST(what_is_still_being_written_is_waited_for)
{
    const size_t bytes = (size_t)64 << 20;
    unsigned char *busy = NULL;
    cudaStream_t stream;
    struct scene s;

    scene_open(&s, "nvfp4");
    must(cudaMalloc((void **)&busy, bytes));
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    ACCEPTED(&s.said, create(&s));
    for (int32_t i = 0; i < REPEATS; i++)
        must(cudaMemsetAsync(busy, 0xff, bytes, stream));
    must(cudaMemcpyAsync(last_scale(&s, 1, 1), busy, 1, cudaMemcpyDeviceToDevice, stream));
    SAID(&s.said, MOXIE_E_INVALID, updated(&s, 1), "weights.w2.scales", "NaN");
    must(cudaStreamDestroy(stream));
    must(cudaFree(busy));
    scene_close(&s);
}
END_TEST

// Ends the capture, which a real driver calls invalid now.
static void end_capture(cudaStream_t stream)
{
    cudaGraph_t graph;

    if (cudaStreamEndCapture(stream, &graph) == cudaSuccess) must(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
}

START_TEST(scales_are_read_before_a_capture)
{
    cudaStream_t stream;
    struct scene s;

    scene_open(&s, _i == 0 ? "mxfp4" : "nvfp4");
    must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    SAID(&s.said, MOXIE_E_CAPTURING, create(&s), "call create and weights_updated before");
    ck_assert_ptr_null(s.runner);
    end_capture(stream);
    ACCEPTED(&s.said, create(&s));
    must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    SAID(&s.said, MOXIE_E_CAPTURING, updated(&s, 1), "call create and weights_updated before");
    end_capture(stream);
    ACCEPTED(&s.said, updated(&s, 1));
    must(cudaStreamDestroy(stream));
    scene_close(&s);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, damaged_scales_are_refused, 0, 2);
    tcase_add_test(tests, values_decide_near_the_end);
    tcase_add_test(tests, what_is_still_being_written_is_waited_for);
    tcase_add_loop_test(tests, scales_are_read_before_a_capture, 0, 2);
}

int main(void)
{
    return gpu_suite("gpu_weights", 1, add);
}
