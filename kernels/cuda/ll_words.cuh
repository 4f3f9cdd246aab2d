// Words with a tag, and how a block waits for them. Included by ll.cu and ll_rows.cuh.
//
// The first warp of the first block is the herald, which tells and awaits flags. It and the first warps of other blocks then keep watch while
// their block's workers, all other warps, wait for words: as await does, they tell peers that this rank waits, look for peers that have gone
// on, and end it when time is up.

#ifndef MOXIE_KERNELS_CUDA_LL_WORDS_CUH
#define MOXIE_KERNELS_CUDA_LL_WORDS_CUH

#include "kernels/cuda/flags_wait.cuh"
#include "kernels/ll.h"

namespace {

constexpr int32_t kThreads = 512, kWorkers = kThreads / 32 - 1; // warps of a block that send and await words
constexpr int32_t kPieceColumns = LL_PIECE_COLUMNS; // 8 a lane
// At workers, between two looks around, which take longer: so few that words of ranks in step come before the first.
constexpr int32_t kWatchLooks = 128;

static_assert(LL_RANKS_MAX <= 32 && LL_TOKENS <= 32, "a lane each");

struct ll_smem {
    heard all[LL_RANKS_MAX];
    round_count told[LL_RANKS_MAX];
    uint32_t silent[LL_RANKS_MAX]; // 1: words of that rank have not come in time
    uint32_t waits[LL_RANKS_MAX];  // 1: but it was heard to wait itself
    uint32_t missed;               // 1: not all has come
    uint32_t ended;                // 1: nobody need wait any longer,
    uint32_t late;                 // since time is up
    uint32_t finished;             // workers that no longer wait
};

__device__ __forceinline__ void store_word(unsigned char *row, int32_t index, uint64_t value, uint64_t tag)
{
    store_tagged(row + index * LL_WORD_BYTES, {value, tag});
}

__device__ __forceinline__ uint64_t pack(uint32_t low, uint32_t high)
{
    return low | static_cast<uint64_t>(high) << 32;
}

// How the own rank stands, in the epoch of this launch. A launch changes what it does not read, since its blocks begin at any time: who
// sends rows begins the epoch after the last that has returned, all others are of the one whose rows were sent. The state lies where peers can
// write.
__device__ __forceinline__ standing begin(const await_kernel_args &args, ll_smem &smem, bool begins_epoch)
{
    const await_args &a = args.a;
    const volatile flag_state *state = a.state;
    const uint64_t returned = state->returned[a.slot];
    standing at = standing_of(state, a.slot);

    at.active &= args.reached;
    if (begins_epoch) at.epoch = returned + 1;
    if (threadIdx.x < LL_RANKS_MAX) {
        smem.all[threadIdx.x] = {ARRIVED, 0, 0};
        smem.told[threadIdx.x] = {static_cast<int32_t>(threadIdx.x) == a.rank ? a.tokens : 0, a.round};
        smem.silent[threadIdx.x] = smem.waits[threadIdx.x] = 0;
    }
    if (threadIdx.x == 0) smem.missed = smem.ended = smem.late = smem.finished = 0;
    return at;
}

// The herald, a lane a peer.
__device__ __forceinline__ void tell_flags(const await_kernel_args &args, const standing &at)
{
    const await_args &a = args.a;
    const int32_t rank = threadIdx.x;

    if (at.failed != 0) return;
    if (rank == 0) keep_epoch(a, at.epoch);
    if (rank < a.ranks && is_peer(at.active, rank, a.rank))
        store_relaxed_system(line_of(args.peers.of[rank], a.word, a.rank, a.ranks), flag_of(at, true));
}

// What a source says before its first row: rows that it reports, and has sent, 16 bits each, and its round.
__device__ __forceinline__ uint64_t pack_count(int32_t rows, int32_t sent, int32_t round)
{
    return pack(rows | sent << 16, round);
}

struct ll_count {
    int32_t rows, sent, round;
};

__device__ __forceinline__ ll_count unpack_count(uint64_t value)
{
    const int32_t rows = value & 0xffff, sent = value >> 16 & 0xffff;

    return {rows, min(sent, rows), static_cast<int32_t>(value >> 32)};
}

// Of this block; -1: the first warp.
__device__ __forceinline__ int32_t own_worker()
{
    return static_cast<int32_t>(threadIdx.x / 32) - 1;
}

// Pieces of rows, item by item over the workers of all blocks, neighbours in different ones.
__device__ __forceinline__ int32_t first_item()
{
    return own_worker() * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x);
}

__device__ __forceinline__ int32_t item_step()
{
    return static_cast<int32_t>(gridDim.x * kWorkers);
}

// A piece of a row, and a lane's place in it.
struct ll_piece {
    int32_t row, piece, column;
};

