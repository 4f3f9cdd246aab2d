// What the CUDA kernels offer besides the table: loading them, and the fact that they are there.

#ifndef MOXIE_KERNELS_CUDA_CUDA_H
#define MOXIE_KERNELS_CUDA_CUDA_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

extern const struct kernels kernels_cuda;

// Loads every kernel on the current device and raises their shared memory limits, so that no launch
// has to. 0, or a cudaError_t.
int32_t kernels_cuda_load(void);

int32_t layer_cuda(const struct layer_args *args, void *stream);
int32_t layer_cuda_load(void);
int32_t route_cuda(const struct route_args *args, void *stream);
int32_t route_cuda_load(void);
int32_t gemms_cuda(const struct gemms_args *args, void *stream);
int32_t gather_units_cuda(void);
int32_t gemm_cuda_load(void);
int32_t dispatch_cuda(const struct dispatch_args *args, void *stream);
int32_t dispatch_cuda_load(void);
int32_t combine_cuda(const struct combine_args *args, void *stream);
int32_t combine_cuda_load(void);
int32_t sum_cuda(const struct sum_args *args, void *stream);
int32_t sum_cuda_load(void);
int32_t record_cuda(const struct record_args *args, void *stream);
int32_t record_cuda_load(void);
int32_t expand_cuda(const struct expand_args *args, void *stream);
int32_t expand_cuda_load(void);
int32_t quantise_cuda(const struct quantise_args *args, void *stream);
int32_t quantise_cuda_load(void);
int32_t signal_cuda(const struct signal_args *args, void *stream);
int32_t await_cuda(const struct await_args *args, void *stream);
int32_t regroup_cuda(const struct regroup_args *args, void *stream);
int32_t flags_cuda_load(void);
int32_t dispatch_ll_cuda(const struct dispatch_ll_args *args, void *stream);
int32_t sum_ll_cuda(const struct sum_ll_args *args, void *stream);
int32_t ll_cuda_load(void);
int32_t tally_cuda(const struct tally_args *args, void *stream);
int32_t tally_cuda_load(void);

#ifdef __cplusplus
}
#endif

#endif
