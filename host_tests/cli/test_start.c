// hosts/cli/plugin.c and bootstrap_hub.c: what the command says where the system does not let it
// start.

#include "hosts/cli/bootstrap.h"
#include "hosts/cli/plugin.h"

#include "host_tests/suite.h"

#include <dlfcn.h>
#include <errno.h>
#include <spawn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int spawn_error, socketpair_error, readlink_error; // 0: the call does not fail

int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const argv[],
                       char *const environment[]);
int __real_socketpair(int domain, int type, int protocol, int ends[2]);
int __wrap_socketpair(int domain, int type, int protocol, int ends[2]);
ssize_t __real_readlink(const char *path, char *target, size_t bytes);
ssize_t __wrap_readlink(const char *path, char *target, size_t bytes);
void *__wrap_dlopen(const char *path, int flags);

int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                       const posix_spawnattr_t *attributes, char *const argv[],
                       char *const environment[])
{
    (void)pid;
    (void)path;
    (void)actions;
    (void)attributes;
    (void)argv;
    (void)environment;
    return spawn_error;
}

int __wrap_socketpair(int domain, int type, int protocol, int ends[2])
{
    if (socketpair_error == 0) return __real_socketpair(domain, type, protocol, ends);
    errno = socketpair_error;
    return -1;
}

ssize_t __wrap_readlink(const char *path, char *target, size_t bytes)
{
    if (readlink_error == 0) return __real_readlink(path, target, bytes);
    errno = readlink_error;
    return -1;
}

// The system's loader knows no library.
void *__wrap_dlopen(const char *path, int flags)
{
    (void)path;
    (void)flags;
    return NULL;
}

START_TEST(ranks_that_cannot_be_started_say_what_to_do)
{
    static const struct {
        int spawn_error, socketpair_error;
        const char *text;
    } rows[] = {
        {0, EMFILE,
         "rank 0: no socket: Too many open files; raise this process's limit of open files (ulimit "
         "-n)"},
        {EMFILE, 0,
         "rank 0 cannot be started: Too many open files; raise this process's limit of open files "
         "(ulimit -n)"},
        {EAGAIN, 0,
         "rank 0 cannot be started: Resource temporarily unavailable; raise the limit of processes "
         "(ulimit -u, pids.max)"},
        {ENOENT, 0, "rank 0 cannot be started: No such file or directory; mount /proc"},
        {EACCES, 0, "rank 0 cannot be started: Permission denied"},
    };
    const struct hub_options options = {.ranks = 2, .silence_ms = 1000};
    const struct hub_handler handler = {0};
    struct fault fault = {0};
    json_t *job = json_object();

    spawn_error = rows[_i].spawn_error;
    socketpair_error = rows[_i].socketpair_error;
    ck_assert_int_eq(hub_run(&options, job, &handler, &fault), EXIT_TROUBLE);
    ck_assert_str_eq(fault.text, rows[_i].text);
    json_decref(job);
}
END_TEST

START_TEST(a_library_that_cannot_be_looked_for_says_why)
{
    struct plugin plugin = {0};
    struct fault fault = {0};

    ck_assert_int_eq(unsetenv("MOXIE_PLUGIN"), 0);
    readlink_error = ENOENT;
    ck_assert_int_eq(plugin_find(&plugin, NULL, &fault), EXIT_TROUBLE);
    readlink_error = 0;
    ck_assert_ptr_nonnull(strstr(fault.text, "/proc/self/exe cannot be read"));
    ck_assert_ptr_nonnull(strstr(fault.text, "mount /proc, or name it with --plugin PATH"));
    ck_assert_ptr_null(strstr(fault.text, " in ,"));
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, ranks_that_cannot_be_started_say_what_to_do, 0, 5);
    tcase_add_test(tests, a_library_that_cannot_be_looked_for_says_why);
}

SUITE_MAIN("start", 20, add)
