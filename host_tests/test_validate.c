// plugin/validate.c: every refusal names the key and the number, and the number is accepted.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

#include <string.h>

// A host on ranks of which each is a DP rank.
static void init_ranks(struct mock_host *mock, int64_t ranks)
{
    mock_host_init(mock);
    mock_set_ranks(mock, ranks);
}

// ---- The dispatch cap --------------------------------------------------------------------------

static void cap_init(struct mock_host *mock)
{
    init_ranks(mock, 4);
    mock_set_i64(mock, "max_prefill_tokens", 16384);
    mock_set_i64(mock, "max_dispatch_tokens_per_rank", 4096);
}

START_TEST(cap_names_key)
{
    struct mock_host mock;

    cap_init(&mock);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_dispatch_tokens_per_rank", "dispatch_rounds_max");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(cap_names_number)
{
    struct mock_host mock;

    cap_init(&mock);
    assert_refused(
        &mock, MOXIE_E_CAPACITY, "max_dispatch_tokens_per_rank",
        "max_dispatch_tokens_per_rank 4096 x dispatch_rounds_max 1 is below dispatch_required "
        "16384, the "
        "tokens that one rank may bring (forward_tokens = 16384: max_prefill_tokens 16384): set "
        "max_dispatch_tokens_per_rank to 16384, or dispatch_rounds_max to 4");
    mock_set_i64(&mock, "dispatch_rounds_max", 3);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_dispatch_tokens_per_rank",
                   "set max_dispatch_tokens_per_rank to 5462, or dispatch_rounds_max to 4");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(cap_number_is_accepted)
{
    struct mock_host mock;

    cap_init(&mock);
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 2);
    mock_set_i64(&mock, "dispatch_rounds_max", 3);
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 2);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 5461);
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 2);
    mock_host_fini(&mock);
}
END_TEST

