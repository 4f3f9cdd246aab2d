// A group of 128 numbers as e4m3 with one f32 scale: a warp holds it, four in a row a lane.

#ifndef MOXIE_KERNELS_CUDA_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_QUANTISE_CUH

#include "kernels/cuda/number.cuh"

#include <cuda_fp8.h>
#include <cuda_runtime.h>

constexpr int32_t kFp8Group = 128;
constexpr float kFp8Largest = 448.0f; // of e4m3

// The same in every lane. Without their signs floats are in the order of their bits, and a NaN is the largest, as the CPU has it.
__device__ __forceinline__ float fp8_scale(const float (&values)[4])
{
    uint32_t magnitude = 0;

#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        magnitude = max(magnitude, __float_as_uint(values[i]) & 0x7fffffffu);
    return __uint_as_float(__reduce_max_sync(~0u, magnitude)) / kFp8Largest;
}

// values / scale as e4m3, the first in the lowest byte, rounded as a division rounds, without one for each number and without a
// branch: a quotient by the rounded inverse, and what remains of the value (Markstein). A factor, exact, keeps both among the
// normal numbers; a quotient that it would change is far under the smallest code.
__device__ __forceinline__ uint32_t fp8_codes(const float (&values)[4], float scale)
{
    float factor = scale < 0x1p-80f ? 0x1p100f : scale > 0x1p80f ? 0x1p-100f : 1.0f;
    float divisor = scale * factor, inverse = 1.0f / divisor;
    bool is_finite = divisor < INFINITY;
    uint32_t codes;
    float q[4];

#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        float value = values[i] * factor, quotient = value * inverse;
        float corrected = __fmaf_rn(__fmaf_rn(-quotient, divisor, value), inverse, quotient);

        q[i] = copysignf(is_finite ? corrected : quotient, value); // the remainder of -0 is 0, and their sum too
    }
    codes = __nv_cvt_float2_to_fp8x2({q[0], q[1]}, __NV_SATFINITE, __NV_E4M3) |
            static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2({q[2], q[3]}, __NV_SATFINITE, __NV_E4M3)) << 16;
    return scale == 0.0f ? 0 : codes;
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
