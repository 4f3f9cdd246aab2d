// plugin/threads.c: every index once, everything visible afterwards, whatever runs where.

#include "plugin/threads.h"

#include "host_tests/suite.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define TASKS_MAX 10007

static int32_t starts_left = -1; // threads until one that cannot be started; negative: all can
static int start_error;

int __real_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);
int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attributes,
                          void *(*start)(void *), void *arg)
{
    if (starts_left >= 0 && starts_left-- == 0) return start_error;
    return __real_pthread_create(thread, attributes, start, arg);
}

static int32_t threads_alive(void)
{
    return names_in("/proc/self/task") - 2;
}

static void *nothing(void *arg)
{
    return arg;
}

// Threads of this process without a pool: a sanitizer starts one of its own beside the first.
static int32_t threads_before(void)
{
    pthread_t thread;

    ck_assert_int_eq(pthread_create(&thread, NULL, nothing, NULL), 0);
    (void)pthread_join(thread, NULL);
    return threads_alive();
}

// A joined thread may be seen for a moment longer.
static void expect_threads(int32_t most)
{
    const struct timespec moment = {0, 10000000};

    for (int i = 0; i < 1000 && threads_alive() > most; i++)
        (void)nanosleep(&moment, NULL);
    ck_assert_int_le(threads_alive(), most);
}

static void count_up(void *arg, uint64_t index)
{
    uint32_t *counts = arg;

    counts[index]++;
}

START_TEST(every_index_runs_once)
{
    static const int32_t workers[] = {1, 2, 3, 8};
    static const uint64_t tasks[] = {0, 1, 2, 3, 7, 64, 1000, TASKS_MAX};
    static uint32_t counts[TASKS_MAX];
    int32_t before = threads_before();
    struct threads *threads;
    uint64_t wrong = 0;

    ck_assert_int_eq(threads_create(workers[_i], &threads, NULL), MOXIE_OK);
    for (uint32_t round = 1; round <= 200; round++)
        for (size_t t = 0; t < sizeof tasks / sizeof tasks[0]; t++) {
            memset(counts, 0, sizeof counts);
            threads_parallel_for(threads, tasks[t], count_up, counts);
            for (uint64_t i = 0; i < TASKS_MAX; i++)
                wrong += counts[i] != (i < tasks[t]);
        }
    ck_assert_uint_eq(wrong, 0);
    threads_destroy(threads);
    expect_threads(before);
}
END_TEST

struct gathering {
    pthread_barrier_t barrier;
    char names[4][16];
    int masked[4];
    pthread_t self[4];
};

// Ends only when four threads are in a task at once.
static void gather(void *arg, uint64_t index)
{
    struct gathering *gathering = arg;
    sigset_t mask;

    (void)pthread_barrier_wait(&gathering->barrier);
    (void)pthread_getname_np(pthread_self(), gathering->names[index], 16);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    gathering->masked[index] = sigismember(&mask, SIGUSR1) && sigismember(&mask, SIGPROF);
    gathering->self[index] = pthread_self();
}

START_TEST(all_workers_take_part_under_their_names)
{
    struct gathering gathering;
    struct threads *threads;
    int32_t callers = 0;
    sigset_t mask;

    memset(&gathering, 0, sizeof gathering);
    ck_assert_int_eq(pthread_barrier_init(&gathering.barrier, NULL, 4), 0);
    ck_assert_int_eq(threads_create(4, &threads, NULL), MOXIE_OK);
    for (int round = 0; round < 100; round++)
        threads_parallel_for(threads, 4, gather, &gathering);
    for (int i = 0; i < 4; i++) {
        if (pthread_equal(gathering.self[i], pthread_self())) {
            callers++;
            continue;
        }
        ck_assert_int_eq(strncmp(gathering.names[i], "moxie-", 6), 0);
        ck_assert_int_eq(gathering.masked[i], 1);
    }
    ck_assert_int_eq(callers, 1);
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    ck_assert_int_eq(sigismember(&mask, SIGUSR1), 0);
    threads_destroy(threads);
    (void)pthread_barrier_destroy(&gathering.barrier);
}
END_TEST

// What SIGSEGV's handler opens.
static unsigned char *closed_pages;
static long page_bytes;

static void open_page(int number, siginfo_t *info, void *context)
{
    unsigned char *at = info->si_addr;

    (void)number;
    (void)context;
    if (at < closed_pages || at >= closed_pages + 64 * page_bytes) _exit(2);
    at = closed_pages + (at - closed_pages) / page_bytes * page_bytes;
    if (mprotect(at, (size_t)page_bytes, PROT_READ | PROT_WRITE) != 0) _exit(3);
}

// Two threads at once, so that one of them is a worker.
static void touch_pages(void *arg, uint64_t index)
{
    (void)pthread_barrier_wait(arg);
    for (uint64_t page = index; page < 64; page += 2)
        closed_pages[page * (uint64_t)page_bytes] = 1;
}

