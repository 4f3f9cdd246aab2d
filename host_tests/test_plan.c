// plugin/plan.c: limits, the layout of a window, and every byte of every buffer.

#include "plugin/plan.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"
#include "kernels/cpu/cpu.h"
#include "kernels/types.h"
#include "plugin/transport.h"

#include <string.h>

static void init_ranks(struct mock_host *mock, int64_t ranks)
{
    mock_host_init(mock);
    mock_set_ranks(mock, ranks);
}

static const moxie_buffer *buffer_of(const struct plan *plan, enum buffer_id id)
{
    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        if (plan->buffer_ids[i] == (int32_t)id) return &plan->buffers[i];
    }
    return NULL;
}

static void assert_bytes(const struct plan *plan, enum buffer_id id, int32_t kind, int64_t bytes)
{
    const moxie_buffer *buffer = buffer_of(plan, id);

    ck_assert_ptr_nonnull(buffer);
    ck_assert_int_eq(buffer->kind, kind);
    ck_assert_msg(buffer->bytes == (uint64_t)bytes, "%s: %ju", buffer->name,
                  (uintmax_t)buffer->bytes);
    ck_assert_uint_eq(buffer->align & (buffer->align - 1), 0);
    ck_assert_uint_ge(buffer->align, 128);
    ck_assert_uint_gt(strlen(buffer->why), 10);
}

// The sums are of what is listed.
static void assert_totals(const struct plan *plan)
{
    uint64_t totals[5] = {0};

    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        ck_assert_uint_ge(plan->buffers[i].bytes_mapped, plan->buffers[i].bytes);
        totals[plan->buffers[i].kind] += plan->buffers[i].bytes_mapped;
    }
    ck_assert_uint_eq(plan->device_bytes, totals[MOXIE_MEMORY_DEVICE]);
    ck_assert_uint_eq(plan->symmetric_bytes, totals[MOXIE_MEMORY_SYMMETRIC]);
    ck_assert_uint_eq(plan->pinned_bytes, totals[MOXIE_MEMORY_PINNED]);
    ck_assert_uint_eq(plan->host_bytes, totals[MOXIE_MEMORY_HOST]);
}

