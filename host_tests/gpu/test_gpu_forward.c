// The whole library on a GPU: golden layers, graphs that replay with other ids and counts, the
// capture, tensors that lie wrongly.

#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/suite.h"
#include "kernels/gemm.h"

#include <pthread.h>
#include <string.h>

static const struct gpu_options bf16 = {0}, fp8 = {.fp8 = 1}, mxfp4 = {.mxfp4 = 1};

#ifndef REPEATS
#define REPEATS 100 // of a forward that must give the same bits
#endif
#define COPIES     18 // of a golden layer's tokens, whose ids are many then
#define FEW_TOKENS 8  // at most, of a layer in one launch, whose sums are others

// The same bits every time, whatever the order of blocks and copies.
static void repeat(const char *name, struct gpu_options options)
{
    struct gpu_layer gpu;
    float *again;

    gpu_layer_open(&gpu, name, options);
    gpu_forward(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    again = malloc(gpu.y_bytes);
    ck_assert_ptr_nonnull(again);
    for (int32_t i = 0; i < REPEATS; i++) {
        memcpy(again, gpu.y, gpu.y_bytes);
        gpu_forward(&gpu);
        ck_assert_mem_eq(again, gpu.y, gpu.y_bytes);
    }
    free(again);
    gpu_layer_close(&gpu);
}

START_TEST(golden_layers)
{
    repeat(gpu_layers[_i], bf16);
}
END_TEST

START_TEST(golden_layers_in_fp8)
{
    repeat(gpu_layers[_i], fp8);
}
END_TEST

START_TEST(golden_layers_in_mxfp4)
{
    static const char *const names[2] = {"qwen3_moe_a", "qwen3_moe_t1"};

    repeat(names[_i], mxfp4);
}
END_TEST

static void forward_some(struct gpu_layer *gpu, int64_t tokens)
{
    gpu_poison(gpu);
    gpu->step.tokens = tokens;
    for (int32_t i = 0; i < 4; i++)
        gpu->batch.dims[i][0] = tokens;
    gpu_launch(gpu);
    gpu_fetch(gpu);
}

// The first `some` of `most` tokens have the same bits alone.
static void same_alone(struct gpu_layer *gpu, int64_t some, int64_t most)
{
    float *whole = malloc(gpu->y_bytes);

    ck_assert_ptr_nonnull(whole);
    forward_some(gpu, most);
    memcpy(whole, gpu->y, gpu->y_bytes);
    forward_some(gpu, some);
    ck_assert_mem_eq(whole, gpu->y, (size_t)(some * gpu->layer.hidden) * sizeof(float));
    ck_assert(gpu->y[some * gpu->layer.hidden] != gpu->y[some * gpu->layer.hidden]);
    free(whole);
}

// A token's bits do not depend on the tokens beside it, but for whether they are few.
START_TEST(batch_mates_change_nothing)
{
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, "qwen3_moe_a", bf16);
    for (int64_t some = FEW_TOKENS + 1; some < gpu.layer.tokens; some += 7)
        same_alone(&gpu, some, gpu.layer.tokens);
    for (int64_t some = 1; some < FEW_TOKENS; some += 2)
        same_alone(&gpu, some, FEW_TOKENS);
    gpu_layer_close(&gpu);
}
END_TEST

// But for whether experts have few tokens, one copy of them, which are multiplied in pieces.
START_TEST(batch_mates_change_nothing_of_mxfp4)
{
    struct gpu_layer gpu;
    int64_t each;

    gpu_layer_open(&gpu, "qwen3_moe_a", (struct gpu_options){.mxfp4 = 1, .copies = COPIES});
    each = gpu.layer.tokens / COPIES;
    for (int64_t some = FEW_TOKENS + 1; some < each; some += 8)
        same_alone(&gpu, some, each);
    for (int64_t some = 1; some < FEW_TOKENS; some += 2)
        same_alone(&gpu, some, FEW_TOKENS);
    for (int64_t copies = 2; copies < COPIES; copies += 3)
        same_alone(&gpu, each * copies, gpu.layer.tokens);
    gpu_layer_close(&gpu);
}
END_TEST

