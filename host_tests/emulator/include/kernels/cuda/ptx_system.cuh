// kernels/cuda/ptx_system.cuh for the emulator.

#ifndef MOXIE_KERNELS_CUDA_PTX_SYSTEM_CUH
#define MOXIE_KERNELS_CUDA_PTX_SYSTEM_CUH

#include "host_tests/emulator/block.h"

#include <cuda_runtime.h>

struct tagged {
    uint64_t value, tag;
};

// The tag is stored last and loaded first: nobody stores another word there before this one has been taken.
static inline void store_tagged(void *at, const tagged &word)
{
    uint64_t *both = static_cast<uint64_t *>(at);

    __atomic_store_n(&both[0], word.value, __ATOMIC_RELAXED);
    __atomic_store_n(&both[1], word.tag, __ATOMIC_RELEASE);
}

static inline tagged load_tagged(const void *at)
{
    const uint64_t *both = static_cast<const uint64_t *>(at);
    tagged word;

    word.tag = __atomic_load_n(&both[1], __ATOMIC_ACQUIRE);
    word.value = __atomic_load_n(&both[0], __ATOMIC_RELAXED);
    return word;
}

static inline void store_relaxed_system(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELAXED);
}

static inline uint64_t load_acquire_system(const uint64_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

static inline void store_release_system(uint64_t *at, uint64_t value)
{
    __atomic_store_n(at, value, __ATOMIC_RELEASE);
}

static inline uint32_t load_acquire_device(const uint32_t *at)
{
    return __atomic_load_n(at, __ATOMIC_ACQUIRE);
}

static inline uint4 load_relaxed_device(const uint32_t *at)
{
    return {__atomic_load_n(at, __ATOMIC_RELAXED), __atomic_load_n(at + 1, __ATOMIC_RELAXED), __atomic_load_n(at + 2, __ATOMIC_RELAXED),
            __atomic_load_n(at + 3, __ATOMIC_RELAXED)};
}

static inline void store_relaxed_device(uint32_t *to, uint32_t word)
{
    __atomic_store_n(to, word, __ATOMIC_RELAXED);
}

static inline void add_release_device(uint32_t *to, uint32_t value)
{
    (void)__atomic_fetch_add(to, value, __ATOMIC_RELEASE);
}

static inline void fence_device()
{
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

static inline void fence_system()
{
    __atomic_thread_fence(__ATOMIC_ACQ_REL);
}

static inline uint64_t global_timer_ns()
{
    return emulator::now_ns();
}

// How long it takes is the emulator's to say.
static inline void spin_pause(uint32_t)
{
    emulator::spin_pause();
}

#endif
