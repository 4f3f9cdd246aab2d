// plugin/transport_shm_memory.c: what is refused before any page is touched, by what the kernel and
// the limits of control groups leave, and memory that is not what was agreed.

#include "plugin/transport_shm_memory.h"

#include "host_tests/kernel_files.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)

static const struct kernel_file machine[] = {{"/proc/meminfo", "MemAvailable: 16384 kB\n"}, {0}};
static const struct kernel_file group[] = {{"/proc/meminfo", "MemAvailable: 16384 kB\n"},
                                           {"/sys/fs/cgroup/memory.max", "8388608\n"},
                                           {"/sys/fs/cgroup/memory.current", "0\n"},
                                           {0}};

static int fallocate_error, shm_open_error, mmap_error; // what calls fail for; 0: they do not

int __real_posix_fallocate(int fd, off_t offset, off_t bytes);
int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes);

int __wrap_posix_fallocate(int fd, off_t offset, off_t bytes)
{
    return fallocate_error != 0 ? fallocate_error : __real_posix_fallocate(fd, offset, bytes);
}

int __real_shm_open(const char *name, int flags, mode_t mode);
int __wrap_shm_open(const char *name, int flags, mode_t mode);

int __wrap_shm_open(const char *name, int flags, mode_t mode)
{
    if (shm_open_error == 0) return __real_shm_open(name, flags, mode);
    errno = shm_open_error;
    return -1;
}

void *__real_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset);

void *__wrap_mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset)
{
    if (mmap_error == 0) return __real_mmap(at, bytes, protection, flags, fd, offset);
    errno = mmap_error;
    return MAP_FAILED;
}

static uint64_t shm_pages; // of 4 KiB, that /dev/shm has free for this user; 0: what it has

int __real_statvfs(const char *path, struct statvfs *seen);
int __wrap_statvfs(const char *path, struct statvfs *seen);

int __wrap_statvfs(const char *path, struct statvfs *seen)
{
    if (shm_pages == 0 || strcmp(path, "/dev/shm") != 0) return __real_statvfs(path, seen);
    *seen = (struct statvfs){.f_bsize = 65536,
                             .f_frsize = 4096,
                             .f_blocks = 4 * shm_pages,
                             .f_bfree = 2 * shm_pages,
                             .f_bavail = shm_pages};
    return 0;
}

static int32_t check(uint64_t bytes, int32_t ranks, int32_t windows, struct said *said)
{
    return shared_memory_check(
        &(struct shared_memory_need){
            .bytes = bytes, .ranks = ranks, .windows = windows, .group_ranks = ranks},
        &said->error);
}

START_TEST(no_more_than_there_is)
{
    static const struct {
        const struct kernel_file *files;
        uint64_t available;
        const char *where;
    } machines[] = {{machine, 16 * MIB, "(the machine's)"},
                    {group, 8 * MIB, "(the limit of its control group"}};
    const uint64_t available = machines[_i].available;
    char words[64];
    struct said said;

    said_init(&said);
    kernel_files = machines[_i].files;
    (void)snprintf(words, sizeof words, "the %llu bytes of memory available",
                   (unsigned long long)available);
    SAID(&said, MOXIE_E_MEMORY, check(available + 1, 1, 1, &said), words, machines[_i].where);
    ACCEPTED(&said, check(available / 2, 2, 1, &said));
    ck_assert_int_eq(check(available / 2 + 1, 2, 1, &said), MOXIE_E_MEMORY);
    kernel_files = NULL;
}
END_TEST

// Nor than /dev/shm has, which may be little on a machine of much memory: all ranks' windows, of
// all forwards in flight.
START_TEST(no_more_than_dev_shm_has)
{
    struct said said;

    said_init(&said);
    shm_pages = 10 * MIB / 4096;
    ACCEPTED(&said, check(5 * MIB, 2, 1, &said));
    ACCEPTED(&said, check(5 * MIB, 1, 2, &said));
    SAID(&said, MOXIE_E_MEMORY, check(5 * MIB + 4096, 2, 1, &said), "the 10485760 bytes free in",
         "/dev/shm; enlarge it (docker: --shm-size), or set max_dispatch_tokens_per_rank lower");
    SAID(&said, MOXIE_E_MEMORY, check(5 * MIB, 1, 3, &said), "for 1 ranks x 3 forwards in flight",
         "the 10485760 bytes free in /dev/shm", "or forwards_in_flight_max lower");
    shm_pages = 0;
}
END_TEST

// To rank 0 of two: a peer in a control group that differs by the bits of *ctx.
static int32_t answer_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    const uint64_t *differs = ctx;
    struct meeting_message *all = recv;

    ck_assert_uint_eq(bytes, sizeof all[0]);
    memcpy(&all[0], send, bytes);
    all[1] = all[0];
    all[1].rank = 1;
    all[1].identity.pid = 0;
    all[1].group ^= *differs;
    return 0;
}