START_TEST(faults_of_a_worker_reach_the_hosts_handler)
{
    struct sigaction action = {.sa_sigaction = open_page, .sa_flags = SA_SIGINFO};
    struct sigaction before;
    pthread_barrier_t both;
    struct threads *threads;

    page_bytes = sysconf(_SC_PAGESIZE);
    closed_pages =
        mmap(NULL, 64 * (size_t)page_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ck_assert_ptr_ne(closed_pages, MAP_FAILED);
    ck_assert_int_eq(sigaction(SIGSEGV, &action, &before), 0);
    ck_assert_int_eq(pthread_barrier_init(&both, NULL, 2), 0);
    ck_assert_int_eq(threads_create(2, &threads, NULL), MOXIE_OK);
    threads_parallel_for(threads, 2, touch_pages, &both);
    threads_destroy(threads);
    (void)pthread_barrier_destroy(&both);
    (void)sigaction(SIGSEGV, &before, NULL);
    for (int page = 0; page < 64; page++)
        ck_assert_int_eq(closed_pages[page * page_bytes], 1);
    (void)munmap(closed_pages, 64 * (size_t)page_bytes);
}
END_TEST

struct nest {
    struct threads *threads;
    uint32_t counts[8][16];
};

static void outer(void *arg, uint64_t index)
{
    struct nest *nest = arg;

    threads_parallel_for(nest->threads, 16, count_up, nest->counts[index]);
}

START_TEST(a_nested_call_runs_by_itself)
{
    struct nest nest;

    memset(&nest, 0, sizeof nest);
    ck_assert_int_eq(threads_create(3, &nest.threads, NULL), MOXIE_OK);
    for (uint32_t round = 1; round <= 100; round++) {
        threads_parallel_for(nest.threads, 8, outer, &nest);
        for (int i = 0; i < 8 * 16; i++)
            ck_assert_uint_eq(nest.counts[i / 16][i % 16], round);
    }
    threads_destroy(nest.threads);
}
END_TEST

START_TEST(a_pool_of_one_is_the_caller)
{
    int32_t before = threads_before();
    struct threads *threads;
    uint32_t counts[4] = {0};

    ck_assert_int_eq(threads_create(1, &threads, NULL), MOXIE_OK);
    threads_parallel_for(threads, 4, count_up, counts);
    ck_assert_uint_eq(counts[3], 1);
    ck_assert_int_le(threads_alive(), before);
    threads_destroy(threads);
    threads_destroy(NULL);
}
END_TEST

START_TEST(a_thread_that_cannot_start_ends_the_others)
{
    int32_t before = threads_before();
    char text[256], wanted[64];
    moxie_error error = {.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
    struct threads *threads;
    sigset_t mask;

    for (int32_t nth = 0; nth < 5; nth++) {
        starts_left = nth;
        start_error = nth == 2 ? ENOMEM : EAGAIN;
        ck_assert_int_eq(threads_create(6, &threads, &error),
                         nth == 2 ? MOXIE_E_MEMORY : MOXIE_E_UNAVAILABLE);
        ck_assert_ptr_null(threads);
        ck_assert_ptr_nonnull(strstr(text, " of 5 cannot be started"));
        // As many as were: nth workers, and who calls.
        (void)snprintf(wanted, sizeof wanted, "set cpu_threads to %d%s, or raise", nth + 1,
                       nth == 0 ? "" : " or less");
        ck_assert_ptr_nonnull(strstr(text, wanted));
        expect_threads(before);
    }
    starts_left = -1;
    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    ck_assert_int_eq(sigismember(&mask, SIGUSR1), 0); // nor are the caller's signals left blocked
}
END_TEST

START_TEST(sizes_are_checked)
{
    struct threads *threads;

    ck_assert_int_eq(threads_create(0, &threads, NULL), MOXIE_E_INVALID);
    ck_assert_int_eq(threads_create(INT32_MIN, &threads, NULL), MOXIE_E_INVALID);
    ck_assert_int_eq(threads_create(THREADS_WORKERS_MAX + 1, &threads, NULL), MOXIE_E_INVALID);
    ck_assert_ptr_null(threads);
}
END_TEST

// Processor time, which a busy machine can only make less of.
START_TEST(idle_workers_sleep)
{
    const struct timespec idle = {0, 400000000};
    struct timespec before, after;
    struct threads *threads;
    uint32_t counts[64];
    int64_t used_ns;

    ck_assert_int_eq(threads_create(8, &threads, NULL), MOXIE_OK);
    threads_parallel_for(threads, 64, count_up, counts);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
    (void)nanosleep(&idle, NULL);
    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
    used_ns = (int64_t)(after.tv_sec - before.tv_sec) * 1000000000 + after.tv_nsec - before.tv_nsec;
    ck_assert_int_lt(used_ns, 100000000);
    threads_destroy(threads);
}
END_TEST

START_TEST(a_forked_child_does_the_work_itself)
{
    struct threads *threads;
    uint32_t counts[64] = {0};
    pid_t child;
    int status;

    ck_assert_int_eq(threads_create(3, &threads, NULL), MOXIE_OK);
    threads_parallel_for(threads, 64, count_up, counts);
    child = fork();
    if (child == 0) {
        threads_parallel_for(threads, 64, count_up, counts);
        threads_destroy(threads);
        _exit(counts[0] == 2 && counts[63] == 2 ? 0 : 1);
    }
    ck_assert_int_eq(waitpid(child, &status, 0), child);
    ck_assert(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    threads_destroy(threads);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_index_runs_once, 0, 4);
    tcase_add_test(tests, all_workers_take_part_under_their_names);
    tcase_add_test(tests, faults_of_a_worker_reach_the_hosts_handler);
    tcase_add_test(tests, a_nested_call_runs_by_itself);
    tcase_add_test(tests, a_pool_of_one_is_the_caller);
    tcase_add_test(tests, a_thread_that_cannot_start_ends_the_others);
    tcase_add_test(tests, sizes_are_checked);
    tcase_add_test(tests, idle_workers_sleep);
    tcase_add_test(tests, a_forked_child_does_the_work_itself);
}

SUITE_MAIN("threads", 120, add)
