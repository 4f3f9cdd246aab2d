// The layouts by expert on a GPU: expand, run on the expanded rows, fold back, against the golden
// output; rows that lie wrongly.

#include "host_tests/crew.h"
#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/suite.h"
#include "kernels/cpu/cpu.h"
#include "kernels/layer.h"
#include "kernels/quantise.h"
#include "plugin/tensor.h"

#include <math.h>
#include <string.h>

// Rows of STANDARD, and the buffers of an expanded layout with places for the worst case.
struct layouts {
    moxie_slab in_slab, out_slab, expanded_slab, result_slab;
    moxie_rows in, out, expanded, results;
    int64_t dims[4][3], weights_dims[2], counts_dim, index_dims[2];
    moxie_tensor row_index;
    moxie_call call;
};

static moxie_tensor on_gpu(size_t bytes, int32_t ndim, int64_t *dims, uint32_t type)
{
    moxie_tensor tensor = tensor_make(gpu_poisoned(bytes), ndim, dims, NULL, type);

    tensor.device.type = MOXIE_DEVICE_CUDA;
    return tensor;
}

static moxie_rows rows_of(int32_t layout, moxie_slab *slab)
{
    *slab = (moxie_slab){.struct_size = sizeof *slab};
    return (moxie_rows){.struct_size = sizeof(moxie_rows),
                        .layout = layout,
                        .slabs_count = 1,
                        .slab_stride = sizeof *slab,
                        .slabs = slab};
}

// Results are f32, or bf16, which down may write.
static void layouts_make(struct layouts *l, const struct gpu_layer *gpu, int32_t layout,
                         int32_t format)
{
    const struct layer *layer = &gpu->layer;
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    int64_t pairs = layer->tokens * layer->top_k;
    int64_t rows = masked ? layer->experts * pairs : pairs;
    size_t values = (size_t)(rows * layer->hidden);

    memset(l, 0, sizeof *l);
    l->in = rows_of(MOXIE_LAYOUT_STANDARD, &l->in_slab);
    l->out = rows_of(MOXIE_LAYOUT_STANDARD, &l->out_slab);
    l->in.id_space = MOXIE_IDS_GLOBAL;
    l->in_slab.rows = gpu->batch.batch.x;
    l->in_slab.ids = gpu->batch.batch.ids;
    l->in_slab.weights = gpu->batch.batch.weights;
    l->out_slab.rows = gpu->batch.batch.y;
    for (int32_t i = 0; i < 2; i++) {
        l->dims[i][0] = masked ? layer->experts : pairs;
        l->dims[i][1] = masked ? pairs : layer->hidden;
        l->dims[i][2] = layer->hidden;
    }
    l->weights_dims[0] = masked ? layer->experts : rows;
    l->weights_dims[1] = pairs;
    l->counts_dim = layer->experts + !masked;
    l->index_dims[0] = layer->tokens;
    l->index_dims[1] = layer->top_k;
    l->expanded = rows_of(layout, &l->expanded_slab);
    l->results = rows_of(layout, &l->result_slab);
    l->expanded_slab.rows = on_gpu(values * 2, masked + 2, l->dims[0], 1u << MOXIE_FORMAT_BF16);
    l->expanded_slab.weights =
        on_gpu((size_t)rows * 4, masked + 1, l->weights_dims, 1u << MOXIE_FORMAT_F32);
    l->result_slab.rows = on_gpu(values * 4, masked + 2, l->dims[1], 1u << format);
    l->expanded.counts = on_gpu((size_t)(layer->experts + 1) * 4, 1, &l->counts_dim, TENSOR_INT32);
    l->row_index = on_gpu((size_t)pairs * 4, 2, l->index_dims, TENSOR_INT32);
    l->call = (moxie_call){.struct_size = sizeof l->call, .stream = gpu->stream};
}

static void layouts_free(struct layouts *l)
{
    must(cudaFree(l->expanded_slab.rows.data));
    must(cudaFree(l->expanded_slab.weights.data));
    must(cudaFree(l->result_slab.rows.data));
    must(cudaFree(l->expanded.counts.data));
    must(cudaFree(l->row_index.data));
}

