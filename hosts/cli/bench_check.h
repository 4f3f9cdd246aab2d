// Whether a device has computed what was asked: an output that was poisoned, and one token by plain
// loops.

#ifndef MOXIE_HOSTS_CLI_BENCH_CHECK_H
#define MOXIE_HOSTS_CLI_BENCH_CHECK_H

#include "hosts/cli/bench.h"

// No number of a 16-bit format, and what no computation writes.
#define BENCH_POISON 0xff

// Of a forward's output on a device: rows of `hidden` 16-bit numbers.
struct output {
    const struct memory *y;
    int64_t hidden;
    int32_t format; // MOXIE_FORMAT_BF16 or _F16
};

// A fault when one of the rows first..first+count-1 holds a number that is not finite, as poison
// is.
int bench_check_rows(struct device *device, const struct output *output, int64_t first,
                     int64_t count, struct fault *fault);

// Refuses what bench_check_share cannot compute.
int bench_check_possible(const struct bench_shape *shape, int32_t format, struct fault *fault);

// The largest relative error of one token that is no mistake: the rows between the projections, and
// packed weights once they are scaled, are 16-bit or, with fp8 weights, fp8 as the rows before,
// which is more where rows are so short that one number's rounding tells.
double bench_check_error_max(int32_t format, const struct bench_shape *shape);

// One token's way through silu experts whose weights are of 16 bits or fewer, and in the order
// GATE_UP.
struct token {
    const struct weights *w1, *w2;
    const uint8_t *x; // [H]
    int32_t x_format; // MOXIE_FORMAT_BF16 or _F16
    const int32_t *experts;
    int64_t top_k;        // of equal router weights
    int64_t expert_first; // that w1 and w2 begin with; experts that they do not have add nothing
};

// Adds to y [H] what the experts of w1 and w2 make of the token, in double and of the weights as
// they are: nothing is quantised here.
int bench_check_share(const struct token *token, double *y, struct fault *fault);

// ||y - reference|| / ||reference|| of the output's row `row`. NaN when the reference is zero.
int bench_check_row(struct device *device, const struct output *output, int64_t row,
                    const double *reference, double *relative_error, struct fault *fault);

#endif
