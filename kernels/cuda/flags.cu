// signal, await and regroup on CUDA: a thread a peer.
//
// grid   1 block of 64 threads, so that what waits never keeps another instance's kernels from the device. A wait is not
//        followed early: dependents that sat on the device while it waits could.
// bytes  a line a peer: bound by the wire's latency

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

constexpr int kThreads = KERNEL_RANKS_MAX;
constexpr uint32_t kPauseNs = 40;
constexpr int32_t kLooks = 16; // at a flag, between two at what else may end the wait

struct windows {
    void *of[KERNEL_RANKS_MAX];
};

struct signal_kernel_args {
    signal_args a;
    windows peers;
};

struct await_kernel_args {
    await_args a;
    windows peers, peer_beats;
};

struct regroup_kernel_args {
    regroup_args a;
    windows peers;
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

// ---- signal ------------------------------------------------------------------------------------

// By all threads of a block that has read the state; in which epoch the slot is now.
template <class Args> __device__ __forceinline__ uint64_t tell_peers(const Args &a, const windows &peers, const standing &at)
{
    const int32_t rank = threadIdx.x;
    const uint64_t epoch = at.epoch + (a.word == WORD_DISPATCH ? 1 : 0);

    __syncthreads();
    if (at.failed != 0) return at.epoch;
    if (rank == 0) a.state->epochs[a.slot] = epoch;
    if (rank < a.ranks && is_peer(at.active, rank, a.rank))
        store_release_system(line_of(peers.of[rank], a.word, a.rank, a.ranks), at.generation << FLAG_EPOCH_BITS | epoch);
    return epoch;
}

__global__ void __launch_bounds__(kThreads) signal_kernel(const __grid_constant__ signal_kernel_args args)
{
    const signal_args &a = args.a;

    griddepcontrol_launch_dependents(); // one block of an await, at most
    griddepcontrol_wait();
    if (threadIdx.x == 0 && a.begun != nullptr) *a.begun += 1;
    tell_peers(a, args.peers, standing_of(a.state, a.slot));
}

// ---- await -------------------------------------------------------------------------------------

enum outcome : uint32_t { ARRIVED, HEARD, MUTE, LEFT_OUT, MOVED_ON, STOPPED, TOO_MANY, OTHER_ROUND };

// What a peer said, as one thread heard it.
struct heard {
    outcome what;
    uint64_t generation, active;
};

// How the own rank stood when the wait began, and its clock.
struct watch : standing {
    uint64_t beat_ns, next_ns, middle_ns, deadline_ns;
};

__device__ watch watch_start(const await_args &a, const standing &at)
{
    uint64_t now_ns = global_timer_ns(), timeout_ns = a.timeout_ns;

    return {at, timeout_ns / FLAG_BEATS, now_ns + timeout_ns / FLAG_BEATS, now_ns + timeout_ns / 2, now_ns + timeout_ns};
}

// A peer whose flag has not come has gone on without this rank, or to a later generation.
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
    return h;
}

// That this rank waits: to those whose flag has come, too, who may wait for this one in another layer.
__device__ void tell_all(const await_kernel_args &args, const watch &w, uint64_t now_ns)
{
    for (int32_t rank = 0; rank < args.a.ranks; rank++)
        if (is_peer(w.active, rank, args.a.rank)) store_release_system(line_of(args.peer_beats.of[rank], WORD_BEAT, args.a.rank, args.a.ranks), now_ns);
}

// Whether the flag comes within a few looks, at it alone: another word takes as long to look at.
__device__ bool comes(const uint64_t *flag, uint64_t want)
{
    for (int32_t look = 0; look < kLooks; look++) {
        if (look > 0) spin_pause(kPauseNs);
        if (load_acquire_system(flag) == want) return true;
    }
    return false;
}

