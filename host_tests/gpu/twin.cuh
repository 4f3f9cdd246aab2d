// What the programs share that run a kernel and its CPU twin on the same random data.

#ifndef MOXIE_HOST_TESTS_GPU_TWIN_CUH
#define MOXIE_HOST_TESTS_GPU_TWIN_CUH

extern "C" {
#include "kernels/cpu/cpu.h"
}
#include "kernels/cuda/cuda.h"

#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#define CHECK(call)                                                                                                       \
    do {                                                                                                                  \
        int status_ = (int)(call);                                                                                        \
        if (status_ != 0) {                                                                                               \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString((cudaError_t)status_));               \
            exit(1);                                                                                                      \
        }                                                                                                                 \
    } while (0)

static uint64_t seed_state;

static inline uint32_t draw(uint32_t limit)
{
    seed_state = seed_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)((seed_state >> 33) % limit);
}

// Memory on both sides with the same bytes, or with bytes that a kernel must overwrite.
struct twin {
    std::vector<unsigned char> cpu;
    unsigned char *gpu;

    explicit twin(size_t bytes) : cpu(bytes + 16, 0xff)
    {
        CHECK(cudaMalloc(&gpu, cpu.size()));
        send();
    }
    twin(const twin &) = delete;
    ~twin()
    {
        cudaFree(gpu);
    }
    void send()
    {
        CHECK(cudaMemcpy(gpu, cpu.data(), cpu.size(), cudaMemcpyHostToDevice));
    }
    void fill(int byte)
    {
        memset(cpu.data(), byte, cpu.size());
        send();
    }
    template <class T> T *on(bool device)
    {
        return (T *)(device ? gpu : cpu.data());
    }
    // e4m3: the sign of a NaN is nobody's promise.
    void clear_nan_signs()
    {
        std::vector<unsigned char> got(cpu.size());

        CHECK(cudaMemcpy(got.data(), gpu, got.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < got.size(); i++) {
            if (got[i] == 0xff) got[i] = 0x7f;
            if (cpu[i] == 0xff) cpu[i] = 0x7f;
        }
        CHECK(cudaMemcpy(gpu, got.data(), got.size(), cudaMemcpyHostToDevice));
    }
    // Of f32: processors make NaNs of their own.
    void one_nan()
    {
        std::vector<unsigned char> got(cpu.size());

        CHECK(cudaMemcpy(got.data(), gpu, got.size(), cudaMemcpyDeviceToHost));
        for (unsigned char *side : {got.data(), cpu.data()})
            for (size_t i = 0; i < cpu.size() / 4; i++)
                if (uint32_t *bits = (uint32_t *)side + i; (*bits & 0x7fffffff) > 0x7f800000) *bits = 0x7fc00000;
        CHECK(cudaMemcpy(gpu, got.data(), got.size(), cudaMemcpyHostToDevice));
    }
    // 1 when both sides hold the same bytes, or the first so many.
    int same(const char *what, size_t bytes = SIZE_MAX)
    {
        std::vector<unsigned char> got(cpu.size());

        CHECK(cudaMemcpy(got.data(), gpu, got.size(), cudaMemcpyDeviceToHost));
        for (size_t i = 0; i < got.size() && i < bytes; i++)
            if (got[i] != cpu[i]) {
                printf("%s differs at byte %zu of %zu: %02x, wanted %02x\n", what, i, got.size(), got[i], cpu[i]);
                return 0;
            }
        return 1;
    }
};

static inline void inline_tasks(void *ctx, uint64_t tasks, void (*task)(void *, uint64_t), void *arg)
{
    (void)ctx;
    for (uint64_t i = 0; i < tasks; i++)
        task(arg, i);
}

static inline cpu_stream *stream_of_cpu()
{
    static cpu_stream stream;

    stream.parallel_for = inline_tasks;
    if (stream.scratch == NULL) stream.scratch = (unsigned char *)aligned_alloc(64, CPU_SCRATCH_BYTES);
    stream.workers = 1;
    stream.isa = cpu_isa_best();
    return &stream;
}

// Draws of `count` seeds from `first` on; 0 when all attempts were good, 77 without a device.
static inline int try_seeds(int argc, char **argv, int (*attempt)())
{
    uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 1, count = argc > 2 ? strtoull(argv[2], NULL, 10) : 100;
    int failed = 0, devices = 0;

    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) return 77;
    CHECK(kernels_cuda_load());
    for (uint64_t seed = first; seed < first + count; seed++) {
        seed_state = seed * 0x9e3779b97f4a7c15u;
        if (attempt()) continue;
        printf("seed %llu failed\n", (unsigned long long)seed);
        failed++;
    }
    printf("%d of %llu seeds failed\n", failed, (unsigned long long)count);
    return failed != 0;
}

#endif
