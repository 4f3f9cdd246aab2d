// Memory for one projection of a rank's experts.

#include "hosts/cli/weights.h"

#include <string.h>

#define BLOCK 128

struct format_row {
    const char *word;
    uint8_t value_bits, value_code; // of one weight; MOXIE_DTYPE_* of what holds it
    uint8_t scale_bits, scale_code; // 0 bits: no scales
    int32_t inputs_per_scale;       // K covered by one scale; 0: not by K
};

static const struct format_row formats[] = {
    [MOXIE_FORMAT_F32] = {"f32", 32, MOXIE_DTYPE_FLOAT, 0, 0, 0},
    [MOXIE_FORMAT_BF16] = {"bf16", 16, MOXIE_DTYPE_BFLOAT, 0, 0, 0},
    [MOXIE_FORMAT_F16] = {"f16", 16, MOXIE_DTYPE_FLOAT, 0, 0, 0},
    [MOXIE_FORMAT_FP8_TENSOR] = {"fp8_tensor", 8, MOXIE_DTYPE_FLOAT8_E4M3FN, 32, MOXIE_DTYPE_FLOAT,
                                 0},
    [MOXIE_FORMAT_FP8_CHANNEL] = {"fp8_channel", 8, MOXIE_DTYPE_FLOAT8_E4M3FN, 32,
                                  MOXIE_DTYPE_FLOAT, 0},
    [MOXIE_FORMAT_FP8_BLOCK128] = {"fp8_block128", 8, MOXIE_DTYPE_FLOAT8_E4M3FN, 32,
                                   MOXIE_DTYPE_FLOAT, BLOCK},
    [MOXIE_FORMAT_INT4_G32] = {"int4_g32", 4, MOXIE_DTYPE_UINT, 32, MOXIE_DTYPE_FLOAT, 32},
    [MOXIE_FORMAT_MXFP4] = {"mxfp4", 4, MOXIE_DTYPE_UINT, 8, MOXIE_DTYPE_UINT, 32},
    [MOXIE_FORMAT_NVFP4] = {"nvfp4", 4, MOXIE_DTYPE_UINT, 8, MOXIE_DTYPE_FLOAT8_E4M3FN, 16},
};

#define FORMATS ((int32_t)(sizeof formats / sizeof formats[0]))

static int format_known(int32_t format)
{
    return format > MOXIE_FORMAT_AUTO && format < FORMATS;
}

const char *format_word(int32_t format)
{
    return format_known(format) ? formats[format].word : "unknown";
}

int32_t format_from_word(const char *word)
{
    for (int32_t i = MOXIE_FORMAT_AUTO + 1; i < FORMATS; i++)
        if (strcmp(formats[i].word, word) == 0) return i;
    return MOXIE_FORMAT_AUTO;
}

int format_is_fp8(int32_t format)
{
    return format_known(format) && formats[format].value_code == MOXIE_DTYPE_FLOAT8_E4M3FN;
}

int format_is_packed(int32_t format)
{
    return format_known(format) && formats[format].value_bits == 4;
}

int32_t format_group(int32_t format)
{
    return format_is_packed(format) ? formats[format].inputs_per_scale : 0;
}

uint64_t format_element_bytes(int32_t format)
{
    if (format == MOXIE_FORMAT_F32) return 4;
    return format == MOXIE_FORMAT_BF16 || format == MOXIE_FORMAT_F16 ? 2 : 0;
}

moxie_dtype format_dtype(int32_t format)
{
    const struct format_row *row = &formats[format_known(format) ? format : MOXIE_FORMAT_AUTO];

    // Two 4-bit weights share a byte.
    return (moxie_dtype){row->value_code, row->value_bits == 4 ? 8 : row->value_bits, 1};
}

moxie_tensor tensor_at(moxie_device place, void *data, moxie_dtype dtype, int32_t ndim,
                       int64_t *shape)
{
    return (moxie_tensor){
        .data = data,
        .device = place,
        .ndim = ndim,
        .dtype = dtype,
        .shape = shape,
    };
}

static int64_t blocks(int64_t size, int64_t block)
{
    return size / block + (size % block != 0);
}

static int gated(const struct weights_shape *shape)
{
    return shape->order != MOXIE_ORDER_PLAIN;
}

