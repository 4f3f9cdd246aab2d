// host_tests/alloc_count.h sees every way to allocate, from every thread, and nothing outside the
// marks.

#include "host_tests/alloc_count.h"
#include "host_tests/suite.h"

#include <pthread.h>
#include <string.h>

// Keeps the compiler from dropping an allocation that nobody reads.
static void *volatile sink;

static void *allocate_once(void *unused)
{
    (void)unused;
    sink = malloc(32);
    free(sink);
    return NULL;
}

START_TEST(nothing_counts_as_nothing)
{
    struct alloc_count count = {7, 7};

    sink = malloc(16);
    alloc_count_begin();
    alloc_count_end(&count);
    free(sink);
    ck_assert_uint_eq(count.allocations, 0);
    ck_assert_uint_eq(count.frees, 0);
}
END_TEST

START_TEST(every_way_to_allocate_counts)
{
    struct alloc_count count;
    void *memory = NULL;
    int answer;

    alloc_count_begin();
    sink = malloc(16);
    free(sink);
    sink = calloc(4, 16);
    free(sink);
    sink = aligned_alloc(64, 128);
    free(sink);
    answer = posix_memalign(&memory, 64, 128);
    sink = memory;
    free(sink);
    sink = strdup("libc allocates too");
    free(sink);
    free(NULL);
    alloc_count_end(&count);
    ck_assert_int_eq(answer, 0);
    ck_assert_uint_eq(count.allocations, 3 + 2 * ALLOC_COUNT_ALIGNED);
    ck_assert_uint_eq(count.frees, 5);
}
END_TEST

START_TEST(realloc_counts)
{
    struct alloc_count count;
    void *memory = malloc(16);

    alloc_count_begin();
    sink = realloc(memory, 1 << 20);
    alloc_count_end(&count);
    free(sink);
    ck_assert_uint_ge(count.allocations, 1);
}
END_TEST

START_TEST(other_threads_count)
{
    struct alloc_count count;
    pthread_t thread;

    alloc_count_begin();
    ck_assert_int_eq(pthread_create(&thread, NULL, allocate_once, NULL), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    alloc_count_end(&count);
    ck_assert_uint_ge(count.allocations, 1);
    ck_assert_uint_ge(count.frees, 1);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, nothing_counts_as_nothing);
    tcase_add_test(tests, every_way_to_allocate_counts);
    tcase_add_test(tests, realloc_counts);
    tcase_add_test(tests, other_threads_count);
}

SUITE_MAIN("alloc_count", 30, add)
