// plugin/runner.c: every golden layer through each of the four receive layouts, id spaces and maps,
// and refusals before the first write.

#include "plugin/runner.h"

#include "host_tests/layer.h"
#include "host_tests/suite.h"
#include "plugin/instance.h"
#include "plugin/tensor.h"

#include <string.h>

static const char *const layers[] = {"deepseek_v3_a",      "gpt_oss_a",   "llama4_a",
                                     "mixtral_a",          "qwen2_moe_a", "qwen3_moe_a",
                                     "qwen3_moe_norenorm", "qwen3_moe_t1"};
#define LAYERS ((int)(sizeof layers / sizeof layers[0]))

// One instance and runner over a whole layer, and rows descriptions that share their storage.
struct bench {
    struct layer layer;
    struct layer_rank rank;
    struct layer_batch batch;
    moxie_call call;
    float *y;
    moxie_slab in_slabs[4], out_slabs[4];
    moxie_rows in, out;
    int64_t dims[4][4][2];
    int32_t counts[4];
    int64_t counts_dim;
};

// Three slabs, each as long as the longest.
static int64_t tokens_max_of(const struct bench *bench)
{
    return 3 * (bench->layer.tokens / 2 + 1);
}

static void bench_open(struct bench *bench, const char *name)
{
    memset(bench, 0, sizeof *bench);
    layer_open(&bench->layer, name);
    layer_rank_init(&bench->rank, &bench->layer, NULL, 0);
    mock_set_i64(&bench->rank.mock, "forward_tokens_max", tokens_max_of(bench));
    layer_rank_open(&bench->rank, &bench->layer);
    bench->y = layer_poisoned(&bench->layer);
    bench->call = (moxie_call){.struct_size = sizeof bench->call};
    layer_batch_of(&bench->layer, 0, bench->layer.tokens, bench->y, &bench->batch);
    bench->in = (moxie_rows){.struct_size = sizeof(moxie_rows),
                             .layout = MOXIE_LAYOUT_STANDARD,
                             .id_space = MOXIE_IDS_GLOBAL,
                             .slabs_count = 1,
                             .slab_stride = sizeof(moxie_slab),
                             .slabs = bench->in_slabs};
    bench->out = bench->in;
    bench->out.slabs = bench->out_slabs;
    bench->in_slabs[0] = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                      .rows = bench->batch.batch.x,
                                      .ids = bench->batch.batch.ids,
                                      .weights = bench->batch.batch.weights};
    bench->out_slabs[0] =
        (moxie_slab){.struct_size = sizeof(moxie_slab), .rows = bench->batch.batch.y};
}

static void bench_close(struct bench *bench)
{
    free(bench->y);
    layer_rank_close(&bench->rank);
    layer_close(&bench->layer);
}

static moxie_tensor rows_of(const moxie_tensor *whole, int64_t first, int64_t rows, int64_t dims[2])
{
    moxie_tensor part = *whole;

    dims[0] = rows;
    dims[1] = whole->shape[1];
    part.shape = dims;
    part.byte_offset += (uint64_t)(first * tensor_stride_bytes(whole, 0));
    return part;
}

// The tokens as if three ranks had sent them: the slabs of 0 and 2, with nothing from 1.
static void bench_rank_major(struct bench *bench)
{
    const moxie_batch *batch = &bench->batch.batch;
    int64_t half = bench->layer.tokens / 2;
    const int64_t firsts[3] = {0, 0, half};
    const int64_t rows[3] = {half, 0, bench->layer.tokens - half};

    for (int32_t i = 0; i < 3; i++) {
        moxie_slab *in = &bench->in_slabs[i];

        *in = (moxie_slab){.struct_size = sizeof *in};
        in->rows = rows_of(&batch->x, firsts[i], rows[i], bench->dims[i][0]);
        in->ids = rows_of(&batch->ids, firsts[i], rows[i], bench->dims[i][1]);
        in->weights = rows_of(&batch->weights, firsts[i], rows[i], bench->dims[i][2]);
        bench->out_slabs[i] = (moxie_slab){.struct_size = sizeof *in};
        bench->out_slabs[i].rows = rows_of(&batch->y, firsts[i], rows[i], bench->dims[i][3]);
        bench->counts[i] = (int32_t)rows[i];
    }
    bench->in.layout = bench->out.layout = MOXIE_LAYOUT_RANK_MAJOR;
    bench->in.slabs_count = bench->out.slabs_count = 3;
    bench->counts_dim = 3;
    bench->in.counts = tensor_make(bench->counts, 1, &bench->counts_dim, NULL, TENSOR_INT32);
}

