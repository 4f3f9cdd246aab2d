// GPUs of hosts apart, over NCCL: windows are memory of one's own, and rows are sent and received.
// The one file that knows NCCL. It is looked up at create, the copy that the process already has
// before any other, and stays loaded. The declarations below are those of its C interface that are
// used here, which have not changed since 2.14.

#include "plugin/transport_nccl.h"

#include "plugin/device.h"
#include "plugin/transport_meeting.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LIBRARY_NAME  "libnccl.so.2"
#define VERSION_LEAST 21400

typedef struct ncclComm *nccl_comm;

enum nccl_result { NCCL_SUCCESS = 0, NCCL_IN_PROGRESS = 7 };
enum nccl_type { NCCL_UINT8 = 1 };

struct nccl_id {
    unsigned char bytes[MEETING_ID_BYTES];
};

// As 2.14 has it; what is longer in a later version has its default there.
struct nccl_config {
    size_t bytes;
    unsigned magic;
    unsigned version;
    int blocking;
};

struct library {
    int (*version)(int *version);
    int (*unique_id)(struct nccl_id *id);
    int (*join)(nccl_comm *comm, int ranks, struct nccl_id id, int rank,
                struct nccl_config *config);
    int (*finalize)(nccl_comm comm);
    int (*destroy)(nccl_comm comm);
    int (*abort)(nccl_comm comm);
    int (*async_error)(nccl_comm comm, int *result);
    const char *(*error_text)(int result);
    const char *(*last_error)(nccl_comm comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *from, size_t count, int type, int peer, nccl_comm comm, void *stream);
    int (*receive)(void *to, size_t count, int type, int peer, nccl_comm comm, void *stream);
};

struct transport {
    struct bootstrap bootstrap;
    struct meeting_identity identity; // nobody is looked for by it: zero
    struct library nccl;
    nccl_comm comm;   // NULL: none yet, or no more
    uint64_t windows; // asked for since create
};

// ---- The library -------------------------------------------------------------------------------

static int32_t find_functions(struct library *nccl, void *handle, moxie_error *error)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        {"ncclGetVersion", &nccl->version},
        {"ncclGetUniqueId", &nccl->unique_id},
        {"ncclCommInitRankConfig", &nccl->join},
        {"ncclCommFinalize", &nccl->finalize},
        {"ncclCommDestroy", &nccl->destroy},
        {"ncclCommAbort", &nccl->abort},
        {"ncclCommGetAsyncError", &nccl->async_error},
        {"ncclGetErrorString", &nccl->error_text},
        {"ncclGetLastError", &nccl->last_error},
        {"ncclGroupStart", &nccl->group_start},
        {"ncclGroupEnd", &nccl->group_end},
        {"ncclSend", &nccl->send},
        {"ncclRecv", &nccl->receive},
    };

    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *function = dlsym(handle, functions[i].name);

        if (function == NULL)
            return fail_with(error, MOXIE_E_UNAVAILABLE,
                             "%s has no function %s; install NCCL 2.14 or newer", LIBRARY_NAME,
                             functions[i].name);
        memcpy(functions[i].at, &function, sizeof function);
    }
    return MOXIE_OK;
}

// What a number of ncclGetVersion is called: 21405 is 2.14.5.
static void version_text(int version, char text[32])
{
    (void)snprintf(text, 32, "%d.%d.%d", version / 10000, version / 100 % 100, version % 100);
}

// As NCCL reads it: 1 overrides what `join` asks for.
static int32_t check_environment(moxie_error *error)
{
    const char *blocking = getenv("NCCL_COMM_BLOCKING");

    if (blocking == NULL || strtol(blocking, NULL, 0) != 1) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNAVAILABLE,
                     "transport nccl: NCCL_COMM_BLOCKING is %s, with which NCCL waits for ever for "
                     "a rank that does not come; unset it",
                     blocking);
}

