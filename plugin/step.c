// What a step and a batch may be.

#include "plugin/step.h"

#include "plugin/capture.h"
#include "plugin/rows.h"
#include "plugin/tensor.h"

#include <inttypes.h>

// So that sums with other ranks' rows stay within 64 bits. How many the capture holds is judged
// apart.
#define CAPTURE_ROW_MAX ((int64_t)1 << 40)

// The first of the ranks that share this one's DP rank.
static int32_t group_first(const struct limits *limits)
{
    return limits->rank / limits->attn_tp * limits->attn_tp;
}

// Each count is read once: a host's thread may be writing them.
static int32_t check_rank_tokens(const moxie_instance *instance, const moxie_step *step,
                                 struct step_shape *shape, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;

    shape->tokens_most = 0;
    shape->listed = 1;
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        int64_t tokens = step->rank_tokens[rank];

        if (tokens < 0)
            return fail_with(error, MOXIE_E_INVALID,
                             "step.rank_tokens[%d]: %" PRId64 "; want 0..%" PRId64, rank, tokens,
                             limits->forward_tokens_max);
        if (rank == limits->rank && tokens != step->tokens)
            return fail_with(error, MOXIE_E_INVALID,
                             "step.rank_tokens[%d]: %" PRId64
                             "; step.tokens of this rank (%d) is %" PRId64 ", want them equal",
                             rank, tokens, limits->rank, step->tokens);
        if (tokens > limits->forward_tokens_max)
            return fail_with(error, MOXIE_E_CAPACITY,
                             "step.rank_tokens[%d]: %" PRId64 "; the plan holds %" PRId64
                             " a rank (%s)",
                             rank, tokens, limits->forward_tokens_max, instance->explained);
        if (tokens > shape->tokens_most) shape->tokens_most = tokens;
        if (rank >= group_first(limits) && rank < limits->rank) shape->capture_row += tokens;
    }
    return MOXIE_OK;
}

static int32_t check_tokens(const moxie_instance *instance, int local, const moxie_step *step,
                            struct step_shape *shape, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    int64_t most = limits->forward_tokens_max;

    if (step->tokens < 0)
        return fail_with(error, MOXIE_E_INVALID, "step.tokens: %" PRId64 "; want 0..%" PRId64,
                         step->tokens, most);
    if (step->tokens > most)
        return fail_with(error, MOXIE_E_CAPACITY,
                         "step.tokens: %" PRId64 "; the plan holds %" PRId64 " on this rank (%s)",
                         step->tokens, most, instance->explained);
    shape->tokens = step->tokens;
    shape->tokens_most = local ? step->tokens : most;
    if (local) return MOXIE_OK;
    if (step->rank_tokens != NULL) return check_rank_tokens(instance, step, shape, error);
    shape->capture_row = (limits->rank - group_first(limits)) * most;
    return MOXIE_OK;
}

// Where this rank's rows go in the capture: after those of the ranks that share its DP rank, which
// `shape` has so far, by rank_tokens, or else as many as they may be.
static int32_t place_capture(const moxie_instance *instance, int local, const moxie_step *step,
                             struct step_shape *shape, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    struct capture_place place = {.row = step->capture_row,
                                  .added = shape->capture_row,
                                  .tokens = step->tokens,
                                  .rows = limits->capture_tokens,
                                  .listed = shape->listed};
    int64_t first = 0;
    int32_t st = MOXIE_OK;

    shape->capture_row = 0;
    if (!limits->capture) goto out;
    if (local)
        place.rows *= limits->dp_size;
    else
        first = (int64_t)(limits->rank / limits->attn_tp) * place.rows;
    TRY(capture_check(instance, &place, error));
    shape->capture_row = first + place.row + place.added;
out:
    return st;
}

int32_t step_rounds(const struct limits *limits, const struct step_shape *shape)
{
    int64_t rounds = ceil_div(shape->tokens_most, limits->tokens_max);

    return rounds < 1 ? 1 : (int32_t)rounds;
}

int32_t step_rows_most(const struct limits *limits, const struct step_shape *shape, int32_t round)
{
    int64_t most = limits->tokens_max;
    int64_t left = shape->tokens_most - round * most;

    return (int32_t)(left < 1 ? 1 : left < most ? left : most);
}

int32_t step_check_slot(const moxie_instance *instance, const char *name, int32_t slot,
                        moxie_error *error)
{
    if (slot >= 0 && slot < instance->plan.limits.slots) return MOXIE_OK;
    return fail_with(error, MOXIE_E_INVALID, "%s: %d; want 0..%d (forwards_in_flight_max - 1)",
                     name, slot, instance->plan.limits.slots - 1);
}

int32_t step_check(const moxie_instance *instance, int local, const moxie_step *step,
                   struct step_shape *shape, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    *shape = (struct step_shape){.padding = step->padding, .tokens_valid = step->tokens_valid};
    TRY(step_check_slot(instance, "step.slot", step->slot, error));
    if ((uintptr_t)step->tokens_valid % sizeof(int32_t) != 0)
        TRY(fail_with(error, MOXIE_E_INVALID, "step.tokens_valid: at %p; want a multiple of 4",
                      (const void *)step->tokens_valid));
    if (step->capture_row < 0 || step->capture_row > CAPTURE_ROW_MAX)
        TRY(fail_with(error, MOXIE_E_INVALID, "step.capture_row: %" PRId64 "; want 0..%" PRId64,
                      step->capture_row, CAPTURE_ROW_MAX));
    TRY(check_tokens(instance, local, step, shape, error));
    TRY(place_capture(instance, local, step, shape, error));
out:
    return st;
}