// A cap that such a forward wants would be refused as well.
START_TEST(cap_of_a_forward_that_cannot_be_counted)
{
    struct mock_host mock;
    struct verdict verdict;

    cap_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", INT64_C(1) << 40);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 1);
    ck_assert_str_eq(verdict.report.reasons->key, "max_prefill_tokens");
    ck_assert_ptr_nonnull(strstr(verdict.report.reasons->message, "32-bit indices"));
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(cap_is_for_the_all_to_all)
{
    struct mock_host mock;

    cap_init(&mock);
    mock_set_str(&mock, "dispatcher", "allgather");
    assert_accepted(&mock);
    mock_set_str(&mock, "dispatcher", "local");
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

// ---- Speculation -------------------------------------------------------------------------------

static void speculative_init(struct mock_host *mock)
{
    mock_host_init(mock);
    mock_set_i64(mock, "max_running_requests", 16);
    mock_set_str(mock, "speculative_algorithm", "EAGLE");
}

START_TEST(speculative_names_key)
{
    struct mock_host mock;

    speculative_init(&mock);
    assert_refused(&mock, MOXIE_E_CONFIG, "speculative_draft_tokens",
                   "unresolved configuration: speculative_algorithm is 'EAGLE'");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(speculative_names_number)
{
    struct mock_host mock;

    speculative_init(&mock);
    assert_refused(&mock, MOXIE_E_CONFIG, "speculative_draft_tokens", "is absent, so 0");
    mock_set_i64(&mock, "speculative_draft_tokens", 0);
    assert_refused(&mock, MOXIE_E_CONFIG, "speculative_draft_tokens", "is 0: validate after");
    assert_refused(&mock, MOXIE_E_CONFIG, "speculative_draft_tokens",
                   "set speculative_draft_tokens to 1 or more");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(speculative_number_is_accepted)
{
    struct mock_host mock;

    speculative_init(&mock);
    mock_set_i64(&mock, "speculative_draft_tokens", 1);
    assert_accepted(&mock);
    mock_unset(&mock, "speculative_draft_tokens");
    mock_set_str(&mock, "speculative_algorithm", "none");
    assert_accepted(&mock);
    mock_set_str(&mock, "speculative_algorithm", "");
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

// ---- Ranks and experts -------------------------------------------------------------------------

static void refused_with(const char *const keys[4], const int64_t values[4], const char *key,
                         const char *text, int32_t alternatives)
{
    struct mock_host mock;
    struct verdict verdict;
    const moxie_reason *reason;

    mock_host_init(&mock);
    for (int32_t i = 0; i < 4 && keys[i] != NULL; i++)
        mock_set_i64(&mock, keys[i], values[i]);
    verdict_make(&verdict, &mock);
    reason = verdict_reason(&verdict, key);
    ck_assert_msg(reason != NULL, "no reason names %s", key);
    ck_assert_str_eq(reason->message, text);
    verdict_free(&verdict);
    ck_assert_int_eq(assert_advice_works(&mock, key), alternatives);
    mock_host_fini(&mock);
}

START_TEST(tp_size_by_dp_size)
{
    static const char *const keys[4] = {"dp_size", "tp_size"};
    static const int64_t values[4] = {4, 6};

    refused_with(keys, values, "dp_size",
                 "tp_size 6 is not divisible by dp_size 4 (tp_size counts all ranks of the MoE "
                 "group): set dp_size to 2",
                 1);
}
END_TEST

START_TEST(ep_size_is_1_or_tp_size)
{
    static const char *const keys[4] = {"tp_size", "ep_size", "ep_rank"};
    static const int64_t values[4] = {8, 3};
    static const int64_t rank[4] = {8, 3, 2};
    static const int64_t one[4] = {1, 3};
    static const int64_t many[4] = {128, 3};

    refused_with(keys, values, "ep_size",
                 "ep_size 3 is neither 1 nor tp_size 8: set ep_size to 1, or ep_size to 8", 2);
    refused_with(keys, one, "ep_size",
                 "ep_size 3 is neither 1 nor tp_size 1: set ep_size to 1, or tp_size to 3", 2);
    refused_with(keys, many, "ep_size", "ep_size 3 is neither 1 nor tp_size 128: set ep_size to 1",
                 1);
    refused_with(keys, rank, "ep_size",
                 "ep_size 3 is neither 1 nor tp_size 8: set ep_size to 1 and ep_rank to 0, or "
                 "ep_size to 8",
                 2);
}
END_TEST

START_TEST(ep_rank_below_ep_size)
{
    static const char *const keys[4] = {"tp_size", "ep_size", "ep_rank"};
    static const int64_t values[4] = {4, 4, 4};

    refused_with(keys, values, "ep_rank",
                 "ep_rank 4 is not below ep_size 4: set ep_rank to 3 or less", 1);
}
END_TEST

START_TEST(counts_fit_32_bits)
{
    static const char *const names[] = {"hidden_size", "intermediate_size", "num_layers"};
    struct mock_host mock;
    struct verdict verdict;

    for (int32_t i = 0; i < 3; i++) {
        mock_host_init(&mock);
        mock_set_i64(&mock, names[i], (int64_t)1 << 31);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, names[i], "2147483648");
        ck_assert_int_eq(assert_advice_works(&mock, names[i]), 1);
        mock_host_fini(&mock);
    }
    mock_host_init(&mock);
    mock_set_i64(&mock, "cpu_threads", 1025);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "cpu_threads", "set it to 1024 or less");
    ck_assert_int_eq(assert_advice_works(&mock, "cpu_threads"), 1);
    mock_set_str(&mock, "device", "sm_90"); // which has no pool
    assert_accepted(&mock);
    mock_set_str(&mock, "device", "cuda");
    verdict_make(&verdict, &mock);
    ck_assert_ptr_null(verdict_reason(&verdict, "cpu_threads"));
    verdict_free(&verdict);
    mock_unset(&mock, "device");
    mock_unset(&mock, "cpu_threads");
    mock_set_i64(&mock, "num_experts", (int64_t)1 << 21);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "num_experts", "num_experts to 1048576 or less");
    ck_assert_int_eq(assert_advice_works(&mock, "num_experts"), 1);
    mock_host_fini(&mock);
}
END_TEST

// ---- Rows in 32 bits ---------------------------------------------------------------------------

START_TEST(rows_fit_32_bits)
{
    static const char *const dispatchers[] = {"local", "allgather", "alltoall"};
    struct mock_host mock;

    for (int32_t i = 0; i < 3; i++) {
        init_ranks(&mock, 4);
        mock_set_str(&mock, "dispatcher", dispatchers[i]);
        mock_set_i64(&mock, "context_length", (int64_t)1 << 28); // x 4 ranks x top_k 2 = 2^31
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, "context_length",
                       "1073741824 rows x top_k 2 pass 2147483647");
        ck_assert_int_eq(assert_advice_works(&mock, "context_length"), i == 2 ? 2 : 1);
        mock_set_i64(&mock, "context_length", ((int64_t)1 << 28) - 1);
        assert_accepted(&mock);
        mock_host_fini(&mock);
    }
}
END_TEST

START_TEST(rows_of_an_explicit_cap)
{
    struct mock_host mock;

    init_ranks(&mock, 4);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", (int64_t)1 << 28);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "max_dispatch_tokens_per_rank",
                   "set max_dispatch_tokens_per_rank to 268435455");
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 1);
    // What is left of the cap needs two rounds for this forward.
    mock_set_i64(&mock, "warmup_tokens_max", (int64_t)1 << 28);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "max_dispatch_tokens_per_rank",
                   " and dispatch_rounds_max to 2");
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 1);
    // Neither a cap nor a bound that is too large hides the other.
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", (int64_t)1 << 50);
    mock_set_i64(&mock, "dispatch_rounds_max", 1 << 12);
    for (int32_t shift = 31; shift <= 62; shift += 31) {
        mock_set_i64(&mock, "warmup_tokens_max", (int64_t)1 << shift);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, "max_dispatch_tokens_per_rank",
                       "set max_dispatch_tokens_per_rank to 268435455");
        assert_refused(&mock, shift == 31 ? MOXIE_E_UNSUPPORTED : MOXIE_E_CONFIG,
                       "warmup_tokens_max", "set warmup_tokens_max to ");
    }
    mock_host_fini(&mock);
}
END_TEST

