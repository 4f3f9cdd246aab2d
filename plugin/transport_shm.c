// Windows in POSIX shared memory, between processes of one host and threads of one process alike.
//
// Names are known to all ranks (transport_meeting.h) before the first is created, so whoever fails
// unlinks all of them: a rank killed on the way leaves nothing behind while one of its peers lives.
// Afterwards the memory has no name at all.
//
// Ranks of one process share one address of the memory. A rank attaches through a mapping of its
// own of the first page, opened by name, where it counts itself in unless the count is already
// zero: an owner that gave up between two rounds can therefore never pull the memory away under it.
// The last of them to close unmaps.

#include "plugin/transport.h"

#include "plugin/futex.h"
#include "plugin/transport_meeting.h"
#include "plugin/transport_shm_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SHARED 0

// The head of every window.
struct bell_line {
    _Atomic uint32_t bell;    // one more for every signal to this window; a futex word
    _Atomic uint32_t waiters; // its owner is about to sleep, or asleep
    _Atomic uint32_t holders; // ranks of its owner's process that use its address
    unsigned char token[MEETING_TOKEN_BYTES]; // which window this is
    unsigned char pad[TRANSPORT_LINE_BYTES - 12 - MEETING_TOKEN_BYTES];
};

struct word_line {
    _Atomic uint64_t value;
    unsigned char pad[TRANSPORT_LINE_BYTES - 8];
};

_Static_assert(sizeof(struct bell_line) == TRANSPORT_LINE_BYTES &&
                   sizeof(struct word_line) == TRANSPORT_LINE_BYTES,
               "TRANSPORT_CONTROL_BYTES counts lines");

struct transport {
    struct bootstrap bootstrap;
    struct meeting_identity identity;
    uint64_t windows;              // asked for since create
    uint8_t mate[MOXIE_RANKS_MAX]; // 1: a thread of this process
    int32_t mates;                 // this rank included
};

static void find_mates(struct transport *transport, const struct meeting *meeting)
{
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        transport->mate[r] = memcmp(&meeting->all[r].identity, &transport->identity,
                                    sizeof transport->identity) == 0;
        transport->mates += transport->mate[r];
    }
}

static void destroy(struct transport *transport)
{
    free(transport);
}

static int32_t create(const struct bootstrap *bootstrap, struct transport **out, moxie_error *error)
{
    struct transport *transport = NULL;
    struct meeting meeting;
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(transport_check_bootstrap(bootstrap, error));
    transport = calloc(1, sizeof *transport);
    TRY(meeting_join(&meeting, bootstrap, transport, error));
    transport->bootstrap = *bootstrap;
    transport->identity = meeting.mine.identity;
    find_mates(transport, &meeting);
    *out = transport;
    transport = NULL;
out:
    destroy(transport);
    return st;
}

// ---- Everybody's memory ------------------------------------------------------------------------

static int32_t make_own(struct meeting *meeting, struct window *window, moxie_error *error)
{
    int32_t st = MOXIE_OK;
    void *base;

    TRY(shared_memory_make(meeting->mine.token, window->bytes_mapped, &base, error));
    window->base = base;
    window->peer[meeting->mine.rank] = base;
    memcpy(((struct bell_line *)base)->token, meeting->mine.token, MEETING_TOKEN_BYTES);
    atomic_store(&((struct bell_line *)base)->holders, 1);
    meeting->mine.address = (uint64_t)(uintptr_t)base;
out:
    return st;
}

// Counts this rank in, through the page that it has mapped itself.
static int32_t hold(struct bell_line *line, int32_t r, moxie_error *error)
{
    uint32_t holders = atomic_load(&line->holders);

    do
        if (holders == 0 || holders >= MOXIE_RANKS_MAX)
            return fail_rank(error, MOXIE_E_PEER, r,
                             "rank %d gave its window up while it was being opened", r);
    while (!atomic_compare_exchange_weak(&line->holders, &holders, holders + 1));
    return MOXIE_OK;
}

