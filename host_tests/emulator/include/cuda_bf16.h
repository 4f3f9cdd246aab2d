// bfloat16 as bits.

#ifndef MOXIE_EMULATOR_CUDA_BF16_H
#define MOXIE_EMULATOR_CUDA_BF16_H

#include "cuda_runtime.h"
#include "host_tests/emulator/numbers.h"

struct __nv_bfloat16 {
    uint16_t bits;
};
struct __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

static inline float __bfloat162float(__nv_bfloat16 value)
{
    return emulator::from_bf16(value.bits);
}
static inline __nv_bfloat16 __float2bfloat16_rn(float value)
{
    return {emulator::to_bf16(value)};
}
static inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high)
{
    return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
static inline float2 __bfloat1622float2(__nv_bfloat162 pair)
{
    return {__bfloat162float(pair.x), __bfloat162float(pair.y)};
}

#endif
