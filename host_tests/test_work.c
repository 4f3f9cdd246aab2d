// kernels/cpu/work.c: what a task computes does not depend on the floating point mode of the thread
// that runs it, and leaves that as it was.

#include "kernels/cpu/work.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <fenv.h>
#include <string.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define ITEMS   64
#define NUMBERS 5

struct results {
    float (*numbers)[NUMBERS]; // [ITEMS]
};

// Rounded, below the smallest normal number, from below it, past the largest, and none.
static void compute(struct work *work, unsigned char *scratch)
{
    const struct results *results = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t i = first; i < end; i++) {
            volatile float one = 1.0f, three = 3.0f, small = 0x1p-100f, large = 0x1p100f;
            volatile float zero = 0.0f, subnormal = 0x1p-140f;

            results->numbers[i][0] = one / three;
            results->numbers[i][1] = small * 0x1p-40f;
            results->numbers[i][2] = subnormal * large;
            results->numbers[i][3] = large * large;
            results->numbers[i][4] = zero / zero;
        }
    }
}

// The host's thread: as it starts, rounding downwards, without subnormals, with traps.
static void set_mode(int mode)
{
    if (mode == 1) ck_assert_int_eq(fesetround(FE_DOWNWARD), 0);
#if defined(__x86_64__)
    if (mode == 2) _mm_setcsr(_mm_getcsr() | 0x8040u);
#endif
    if (mode == 3) (void)feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
}

// All that set_mode may change, and what was raised.
static uint32_t get_mode(void)
{
#if defined(__x86_64__)
    return _mm_getcsr();
#else
    return (uint32_t)(fegetround() ^ fegetexcept() << 8 ^ fetestexcept(FE_ALL_EXCEPT));
#endif
}

START_TEST(no_mode_of_the_host_counts)
{
    static float want[ITEMS][NUMBERS], got[ITEMS][NUMBERS];
    const struct results wanted = {want}, gotten = {got};
    struct work work = {.body = compute, .args = &wanted, .items = ITEMS, .grain = 1};
    struct cpu_stream stream;
    uint32_t before, after;

    stream_init(&stream, _i / 4 == 0 ? 1 : 4, CPU_SCALAR);
    work_run(&work, &stream, INT64_MAX);
    ck_assert(want[0][1] > 0.0f && want[0][2] > 0.0f);
    work.args = &gotten;
    (void)feclearexcept(FE_ALL_EXCEPT);
    set_mode(_i % 4);
    before = get_mode();
    work_run(&work, &stream, INT64_MAX);
    after = get_mode();
    (void)fesetenv(FE_DFL_ENV);
    ck_assert_mem_eq(got, want, sizeof got);
    ck_assert_uint_eq(after, before);
    stream_fini(&stream);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, no_mode_of_the_host_counts, 0, 8);
}

SUITE_MAIN("work", 60, add)
