// The whole library on a GPU: golden layers, graphs that replay with other ids and counts, tensors
// that lie wrongly. Exits with 77 where there is no device of compute capability 9.0.

#include "plugin/forward.h"

#include "host_tests/layer.h"
#include "host_tests/suite.h"
#include "plugin/dispatcher.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <string.h>

static const char *const layers[] = {"deepseek_v3_a",      "gpt_oss_a",   "llama4_a",
                                     "mixtral_a",          "qwen2_moe_a", "qwen3_moe_a",
                                     "qwen3_moe_norenorm", "qwen3_moe_t1"};
#define LAYERS ((int)(sizeof layers / sizeof layers[0]))

#ifndef REPEATS
#define REPEATS 100 // of a forward that must give the same bits
#endif

struct bench {
    struct layer layer;
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
};

static void must(cudaError_t st)
{
    ck_assert_msg(st == cudaSuccess, "%s", cudaGetErrorString(st));
}

static void upload(moxie_tensor *tensor)
{
    int64_t count = 1;
    void *device = NULL;
    size_t bytes;

    if (tensor->data == NULL) return;
    for (int32_t i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    bytes = (size_t)(count * tensor_element_bytes(tensor));
    must(cudaMalloc(&device, bytes + 16));
    must(cudaMemcpy(device, tensor->data, bytes, cudaMemcpyHostToDevice));
    tensor->data = device;
    tensor->device.type = MOXIE_DEVICE_CUDA;
}

static int32_t mock_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    (void)ctx;
    if (request->kind == MOXIE_MEMORY_DEVICE) {
        must(cudaMalloc(memory, request->bytes));
        must(cudaMemset(*memory, 0xff, request->bytes));
        return 0;
    }
    return posix_memalign(memory, (size_t)request->align, (size_t)request->bytes);
}

static void mock_release(void *ctx, const moxie_allocation *request, void *memory)
{
    (void)ctx;
    if (request->kind == MOXIE_MEMORY_DEVICE)
        must(cudaFree(memory));
    else
        free(memory);
}

static void accept(struct bench *bench, int32_t answer)
{
    ck_assert_msg(answer == MOXIE_OK, "%s", bench->mock.text);
}

static void bench_open(struct bench *bench, const char *name)
{
    static const struct registry none;
    moxie_error *error = &bench->mock.error;
    const moxie_plan *plan = NULL;
    void *y = NULL;

    memset(bench, 0, sizeof *bench);
    layer_open(&bench->layer, name);
    mock_host_init(&bench->mock);
    layer_configure(&bench->layer, &bench->mock);
    mock_set_str(&bench->mock, "device", "sm_90");
    mock_set_i64(&bench->mock, "forward_tokens_max", bench->layer.tokens);
    bench->mock.host.allocate = mock_allocate;
    bench->mock.host.release = mock_release;
    accept(bench, instance_open(&bench->mock.host, &none, &bench->instance, error));
    accept(bench, instance_plan(bench->instance, &plan, error));
    layer_weights_of(&bench->layer, 0, bench->layer.experts, &bench->weights);
    upload(&bench->weights.w1.values);
    upload(&bench->weights.w2.values);
    upload(&bench->weights.w1.bias);
    upload(&bench->weights.w2.bias);
    accept(bench,
           runner_create(bench->instance, 0, &bench->weights.weights, &bench->runner, error));
    accept(bench, dispatcher_create(bench->instance, DISPATCHER_LOCAL, &bench->dispatcher, error));
    bench->y_bytes = (size_t)(bench->layer.tokens * bench->layer.hidden) * sizeof(float);
    bench->y = malloc(bench->y_bytes);
    layer_batch_of(&bench->layer, 0, bench->layer.tokens, bench->y, &bench->batch);
    upload(&bench->batch.batch.x);
    upload(&bench->batch.batch.ids);
    upload(&bench->batch.batch.weights);
    must(cudaMalloc(&y, bench->y_bytes));
    bench->batch.batch.y.data = y;
    bench->batch.batch.y.device.type = MOXIE_DEVICE_CUDA;
    must(cudaStreamCreateWithFlags(&bench->stream, cudaStreamNonBlocking));
    bench->batch.batch.stream = bench->stream;
    bench->step = (moxie_step){.struct_size = sizeof(moxie_step), .tokens = bench->layer.tokens};
}

static void bench_close(struct bench *bench)
{
    dispatcher_destroy(bench->dispatcher);
    runner_destroy(bench->runner);
    ck_assert_int_eq(instance_close(bench->instance, &bench->mock.error), MOXIE_OK);
    must(cudaStreamDestroy(bench->stream));
    must(cudaFree(bench->weights.w1.values.data));
    must(cudaFree(bench->weights.w2.values.data));
    must(cudaFree(bench->weights.w1.bias.data));
    must(cudaFree(bench->weights.w2.bias.data));
    must(cudaFree(bench->batch.batch.x.data));
    must(cudaFree(bench->batch.batch.ids.data));
    must(cudaFree(bench->batch.batch.weights.data));
    must(cudaFree(bench->batch.batch.y.data));
    free(bench->y);
    layer_close(&bench->layer);
}

static void poison(struct bench *bench)
{
    must(cudaMemsetAsync(bench->batch.batch.y.data, 0xff, bench->y_bytes, bench->stream));
}

static void fetch(struct bench *bench)
{
    must(cudaMemcpyAsync(bench->y, bench->batch.batch.y.data, bench->y_bytes,
                         cudaMemcpyDeviceToHost, bench->stream));
    must(cudaStreamSynchronize(bench->stream));
}

