// Scales of fp8 weights, for two weight rows at a time. Included by gemm.cu and gemm_many.cuh.

#ifndef MOXIE_KERNELS_CUDA_GEMM_SCALE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_SCALE_CUH

#include "kernels/cuda/gemm_tile.cuh"

namespace {

// x of row r, y of row r + 8 of sixteen: gate and up, in the order they lie in memory, or two outputs, which lie in one block.
template <bool is_gate_up> struct row_scales {
    const float *low; // by block of 128 inputs; NULL: all 1
    int32_t high;     // of the other row, after `low`
    float2 whole;     // of the whole row

    __device__ __forceinline__ float2 of_block(int32_t block) const
    {
        float scale;

        if (low == nullptr) return {1.0f, 1.0f};
        scale = __ldg(low + block);
        return {scale, is_gate_up ? __ldg(low + block + high) : scale};
    }
};

// Rows of the matrix, and of its blocks.
struct two_rows {
    int32_t low, high, low_block, high_block;
};

// Those at r and r + 8 of the sixteen from `first` of the tile on.
template <class P> __device__ __forceinline__ two_rows find_rows_of(const gemm_args &args, const tile &t, int32_t first, int32_t r)
{
    first += t.row_tile * P::rows;
    if (P::is_gate_up && args.order != ORDER_PLAIN) {
        int32_t unit = min(first / 2 + r, args.outputs - 1);
        bool interleaved = args.order == ORDER_INTERLEAVED;

        return {interleaved ? 2 * unit : unit, interleaved ? 2 * unit + 1 : args.outputs + unit, unit / 128,
                args.scales.second_block + unit / 128};
    }
    first = min(first + r, args.outputs - 1);
    return {first, min(first + 8, args.outputs - 1), first / 128, min(first + 8, args.outputs - 1) / 128};
}

template <class P> __device__ __forceinline__ row_scales<P::is_gate_up> find_scales(const gemm_args &args, const tile &t, const two_rows &rows)
{
    const weight_scales &from = args.scales;
    const float *scales = from.scales + t.expert * from.expert_stride;
    bool up_first = args.order == ORDER_UP_GATE;

    if (from.format == FORMAT_FP8_BLOCK128)
        return {scales + rows.low_block * from.row_stride, (rows.high_block - rows.low_block) * from.row_stride, {1.0f, 1.0f}};
    if (from.format == FORMAT_FP8_CHANNEL) return {nullptr, 0, {scales[rows.low], scales[rows.high]}};
    if (from.halves == 1 || !P::is_gate_up) return {nullptr, 0, {scales[0], scales[0]}};
    return {nullptr, 0, {scales[up_first], scales[!up_first]}};
}

} // namespace

#endif
