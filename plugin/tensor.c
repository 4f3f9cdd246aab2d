// Checks of tensors that a host passes.

#include "plugin/tensor.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

struct tensor_type {
    uint32_t bit;
    uint8_t code, bits;
    const char *name;
};

static const struct tensor_type tensor_types[] = {
    {1u << MOXIE_FORMAT_F32, MOXIE_DTYPE_FLOAT, 32, "float32"},
    {1u << MOXIE_FORMAT_BF16, MOXIE_DTYPE_BFLOAT, 16, "bfloat16"},
    {1u << MOXIE_FORMAT_F16, MOXIE_DTYPE_FLOAT, 16, "float16"},
    {TENSOR_E4M3, MOXIE_DTYPE_FLOAT8_E4M3FN, 8, "float8_e4m3fn"},
    {TENSOR_E4M3, MOXIE_DTYPE_UINT, 8, "uint8"},
    {TENSOR_INT32, MOXIE_DTYPE_INT, 32, "int32"},
    {TENSOR_INT64, MOXIE_DTYPE_INT, 64, "int64"},
    {TENSOR_UINT8, MOXIE_DTYPE_UINT, 8, "uint8"},
};

#define TENSOR_TYPES_COUNT (sizeof tensor_types / sizeof tensor_types[0])

static int dtype_is(const moxie_tensor *tensor, const struct tensor_type *type)
{
    return tensor->dtype.code == type->code && tensor->dtype.bits == type->bits &&
           tensor->dtype.lanes == 1;
}

static int dtype_wanted(const moxie_tensor *tensor, uint32_t types)
{
    for (size_t i = 0; i < TENSOR_TYPES_COUNT; i++) {
        if ((types & tensor_types[i].bit) != 0 && dtype_is(tensor, &tensor_types[i])) return 1;
    }
    return 0;
}

static int32_t refuse_dtype(const moxie_tensor *tensor, const struct tensor_want *want,
                            moxie_error *error)
{
    char names[96] = "";
    size_t used = 0;

    for (size_t i = 0; i < TENSOR_TYPES_COUNT; i++) {
        if ((want->types & tensor_types[i].bit) == 0 || used >= sizeof names) continue;
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", used > 0 ? ", " : "",
                                 tensor_types[i].name);
    }
    return fail_with(error, MOXIE_E_UNSUPPORTED, "%s: dtype code %d, %d bits, %d lanes; want %s%s",
                     want->name, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes, names,
                     tensor->dtype.lanes != 1 ? " of 1 lane" : "");
}

// Of what is wanted, -1 is any extent.
static void print_shape(char *text, size_t capacity, const int64_t *shape, int32_t ndim,
                        int is_wanted)
{
    size_t used = 0;

    for (int32_t i = 0; i < ndim && used < capacity; i++) {
        const char *separator = i > 0 ? ", " : "";

        if (is_wanted && shape[i] < 0)
            used += (size_t)snprintf(text + used, capacity - used, "%s*", separator);
        else
            used +=
                (size_t)snprintf(text + used, capacity - used, "%s%" PRId64, separator, shape[i]);
    }
}

static int32_t check_shape(const moxie_tensor *tensor, const struct tensor_want *want,
                           moxie_error *error)
{
    char seen[96] = "", wanted[96] = "";
    int same = tensor->ndim == want->ndim && tensor->shape != NULL;

    for (int32_t i = 0; same && i < want->ndim; i++)
        same = tensor->shape[i] >= 0 && (want->shape[i] < 0 || tensor->shape[i] == want->shape[i]);
    if (same) return MOXIE_OK;
    print_shape(wanted, sizeof wanted, want->shape, want->ndim, 1);
    if (tensor->shape != NULL && tensor->ndim >= 1 && tensor->ndim <= 8)
        print_shape(seen, sizeof seen, tensor->shape, tensor->ndim, 0);
    return fail_with(error, MOXIE_E_INVALID, "%s: %d dimensions [%s]; want [%s]", want->name,
                     tensor->ndim, seen, wanted);
}

