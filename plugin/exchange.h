// The push protocol of one slot: rows and result rows into the peers' windows, and the flags of
// exchange_flags.h. One code for alltoall and allgather, for processes and for threads; only
// `everywhere` differs.
//
// Why one copy of each slab is safe: a rank starts dispatch N+1 only after its combine N has seen
// every peer's flag, so every peer has finished reading its rows of N; a result row of N+1 reaches
// a rank only after that rank sent dispatch N+1, so after it finished summing N.

#ifndef MOXIE_PLUGIN_EXCHANGE_H
#define MOXIE_PLUGIN_EXCHANGE_H

#include "kernels/gemm.h"
#include "kernels/layer.h"
#include "kernels/ll.h"
#include "plugin/instance.h"
#include "plugin/transport.h"

struct exchange_flags;
struct exchange_watch;

// What the slots of a dispatcher share.
struct exchange_group {
    moxie_instance *instance;
    const struct transport_ops *ops;
    const struct exchange_flags *flags;
    struct transport *transport;
    struct flag_state *state;                  // where kernels wait: in a window, or pinned
    struct flag_report *report;                // and what they say, pinned
    struct report_link link;                   // for the instance's stats
    void *stream;                              // of its own: generations are told there
    struct exchange_watch *watch;              // where NCCL waits: of its waits
    int64_t pid;                               // the creator's: a child of it has no windows
    uint64_t generation;                       // set_active_ranks calls so far
    uint64_t active;                           // bit r: rank r takes part
    struct window *beat_window;                // slot 0's: WORD_BEAT lies there for all slots
    uint64_t beats;                            // sent so far: the last value of WORD_BEAT
    int64_t expert_first[MOXIE_RANKS_MAX + 1]; // physical ids
    int32_t everywhere;                        // allgather
};

// What a tensor points at that is handed out: its shape and strides, which live in the slot.
struct exchange_extent {
    int64_t dims[2], strides[2];
};

struct exchange_dims {
    struct exchange_extent rows, scales, ids, weights, results, map;
};

// One forward in flight.
struct exchange {
    struct window *window;
    uint64_t epoch;
    moxie_rows in, out;
    moxie_slab in_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    struct exchange_dims dims[MOXIE_RANKS_MAX];
    int32_t *counts; // [ranks] rows that came, where the runner reads them: on the device, or:
    int32_t host_counts[MOXIE_RANKS_MAX];
    int64_t counts_dim;
    int32_t went_out; // 1: something of the layer runs, or has; 0: a graph may hold what there is
};

// The tokens of one round.
struct exchange_round {
    const moxie_batch *batch;
    const int32_t *tokens_valid;
    int64_t first;   // token of the batch
    int64_t earlier; // tokens of the forward's rounds before this one
    int32_t tokens;
    int32_t pad_rows; // MAX_LEN: rows that every rank reports, 0: none
    int32_t slot;
    int32_t rows_most; // of any rank to any other, the same on every rank; at least 1
    int32_t joined;    // 1: what is sent is waited for in the same call
    int32_t index;     // among the rounds of its layer
};

// How ranks tell each other. The calls of one layer of a slot: begin, send(WORD_DISPATCH),
// wait(WORD_DISPATCH), send(WORD_COMBINE), wait(WORD_COMBINE).
struct exchange_flags {
    // When the windows are open; `open` that fails leaves what `close` gives back.
    int32_t (*open)(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                    moxie_error *error);
    void (*close)(struct exchange_group *group);
    // Before the first row is written. MOXIE_E_PEER when a peer has gone on.
    int32_t (*begin)(struct exchange_group *group, struct exchange *slot, moxie_error *error);
    // Flags every active peer, after everything written into their windows. Of a joined round
    // `wait` may do it.
    int32_t (*send)(struct exchange_group *group, struct exchange *slot,
                    const struct exchange_round *round, enum flag_word word, moxie_error *error);
    // Waits for every active peer's flag; WORD_DISPATCH fills slot->counts.
    int32_t (*wait)(struct exchange_group *group, struct exchange *slot,
                    const struct exchange_round *round, enum flag_word word, moxie_error *error);
    // Starts the next generation with these ranks and tells all ranks.
    int32_t (*regroup)(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                       uint64_t active, moxie_error *error);
    // Why a wait in stream order has failed, any thread; MOXIE_OK when none has.
    int32_t (*failure)(const struct exchange_group *group, moxie_error *error);
};

