// plugin/budget.c: a plan over budget names its largest buffers, and values that fit, whatever else
// is wrong beside the sizes.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

#include <stdio.h>
#include <string.h>

static int64_t planned(struct mock_host *mock)
{
    struct verdict verdict;
    int64_t bytes;

    verdict_make(&verdict, mock);
    ck_assert_uint_gt(verdict.plan.buffers_count, 0);
    bytes = (int64_t)(verdict.plan.device_bytes + verdict.plan.symmetric_bytes);
    verdict_free(&verdict);
    return bytes;
}

static void init(struct mock_host *mock, int64_t ranks)
{
    mock_host_init(mock);
    mock_set_ranks(mock, ranks);
    mock_set_i64(mock, "max_prefill_tokens", 4096);
}

START_TEST(names_key_and_largest)
{
    struct mock_host mock;

    init(&mock, 4);
    mock_set_i64(&mock, "device_memory_budget_bytes", 20 << 20);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens",
                   "exceed device_memory_budget_bytes 20971520");
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens",
                   "(forward_tokens = 4096: max_prefill_tokens 4096; largest: mid 12582912, "
                   "pair_out 8388608, window ");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(names_numbers)
{
    struct mock_host mock;

    init(&mock, 4);
    mock_set_i64(&mock, "device_memory_budget_bytes", 1);
    assert_refused(&mock, MOXIE_E_CAPACITY, "device_memory_budget_bytes",
                   "set device_memory_budget_bytes to ");
    ck_assert_int_eq(assert_advice_works(&mock, "device_memory_budget_bytes"), 1);
    mock_set_i64(&mock, "device_memory_budget_bytes", 10 << 20);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens",
                   "or less, or dispatch_rounds_max to ");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(numbers_are_accepted_and_tight)
{
    struct mock_host mock;
    int64_t bytes, fits;
    struct verdict verdict;
    const char *advice;

    init(&mock, 4);
    bytes = planned(&mock);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes);
    assert_accepted(&mock);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes - 1);
    ck_assert_int_eq(assert_advice_works(&mock, "max_prefill_tokens"), 3);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes / 3);
    ck_assert_int_eq(assert_advice_works(&mock, "max_prefill_tokens"), 3);
    // One token more than advised does not fit.
    verdict_make(&verdict, &mock);
    advice = strstr(verdict.report.reasons[0].message, "set max_prefill_tokens to ");
    ck_assert_ptr_nonnull(advice);
    fits = strtoll(advice + strlen("set max_prefill_tokens to "), NULL, 10);
    verdict_free(&verdict);
    mock_set_i64(&mock, "max_prefill_tokens", fits + 1);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens", "exceed");
    mock_host_fini(&mock);
}
END_TEST

// What is planned with the number is the whole budget: one more would pass it, one less is wasted.
START_TEST(numbers_take_the_whole_budget)
{
    struct mock_host mock;

    init(&mock, 4);
    mock_set_i64(&mock, "max_prefill_tokens", 1000);
    mock_set_i64(&mock, "device_memory_budget_bytes", planned(&mock));
    mock_set_i64(&mock, "max_prefill_tokens", 4096);
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens",
                   "set max_prefill_tokens to 1000 or less");
    mock_unset(&mock, "device_memory_budget_bytes");
    mock_set_i64(&mock, "dispatch_rounds_max", 3);
    mock_set_i64(&mock, "device_memory_budget_bytes", planned(&mock));
    mock_unset(&mock, "dispatch_rounds_max");
    assert_refused(&mock, MOXIE_E_CAPACITY, "max_prefill_tokens", "dispatch_rounds_max to 3, or ");
    mock_host_fini(&mock);
}
END_TEST

