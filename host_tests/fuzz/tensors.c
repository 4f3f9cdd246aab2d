// Tensors of any shape, stride, type and alignment.

#include "host_tests/fuzz/tensors.h"

#include <string.h>

#define SPAN_BYTES_MAX 8192

static const moxie_dtype types[TYPES_COUNT] = {
    [F32] = {MOXIE_DTYPE_FLOAT, 32, 1}, [BF16] = {MOXIE_DTYPE_BFLOAT, 16, 1},
    [F16] = {MOXIE_DTYPE_FLOAT, 16, 1}, [E4M3] = {MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 1},
    [U8] = {MOXIE_DTYPE_UINT, 8, 1},    [I32] = {MOXIE_DTYPE_INT, 32, 1},
    [I64] = {MOXIE_DTYPE_INT, 64, 1},
};

// Bytes from the first element to past the last; 0 for none, and for what cannot be.
static uint64_t span_of(const moxie_tensor *tensor)
{
    uint64_t last = 0, step = 1;

    if (tensor->shape == NULL || tensor->ndim < 1 || tensor->ndim > 8) return 0;
    for (int32_t i = tensor->ndim - 1; i >= 0; i--) {
        int64_t extent = tensor->shape[i];

        if (extent <= 0 || (tensor->strides != NULL && extent > 1 && tensor->strides[i] < 0))
            return 0;
        if (tensor->strides != NULL) step = (uint64_t)tensor->strides[i];
        last = fuzz_add(last, fuzz_mul((uint64_t)extent - 1, step));
        if (tensor->strides == NULL) step = fuzz_mul(step, (uint64_t)extent);
    }
    return fuzz_mul(fuzz_add(last, 1), tensor->dtype.bits / 8);
}

static void back(struct maker *maker, moxie_tensor *tensor, uint8_t form)
{
    uint64_t span = span_of(tensor);
    size_t offset, bytes, known;
    unsigned char *data;

    if (span > SPAN_BYTES_MAX || tensor->byte_offset > SPAN_BYTES_MAX) {
        maker->absent = 1;
        tensor->data = fuzz_place(0, 0);
        return;
    }
    offset = (size_t)tensor->byte_offset;
    bytes = (size_t)span;
    // Now and then where no element of its type may lie.
    data = fuzz_place(bytes, (form & 0x30) == 0x30 ? 1u << (form & 3) : 0);
    // Not all from the input, so that it stays short.
    known = bytes < 32 ? bytes : 32;
    if (known > 0) fuzz_bytes(maker->input, data, known);
    for (size_t i = known; i < bytes; i++)
        data[i] = data[i - known];
    tensor->data = data - offset;
}

static int64_t take_extent(struct fuzz_input *input, int64_t right)
{
    uint8_t form = fuzz_u8(input);

    if (form < 128) return right;
    if (form < 144) return 0;
    if (form < 168 && right >= 0 && right < INT32_MAX) return right + (form & 3) - 1;
    return fuzz_i64(input);
}

static void take_shape(struct fuzz_input *input, moxie_tensor *tensor, const int64_t *right,
                       int32_t ndim)
{
    size_t entries = tensor->ndim >= 1 && tensor->ndim <= 8 ? (size_t)tensor->ndim : 0;
    uint8_t form = fuzz_u8(input);

    tensor->shape = fuzz_place(entries * sizeof *tensor->shape, 0);
    for (size_t i = 0; i < entries; i++)
        tensor->shape[i] = take_extent(input, (int32_t)i < ndim ? right[i] : 1);
    if (form == 0xff) tensor->shape = NULL;
    if ((form & 1) == 0) return;
    tensor->strides = fuzz_place(entries * sizeof *tensor->strides, 0);
    for (size_t i = entries; i > 0; i--) {
        int64_t compact = 1;

        if (i < entries &&
            __builtin_mul_overflow(tensor->strides[i], right[i < (size_t)ndim ? i : 0], &compact))
            compact = 1;
        tensor->strides[i - 1] = take_extent(input, compact);
    }
}

moxie_tensor take_tensor(struct maker *maker, const int64_t *right, int32_t ndim, enum type type)
{
    struct fuzz_input *input = maker->input;
    uint8_t form = fuzz_u8(input);
    int plain = maker->made < 32 && (maker->plain >> maker->made & 1u) != 0;
    moxie_tensor tensor = {.device = {MOXIE_DEVICE_CPU, 0}, .ndim = ndim, .dtype = types[type]};

    maker->made++;
    if (form < 96 || plain) {
        tensor.shape = fuzz_place((size_t)ndim * sizeof *tensor.shape, 0);
        memcpy(tensor.shape, right, (size_t)ndim * sizeof *tensor.shape);
        back(maker, &tensor, 0);
        return tensor;
    }
    maker->odd++;
    if (form == 0xff) return tensor;
    if ((form & 4) != 0) tensor.dtype = types[fuzz_below(input, TYPES_COUNT)];
    if ((form & 8) != 0 && fuzz_u8(input) > 192) {
        tensor.ndim = (int32_t)fuzz_i64(input);
        fuzz_bytes(input, &tensor.dtype, sizeof tensor.dtype);
        tensor.device.type = (int32_t)fuzz_below(input, 4);
    }
    if ((form & 0x40) != 0) tensor.byte_offset = (uint64_t)fuzz_i64(input);
    take_shape(input, &tensor, right, ndim);
    back(maker, &tensor, form);
    return tensor;
}

moxie_tensor no_tensor(void)
{
    return (moxie_tensor){.data = NULL};
}
