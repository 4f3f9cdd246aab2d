// Prefix sums of a warp, and searching in them.

#ifndef MOXIE_KERNELS_CUDA_SEARCH_CUH
#define MOXIE_KERNELS_CUDA_SEARCH_CUH

#include <cuda_runtime.h>

// Of the lanes up to this one.
__device__ __forceinline__ int32_t max_until(int32_t own)
{
    int32_t lane = threadIdx.x % 32, most = own;

#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
        int32_t before = __shfl_up_sync(~0u, most, step);

        if (lane >= step) most = max(most, before);
    }
    return most;
}

// Of the lanes before this one.
__device__ __forceinline__ int32_t sum_before(int32_t own)
{
    int32_t lane = threadIdx.x % 32, sum = own;

#pragma unroll
    for (int32_t step = 1; step < 32; step *= 2) {
        int32_t before = __shfl_up_sync(~0u, sum, step);

        if (lane >= step) sum += before;
    }
    return sum - own;
}

// The last of `count` ascending numbers of which `factor` times is at most `value`; the first is.
__device__ __forceinline__ int32_t last_at_most(const int32_t *numbers, int32_t count, int32_t value, int32_t factor = 1)
{
    int32_t low = 0, high = count - 1;

    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;

        if (factor * numbers[middle] <= value)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// The same of at most 1024 numbers, and one at least, by a whole warp.
__device__ __forceinline__ int32_t last_at_most_of_warp(const int32_t *numbers, int32_t count, int32_t value, int32_t factor)
{
    const int32_t lane = threadIdx.x % 32, wide = (count + 31) / 32;
    int32_t at = lane * wide, first;

    first = (__popc(__ballot_sync(~0u, at < count && factor * numbers[at] <= value)) - 1) * wide;
    at = first + lane;
    return first + __popc(__ballot_sync(~0u, lane < wide && at < count && factor * numbers[at] <= value)) - 1;
}

#endif
