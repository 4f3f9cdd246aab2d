// Groups of 128 numbers as e4m3 with one f32 scale each: half a warp holds one, eight in a row a lane.

#ifndef MOXIE_KERNELS_CUDA_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_QUANTISE_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/quantise.h"

#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <math.h>

constexpr int32_t kFp8Group = 128;
constexpr int32_t kFp8Lane = 8;             // numbers of a lane
constexpr int32_t kFp8Warp = 32 * kFp8Lane; // of a warp

// The largest magnitude of a group, the same in all its lanes. Without their signs floats are in the order of their bits, and a NaN
// is the largest, as the CPU has it.
__device__ __forceinline__ float fp8_largest(const float (&values)[kFp8Lane])
{
    uint32_t magnitude = 0;

#pragma unroll
    for (int32_t i = 0; i < kFp8Lane; i++)
        magnitude = max(magnitude, __float_as_uint(values[i]) & 0x7fffffffu);
#pragma unroll
    for (int32_t step = kFp8Group / kFp8Lane / 2; step > 0; step /= 2)
        magnitude = max(magnitude, __shfl_xor_sync(~0u, magnitude, step));
    return __uint_as_float(magnitude);
}

// Of 16-bit numbers as they lie in memory, of which a word holds two, the largest magnitudes of the first ones and of the second ones.
__device__ __forceinline__ uint32_t largest_two(const uint4 &eight)
{
    const uint32_t magnitudes = 0x7fff7fffu;

    return __vmaxu2(__vmaxu2(eight.x & magnitudes, eight.y & magnitudes), __vmaxu2(eight.z & magnitudes, eight.w & magnitudes));
}

// The same of a group of them.
__device__ __forceinline__ float fp8_largest(const uint4 &eight, bool is_bf16)
{
    const uint32_t two = largest_two(eight);
    uint32_t most = max(two & 0xffffu, two >> 16);

#pragma unroll
    for (int32_t step = kFp8Group / kFp8Lane / 2; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, step));
    return is_bf16 ? number_unpack<true>(most).x : number_unpack<false>(most).x;
}

__device__ __forceinline__ uint32_t fp8_pack(const float *q)
{
    return __nv_cvt_float2_to_fp8x2({q[0], q[1]}, __NV_SATFINITE, __NV_E4M3) |
           static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2({q[2], q[3]}, __NV_SATFINITE, __NV_E4M3)) << 16;
}

// What the numbers of a group are multiplied by, and the codes of that in turn; both 0 where the group has no scale.
struct fp8_scaling {
    float scale, inverse;
};

// The quotients largest / 448 and 448 / largest, rounded as divisions round them, without their branches, which would keep several of them
// from being under way at once: a reciprocal that is rounded right, or good to an ulp and improved once, and the exact remainder of the
// product with it. Right for every magnitude (`kernel_twin`). Scaled by 2^-10, no reciprocal is too small.
__device__ __forceinline__ fp8_scaling fp8_scaling_of(float largest)
{
    const float by_largest = 1.0f / FP8_LARGEST, small = largest * 0x1p-10f, above = FP8_LARGEST * 0x1p-10f;
    const float approx = reciprocal_approx(small), reciprocal = fmaf(fmaf(-small, approx, 1.0f), approx, approx);
    const float scale = largest * by_largest, inverse = above * reciprocal;
    fp8_scaling to = {fmaf(fmaf(-FP8_LARGEST, scale, largest), by_largest, scale), fmaf(fmaf(-small, inverse, above), reciprocal, inverse)};

    if (largest < FP8_SMALLEST) to = {};
    if (largest == INFINITY) to = {largest, 0.0f};
    return to;
}

// Of several groups of each half warp, shared out among its lanes.
template <int count> __device__ __forceinline__ void fp8_scalings_of(const float (&largest)[count], fp8_scaling (&to)[count])
{
    const int32_t lane = threadIdx.x % 32;
    float own = largest[0];
    fp8_scaling scaling;

    static_assert((count & (count - 1)) == 0 && count <= kFp8Group / kFp8Lane);
#pragma unroll
    for (int32_t i = 1; i < count; i++)
        if (lane % count == i) own = largest[i];
    scaling = fp8_scaling_of(own);
#pragma unroll
    for (int32_t i = 0; i < count; i++)
        to[i] = {__shfl_sync(~0u, scaling.scale, (lane & 16) + i), __shfl_sync(~0u, scaling.inverse, (lane & 16) + i)};
}

// Eight numbers as e4m3, the first in the lowest byte.
__device__ __forceinline__ uint2 fp8_codes(const float (&values)[kFp8Lane], float inverse)
{
    float scaled[kFp8Lane];

#pragma unroll
    for (int32_t i = 0; i < kFp8Lane; i++)
        scaled[i] = values[i] * inverse;
    return {fp8_pack(scaled), fp8_pack(scaled + 4)};
}

// And the scale of their group.
struct fp8_eight {
    uint2 codes;
    float scale;
};

__device__ __forceinline__ fp8_eight fp8_code(const float (&values)[kFp8Lane], float largest)
{
    const fp8_scaling by = fp8_scaling_of(largest);

    return {fp8_codes(values, by.inverse), by.scale};
}

__device__ __forceinline__ void unpack_8(const uint4 &eight, bool is_bf16, float (&to)[kFp8Lane])
{
    uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};

#pragma unroll
    for (int32_t i = 0; i < 4; i++) {
        float2 two = is_bf16 ? number_unpack<true>(words[i]) : number_unpack<false>(words[i]);

        to[i * 2] = two.x;
        to[i * 2 + 1] = two.y;
    }
}

// Of a row at a multiple of eight numbers.
__device__ __forceinline__ void load_8(const unsigned char *row, int32_t column, int32_t format, float (&to)[kFp8Lane])
{
    if (format == FORMAT_F32) {
        const uint4 *eight = reinterpret_cast<const uint4 *>(row + column * 4);
        uint4 held[2] = {eight[0], eight[1]};

        memcpy(to, held, sizeof to);
    } else {
        unpack_8(*reinterpret_cast<const uint4 *>(row + column * 2), format == FORMAT_BF16, to);
    }
}

#endif
