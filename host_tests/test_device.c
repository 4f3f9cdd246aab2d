// plugin/device.c: the devices of this build, and words for those it lacks.

#include "plugin/device.h"

#include "host_tests/suite.h"

#include <string.h>

START_TEST(devices_have_names)
{
    char reason[160];

    ck_assert_ptr_eq(device_find("cpu"), &device_cpu);
    ck_assert_ptr_null(device_find("sm_100"));
    ck_assert_int_gt(device_probe("cpu", reason), 0);
    ck_assert_str_ne(reason, "");
}
END_TEST

START_TEST(what_is_missing_is_said)
{
    char reason[160];

    ck_assert_int_eq(device_probe("sm_100", reason), 0);
    ck_assert_ptr_nonnull(strstr(reason, "built without sm_100 kernels"));
    // Whatever the build and the machine, there is a verdict and a reason.
    reason[0] = '\0';
    ck_assert_int_ge(device_probe("sm_90", reason), 0);
    ck_assert_str_ne(reason, "");
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, devices_have_names);
    tcase_add_test(tests, what_is_missing_is_said);
}

SUITE_MAIN("device", 30, add)
