// What the bench makes of routings and times: skewed loads, bytes between ranks, floors.

#include "hosts/cli/bench_report.h"

#include "host_tests/suite.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define NEAR 1e-9

static const struct bench_shape dsv3 = {7168, 2048, 256, 8};

// ---- Routings ----------------------------------------------------------------------------------

// The share of the pairs that rank 0 gets, over the mean of the ranks; each token's experts differ.
static double load_of_rank_0(const struct bench_shape *shape, int ranks, double skew)
{
    enum { TOKENS = 2000 };
    const struct draw draw = {3, 5, ranks - 1, ranks, skew};
    int64_t own = bench_experts_first(shape->experts, ranks, 1);
    int64_t pairs = TOKENS * shape->top_k;
    int32_t *ids = malloc((size_t)pairs * sizeof *ids);
    int64_t here = 0;

    ck_assert_ptr_nonnull(ids);
    bench_draw_ids(shape, &draw, TOKENS, ids);
    for (int64_t i = 0; i < pairs; i++) {
        ck_assert_int_ge(ids[i], 0);
        ck_assert_int_lt(ids[i], shape->experts);
        for (int64_t j = i / shape->top_k * shape->top_k; j < i; j++)
            ck_assert_int_ne(ids[i], ids[j]);
        here += ids[i] < own;
    }
    free(ids);
    return (double)here * ranks / (double)pairs;
}

START_TEST(a_skew_is_the_load_of_rank_0)
{
    static const struct bench_shape few = {64, 32, 8, 2};

    ck_assert_double_eq_tol(load_of_rank_0(&dsv3, 8, 0), 1, 0.05);
    ck_assert_double_eq_tol(load_of_rank_0(&dsv3, 8, 1), 1, 0.05);
    ck_assert_double_eq_tol(load_of_rank_0(&dsv3, 8, 1.5), 1.5, 0.05);
    ck_assert_double_eq_tol(load_of_rank_0(&dsv3, 8, 2), 2, 0.05);
    ck_assert_double_eq_tol(load_of_rank_0(&few, 2, 1.5), 1.5, 0.05);
    ck_assert_double_eq_tol(load_of_rank_0(&few, 8, 4), 4, NEAR);
}
END_TEST

START_TEST(a_skew_has_an_end)
{
    static const struct bench_shape one_each = {64, 32, 8, 8};

    ck_assert_double_eq_tol(bench_skew_max(&dsv3, 8), 8, NEAR);
    ck_assert_double_eq_tol(bench_skew_max(&one_each, 8), 1, NEAR);
    ck_assert_double_eq_tol(load_of_rank_0(&one_each, 8, 2), 1, NEAR);
    // Every rank has an expert more than its share where they cannot be shared evenly.
    ck_assert_int_eq(bench_experts_first(10, 4, 1), 3);
    ck_assert_int_eq(bench_experts_first(10, 4, 4), 10);
}
END_TEST

START_TEST(shapes_of_whole_layers_have_names)
{
    struct bench_shape shape;

    ck_assert_ptr_null(bench_shape_parse(&shape, "dsv3"));
    ck_assert_mem_eq(&shape, &dsv3, sizeof shape);
    ck_assert_ptr_null(bench_shape_parse(&shape, "h4096e256"));
    ck_assert_int_eq(shape.hidden, 4096);
    ck_assert_int_eq(shape.intermediate, 2048);
    ck_assert_int_eq(shape.experts, 256);
    ck_assert_int_eq(shape.top_k, 6);
    for (int op = BENCH_LAYER; op <= BENCH_BOTH; op++)
        ck_assert_int_eq(bench_op_parse(bench_op_word(op)), op);
    ck_assert_int_eq(bench_op_parse("all"), -1);
}
END_TEST

// ---- Bytes and floors --------------------------------------------------------------------------

START_TEST(a_row_has_scales_ids_and_weights)
{
    const struct wire_rows plain = wire_rows_of(&dsv3, MOXIE_FORMAT_BF16, "input");
    const struct wire_rows fp8 = wire_rows_of(&dsv3, MOXIE_FORMAT_BF16, "fp8_block128");
    const struct wire_rows nvfp4 = wire_rows_of(&dsv3, MOXIE_FORMAT_BF16, "nvfp4");

    ck_assert_uint_eq(plain.dispatch_bytes, 7168 * 2 + 64);
    ck_assert_uint_eq(plain.result_bytes, 7168 * 2);
    ck_assert_uint_eq(fp8.dispatch_bytes, 7168 + 56 * 4 + 64);
    ck_assert_uint_eq(nvfp4.dispatch_bytes, 3584 + 4 + 448 + 64);
    ck_assert_double_eq(wire_bytes(&fp8, BENCH_DISPATCH, 10, 1), 10.0 * 7456);
    ck_assert_double_eq(wire_bytes(&fp8, BENCH_COMBINE, 10, 1), 14336);
    ck_assert_double_eq(wire_bytes(&fp8, BENCH_BOTH, 10, 1), 10.0 * 7456 + 14336);
    ck_assert_double_eq(wire_bytes(&fp8, BENCH_LAYER, 10, 1), 10.0 * 7456 + 14336);
}
END_TEST

// Of a run over 2 ranks on GPUs, of which rank 0 has the experts 0..3.
static struct bench_run run_of(const struct bench_options *options)
{
    return (struct bench_run){
        .options = options,
        .forwards = BENCH_FORWARDS,
        .anchors = {4.5e12, 790e12},
        .row = {1000, 700},
    };
}