// Waits for the flag of one peer, and listens to what it tells. `ended` stops all threads; a deadline does not, since the other
// threads have to say whom they heard.
__device__ heard listen(const await_kernel_args &args, watch w, int32_t rank, volatile uint32_t *ended)
{
    const await_args &a = args.a;
    uint64_t want = w.generation << FLAG_EPOCH_BITS | w.epoch, beat = 0;
    const uint64_t *beat_line = line_of(a.beats, WORD_BEAT, rank, a.ranks);
    uint64_t now_ns = 0; // from before the looks, or a flag that came between them and the deadline would be missed
    bool noted = false;

    for (;; now_ns = global_timer_ns()) {
        heard h;

        if (comes(line_of(a.window, a.word, rank, a.ranks), want)) return {ARRIVED, 0, 0};
        h = look_for_leavers(a, w, rank);
        if (h.what != ARRIVED) {
            *ended = 1; // here: behind the loop a thread waits for those of its warp that are still in it
            return h;
        }
        if (*ended != 0 || has_failed(a.state)) return {STOPPED, 0, 0};
        if (now_ns >= w.next_ns) {
            tell_all(args, w, now_ns);
            w.next_ns = now_ns + w.beat_ns;
        }
        if (!noted && now_ns >= w.middle_ns) {
            beat = load_acquire_system(beat_line);
            noted = true;
            // Where this waited for its turn over the middle, it cannot tell who was heard meanwhile.
            w.deadline_ns = max(w.deadline_ns, now_ns + 2 * w.beat_ns);
        }
        if (now_ns >= w.deadline_ns) return {load_acquire_system(beat_line) == beat ? MUTE : HEARD, 0, 0};
    }
}

