// A random layer: bytes that a plugin reads, and the numbers that they stand for.

#include "hosts/cli/conform_layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int is_float(int32_t format)
{
    return format == MOXIE_FORMAT_F32 || format == MOXIE_FORMAT_BF16 || format == MOXIE_FORMAT_F16;
}

static int is_packed(int32_t format)
{
    return format == MOXIE_FORMAT_INT4_G32 || format == MOXIE_FORMAT_MXFP4 ||
           format == MOXIE_FORMAT_NVFP4;
}

int layer_is_gated(const struct layer_spec *spec)
{
    return strcmp(spec->activation, "relu2") != 0;
}

void *conform_room(struct check *check, int64_t count, int64_t bytes)
{
    void *room = calloc(count > 0 ? (size_t)count : 1, (size_t)bytes);

    if (room == NULL) (void)skipped(check, "out of memory");
    return room;
}

moxie_tensor conform_tensor(void *data, moxie_dtype dtype, int32_t ndim, int64_t *shape,
                            int64_t *strides)
{
    return (moxie_tensor){.data = data,
                          .device = {MOXIE_DEVICE_CPU, 0},
                          .ndim = ndim,
                          .dtype = dtype,
                          .shape = shape,
                          .strides = strides};
}

static int64_t ceil_128(int64_t count)
{
    return (count + 127) / 128;
}

static int64_t value_bytes(const struct matrix_room *room)
{
    int32_t format = room->spec->weight_format;

    if (is_float(format)) return room->n * room->k * number_bytes(format);
    return is_packed(format) ? room->n * room->k / 2 : room->n * room->k;
}

// The shape of the scales, by format; [0] is the experts.
static void describe_scales(struct matrix_room *room)
{
    const struct layer_spec *spec = room->spec;
    int64_t *shape = room->scales_shape;

    room->scale_bytes = 0;
    room->scales_ndim = 0;
    room->globals_ndim = 0;
    if (is_float(spec->weight_format)) return;
    shape[0] = spec->experts;
    shape[1] = room->n;
    room->scales_ndim = 3;
    room->scale_bytes = 4;
    switch (spec->weight_format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        room->scales_ndim = spec->scale_halves == 2 && room->halves == 2 ? 2 : 1;
        shape[1] = room->scales_ndim;
        break;
    case MOXIE_FORMAT_FP8_CHANNEL:
        room->scales_ndim = 2;
        break;
    case MOXIE_FORMAT_FP8_BLOCK128:
        shape[1] = room->halves * ceil_128(room->n / room->halves);
        shape[2] = ceil_128(room->k);
        break;
    case MOXIE_FORMAT_NVFP4:
        shape[2] = room->k / 16;
        room->scale_bytes = 1;
        room->globals_ndim = spec->scale_halves == 2 && room->halves == 2 ? 2 : 1;
        room->globals_shape[0] = spec->experts;
        room->globals_shape[1] = room->globals_ndim;
        break;
    default:
        shape[2] = room->k / 32;
        room->scale_bytes =
            spec->weight_format == MOXIE_FORMAT_MXFP4 ? 1 : number_bytes(spec->scale_format);
        break;
    }
    room->scale_bytes *= shape[1] * (room->scales_ndim == 3 ? shape[2] : 1);
}

// Scales and values are chosen so that a product of two rows is of the order of one.
static void roll_scales(struct matrix_room *room, struct dice *dice)
{
    const struct layer_spec *spec = room->spec;
    double size = 1 / sqrt((double)room->k);
    int64_t bytes = spec->experts * room->scale_bytes;

    for (int64_t i = 0; i < room->globals_ndim * spec->experts; i++)
        room->globals[i] = (float)(size * (1 + 0.5 * dice_real(dice)));
    switch (spec->weight_format) {
    case MOXIE_FORMAT_MXFP4: // 2^-5 .. 2^-3
        for (int64_t i = 0; i < bytes; i++)
            room->scales[i] = (uint8_t)(122 + dice_below(dice, 3));
        break;
    case MOXIE_FORMAT_NVFP4: // e4m3 of 0.25 .. 1.875
        for (int64_t i = 0; i < bytes; i++)
            room->scales[i] = (uint8_t)(5 << 3 | dice_below(dice, 24));
        break;
    case MOXIE_FORMAT_INT4_G32:
        for (int64_t i = 0; i < bytes / number_bytes(spec->scale_format); i++)
            number_write(room->scales, spec->scale_format, i,
                         size / 4 * (1 + 0.5 * dice_real(dice)));
        break;
    default:
        for (int64_t i = 0; i < bytes / 4; i++)
            number_write(room->scales, MOXIE_FORMAT_F32, i, size * (1 + 0.5 * dice_real(dice)));
        break;
    }
}

