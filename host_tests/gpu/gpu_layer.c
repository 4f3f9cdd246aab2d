#include "host_tests/gpu/gpu_layer.h"

#include "host_tests/suite.h"
#include "kernels/cpu/numbers.h"
#include "plugin/tensor.h"

#include <math.h>

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

const char *const gpu_layers[] = {"deepseek_v3_a", "mixtral_a",    "qwen2_moe_a",
                                  "qwen3_moe_a",   "qwen3_moe_t1", "qwen3_moe_norenorm",
                                  "gpt_oss_a",     "llama4_a"};

_Static_assert(sizeof gpu_layers / sizeof gpu_layers[0] == GPU_LAYERS, "GPU_LAYERS");

void must(cudaError_t st)
{
    ck_assert_msg(st == cudaSuccess, "%s", cudaGetErrorString(st));
}

void gpu_upload(moxie_tensor *tensor)
{
    int64_t count = 1;
    void *device = NULL;
    int ordinal = 0;
    size_t bytes;

    if (tensor->data == NULL) return;
    for (int32_t i = 0; i < tensor->ndim; i++)
        count *= tensor->shape[i];
    bytes = (size_t)(count * tensor_element_bytes(tensor));
    must(cudaMalloc(&device, bytes + 16));
    must(cudaMemcpy(device, tensor->data, bytes, cudaMemcpyHostToDevice));
    tensor->data = device;
    must(cudaGetDevice(&ordinal));
    tensor->device = (moxie_device){MOXIE_DEVICE_CUDA, ordinal};
}

void gpu_refill(const moxie_tensor *tensor, const moxie_tensor *from)
{
    int64_t count = 1;

    for (int32_t i = 0; i < from->ndim; i++)
        count *= from->shape[i];
    must(cudaMemcpy(tensor->data, from->data, (size_t)(count * tensor_element_bytes(from)),
                    cudaMemcpyHostToDevice));
}

static int32_t mock_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct gpu_layer *gpu = (struct gpu_layer *)((char *)ctx - offsetof(struct gpu_layer, mock));

    gpu->allocate_calls++;
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

void gpu_accept(const struct gpu_layer *gpu, int32_t answer)
{
    ck_assert_msg(answer == MOXIE_OK, "%s", gpu->mock.text);
}

// The weights of a projection as e4m3 codes with a scale per row.
static void quantise(moxie_matrix *matrix, int64_t scale_dims[2])
{
    const uint16_t *from = (const uint16_t *)(const void *)tensor_data(&matrix->values);
    int64_t experts = matrix->values.shape[0], rows = matrix->values.shape[1];
    int64_t columns = matrix->values.shape[2];
    uint8_t *codes = malloc((size_t)(experts * rows * columns));
    float *scales = malloc((size_t)(experts * rows) * sizeof *scales);

    ck_assert(codes != NULL && scales != NULL);
    for (int64_t row = 0; row < experts * rows; row++) {
        float largest = 0.0f;

        for (int64_t k = 0; k < columns; k++)
            largest = fmaxf(largest, fabsf(number_load(FORMAT_BF16, from, row * columns + k)));
        scales[row] = largest / 448.0f;
        for (int64_t k = 0; k < columns; k++)
            codes[row * columns + k] =
                e4m3_encode(number_load(FORMAT_BF16, from, row * columns + k) / scales[row]);
    }
    scale_dims[0] = experts;
    scale_dims[1] = rows;
    matrix->format = MOXIE_FORMAT_FP8_CHANNEL;
    matrix->values = tensor_make(codes, 3, matrix->values.shape, NULL, TENSOR_UINT8);
    matrix->scales = tensor_make(scales, 2, scale_dims, NULL, 1u << MOXIE_FORMAT_F32);
}

void gpu_quantise_weights(struct layer_weights_view *weights, int64_t (*scale_dims)[2])
{
    quantise(&weights->w1, scale_dims[0]);
    quantise(&weights->w2, scale_dims[1]);
}

void gpu_free_quantised(const struct layer_weights_view *weights)
{
    free(weights->w1.values.data);
    free(weights->w1.scales.data);
    free(weights->w2.values.data);
    free(weights->w2.scales.data);
}

