// A group of 128 numbers as e4m3 with one f32 scale: a warp holds it, four a lane, in any order.

#ifndef MOXIE_KERNELS_CUDA_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_QUANTISE_CUH

#include <cuda_fp8.h>
#include <cuda_runtime.h>

constexpr int32_t kFp8Group = 128;
constexpr float kFp8Largest = 448.0f; // of e4m3

// As the CPU's: a NaN wins and stays.
__device__ __forceinline__ float larger(float a, float b)
{
    return !(b <= a) && a == a ? b : a;
}

// The same in every lane.
__device__ __forceinline__ float fp8_scale(const float (&values)[4])
{
    float magnitude = 0.0f;

#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        magnitude = larger(magnitude, fabsf(values[i]));
#pragma unroll
    for (int32_t bits = 16; bits > 0; bits /= 2)
        magnitude = larger(magnitude, __shfl_xor_sync(~0u, magnitude, bits));
    return magnitude / kFp8Largest;
}

__device__ __forceinline__ unsigned char fp8_code(float value, float scale)
{
    return scale == 0.0f ? 0 : __nv_cvt_float_to_fp8(value / scale, __NV_SATFINITE, __NV_E4M3);
}

#endif
