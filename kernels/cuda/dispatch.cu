// dispatch on CUDA, in two launches: which row of each destination a token takes, then the rows. Few tokens take one, whose blocks all
// find all places.
//
// slots  a block of 1024 threads a rank, a thread a token, 1024 tokens in order at a time
//        bytes  the ids once a rank, 4 a (token, rank): bound by the latency of one load a turn
// push   a warp a token and piece of its row, 16 bytes a lane (fp8: eight numbers a lane)
//        bytes  x once, a wire row a destination: bound by the links to the peers

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/push_args.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/cuda/walk.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kSlotThreads = 1024;
constexpr int kSlotWarps = kSlotThreads / 32;
constexpr int kFewTokens = 512; // whose places every block finds in less time than another launch takes
constexpr int kFewWords = kFewTokens / 32; // a lane each
constexpr int kBatch = 4;           // loads of a lane under way at once
constexpr int kBatchFp8 = 2;        // where they become e4m3
constexpr int kWarpsWanted = 2048;  // of push: enough to fill the links with a few tokens
constexpr int kBlocksOfSm = 4;      // of push, by its registers
constexpr int kPieceColumns = kFp8Warp * kBatchFp8; // a multiple of it: as many as are under way
constexpr int kPieceColumnsMax = 32 * kFp8Group;    // a lane keeps the scale of one group
constexpr int kFp8WarpGroups = kFp8Warp / kFp8Group;

// At the moment: another stream may set it.
__device__ __forceinline__ bool has_failed(const push_args &a)
{
    return a.failed != nullptr && *static_cast<const volatile uint32_t *>(a.failed) != 0;
}

// Rows are pushed there.
__device__ __forceinline__ bool is_destination(const push_args &a, int32_t rank)
{
    return rank != a.rank && a.to[rank].rows != nullptr;
}

// ---- slots ---------------------------------------------------------------------------------------------------------------

__device__ bool goes(const push_args &a, int64_t valid, int32_t token, int32_t rank)
{
    int32_t first = a.expert_first[rank], end = a.expert_first[rank + 1];
    bool found = false;

    if (token >= a.tokens) return false;
    if (a.everywhere) return true;
#pragma unroll 8
    for (int32_t t = 0; t < a.top_k; t++) {
        int32_t id = physical_id(a, valid, token, t);

        found |= id >= first && id < end;
    }
    return found;
}

// Fills the rank's column of send_slot; how many tokens go there. `wanted`: whether this thread's first token goes there.
__device__ int32_t place_rows(const push_args &a, int64_t valid, int32_t rank, bool wanted)
{
    __shared__ int32_t sums[2][kSlotWarps]; // by turns, so that a turn has one barrier
    int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, sent = 0;

    for (int32_t base = 0, turn = 0; base < a.tokens; base += kSlotThreads, turn ^= 1) {
        int32_t token = base + static_cast<int32_t>(threadIdx.x), sum, own, slot;
        uint32_t lanes;

        if (base > 0) wanted = goes(a, valid, token, rank);
        lanes = __ballot_sync(~0u, wanted);
        if (lane == 0) sums[turn][warp] = __popc(lanes);
        __syncthreads();
        own = sums[turn][lane];
        sum = sum_before(own) + own;
        slot = sent + __shfl_sync(~0u, sum - own, warp) + __popc(lanes & ((1u << lane) - 1));
        if (token < a.tokens) a.send_slot[static_cast<int64_t>(token) * a.ranks + rank] = wanted && slot < a.rows_cap ? slot : -1;
        sent += __shfl_sync(~0u, sum, kSlotWarps - 1);
    }
    return sent;
}

__device__ void finish_slab(const push_args &a, const push_slab &to, int32_t wanted)
{
    int64_t end = static_cast<int64_t>(padded(a)) * a.top_k;

    for (int64_t i = static_cast<int64_t>(wanted) * a.top_k + threadIdx.x; i < end; i += blockDim.x) {
        to.ids[i] = -1;
        to.weights[i] = 0.0f;
    }
    if (threadIdx.x == 0) *to.count = {rows_counted(a, wanted), a.round};
}

