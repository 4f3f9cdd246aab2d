// A warp's way over rows that are cut in pieces: it keeps its piece, so that nothing is divided at a row.

#ifndef MOXIE_KERNELS_CUDA_WALK_CUH
#define MOXIE_KERNELS_CUDA_WALK_CUH

#include <stdint.h>

// Rows are fewer than 2^31, so that a step from one does not wrap.
struct row_walk {
    int32_t piece;  // of every row
    uint32_t first; // row; past all for a warp that is left over
    uint32_t step;
};

// A grid with a warp for each piece of a row at least.
__device__ __forceinline__ row_walk walk_rows(int32_t pieces)
{
    uint32_t warps_a_block = blockDim.x / 32, warp = blockIdx.x * warps_a_block + threadIdx.x / 32;
    uint32_t step = gridDim.x * warps_a_block / pieces;

    return {static_cast<int32_t>(warp % pieces), warp / pieces < step ? warp / pieces : UINT32_MAX, step};
}

#endif
