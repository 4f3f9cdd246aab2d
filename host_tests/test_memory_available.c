// plugin/memory_available.c: what the kernel and the limits of control groups leave.

#include "plugin/memory_available.h"

#include "host_tests/kernel_files.h"
#include "host_tests/suite.h"

#define MIB (UINT64_C(1) << 20)

#define MEMINFO                                                                                    \
    {                                                                                              \
        "/proc/meminfo", "MemTotal:       32768 kB\nMemAvailable:    16384 kB\n"                   \
                         "SwapFree:              0 kB\n"                                           \
    }
#define GROUP_AT(path, usage, files)                                                               \
    {"/sys/fs/cgroup" path "/memory.current", usage},                                              \
    {                                                                                              \
        "/sys/fs/cgroup" path "/memory.stat",                                                      \
            "anon 1\nfile 7\ninactive_file " files "\nactive_file 0\n"                             \
    }
#define GROUP(usage, files) GROUP_AT("", usage, files)
#define GROUP_1(path, limit, usage)                                                                \
    {"/sys/fs/cgroup/memory" path "/memory.limit_in_bytes", limit},                                \
    {                                                                                              \
        "/sys/fs/cgroup/memory" path "/memory.usage_in_bytes", usage                               \
    }

#define SWAP(version, limit, usage)                                                                \
    {"/proc/meminfo", "MemAvailable: 16384 kB\nSwapFree: 8192 kB\n"}, LIMITS_##version(limit, usage)
#define LIMITS_1(limit, usage) GROUP_1("", limit, usage)
#define LIMITS_2(limit, usage)                                                                     \
    {"/sys/fs/cgroup/memory.max", limit},                                                          \
    {                                                                                              \
        "/sys/fs/cgroup/memory.current", usage                                                     \
    }
#define SWAP_MAX(limit, usage)                                                                     \
    {"/sys/fs/cgroup/memory.swap.max", limit},                                                     \
    {                                                                                              \
        "/sys/fs/cgroup/memory.swap.current", usage                                                \
    }
#define MEMSW(limit, usage)                                                                        \
    {"/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", limit},                                  \
    {                                                                                              \
        "/sys/fs/cgroup/memory/memory.memsw.usage_in_bytes", usage                                 \
    }

static const struct {
    struct kernel_file files[12];
    uint64_t available;
} machines[] = {
    {{MEMINFO}, 16 * MIB},
    {{{"/proc/meminfo", "MemAvailable: 8192 kB\nSwapFree: 8192 kB\n"}}, 16 * MIB},
    // No limit, and one past what the machine has.
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "max\n"}, GROUP("12582912\n", "0")}, 16 * MIB},
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "134217728\n"}, GROUP("12582912\n", "0")}, 16 * MIB},
    // Of 16 MiB three quarters are held, of which pages of files are another quarter, or all.
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "16777216\n"}, GROUP("12582912\n", "0")}, 4 * MIB},
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "16777216\n"}, GROUP("12582912\n", "4194304")},
     8 * MIB},
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "8388608\n"}, GROUP("4194304\n", "4194305")}, 8 * MIB},
    {{MEMINFO, {"/sys/fs/cgroup/memory.max", "4194304\n"}, GROUP("4194305\n", "0")}, 0},
    // Version 1.
    {{MEMINFO,
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "8388608\n"},
      {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "6291456\n"},
      {"/sys/fs/cgroup/memory/memory.stat",
       "inactive_file 5\ntotal_inactive_file 1048576\ntotal_active_file 1048576\n"}},
     4 * MIB},
    // The process's own group has less than those above it, or one of those has.
    {{MEMINFO,
      {"/proc/self/cgroup", "0::/slurm/job_1\n"},
      {"/sys/fs/cgroup/slurm/job_1/memory.max", "8388608\n"},
      GROUP_AT("/slurm/job_1", "4194304\n", "1048576"),
      {"/sys/fs/cgroup/slurm/memory.max", "12582912\n"},
      GROUP_AT("/slurm", "4194304\n", "0")},
     5 * MIB},
    {{MEMINFO,
      {"/proc/self/cgroup", "0::/slurm/job_1\n"},
      {"/sys/fs/cgroup/slurm/job_1/memory.max", "max\n"},
      GROUP_AT("/slurm/job_1", "4194304\n", "0"),
      {"/sys/fs/cgroup/slurm/memory.max", "8388608\n"},
      GROUP_AT("/slurm", "4194304\n", "0")},
     4 * MIB},
    {{MEMINFO,
      {"/proc/self/cgroup", "9:name=systemd:/other\n4:memory:/job\n1:cpu:/other\n0::/\n"},
      GROUP_1("/job", "8388608\n", "1048576\n"),
      GROUP_1("/other", "1048576\n", "0\n"),
      GROUP_1("", "9223372036854771712\n", "0\n")},
     7 * MIB},
    // Of a group that is not here, as in a container that has no namespace of groups, the root is.
    {{MEMINFO,
      {"/proc/self/cgroup", "4:memory:/docker/1\n"},
      GROUP_1("", "8388608\n", "1048576\n")},
     7 * MIB},
    {{MEMINFO,
      {"/proc/self/cgroup", "0::/\n"},
      {"/sys/fs/cgroup/memory.max", "8388608\n"},
      GROUP("1048576\n", "0")},
     7 * MIB},
    // Of 8 MiB of swap a group has none, what its limit leaves, or all. Version 1 limits the sum.
    {{SWAP(2, "8388608", "1048576"), SWAP_MAX("0\n", "0\n")}, 7 * MIB},
    {{SWAP(2, "8388608", "1048576"), SWAP_MAX("2097152\n", "1048576\n")}, 8 * MIB},
    {{SWAP(2, "8388608", "1048576"), SWAP_MAX("1048576\n", "2097152\n")}, 7 * MIB},
    {{SWAP(2, "8388608", "1048576"), SWAP_MAX("max\n", "1048576\n")}, 15 * MIB},
    {{SWAP(2, "8388608", "1048576"), SWAP_MAX("134217728\n", "0\n")}, 15 * MIB},
    {{SWAP(2, "8388608", "1048576")}, 15 * MIB},
    {{SWAP(1, "8388608", "1048576"), MEMSW("8388608\n", "1048576\n")}, 7 * MIB},
    {{SWAP(1, "8388608", "1048576"), MEMSW("10485760\n", "2097152\n")}, 8 * MIB},
    {{SWAP(1, "8388608", "1048576"), MEMSW("9223372036854771712\n", "1048576\n")}, 15 * MIB},
    {{SWAP(1, "8388608", "1048576")}, 15 * MIB},
};
#define MACHINES ((int)(sizeof machines / sizeof machines[0]))

