// Of the instructions of ptx.cuh, those by which blocks and devices see what others have stored.

#ifndef MOXIE_KERNELS_CUDA_PTX_SYSTEM_CUH
#define MOXIE_KERNELS_CUDA_PTX_SYSTEM_CUH

#include <cuda_runtime.h>
#include <stdint.h>

// 8 bytes of a row and a tag (kernels/ll.h), which are stored and loaded as one.
struct tagged {
    uint64_t value, tag;
};

__device__ __forceinline__ void store_tagged(void *at, const tagged &word)
{
    asm volatile("{\n\t.reg .b128 both;\n\tmov.b128 both, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], both;\n\t}" ::"l"(at), "l"(word.value),
                 "l"(word.tag)
                 : "memory");
}

__device__ __forceinline__ tagged load_tagged(const void *at)
{
    tagged word;

    asm volatile("{\n\t.reg .b128 both;\n\tld.relaxed.sys.global.b128 both, [%2];\n\tmov.b128 {%0, %1}, both;\n\t}"
                 : "=l"(word.value), "=l"(word.tag)
                 : "l"(at)
                 : "memory");
    return word;
}

__device__ __forceinline__ void store_relaxed_system(uint64_t *at, uint64_t value)
{
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// A flag in a window: whoever reads the value a peer released sees what the peer wrote before.
__device__ __forceinline__ uint64_t load_acquire_system(const uint64_t *at)
{
    uint64_t value;

    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(at) : "memory");
    return value;
}

__device__ __forceinline__ void store_release_system(uint64_t *at, uint64_t value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(at), "l"(value) : "memory");
}

// The same between the blocks of one device.
__device__ __forceinline__ uint32_t load_acquire_device(const uint32_t *at)
{
    uint32_t value;

    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
    return value;
}

// Words that other blocks write, each whole.
__device__ __forceinline__ uint4 load_relaxed_device(const uint32_t *at)
{
    uint4 words;

    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w) : "l"(at) : "memory");
    return words;
}

__device__ __forceinline__ void store_relaxed_device(uint32_t *to, uint32_t word)
{
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(word) : "memory");
}

// Whoever reads the sum sees what this thread wrote before, and what it saw of its block's other threads.
__device__ __forceinline__ void add_release_device(uint32_t *to, uint32_t value)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

// What this thread wrote before is there for all blocks of the device.
__device__ __forceinline__ void fence_device()
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ void fence_system()
{
    asm volatile("fence.acq_rel.sys;" ::: "memory");
}

// Nanoseconds since some moment; it advances in steps that may be a microsecond.
__device__ __forceinline__ uint64_t global_timer_ns()
{
    uint64_t now;

    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Between two looks at a flag: about `ns`, and possibly none.
__device__ __forceinline__ void spin_pause(uint32_t ns)
{
    asm volatile("nanosleep.u32 %0;" ::"r"(ns));
}

#endif
