// plugin/runner.c: what a call writes lies over nothing that it reads meanwhile, and nothing else
// that it writes.

#include "host_tests/layer.h"
#include "host_tests/said.h"
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

// Row 0 of the results would say how many there are. A host's slabs may be longer than ours.
START_TEST(counts_lie_over_no_results)
{
    struct {
        moxie_slab slab;
        uint64_t later;
    } longer[2];
    struct sources s;

    sources_open(&s);
    memset(longer, 0xff, sizeof longer);
    for (int32_t i = 0; i < 2; i++)
        longer[i].slab = s.out_slabs[i];
    if (_i == 1) {
        s.out.slabs = &longer[0].slab;
        s.out.slab_stride = sizeof longer[0];
    }
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
    free(slab.rows.data);
    free(index.data);
    sources_close(&s);
}
END_TEST

// Whichever of two came last would be what is there.
START_TEST(what_expand_writes_lies_apart)
{
    const moxie_call call = {.struct_size = sizeof call};
    struct sources s;
    int64_t pairs, experts, dims[4][2];
    moxie_slab slab = {.struct_size = sizeof slab};
    moxie_rows out;
    moxie_tensor index, *written[3];
    char *memory;

    sources_open(&s);
    pairs = 2 * s.layer.tokens * s.layer.top_k;
    experts = s.layer.experts + 1;
    memory = calloc((size_t)pairs, (size_t)(4 * s.layer.hidden));
    memcpy(dims, (int64_t[4][2]){{pairs, s.layer.hidden}, {pairs}, {experts}}, sizeof dims);
    dims[3][0] = 2 * s.layer.tokens;
    dims[3][1] = s.layer.top_k;
    slab.rows = tensor_make(memory, 2, dims[0], NULL, 1u << MOXIE_FORMAT_BF16);
    slab.weights =
        tensor_make(memory + 2 * pairs * s.layer.hidden, 1, dims[1], NULL, 1u << MOXIE_FORMAT_F32);
    index = tensor_make((char *)slab.weights.data + 4 * pairs, 2, dims[3], NULL, TENSOR_INT32);
    out = by_expert(&slab);
    out.counts = tensor_make((char *)index.data + 4 * pairs, 1, dims[2], NULL, TENSOR_INT32);
    ACCEPTED(&s.said, runner_expand(s.rank.runner, &call, &s.in, &out, &index, &s.said.error));
    written[0] = &slab.weights;
    written[1] = &index;
    written[2] = &out.counts;
    for (int32_t i = 0; i < 3; i++) {
        void *apart = written[i]->data;

        for (int32_t over = 0; over < 3; over++) {
            if (over == i) continue;
            written[i]->data = written[over]->data;
            SAID(&s.said, MOXIE_E_INVALID,
                 runner_expand(s.rank.runner, &call, &s.in, &out, &index, &s.said.error),
                 "expand: what is written at", "want them apart");
        }
        written[i]->data = memory; // the rows'
        SAID(&s.said, MOXIE_E_INVALID,
             runner_expand(s.rank.runner, &call, &s.in, &out, &index, &s.said.error),
             "expand: what is written at");
        written[i]->data = apart;
    }
    free(memory);
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
    tcase_add_loop_test(tests, counts_lie_over_no_results, 0, 2);
    tcase_add_test(tests, nor_over_what_fold_writes);
    tcase_add_test(tests, what_expand_writes_lies_apart);
    tcase_add_test(tests, a_count_of_tokens_may);
}

SUITE_MAIN("runner_apart", 60, add)
