// plugin/status.c: texts are cut and terminated, sizes never wrap.

#include "plugin/status.h"

#include "host_tests/suite.h"

#include <string.h>

START_TEST(text_is_cut_and_terminated)
{
    char text[8];
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};

    memset(text, 'x', sizeof text);
    ck_assert_int_eq(fail_with(&error, MOXIE_E_CAPACITY, "tokens %d past %d", 17, 16),
                     MOXIE_E_CAPACITY);
    ck_assert_str_eq(text, "tokens ");
    ck_assert_int_eq(error.code, MOXIE_E_CAPACITY);
    ck_assert_int_eq(error.rank, -1);
    ck_assert_int_eq(fail_rank(&error, MOXIE_E_PEER, 3, "r"), MOXIE_E_PEER);
    ck_assert_int_eq(error.rank, 3);
    ck_assert_int_eq(fail_with(NULL, MOXIE_E_INVALID, "nobody listens"), MOXIE_E_INVALID);
}
END_TEST

START_TEST(codes_have_names)
{
    ck_assert_str_eq(status_name(MOXIE_OK), "OK");
    ck_assert_str_eq(status_name(MOXIE_E_COLLECTIVE_MISMATCH), "COLLECTIVE_MISMATCH");
    ck_assert_str_eq(status_name(MOXIE_E_INTERNAL), "INTERNAL");
    ck_assert_str_eq(status_name(99), "UNKNOWN");
    ck_assert_str_eq(status_name(-1), "UNKNOWN");
}
END_TEST

START_TEST(sizes_are_checked)
{
    int64_t out = -7;

    ck_assert(size_mul((int64_t)1 << 31, (int64_t)1 << 31, &out));
    ck_assert_int_eq(out, (int64_t)1 << 62);
    ck_assert(!size_mul((int64_t)1 << 31, ((int64_t)1 << 31) + 1, &out));
    ck_assert(!size_mul(INT64_MAX, 2, &out));
    ck_assert(!size_add((int64_t)1 << 62, 1, &out));
    ck_assert(!size_add(INT64_MAX, 1, &out));
    ck_assert_int_eq(out, (int64_t)1 << 62);
    ck_assert(size_align(129, 128, &out));
    ck_assert_int_eq(out, 256);
    ck_assert(size_align(0, 128, &out));
    ck_assert_int_eq(out, 0);
    ck_assert(!size_align((int64_t)1 << 62, (int64_t)1 << 21, &out) || out == (int64_t)1 << 62);
    ck_assert_int_eq(ceil_div(7, 4), 2);
    ck_assert_int_eq(ceil_div(0, 4), 0);
    ck_assert_int_eq(ceil_div(INT64_MAX, 1), INT64_MAX);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, text_is_cut_and_terminated);
    tcase_add_test(tests, codes_have_names);
    tcase_add_test(tests, sizes_are_checked);
}

SUITE_MAIN("status", 30, add)