static void run(struct bench *bench)
{
    int32_t answer = runner_run(bench->rank.runner, &bench->call, &bench->in, &bench->out,
                                &bench->rank.mock.error);

    ck_assert_msg(answer == MOXIE_OK, "%s", bench->rank.mock.text);
}

static double bound_of(const struct bench *bench)
{
    char activation[32];

    golden_text(&bench->layer.golden, "activation", activation, sizeof activation);
    return strcmp(activation, "swigluoai") == 0 ? 2e-6 : 1e-6;
}

START_TEST(standard_rows)
{
    struct bench bench;

    bench_open(&bench, layers[_i]);
    run(&bench);
    ck_assert_double_le(golden_error(bench.y, &bench.layer.want), bound_of(&bench));
    bench_close(&bench);
}
END_TEST

START_TEST(rank_major_rows)
{
    struct bench bench;

    bench_open(&bench, layers[_i]);
    bench_rank_major(&bench);
    run(&bench);
    ck_assert_double_le(golden_error(bench.y, &bench.layer.want), bound_of(&bench));
    bench_close(&bench);
}
END_TEST

// ---- layouts by expert -------------------------------------------------------------------------

// Buffers of an expanded layout: places for the worst case, in the layout's shape.
struct expanded {
    moxie_slab in_slab, out_slab;
    moxie_rows in, out;
    int64_t dims[4][3], counts_dim, index_dims[2];
    unsigned char *rows;
    float *weights, *results;
    int32_t *counts, *index;
    moxie_tensor row_index;
};

static void *poisoned(int64_t bytes)
{
    void *memory = malloc((size_t)bytes + 1);

    ck_assert_ptr_nonnull(memory);
    memset(memory, 0xff, (size_t)bytes + 1);
    return memory;
}

static void expanded_make(struct expanded *e, const struct bench *bench, int32_t layout)
{
    const struct layer *layer = &bench->layer;
    int64_t pairs = layer->tokens * layer->top_k;
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
    int64_t rows = masked ? layer->experts * pairs : pairs;
    const int32_t ndim = masked ? 3 : 2;

    memset(e, 0, sizeof *e);
    e->rows = poisoned(rows * layer->hidden * 2);
    e->weights = poisoned(rows * 4);
    e->results = poisoned(rows * layer->hidden * 4);
    e->counts = poisoned((layer->experts + 1) * 4);
    e->index = poisoned(pairs * 4);
    for (int32_t i = 0; i < 2; i++) {
        e->dims[i][0] = masked ? layer->experts : pairs;
        e->dims[i][1] = masked ? pairs : layer->hidden;
        e->dims[i][2] = layer->hidden;
    }
    e->dims[2][0] = masked ? layer->experts : rows;
    e->dims[2][1] = pairs;
    e->counts_dim = layer->experts + !masked;
    e->index_dims[0] = layer->tokens;
    e->index_dims[1] = layer->top_k;
    e->in = (moxie_rows){.struct_size = sizeof(moxie_rows),
                         .layout = layout,
                         .slabs_count = 1,
                         .slab_stride = sizeof(moxie_slab),
                         .slabs = &e->in_slab};
    e->out = e->in;
    e->out.slabs = &e->out_slab;
    e->in_slab = (moxie_slab){.struct_size = sizeof(moxie_slab)};
    e->out_slab = e->in_slab;
    e->in_slab.rows = tensor_make(e->rows, ndim, e->dims[0], NULL, 1u << MOXIE_FORMAT_BF16);
    e->in_slab.weights =
        tensor_make(e->weights, masked + 1, e->dims[2], NULL, 1u << MOXIE_FORMAT_F32);
    e->out_slab.rows = tensor_make(e->results, ndim, e->dims[1], NULL, 1u << MOXIE_FORMAT_F32);
    e->in.counts = tensor_make(e->counts, 1, &e->counts_dim, NULL, TENSOR_INT32);
    e->row_index = tensor_make(e->index, 2, e->index_dims, NULL, TENSOR_INT32);
}

static void expanded_free(struct expanded *e)
{
    free(e->rows);
    free(e->weights);
    free(e->results);
    free(e->counts);
    free(e->index);
}

