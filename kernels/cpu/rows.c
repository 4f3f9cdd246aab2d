// Rows of activations, see rows.h.

#include "kernels/cpu/rows.h"

#include "kernels/cpu/numbers.h"
#include "kernels/quantise.h"

#include <math.h>
#include <string.h>

#define NVFP4_HEADER 4
#define E2M1_MAX     6.0f

int64_t row_bytes(int32_t format, int64_t columns)
{
    if (format == FORMAT_FP8_BLOCK128) return columns;
    if (format == FORMAT_NVFP4) return (columns + 1) / 2;
    return columns * number_bytes(format);
}

int64_t row_scale_bytes(int32_t format, int64_t columns)
{
    if (format == FORMAT_FP8_BLOCK128) return (columns + FP8_GROUP - 1) / FP8_GROUP * 4;
    if (format == FORMAT_NVFP4) return NVFP4_HEADER + (columns + NVFP4_GROUP - 1) / NVFP4_GROUP;
    return 0;
}

int32_t count_read(const int32_t *count, int32_t cap)
{
    int32_t seen = count == NULL ? cap : __atomic_load_n(count, __ATOMIC_RELAXED);

    return seen < 0 ? 0 : seen > cap ? cap : seen;
}

int has_failed(const uint32_t *failed)
{
    return failed != NULL && __atomic_load_n(failed, __ATOMIC_RELAXED) != 0;
}

int64_t group_stride(int64_t stride_bytes)
{
    return stride_bytes != 0 ? stride_bytes : 4;
}

static int64_t scales_at(const struct row_slab *slab, int64_t row)
{
    if (slab->expert_rows == 0) return row * slab->scale_stride_bytes;
    return row / slab->expert_rows * slab->scale_expert_stride_bytes +
           row % slab->expert_rows * slab->scale_stride_bytes;
}

struct row_view slab_row(const struct row_slab *slab, int64_t row)
{
    struct row_view view = {
        .values = (const unsigned char *)slab->rows + row * slab->row_stride_bytes,
        .group_stride_bytes = slab->group_stride_bytes,
        .format = slab->format,
    };

    if (slab->scales != NULL)
        view.scales = (const unsigned char *)slab->scales + scales_at(slab, row);
    return view;
}

static void decode_fp8(const struct row_view *row, int64_t first, int64_t count, float *to)
{
    const uint8_t *values = (const uint8_t *)row->values + first;
    int64_t stride = group_stride(row->group_stride_bytes);
    float scale = 0.0f;

    for (int64_t i = 0; i < count; i++) {
        if (i % FP8_GROUP == 0)
            memcpy(&scale, (const unsigned char *)row->scales + (first + i) / FP8_GROUP * stride,
                   sizeof scale);
        to[i] = e4m3_decode(values[i]) * scale;
    }
}

static void decode_nvfp4(const struct row_view *row, int64_t first, int64_t count, float *to)
{
    const uint8_t *values = (const uint8_t *)row->values + first / 2;
    const uint8_t *scales = (const uint8_t *)row->scales + NVFP4_HEADER + first / NVFP4_GROUP;
    float global = number_load(FORMAT_F32, row->scales, 0);

    for (int64_t i = 0; i < count; i++) {
        float block = e4m3_decode(scales[i / NVFP4_GROUP]);

        to[i] = e2m1_values[(values[i / 2] >> (i % 2 * 4)) & 15] * block * global;
    }
}

void row_decode(const struct row_view *row, int64_t first, int64_t count, float *to)
{
    if (row->format == FORMAT_FP8_BLOCK128) {
        decode_fp8(row, first, count, to);
    } else if (row->format == FORMAT_NVFP4) {
        decode_nvfp4(row, first, count, to);
    } else {
        int64_t offset = first * number_bytes(row->format);

        numbers_decode(row->format, (const unsigned char *)row->values + offset, count, to);
    }
}

float largest(const float *values, int64_t count, float before)
{
    for (int64_t i = 0; i < count; i++) {
        float magnitude = fabsf(values[i]);

        // Not "greater than": a NaN must win, and stay.
        if (!(magnitude <= before) && before == before) before = magnitude;
    }
    return before;
}

