// quantise on CUDA: rows of 16- or 32-bit numbers to e4m3 with an f32 scale per 128.
//
// grid   a warp a group of 128 numbers, four a lane
// bytes  the rows once, half or a quarter of them written: bound by memory

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/quantise.cuh"

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ void quantise_group(const quantise_args &a, int64_t row, int32_t first)
{
    int64_t x_row = a.x_row != nullptr ? a.x_row[row] : row;
    const unsigned char *from = static_cast<const unsigned char *>(a.x) + x_row * a.x_stride_bytes;
    unsigned char *to = static_cast<unsigned char *>(a.rows) + row * a.row_stride_bytes;
    int32_t lane = threadIdx.x % 32;
    float values[4], scale;

#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        int32_t column = first + i * 32 + lane;

        values[i] = column < a.columns ? number_load(from, column, a.x_format) : 0.0f;
    }
    scale = fp8_scale(values);
#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        int32_t column = first + i * 32 + lane;

        if (column < a.columns) to[column] = fp8_code(values[i], scale);
    }
    if (lane == 0) {
        unsigned char *scales = static_cast<unsigned char *>(a.scales) + row * a.scale_stride_bytes;

        reinterpret_cast<float *>(scales)[first / kFp8Group] = scale;
    }
}

__global__ void __launch_bounds__(kThreads) quantise_kernel(const __grid_constant__ quantise_args a)
{
    int64_t rows = a.count == nullptr ? a.rows_count : min(max(*a.count, 0), a.rows_count);
    int64_t groups = (a.columns + kFp8Group - 1) / kFp8Group;
    int64_t warps = static_cast<int64_t>(gridDim.x) * (kThreads / 32);

    for (int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32; item < rows * groups; item += warps)
        quantise_group(a, item / groups, static_cast<int32_t>(item % groups) * kFp8Group);
}

} // namespace

extern "C" int32_t quantise_cuda_load(void)
{
    return load_kernel(quantise_kernel);
}

extern "C" int32_t quantise_cuda(const struct quantise_args *args, void *stream)
{
    int64_t groups = (args->columns + kFp8Group - 1) / kFp8Group;

    if (args->format != FORMAT_FP8_BLOCK128) return cudaErrorInvalidValue;
    if (args->rows_count == 0) return cudaSuccess;
    return launch(quantise_kernel, {grid_for(args->rows_count * groups, kThreads / 32), kThreads, 0, LAUNCH_AFTER}, stream, *args);
}
