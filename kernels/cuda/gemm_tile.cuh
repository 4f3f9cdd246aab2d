// The tiles that gate_up and down work through, and what a block keeps of them in shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_TILE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/types.h"

#include <cuda_runtime.h>

namespace {

constexpr int kRows = 128;      // weight rows of a tile
constexpr int kBlockRows = 64;  // of one wgmma
constexpr int kBlockBytes = kBlockRows * 128;
constexpr int kColumns = 256;   // tokens of the largest tile
constexpr int kDepth = 64;      // inputs of a stage: 128 bytes
constexpr int kStages = 4;
constexpr int kManyTokens = 64; // token rows of the larger box
constexpr int kLag = 2;         // stages between a gather's issue and its arrival
constexpr int kThreads = 384;
constexpr int kExpertsMax = 1024;

struct alignas(1024) gemm_smem {
    unsigned char weights[kStages][kRows * 128];
    unsigned char tokens[kStages][kColumns * 128];
    uint64_t full[kStages], empty[kStages];
    const unsigned char *token_row[kColumns]; // of the tile being loaded; NULL: zeros
    int32_t tile_first[kExpertsMax + 1];      // prefix sums
    int32_t expert_first[kExpertsMax + 1];    // pairs
};

struct gemm_slab {
    const unsigned char *rows;
    int64_t row_stride_bytes;
};

// What both products need on the device.
struct gemm_args {
    CUtensorMap weights;
    CUtensorMap tokens;      // down: boxes of 8 rows
    CUtensorMap many_tokens; // and of kManyTokens
    gemm_slab slabs[KERNEL_RANKS_MAX];
    const int32_t *expert_offset;
    const int32_t *pair_row;  // gate_up: gather
    const float *pair_weight; // gate_up: router weight on the input, or NULL
    const void *bias;
    int64_t bias_expert_stride_bytes;
    unsigned char *out;
    int64_t out_stride_bytes;
    int32_t bias_format;
    int32_t experts;
    int32_t depth;      // K
    int32_t outputs;    // columns of out: units, or hidden
    int32_t row_tiles;  // weight tiles of an expert
    int32_t rows_cap;
    int32_t order;      // enum row_order of w1
    int32_t activation;
    float alpha, beta, limit;
};

struct tile {
    int32_t expert;
    int32_t row_tile;
    int32_t pair;   // first
    int32_t tokens; // 1..kColumns
};

__device__ __forceinline__ int32_t token_tiles(int32_t pairs)
{
    return (pairs + kColumns - 1) / kColumns;
}

// Every block makes the same two tables. Ends with a block barrier.
__device__ __forceinline__ void make_tables(const gemm_args &args, gemm_smem &smem)
{
    for (int32_t e = threadIdx.x; e <= args.experts; e += kThreads)
        smem.expert_first[e] = args.expert_offset[e];
    __syncthreads();
    if (threadIdx.x < 32) {
        int32_t sum = 0;

        for (int32_t base = 0; base < args.experts; base += 32) {
            int32_t e = base + threadIdx.x;
            int32_t tiles = 0;

            if (e < args.experts)
                tiles = token_tiles(smem.expert_first[e + 1] - smem.expert_first[e]) * args.row_tiles;
            for (int32_t step = 1; step < 32; step *= 2) {
                int32_t before = __shfl_up_sync(~0u, tiles, step);

                if (static_cast<int32_t>(threadIdx.x) >= step) tiles += before;
            }
            if (e < args.experts) smem.tile_first[e + 1] = sum + tiles;
            sum += __shfl_sync(~0u, tiles, 31);
        }
        if (threadIdx.x == 0) smem.tile_first[0] = 0;
    }
    __syncthreads();
}

__device__ __forceinline__ tile find_tile(const gemm_args &args, const gemm_smem &smem, int32_t index)
{
    int32_t low = 0, high = args.experts - 1;
    int32_t columns, within;
    tile found;

    while (low < high) {
        int32_t middle = (low + high + 1) / 2;

        if (smem.tile_first[middle] <= index)
            low = middle;
        else
            high = middle - 1;
    }
    columns = token_tiles(smem.expert_first[low + 1] - smem.expert_first[low]);
    within = index - smem.tile_first[low];
    found.expert = low;
    found.row_tile = within / columns;
    found.pair = smem.expert_first[low] + within % columns * kColumns;
    found.tokens = min(kColumns, smem.expert_first[low + 1] - found.pair);
    return found;
}

// N of the wgmma that a tile takes.
__device__ __forceinline__ int32_t tile_columns(int32_t tokens)
{
    return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 128 ? 128 : 256;
}

} // namespace

#endif
