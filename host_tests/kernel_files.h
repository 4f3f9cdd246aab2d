// Files of the kernel that are made up, for one suite: with LINKER:--wrap=fopen and --wrap=stat,
// those of /proc and /sys are `kernel_files` alone, once that is set. A folder's inode is the
// length of its path.

#ifndef MOXIE_HOST_TESTS_KERNEL_FILES_H
#define MOXIE_HOST_TESTS_KERNEL_FILES_H

#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

struct kernel_file {
    const char *path, *text;
};

static const struct kernel_file *kernel_files; // until one without a path

FILE *__real_fopen(const char *path, const char *mode);
FILE *__wrap_fopen(const char *path, const char *mode);

FILE *__wrap_fopen(const char *path, const char *mode)
{
    if (kernel_files == NULL || (strncmp(path, "/sys/", 5) != 0 && strncmp(path, "/proc/", 6) != 0))
        return __real_fopen(path, mode);
    for (const struct kernel_file *file = kernel_files; file->path != NULL; file++)
        if (strcmp(file->path, path) == 0)
            return fmemopen((void *)(uintptr_t)file->text, strlen(file->text), "r");
    return NULL;
}

int __real_stat(const char *path, struct stat *seen);
int __wrap_stat(const char *path, struct stat *seen);

int __wrap_stat(const char *path, struct stat *seen)
{
    if (kernel_files == NULL || strncmp(path, "/sys/", 5) != 0) return __real_stat(path, seen);
    *seen = (struct stat){.st_mode = S_IFDIR, .st_ino = strlen(path)};
    return 0;
}

#endif
