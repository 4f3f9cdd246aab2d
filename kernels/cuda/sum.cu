// sum on CUDA: a token's result rows from all ranks, in fp32 in rank order, into y.
//
// grid   a warp a token and 256 columns, 16 bytes a lane and part where rows are aligned
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

            if (loaded != 0 && column < a.hidden) {
                const unsigned char *from = rank == a.rank ? own : a.parts[rank] + row * a.part_stride_bytes;

                parts[i] = is_aligned(from, 16) ? load_8<format>(from, column) : load_8_anywhere<format>(from, column);
            }
            loaded &= loaded - 1;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch && left != 0; i++) {
            float values[8];

            unpack_8(parts[i], values);
#pragma unroll
            for (int32_t j = 0; j < 8; j++)
                sum[j] += values[j];
            left &= left - 1;
        }
    }
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

template <int32_t format> __global__ void __maxnreg__(format == FORMAT_F32 ? 64 : 56) sum_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kColumns - 1) / kColumns);
    int32_t column = walk.piece * kColumns + threadIdx.x % 32 * 8;
    uint64_t active;
    part_rows rows;

    rows = part_rows_of(a, a.tokens - 1 - walk.first);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    active = a.active_now != nullptr ? *a.active_now : a.active;
    if (a.failed != nullptr && *a.failed != 0) active = 0;
    // The last rows first: they came last, and some of them are in the L2 yet.
    for (uint32_t walked = walk.first; walked < a.tokens; walked += walk.step) {
        uint32_t token = a.tokens - 1 - walked;
        part_rows next = part_rows_of(a, token - walk.step);
        uint64_t left = __ballot_sync(~0u, rows.high >= 0);
        unsigned char *own = a.y + static_cast<int64_t>(token) * a.y_stride_bytes;
        float sum[8] = {};

        left = (left << 32 | __ballot_sync(~0u, rows.low >= 0)) & active;
        add_parts<format>(a, own, left, rows.low, rows.high, column, sum);
        if (column < a.hidden) store_8(own, format, column, sum);
        rows = next;
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
    for (int32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; row < a.rows_count; row += warps) {
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

} // namespace

extern "C" int32_t sum_cuda_load(void)
{
    cudaError_t st = load_kernel(zero_kernel);

    for (int32_t format : {FORMAT_F32, FORMAT_BF16, FORMAT_F16})
        if (st == cudaSuccess) st = load_sharing_kernel(entry_of(format));
    return st;
}

extern "C" int32_t sum_cuda(const struct sum_args *from, void *stream)
{
    int64_t pieces = (from->hidden + kColumns - 1) / kColumns;
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
    return launch(entry_of(from->format), shape_for(from->tokens * pieces, pieces, kBlocksOfSm, from->sms), stream, to);
}
