// plugin/unused.c: keys that are set and have no effect are warned of, and only those.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

#include <string.h>

START_TEST(one_rank_dispatches_nothing)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "dispatch_format", "fp8_block128");
    mock_set_i64(&mock, "timeout_ms", 5000);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 8);
    assert_warned(&mock, "dispatch_format", "dispatch_format is unused: ep_size is 1");
    mock_set_str(&mock, "transport", "shm");
    assert_warned(&mock, "timeout_ms", "timeout_ms is unused: ep_size is 1");
    assert_warned(&mock, "transport", "transport is unused: ep_size is 1");
    assert_warned(&mock, "max_dispatch_tokens_per_rank",
                  "max_dispatch_tokens_per_rank is unused: dispatcher is local");
    mock_set_ranks(&mock, 2);
    assert_not_warned(&mock, "dispatch_format");
    assert_not_warned(&mock, "timeout_ms");
    assert_not_warned(&mock, "transport");
    assert_not_warned(&mock, "max_dispatch_tokens_per_rank");
    mock_set_str(&mock, "dispatcher", "local");
    assert_warned(&mock, "dispatch_format", "dispatcher local moves no rows");
    mock_set_str(&mock, "dispatcher", "allgather");
    assert_not_warned(&mock, "dispatch_format");
    assert_warned(&mock, "max_dispatch_tokens_per_rank", "allgather moves a forward in one round");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(sms_are_those_of_a_gpu)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "dispatch_sms", 24);
    assert_warned(&mock, "dispatch_sms", "dispatch_sms is unused: ep_size is 1");
    mock_set_ranks(&mock, 2);
    assert_warned(&mock, "dispatch_sms", "dispatch_sms is unused: device is cpu");
    mock_set_str(&mock, "device", "sm_90");
    assert_not_warned(&mock, "dispatch_sms");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(nothing_is_unused_for_a_key_that_is_refused)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "cuda");
    mock_set_i64(&mock, "dispatch_sms", 24);
    mock_set_ranks(&mock, 2);
    assert_not_warned(&mock, "dispatch_sms");
    mock_set_i64(&mock, "speculative_draft_tokens", 4);
    assert_warned(&mock, "speculative_draft_tokens", "speculative_algorithm is none");
    mock_set_i64(&mock, "speculative_algorithm", 1);
    assert_not_warned(&mock, "speculative_draft_tokens");
    mock_host_fini(&mock);
}
END_TEST

// A default that the host spells out asks for nothing.
START_TEST(defaults_are_no_request)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_running_requests", 8);
    mock_set_str(&mock, "dispatch_format", "input");
    mock_set_str(&mock, "transport", "auto");
    mock_set_i64(&mock, "dispatch_rounds_max", 1);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 0);
    mock_set_i64(&mock, "speculative_draft_tokens", 0);
    mock_set_f64(&mock, "activation_alpha", 1.702);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.warnings_count, 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(rounds_are_for_forward_alone)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_i64(&mock, "dispatch_rounds_max", 4);
    assert_warned(&mock, "dispatch_rounds_max", "dispatch_rounds_max is 4: forward() alone");
    mock_set_str(&mock, "dispatcher", "allgather");
    assert_warned(&mock, "dispatch_rounds_max", "dispatch_rounds_max is unused");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(more_choices_than_experts)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "num_experts", 6);
    mock_set_i64(&mock, "num_redundant_experts", 2);
    mock_set_i64(&mock, "top_k", 8);
    assert_not_warned(&mock, "top_k");
    mock_set_i64(&mock, "top_k", 9);
    assert_warned(&mock, "top_k", "top_k 9 is more than physical_experts 8: of each token some");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(prefill_keys)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "context_length", 4096);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    assert_not_warned(&mock, "context_length");
    assert_warned(&mock, "pipeline_dynamic_chunking", "chunking is off");
    mock_set_i64(&mock, "chunked_prefill_size", 512);
    assert_warned(&mock, "context_length", "context_length is unused: chunking is on");
    assert_not_warned(&mock, "pipeline_dynamic_chunking");
    mock_set_i64(&mock, "prefill_graph_max_tokens", 64);
    assert_not_warned(&mock, "prefill_graph_max_tokens");
    mock_set_i64(&mock, "disable_prefill_graph", 1);
    assert_warned(&mock, "prefill_graph_max_tokens", "disable_prefill_graph is 1");
    mock_set_str(&mock, "disaggregation_mode", "decode");
    assert_warned(&mock, "prefill_graph_max_tokens", "disaggregation_mode is decode");
    assert_warned(&mock, "chunked_prefill_size", "disaggregation_mode is decode");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(decode_keys)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "speculative_draft_tokens", 4);
    assert_warned(&mock, "speculative_draft_tokens", "speculative_algorithm is none");
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    assert_not_warned(&mock, "speculative_draft_tokens");
    mock_set_i64(&mock, "decode_graph_max_batch", 64);
    assert_not_warned(&mock, "decode_graph_max_batch");
    mock_set_i64(&mock, "disable_decode_graph", 1);
    assert_warned(&mock, "decode_graph_max_batch", "disable_decode_graph is 1");
    mock_set_str(&mock, "disaggregation_mode", "prefill");
    assert_warned(&mock, "decode_graph_max_batch", "disaggregation_mode is prefill");
    assert_warned(&mock, "speculative_draft_tokens", "disaggregation_mode is prefill");
    mock_unset(&mock, "speculative_draft_tokens");
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(own_bound_below_the_derived)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", 512);
    mock_set_i64(&mock, "forward_tokens_max", 511);
    assert_warned(&mock, "forward_tokens_max", "forward_tokens_max 511 is below the 512 tokens");
    mock_set_i64(&mock, "forward_tokens_max", 512);
    assert_not_warned(&mock, "forward_tokens_max");
    mock_host_fini(&mock);
}
END_TEST

