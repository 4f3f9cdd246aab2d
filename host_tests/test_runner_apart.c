// plugin/runner.c: what a call writes lies over nothing that it reads meanwhile, and nothing else
// that it writes.

#include "host_tests/layer.h"
#include "host_tests/said.h"
#include "kernels/layer.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

// All tokens of a layer as the rows of two sources, the second of which has none.
struct sources {
    struct layer layer;
    struct layer_rank rank;
    struct layer_batch batch;
    struct said said;
    float *y;
    moxie_slab in_slabs[2], out_slabs[2];
    moxie_rows in, out;
    int64_t counts_dim;
    int32_t counts[2];
};

static void sources_open(struct sources *s)
{
    const moxie_batch *batch = &s->batch.batch;

    memset(s, 0, sizeof *s);
    said_init(&s->said);
    layer_open(&s->layer, "qwen2_moe_a");
    layer_rank_init(&s->rank, &s->layer, NULL, 0);
    mock_set_i64(&s->rank.mock, "forward_tokens_max", 2 * s->layer.tokens);
    layer_rank_open(&s->rank, &s->layer);
    s->y = layer_poisoned(&s->layer);
    layer_batch_of(&s->layer, 0, s->layer.tokens, s->y, &s->batch);
    s->in = (moxie_rows){.struct_size = sizeof s->in,
                         .layout = MOXIE_LAYOUT_RANK_MAJOR,
                         .id_space = MOXIE_IDS_GLOBAL,
                         .slabs_count = 2,
                         .slab_stride = sizeof(moxie_slab),
                         .slabs = s->in_slabs};
    s->out = s->in;
    s->out.slabs = s->out_slabs;
    for (int32_t i = 0; i < 2; i++) {
        s->in_slabs[i] = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                      .rows = batch->x,
                                      .ids = batch->ids,
                                      .weights = batch->weights};
        s->out_slabs[i] = (moxie_slab){.struct_size = sizeof(moxie_slab), .rows = batch->y};
    }
    s->out_slabs[1].rows.data = layer_poisoned(&s->layer);
    s->counts_dim = 2;
    s->counts[0] = (int32_t)s->layer.tokens;
    s->in.counts = tensor_make(s->counts, 1, &s->counts_dim, NULL, TENSOR_INT32);
}

static void sources_close(struct sources *s)
{
    free(s->out_slabs[1].rows.data);
    free(s->y);
    layer_rank_close(&s->rank);
    layer_close(&s->layer);
}

static int32_t run(struct sources *s)
{
    const moxie_call call = {.struct_size = sizeof call};

    return runner_run(s->rank.runner, &call, &s->in, &s->out, &s->said.error);
}

static moxie_rows by_expert(moxie_slab *slab)
{
    return (moxie_rows){.struct_size = sizeof(moxie_rows),
                        .layout = MOXIE_LAYOUT_EXPERT_CONTIGUOUS,
                        .id_space = MOXIE_IDS_LOCAL,
                        .slabs_count = 1,
                        .slab_stride = sizeof *slab,
                        .slabs = slab};
}

// Row 0 of the results would say how many there are.
START_TEST(counts_lie_over_no_results)
{
    struct sources s;

    sources_open(&s);
    for (int32_t i = 1; i >= 0; i--) {
        memcpy(s.out_slabs[i].rows.data, s.counts, sizeof s.counts);
        s.in.counts.data = s.out_slabs[i].rows.data;
        SAID(&s.said, MOXIE_E_INVALID, run(&s), "run: what is written at", "want them apart");
        ck_assert_mem_eq(s.out_slabs[i].rows.data, s.counts, sizeof s.counts);
    }
    s.in.counts.data = s.counts;
    ACCEPTED(&s.said, run(&s));
    ck_assert_double_le(golden_error(s.y, &s.layer.want), 1e-6);
    sources_close(&s);
}
END_TEST

