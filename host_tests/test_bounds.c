// plugin/bounds.c: the vectors of the specification, ties, and arithmetic at the edge of 2^62.

#include "plugin/bounds.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

#include <string.h>

#define HUGE_TOKENS ((int64_t)1 << 62)

struct pair {
    const char *key;
    int64_t value;
};

// Sets pairs up to a NULL key.
static void set_all(struct mock_host *mock, const struct pair *pairs)
{
    for (; pairs->key != NULL; pairs++)
        mock_set_i64(mock, pairs->key, pairs->value);
}

static const struct pair vector_1[] = {{"max_prefill_tokens", 16384},
                                       {"prefill_graph_max_tokens", 2048},
                                       {"decode_graph_max_batch", 512},
                                       {NULL, 0}};
static const struct pair vector_4_ranks[] = {
    {"dp_size", 4}, {"tp_size", 4}, {"ep_size", 4}, {NULL, 0}};
static const struct pair vector_7[] = {{"max_prefill_tokens", 16384},
                                       {"chunked_prefill_size", 8192},
                                       {"max_running_requests", 4096},
                                       {"speculative_draft_tokens", 4},
                                       {"dp_size", 8},
                                       {"tp_size", 8},
                                       {"ep_size", 8},
                                       {NULL, 0}};

static void assert_bounds(struct mock_host *mock, int64_t forward_tokens, const char *dominant)
{
    struct verdict verdict;

    verdict_make(&verdict, mock);
    ck_assert_int_eq(verdict.bounds.forward_tokens, forward_tokens);
    ck_assert_str_eq(bounds_dominant(&verdict.bounds), dominant);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    verdict_free(&verdict);
}

