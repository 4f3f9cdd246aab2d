// plugin/capture.c: what every layer chose, in the slice of its DP rank, and "no expert" for the
// rest.

#include "plugin/capture.h"

#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/instance.h"
#include "plugin/tensor.h"

#include <string.h>

#define DP      3
#define SLICE   4 // tokens of one DP rank
#define LAYERS  2
#define TOP_K   3
#define EXPERTS 8
#define ROW     (LAYERS * TOP_K)

struct sample {
    struct mock_host mock;
    moxie_instance *instance;
    struct said said;
};

static void sample_init(struct sample *s, int32_t capture)
{
    static const struct registry none;

    memset(s, 0, sizeof *s);
    said_init(&s->said);
    mock_host_init(&s->mock);
    mock_set_i64(&s->mock, "dp_size", DP);
    mock_set_i64(&s->mock, "tp_size", DP);
    mock_set_i64(&s->mock, "forward_tokens_max", SLICE);
    mock_set_i64(&s->mock, "num_layers", LAYERS);
    mock_set_i64(&s->mock, "num_experts", EXPERTS - 1);
    mock_set_i64(&s->mock, "num_redundant_experts", 1);
    mock_set_i64(&s->mock, "top_k", TOP_K);
    mock_set_i64(&s->mock, "capture_routed_experts", capture);
    ck_assert_int_eq(instance_open(&s->mock.host, &none, &s->instance, &s->mock.error), MOXIE_OK);
    ACCEPTED(&s->said, instance_accepted(s->instance, &s->said.error));
    ACCEPTED(&s->said, instance_take(s->instance, 1u << BUFFER_CAPTURE, &s->said.error));
}

static void sample_fini(struct sample *s)
{
    instance_drop(s->instance, 1u << BUFFER_CAPTURE);
    ck_assert_int_eq(instance_close(s->instance, &s->mock.error), MOXIE_OK);
    mock_host_fini(&s->mock);
}

static const int32_t *view(struct sample *s, int32_t dp_rank)
{
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = dp_rank};

    ACCEPTED(&s->said, instance_captured(s->instance, &captured, &s->said.error));
    ck_assert_int_eq(captured.ids.ndim, 3);
    ck_assert_int_eq(captured.ids.shape[0], SLICE);
    ck_assert_int_eq(captured.ids.shape[1], LAYERS);
    ck_assert_int_eq(captured.ids.shape[2], TOP_K);
    ck_assert_int_eq(tensor_stride_bytes(&captured.ids, 0), ROW * 4);
    ck_assert_int_eq(tensor_stride_bytes(&captured.ids, 1), TOP_K * 4);
    ck_assert_int_eq(captured.ids.dtype.code, MOXIE_DTYPE_INT);
    ck_assert_int_eq(captured.ids.dtype.bits, 32);
    return (const int32_t *)(const void *)tensor_data(&captured.ids);
}

// Compares all rows of all slices; those not given are -1.
static void check_all(struct sample *s, int64_t row, int32_t layer, const int32_t *want,
                      int32_t tokens)
{
    for (int64_t at = 0; at < DP * SLICE * ROW; at++) {
        int64_t token = at / ROW - row;
        int32_t expected = -1;

        if (token >= 0 && token < tokens && at / TOP_K % LAYERS == layer)
            expected = want[token * TOP_K + at % TOP_K];
        ck_assert_msg(view(s, (int32_t)(at / ROW / SLICE))[at % (SLICE * ROW)] == expected,
                      "entry %d is not %d", (int)at, expected);
    }
}

START_TEST(slices_follow_each_other)
{
    struct sample s;

    sample_init(&s, 1);
    ck_assert_ptr_eq(view(&s, 1), view(&s, 0) + SLICE * ROW);
    ck_assert_ptr_eq(view(&s, 2), view(&s, 0) + 2 * SLICE * ROW);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    check_all(&s, 0, 0, NULL, 0);
    sample_fini(&s);
}
END_TEST

