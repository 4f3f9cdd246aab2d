// What this machine has.

#include "hosts/cli/machine.h"

#include <sched.h>
#include <stdio.h>

int machine_cores(void)
{
    cpu_set_t cores;

    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return 1;
    return CPU_COUNT(&cores) > 0 ? CPU_COUNT(&cores) : 1;
}

uint64_t machine_memory_available(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    char line[128];
    unsigned long long kibibytes = 0;
    uint64_t available = UINT64_MAX;

    if (file == NULL) return available;
    while (available == UINT64_MAX && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "MemAvailable: %llu kB", &kibibytes) == 1) available = kibibytes << 10;
    (void)fclose(file);
    return available;
}