// Sees to it that rank r's window is at `address` in this process. The kernel does the reading: an
// address that a confused peer made up is an error of write() instead of a fault.
static int32_t check_address(uint64_t address, const unsigned char token[MEETING_TOKEN_BYTES],
                             int32_t r, moxie_error *error)
{
    struct bell_line line = {.pad = {0}};
    int pipe_fds[2];
    int here;

    if (pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) != 0)
        return fail_with(error, MOXIE_E_MEMORY, "no pipe to check an address with (%s); %s",
                         strerror(errno), transport_remedy(errno, "try again"));
    here = syscall(SYS_write, pipe_fds[1], address, sizeof line) == (long)sizeof line &&
           read(pipe_fds[0], &line, sizeof line) == (ssize_t)sizeof line &&
           memcmp(line.token, token, MEETING_TOKEN_BYTES) == 0;
    (void)close(pipe_fds[0]);
    (void)close(pipe_fds[1]);
    if (here) return MOXIE_OK;
    return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                     "rank %d says it is a thread of this process, but its window is not here", r);
}

// A rank of this process: its first page is mapped for as long as it takes to count in.
static int32_t map_mate(const struct meeting *meeting, int32_t r, struct window *window,
                        moxie_error *error)
{
    uint64_t page_bytes = (uint64_t)sysconf(_SC_PAGESIZE);
    int32_t st = MOXIE_OK;
    void *page;

    TRY(shared_memory_open(meeting->tokens[r], window->bytes_mapped, page_bytes, r, &page, error));
    st = check_address(meeting->all[r].address, meeting->tokens[r], r, error);
    if (st == MOXIE_OK) st = hold(page, r, error);
    (void)munmap(page, page_bytes);
    TRY(st);
    window->peer[r] = (unsigned char *)(uintptr_t)meeting->all[r].address;
out:
    return st;
}

static int32_t map_peers(const struct transport *transport, const struct meeting *meeting,
                         struct window *window, moxie_error *error)
{
    uint64_t bytes = window->bytes_mapped;
    int32_t st = MOXIE_OK;
    void *memory;

    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        if (r == transport->bootstrap.rank) continue;
        if (transport->mate[r]) {
            TRY(map_mate(meeting, r, window, error));
            continue;
        }
        TRY(shared_memory_open(meeting->tokens[r], bytes, bytes, r, &memory, error));
        window->peer[r] = memory;
    }
out:
    return st;
}

// ---- Windows -----------------------------------------------------------------------------------

// Between processes every mapping is its rank's own. Within one the last holder unmaps.
static void let_go(unsigned char *memory, uint64_t bytes, int held)
{
    struct bell_line *line = (struct bell_line *)(void *)memory;

    if (!held || atomic_fetch_sub_explicit(&line->holders, 1, memory_order_acq_rel) == 1)
        (void)munmap(memory, bytes);
}

// The child of a fork() is not counted. What its parent's threads share stays mapped in it: another
// of its copies of their handles may still use the address.
static void window_close(struct transport *transport, struct window *window)
{
    int counted = transport->identity.pid == getpid();

    if (window == NULL) return;
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        int held = transport->mate[r] && transport->mates > 1;

        if (window->peer[r] != NULL && (counted || !held))
            let_go(window->peer[r], window->bytes_mapped, held);
    }
    free(window);
}

// The size, the header and the name: all that can be refused before any memory is made.
static int32_t prepare(const struct transport *transport, uint64_t bytes, struct meeting *meeting,
                       struct window **out)
{
    moxie_error *error = &meeting->local;
    struct window *window = NULL;
    uint64_t bytes_mapped;
    int32_t st = MOXIE_OK;