// Rows of few ids become fp8 at each of their places, those of many once.
START_TEST(many_ids_have_the_bits_of_few)
{
    static const char *const names[2] = {"deepseek_v3_a", "qwen3_moe_a"};
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, names[_i], (struct gpu_options){.fp8 = 1, .copies = COPIES});
    ck_assert_int_gt(gpu.layer.tokens * gpu.layer.top_k, GEMMS_GATHER_IDS);
    gpu_forward(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    same_alone(&gpu, gpu.layer.tokens / COPIES, gpu.layer.tokens);
    gpu_layer_close(&gpu);
}
END_TEST

// By turns with one of all tokens, whose tables must not be taken for its own. Empty tensors of
// some hosts have no address.
START_TEST(no_tokens_are_a_forward)
{
    static const char *const names[3] = {"mixtral_a", "mixtral_a", "qwen3_moe_a"};
    const struct gpu_options options[3] = {bf16, fp8, {.mxfp4 = 1}};
    struct gpu_layer gpu;
    void *ids;

    gpu_layer_open(&gpu, names[_i], options[_i]);
    ids = gpu.batch.batch.ids.data;
    for (int32_t turn = 0; turn < 6; turn++) {
        gpu.step.tokens = turn % 2 == 0 ? gpu.layer.tokens : 0;
        gpu.batch.batch.ids.data = turn == 3 ? NULL : ids;
        for (int32_t i = 0; i < 4; i++)
            gpu.batch.dims[i][0] = gpu.step.tokens;
        gpu_forward(&gpu);
        ck_assert(turn % 2 == 0 ? gpu.y[0] == gpu.y[0] : gpu.y[0] != gpu.y[0]);
    }
    gpu.batch.batch.ids.data = ids;
    gpu_layer_close(&gpu);
}
END_TEST

// Two instances on one stream, captured in turns, each graph's forwards among the other's.
START_TEST(graphs_of_two_instances_interleave)
{
    static const char *const names[2] = {"qwen3_moe_a", "gpt_oss_a"};
    struct gpu_layer gpus[2];
    cudaGraphExec_t execs[2];
    cudaStream_t own;

    for (int32_t i = 0; i < 2; i++)
        gpu_layer_open(&gpus[i], names[i], bf16);
    own = gpus[1].stream;
    gpus[1].stream = gpus[0].stream;
    gpus[1].batch.batch.stream = gpus[0].stream;
    for (int32_t i = 0; i < 2; i++) {
        cudaGraph_t graph;

        // Nothing unsafe is called in a forward, by any thread: the mode forbids it.
        must(cudaStreamBeginCapture(gpus[i].stream, cudaStreamCaptureModeGlobal));
        gpu_launch(&gpus[i]);
        gpu_launch(&gpus[1 - i]);
        must(cudaStreamEndCapture(gpus[i].stream, &graph));
        must(cudaGraphInstantiate(&execs[i], graph, 0));
        must(cudaGraphDestroy(graph));
    }
    for (int32_t i = 0; i < 4; i++) {
        gpu_poison(&gpus[0]);
        gpu_poison(&gpus[1]);
        must(cudaGraphLaunch(execs[i % 2], gpus[0].stream));
        for (int32_t k = 0; k < 2; k++) {
            gpu_fetch(&gpus[k]);
            ck_assert_double_le(golden_error(gpus[k].y, &gpus[k].layer.want), 5e-3);
        }
    }
    gpus[1].stream = own;
    for (int32_t i = 0; i < 2; i++) {
        must(cudaGraphExecDestroy(execs[i]));
        gpu_layer_close(&gpus[i]);
    }
}
END_TEST

