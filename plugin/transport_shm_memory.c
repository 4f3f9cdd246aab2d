// Pieces of POSIX shared memory.

#include "plugin/transport_shm_memory.h"

#include "plugin/memory_available.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define NAME_BYTES    48                // "/moxie-", 32 hexadecimal digits, NUL
#define RESERVE_BYTES ((off_t)64 << 20) // allocated in one system call

// Lower alone would be refused: the product of both has to hold a rank's tokens.
#define FEWER_BYTES "set max_dispatch_tokens_per_rank lower and dispatch_rounds_max higher"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U // since Linux 6.3, where vm.memfd_noexec may demand it
#endif

static void name_of(const unsigned char token[MEETING_TOKEN_BYTES], char name[NAME_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    size_t length = strlen(strcpy(name, "/moxie-"));

    for (size_t i = 0; i < MEETING_TOKEN_BYTES; i++) {
        name[length++] = digits[token[i] >> 4];
        name[length++] = digits[token[i] & 15];
    }
    name[length] = '\0';
}

static int32_t refuse(const struct shared_memory_need *need, int32_t ranks, uint64_t room,
                      const char *where, moxie_error *error)
{
    return fail_with(error, MOXIE_E_MEMORY,
                     "windows of %" PRIu64 " bytes for %d ranks x %d forwards in flight do not fit "
                     "into the %" PRIu64 " bytes %s " FEWER_BYTES "%s",
                     need->bytes, ranks, need->windows, room, where,
                     need->windows > 1 ? ", or forwards_in_flight_max lower" : "");
}

// A window is its maker's memory. Which ranks are in the groups above its own is not known: all.
int32_t shared_memory_check(const struct shared_memory_need *need, moxie_error *error)
{
    const struct memory_available available = memory_available();
    const struct {
        uint64_t bytes;
        int32_t ranks;
        const char *where;
    } rooms[] = {
        {available.machine, need->ranks, "of memory available (" MEMORY_OF_MACHINE ");"},
        {available.group, need->group_ranks, "of memory available (" MEMORY_OF_GROUP ");"},
        {available.above, need->ranks, "of memory available (" MEMORY_OF_GROUP ");"},
    };
    const uint64_t each = need->bytes * (uint64_t)need->windows; // once the product below is one
    struct statvfs shm;
    int64_t wanted;

    if (!size_mul((int64_t)need->bytes, need->ranks * need->windows, &wanted))
        return refuse(need, need->ranks, SIZE_LIMIT, "that can be addressed;", error);
    if (statvfs("/dev/shm", &shm) == 0 && shm.f_blocks != 0 &&
        (uint64_t)wanted / shm.f_frsize > shm.f_bavail)
        return refuse(need, need->ranks, (uint64_t)shm.f_bavail * shm.f_frsize,
                      "free in /dev/shm; enlarge it (docker: --shm-size), or", error);
    for (size_t i = 0; i < sizeof rooms / sizeof rooms[0]; i++)
        if (each * (uint64_t)rooms[i].ranks > rooms[i].bytes)
            return refuse(need, rooms[i].ranks, rooms[i].bytes, rooms[i].where, error);
    return MOXIE_OK;
}

// Signals stay blocked over one system call: kernels before 6.8 give up all of an interrupted
// allocation, and a profiler's timer would interrupt every attempt at a large one.
static int reserve_piece(int fd, off_t offset, off_t bytes)
{
    sigset_t all, before;
    int os_error;

    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    do
        os_error = posix_fallocate(fd, offset, bytes);
    while (os_error == EINTR);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return os_error;
}

// Past RLIMIT_FSIZE the kernel would send SIGXFSZ.
static int32_t reserve(int fd, uint64_t bytes, moxie_error *error)
{
    struct rlimit limit;
    int os_error = 0;

    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
        bytes > limit.rlim_cur)
        return fail_with(error, MOXIE_E_MEMORY,
                         "a window of %" PRIu64
                         " bytes is past this process's limit of file sizes (ulimit -f)",
                         bytes);
    for (off_t offset = 0, piece; os_error == 0 && offset < (off_t)bytes; offset += piece) {
        piece = (off_t)bytes - offset < RESERVE_BYTES ? (off_t)bytes - offset : RESERVE_BYTES;
        os_error = reserve_piece(fd, offset, piece);
    }
    if (os_error != 0 && os_error != ENOSPC && os_error != ENOMEM)
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "the memory of a window cannot be reserved (fallocate: %s); allow "
                         "fallocate",
                         strerror(os_error));
    if (os_error != 0)
        return fail_with(error, MOXIE_E_MEMORY,
                         "/dev/shm has no room for a window of %" PRIu64
                         " bytes (%s); enlarge it (docker: --shm-size), or " FEWER_BYTES,
                         bytes, strerror(os_error));
    return MOXIE_OK;
}