static int32_t check_tensors(const moxie_instance *instance, int64_t tokens,
                             const moxie_batch *batch, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    const moxie_device device = instance_place(instance);
    struct tensor_want x = {
        "batch.x", {tokens, limits->hidden}, 2, 1u << limits->input_format, device, 0};
    struct tensor_want ids = {
        "batch.ids", {tokens, limits->top_k}, 2, TENSOR_INT32 | TENSOR_INT64, device, 0};
    struct tensor_want weights = {
        "batch.weights", {tokens, limits->top_k}, 2, TENSOR_FORMATS_FLOAT, device, 0};
    struct tensor_want y = {
        "batch.y", {tokens, limits->hidden}, 2, 1u << limits->output_format, device, 0};
    struct tensor_want map = {"batch.expert_map", {-1}, 1, TENSOR_INT32, device, 1};
    int32_t st = MOXIE_OK;

    TRY(tensor_check(&batch->x, &x, error));
    if (device.type != MOXIE_DEVICE_CPU && tokens > 0)
        TRY(rows_check_aligned("batch.x", tensor_data(&batch->x), tensor_stride_bytes(&batch->x, 0),
                               error));
    TRY(tensor_check(&batch->ids, &ids, error));
    TRY(tensor_check(&batch->weights, &weights, error));
    TRY(tensor_check(&batch->y, &y, error));
    TRY(tensor_check(&batch->expert_map, &map, error));
    if (tensor_overlap(&batch->x, &batch->y))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "batch.y overlaps batch.x; give it memory of its own"));
    TRY(tensor_check_rows_apart(&batch->y, "batch.y", error));
out:
    return st;
}

void step_zero_y(const moxie_instance *instance, const moxie_batch *batch)
{
    const moxie_tensor *y = &batch->y;

    for (int64_t token = 0; token < y->shape[0]; token++)
        instance->device->zero(tensor_data(y) + token * tensor_stride_bytes(y, 0),
                               y->shape[1] * tensor_element_bytes(y), batch->stream);
}

int32_t step_check_rounds(const struct step_shape *shape, const moxie_batch *batch,
                          moxie_error *error)
{
    int64_t one = 1;
    // Read alone; DLPack has no const.
    const moxie_tensor valid =
        tensor_make((void *)(uintptr_t)shape->tokens_valid, 1, &one, NULL, TENSOR_INT32);
    const struct {
        const char *name;
        const moxie_tensor *tensor;
    } inputs[] = {{"batch.ids", &batch->ids},
                  {"batch.weights", &batch->weights},
                  {"batch.expert_map", &batch->expert_map},
                  {"step.tokens_valid", &valid}};

    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (tensor_overlap(&batch->y, inputs[i].tensor))
            return fail_with(
                error, MOXIE_E_INVALID,
                "batch.y overlaps %s, which later rounds read; give it memory of its own",
                inputs[i].name);
    return MOXIE_OK;
}

int32_t step_check_batch(const moxie_instance *instance, int local, int64_t tokens,
                         const moxie_batch *batch, moxie_error *error)
{
    const struct limits *limits = &instance->plan.limits;
    int32_t st = MOXIE_OK;

    if (batch->layer < 0 || batch->layer >= limits->layers)
        TRY(fail_with(error, MOXIE_E_INVALID, "batch.layer: %d; want 0..%d (num_layers - 1)",
                      batch->layer, limits->layers - 1));
    if (batch->id_space < MOXIE_IDS_GLOBAL ||
        batch->id_space > (local ? MOXIE_IDS_LOCAL : MOXIE_IDS_PHYSICAL))
        TRY(fail_with(error, MOXIE_E_INVALID, "batch.id_space: %d; want %s", batch->id_space,
                      local ? "a MOXIE_IDS_*" : "MOXIE_IDS_GLOBAL or _PHYSICAL"));
    if (instance->device->tensor_device == MOXIE_DEVICE_CPU && batch->stream != NULL)
        TRY(fail_with(error, MOXIE_E_INVALID, "batch.stream: %p; want NULL on the CPU",
                      batch->stream));
    TRY(check_tensors(instance, tokens, batch, error));
out:
    return st;
}

struct step_rows step_rows_of(const moxie_batch *batch)
{
    return (struct step_rows){.x = tensor_data(&batch->x),
                              .y = tensor_data(&batch->y),
                              .x_stride_bytes = tensor_stride_bytes(&batch->x, 0),
                              .y_stride_bytes = tensor_stride_bytes(&batch->y, 0)};
}

int32_t step_check_rows(const struct step_rows *sent, const moxie_batch *batch, int x_too,
                        moxie_error *error)
{
    const struct step_rows rows = step_rows_of(batch);

    if (batch->y.shape[0] == 0) return MOXIE_OK;
    if (rows.y != sent->y || rows.y_stride_bytes != sent->y_stride_bytes)
        return fail_with(error, MOXIE_E_INVALID, "batch.y is not the y of this layer's dispatch");
    if (x_too && (rows.x != sent->x || rows.x_stride_bytes != sent->x_stride_bytes))
        return fail_with(error, MOXIE_E_INVALID, "batch.x is not the x of this layer's dispatch");
    return MOXIE_OK;
}