// A forward asks nobody for memory, and what needs some says so while a graph is captured.
START_TEST(memory_is_taken_before_a_capture)
{
    struct gpu_layer gpu;
    moxie_runner *runner = NULL;
    moxie_instance *other = NULL;
    static const struct registry none;
    cudaGraph_t graph;
    uint64_t calls;

    gpu_layer_open(&gpu, "qwen3_moe_a", bf16);
    calls = gpu.allocate_calls;
    gpu_forward(&gpu);
    ck_assert_uint_eq(gpu.allocate_calls, calls);
    gpu.mock.host.allocate = NULL;
    gpu.mock.host.release = NULL;
    gpu_accept(&gpu, instance_open(&gpu.mock.host, &none, &other, &gpu.mock.error));
    must(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeGlobal));
    ck_assert_int_eq(runner_create(other, 0, &gpu.weights.weights, &runner, &gpu.mock.error),
                     MOXIE_E_CAPTURING);
    ck_assert(strstr(gpu.mock.text, "create runners and dispatchers before") != NULL);
    ck_assert_ptr_null(runner);
    // A real driver calls it invalid now.
    if (cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess) must(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    gpu_accept(&gpu, runner_create(other, 0, &gpu.weights.weights, &runner, &gpu.mock.error));
    runner_destroy(runner);
    gpu_accept(&gpu, instance_close(other, &gpu.mock.error));
    gpu_layer_close(&gpu);
}
END_TEST

// It waits for the device, which is what a capture refuses; nobody else could say why it failed.
START_TEST(a_destroy_in_a_capture_is_told)
{
    struct gpu_layer gpu;
    moxie_runner *runner = NULL;
    cudaGraph_t graph;

    gpu_layer_open(&gpu, "qwen3_moe_a", bf16);
    for (int captured = 0; captured < 2; captured++) {
        gpu_accept(&gpu,
                   runner_create(gpu.instance, 0, &gpu.weights.weights, &runner, &gpu.mock.error));
        ck_assert(!mock_logged(&gpu.mock, "HOST_MISBEHAVING"));
        if (captured) must(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeGlobal));
        runner_destroy(runner);
    }
    ck_assert(mock_logged(&gpu.mock, "HOST_MISBEHAVING capture: destroy, "));
    if (cudaStreamEndCapture(gpu.stream, &graph) == cudaSuccess) must(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    gpu_forward(&gpu);
    gpu_layer_close(&gpu);
}
END_TEST