// A slice has room for the rows that its ranks pad with, between those of their tokens: hosts see
// all, of the DP rank whose tokens are recorded here, and nothing of others.
START_TEST(a_slice_shows_padded_rows)
{
    static const struct registry none;
    struct moxie_captured other = {.struct_size = sizeof other};
    struct sample s;

    memset(&s, 0, sizeof s);
    said_init(&s.said);
    mock_host_init(&s.mock);
    mock_set_i64(&s.mock, "dp_size", 2);
    mock_set_i64(&s.mock, "tp_size", 4);
    mock_set_i64(&s.mock, "ep_size", 4);
    mock_set_i64(&s.mock, "ep_rank", 2);
    mock_set_i64(&s.mock, "forward_tokens_max", SLICE - 1);
    mock_set_i64(&s.mock, "num_layers", LAYERS);
    mock_set_i64(&s.mock, "top_k", TOP_K);
    mock_set_i64(&s.mock, "capture_routed_experts", 1);
    ck_assert_int_eq(instance_open(&s.mock.host, &none, &s.instance, &s.mock.error), MOXIE_OK);
    ACCEPTED(&s.said, instance_accepted(s.instance, &s.said.error));
    ACCEPTED(&s.said, instance_take(s.instance, 1u << BUFFER_CAPTURE, &s.said.error));
    ck_assert_ptr_eq(view(&s, 1),
                     (int32_t *)memory_slot(&s.instance->memory, BUFFER_CAPTURE, 0) + SLICE * ROW);
    SAID(&s.said, MOXIE_E_UNAVAILABLE, instance_captured(s.instance, &other, &s.said.error),
         "captured: dp_rank 0", "tokens of 1 alone");
    sample_fini(&s);
}
END_TEST

START_TEST(ids_are_recorded)
{
    static const int32_t ids[] = {0, 7, 3, 2, 2, 5};
    struct capture_rows rows = {.ids = ids,
                                .id_stride_bytes = TOP_K * 4,
                                .id_bytes = 4,
                                .tokens = 2,
                                .row_first = SLICE + 2,
                                .layer = 1};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, SLICE + 2, 1, ids, 2);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    rows.row_first = DP * SLICE - 2; // the very last rows
    rows.layer = 0;
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, DP * SLICE - 2, 0, ids, 2);
    sample_fini(&s);
}
END_TEST

START_TEST(ids_out_of_range_are_no_expert)
{
    static const int32_t ids[] = {-1, EXPERTS, INT32_MAX, INT32_MIN, EXPERTS - 1, -5};
    static const int32_t want[] = {-1, -1, -1, -1, EXPERTS - 1, -1};
    struct capture_rows rows = {
        .ids = ids, .id_stride_bytes = TOP_K * 4, .id_bytes = 4, .tokens = 2};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, want, 2);
    sample_fini(&s);
}
END_TEST

// Rows with a gap, of wide ids whose low halves alone would be experts.
START_TEST(wide_ids_are_read_whole)
{
    static const int64_t ids[] = {((int64_t)1 << 32) + 1, 4, -1, 99, INT64_MAX, INT64_MIN, 6, 99};
    static const int32_t want[] = {-1, 4, -1, -1, -1, 6};
    struct capture_rows rows = {
        .ids = ids, .id_stride_bytes = 4 * 8, .id_bytes = 8, .tokens = 2, .row_first = 1};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 1, 0, want, 2);
    sample_fini(&s);
}
END_TEST

START_TEST(maps_are_followed)
{
    static const int32_t ids[] = {0, 1, 2, 3, -1, 4}, map[] = {7, 0, EXPERTS, -3};
    static const int32_t want[] = {7, 0, -1, -1, -1, -1};
    struct capture_rows rows = {.ids = ids,
                                .id_stride_bytes = TOP_K * 4,
                                .id_bytes = 4,
                                .tokens = 2,
                                .expert_map = map,
                                .map_count = 4};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, want, 2);
    sample_fini(&s);
}
END_TEST

START_TEST(padding_is_no_expert)
{
    static const int32_t ids[] = {0, 1, 2, 3, 4, 5, 6, 7, 0};
    static const int32_t want[] = {0, 1, 2, -1, -1, -1, -1, -1, -1};
    int32_t valid = 5;
    struct capture_rows rows = {.ids = ids,
                                .id_stride_bytes = TOP_K * 4,
                                .id_bytes = 4,
                                .tokens = 3,
                                .tokens_valid = &valid,
                                .token_first = 4}; // the second round of a step
    struct sample s;

    sample_init(&s, 1);
    memset(memory_slot(&s.instance->memory, BUFFER_CAPTURE, 0), 0xff, DP * SLICE * ROW * 4);
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, want, 3);
    valid = INT32_MIN;
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, NULL, 0);
    valid = INT32_MAX;
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, ids, 3);
    sample_fini(&s);
}
END_TEST

START_TEST(no_tokens_write_nothing)
{
    struct capture_rows rows = {.id_bytes = 4, .row_first = DP * SLICE};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, NULL, 0);
    sample_fini(&s);
}
END_TEST