START_TEST(nor_over_what_fold_writes)
{
    const moxie_call call = {.struct_size = sizeof call};
    struct sources s;
    moxie_slab slab = {.struct_size = sizeof slab};
    moxie_rows expanded;
    moxie_tensor index;
    int64_t index_dims[2], row_dims[2];

    sources_open(&s);
    index_dims[0] = 2 * s.layer.tokens;
    index_dims[1] = s.layer.top_k;
    row_dims[0] = 1;
    row_dims[1] = s.layer.hidden;
    index = tensor_make(calloc((size_t)(index_dims[0] * index_dims[1]), sizeof(int32_t)), 2,
                        index_dims, NULL, TENSOR_INT32);
    slab.rows = tensor_make(calloc((size_t)row_dims[1], sizeof(float)), 2, row_dims, NULL,
                            1u << MOXIE_FORMAT_F32);
    expanded = by_expert(&slab);
    s.out.counts = s.in.counts;
    ACCEPTED(&s.said, runner_fold(s.rank.runner, &call, &expanded, &index, &s.out, &s.said.error));
    s.out.counts.data = s.out_slabs[1].rows.data;
    SAID(&s.said, MOXIE_E_INVALID,
         runner_fold(s.rank.runner, &call, &expanded, &index, &s.out, &s.said.error),
         "fold: what is written at", "want them apart");
    s.out.counts.data = s.counts;
    free(index.data);
    index.data = s.out_slabs[1].rows.data;
    SAID(&s.said, MOXIE_E_INVALID,
         runner_fold(s.rank.runner, &call, &expanded, &index, &s.out, &s.said.error),
         "fold: what is written at", "want them apart");
    free(slab.rows.data);
    sources_close(&s);
}
END_TEST

// Of sources, too: by their ranges, or as columns of one array.
START_TEST(results_of_sources_lie_apart)
{
    const moxie_call call = {.struct_size = sizeof call};
    struct sources s;
    moxie_rows expanded;
    moxie_slab slab = {.struct_size = sizeof slab};
    moxie_tensor *second = &s.out_slabs[1].rows, index;
    int64_t index_dims[2], strides[2];
    float *memory, *whole;

    sources_open(&s);
    memory = second->data;
    whole = calloc((size_t)(2 * s.layer.tokens * s.layer.hidden), sizeof *whole);
    ck_assert_ptr_nonnull(whole);
    second->data = s.y + (s.layer.tokens - 1) * s.layer.hidden; // the last row of the first
    SAID(&s.said, MOXIE_E_INVALID, run(&s), "out: slabs 0 and 1 overlap", "memory of its own");
    ck_assert_int_eq(memcmp(s.y, memory, (size_t)(s.layer.tokens * s.layer.hidden) * 4), 0);
    slab.rows = s.out_slabs[0].rows;
    slab.rows.data = memory;
    expanded = by_expert(&slab);
    index_dims[0] = 2 * s.layer.tokens;
    index_dims[1] = s.layer.top_k;
    index = tensor_make(whole, 2, index_dims, NULL, TENSOR_INT32);
    s.out.counts = s.in.counts;
    SAID(&s.said, MOXIE_E_INVALID,
         runner_fold(s.rank.runner, &call, &expanded, &index, &s.out, &s.said.error),
         "out: slabs 0 and 1 overlap");
    strides[0] = 2 * s.layer.hidden;
    strides[1] = 1;
    s.out_slabs[0].rows.strides = second->strides = strides;
    s.out_slabs[0].rows.data = whole;
    second->data = whole + s.layer.hidden;
    ACCEPTED(&s.said, run(&s));
    second->data = whole + s.layer.hidden - 1;
    SAID(&s.said, MOXIE_E_INVALID, run(&s), "out: slabs 0 and 1 overlap");
    second->data = memory;
    free(whole);
    sources_close(&s);
}
END_TEST

// Where expand may write all rows of both sources.
struct expansion {
    moxie_slab slab;
    moxie_rows out;
    moxie_tensor index, *written[3]; // besides the rows
    int64_t pairs, dims[5][2];
    char *memory; // of all four
};

