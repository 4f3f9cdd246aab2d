// sum on CUDA: a token's result rows from all ranks, in fp32 in rank order, into y.
//
// grid   a warp a token, on few SMs two, and 256 columns, 16 bytes a lane and part where rows are aligned
// bytes  every part's row once, y twice: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row8.cuh"
#include "kernels/cuda/walk.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 256; // of a warp: 8 a lane
constexpr int kBlocksOfSm = 4; // by its registers

struct args {
    const unsigned char *parts[KERNEL_RANKS_MAX];
    unsigned char *y;
    const int32_t *send_slot;
    const uint32_t *failed;
    const uint64_t *active_now;
    int64_t y_stride_bytes, part_stride_bytes;
    uint64_t active;
    uint32_t tokens;
    int32_t hidden, ranks, rank, rows_cap;
};

// The row of `rank` for this token, -1 when it has none. Slots are older than the launch before this one.
__device__ __forceinline__ int32_t part_row(const args &a, uint32_t token, int32_t rank)
{
    int32_t row;

    if (rank >= a.ranks) return -1;
    if (rank == a.rank) return token;
    row = a.parts[rank] == nullptr ? -1 : a.send_slot[static_cast<int64_t>(token) * a.ranks + rank];
    return row < a.rows_cap ? row : -1;
}

template <int32_t format>
__device__ __forceinline__ eight<format> load_part(const args &a, const unsigned char *own, int32_t rank, int32_t row, int32_t column)
{
    const unsigned char *from = rank == a.rank ? own : a.parts[rank] + row * a.part_stride_bytes;

    return is_aligned(from, 16) ? load_8<format>(from, column) : load_8_anywhere<format>(from, column);
}

// Adds the rows of all ranks in `left`, of which a lane knows two: its own number's and that + 32.
template <int32_t format>
__device__ __forceinline__ void add_parts(const args &a, const unsigned char *own, uint64_t left, int32_t low, int32_t high, int32_t column,
                                          float (&sum)[8])
{
    constexpr int kBatch = format == FORMAT_F32 ? 2 : 4; // parts under way at once

    while (left != 0) {
        eight<format> parts[kBatch] = {};
        uint64_t loaded = left;

#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            int32_t rank = __ffsll(static_cast<long long>(loaded)) - 1;
            int32_t row = __shfl_sync(~0u, rank < 32 ? low : high, rank & 31);

            if (loaded != 0 && column < a.hidden) parts[i] = load_part<format>(a, own, rank, row, column);
            loaded &= loaded - 1;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch && left != 0; i++, left &= left - 1)
            add_8(parts[i], 1.0f, sum);
    }
}

// The own row of the token that is reached after `walked`: the last ones come first, since they came last, and some are in the L2 yet.
__device__ __forceinline__ unsigned char *own_row(const args &a, uint32_t walked)
{
    return a.y + static_cast<int64_t>(a.tokens - 1 - walked) * a.y_stride_bytes;
}

// A token's rows in all parts. A lane knows those of two ranks, its own number and that + 32.
struct part_rows {
    int32_t low, high;
};

__device__ __forceinline__ part_rows part_rows_of(const args &a, uint32_t token)
{
    int32_t lane = threadIdx.x % 32;

    if (token >= a.tokens) return {-1, -1};
    return {part_row(a, token, lane), part_row(a, token, lane + 32)};
}

// Those whose parts are summed. Others write these words meanwhile: what is done by a whole warp hangs on what one of its lanes has read.
__device__ __forceinline__ uint64_t active_ranks(const args &a)
{
    if (a.failed != nullptr && *a.failed != 0) return 0;
    return a.active_now != nullptr ? *a.active_now : a.active;
}

