// Windows in POSIX shared memory, between processes of one host and threads of one process alike.
//
// Names are known to all ranks (transport_meeting.h) before the first is created, so whoever fails
// unlinks all of them: a rank killed on the way leaves nothing behind while one of its peers lives.
// Afterwards the memory has no name at all.
//
// Ranks of one process share one address of the memory, and the last of them to close unmaps. They
// are counted in a file without a name (struct tenancy), since a peer process can write anything
// into a window. A rank attaches through a mapping of its own of that file, where it counts itself
// in unless the count is already zero: an owner that gave up between two rounds can therefore never
// pull the memory away under it.

#include "plugin/transport.h"

#include "plugin/futex.h"
#include "plugin/transport_meeting.h"
#include "plugin/transport_shm_memory.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define SHARED 0

// The head of every window. Whoever maps it may write anything here.
struct bell_line {
    _Atomic uint32_t bell;    // one more for every signal to this window; a futex word
    _Atomic uint32_t waiters; // its owner is about to sleep, or asleep
    unsigned char pad[TRANSPORT_LINE_BYTES - 8];
};

struct word_line {
    _Atomic uint64_t value;
    unsigned char pad[TRANSPORT_LINE_BYTES - 8];
};

_Static_assert(sizeof(struct bell_line) == TRANSPORT_LINE_BYTES &&
                   sizeof(struct word_line) == TRANSPORT_LINE_BYTES,
               "TRANSPORT_CONTROL_BYTES counts lines");

// Who uses a window's address in its owner's process: in memory that no other process has.
struct tenancy {
    _Atomic uint32_t holders;                 // ranks; the last unmaps both
    unsigned char token[MEETING_TOKEN_BYTES]; // which window this is of
    unsigned char *base;                      // the window
    struct tenancy *self;                     // this
};

struct shm_window {
    struct window window;
    struct tenancy *tenancy[MOXIE_RANKS_MAX]; // of rank r's memory; NULL: the mapping is ours alone
};

struct transport {
    struct bootstrap bootstrap;
    struct meeting_identity identity;
    uint64_t windows;              // asked for since create
    uint8_t mate[MOXIE_RANKS_MAX]; // 1: a thread of this process
    int32_t mates;                 // this rank included
    int32_t group_ranks;           // whose memory the limit of this rank's control group is for
};

static void find_neighbours(struct transport *transport, const struct meeting *meeting)
{
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        transport->mate[r] = memcmp(&meeting->all[r].identity, &transport->identity,
                                    sizeof transport->identity) == 0;
        transport->mates += transport->mate[r];
        transport->group_ranks +=
            meeting->mine.group == 0 || meeting->all[r].group == meeting->mine.group;
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
    find_neighbours(transport, &meeting);
    *out = transport;
    transport = NULL;
out:
    destroy(transport);
    return st;
}

// ---- Ranks of one process ----------------------------------------------------------------------

// Of the own window, held by this rank. Mates ask for it by *fd, which is closed when they have.
static int32_t tenancy_make(struct meeting *meeting, struct shm_window *own, int *fd)
{
    struct tenancy *tenancy;
    int32_t st = MOXIE_OK;
    void *memory;

    TRY(process_memory_make(sizeof *tenancy, fd, &memory, &meeting->local));
    tenancy = memory;
    atomic_store(&tenancy->holders, 1);
    memcpy(tenancy->token, meeting->mine.token, MEETING_TOKEN_BYTES);
    tenancy->base = own->window.base;
    tenancy->self = tenancy;
    own->tenancy[meeting->mine.rank] = tenancy;
out:
    return st;
}

// Counts this rank in, through a mapping of its own.
static int32_t tenancy_hold(struct tenancy *tenancy, int32_t r, moxie_error *error)
{
    uint32_t holders = atomic_load(&tenancy->holders);

    do
        if (holders == 0)
            return fail_rank(error, MOXIE_E_PEER, r,
                             "rank %d gave its window up while it was being opened", r);
    while (!atomic_compare_exchange_weak(&tenancy->holders, &holders, holders + 1));
    return MOXIE_OK;
}

// A rank of this process, unless it says so falsely.
static int32_t map_mate(const struct meeting *meeting, int32_t r, struct shm_window *own,
                        moxie_error *error)
{
    struct tenancy *tenancy = NULL;
    int32_t st = MOXIE_OK;
    void *memory;

    TRY(process_memory_open((int)meeting->all[r].tenancy_fd, sizeof *tenancy, &memory, error));
    tenancy = memory;
    if (tenancy == NULL || memcmp(tenancy->token, meeting->tokens[r], MEETING_TOKEN_BYTES) != 0)
        TRY(fail_rank(
            error, MOXIE_E_COLLECTIVE_MISMATCH, r,
            "rank %d says it is a thread of this process, but its window is not here (any more)",
            r));
    TRY(tenancy_hold(tenancy, r, error));
    own->tenancy[r] = tenancy->self;
    own->window.peer[r] = tenancy->base;
out:
    if (tenancy != NULL) (void)munmap(tenancy, sizeof *tenancy);
    return st;
}

