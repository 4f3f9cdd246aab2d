// Windows in device memory that the GPUs of a host reach over NVLink: ranks are processes or
// threads of one process, each with its own current device. A rank makes its window, passes it as a
// descriptor to all others, and maps theirs. Memory lives as long as anyone maps it.
//
// Flags are kernels' (kernels/flags.h), in stream order, so this transport has no signals and
// waits.

#include "plugin/device.h"
#include "plugin/transport_mail.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct transport {
    struct bootstrap bootstrap;
    struct meeting_identity identity;
    uint64_t windows; // asked for since create
};

// One window on its way.
struct opening {
    struct meeting meeting;
    struct window *window;
    int box;
    int own_fd;
    int fds[MOXIE_RANKS_MAX]; // of the peers' windows
};

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
    *out = transport;
    transport = NULL;
out:
    destroy(transport);
    return st;
}

// ---- Windows -----------------------------------------------------------------------------------

static const struct device *device_of(const struct transport *transport)
{
    return transport->bootstrap.device;
}

static void window_close(struct transport *transport, struct window *window)
{
    const struct device_windows *windows = device_of(transport)->windows;

    if (window == NULL) return;
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++)
        if (window->peer[r] != NULL) windows->unmap(window->peer[r], window->bytes_mapped);
    free(window);
}

// The size, the header, the name and the box: all that can be refused before any memory is made.
static int32_t prepare(const struct transport *transport, uint64_t bytes, struct opening *opening)
{
    moxie_error *error = &opening->meeting.local;
    int64_t control_bytes = TRANSPORT_CONTROL_BYTES(transport->bootstrap.ranks);
    struct window *window = NULL;
    int32_t st = MOXIE_OK;
    int64_t bytes_mapped = 0;

    opening->meeting.mine.bytes = bytes;
    if (bytes < (uint64_t)control_bytes || bytes > INT64_MAX ||
        !size_align((int64_t)bytes, device_of(transport)->windows->granule_bytes, &bytes_mapped))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "a window of %" PRIu64 " bytes; %" PRId64 " at least, 2^62 at most", bytes,
                      control_bytes));
    TRY(meeting_token(opening->meeting.mine.token, error));
    TRY(mail_open(opening->meeting.mine.token, &opening->box, error));
    window = calloc(1, sizeof *window);
    if (window == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory"));
    window->bytes = bytes;
    window->bytes_mapped = (uint64_t)bytes_mapped;
    opening->window = window;
out:
    return st;
}

static int32_t make_own(const struct transport *transport, struct opening *opening)
{
    const struct device *device = device_of(transport);
    struct window *window = opening->window;
    int32_t own = transport->bootstrap.rank;
    moxie_error *error = &opening->meeting.local;
    void *base = NULL;
    int32_t answer = device->windows->make(window->bytes_mapped, &base, &opening->own_fd);
    int32_t st = device->status(answer);

    if (st == MOXIE_E_CAPTURING)
        return fail_with(error, MOXIE_E_CAPTURING,
                         "a window cannot be made while a graph is captured; create dispatchers "
                         "before");
    if (st != MOXIE_OK)
        return fail_with(
            error, st,
            "the device could not give a window of %" PRIu64 " bytes that peers can map (%s)%s",
            window->bytes_mapped, device->error_text(answer), device_earlier(device, st));
    window->base = base;
    window->peer[own] = base;
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        if (r != own) st = mail_post(opening->meeting.tokens[r], own, r, opening->own_fd, error);
        if (st != MOXIE_OK) return st;
    }
    return MOXIE_OK;
}

static int32_t map_peers(const struct transport *transport, struct opening *opening)
{
    const struct device *device = device_of(transport);
    struct window *window = opening->window;
    int32_t own = transport->bootstrap.rank;
    moxie_error *error = &opening->meeting.local;
    int32_t st = MOXIE_OK;

    TRY(mail_take(opening->box, own, transport->bootstrap.ranks, opening->fds, error));
    for (int32_t r = 0; r < transport->bootstrap.ranks; r++) {
        void *memory = NULL;
        int32_t answer;

        if (r == own) continue;
        answer = device->windows->map(opening->fds[r], window->bytes_mapped, &memory);
        if (answer != 0)
            TRY(fail_rank(error, MOXIE_E_UNAVAILABLE, r,
                          "this rank's device cannot reach the memory of rank %d's (%s); NVLink or "
                          "peer access between all devices is needed",
                          r, device->error_text(answer)));
        window->peer[r] = memory;
    }
out:
    return st;
}

static void opening_end(struct opening *opening)
{
    for (int32_t r = 0; r < MOXIE_RANKS_MAX; r++)
        if (opening->fds[r] >= 0) (void)close(opening->fds[r]);
    if (opening->own_fd >= 0) (void)close(opening->own_fd);
    if (opening->box >= 0) (void)close(opening->box);
}

static int32_t window_open(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error)
{
    struct opening opening = {.box = -1, .own_fd = -1};
    struct meeting *meeting = &opening.meeting;
    int32_t st = MOXIE_OK;

    *out = NULL;
    for (int32_t r = 0; r < MOXIE_RANKS_MAX; r++)
        opening.fds[r] = -1;
    transport->windows++;
    meeting_init(meeting, &transport->bootstrap, &transport->identity, transport->windows);
    TRY(meeting_meet(meeting, STAGE_OFFER, prepare(transport, bytes, &opening), error));
    TRY(meeting_take_offers(meeting, error));
    TRY(meeting_meet(meeting, STAGE_MADE, make_own(transport, &opening), error));
    TRY(meeting_meet(meeting, STAGE_MAPPED, map_peers(transport, &opening), error));
    *out = opening.window;
    opening.window = NULL;
out:
    opening_end(&opening);
    window_close(transport, opening.window);
    return st;
}

static int32_t agree(struct transport *transport, int32_t step, const moxie_error *seen,
                     moxie_error *error)
{
    struct meeting meeting;

    meeting_init(&meeting, &transport->bootstrap, &transport->identity, transport->windows);
    if (step != MOXIE_OK) (void)fail_rank(&meeting.local, step, seen->rank, "%s", seen->text);
    return meeting_meet(&meeting, STAGE_MAPPED, step, error);
}

const struct transport_ops transport_nvlink = {
    .create = create,
    .window_open = window_open,
    .window_close = window_close,
    .agree = agree,
    .destroy = destroy,
};
