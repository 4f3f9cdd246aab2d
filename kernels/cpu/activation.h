// The activation functions between the two products.

#ifndef MOXIE_KERNELS_CPU_ACTIVATION_H
#define MOXIE_KERNELS_CPU_ACTIVATION_H

#include "kernels/cpu/isa.h"

struct activation_args {
    int32_t kind;             // enum activation
    float alpha, beta, limit; // of ACTIVATION_SWIGLUOAI; limit 0: none
};

// gate[i] becomes the activated unit; `up` is NULL where nothing is gated (a w1 of ORDER_PLAIN).
// `up` is clobbered.
void activation_apply(const struct activation_args *args, const struct cpu_ops *ops, float *gate,
                      float *up, int64_t count);

#endif
