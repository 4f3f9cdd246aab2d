// What depends on the instruction set: the inner product and the decoding of weights. One file per
// set, compiled with its own flags, chosen at run time. Within one set a result depends on its own
// two rows only: neither on the tile that it falls into nor on its neighbours.

#ifndef MOXIE_KERNELS_CPU_ISA_H
#define MOXIE_KERNELS_CPU_ISA_H

#include "kernels/cpu/cpu.h"

// c[m, n] += a[m, :] . w[n, :] over k elements, in as many partial sums as a vector has lanes.
struct dot_args {
    const float *a;                       // [rows, k], a_stride apart
    const float *w;                       // [columns, k], w_stride apart
    float *c;                             // [rows, columns], c_stride apart
    int64_t a_stride, w_stride, c_stride; // elements
    int64_t rows, columns, k;
};

struct cpu_ops {
    void (*dot)(const struct dot_args *args);
    // Exact decodes to f32; `from` may be unaligned. from_e4m3 multiplies by `scale`.
    void (*from_bf16)(const void *from, int64_t count, float *to);
    void (*from_f16)(const void *from, int64_t count, float *to);
    void (*from_e4m3)(const void *from, int64_t count, float scale, float *to);
    // Nibbles, the even element in the low one: to[i] = values[nibble i] * scales[i / group]; group
    // is 16 or 32.
    void (*from_nibbles)(const void *from, int64_t count, const float values[16],
                         const float *scales, int64_t group, float *to);
    // x[i] becomes x[i] * sigmoid(alpha * x[i]): silu and its kin.
    void (*swish)(float *x, int64_t count, float alpha);
};

extern const struct cpu_ops cpu_ops_scalar;
#if defined(__x86_64__)
extern const struct cpu_ops cpu_ops_avx2;
extern const struct cpu_ops cpu_ops_avx512;
#endif

// The operations of stream->isa.
const struct cpu_ops *cpu_ops_of(const struct cpu_stream *stream);

#endif
