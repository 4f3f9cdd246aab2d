// Weights as a host describes them.

#include "plugin/weights.h"

#include "kernels/flags.h"
#include "plugin/tensor.h"

#include <inttypes.h>

_Static_assert((int)FORMAT_F32 == MOXIE_FORMAT_F32 && (int)FORMAT_BF16 == MOXIE_FORMAT_BF16 &&
                   (int)FORMAT_F16 == MOXIE_FORMAT_F16 &&
                   (int)FORMAT_FP8_TENSOR == MOXIE_FORMAT_FP8_TENSOR &&
                   (int)FORMAT_FP8_CHANNEL == MOXIE_FORMAT_FP8_CHANNEL &&
                   (int)FORMAT_FP8_BLOCK128 == MOXIE_FORMAT_FP8_BLOCK128 &&
                   (int)FORMAT_INT4_G32 == MOXIE_FORMAT_INT4_G32 &&
                   (int)FORMAT_MXFP4 == MOXIE_FORMAT_MXFP4 &&
                   (int)FORMAT_NVFP4 == MOXIE_FORMAT_NVFP4 && (int)FORMAT_FP8 == MOXIE_FORMAT_FP8,
               "kernels and ABI number formats alike");
_Static_assert((int)ORDER_PLAIN == MOXIE_ORDER_PLAIN && (int)ORDER_GATE_UP == MOXIE_ORDER_GATE_UP &&
                   (int)ORDER_UP_GATE == MOXIE_ORDER_UP_GATE &&
                   (int)ORDER_INTERLEAVED == MOXIE_ORDER_INTERLEAVED,
               "kernels and ABI number row orders alike");
_Static_assert(KERNEL_RANKS_MAX == MOXIE_RANKS_MAX && KERNEL_TOP_K_MAX == MOXIE_TOP_K_MAX &&
                   KERNEL_SLOTS_MAX == MOXIE_SLOTS_MAX,
               "what the ABI allows has room in the kernels' arrays");

// One matrix while it is being read.
struct reading {
    const moxie_matrix *matrix;
    const char *values, *scales, *globals, *bias; // names for errors
    int64_t experts, n, k;
    int64_t block_rows, block_columns; // fp8_block128: scales per expert
    int32_t halves;                    // 2: a gated w1
    moxie_device device;
};

static int is_packed(int32_t format)
{
    return format == MOXIE_FORMAT_INT4_G32 || format == MOXIE_FORMAT_MXFP4 ||
           format == MOXIE_FORMAT_NVFP4;
}

static int is_float(int32_t format)
{
    return format == MOXIE_FORMAT_F32 || format == MOXIE_FORMAT_BF16 || format == MOXIE_FORMAT_F16;
}

static uint32_t values_type(int32_t format)
{
    if (is_float(format)) return 1u << format;
    return is_packed(format) ? TENSOR_UINT8 : TENSOR_E4M3;
}

#define MAP_STRIDE_LIMIT (INT64_C(1) << 40) // of all rows of an expert, too

// What a tensor map can describe.
static int32_t check_device_values(const struct reading *r, const struct weight_view *view,
                                   moxie_error *error)
{
    uintptr_t bits = (uintptr_t)view->values | (uintptr_t)view->row_stride_bytes;

    if (view->block_offset != 0)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: block_offset %d; on this device a shard begins with a block, so want "
                         "0: cut intermediate_size at multiples of 128",
                         r->values, view->block_offset);
    if (r->experts > 1) bits |= (uintptr_t)view->expert_stride_bytes;
    if (bits % 16 != 0)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: at %p with strides of %lld and %lld bytes; want multiples of 16",
                         r->values, view->values, (long long)view->expert_stride_bytes,
                         (long long)view->row_stride_bytes);
    if ((r->experts > 1 && view->expert_stride_bytes >= MAP_STRIDE_LIMIT) ||
        view->row_stride_bytes >= MAP_STRIDE_LIMIT / (r->n > r->k ? r->n : r->k))
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: experts %lld and rows %lld bytes apart; want one expert's rows, and "
                         "the next expert, within 2^40 bytes",
                         r->values, (long long)view->expert_stride_bytes,
                         (long long)view->row_stride_bytes);
    return MOXIE_OK;
}