START_TEST(vector_1_prefill)
{
    struct mock_host mock;

    mock_host_init(&mock);
    set_all(&mock, vector_1);
    assert_bounds(&mock, 16384, "max_prefill_tokens");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_2_verify_steps)
{
    static const struct pair pairs[] = {{"max_prefill_tokens", 512},
                                        {"prefill_graph_max_tokens", 512},
                                        {"decode_graph_max_batch", 512},
                                        {"speculative_draft_tokens", 8},
                                        {NULL, 0}};
    struct mock_host mock;
    struct verdict verdict;
    char text[256];

    mock_host_init(&mock);
    set_all(&mock, pairs);
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    assert_bounds(&mock, 4096, "decode_graph_max_batch");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.capture_rows, 4096);
    bounds_explain(&verdict.bounds, &verdict.config, text, sizeof text);
    ck_assert_str_eq(
        text, "forward_tokens = 4096: decode_graph_max_batch 512 x speculative_draft_tokens 8");
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_3_disabled_graph)
{
    static const struct pair pairs[] = {{"max_prefill_tokens", 512},
                                        {"prefill_graph_max_tokens", 2048},
                                        {"disable_prefill_graph", 1},
                                        {"decode_graph_max_batch", 64},
                                        {NULL, 0}};
    struct mock_host mock;

    mock_host_init(&mock);
    set_all(&mock, pairs);
    assert_bounds(&mock, 512, "max_prefill_tokens");
    mock_set_i64(&mock, "disable_prefill_graph", 0);
    assert_bounds(&mock, 2048, "prefill_graph_max_tokens");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_4_four_dp_ranks)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, vector_1);
    set_all(&mock, vector_4_ranks);
    assert_bounds(&mock, 16384, "max_prefill_tokens");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.allgather_rows, 65536);
    ck_assert_int_eq(verdict.bounds.dispatch_required, 16384);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_5_dispatch_cap)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, vector_1);
    set_all(&mock, vector_4_ranks);
    mock_set_str(&mock, "dispatcher", "alltoall");
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 4096);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_dispatch_tokens_per_rank", "16384");
    mock_set_i64(&mock, "dispatch_rounds_max", 4);
    assert_accepted(&mock);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.alltoall_rows, 16384);
    ck_assert_int_eq(verdict.plan.limits.tokens_max, 4096);
    ck_assert_int_eq(verdict.plan.limits.forward_tokens_max, 16384);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_6_attention_tp)
{
    static const struct pair ranks[] = {{"dp_size", 2}, {"tp_size", 8}, {"ep_size", 8}, {NULL, 0}};
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, vector_1);
    set_all(&mock, ranks);
    assert_bounds(&mock, 16384, "max_prefill_tokens");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.attn_tp, 4);
    ck_assert_int_eq(verdict.bounds.dispatch_required, 4096);
    ck_assert_int_eq(verdict.bounds.alltoall_rows, 32768);
    ck_assert_int_eq(verdict.bounds.allgather_rows, 32768);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vectors_7_and_8_tie_and_decode_only)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, vector_7);
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    assert_bounds(&mock, 16384, "max_prefill_tokens");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.capture_rows, 131072);
    verdict_free(&verdict);
    mock_set_str(&mock, "disaggregation_mode", "decode");
    assert_bounds(&mock, 16384, "max_running_requests");
    mock_set_str(&mock, "disaggregation_mode", "prefill");
    assert_bounds(&mock, 16384, "max_prefill_tokens");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_9_dynamic_chunks)
{
    struct mock_host mock;
    struct verdict verdict;
    char text[256];

    mock_host_init(&mock);
    mock_set_i64(&mock, "chunked_prefill_size", 8192);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    assert_bounds(&mock, 10240, "chunked_prefill_size");
    verdict_make(&verdict, &mock);
    bounds_explain(&verdict.bounds, &verdict.config, text, sizeof text);
    ck_assert_str_eq(
        text,
        "forward_tokens = 10240: chunked_prefill_size 8192 x 5/4 (pipeline_dynamic_chunking)");
    verdict_free(&verdict);
    // (5c + 3) / 4 for every remainder.
    for (int64_t c = 1; c < 40; c++) {
        mock_set_i64(&mock, "chunked_prefill_size", c);
        assert_bounds(&mock, (5 * c + 3) / 4, "chunked_prefill_size");
    }
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_10_no_chunks)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_i64(&mock, "chunked_prefill_size", -1);
    mock_set_i64(&mock, "max_prefill_tokens", 4096);
    assert_bounds(&mock, 4096, "max_prefill_tokens");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.capture_rows, 4096);
    verdict_free(&verdict);
    mock_set_i64(&mock, "context_length", 32768);
    assert_bounds(&mock, 32768, "context_length");
    mock_set_i64(&mock, "chunked_prefill_size", 0);
    assert_bounds(&mock, 32768, "context_length");
    mock_set_i64(&mock, "chunked_prefill_size", 1024);
    assert_bounds(&mock, 4096, "max_prefill_tokens");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_11_unresolved)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    assert_refused(&mock, MOXIE_E_CONFIG, "speculative_draft_tokens", "unresolved");
    // The formula holds all the same: one token per request.
    mock_set_i64(&mock, "max_running_requests", 16);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.forward_tokens, 16);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(vector_12_64_ranks)
{
    static const struct pair pairs[] = {{"dp_size", 64},
                                        {"tp_size", 64},
                                        {"ep_size", 64},
                                        {"max_dispatch_tokens_per_rank", 4096},
                                        {"forward_tokens_max", 4096},
                                        {"hidden_size", 7168},
                                        {NULL, 0}};
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, pairs);
    assert_bounds(&mock, 4096, "forward_tokens_max");
    verdict_make(&verdict, &mock);
    ck_assert_int_gt(verdict.plan.window.results, (int64_t)1 << 31);
    ck_assert_int_ge(verdict.plan.window.bytes, 2 * (int64_t)63 * 4096 * 14336);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// Every key that can dominate, alone and in a tie with all that follow it.
