// plugin/report.c: entries grow, keep their order, and own their text.

#include "plugin/config.h"

#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

START_TEST(entries_grow_in_order)
{
    struct report report = {0};
    char text[64];

    for (int32_t i = 0; i < 100; i++) {
        report_reason(&report, MOXIE_E_CAPACITY, KEY_TOP_K, "reason %d", i);
        report_warning(&report, KEY_DEVICE, "warning %d", i);
    }
    ck_assert_uint_eq(report.reasons_count, 100);
    ck_assert_uint_eq(report.warnings_count, 100);
    for (int32_t i = 0; i < 100; i++) {
        (void)snprintf(text, sizeof text, "reason %d", i);
        ck_assert_str_eq(report.reasons[i].message, text);
        ck_assert_str_eq(report.reasons[i].name, "CAPACITY");
        ck_assert_str_eq(report.reasons[i].key, "top_k");
        ck_assert_uint_eq(report.reasons[i].struct_size, sizeof(moxie_reason));
        ck_assert_str_eq(report.warnings[i].name, "WARNING");
        ck_assert_int_eq(report.warnings[i].code, MOXIE_OK);
    }
    ck_assert_int_eq(report.memory_failed, 0);
    report_fini(&report);
    ck_assert_ptr_null(report.reasons);
    report_fini(&report); // twice is once
}
END_TEST

START_TEST(long_texts_are_cut)
{
    struct report report = {0};
    char text[4000];

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    report_reason(&report, MOXIE_E_CONFIG, KEY_TOP_K, "%s", text);
    ck_assert_uint_eq(strlen(report.reasons[0].message), 1023);
    report_fini(&report);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, entries_grow_in_order);
    tcase_add_test(tests, long_texts_are_cut);
}

SUITE_MAIN("report", 30, add)
