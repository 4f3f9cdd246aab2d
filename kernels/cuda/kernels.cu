// The kernel table of sm_90a.

#include "kernels/cuda/cuda.h"

#include <cuda_runtime.h>

extern const struct kernels kernels_cuda = {
    "sm_90", route_cuda, gate_up_cuda, down_cuda, nullptr, combine_cuda, nullptr, nullptr, nullptr, nullptr,
};

extern "C" int32_t kernels_cuda_load(void)
{
    int32_t st = route_cuda_load();

    if (st == cudaSuccess) st = gemm_cuda_load();
    return st == cudaSuccess ? combine_cuda_load() : st;
}
