#include "host_tests/cli/bench_fakes.h"

#include <check.h>
#include <string.h>

void bench_fakes_find(struct fake_cuda *fake, struct fake_nvtx *ranges)
{
    ck_assert_msg(fake_cuda_find(fake), "LD_LIBRARY_PATH leads to no fake driver");
    ck_assert_msg(fake_nvtx_find(ranges, "libnvtx3interop.so.1"), "nor to the fake NVTX");
    ranges->reset();
}

static void break_call(const struct fake_cuda *fake, const char *name, int nth,
                       int (*bench)(struct fault *fault))
{
    struct fault fault = {.text = ""};

    fake->reset();
    fake->break_call(name, nth, 700);
    ck_assert_msg(bench(&fault) == EXIT_TROUBLE, "%s, call %d", name, nth);
    ck_assert_msg(strstr(fault.text, "CUDA error 700") != NULL, "%s", fault.text);
    ck_assert_int_eq(fake->live(), 0);
}

void bench_break_calls(const struct fake_cuda *fake, const char *const *names, size_t names_count,
                       int most, int (*bench)(struct fault *fault))
{
    struct fault fault = {.text = ""};

    for (size_t i = 0; i < names_count; i++) {
        int calls = 0;

        fake->reset();
        ck_assert_int_eq(bench(&fault), EXIT_OK);
        calls = fake->calls(names[i]);
        ck_assert_int_ge(calls, 2);
        for (int nth = 1; nth < calls; nth += 1 + calls / most)
            break_call(fake, names[i], nth, bench);
        break_call(fake, names[i], calls, bench);
    }
}
