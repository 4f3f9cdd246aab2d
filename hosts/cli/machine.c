// What this machine has.

#include "hosts/cli/machine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int machine_cores(void)
{
    cpu_set_t cores;
    long online = sysconf(_SC_NPROCESSORS_ONLN); // of more than a cpu_set_t can say

    if (sched_getaffinity(0, sizeof cores, &cores) != 0) return online > 0 ? (int)online : 1;
    return CPU_COUNT(&cores) > 0 ? CPU_COUNT(&cores) : 1;
}

// The number behind `word` at the begin of a line of a file; 0 where there is none, as of "max".
static int read_number(const char *path, const char *word, uint64_t *number)
{
    FILE *file = fopen(path, "re");
    char line[128];
    int found = 0;

    if (file == NULL) return 0;
    while (!found && fgets(line, sizeof line, file) != NULL) {
        const char *digits = line + strlen(word);
        char *end = NULL;

        if (strncmp(line, word, strlen(word)) != 0) continue;
        *number = strtoull(digits, &end, 10);
        found = end != digits;
    }
    (void)fclose(file);
    return found;
}

// What a container may still take: its pages of files can be dropped.
static uint64_t container_available(const char *limit_path, const char *held_path,
                                    const char *stat_path, const char *const files[2])
{
    uint64_t limit = 0, held = 0, bytes = 0, dropped = 0;

    if (!read_number(limit_path, "", &limit) || !read_number(held_path, "", &held))
        return UINT64_MAX;
    for (int i = 0; i < 2; i++)
        if (read_number(stat_path, files[i], &bytes)) dropped += bytes;
    held = held > dropped ? held - dropped : 0;
    return limit > held ? limit - held : 0;
}

uint64_t machine_memory_available(void)
{
    static const char *const files[] = {"inactive_file ", "active_file "};
    static const char *const files_v1[] = {"total_inactive_file ", "total_active_file "};
    uint64_t kibibytes = 0, available = UINT64_MAX, rooms[2];

    if (read_number("/proc/meminfo", "MemAvailable:", &kibibytes)) available = kibibytes << 10;
    rooms[0] = container_available("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current",
                                   "/sys/fs/cgroup/memory.stat", files);
    rooms[1] = container_available("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                   "/sys/fs/cgroup/memory/memory.usage_in_bytes",
                                   "/sys/fs/cgroup/memory/memory.stat", files_v1);
    for (int i = 0; i < 2; i++)
        if (rooms[i] < available) available = rooms[i];
    return available;
}
