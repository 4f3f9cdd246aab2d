// signal, await, regroup: what the ranks of a dispatcher tell each other in stream order, in
// windows of device memory that every peer maps. Where windows are host memory, the host does the
// same over a transport's words (plugin/exchange_flags.c).
//
// A window begins with lines of FLAG_LINE_BYTES: one of the transport's own, then one per (word,
// source). A rank writes only its own source's lines in a peer's window, and reads only its own
// window. A flag's value is generation << FLAG_EPOCH_BITS | epoch; a wait takes the one that it
// names alone, since a later one means other rows.

#ifndef MOXIE_KERNELS_FLAGS_H
#define MOXIE_KERNELS_FLAGS_H

#include "kernels/types.h"

#define FLAG_LINE_BYTES  64
#define FLAG_EPOCH_BITS  40                  // outlast any server
#define FLAG_LL          ((uint64_t)1 << 39) // beside the epoch: its rows come as words of ll.h
#define FLAG_BEATS       8                   // within timeout_ms, the first after one part of it
#define KERNEL_SLOTS_MAX 4

// What a source tells a destination, one 64-bit value each.
enum flag_word {
    WORD_DISPATCH,   // its rows of that generation and epoch are in my slab
    WORD_COMBINE,    // its result rows of that generation and epoch are in my slab
    WORD_ACTIVE,     // the ranks it goes on with, a bit each; told before the generation
    WORD_GENERATION, // the generation it has moved on to (told to ranks it leaves out, too)
    WORD_BEAT,       // changes while it waits: it is alive, others are late
    WORD_COUNT
};

// Device memory (over NCCL pinned), one per dispatcher: read again at every replay of a graph.
struct flag_state {
    uint64_t generation;
    uint64_t active;                     // bit r: rank r takes part
    uint64_t epochs[KERNEL_SLOTS_MAX];   // layers of this generation that the slot has sent,
    uint64_t returned[KERNEL_SLOTS_MAX]; // and of which it has sent the results
    uint64_t rows_sent[KERNEL_SLOTS_MAX], rows_received[KERNEL_SLOTS_MAX]; // before they are told
    uint32_t failed; // 1: a wait has failed, and everything after it does nothing
    uint32_t reserved;
};

enum verdict_kind {
    VERDICT_NONE,
    VERDICT_LEFT_OUT, // `rank` goes on without this rank
    VERDICT_MOVED_ON, // `rank` has a later generation, or fewer ranks, this one among them
    VERDICT_SILENT,   // the ranks of `silent` owe a flag; `rank` was not heard to wait either
    VERDICT_ALL_WAIT, // the ranks of `silent` owe a flag, and all of them wait
    VERDICT_ROWS,     // `rank` says that it has sent more rows than a rank has in this forward
    VERDICT_ROUND,    // `rank` is in another round
    VERDICT_WAY,      // of one of `rank` and this one rows are few (ll.h)
    VERDICT_MASKS,    // `rank` keeps a rank that this one has left out in the same generation
};

// Why a wait failed.
struct flag_verdict {
    uint32_t kind; // written last
    int32_t rank;
    uint32_t word;                         // enum flag_word: awaited
    int32_t told_rows;                     // by `rank`
    uint64_t epoch, generation;            // of the rank that waited
    uint64_t told_generation, told_active; // by `rank`
    uint64_t silent;                       // bit r: rank r
    int32_t rows_most;                     // of any rank
    int32_t round, told_round, reserved;   // of the rank that waited, and by `rank`
};

// Pinned host memory that the device writes, one per dispatcher.
struct flag_report {
    struct flag_verdict verdict; // of the first wait that failed
    uint64_t rows_sent[KERNEL_SLOTS_MAX], rows_received[KERNEL_SLOTS_MAX];
    // Where something without a deadline lies between a signal and its await: how many of each have
    // run, of those launched one by one [0] and of those in graphs [1].
    uint64_t begun[2][KERNEL_SLOTS_MAX], ended[2][KERNEL_SLOTS_MAX];
};

// Stores this generation and epoch in `word` at every active peer, after everything that earlier
// launches of the stream wrote there. WORD_DISPATCH begins the slot's next epoch.
struct signal_args {
    struct flag_state *state;
    void *const *peers; // host array [ranks]: rank r's window of this slot
    uint64_t *begun;    // one more at every run, failed or not; mapped host memory, no other
                        // writer; NULL: not counted
    int32_t slot;
    int32_t word; // enum flag_word: WORD_DISPATCH or WORD_COMBINE
    int32_t ranks, rank;
};

// With `peers`, first does what signal does, which saves a launch. Waits until `word` of every
// active peer is of this generation and epoch; then, with `counts`, takes the rows that each has
// sent: more than rows_most, or those of another round, are a failure. A wait that fails sets
// state->failed, says why in the report, and counts no rows, as does every wait after it.
struct await_args {
    struct flag_state *state;
    void *const *peers;      // as signal_args.peers; NULL: an earlier launch has signalled
    void *window;            // own, of this slot
    void *beats;             // own window of slot 0, where WORD_BEAT lies for all slots
    void *const *peer_beats; // host array [ranks]: rank r's window of slot 0
    const void *peer_counts; // in the own window, struct round_count FLAG_LINE_BYTES apart: source
                             // s is at s, or s - 1 from `rank` on
    int32_t *counts;         // out [ranks], 0..rows_most; the own rank's is `tokens`. NULL: none
    const void *peer_ids;    // in the own window, int32 [rows, top_k] peer_ids_slab_bytes apart, in
                             // the order of peer_counts, 16-byte aligned
    int32_t *ids; // out [ranks, rows_most, top_k], 16-byte aligned: ids of the rows that are
                  // counted, -1 behind them; the own rank's `tokens` rows are there. NULL: not
                  // wanted, as without counts
    int64_t peer_ids_slab_bytes;
    struct flag_report *report;
    uint64_t *ended; // as signal_args.begun
    int64_t timeout_ns;
    int32_t slot;
    int32_t word; // enum flag_word: WORD_DISPATCH or WORD_COMBINE
    int32_t ranks, rank;
    int32_t tokens, rows_most, round, top_k;
    int32_t is_ll; // 1: of flags with FLAG_LL, in ll.h's launches alone
    int32_t reserved;
};

// Starts `generation` with the ranks of `active`: the slot's epochs from 0, no failure, and every
// rank is told, those left out too. Not in a graph.
struct regroup_args {
    struct flag_state *state;
    void *const *peers; // host array [ranks]: rank r's window of this slot
    uint64_t generation, active;
    int32_t slot;
    int32_t ranks, rank;
    int32_t reserved;
};

#endif
