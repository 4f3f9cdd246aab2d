// Structs and tensors as a host passes them.

#include "host_tests/mock_plugin/mock.h"

#include <stddef.h>
#include <string.h>

#define STRUCT_BYTES_MAX 4096
#define BYTES_MAX        ((int64_t)1 << 62)

#define SHAPE(type, first) .name = #type, .first_bytes = first, .bytes = sizeof(type)
#define RESERVED(type)     .reserved = offsetof(type, reserved0)

// The second number is the size that ABI 0.1 published; it never changes.
const struct shape shape_request = {SHAPE(moxie_request, 24), RESERVED(moxie_request)};
const struct shape shape_host = {SHAPE(moxie_host, 136)};
const struct shape shape_step = {SHAPE(moxie_step, 48)};
const struct shape shape_batch = {SHAPE(moxie_batch, 264)};
const struct shape shape_call = {SHAPE(moxie_call, 24), RESERVED(moxie_call)};
const struct shape shape_weights = {SHAPE(moxie_weights, 24), RESERVED(moxie_weights)};
const struct shape shape_matrix = {SHAPE(moxie_matrix, 216), RESERVED(moxie_matrix)};
const struct shape shape_rows = {SHAPE(moxie_rows, 128), RESERVED(moxie_rows)};
const struct shape shape_slab = {SHAPE(moxie_slab, 200), RESERVED(moxie_slab)};
const struct shape shape_probe = {SHAPE(moxie_probe, 192)};
const struct shape shape_config_entry = {SHAPE(moxie_config_entry, 40)};
const struct shape shape_stats = {SHAPE(moxie_stats, 88)};
const struct shape shape_captured = {SHAPE(moxie_captured, 56)};
const struct shape shape_routing = {SHAPE(moxie_routing, 88), RESERVED(moxie_routing)};

static uint32_t u32_at(const void *bytes, uint32_t offset)
{
    uint32_t word;

    memcpy(&word, (const unsigned char *)bytes + offset, sizeof word);
    return word;
}

int32_t struct_read(const struct caller *caller, const struct shape *shape, const char *what,
                    const void *from, void *to)
{
    const unsigned char *bytes = from;
    uint32_t declared;
    int ignored = HAS_FAULT(FAULT_IGNORED_TAIL);

    memset(to, 0, shape->bytes);
    if (from == NULL) return fail_with(caller, MOXIE_E_INVALID, "%s is NULL", what);
    declared = u32_at(from, 0);
    if (HAS_FAULT(FAULT_SHORT_STRUCT) && declared < shape->first_bytes) declared = shape->bytes;
    if (declared < shape->first_bytes || declared > STRUCT_BYTES_MAX)
        return fail_with(caller, MOXIE_E_INVALID,
                         "%s: struct_size %u; set it to sizeof(%s), which is %u", what, declared,
                         shape->name, shape->bytes);
    ignored |= HAS_FAULT(FAULT_GROWN_REQUEST) && shape == &shape_request;
    for (uint32_t at = shape->bytes; at < declared && !ignored; at++) {
        if (bytes[at] != 0)
            return fail_with(caller, MOXIE_E_UNSUPPORTED,
                             "%s: byte %u of %s is not zero, and this plugin knows %u bytes", what,
                             at, shape->name, shape->bytes);
    }
    if (shape->reserved != 0 && u32_at(from, shape->reserved) != 0)
        return fail_with(caller, MOXIE_E_INVALID, "%s: the reserved field at offset %u is not 0",
                         what, shape->reserved);
    memcpy(to, from, declared < shape->bytes ? declared : shape->bytes);
    memcpy(to, &shape->bytes, sizeof shape->bytes);
    return MOXIE_OK;
}

void struct_write(const struct shape *shape, const void *from, void *to)
{
    uint32_t declared = u32_at(to, 0);
    uint32_t known = declared < shape->bytes ? declared : shape->bytes;

    memcpy((unsigned char *)to + 4, (const unsigned char *)from + 4, known - 4);
}

