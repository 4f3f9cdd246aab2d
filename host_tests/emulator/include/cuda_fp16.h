// float16 as bits.

#ifndef MOXIE_EMULATOR_CUDA_FP16_H
#define MOXIE_EMULATOR_CUDA_FP16_H

#include "cuda_runtime.h"
#include "host_tests/emulator/numbers.h"

struct __half {
    uint16_t bits;
};
struct __half2 {
    __half x, y;
};

static inline float __half2float(__half value)
{
    return emulator::from_f16(value.bits);
}
static inline __half __float2half_rn(float value)
{
    return {emulator::to_f16(value)};
}
static inline __half2 __floats2half2_rn(float low, float high)
{
    return {__float2half_rn(low), __float2half_rn(high)};
}
static inline float2 __half22float2(__half2 pair)
{
    return {__half2float(pair.x), __half2float(pair.y)};
}

#endif