START_TEST(the_key_that_saves_most)
{
    struct mock_host mock;
    struct verdict verdict;
    const char *advice;
    int64_t bytes;

    // Many layers: the capture outweighs everything else.
    init(&mock, 1);
    mock_set_i64(&mock, "num_layers", 1000);
    bytes = planned(&mock);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes);
    assert_refused(&mock, MOXIE_E_CAPACITY, "capture_routed_experts", "largest: capture 32768000");
    ck_assert_int_eq(assert_advice_works(&mock, "capture_routed_experts"), 2);
    mock_host_fini(&mock);

    // A small capture saves little.
    init(&mock, 1);
    mock_set_i64(&mock, "capture_routed_experts", 1);
    mock_set_i64(&mock, "device_memory_budget_bytes", planned(&mock) / 2);
    ck_assert_int_eq(assert_advice_works(&mock, "max_prefill_tokens"), 2);
    mock_host_fini(&mock);

    // A cap far above what the forward needs.
    init(&mock, 4);
    mock_set_i64(&mock, "max_prefill_tokens", 16);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 4096);
    bytes = planned(&mock);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes / 2);
    ck_assert_int_eq(assert_advice_works(&mock, "max_dispatch_tokens_per_rank"), 2);
    verdict_make(&verdict, &mock);
    advice = strstr(verdict.report.reasons[0].message, "set max_dispatch_tokens_per_rank to ");
    ck_assert_ptr_nonnull(advice);
    // Less may be too few for a forward.
    ck_assert_ptr_null(strstr(advice, " or less"));
    verdict_free(&verdict);
    mock_host_fini(&mock);

    // Two keys of the same size: lowering one is not enough, the host's own bound is.
    init(&mock, 1);
    mock_set_i64(&mock, "warmup_tokens_max", 4096);
    bytes = planned(&mock);
    mock_set_i64(&mock, "device_memory_budget_bytes", bytes / 2);
    ck_assert_int_eq(assert_advice_works(&mock, "forward_tokens_max"), 2);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(host_memory_is_not_counted)
{
    struct mock_host mock;

    init(&mock, 1);
    mock_set_i64(&mock, "device_memory_budget_bytes", planned(&mock));
    mock_set_i64(&mock, "cpu_threads", 512);
    assert_accepted(&mock);
    mock_host_fini(&mock);
}
END_TEST

// Refused values of keys that no size comes from.
static const struct {
    const char *key;
    const char *word; // or NULL
    double number;
    int32_t is_real;
} apart[] = {
    {"activation", "swish", 0, 0},
    {"activation_alpha", NULL, 2.5, 1},
    {"activation_beta", NULL, 2.5, 1},
    {"activation_limit", NULL, 7, 1},
    {"routed_scaling_factor", NULL, 1e300, 1},
    {"apply_router_weight_on_input", NULL, 1, 0},
    {"deterministic", NULL, 2, 0},
    {"dispatch_sms", NULL, -1, 0},
    {"timeout_ms", NULL, 0, 0},
};
#define APART ((int)(sizeof apart / sizeof apart[0]))

static void spoil(struct mock_host *mock, int i)
{
    if (apart[i].word != NULL)
        mock_set_str(mock, apart[i].key, apart[i].word);
    else if (apart[i].is_real)
        mock_set_f64(mock, apart[i].key, apart[i].number);
    else
        mock_set_i64(mock, apart[i].key, (int64_t)apart[i].number);
}

// Each alone, and all but the first at once, beside which nobody judges an activation's parameters.
static int is_spoilt(int turn, int i)
{
    return turn == i || (turn == APART && i > 0);
}

// With the numbers of the plan that there is without the other reasons.
START_TEST(is_told_beside_reasons_without_a_size)
{
    struct mock_host mock;
    struct verdict verdict;
    char words[96];

    init(&mock, 4);
    mock_set_i64(&mock, "top_k", 2);
    (void)snprintf(words, sizeof words, "set device_memory_budget_bytes to %lld",
                   (long long)planned(&mock));
    mock_set_i64(&mock, "device_memory_budget_bytes", 1);
    for (int i = 0; i < APART; i++)
        if (is_spoilt(_i, i)) spoil(&mock, i);
    assert_refused(&mock, MOXIE_E_CAPACITY, "device_memory_budget_bytes", words);
    verdict_make(&verdict, &mock);
    for (int i = 0; i < APART; i++)
        ck_assert_int_eq(verdict_reason(&verdict, apart[i].key) != NULL, is_spoilt(_i, i));
    ck_assert_uint_eq(verdict.report.reasons_count, _i == APART ? APART : 2);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// A size that is refused, or a device whose plan hangs on the activation.
START_TEST(is_not_told_of_a_plan_that_is_unknown)
{
    struct mock_host mock;
    struct verdict verdict;

    init(&mock, 4);
    mock_set_i64(&mock, "device_memory_budget_bytes", 1);
    if (_i == 0)
        mock_set_i64(&mock, "num_layers", 0);
    else
        mock_set_str(&mock, "device", "sm_90");
    if (_i == 2) mock_set_str(&mock, "activation", "swish");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict_reason(&verdict, "device_memory_budget_bytes") != NULL, _i == 1);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, names_key_and_largest);
    tcase_add_test(tests, names_numbers);
    tcase_add_test(tests, numbers_are_accepted_and_tight);
    tcase_add_test(tests, numbers_take_the_whole_budget);
    tcase_add_test(tests, the_key_that_saves_most);
    tcase_add_test(tests, host_memory_is_not_counted);
    tcase_add_loop_test(tests, is_told_beside_reasons_without_a_size, 0, APART + 1);
    tcase_add_loop_test(tests, is_not_told_of_a_plan_that_is_unknown, 0, 3);
}

SUITE_MAIN("budget", 60, add)