// The weights of a projection as e2m1 codes with a power of two for each 32.
static void pack(moxie_matrix *matrix, int64_t dims[2][3])
{
    const uint16_t *from = (const uint16_t *)(const void *)tensor_data(&matrix->values);
    const int64_t *shape = matrix->values.shape;
    int64_t groups = shape[0] * shape[1] * shape[2] / 32;
    uint8_t *codes = calloc((size_t)groups, 16), *scales = malloc((size_t)groups);

    ck_assert(codes != NULL && scales != NULL && shape[2] % 32 == 0);
    for (int64_t group = 0; group < groups; group++) {
        int exponent;
        float largest = 0.0f;

        for (int64_t i = group * 32; i < group * 32 + 32; i++)
            largest = fmaxf(largest, fabsf(number_load(FORMAT_BF16, from, i)));
        (void)frexpf(largest, &exponent); // below 2^exponent, which becomes 4 to 8
        scales[group] = (uint8_t)(127 + exponent - 3);
        for (int64_t i = group * 32; i < group * 32 + 32; i++)
            codes[i / 2] |=
                (uint8_t)(e2m1_encode(ldexpf(number_load(FORMAT_BF16, from, i), 3 - exponent))
                          << i % 2 * 4);
    }
    memcpy(dims[0], (int64_t[]){shape[0], shape[1], shape[2] / 2}, sizeof dims[0]);
    memcpy(dims[1], (int64_t[]){shape[0], shape[1], shape[2] / 32}, sizeof dims[1]);
    matrix->format = MOXIE_FORMAT_MXFP4;
    matrix->values = tensor_make(codes, 3, dims[0], NULL, TENSOR_UINT8);
    matrix->scales = tensor_make(scales, 3, dims[1], NULL, TENSOR_UINT8);
}

void gpu_pack_weights(struct layer_weights_view *weights, int64_t (*dims)[2][3])
{
    pack(&weights->w1, dims[0]);
    pack(&weights->w2, dims[1]);
}

void gpu_upload_weights(struct layer_weights_view *weights, int64_t (*scale_dims)[2])
{
    struct layer_weights_view host;

    if (scale_dims != NULL) gpu_quantise_weights(weights, scale_dims);
    host = *weights;
    gpu_upload(&weights->w1.values);
    gpu_upload(&weights->w1.scales);
    gpu_upload(&weights->w2.values);
    gpu_upload(&weights->w2.scales);
    gpu_upload(&weights->w1.bias);
    gpu_upload(&weights->w2.bias);
    if (scale_dims != NULL) gpu_free_quantised(&host);
}

void gpu_free_weights(struct layer_weights_view *weights)
{
    must(cudaFree(weights->w1.values.data));
    must(cudaFree(weights->w1.scales.data));
    must(cudaFree(weights->w2.scales.data));
    must(cudaFree(weights->w2.values.data));
    must(cudaFree(weights->w1.bias.data));
    must(cudaFree(weights->w2.bias.data));
}

static void copy_tokens(struct gpu_layer *gpu, int32_t copies)
{
    struct golden_tensor *const all[4] = {&gpu->layer.x, &gpu->layer.ids, &gpu->layer.weights,
                                          &gpu->layer.want};

    gpu->layer.tokens *= copies;
    for (int32_t i = 0; i < 4; i++) {
        struct golden_tensor *each = all[i];

        gpu->copied[i] = malloc((size_t)(each->bytes * copies));
        ck_assert_ptr_nonnull(gpu->copied[i]);
        for (int32_t copy = 0; copy < copies; copy++)
            memcpy(gpu->copied[i] + copy * each->bytes, each->data, (size_t)each->bytes);
        each->data = gpu->copied[i];
        each->shape[0] *= copies;
        each->count *= copies;
        each->bytes *= copies;
    }
}

void gpu_layer_open(struct gpu_layer *gpu, const char *name, struct gpu_options options)
{
    static const struct registry none;
    moxie_error *error = &gpu->mock.error;
    struct layer_weights_view packed;
    const moxie_plan *plan = NULL;
    void *y = NULL;

    memset(gpu, 0, sizeof *gpu);
    layer_open(&gpu->layer, name);
    if (options.copies > 1) copy_tokens(gpu, options.copies);
    mock_host_init(&gpu->mock);
    layer_configure(&gpu->layer, &gpu->mock);
    mock_set_str(&gpu->mock, "device", "sm_90");
    mock_set_i64(&gpu->mock, "capture_routed_experts", options.capture);
    if (options.fp8) mock_set_str(&gpu->mock, "weight_format", "fp8_channel");
    if (options.mxfp4) mock_set_str(&gpu->mock, "weight_format", "mxfp4");
    if (options.none) mock_set_str(&gpu->mock, "runner", "none");
    // The golden output is that of weights and rows that were not rounded to fp8, or mxfp4.
    gpu->bound = options.mxfp4 ? 0.25 : options.fp8 ? 8e-2 : 5e-3;
    // Room for three ranks' slabs.
    mock_set_i64(&gpu->mock, "forward_tokens_max", 2 * gpu->layer.tokens + 1);
    gpu->mock.host.allocate = mock_allocate;
    gpu->mock.host.release = mock_release;
    gpu_accept(gpu, instance_open(&gpu->mock.host, &none, &gpu->instance, error));
    gpu_accept(gpu, instance_plan(gpu->instance, &plan, error));
    layer_weights_of(&gpu->layer, 0, gpu->layer.experts, &gpu->weights);
    if (options.mxfp4) gpu_pack_weights(&gpu->weights, gpu->packed_dims);
    packed = gpu->weights;
    gpu_upload_weights(&gpu->weights, options.fp8 ? gpu->scale_dims : NULL);
    if (options.mxfp4) gpu_free_quantised(&packed);
    gpu_accept(gpu, runner_create(gpu->instance, 0, options.none ? NULL : &gpu->weights.weights,
                                  &gpu->runner, error));
    gpu_accept(gpu, dispatcher_create(gpu->instance, DISPATCHER_LOCAL, &gpu->dispatcher, error));
    gpu->y_bytes = (size_t)(gpu->layer.tokens * gpu->layer.hidden) * sizeof(float);
    gpu->y = malloc(gpu->y_bytes);
    layer_batch_of(&gpu->layer, 0, gpu->layer.tokens, gpu->y, &gpu->batch);
    gpu_upload(&gpu->batch.batch.x);
    gpu_upload(&gpu->batch.batch.ids);
    gpu_upload(&gpu->batch.batch.weights);
    must(cudaMalloc(&y, gpu->y_bytes));
    gpu->batch.batch.y.data = y;
    gpu->batch.batch.y.device.type = MOXIE_DEVICE_CUDA;
    must(cudaStreamCreateWithFlags(&gpu->stream, cudaStreamNonBlocking));
    gpu->batch.batch.stream = gpu->stream;
    gpu->step = (moxie_step){.struct_size = sizeof(moxie_step), .tokens = gpu->layer.tokens};
}