// An engine that forgot its capacity has a bound of one token, which its first prefill passes.
START_TEST(no_bound_at_all)
{
    static const char *const keys[] = {"forward_tokens_max",       "max_prefill_tokens",
                                       "chunked_prefill_size",     "context_length",
                                       "prefill_graph_max_tokens", "decode_graph_max_batch",
                                       "max_running_requests",     "warmup_tokens_max"};
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "forward_tokens_max", 0);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        assert_warned(&mock, "forward_tokens_max", "so forward_tokens is 1, and a forward of more");
        assert_warned(&mock, "forward_tokens_max", keys[i]);
        mock_set_i64(&mock, keys[i], 1); // as much, and somebody's
        assert_not_warned(&mock, "forward_tokens_max");
        mock_set_i64(&mock, keys[i], 0);
    }
    mock_set_str(&mock, "disaggregation_mode", "decode");
    mock_set_i64(&mock, "max_prefill_tokens", 64);
    assert_warned(&mock, "forward_tokens_max",
                  "from: decode_graph_max_batch, max_running_requests, warmup_tokens_max");
    mock_set_str(&mock, "disaggregation_mode", "prefill");
    assert_not_warned(&mock, "forward_tokens_max");
    mock_set_i64(&mock, "max_prefill_tokens", 0);
    assert_warned(&mock, "forward_tokens_max", "prefill_graph_max_tokens, warmup_tokens_max");
    // A bound that cannot be computed is refused, and not taken for one token.
    mock_set_i64(&mock, "max_prefill_tokens", -1);
    assert_not_warned(&mock, "forward_tokens_max");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(a_long_timeout_is_cut)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_i64(&mock, "timeout_ms", (int64_t)1 << 31);
    assert_warned(&mock, "timeout_ms", "timeout_ms 2147483648 is cut to 2147483647");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.plan.limits.timeout_ms, INT32_MAX);
    verdict_free(&verdict);
    mock_set_i64(&mock, "timeout_ms", INT32_MAX);
    assert_not_warned(&mock, "timeout_ms");
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, one_rank_dispatches_nothing);
    tcase_add_test(tests, sms_are_those_of_a_gpu);
    tcase_add_test(tests, nothing_is_unused_for_a_key_that_is_refused);
    tcase_add_test(tests, defaults_are_no_request);
    tcase_add_test(tests, rounds_are_for_forward_alone);
    tcase_add_test(tests, more_choices_than_experts);
    tcase_add_test(tests, prefill_keys);
    tcase_add_test(tests, decode_keys);
    tcase_add_test(tests, own_bound_below_the_derived);
    tcase_add_test(tests, no_bound_at_all);
    tcase_add_test(tests, a_long_timeout_is_cut);
}

SUITE_MAIN("unused", 60, add)
