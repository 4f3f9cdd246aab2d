// signal, await and regroup on CUDA: a thread a peer.
//
// grid   1 block of 64 threads, so that what waits never keeps another instance's kernels from the device. A wait is not
//        followed early: dependents that sat on the device while it waits could.
// bytes  a line a peer: bound by the wire's latency

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/flags_wait.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

constexpr int kThreads = KERNEL_RANKS_MAX;

struct signal_kernel_args {
    signal_args a;
    windows peers;
};

struct regroup_kernel_args {
    regroup_args a;
    windows peers;
};

// ---- signal ------------------------------------------------------------------------------------

// By all threads of a block that has read the state; in which epoch the slot is now.
template <class Args> __device__ __forceinline__ uint64_t tell_peers(const Args &a, const windows &peers, const standing &at)
{
    const int32_t rank = threadIdx.x;
    const uint64_t epoch = at.epoch + (a.word == WORD_DISPATCH ? 1 : 0);

    __syncthreads();
    if (at.failed != 0) return at.epoch;
    if (rank == 0) keep_epoch(a, epoch);
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
        a.state->epochs[a.slot] = a.state->returned[a.slot] = 0;
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
    await_kernel_args to = {*args, {}, copy_windows(args->peer_beats, args->ranks), 0};

    if (args->peers != nullptr) to.peers = copy_windows(args->peers, args->ranks);
    return launch(await_kernel, {1, kThreads, 0, LAUNCH_EARLY}, stream, to);
}

extern "C" int32_t regroup_cuda(const struct regroup_args *args, void *stream)
{
    regroup_kernel_args to = {*args, copy_windows(args->peers, args->ranks)};

    return launch(regroup_kernel, {1, kThreads, 0, LAUNCH_AFTER}, stream, to);
}
