// The tiles that gate_up and down work through, and what a block keeps of them in shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_TILE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/types.h"

#include <cuda_runtime.h>

namespace {

constexpr int kRows = 128;      // weight rows of a tile
constexpr int kBlockRows = 64;  // of one wgmma
constexpr int kBlockBytes = kBlockRows * 128; // of a stage
constexpr int kColumns = 256;   // tokens of the largest tile
constexpr int kScaled = 128;    // of the largest fp8 one, which keeps its sums twice
constexpr int kRowBytes = 128;  // of a stage, for each weight row and token
constexpr int kStages = 4;
constexpr int kManyTokens = 64; // token rows of the larger box
constexpr int kLag = 2;         // stages between a gather's issue and its arrival
constexpr int kThreads = 384;
constexpr int kExpertsMax = 1024;

enum operand { OPERAND_BF16, OPERAND_F16, OPERAND_E4M3 };

// What a kernel is compiled for. e4m3 is multiplied 128 inputs at a time and scaled in fp32; its outputs are bf16.
template <operand type, bool is_gate_up_, bool rows_in_> struct product {
    static constexpr bool is_gate_up = is_gate_up_;
    static constexpr bool rows_in = rows_in_; // weights [E, K, N]
    static constexpr bool is_scaled = type == OPERAND_E4M3;
    static constexpr bool is_bf16 = type != OPERAND_F16; // of the outputs
    static constexpr int depth = is_scaled ? kRowBytes : kRowBytes / 2; // inputs of a stage
    static constexpr int columns = is_scaled ? kScaled : kColumns;
    static constexpr bool copies = is_gate_up || is_scaled; // the loading threads copy, besides the engine
};

struct alignas(1024) gemm_smem {
    unsigned char weights[kStages][kRows * kRowBytes];
    unsigned char tokens[kStages][kColumns * kRowBytes];
    float token_scale[kStages][kScaled];
    uint64_t full[kStages], empty[kStages];
    const unsigned char *token_row[kColumns]; // of the tile being loaded; NULL: zeros
    const float *scale_row[kScaled];          // and their scales, one per 128 inputs
    int32_t tile_first[kExpertsMax + 1];      // prefix sums
    int32_t expert_first[kExpertsMax + 1];    // pairs
};

struct gemm_slab {
    const unsigned char *rows, *scales;
    int64_t row_stride_bytes, scale_stride_bytes;
};

// Scales of fp8 weights: by block of 128 x 128, by row, or one or two an expert.
struct weight_scales {
    const float *scales;
    int64_t expert_stride, row_stride; // floats
    int32_t format;
    int32_t second_block; // block row of the half that lies second in w1
    int32_t halves;       // scales an expert, FORMAT_FP8_TENSOR
};

// What both products need on the device.
struct gemm_args {
    CUtensorMap weights;
    CUtensorMap tokens;      // down: boxes of 8 rows
    CUtensorMap many_tokens; // and of kManyTokens
    gemm_slab slabs[KERNEL_RANKS_MAX]; // gate_up; down: [0] holds mid's scales
    weight_scales scales;
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
    int32_t tokens; // 1..columns of the product
};

template <class P> __device__ __forceinline__ int32_t token_tiles(int32_t pairs)
{
    return (pairs + P::columns - 1) / P::columns;
}

// Every block makes the same two tables. Ends with a block barrier.
template <class P> __device__ __forceinline__ void make_tables(const gemm_args &args, gemm_smem &smem)
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
                tiles = token_tiles<P>(smem.expert_first[e + 1] - smem.expert_first[e]) * args.row_tiles;
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

template <class P> __device__ __forceinline__ tile find_tile(const gemm_args &args, const gemm_smem &smem, int32_t index)
{
    int32_t expert = last_at_most(smem.tile_first, args.experts, index);
    int32_t columns = token_tiles<P>(smem.expert_first[expert + 1] - smem.expert_first[expert]);
    int32_t within = index - smem.tile_first[expert];
    tile found;

    found.expert = expert;
    found.row_tile = within / columns;
    found.pair = smem.expert_first[expert] + within % columns * P::columns;
    found.tokens = min(P::columns, smem.expert_first[expert + 1] - found.pair);
    return found;
}

// N of the wgmma that a tile takes.
__device__ __forceinline__ int32_t tile_columns(int32_t tokens)
{
    return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 128 ? 128 : 256;
}

} // namespace

#endif
