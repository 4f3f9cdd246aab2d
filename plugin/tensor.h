// Checks of tensors that a host passes: rank, shape, dtype, strides, device, with the tensor named
// in the error.

#ifndef MOXIE_PLUGIN_TENSOR_H
#define MOXIE_PLUGIN_TENSOR_H

#include "plugin/status.h"

#define TENSOR_FORMATS_FLOAT                                                                       \
    (1u << MOXIE_FORMAT_F32 | 1u << MOXIE_FORMAT_BF16 | 1u << MOXIE_FORMAT_F16)
#define TENSOR_E4M3  (1u << MOXIE_FORMAT_FP8_TENSOR) // float8_e4m3fn, or its bytes as uint8
#define TENSOR_INT32 (1u << 28)
#define TENSOR_INT64 (1u << 29)
#define TENSOR_UINT8 (1u << 30)

// What a tensor must be.
struct tensor_want {
    const char *name;    // for the error: "batch.x"
    int64_t shape[4];    // -1 takes any extent
    int32_t ndim;        // 1..4
    uint32_t types;      // 1u << MOXIE_FORMAT_* and TENSOR_* bits
    moxie_device device; // a CPU's id is not looked at
    int32_t optional;    // 1: data NULL is accepted
};

// MOXIE_OK, or MOXIE_E_INVALID / _UNSUPPORTED naming the tensor, what was seen and what was wanted.
// The last dimension must be compact, the others may have any non-negative stride; the extent in
// bytes must not overflow. A tensor with a zero extent may have NULL data and any strides, and lie
// on any device.
// Elements must be aligned to their size, on a CPU those of 4 and 8 bytes.
int32_t tensor_check(const moxie_tensor *tensor, const struct tensor_want *want,
                     moxie_error *error);

// Of a checked tensor: the first byte (NULL for none), bytes per element, the bytes between two
// entries of dimension `dim`: where there are not two, as if compact, because exporters write any
// stride there; and whether it has no element.
static inline unsigned char *tensor_data(const moxie_tensor *tensor)
{
    return tensor->data == NULL ? NULL : (unsigned char *)tensor->data + tensor->byte_offset;
}

static inline int64_t tensor_element_bytes(const moxie_tensor *tensor)
{
    return tensor->dtype.bits / 8;
}

static inline int tensor_is_empty(const moxie_tensor *tensor)
{
    for (int32_t i = 0; i < tensor->ndim; i++)
        if (tensor->shape[i] == 0) return 1;
    return 0;
}

static inline int64_t tensor_stride_bytes(const moxie_tensor *tensor, int32_t dim)
{
    int64_t stride = tensor_element_bytes(tensor);

    if (tensor->strides != NULL && tensor->shape[dim] > 1 && !tensor_is_empty(tensor))
        return tensor->strides[dim] * stride;
    for (int32_t i = dim + 1; i < tensor->ndim; i++)
        stride *= tensor->shape[i];
    return stride;
}

// Of any tensor: MOXIE_FORMAT_F32, _BF16, _F16, _FP8_TENSOR (e4m3), or 0; the last extent, or -1.
int32_t tensor_format(const moxie_tensor *tensor);
int64_t tensor_columns(const moxie_tensor *tensor);

// 1 when two checked tensors may have a byte in common: they do not when one ends before the other
// begins, nor, 2-D, as different columns of one wider array.
int tensor_overlap(const moxie_tensor *a, const moxie_tensor *b);
// 1 when two rows of a checked tensor have a byte in common: nothing can be written there.
int tensor_rows_overlap(const moxie_tensor *tensor);
// MOXIE_E_INVALID, in the name of what is written, when they have.
int32_t tensor_check_rows_apart(const moxie_tensor *tensor, const char *name, moxie_error *error);

// A compact or strided CPU tensor of ndim dimensions over `data`; `dims` must outlive it, strides,
// when given, too.
moxie_tensor tensor_make(void *data, int32_t ndim, int64_t *dims, int64_t *strides, uint32_t type);

#endif
