// e4m3 as bits.

#ifndef MOXIE_EMULATOR_CUDA_FP8_H
#define MOXIE_EMULATOR_CUDA_FP8_H

#include "cuda_runtime.h"
#include "host_tests/emulator/numbers.h"

typedef uint8_t __nv_fp8_storage_t;
typedef enum { __NV_NOSAT, __NV_SATFINITE } __nv_saturation_t;
typedef enum { __NV_E4M3, __NV_E5M2 } __nv_fp8_interpretation_t;

static inline __nv_fp8_storage_t __nv_cvt_float_to_fp8(float value, __nv_saturation_t,
                                                       __nv_fp8_interpretation_t)
{
    return emulator::to_e4m3(value);
}

#endif