// The own rank's block has no rows to place: it counts all ranks' once more, because no block waits for another.
__device__ void add_rows_sent(const push_args &a, int64_t valid)
{
    __shared__ int32_t sent[kSlotWarps][KERNEL_RANKS_MAX];
    __shared__ unsigned long long all;
    int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, thread = threadIdx.x;
    uint64_t before = thread == 0 ? *static_cast<const volatile uint64_t *>(a.rows_sent) : 0;

    if (thread == 0) all = 0;
    for (int32_t rank = lane; rank < a.ranks; rank += 32)
        sent[warp][rank] = 0;
    __syncwarp();
    for (int32_t base = 0; base < a.tokens; base += kSlotThreads) {
        int32_t token = base + thread;
        uint64_t ranks = owners<4>(a, valid, token);

        for (int32_t rank = 0; rank < a.ranks; rank++) {
            int32_t tokens = __popc(__ballot_sync(~0u, (ranks >> rank & 1) != 0));

            if (lane == 0) sent[warp][rank] += tokens;
        }
    }
    __syncthreads();
    if (thread < a.ranks && is_destination(a, thread)) {
        int32_t rows = 0;

        for (int32_t w = 0; w < kSlotWarps; w++)
            rows += sent[w][thread];
        atomicAdd(&all, static_cast<unsigned long long>(rows_counted(a, rows)));
    }
    __syncthreads();
    if (thread == 0) tell_rows(a, before + all);
}

__global__ void __launch_bounds__(kSlotThreads) slots_kernel(const __grid_constant__ push_args a)
{
    __shared__ bool failed; // read once: it may be set meanwhile, and threads that part would never meet again
    int32_t rank = blockIdx.x;
    bool seen, wanted;
    int64_t valid;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    seen = has_failed(a); // under way while ids are
    valid = tokens_valid(a);
    wanted = goes(a, valid, threadIdx.x, rank);
    if (threadIdx.x == 0) failed = seen;
    __syncthreads();
    if (failed || !is_destination(a, rank)) {
        for (int64_t token = threadIdx.x; token < a.tokens; token += kSlotThreads)
            a.send_slot[token * a.ranks + rank] = -1;
        if (!failed && rank == a.rank && a.rows_sent != nullptr) add_rows_sent(a, valid);
        return;
    }
    finish_slab(a, a.to[rank], place_rows(a, valid, rank, wanted));
}

// ---- push ----------------------------------------------------------------------------------------------------------------

// Which of few tokens go to a rank: a bit each, and how many go before each word of 32. A lane reads its own rank's.
struct few_tokens {
    uint32_t wanted[KERNEL_RANKS_MAX][kFewWords + 1];
    int32_t before[KERNEL_RANKS_MAX][kFewWords + 1]; // at the end, all
};

// Returns whether a wait has failed: then no token goes anywhere.
__device__ bool find_few(const push_args &a, int64_t valid, few_tokens *few)
{
    __shared__ bool failed; // as in slots
    int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, words = (a.tokens + 31) / 32;
    bool seen = has_failed(a);

    for (int32_t word = warp; word < words; word += warps) {
        uint64_t ranks = owners<4>(a, valid, word * 32 + lane);

        for (int32_t rank = 0; rank < a.ranks; rank++) {
            uint32_t lanes = __ballot_sync(~0u, is_destination(a, rank) && (ranks >> rank & 1) != 0);

            if (lane == 0) few->wanted[rank][word] = lanes;
        }
    }
    if (threadIdx.x == 0) failed = seen;
    __syncthreads();
    for (int32_t rank = warp; rank < a.ranks; rank += warps) {
        int32_t own, before;

        if (failed && lane < words) few->wanted[rank][lane] = 0;
        own = lane < words ? __popc(few->wanted[rank][lane]) : 0;
        before = sum_before(own);
        if (lane < kFewWords) few->before[rank][lane] = before;
        if (lane == 31) few->before[rank][kFewWords] = before + own;
    }
    __syncthreads();
    return failed;
}

