// Symmetric windows, signals, and waits with a deadline between the EP ranks. One table, of which
// shared memory and threads of one process are one implementation (transport_shm.c), device memory
// of one host another (transport_nvlink.c), hosts apart a third (transport_nccl.c), and a single
// rank the last (transport_self.c).
//
// A window is one piece of memory per rank that every peer maps, but over NCCL. Its first bytes are
// control words (kernels/flags.h); the line before them holds, in host memory, the bell that wakes
// its owner. No lock lies in a window: a rank may die between any two stores.

#ifndef MOXIE_PLUGIN_TRANSPORT_H
#define MOXIE_PLUGIN_TRANSPORT_H

#include "kernels/flags.h"
#include "plugin/status.h"

// Windows of host memory are mapped in multiples of the largest page that 64-bit Linux commonly
// has: the plan says how much that is, and is the same on every machine.
#define TRANSPORT_PAGE_BYTES           65536
#define TRANSPORT_LINE_BYTES           FLAG_LINE_BYTES
#define TRANSPORT_CONTROL_BYTES(ranks) (((int64_t)(ranks)*WORD_COUNT + 1) * TRANSPORT_LINE_BYTES)

struct device;

// The host's bootstrap callbacks.
struct bootstrap {
    int32_t (*all_gather)(void *ctx, const void *send, void *recv, uint64_t bytes);
    void *ctx;
    int32_t rank, ranks;
    const struct device *device; // whose memory windows are; transports of host memory need none
    int32_t windows;             // that will be opened; more may be
    int32_t timeout_ms;          // of create and of every wait, for transports that wait themselves
};

struct transport;

// A window as one rank sees it.
struct window {
    unsigned char *base;                  // its own memory
    unsigned char *peer[MOXIE_RANKS_MAX]; // rank r's memory; peer[rank] == base
    // Where peers do not map windows (peer[r] is NULL): memory of the own device, laid out as a
    // window, whose slab of index r < rank ? r : r - 1 holds what is to go to rank r. Set by who
    // opens the window.
    unsigned char *staging;
    uint64_t bytes, bytes_mapped; // as asked for, and rounded up to what is mapped
    void *impl;
};

// A collective call fails on every rank, with the same code, rank to blame and text, when one
// rank's own step fails; it needs all_gather alone. When all_gather itself fails, the ranks it
// fails on get MOXIE_E_PEER.
struct transport_ops {
    // Collective. Learns how the peers can be reached; fails with MOXIE_E_UNAVAILABLE when memory
    // cannot be shared.
    int32_t (*create)(const struct bootstrap *bootstrap, struct transport **out,
                      moxie_error *error);
    // Collective. A zeroed window of `bytes`, at least TRANSPORT_CONTROL_BYTES, on every rank,
    // mapped by all. On failure nothing is held, on any rank.
    int32_t (*window_open)(struct transport *transport, uint64_t bytes, struct window **out,
                           moxie_error *error);
    // Not collective: peers may close earlier, later or never. NULL is a no-op.
    void (*window_close)(struct transport *transport, struct window *window);
    // This and the next three: NULL where windows are device memory, and kernels do it.
    //
    // Publishes everything this rank wrote into rank `peer`'s window, then `value` in its `word`
    // line, and wakes it. Streaming (non-temporal) stores need their own fence before.
    void (*signal)(struct transport *transport, struct window *window, int32_t peer,
                   enum flag_word word, uint64_t value);
    // The last value that `source` signalled to me, 0 before the first; everything it wrote before
    // is visible.
    uint64_t (*read)(struct transport *transport, struct window *window, int32_t source,
                     enum flag_word word);
    // A ticket for wait: taken before the words are read, so that no signal is missed.
    uint32_t (*ticket)(struct transport *transport, struct window *window);
    // Sleeps until a signal has arrived in my window since the ticket, or until deadline_ns
    // (CLOCK_MONOTONIC). May return early, so callers loop and look at the clock themselves. Spins
    // briefly, then yields the core.
    void (*wait)(struct transport *transport, struct window *window, uint32_t ticket,
                 int64_t deadline_ns);
    // Collective: how a step of one's own went, `seen` saying why not, and then how those of all
    // ranks did. NULL where, once windows are open, no rank's step can fail.
    int32_t (*agree)(struct transport *transport, int32_t step, const moxie_error *seen,
                     moxie_error *error);
    // After the last window_close. Not collective. NULL is a no-op.
    void (*destroy)(struct transport *transport);
};

extern const struct transport_ops transport_self;   // one rank
extern const struct transport_ops transport_shm;    // processes or threads of one host
extern const struct transport_ops transport_nvlink; // the same, whose windows are device memory
extern const struct transport_ops transport_nccl;   // hosts apart; windows are not mapped by peers

// CLOCK_MONOTONIC in nanoseconds.
int64_t clock_ns(void);
// Sleeps for a moment, between two looks at what ends by itself.
void clock_pause(void);

// For the implementations. The first refuses a bootstrap that nothing collective could be done
// with; the second gives the bytes of a window of host memory as they are mapped, or says why there
// can be none.
int32_t transport_check_bootstrap(const struct bootstrap *bootstrap, moxie_error *error);
int32_t transport_window_bytes(uint64_t bytes, int32_t ranks, uint64_t *bytes_mapped,
                               moxie_error *error);
// What to do about a call that failed with `os_error`: `otherwise`, where there was a file
// descriptor left.
const char *transport_remedy(int os_error, const char *otherwise);

#endif