static int32_t check_rows(struct sample *s, int64_t row, int64_t added, int64_t tokens)
{
    const struct capture_place place = {
        .row = row, .added = added, .tokens = tokens, .rows = SLICE, .listed = added == 1};

    return capture_check(s->instance, &place, &s->said.error);
}

START_TEST(rows_past_the_slice_are_refused)
{
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, check_rows(&s, 0, 0, SLICE));
    ACCEPTED(&s.said, check_rows(&s, SLICE, 0, 0));
    SAID(&s.said, MOXIE_E_CAPACITY, check_rows(&s, 1, 0, SLICE), "capture rows 1 to 5", "4 rows",
         "forward_tokens_max");
    SAID(&s.said, MOXIE_E_CAPACITY, check_rows(&s, SLICE + 1, 0, 0),
         "step.capture_row: 5: capture rows 5 to 5", "4 rows", "want step.capture_row at most 4");
    SAID(&s.said, MOXIE_E_CAPACITY, check_rows(&s, -1, 0, 1), "capture rows -1 to 0");
    // What the ranks before bring is not the host's to add.
    ACCEPTED(&s.said, check_rows(&s, 1, 1, 2));
    SAID(&s.said, MOXIE_E_CAPACITY, check_rows(&s, 2, 1, 2),
         "step.capture_row: 2, to which 1 of this DP rank's earlier ranks are added: capture rows "
         "3 to 5",
         "want step.capture_row at most 1");
    ck_assert_ptr_null(strstr(s.said.text, "step.rank_tokens"));
    SAID(&s.said, MOXIE_E_CAPACITY, check_rows(&s, 1, 2, 2),
         "to which 2 of this DP rank's earlier ranks are added, the most that they may have: ",
         "want step.capture_row at most 0, or step.rank_tokens, by which fewer are");
    sample_fini(&s);
}
END_TEST

START_TEST(views_are_refused_in_words)
{
    moxie_captured captured, before;
    struct sample s;

    memset(&captured, 0xa5, sizeof captured);
    captured.dp_rank = DP;
    before = captured;
    sample_init(&s, 1);
    SAID(&s.said, MOXIE_E_INVALID, instance_captured(s.instance, &captured, &s.said.error),
         "dp_rank 3", "0..2");
    ck_assert_mem_eq(&captured, &before, sizeof captured);
    captured.dp_rank = -1;
    SAID(&s.said, MOXIE_E_INVALID, instance_captured(s.instance, &captured, &s.said.error),
         "dp_rank -1", "0..2");
    captured.dp_rank = 0;
    instance_drop(s.instance, 1u << BUFFER_CAPTURE);
    SAID(&s.said, MOXIE_E_UNAVAILABLE, instance_captured(s.instance, &captured, &s.said.error),
         "no dispatcher");
    ACCEPTED(&s.said, instance_take(s.instance, 1u << BUFFER_CAPTURE, &s.said.error));
    sample_fini(&s);
}
END_TEST

// Local ids are recorded as the physical ones that they are.
START_TEST(local_ids_become_physical)
{
    static const int32_t ids[] = {0, 2, 3, -1, 1, EXPERTS};
    static const int32_t want[] = {4, 6, -1, -1, 5, -1};
    struct capture_rows rows = {
        .ids = ids, .id_stride_bytes = TOP_K * 4, .id_bytes = 4, .tokens = 2, .are_local = 1};
    struct sample s;

    sample_init(&s, 1);
    s.instance->plan.limits.experts_first = 4;
    s.instance->plan.limits.experts_local = 3;
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    check_all(&s, 0, 0, want, 2);
    sample_fini(&s);
}
END_TEST

START_TEST(another_dispatcher_keeps_what_was_recorded)
{
    static const int32_t ids[] = {0, 7, 3};
    struct capture_rows rows = {
        .ids = ids, .id_stride_bytes = TOP_K * 4, .id_bytes = 4, .tokens = 1};
    struct sample s;

    sample_init(&s, 1);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    ACCEPTED(&s.said, instance_take(s.instance, 1u << BUFFER_CAPTURE, &s.said.error));
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    check_all(&s, 0, 0, ids, 1);
    instance_drop(s.instance, 1u << BUFFER_CAPTURE);
    sample_fini(&s);
}
END_TEST