// ---- Tensors -----------------------------------------------------------------------------------

struct dtype_row {
    uint8_t code, bits;
    uint32_t types; // what it may stand for
};

static const struct dtype_row dtypes[] = {
    {MOXIE_DTYPE_FLOAT, 32, TYPE_F32},
    {MOXIE_DTYPE_BFLOAT, 16, TYPE_BF16},
    {MOXIE_DTYPE_FLOAT, 16, TYPE_F16},
    {MOXIE_DTYPE_FLOAT8_E4M3FN, 8, TYPE_E4M3},
    {MOXIE_DTYPE_UINT, 8, TYPE_U8 | TYPE_E4M3},
    {MOXIE_DTYPE_INT, 32, TYPE_I32},
    {MOXIE_DTYPE_INT, 64, TYPE_I64},
};

// The one wanted type that the tensor has; 0: none. fp8 may come as bytes.
static uint32_t type_of(const moxie_tensor *tensor, uint32_t wanted)
{
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        uint32_t both = dtypes[i].types & wanted;

        if (tensor->dtype.code == dtypes[i].code && tensor->dtype.bits == dtypes[i].bits &&
            tensor->dtype.lanes == 1)
            return (both & TYPE_U8) != 0 ? TYPE_U8 : both;
    }
    return 0;
}

static int32_t check_shape(const struct caller *caller, const struct want *want,
                           const moxie_tensor *tensor)
{
    if (tensor->ndim != want->ndim || tensor->shape == NULL)
        return fail_with(caller, MOXIE_E_INVALID, "%s: %d dimensions; want %d", want->name,
                         tensor->ndim, want->ndim);
    for (int32_t i = 0; i < want->ndim; i++) {
        if (tensor->shape[i] < 0 || (want->shape[i] >= 0 && tensor->shape[i] != want->shape[i]))
            return fail_with(caller, MOXIE_E_INVALID, "%s: dimension %d is %lld; want %lld",
                             want->name, i, (long long)tensor->shape[i], (long long)want->shape[i]);
    }
    return MOXIE_OK;
}

// Fills the strides, and refuses what no address can reach.
static int32_t read_strides(const struct caller *caller, const struct want *want,
                            const moxie_tensor *tensor, struct view *view)
{
    int64_t compact = type_bytes(view->type), reach = 0, step;

    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        int64_t extent = tensor->shape[i];

        view->shape[i] = extent;
        view->stride_bytes[i] = compact;
        if (tensor->strides != NULL &&
            (tensor->strides[i] < 0 ||
             __builtin_mul_overflow(tensor->strides[i], type_bytes(view->type),
                                    &view->stride_bytes[i])))
            return fail_with(caller, MOXIE_E_INVALID, "%s: stride %d is %lld", want->name, i,
                             (long long)tensor->strides[i]);
        if (__builtin_mul_overflow(compact, extent > 0 ? extent : 1, &compact) ||
            __builtin_mul_overflow(view->stride_bytes[i], extent > 0 ? extent - 1 : 0, &step) ||
            __builtin_add_overflow(reach, step, &reach) || reach > BYTES_MAX)
            return fail_with(caller, MOXIE_E_INVALID, "%s: its size overflows", want->name);
    }
    if (view->shape[view->ndim - 1] > 1 &&
        view->stride_bytes[view->ndim - 1] != type_bytes(view->type))
        return fail_with(caller, MOXIE_E_UNSUPPORTED, "%s: the last dimension is not compact",
                         want->name);
    return MOXIE_OK;
}

int32_t view_read(const struct caller *caller, const struct want *want, const moxie_tensor *tensor,
                  struct view *view)
{
    int32_t st = MOXIE_OK;