// The row of a token at that rank, -1 for none.
__device__ __forceinline__ int32_t few_slot(const push_args &a, const few_tokens &few, int32_t token, int32_t rank)
{
    uint32_t lanes;
    int32_t slot;

    if (rank >= a.ranks) return -1;
    lanes = few.wanted[rank][token / 32];
    slot = few.before[rank][token / 32] + __popc(lanes & ((1u << token % 32) - 1));
    return (lanes >> token % 32 & 1) != 0 && slot < a.rows_cap ? slot : -1;
}

// Each block tells some ranks how many rows they get.
__device__ void tell_few(const push_args &a, const few_tokens &few)
{
    for (int32_t rank = blockIdx.x; rank < a.ranks; rank += gridDim.x)
        if (is_destination(a, rank)) finish_slab(a, a.to[rank], few.before[rank][kFewWords]);
}

// Rows that the counts tell of, for the host.
__device__ uint64_t rows_of_few(const push_args &a, const few_tokens &few)
{
    uint64_t all = 0;

    for (int32_t rank = 0; rank < a.ranks; rank++)
        if (is_destination(a, rank)) all += rows_counted(a, few.before[rank][kFewWords]);
    return all;
}

// Where a token goes, from the rank after the own one on, so that no rank is the first of all others. A lane holds the rows of two ranks,
// its own number and that + 32.
struct places {
    uint64_t turns; // bit t: to rank (own + 1 + t) % 64
    int32_t low, high;
};

__device__ __forceinline__ places places_at(const push_args &a, int32_t low, int32_t high)
{
    uint64_t ranks = __ballot_sync(~0u, high >= 0);
    int32_t first = (a.rank + 1) % 64;

    ranks = ranks << 32 | __ballot_sync(~0u, low >= 0);
    return {first == 0 ? ranks : ranks >> first | ranks << (64 - first), low, high};
}

__device__ __forceinline__ places places_of(const push_args &a, int32_t token)
{
    const int32_t *slots = a.send_slot + static_cast<int64_t>(token) * a.ranks;
    int32_t lane = threadIdx.x % 32;

    return places_at(a, lane < a.ranks ? slots[lane] : -1, lane + 32 < a.ranks ? slots[lane + 32] : -1);
}

// The same of few tokens; `keeps`: for sum, too.
__device__ __forceinline__ places places_of_few(const push_args &a, const few_tokens &few, int32_t token, bool keeps)
{
    int32_t *slots = a.send_slot + static_cast<int64_t>(token) * a.ranks;
    int32_t lane = threadIdx.x % 32, low = few_slot(a, few, token, lane), high = few_slot(a, few, token, lane + 32);

    if (keeps && lane < a.ranks) slots[lane] = low;
    if (keeps && lane + 32 < a.ranks) slots[lane + 32] = high;
    return places_at(a, low, high);
}

struct place {
    int32_t rank;
    int64_t row;
};

// Takes the next destination out; for the whole warp.
__device__ __forceinline__ place next_place(const push_args &a, const places &at, uint64_t *left)
{
    int32_t rank = (__ffsll(static_cast<long long>(*left)) + a.rank) % 64;

    *left &= *left - 1;
    return {rank, __shfl_sync(~0u, rank < 32 ? at.low : at.high, rank % 32)};
}

// The ids and weights of a token, a lane a place in its top-k.
__device__ void push_routing(const push_args &a, int64_t valid, int32_t token, const places &at)
{
    int32_t t = threadIdx.x % 32, id = -1;
    const push_slab &own = a.to[a.rank];
    float weight = 0.0f;

    if (t < a.top_k) {
        id = physical_id(a, valid, token, t);
        weight = number_load(a.weights + token * a.weight_stride_bytes, t, a.weight_format);
    }
    for (uint64_t left = at.turns; left != 0;) {
        place to = next_place(a, at, &left);

        if (t >= a.top_k) continue;
        a.to[to.rank].ids[to.row * a.top_k + t] = id;
        a.to[to.rank].weights[to.row * a.top_k + t] = weight;
    }
    if (own.ids == nullptr || t >= a.top_k) return;
    own.ids[static_cast<int64_t>(token) * a.top_k + t] = id;
    own.weights[static_cast<int64_t>(token) * a.top_k + t] = weight;
}

