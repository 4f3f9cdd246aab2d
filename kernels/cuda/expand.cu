// expand on CUDA: a pair's row and its weight to where the layout wants them.
//
// grid   a warp a pair, 16 bytes a lane; then a thread a position for the index
// bytes  every pair's row read and written once: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/search.cuh"

namespace {

constexpr int kThreads = 256;

struct source {
    const unsigned char *rows;
    int64_t row_stride_bytes;
};

struct args {
    source slabs[KERNEL_RANKS_MAX];
    const int32_t *expert_offset, *pair_row, *row_pair;
    const float *pair_weight;
    unsigned char *rows;
    float *weights;
    int32_t *counts, *row_index;
    int64_t row_stride_bytes, positions;
    int32_t experts, slabs_count, rows_cap, rows_per_expert, masked, row_pieces; // row_pieces: of 16 bytes
};

// Where a pair's row goes, -1 when its expert is full.
__device__ int64_t expanded_row(const args &a, int32_t pair)
{
    int32_t expert, row;

    if (!a.masked) return pair;
    expert = last_at_most(a.expert_offset, a.experts, pair);
    row = pair - a.expert_offset[expert];
    return row < a.rows_per_expert ? expert * static_cast<int64_t>(a.rows_per_expert) + row : -1;
}

__device__ void copy_pair(const args &a, int32_t pair)
{
    int64_t to = expanded_row(a, pair);
    int32_t flat = a.pair_row[pair], lane = threadIdx.x % 32;
    const unsigned char *from;

    if (to < 0 || flat < 0 || flat / a.rows_cap >= a.slabs_count) return;
    from = a.slabs[flat / a.rows_cap].rows + flat % a.rows_cap * a.slabs[flat / a.rows_cap].row_stride_bytes;
    for (int32_t i = lane; i < a.row_pieces; i += 32)
        reinterpret_cast<uint4 *>(a.rows + to * a.row_stride_bytes)[i] = reinterpret_cast<const uint4 *>(from)[i];
    if (lane == 0) a.weights[to] = a.pair_weight[pair];
}

__device__ int32_t count_of(const args &a, int32_t expert)
{
    if (!a.masked) return a.expert_offset[expert];
    return min(a.expert_offset[expert + 1] - a.expert_offset[expert], a.rows_per_expert);
}

__global__ void __launch_bounds__(kThreads) expand_kernel(const __grid_constant__ args a)
{
    int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    int64_t threads = static_cast<int64_t>(gridDim.x) * kThreads;
    int32_t pairs = a.expert_offset[a.experts];

    for (int64_t pair = thread / 32; pair < pairs; pair += threads / 32)
        copy_pair(a, static_cast<int32_t>(pair));
    for (int64_t i = thread; i < a.positions; i += threads) {
        int32_t pair = a.row_pair[i];

        a.row_index[i] = pair < 0 || pair >= pairs ? -1 : static_cast<int32_t>(expanded_row(a, pair));
    }
    for (int64_t e = thread; e < a.experts + !a.masked; e += threads)
        a.counts[e] = count_of(a, static_cast<int32_t>(e));
}

} // namespace

extern "C" int32_t expand_cuda_load(void)
{
    return load_kernel(expand_kernel);
}

extern "C" int32_t expand_cuda(const struct expand_args *from, void *stream)
{
    args to = {};

    if (from->hidden % 8 != 0 || from->scales != nullptr) return cudaErrorInvalidValue;
    for (int32_t i = 0; i < from->slabs_count; i++) {
        const row_slab &slab = from->slabs[i];

        if (slab.format != FORMAT_BF16 && slab.format != FORMAT_F16) return cudaErrorInvalidValue;
        to.slabs[i] = {static_cast<const unsigned char *>(slab.rows), slab.row_stride_bytes};
    }
    to.expert_offset = from->expert_offset;
    to.pair_row = from->pair_row;
    to.row_pair = from->row_pair;
    to.pair_weight = from->pair_weight;
    to.rows = static_cast<unsigned char *>(from->rows);
    to.weights = from->weights;
    to.counts = from->counts;
    to.row_index = from->row_index;
    to.row_stride_bytes = from->row_stride_bytes;
    to.positions = static_cast<int64_t>(from->slabs_count) * from->rows_cap * from->top_k;
    to.experts = from->experts;
    to.slabs_count = from->slabs_count;
    to.rows_cap = from->rows_cap;
    to.rows_per_expert = from->rows_per_expert;
    to.masked = from->masked;
    to.row_pieces = from->hidden / 8;
    return launch(expand_kernel, {grid_for(to.positions, kThreads / 32), kThreads, 0, LAUNCH_AFTER}, stream, to);
}
