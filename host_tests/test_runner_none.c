// plugin/runner.c with runner = none: Moxie's dispatcher before a runner of the host's own, on rows
// as they come or by expert. That runner is another instance's here.

#include "plugin/runner.h"

#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/tensor.h"

#include <stdlib.h>
#include <string.h>

static void none_keys(struct crew_member *member)
{
    mock_set_str(&member->rank.mock, "runner", "none");
}

// The host's own runner: of an instance that has the same keys, but computes.
static void own_open(struct crew_member *member, struct layer_rank *own)
{
    const struct crew *crew = member->crew;

    layer_rank_init(own, &crew->layer, crew->ranks > 1 ? crew->group : NULL, member->index);
    mock_set_str(&own->mock, "dispatcher", crew->dispatcher);
    mock_set_i64(&own->mock, "forward_tokens_max",
                 member->rank.instance->plan.limits.forward_tokens_max);
    layer_rank_prepare(own, &crew->layer);
}

static void dispatch(struct crew_member *member, const moxie_rows **in, const moxie_rows **out)
{
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;

    crew_expect(member, dispatcher_dispatch_send(member->rank.dispatcher, batch, error), MOXIE_OK,
                NULL);
    crew_expect(member, dispatcher_dispatch_recv(member->rank.dispatcher, batch, in, out, error),
                MOXIE_OK, NULL);
}

static void combine(struct crew_member *member)
{
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;

    crew_expect(member, dispatcher_combine_send(member->rank.dispatcher, batch, error), MOXIE_OK,
                NULL);
    crew_expect(member, dispatcher_combine_recv(member->rank.dispatcher, batch, error), MOXIE_OK,
                NULL);
}

// Moxie's part beside a runner of the host's own: dispatch, then `between`, then combine.
static void layer_around(struct crew_member *member,
                         void (*between)(struct crew_member *, moxie_runner *own,
                                         const moxie_rows *in, const moxie_rows *out))
{
    const moxie_rows *in = NULL, *out = NULL;
    struct layer_rank own;

    own_open(member, &own);
    crew_begin(member);
    dispatch(member, &in, &out);
    between(member, own.runner, in, out);
    combine(member);
    layer_rank_close(&own);
}

static void run_own(struct crew_member *member, moxie_runner *own, const moxie_rows *in,
                    const moxie_rows *out)
{
    const moxie_call call = {.struct_size = sizeof call};

    crew_expect(member, runner_run(own, &call, in, out, &member->rank.mock.error), MOXIE_OK, NULL);
}

// Flat rows, of which each slab counts as the largest.
static int64_t flat_rows(const moxie_rows *in)
{
    int64_t largest = 0;

    for (uint32_t i = 0; i < in->slabs_count; i++)
        if (in->slabs[i].ids.shape[0] > largest) largest = in->slabs[i].ids.shape[0];
    return in->slabs_count * largest;
}