// From rows as they come to y, with rows by expert between; `format` of the results.
static void go_by_expert(struct gpu_layer *gpu, int32_t layout, int32_t format)
{
    moxie_error *error = &gpu->mock.error;
    struct layouts l;

    layouts_make(&l, gpu, layout, format);
    gpu_poison(gpu);
    gpu_accept(gpu, runner_expand(gpu->runner, &l.call, &l.in, &l.expanded, &l.row_index, error));
    gpu_accept(gpu, runner_run(gpu->runner, &l.call, &l.expanded, &l.results, error));
    gpu_accept(gpu, runner_fold(gpu->runner, &l.call, &l.results, &l.row_index, &l.out, error));
    gpu_fetch(gpu);
    ck_assert_double_le(golden_error(gpu->y, &gpu->layer.want), gpu->bound);
    layouts_free(&l);
}

static void by_expert(int32_t index, int32_t layout)
{
    const int32_t of_all = index % (GPU_LAYERS + GPU_LAYERS_FP8);
    struct gpu_layer gpu;

    gpu_layer_open(&gpu, gpu_layers[of_all % GPU_LAYERS],
                   (struct gpu_options){.fp8 = of_all >= GPU_LAYERS});
    go_by_expert(&gpu, layout, index == of_all ? MOXIE_FORMAT_F32 : MOXIE_FORMAT_BF16);
    gpu_layer_close(&gpu);
}