static int32_t load(struct library *nccl, int *version, moxie_error *error)
{
    void *handle = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD | RTLD_NODELETE);
    const char *why;
    char text[32];
    int32_t st = MOXIE_OK;
    int answer;

    if (handle == NULL) handle = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (handle == NULL) {
        why = dlerror();
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "transport nccl: %s cannot be loaded (%s); install NCCL 2.14 or newer, or "
                         "put it on the library path",
                         LIBRARY_NAME, why == NULL ? "not found" : why);
    }
    TRY(find_functions(nccl, handle, error));
    answer = nccl->version(version);
    if (answer != NCCL_SUCCESS)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE, "%s does not say its version: %s", LIBRARY_NAME,
                      nccl->error_text(answer)));
    version_text(*version, text);
    if (*version < VERSION_LEAST)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE,
                      "%s is NCCL %s; install 2.14 or newer, on every rank the same", LIBRARY_NAME,
                      *version < 10000 ? "before 2.9" : text));
out:
    (void)dlclose(handle);
    return st;
}

// ---- Answers -----------------------------------------------------------------------------------

// NCCL's answer in words, with what it has noted last where that says more.
static int32_t fail_nccl(const struct transport *transport, int32_t code, const char *what,
                         int answer, moxie_error *error)
{
    const struct library *nccl = &transport->nccl;
    const char *last = nccl->last_error(transport->comm);

    return fail_with(error, code, "NCCL: %s: %s%s%s", what, nccl->error_text(answer),
                     last == NULL || last[0] == '\0' ? "" : "; ", last == NULL ? "" : last);
}

// Waits until what NCCL does in a thread of its own is done, `answer` being what the call gave;
// gives NCCL_IN_PROGRESS when that takes longer than timeout_ms.
static int settle(const struct transport *transport, int answer)
{
    int64_t deadline_ns = clock_ns() + (int64_t)transport->bootstrap.timeout_ms * 1000000;

    while (answer == NCCL_IN_PROGRESS && transport->comm != NULL) {
        int state = NCCL_SUCCESS;
        int asked = transport->nccl.async_error(transport->comm, &state);

        answer = asked == NCCL_SUCCESS ? state : asked;
        if (answer != NCCL_IN_PROGRESS || clock_ns() >= deadline_ns) break;
        clock_pause();
    }
    return answer;
}

void nccl_abort(struct transport *transport)
{
    if (transport->comm != NULL) (void)transport->nccl.abort(transport->comm);
    transport->comm = NULL;
}

void nccl_finish(struct transport *transport)
{
    if (transport->comm == NULL) return;
    if (settle(transport, transport->nccl.finalize(transport->comm)) == NCCL_SUCCESS) {
        (void)transport->nccl.destroy(transport->comm);
        transport->comm = NULL;
    }
    nccl_abort(transport);
}

int32_t nccl_check(struct transport *transport, moxie_error *error)
{
    int state = NCCL_SUCCESS;
    int answer;

    if (transport->comm == NULL) return MOXIE_OK;
    answer = transport->nccl.async_error(transport->comm, &state);
    if (answer == NCCL_SUCCESS) answer = state;
    if (answer == NCCL_SUCCESS || answer == NCCL_IN_PROGRESS) return MOXIE_OK;
    return fail_nccl(transport, MOXIE_E_PEER, "an exchange failed", answer, error);
}

// ---- Create and destroy ------------------------------------------------------------------------

static void destroy(struct transport *transport)
{
    if (transport == NULL) return;
    nccl_abort(transport);
    free(transport);
}

// What each rank needs of its own.
static int32_t prepare(struct transport *transport, struct meeting *meeting)
{
    int version = 0;
    int32_t st = MOXIE_OK;

    if (transport == NULL)
        TRY(fail_with(&meeting->local, MOXIE_E_MEMORY, "a transport: out of memory"));
    TRY(check_environment(&meeting->local));
    TRY(load(&transport->nccl, &version, &meeting->local));
    meeting->mine.bytes = (uint64_t)version;
out:
    return st;
}

