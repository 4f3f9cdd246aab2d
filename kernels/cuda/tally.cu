// tally on CUDA: a thread an expert.
//
// bytes  20 an expert: nothing next to a layer

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) tally_kernel(const __grid_constant__ tally_args a)
{
    int32_t expert = static_cast<int32_t>(blockIdx.x) * kThreads + static_cast<int32_t>(threadIdx.x);

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (expert >= a.experts) return;
    atomicAdd(reinterpret_cast<unsigned long long *>(&a.load[expert]),
              static_cast<unsigned long long>(a.expert_offset[expert + 1] - a.expert_offset[expert]));
}

} // namespace

extern "C" int32_t tally_cuda_load(void)
{
    return load_kernel(tally_kernel);
}

extern "C" int32_t tally_cuda(const struct tally_args *args, void *stream)
{
    return launch(tally_kernel, {grid_for(args->experts, kThreads), kThreads, 0, LAUNCH_EARLY}, stream, *args);
}