__device__ __forceinline__ unsigned char *row_at(const push_args &a, place to)
{
    return static_cast<unsigned char *>(a.to[to.rank].rows) + to.row * a.row_stride_bytes;
}

// Bytes begin..end-1 of the row, as they are.
__device__ void push_copy(const push_args &a, int32_t token, const places &at, int32_t begin, int32_t end)
{
    const unsigned char *from = a.x + token * a.x_stride_bytes;

    for (int32_t first = begin + threadIdx.x % 32 * 16; begin < end; begin += 512 * kBatch, first += 512 * kBatch) {
        uint4 held[kBatch];

#pragma unroll
        for (int32_t i = 0; i < kBatch; i++)
            if (first + i * 512 < end) held[i] = *reinterpret_cast<const uint4 *>(from + first + i * 512);
        for (uint64_t left = at.turns; left != 0;) {
            unsigned char *row = row_at(a, next_place(a, at, &left));

#pragma unroll
            for (int32_t i = 0; i < kBatch; i++)
                if (first + i * 512 < end) *reinterpret_cast<uint4 *>(row + first + i * 512) = held[i];
        }
    }
}

// Columns begin..end-1 of the row, as e4m3 with a scale per 128. A lane keeps the scale of one group, so that a row's go out together.
__device__ void push_fp8(const push_args &a, int32_t token, const places &at, int32_t begin, int32_t end)
{
    const unsigned char *from = a.x + token * a.x_stride_bytes;
    int32_t lane = threadIdx.x % 32;
    float scale = 0.0f;

    for (int32_t part = begin; part < end; part += kFp8Warp * kBatchFp8) {
        int32_t first = part + lane * kFp8Lane;
        float values[kBatchFp8][kFp8Lane] = {};
        float largest[kBatchFp8];
        fp8_scaling by[kBatchFp8];
        uint2 codes[kBatchFp8];

#pragma unroll
        for (int32_t i = 0; i < kBatchFp8; i++)
            if (first + i * kFp8Warp < end) load_8(from, first + i * kFp8Warp, a.x_format, values[i]);
#pragma unroll
        for (int32_t i = 0; i < kBatchFp8; i++)
            largest[i] = fp8_largest(values[i]);
        fp8_scalings_of(largest, by);
#pragma unroll
        for (int32_t i = 0; i < kBatchFp8; i++) {
            float of_group = __shfl_sync(~0u, by[i].scale, lane % kFp8WarpGroups * (kFp8Group / kFp8Lane));

            codes[i] = fp8_codes(values[i], by[i].inverse);
            if (lane / kFp8WarpGroups == (part - begin) / kFp8Warp + i) scale = of_group;
        }
        for (uint64_t left = at.turns; left != 0;) {
            unsigned char *row = row_at(a, next_place(a, at, &left));

#pragma unroll
            for (int32_t i = 0; i < kBatchFp8; i++)
                if (first + i * kFp8Warp < end) *reinterpret_cast<uint2 *>(row + first + i * kFp8Warp) = codes[i];
        }
    }
    for (uint64_t left = at.turns; left != 0;) {
        place to = next_place(a, at, &left);
        float *row_scales = reinterpret_cast<float *>(static_cast<unsigned char *>(a.to[to.rank].scales) + to.row * a.scale_stride_bytes);

        if (begin + lane * kFp8Group < end) row_scales[begin / kFp8Group + lane] = scale;
    }
}

// The first row of the walk, while slots are found. Whoever still writes x makes it worthless, not wrong.
__device__ __forceinline__ void prefetch_first(const push_args &a, const row_walk &walk, int32_t begin_byte, int32_t end_byte)
{
    if (walk.first >= static_cast<uint32_t>(a.tokens)) return;
    for (int32_t at = begin_byte + threadIdx.x % 32 * 128; at < end_byte; at += 32 * 128)
        prefetch_l2(a.x + walk.first * a.x_stride_bytes + at);
}

