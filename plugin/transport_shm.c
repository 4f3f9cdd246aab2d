// Windows in POSIX shared memory, between processes of one host and threads of one process alike.
//
// Opening goes in rounds of the host's all_gather, each carrying how the rank's own step went, so
// that all ranks go on or all fail: OFFER (size and a random name, before anything exists), MADE
// (the memory is there), MAPPED (everybody sees everybody's). Names are known to all before the
// first is created, so whoever fails unlinks all of them: a rank killed on the way leaves nothing
// behind while one of its peers lives. Afterwards the memory has no name at all.
//
// Ranks of one process share one address of the memory. A rank attaches through a mapping of its
// own of the first page, opened by name, where it counts itself in unless the count is already
// zero: an owner that gave up between two rounds can therefore never pull the memory away under it.
// The last of them to close unmaps.

#include "plugin/transport.h"

#include "plugin/futex.h"
#include "plugin/transport_shm_memory.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define BOOT_ID_BYTES 40 // 36 characters, NUL
#define TEXT_BYTES    200
#define STAGE_MAGIC   0x4d580100u // raised with every change of struct message

#define SHARED 0

enum stage { STAGE_JOIN, STAGE_OFFER, STAGE_MADE, STAGE_MAPPED };

// The head of every window.
struct bell_line {
    _Atomic uint32_t bell;    // one more for every signal to this window; a futex word
    _Atomic uint32_t waiters; // its owner is about to sleep, or asleep
    _Atomic uint32_t holders; // ranks of its owner's process that use its address
    unsigned char token[SHARED_TOKEN_BYTES]; // which window this is
    unsigned char pad[TRANSPORT_LINE_BYTES - 12 - SHARED_TOKEN_BYTES];
};

struct word_line {
    _Atomic uint64_t value;
    unsigned char pad[TRANSPORT_LINE_BYTES - 8];
};

_Static_assert(sizeof(struct bell_line) == TRANSPORT_LINE_BYTES &&
                   sizeof(struct word_line) == TRANSPORT_LINE_BYTES,
               "TRANSPORT_CONTROL_BYTES counts lines");

// Two ranks with the same identity are threads of one process.
struct identity {
    char boot_id[BOOT_ID_BYTES];
    uint64_t pid_namespace[2]; // device and inode
    int64_t pid;
};

// What ranks tell each other. One shape for every stage: later stages repeat what earlier ones
// said.
struct message {
    uint32_t stage;  // STAGE_MAGIC + enum stage
    int32_t rank;    // the sender's
    int32_t status;  // how the sender's own step went
    int32_t blame;   // the rank to blame for that, or -1 for the sender
    uint64_t window; // windows asked for since create, this one included
    struct identity identity;
    uint64_t bytes; // from STAGE_OFFER on
    unsigned char token[SHARED_TOKEN_BYTES];
    uint64_t address;      // from STAGE_MADE on: the sender's, for ranks of its process
    char text[TEXT_BYTES]; // why status is what it is
};

_Static_assert(sizeof(struct message) == 120 + TEXT_BYTES, "what is sent has no padding");

// One collective call under way.
struct meeting {
    const struct bootstrap *bootstrap;
    struct message mine;
    struct message all[MOXIE_RANKS_MAX];
    moxie_error local; // of the own step; writes into mine
    // Of every rank's window, once all are known.
    unsigned char tokens[MOXIE_RANKS_MAX][SHARED_TOKEN_BYTES];
};

struct transport {
    struct bootstrap bootstrap;
    struct identity identity;
    uint64_t windows;              // asked for since create
    uint8_t mate[MOXIE_RANKS_MAX]; // 1: a thread of this process
    int32_t mates;                 // this rank included
};

// ---- Meetings ----------------------------------------------------------------------------------

static void meeting_init(struct meeting *meeting, const struct transport *transport)
{
    memset(meeting, 0, sizeof *meeting);
    meeting->bootstrap = &transport->bootstrap;
    meeting->mine.rank = transport->bootstrap.rank;
    meeting->mine.window = transport->windows;
    meeting->mine.identity = transport->identity;
    meeting->local.struct_size = sizeof meeting->local;
    meeting->local.text = meeting->mine.text;
    meeting->local.text_bytes = TEXT_BYTES;
}

// A peer's text is shown to people: it ends, and has no control characters.
static void clean_text(char text[TEXT_BYTES])
{
    text[TEXT_BYTES - 1] = '\0';
    for (char *c = text; *c != '\0'; c++)
        if (*c < ' ' || *c > '~') *c = '?';
}