template <int32_t format> __global__ void __maxnreg__(format == FORMAT_F32 ? 64 : 56) sum_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kColumns - 1) / kColumns);
    int32_t column = walk.piece * kColumns + threadIdx.x % 32 * 8;
    uint64_t active;
    part_rows rows;

    rows = part_rows_of(a, a.tokens - 1 - walk.first);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    active = __shfl_sync(~0u, active_ranks(a), 0);
    for (uint32_t walked = walk.first; walked < a.tokens; walked += walk.step) {
        uint32_t token = a.tokens - 1 - walked;
        part_rows next = part_rows_of(a, token - walk.step);
        uint64_t left = __ballot_sync(~0u, rows.high >= 0);
        unsigned char *own = own_row(a, walked);
        float sum[8] = {};

        left = (left << 32 | __ballot_sync(~0u, rows.low >= 0)) & active;
        add_parts<format>(a, own, left, rows.low, rows.high, column, sum);
        if (column < a.hidden) store_8(own, format, column, sum);
        rows = next;
    }
}

// Where SMs are few, each warp has more under way: two tokens at once, and four parts of each. Of up to 16 ranks, so that a warp's
// lanes look up the rows of both.
constexpr int kTokens = 2, kTokenRanks = 16, kParts = 4;

__device__ __forceinline__ int32_t find_two(const args &a, uint32_t walked, uint32_t step)
{
    const uint32_t at = walked + threadIdx.x % 32 / kTokenRanks * step;

    return at < a.tokens ? part_row(a, a.tokens - 1 - at, threadIdx.x % kTokenRanks) : -1;
}

template <int32_t format> __global__ void __launch_bounds__(kAloneThreads, 1) sum_two_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kColumns - 1) / kColumns);
    const int32_t column = walk.piece * kColumns + threadIdx.x % 32 * 8;
    int32_t row = find_two(a, walk.first, walk.step);
    uint32_t active;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    active = static_cast<uint32_t>(__shfl_sync(~0u, active_ranks(a), 0)) & 0xffffu;
    active |= active << kTokenRanks;
    for (uint32_t walked = walk.first; walked < a.tokens; walked += kTokens * walk.step) {
        const uint32_t has_part = __ballot_sync(~0u, row >= 0) & active;
        const int32_t next = find_two(a, walked + kTokens * walk.step, walk.step);
        eight<format> loaded[kTokens][kParts] = {};

#pragma unroll
        for (int32_t i = 0; i < kTokens; i++) {
            const unsigned char *own = own_row(a, walked + i * walk.step);
            uint32_t left = has_part & 0xffffu << i * kTokenRanks;

#pragma unroll
            for (int32_t j = 0; j < kParts; j++, left &= left - 1) {
                int32_t lane = __ffs(static_cast<int>(left)) - 1, at = __shfl_sync(~0u, row, lane);

                if (left != 0 && column < a.hidden) loaded[i][j] = load_part<format>(a, own, lane % kTokenRanks, at, column);
            }
        }
#pragma unroll
        for (int32_t i = 0; i < kTokens; i++) {
            unsigned char *own = own_row(a, walked + i * walk.step);
            uint32_t left = has_part & 0xffffu << i * kTokenRanks;
            float sum[8] = {};

#pragma unroll
            for (int32_t j = 0; j < kParts && left != 0; j++, left &= left - 1)
                add_8(loaded[i][j], 1.0f, sum);
            for (; left != 0; left &= left - 1) {
                int32_t lane = __ffs(static_cast<int>(left)) - 1, at = __shfl_sync(~0u, row, lane);

                if (column < a.hidden) add_8(load_part<format>(a, own, lane % kTokenRanks, at, column), 1.0f, sum);
            }
            if (walked + i * walk.step < a.tokens && column < a.hidden) store_8(own, format, column, sum);
        }
        row = next;
    }
}

// Rows that earlier rounds have summed, when a later one fails. Apart, so that a sum keeps its registers.
struct zero_args {
    unsigned char *rows;
    const uint32_t *failed;
    int64_t stride_bytes;
    int32_t rows_count, row_bytes;
};