static uint64_t least(void)
{
    const struct memory_available available = memory_available();
    const uint64_t group = available.group < available.above ? available.group : available.above;

    return available.machine < group ? available.machine : group;
}

START_TEST(no_more_than_there_is)
{
    kernel_files = machines[_i].files;
    ck_assert_uint_eq(least(), machines[_i].available);
    kernel_files = NULL;
}
END_TEST

START_TEST(where_nothing_says_so_there_is_no_limit)
{
    static const struct kernel_file none[1];

    kernel_files = none;
    ck_assert_uint_eq(least(), UINT64_MAX);
    kernel_files = NULL;
}
END_TEST

// The innermost with a limit, which is the group's; those above it have others below them, too.
START_TEST(the_innermost_limit_is_told_from_those_above)
{
    static const struct kernel_file files[] = {MEMINFO,
                                               {"/proc/self/cgroup", "0::/job/step/task\n"},
                                               {"/sys/fs/cgroup/job/step/task/memory.max", "max\n"},
                                               GROUP_AT("/job/step/task", "0\n", "0"),
                                               {"/sys/fs/cgroup/job/step/memory.max", "8388608\n"},
                                               GROUP_AT("/job/step", "1048576\n", "0"),
                                               {"/sys/fs/cgroup/job/memory.max", "12582912\n"},
                                               GROUP_AT("/job", "1048576\n", "0"),
                                               {0}};
    static const struct kernel_file version_1[] = {
        {"/proc/self/cgroup", "4:memory:/job/task\n"},
        GROUP_1("/job/task", "9223372036854771712\n", "0\n"),
        GROUP_1("/job", "8388608\n", "1048576\n"),
        {0}};
    struct memory_available available;

    kernel_files = version_1;
    available = memory_available();
    ck_assert_uint_eq(available.group, 7 * MIB);
    ck_assert_uint_eq(available.above, UINT64_MAX);
    ck_assert_uint_eq(available.group_id, strlen("/sys/fs/cgroup/memory/job"));
    kernel_files = files;
    available = memory_available();
    kernel_files = NULL;
    ck_assert_uint_eq(available.machine, 16 * MIB);
    ck_assert_uint_eq(available.group, 7 * MIB);
    ck_assert_uint_eq(available.above, 11 * MIB);
    ck_assert_uint_eq(available.group_id, strlen("/sys/fs/cgroup/job/step"));
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, no_more_than_there_is, 0, MACHINES);
    tcase_add_test(tests, the_innermost_limit_is_told_from_those_above);
    tcase_add_test(tests, where_nothing_says_so_there_is_no_limit);
}

SUITE_MAIN("memory_available", 20, add)