static void expansion_init(struct expansion *e, const struct layer *layer)
{
    const int64_t hidden = layer->hidden, groups = ceil_div(hidden, 128);

    memset(e, 0, sizeof *e);
    e->pairs = 2 * layer->tokens * layer->top_k;
    e->memory = calloc((size_t)e->pairs, (size_t)(4 * (hidden + groups)));
    ck_assert_ptr_nonnull(e->memory);
    memcpy(e->dims,
           (int64_t[5][2]){{e->pairs, hidden},
                           {e->pairs},
                           {layer->experts + 1},
                           {2 * layer->tokens, layer->top_k},
                           {e->pairs, groups}},
           sizeof e->dims);
    e->slab.struct_size = sizeof e->slab;
    e->slab.rows = tensor_make(e->memory, 2, e->dims[0], NULL, 1u << MOXIE_FORMAT_BF16);
    e->slab.weights =
        tensor_make(e->memory + 2 * e->pairs * hidden, 1, e->dims[1], NULL, 1u << MOXIE_FORMAT_F32);
    e->index =
        tensor_make((char *)e->slab.weights.data + 4 * e->pairs, 2, e->dims[3], NULL, TENSOR_INT32);
    e->out = by_expert(&e->slab);
    e->out.counts =
        tensor_make((char *)e->index.data + 4 * e->pairs, 1, e->dims[2], NULL, TENSOR_INT32);
    e->written[0] = &e->slab.weights;
    e->written[1] = &e->index;
    e->written[2] = &e->out.counts;
}

static int32_t expand(struct sources *s, const struct expansion *e)
{
    const moxie_call call = {.struct_size = sizeof call};

    return runner_expand(s->rank.runner, &call, &s->in, &e->out, &e->index, &s->said.error);
}

// Nothing that is written may lie at `memory`.
static void expect_apart(struct sources *s, struct expansion *e, void *memory)
{
    for (int32_t i = 0; i < 3; i++) {
        void *apart = e->written[i]->data;

        e->written[i]->data = memory;
        SAID(&s->said, MOXIE_E_INVALID, expand(s, e), "expand: what is written at");
        e->written[i]->data = apart;
    }
}

// Whichever of two came last would be what is there.
START_TEST(what_expand_writes_lies_apart)
{
    struct sources s;
    struct expansion e;

    sources_open(&s);
    expansion_init(&e, &s.layer);
    ACCEPTED(&s.said, expand(&s, &e));
    for (int32_t i = 0; i < 3; i++) {
        void *apart = e.written[i]->data;

        for (int32_t over = 0; over < 3; over++) {
            if (over == i) continue;
            e.written[i]->data = e.written[over]->data;
            SAID(&s.said, MOXIE_E_INVALID, expand(&s, &e), "expand: what is written at",
                 "want them apart");
        }
        e.written[i]->data = apart;
    }
    expect_apart(&s, &e, e.memory); // the rows'
    free(e.memory);
    sources_close(&s);
}
END_TEST

// Rows of fp8, whose scales are read while the rest is written.
START_TEST(expand_writes_over_no_scales)
{
    struct sources s;
    struct expansion e;
    int64_t scale_dims[2];
    char *scales;

    sources_open(&s);
    expansion_init(&e, &s.layer);
    scale_dims[0] = s.layer.tokens;
    scale_dims[1] = e.dims[4][1];
    scales = calloc((size_t)e.pairs, (size_t)(4 * scale_dims[1]));
    for (int32_t i = 0; i < 2; i++) {
        s.in_slabs[i].rows =
            tensor_make(s.batch.batch.x.data, 2, s.batch.dims[0], NULL, TENSOR_E4M3);
        s.in_slabs[i].scales = tensor_make(scales, 2, scale_dims, NULL, 1u << MOXIE_FORMAT_F32);
    }
    e.slab.rows = tensor_make(e.memory, 2, e.dims[0], NULL, TENSOR_E4M3);
    e.slab.scales = tensor_make((char *)e.out.counts.data + 4 * (s.layer.experts + 1), 2, e.dims[4],
                                NULL, 1u << MOXIE_FORMAT_F32);
    ACCEPTED(&s.said, expand(&s, &e));
    expect_apart(&s, &e, scales);
    free(scales);
    free(e.memory);
    sources_close(&s);
}
END_TEST

