// Weights, see weights.h.

#include "kernels/cpu/weights.h"

#include "kernels/cpu/numbers.h"

#include <string.h>

#define BLOCK        128 // of fp8_block128, both ways
#define GROUP_MIN    16
#define TRANSPOSED_K 16 // inputs that are transposed at a time: a cache line of outputs

struct weight_half w1_half(const struct weight_view *view, int64_t intermediate, int up)
{
    int second = view->order == ORDER_UP_GATE ? !up : up;
    struct weight_half half = {.step = 1, .unit_offset = view->block_offset};

    if (view->order == ORDER_PLAIN) return half;
    if (up && view->global_stride > 1) half.global = 1;
    if (view->order == ORDER_INTERLEAVED) {
        half.step = 2;
        half.first = up;
    } else if (second) {
        half.first = intermediate;
    }
    if (second) half.block_first = (view->block_offset + intermediate + BLOCK - 1) / BLOCK;
    return half;
}

struct weight_half w2_half(const struct weight_view *view)
{
    return (struct weight_half){.step = 1, .k_offset = view->block_offset};
}

static const unsigned char *expert_values(const struct panel *panel)
{
    const struct weight_view *view = panel->view;

    return (const unsigned char *)view->values + panel->expert * view->expert_stride_bytes;
}

static const unsigned char *expert_scales(const struct panel *panel)
{
    const struct weight_view *view = panel->view;

    return (const unsigned char *)view->scales + panel->expert * view->scale_expert_stride_bytes;
}

static int64_t row_of(const struct panel *panel, int64_t unit)
{
    return panel->half.first + (panel->unit + unit) * panel->half.step;
}

// f32, bf16 or f16, along k.
static void decode_plain(const struct cpu_ops *ops, int32_t format, const void *from, int64_t count,
                         float *to)
{
    if (format == FORMAT_BF16)
        ops->from_bf16(from, count, to);
    else if (format == FORMAT_F16)
        ops->from_f16(from, count, to);
    else
        memcpy(to, from, (size_t)count * sizeof *to);
}

// One row of fp8_block128: a run per block of inputs.
static void decode_block128(const struct panel *panel, const struct cpu_ops *ops, int64_t unit,
                            float *to)
{
    const struct weight_view *view = panel->view;
    const struct weight_half *half = &panel->half;
    const unsigned char *values =
        expert_values(panel) + row_of(panel, unit) * view->row_stride_bytes;
    int64_t block_row = half->block_first + (panel->unit + unit + half->unit_offset) / BLOCK;
    const unsigned char *scales = expert_scales(panel) + block_row * view->scale_row_stride_bytes;
    int64_t end = panel->k + panel->k_count;

    for (int64_t k = panel->k; k < end;) {
        int64_t block = (k + half->k_offset) / BLOCK;
        int64_t stop = (block + 1) * BLOCK - half->k_offset;
        int64_t count = (stop < end ? stop : end) - k;

        ops->from_e4m3(values + k, count, number_load(FORMAT_F32, scales, block),
                       to + (k - panel->k));
        k += count;
    }
}

// One row of a 4-bit format: the scales of its groups first.
static void decode_nibbles(const struct panel *panel, const struct cpu_ops *ops, int64_t unit,
                           float *to)
{
    const struct weight_view *view = panel->view;
    int64_t row = row_of(panel, unit);
    const unsigned char *values =
        expert_values(panel) + row * view->row_stride_bytes + panel->k / 2;
    const unsigned char *scales = expert_scales(panel) + row * view->scale_row_stride_bytes;
    int64_t group = view->format == FORMAT_NVFP4 ? 16 : 32;
    const float *codes = view->format == FORMAT_INT4_G32 ? int4_values : e2m1_values;
    float group_scales[PANEL_K / GROUP_MIN];

    for (int64_t i = 0; i * group < panel->k_count; i++) {
        int64_t index = panel->k / group + i;

        if (view->format == FORMAT_INT4_G32)
            group_scales[i] = number_load(view->scale_format, scales, index);
        else if (view->format == FORMAT_MXFP4)
            group_scales[i] = e8m0_decode(scales[index]);
        else
            group_scales[i] = e4m3_decode(scales[index]);
    }
    ops->from_nibbles(values, panel->k_count, codes, group_scales, group, to);
}