static int32_t read_values(const struct reading *r, struct weight_view *view, moxie_error *error)
{
    const moxie_matrix *matrix = r->matrix;
    int rows_in = matrix->orientation == MOXIE_ROWS_IN;
    int64_t columns = is_packed(matrix->format) ? r->k / 2 : r->k;
    struct tensor_want want = {
        .name = r->values,
        .shape = {r->experts, rows_in ? r->k : r->n, rows_in ? r->n : columns},
        .ndim = 3,
        .types = values_type(matrix->format),
        .device = r->device};
    int32_t st = MOXIE_OK;

    if (rows_in && !is_float(matrix->format))
        TRY(fail_with(error, MOXIE_E_UNSUPPORTED,
                      "%s: MOXIE_ROWS_IN is for f32, bf16 and f16; use MOXIE_ROWS_OUT [E, N, K]",
                      r->values));
    TRY(tensor_check(&matrix->values, &want, error));
    view->values = tensor_data(&matrix->values);
    view->expert_stride_bytes = tensor_stride_bytes(&matrix->values, 0);
    view->row_stride_bytes = tensor_stride_bytes(&matrix->values, 1);
    if (r->device.type != MOXIE_DEVICE_CPU) TRY(check_device_values(r, view, error));
out:
    return st;
}

// What the scales of each format look like: dimensions after [E], and types.
static void scales_want(const struct reading *r, struct tensor_want *want)
{
    *want = (struct tensor_want){.name = r->scales, .ndim = 3, .device = r->device};
    want->shape[0] = r->experts;
    want->shape[1] = r->n;
    want->types = 1u << MOXIE_FORMAT_F32;
    switch (r->matrix->format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        want->ndim = r->halves == 2 && r->matrix->scales.ndim == 2 ? 2 : 1;
        want->shape[1] = 2;
        break;
    case MOXIE_FORMAT_FP8_CHANNEL:
        want->ndim = 2;
        break;
    case MOXIE_FORMAT_FP8_BLOCK128:
        want->shape[1] = r->block_rows;
        want->shape[2] = r->block_columns;
        break;
    case MOXIE_FORMAT_INT4_G32:
        want->shape[2] = r->k / 32;
        want->types = TENSOR_FORMATS_FLOAT;
        break;
    case MOXIE_FORMAT_MXFP4:
        want->shape[2] = r->k / 32;
        want->types = TENSOR_UINT8;
        break;
    default:
        want->shape[2] = r->k / 16;
        want->types = TENSOR_E4M3;
        break;
    }
}

// Of fp8_block128. A GPU counts the floats of an expert in 32 bits.
static int32_t check_device_scales(const struct reading *r, const struct weight_view *view,
                                   moxie_error *error)
{
    const int64_t row_floats = view->scale_row_stride_bytes / (int64_t)sizeof(float);

    if (r->block_rows < 2 || row_floats <= INT32_MAX / (r->block_rows - 1)) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "%s: %" PRId64 " bytes between the %" PRId64
                     " block rows of an expert; this device takes less than 8 GiB from the first "
                     "to the last: want them compact, or %" PRId64 " bytes apart at most",
                     r->scales, view->scale_row_stride_bytes, r->block_rows,
                     INT32_MAX / (r->block_rows - 1) * (int64_t)sizeof(float));
}

