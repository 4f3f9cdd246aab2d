// What the kernel and the limits of control groups leave.

#include "plugin/memory_available.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define GROUP_BYTES    1024 // of a group's path; of a longer one its parents are seen
#define NO_LIMIT_BYTES (UINT64_C(1) << 62) // and more: version 1 writes all pages that it can count

// The number behind `key` in a file of lines, or the file's only one where key is "". 0: there is
// none, as where a limit is "max".
static int read_number(const char *path, const char *key, uint64_t *number)
{
    FILE *file = fopen(path, "re");
    const size_t length = strlen(key);
    char line[128];
    int found = 0;

    if (file == NULL) return 0;
    while (!found && fgets(line, sizeof line, file) != NULL)
        found = strncmp(line, key, length) == 0 && sscanf(line + length, "%" SCNu64, number) == 1;
    (void)fclose(file);
    return found;
}

// Where a version of control groups has its files, and what they are called.
struct group_files {
    const char *mount, *controller, *limit, *held, *stat, *pages[2], *swap_limit, *swap_held;
    int swap_with_memory; // the last two count both together
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
                      const char *key, uint64_t *number)
{
    char path[2 * GROUP_BYTES];

    (void)snprintf(path, sizeof path, "%s%s/%s", files->mount, group, name);
    return read_number(path, key, number);
}

static uint64_t sum_of(uint64_t bytes, uint64_t more)
{
    return bytes > UINT64_MAX - more ? UINT64_MAX : bytes + more;
}

static uint64_t less(uint64_t bytes, uint64_t taken)
{
    return bytes > taken ? bytes - taken : 0;
}

// What one group's limits leave, of the machine's swap, too. Pages of files can be had again.
// UINT64_MAX: there is no limit.
static uint64_t group_left(const struct group_files *files, const char *group, uint64_t swap)
{
    uint64_t limit, held, bytes, left, pages = 0;

    if (!read_group(files, group, files->limit, "", &limit) || limit >= NO_LIMIT_BYTES ||
        !read_group(files, group, files->held, "", &held))
        return UINT64_MAX;
    for (int32_t i = 0; i < 2; i++)
        if (read_group(files, group, files->stat, files->pages[i], &bytes)) pages += bytes;
    left = less(limit, less(held, pages));
    if (!read_group(files, group, files->swap_limit, "", &limit) ||
        !read_group(files, group, files->swap_held, "", &held))
        return sum_of(left, swap);
    if (files->swap_with_memory) {
        const uint64_t both = less(limit, less(held, pages));

        left = sum_of(left, swap);
        return left < both ? left : both;
    }
    limit = less(limit, held);
    return sum_of(left, limit < swap ? limit : swap);
}

// Its folder's inode is one in all namespaces of groups, each of which sees another device.
static uint64_t group_id(const struct group_files *files, const char *group)
{
    char path[2 * GROUP_BYTES];
    struct stat folder;

    (void)snprintf(path, sizeof path, "%s%s", files->mount, group);
    return stat(path, &folder) == 0 ? folder.st_ino : 0;
}

static void read_groups(struct memory_available *available, uint64_t swap)
{
    static const struct group_files versions[] = {
        {"/sys/fs/cgroup",
         "",
         "memory.max",
         "memory.current",
         "memory.stat",
         {"inactive_file ", "active_file "},
         "memory.swap.max",
         "memory.swap.current",
         0},
        {"/sys/fs/cgroup/memory",
         "memory",
         "memory.limit_in_bytes",
         "memory.usage_in_bytes",
         "memory.stat",
         {"total_inactive_file ", "total_active_file "},
         "memory.memsw.limit_in_bytes",
         "memory.memsw.usage_in_bytes",
         1},
    };
    char group[GROUP_BYTES], *last;

    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        group_of(&versions[i], group);
        do {
            const uint64_t left = group_left(&versions[i], group, swap);

            if (available->group == UINT64_MAX && left != UINT64_MAX) {
                available->group = left;
                available->group_id = group_id(&versions[i], group);
            } else if (left < available->above) {
                available->above = left;
            }
            last = strrchr(group, '/');
            if (last != NULL) *last = '\0';
        } while (last != NULL);
    }
}

struct memory_available memory_available(void)
{
    struct memory_available available = {
        .machine = UINT64_MAX, .group = UINT64_MAX, .above = UINT64_MAX};
    uint64_t kib, swap = 0;

    if (read_number("/proc/meminfo", "SwapFree: ", &kib)) swap = kib << 10;
    if (read_number("/proc/meminfo", "MemAvailable: ", &kib))
        available.machine = sum_of(kib << 10, swap);
    read_groups(&available, swap);
    return available;
}