START_TEST(rows_of_dynamic_chunks)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    mock_set_i64(&mock, "chunked_prefill_size", (int64_t)1 << 30);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "chunked_prefill_size", "1342177280 rows");
    ck_assert_int_eq(assert_advice_works(&mock, "chunked_prefill_size"), 1);
    mock_host_fini(&mock);
}
END_TEST

// Two keys that each bring too much: the host's own bound is the one change that helps.
START_TEST(rows_of_several_keys)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", (int64_t)1 << 31);
    mock_set_i64(&mock, "max_running_requests", (int64_t)1 << 30);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "forward_tokens_max",
                   "max_prefill_tokens 2147483648");
    ck_assert_int_eq(assert_advice_works(&mock, "forward_tokens_max"), 1);
    mock_host_fini(&mock);
}
END_TEST

// While chunks are on, a context of any length brings no more than a chunk.
START_TEST(rows_of_chunks_alone)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "chunked_prefill_size", (int64_t)1 << 31);
    mock_set_i64(&mock, "context_length", (int64_t)1 << 40);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "chunked_prefill_size", "2147483648 rows");
    ck_assert_int_eq(assert_advice_works(&mock, "chunked_prefill_size"), 1);
    mock_host_fini(&mock);
}
END_TEST

// Ranks that share a DP rank's tokens may bring a row more each than their share is.
START_TEST(rows_of_uneven_shares)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "tp_size", 64);
    mock_set_i64(&mock, "ep_size", 64);
    mock_set_i64(&mock, "forward_tokens_max", (int64_t)1 << 31);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "forward_tokens_max", "2147483648 rows");
    ck_assert_int_eq(assert_advice_works(&mock, "forward_tokens_max"), 1);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(rows_of_verify_steps)
{
    struct mock_host mock;

    speculative_init(&mock);
    mock_set_i64(&mock, "speculative_draft_tokens", (int64_t)1 << 30);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "speculative_draft_tokens",
                   "max_running_requests 16 x");
    ck_assert_int_eq(assert_advice_works(&mock, "speculative_draft_tokens"), 1);
    mock_set_i64(&mock, "speculative_draft_tokens", 4);
    mock_set_i64(&mock, "max_running_requests", (int64_t)1 << 30);
    ck_assert_int_eq(assert_advice_works(&mock, "max_running_requests"), 1);
    mock_host_fini(&mock);
}
END_TEST

// The capture counts rows of all DP ranks, whatever the rounds leave of a dispatch.
START_TEST(rows_of_the_capture)
{
    struct mock_host mock;

    init_ranks(&mock, 4);
    mock_set_i64(&mock, "dispatch_rounds_max", 64);
    mock_set_i64(&mock, "warmup_tokens_max", (int64_t)1 << 28);
    assert_accepted(&mock);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "warmup_tokens_max", "1073741824 rows");
    ck_assert_int_eq(assert_advice_works(&mock, "warmup_tokens_max"), 1);
    mock_host_fini(&mock);
}
END_TEST

// ---- What would be ignored ---------------------------------------------------------------------

START_TEST(activation_parameters_are_honoured)
{
    static const char *const names[] = {"activation_alpha", "activation_beta", "activation_limit"};
    static const char *const advice[] = {"to 1.702, or activation to swigluoai",
                                         "to 1, or activation to swigluoai",
                                         "to 0, or activation to swigluoai"};
    static const double standard[] = {1.702, 1.0, 0.0};
    struct mock_host mock;

    for (int32_t i = 0; i < 3; i++) {
        mock_host_init(&mock);
        mock_set_f64(&mock, names[i], 7.0);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, names[i], "is 7, and activation silu");
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, names[i], advice[i]);
        ck_assert_int_eq(assert_advice_works(&mock, names[i]), 2);
        mock_set_f64(&mock, names[i], standard[i]);
        assert_accepted(&mock);
        mock_host_fini(&mock);
    }
}
END_TEST