static int32_t read_scales(const struct reading *r, struct weight_view *view, moxie_error *error)
{
    const moxie_tensor *scales = &r->matrix->scales;
    struct tensor_want want;
    int32_t st = MOXIE_OK;

    if (is_float(r->matrix->format)) {
        if (scales->data != NULL)
            TRY(fail_with(error, MOXIE_E_INVALID, "%s: given, but the format has no scales",
                          r->scales));
        goto out;
    }
    scales_want(r, &want);
    TRY(tensor_check(scales, &want, error));
    view->scales = tensor_data(scales);
    view->scale_format = tensor_format(scales);
    view->scale_expert_stride_bytes = tensor_stride_bytes(scales, 0);
    if (scales->ndim > 1) view->scale_row_stride_bytes = tensor_stride_bytes(scales, 1);
    if (r->matrix->format == MOXIE_FORMAT_FP8_TENSOR) view->global_stride = scales->ndim;
    if (r->matrix->format == MOXIE_FORMAT_FP8_BLOCK128 && r->device.type != MOXIE_DEVICE_CPU)
        TRY(check_device_scales(r, view, error));
out:
    return st;
}

static int32_t read_globals(const struct reading *r, struct weight_view *view, moxie_error *error)
{
    const moxie_tensor *globals = &r->matrix->global_scales;
    struct tensor_want want = {.name = r->globals,
                               .shape = {r->experts, 2},
                               .ndim = r->halves == 2 && globals->ndim == 2 ? 2 : 1,
                               .types = 1u << MOXIE_FORMAT_F32,
                               .device = r->device};
    int32_t st = MOXIE_OK;

    if (r->matrix->format != MOXIE_FORMAT_NVFP4) {
        if (globals->data != NULL)
            TRY(fail_with(error, MOXIE_E_INVALID, "%s: given, but only nvfp4 has global scales",
                          r->globals));
        goto out;
    }
    TRY(tensor_check(globals, &want, error));
    view->globals = (const float *)(const void *)tensor_data(globals);
    view->global_expert_stride_bytes = tensor_stride_bytes(globals, 0);
    view->global_stride = want.ndim;
out:
    return st;
}

static int32_t read_bias(const struct reading *r, struct weight_view *view, moxie_error *error)
{
    struct tensor_want want = {.name = r->bias,
                               .shape = {r->experts, r->n},
                               .ndim = 2,
                               .types = TENSOR_FORMATS_FLOAT,
                               .device = r->device,
                               .optional = 1};
    int32_t st = MOXIE_OK;

    TRY(tensor_check(&r->matrix->bias, &want, error));
    view->bias = tensor_data(&r->matrix->bias);
    if (view->bias != NULL) {
        view->bias_format = tensor_format(&r->matrix->bias);
        view->bias_expert_stride_bytes = tensor_stride_bytes(&r->matrix->bias, 0);
    }
out:
    return st;
}

static int32_t refuse_format(const struct reading *r, const struct limits *limits,
                             moxie_error *error)
{
    char seen[CONFIG_TEXT_BYTES], wanted[CONFIG_TEXT_BYTES];

    config_word_text(KEY_WEIGHT_FORMAT, r->matrix->format, seen);
    config_word_text(KEY_WEIGHT_FORMAT, limits->weight_format, wanted);
    return fail_with(error, MOXIE_E_INVALID,
                     "%s: format %d (%s); want %d, since the key weight_format is %s", r->values,
                     r->matrix->format, seen[0] != '\0' ? seen : "unknown", limits->weight_format,
                     wanted);
}

static int32_t read_matrix(const struct reading *r, const struct limits *limits,
                           struct weight_view *view, moxie_error *error)
{
    const moxie_matrix *matrix = r->matrix;
    int32_t st = MOXIE_OK;

    if (matrix->format != limits->weight_format) TRY(refuse_format(r, limits, error));
    if (matrix->orientation != MOXIE_ROWS_OUT && matrix->orientation != MOXIE_ROWS_IN)
        TRY(fail_with(error, MOXIE_E_INVALID, "%s: orientation %d; want MOXIE_ROWS_OUT or _IN",
                      r->values, matrix->orientation));
    if (matrix->block_offset < 0 || matrix->block_offset > 127 ||
        (matrix->block_offset != 0 && matrix->format != MOXIE_FORMAT_FP8_BLOCK128))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "%s: block_offset %d; want 0..127, and 0 unless fp8_block128", r->values,
                      matrix->block_offset));
    *view = (struct weight_view){.n = r->n,
                                 .k = r->k,
                                 .format = matrix->format,
                                 .order = matrix->order,
                                 .rows_in = matrix->orientation == MOXIE_ROWS_IN,
                                 .block_offset = matrix->block_offset};
    TRY(read_values(r, view, error));
    TRY(read_scales(r, view, error));
    TRY(read_globals(r, view, error));
    TRY(read_bias(r, view, error));
