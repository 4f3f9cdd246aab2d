// plugin/budget.c: a plan over budget names its largest buffers, and values that fit.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

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
    mock_set_i64(mock, "dp_size", ranks);
    mock_set_i64(mock, "tp_size", ranks);
    mock_set_i64(mock, "ep_size", ranks);
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

START_TEST(the_key_that_saves_most)
{
    struct mock_host mock;
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

static void add(TCase *tests)
{
    tcase_add_test(tests, names_key_and_largest);
    tcase_add_test(tests, names_numbers);
    tcase_add_test(tests, numbers_are_accepted_and_tight);
    tcase_add_test(tests, the_key_that_saves_most);
    tcase_add_test(tests, host_memory_is_not_counted);
}

SUITE_MAIN("budget", 60, add)
