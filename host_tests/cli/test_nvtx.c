// Which library the ranges of a profiler come from. FAKE_NVTX says what LD_LIBRARY_PATH leads to.

#include "hosts/cli/nvtx.h"

#include "host_tests/cli/fake_nvtx.h"
#include "host_tests/suite.h"

#include <string.h>

START_TEST(both_functions_or_none)
{
    const char *kind = getenv("FAKE_NVTX");
    struct nvtx nvtx;
    struct fake_nvtx fake;

    ck_assert_ptr_nonnull(kind);
    nvtx_load(&nvtx);
    ck_assert_int_eq(nvtx.push != NULL, nvtx.pop != NULL);
    if (strcmp(kind, "none") == 0 || strcmp(kind, "half") == 0) {
        ck_assert(nvtx.push == NULL);
        return;
    }
    ck_assert(nvtx.push != NULL);
    ck_assert(fake_nvtx_find(&fake, strcmp(kind, "old") == 0 ? "libnvToolsExt.so.1"
                                                             : "libnvtx3interop.so.1"));
    (void)nvtx.push("a range");
    ck_assert_int_eq(fake.depth(), 1);
    (void)nvtx.pop();
    ck_assert_int_eq(fake.depth(), 0);
    ck_assert_str_eq(fake.event(0), "+a range");
    ck_assert_str_eq(fake.event(1), "-a range");
    ck_assert_str_eq(fake.event(2), "");
}
END_TEST

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, both_functions_or_none);
}

SUITE_MAIN("cli_nvtx", 30, add_tests)
