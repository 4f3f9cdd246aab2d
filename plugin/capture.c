// The routed-experts capture.

#include "plugin/capture.h"

#include "plugin/instance.h"
#include "plugin/tensor.h"

#include <inttypes.h>
#include <stdio.h>

static int32_t *capture_base(const moxie_instance *instance)
{
    return memory_slot(&instance->memory, BUFFER_CAPTURE, 0);
}

int32_t capture_clear(moxie_instance *instance, moxie_error *error)
{
    int32_t *base = capture_base(instance);

    if (base == NULL || instance->memory.buffers[BUFFER_CAPTURE].users > 1) return MOXIE_OK;
    return instance_launched(
        instance, instance->device->fill(base, 0xff, instance->plan.slot_bytes[BUFFER_CAPTURE]),
        "capture", error);
}

int32_t capture_record(moxie_instance *instance, const struct capture_rows *rows,
                       moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    int64_t row_ints = (int64_t)limits->layers * limits->top_k;
    int32_t *base = capture_base(instance);
    struct record_args args = {
        .ids = rows->ids,
        .id_stride_bytes = rows->id_stride_bytes,
        .expert_map = rows->expert_map,
        .tokens_valid = rows->tokens_valid,
        .map_count = rows->map_count,
        .token_first = rows->token_first,
        .out_stride = row_ints,
        .id_bytes = rows->id_bytes,
        .tokens = rows->tokens,
        .top_k = limits->top_k,
        .experts = rows->are_local ? limits->experts_local : limits->physical_experts,
        .expert_first = rows->are_local ? (int32_t)limits->experts_first : 0,
    };

    if (base == NULL || rows->ids == NULL) return MOXIE_OK;
    args.out = base + rows->row_first * row_ints + (int64_t)rows->layer * limits->top_k;
    return instance_launched(
        instance, instance->device->kernels->record(&args, instance_stream(instance, rows->stream)),
        "record", error);
}

int32_t capture_check(const moxie_instance *instance, const struct capture_place *place,
                      moxie_error *error)
{
    const int64_t row = place->row + place->added;
    char added[128] = "", listed[64] = "";

    if (!instance->plan.limits.capture) return MOXIE_OK;
    if (row >= 0 && row <= place->rows && place->tokens <= place->rows - row) return MOXIE_OK;
    if (place->added > 0)
        (void)snprintf(added, sizeof added,
                       ", to which %" PRId64 " of this DP rank's earlier ranks are added%s",
                       place->added, place->listed ? "" : ", the most that they may have");
    if (place->added > 0 && !place->listed)
        (void)snprintf(listed, sizeof listed, ", or step.rank_tokens, by which fewer are");
    return fail_with(error, MOXIE_E_CAPACITY,
                     "step.capture_row: %" PRId64 "%s: capture rows %" PRId64 " to %" PRId64
                     " overrun the %" PRId64
                     " rows of the routed-experts capture (%s); want step.capture_row at most "
                     "%" PRId64 "%s",
                     place->row, added, row, row + place->tokens, place->rows, instance->explained,
                     place->rows - place->added - place->tokens, listed);
}

int32_t capture_clear_load(moxie_instance *instance, int32_t layer, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    const int64_t row_bytes = (int64_t)limits->experts_local * 8;
    unsigned char *base = memory_slot(&instance->memory, BUFFER_EXPERT_LOAD, 0);
    // The first runner finds memory as it was given.
    int first = instance->memory.buffers[BUFFER_EXPERT_LOAD].users == 1;

    if (base == NULL) return MOXIE_OK;
    return instance_launched(instance,
                             instance->device->fill(base + (first ? 0 : layer * row_bytes), 0,
                                                    first ? limits->layers * row_bytes : row_bytes),
                             "expert_load", error);
}

// The shapes of both tensors are constant, so that handing out the same arrays every time is safe.
static moxie_tensor kept(const moxie_instance *instance, void *data, int32_t ndim,
                         const int64_t *shape, const int64_t *strides, uint32_t type)
{
    moxie_tensor tensor =
        tensor_make(data, ndim, (int64_t *)(uintptr_t)shape, (int64_t *)(uintptr_t)strides, type);

    tensor.device = instance_place(instance);
    return tensor;
}

static int is_recorded_here(const struct limits *limits, int32_t dp_rank)
{
    return limits->dispatcher == DISPATCHER_LOCAL || dp_rank == limits->rank / limits->attn_tp;
}

// None where no dispatcher keeps them, nor of a DP rank whose tokens are other ranks'.
static int32_t view_ids(const moxie_instance *instance, int32_t dp_rank, moxie_tensor *ids,
                        moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    int32_t *base = capture_base(instance);
    int64_t row_ints = (int64_t)limits->layers * limits->top_k;

    if (dp_rank < 0 || dp_rank >= limits->dp_size)
        return fail_with(error, MOXIE_E_INVALID, "captured: dp_rank %d; want 0..%d", dp_rank,
                         limits->dp_size - 1);
    if (base != NULL && is_recorded_here(limits, dp_rank))
        *ids = kept(instance, base + dp_rank * limits->capture_tokens * row_ints, 3,
                    instance->captured_shape, instance->captured_strides, TENSOR_INT32);
    return MOXIE_OK;
}

int32_t capture_view(const moxie_instance *instance, moxie_captured *captured, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    void *base = memory_slot(&instance->memory, BUFFER_EXPERT_LOAD, 0);
    moxie_tensor ids = {.data = NULL}, load = ids;
    int32_t st = MOXIE_OK;

    TRY(instance_accepted(instance, error));
    if (!limits->capture && !limits->expert_load)
        TRY(fail_with(
            error, MOXIE_E_UNAVAILABLE,
            "captured: capture_routed_experts is 0, and count_expert_load too; set one of "
            "them to 1"));
    if (limits->capture) TRY(view_ids(instance, captured->dp_rank, &ids, error));
    if (instance->memory.buffers[BUFFER_EXPERT_LOAD].users > 0 && limits->expert_load)
        load = kept(instance, base, 2, instance->load_shape, instance->load_strides, TENSOR_INT64);
    if (ids.ndim == 0 && load.ndim == 0 && capture_base(instance) != NULL)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE,
                      "captured: dp_rank %d; this rank records tokens of %d alone, and each other "
                      "its own",
                      captured->dp_rank, limits->rank / limits->attn_tp));
    if (ids.ndim == 0 && load.ndim == 0)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE, "captured: no %s has been created yet",
                      !limits->expert_load ? "dispatcher"
                      : !limits->capture   ? "runner"
                                           : "dispatcher or runner"));
    captured->ids = ids;
    captured->load = load;
out:
    return st;
}
