// The CPU's table.

#include "kernels/kernels.h"

const struct kernels kernels_cpu = {
    .record = record_cpu,
    .route = route_cpu,
    .tally = tally_cpu,
    .gemms = gemms_cpu,
    .dispatch = dispatch_cpu,
    .combine = combine_cpu,
    .sum = sum_cpu,
    .expand = expand_cpu,
    .quantise = quantise_cpu,
};