static int32_t expand(struct bench *bench, struct expanded *e)
{
    return runner_expand(bench->rank.runner, &bench->call, &bench->in, &e->in, &e->row_index,
                         &bench->rank.mock.error);
}

static int32_t fold(struct bench *bench, struct expanded *e)
{
    return runner_fold(bench->rank.runner, &bench->call, &e->out, &e->row_index, &bench->out,
                       &bench->rank.mock.error);
}

// Expand, run on the expanded rows, fold back: what a runner that wants rows by expert sees.
static void by_expert(const char *name, int32_t layout)
{
    struct bench bench;
    struct expanded e;
    moxie_error *error;

    bench_open(&bench, name);
    error = &bench.rank.mock.error;
    expanded_make(&e, &bench, layout);
    ck_assert_msg(expand(&bench, &e) == MOXIE_OK, "%s", bench.rank.mock.text);
    ck_assert_msg(runner_run(bench.rank.runner, &bench.call, &e.in, &e.out, error) == MOXIE_OK,
                  "%s", bench.rank.mock.text);
    ck_assert_msg(fold(&bench, &e) == MOXIE_OK, "%s", bench.rank.mock.text);
    ck_assert_double_le(golden_error(bench.y, &bench.layer.want), bound_of(&bench));
    expanded_free(&e);
    bench_close(&bench);
}

