// plugin/log.c: whole lines for the host's callback, and none without one.

#include "plugin/log.h"

#include "host_tests/mock_host.h"
#include "host_tests/suite.h"

#include <string.h>

START_TEST(lines_reach_the_host)
{
    struct mock_host mock;

    mock_host_init(&mock);
    log_line(&mock.host, MOXIE_LOG_WARNING, "config", "%s is %d", "top_k", 7);
    log_line(&mock.host, MOXIE_LOG_HOST_MISBEHAVING, "thread", "%s", "");
    ck_assert_str_eq(mock.log, "WARNING config: top_k is 7\nHOST_MISBEHAVING thread: \n");
    ck_assert_uint_eq(mock.log_lines, 2);
    mock.host.log = NULL;
    log_line(&mock.host, MOXIE_LOG_ERROR, "config", "nobody listens");
    ck_assert_uint_eq(mock.log_lines, 2);
    mock_host_fini(&mock);
}
END_TEST

// The mock checks that the length is that of the text.
START_TEST(long_lines_are_cut)
{
    struct mock_host mock;
    char text[2000];

    mock_host_init(&mock);
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = '\0';
    log_line(&mock.host, MOXIE_LOG_INFO, "plan", "%s", text);
    ck_assert_uint_eq(mock.log_bytes, strlen("INFO plan: \n") + 511);
    text[511] = '\0';
    log_line(&mock.host, MOXIE_LOG_INFO, "plan", "%s", text);
    ck_assert_uint_eq(mock.log_bytes, 2 * (strlen("INFO plan: \n") + 511));
    mock_host_fini(&mock);
}
END_TEST

START_TEST(a_line_is_one_line)
{
    struct mock_host mock;

    mock_host_init(&mock);
    log_line(&mock.host, MOXIE_LOG_INFO, "config", "runner %s", "a\nERROR b\r\tc\x7f\xc3\xa9");
    ck_assert_str_eq(mock.log, "INFO config: runner a ERROR b  c\x7f\xc3\xa9\n");
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, lines_reach_the_host);
    tcase_add_test(tests, long_lines_are_cut);
    tcase_add_test(tests, a_line_is_one_line);
}

SUITE_MAIN("log", 10, add)
