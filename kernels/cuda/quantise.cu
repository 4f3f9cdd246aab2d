// quantise on CUDA: rows of 16- or 32-bit numbers to e4m3 with an f32 scale per 128.
//
// grid   a warp a group of 128 numbers, four a lane
// bytes  the rows once, half or a quarter of them written: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"

#include <cuda_fp8.h>

namespace {

constexpr int kThreads = 256;
constexpr int kGroup = 128;
constexpr float kLargest = 448.0f; // of e4m3

// As the CPU's: a NaN wins and stays.
__device__ __forceinline__ float larger(float a, float b)
{
    return !(b <= a) && a == a ? b : a;
}

__device__ __forceinline__ void quantise_group(const quantise_args &a, int64_t row, int32_t first)
{
    int64_t x_row = a.x_row != nullptr ? a.x_row[row] : row;
    const unsigned char *from = static_cast<const unsigned char *>(a.x) + x_row * a.x_stride_bytes;
    unsigned char *to = static_cast<unsigned char *>(a.rows) + row * a.row_stride_bytes;
    int32_t lane = threadIdx.x % 32;
    float values[4], magnitude = 0.0f, scale;

#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        int32_t column = first + i * 32 + lane;

        values[i] = column < a.columns ? number_load(from, column, a.x_format) : 0.0f;
        magnitude = larger(magnitude, fabsf(values[i]));
    }
#pragma unroll
    for (int32_t bits = 16; bits > 0; bits /= 2)
        magnitude = larger(magnitude, __shfl_xor_sync(~0u, magnitude, bits));
    scale = magnitude / kLargest;
#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        int32_t column = first + i * 32 + lane;

        if (column < a.columns)
            to[column] = scale == 0.0f ? 0 : __nv_cvt_float_to_fp8(values[i] / scale, __NV_SATFINITE, __NV_E4M3);
    }
    if (lane == 0) {
        unsigned char *scales = static_cast<unsigned char *>(a.scales) + row * a.scale_stride_bytes;

        reinterpret_cast<float *>(scales)[first / kGroup] = scale;
    }
}

__global__ void __launch_bounds__(kThreads) quantise_kernel(const __grid_constant__ quantise_args a)
{
    int64_t rows = a.count == nullptr ? a.rows_count : min(max(*a.count, 0), a.rows_count);
    int64_t groups = (a.columns + kGroup - 1) / kGroup;
    int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);

    for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < rows * groups; item += warps)
        quantise_group(a, item / groups, static_cast<int32_t>(item % groups) * kGroup);
}

} // namespace

extern "C" int32_t quantise_cuda_load(void)
{
    return load_kernel(quantise_kernel);
}

extern "C" int32_t quantise_cuda(const struct quantise_args *args, void *stream)
{
    int64_t groups = (args->columns + kGroup - 1) / kGroup;

    if (args->format != FORMAT_FP8_BLOCK128) return cudaErrorInvalidValue;
    if (args->rows_count == 0) return cudaSuccess;
    return launch(quantise_kernel, {grid_for(args->rows_count * groups, kThreads / 32), kThreads, 0, LAUNCH_AFTER}, stream, *args);
}
