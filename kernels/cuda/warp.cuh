// What the lanes of a warp have in common.

#ifndef MOXIE_KERNELS_CUDA_WARP_CUH
#define MOXIE_KERNELS_CUDA_WARP_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// A value that is the same in all lanes of a warp. The compiler then knows, and keeps what follows from it in uniform registers.
__device__ __forceinline__ int32_t uniform(int32_t value)
{
    return __shfl_sync(~0u, value, 0);
}

#endif