// Each of the two is there as long as who fills it.
START_TEST(one_of_both_is_given)
{
    moxie_captured captured = {.struct_size = sizeof captured};
    struct sample s;

    sample_init(&s, 1);
    s.instance->plan.limits.expert_load = 1;
    ACCEPTED(&s.said, instance_captured(s.instance, &captured, &s.said.error));
    ck_assert_ptr_nonnull(captured.ids.data);
    ck_assert_ptr_null(captured.load.data);
    instance_drop(s.instance, 1u << BUFFER_CAPTURE);
    SAID(&s.said, MOXIE_E_UNAVAILABLE, instance_captured(s.instance, &captured, &s.said.error),
         "no dispatcher or runner has been created yet");
    ACCEPTED(&s.said, instance_take(s.instance, 1u << BUFFER_EXPERT_LOAD, &s.said.error));
    ACCEPTED(&s.said, instance_captured(s.instance, &captured, &s.said.error));
    ck_assert_ptr_null(captured.ids.data);
    ck_assert_int_eq(captured.load.ndim, 2);
    instance_drop(s.instance, 1u << BUFFER_EXPERT_LOAD);
    ACCEPTED(&s.said, instance_take(s.instance, 1u << BUFFER_CAPTURE, &s.said.error));
    sample_fini(&s);
}
END_TEST

// As on a build without the device, on a rank that owns no expert.
START_TEST(load_without_a_runner_is_refused)
{
    moxie_captured captured = {.struct_size = sizeof captured};
    struct sample s;

    sample_init(&s, 0);
    s.instance->plan.limits.expert_load = 1;
    s.instance->plan.limits.experts_local = 0;
    s.instance->device = NULL;
    SAID(&s.said, MOXIE_E_UNAVAILABLE, instance_captured(s.instance, &captured, &s.said.error),
         "no runner");
    s.instance->device = &device_cpu;
    sample_fini(&s);
}
END_TEST

START_TEST(without_the_key_nothing_is_kept)
{
    static const int32_t ids[] = {0, 1, 2};
    struct capture_rows rows = {
        .ids = ids, .id_stride_bytes = TOP_K * 4, .id_bytes = 4, .tokens = 1};
    moxie_captured captured = {.struct_size = sizeof captured};
    struct sample s;

    sample_init(&s, 0);
    ck_assert_uint_eq(s.mock.allocate_calls, 0);
    ACCEPTED(&s.said, capture_clear(s.instance, &s.said.error));
    ACCEPTED(&s.said, capture_record(s.instance, &rows, &s.said.error));
    ACCEPTED(&s.said, check_rows(&s, 1000, 0, 1000));
    SAID(&s.said, MOXIE_E_UNAVAILABLE, instance_captured(s.instance, &captured, &s.said.error),
         "capture_routed_experts is 0", "set one of them to 1");
    sample_fini(&s);
}
END_TEST

// What the key says is not what is wrong with it.
START_TEST(a_refused_configuration_keeps_nothing)
{
    static const struct registry none;
    moxie_captured captured = {.struct_size = sizeof captured};
    struct mock_host mock;
    struct said said;
    moxie_instance *instance;

    said_init(&said);
    mock_host_init(&mock);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    mock_set_i64(&mock, "hidden_size", -4);
    ck_assert_int_eq(instance_open(&mock.host, &none, &instance, &mock.error), MOXIE_OK);
    SAID(&said, MOXIE_E_CONFIG, instance_captured(instance, &captured, &said.error),
         "refused for 1 reason", "hidden_size is -4");
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, slices_follow_each_other);
    tcase_add_test(tests, a_slice_shows_padded_rows);
    tcase_add_test(tests, ids_are_recorded);
    tcase_add_test(tests, ids_out_of_range_are_no_expert);
    tcase_add_test(tests, wide_ids_are_read_whole);
    tcase_add_test(tests, maps_are_followed);
    tcase_add_test(tests, padding_is_no_expert);
    tcase_add_test(tests, no_tokens_write_nothing);
    tcase_add_test(tests, rows_past_the_slice_are_refused);
    tcase_add_test(tests, views_are_refused_in_words);
    tcase_add_test(tests, local_ids_become_physical);
    tcase_add_test(tests, another_dispatcher_keeps_what_was_recorded);
    tcase_add_test(tests, one_of_both_is_given);
    tcase_add_test(tests, load_without_a_runner_is_refused);
    tcase_add_test(tests, without_the_key_nothing_is_kept);
    tcase_add_test(tests, a_refused_configuration_keeps_nothing);
}

SUITE_MAIN("capture", 20, add)