    *view = (struct view){.ndim = want->ndim};
    if (tensor->data == NULL && want->optional) return MOXIE_OK;
    TRY(check_shape(caller, want, tensor));
    view->type = type_of(tensor, want->types);
    if (view->type == 0)
        TRY(fail_with(caller, MOXIE_E_UNSUPPORTED, "%s: dtype code %d, %d bits, %d lanes",
                      want->name, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes));
    TRY(read_strides(caller, want, tensor, view));
    if (view_bytes(view) == 0 && !HAS_FAULT(FAULT_NULL_REFUSED)) return MOXIE_OK;
    if (tensor->data == NULL)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s: data is NULL", want->name));
    if (tensor->device.type != MOXIE_DEVICE_CPU)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s: on device type %d; want the CPU", want->name,
                      tensor->device.type));
    if (tensor->byte_offset > (uint64_t)BYTES_MAX)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s: its size overflows", want->name));
    view->data = (unsigned char *)tensor->data;
    if (!HAS_FAULT(FAULT_IGNORED_OFFSET)) view->data += tensor->byte_offset;
    if (type_bytes(view->type) >= 4 &&
        (uintptr_t)view->data % (uintptr_t)type_bytes(view->type) != 0)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s: data is not aligned to its elements",
                      want->name));
out:
    return st;
}

int64_t view_bytes(const struct view *view)
{
    int64_t bytes = type_bytes(view->type);

    for (int32_t i = 0; i < view->ndim; i++) {
        if (view->shape[i] == 0) return 0;
        bytes += (view->shape[i] - 1) * view->stride_bytes[i];
    }
    return bytes;
}

// Column ranges of one wider array lie within each other's extent and still share no byte.
static int columns_apart(const struct view *low, const struct view *high)
{
    uintptr_t pitch = (uintptr_t)low->stride_bytes[0];
    uintptr_t low_bytes = (uintptr_t)(low->shape[1] * type_bytes(low->type));
    uintptr_t high_bytes = (uintptr_t)(high->shape[1] * type_bytes(high->type));
    uintptr_t gap;

    if (pitch == 0 || pitch != (uintptr_t)high->stride_bytes[0]) return 0;
    gap = ((uintptr_t)high->data - (uintptr_t)low->data) % pitch;
    return gap >= low_bytes && gap + high_bytes <= pitch;
}

int view_overlap(const struct view *a, const struct view *b)
{
    uintptr_t a_first = (uintptr_t)a->data, b_first = (uintptr_t)b->data;
    uintptr_t a_bytes = (uintptr_t)view_bytes(a), b_bytes = (uintptr_t)view_bytes(b);

    if (a_bytes == 0 || b_bytes == 0) return 0;
    if (a_first >= b_first + b_bytes || b_first >= a_first + a_bytes) return 0;
    return a_first < b_first ? !columns_apart(a, b) : !columns_apart(b, a);
}

int view_rows_overlap(const struct view *view)
{
    int64_t inner = type_bytes(view->type);

    if (view_bytes(view) == 0) return 0;
    for (int32_t i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] > 1 && view->stride_bytes[i] < inner) return 1;
        inner += (view->shape[i] - 1) * view->stride_bytes[i];
    }
    return 0;
}

unsigned char *view_at(const struct view *view, int64_t i, int64_t j, int64_t k)
{
    return view->data + i * view->stride_bytes[0] + j * view->stride_bytes[1] +
           k * view->stride_bytes[2];
}

double view_number(const struct view *view, int64_t i, int64_t j, int64_t k)
{
    return number_load(view->type, view_at(view, i, j, k));
}

int64_t view_integer(const struct view *view, int64_t i, int64_t j)
{
    int32_t narrow;
    int64_t wide;

    if (view->type == TYPE_I64) {
        memcpy(&wide, view_at(view, i, j, 0), sizeof wide);
        return wide;
    }
    memcpy(&narrow, view_at(view, i, j, 0), sizeof narrow);
    return narrow;
}