template <bool is_fp8, bool is_few> __global__ void __maxnreg__(64) push_kernel(const __grid_constant__ push_args a)
{
    const row_walk walk = walk_rows(a.pieces);
    int32_t begin = walk.piece * a.piece_columns, end = min(begin + a.piece_columns, a.hidden), number_bytes = a.x_format == FORMAT_F32 ? 4 : 2;
    bool counts_rows = is_few && blockIdx.x == 0 && threadIdx.x == 0 && a.rows_sent != nullptr, failed;
    __shared__ few_tokens few;
    uint64_t sent = 0;
    int64_t valid;

    prefetch_first(a, walk, begin * number_bytes, end * number_bytes);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (counts_rows) sent = *static_cast<const volatile uint64_t *>(a.rows_sent);
    valid = tokens_valid(a);
    if constexpr (is_few) {
        failed = find_few(a, valid, &few);
        if (!failed) tell_few(a, few);
    } else {
        failed = has_failed(a);
    }
    if (failed) valid = 0;
    for (uint32_t walked = walk.first; walked < static_cast<uint32_t>(a.tokens); walked += walk.step) {
        int32_t token = static_cast<int32_t>(walked);
        places at = is_few ? places_of_few(a, few, token, walk.piece == 0) : places_of(a, token);

        if (walk.piece == 0) push_routing(a, valid, token, at);
        if (at.turns == 0) continue;
        if constexpr (is_fp8)
            push_fp8(a, token, at, begin, end);
        else
            push_copy(a, token, at, begin * number_bytes, end * number_bytes);
    }
    if (counts_rows && !failed) tell_rows(a, sent + rows_of_few(a, few));
}

// ---- The launch ----------------------------------------------------------------------------------------------------------

// Few tokens: rows in pieces, so that all of the machine pushes.
void cut_rows(const dispatch_args &from, push_args *to)
{
    int32_t pieces = max(kWarpsWanted / max(from.tokens, 1) + 1, (from.hidden + kPieceColumnsMax - 1) / kPieceColumnsMax);
    int32_t columns = (from.hidden + pieces - 1) / pieces;

    to->piece_columns = (columns + kPieceColumns - 1) / kPieceColumns * kPieceColumns;
    to->pieces = (from.hidden + to->piece_columns - 1) / to->piece_columns;
}

typedef void (*push_kernel_entry)(push_args);

push_kernel_entry push_entry(bool is_fp8, bool is_few)
{
    if (is_fp8) return is_few ? push_kernel<true, true> : push_kernel<true, false>;
    return is_few ? push_kernel<false, true> : push_kernel<false, false>;
}

} // namespace

extern "C" int32_t dispatch_cuda_load(void)
{
    cudaError_t st = load_kernel(slots_kernel);

    for (bool is_fp8 : {false, true})
        for (bool is_few : {false, true})
            if (st == cudaSuccess) st = load_kernel(push_entry(is_fp8, is_few), kAloneSmemBytes);
    return st;
}

extern "C" int32_t dispatch_cuda(const struct dispatch_args *from, void *stream)
{
    bool is_few = from->tokens > 0 && from->tokens <= kFewTokens;
    launch_shape slots = {static_cast<unsigned>(from->ranks), kSlotThreads, 0, LAUNCH_EARLY};
    cudaError_t st = cudaSuccess;
    push_args to = {};

    if (!can_push(*from)) return cudaErrorInvalidValue;
    fill(*from, &to);
    cut_rows(*from, &to);
    if (!is_few) st = launch(slots_kernel, slots, stream, to);
    if (st != cudaSuccess || from->tokens == 0) return st;
    return launch(push_entry(from->wire_format == FORMAT_FP8_BLOCK128, is_few),
                  shape_for(static_cast<int64_t>(from->tokens) * to.pieces, to.pieces, kBlocksOfSm, from->sms), stream, to);
}