static void fill(struct bench_run *run, const char *samples)
{
    struct fault fault = {.text = ""};
    json_t *read = json_loads(samples, 0, NULL);

    ck_assert_msg(bench_fill_cell(run, 0, read, &fault) == EXIT_OK, "%s", fault.text);
    json_decref(read);
}

// 35 rows of 1000 bytes that leave a rank, 50 results of 700: 0.1 us each at 350 GB/s.
#define SAMPLE(time) "[" time ", 2.0, 17.5, 35.0, 50.0, 0.5]"

START_TEST(what_the_wire_allows)
{
    const struct bench_options options = {.rank = {.ranks = 2},
                                          .shape = {64, 32, 8, 2},
                                          .format = MOXIE_FORMAT_BF16,
                                          .row_format = MOXIE_FORMAT_BF16,
                                          .cells = 1,
                                          .tokens = {10},
                                          .op = BENCH_BOTH};
    struct bench_run run = run_of(&options);
    const struct cell *cell = &run.cells[0];

    fill(&run, "[" SAMPLE("3.0") ", " SAMPLE("1.0") ", " SAMPLE("2.0") "]");
    ck_assert_int_eq(cell->repetitions, 3);
    ck_assert_double_eq_tol(cell->median_us, 2, NEAR);
    ck_assert_double_eq_tol(cell->p10_us, 1, NEAR);
    ck_assert_double_eq_tol(cell->p90_us, 3, NEAR);
    ck_assert_double_eq_tol(cell->spread_us, 2, NEAR);
    ck_assert_double_eq_tol(cell->event_us, 0.5, NEAR);
    ck_assert_double_eq_tol(cell->wire_floor_us, 0.1 + 0.1, NEAR);
    ck_assert_double_eq_tol(cell->floor_us, 0.2, NEAR);
    ck_assert_double_eq_tol(cell->share, 0.1, NEAR);
    ck_assert_double_eq_tol(cell->wire_gb_per_s, 17.5 * 1700 / 2 * 1e-3, NEAR);
    ck_assert_double_eq_tol(cell->logical_gb_per_s, 20 * 1700 / 2 * 1e-3, NEAR);
    ck_assert_double_eq_tol(cell->sent_most, 35, NEAR);
    ck_assert_double_eq_tol(cell->came_most, 50, NEAR);
}
END_TEST

// Every token goes to every expert, so that the floor does not depend on the draw.
START_TEST(a_layer_waits_for_its_fullest_rank)
{
    const struct bench_options options = {.rank = {.ranks = 3},
                                          .shape = {64, 32, 8, 8},
                                          .format = MOXIE_FORMAT_BF16,
                                          .row_format = MOXIE_FORMAT_BF16,
                                          .cells = 1,
                                          .tokens = {10}};
    struct bench_run run = run_of(&options);
    const struct cell *cell = &run.cells[0];
    double expert_bytes = 3 * 64 * 32 * 2;

    fill(&run, "[" SAMPLE("1.0") "]");
    ck_assert_double_eq_tol(cell->floor_us, 1e6 * 3 * expert_bytes / 4.5e12 + 0.2, NEAR);
    ck_assert_double_eq_tol(cell->touched_bytes, BENCH_FORWARDS * 3 * expert_bytes, NEAR);
    // On one machine's memory all experts count, and no wire of ours.
    run.forwards = 1;
    fill(&run, "[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0]]");
    ck_assert_double_eq_tol(cell->floor_us, 1e6 * 8 * expert_bytes / 4.5e12, NEAR);
}
END_TEST

START_TEST(collectives_are_summed_up)
{
    const struct bench_options options = {.rank = {.ranks = 2}};
    struct bench_run run = run_of(&options);
    struct fault fault = {.text = ""};
    json_t *found = json_loads(
        "{\"all\": {\"samples\": [[4.0, 1.0], [2.0, 3.0], [3.0, 2.0]], \"bytes\": 6000.0}}", 0,
        NULL);
    const struct collective_times *times = &run.cells[0].collectives[0];

    ck_assert_int_eq(bench_fill_collectives(&run, 0, NULL, &fault), EXIT_OK);
    ck_assert_int_eq(run.cells[0].collectives_count, 0);
    ck_assert_int_eq(bench_fill_collectives(&run, 0, found, &fault), EXIT_OK);
    ck_assert_int_eq(run.cells[0].collectives_count, 1);
    ck_assert_str_eq(times->name, "all");
    ck_assert_double_eq_tol(times->median_us, 3, NEAR);
    ck_assert_double_eq_tol(times->spread_us, 2, NEAR);
    ck_assert_double_eq_tol(times->bytes, 6000, NEAR);
    ck_assert_int_eq(times->replays, 3);
    json_decref(found);
}
END_TEST

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, a_skew_is_the_load_of_rank_0);
    tcase_add_test(tests, a_skew_has_an_end);
    tcase_add_test(tests, shapes_of_whole_layers_have_names);
    tcase_add_test(tests, a_row_has_scales_ids_and_weights);
    tcase_add_test(tests, what_the_wire_allows);
    tcase_add_test(tests, a_layer_waits_for_its_fullest_rank);
    tcase_add_test(tests, collectives_are_summed_up);
}

SUITE_MAIN("cli_bench_numbers", 60, add_tests)