// The verdict on rank r's message; the same on every rank, since all read the same messages.
static int32_t judge(struct meeting *meeting, enum stage stage, int32_t r, moxie_error *error)
{
    struct message *message = &meeting->all[r];
    int32_t blame = message->blame;

    if (message->stage != STAGE_MAGIC + (uint32_t)stage || message->window != meeting->mine.window)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "rank %d is at another point of its bootstrap, or of another build; every "
                         "rank must make the "
                         "same calls in the same order",
                         r);
    if (message->rank != r)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "all_gather put the bytes of rank %d in the place of rank %d; it must "
                         "keep the order of ranks",
                         message->rank, r);
    if (message->status == MOXIE_OK) return MOXIE_OK;
    if (message->status < 0 || message->status > MOXIE_E_INTERNAL)
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "rank %d failed with code %d, which is none", r, message->status);
    if (blame < 0 || blame >= meeting->bootstrap->ranks) blame = r;
    clean_text(message->text);
    return fail_rank(error, message->status, blame, "rank %d: %s", r, message->text);
}

// Tells everyone how the own step (`step`, its text in meeting->local) went, and answers how those
// of all ranks did.
static int32_t meet(struct meeting *meeting, enum stage stage, int32_t step, moxie_error *error)
{
    const struct bootstrap *bootstrap = meeting->bootstrap;
    struct message *mine = &meeting->mine;
    int32_t os_error = 0;
    int32_t st = MOXIE_OK;

    mine->stage = STAGE_MAGIC + (uint32_t)stage;
    mine->status = step;
    mine->blame = step == MOXIE_OK ? -1 : meeting->local.rank;
    memset(meeting->all, 0, sizeof meeting->all);
    if (bootstrap->ranks == 1)
        meeting->all[0] = *mine;
    else
        os_error = bootstrap->all_gather(bootstrap->ctx, mine, meeting->all, sizeof *mine);
    if (os_error != 0 && step != MOXIE_OK)
        TRY(fail_rank(error, step, mine->blame, "rank %d: %s", mine->rank, mine->text));
    if (os_error != 0)
        TRY(fail_with(error, MOXIE_E_PEER,
                      "the host's all_gather failed (%d) between %d ranks: one has died, or left "
                      "after an error of "
                      "its own",
                      os_error, bootstrap->ranks));
    for (int32_t r = 0; r < bootstrap->ranks; r++)
        TRY(judge(meeting, stage, r, error));
out:
    return st;
}

// ---- Who is where ------------------------------------------------------------------------------

static int32_t identify(struct identity *identity, moxie_error *error)
{
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? -1 : read(fd, identity->boot_id, BOOT_ID_BYTES - 1);
    struct stat pid_namespace;

    if (fd >= 0) (void)close(fd);
    if (length <= 0)
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "/proc/sys/kernel/random/boot_id cannot be read, so ranks of this host "
                         "cannot be told from "
                         "others; mount /proc");
    if (stat("/proc/self/ns/pid", &pid_namespace) != 0)
        return fail_with(
            error, MOXIE_E_UNAVAILABLE,
            "/proc/self/ns/pid cannot be read (%s), so threads of this process cannot be told from "
            "others; mount /proc",
            strerror(errno));
    identity->pid_namespace[0] = pid_namespace.st_dev;
    identity->pid_namespace[1] = pid_namespace.st_ino;
    identity->pid = getpid();
    return MOXIE_OK;
}

// Every rank is compared with rank 0, so that all come to the same verdict.
static int32_t find_mates(struct transport *transport, const struct meeting *meeting,
                          moxie_error *error)
{
    const struct message *all = meeting->all;

    for (int32_t r = 0; r < transport->bootstrap.ranks; r++)
        if (memcmp(all[r].identity.boot_id, all[0].identity.boot_id, BOOT_ID_BYTES) != 0)
            return fail_rank(error, MOXIE_E_UNAVAILABLE, r,
                             "rank %d is on another host than rank 0, and shared memory joins "
                             "ranks of one host only; "
                             "keep the ranks on one host, or choose a transport between hosts",
                             r);
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        transport->mate[r] =
            memcmp(&all[r].identity, &transport->identity, sizeof all[r].identity) == 0;
        transport->mates += transport->mate[r];
    }
    return MOXIE_OK;
}

static void destroy(struct transport *transport)
{
    free(transport);
}

