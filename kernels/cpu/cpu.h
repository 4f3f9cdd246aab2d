// The CPU's "stream": who runs tasks, with which instructions, on which scratch. A kernel starts
// `workers` tasks, which share its tiles by an atomic counter; task index w owns scratch + w *
// CPU_SCRATCH_BYTES.

#ifndef MOXIE_KERNELS_CPU_CPU_H
#define MOXIE_KERNELS_CPU_CPU_H

#include <stddef.h>
#include <stdint.h>

enum cpu_isa { CPU_SCALAR, CPU_AVX2, CPU_AVX512 };

#define CPU_SCRATCH_BYTES ((size_t)1 << 20)

struct cpu_stream {
    // Calls task(arg, 0..tasks-1), each once, and returns when all are done.
    void (*parallel_for)(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t index),
                         void *arg);
    void *ctx;
    unsigned char *scratch; // [workers, CPU_SCRATCH_BYTES], 64-byte aligned
    int32_t workers;        // >= 1
    int32_t isa;            // enum cpu_isa, at most what cpu_isa_best() says
};

// The best instruction set this machine and its operating system offer.
enum cpu_isa cpu_isa_best(void);

#endif
