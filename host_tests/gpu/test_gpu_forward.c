// The whole library on a GPU: golden layers, graphs that replay with other ids and counts, the
// capture, tensors that lie wrongly.

#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/suite.h"

#include <string.h>

#ifndef REPEATS
#define REPEATS 100 // of a forward that must give the same bits
#endif

START_TEST(golden_layers)
{
    struct gpu_layer gpu;
    float *again;

    gpu_layer_open(&gpu, gpu_layers[_i], 0);
    gpu_forward(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), 5e-3);
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
END_TEST

// A token's bits do not depend on the tokens beside it.
START_TEST(batch_mates_change_nothing)
{
    struct gpu_layer gpu;
    float *whole;
    int64_t tokens;

    gpu_layer_open(&gpu, "qwen3_moe_a", 0);
    tokens = gpu.layer.tokens;
    gpu_forward(&gpu);
    whole = malloc(gpu.y_bytes);
    ck_assert_ptr_nonnull(whole);
    memcpy(whole, gpu.y, gpu.y_bytes);
    for (int64_t some = 1; some < tokens; some += 7) {
        gpu_poison(&gpu);
        gpu.step.tokens = some;
        for (int32_t i = 0; i < 4; i++)
            gpu.batch.dims[i][0] = some;
        gpu_launch(&gpu);
        gpu_fetch(&gpu);
        ck_assert_mem_eq(whole, gpu.y, (size_t)(some * gpu.layer.hidden) * sizeof(float));
        ck_assert(gpu.y[some * gpu.layer.hidden] != gpu.y[some * gpu.layer.hidden]);
    }
    free(whole);
    gpu_layer_close(&gpu);
}
END_TEST

// Captured once; replayed with other ids and another count of valid tokens.
START_TEST(graphs_replay_with_other_counts)
{
    struct gpu_layer gpu;
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    int32_t *valid = NULL, one_expert[256];
    float *eager;

    gpu_layer_open(&gpu, "deepseek_v3_a", 0);
    must(cudaMalloc((void **)&valid, sizeof *valid));
    gpu.step.tokens_valid = valid;
    must(cudaStreamBeginCapture(gpu.stream, cudaStreamCaptureModeThreadLocal));
    gpu_launch(&gpu);
    must(cudaStreamEndCapture(gpu.stream, &graph));
    must(cudaGraphInstantiate(&exec, graph, 0));
    eager = malloc(gpu.y_bytes);
    ck_assert_ptr_nonnull(eager);
    for (int32_t tokens = 0; tokens <= gpu.layer.tokens; tokens += 29) {
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
        if (tokens == 0) ck_assert_float_eq(gpu.y[0], 0.0f);
    }
    free(eager);
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

    gpu_layer_open(&gpu, "gpt_oss_a", 1);
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

    gpu_layer_open(&gpu, "mixtral_a", 0);
    error = &gpu.mock.error;
    gpu_accept(&gpu, dispatcher_begin_forward(gpu.dispatcher, &gpu.step, error));
    gpu.batch.batch.x.device.type = MOXIE_DEVICE_CPU;
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_INVALID);
    ck_assert(strstr(gpu.mock.text, "batch.x") != NULL);
    gpu.batch.batch.x.device.type = MOXIE_DEVICE_CUDA;
    gpu.batch.batch.x.byte_offset = 2;
    ck_assert_int_eq(forward_run(gpu.dispatcher, gpu.runner, &gpu.batch.batch, error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(gpu.mock.text, "multiples of 16") != NULL);
    gpu_layer_close(&gpu);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, golden_layers, 0, GPU_LAYERS);
    tcase_add_test(tests, batch_mates_change_nothing);
    tcase_add_test(tests, graphs_replay_with_other_counts);
    tcase_add_test(tests, routed_experts_are_captured);
    tcase_add_test(tests, tensors_that_lie_wrongly_are_refused);
}

int main(void)
{
    return gpu_suite("gpu_forward", add);
}
