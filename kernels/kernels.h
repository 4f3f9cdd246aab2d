// The kernel table of one device: what runner and dispatcher launch. Same args on every device.

#ifndef MOXIE_KERNELS_KERNELS_H
#define MOXIE_KERNELS_KERNELS_H

#include "kernels/combine.h"
#include "kernels/dispatch.h"
#include "kernels/expand.h"
#include "kernels/flags.h"
#include "kernels/gemm.h"
#include "kernels/layer.h"
#include "kernels/ll.h"
#include "kernels/quantise.h"
#include "kernels/record.h"
#include "kernels/route.h"
#include "kernels/tally.h"

struct kernels {
    int32_t (*record)(const struct record_args *args, void *stream);
    // NULL on the CPU, where launches cost nothing.
    int32_t (*layer)(const struct layer_args *args, void *stream);
    int32_t (*route)(const struct route_args *args, void *stream);
    int32_t (*tally)(const struct tally_args *args, void *stream);
    int32_t (*gemms)(const struct gemms_args *args, void *stream);
    // Units of mid up to which gemms had better gather fp8 rows, on the current device; it may take
    // microseconds. NULL: never.
    int32_t (*gather_units)(void);
    int32_t (*dispatch)(const struct dispatch_args *args, void *stream);
    int32_t (*combine)(const struct combine_args *args, void *stream);
    int32_t (*sum)(const struct sum_args *args, void *stream);
    int32_t (*expand)(const struct expand_args *args, void *stream);
    int32_t (*quantise)(const struct quantise_args *args, void *stream);
    // NULL on the CPU, where a host thread does it.
    int32_t (*signal)(const struct signal_args *args, void *stream);
    int32_t (*await)(const struct await_args *args, void *stream);
    int32_t (*regroup)(const struct regroup_args *args, void *stream);
    int32_t (*dispatch_ll)(const struct dispatch_ll_args *args, void *stream);
    int32_t (*sum_ll)(const struct sum_ll_args *args, void *stream);
};

extern const struct kernels kernels_cpu;

#endif
