// Groups of 128 numbers as e4m3 with one f32 scale each: half a warp holds one, eight in a row a lane.

#ifndef MOXIE_KERNELS_CUDA_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_QUANTISE_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cuda_fp8.h>
#include <cuda_runtime.h>

constexpr int32_t kFp8Group = 128;
constexpr float kFp8Largest = 448.0f; // of e4m3

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

// The same of 16-bit numbers as they lie in memory: a word holds two.
__device__ __forceinline__ float fp8_largest(const uint4 &eight, bool is_bf16)
{
    const uint32_t magnitudes = 0x7fff7fffu;
    uint32_t two = __vmaxu2(__vmaxu2(eight.x & magnitudes, eight.y & magnitudes), __vmaxu2(eight.z & magnitudes, eight.w & magnitudes));
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

// Eight numbers as e4m3, the first in the lowest byte, and the scale of their group.
struct fp8_eight {
    uint2 codes;
    float scale;
};

// Whether scale, inverse and what remains of a quotient are normal numbers, so that fp8_code_plain is right. A NaN is not.
__device__ __forceinline__ bool fp8_is_plain(float largest)
{
    return largest == 0.0f || (largest >= 0x1p-70f && largest <= 0x1p90f);
}

// values * factor / divisor, rounded as a division rounds without one: a quotient by the inverse, and what remains of the value
// (Markstein). What a code is decided by has so few digits that the inverse need not be the nearest.
__device__ __forceinline__ uint2 fp8_quotients(const float (&values)[kFp8Lane], float factor, float divisor, float inverse)
{
    float q[kFp8Lane];

#pragma unroll
    for (int32_t i = 0; i < kFp8Lane; i++) {
        float value = values[i] * factor, quotient = value * inverse;

        // The remainder with its sign turned, so that -0 stays -0: nothing remains of it, times -inverse that is -0, too.
        q[i] = __fmaf_rn(__fmaf_rn(quotient, divisor, -value), -inverse, quotient);
    }
    return {fp8_pack(q), fp8_pack(q + 4)};
}

// With scale = largest / kFp8Largest, as a division rounds too.
__device__ __forceinline__ fp8_eight fp8_code_plain(const float (&values)[kFp8Lane], float largest)
{
    const float part = 1.0f / kFp8Largest;
    float first = largest * part, scale = __fmaf_rn(__fmaf_rn(-first, kFp8Largest, largest), part, first);
    uint2 codes = fp8_quotients(values, 1.0f, scale, reciprocal_approx(scale));

    if (largest == 0.0f) return {{0, 0}, 0.0f};
    return {codes, scale};
}

// What the numbers of a group are divided by. A factor, exact, keeps scale and inverse among the normal numbers; a quotient that it
// would change is far under the smallest code.
struct fp8_divisor {
    float scale, factor, divisor, inverse;
};

__device__ __forceinline__ fp8_divisor fp8_divisor_of(float largest)
{
    float scale = largest / kFp8Largest, factor = scale < 0x1p-80f ? 0x1p100f : scale > 0x1p80f ? 0x1p-100f : 1.0f;
    float divisor = scale * factor;

    // By infinity a quotient is 0 or NaN already, and nothing remains.
    return {scale, factor, divisor < INFINITY ? divisor : 0.0f, 1.0f / divisor};
}

// The codes of any numbers.
__device__ __forceinline__ uint2 fp8_codes(const float (&values)[kFp8Lane], const fp8_divisor &by)
{
    uint2 codes = fp8_quotients(values, by.factor, by.divisor, by.inverse);

    return by.scale == 0.0f ? uint2{0, 0} : codes;
}

__device__ __forceinline__ fp8_eight fp8_code(const float (&values)[kFp8Lane], float largest)
{
    const fp8_divisor by = fp8_divisor_of(largest);

    return {fp8_codes(values, by), by.scale};
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
