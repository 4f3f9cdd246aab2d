// How a rank waits for its peers' flags, and what it says when they do not come. Included by flags.cu and ll.cu.

#ifndef MOXIE_KERNELS_CUDA_FLAGS_WAIT_CUH
#define MOXIE_KERNELS_CUDA_FLAGS_WAIT_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/flags.h"

#include <cuda_runtime.h>

namespace {

constexpr uint32_t kPauseNs = 40;
constexpr int32_t kLooks = 16; // at a flag, between two at what else may end the wait

struct windows {
    void *of[KERNEL_RANKS_MAX];
};

struct await_kernel_args {
    await_args a;
    windows peers, peer_beats;
    uint64_t reached; // ll.h: bit r: rank r may be active, since there is a place for what goes to it
};

windows copy_windows(void *const *from, int32_t ranks)
{
    windows to = {};

    for (int32_t rank = 0; rank < ranks; rank++)
        to.of[rank] = from[rank];
    return to;
}

__device__ __forceinline__ uint64_t *line_of(void *window, int32_t word, int32_t source, int32_t ranks)
{
    return reinterpret_cast<uint64_t *>(static_cast<unsigned char *>(window) + (1 + word * ranks + source) * FLAG_LINE_BYTES);
}

__device__ __forceinline__ bool is_peer(uint64_t active, int32_t rank, int32_t own)
{
    return rank != own && (active >> rank & 1) != 0;
}

__device__ __forceinline__ bool has_failed(const flag_state *state)
{
    return load_acquire_device(&state->failed) != 0;
}

// Of the own rank, when its kernel began.
struct standing {
    uint64_t generation, active, epoch, rows_received;
    uint32_t failed;
};

// All of it at once, not one after the other.
__device__ __forceinline__ standing standing_of(const volatile flag_state *state, int32_t slot)
{
    return {state->generation, state->active, state->epochs[slot], state->rows_received[slot], state->failed};
}

// What a flag says of that epoch.
__device__ __forceinline__ uint64_t flag_of(const standing &at, bool is_ll)
{
    return at.generation << FLAG_EPOCH_BITS | at.epoch | (is_ll ? FLAG_LL : 0);
}

// One thread, when it tells peers: rows of this epoch, or results, are sent.
template <class Args> __device__ __forceinline__ void keep_epoch(const Args &a, uint64_t epoch)
{
    (a.word == WORD_DISPATCH ? a.state->epochs : a.state->returned)[a.slot] = epoch;
}

enum outcome : uint32_t { ARRIVED, HEARD, MUTE, LEFT_OUT, MOVED_ON, OTHER_MASK, STOPPED, TOO_MANY, OTHER_ROUND, OTHER_WAY };

// What a peer said, as one thread heard it.
struct heard {
    outcome what;
    uint64_t generation, active;
};

// How the own rank stood when the wait began, and its clock; from half the time on, what the peer's beat was then.
struct watch : standing {
    uint64_t beat_ns, next_ns, middle_ns, deadline_ns, beat;
};

__device__ watch watch_start(const await_args &a, const standing &at)
{
    uint64_t now_ns = global_timer_ns(), timeout_ns = a.timeout_ns;

    return {at, timeout_ns / FLAG_BEATS, now_ns + timeout_ns / FLAG_BEATS, now_ns + timeout_ns / 2, now_ns + timeout_ns, 0};
}

// A peer whose flag has not come has gone on without this rank, to a later generation, or with other ranks.
__device__ heard look_for_leavers(const await_args &a, const watch &w, int32_t rank)
{
    heard h = {ARRIVED, 0, 0};

    h.generation = load_acquire_system(line_of(a.window, WORD_GENERATION, rank, a.ranks));
    // Told before the generation, so at least as new.
    h.active = load_acquire_system(line_of(a.window, WORD_ACTIVE, rank, a.ranks));
    // No mask grows, so one without this rank is final in whatever generation; 0 is none yet.
    if (h.active != 0 && (h.active >> a.rank & 1) == 0)
        h.what = LEFT_OUT;
    else if (h.generation > w.generation)
        h.what = MOVED_ON;
    // One with more ranks was so in this generation. One with fewer may be of the next, which is then told in a moment.
    else if (h.generation == w.generation && h.active != 0 && h.active != w.active)
        h.what = (h.active & ~w.active) != 0 ? OTHER_MASK : MOVED_ON;
    return h;
}

// That this rank waits: to those whose flag has come, too, who may wait for this one in another layer.
__device__ void tell_all(const await_kernel_args &args, const watch &w, uint64_t now_ns)
{
#pragma unroll 1
    for (int32_t rank = 0; rank < args.a.ranks; rank++)
        if (is_peer(w.active, rank, args.a.rank)) store_release_system(line_of(args.peer_beats.of[rank], WORD_BEAT, args.a.rank, args.a.ranks), now_ns);
}

__device__ __forceinline__ const uint64_t *beat_line_of(const await_args &a, int32_t rank)
{
    return line_of(a.beats, WORD_BEAT, rank, a.ranks);
}

// Between looks: tells peers that this rank waits, where this thread does, and at half the time notes the beat of `rank`, -1 for none.
__device__ __forceinline__ void keep_beat(const await_kernel_args &args, watch &w, uint64_t now_ns, int32_t rank, bool tells)
{
    if (now_ns >= w.next_ns) {
        if (tells) tell_all(args, w, now_ns);
        w.next_ns = now_ns + w.beat_ns;
    }
    if (now_ns < w.middle_ns) return;
    if (rank >= 0) w.beat = load_acquire_system(beat_line_of(args.a, rank));
    w.middle_ns = UINT64_MAX;
    // Where this waited for its turn over the middle, it cannot tell who was heard meanwhile.
    w.deadline_ns = max(w.deadline_ns, now_ns + 2 * w.beat_ns);
}

// Whether `rank`, of which something is late, was heard to wait itself.
__device__ __forceinline__ bool was_heard(const await_args &a, const watch &w, int32_t rank)
{
    return load_acquire_system(beat_line_of(a, rank)) != w.beat;
}

// What the flag says, once that is of the epoch or after a few looks, at it alone: another word takes as long to look at.
__device__ uint64_t look_at(const uint64_t *flag, uint64_t want)
{
    uint64_t seen = load_acquire_system(flag);

#pragma unroll 1
    for (int32_t look = 1; look < kLooks && ((seen ^ want) & ~FLAG_LL) != 0; look++) {
        spin_pause(kPauseNs);
        seen = load_acquire_system(flag);
    }
    return seen;
}

// Waits for the flag of one peer, and listens to what it tells. `ended` stops all threads; a deadline does not, since the other
// threads have to say whom they heard.
__device__ heard listen(const await_kernel_args &args, watch w, int32_t rank, volatile uint32_t *ended)
{
    const await_args &a = args.a;
    const uint64_t want = flag_of(w, a.is_ll);
    uint64_t now_ns = 0; // from before the looks, or a flag that came between them and the deadline would be missed

    for (;; now_ns = global_timer_ns()) {
        const uint64_t seen = look_at(line_of(a.window, a.word, rank, a.ranks), want);
        heard h;

        if (seen == want) return {ARRIVED, 0, 0};
        h = look_for_leavers(a, w, rank);
        if (h.what == ARRIVED && (seen ^ want) == FLAG_LL) h.what = OTHER_WAY;
        if (h.what != ARRIVED) {
            *ended = 1; // here: behind the loop a thread waits for those of its warp that are still in it
            return h;
        }
        if (*ended != 0 || has_failed(a.state)) return {STOPPED, 0, 0};
        keep_beat(args, w, now_ns, rank, true);
        if (now_ns >= w.deadline_ns) return {was_heard(a, w, rank) ? HEARD : MUTE, 0, 0};
    }
}

// One thread: what all have heard, in the order of ranks as the host's wait goes. `told`: the count of each.
__device__ flag_verdict judge(const await_args &a, const watch &w, const heard *all, const round_count *told)
{
    flag_verdict v = {VERDICT_NONE, -1, static_cast<uint32_t>(a.word), 0, w.epoch, w.generation, 0, 0, 0, a.rows_most, a.round, 0, 0};

#pragma unroll 1
    for (int32_t rank = 0; rank < a.ranks; rank++) {
        if (all[rank].what != LEFT_OUT && all[rank].what != MOVED_ON && all[rank].what != OTHER_MASK) continue;
        v.kind = all[rank].what == LEFT_OUT ? VERDICT_LEFT_OUT : all[rank].what == MOVED_ON ? VERDICT_MOVED_ON : VERDICT_MASKS;
        v.rank = rank;
        v.told_generation = all[rank].generation;
        v.told_active = all[rank].active;
        return v;
    }
#pragma unroll 1
    for (int32_t rank = 0; rank < a.ranks; rank++) {
        if (all[rank].what != HEARD && all[rank].what != MUTE) continue;
        v.silent |= uint64_t{1} << rank;
        if (v.rank < 0 && all[rank].what == MUTE) v.rank = rank;
    }
    if (v.silent != 0) v.kind = v.rank < 0 ? VERDICT_ALL_WAIT : VERDICT_SILENT;
#pragma unroll 1
    for (int32_t rank = 0; v.kind == VERDICT_NONE && rank < a.ranks; rank++) {
        if (all[rank].what == ARRIVED || all[rank].what == STOPPED) continue;
        v.kind = all[rank].what == TOO_MANY ? VERDICT_ROWS : all[rank].what == OTHER_ROUND ? VERDICT_ROUND : VERDICT_WAY;
        v.rank = rank;
        v.told_rows = told[rank].rows;
        v.told_round = told[rank].round;
    }
    return v;
}

// The first failure of the dispatcher is the one that is told; of an older generation, none is.
__device__ void settle(const await_args &a, const flag_verdict &v)
{
    if (v.kind == VERDICT_NONE || static_cast<const volatile flag_state *>(a.state)->generation != v.generation) return;
    if (atomicCAS(&a.state->failed, 0u, 1u) != 0) return;
    a.report->verdict.rank = v.rank;
    a.report->verdict.word = v.word;
    a.report->verdict.epoch = v.epoch;
    a.report->verdict.generation = v.generation;
    a.report->verdict.told_generation = v.told_generation;
    a.report->verdict.told_active = v.told_active;
    a.report->verdict.silent = v.silent;
    a.report->verdict.told_rows = v.told_rows;
    a.report->verdict.rows_most = v.rows_most;
    a.report->verdict.round = v.round;
    a.report->verdict.told_round = v.told_round;
    fence_system();
    *static_cast<volatile uint32_t *>(&a.report->verdict.kind) = v.kind;
}

// Of a rank that has arrived. What is not of this round may be of the next generation, which is told before it.
__device__ heard check_count(const await_args &a, const watch &w, int32_t rank, const round_count &told)
{
    heard h = {ARRIVED, 0, 0};

    if (told.round == a.round && told.rows <= a.rows_most) return h;
    fence_system();
    if (rank != a.rank) h = look_for_leavers(a, w, rank);
    if (h.what == ARRIVED) h.what = told.round != a.round ? OTHER_ROUND : TOO_MANY;
    return h;
}

__device__ void take_counts(const await_args &a, const round_count *told, bool failed, uint64_t received)
{
    int32_t rank = threadIdx.x;

    if (rank < a.ranks) a.counts[rank] = failed ? 0 : told[rank].rows;
    if (rank != 0 || failed) return;
#pragma unroll 1
    for (int32_t r = 0; r < a.ranks; r++)
        received += r != a.rank ? told[r].rows : 0;
    a.state->rows_received[a.slot] = received;
    a.report->rows_received[a.slot] = received;
}

} // namespace

#endif
