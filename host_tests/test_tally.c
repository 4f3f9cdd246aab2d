// kernels/cpu/tally.c, and the counters of expert load that hosts read.

#include "kernels/tally.h"

#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <string.h>

#define LAYERS 3
#define LAYER  1
#define STEPS  2

START_TEST(rows_are_added)
{
    const int32_t offsets[] = {0, 2, 2, 9, 10};
    int64_t load[] = {1, 0, (int64_t)1 << 40, -1, 77};
    const struct tally_args args = {.expert_offset = offsets, .load = load, .experts = 4};

    ck_assert_int_eq(tally_cpu(&args, NULL), 0);
    ck_assert_int_eq(load[0], 3);
    ck_assert_int_eq(load[1], 0);
    ck_assert_int_eq(load[2], ((int64_t)1 << 40) + 7);
    ck_assert_int_eq(load[3], 0);
    ck_assert_int_eq(load[4], 77);
}
END_TEST

static void keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "num_layers", LAYERS);
    mock_set_i64(&member->rank.mock, "count_expert_load", 1);
}

// Another runner of the same instance, for layer LAYER.
static moxie_runner *second_runner(struct crew_member *member)
{
    const struct limits *limits = &member->rank.instance->plan.limits;
    struct layer_weights_view view;
    moxie_runner *runner = NULL;

    layer_weights_of(&member->crew->layer, limits->experts_first, limits->experts_local, &view);
    ck_assert_int_eq(runner_create(member->rank.instance, LAYER, &view.weights, &runner,
                                   &member->rank.mock.error),
                     MOXIE_OK);
    return runner;
}

static int64_t chosen(const struct layer *layer, int64_t expert)
{
    const int32_t *ids = (const int32_t *)(const void *)layer->ids.data;
    int64_t count = 0;

    for (int64_t i = 0; i < layer->tokens * layer->top_k; i++)
        count += ids[i] == expert;
    return count;
}

// STEPS layers by one runner count there, and nowhere else; a runner that is made anew, or a host,
// begins from zero.
static void scenario(struct crew_member *member)
{
    const struct limits *limits = &member->rank.instance->plan.limits;
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = 1000};
    moxie_runner *first = member->rank.runner;
    int64_t *load;

    member->rank.runner = second_runner(member);
    member->batch.batch.layer = LAYER;
    for (int32_t i = 0; i < STEPS; i++)
        crew_forward(member);
    ck_assert_int_eq(instance_captured(member->rank.instance, &captured, &member->rank.mock.error),
                     MOXIE_OK);
    ck_assert_ptr_null(captured.ids.data);
    ck_assert_int_eq(captured.load.ndim, 2);
    ck_assert_int_eq(captured.load.shape[0], LAYERS);
    ck_assert_int_eq(captured.load.shape[1], limits->experts_local);
    ck_assert_int_eq(captured.load.dtype.bits, 64);
    ck_assert_int_eq(tensor_stride_bytes(&captured.load, 0), limits->experts_local * 8);
    load = (int64_t *)(void *)tensor_data(&captured.load);
    for (int32_t at = 0; at < LAYERS * limits->experts_local; at++)
        ck_assert_int_eq(load[at],
                         at / limits->experts_local != LAYER
                             ? 0
                             : STEPS * chosen(&member->crew->layer,
                                              limits->experts_first + at % limits->experts_local));
    runner_destroy(member->rank.runner);
    member->rank.runner = second_runner(member);
    for (int32_t e = 0; e < limits->experts_local; e++)
        ck_assert_int_eq(load[LAYER * limits->experts_local + e], 0);
    runner_destroy(member->rank.runner);
    member->rank.runner = first;
}

START_TEST(every_rank_counts_its_experts)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = _i,
                        .dispatcher = _i == 1 ? "local" : "alltoall",
                        .configure = keys,
                        .scenario = scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

START_TEST(without_a_runner_there_is_none)
{
    static const struct registry none;
    moxie_captured captured = {.struct_size = sizeof captured};
    struct mock_host mock;
    moxie_instance *instance = NULL;

    mock_host_init(&mock);
    mock_set_i64(&mock, "count_expert_load", 1);
    ck_assert_int_eq(instance_open(&mock.host, &none, &instance, &mock.error), MOXIE_OK);
    ck_assert_int_eq(instance_captured(instance, &captured, &mock.error), MOXIE_E_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(mock.text, "no runner has been created"));
    ck_assert_ptr_null(captured.load.data);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, rows_are_added);
    tcase_add_loop_test(tests, every_rank_counts_its_experts, 1, 4);
    tcase_add_test(tests, without_a_runner_there_is_none);
}

SUITE_MAIN("tally", 60, add)
