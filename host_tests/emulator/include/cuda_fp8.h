// e4m3 as bits.

#ifndef MOXIE_EMULATOR_CUDA_FP8_H
#define MOXIE_EMULATOR_CUDA_FP8_H

#include "cuda_runtime.h"
#include "host_tests/emulator/numbers.h"

typedef uint16_t __nv_fp8x2_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

static inline __nv_fp8x2_storage_t __nv_cvt_float2_to_fp8x2(float2 values, __nv_saturation_t,
                                                            __nv_fp8_interpretation_t)
{
    return static_cast<uint16_t>(emulator::to_e4m3(values.x) | emulator::to_e4m3(values.y) << 8);
}

#endif