// A group's limit is for the windows of its own ranks. One above it may be for all of them.
START_TEST(a_groups_limit_is_for_its_own_ranks)
{
    static const struct kernel_file above[] = {{"/proc/self/cgroup", "0::/job\n"},
                                               {"/sys/fs/cgroup/job/memory.max", "8388608\n"},
                                               {"/sys/fs/cgroup/job/memory.current", "0\n"},
                                               {"/sys/fs/cgroup/memory.max", "9437184\n"},
                                               {"/sys/fs/cgroup/memory.current", "0\n"},
                                               {0}};
    static const struct {
        uint64_t differs;
        const struct kernel_file *files;
        const char *refused;
    } rows[] = {{0, group, "for 2 ranks x 1 forwards in flight do not fit into the 8388608 bytes"},
                {1, group, NULL},
                {1, above, "for 2 ranks x 1 forwards in flight do not fit into the 9437184 bytes"}};
    uint64_t differs = rows[_i].differs;
    const struct bootstrap bootstrap = {
        .all_gather = answer_gather, .ctx = &differs, .ranks = 2, .windows = 1};
    struct transport *transport;
    struct window *window;
    struct said said;

    said_init(&said);
    kernel_files = rows[_i].files;
    ACCEPTED(&said, transport_shm.create(&bootstrap, &transport, &said.error));
    if (rows[_i].refused == NULL)
        ACCEPTED(&said, transport_shm.window_open(transport, 5 * MIB, &window, &said.error));
    else
        SAID(&said, MOXIE_E_MEMORY,
             transport_shm.window_open(transport, 5 * MIB, &window, &said.error), rows[_i].refused);
    kernel_files = NULL;
    transport_shm.window_close(transport, window);
    transport_shm.destroy(transport);
}
END_TEST

// Those of all forwards in flight, before the first takes any: of 16 MiB, three of 5 MiB fit.
START_TEST(all_windows_are_counted_at_first)
{
    struct transport *transport;
    struct window *windows[3];
    struct said said;

    said_init(&said);
    kernel_files = machine;
    for (int32_t count = 3; count <= 4; count++) {
        const struct bootstrap bootstrap = {.ranks = 1, .windows = count};

        ACCEPTED(&said, transport_shm.create(&bootstrap, &transport, &said.error));
        for (int32_t i = 0; count == 3 && i < count; i++)
            ACCEPTED(&said,
                     transport_shm.window_open(transport, 5 * MIB, &windows[i], &said.error));
        for (int32_t i = 0; count == 3 && i < count; i++)
            transport_shm.window_close(transport, windows[i]);
        if (count == 4)
            SAID(&said, MOXIE_E_MEMORY,
                 transport_shm.window_open(transport, 5 * MIB, &windows[0], &said.error),
                 "windows of 5242880 bytes for 1 ranks x 4 forwards in flight do not fit",
                 "the 16777216 bytes of memory available",
                 "max_dispatch_tokens_per_rank lower and dispatch_rounds_max higher, or "
                 "forwards_in_flight_max lower");
        transport_shm.destroy(transport);
    }
    kernel_files = NULL;
}
END_TEST

// Where there is one forward, fewer are no remedy; and no number is too large to be refused.
START_TEST(one_forward_cannot_be_fewer)
{
    struct said said;

    said_init(&said);
    ck_assert_int_eq(check(UINT64_C(1) << 60, 2, 1, &said), MOXIE_E_MEMORY);
    ck_assert_ptr_null(strstr(said.text, "forwards_in_flight_max"));
    SAID(&said, MOXIE_E_MEMORY, check(UINT64_C(1) << 60, 64, 8, &said), "64 ranks x 8 forwards",
         "can be addressed");
}
END_TEST

static int32_t make_one(struct said *said)
{
    unsigned char token[MEETING_TOKEN_BYTES] = {2};
    int32_t answer;
    void *made;

    (void)snprintf((char *)token + 1, sizeof token - 1, "%d", (int)getpid());
    answer = shared_memory_make(token, (uint64_t)TRANSPORT_PAGE_BYTES, &made, &said->error);
    shared_memory_unlink(token);
    return answer;
}