// Rank 0 brings the name that all join by. Once all are ready: NCCL listens in a thread of its own
// from then on, until all have joined.
static int32_t bring_id(const struct transport *transport, struct meeting *meeting)
{
    struct nccl_id id;
    int answer;

    if (transport->bootstrap.rank != 0) return MOXIE_OK;
    answer = transport->nccl.unique_id(&id);
    if (answer != NCCL_SUCCESS)
        return fail_nccl(transport, MOXIE_E_UNAVAILABLE, "no name for the ranks to join by", answer,
                         &meeting->local);
    memcpy(meeting->mine.id, id.bytes, sizeof meeting->mine.id);
    return MOXIE_OK;
}

static int32_t same_version(const struct meeting *meeting, moxie_error *error)
{
    char theirs[32], first[32];

    for (int32_t r = 0; r < meeting->bootstrap->ranks; r++) {
        if (meeting->all[r].bytes == meeting->all[0].bytes) continue;
        version_text((int)meeting->all[r].bytes, theirs);
        version_text((int)meeting->all[0].bytes, first);
        return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, r,
                         "rank %d has NCCL %s, rank 0 %s; install the same everywhere", r, theirs,
                         first);
    }
    return MOXIE_OK;
}

// A rank that failed for a reason of its own is heard before those that only waited for it.
static int32_t meet(struct meeting *meeting, int32_t step, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(meeting_meet(meeting, STAGE_MADE, step == MOXIE_E_TIMEOUT ? MOXIE_OK : step, error));
    TRY(meeting_meet(meeting, STAGE_MAPPED, step, error));
out:
    return st;
}

// MOXIE_E_TIMEOUT when the others do not come.
static int32_t join(struct transport *transport, const struct meeting *meeting, moxie_error *error)
{
    struct nccl_config config = {sizeof config, 0xcafebeef, VERSION_LEAST, 0};
    struct nccl_id id;
    int answer;

    memcpy(id.bytes, meeting->all[0].id, sizeof id.bytes);
    answer = settle(transport, transport->nccl.join(&transport->comm, transport->bootstrap.ranks,
                                                    id, transport->bootstrap.rank, &config));
    if (answer == NCCL_SUCCESS) return MOXIE_OK;
    if (answer == NCCL_IN_PROGRESS)
        return fail_with(error, MOXIE_E_TIMEOUT,
                         "NCCL did not join the ranks within timeout_ms = %d; see NCCL_DEBUG=INFO, "
                         "and NCCL_SOCKET_IFNAME for the network between the hosts",
                         transport->bootstrap.timeout_ms);
    return fail_nccl(transport, MOXIE_E_UNAVAILABLE, "the ranks cannot be joined", answer, error);
}

static int32_t create(const struct bootstrap *bootstrap, struct transport **out, moxie_error *error)
{
    struct transport *transport = NULL;
    const struct meeting_identity nobody = {.pid = 0};
    struct meeting meeting;
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(transport_check_bootstrap(bootstrap, error));
    meeting_init(&meeting, bootstrap, &nobody, 0);
    transport = calloc(1, sizeof *transport);
    if (transport != NULL) transport->bootstrap = *bootstrap;
    TRY(meeting_meet(&meeting, STAGE_JOIN, prepare(transport, &meeting), error));
    TRY(same_version(&meeting, error));
    TRY(meeting_meet(&meeting, STAGE_OFFER, bring_id(transport, &meeting), error));
    TRY(meet(&meeting, join(transport, &meeting, &meeting.local), error));
    *out = transport;
    transport = NULL;
out:
    destroy(transport);
    return st;
}

static int32_t agree(struct transport *transport, int32_t step, const moxie_error *seen,
                     moxie_error *error)
{
    struct meeting meeting;

    meeting_init(&meeting, &transport->bootstrap, &transport->identity, transport->windows);
    if (step != MOXIE_OK) (void)fail_rank(&meeting.local, step, seen->rank, "%s", seen->text);
    return meet(&meeting, step, error);
}

// ---- Windows -----------------------------------------------------------------------------------

static void window_close(struct transport *transport, struct window *window)
{
    if (window == NULL) return;
    if (window->base != NULL)
        transport->bootstrap.device->windows->unmap(window->base, window->bytes_mapped);
    free(window);
}

