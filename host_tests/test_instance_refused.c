// plugin/instance.c: a configuration that is refused has no plan, and its text loses no reason
// unseen; what cannot be taken leaves nothing behind.

#include "plugin/instance.h"

#include "host_tests/kernel_files.h"
#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <fenv.h>
#include <math.h>

static moxie_instance *open_instance(struct mock_host *mock)
{
    static const struct registry nobody;
    moxie_instance *instance = NULL;

    ck_assert_int_eq(instance_open(&mock->host, &nobody, &instance, &mock->error), MOXIE_OK);
    return instance;
}

// The sizes are known, and are what is wrong.
START_TEST(a_plan_over_its_budget_shows_no_buffers)
{
    struct mock_host mock;
    moxie_instance *instance;
    const moxie_plan *plan = NULL;
    struct said said;

    said_init(&said);
    mock_host_init(&mock);
    mock_set_i64(&mock, "device_memory_budget_bytes", 1);
    instance = open_instance(&mock);
    SAID(&said, MOXIE_E_CONFIG, instance_plan(instance, &plan, &said.error),
         "device_memory_budget_bytes to ");
    ck_assert_uint_eq(plan->buffers_count, 0);
    ck_assert_ptr_null(plan->buffers);
    ck_assert_uint_eq(
        plan->device_bytes + plan->symmetric_bytes + plan->pinned_bytes + plan->host_bytes, 0);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

// Whatever the length of what is before: all of them, or how many more there are.
START_TEST(reasons_that_do_not_fit_are_counted)
{
    static const char *const keys[] = {
        "hidden_size", "intermediate_size", "num_experts",        "top_k",
        "num_layers",  "dp_size",           "max_prefill_tokens", "context_length",
        "tp_size",     "ep_size",           "warmup_tokens_max",  "cpu_threads"};
    char word[101] = "", text[2048]; // more than there is to say
    moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};
    const moxie_report *report = NULL;
    struct mock_host mock;
    moxie_instance *instance;
    int counted;

    mock_host_init(&mock);
    memset(word, 'x', (size_t)_i);
    mock_set_str(&mock, "activation", word);
    mock_set_str(&mock, "weight_format", word);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        mock_set_i64(&mock, keys[i], -1);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_accepted(instance, &error), MOXIE_E_CONFIG);
    ck_assert_int_eq(instance_validate(instance, &report), MOXIE_OK);
    counted = strstr(text, " more, see validate()") != NULL;
    for (uint64_t i = 0; i < report->reasons_count && !counted; i++)
        ck_assert_msg(strstr(text, report->reasons[i].message) != NULL, "%s is not in %s",
                      report->reasons[i].key, text);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(no_number_raises_anything_in_the_hosts_thread)
{
    static const double numbers[] = {NAN, 1e300, 1e-300};
    struct mock_host mock;
    moxie_instance *instance;
    int traps;

    mock_host_init(&mock);
    mock_set_f64(&mock, "activation_limit", numbers[_i]);
    (void)feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
    traps = fegetexcept();
    instance = open_instance(&mock);
    ck_assert_int_eq(fegetexcept(), traps);
    (void)fedisableexcept(FE_ALL_EXCEPT);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(what_cannot_be_taken_leaves_nothing)
{
    const uint32_t set = 1u << BUFFER_PAIR_ROW | 1u << BUFFER_CPU_SCRATCH;
    struct mock_host mock;
    moxie_instance *instance;
    struct said said;

    said_init(&said);
    mock_host_init(&mock);
    mock_set_i64(&mock, "cpu_threads", 3);
    instance = open_instance(&mock);
    ACCEPTED(&said, instance_device(instance, &said.error));
    for (uint64_t nth = 1; nth <= 2; nth++) {
        mock.allocate_fail_at = nth;
        mock.allocate_calls = 0;
        SAID(&said, MOXIE_E_MEMORY, instance_take(instance, set, &said.error), "could not give");
        ck_assert_ptr_null(instance->threads);
    }
    mock.allocate_fail_at = 0;
    instance->plan.limits.threads = THREADS_WORKERS_MAX + 1;
    SAID(&said, MOXIE_E_INVALID, instance_take(instance, set, &said.error), "a pool has 1 to");
    ck_assert_uint_eq(mock.bytes_live, 0);
    ck_assert_uint_eq(instance->memory.bytes_held, 0);
    ck_assert_int_eq(instance->users, 0);
    instance->plan.limits.threads = 3;
    ACCEPTED(&said, instance_take(instance, set, &said.error));
    ck_assert_ptr_nonnull(instance->threads);
    instance_drop(instance, set);
    ACCEPTED(&said, instance_close(instance, &said.error));
    mock_host_fini(&mock);
}
END_TEST

static void free_kib(char meminfo[64], uint64_t bytes)
{
    (void)snprintf(meminfo, 64, "MemAvailable: %llu kB\n", (unsigned long long)(bytes >> 10));
}

// By what the plan takes of the machine, or of a group that has less; and by no more than the text
// asks for. A host's own allocator has limits of its own.
START_TEST(a_plan_past_what_is_free_is_refused)
{
    const uint32_t set = 1u << BUFFER_PAIR_ROW | 1u << BUFFER_CPU_SCRATCH;
    char meminfo[64], limit[32];
    const struct kernel_file machine[] = {{"/proc/meminfo", meminfo}, {0}};
    const struct kernel_file group[] = {{"/proc/meminfo", meminfo},
                                        {"/sys/fs/cgroup/memory.max", limit},
                                        {"/sys/fs/cgroup/memory.current", "0\n"},
                                        {0}};
    struct mock_host mock;
    moxie_instance *instance;
    uint64_t bytes;
    struct said said;

    said_init(&said);
    mock_host_init(&mock);
    mock_set_i64(&mock, "forward_tokens_max", 4096);
    instance = open_instance(&mock);
    bytes = instance->plan.device_bytes + instance->plan.host_bytes + instance->plan.pinned_bytes +
            instance->plan.symmetric_bytes;
    free_kib(meminfo, bytes - 1024);
    (void)snprintf(limit, sizeof limit, "%llu\n", (unsigned long long)bytes - 2048);
    ACCEPTED(&said, instance_device(instance, &said.error));
    kernel_files = machine;
    ACCEPTED(&said, instance_take(instance, set, &said.error));
    instance_drop(instance, set);
    instance->host.allocate = NULL;
    instance->host.release = NULL;
    SAID(&said, MOXIE_E_MEMORY, instance_take(instance, set, &said.error), "the plan's device ",
         "memory available (the machine's): set forward_tokens_max to 40",
         " or less, or free memory");
    kernel_files = group;
    SAID(&said, MOXIE_E_MEMORY, instance_take(instance, set, &said.error),
         "bytes of memory available (the limit of its control group",
         "set forward_tokens_max to 40", "raise that limit");
    ck_assert_int_eq(instance->users, 0);
    ck_assert_uint_eq(instance->memory.bytes_held, 0);
    free_kib(meminfo, bytes + 1024);
    kernel_files = machine;
    ACCEPTED(&said, instance_take(instance, set, &said.error));
    // What is taken is no longer free, and is not counted twice.
    free_kib(meminfo, 0);
    ACCEPTED(&said, instance_take(instance, set, &said.error));
    instance_drop(instance, set);
    instance_drop(instance, set);
    kernel_files = NULL;
    ACCEPTED(&said, instance_close(instance, &said.error));
    mock_host_fini(&mock);
}
END_TEST

// The windows between ranks among it, which are opened last.
START_TEST(windows_are_of_what_is_taken)
{
    const uint32_t set = 1u << BUFFER_PAIR_ROW | 1u << BUFFER_CPU_SCRATCH;
    char meminfo[64], words[64];
    const struct kernel_file machine[] = {{"/proc/meminfo", meminfo}, {0}};
    struct mock_host mock;
    moxie_instance *instance;
    uint64_t apart, symmetric;
    struct said said;

    said_init(&said);
    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_i64(&mock, "forward_tokens_max", 4096);
    mock.host.allocate = NULL;
    mock.host.release = NULL;
    instance = open_instance(&mock);
    apart = instance->plan.device_bytes + instance->plan.host_bytes;
    symmetric = instance->plan.symmetric_bytes;
    ck_assert_uint_gt(symmetric, 4096);
    (void)snprintf(words, sizeof words, " + symmetric %llu + host ", (unsigned long long)symmetric);
    ACCEPTED(&said, instance_device(instance, &said.error));
    kernel_files = machine;
    free_kib(meminfo, apart + symmetric - 1024);
    SAID(&said, MOXIE_E_MEMORY, instance_take(instance, set, &said.error), words,
         "(the machine's)");
    free_kib(meminfo, apart + symmetric + 1024);
    ACCEPTED(&said, instance_take(instance, set, &said.error));
    instance_drop(instance, set);
    kernel_files = NULL;
    ACCEPTED(&said, instance_close(instance, &said.error));
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, a_plan_over_its_budget_shows_no_buffers);
    tcase_add_loop_test(tests, reasons_that_do_not_fit_are_counted, 1, 101);
    tcase_add_loop_test(tests, no_number_raises_anything_in_the_hosts_thread, 0, 3);
    tcase_add_test(tests, what_cannot_be_taken_leaves_nothing);
    tcase_add_test(tests, a_plan_past_what_is_free_is_refused);
    tcase_add_test(tests, windows_are_of_what_is_taken);
}

SUITE_MAIN("instance_refused", 20, add)