START_TEST(expert_contiguous_rows)
{
    by_expert(layers[_i], MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
}
END_TEST

START_TEST(expert_masked_rows)
{
    by_expert(layers[_i], MOXIE_LAYOUT_EXPERT_MASKED);
}
END_TEST

// Result rows go to peers: those that nobody sent rows for would be moved for nothing.
START_TEST(fold_leaves_rows_past_the_count)
{
    struct bench bench;
    struct expanded e;
    moxie_error *error;
    moxie_rows out;
    int32_t count;
    int64_t one = 1, hidden;
    float poison;

    bench_open(&bench, layers[0]);
    error = &bench.rank.mock.error;
    hidden = bench.layer.hidden;
    count = (int32_t)bench.layer.tokens - 1;
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    out = bench.out;
    out.layout = MOXIE_LAYOUT_RANK_MAJOR;
    out.counts = tensor_make(&count, 1, &one, NULL, TENSOR_INT32);
    memset(bench.y, 0xff, (size_t)(bench.layer.tokens * hidden) * sizeof *bench.y);
    memset(&poison, 0xff, sizeof poison);
    ck_assert_int_eq(expand(&bench, &e), MOXIE_OK);
    ck_assert_int_eq(runner_run(bench.rank.runner, &bench.call, &e.in, &e.out, error), MOXIE_OK);
    ck_assert_msg(runner_fold(bench.rank.runner, &bench.call, &e.out, &e.row_index, &out, error) ==
                      MOXIE_OK,
                  "%s", bench.rank.mock.text);
    ck_assert_mem_ne(bench.y + (count - 1) * hidden, &poison, sizeof poison);
    ck_assert_mem_eq(bench.y + count * hidden, &poison, sizeof poison);
    one = 2;
    ck_assert_int_eq(runner_fold(bench.rank.runner, &bench.call, &e.out, &e.row_index, &out, error),
                     MOXIE_E_INVALID);
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

// ---- id spaces ---------------------------------------------------------------------------------

// Ids are given backwards and the map turns them round again; one id is mapped to nothing.
START_TEST(expert_maps)
{
    static const int32_t spaces[] = {MOXIE_IDS_GLOBAL, MOXIE_IDS_PHYSICAL, MOXIE_IDS_LOCAL};
    struct bench bench;
    int32_t map[32], ids[1024];
    int64_t map_dim, count;

    bench_open(&bench, "qwen3_moe_a");
    map_dim = bench.layer.experts;
    count = bench.layer.tokens * bench.layer.top_k;
    ck_assert_int_le(count, 1024);
    for (int32_t i = 0; i < map_dim; i++)
        map[i] = (int32_t)map_dim - 1 - i;
    for (int64_t i = 0; i < count; i++)
        ids[i] = (int32_t)map_dim - 1 - ((const int32_t *)(const void *)bench.layer.ids.data)[i];
    bench.in_slabs[0].ids.data = ids;
    bench.in.id_space = spaces[_i];
    bench.in.expert_map = tensor_make(map, 1, &map_dim, NULL, TENSOR_INT32);
    run(&bench);
    ck_assert_double_le(golden_error(bench.y, &bench.layer.want), 1e-6);
    map[3] = -1;
    map[4] = INT32_MAX;
    run(&bench);
    ck_assert_double_gt(golden_error(bench.y, &bench.layer.want), 1e-3);
    bench_close(&bench);
}
END_TEST

// ---- refusals ----------------------------------------------------------------------------------

static void refused(struct bench *bench, int32_t code, const char *text)
{
    int32_t answer = runner_run(bench->rank.runner, &bench->call, &bench->in, &bench->out,
                                &bench->rank.mock.error);

    ck_assert_int_eq(answer, code);
    ck_assert_msg(strstr(bench->rank.mock.text, text) != NULL, "no \"%s\" in: %s", text,
                  bench->rank.mock.text);
    ck_assert(bench->y[0] != bench->y[0]);
}

START_TEST(what_does_not_fit_is_refused_before_a_write)
{
    struct bench bench;
    moxie_slab whole;

    bench_open(&bench, "mixtral_a");
    whole = bench.in_slabs[0];
    bench.call.slot = 1;
    refused(&bench, MOXIE_E_INVALID, "call.slot");
    bench.call.slot = 0;
    bench.call.layer = 1;
    refused(&bench, MOXIE_E_INVALID, "call.layer");
    bench.call.layer = 0;
    bench.call.stream = &bench;
    refused(&bench, MOXIE_E_INVALID, "call.stream");
    bench.call.stream = NULL;
    bench.in.layout = 9;
    refused(&bench, MOXIE_E_UNSUPPORTED, "rows.layout");
    bench.in.layout = MOXIE_LAYOUT_STANDARD;
    bench.in.id_space = 0;
    refused(&bench, MOXIE_E_INVALID, "rows.id_space");
    bench.in.id_space = MOXIE_IDS_GLOBAL;
    bench.in_slabs[0].ids.data = NULL;
    refused(&bench, MOXIE_E_INVALID, "rows.slab.ids");
    bench.in_slabs[0] = whole;
    bench.batch.dims[0][0] = tokens_max_of(&bench) + 1;
    refused(&bench, MOXIE_E_CAPACITY, "forward_tokens_max");
    bench.batch.dims[0][0] = bench.layer.tokens;
    bench.batch.dims[0][1]--;
    refused(&bench, MOXIE_E_INVALID, "rows.slab.rows");
    bench.batch.dims[0][1]++;
    bench.batch.dims[3][0]--;
    refused(&bench, MOXIE_E_INVALID, "out.slab.rows");
    bench.batch.dims[3][0]++;
    run(&bench);
    bench_close(&bench);
}
END_TEST

static void assert_not_expanded(struct bench *bench, struct expanded *e, int32_t code,
                                const char *words)
{
    ck_assert_int_eq(expand(bench, e), code);
    ck_assert_msg(strstr(bench->rank.mock.text, words) != NULL, "%s", bench->rank.mock.text);
    ck_assert_int_eq(e->index[0], -1);
}

START_TEST(expanded_rows_must_hold_the_worst_case)
{
    struct bench bench;
    struct expanded e;

    bench_open(&bench, "qwen2_moe_a");
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    e.dims[0][0]--;
    e.dims[2][0]--;
    assert_not_expanded(&bench, &e, MOXIE_E_CAPACITY, "1 slabs, each counted as of");
    ck_assert_int_eq(e.counts[0], -1);
    e.in = bench.in;
    ck_assert_int_eq(expand(&bench, &e), MOXIE_E_INVALID);
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

// Places for more rows than the plan holds are no rows yet; counts of more are.
START_TEST(masked_counts_past_the_plan_are_refused_before_a_write)
{
    struct bench bench;
    struct expanded e;
    moxie_stats stats = {.struct_size = sizeof stats};
    moxie_error *error;
    int64_t left, each;
    unsigned char *written;

    bench_open(&bench, "qwen2_moe_a");
    error = &bench.rank.mock.error;
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_MASKED);
    left = tokens_max_of(&bench) * bench.layer.top_k;
    each = e.dims[0][1];
    ck_assert_int_gt(bench.layer.experts * each, left + each);
    memset(e.rows, 0, (size_t)(bench.layer.experts * each * bench.layer.hidden * 2));
    memset(e.weights, 0, (size_t)(bench.layer.experts * each) * sizeof *e.weights);
    for (int64_t expert = 0; expert < bench.layer.experts; expert++) {
        int64_t rows = left < each ? left : each;

        e.counts[expert] = rows > 0 ? (int32_t)rows : -1;
        left -= rows;
    }
    written = (unsigned char *)e.results;
    e.counts[bench.layer.experts - 1] = 1;
    ck_assert_int_eq(runner_run(bench.rank.runner, &bench.call, &e.in, &e.out, error),
                     MOXIE_E_CAPACITY);
    ck_assert_msg(strstr(bench.rank.mock.text, "rows.counts") != NULL &&
                      strstr(bench.rank.mock.text, "forward_tokens_max") != NULL,
                  "%s", bench.rank.mock.text);
    ck_assert_int_eq(written[0], 0xff);
    instance_stats(bench.rank.instance, &stats);
    ck_assert_uint_eq(stats.refused, 1);
    e.counts[bench.layer.experts - 1] = -1;
    ck_assert_msg(runner_run(bench.rank.runner, &bench.call, &e.in, &e.out, error) == MOXIE_OK,
                  "%s", bench.rank.mock.text);
    ck_assert_int_eq(written[0], 0);
    // More rows of an expert than it has places are as many as the places.
    e.counts[0] = INT32_MAX;
    ck_assert_int_eq(runner_run(bench.rank.runner, &bench.call, &e.in, &e.out, error), MOXIE_OK);
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

START_TEST(what_fold_refuses_is_counted)
{
    struct bench bench;
    struct expanded e;
    moxie_stats stats = {.struct_size = sizeof stats};

    bench_open(&bench, "qwen2_moe_a");
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    bench.batch.dims[3][0] = tokens_max_of(&bench) + 1;
    ck_assert_int_eq(fold(&bench, &e), MOXIE_E_CAPACITY);
    e.dims[1][0] = tokens_max_of(&bench) * bench.layer.top_k + 1;
    ck_assert_int_eq(fold(&bench, &e), MOXIE_E_CAPACITY);
    instance_stats(bench.rank.instance, &stats);
    ck_assert_uint_eq(stats.refused, 2);
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

// No rows into no places: counts are those of the layout, one for each expert. Nor is anything read
// of an index without data, on the way back.
START_TEST(nothing_is_expanded_into_masked_rows)
{
    struct bench bench;
    struct expanded e;
    moxie_slab *in;

    bench_open(&bench, "qwen2_moe_a");
    in = &bench.in_slabs[0];
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_MASKED);
    for (int32_t i = 0; i < 4; i++)
        bench.batch.dims[i][0] = 0;
    e.dims[0][1] = e.dims[1][1] = e.dims[2][1] = e.index_dims[0] = 0;
    e.in_slab.weights.data = e.row_index.data = NULL;
    ck_assert(in->rows.shape[0] == 0 && in->ids.shape[0] == 0 && in->weights.shape[0] == 0);
    ck_assert_msg(expand(&bench, &e) == MOXIE_OK, "%s", bench.rank.mock.text);
    for (int64_t expert = 0; expert <= bench.layer.experts; expert++)
        ck_assert_int_eq(e.counts[expert], expert < bench.layer.experts ? 0 : -1);
    ck_assert_msg(fold(&bench, &e) == MOXIE_OK, "%s", bench.rank.mock.text);
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

START_TEST(expanded_rows_are_of_the_format_and_the_index_is_compact)
{
    struct bench bench;
    struct expanded e;
    int64_t strides[2], whole;

    bench_open(&bench, "qwen2_moe_a");
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    e.in_slab.rows = tensor_make(e.rows, 2, e.dims[0], NULL, 1u << MOXIE_FORMAT_F16);
    assert_not_expanded(&bench, &e, MOXIE_E_INVALID, "format bf16 into rows of format f16");
    // A slab after the first, as a peer's is beside the own one.
    e.in_slab.rows = tensor_make(e.rows, 2, e.dims[0], NULL, 1u << MOXIE_FORMAT_BF16);
    whole = bench.batch.dims[0][0];
    for (int32_t i = 0; i < 3; i++)
        bench.batch.dims[i][0] = whole / 2;
    bench.in_slabs[1] = bench.in_slabs[0];
    bench.in_slabs[1].rows.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 16, 1};
    bench.in.layout = MOXIE_LAYOUT_RANK_MAJOR;
    bench.in.slabs_count = 2;
    bench.counts[0] = bench.counts[1] = (int32_t)(whole / 2);
    bench.counts_dim = 2;
    bench.in.counts = tensor_make(bench.counts, 1, &bench.counts_dim, NULL, TENSOR_INT32);
    assert_not_expanded(&bench, &e, MOXIE_E_INVALID, "slab 1: rows of format f16 into");
    bench.in.layout = MOXIE_LAYOUT_STANDARD;
    bench.in.slabs_count = 1;
    bench.in.counts = (moxie_tensor){0};
    for (int32_t i = 0; i < 3; i++)
        bench.batch.dims[i][0] = whole;
    strides[0] = 0;
    strides[1] = 1;
    e.in_slab.rows.strides = strides;
    assert_not_expanded(&bench, &e, MOXIE_E_INVALID, "overlap each other");
    e.in_slab.rows = tensor_make(e.rows, 2, e.dims[0], NULL, 1u << MOXIE_FORMAT_BF16);
    strides[0] = e.index_dims[1] + 1;
    strides[1] = 1;
    e.row_index = tensor_make(e.index, 2, e.index_dims, strides, TENSOR_INT32);
    assert_not_expanded(&bench, &e, MOXIE_E_UNSUPPORTED, "row_index: strided");
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

// Rows are copied, and summed, in any order.
START_TEST(what_is_written_lies_over_nothing_that_is_read)
{
    struct bench bench;
    struct expanded e;

    bench_open(&bench, "qwen2_moe_a");
    expanded_make(&e, &bench, MOXIE_LAYOUT_EXPERT_CONTIGUOUS);
    bench.in_slabs[0].rows.data = e.rows;
    assert_not_expanded(&bench, &e, MOXIE_E_INVALID, "expand: what is written at");
    bench.out_slabs[0].rows.data = e.out.slabs->rows.data;
    ck_assert_int_eq(fold(&bench, &e), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(bench.rank.mock.text, "fold: what is written at"));
    expanded_free(&e);
    bench_close(&bench);
}
END_TEST

START_TEST(layers_and_updates_are_checked)
{
    struct bench bench;
    struct layer_weights_view view;
    moxie_runner *other = NULL;
    moxie_error *error;
    int32_t experts[] = {0, 7, 8};

    bench_open(&bench, "mixtral_a");
    error = &bench.rank.mock.error;
    layer_weights_of(&bench.layer, 0, bench.layer.experts, &view);
    ck_assert_int_eq(runner_create(bench.rank.instance, 1, &view.weights, &other, error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_null(other);
    layer_weights_of(&bench.layer, 0, bench.layer.experts - 1, &view);
    ck_assert_int_eq(runner_create(bench.rank.instance, 0, &view.weights, &other, error),
                     MOXIE_E_INVALID);
    ck_assert_int_eq(runner_weights_updated(bench.rank.runner, NULL, 0, error), MOXIE_OK);
    ck_assert_int_eq(runner_weights_updated(bench.rank.runner, experts, 2, error), MOXIE_OK);
    ck_assert_int_eq(runner_weights_updated(bench.rank.runner, experts, 3, error), MOXIE_E_INVALID);
    ck_assert(strstr(bench.rank.mock.text, "ids[2]") != NULL);
    runner_destroy(NULL);
    bench_close(&bench);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, standard_rows, 0, LAYERS);
    tcase_add_loop_test(tests, rank_major_rows, 0, LAYERS);
    tcase_add_loop_test(tests, expert_contiguous_rows, 0, LAYERS);
    tcase_add_loop_test(tests, expert_masked_rows, 0, LAYERS);
    tcase_add_test(tests, fold_leaves_rows_past_the_count);
    tcase_add_loop_test(tests, expert_maps, 0, 3);
    tcase_add_test(tests, what_does_not_fit_is_refused_before_a_write);
    tcase_add_test(tests, expanded_rows_must_hold_the_worst_case);
    tcase_add_test(tests, masked_counts_past_the_plan_are_refused_before_a_write);
    tcase_add_test(tests, what_fold_refuses_is_counted);
    tcase_add_test(tests, nothing_is_expanded_into_masked_rows);
    tcase_add_test(tests, expanded_rows_are_of_the_format_and_the_index_is_compact);
    tcase_add_test(tests, what_is_written_lies_over_nothing_that_is_read);
    tcase_add_test(tests, layers_and_updates_are_checked);
}

SUITE_MAIN("runner", 120, add)
