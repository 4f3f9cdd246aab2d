// Tensor maps of 8- and 16-bit numbers, swizzled by 128 bytes: what the copy engine reads by. Made on the host, at every launch:
// a pure function of the arguments that takes 0.2 microseconds, looking up the encoder included, so nothing is kept that could go stale.

#ifndef MOXIE_KERNELS_CUDA_TENSOR_MAP_CUH
#define MOXIE_KERNELS_CUDA_TENSOR_MAP_CUH

#include <cuda.h>
#include <cuda_runtime.h>

struct tensor_map_shape {
    cuuint32_t rank;
    cuuint64_t extents[5];
    cuuint64_t strides[4]; // bytes, of dimensions 1..
    cuuint32_t box[5]; // swizzled by 128 bytes, but for f32
};

struct tensor_map_request {
    CUtensorMap *map;
    const void *base;
    CUtensorMapDataType numbers;
    tensor_map_shape shape;
};

// Several at once, because the lookup of the driver's function takes longer than a map.
cudaError_t tensor_maps_make(const tensor_map_request *requests, int32_t count);

#endif
