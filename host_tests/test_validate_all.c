// plugin/validate.c: all reasons at once, the same ones every time, of whatever a host says.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"

#include <stdlib.h>
#include <string.h>

// ---- All at once -------------------------------------------------------------------------------

START_TEST(all_reasons_at_once)
{
    static const char *const wanted[] = {"hidden_size",      "dp_size",
                                         "timeout_ms",       "speculative_draft_tokens",
                                         "activation_limit", "apply_router_weight_on_input",
                                         "runner",           "ep_rank"};
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_unset(&mock, "hidden_size");
    mock_set_i64(&mock, "tp_size", 3);
    mock_set_i64(&mock, "dp_size", 2);
    mock_set_i64(&mock, "ep_rank", 1);
    mock_set_i64(&mock, "top_k", 2);
    mock_set_i64(&mock, "timeout_ms", 0);
    mock_set_str(&mock, "speculative_algorithm", "EAGLE");
    mock_set_f64(&mock, "activation_limit", 7);
    mock_set_i64(&mock, "apply_router_weight_on_input", 1);
    mock_set_str(&mock, "runner", "no_such_runner");
    verdict_make(&verdict, &mock);
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++)
        ck_assert_msg(verdict_reason(&verdict, wanted[i]) != NULL, "no reason names %s", wanted[i]);
    ck_assert_uint_eq(verdict.report.reasons_count, sizeof wanted / sizeof wanted[0]);
    ck_assert_uint_eq(verdict.plan.buffers_count, 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(same_question_same_answer)
{
    struct verdict *first = calloc(2, sizeof *first);
    struct verdict *second;
    struct mock_host mock;

    ck_assert_ptr_nonnull(first);
    second = first + 1;
    mock_host_init(&mock);
    mock_set_ranks(&mock, 4);
    mock_set_i64(&mock, "max_prefill_tokens", 16384);
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", 4096);
    mock_set_i64(&mock, "dispatch_rounds_max", 8);
    mock_set_i64(&mock, "context_length", 77);
    verdict_make(first, &mock);
    verdict_make(second, &mock);
    ck_assert_mem_eq(&first->config, &second->config, sizeof first->config);
    ck_assert_mem_eq(&first->bounds, &second->bounds, sizeof first->bounds);
    ck_assert_mem_eq(&first->plan, &second->plan, sizeof first->plan);
    ck_assert_uint_eq(first->report.warnings_count, second->report.warnings_count);
    for (uint64_t i = 0; i < first->report.warnings_count; i++)
        ck_assert_str_eq(first->report.warnings[i].message, second->report.warnings[i].message);
    verdict_free(first);
    verdict_free(second);
    free(first);
    mock_host_fini(&mock);
}
END_TEST

// ---- Whatever a host says ----------------------------------------------------------------------

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

// About a quarter of the keys, each with a plausible, an extreme or a meaningless value of its
// type.
static void random_set(struct mock_host *mock, uint64_t *state)
{
    static const int64_t numbers[] = {-1,
                                      0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      8,
                                      64,
                                      100,
                                      512,
                                      4096,
                                      1 << 20,
                                      INT32_MAX,
                                      (int64_t)1 << 40,
                                      (int64_t)1 << 62,
                                      INT64_MAX};
    static const double reals[] = {0.0, 1.0, 1.702, -3.5, 1e30};
    static const char *const names[] = {"auto",      "local", "allgather", "alltoall",
                                        "moxie_cpu", "EAGLE", ""};
    char word[CONFIG_TEXT_BYTES];

    for (int32_t key = 0; key < KEY_COUNT; key++) {
        const char *name = config_name((enum config_key)key);

        if (random_next(state) % 4 != 0) continue;
        if (config_type_of((enum config_key)key) == CONFIG_I64) {
            mock_set_i64(mock, name,
                         numbers[random_next(state) % (sizeof numbers / sizeof numbers[0])]);
        } else if (config_type_of((enum config_key)key) == CONFIG_F64) {
            mock_set_f64(mock, name, reals[random_next(state) % 5]);
        } else {
            config_word_text((enum config_key)key, (int32_t)(random_next(state) % 11), word);
            mock_set_str(mock, name, word[0] != '\0' ? word : names[random_next(state) % 7]);
        }
    }
}

START_TEST(every_configuration_is_judged)
{
    struct verdict *verdict = calloc(1, sizeof *verdict);
    struct mock_host *mock = calloc(1, sizeof *mock);
    uint64_t state = 88172645463325252u;
    uint64_t accepted = 0;

    ck_assert(verdict != NULL && mock != NULL);
    for (int32_t n = 0; n < 5000; n++) {
        mock_host_init(mock);
        if (n % 2 == 0) random_set(mock, &state);
        for (int32_t i = 0; n % 2 == 1 && i < 3; i++) // nearly right: a few keys only
            mock_set_i64(mock, config_name((enum config_key)(random_next(&state) % KEY_COUNT)),
                         (int64_t)(random_next(&state) % 3));
        verdict_make(verdict, mock);
        accepted += verdict->report.reasons_count == 0;
        if (verdict->report.reasons_count == 0) ck_assert_uint_gt(verdict->plan.buffers_count, 0);
        for (uint64_t i = 0; i < verdict->report.reasons_count; i++) {
            ck_assert_uint_gt(strlen(verdict->report.reasons[i].key), 0);
            ck_assert_msg(strstr(verdict->report.reasons[i].message, "set ") != NULL,
                          "no advice in: %s", verdict->report.reasons[i].message);
        }
        for (uint64_t i = 0; i < verdict->plan.buffers_count; i++)
            ck_assert_uint_gt(verdict->plan.buffers[i].bytes, 0);
        verdict_free(verdict);
        mock_host_fini(mock);
    }
    ck_assert_uint_gt(accepted, 100);
    free(verdict);
    free(mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, all_reasons_at_once);
    tcase_add_test(tests, same_question_same_answer);
    tcase_add_test(tests, every_configuration_is_judged);
}

SUITE_MAIN("validate_all", 60, add)