static int32_t map(int fd, uint64_t bytes, void **out, moxie_error *error)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

    if (memory == MAP_FAILED)
        return fail_with(error, MOXIE_E_MEMORY,
                         "a window of %" PRIu64
                         " bytes cannot be mapped (%s); raise this process's limit of address "
                         "space (ulimit -v), or " FEWER_BYTES,
                         bytes, strerror(errno));
    // A child would keep it after all ranks have closed theirs. Where it is refused, one does.
    (void)madvise(memory, bytes, MADV_DONTFORK);
    *out = memory;
    return MOXIE_OK;
}

static int32_t open_code(int os_error)
{
    return os_error == EMFILE || os_error == ENFILE || os_error == ENOMEM || os_error == ENOSPC
               ? MOXIE_E_MEMORY
               : MOXIE_E_UNAVAILABLE;
}

// An empty file takes no room: what has run out is the number of files.
static const char *make_remedy(int os_error)
{
    return os_error == ENOSPC ? "remove files from /dev/shm, or raise its nr_inodes"
                              : transport_remedy(os_error, "/dev/shm must be mounted and writable");
}

int32_t shared_memory_make(const unsigned char token[MEETING_TOKEN_BYTES], uint64_t bytes,
                           void **out, moxie_error *error)
{
    char name[NAME_BYTES];
    int32_t st = MOXIE_OK;
    int fd;

    name_of(token, name);
    fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0)
        TRY(fail_with(error, open_code(errno), "shared memory cannot be made (shm_open: %s); %s",
                      strerror(errno), make_remedy(errno)));
    // The umask may have taken from the mode that peers open it by.
    (void)fchmod(fd, 0600);
    TRY(reserve(fd, bytes, error));
    TRY(map(fd, bytes, out, error));
out:
    if (fd >= 0) (void)close(fd);
    return st;
}

int32_t shared_memory_open(const unsigned char token[MEETING_TOKEN_BYTES], uint64_t bytes,
                           int32_t owner, void **out, moxie_error *error)
{
    char name[NAME_BYTES];
    struct stat file;
    int32_t st = MOXIE_OK;
    int fd;

    name_of(token, name);
    fd = shm_open(name, O_RDWR, 0);
    if (fd < 0)
        TRY(fail_rank(error, open_code(errno), owner,
                      "the window of rank %d cannot be opened (%s); %s", owner, strerror(errno),
                      transport_remedy(errno, "run the ranks as one user with one /dev/shm "
                                              "(docker: --ipc=host, or one container)")));
    if (fstat(fd, &file) != 0 || file.st_size < 0 || (uint64_t)file.st_size != bytes)
        TRY(fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, owner,
                      "the window of rank %d is not of the agreed %" PRIu64 " bytes", owner,
                      bytes));
    TRY(map(fd, bytes, out, error));
out:
    if (fd >= 0) (void)close(fd);
    return st;
}

void shared_memory_unlink(const unsigned char token[MEETING_TOKEN_BYTES])
{
    char name[NAME_BYTES];

    name_of(token, name);
    (void)shm_unlink(name);
}

int32_t process_memory_make(uint64_t bytes, int *fd, void **out, moxie_error *error)
{
    int made = memfd_create("moxie-threads", MFD_CLOEXEC | MFD_NOEXEC_SEAL);
    int32_t st = MOXIE_OK;
    int os_error;

    *fd = -1;
    if (made < 0 && errno == EINVAL) made = memfd_create("moxie-threads", MFD_CLOEXEC);
    os_error = made < 0 ? errno : reserve_piece(made, 0, (off_t)bytes);
    if (os_error != 0)
        TRY(fail_with(error, open_code(os_error),
                      "no memory for the threads of a process (memfd_create: %s); %s",
                      strerror(os_error),
                      transport_remedy(os_error, "allow it, or run the ranks as processes")));
    TRY(map(made, bytes, out, error));
    *fd = made;
    made = -1;
out:
    if (made >= 0) (void)close(made);
    return st;
}

// What is looked at is a descriptor of our own: the maker may close the other at any time.
int32_t process_memory_open(int fd, uint64_t bytes, void **out, moxie_error *error)
{
    int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    struct stat file;
    int32_t st = MOXIE_OK;

    *out = NULL;
    if (own < 0 && errno == EBADF) return MOXIE_OK;
    if (own < 0 || fstat(own, &file) != 0)
        TRY(fail_with(error, MOXIE_E_MEMORY,
                      "no file descriptor to look at a thread's window with (%s); %s",
                      strerror(errno), transport_remedy(errno, "try again")));
    if (S_ISREG(file.st_mode) && (uint64_t)file.st_size == bytes) TRY(map(own, bytes, out, error));
out:
    if (own >= 0) (void)close(own);
    return st;
}
