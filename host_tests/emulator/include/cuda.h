// The driver's types that the kernels name. Values as in NVIDIA's header of the same name.

#ifndef MOXIE_EMULATOR_CUDA_H
#define MOXIE_EMULATOR_CUDA_H

#include <stdint.h>

typedef uint32_t cuuint32_t;
typedef uint64_t cuuint64_t;
typedef enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;
typedef enum {
    CU_TENSOR_MAP_DATA_TYPE_UINT8 = 0,
    CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6,
    CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 = 9
} CUtensorMapDataType;
typedef enum { CU_TENSOR_MAP_INTERLEAVE_NONE } CUtensorMapInterleave;
typedef enum {
    CU_TENSOR_MAP_SWIZZLE_NONE,
    CU_TENSOR_MAP_SWIZZLE_32B,
    CU_TENSOR_MAP_SWIZZLE_64B,
    CU_TENSOR_MAP_SWIZZLE_128B
} CUtensorMapSwizzle;
typedef enum {
    CU_TENSOR_MAP_L2_PROMOTION_NONE,
    CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3
} CUtensorMapL2promotion;
typedef enum { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE } CUtensorMapFloatOOBfill;

// 128 bytes, 64 of alignment, as the driver's; inside, the emulator's own.
typedef struct __attribute__((aligned(64))) CUtensorMap {
    const unsigned char *base;
    uint64_t extents[5];
    uint64_t strides[4]; // bytes, of dimensions 1..
    uint16_t box[5];
    uint16_t rank;
    uint16_t swizzle_bytes; // 0: none
    uint16_t element_bytes;
} CUtensorMap;

#endif