    meeting->mine.bytes = bytes;
    TRY(transport_window_bytes(bytes, transport->bootstrap.ranks, &bytes_mapped, error));
    TRY(shared_memory_check(bytes_mapped, transport->bootstrap.ranks, error));
    TRY(meeting_token(meeting->mine.token, error));
    window = calloc(1, sizeof *window);
    if (window == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory"));
    window->bytes = bytes;
    window->bytes_mapped = bytes_mapped;
    *out = window;
out:
    return st;
}

static int32_t window_open(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error)
{
    struct meeting meeting;
    struct window *window = NULL;
    int32_t st = MOXIE_OK;
    int named = 0;

    *out = NULL;
    transport->windows++;
    meeting_init(&meeting, &transport->bootstrap, &transport->identity, transport->windows);
    TRY(meeting_meet(&meeting, STAGE_OFFER, prepare(transport, bytes, &meeting, &window), error));
    TRY(meeting_take_offers(&meeting, error));
    named = 1;
    TRY(meeting_meet(&meeting, STAGE_MADE, make_own(&meeting, window, &meeting.local), error));
    TRY(meeting_meet(&meeting, STAGE_MAPPED, map_peers(transport, &meeting, window, &meeting.local),
                     error));
    *out = window;
    window = NULL;
out:
    for (int32_t r = 0; named && r < transport->bootstrap.ranks; r++)
        shared_memory_unlink(meeting.tokens[r]);
    window_close(transport, window);
    return st;
}

// ---- Signals -----------------------------------------------------------------------------------

static _Atomic uint64_t *word_of(const struct transport *transport, unsigned char *base,
                                 int32_t source, enum flag_word word)
{
    struct word_line *lines = (struct word_line *)(void *)(base + TRANSPORT_LINE_BYTES);

    return &lines[(int32_t)word * transport->bootstrap.ranks + source].value;
}

// The ringer rings and then looks for waiters; the waiter counts itself and then looks at the bell.
// All four are sequentially consistent, so one of the two sees the other. A peer that died or
// scribbles here costs a needless wake or a wait up to its deadline.
static void signal_peer(struct transport *transport, struct window *window, int32_t peer,
                        enum flag_word word, uint64_t value)
{
    struct bell_line *line = (struct bell_line *)(void *)window->peer[peer];

    atomic_store_explicit(word_of(transport, window->peer[peer], transport->bootstrap.rank, word),
                          value, memory_order_release);
    (void)atomic_fetch_add(&line->bell, 1);
    if (atomic_load(&line->waiters) != 0) futex_wake(&line->bell, INT_MAX, SHARED);
}

static uint64_t read_word(struct transport *transport, struct window *window, int32_t source,
                          enum flag_word word)
{
    return atomic_load_explicit(word_of(transport, window->base, source, word),
                                memory_order_acquire);
}

static uint32_t ticket(struct transport *transport, struct window *window)
{
    struct bell_line *line = (struct bell_line *)(void *)window->base;

    (void)transport;
    return atomic_load_explicit(&line->bell, memory_order_acquire);
}

static void wait_until(struct transport *transport, struct window *window, uint32_t seen,
                       int64_t deadline_ns)
{
    struct bell_line *line = (struct bell_line *)(void *)window->base;
    struct timespec deadline = {.tv_sec = deadline_ns / 1000000000,
                                .tv_nsec = deadline_ns % 1000000000};

    for (int look = 0; look < SPIN_LOOKS; look++) {
        if (ticket(transport, window) != seen) return;
        spin_pause();
    }
    if (deadline_ns <= 0) return;
    (void)atomic_fetch_add(&line->waiters, 1);
    if (atomic_load(&line->bell) == seen) futex_wait(&line->bell, seen, &deadline, SHARED);
    (void)atomic_fetch_sub(&line->waiters, 1);
}

const struct transport_ops transport_shm = {
    .name = "shm",
    .create = create,
    .window_open = window_open,
    .window_close = window_close,
    .signal = signal_peer,
    .read = read_word,
    .ticket = ticket,
    .wait = wait_until,
    .destroy = destroy,
};