// Rows and columns of one expert's scales; 0 rows: none.
static void scale_shape(const struct weights_shape *shape, int64_t *rows, int64_t *columns)
{
    int64_t halves = gated(shape) ? 2 : 1;

    *rows = 0;
    *columns = 1;
    switch (shape->format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        *rows = halves;
        break;
    case MOXIE_FORMAT_FP8_CHANNEL:
        *rows = shape->outputs;
        break;
    case MOXIE_FORMAT_FP8_BLOCK128:
        *rows = halves * blocks(shape->outputs / halves, BLOCK);
        *columns = blocks(shape->inputs, BLOCK);
        break;
    case MOXIE_FORMAT_INT4_G32:
    case MOXIE_FORMAT_MXFP4:
    case MOXIE_FORMAT_NVFP4:
        *rows = shape->outputs;
        *columns = shape->inputs / formats[shape->format].inputs_per_scale;
        break;
    default:
        break;
    }
}

// The sizes of one expert. 0 when they overflow or the format cannot cut K so.
static int measure(const struct weights_shape *shape, struct weights *weights)
{
    const struct format_row *row = &formats[shape->format];
    int64_t scale_rows = 0;
    int64_t scale_columns = 0;
    uint64_t elements = 0;
    uint64_t bits = 0;

    if (row->value_bits == 4 && shape->inputs % row->inputs_per_scale != 0) return 0;
    scale_shape(shape, &scale_rows, &scale_columns);
    if (!bytes_mul((uint64_t)shape->outputs, (uint64_t)shape->inputs, &elements) ||
        !bytes_mul(elements, (uint64_t)row->value_bits, &bits) ||
        !bytes_mul((uint64_t)scale_rows, (uint64_t)scale_columns * row->scale_bits / 8,
                   &weights->scale_bytes))
        return 0;
    weights->value_bytes = bits / 8;
    weights->global_bytes =
        shape->format == MOXIE_FORMAT_NVFP4 ? sizeof(float) * (gated(shape) ? 2 : 1) : 0;
    weights->bias_bytes = (uint64_t)shape->outputs * format_element_bytes(shape->bias_format);
    return 1;
}

static int shape_possible(const struct weights_shape *shape)
{
    return format_known(shape->format) && shape->experts >= 0 && shape->outputs >= 1 &&
           shape->inputs >= 1 && shape->outputs < (int64_t)1 << 48 &&
           shape->inputs < (int64_t)1 << 48;
}

uint64_t weights_bytes(const struct weights_shape *shape)
{
    struct weights sizes = {.value_bytes = 0};
    uint64_t one = 0;
    uint64_t all = 0;

    if (!shape_possible(shape) || !measure(shape, &sizes)) return 0;
    if (!bytes_add(sizes.value_bytes, sizes.scale_bytes, &one) ||
        !bytes_add(one, sizes.global_bytes + sizes.bias_bytes, &one) ||
        !bytes_mul(one, (uint64_t)shape->experts, &all))
        return 0;
    return all;
}

void weights_shapes(int64_t hidden, int64_t intermediate, const struct weights_shape *like,
                    struct weights_shape *w1, struct weights_shape *w2)
{
    *w1 = (struct weights_shape){
        .format = like->format,
        .order = like->order,
        .experts = like->experts,
        .outputs = like->order == MOXIE_ORDER_PLAIN ? intermediate : 2 * intermediate,
        .inputs = hidden,
    };
    *w2 = (struct weights_shape){
        .format = like->format,
        .order = MOXIE_ORDER_PLAIN,
        .experts = like->experts,
        .outputs = hidden,
        .inputs = intermediate,
    };
}

uint64_t weights_bytes_of_two(const struct weights_shape *w1, const struct weights_shape *w2)
{
    uint64_t first = weights_bytes(w1), second = weights_bytes(w2), both = 0;

    return first > 0 && second > 0 && bytes_add(first, second, &both) ? both : 0;
}

// All experts of `bytes` each; none when there is nothing to hold.
static int allocate(struct weights *weights, struct memory *memory, uint64_t bytes,
                    struct fault *fault)
{
    uint64_t total = (uint64_t)weights->shape.experts * bytes;

    if (bytes == 0) return EXIT_OK;
    return memory_init(memory, weights->device, total, "the experts' weights", fault);
}