static int32_t make(const struct transport *transport, uint64_t bytes, struct window *window,
                    moxie_error *error)
{
    const struct device *device = transport->bootstrap.device;
    int64_t mapped = 0;
    void *base = NULL;
    int fd = -1;
    int32_t answer, st;

    if (window == NULL) return fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory");
    if (bytes > INT64_MAX || !size_align((int64_t)bytes, device->windows->granule_bytes, &mapped))
        return fail_with(error, MOXIE_E_INVALID, "a window of %" PRIu64 " bytes; 2^62 at most",
                         bytes);
    answer = device->windows->make((uint64_t)mapped, &base, &fd);
    if (fd >= 0) (void)close(fd); // nobody maps it
    st = device->status(answer);
    if (st != MOXIE_OK)
        return fail_with(error, st, "a window of %" PRId64 " bytes cannot be made (%s)%s", mapped,
                         device->error_text(answer),
                         st == MOXIE_E_CAPTURING || st == MOXIE_E_MEMORY
                             ? "; create dispatchers while no graph is captured, and leave them "
                               "room"
                             : device_earlier(device, st));
    window->base = base;
    window->peer[transport->bootstrap.rank] = base;
    window->bytes = bytes;
    window->bytes_mapped = (uint64_t)mapped;
    return MOXIE_OK;
}

static int32_t window_open(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error)
{
    struct window *window = calloc(1, sizeof *window);
    struct meeting meeting;
    int32_t st = MOXIE_OK;

    *out = NULL;
    transport->windows++;
    meeting_init(&meeting, &transport->bootstrap, &transport->identity, transport->windows);
    meeting.mine.bytes = bytes;
    TRY(meeting_meet(&meeting, STAGE_MADE, make(transport, bytes, window, &meeting.local), error));
    TRY(meeting_take_offers(&meeting, error));
    *out = window;
    window = NULL;
out:
    window_close(transport, window);
    return st;
}

// ---- Exchanges ---------------------------------------------------------------------------------

static int post(const struct transport *transport, const struct nccl_piece *piece, void *stream)
{
    const struct library *nccl = &transport->nccl;
    int answer = nccl->send(piece->from, (size_t)piece->bytes, NCCL_UINT8, piece->peer,
                            transport->comm, stream);

    if (answer != NCCL_SUCCESS && answer != NCCL_IN_PROGRESS) return answer;
    return nccl->receive(piece->to, (size_t)piece->bytes, NCCL_UINT8, piece->peer, transport->comm,
                         stream);
}

int32_t nccl_exchange(struct transport *transport, const struct nccl_piece *pieces,
                      int32_t pieces_count, void *stream, moxie_error *error)
{
    int posted = NCCL_SUCCESS, answer;

    if (transport->comm == NULL)
        return fail_with(error, MOXIE_E_PEER,
                         "NCCL's communicator was aborted; create the dispatchers anew");
    answer = transport->nccl.group_start();
    if (answer != NCCL_SUCCESS)
        return fail_nccl(transport, MOXIE_E_DEVICE, "no exchange can begin", answer, error);
    for (int32_t i = 0; i < pieces_count; i++) {
        if (pieces[i].bytes == 0) continue;
        posted = post(transport, &pieces[i], stream);
        if (posted != NCCL_SUCCESS && posted != NCCL_IN_PROGRESS) break;
    }
    // Ended in any case: the thread would stay in the group.
    answer = settle(transport, transport->nccl.group_end());
    if (posted != NCCL_SUCCESS && posted != NCCL_IN_PROGRESS) answer = posted;
    if (answer == NCCL_SUCCESS) return MOXIE_OK;
    if (answer == NCCL_IN_PROGRESS)
        return fail_with(error, MOXIE_E_TIMEOUT,
                         "NCCL did not launch an exchange within timeout_ms = %d; a rank is gone, "
                         "or the ranks make different calls; create the dispatchers anew",
                         transport->bootstrap.timeout_ms);
    return fail_nccl(transport, MOXIE_E_PEER, "an exchange failed", answer, error);
}

const struct transport_ops transport_nccl = {
    .create = create,
    .window_open = window_open,
    .window_close = window_close,
    .agree = agree,
    .destroy = destroy,
};
