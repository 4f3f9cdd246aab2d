// Files that exist in memory alone.

#include "host_tests/fuzz/files.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

void fuzz_file_init(struct fuzz_file *file)
{
    file->descriptor = memfd_create("fuzz", MFD_CLOEXEC);
    PROPERTY(file->descriptor >= 0);
    (void)snprintf(file->path, sizeof file->path, "/proc/%d/fd/%d", (int)getpid(),
                   file->descriptor);
}

void fuzz_file_write(const struct fuzz_file *file, const void *bytes, size_t count)
{
    PROPERTY(ftruncate(file->descriptor, 0) == 0);
    PROPERTY(count == 0 || pwrite(file->descriptor, bytes, count, 0) == (ssize_t)count);
}
