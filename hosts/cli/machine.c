// What this machine has.

#include "hosts/cli/machine.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GROUP_BYTES 1024 // of a group's path; of a longer one its parents are seen

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

// Where a version of control groups has its files, and what they are called.
struct group_files {
    const char *mount, *controller, *limit, *held, *pages[2];
};

// This process's group, as a path below the mount; "" for the root, or where nothing says it.
static void group_of(const struct group_files *files, char path[GROUP_BYTES])
{
    FILE *file = fopen("/proc/self/cgroup", "re");
    char line[GROUP_BYTES];

    path[0] = '\0';
    while (file != NULL && path[0] == '\0' && fgets(line, sizeof line, file) != NULL) {
        char *controllers = strchr(line, ':');
        char *own = controllers != NULL ? strchr(controllers + 1, ':') : NULL;

        if (own == NULL) continue;
        *own++ = '\0';
        own[strcspn(own, "\n")] = '\0';
        if (files->controller[0] == '\0' ? controllers[1] == '\0'
                                         : strstr(controllers, files->controller) != NULL)
            (void)snprintf(path, GROUP_BYTES, "%s", strcmp(own, "/") == 0 ? "" : own);
    }
    if (file != NULL) (void)fclose(file);
}

static int read_group(const struct group_files *files, const char *group, const char *name,
                      const char *word, uint64_t *number)
{
    char path[2 * GROUP_BYTES];

    (void)snprintf(path, sizeof path, "%s%s/%s", files->mount, group, name);
    return read_number(path, word, number);
}

// What a group may still take: its pages of files can be dropped.
static uint64_t group_available(const struct group_files *files, const char *group)
{
    uint64_t limit = 0, held = 0, bytes = 0, dropped = 0;

    if (!read_group(files, group, files->limit, "", &limit) ||
        !read_group(files, group, files->held, "", &held))
        return UINT64_MAX;
    for (int i = 0; i < 2; i++)
        if (read_group(files, group, "memory.stat", files->pages[i], &bytes)) dropped += bytes;
    held = held > dropped ? held - dropped : 0;
    return limit > held ? limit - held : 0;
}

uint64_t machine_memory_available(void)
{
    static const struct group_files versions[] = {
        {"/sys/fs/cgroup", "", "memory.max", "memory.current", {"inactive_file ", "active_file "}},
        {"/sys/fs/cgroup/memory",
         "memory",
         "memory.limit_in_bytes",
         "memory.usage_in_bytes",
         {"total_inactive_file ", "total_active_file "}},
    };
    uint64_t kibibytes = 0, available = UINT64_MAX;
    char group[GROUP_BYTES], *last;

    if (read_number("/proc/meminfo", "MemAvailable:", &kibibytes)) available = kibibytes << 10;
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        group_of(&versions[i], group);
        do {
            const uint64_t room = group_available(&versions[i], group);

            if (room < available) available = room;
            last = strrchr(group, '/');
            if (last != NULL) *last = '\0';
        } while (last != NULL);
    }
    return available;
}
