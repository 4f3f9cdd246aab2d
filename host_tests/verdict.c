// Judging configurations in tests.

#include "host_tests/verdict.h"

#include "host_tests/suite.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void verdict_make(struct verdict *verdict, struct mock_host *mock)
{
    memset(verdict, 0, sizeof *verdict);
    config_read(&verdict->config, &mock->host, &verdict->report);
    validate_resolve(&verdict->config);
    bounds_compute(&verdict->bounds, &verdict->config, &verdict->report);
    validate_config(&verdict->config, &verdict->bounds, &verdict->report);
    plan_make(&verdict->plan, &verdict->config, &verdict->bounds, &verdict->report);
    validate_plan(&verdict->config, &verdict->plan, &verdict->report);
    ck_assert_int_eq(verdict->report.memory_failed, 0);
}

void verdict_free(struct verdict *verdict)
{
    report_fini(&verdict->report);
}

static const moxie_reason *entry_find(const moxie_reason *entries, uint64_t count, const char *key)
{
    for (uint64_t i = 0; i < count; i++) {
        if (strcmp(entries[i].key, key) == 0) return &entries[i];
    }
    return NULL;
}

const moxie_reason *verdict_reason(const struct verdict *verdict, const char *key)
{
    return entry_find(verdict->report.reasons, verdict->report.reasons_count, key);
}

const moxie_reason *verdict_warning(const struct verdict *verdict, const char *key)
{
    return entry_find(verdict->report.warnings, verdict->report.warnings_count, key);
}

void assert_accepted(struct mock_host *mock)
{
    struct verdict verdict;

    verdict_make(&verdict, mock);
    ck_assert_msg(verdict.report.reasons_count == 0, "refused: %s",
                  verdict.report.reasons_count == 0 ? "" : verdict.report.reasons[0].message);
    ck_assert_uint_gt(verdict.plan.buffers_count, 0);
    verdict_free(&verdict);
}

void assert_refused(struct mock_host *mock, int32_t code, const char *key, const char *text)
{
    struct verdict verdict;
    const moxie_reason *reason;

    verdict_make(&verdict, mock);
    reason = verdict_reason(&verdict, key);
    ck_assert_msg(reason != NULL, "no reason names %s", key);
    ck_assert_int_eq(reason->code, code);
    ck_assert_str_eq(reason->name, status_name(code));
    ck_assert_msg(strstr(reason->message, text) != NULL, "'%s' is not in: %s", text,
                  reason->message);
    verdict_free(&verdict);
}

void assert_warned(struct mock_host *mock, const char *key, const char *text)
{
    struct verdict verdict;
    const moxie_reason *warning;

    verdict_make(&verdict, mock);
    warning = verdict_warning(&verdict, key);
    ck_assert_msg(warning != NULL, "no warning names %s", key);
    ck_assert_int_eq(warning->code, MOXIE_OK);
    ck_assert_str_eq(warning->name, "WARNING");
    ck_assert_msg(strstr(warning->message, text) != NULL, "'%s' is not in: %s", text,
                  warning->message);
    verdict_free(&verdict);
}

void assert_not_warned(struct mock_host *mock, const char *key)
{
    struct verdict verdict;

    verdict_make(&verdict, mock);
    ck_assert_ptr_null(verdict_warning(&verdict, key));
    verdict_free(&verdict);
}

static void value_apply(struct mock_host *mock, const char *key, const char *value)
{
    if (strspn(value, "-0123456789") == strlen(value))
        mock_set_i64(mock, key, strtoll(value, NULL, 10));
    else if (strspn(value, "-.0123456789") == strlen(value))
        mock_set_f64(mock, key, strtod(value, NULL));
    else
        mock_set_str(mock, key, value);
}

// Applies "KEY to VALUE [or less] [and KEY to VALUE]".
static void alternative_apply(struct mock_host *mock, char *alternative, const char *reason_key)
{
    char *state = NULL;
    char *key = strtok_r(alternative, " ", &state);
    const char *to, *value;

    while (key != NULL) {
        to = strtok_r(NULL, " ", &state);
        ck_assert_ptr_nonnull(to);
        if (strcmp(key, "or") != 0 && strcmp(key, "and") != 0) {
            ck_assert_str_eq(to, "to");
            value = strtok_r(NULL, " ", &state);
            ck_assert_ptr_nonnull(value);
            value_apply(mock, strcmp(key, "it") == 0 ? reason_key : key, value);
        } else if (strcmp(key, "and") == 0) {
            key = (char *)(uintptr_t)to;
            ck_assert_str_eq(strtok_r(NULL, " ", &state), "to");
            value_apply(mock, key, strtok_r(NULL, " ", &state));
        }
        key = strtok_r(NULL, " ", &state);
    }
}

int32_t assert_advice_works(struct mock_host *mock, const char *key)
{
    struct mock_host *changed = malloc(sizeof *changed);
    struct verdict verdict;
    const moxie_reason *reason;
    char alternative[512];
    const char *from, *end;
    int32_t count = 0;

    ck_assert_ptr_nonnull(changed);
    verdict_make(&verdict, mock);
    reason = verdict_reason(&verdict, key);
    ck_assert_msg(reason != NULL, "no reason names %s", key);
    ck_assert_msg(verdict.report.reasons_count == 1, "%s, and also: %s",
                  verdict.report.reasons[0].message,
                  verdict.report.reasons[verdict.report.reasons_count - 1].message);
    from = strstr(reason->message, "set ");
    ck_assert_msg(from != NULL, "no advice in: %s", reason->message);
    for (from += strlen("set "); from != NULL; count++) {
        end = strstr(from, ", or ");
        (void)snprintf(alternative, sizeof alternative, "%.*s",
                       end == NULL ? 511 : (int)(end - from), from);
        mock_host_init(changed);
        memcpy(changed->values, mock->values, sizeof mock->values);
        changed->values_count = mock->values_count;
        alternative_apply(changed, alternative, key);
        assert_accepted(changed);
        mock_host_fini(changed);
        from = end == NULL ? NULL : end + strlen(", or ");
    }
    verdict_free(&verdict);
    free(changed);
    return count;
}