// Captured once; replayed with other ids and another count of valid tokens, whose rows are what
// they are among all tokens.
START_TEST(graphs_replay_with_other_counts)
{
    struct gpu_layer gpu;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int32_t *valid = NULL, one_expert[256], all;
    size_t row_bytes;
    float *eager, *whole;

    gpu_layer_open(&gpu, "deepseek_v3_a", bf16);
    must(cudaMalloc((void **)&valid, sizeof *valid));
    gpu.step.tokens_valid = valid;
    must(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    gpu_launch(&gpu);
    must(cudaStreamEndCapture(gpu.stream, &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    eager = malloc(gpu.y_bytes);
    whole = malloc(gpu.y_bytes);
    ck_assert(eager != NULL && whole != NULL);
    all = (int32_t)gpu.layer.tokens;
    row_bytes = gpu.y_bytes / (size_t)all;
    for (int32_t i = 0; i < all * gpu.layer.top_k; i++)
        one_expert[i] = i % 32;
    must(cudaMemcpy(gpu.batch.batch.ids.data, one_expert, (size_t)(all * gpu.layer.top_k) * 4,
                    cudaMemcpyHostToDevice));
    must(cudaMemcpy(valid, &all, sizeof all, cudaMemcpyHostToDevice));
    gpu_forward(&gpu);
    memcpy(whole, gpu.y, gpu.y_bytes);
    for (int32_t tokens = 0; tokens <= gpu.layer.tokens; tokens += 7) {
        for (int32_t i = 0; i < gpu.layer.tokens * gpu.layer.top_k; i++)
            one_expert[i] = tokens == 0 ? 3 : i % 32;
        must(cudaMemcpy(gpu.batch.batch.ids.data, one_expert,
                        (size_t)(gpu.layer.tokens * gpu.layer.top_k) * 4, cudaMemcpyHostToDevice));
        must(cudaMemcpy(valid, &tokens, sizeof tokens, cudaMemcpyHostToDevice));
        gpu_forward(&gpu);
        memcpy(eager, gpu.y, gpu.y_bytes);
        gpu_poison(&gpu);
        must(cudaGraphLaunch(exec, gpu.stream));
        gpu_fetch(&gpu);
        ck_assert_mem_eq(eager, gpu.y, gpu.y_bytes);
        ck_assert_mem_eq(whole, gpu.y, (size_t)tokens * row_bytes);
        for (size_t i = (size_t)tokens * row_bytes / 4; i < gpu.y_bytes / 4; i++)
            ck_assert_float_eq(gpu.y[i], 0.0f);
    }
    free(eager);
    free(whole);
    must(cudaGraphExecDestroy(exec));
    must(cudaGraphDestroy(graph));
    must(cudaFree(valid));
    gpu_layer_close(&gpu);
}
END_TEST

// What every token chose lies in device memory, -1 past the valid ones; a graph records too.
START_TEST(routed_experts_are_captured)
{
    moxie_captured captured = {.struct_size = sizeof captured};
    struct gpu_layer gpu;
    int32_t *valid = NULL, some, *got;
    size_t count;

    gpu_layer_open(&gpu, "gpt_oss_a", (struct gpu_options){.capture = 1});
    count = (size_t)(gpu.layer.tokens * gpu.layer.top_k);
    some = (int32_t)gpu.layer.tokens - 3;
    got = malloc(count * sizeof *got);
    ck_assert_ptr_nonnull(got);
    must(cudaMalloc((void **)&valid, sizeof *valid));
    must(cudaMemcpy(valid, &some, sizeof some, cudaMemcpyHostToDevice));
    gpu.step.tokens_valid = valid;
    gpu_forward(&gpu);
    gpu_accept(&gpu, instance_captured(gpu.instance, &captured, &gpu.mock.error));
    ck_assert_int_eq(captured.ids.device.type, MOXIE_DEVICE_CUDA);
    must(cudaMemcpy(got, captured.ids.data, count * sizeof *got, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < count; i++) {
        const int32_t *ids = (const int32_t *)(const void *)gpu.layer.ids.data;

        ck_assert_int_eq(got[i], (int64_t)i / gpu.layer.top_k < some ? ids[i] : -1);
    }
    free(got);
    must(cudaFree(valid));
    gpu_layer_close(&gpu);
}
END_TEST

START_TEST(tensors_that_lie_wrongly_are_refused)
{
    struct gpu_layer gpu;
    moxie_error *error;

    gpu_layer_open(&gpu, "mixtral_a", bf16);
    error = &gpu.mock.error;
    gpu_accept(&gpu, dispatcher_begin_forward(gpu.dispatcher, &gpu.step, error));
    gpu.batch.batch.x.device.type = MOXIE_DEVICE_CPU;
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_INVALID);
    ck_assert(strstr(gpu.mock.text, "batch.x") != NULL);
    gpu.batch.batch.x.device.type = MOXIE_DEVICE_CUDA;
    gpu.batch.batch.x.device.id++; // a neighbour's
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_INVALID);
    ck_assert(strstr(gpu.mock.text, "batch.x: on device 1") != NULL);
    gpu.batch.batch.x.device.id--;
    gpu.batch.batch.x.byte_offset = 2;
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(gpu.mock.text, "multiples of 16") != NULL);
    ck_assert(strstr(gpu.mock.text, "batch.x") != NULL);
    gpu.batch.batch.x.byte_offset = 0;
    gpu.batch.batch.y.byte_offset = 1;
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_INVALID);
    gpu.batch.batch.y.byte_offset = 0;
    gpu.batch.batch.x.dtype.code = MOXIE_DTYPE_FLOAT; // f16, and the weights are bf16
    ck_assert_int_ne(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error), MOXIE_OK);
    ck_assert(strstr(gpu.mock.text, "batch.x") != NULL || strstr(gpu.mock.text, "format") != NULL);
    gpu_layer_close(&gpu);
}
END_TEST

