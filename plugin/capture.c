// The routed-experts capture.

#include "plugin/capture.h"

#include "plugin/instance.h"
#include "plugin/tensor.h"

#include <inttypes.h>
#include <string.h>

static int32_t *capture_base(const moxie_instance *instance)
{
    return memory_slot(&instance->memory, BUFFER_CAPTURE, 0);
}

void capture_clear(moxie_instance *instance)
{
    if (capture_base(instance) != NULL)
        memset(capture_base(instance), 0xff, (size_t)instance->plan.slot_bytes[BUFFER_CAPTURE]);
}

static int64_t read_id(const unsigned char *at, int32_t bytes)
{
    int32_t narrow;
    int64_t wide;

    if (bytes == 8) {
        memcpy(&wide, at, sizeof wide);
        return wide;
    }
    memcpy(&narrow, at, sizeof narrow);
    return narrow;
}

static int32_t physical_id(const struct capture_rows *rows, const unsigned char *at,
                           int32_t experts)
{
    int64_t id = read_id(at, rows->id_bytes);

    if (rows->expert_map != NULL) id = id >= 0 && id < rows->map_count ? rows->expert_map[id] : -1;
    return id >= 0 && id < experts ? (int32_t)id : -1;
}

void capture_record(moxie_instance *instance, const struct capture_rows *rows)
{
    const struct limits *limits = &instance->plan.limits;
    int32_t *base = capture_base(instance);
    int64_t valid = rows->tokens;

    if (base == NULL || rows->ids == NULL) return;
    if (rows->tokens_valid != NULL) valid = *rows->tokens_valid - rows->token_first;
    for (int32_t token = 0; token < rows->tokens; token++) {
        const unsigned char *ids = (const unsigned char *)rows->ids + token * rows->id_stride_bytes;
        int32_t *to =
            base + ((rows->row_first + token) * limits->layers + rows->layer) * limits->top_k;

        for (int32_t k = 0; k < limits->top_k; k++)
            to[k] = token < valid ? physical_id(rows, ids + (int64_t)k * rows->id_bytes,
                                                limits->physical_experts)
                                  : -1;
    }
}

int32_t capture_check(const moxie_instance *instance, int64_t row, int64_t tokens,
                      int64_t slice_rows, moxie_error *error)
{
    if (!instance->plan.limits.capture) return MOXIE_OK;
    if (row >= 0 && row <= slice_rows && tokens <= slice_rows - row) return MOXIE_OK;
    return fail_with(error, MOXIE_E_CAPACITY,
                     "capture rows %" PRId64 " to %" PRId64 " overrun the %" PRId64
                     " rows of the routed-experts capture (%s)",
                     row, row + tokens, slice_rows, instance->explained);
}

int32_t capture_view(const moxie_instance *instance, moxie_captured *captured, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    int32_t *base = capture_base(instance);
    int64_t row_ints = (int64_t)limits->layers * limits->top_k;

    if (!limits->capture)
        return fail_with(error, MOXIE_E_UNAVAILABLE, "captured: capture_routed_experts is 0");
    if (base == NULL)
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "captured: no dispatcher has been created yet");
    if (captured->dp_rank < 0 || captured->dp_rank >= limits->dp_size)
        return fail_with(error, MOXIE_E_INVALID, "captured: dp_rank %d; want 0..%d",
                         captured->dp_rank, limits->dp_size - 1);
    // The shape is constant, so that handing out the same arrays every time is safe.
    captured->ids = tensor_make(base + captured->dp_rank * limits->capture_tokens * row_ints, 3,
                                (int64_t *)(uintptr_t)instance->captured_shape,
                                (int64_t *)(uintptr_t)instance->captured_strides, TENSOR_INT32);
    return MOXIE_OK;
}
