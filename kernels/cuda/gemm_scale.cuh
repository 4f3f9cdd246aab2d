// Scales of fp8 weights, for the two weight rows of a thread. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_SCALE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_SCALE_CUH

#include "kernels/cuda/gemm_tile.cuh"

namespace {

// x of row r, y of row r + 8 of the warp's sixteen: gate and up, in the order they lie in memory, or two outputs.
struct row_scales {
    const float *low, *high; // by block of 128 inputs; NULL: all 1
    float2 whole;            // of the whole row

    __device__ __forceinline__ float2 of_block(int32_t block) const
    {
        if (low == nullptr) return {1.0f, 1.0f};
        return {low[block], high[block]};
    }
};

// Rows of the matrix, and of its blocks.
struct two_rows {
    int32_t low, high, low_block, high_block;
};

template <class P> __device__ __forceinline__ two_rows rows_of_thread(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
    int32_t first = t.row_tile * kRows + warpgroup * kBlockRows + warp * 16;

    if (P::is_gate_up && args.order != ORDER_PLAIN) {
        int32_t unit = min(first / 2 + lane / 4, args.outputs - 1);
        bool interleaved = args.order == ORDER_INTERLEAVED;

        return {interleaved ? 2 * unit : unit, interleaved ? 2 * unit + 1 : args.outputs + unit, unit / 128,
                args.scales.second_block + unit / 128};
    }
    first = min(first + lane / 4, args.outputs - 1);
    return {first, min(first + 8, args.outputs - 1), first / 128, min(first + 8, args.outputs - 1) / 128};
}

template <class P> __device__ __forceinline__ row_scales find_row_scales(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    two_rows rows = rows_of_thread<P>(args, t, warpgroup);
    const weight_scales &from = args.scales;
    const float *scales = from.scales + t.expert * from.expert_stride;
    bool up_first = args.order == ORDER_UP_GATE;

    if (from.format == FORMAT_FP8_BLOCK128)
        return {scales + rows.low_block * from.row_stride, scales + rows.high_block * from.row_stride, {1.0f, 1.0f}};
    if (from.format == FORMAT_FP8_CHANNEL) return {nullptr, nullptr, {scales[rows.low], scales[rows.high]}};
    if (from.halves == 1 || !P::is_gate_up) return {nullptr, nullptr, {scales[0], scales[0]}};
    return {nullptr, nullptr, {scales[up_first], scales[!up_first]}};
}

} // namespace

#endif
