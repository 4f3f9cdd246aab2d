// Checks of tensors that a host passes: rank, shape, dtype, strides, device, with the field named in the error.

#ifndef MOXIE_PLUGIN_TENSOR_H
#define MOXIE_PLUGIN_TENSOR_H

#include "plugin/status.h"

// What a tensor must be. A shape entry of -1 takes any extent >= 0.
struct tensor_want {
    const char *name;      // for the error: "batch.x"
    int32_t ndim;          // 1..4
    int64_t shape[4];
    uint32_t formats;      // 1u << MOXIE_FORMAT_{F32,BF16,F16,FP8_TENSOR}; or 0 and `integers`
    uint32_t integers;     // bit 0 int32, bit 1 int64, bit 2 uint8
    int32_t optional;      // data NULL is accepted
};

// MOXIE_OK, or MOXIE_E_INVALID / _UNSUPPORTED naming the tensor, what was seen and what was wanted. The last dimension must
// be compact, strides must be non-negative and the whole extent must not overflow. A tensor with a zero extent may have
// NULL data.
int32_t tensor_check(const moxie_tensor *tensor, const struct tensor_want *want, moxie_error *error);

// Of a checked tensor: the first byte, the bytes between two entries of dimension `dim`, bytes per element.
unsigned char *tensor_data(const moxie_tensor *tensor);
int64_t tensor_stride_bytes(const moxie_tensor *tensor, int32_t dim);
int64_t tensor_element_bytes(const moxie_tensor *tensor);
// MOXIE_FORMAT_* of a floating tensor (FP8_TENSOR for e4m3); 0 when it is none of ours.
int32_t tensor_format(const moxie_tensor *tensor);

#endif