extern const struct exchange_flags exchange_flags_host;   // over host memory, in the call
extern const struct exchange_flags exchange_flags_device; // by kernels, in stream order
extern const struct exchange_flags exchange_flags_nccl;   // the same with NCCL in between

static inline const struct limits *exchange_limits(const struct exchange_group *group)
{
    return &group->instance->plan.limits;
}

// What this rank writes for `rank`: that rank's window, or the own staging where it goes from.
static inline unsigned char *window_to(const struct window *window, int32_t rank)
{
    return window->staging != NULL ? window->staging : window->peer[rank];
}

// [ranks, rows_most, top_k]: the ids of all rows of a round on a GPU, where they are few, kept
// where no peer writes, so that every block of the products may read them; NULL: they stay in the
// slabs, where route alone reads them, once.
static inline int32_t *exchange_few_ids(const struct exchange_group *group,
                                        const struct exchange_round *round)
{
    const struct limits *limits = exchange_limits(group);
    int64_t rows = (int64_t)limits->ranks * round->rows_most;

    if (group->state == NULL || rows * limits->top_k > GEMMS_IDS_MAX) return NULL;
    return (int32_t *)memory_slot(&group->instance->memory, BUFFER_FEW_IDS, round->slot) +
           KERNEL_RANKS_MAX;
}

// As instance_launched, of a round: notes what went out.
int32_t exchange_launched(const struct exchange_group *group, struct exchange *slot,
                          const struct exchange_round *round, int32_t answer, const char *kernel,
                          moxie_error *error);

// Host arrays that await_args point to.
struct exchange_peers {
    void *windows[MOXIE_RANKS_MAX], *beats[MOXIE_RANKS_MAX];
};

// What a kernel waits for, where kernels do; it signals first.
struct await_args exchange_await_stage(const struct exchange_group *group,
                                       const struct exchange *slot,
                                       const struct exchange_round *round, enum flag_word word,
                                       struct exchange_peers *peers);

// MOXIE_E_INVALID in a child that was forked: its flags would be the parent's.
int32_t exchange_check_process(const struct exchange_group *group, moxie_error *error);

// Which transport and flags: the same on every rank, as the keys are.
void exchange_choose(struct exchange_group *group);
// Collective: maps the windows of every slot.
int32_t exchange_open(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                      moxie_error *error);
void exchange_close(struct exchange_group *group, struct exchange *slots, int32_t slots_count);

// Pushes the rows of a round and flags every active peer.
int32_t exchange_dispatch_send(struct exchange_group *group, struct exchange *slot,
                               const struct exchange_round *round, moxie_error *error);
// Waits for every active peer, then describes what came and where results go in slot->in and
// slot->out.
int32_t exchange_dispatch_recv(struct exchange_group *group, struct exchange *slot,
                               const struct exchange_round *round, moxie_error *error);
// Without peers: the batch itself is what came, and y is where results go.
void exchange_describe_local(const moxie_instance *instance, struct exchange *slot,
                             const struct exchange_round *round);
// Result rows are in the peers' windows; flags them.
int32_t exchange_combine_send(struct exchange_group *group, struct exchange *slot,
                              const struct exchange_round *round, moxie_error *error);
// Waits for every active peer and sums into the batch's y.
int32_t exchange_combine_recv(struct exchange_group *group, struct exchange *slot,
                              const struct exchange_round *round, moxie_error *error);

#endif