START_TEST(ties_go_to_the_first)
{
    static const char *const order[] = {"forward_tokens_max",       "max_prefill_tokens",
                                        "chunked_prefill_size",     "context_length",
                                        "prefill_graph_max_tokens", "decode_graph_max_batch",
                                        "max_running_requests",     "warmup_tokens_max"};
    struct mock_host mock;

    mock_host_init(&mock);
    assert_bounds(&mock, 1, "minimum");
    for (int32_t i = 7; i >= 0; i--) {
        mock_set_i64(&mock, order[i], 77);
        assert_bounds(&mock, 77, order[i]);
    }
    // A bound of one token is the key's, not the minimum's.
    mock_host_fini(&mock);
    mock_host_init(&mock);
    mock_set_i64(&mock, "warmup_tokens_max", 1);
    assert_bounds(&mock, 1, "warmup_tokens_max");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(own_bound_replaces)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", 512);
    mock_set_i64(&mock, "forward_tokens_max", 100);
    assert_bounds(&mock, 100, "forward_tokens_max");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.derived_tokens, 512);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(attention_tp_pads)
{
    static const struct pair pairs[] = {{"forward_tokens_max", 10},
                                        {"tp_size", 4},
                                        {"ep_size", 4},
                                        {"dispatch_rounds_max", 2},
                                        {NULL, 0}};
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    set_all(&mock, pairs);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.dispatch_required, 3);
    ck_assert_int_eq(verdict.bounds.dispatch_tokens, 2);
    ck_assert_int_eq(verdict.bounds.allgather_rows, 10);
    ck_assert_int_eq(verdict.bounds.gather_rows, 12);
    ck_assert_int_eq(verdict.bounds.alltoall_rows, 8);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// One bad number hides only what depends on it.
START_TEST(the_rest_is_still_computed)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", 512);
    mock_set_str(&mock, "dp_size", "four");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.forward_tokens, 512);
    ck_assert_int_eq(verdict.bounds.attn_tp, -1);
    ck_assert_int_eq(verdict.bounds.dispatch_required, -1);
    ck_assert_int_eq(verdict.bounds.dispatch_tokens, -1);
    ck_assert_int_eq(verdict.bounds.allgather_rows, -1);
    ck_assert_int_eq(verdict.bounds.physical_experts, 8);
    verdict_free(&verdict);
    mock_unset(&mock, "dp_size");
    mock_set_i64(&mock, "max_running_requests", HUGE_TOKENS);
    mock_set_i64(&mock, "speculative_draft_tokens", 8);
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    assert_refused(&mock, MOXIE_E_CONFIG, "max_running_requests", "4611686018427387904");
    assert_refused(&mock, MOXIE_E_CONFIG, "max_running_requests", "speculative_draft_tokens 8");
    ck_assert_int_eq(assert_advice_works(&mock, "max_running_requests"), 1);
    mock_set_i64(&mock, "decode_graph_max_batch", HUGE_TOKENS); // a tie goes to the graph
    assert_refused(&mock, MOXIE_E_CONFIG, "decode_graph_max_batch", "4611686018427387904");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.bounds.prefill, 512);
    ck_assert_int_eq(verdict.bounds.decode, -1);
    ck_assert_int_eq(verdict.bounds.forward_tokens, -1);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(products_past_2_62)
{
    struct mock_host mock;

    mock_host_init(&mock);
    set_all(&mock, vector_4_ranks);
    mock_set_i64(&mock, "warmup_tokens_max", HUGE_TOKENS / 2);
    assert_refused(&mock, MOXIE_E_CONFIG, "warmup_tokens_max",
                   "dp_size 4 x forward_tokens 2305843009213693952");
    mock_unset(&mock, "warmup_tokens_max");
    mock_set_i64(&mock, "chunked_prefill_size", HUGE_TOKENS);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    ck_assert_int_eq(assert_advice_works(&mock, "chunked_prefill_size"), 1);
    mock_unset(&mock, "chunked_prefill_size");
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 0);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", INT64_MAX);
    mock_set_str(&mock, "dispatcher", "alltoall");
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 1);
    mock_unset(&mock, "max_dispatch_tokens_per_rank");
    mock_set_i64(&mock, "num_redundant_experts", HUGE_TOKENS);
    ck_assert_int_eq(assert_advice_works(&mock, "num_redundant_experts"), 1);
    mock_host_fini(&mock);
}
END_TEST