// Far enough ahead for the memory, near enough to stay in the first cache.
#define AHEAD_ROWS 24

// Addresses, not pointers: they may be past the array.
static void prefetch(const unsigned char *row, int64_t ahead_bytes, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i += 64)
        __builtin_prefetch((const void *)((uintptr_t)row + (uintptr_t)(ahead_bytes + i)));
}

// values [k, n]: a few inputs at a time, decoded as they lie and turned.
static void decode_rows_in(const struct panel *panel, const struct cpu_ops *ops, float *to)
{
    const struct weight_view *view = panel->view;
    const unsigned char *values =
        expert_values(panel) + row_of(panel, 0) * number_bytes(view->format);
    int64_t span = (panel->units - 1) * panel->half.step + 1;
    float rows[TRANSPOSED_K][PANEL_COLUMNS * 2];

    for (int64_t k = 0; k < panel->k_count; k += TRANSPOSED_K) {
        int64_t count = panel->k_count - k < TRANSPOSED_K ? panel->k_count - k : TRANSPOSED_K;

        for (int64_t i = 0; i < count; i++) {
            const unsigned char *row = values + (panel->k + k + i) * view->row_stride_bytes;

            prefetch(row, AHEAD_ROWS * view->row_stride_bytes, span * number_bytes(view->format));
            decode_plain(ops, view->format, row, span, rows[i]);
        }
        for (int64_t unit = 0; unit < panel->units; unit++) {
            for (int64_t i = 0; i < count; i++)
                to[unit * PANEL_K + k + i] = rows[i][unit * panel->half.step];
        }
    }
}

const float *panel_load(const struct panel *panel, const struct cpu_ops *ops, float *scratch,
                        int64_t *stride)
{
    const struct weight_view *view = panel->view;
    const unsigned char *values = expert_values(panel);

    *stride = PANEL_K;
    if (view->rows_in) {
        decode_rows_in(panel, ops, scratch);
        return scratch;
    }
    if (view->format == FORMAT_F32) {
        *stride = view->row_stride_bytes / 4 * panel->half.step;
        return (const float *)(const void *)(values + row_of(panel, 0) * view->row_stride_bytes) +
               panel->k;
    }
    for (int64_t unit = 0; unit < panel->units; unit++) {
        const unsigned char *row = values + row_of(panel, unit) * view->row_stride_bytes;
        float *to = scratch + unit * PANEL_K;

        if (view->format == FORMAT_BF16 || view->format == FORMAT_F16)
            decode_plain(ops, view->format, row + panel->k * 2, panel->k_count, to);
        else if (view->format == FORMAT_FP8_TENSOR || view->format == FORMAT_FP8_CHANNEL)
            ops->from_e4m3(row + panel->k, panel->k_count, 1.0f, to);
        else if (view->format == FORMAT_FP8_BLOCK128)
            decode_block128(panel, ops, unit, to);
        else
            decode_nibbles(panel, ops, unit, to);
    }
    return scratch;
}

static float factor_of(const struct panel *panel, int64_t row)
{
    const struct weight_view *view = panel->view;

    if (view->format == FORMAT_FP8_TENSOR)
        return number_load(FORMAT_F32, expert_scales(panel), panel->half.global);
    if (view->format == FORMAT_FP8_CHANNEL)
        return number_load(FORMAT_F32, expert_scales(panel), row);
    if (view->format == FORMAT_NVFP4)
        return number_load(FORMAT_F32,
                           (const unsigned char *)view->globals +
                               panel->expert * view->global_expert_stride_bytes,
                           panel->half.global);
    return 1.0f;
}

void panel_finish(const struct panel *panel, float factor[PANEL_COLUMNS], float bias[PANEL_COLUMNS])
{
    const struct weight_view *view = panel->view;
    const unsigned char *biases = view->bias;

    for (int64_t unit = 0; unit < panel->units; unit++) {
        int64_t row = row_of(panel, unit);

        factor[unit] = factor_of(panel, row);
        bias[unit] = 0.0f;
        if (biases != NULL)
            bias[unit] = number_load(view->bias_format,
                                     biases + panel->expert * view->bias_expert_stride_bytes, row);
    }
}