// The bytes from the first to past the last element; 0 for an empty tensor, -1 when they overflow,
// or those of as many elements in a row would. The strides have passed check_strides.
static int64_t extent_bytes(const moxie_tensor *tensor)
{
    const int64_t element = tensor_element_bytes(tensor);
    const int empty = tensor_is_empty(tensor);
    int64_t compact = element, last = 0;

    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        int64_t extent = tensor->shape[i] > 0 ? tensor->shape[i] : 1;
        int64_t stride = tensor->strides != NULL && extent > 1 && !empty
                             ? tensor->strides[i] * element
                             : compact;
        int64_t step;

        if (!size_mul(extent - 1, stride, &step) || !size_add(last, step, &last) ||
            !size_mul(compact, extent, &compact))
            return -1;
    }
    return empty ? 0 : last + element;
}

static int32_t check_strides(const moxie_tensor *tensor, const struct tensor_want *want,
                             moxie_error *error)
{
    int64_t bytes;

    if (tensor->strides == NULL || tensor_is_empty(tensor)) return MOXIE_OK;
    for (int32_t i = 0; i < tensor->ndim; i++) {
        if (tensor->shape[i] < 2) continue; // exporters write any stride there
        if (tensor->strides[i] < 0 ||
            !size_mul(tensor->strides[i], tensor_element_bytes(tensor), &bytes))
            return fail_with(error, MOXIE_E_INVALID,
                             "%s: stride %" PRId64 " of dimension %d; want 0 or more elements, of "
                             "2^62 bytes at most",
                             want->name, tensor->strides[i], i);
    }
    if (tensor->shape[tensor->ndim - 1] > 1 && tensor->strides[tensor->ndim - 1] != 1)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: the last dimension has stride %" PRId64 "; want 1 (compact)",
                         want->name, tensor->strides[tensor->ndim - 1]);
    return MOXIE_OK;
}

static const char *memory_of(int32_t device_type)
{
    if (device_type == MOXIE_DEVICE_CPU) return ", the CPU's memory";
    return device_type == MOXIE_DEVICE_CUDA ? ", a GPU's memory" : "";
}

static int32_t check_device(const moxie_tensor *tensor, const struct tensor_want *want,
                            moxie_error *error)
{
    if (tensor->device.type != want->device.type)
        return fail_with(error, MOXIE_E_INVALID,
                         "%s: on device type %d%s; want %d%s (where tensors of an instance lie is "
                         "what the key device says)",
                         want->name, tensor->device.type, memory_of(tensor->device.type),
                         want->device.type, memory_of(want->device.type));
    if (tensor->device.type == MOXIE_DEVICE_CPU || tensor->device.id == want->device.id)
        return MOXIE_OK;
    return fail_with(
        error, MOXIE_E_INVALID,
        "%s: on device %d, but what this instance has lies on device %d; move it there, "
        "or open an instance for each device",
        want->name, tensor->device.id, want->device.id);
}

int32_t tensor_check(const moxie_tensor *tensor, const struct tensor_want *want, moxie_error *error)
{
    int32_t st = MOXIE_OK;
    int64_t bytes;

    if (tensor->data == NULL && want->optional) goto out;
    TRY(check_shape(tensor, want, error));
    if (!dtype_wanted(tensor, want->types)) TRY(refuse_dtype(tensor, want, error));
    TRY(check_strides(tensor, want, error));
    bytes = extent_bytes(tensor);
    if (bytes < 0 || tensor->byte_offset > (uint64_t)1 << 62)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "%s: its size, or its byte_offset of %" PRIu64
                      ", overflows; want 2^62 bytes at most",
                      want->name, tensor->byte_offset));
    if (bytes > 0 && tensor->data == NULL)
        TRY(fail_with(error, MOXIE_E_INVALID, "%s: data is NULL", want->name));
    if (bytes > 0) TRY(check_device(tensor, want, error));
    // A CPU's kernels read 16-bit numbers wherever they lie: checkpoints are mapped as they are.
    if (bytes > 0 && (tensor->dtype.bits >= 32 || want->device.type != MOXIE_DEVICE_CPU) &&
        (uintptr_t)tensor_data(tensor) % (uintptr_t)tensor_element_bytes(tensor) != 0)
        TRY(fail_with(error, MOXIE_E_INVALID, "%s: data at %p; want a multiple of %" PRId64,
                      want->name, (void *)tensor_data(tensor), tensor_element_bytes(tensor)));
