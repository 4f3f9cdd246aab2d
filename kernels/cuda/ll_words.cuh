// Words with a tag, and how a block waits for them. Included by ll.cu and ll_rows.cuh.
//
// The first warp of the first block is the herald, which tells and awaits flags. The first warps of other blocks have nothing to do, and all
// others are workers.

#ifndef MOXIE_KERNELS_CUDA_LL_WORDS_CUH
#define MOXIE_KERNELS_CUDA_LL_WORDS_CUH

#include "kernels/cuda/flags_wait.cuh"
#include "kernels/ll.h"

namespace {

constexpr int32_t kThreads = 512, kWorkers = kThreads / 32 - 1; // warps of a block that send and await words
constexpr int32_t kPieceColumns = LL_PIECE_COLUMNS; // 8 a lane

static_assert(LL_RANKS_MAX <= 32 && LL_TOKENS <= 32, "a lane each");

struct ll_smem {
    heard all[LL_RANKS_MAX];
    round_count told[LL_RANKS_MAX];
    uint32_t silent[LL_RANKS_MAX]; // 1: words of that rank have not come
    uint32_t missed;               // 1: not all has come
    uint32_t ended;                // 1: nobody need wait any longer
    uint32_t done;                 // blocks, and of those that have waited in vain 2^16
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
// sends rows begins the epoch after the last that has returned, all others are of the one whose rows were sent.
__device__ __forceinline__ standing begin(const await_args &a, ll_smem &smem, bool begins_epoch)
{
    const volatile flag_state *state = a.state;
    const uint64_t returned = state->returned[a.slot];
    standing at = standing_of(state, a.slot);

    if (begins_epoch) at.epoch = returned + 1;
    if (threadIdx.x < LL_RANKS_MAX) smem.silent[threadIdx.x] = 0;
    if (threadIdx.x == 0) smem.missed = smem.ended = 0;
    return at;
}

// The herald, a lane a peer.
__device__ __forceinline__ void tell_flags(const await_kernel_args &args, const standing &at)
{
    const await_args &a = args.a;
    const int32_t rank = threadIdx.x;

    if (at.failed != 0) return;
    if (rank == 0) (a.word == WORD_DISPATCH ? a.state->epochs : a.state->returned)[a.slot] = at.epoch;
    if (rank < a.ranks && is_peer(at.active, rank, a.rank))
        store_relaxed_system(line_of(args.peers.of[rank], a.word, a.rank, a.ranks), flag_of(at, true));
}

// Between looks at words: whether to look no longer. Their deadline is behind that of flags, which says more.
struct patience {
    uint64_t deadline_ns;
    int32_t looks;
};

// Whether the wait has ended by a peer's word or a failure: what has not come then need not be late.
__device__ __forceinline__ bool is_ended(const await_args &a, const ll_smem &smem)
{
    return *static_cast<const volatile uint32_t *>(&smem.ended) != 0 || has_failed(a.state);
}

__device__ __forceinline__ bool is_over(const await_args &a, const ll_smem &smem, const standing &at, patience &left)
{
    const volatile flag_state *state = a.state;

    spin_pause(kPauseNs);
    if (++left.looks % kLooks != 0) return false;
    if (left.deadline_ns == 0) left.deadline_ns = global_timer_ns() + 2 * static_cast<uint64_t>(a.timeout_ns);
    return is_ended(a, smem) || state->generation != at.generation || global_timer_ns() >= left.deadline_ns;
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

// Pieces of rows, item by item over the workers of all blocks, neighbours in different ones.
__device__ __forceinline__ int32_t first_item()
{
    return static_cast<int32_t>((threadIdx.x / 32 - 1) * gridDim.x + blockIdx.x);
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

// The herald, once a lane's peer's flag has come: what that counted, or who has left.
__device__ heard hear_count(const await_args &a, const ll_smem &smem, const watch &w, const unsigned char *words, round_count *told)
{
    const int32_t rank = threadIdx.x;
    patience left = {};
    ll_count count;
    tagged word;

    for (;;) {
        word = load_tagged(words);
        if (word.tag == flag_of(w, false)) break;
        if (is_over(a, smem, w, left)) {
            heard h = look_for_leavers(a, w, rank);

            if (h.what == ARRIVED) h.what = is_ended(a, smem) ? STOPPED : MUTE;
            return h;
        }
    }
    count = unpack_count(word.value);
    *told = {count.rows, count.round};
    return check_count(a, w, rank, *told);
}

// The herald: waits for flags and counts (`words`, or NULL).
__device__ void wait_flags(const await_kernel_args &args, ll_smem &smem, const watch &w, const unsigned char *words, int64_t stride_bytes)
{
    const await_args &a = args.a;
    const int32_t rank = threadIdx.x;
    heard h = {ARRIVED, 0, 0};

    if (rank < a.ranks) {
        smem.told[rank] = {rank == a.rank ? a.tokens : 0, a.round};
        if (is_peer(w.active, rank, a.rank)) {
            h = listen(args, w, rank, &smem.ended);
            if (h.what == ARRIVED && words != nullptr)
                h = hear_count(a, smem, w, words + index_of(rank, a.rank) * stride_bytes, &smem.told[rank]);
        }
        smem.all[rank] = h;
        if (h.what != ARRIVED) smem.missed = 1;
    }
    __syncwarp();
    if (rank == 0 && (smem.missed != 0 || has_failed(a.state))) smem.missed = smem.ended = 1;
}

__device__ __forceinline__ void miss(const await_args &a, ll_smem &smem, int32_t rank)
{
    if (!is_ended(a, smem)) smem.silent[rank] = 1;
    smem.missed = 1;
}

// When a block has waited: whether in vain.
__device__ bool judge_words(const await_args &a, ll_smem &smem, const watch &w)
{
    __syncthreads();
    griddepcontrol_launch_dependents(); // which no longer wait for a peer
    if (smem.missed == 0) return false;
    if (threadIdx.x == 0) {
#pragma unroll 1
        for (int32_t rank = 0; rank < a.ranks; rank++) {
            if (blockIdx.x != 0) smem.all[rank] = {ARRIVED, 0, 0};
            if (smem.silent[rank] != 0 && smem.all[rank].what == ARRIVED) smem.all[rank].what = MUTE;
        }
        settle(a, judge(a, w, smem.all, smem.told));
    }
    return true;
}

} // namespace

#endif
