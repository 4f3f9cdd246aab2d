// The transport of one rank: plain memory, and words that only it writes.

#include "plugin/transport.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

// Windows hold all the state.
struct transport {
    int32_t ranks;
};

struct self_window {
    struct window window;
    _Atomic uint64_t words[WORD_COUNT];
    _Atomic uint32_t bell;
};

static void window_close(struct transport *transport, struct window *window)
{
    (void)transport;
    if (window == NULL) return;
    if (window->base != NULL) (void)munmap(window->base, window->bytes_mapped);
    free(window->impl);
}

static int32_t window_open(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error)
{
    struct self_window *self = NULL;
    int32_t st = MOXIE_OK;
    uint64_t bytes_mapped;
    void *base;

    *out = NULL;
    TRY(transport_window_bytes(bytes, 1, &bytes_mapped, error));
    self = calloc(1, sizeof *self);
    if (self == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a window's header: out of memory"));
    self->window.impl = self;
    base = mmap(NULL, bytes_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED)
        TRY(fail_with(error, MOXIE_E_MEMORY, "a window of %" PRIu64 " bytes: out of memory",
                      bytes));
    self->window.base = self->window.peer[0] = base;
    self->window.bytes = bytes;
    self->window.bytes_mapped = bytes_mapped;
    *out = &self->window;
    self = NULL;
out:
    window_close(transport, self == NULL ? NULL : &self->window);
    return st;
}

static void signal_self(struct transport *transport, struct window *window, int32_t peer,
                        enum flag_word word, uint64_t value)
{
    struct self_window *self = window->impl;

    (void)transport;
    (void)peer;
    atomic_store_explicit(&self->words[word], value, memory_order_release);
    (void)atomic_fetch_add_explicit(&self->bell, 1, memory_order_release);
}

static uint64_t read_word(struct transport *transport, struct window *window, int32_t source,
                          enum flag_word word)
{
    struct self_window *self = window->impl;

    (void)transport;
    (void)source;
    return atomic_load_explicit(&self->words[word], memory_order_acquire);
}

static uint32_t ticket(struct transport *transport, struct window *window)
{
    struct self_window *self = window->impl;

    (void)transport;
    return atomic_load_explicit(&self->bell, memory_order_acquire);
}

// The only rank is here, waiting: nothing more can arrive.
static void wait_until(struct transport *transport, struct window *window, uint32_t seen,
                       int64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = deadline_ns / 1000000000,
                                .tv_nsec = deadline_ns % 1000000000};

    if (ticket(transport, window) == seen && deadline_ns > 0)
        (void)clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &deadline, NULL);
}

static void destroy(struct transport *transport)
{
    free(transport);
}

static int32_t create(const struct bootstrap *bootstrap, struct transport **out, moxie_error *error)
{
    struct transport *transport = NULL;
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(transport_check_bootstrap(bootstrap, error));
    if (bootstrap->ranks != 1)
        TRY(fail_with(error, MOXIE_E_UNSUPPORTED, "%d ranks; this transport serves one",
                      bootstrap->ranks));
    transport = calloc(1, sizeof *transport);
    if (transport == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "a transport: out of memory"));
    transport->ranks = bootstrap->ranks;
    *out = transport;
out:
    return st;
}

const struct transport_ops transport_self = {
    .create = create,
    .window_open = window_open,
    .window_close = window_close,
    .signal = signal_self,
    .read = read_word,
    .ticket = ticket,
    .wait = wait_until,
    .destroy = destroy,
};
