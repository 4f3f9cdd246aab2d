// tally: adds the rows that each local expert of a layer computes to counters. Integers, added
// atomically: forwards that overlap may add at the same time, in any order.

#ifndef MOXIE_KERNELS_TALLY_H
#define MOXIE_KERNELS_TALLY_H

#include "kernels/types.h"

struct tally_args {
    const int32_t *expert_offset; // device [experts + 1]: first pair of each expert
    int64_t *load;                // device [experts]; grows
    int32_t experts;
    int32_t reserved;
};

int32_t tally_cpu(const struct tally_args *args, void *stream);

#endif
