// combine on CUDA: a row's pairs, weighted and summed in fp32 in slot order, into one result row.
//
// grid   a warp a row and 256 columns, 16 bytes a lane and pair; a lane looks up the pair of its own slot
// bytes  every pair's row once, every result row once: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row8.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 256; // of a warp: 8 a lane
constexpr int kBatch = 2;     // pairs under way at once

struct args {
    out_slab slabs[KERNEL_RANKS_MAX];
    const unsigned char *pair_out;
    const int32_t *row_pair, *pair_row, *pairs_count;
    const float *pair_weight;
    int64_t pair_stride_bytes, pairs;
    int32_t slabs_count, rows_cap, hidden, top_k;
    float scale;
};

// Adds the pairs of the lanes in `left`, in their order.
template <int32_t format>
__device__ __forceinline__ void add_pairs(const args &a, uint32_t left, int32_t own_pair, int32_t column, float (&sum)[8])
{
    float own_weight = a.pair_weight == nullptr || (left >> threadIdx.x % 32 & 1) == 0 ? 1.0f : a.pair_weight[own_pair];

    while (left != 0) {
        eight<format> rows[kBatch] = {};
        uint32_t loaded = left;

#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            int32_t pair = __shfl_sync(~0u, own_pair, __ffs(static_cast<int>(loaded)) - 1);

            if (loaded != 0 && column < a.hidden) rows[i] = load_8<format>(a.pair_out + pair * a.pair_stride_bytes, column);
            loaded &= loaded - 1;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            float weight = __shfl_sync(~0u, own_weight, __ffs(static_cast<int>(left)) - 1);
            float values[8];

            unpack_8(rows[i], values);
            for (int32_t j = 0; left != 0 && j < 8; j++)
                sum[j] += weight * values[j];
            left &= left - 1;
        }
    }
}

__device__ void store_row(const out_slab &to, int32_t row, int32_t column, float (&sum)[8], float scale)
{
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        sum[i] *= scale;
    store_8(static_cast<unsigned char *>(to.rows) + row * to.row_stride_bytes, to.format, column, sum);
}

// Rows of the slab with the most; the same in every lane. What was planned for may be many times that.
__device__ __forceinline__ int32_t rows_most(const args &a)
{
    int32_t most = 0;

    for (int32_t index = threadIdx.x % 32; index < a.slabs_count; index += 32) {
        const out_slab &to = a.slabs[index];

        if (to.rows != nullptr) most = max(most, to.count != nullptr ? min(*to.count, to.cap) : to.cap);
    }
    for (int32_t step = 16; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, step));
    return min(most, a.rows_cap);
}

template <int32_t format> __global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ args a)
{
    int64_t pieces = (a.hidden + kColumns - 1) / kColumns;
    int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);
    int32_t lane = threadIdx.x % 32;
    int64_t rows;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    rows = a.row_pair == nullptr ? min(static_cast<int64_t>(*a.pairs_count), a.pairs)
                                 : static_cast<int64_t>(a.slabs_count) * rows_most(a);
    for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < rows * pieces; item += warps) {
        int64_t at = item / pieces;
        int32_t column = static_cast<int32_t>(item % pieces) * kColumns + lane * 8;
        // Slabs take turns: written one after another by all ranks at once, each in turn would be the end of every link.
        int32_t index = a.row_pair == nullptr ? 0 : static_cast<int32_t>(at % a.slabs_count);
        int32_t row = a.row_pair == nullptr ? a.pair_row[at] : static_cast<int32_t>(at / a.slabs_count);
        const out_slab &to = a.slabs[index];
        bool wanted = to.rows != nullptr && row >= 0 && row < to.cap && (a.row_pair == nullptr || to.count == nullptr || row < *to.count);
        int32_t pair = -1;
        float sum[8] = {};

        if (wanted && a.row_pair == nullptr && lane == 0) pair = static_cast<int32_t>(at);
        if (wanted && a.row_pair != nullptr && lane < a.top_k) pair = a.row_pair[(static_cast<int64_t>(index) * a.rows_cap + row) * a.top_k + lane];
        add_pairs<format>(a, __ballot_sync(~0u, pair >= 0 && pair < a.pairs), pair, column, sum);
        if (wanted && column < a.hidden) store_row(to, row, column, sum, a.scale);
    }
}

typedef void (*combine_entry)(args);

// The kernel for pairs of that format; NULL when there is none.
combine_entry entry_of(int32_t format)
{
    switch (format) {
    case FORMAT_F32:
        return combine_kernel<FORMAT_F32>;
    case FORMAT_BF16:
        return combine_kernel<FORMAT_BF16>;
    case FORMAT_F16:
        return combine_kernel<FORMAT_F16>;
    default:
        return nullptr;
    }
}

} // namespace

extern "C" int32_t combine_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (int32_t format : {FORMAT_F32, FORMAT_BF16, FORMAT_F16})
        if (st == cudaSuccess) st = load_kernel(entry_of(format));
    return st;
}

extern "C" int32_t combine_cuda(const struct combine_args *from, void *stream)
{
    int64_t pieces = (from->hidden + kColumns - 1) / kColumns;
    launch_shape shape = {1, kThreads, 0, LAUNCH_EARLY};
    args to = {};

    if (from->hidden % 8 != 0 || entry_of(from->pair_format) == nullptr) return cudaErrorInvalidValue;
    for (int32_t i = 0; i < from->slabs_count; i++)
        to.slabs[i] = from->slabs[i];
    to.pair_out = static_cast<const unsigned char *>(from->pair_out);
    to.row_pair = from->row_pair;
    to.pair_row = from->pair_row;
    to.pairs_count = from->pairs_count;
    to.pair_weight = from->pair_weight;
    to.pair_stride_bytes = from->pair_stride_bytes;
    to.pairs = from->pairs;
    to.slabs_count = from->slabs_count;
    to.rows_cap = from->rows_cap;
    to.hidden = from->hidden;
    to.top_k = from->top_k;
    to.scale = from->scale;
    // Counts live on the device: the grid covers the capacity.
    shape.blocks = grid_for(static_cast<int64_t>(from->slabs_count) * from->rows_cap * pieces, kThreads / 32);
    return launch(entry_of(from->pair_format), shape, stream, to);
}