static void tenancy_leave(struct tenancy *tenancy, uint64_t window_bytes)
{
    if (atomic_fetch_sub_explicit(&tenancy->holders, 1, memory_order_acq_rel) != 1) return;
    (void)munmap(tenancy->base, window_bytes);
    (void)munmap(tenancy, sizeof *tenancy);
}

// ---- Everybody's memory ------------------------------------------------------------------------

static int32_t make_own(const struct transport *transport, struct meeting *meeting,
                        struct shm_window *own, int *tenancy_fd)
{
    struct window *window = &own->window;
    int32_t st = MOXIE_OK;
    void *base;

    TRY(shared_memory_make(meeting->mine.token, window->bytes_mapped, &base, &meeting->local));
    window->base = base;
    window->peer[meeting->mine.rank] = base;
    if (transport->mates > 1) TRY(tenancy_make(meeting, own, tenancy_fd));
    meeting->mine.tenancy_fd = *tenancy_fd;
out:
    return st;
}

static int32_t map_peers(const struct transport *transport, const struct meeting *meeting,
                         struct shm_window *own, moxie_error *error)
{
    uint64_t bytes = own->window.bytes_mapped;
    int32_t st = MOXIE_OK;
    void *memory;

    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        if (r == transport->bootstrap.rank) continue;
        if (transport->mate[r]) {
            TRY(map_mate(meeting, r, own, error));
            continue;
        }
        TRY(shared_memory_open(meeting->tokens[r], bytes, r, &memory, error));
        own->window.peer[r] = memory;
    }
out:
    return st;
}

// ---- Windows -----------------------------------------------------------------------------------

// In the child of a fork() the windows are not mapped: something else may lie there by now.
static void window_close(struct transport *transport, struct window *window)
{
    struct shm_window *own = window != NULL ? window->impl : NULL;
    int ours = transport->identity.pid == getpid();

    if (own == NULL) return;
    for (int32_t r = 0; ours && r < transport->bootstrap.ranks; r++)
        if (own->window.peer[r] != NULL && own->tenancy[r] == NULL)
            (void)munmap(own->window.peer[r], own->window.bytes_mapped);
        else if (own->tenancy[r] != NULL)
            tenancy_leave(own->tenancy[r], own->window.bytes_mapped);
    free(own);
}

// This one and those that follow it: that they do not fit is said before the first takes any
// memory.
static int32_t windows_to_come(const struct transport *transport)
{
    const int64_t later = transport->bootstrap.windows - (int64_t)transport->windows;

    return later > 0 ? (int32_t)later + 1 : 1;
}

// The size, the header and the name: all that can be refused before any memory is made.
static int32_t prepare(const struct transport *transport, uint64_t bytes, struct meeting *meeting,
                       struct shm_window **out)
{
    moxie_error *error = &meeting->local;
    struct shm_window *own = NULL;
    uint64_t bytes_mapped;
    int32_t st = MOXIE_OK;

    meeting->mine.bytes = bytes;
    TRY(transport_window_bytes(bytes, transport->bootstrap.ranks, &bytes_mapped, error));
    TRY(shared_memory_check(&(struct shared_memory_need){.bytes = bytes_mapped,
                                                         .ranks = transport->bootstrap.ranks,
                                                         .group_ranks = transport->group_ranks,
                                                         .windows = windows_to_come(transport)},
                            error));
    TRY(meeting_token(meeting->mine.token, error));
    own = calloc(1, sizeof *own);
    if (own == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory"));
    own->window.bytes = bytes;
    own->window.bytes_mapped = bytes_mapped;
    own->window.impl = own;
    *out = own;
out:
    return st;
}

static int32_t window_open(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error)
{
    struct meeting meeting;
    struct shm_window *own = NULL;
    int32_t st = MOXIE_OK;
    int tenancy_fd = -1, named = 0;

    *out = NULL;
    transport->windows++;
    meeting_init(&meeting, &transport->bootstrap, &transport->identity, transport->windows);
    TRY(meeting_meet(&meeting, STAGE_OFFER, prepare(transport, bytes, &meeting, &own), error));
    TRY(meeting_take_offers(&meeting, error));
    named = 1;
    TRY(meeting_meet(&meeting, STAGE_MADE, make_own(transport, &meeting, own, &tenancy_fd), error));
    TRY(meeting_meet(&meeting, STAGE_MAPPED, map_peers(transport, &meeting, own, &meeting.local),
                     error));
    *out = &own->window;
out:
    for (int32_t r = 0; named && r < transport->bootstrap.ranks; r++)
        shared_memory_unlink(meeting.tokens[r]);
    if (tenancy_fd >= 0) (void)close(tenancy_fd);
    if (own != NULL && *out == NULL) window_close(transport, &own->window);
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
    .create = create,
    .window_open = window_open,
    .window_close = window_close,
    .signal = signal_peer,
    .read = read_word,
    .ticket = ticket,
    .wait = wait_until,
    .destroy = destroy,
};