// Rows that a host hands to the runner itself are checked there.
START_TEST(rows_of_another_format_are_refused)
{
    moxie_call call = {.struct_size = sizeof call};
    moxie_slab in_slab = {.struct_size = sizeof in_slab}, out_slab = in_slab;
    moxie_rows in = {.struct_size = sizeof in,
                     .layout = MOXIE_LAYOUT_STANDARD,
                     .id_space = MOXIE_IDS_GLOBAL,
                     .slabs_count = 1,
                     .slab_stride = sizeof in_slab,
                     .slabs = &in_slab};
    moxie_rows out = in;
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, "mixtral_a", bf16);
    in_slab.rows = gpu.batch.batch.x;
    in_slab.rows.dtype.code = MOXIE_DTYPE_FLOAT;
    in_slab.ids = gpu.batch.batch.ids;
    in_slab.weights = gpu.batch.batch.weights;
    out_slab.rows = gpu.batch.batch.y;
    out.slabs = &out_slab;
    ck_assert_int_eq(runner_run(gpu.runner, &call, &in, &out, &gpu.mock.error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(gpu.mock.text, "this device takes rows of format bf16") != NULL);
    gpu_layer_close(&gpu);
}
END_TEST

// Of weights that the device has no code for, or cannot read; an instance that reads the host's
// configuration as it is now.
static void refuse_weights(struct gpu_layer *gpu, int32_t code, const char *says)
{
    static const struct registry none;
    moxie_instance *other = NULL;
    moxie_runner *runner = NULL;

    gpu_accept(gpu, instance_open(&gpu->mock.host, &none, &other, &gpu->mock.error));
    ck_assert_int_eq(runner_create(other, 0, &gpu->weights.weights, &runner, &gpu->mock.error),
                     code);
    ck_assert(strstr(gpu->mock.text, says) != NULL);
    ck_assert_ptr_null(runner);
    gpu_accept(gpu, instance_close(other, &gpu->mock.error));
}

START_TEST(a_shard_begins_with_a_block)
{
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, "mixtral_a", fp8);
    mock_set_str(&gpu.mock, "weight_format", "fp8_block128");
    gpu.weights.w1.format = gpu.weights.w2.format = MOXIE_FORMAT_FP8_BLOCK128;
    gpu.weights.w1.block_offset = gpu.weights.w2.block_offset = 64;
    refuse_weights(&gpu, MOXIE_E_UNSUPPORTED, "block_offset 64");
    gpu_layer_close(&gpu);
}
END_TEST

START_TEST(weights_lie_on_16_bytes)
{
    static int64_t far_experts[] = {INT64_C(1) << 39, 1 << 12, 1};
    static int64_t far_rows[] = {INT64_C(1) << 38, INT64_C(1) << 36, 1};
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, "mixtral_a", bf16);
    gpu.weights.w2.values.byte_offset += 2;
    refuse_weights(&gpu, MOXIE_E_UNSUPPORTED, "want multiples of 16");
    gpu.weights.w2.values.byte_offset -= 2;
    gpu.weights.w2.values.strides = far_experts;
    refuse_weights(&gpu, MOXIE_E_UNSUPPORTED, "within 2^40 bytes");
    gpu.weights.w2.values.strides = far_rows;
    refuse_weights(&gpu, MOXIE_E_UNSUPPORTED, "within 2^40 bytes");
    gpu.weights.w2.values.strides = NULL;
    gpu.weights.w1.values.device.id++;
    refuse_weights(&gpu, MOXIE_E_INVALID, "on device 1");
    gpu_layer_close(&gpu);
}
END_TEST