// As a float it would be none at all.
START_TEST(a_limit_that_is_too_small_for_a_float)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "activation", "swigluoai");
    mock_set_f64(&mock, "activation_limit", 1e-50);
    assert_refused(&mock, MOXIE_E_CONFIG, "activation_limit", "is 1e-50, which 32 bits have as 0");
    mock_set_f64(&mock, "activation_limit", 1e-38);
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(router_weight_on_input_needs_top_1)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "apply_router_weight_on_input", 1);
    assert_refused(&mock, MOXIE_E_CONFIG, "apply_router_weight_on_input", "top_k is 2");
    assert_refused(&mock, MOXIE_E_CONFIG, "apply_router_weight_on_input",
                   "set apply_router_weight_on_input to 0, or top_k to 1");
    ck_assert_int_eq(assert_advice_works(&mock, "apply_router_weight_on_input"), 2);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(groups_are_whole)
{
    static const struct {
        const char *format_key, *format;
        int64_t group;
        int32_t on_intermediate;
    } rows[] = {{"weight_format", "int4_g32", 32, 1},
                {"weight_format", "mxfp4", 32, 1},
                {"weight_format", "nvfp4", 16, 1},
                {"activation_format", "nvfp4", 16, 1},
                {"dispatch_format", "nvfp4", 16, 0}};
    struct mock_host mock;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        init_ranks(&mock, 2);
        mock_set_str(&mock, rows[i].format_key, rows[i].format);
        assert_accepted(&mock);
        mock_set_i64(&mock, "hidden_size", 2 * rows[i].group + 8);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, "hidden_size", rows[i].format);
        ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 2);
        mock_set_i64(&mock, "hidden_size", 64);
        mock_set_i64(&mock, "intermediate_size", 5);
        if (rows[i].on_intermediate)
            ck_assert_int_eq(assert_advice_works(&mock, "intermediate_size"), 2);
        else
            assert_accepted(&mock);
        mock_host_fini(&mock);
    }
    // Blocks of 128 may be ragged.
    mock_host_init(&mock);
    mock_set_i64(&mock, "hidden_size", 130);
    mock_set_str(&mock, "weight_format", "fp8_block128");
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

// ---- Between ranks -----------------------------------------------------------------------------

START_TEST(a_transport_fits_the_device)
{
    static const struct {
        const char *device, *transport, *text;
    } rows[] = {
        {"cpu", "nvlink", "transport nvlink moves rows of GPUs, and device is cpu"},
        {"cpu", "nccl", "transport nccl moves rows of GPUs, and device is cpu"},
        {"sm_90", "shm", "transport shm moves rows of CPUs, and device is sm_90"},
    };
    struct mock_host mock;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        init_ranks(&mock, 2);
        mock_set_str(&mock, "device", rows[i].device);
        mock_set_str(&mock, "transport", rows[i].transport);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, "transport", rows[i].text);
        ck_assert_int_eq(assert_advice_works(&mock, "transport"), 1);
        mock_host_fini(&mock);
    }
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, cap_names_key);
    tcase_add_test(tests, cap_names_number);
    tcase_add_test(tests, cap_number_is_accepted);
    tcase_add_test(tests, cap_of_a_forward_that_cannot_be_counted);
    tcase_add_test(tests, cap_is_for_the_all_to_all);
    tcase_add_test(tests, speculative_names_key);
    tcase_add_test(tests, speculative_names_number);
    tcase_add_test(tests, speculative_number_is_accepted);
    tcase_add_test(tests, tp_size_by_dp_size);
    tcase_add_test(tests, ep_size_is_1_or_tp_size);
    tcase_add_test(tests, ep_rank_below_ep_size);
    tcase_add_test(tests, counts_fit_32_bits);
    tcase_add_test(tests, rows_fit_32_bits);
    tcase_add_test(tests, a_transport_fits_the_device);
    tcase_add_test(tests, rows_of_an_explicit_cap);
    tcase_add_test(tests, rows_of_dynamic_chunks);
    tcase_add_test(tests, rows_of_several_keys);
    tcase_add_test(tests, rows_of_chunks_alone);
    tcase_add_test(tests, rows_of_uneven_shares);
    tcase_add_test(tests, rows_of_verify_steps);
    tcase_add_test(tests, rows_of_the_capture);
    tcase_add_test(tests, activation_parameters_are_honoured);
    tcase_add_test(tests, a_limit_that_is_too_small_for_a_float);
    tcase_add_test(tests, router_weight_on_input_needs_top_1);
    tcase_add_test(tests, groups_are_whole);
}

SUITE_MAIN("validate", 60, add)