static void set_dims(int64_t dims[3], int64_t experts, int64_t rows, int64_t columns)
{
    dims[0] = experts;
    dims[1] = rows;
    dims[2] = columns;
}

static void describe(struct weights *weights)
{
    const struct weights_shape *shape = &weights->shape;
    const struct format_row *row = &formats[shape->format];
    const moxie_dtype scale_dtype = {row->scale_code, row->scale_bits, 1};
    const moxie_dtype f32 = {MOXIE_DTYPE_FLOAT, 32, 1};
    moxie_device place = weights->device->place;
    int64_t columns = row->value_bits == 4 ? shape->inputs / 2 : shape->inputs;
    int64_t scale_rows = 0;
    int64_t scale_columns = 0;
    int32_t scale_dims = 3;

    scale_shape(shape, &scale_rows, &scale_columns);
    if (shape->format == MOXIE_FORMAT_FP8_CHANNEL) scale_dims = 2;
    if (shape->format == MOXIE_FORMAT_FP8_TENSOR) scale_dims = gated(shape) ? 2 : 1;
    if (shape->orientation == MOXIE_ROWS_IN)
        set_dims(weights->dims[0], shape->experts, columns, shape->outputs);
    else
        set_dims(weights->dims[0], shape->experts, shape->outputs, columns);
    set_dims(weights->dims[1], shape->experts, scale_rows, scale_columns);
    set_dims(weights->dims[2], shape->experts, 2, 1);
    set_dims(weights->dims[3], shape->experts, shape->outputs, 1);
    weights->matrix = (moxie_matrix){
        .struct_size = sizeof(moxie_matrix),
        .format = shape->format,
        .order = shape->order,
        .orientation = shape->orientation,
        .values =
            tensor_at(place, weights->values.at, format_dtype(shape->format), 3, weights->dims[0]),
    };
    if (weights->scales.at != NULL)
        weights->matrix.scales =
            tensor_at(place, weights->scales.at, scale_dtype, scale_dims, weights->dims[1]);
    if (weights->globals.at != NULL)
        weights->matrix.global_scales =
            tensor_at(place, weights->globals.at, f32, gated(shape) ? 2 : 1, weights->dims[2]);
    if (weights->biases.at != NULL)
        weights->matrix.bias = tensor_at(place, weights->biases.at,
                                         format_dtype(shape->bias_format), 2, weights->dims[3]);
}

int weights_init(struct weights *weights, struct device *device, const struct weights_shape *shape,
                 struct fault *fault)
{
    int st = EXIT_OK;

    *weights = (struct weights){.device = device, .shape = *shape};
    if (shape->experts > 0 && weights_bytes(shape) == 0)
        return fault_set(fault, EXIT_TROUBLE,
                         "weights of %lld experts, %lld outputs, %lld inputs cannot be held in %s",
                         (long long)shape->experts, (long long)shape->outputs,
                         (long long)shape->inputs, format_word(shape->format));
    if (!shape_possible(shape) || !measure(shape, weights))
        return fault_set(fault, EXIT_TROUBLE, "weights of an impossible shape");
    TRY(allocate(weights, &weights->values, weights->value_bytes, fault));
    TRY(allocate(weights, &weights->scales, weights->scale_bytes, fault));
    TRY(allocate(weights, &weights->globals, weights->global_bytes, fault));
    TRY(allocate(weights, &weights->biases, weights->bias_bytes, fault));
    describe(weights);
out:
    if (st != EXIT_OK) weights_fini(weights);
    return st;
}

int weights_copy(struct weights *to, const struct weights *from, struct fault *fault)
{
    const struct memory *const sources[] = {&from->values, &from->scales, &from->globals,
                                            &from->biases};
    struct memory *const targets[] = {&to->values, &to->scales, &to->globals, &to->biases};
    struct device *device = to->device;
    int st = EXIT_OK;

    for (int i = 0; i < 4; i++)
        if (sources[i]->at != NULL)
            TRY(device->table->copy(device, targets[i]->at, sources[i]->at, sources[i]->bytes,
                                    fault));
out:
    return st;
}

void weights_fini(struct weights *weights)
{
    memory_fini(&weights->values, weights->device);
    memory_fini(&weights->scales, weights->device);
    memory_fini(&weights->globals, weights->device);
    memory_fini(&weights->biases, weights->device);
    *weights = (struct weights){.value_bytes = 0};
}