static int32_t create(const struct bootstrap *bootstrap, struct transport **out, moxie_error *error)
{
    struct transport blank = {.bootstrap = *bootstrap};
    struct transport *transport = NULL;
    struct meeting meeting;
    int32_t st = MOXIE_OK;
    int32_t step;

    *out = NULL;
    TRY(transport_check_bootstrap(bootstrap, error));
    meeting_init(&meeting, &blank);
    step = identify(&meeting.mine.identity, &meeting.local);
    transport = calloc(1, sizeof *transport);
    if (transport == NULL)
        step = fail_with(&meeting.local, MOXIE_E_MEMORY, "a transport: out of memory");
    TRY(meet(&meeting, STAGE_JOIN, step, error));
    *transport = blank;
    transport->identity = meeting.mine.identity;
    TRY(find_mates(transport, &meeting, error));
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
    memcpy(((struct bell_line *)base)->token, meeting->mine.token, SHARED_TOKEN_BYTES);
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
static int32_t check_address(uint64_t address, const unsigned char token[SHARED_TOKEN_BYTES],
                             int32_t r, moxie_error *error)
{
    struct bell_line line = {.pad = {0}};
    int pipe_fds[2];
    int here;

    if (pipe2(pipe_fds, O_CLOEXEC | O_NONBLOCK) != 0)
        return fail_with(error, MOXIE_E_MEMORY, "a pipe to check an address with: %s",
                         strerror(errno));
    here = syscall(SYS_write, pipe_fds[1], address, sizeof line) == (long)sizeof line &&
           read(pipe_fds[0], &line, sizeof line) == (ssize_t)sizeof line &&
           memcmp(line.token, token, SHARED_TOKEN_BYTES) == 0;
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

static void window_close(struct transport *transport, struct window *window)
{
    if (window == NULL) return;
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++)
        if (window->peer[r] != NULL)
            let_go(window->peer[r], window->bytes_mapped,
                   transport->mate[r] && transport->mates > 1);
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
    TRY(shared_memory_token(meeting->mine.token, error));
    window = calloc(1, sizeof *window);
    if (window == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory"));
    window->bytes = bytes;
    window->bytes_mapped = bytes_mapped;
    *out = window;
out:
    return st;
}

// All names are known from here on, and all sizes the same.
static int32_t take_offers(struct meeting *meeting, moxie_error *error)
{
    const struct message *all = meeting->all;

    for (int32_t r = 0; r < meeting->bootstrap->ranks; r++) {
        if (all[r].bytes != all[0].bytes)
            return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                             "rank %d opens a window of %" PRIu64 " bytes, rank 0 one of %" PRIu64
                             "; the ranks' configurations differ",
                             r, all[r].bytes, all[0].bytes);
        memcpy(meeting->tokens[r], all[r].token, SHARED_TOKEN_BYTES);
    }
    memcpy(meeting->tokens[meeting->mine.rank], meeting->mine.token, SHARED_TOKEN_BYTES);
    return MOXIE_OK;
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
    meeting_init(&meeting, transport);
    TRY(meet(&meeting, STAGE_OFFER, prepare(transport, bytes, &meeting, &window), error));
    TRY(take_offers(&meeting, error));
    named = 1;
    TRY(meet(&meeting, STAGE_MADE, make_own(&meeting, window, &meeting.local), error));
    TRY(meet(&meeting, STAGE_MAPPED, map_peers(transport, &meeting, window, &meeting.local),
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
                                 int32_t source, enum transport_word word)
{
    struct word_line *lines = (struct word_line *)(void *)(base + TRANSPORT_LINE_BYTES);

    return &lines[(int32_t)word * transport->bootstrap.ranks + source].value;
}

// The ringer rings and then looks for waiters; the waiter counts itself and then looks at the bell.
// All four are sequentially consistent, so one of the two sees the other. A peer that died or
// scribbles here costs a needless wake or a wait up to its deadline.
static void signal_peer(struct transport *transport, struct window *window, int32_t peer,
                        enum transport_word word, uint64_t value)
{
    struct bell_line *line = (struct bell_line *)(void *)window->peer[peer];

    atomic_store_explicit(word_of(transport, window->peer[peer], transport->bootstrap.rank, word),
                          value, memory_order_release);
    (void)atomic_fetch_add(&line->bell, 1);
    if (atomic_load(&line->waiters) != 0) futex_wake(&line->bell, INT_MAX, SHARED);
}

static uint64_t read_word(struct transport *transport, struct window *window, int32_t source,
                          enum transport_word word)
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