void gpu_layer_close(struct gpu_layer *gpu)
{
    dispatcher_destroy(gpu->dispatcher);
    runner_destroy(gpu->runner);
    ck_assert_int_eq(instance_close(gpu->instance, &gpu->mock.error), MOXIE_OK);
    must(cudaStreamDestroy(gpu->stream));
    gpu_free_weights(&gpu->weights);
    must(cudaFree(gpu->batch.batch.x.data));
    must(cudaFree(gpu->batch.batch.ids.data));
    must(cudaFree(gpu->batch.batch.weights.data));
    must(cudaFree(gpu->batch.batch.y.data));
    free(gpu->y);
    for (int32_t i = 0; i < 4; i++)
        free(gpu->copied[i]);
    layer_close(&gpu->layer);
}

void gpu_poison(struct gpu_layer *gpu)
{
    must(cudaMemsetAsync(gpu->batch.batch.y.data, 0xff, gpu->y_bytes, gpu->stream));
}

void gpu_fetch(struct gpu_layer *gpu)
{
    must(cudaMemcpyAsync(gpu->y, gpu->batch.batch.y.data, gpu->y_bytes, cudaMemcpyDeviceToHost,
                         gpu->stream));
    must(cudaStreamSynchronize(gpu->stream));
}

void gpu_launch(struct gpu_layer *gpu)
{
    moxie_error *error = &gpu->mock.error;

    gpu_accept(gpu, dispatcher_begin_forward(gpu->dispatcher, &gpu->step, error));
    gpu_accept(gpu, forward_run(gpu->dispatcher, gpu->runner, &gpu->batch.batch, error));
}

void gpu_forward(struct gpu_layer *gpu)
{
    gpu_poison(gpu);
    gpu_launch(gpu);
    gpu_fetch(gpu);
}

void *gpu_poisoned(size_t bytes)
{
    void *memory = NULL;

    must(cudaMalloc(&memory, bytes));
    must(cudaMemset(memory, 0xff, bytes));
    return memory;
}

// Asked in a process of its own: this one forks for every test, and CUDA does not survive a fork.
int gpu_devices(void)
{
    char reason[160];
    int status = -1, devices = 0;
    pid_t child = fork();

    if (child == 0) {
        if (!device_probe("sm_90", reason))
            (void)printf("skipped: %s\n", reason);
        else
            (void)cudaGetDeviceCount(&devices);
        (void)fflush(stdout);
        _exit(devices);
    }
    return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status)
               ? WEXITSTATUS(status)
               : 0;
}

int gpu_suite(const char *name, int devices_least, void (*add)(TCase *tests))
{
    SRunner *runner;
    Suite *suite;
    TCase *tests;
    int failed, devices = gpu_devices();

    if (devices > 0 && devices < devices_least)
        (void)printf("skipped: %d devices, %d are needed\n", devices, devices_least);
    if (devices < devices_least) return 77;
    suite = suite_create(name);
    tests = tcase_create(name);
    tcase_set_timeout(tests, 120);
    add(tests);
    suite_add_tcase(suite, tests);
    runner = srunner_create(suite);
    srunner_run_all(runner, CK_ENV);
    failed = srunner_ntests_failed(runner);
    srunner_free(runner);
    return failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