static void roll_values(struct matrix_room *room, struct dice *dice)
{
    const struct layer_spec *spec = room->spec;
    int64_t bytes = spec->experts * value_bytes(room);
    double size = sqrt(3 / (double)room->k);

    if (is_float(spec->weight_format)) {
        for (int64_t i = 0; i < spec->experts * room->n * room->k; i++)
            number_write(room->values, spec->weight_format, i, size * dice_real(dice));
        return;
    }
    // e4m3 up to 1.875: the highest bit of the exponent stays 0, and so NaN is not among them.
    for (int64_t i = 0; i < bytes; i++)
        room->values[i] =
            (uint8_t)(dice_roll(dice) >> 24 & (is_packed(spec->weight_format) ? 0xff : 0xbf));
}

// The scale of one value. Scales of halves are gate then up, as are the rows of such layers.
static double scale_at(const struct matrix_room *room, int64_t expert, int64_t row, int64_t column)
{
    const struct layer_spec *spec = room->spec;
    const int64_t *shape = room->scales_shape;
    int64_t half_rows = room->n / room->halves;
    int64_t half = row / half_rows;
    int64_t block = expert * shape[1] + row;

    switch (spec->weight_format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        return number_read(room->scales, MOXIE_FORMAT_F32,
                           room->scales_ndim == 2 ? expert * 2 + half : expert);
    case MOXIE_FORMAT_FP8_CHANNEL:
        return number_read(room->scales, MOXIE_FORMAT_F32, block);
    case MOXIE_FORMAT_FP8_BLOCK128:
        block = half * ceil_128(half_rows) + row % half_rows / 128;
        return number_read(room->scales, MOXIE_FORMAT_F32,
                           (expert * shape[1] + block) * shape[2] + column / 128);
    case MOXIE_FORMAT_INT4_G32:
        return number_read(room->scales, spec->scale_format, block * shape[2] + column / 32);
    case MOXIE_FORMAT_MXFP4:
        return decode_e8m0(room->scales[block * shape[2] + column / 32]);
    case MOXIE_FORMAT_NVFP4:
        return decode_e4m3(room->scales[block * shape[2] + column / 16]) *
               (double)room->globals[room->globals_ndim == 2 ? expert * 2 + half : expert];
    default:
        return 1;
    }
}

static double value_at(const struct matrix_room *room, int64_t expert, int64_t row, int64_t column)
{
    const struct layer_spec *spec = room->spec;
    int64_t at = (expert * room->n + row) * room->k + column;
    uint8_t nibble = 0;

    if (is_float(spec->weight_format)) {
        if (spec->orientation == MOXIE_ROWS_IN) at = (expert * room->k + column) * room->n + row;
        return number_read(room->values, spec->weight_format, at);
    }
    if (!is_packed(spec->weight_format)) return decode_e4m3(room->values[at]);
    nibble = (uint8_t)(room->values[at / 2] >> (at % 2 * 4) & 0xf);
    return spec->weight_format == MOXIE_FORMAT_INT4_G32 ? nibble - 8.0 : decode_e2m1(nibble);
}

static void fill_exact(struct matrix_room *room)
{
    double *to = room->exact;

    for (int64_t expert = 0; expert < room->spec->experts; expert++)
        for (int64_t row = 0; row < room->n; row++)
            for (int64_t column = 0; column < room->k; column++)
                *to++ = value_at(room, expert, row, column) * scale_at(room, expert, row, column);
}

static int matrix_make(struct matrix_room *room, struct dice *dice, struct check *check)
{
    const struct layer_spec *spec = room->spec;
    int64_t rows = spec->experts * room->n;

    describe_scales(room);
    room->values = conform_room(check, spec->experts * value_bytes(room), 1);
    room->scales = conform_room(check, spec->experts * room->scale_bytes, 1);
    room->globals = conform_room(check, spec->experts * 2, sizeof *room->globals);
    room->bias = conform_room(check, rows, 4);
    room->exact = conform_room(check, rows * room->k, sizeof *room->exact);
    room->exact_bias = conform_room(check, rows, sizeof *room->exact_bias);
    if (check->verdict != VERDICT_PASS) return check->verdict;
    roll_scales(room, dice);
    roll_values(room, dice);
    fill_exact(room);
    for (int64_t i = 0; spec->bias_format != MOXIE_FORMAT_AUTO && i < rows; i++) {
        number_write(room->bias, spec->bias_format, i, 0.5 * dice_real(dice));
        room->exact_bias[i] = number_read(room->bias, spec->bias_format, i);
    }
    return VERDICT_PASS;
}