START_TEST(one_rank)
{
    struct mock_host mock;
    struct verdict verdict;
    const struct plan *plan = &verdict.plan;

    mock_host_init(&mock); // hidden 64, intermediate 96, 8 experts, top_k 2
    mock_set_i64(&mock, "max_prefill_tokens", 100);
    mock_set_i64(&mock, "intermediate_size", 100); // 400 bytes, pitched to 512
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(plan->limits.dispatcher, DISPATCHER_LOCAL);
    ck_assert_int_eq(plan->limits.tokens_max, 100);
    ck_assert_int_eq(plan->limits.forward_tokens_max, 100);
    ck_assert_int_eq(plan->limits.rows_max, 100);
    ck_assert_int_eq(plan->limits.pairs_max, 200);
    ck_assert_int_eq(plan->limits.experts_local, 8);
    assert_bytes(plan, BUFFER_EXPERT_OFFSET, MOXIE_MEMORY_DEVICE, (8 + 1) * 4);
    assert_bytes(plan, BUFFER_PAIR_ROW, MOXIE_MEMORY_DEVICE, 200 * 4);
    assert_bytes(plan, BUFFER_PAIR_WEIGHT, MOXIE_MEMORY_DEVICE, 200 * 4);
    assert_bytes(plan, BUFFER_ROW_PAIR, MOXIE_MEMORY_DEVICE, 200 * 4);
    assert_bytes(plan, BUFFER_MID, MOXIE_MEMORY_DEVICE, 200 * 512);
    assert_bytes(plan, BUFFER_PAIR_OUT, MOXIE_MEMORY_DEVICE, 200 * 256);
    assert_bytes(plan, BUFFER_CPU_SCRATCH, MOXIE_MEMORY_HOST, 4 * (int64_t)CPU_SCRATCH_BYTES);
    ck_assert_int_eq(plan->slot_bytes[BUFFER_CPU_SCRATCH], (int64_t)CPU_SCRATCH_BYTES);
    ck_assert_ptr_null(buffer_of(plan, BUFFER_SEND_SLOT));
    ck_assert_ptr_null(buffer_of(plan, BUFFER_WINDOW));
    ck_assert_ptr_null(buffer_of(plan, BUFFER_CAPTURE));
    ck_assert_int_eq(plan->slot_bytes[BUFFER_WINDOW], 0);
    assert_totals(plan);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(slots_have_pieces_of_their_own)
{
    struct mock_host mock;
    struct verdict verdict;
    const struct plan *plan = &verdict.plan;
    uint64_t mapped = 0;

    init_ranks(&mock, 2);
    mock_set_i64(&mock, "warmup_tokens_max", 33);
    mock_set_i64(&mock, "forwards_in_flight_max", 3);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(plan->limits.slots, 3);
    // 2 ranks x 33 rows x top_k 2 = 132 pairs: 528 bytes, 640 aligned.
    ck_assert_int_eq(plan->slot_bytes[BUFFER_PAIR_ROW], 640);
    assert_bytes(plan, BUFFER_PAIR_ROW, MOXIE_MEMORY_DEVICE, 3 * 640);
    // 33 tokens x 2 ranks
    ck_assert_int_eq(plan->slot_bytes[BUFFER_SEND_SLOT], 384);
    assert_bytes(plan, BUFFER_SEND_SLOT, MOXIE_MEMORY_DEVICE, 3 * 384);
    assert_bytes(plan, BUFFER_WINDOW, MOXIE_MEMORY_SYMMETRIC, 3 * plan->window.bytes);
    ck_assert_int_eq(plan->slot_bytes[BUFFER_WINDOW], plan->window.bytes);
    // What is mapped is what the plan says, whatever the machine's pages.
    ck_assert_int_eq(transport_window_bytes((uint64_t)plan->window.bytes, 2, &mapped, NULL),
                     MOXIE_OK);
    ck_assert_uint_eq(mapped, ((uint64_t)plan->window.bytes + 65535) / 65536 * 65536);
    ck_assert_uint_eq(buffer_of(plan, BUFFER_WINDOW)->bytes_mapped, 3 * mapped);
    assert_totals(plan);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(dispatchers_have_shapes)
{
    static const struct {
        const char *dispatcher;
        int64_t tokens, forward, cap, rows;
    } shapes[] = {{"local", 12, 12, 12, 12},  // all tokens of both DP ranks, padded to attn_tp 2
                  {"allgather", 3, 3, 3, 12}, // one round
                  {"alltoall", 2, 3, 2, 8}};  // two rounds
    struct mock_host mock;
    struct verdict verdict;

    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        init_ranks(&mock, 4);
        mock_set_i64(&mock, "dp_size", 2);
        mock_set_i64(&mock, "forward_tokens_max", 5);
        mock_set_i64(&mock, "dispatch_rounds_max", 2);
        mock_set_str(&mock, "dispatcher", shapes[i].dispatcher);
        verdict_make(&verdict, &mock);
        ck_assert_int_eq(verdict.plan.limits.tokens_max, shapes[i].tokens);
        ck_assert_int_eq(verdict.plan.limits.forward_tokens_max, shapes[i].forward);
        ck_assert_int_eq(verdict.plan.limits.rows_cap, shapes[i].cap);
        ck_assert_int_eq(verdict.plan.limits.rows_max, shapes[i].rows);
        ck_assert_int_eq(verdict.plan.limits.pairs_max, 2 * shapes[i].rows);
        ck_assert_int_eq(plan_rows_max(&verdict.config, &verdict.bounds), shapes[i].rows);
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
}
END_TEST

// Sections in order, aligned, apart, and nothing past the end.
static void assert_layout(const struct plan *plan)
{
    const struct window_layout *window = &plan->window;
    const struct limits *limits = &plan->limits;
    int64_t slabs = limits->ranks - 1;

    ck_assert_int_ge(window->counts, TRANSPORT_CONTROL_BYTES(limits->ranks));
    ck_assert_int_eq(window->counts % 64, 0);
    ck_assert_int_ge(window->rows, window->counts + slabs * 64);
    ck_assert_int_eq(window->scales, window->rows + slabs * window->rows_slab_bytes);
    ck_assert_int_eq(window->ids, window->scales + slabs * window->scales_slab_bytes);
    ck_assert_int_eq(window->weights, window->ids + slabs * window->ids_slab_bytes);
    ck_assert_int_eq(window->results, window->weights + slabs * window->weights_slab_bytes);
    ck_assert_int_eq(window->ll, window->results + slabs * window->results_slab_bytes);
    ck_assert_int_eq(window->ll_results, window->ll + slabs * window->ll_slab_bytes);
    ck_assert_int_eq(window->bytes, window->ll_results + slabs * window->ll_results_slab_bytes);
    ck_assert_int_eq(
        (window->rows | window->scales | window->ids | window->weights | window->results) % 128, 0);
    ck_assert_int_eq(
        (window->rows_slab_bytes | window->scales_slab_bytes | window->ids_slab_bytes) % 128, 0);
    ck_assert_int_eq((window->weights_slab_bytes | window->results_slab_bytes) % 128, 0);
    ck_assert_int_ge(window->rows_slab_bytes, limits->rows_cap * limits->row_bytes);
    ck_assert_int_ge(window->scales_slab_bytes, limits->rows_cap * limits->scale_bytes);
    ck_assert_int_ge(window->ids_slab_bytes, limits->rows_cap * limits->top_k * 4);
    ck_assert_int_ge(window->weights_slab_bytes, limits->rows_cap * limits->top_k * 4);
    ck_assert_int_ge(window->results_slab_bytes, limits->rows_cap * limits->result_bytes);
}

START_TEST(windows_are_laid_out)
{
    static const struct {
        const char *input, *dispatch, *output;
        int64_t row, scale, result;
        int32_t wire;
    } rows[] = {
        {"bf16", "input", "bf16", 512, 0, 512, FORMAT_BF16},                 // 400 bytes
        {"f16", "input", "f32", 512, 0, 896, FORMAT_F16},                    // 800
        {"f32", "input", "f16", 896, 0, 512, FORMAT_F32},                    //
        {"bf16", "fp8_block128", "bf16", 256, 16, 512, FORMAT_FP8_BLOCK128}, // 200, 2 scales
        {"bf16", "nvfp4", "bf16", 128, 32, 512, FORMAT_NVFP4}};              // 104, 4 + 13 bytes
    struct mock_host mock;
    struct verdict verdict;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        init_ranks(&mock, 3);
        mock_set_i64(&mock, "hidden_size", rows[i].wire == FORMAT_NVFP4 ? 208 : 200);
        mock_set_i64(&mock, "warmup_tokens_max", 7);
        mock_set_str(&mock, "input_format", rows[i].input);
        mock_set_str(&mock, "dispatch_format", rows[i].dispatch);
        mock_set_str(&mock, "output_format", rows[i].output);
        verdict_make(&verdict, &mock);
        ck_assert_uint_eq(verdict.report.reasons_count, 0);
        ck_assert_int_eq(verdict.plan.limits.wire_format, rows[i].wire);
        ck_assert_int_eq(verdict.plan.limits.row_bytes, rows[i].row);
        ck_assert_int_eq(verdict.plan.limits.scale_bytes, rows[i].scale);
        ck_assert_int_eq(verdict.plan.limits.result_bytes, rows[i].result);
        ck_assert_int_eq(verdict.plan.limits.id_bytes, 8);
        ck_assert_int_eq(verdict.plan.limits.weight_bytes, 8);
        assert_layout(&verdict.plan);
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
}
END_TEST

// FlashInfer's one-sided all-to-all takes 942,342,528 bytes for this; seven slabs of rows are the
// floor.
START_TEST(the_ceiling_of_eight_ranks)
{
    struct mock_host mock;
    struct verdict verdict;
    uint64_t floor_bytes = (uint64_t)7 * 4096 * 14336 * 2;

    init_ranks(&mock, 8);
    mock_set_i64(&mock, "forward_tokens_max", 4096);
    mock_set_i64(&mock, "hidden_size", 7168);
    mock_set_i64(&mock, "intermediate_size", 2048);
    mock_set_i64(&mock, "num_experts", 256);
    mock_set_i64(&mock, "top_k", 8);
    mock_set_str(&mock, "dispatcher", "alltoall");
    verdict_make(&verdict, &mock);
    ck_assert_uint_gt(verdict.plan.symmetric_bytes, floor_bytes);
    ck_assert_uint_lt(verdict.plan.symmetric_bytes, 942342528);
    ck_assert_uint_lt(verdict.plan.symmetric_bytes,
                      floor_bytes + (3 << 20)); // ids, weights, control
    assert_layout(&verdict.plan);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(a_group_of_one_keeps_a_window)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_str(&mock, "dispatcher", "alltoall");
    mock_set_str(&mock, "dispatch_format", "nvfp4"); // no row travels: the input's format stays
    verdict_make(&verdict, &mock);
    ck_assert_int_ge(verdict.plan.window.bytes, TRANSPORT_CONTROL_BYTES(1));
    ck_assert_int_eq(verdict.plan.window.rows, verdict.plan.window.bytes);
    ck_assert_int_eq(verdict.plan.limits.wire_format, FORMAT_BF16);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(the_capture_is_exact)
{
    struct mock_host mock;
    struct verdict verdict;

    init_ranks(&mock, 8);
    mock_set_i64(&mock, "num_layers", 61);
    mock_set_i64(&mock, "top_k", 7);
    mock_set_i64(&mock, "forward_tokens_max", 13);
    mock_set_i64(&mock, "forwards_in_flight_max", 2);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.capture_rows, 8 * 13);
    ck_assert_int_eq(verdict.plan.limits.capture_tokens, 13);
    assert_bytes(&verdict.plan, BUFFER_CAPTURE, MOXIE_MEMORY_DEVICE, (int64_t)8 * 13 * 61 * 7 * 4);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// Thirteen tokens of a DP rank are four rows of each of its four ranks, where each pads its own
// share: a slice holds all sixteen.
START_TEST(the_capture_has_room_for_padding)
{
    struct mock_host mock;
    struct verdict verdict;

    init_ranks(&mock, 8);
    mock_set_i64(&mock, "dp_size", 2);
    mock_set_i64(&mock, "num_layers", 3);
    mock_set_i64(&mock, "top_k", 7);
    mock_set_i64(&mock, "forward_tokens_max", 13);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.capture_rows, 2 * 13);
    ck_assert_int_eq(verdict.plan.limits.capture_tokens, 16);
    assert_bytes(&verdict.plan, BUFFER_CAPTURE, MOXIE_MEMORY_DEVICE, (int64_t)2 * 16 * 3 * 7 * 4);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(uneven_experts)
{
    static const int64_t first[] = {0, 4, 7, 10};
    static const int32_t own[] = {4, 3, 3, 3};
    struct mock_host mock;
    struct verdict verdict;

    for (int64_t rank = 0; rank < 4; rank++) {
        init_ranks(&mock, 4);
        mock_set_i64(&mock, "ep_rank", rank);
        mock_set_i64(&mock, "num_redundant_experts", 4);
        mock_set_i64(&mock, "num_fused_shared_experts", 1);
        verdict_make(&verdict, &mock);
        ck_assert_int_eq(verdict.plan.limits.physical_experts, 13);
        ck_assert_int_eq(verdict.plan.limits.experts_first, first[rank]);
        ck_assert_int_eq(verdict.plan.limits.experts_local, own[rank]);
        assert_bytes(&verdict.plan, BUFFER_EXPERT_OFFSET, MOXIE_MEMORY_DEVICE, (own[rank] + 1) * 4);
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
}
END_TEST

// Buffers past 2^62 bytes are a reason that names the key and both numbers, and leave nothing.
START_TEST(overflow_is_a_reason)
{
    static const char *const keys[] = {"intermediate_size", "hidden_size"};
    struct mock_host mock;
    struct verdict verdict;

    for (int32_t i = 0; i < 2; i++) {
        mock_host_init(&mock);
        mock_set_i64(&mock, "warmup_tokens_max", 1 << 29);
        mock_set_i64(&mock, keys[i], INT32_MAX);
        assert_refused(&mock, MOXIE_E_CAPACITY, keys[i],
                       "1073741824 rows of 8589934592 bytes pass 2^62");
        ck_assert_int_eq(assert_advice_works(&mock, keys[i]), 1);
        verdict_make(&verdict, &mock);
        ck_assert_uint_eq(verdict.plan.buffers_count, 0);
        ck_assert_uint_eq(verdict.plan.device_bytes, 0);
        ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_PAIR_ROW], 0);
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
    // All at once, and each key once: a window's rows are the columns of pair_out's again.
    init_ranks(&mock, 4);
    mock_set_i64(&mock, "warmup_tokens_max", 1 << 27);
    for (int32_t i = 0; i < 2; i++)
        mock_set_i64(&mock, keys[i], INT32_MAX);
    assert_refused(&mock, MOXIE_E_CAPACITY, keys[0], "mid: ");
    assert_refused(&mock, MOXIE_E_CAPACITY, keys[1], "pair_out: ");
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 2);
    ck_assert_uint_eq(verdict.plan.buffers_count, 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
    mock_host_init(&mock);
    mock_set_i64(&mock, "warmup_tokens_max", 1 << 29);
    mock_set_i64(&mock, "num_layers", INT32_MAX);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    assert_refused(&mock, MOXIE_E_CAPACITY, "num_layers", "capture");
    ck_assert_int_eq(assert_advice_works(&mock, "num_layers"), 1);
    mock_host_fini(&mock);
    init_ranks(&mock, 64);
    mock_set_i64(&mock, "top_k", 1);
    mock_set_i64(&mock, "forwards_in_flight_max", 4);
    mock_set_i64(&mock, "warmup_tokens_max", 1 << 24);
    mock_set_i64(&mock, "hidden_size", 200000000);
    mock_set_str(&mock, "input_format", "f32");
    mock_set_str(&mock, "output_format", "f32"); // pair_out fits, rows and results do not
    assert_refused(&mock, MOXIE_E_CAPACITY, "hidden_size", "window");
    ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 1);
    mock_host_fini(&mock);
}
END_TEST

// No buffer passes 2^62 bytes, and all of them do.
START_TEST(a_sum_past_2_62_is_a_reason)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "warmup_tokens_max", 1 << 28);
    mock_set_i64(&mock, "intermediate_size", 1 << 30);
    assert_accepted(&mock);
    mock_set_i64(&mock, "hidden_size", 1 << 30);
    assert_refused(&mock, MOXIE_E_CAPACITY, "hidden_size", "pair_out: 1 x 536870912 rows");
    ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 1);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(limits_carry_the_numbers)
{
    struct mock_host mock;
    struct verdict verdict;
    const struct limits *limits = &verdict.plan.limits;

    mock_host_init(&mock);
    mock_set_str(&mock, "activation", "swigluoai");
    mock_set_f64(&mock, "activation_limit", 7.0);
    mock_set_f64(&mock, "routed_scaling_factor", 2.5);
    mock_set_i64(&mock, "top_k", 1);
    mock_set_i64(&mock, "apply_router_weight_on_input", 1);
    mock_set_str(&mock, "weight_format", "mxfp4");
    mock_set_str(&mock, "output_format", "f32");
    mock_set_i64(&mock, "num_layers", 3);
    mock_set_i64(&mock, "cpu_threads", 7);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    ck_assert_int_eq(limits->activation, ACTIVATION_SWIGLUOAI);
    ck_assert(limits->alpha == 1.702f && limits->beta == 1.0f && limits->limit == 7.0f);
    ck_assert(limits->scaling_factor == 2.5f);
    ck_assert_int_eq(limits->weight_on_input, 1);
    ck_assert_int_eq(limits->weight_format, FORMAT_MXFP4);
    ck_assert_int_eq(limits->operand_format, FORMAT_F32);
    ck_assert_int_eq(limits->input_format, FORMAT_BF16);
    ck_assert_int_eq(limits->output_format, FORMAT_F32);
    ck_assert_int_eq(limits->hidden, 64);
    ck_assert_int_eq(limits->intermediate, 96);
    ck_assert_int_eq(limits->layers, 3);
    ck_assert_int_eq(limits->threads, 7);
    ck_assert_int_eq(limits->timeout_ms, 30000);
    ck_assert_int_eq(limits->capture, 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// NCCL sends from memory of its own, laid out as a window; nobody else needs it.
START_TEST(what_nccl_sends_is_staged)
{
    static const char *const transports[] = {"auto", "nvlink", "nccl"};
    struct verdict verdict;
    struct mock_host mock;

    for (int32_t i = 0; i < 3; i++) {
        int32_t staged = i == 2;

        init_ranks(&mock, 4);
        mock_set_str(&mock, "device", "sm_90");
        mock_set_str(&mock, "transport", transports[i]);
        mock_set_i64(&mock, "forwards_in_flight_max", 2);
        verdict_make(&verdict, &mock);
        ck_assert_uint_eq(verdict.report.reasons_count, 0);
        ck_assert_int_eq(verdict.plan.limits.staged, staged);
        assert_bytes(&verdict.plan, BUFFER_WINDOW, MOXIE_MEMORY_SYMMETRIC,
                     2 * verdict.plan.window.bytes);
        assert_bytes(
            &verdict.plan, BUFFER_REPORT, MOXIE_MEMORY_PINNED,
            (int64_t)(sizeof(struct flag_report) + (staged ? sizeof(struct flag_state) : 0)));
        if (staged)
            assert_bytes(&verdict.plan, BUFFER_STAGING, MOXIE_MEMORY_DEVICE,
                         2 * verdict.plan.window.bytes);
        else
            ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_STAGING], 0);
        assert_totals(&verdict.plan);
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
    // One rank sends nothing.
    init_ranks(&mock, 1);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "dispatcher", "alltoall");
    mock_set_str(&mock, "transport", "nccl");
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    ck_assert_int_eq(verdict.plan.limits.staged, 0);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_STAGING], 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, one_rank);
    tcase_add_test(tests, slots_have_pieces_of_their_own);
    tcase_add_test(tests, dispatchers_have_shapes);
    tcase_add_test(tests, windows_are_laid_out);
    tcase_add_test(tests, the_ceiling_of_eight_ranks);
    tcase_add_test(tests, a_group_of_one_keeps_a_window);
    tcase_add_test(tests, the_capture_is_exact);
    tcase_add_test(tests, the_capture_has_room_for_padding);
    tcase_add_test(tests, uneven_experts);
    tcase_add_test(tests, overflow_is_a_reason);
    tcase_add_test(tests, a_sum_past_2_62_is_a_reason);
    tcase_add_test(tests, limits_carry_the_numbers);
    tcase_add_test(tests, what_nccl_sends_is_staged);
}

SUITE_MAIN("plan", 60, add)