// Rows by expert, for the worst case.
static void run_own_by_expert(struct crew_member *member, moxie_runner *own, const moxie_rows *in,
                              const moxie_rows *out)
{
    const struct limits *limits = &member->rank.instance->plan.limits;
    const moxie_call call = {.struct_size = sizeof call};
    moxie_error *error = &member->rank.mock.error;
    moxie_runner *expander = NULL;
    int64_t index_dims[2] = {flat_rows(in), limits->top_k};
    int64_t rows_dims[2] = {limits->pairs_max, limits->hidden}, weights_dim = limits->pairs_max;
    int64_t counts_dim = limits->experts_local + 1;
    moxie_slab expanded_slab = {.struct_size = sizeof expanded_slab};
    moxie_slab result_slab = {.struct_size = sizeof result_slab};
    moxie_rows expanded = {.struct_size = sizeof expanded,
                           .layout = MOXIE_LAYOUT_EXPERT_CONTIGUOUS,
                           .slabs_count = 1,
                           .slab_stride = sizeof expanded_slab,
                           .slabs = &expanded_slab};
    moxie_rows results = expanded;
    const size_t values = (size_t)(limits->pairs_max * limits->hidden);
    void *rows = malloc(values * 2), *weights = malloc((size_t)limits->pairs_max * 4);
    void *sums = malloc(values * 4), *counts = malloc((size_t)counts_dim * 4);
    void *index = malloc((size_t)(index_dims[0] * index_dims[1]) * 4);
    moxie_tensor row_index = tensor_make(index, 2, index_dims, NULL, TENSOR_INT32);

    results.slabs = &result_slab;
    expanded_slab.rows = tensor_make(rows, 2, rows_dims, NULL, 1u << MOXIE_FORMAT_BF16);
    expanded_slab.weights = tensor_make(weights, 1, &weights_dim, NULL, 1u << MOXIE_FORMAT_F32);
    result_slab.rows = tensor_make(sums, 2, rows_dims, NULL, 1u << MOXIE_FORMAT_F32);
    expanded.counts = tensor_make(counts, 1, &counts_dim, NULL, TENSOR_INT32);
    crew_expect(member, runner_create(member->rank.instance, 0, NULL, &expander, error), MOXIE_OK,
                NULL);
    crew_expect(member, runner_expand(expander, &call, in, &expanded, &row_index, error), MOXIE_OK,
                NULL);
    crew_expect(member, runner_run(own, &call, &expanded, &results, error), MOXIE_OK, NULL);
    crew_expect(member, runner_fold(expander, &call, &results, &row_index, out, error), MOXIE_OK,
                NULL);
    runner_destroy(expander);
    free(rows);
    free(weights);
    free(sums);
    free(counts);
    free(index);
}

static void rows_scenario(struct crew_member *member)
{
    layer_around(member, run_own);
}

static void by_expert_scenario(struct crew_member *member)
{
    layer_around(member, run_own_by_expert);
}

START_TEST(the_host_computes_between_dispatch_and_combine)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = _i % 2 == 0 ? 1 : 3,
                        .dispatcher = _i % 2 == 0 ? "local" : "alltoall",
                        .configure = none_keys,
                        .scenario = _i < 2 ? rows_scenario : by_expert_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// Refused before anything was sent: the ranks go on.
static void refused_scenario(struct crew_member *member)
{
    const moxie_call call = {.struct_size = sizeof call};
    moxie_error *error = &member->rank.mock.error;
    moxie_runner *runner = member->rank.runner;
    const moxie_rows *in = NULL, *out = NULL;

    crew_begin(member);
    crew_expect(member, forward_run(member->rank.dispatcher, runner, &member->batch.batch, error),
                MOXIE_E_UNSUPPORTED, "set runner to auto");
    crew_expect(member, runner_weights_updated(runner, NULL, 0, error), MOXIE_E_UNSUPPORTED,
                "runner is none: a runner of the host's own has the weights and computes, and this "
                "one only expands and folds: call that one, between dispatch and combine, and tell "
                "it of new weights, or set runner to auto");
    dispatch(member, &in, &out);
    crew_expect(member, runner_run(runner, &call, in, out, error), MOXIE_E_UNSUPPORTED,
                "runner is none");
    combine(member);
    rows_scenario(member);
}

START_TEST(what_would_compute_is_refused)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = none_keys,
                        .scenario = refused_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// So it is where the configuration was refused, for which there is no plan: create says that, and
// not that the weights are missing.
START_TEST(a_refused_configuration_takes_no_weights)
{
    static const struct registry none;
    moxie_instance *instance = NULL;
    moxie_runner *runner = NULL;
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "runner", "none");
    mock_set_i64(&mock, "count_expert_load", 1);
    ck_assert_int_eq(instance_open(&mock.host, &none, &instance, &mock.error), MOXIE_OK);
    ck_assert_int_eq(runner_takes_weights(instance), 0);
    ck_assert_int_eq(runner_create(instance, 0, NULL, &runner, &mock.error), MOXIE_E_CONFIG);
    ck_assert_ptr_nonnull(strstr(mock.text, "count_expert_load"));
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, the_host_computes_between_dispatch_and_combine, 0, 4);
    tcase_add_test(tests, what_would_compute_is_refused);
    tcase_add_test(tests, a_refused_configuration_takes_no_weights);
}

SUITE_MAIN("runner_none", 60, add)
