// A problem for the two products: weights in any format, order and orientation, made of random
// bytes, and what a plain fp64 reference says of it, which decodes the weights by the words of
// abi.h.

#ifndef MOXIE_HOST_TESTS_REFERENCE_H
#define MOXIE_HOST_TESTS_REFERENCE_H

#include "kernels/types.h"

#define EXPERTS   4
#define ROWS      24
#define PAIRS_MAX 512

struct problem {
    int64_t hidden, intermediate;
    int64_t pairs;
    struct weight_view w1, w2;
    unsigned char *memory[8]; // values, scales, globals, bias of both
    float *x;                 // [ROWS, hidden]
    int32_t expert_offset[EXPERTS + 1];
    int32_t pair_row[PAIRS_MAX];
    float pair_weight[PAIRS_MAX];
    int32_t activation;
    int32_t operand;
    float alpha, beta, limit;
    int32_t weight_on_input;
    float *mid, *out;   // [pairs, ..]: what the kernels say
    double *mid_wanted; // what the reference says
    double *out_wanted;
};

// Ragged experts: 3, 0, 1 and 18 rows. Sizes are odd where the format allows it; every row is
// aligned to its elements alone.
void problem_init(struct problem *problem, int32_t format, int32_t order, int32_t rows_in);
void problem_fini(struct problem *problem);

// New scales of another number format (int4_g32).
void problem_rescale(struct problem *problem, int32_t scale_format);

// Fills mid_wanted, and out_wanted from the kernels' own mid, so that each product is judged alone.
void problem_reference(struct problem *problem);

#endif
