// How every kernel is launched: blocks and threads in one dimension, arguments by value.

#ifndef MOXIE_KERNELS_CUDA_LAUNCH_CUH
#define MOXIE_KERNELS_CUDA_LAUNCH_CUH

#include <cuda_runtime.h>

#include <algorithm>

// A grid that strides over its items: enough blocks for `items`, at most a few waves of an H200.
constexpr int64_t kGridSms = 132, kGridBlocksMax = kGridSms * 16;

static inline unsigned grid_for(int64_t items, int64_t items_a_block)
{
    int64_t blocks = (items + items_a_block - 1) / items_a_block;

    return static_cast<unsigned>(blocks < 1 ? 1 : blocks > kGridBlocksMax ? kGridBlocksMax : blocks);
}

// Blocks for kernels whose warps stride over items: of so many threads, or where SMs are bounded, as large as can be.
constexpr unsigned kSharingThreads = 256, kAloneThreads = 1024;
// Over half of an SM's, so that a block has one to itself, and as many blocks take as many SMs.
constexpr size_t kAloneSmemBytes = 120 << 10;

// An early one may begin while the launch before it ends: its blocks call griddepcontrol_wait before they read what that wrote.
enum launch_order { LAUNCH_AFTER, LAUNCH_EARLY };

struct launch_shape {
    unsigned blocks, threads;
    size_t smem_bytes;
    launch_order order;
    unsigned cluster = 0; // blocks of one, which run at once; 0: no cluster
};

// An early launch with a warp an item at most, and at least `warps_least`; of as many blocks as run at once, `blocks_of_sm` on each.
// On `sms` SMs, where that is not 0, and they have so many warps.
static inline launch_shape shape_for(int64_t items, int64_t warps_least, int32_t blocks_of_sm, int32_t sms)
{
    const int64_t a_block = (sms > 0 ? kAloneThreads : kSharingThreads) / 32, most = sms > 0 ? sms : kGridSms * blocks_of_sm;
    int64_t blocks = (items + a_block - 1) / a_block;

    blocks = blocks < most ? blocks : most;
    if (blocks * a_block < warps_least) blocks = (warps_least + a_block - 1) / a_block;
    if (blocks < 1) blocks = 1;
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(a_block * 32), sms > 0 ? kAloneSmemBytes : 0, LAUNCH_EARLY};
}

template <class Args> cudaError_t launch(void (*kernel)(Args), const launch_shape &shape, void *stream, const Args &args)
{
    cudaLaunchAttribute attributes[2] = {};
    cudaLaunchConfig_t config = {};

    config.attrs = attributes;
    if (shape.order == LAUNCH_EARLY) {
        attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 0) {
        attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
        attributes[config.numAttrs++].val.clusterDim = {shape.cluster, 1, 1};
    }
    config.gridDim = dim3(shape.blocks);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.smem_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return cudaLaunchKernelEx(&config, kernel, args);
}

// Of the current device; 0: nobody knows.
static inline int32_t device_attribute(cudaDeviceAttr attribute)
{
    int device = 0, value = 0;

    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return 0;
    return value;
}

static inline int32_t sm_count()
{
    return std::max(device_attribute(cudaDevAttrMultiProcessorCount), 1);
}

// Loads a kernel on the current device, so that its first launch has not to; `smem_bytes`: the most dynamic shared memory of a launch.
template <class Kernel> cudaError_t load_kernel(Kernel *kernel, size_t smem_bytes = 0)
{
    cudaFuncAttributes attributes;
    cudaError_t st = cudaFuncGetAttributes(&attributes, kernel);

    if (st != cudaSuccess || smem_bytes == 0) return st;
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes));
}

#endif