START_TEST(expert_contiguous_rows)
{
    by_expert(_i, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
}
END_TEST

START_TEST(expert_masked_rows)
{
    by_expert(_i, MOXIE_LAYOUT_EXPERT_MASKED);
}
END_TEST

// Of weights that have lost as much as those, y is held against a forward's, which of one token
// rounds no expert's result, and of masked rows, which may be more, not what x is multiplied as.
START_TEST(mxfp4_by_expert)
{
    const int32_t layout = _i % 2 ? MOXIE_LAYOUT_EXPERT_MASKED : MOXIE_LAYOUT_EXPERT_CONTIGUOUS;
    struct gpu_layer gpu;
    float *forward;

    gpu_layer_open(&gpu, _i < 2 ? "qwen3_moe_a" : "qwen3_moe_t1", (struct gpu_options){.mxfp4 = 1});
    gpu_forward(&gpu);
    forward = malloc(gpu.y_bytes);
    ck_assert_ptr_nonnull(forward);
    memcpy(forward, gpu.y, gpu.y_bytes);
    go_by_expert(&gpu, layout, MOXIE_FORMAT_F32);
    ck_assert_double_le(crew_difference(gpu.y, forward, gpu.layer.tokens * gpu.layer.hidden),
                        gpu.layer.tokens > 1 && _i % 2 == 0 ? 1e-6 : 3e-3);
    free(forward);
    gpu_layer_close(&gpu);
}
END_TEST

// Rows of bf16 as a dispatcher that quantises brings them: e4m3, and a scale for each 128 columns,
// both in memory of their own; `scale_dims` outlives them. Places without a row are NaNs before and
// after.
static void rows_become_fp8(moxie_slab *slab, int64_t scale_dims[3])
{
    moxie_tensor *rows = &slab->rows, *scales = &slab->scales;
    const int32_t last = rows->ndim - 1;
    const int64_t hidden = rows->shape[last], groups = (hidden + 127) / 128;
    const int64_t count = rows->shape[0] * (last > 1 ? rows->shape[1] : 1);
    struct cpu_stream stream = {.workers = 1};
    struct quantise_args args = {.x = malloc((size_t)(count * hidden) * 2),
                                 .rows = malloc((size_t)(count * hidden)),
                                 .scales = malloc((size_t)(count * groups) * 4),
                                 .x_stride_bytes = hidden * 2,
                                 .row_stride_bytes = hidden,
                                 .scale_stride_bytes = groups * 4,
                                 .x_format = FORMAT_BF16,
                                 .format = FORMAT_FP8_BLOCK128,
                                 .rows_count = (int32_t)count,
                                 .columns = (int32_t)hidden};

    ck_assert(args.x != NULL && args.rows != NULL && args.scales != NULL);
    must(cudaMemcpy((void *)(uintptr_t)args.x, rows->data, (size_t)(count * hidden) * 2,
                    cudaMemcpyDeviceToHost));
    ck_assert_int_eq(quantise_cpu(&args, &stream), 0);
    memcpy(scale_dims, rows->shape, (size_t)last * sizeof *scale_dims);
    scale_dims[last] = groups;
    *rows = tensor_make(args.rows, last + 1, rows->shape, NULL, TENSOR_E4M3);
    *scales = tensor_make(args.scales, last + 1, scale_dims, NULL, 1u << MOXIE_FORMAT_F32);
    gpu_upload(rows);
    gpu_upload(scales);
    free((void *)(uintptr_t)args.x);
    free(args.rows);
    free(args.scales);
}

// Rows that come as fp8 are multiplied as they are, and expand does not make them.
START_TEST(fp8_rows_by_expert)
{
    const int32_t layout = _i % 2 ? MOXIE_LAYOUT_EXPERT_MASKED : MOXIE_LAYOUT_EXPERT_CONTIGUOUS;
    struct gpu_layer gpu;
    struct layouts l;
    int64_t scale_dims[2][3];
    moxie_error *error = &gpu.mock.error;
    void *expanded;

    gpu_layer_open(&gpu, gpu_layers[_i / 2], (struct gpu_options){.fp8 = 1});
    layouts_make(&l, &gpu, layout, MOXIE_FORMAT_BF16);
    gpu_accept(&gpu, runner_expand(gpu.runner, &l.call, &l.in, &l.expanded, &l.row_index, error));
    must(cudaStreamSynchronize(gpu.stream));
    expanded = l.expanded_slab.rows.data;
    rows_become_fp8(&l.expanded_slab, scale_dims[0]);
    gpu_poison(&gpu);
    gpu_accept(&gpu, runner_run(gpu.runner, &l.call, &l.expanded, &l.results, error));
    gpu_accept(&gpu, runner_fold(gpu.runner, &l.call, &l.results, &l.row_index, &l.out, error));
    gpu_fetch(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    rows_become_fp8(&l.in_slab, scale_dims[1]);
    ck_assert_int_eq(runner_expand(gpu.runner, &l.call, &l.in, &l.expanded, &l.row_index, error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(gpu.mock.text, "want all of one format, bf16 or f16") != NULL);
    must(cudaFree(expanded));
    must(cudaFree(l.in_slab.rows.data));
    must(cudaFree(l.in_slab.scales.data));
    must(cudaFree(l.expanded_slab.scales.data));
    layouts_free(&l);
    gpu_layer_close(&gpu);
}
END_TEST

// Rows [first, first + rows) of a compact tensor; `dims` gets the new shape.
static moxie_tensor part_of(const moxie_tensor *whole, int64_t first, int64_t rows, int64_t dims[2])
{
    moxie_tensor part = *whole;

    dims[0] = rows;
    dims[1] = whole->shape[1];
    part.shape = dims;
    part.byte_offset += (uint64_t)(first * dims[1] * tensor_element_bytes(whole));
    return part;
}

// A slab of those rows of the batch, and the one for their results; `dims` outlive both.
static void slabs_of(const struct gpu_layer *gpu, int64_t first, int64_t rows, moxie_slab *in,
                     moxie_slab *out, int64_t dims[4][2])
{
    const moxie_batch *batch = &gpu->batch.batch;

    *in = *out = (moxie_slab){.struct_size = sizeof *in};
    in->rows = part_of(&batch->x, first, rows, dims[0]);
    in->ids = part_of(&batch->ids, first, rows, dims[1]);
    in->weights = part_of(&batch->weights, first, rows, dims[2]);
    out->rows = part_of(&batch->y, first, rows, dims[3]);
}

// A run of RANK_MAJOR rows.
struct sources {
    moxie_slab in[3], out[3];
    moxie_rows in_rows, out_rows;
    int64_t dims[3][4][2], ranks;
};

// Slabs of so many rows each, one after another of the batch, of which `counts` are there.
static void sources_make(struct sources *s, const struct gpu_layer *gpu, const int32_t *rows,
                         const int32_t *counts, uint32_t ranks)
{
    int64_t first = 0;

    s->in_rows = s->out_rows = rows_of(MOXIE_LAYOUT_RANK_MAJOR, s->in);
    for (uint32_t i = 0; i < ranks; i++) {
        slabs_of(gpu, first, rows[i], &s->in[i], &s->out[i], s->dims[i]);
        first += rows[i];
    }
    s->ranks = ranks;
    s->in_rows.id_space = MOXIE_IDS_GLOBAL;
    s->in_rows.slabs_count = s->out_rows.slabs_count = ranks;
    // Only read here.
    s->in_rows.counts = tensor_make((void *)(uintptr_t)counts, 1, &s->ranks, NULL, TENSOR_INT32);
    gpu_upload(&s->in_rows.counts);
    s->out_rows.slabs = s->out;
}

static void sources_run(const struct sources *s, struct gpu_layer *gpu)
{
    const moxie_call call = {.struct_size = sizeof call, .stream = gpu->stream};

    gpu_accept(gpu, runner_run(gpu->runner, &call, &s->in_rows, &s->out_rows, &gpu->mock.error));
}

// Three ranks' rows, one of them without any.
START_TEST(rank_major_rows)
{
    struct gpu_layer gpu;
    struct sources s;
    int32_t counts[3] = {0};

    gpu_layer_open(&gpu, gpu_layers[_i % GPU_LAYERS],
                   (struct gpu_options){.fp8 = _i >= GPU_LAYERS});
    counts[0] = (int32_t)(gpu.layer.tokens / 2);
    counts[2] = (int32_t)gpu.layer.tokens - counts[0];
    sources_make(&s, &gpu, counts, counts, 3);
    gpu_poison(&gpu);
    sources_run(&s, &gpu);
    gpu_fetch(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    must(cudaFree(s.in_rows.counts.data));
    gpu_layer_close(&gpu);
}
END_TEST

// Few rows of two ranks, in one launch; not where the results of one lie over the other's rows,
// which takes the longer way, and sums in another order.
START_TEST(results_over_the_rows_of_another_slab)
{
    static const int32_t counts[] = {2, 1};
    struct gpu_layer gpu;
    struct sources s;
    const float *apart;
    float *over;
    size_t bytes;

    gpu_layer_open(&gpu, gpu_layers[0], (struct gpu_options){0});
    sources_make(&s, &gpu, counts, counts, 2);
    gpu_poison(&gpu);
    sources_run(&s, &gpu);
    gpu_fetch(&gpu);
    apart = gpu.y + 2 * gpu.layer.hidden;
    bytes = (size_t)gpu.layer.hidden * sizeof *over;
    over = malloc(bytes);
    ck_assert_ptr_nonnull(over);
    s.out[1].rows.data = s.in[0].rows.data; // both rows: 4 bytes a number, where they have 2
    s.out[1].rows.byte_offset = s.in[0].rows.byte_offset;
    sources_run(&s, &gpu);
    must(cudaStreamSynchronize(gpu.stream));
    must(cudaMemcpy(over, tensor_data(&s.out[1].rows), bytes, cudaMemcpyDeviceToHost));
    ck_assert_double_le(crew_difference(over, apart, gpu.layer.hidden), 5e-3);
    ck_assert_mem_ne(over, apart, bytes);
    free(over);
    must(cudaFree(s.in_rows.counts.data));
    gpu_layer_close(&gpu);
}
END_TEST

// One rank's rows, of which `count` are there: results past them stay, in one launch and in
// several.
START_TEST(results_past_the_count_stay)
{
    const int32_t rows = _i, count = 3;
    struct gpu_layer gpu;
    struct sources s;

    gpu_layer_open(&gpu, gpu_layers[0], (struct gpu_options){0});
    ck_assert_int_gt(gpu.layer.tokens, 9);
    sources_make(&s, &gpu, &rows, &count, 1);
    gpu_poison(&gpu);
    sources_run(&s, &gpu);
    gpu_fetch(&gpu);
    for (int64_t i = 0; i < _i * gpu.layer.hidden; i++)
        ck_assert_msg((isnan(gpu.y[i]) != 0) == (i >= count * gpu.layer.hidden), "row %lld is %g",
                      (long long)(i / gpu.layer.hidden), (double)gpu.y[i]);
    must(cudaFree(s.in_rows.counts.data));
    gpu_layer_close(&gpu);
}
END_TEST

START_TEST(folded_rows_lie_on_16_bytes)
{
    struct gpu_layer gpu;
    struct layouts l;

    gpu_layer_open(&gpu, "mixtral_a", (struct gpu_options){0});
    layouts_make(&l, &gpu, MOXIE_LAYOUT_EXPERT_CONTIGUOUS, MOXIE_FORMAT_F32);
    l.result_slab.rows.byte_offset = 4;
    ck_assert_int_eq(
        runner_fold(gpu.runner, &l.call, &l.results, &l.row_index, &l.out, &gpu.mock.error),
        MOXIE_E_UNSUPPORTED);
    ck_assert(strstr(gpu.mock.text, "multiples of 16") != NULL);
    layouts_free(&l);
    gpu_layer_close(&gpu);
}
END_TEST

// Results of one pair each have the same bits wherever they lie: apart from x, where down writes
// them; in the place of x, or at an odd number, where combine does.
START_TEST(results_of_one_pair)
{
    struct gpu_layer gpu;
    struct layouts l;
    moxie_tensor apart;
    unsigned char *first, *got;
    size_t bytes;

    gpu_layer_open(&gpu, "llama4_a", (struct gpu_options){0});
    ck_assert_int_eq(gpu.layer.top_k, 1);
    layouts_make(&l, &gpu, MOXIE_LAYOUT_EXPERT_CONTIGUOUS, MOXIE_FORMAT_F32);
    bytes = (size_t)(gpu.layer.tokens * gpu.layer.hidden) * 2;
    first = malloc(bytes);
    got = malloc(bytes);
    ck_assert(first != NULL && got != NULL);
    apart = on_gpu(bytes + 2, 2, gpu.batch.batch.x.shape, 1u << MOXIE_FORMAT_BF16);
    for (int32_t i = 0; i < 3; i++) {
        l.out_slab.rows = i < 2 ? apart : gpu.batch.batch.x;
        l.out_slab.rows.byte_offset += i == 1 ? 2 : 0;
        gpu_accept(&gpu, runner_run(gpu.runner, &l.call, &l.in, &l.out, &gpu.mock.error));
        must(cudaStreamSynchronize(gpu.stream));
        must(cudaMemcpy(got, tensor_data(&l.out_slab.rows), bytes, cudaMemcpyDeviceToHost));
        if (i == 0) memcpy(first, got, bytes);
        ck_assert_mem_eq(got, first, bytes);
    }
    must(cudaFree(apart.data));
    free(first);
    free(got);
    layouts_free(&l);
    gpu_layer_close(&gpu);
}
END_TEST

// Another instance expands and folds what this one's runner computes by expert, as one of the
// host's own would: few positions, and as many as many blocks count.
START_TEST(expanded_for_the_hosts_own_runner)
{
    struct gpu_options options = {.copies = _i == 0 ? 1 : 64};
    struct gpu_layer gpu, none;
    struct layouts l;

    gpu_layer_open(&gpu, "qwen3_moe_a", options);
    options.none = 1;
    gpu_layer_open(&none, "qwen3_moe_a", options);
    layouts_make(&l, &gpu, MOXIE_LAYOUT_EXPERT_CONTIGUOUS, MOXIE_FORMAT_F32);
    gpu_poison(&gpu);
    gpu_accept(&none, runner_expand(none.runner, &l.call, &l.in, &l.expanded, &l.row_index,
                                    &none.mock.error));
    gpu_accept(&gpu, runner_run(gpu.runner, &l.call, &l.expanded, &l.results, &gpu.mock.error));
    gpu_accept(&none, runner_fold(none.runner, &l.call, &l.results, &l.row_index, &l.out,
                                  &none.mock.error));
    gpu_fetch(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    ck_assert_int_eq(none.instance->plan.slot_bytes[BUFFER_PAIR_OUT], 0);
    layouts_free(&l);
    gpu_layer_close(&none);
    gpu_layer_close(&gpu);
}
END_TEST

// Every layer in 16 bits and, where its weights lie so, in fp8.
static void add(TCase *tests)
{
    tcase_add_loop_test(tests, expert_contiguous_rows, 0, 2 * (GPU_LAYERS + GPU_LAYERS_FP8));
    tcase_add_loop_test(tests, expert_masked_rows, 0, 2 * (GPU_LAYERS + GPU_LAYERS_FP8));
    tcase_add_loop_test(tests, mxfp4_by_expert, 0, 4);
    tcase_add_loop_test(tests, fp8_rows_by_expert, 0, 2 * GPU_LAYERS_FP8);
    tcase_add_loop_test(tests, rank_major_rows, 0, GPU_LAYERS + GPU_LAYERS_FP8);
    tcase_add_test(tests, results_over_the_rows_of_another_slab);
    tcase_add_loop_test(tests, results_past_the_count_stay, LAYER_TOKENS, LAYER_TOKENS + 2);
    tcase_add_test(tests, folded_rows_lie_on_16_bytes);
    tcase_add_test(tests, results_of_one_pair);
    tcase_add_loop_test(tests, expanded_for_the_hosts_own_runner, 0, 2);
}

int main(void)
{
    return gpu_suite("gpu_layouts", 1, add);
}