START_TEST(weights_lie_alike)
{
    struct gpu_layer gpu;
    moxie_matrix *w2;
    int64_t outputs;

    gpu_layer_open(&gpu, "mixtral_a", bf16);
    w2 = &gpu.weights.w2;
    ck_assert_int_eq(w2->orientation, MOXIE_ROWS_OUT);
    w2->orientation = MOXIE_ROWS_IN;
    outputs = w2->values.shape[1];
    w2->values.shape[1] = w2->values.shape[2];
    w2->values.shape[2] = outputs;
    refuse_weights(&gpu, MOXIE_E_UNSUPPORTED, "want both MOXIE_ROWS_OUT");
    gpu_layer_close(&gpu);
}
END_TEST

// What the driver has current on this thread.
static const void *context_of_thread(void)
{
    enum cudaDriverEntryPointQueryResult found;
    int (*get_current)(const void **) = NULL;
    void *function = NULL;
    const void *context = NULL;

    must(cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000, cudaEnableDefault,
                                          &found));
    memcpy(&get_current, &function, sizeof function);
    ck_assert_int_eq(get_current(&context), 0);
    return context;
}

static void *update_and_destroy(void *arg)
{
    struct gpu_layer *gpu = arg;

    ck_assert_ptr_null(context_of_thread());
    gpu_accept(gpu, runner_weights_updated(gpu->runner, NULL, 0, &gpu->mock.error));
    ck_assert_ptr_null(context_of_thread());
    dispatcher_destroy(gpu->dispatcher);
    ck_assert_ptr_null(context_of_thread());
    runner_destroy(gpu->runner);
    ck_assert_ptr_null(context_of_thread());
    return NULL;
}

// A context on a device that is not the instance's would take some hundred MiB there.
START_TEST(a_thread_without_a_device_is_left_without)
{
    struct gpu_layer gpu;
    pthread_t thread;

    gpu_layer_open(&gpu, "qwen3_moe_a", mxfp4);
    gpu_forward(&gpu);
    ck_assert_int_eq(pthread_create(&thread, NULL, update_and_destroy, &gpu), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    gpu.runner = NULL;
    gpu.dispatcher = NULL;
    gpu_layer_close(&gpu);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, golden_layers, 0, GPU_LAYERS);
    tcase_add_loop_test(tests, golden_layers_in_fp8, 0, GPU_LAYERS_FP8);
    tcase_add_loop_test(tests, golden_layers_in_mxfp4, 0, 2);
    tcase_add_test(tests, batch_mates_change_nothing);
    tcase_add_test(tests, batch_mates_change_nothing_of_mxfp4);
    tcase_add_loop_test(tests, many_ids_have_the_bits_of_few, 0, 2);
    tcase_add_loop_test(tests, no_tokens_are_a_forward, 0, 3);
    tcase_add_test(tests, graphs_replay_with_other_counts);
    tcase_add_test(tests, graphs_of_two_instances_interleave);
    tcase_add_test(tests, memory_is_taken_before_a_capture);
    tcase_add_test(tests, a_destroy_in_a_capture_is_told);
    tcase_add_test(tests, routed_experts_are_captured);
    tcase_add_test(tests, tensors_that_lie_wrongly_are_refused);
    tcase_add_test(tests, rows_of_another_format_are_refused);
    tcase_add_test(tests, a_shard_begins_with_a_block);
    tcase_add_test(tests, weights_lie_on_16_bytes);
    tcase_add_test(tests, weights_lie_alike);
    tcase_add_test(tests, a_thread_without_a_device_is_left_without);
}

int main(void)
{
    return gpu_suite("gpu_forward", 1, add);
}
