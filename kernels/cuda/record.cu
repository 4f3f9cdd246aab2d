// record on CUDA: a thread an id.
//
// bytes  every id once, 4 written: nothing next to a layer

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/launch.cuh"

namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) record_kernel(const __grid_constant__ record_args a)
{
    int64_t valid = a.tokens_valid == nullptr ? a.tokens : *a.tokens_valid - a.token_first;
    int64_t ids = static_cast<int64_t>(a.tokens) * a.top_k;

    for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < ids; i += static_cast<int64_t>(gridDim.x) * kThreads) {
        int64_t token = i / a.top_k, k = i % a.top_k;
        const void *row = static_cast<const unsigned char *>(a.ids) + token * a.id_stride_bytes;

        int32_t id = id_mapped(a.expert_map, a.map_count, id_read(row, k, a.id_bytes), 0, a.experts);

        a.out[token * a.out_stride + k] = token < valid && id >= 0 ? id + a.expert_first : -1;
    }
}

} // namespace

extern "C" int32_t record_cuda_load(void)
{
    return load_kernel(record_kernel);
}

extern "C" int32_t record_cuda(const struct record_args *args, void *stream)
{
    if (args->tokens == 0) return cudaSuccess;
    return launch(record_kernel, {grid_for(static_cast<int64_t>(args->tokens) * args->top_k, kThreads), kThreads, 0, LAUNCH_AFTER},
                  stream, *args);
}