START_TEST(an_expansion_that_does_not_fit_is_counted)
{
    struct sources s;
    struct expansion e;
    moxie_stats stats;

    sources_open(&s);
    expansion_init(&e, &s.layer);
    e.dims[0][0] = --e.dims[1][0];
    SAID(&s.said, MOXIE_E_CAPACITY, expand(&s, &e), "expand: out has");
    instance_stats(s.rank.instance, &stats);
    ck_assert_uint_eq(stats.refused, 1);
    // A larger plan is not what is wanted where there are too many.
    e.dims[0][0] = e.dims[1][0] = s.rank.instance->plan.limits.pairs_max + 1;
    SAID(&s.said, MOXIE_E_CAPACITY, expand(&s, &e), "expand: out has", "want at most",
         "the plan's rows times top_k, and ", " are enough for these");
    ck_assert_ptr_null(strstr(s.said.text, "forward_tokens"));
    instance_stats(s.rank.instance, &stats);
    ck_assert_uint_eq(stats.refused, 2);
    free(e.memory);
    sources_close(&s);
}
END_TEST

static int32_t layers; // that were offered to a device as one launch

static int32_t watched_layer(const struct layer_args *args, void *stream)
{
    (void)args;
    (void)stream;
    layers++;
    return LAYER_UNFIT;
}

// One launch for everything reads while it writes: results that lie over an input are not for it.
START_TEST(results_over_an_input_take_launches_apart)
{
    struct kernels kernels = kernels_cpu;
    struct device device = device_cpu;
    struct sources s;
    moxie_tensor *read[4];
    int64_t scale_dims[2], map_dim;

    sources_open(&s);
    scale_dims[0] = s.layer.tokens;
    scale_dims[1] = ceil_div(s.layer.hidden, 128);
    map_dim = s.layer.experts;
    s.in.slabs_count = s.out.slabs_count = 1;
    s.counts_dim = 1;
    s.in_slabs[0].rows = tensor_make(s.batch.batch.x.data, 2, s.batch.dims[0], NULL, TENSOR_E4M3);
    s.in_slabs[0].scales =
        tensor_make(calloc((size_t)(scale_dims[0] * scale_dims[1]), sizeof(float)), 2, scale_dims,
                    NULL, 1u << MOXIE_FORMAT_F32);
    s.in.expert_map =
        tensor_make(calloc((size_t)map_dim, sizeof(int32_t)), 1, &map_dim, NULL, TENSOR_INT32);
    kernels.layer = watched_layer;
    device.kernels = &kernels;
    s.rank.instance->device = &device;
    layers = 0;
    ACCEPTED(&s.said, run(&s));
    ck_assert_int_eq(layers, 1);
    read[0] = &s.in_slabs[0].scales;
    read[1] = &s.in_slabs[0].ids;
    read[2] = &s.in_slabs[0].weights;
    read[3] = &s.in.expert_map;
    for (int32_t i = 0; i < 4; i++) {
        void *apart = read[i]->data;

        read[i]->data = s.y;
        ACCEPTED(&s.said, run(&s));
        ck_assert_msg(layers == 1, "input %d", i);
        read[i]->data = apart;
    }
    s.rank.instance->device = &device_cpu;
    free(s.in_slabs[0].scales.data);
    free(s.in.expert_map.data);
    sources_close(&s);
}
END_TEST

// STANDARD rows past the count have results, too, so it is read before.
START_TEST(a_count_of_tokens_may)
{
    struct sources s;

    sources_open(&s);
    s.in.layout = s.out.layout = MOXIE_LAYOUT_STANDARD;
    s.in.slabs_count = s.out.slabs_count = 1;
    s.counts_dim = 1;
    memcpy(s.y, s.counts, sizeof s.counts[0]);
    s.in.counts.data = s.y;
    ACCEPTED(&s.said, run(&s));
    ck_assert_double_le(golden_error(s.y, &s.layer.want), 1e-6);
    sources_close(&s);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, counts_lie_over_no_results);
    tcase_add_test(tests, nor_over_what_fold_writes);
    tcase_add_test(tests, results_of_sources_lie_apart);
    tcase_add_test(tests, what_expand_writes_lies_apart);
    tcase_add_test(tests, expand_writes_over_no_scales);
    tcase_add_test(tests, an_expansion_that_does_not_fit_is_counted);
    tcase_add_test(tests, results_over_an_input_take_launches_apart);
    tcase_add_test(tests, a_count_of_tokens_may);
}

SUITE_MAIN("runner_apart", 60, add)