__device__ __forceinline__ ll_piece piece_of(int32_t item, int32_t pieces)
{
    const int32_t row = item / pieces, piece = item - row * pieces;

    return {row, piece, piece * kPieceColumns + static_cast<int32_t>(threadIdx.x % 32) * (kPieceColumns / 32)};
}

__device__ __forceinline__ int32_t index_of(int32_t rank, int32_t own)
{
    return rank < own ? rank : rank - 1;
}

__device__ __forceinline__ uint32_t read_anew(const uint32_t &word)
{
    return *static_cast<const volatile uint32_t *>(&word);
}

// Nobody need wait any longer.
__device__ __forceinline__ void end_wait(ll_smem &smem)
{
    smem.missed = 1;
    *static_cast<volatile uint32_t *>(&smem.ended) = 1;
}

// A worker: words of that rank are not there, and the wait has ended. Before its time, that rank need not be late.
__device__ __forceinline__ void miss(ll_smem &smem, int32_t rank)
{
    smem.missed = 1;
    if (read_anew(smem.late) != 0) smem.silent[rank] = 1;
}

// A whole warp of workers no longer waits.
__device__ __forceinline__ void finish(ll_smem &smem)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) atomicAdd(&smem.finished, 1u);
}

// The herald: until all flags have come, or one in vain.
__device__ void wait_flags(const await_kernel_args &args, ll_smem &smem, const watch &w)
{
    const await_args &a = args.a;
    const int32_t rank = threadIdx.x;
    heard h = {ARRIVED, 0, 0};

    if (rank < a.ranks && is_peer(w.active, rank, a.rank)) h = listen(args, w, rank, &smem.ended);
    if (rank < a.ranks) smem.all[rank] = h;
    if (h.what != ARRIVED || has_failed(a.state)) end_wait(smem);
    __syncwarp();
}

// A look that await takes between its looks at flags, of the first warp of a block, a lane a peer.
__device__ void look_around(const await_kernel_args &args, ll_smem &smem, watch &w)
{
    const await_args &a = args.a;
    const int32_t rank = threadIdx.x;
    const bool has_peer = rank < a.ranks && is_peer(w.active, rank, a.rank);
    const uint64_t now_ns = __shfl_sync(~0u, global_timer_ns(), 0);

    if (has_peer) {
        const heard h = look_for_leavers(a, w, rank);

        if (h.what != ARRIVED) {
            smem.all[rank] = h;
            end_wait(smem);
        }
    }
    if (has_failed(a.state) || static_cast<const volatile flag_state *>(a.state)->generation != w.generation) end_wait(smem);
    keep_beat(args, w, now_ns, has_peer ? rank : -1, rank == 0);
    if (__shfl_sync(~0u, now_ns < w.deadline_ns || read_anew(smem.ended) != 0, 0)) return;
    if (has_peer) smem.waits[rank] = was_heard(a, w, rank);
    smem.late = 1;
    __syncwarp();
    end_wait(smem);
}

// The first warp of a block, until its workers have finished; the herald awaits flags before.
__device__ void keep_watch(const await_kernel_args &args, ll_smem &smem, const standing &at)
{
    watch w = watch_start(args.a, at);

    if (blockIdx.x == 0) wait_flags(args, smem, w);
    w.next_ns = __shfl_sync(~0u, w.next_ns, 0);
    w.middle_ns = __shfl_sync(~0u, w.middle_ns, 0);
    w.deadline_ns = __shfl_sync(~0u, w.deadline_ns, 0);
#pragma unroll 1
    for (int32_t look = 1; __shfl_sync(~0u, read_anew(smem.finished), 0) != kWorkers; look++) {
        spin_pause(kPauseNs);
        if (look % kWatchLooks == 0) look_around(args, smem, w);
    }
}

// When a block has waited: whether in vain. `has_counts`: of rows that have come in the first block.
__device__ bool judge_words(const await_args &a, ll_smem &smem, const standing &at, bool has_counts)
{
    const watch w = {at, 0, 0, 0, 0, 0}; // without the clock, which takes its time to read
    const int32_t rank = threadIdx.x;

    __syncthreads();
    griddepcontrol_launch_dependents(); // which no longer wait for a peer
    if (has_counts) {
        const bool has_missed = smem.missed != 0; // before a lane of the first warp, which has all ranks, says so

        __syncwarp();
        if (rank < a.ranks && !has_missed) {
            const heard h = check_count(a, w, rank, smem.told[rank]);

            smem.all[rank] = h;
            if (h.what != ARRIVED) smem.missed = 1;
        }
        __syncthreads();
    }
    if (smem.missed == 0) return false;
    if (rank == 0) {
#pragma unroll 1
        for (int32_t peer = 0; peer < a.ranks; peer++)
            if (smem.silent[peer] != 0 && smem.all[peer].what == ARRIVED) smem.all[peer].what = smem.waits[peer] != 0 ? HEARD : MUTE;
        settle(a, judge(a, w, smem.all, smem.told));
    }
    return true;
}

} // namespace

#endif