float row_largest(const struct row_view *row, int64_t columns)
{
    float piece[ROW_PIECE];
    float magnitude = 0.0f;

    for (int64_t first = 0; first < columns; first += ROW_PIECE) {
        int64_t count = columns - first < ROW_PIECE ? columns - first : ROW_PIECE;

        row_decode(row, first, count, piece);
        magnitude = largest(piece, count, magnitude);
    }
    return magnitude;
}

float nvfp4_global(float magnitude)
{
    return magnitude / (E2M1_MAX * FP8_LARGEST);
}

// Of one group of 128; both 0 when all are zero, or too small to have one.
struct fp8_scaling {
    float scale, inverse;
};

static struct fp8_scaling fp8_scaling_of(const float *values, int64_t count)
{
    float magnitude = largest(values, count, 0.0f);

    if (magnitude < FP8_SMALLEST) return (struct fp8_scaling){0};
    return (struct fp8_scaling){magnitude / FP8_LARGEST, FP8_LARGEST / magnitude};
}

// The e4m3 scale of one group of 16, in units of the row's global scale.
static uint8_t nvfp4_scale(const float *values, int64_t count, float global)
{
    if (global == 0.0f) return 0;
    return e4m3_encode(largest(values, count, 0.0f) / E2M1_MAX / global);
}

static uint8_t nvfp4_code(float value, float scale)
{
    return scale == 0.0f ? 0 : e2m1_encode(value / scale);
}

static void encode_fp8(const float *from, int64_t count, const struct row_out *to)
{
    uint8_t *values = to->values;
    uint8_t *scales = to->scales;

    for (int64_t group = 0; group < count; group += FP8_GROUP) {
        int64_t size = count - group < FP8_GROUP ? count - group : FP8_GROUP;
        struct fp8_scaling by = fp8_scaling_of(from + group, size);

        memcpy(scales + group / FP8_GROUP * 4, &by.scale, sizeof by.scale);
        for (int64_t i = group; i < group + size; i++)
            values[i] = e4m3_encode(from[i] * by.inverse);
    }
}

static void encode_nvfp4(const float *from, int64_t count, float global, const struct row_out *to)
{
    uint8_t *values = to->values;
    uint8_t *scales = to->scales;

    for (int64_t group = 0; group < count; group += NVFP4_GROUP) {
        int64_t size = count - group < NVFP4_GROUP ? count - group : NVFP4_GROUP;
        uint8_t code = nvfp4_scale(from + group, size, global);
        float scale = e4m3_decode(code) * global;

        scales[group / NVFP4_GROUP] = code;
        for (int64_t i = group; i < group + size; i += 2) {
            uint8_t low = nvfp4_code(from[i], scale);
            uint8_t high = i + 1 < group + size ? nvfp4_code(from[i + 1], scale) : 0;

            values[i / 2] = (uint8_t)(low | high << 4);
        }
    }
}

int64_t piece_scale_bytes(int32_t format, int64_t columns)
{
    int64_t bytes = row_scale_bytes(format, columns);

    return format == FORMAT_NVFP4 ? bytes - NVFP4_HEADER : bytes;
}

struct row_out row_piece(int32_t format, void *values, void *scales, int64_t first)
{
    struct row_out out = {.values = (unsigned char *)values + row_bytes(format, first)};

    if (scales != NULL) out.scales = (unsigned char *)scales + row_scale_bytes(format, first);
    return out;
}

void row_begin(int32_t format, float global, void *scales)
{
    if (format == FORMAT_NVFP4) memcpy(scales, &global, sizeof global);
}

void row_encode(int32_t format, const float *from, int64_t count, float global,
                const struct row_out *to)
{
    if (format == FORMAT_FP8_BLOCK128)
        encode_fp8(from, count, to);
    else if (format == FORMAT_NVFP4)
        encode_nvfp4(from, count, global, to);
    else
        numbers_encode(format, from, count, to->values);
}

void operand_round(int32_t format, float *values, int64_t count, float global)
{
    uint8_t encoded[ROW_PIECE * 2];
    uint8_t scales[NVFP4_HEADER + ROW_PIECE / NVFP4_GROUP];
    struct row_view view = {.values = encoded, .scales = scales, .format = format};
    struct row_out out;

    if (format == FORMAT_F32) return;
    if (format == FORMAT_FP8) view.format = FORMAT_FP8_BLOCK128;
    out = row_piece(view.format, encoded, scales, 0);
    row_begin(view.format, global, scales);
    row_encode(view.format, values, count, global, &out);
    row_decode(&view, 0, count, values);
}