// What a sandbox forbids is no want of room.
START_TEST(pages_that_cannot_be_reserved_say_why)
{
    static const struct {
        int os_error;
        int32_t code;
        const char *remedy;
    } rows[] = {{ENOSPC, MOXIE_E_MEMORY, "enlarge it (docker: --shm-size)"},
                {ENOMEM, MOXIE_E_MEMORY, "enlarge it (docker: --shm-size)"},
                {EPERM, MOXIE_E_UNAVAILABLE, "allow fallocate"},
                {ENOSYS, MOXIE_E_UNAVAILABLE, "allow fallocate"}};
    struct said said;

    said_init(&said);
    fallocate_error = rows[_i].os_error;
    SAID(&said, rows[_i].code, make_one(&said), strerror(rows[_i].os_error), rows[_i].remedy);
    fallocate_error = 0;
}
END_TEST

START_TEST(no_more_files_is_no_want_of_a_mount)
{
    struct said said;

    said_init(&said);
    shm_open_error = ENOSPC;
    SAID(&said, MOXIE_E_MEMORY, make_one(&said),
         "remove files from /dev/shm, or raise its nr_inodes");
    shm_open_error = EACCES;
    SAID(&said, MOXIE_E_UNAVAILABLE, make_one(&said), "/dev/shm must be mounted and writable");
    shm_open_error = 0;
}
END_TEST

START_TEST(a_limit_of_addresses_is_told)
{
    struct said said;

    said_init(&said);
    mmap_error = ENOMEM;
    SAID(&said, MOXIE_E_MEMORY, make_one(&said), "a window of 65536 bytes", "ulimit -v",
         "max_dispatch_tokens_per_rank lower");
    mmap_error = 0;
}
END_TEST

// Peers open it by its mode, whatever the umask takes from that. Root may open anything.
START_TEST(a_umask_keeps_no_peer_out)
{
    const uint64_t bytes = (uint64_t)TRANSPORT_PAGE_BYTES;
    unsigned char token[MEETING_TOKEN_BYTES] = {1};
    const mode_t before = umask(0777);
    char name[48] = "/moxie-01";
    struct stat file;
    struct said said;
    void *made;
    int fd;

    said_init(&said);
    (void)snprintf((char *)token + 1, sizeof token - 1, "%d", (int)getpid());
    ACCEPTED(&said, shared_memory_make(token, bytes, &made, &said.error));
    (void)umask(before);
    for (size_t i = 1; i < sizeof token; i++)
        (void)snprintf(name + 7 + 2 * i, 3, "%02x", token[i]);
    fd = shm_open(name, O_RDONLY, 0);
    shared_memory_unlink(token);
    ck_assert_int_ge(fd, 0);
    ck_assert_int_eq(fstat(fd, &file), 0);
    ck_assert_uint_eq(file.st_mode & 0777, 0600);
    ck_assert_int_eq(close(fd), 0);
    ck_assert_int_eq(munmap(made, bytes), 0);
}
END_TEST

// A peer may put another file in the place of its own, or cut it short.
START_TEST(memory_of_another_size_is_refused)
{
    const uint64_t bytes = (uint64_t)TRANSPORT_PAGE_BYTES;
    const uint64_t others[] = {bytes / 2, 2 * bytes};
    unsigned char token[MEETING_TOKEN_BYTES] = {0};
    void *made, *opened = NULL;
    struct said said;

    said_init(&said);
    (void)snprintf((char *)token, sizeof token, "%d", (int)getpid());
    ck_assert_int_eq(shared_memory_make(token, bytes, &made, &said.error), MOXIE_OK);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(shared_memory_open(token, others[i], 3, &opened, &said.error),
                         MOXIE_E_COLLECTIVE_MISMATCH);
        ck_assert_msg(strstr(said.text, "the window of rank 3 is not of the agreed") != NULL, "%s",
                      said.text);
        ck_assert_ptr_null(opened);
    }
    ck_assert_int_eq(shared_memory_open(token, bytes, 3, &opened, &said.error), MOXIE_OK);
    shared_memory_unlink(token);
    ck_assert_int_eq(munmap(opened, bytes), 0);
    ck_assert_int_eq(munmap(made, bytes), 0);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, no_more_than_there_is, 0, 2);
    tcase_add_test(tests, no_more_than_dev_shm_has);
    tcase_add_loop_test(tests, a_groups_limit_is_for_its_own_ranks, 0, 3);
    tcase_add_test(tests, all_windows_are_counted_at_first);
    tcase_add_test(tests, one_forward_cannot_be_fewer);
    tcase_add_loop_test(tests, pages_that_cannot_be_reserved_say_why, 0, 4);
    tcase_add_test(tests, no_more_files_is_no_want_of_a_mount);
    tcase_add_test(tests, a_limit_of_addresses_is_told);
    tcase_add_test(tests, a_umask_keeps_no_peer_out);
    tcase_add_test(tests, memory_of_another_size_is_refused);
}

SUITE_MAIN("transport_shm_memory", 60, add)