// One thread: what all have heard, in the order of ranks as the host's wait goes. `told`: the count of each.
__device__ flag_verdict judge(const await_args &a, const watch &w, const heard *all, const round_count *told)
{
    flag_verdict v = {VERDICT_NONE, -1, static_cast<uint32_t>(a.word), 0, w.epoch, w.generation, 0, 0, 0, a.rows_most, a.round, 0, 0};

    for (int32_t rank = 0; rank < a.ranks; rank++) {
        if (all[rank].what != LEFT_OUT && all[rank].what != MOVED_ON) continue;
        v.kind = all[rank].what == LEFT_OUT ? VERDICT_LEFT_OUT : VERDICT_MOVED_ON;
        v.rank = rank;
        v.told_generation = all[rank].generation;
        v.told_active = all[rank].active;
        return v;
    }
    for (int32_t rank = 0; rank < a.ranks; rank++) {
        if (all[rank].what != HEARD && all[rank].what != MUTE) continue;
        v.silent |= uint64_t{1} << rank;
        if (v.rank < 0 && all[rank].what == MUTE) v.rank = rank;
    }
    if (v.silent != 0) v.kind = v.rank < 0 ? VERDICT_ALL_WAIT : VERDICT_SILENT;
    for (int32_t rank = 0; v.kind == VERDICT_NONE && rank < a.ranks; rank++) {
        if (all[rank].what != TOO_MANY && all[rank].what != OTHER_ROUND) continue;
        v.kind = all[rank].what == TOO_MANY ? VERDICT_ROWS : VERDICT_ROUND;
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

// A peer may write anything there.
__device__ round_count count_from(const await_args &a, uint64_t active, int32_t rank)
{
    const unsigned char *counts = static_cast<const unsigned char *>(a.peer_counts);
    int32_t index = rank < a.rank ? rank : rank - 1, rows;
    const volatile round_count *told = reinterpret_cast<const volatile round_count *>(counts + index * FLAG_LINE_BYTES);

    if (rank == a.rank) return {a.tokens, a.round};
    if (!is_peer(active, rank, a.rank)) return {0, a.round};
    rows = told->rows;
    return {max(rows, 0), told->round};
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
    for (int32_t r = 0; r < a.ranks; r++)
        received += r != a.rank ? told[r].rows : 0;
    a.state->rows_received[a.slot] = received;
    a.report->rows_received[a.slot] = received;
}

__device__ __forceinline__ void clear_ids(int32_t &word)
{
    word = -1;
}

__device__ __forceinline__ void clear_ids(uint4 &word)
{
    word = {~0u, ~0u, ~0u, ~0u};
}

// Peers' ids as they are now, by words of one or of four, of which a thread has several under way; a row has whole words. `failed`: of no
// row, as counts say then.
template <class Word> __device__ void take_ids(const await_args &a, const round_count *told, bool failed)
{
    constexpr int32_t ids = sizeof(Word) / 4;
    const int32_t row = a.top_k / ids, slab = a.rows_most * row;
    Word *to = reinterpret_cast<Word *>(a.ids);

#pragma unroll 8
    for (int32_t i = threadIdx.x; i < a.ranks * slab; i += kThreads) {
        const int32_t rank = i / slab, at = i - rank * slab, index = rank < a.rank ? rank : rank - 1;
        const unsigned char *from = static_cast<const unsigned char *>(a.peer_ids) + index * a.peer_ids_slab_bytes;
        const bool is_valid = !failed && at < told[rank].rows * row;
        Word word;

        if (is_valid && rank == a.rank) continue;
        clear_ids(word);
        if (is_valid) word = __ldcg(reinterpret_cast<const Word *>(from) + at);
        to[i] = word;
    }
}

__global__ void __launch_bounds__(kThreads) await_kernel(const __grid_constant__ await_kernel_args args)
{
    __shared__ heard all[KERNEL_RANKS_MAX];
    __shared__ round_count told[KERNEL_RANKS_MAX];
    __shared__ uint32_t ended, missed;
    __shared__ bool failed; // read once: another stream may set it, and ids and counts have to agree
    const await_args &a = args.a;
    int32_t rank = threadIdx.x;
    standing at;
    watch w;

    griddepcontrol_wait();
    at = standing_of(a.state, a.slot);
    if (a.peers != nullptr) at.epoch = tell_peers(a, args.peers, at);
    w = watch_start(a, at);
    if (rank == 0) ended = missed = 0;
    __syncthreads();
    all[rank] = {ARRIVED, 0, 0};
    if (rank < a.ranks && is_peer(w.active, rank, a.rank)) all[rank] = listen(args, w, rank, &ended);
    if (rank < a.ranks && a.counts != nullptr) {
        told[rank] = count_from(a, w.active, rank);
        if (all[rank].what == ARRIVED) all[rank] = check_count(a, w, rank, told[rank]);
    }
    if (all[rank].what != ARRIVED) missed = 1;
    __syncthreads();
    griddepcontrol_launch_dependents(); // which no longer wait for a peer
    if (missed != 0 && rank == 0) settle(a, judge(a, w, all, told));
    if (rank == 0) failed = missed != 0 || has_failed(a.state);
    __syncthreads();
    if (a.ids != nullptr) a.top_k % 4 == 0 ? take_ids<uint4>(a, told, failed) : take_ids<int32_t>(a, told, failed);
    if (a.counts != nullptr) take_counts(a, told, failed, w.rows_received);
    if (rank == 0 && a.ended != nullptr) *a.ended += 1;
}

// ---- regroup -----------------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads) regroup_kernel(const __grid_constant__ regroup_kernel_args args)
{
    const regroup_args &a = args.a;
    int32_t rank = threadIdx.x;

    if (rank == 0) {
        a.state->generation = a.generation;
        a.state->active = a.active;
        a.state->epochs[a.slot] = 0;
        a.state->failed = 0;
    }
    if (rank >= a.ranks || rank == a.rank) return;
    store_release_system(line_of(args.peers.of[rank], WORD_ACTIVE, a.rank, a.ranks), a.active);
    store_release_system(line_of(args.peers.of[rank], WORD_GENERATION, a.rank, a.ranks), a.generation);
}

} // namespace

extern "C" int32_t flags_cuda_load(void)
{
    cudaError_t st = load_kernel(signal_kernel);

    if (st == cudaSuccess) st = load_kernel(await_kernel);
    if (st == cudaSuccess) st = load_kernel(regroup_kernel);
    return st;
}

extern "C" int32_t signal_cuda(const struct signal_args *args, void *stream)
{
    signal_kernel_args to = {*args, copy_windows(args->peers, args->ranks)};

    return launch(signal_kernel, {1, kThreads, 0, LAUNCH_EARLY}, stream, to);
}

extern "C" int32_t await_cuda(const struct await_args *args, void *stream)
{
    await_kernel_args to = {*args, {}, copy_windows(args->peer_beats, args->ranks)};

    if (args->peers != nullptr) to.peers = copy_windows(args->peers, args->ranks);
    return launch(await_kernel, {1, kThreads, 0, LAUNCH_EARLY}, stream, to);
}

extern "C" int32_t regroup_cuda(const struct regroup_args *args, void *stream)
{
    regroup_kernel_args to = {*args, copy_windows(args->peers, args->ranks)};

    return launch(regroup_kernel, {1, kThreads, 0, LAUNCH_AFTER}, stream, to);
}
