// Searching prefix sums.

#ifndef MOXIE_KERNELS_CUDA_SEARCH_CUH
#define MOXIE_KERNELS_CUDA_SEARCH_CUH

#include <cuda_runtime.h>

// The last of `count` ascending numbers that is at most `value`; the first is.
__device__ __forceinline__ int32_t last_at_most(const int32_t *numbers, int32_t count, int32_t value)
{
    int32_t low = 0, high = count - 1;

    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;

        if (numbers[middle] <= value)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

#endif