static void forward(struct bench *bench)
{
    moxie_error *error = &bench->mock.error;

    accept(bench, dispatcher_begin_forward(bench->dispatcher, &bench->step, error));
    accept(bench, forward_run(bench->dispatcher, bench->runner, &bench->batch.batch, error));
}

START_TEST(golden_layers)
{
    struct bench bench;
    float *again;

    bench_open(&bench, layers[_i]);
    poison(&bench);
    forward(&bench);
    fetch(&bench);
    ck_assert_double_le(golden_error(bench.y, &bench.layer.want), 5e-3);
    again = malloc(bench.y_bytes);
    ck_assert_ptr_nonnull(again);
    for (int32_t i = 0; i < REPEATS; i++) {
        memcpy(again, bench.y, bench.y_bytes);
        poison(&bench);
        forward(&bench);
        fetch(&bench);
        ck_assert_mem_eq(again, bench.y, bench.y_bytes);
    }
    free(again);
    bench_close(&bench);
}
END_TEST

// A token's bits do not depend on the tokens beside it.
START_TEST(batch_mates_change_nothing)
{
    struct bench bench;
    float *whole;
    int64_t tokens;

    bench_open(&bench, "qwen3_moe_a");
    tokens = bench.layer.tokens;
    forward(&bench);
    fetch(&bench);
    whole = malloc(bench.y_bytes);
    ck_assert_ptr_nonnull(whole);
    memcpy(whole, bench.y, bench.y_bytes);
    for (int64_t some = 1; some < tokens; some += 7) {
        poison(&bench);
        bench.step.tokens = some;
        for (int32_t i = 0; i < 4; i++)
            bench.batch.dims[i][0] = some;
        forward(&bench);
        fetch(&bench);
        ck_assert_mem_eq(whole, bench.y, (size_t)(some * bench.layer.hidden) * sizeof(float));
        ck_assert(bench.y[some * bench.layer.hidden] != bench.y[some * bench.layer.hidden]);
    }
    free(whole);
    bench_close(&bench);
}
END_TEST

// Captured once; replayed with other ids and another count of valid tokens.
START_TEST(graphs_replay_with_other_counts)
{
    struct bench bench;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int32_t *valid = NULL, one_expert[256];
    float *eager;

    bench_open(&bench, "deepseek_v3_a");
    must(cudaMalloc((void **)&valid, sizeof *valid));
    bench.step.tokens_valid = valid;
    must(cudaStreamBeginCapture(bench.stream, cudaStreamCaptureModeThreadLocal));
    forward(&bench);
    must(cudaStreamEndCapture(bench.stream, &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    eager = malloc(bench.y_bytes);
    ck_assert_ptr_nonnull(eager);
    for (int32_t tokens = 0; tokens <= bench.layer.tokens; tokens += 29) {
        for (int32_t i = 0; i < bench.layer.tokens * bench.layer.top_k; i++)
            one_expert[i] = tokens == 0 ? 3 : i % 32;
        must(cudaMemcpy(bench.batch.batch.ids.data, one_expert,
                        (size_t)(bench.layer.tokens * bench.layer.top_k) * 4,
                        cudaMemcpyHostToDevice));
        must(cudaMemcpy(valid, &tokens, sizeof tokens, cudaMemcpyHostToDevice));
        poison(&bench);
        forward(&bench);
        fetch(&bench);
        memcpy(eager, bench.y, bench.y_bytes);
        poison(&bench);
        must(cudaGraphLaunch(exec, bench.stream));
        fetch(&bench);
        ck_assert_mem_eq(eager, bench.y, bench.y_bytes);
        if (tokens == 0) ck_assert_float_eq(bench.y[0], 0.0f);
    }
    free(eager);
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    must(cudaFree(valid));
    bench_close(&bench);
}
END_TEST

START_TEST(tensors_that_lie_wrongly_are_refused)
{
    struct bench bench;
    moxie_error *error;

    bench_open(&bench, "mixtral_a");
    error = &bench.mock.error;
    accept(&bench, dispatcher_begin_forward(bench.dispatcher, &bench.step, error));
    bench.batch.batch.x.device.type = MOXIE_DEVICE_CPU;
    ck_assert_int_eq(forward_run(bench.dispatcher, bench.runner, &bench.batch.batch, error),
                     MOXIE_E_INVALID);
    ck_assert(strstr(bench.mock.text, "batch.x") != NULL);
    bench.batch.batch.x.device.type = MOXIE_DEVICE_CUDA;
    bench.batch.batch.x.byte_offset = 2;
    ck_assert_int_eq(forward_run(bench.dispatcher, bench.runner, &bench.batch.batch, error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(bench.mock.text, "multiples of 16") != NULL);
    bench_close(&bench);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, golden_layers, 0, LAYERS);
    tcase_add_test(tests, batch_mates_change_nothing);
    tcase_add_test(tests, graphs_replay_with_other_counts);
    tcase_add_test(tests, tensors_that_lie_wrongly_are_refused);
}

int main(void)
{
    Suite *suite = suite_create("gpu_forward");
    TCase *tests = tcase_create("gpu_forward");
    SRunner *runner;
    char reason[160];
    int failed;

    if (device_probe("sm_90", reason) == 0) {
        (void)printf("skipped: %s\n", reason);
        return 77;
    }
    tcase_set_timeout(tests, 120);
    add(tests);
    suite_add_tcase(suite, tests);
    runner = srunner_create(suite);
    // CUDA does not survive a fork.
    srunner_set_fork_status(runner, CK_NOFORK);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