// Hosts say "any number" so, and these have no effect.
START_TEST(products_without_effect_may_pass_2_62)
{
    static const char *const unlimited[] = {"max_running_requests", "chunked_prefill_size",
                                            "context_length"};
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "forward_tokens_max", 16);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    mock_set_str(&mock, "speculative_algorithm", "eagle");
    mock_set_i64(&mock, "speculative_draft_tokens", 8);
    for (int32_t i = 0; i < 3; i++) {
        mock_set_i64(&mock, unlimited[i], INT64_MAX);
        assert_bounds(&mock, 16, "forward_tokens_max");
        assert_accepted(&mock);
    }
    mock_host_fini(&mock);

    mock_host_init(&mock);
    mock_set_str(&mock, "disaggregation_mode", "decode");
    mock_set_i64(&mock, "max_running_requests", 8);
    mock_set_i64(&mock, "chunked_prefill_size", INT64_MAX);
    mock_set_i64(&mock, "pipeline_dynamic_chunking", 1);
    assert_accepted(&mock);
    mock_host_fini(&mock);

    for (int32_t i = 0; i < 2; i++) {
        mock_host_init(&mock);
        set_all(&mock, vector_4_ranks);
        mock_set_i64(&mock, "forward_tokens_max", 16);
        mock_set_i64(&mock, "max_dispatch_tokens_per_rank", INT64_MAX);
        mock_set_str(&mock, "dispatcher", i == 0 ? "local" : "allgather");
        assert_accepted(&mock);
        mock_host_fini(&mock);
    }
}
END_TEST

// Whatever two of three counts pass the limit, or come to it, one advice does.
START_TEST(experts_past_the_limit)
{
    static const int64_t counts[] = {1, 8, 500000, 1 << 20, HUGE_TOKENS, INT64_MAX};
    static const char *const keys[] = {"num_experts", "num_redundant_experts",
                                       "num_fused_shared_experts"};
    const int32_t kinds = (int32_t)(sizeof counts / sizeof counts[0]);
    struct mock_host mock;
    struct verdict verdict;
    int32_t refused = 0;

    for (int32_t n = 0; n < kinds * kinds * kinds; n++) {
        mock_host_init(&mock);
        for (int32_t i = 0, rest = n; i < 3; i++, rest /= kinds)
            mock_set_i64(&mock, keys[i], counts[rest % kinds] - (i > 0));
        verdict_make(&verdict, &mock);
        if (verdict.report.reasons_count > 0) {
            ck_assert_int_eq(assert_advice_works(&mock, verdict.report.reasons[0].key), 1);
            refused++;
        }
        verdict_free(&verdict);
        mock_host_fini(&mock);
    }
    ck_assert_int_gt(refused, 100);
}
END_TEST

START_TEST(experts_are_split)
{
    // 10 experts over 4 ranks: 3, 3, 2, 2.
    static const int64_t first[] = {0, 3, 6, 8, 10};

    for (int64_t rank = 0; rank <= 4; rank++)
        ck_assert_int_eq(experts_first(10, 4, rank), first[rank]);
    ck_assert_int_eq(experts_first(8, 1, 1), 8);
    ck_assert_int_eq(experts_first(3, 7, 3), 3);
    ck_assert_int_eq(experts_first(3, 7, 7), 3);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, vector_1_prefill);
    tcase_add_test(tests, vector_2_verify_steps);
    tcase_add_test(tests, vector_3_disabled_graph);
    tcase_add_test(tests, vector_4_four_dp_ranks);
    tcase_add_test(tests, vector_5_dispatch_cap);
    tcase_add_test(tests, vector_6_attention_tp);
    tcase_add_test(tests, vectors_7_and_8_tie_and_decode_only);
    tcase_add_test(tests, vector_9_dynamic_chunks);
    tcase_add_test(tests, vector_10_no_chunks);
    tcase_add_test(tests, vector_11_unresolved);
    tcase_add_test(tests, vector_12_64_ranks);
    tcase_add_test(tests, ties_go_to_the_first);
    tcase_add_test(tests, own_bound_replaces);
    tcase_add_test(tests, attention_tp_pads);
    tcase_add_test(tests, the_rest_is_still_computed);
    tcase_add_test(tests, products_past_2_62);
    tcase_add_test(tests, products_without_effect_may_pass_2_62);
    tcase_add_test(tests, experts_past_the_limit);
    tcase_add_test(tests, experts_are_split);
}

SUITE_MAIN("bounds", 60, add)
