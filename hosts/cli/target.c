// A file that the command writes, complete or not at all.

#include "hosts/cli/target.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define NAMES_MAX   1000
#define WRITE_BYTES ((uint64_t)1 << 20) // at once

// Where the path leads, and the rights of what is there.
static int resolve(struct target *target, const char *path, mode_t *mode, struct fault *fault)
{
    struct stat link;
    struct stat seen;

    *mode = 0;
    if (lstat(path, &link) != 0) {
        if (errno != ENOENT) return fault_set(fault, EXIT_TROUBLE, "%s: %s", path, strerror(errno));
        target->path = strdup(path);
        return target->path != NULL ? EXIT_OK : fault_set(fault, EXIT_TROUBLE, "out of memory");
    }
    if (stat(path, &seen) != 0) return fault_from_errno(fault, path);
    // Before its path is asked for: a pipe's, behind a link in /proc, is none.
    if (!S_ISREG(seen.st_mode))
        return fault_set(fault, EXIT_TROUBLE,
                         "%s is there, and no regular file; it would be replaced", path);
    target->path = realpath(path, NULL);
    if (target->path == NULL)
        return fault_set(fault, EXIT_TROUBLE, "%s: %s", path, strerror(errno));
    *mode = seen.st_mode & 07777;
    return EXIT_OK;
}

// A new file beside the target, under a name that nobody has.
static int open_part(struct target *target, struct fault *fault)
{
    int descriptor = -1;

    for (int i = 0; i < NAMES_MAX && descriptor < 0; i++) {
        free(target->part);
        if (asprintf(&target->part, "%s.%ld-%d.part", target->path, (long)getpid(), i) < 0) {
            target->part = NULL;
            return fault_set(fault, EXIT_TROUBLE, "out of memory");
        }
        descriptor = open(target->part, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        if (descriptor < 0 && errno != EEXIST) break;
    }
    if (descriptor < 0)
        return fault_set(fault, EXIT_TROUBLE, "%s, to be written beside it first: %s", target->path,
                         strerror(errno));
    target->file = fdopen(descriptor, "wb");
    if (target->file != NULL) return EXIT_OK;
    (void)close(descriptor);
    (void)unlink(target->part);
    return fault_set(fault, EXIT_TROUBLE, "%s: %s", target->part, strerror(errno));
}

static void forget(struct target *target)
{
    const struct interrupts interrupts = target->interrupts;

    free(target->part);
    free(target->path);
    *target = (struct target){.path = NULL};
    interrupts_deliver(&interrupts);
}

int target_open(struct target *target, const char *path, struct fault *fault)
{
    mode_t mode = 0;
    int st = EXIT_OK;

    *target = (struct target){.path = NULL};
    interrupts_hold(&target->interrupts);
    TRY(resolve(target, path, &mode, fault));
    TRY(open_part(target, fault));
    // Who may read a file does not change because it is written again.
    if (mode != 0) (void)fchmod(fileno(target->file), mode);
out:
    if (st != EXIT_OK) forget(target);
    return st;
}

int target_write(struct target *target, const void *data, uint64_t bytes, struct fault *fault)
{
    const char *from = data;

    for (uint64_t done = 0; done < bytes; done += WRITE_BYTES) {
        uint64_t part = bytes - done < WRITE_BYTES ? bytes - done : WRITE_BYTES;

        if (interrupts_came(&target->interrupts))
            return fault_set(fault, EXIT_TROUBLE, "%s: interrupted", target->path);
        if (fwrite(from + done, 1, part, target->file) != part)
            return fault_set(fault, EXIT_TROUBLE, "%s: %s", target->part, strerror(errno));
    }
    return EXIT_OK;
}

int target_close(struct target *target, int st, struct fault *fault)
{
    if (fclose(target->file) != 0 && st == EXIT_OK)
        st = fault_set(fault, EXIT_TROUBLE, "%s: %s", target->part, strerror(errno));
    if (st == EXIT_OK && rename(target->part, target->path) != 0)
        st = fault_set(fault, EXIT_TROUBLE, "%s: %s", target->path, strerror(errno));
    if (st != EXIT_OK) (void)unlink(target->part);
    forget(target);
    return st;
}

int target_check(const char *path, struct fault *fault)
{
    struct target target;
    int st = target_open(&target, path, fault);

    if (st != EXIT_OK) return st;
    (void)fclose(target.file);
    (void)unlink(target.part);
    forget(&target);
    return EXIT_OK;
}
