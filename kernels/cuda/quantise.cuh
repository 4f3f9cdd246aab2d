// A group of 128 numbers as e4m3 with one f32 scale: a warp holds it, four in a row a lane.

#ifndef MOXIE_KERNELS_CUDA_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_QUANTISE_CUH

#include "kernels/cuda/number.cuh"

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

// The first number in the lowest byte.
__device__ __forceinline__ uint32_t fp8_codes(const float (&values)[4], float scale)
{
    uint32_t codes = 0;

#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        codes |= scale == 0.0f ? 0 : static_cast<uint32_t>(__nv_cvt_float_to_fp8(values[i] / scale, __NV_SATFINITE, __NV_E4M3)) << (8 * i);
    return codes;
}

// Of a row at a multiple of four numbers.
__device__ __forceinline__ void load_4(const unsigned char *row, int32_t column, int32_t format, float (&to)[4])
{
    if (format == FORMAT_F32) {
        uint4 four = *reinterpret_cast<const uint4 *>(row + column * 4);

        memcpy(to, &four, sizeof to);
    } else {
        uint64_t four = *reinterpret_cast<const uint64_t *>(row + column * 2);
        uint32_t words[2] = {static_cast<uint32_t>(four), static_cast<uint32_t>(four >> 32)};

#pragma unroll
        for (int32_t i = 0; i < 2; i++) {
            float2 two = format == FORMAT_BF16 ? number_unpack<true>(words[i]) : number_unpack<false>(words[i]);

            to[i * 2] = two.x;
            to[i * 2 + 1] = two.y;
        }
    }
}

#endif
