// What a transport may leave behind, and system calls that fail on demand. A suite that includes
// this is linked with
// --wrap for each function below (host_tests/CMakeLists.txt).

#ifndef MOXIE_HOST_TESTS_TRACES_H
#define MOXIE_HOST_TESTS_TRACES_H

#include "host_tests/trial.h"

#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>

#define TRACE_NAMES_MAX 16384

struct trace_names {
    _Atomic uint32_t count;
    char names[TRACE_NAMES_MAX][64];
};

static struct trace_names *trace_names; // shared by the processes of a test

int __real_shm_open(const char *name, int flags, mode_t mode);
int __wrap_shm_open(const char *name, int flags, mode_t mode);
int __real_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes);
void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
int __real_fstat(int fd, struct stat *file);
int __wrap_fstat(int fd, struct stat *file);
int __real_stat(const char *path, struct stat *file);
int __wrap_stat(const char *path, struct stat *file);
int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __real_fcntl(int fd, int command, ...);
int __wrap_fcntl(int fd, int command, ...);
ssize_t __real_getrandom(void *buffer, size_t bytes, unsigned flags);
ssize_t __wrap_getrandom(void *buffer, size_t bytes, unsigned flags);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);

int __wrap_shm_open(const char *name, int flags, mode_t mode)
{
    uint32_t index;

    if (call_fails()) return -1;
    if (trace_names != NULL && (flags & O_CREAT) != 0) {
        index = atomic_fetch_add(&trace_names->count, 1);
        ck_assert_uint_lt(index, TRACE_NAMES_MAX);
        (void)snprintf(trace_names->names[index], sizeof trace_names->names[index], "/dev/shm%s",
                       name);
    }
    return __real_shm_open(name, flags, mode);
}

// Interrupted as kernels before 6.8 do it: every time while a signal may come, and once for another
// reason.
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes)
{
    static _Thread_local int interrupted;
    sigset_t mask;

    (void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
    interrupted = !interrupted;
    if (!sigismember(&mask, SIGALRM) || interrupted) return EINTR;
    return call_fails() ? ENOSPC : __real_posix_fallocate(fd, offset, bytes);
}

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    if (!call_fails()) return __real_mmap(at, bytes, protection, flags, fd, offset);
    errno = ENOMEM;
    return MAP_FAILED;
}

int __wrap_fstat(int fd, struct stat *file)
{
    return call_fails() ? -1 : __real_fstat(fd, file);
}

// But of control groups: where it fails, no rank does.
int __wrap_stat(const char *path, struct stat *file)
{
    if (strncmp(path, "/sys/", 5) == 0) return __real_stat(path, file);
    return call_fails() ? -1 : __real_stat(path, file);
}

// As kernels before 6.3 do it, too.
int __wrap_memfd_create(const char *name, unsigned flags)
{
    if (call_fails()) return -1;
    if (flags == MFD_CLOEXEC) return __real_memfd_create(name, flags);
    errno = EINVAL;
    return -1;
}

// Of the command that the library uses. A build that counts lines locks its files by others.
int __wrap_fcntl(int fd, int command, ...)
{
    va_list arguments;
    void *argument;

    if (command == F_DUPFD_CLOEXEC) return call_fails() ? -1 : __real_fcntl(fd, command, 0);
    va_start(arguments, command);
    argument = va_arg(arguments, void *);
    va_end(arguments);
    return __real_fcntl(fd, command, argument);
}

ssize_t __wrap_getrandom(void *buffer, size_t bytes, unsigned flags)
{
    return call_fails() ? -1 : __real_getrandom(buffer, bytes, flags);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return call_fails() ? NULL : __real_calloc(count, bytes);
}

// ---- Traces ------------------------------------------------------------------------------------

static void traces_start(void)
{
    trace_names = shared_memory(sizeof *trace_names);
}

static int32_t names_left(void)
{
    int32_t left = 0;

    for (uint32_t i = 0; i < atomic_load(&trace_names->count); i++)
        left += access(trace_names->names[i], F_OK) == 0;
    return left;
}

// What this process's address space has of a name.
static int32_t mapped(const char *name)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int32_t pieces = 0;

    ck_assert_ptr_nonnull(maps);
    while (fgets(line, sizeof line, maps) != NULL)
        pieces += strstr(line, name) != NULL;
    (void)fclose(maps);
    return pieces;
}

static int32_t windows_mapped(void)
{
    return mapped("/dev/shm/moxie-"); // a folder above the program may be called so
}

// By windows that threads share.
static int32_t counts_mapped(void)
{
    return mapped("/memfd:moxie-");
}

#endif
