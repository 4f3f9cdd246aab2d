// hosts/cli/machine.c: the memory that the machine and the limits of control groups leave.

#include "hosts/cli/machine.h"

#include "host_tests/kernel_files.h"
#include "host_tests/suite.h"

#define MIB (UINT64_C(1) << 20)

static const struct {
    struct kernel_file files[12];
    uint64_t available;
} machines[] = {
    {{{0}}, UINT64_MAX},
    {{{"/proc/meminfo", "MemFree: 1 kB\nMemAvailable: 16384 kB\n"}}, 16 * MIB},
    // Version 2: the root's, without what pages of files hold.
    {{{"/proc/meminfo", "MemAvailable: 16384 kB\n"},
      {"/sys/fs/cgroup/memory.max", "8388608\n"},
      {"/sys/fs/cgroup/memory.current", "4194304\n"},
      {"/sys/fs/cgroup/memory.stat", "anon 1\ninactive_file 1048576\nactive_file 1048576\n"}},
     6 * MIB},
    // The process's own, or one above it.
    {{{"/proc/self/cgroup", "0::/job/task\n"},
      {"/sys/fs/cgroup/job/task/memory.max", "8388608\n"},
      {"/sys/fs/cgroup/job/task/memory.current", "1048576\n"},
      {"/sys/fs/cgroup/job/memory.max", "12582912\n"},
      {"/sys/fs/cgroup/job/memory.current", "1048576\n"}},
     7 * MIB},
    {{{"/proc/self/cgroup", "0::/job/task\n"},
      {"/sys/fs/cgroup/job/task/memory.max", "max\n"},
      {"/sys/fs/cgroup/job/task/memory.current", "1048576\n"},
      {"/sys/fs/cgroup/job/memory.max", "8388608\n"},
      {"/sys/fs/cgroup/job/memory.current", "4194304\n"}},
     4 * MIB},
    // Version 1.
    {{{"/proc/self/cgroup", "9:name=systemd:/other\n4:memory:/job\n1:cpu:/other\n0::/\n"},
      {"/sys/fs/cgroup/memory/job/memory.limit_in_bytes", "8388608\n"},
      {"/sys/fs/cgroup/memory/job/memory.usage_in_bytes", "4194304\n"},
      {"/sys/fs/cgroup/memory/job/memory.stat", "inactive_file 5\ntotal_inactive_file 1048576\n"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
      {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "0\n"}},
     5 * MIB},
    {{{"/proc/self/cgroup", "4:memory:/docker/1\n"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "8388608\n"},
      {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "1048576\n"}},
     7 * MIB},
};
#define MACHINES ((int)(sizeof machines / sizeof machines[0]))

START_TEST(no_more_than_there_is)
{
    kernel_files = machines[_i].files;
    ck_assert_uint_eq(machine_memory_available(), machines[_i].available);
    kernel_files = NULL;
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, no_more_than_there_is, 0, MACHINES);
}

SUITE_MAIN("machine", 20, add)