out:
    return st;
}

static int32_t read_w1(const moxie_matrix *matrix, const struct limits *limits, moxie_device device,
                       struct weight_view *view, moxie_error *error)
{
    int gated = limits->activation != ACTIVATION_RELU2;
    struct reading r = {.matrix = matrix,
                        .values = "weights.w1.values",
                        .scales = "weights.w1.scales",
                        .globals = "weights.w1.global_scales",
                        .bias = "weights.w1.bias",
                        .experts = limits->experts_local,
                        .n = (int64_t)limits->intermediate * (gated ? 2 : 1),
                        .k = limits->hidden,
                        .halves = gated ? 2 : 1,
                        .device = device};

    if (gated ? matrix->order < MOXIE_ORDER_GATE_UP || matrix->order > MOXIE_ORDER_INTERLEAVED
              : matrix->order != MOXIE_ORDER_PLAIN)
        return fail_with(error, MOXIE_E_INVALID, "weights.w1.order: %d; want %s", matrix->order,
                         gated ? "MOXIE_ORDER_GATE_UP, _UP_GATE or _INTERLEAVED"
                               : "MOXIE_ORDER_PLAIN: relu2 has no gate");
    r.block_rows = ceil_div((int64_t)matrix->block_offset + limits->intermediate, 128) * r.halves;
    r.block_columns = ceil_div(limits->hidden, 128);
    return read_matrix(&r, limits, view, error);
}

static int32_t read_w2(const moxie_matrix *matrix, const struct limits *limits, moxie_device device,
                       struct weight_view *view, moxie_error *error)
{
    struct reading r = {.matrix = matrix,
                        .values = "weights.w2.values",
                        .scales = "weights.w2.scales",
                        .globals = "weights.w2.global_scales",
                        .bias = "weights.w2.bias",
                        .experts = limits->experts_local,
                        .n = limits->hidden,
                        .k = limits->intermediate,
                        .halves = 1,
                        .device = device};

    if (matrix->order != MOXIE_ORDER_PLAIN)
        return fail_with(error, MOXIE_E_INVALID, "weights.w2.order: %d; want MOXIE_ORDER_PLAIN",
                         matrix->order);
    r.block_rows = ceil_div(limits->hidden, 128);
    r.block_columns = ceil_div((int64_t)matrix->block_offset + limits->intermediate, 128);
    return read_matrix(&r, limits, view, error);
}

// A GPU has kernels for weights that lie alike.
static int32_t check_device_weights(const moxie_weights *weights, moxie_error *error)
{
    if (weights->w1->orientation == weights->w2->orientation) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "weights: orientation is %d for w1 and %d for w2; on this device want both "
                     "MOXIE_ROWS_OUT [E, N, K] (%d), or both MOXIE_ROWS_IN [E, K, N] (%d)",
                     weights->w1->orientation, weights->w2->orientation, MOXIE_ROWS_OUT,
                     MOXIE_ROWS_IN);
}

int32_t weights_read(const moxie_weights *weights, const struct limits *limits, moxie_device device,
                     struct layer_weights *out, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(read_w1(weights->w1, limits, device, &out->w1, error));
    TRY(read_w2(weights->w2, limits, device, &out->w2, error));
    if (out->w1.block_offset != out->w2.block_offset)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "weights: block_offset is %d for w1 and %d for w2; a shard has one offset",
                      out->w1.block_offset, out->w2.block_offset));
    if (device.type != MOXIE_DEVICE_CPU) TRY(check_device_weights(weights, error));
out:
    return st;
}