out:
    return st;
}

int64_t tensor_columns(const moxie_tensor *tensor)
{
    if (tensor->shape == NULL || tensor->ndim < 1 || tensor->ndim > 8) return -1;
    return tensor->shape[tensor->ndim - 1];
}

int32_t tensor_format(const moxie_tensor *tensor)
{
    static const int32_t formats[] = {MOXIE_FORMAT_F32, MOXIE_FORMAT_BF16, MOXIE_FORMAT_F16,
                                      MOXIE_FORMAT_FP8_TENSOR};

    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        if (dtype_wanted(tensor, 1u << formats[i])) return formats[i];
    }
    return 0;
}

// Two column ranges of one wider array: rows equally far apart, and no column in common.
static int columns_apart(const moxie_tensor *a, const moxie_tensor *b)
{
    uintptr_t pitch = (uintptr_t)tensor_stride_bytes(a, 0);
    uintptr_t a_first = (uintptr_t)tensor_data(a), b_first = (uintptr_t)tensor_data(b);
    uintptr_t a_bytes, b_bytes;

    if (a->ndim != 2 || b->ndim != 2) return 0;
    a_bytes = (uintptr_t)(a->shape[1] * tensor_element_bytes(a));
    b_bytes = (uintptr_t)(b->shape[1] * tensor_element_bytes(b));
    if (pitch == 0 || pitch != (uintptr_t)tensor_stride_bytes(b, 0)) return 0;
    if (b_first < a_first)
        return (a_first - b_first) % pitch >= b_bytes &&
               (a_first - b_first) % pitch + a_bytes <= pitch;
    return (b_first - a_first) % pitch >= a_bytes && (b_first - a_first) % pitch + b_bytes <= pitch;
}

int tensor_overlap(const moxie_tensor *a, const moxie_tensor *b)
{
    int64_t a_bytes, b_bytes;
    uintptr_t a_first, b_first;

    if (a->data == NULL || b->data == NULL) return 0;
    a_bytes = extent_bytes(a);
    b_bytes = extent_bytes(b);
    if (a_bytes <= 0 || b_bytes <= 0) return 0;
    a_first = (uintptr_t)tensor_data(a);
    b_first = (uintptr_t)tensor_data(b);
    if (a_first >= b_first + (uintptr_t)b_bytes || b_first >= a_first + (uintptr_t)a_bytes)
        return 0;
    return !columns_apart(a, b);
}

int tensor_rows_overlap(const moxie_tensor *tensor)
{
    int64_t inner_bytes = tensor_element_bytes(tensor);

    if (tensor_is_empty(tensor)) return 0;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        int64_t stride_bytes = tensor_stride_bytes(tensor, i);

        if (tensor->shape[i] > 1 && stride_bytes < inner_bytes) return 1;
        inner_bytes += (tensor->shape[i] - 1) * stride_bytes;
    }
    return 0;
}

int32_t tensor_check_rows_apart(const moxie_tensor *tensor, const char *name, moxie_error *error)
{
    if (!tensor_rows_overlap(tensor)) return MOXIE_OK;
    return fail_with(error, MOXIE_E_INVALID,
                     "%s: its rows overlap each other; give each memory of its own", name);
}

moxie_tensor tensor_make(void *data, int32_t ndim, int64_t *dims, int64_t *strides, uint32_t type)
{
    moxie_tensor tensor = {.data = data,
                           .device = {MOXIE_DEVICE_CPU, 0},
                           .ndim = ndim,
                           .shape = dims,
                           .strides = strides};

    for (size_t i = 0; i < TENSOR_TYPES_COUNT; i++) {
        if (tensor_types[i].bit != type) continue;
        tensor.dtype.code = tensor_types[i].code;
        tensor.dtype.bits = tensor_types[i].bits;
        tensor.dtype.lanes = 1;
        break;
    }
    return tensor;
}
