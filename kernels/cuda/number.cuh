// Numbers of activations in registers.

#ifndef MOXIE_KERNELS_CUDA_NUMBER_CUH
#define MOXIE_KERNELS_CUDA_NUMBER_CUH

#include "kernels/types.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <string.h>

__host__ __device__ __forceinline__ bool is_aligned(const void *at, int32_t bytes)
{
    return reinterpret_cast<uintptr_t>(at) % bytes == 0;
}

__device__ __forceinline__ float number_load(const void *numbers, int64_t index, int32_t format)
{
    if (format == FORMAT_F32) return static_cast<const float *>(numbers)[index];
    if (format == FORMAT_BF16) return __bfloat162float(static_cast<const __nv_bfloat16 *>(numbers)[index]);
    return __half2float(static_cast<const __half *>(numbers)[index]);
}

__device__ __forceinline__ void number_store(void *numbers, int64_t index, int32_t format, float value)
{
    if (format == FORMAT_F32)
        static_cast<float *>(numbers)[index] = value;
    else if (format == FORMAT_BF16)
        static_cast<__nv_bfloat16 *>(numbers)[index] = __float2bfloat16_rn(value);
    else
        static_cast<__half *>(numbers)[index] = __float2half_rn(value);
}

// Two numbers as 16 bits each, the first in the low half.
template <bool is_bf16> __device__ __forceinline__ uint32_t number_pack(float low, float high)
{
    uint32_t packed;

    if constexpr (is_bf16) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
        memcpy(&packed, &pair, sizeof packed);
    } else {
        __half2 pair = __floats2half2_rn(low, high);
        memcpy(&packed, &pair, sizeof packed);
    }
    return packed;
}

template <bool is_bf16> __device__ __forceinline__ float2 number_unpack(uint32_t packed)
{
    if constexpr (is_bf16) {
        // As numbers a word is split by three instructions where these two do.
        return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xffff0000u)};
    } else {
        __half2 pair;
        memcpy(&pair, &packed, sizeof packed);
        return __half22float2(pair);
    }
}

#endif