__global__ void __launch_bounds__(kThreads) zero_kernel(const __grid_constant__ zero_args a)
{
    int32_t warps = gridDim.x * (kThreads / 32);

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (*a.failed == 0) return;
    for (int64_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < a.rows_count; row += warps) {
        uint16_t *to = reinterpret_cast<uint16_t *>(a.rows + row * a.stride_bytes);

        for (int32_t i = threadIdx.x % 32; i < a.row_bytes / 2; i += 32)
            to[i] = 0;
    }
}

int32_t zero_earlier(const sum_args &from, void *stream)
{
    zero_args to = {static_cast<unsigned char *>(from.y_earlier), from.failed, from.y_stride_bytes, from.tokens_earlier,
                    from.hidden * (from.format == FORMAT_F32 ? 4 : 2)};

    if (from.failed == nullptr || from.tokens_earlier == 0) return cudaSuccess;
    return launch(zero_kernel, {grid_for(from.tokens_earlier, kThreads / 32), kThreads, 0, LAUNCH_EARLY}, stream, to);
}

typedef void (*sum_entry)(args);

// The kernel for rows of that format; NULL when there is none.
sum_entry entry_of(int32_t format)
{
    switch (format) {
    case FORMAT_F32:
        return sum_kernel<FORMAT_F32>;
    case FORMAT_BF16:
        return sum_kernel<FORMAT_BF16>;
    case FORMAT_F16:
        return sum_kernel<FORMAT_F16>;
    default:
        return nullptr;
    }
}

// That of few SMs; NULL where ranks are many, or parts of f32 would take too many registers.
sum_entry entry_of_few_sms(const sum_args &from)
{
    if (from.sms == 0 || from.ranks > kTokenRanks || from.format == FORMAT_F32) return nullptr;
    return from.format == FORMAT_BF16 ? sum_two_kernel<FORMAT_BF16> : sum_two_kernel<FORMAT_F16>;
}

} // namespace

extern "C" int32_t sum_cuda_load(void)
{
    cudaError_t st = load_kernel(zero_kernel);

    for (int32_t format : {FORMAT_F32, FORMAT_BF16, FORMAT_F16})
        if (st == cudaSuccess) st = load_kernel(entry_of(format), kAloneSmemBytes);
    for (sum_entry entry : {sum_two_kernel<FORMAT_BF16>, sum_two_kernel<FORMAT_F16>})
        if (st == cudaSuccess) st = load_kernel(entry, kAloneSmemBytes);
    return st;
}

extern "C" int32_t sum_cuda(const struct sum_args *from, void *stream)
{
    int64_t pieces = (from->hidden + kColumns - 1) / kColumns;
    sum_entry entry;
    args to = {};
    int32_t st;

    if (from->hidden % 8 != 0 || from->ranks > KERNEL_RANKS_MAX || entry_of(from->format) == nullptr) return cudaErrorInvalidValue;
    st = zero_earlier(*from, stream);
    if (st != cudaSuccess || from->tokens == 0) return st;
    for (int32_t rank = 0; rank < from->ranks; rank++)
        to.parts[rank] = static_cast<const unsigned char *>(from->parts[rank]);
    to.y = static_cast<unsigned char *>(from->y);
    to.send_slot = from->send_slot;
    to.failed = from->failed;
    to.active_now = from->active_now;
    to.y_stride_bytes = from->y_stride_bytes;
    to.part_stride_bytes = from->part_stride_bytes;
    to.active = from->active;
    to.tokens = from->tokens;
    to.hidden = from->hidden;
    to.ranks = from->ranks;
    to.rank = from->rank;
    to.rows_cap = from->rows_cap;
    entry = entry_of_few_sms(*from);
    return launch(entry != nullptr ? entry : entry_of(from->format), shape_for(from->tokens * pieces, pieces, kBlocksOfSm, from->sms), stream, to);
}
