// The instructions of sm_90a on numbers in registers, for ptx.cuh, which alone includes this.

#ifndef MOXIE_KERNELS_CUDA_PTX_NUMBER_CUH
#define MOXIE_KERNELS_CUDA_PTX_NUMBER_CUH

#include <stdint.h>

// NaN if one is.
__device__ __forceinline__ float min_nan(float x, float y)
{
    float least;

    asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
    return least;
}

__device__ __forceinline__ float max_nan(float x, float y)
{
    float most;

    asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
    return most;
}

// Four codes as fp16, which holds each: two and two.
__device__ __forceinline__ void e4m3_to_f16(uint32_t codes, uint32_t &low, uint32_t &high)
{
    asm("{\n\t.reg .b16 l, h;\n\t"
        "mov.b32 {l, h}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, l;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
        : "=r"(low), "=r"(high)
        : "r"(codes));
}

// Four bytes of the eight that `low` and `high` have, each as four bits of `by` say: which, and with the highest of the four set, whether
// that byte's highest bit is, in all eight.
__device__ __forceinline__ uint32_t bytes_by(uint32_t low, uint32_t high, uint32_t by)
{
    uint32_t bytes;

    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(by));
    return bytes;
}

// The lower word of both, shifted right by less than 32 bits.
__device__ __forceinline__ uint32_t shifted_by(uint32_t low, uint32_t high, uint32_t bits)
{
    uint32_t word;

    asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(word) : "r"(low), "r"(high), "r"(bits));
    return word;
}

// Of two bf16 numbers each, x * y + z and x * y. Numbers below the normal ones count.
__device__ __forceinline__ uint32_t bf16_fma(uint32_t x, uint32_t y, uint32_t z)
{
    uint32_t sum;

    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(x), "r"(y), "r"(z));
    return sum;
}

__device__ __forceinline__ uint32_t bf16_multiply(uint32_t x, uint32_t y)
{
    uint32_t product;

    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(x), "r"(y));
    return product;
}

// One of a word's two 16-bit numbers, twice. An instruction that takes it reads the word itself; bytes_by would be one more.
template <bool is_high> __device__ __forceinline__ uint32_t twice(uint32_t pair)
{
    uint32_t number;

    if constexpr (is_high)
        asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {h, h};\n\t}" : "=r"(number) : "r"(pair));
    else
        asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %1;\n\tmov.b32 %0, {l, l};\n\t}" : "=r"(number) : "r"(pair));
    return number;
}

// 2^x, with two units of the last place.
__device__ __forceinline__ float exp2_approx(float x)
{
    float power;

    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x, with one.
__device__ __forceinline__ float reciprocal_approx(float x)
{
    float inverse;

    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(x));
    return inverse;
}

#endif