static void matrix_free(struct matrix_room *room)
{
    free(room->values);
    free(room->scales);
    free(room->bias);
    free(room->globals);
    free(room->exact);
    free(room->exact_bias);
}

int layer_make(struct layer *layer, const struct layer_spec *spec, struct check *check)
{
    struct dice dice = {.state = spec->seed * 2 + 1};
    int64_t halves = layer_is_gated(spec) ? 2 : 1;
    int st = VERDICT_PASS;

    layer_free(layer);
    layer->spec = *spec;
    layer->w1 = (struct matrix_room){.spec = &layer->spec,
                                     .n = halves * spec->intermediate,
                                     .k = spec->hidden,
                                     .halves = halves};
    layer->w2 = (struct matrix_room){
        .spec = &layer->spec, .n = spec->hidden, .k = spec->intermediate, .halves = 1};
    st = matrix_make(&layer->w1, &dice, check);
    return st != VERDICT_PASS ? st : matrix_make(&layer->w2, &dice, check);
}

void layer_free(struct layer *layer)
{
    matrix_free(&layer->w1);
    matrix_free(&layer->w2);
    *layer = (struct layer){0};
}

// The experts from `first` on of a tensor whose first dimension is the experts.
static moxie_tensor slice(void *data, int64_t expert_bytes, int64_t first, moxie_dtype dtype,
                          int64_t *shape)
{
    return conform_tensor((unsigned char *)data + first * expert_bytes, dtype, 3, shape, NULL);
}

static void matrix_view(const struct matrix_room *room, int64_t first, int64_t count,
                        int64_t shapes[4][3], moxie_matrix *to)
{
    const struct layer_spec *spec = room->spec;
    int rows_in = spec->orientation == MOXIE_ROWS_IN;
    int64_t columns = is_packed(spec->weight_format) ? room->k / 2 : room->k;
    moxie_dtype scale_dtype = {MOXIE_DTYPE_FLOAT, 32, 1};

    if (spec->weight_format == MOXIE_FORMAT_MXFP4)
        scale_dtype = (moxie_dtype){MOXIE_DTYPE_UINT, 8, 1};
    if (spec->weight_format == MOXIE_FORMAT_NVFP4)
        scale_dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    if (spec->weight_format == MOXIE_FORMAT_INT4_G32) scale_dtype = dtype_of(spec->scale_format);
    memcpy(shapes[0], (int64_t[]){count, rows_in ? room->k : room->n, rows_in ? room->n : columns},
           sizeof shapes[0]);
    memcpy(shapes[1], (int64_t[]){count, room->scales_shape[1], room->scales_shape[2]},
           sizeof shapes[1]);
    memcpy(shapes[2], (int64_t[]){count, room->globals_shape[1], 0}, sizeof shapes[2]);
    memcpy(shapes[3], (int64_t[]){count, room->n, 0}, sizeof shapes[3]);
    *to = (moxie_matrix){
        .struct_size = sizeof *to,
        .format = spec->weight_format,
        .order = room->halves == 1 ? MOXIE_ORDER_PLAIN : spec->order,
        .orientation = spec->orientation,
        .values =
            slice(room->values, value_bytes(room), first, dtype_of(spec->weight_format), shapes[0]),
    };
    if (room->scales_ndim > 0) {
        to->scales = slice(room->scales, room->scale_bytes, first, scale_dtype, shapes[1]);
        to->scales.ndim = room->scales_ndim;
    }
    if (room->globals_ndim > 0) {
        to->global_scales = slice(room->globals, 4 * room->globals_ndim, first,
                                  dtype_of(MOXIE_FORMAT_F32), shapes[2]);
        to->global_scales.ndim = room->globals_ndim;
    }
    if (spec->bias_format != MOXIE_FORMAT_AUTO) {
        to->bias = slice(room->bias, room->n * number_bytes(spec->bias_format), first,
                         dtype_of(spec->bias_format), shapes[3]);
        to->bias.ndim = 2;
    }
}

void layer_view_of(const struct layer *layer, int64_t first, int64_t count, struct layer_view *view)
{
    matrix_view(&layer->w1, first, count, view->shapes[0], &view->w1);
    matrix_view(&layer->w2, first, count, view->shapes[1], &view->w2);
    view->weights =
        (moxie_weights){.struct_size = sizeof view->weights, .w1 = &view->w1, .w2 = &view->w2};
}
