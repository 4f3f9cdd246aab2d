// The words that CUDA adds to C++, for a compiler that does not know them: a kernel is a function,
// its threads are what emulator/block.h runs.

#ifndef MOXIE_EMULATOR_CUDA_RUNTIME_H
#define MOXIE_EMULATOR_CUDA_RUNTIME_H

#include "cuda_runtime_api.h"
#include "host_tests/emulator/block.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __maxnreg__(...)
// The blocks of a host thread run one after another, so one copy serves them all.
#define __shared__ static thread_local

[[maybe_unused]] static thread_local const dim3 &threadIdx = emulator::here.thread;
[[maybe_unused]] static thread_local const dim3 &blockIdx = emulator::here.block;
[[maybe_unused]] static thread_local const dim3 &blockDim = emulator::here.block_dim;
[[maybe_unused]] static thread_local const dim3 &gridDim = emulator::here.grid_dim;

struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

// By value, as on the device: of a number in memory that others write they read one.
template <class T> constexpr T max(T a, T b)
{
    return a < b ? b : a;
}
template <class T> constexpr T min(T a, T b)
{
    return b < a ? b : a;
}

template <class T> T __ldcg(const T *at)
{
    return *at;
}

template <class T> T __ldg(const T *at)
{
    return *at;
}
// The larger of each half.
static inline uint32_t __vmaxu2(uint32_t a, uint32_t b)
{
    return max(a >> 16, b >> 16) << 16 | max(a & 0xffffu, b & 0xffffu);
}
// How far the bytes of both are apart.
static inline uint32_t __vabsdiffu4(uint32_t a, uint32_t b)
{
    uint32_t to = 0;

    for (int i = 0; i < 32; i += 8) {
        const uint32_t x = a >> i & 0xff, y = b >> i & 0xff;

        to |= (x > y ? x - y : y - x) << i;
    }
    return to;
}
static inline int __ffs(uint32_t bits)
{
    return __builtin_ffs(static_cast<int>(bits));
}
static inline int __ffsll(long long bits)
{
    return __builtin_ffsll(bits);
}
static inline int __popc(uint32_t bits)
{
    return __builtin_popcount(bits);
}

static inline void __syncthreads()
{
    emulator::barrier(0, emulator::here.block_dim.x);
}
static inline void __syncwarp()
{
    emulator::warp_exchange("__syncwarp", 0);
}

template <class T> T __shfl_sync(uint32_t mask, T value, int lane)
{
    return emulator::warp_read<T>("__shfl_sync", mask, value, lane & 31);
}
static inline uint32_t __reduce_max_sync(uint32_t mask, uint32_t value)
{
    const uint64_t *lanes;

    emulator::check_mask(mask);
    lanes = emulator::warp_exchange("__reduce_max_sync", value);
    return static_cast<uint32_t>(*std::max_element(lanes, lanes + 32));
}
static inline uint32_t __float_as_uint(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}
static inline float __uint_as_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}
static inline float __fmaf_rn(float a, float b, float c)
{
    return std::fma(a, b, c);
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int bits)
{
    return emulator::warp_read<T>("__shfl_xor_sync", mask, value, emulator::lane() ^ bits);
}
template <class T> T __shfl_up_sync(uint32_t mask, T value, int step)
{
    int from = emulator::lane() - step;

    return emulator::warp_read<T>("__shfl_up_sync", mask, value,
                                  from < 0 ? emulator::lane() : from);
}
static inline uint32_t __ballot_sync(uint32_t mask, int predicate)
{
    return emulator::warp_ballot(mask, predicate != 0);
}
static inline int __all_sync(uint32_t mask, int predicate)
{
    return __ballot_sync(mask, predicate) == mask;
}
static inline uint32_t __match_any_sync(uint32_t mask, int32_t value)
{
    return emulator::warp_match(mask, static_cast<uint32_t>(value));
}

// Relaxed, as on the device; here they are whole for other processes too, which there only the ones
// of system scope are.
static inline unsigned atomicOr(unsigned *at, unsigned value)
{
    return __atomic_fetch_or(at, value, __ATOMIC_RELAXED);
}
static inline void __threadfence_block(void)
{
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline unsigned atomicAdd(unsigned *at, unsigned value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
static inline int atomicAdd(int *at, int value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
static inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value)
{
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
static inline unsigned atomicExch(unsigned *at, unsigned value)
{
    return __atomic_exchange_n(at, value, __ATOMIC_RELAXED);
}
// The value before, whether or not it was `expected`.
static inline unsigned atomicCAS(unsigned *at, unsigned expected, unsigned value)
{
    (void)__atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED);
    return expected;
}
static inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long expected,
                                           unsigned long long value)
{
    (void)__atomic_compare_exchange_n(at, &expected, value, false, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED);
    return expected;
}

template <class T> cudaError_t cudaMalloc(T **memory, size_t bytes)
{
    return cudaMalloc(reinterpret_cast<void **>(memory), bytes);
}

enum {
    cudaLaunchAttributeClusterDimension = 4,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaLaunchAttribute {
    int id;
    struct {
        int programmaticStreamSerializationAllowed;
        struct {
            unsigned x, y, z;
        } clusterDim;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};
struct cudaFuncAttributes {
    int numRegs;
};

template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel *)
{
    return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel *kernel, cudaFuncAttribute, int value)
{
    return emulator::allow_smem(reinterpret_cast<const void *>(kernel), value);
}

static inline bool is_early(const cudaLaunchConfig_t &config)
{
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization &&
            config.attrs[i].val.programmaticStreamSerializationAllowed != 0)
            return true;
    return false;
}

static inline unsigned cluster_of(const cudaLaunchConfig_t &config)
{
    for (unsigned i = 0; i < config.numAttrs; i++)
        if (config.attrs[i].id == cudaLaunchAttributeClusterDimension)
            return config.attrs[i].val.clusterDim.x;
    return 1;
}

// The argument is copied now, as a launch copies it.
template <class Argument>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Argument),
                               const std::remove_const_t<Argument> &argument)
{
    emulator::launch launch = {config->gridDim,
                               config->blockDim,
                               config->dynamicSmemBytes,
                               is_early(*config),
                               cluster_of(*config),
                               reinterpret_cast<const void *>(kernel),
                               [kernel, argument] { kernel(argument); }};

    return emulator::enqueue_launch(config->stream, launch);
}

#endif
