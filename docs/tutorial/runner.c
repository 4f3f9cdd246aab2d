// The runner: f32 and bf16 weights, silu. This file is the plugin proper; the others are the
// manners that every plugin has.

#include "docs/tutorial/skeleton.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct matrix {
    struct view values; // [E, N, K]; the strides of MOXIE_ROWS_IN are turned to match
    struct view bias;   // [E, N], or none
};

struct runner {
    struct object object;
    struct matrix w1, w2; // N = 2 * intermediate, K = hidden; N = hidden, K = intermediate
    int32_t order;
};

static int32_t read_matrix(struct instance *instance, const moxie_matrix *from, int64_t rows,
                           int64_t columns, struct matrix *to, moxie_error *error)
{
    static const int32_t formats[] = {MOXIE_FORMAT_F32, MOXIE_FORMAT_BF16};
    int64_t word = instance->number[WEIGHT_FORMAT], middle;
    int rows_in = from->orientation == MOXIE_ROWS_IN;
    const struct wanted values = {
        "weights",
        word == 0 ? F32 : BF16,
        3,
        {instance->number[EXPERTS], rows_in ? columns : rows, rows_in ? rows : columns}};
    const struct wanted bias = {"bias", F32 | BF16 | F16, 2, {instance->number[EXPERTS], rows, 0}};
    int32_t st = MOXIE_OK;

    if (from->format != formats[word] || from->reserved0 != 0 || from->block_offset != 0)
        return fail(error, MOXIE_E_INVALID, "weights: format %d, block_offset %d", from->format,
                    from->block_offset);
    if (from->scales.data != NULL || from->global_scales.data != NULL)
        return fail(error, MOXIE_E_INVALID, "weights: the format has no scales");
    TRY(view(&to->values, &from->values, &values, error));
    if (from->bias.data != NULL) TRY(view(&to->bias, &from->bias, &bias, error));
    middle = to->values.stride[1];
    if (rows_in) {
        to->values.stride[1] = to->values.stride[2];
        to->values.stride[2] = middle;
    }
out:
    return st;
}

// Row `unit` of the gate (half 0) or up (half 1) projection.
static int64_t row_of(const struct runner *runner, int half, int64_t unit, int64_t units)
{
    if (runner->order == MOXIE_ORDER_INTERLEAVED) return 2 * unit + half;
    return (runner->order == MOXIE_ORDER_UP_GATE ? 1 - half : half) * units + unit;
}

static double dot(const struct view *x, int64_t row, const struct matrix *matrix, int64_t expert,
                  int64_t output, int64_t columns)
{
    const struct view *bias = &matrix->bias;
    double sum = bias->data != NULL ? number_at(bias, expert, output, 0) : 0;

    for (int64_t i = 0; i < columns; i++)
        sum += number_at(x, row, i, 0) * number_at(&matrix->values, expert, output, i);
    return sum;
}

int32_t read_job(struct instance *instance, const moxie_slab *in, const moxie_slab *out,
                 const moxie_rows *rows, int64_t tokens, struct job *job, moxie_error *error)
{
    const int64_t *number = instance->number;
    struct wanted x_wanted = {
        "x", number[INPUT_FORMAT] == 0 ? F32 : BF16, 2, {tokens, number[HIDDEN], 0}};
    struct wanted y_wanted = {
        "y", number[OUTPUT_FORMAT] == 0 ? F32 : BF16, 2, {tokens, number[HIDDEN], 0}};
    struct wanted ids = {"ids", I32 | I64, 2, {tokens, number[TOP_K], 0}};
    struct wanted weights = {"weights", F32 | BF16 | F16, 2, {tokens, number[TOP_K], 0}};
    const struct wanted any = {"expert_map or counts", I32, 1, {-1, 0, 0}};
    uintptr_t x, y;
    int32_t st = MOXIE_OK;

    memset(job, 0, sizeof *job);
    TRY(view(&job->x, &in->rows, &x_wanted, error));
    y_wanted.shape[0] = ids.shape[0] = weights.shape[0] = job->x.shape[0];
    TRY(view(&job->ids, &in->ids, &ids, error));
    TRY(view(&job->weights, &in->weights, &weights, error));
    TRY(view(&job->y, &out->rows, &y_wanted, error));
    if (rows->expert_map.data != NULL) TRY(view(&job->map, &rows->expert_map, &any, error));
    if (rows->counts.data != NULL) TRY(view(&job->valid, &rows->counts, &any, error));
    x = (uintptr_t)job->x.data;
    y = (uintptr_t)job->y.data;
    if (x < y + (uintptr_t)job->y.extent && y < x + (uintptr_t)job->x.extent)
        TRY(fail(error, MOXIE_E_INVALID, "y overlaps x"));
out:
    return st;
}

static void compute_row(const struct instance *instance, const struct runner *runner,
                        const struct job *job, int64_t row)
{
    int64_t hidden = instance->number[HIDDEN], units = instance->number[INTERMEDIATE];
    const struct view middle = {(unsigned char *)instance->scratch, F32, {0}, {0, 4, 0}, 0};
    float *sum = instance->scratch + units;

    memset(sum, 0, (size_t)hidden * sizeof *sum);
    for (int64_t k = 0; k < instance->number[TOP_K]; k++) {
        int64_t id = id_at(&job->ids, row, k);

        if (job->valid.data != NULL && row >= id_at(&job->valid, 0, 0)) continue;
        if (job->map.data != NULL)
            id = id >= 0 && id < job->map.shape[0] ? id_at(&job->map, id, 0) : -1;
        if (id < 0 || id >= instance->number[EXPERTS]) continue;
        for (int64_t unit = 0; unit < units; unit++) {
            double gate =
                dot(&job->x, row, &runner->w1, id, row_of(runner, 0, unit, units), hidden);
            double up = dot(&job->x, row, &runner->w1, id, row_of(runner, 1, unit, units), hidden);

            instance->scratch[unit] = (float)(gate / (1.0 + exp(-gate)) * up);
        }
        for (int64_t h = 0; h < hidden; h++)
            sum[h] += (float)(number_at(&job->weights, row, k, 0) *
                              dot(&middle, 0, &runner->w2, id, h, units));
    }
    for (int64_t h = 0; h < hidden; h++)
        store(&job->y, row, h, (float)(instance->scaling * (double)sum[h]));
}

static int32_t runner_create(moxie_instance *handle, int32_t layer, const moxie_weights *given,
                             moxie_runner **out, moxie_error *error)
{
    struct instance *instance = NULL;
    struct object *object;
    struct runner *runner = NULL;
    moxie_weights weights;
    moxie_matrix w1, w2;
    int used = 0;
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail(error, MOXIE_E_INVALID, "out is NULL");
    *out = NULL;
    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INIT, &object, error));
    instance = object->instance;
    TRY(use(instance, error));
    used = 1;
    TAKE(weights, given, "weights");
    TAKE(w1, weights.w1, "w1");
    TAKE(w2, weights.w2, "w2");
    if (layer < 0 || layer >= instance->number[LAYERS] || weights.reserved0 != 0 ||
        w1.order < MOXIE_ORDER_GATE_UP || w1.order > MOXIE_ORDER_INTERLEAVED || w2.order != 0)
        TRY(fail(error, MOXIE_E_INVALID, "layer %d, orders %d and %d", layer, w1.order, w2.order));
    runner = calloc(1, sizeof *runner);
    if (runner == NULL) TRY(fail(error, MOXIE_E_MEMORY, "no memory for the handle"));
    runner->order = w1.order;
    TRY(read_matrix(instance, &w1, 2 * instance->number[INTERMEDIATE], instance->number[HIDDEN],
                    &runner->w1, error));
    TRY(read_matrix(instance, &w2, instance->number[HIDDEN], instance->number[INTERMEDIATE],
                    &runner->w2, error));
    enlist(&runner->object, instance, RUN);
    *out = (moxie_runner *)runner;
    return MOXIE_OK;
out:
    free(runner);
    if (used) unuse(instance);
    return st;
}

static int32_t take_rows(moxie_rows *rows, moxie_slab *slab, const moxie_rows *given,
                         const char *what, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TAKE(*rows, given, what);
    if (rows->slabs == NULL || rows->slabs_count != 1 || rows->slab_stride < sizeof *slab ||
        rows->slabs->struct_size > rows->slab_stride || rows->reserved0 != 0 ||
        rows->id_space < MOXIE_IDS_GLOBAL || rows->id_space > MOXIE_IDS_LOCAL)
        TRY(fail(error, MOXIE_E_INVALID, "%s: slabs or id_space", what));
    if (rows->layout != MOXIE_LAYOUT_STANDARD)
        TRY(fail(error, MOXIE_E_UNSUPPORTED, "%s: layout %d", what, rows->layout));
    TAKE(*slab, rows->slabs, what);
out:
    return st;
}

static int32_t runner_run(moxie_runner *handle, const moxie_call *given, const moxie_rows *in,
                          const moxie_rows *out_rows, moxie_error *error)
{
    struct instance *instance;
    struct object *object;
    moxie_rows in_rows, results;
    moxie_slab from, to;
    moxie_call call;
    struct job job;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, RUN, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    instance = object->instance;
    TAKE(call, given, "call");
    TRY(take_rows(&in_rows, &from, in, "in", error));
    TRY(take_rows(&results, &to, out_rows, "out", error));
    if (call.slot != 0 || call.layer < 0 || call.layer >= instance->number[LAYERS] || call.stream)
        TRY(fail(error, MOXIE_E_INVALID, "slot %d, layer %d, or a stream", call.slot, call.layer));
    TRY(read_job(instance, &from, &to, &in_rows, -1, &job, error));
    if (job.x.shape[0] > instance->bounds.forward_tokens) {
        instance->stats.refused++;
        TRY(fail(error, MOXIE_E_CAPACITY, "%lld rows; the plan holds %lld",
                 (long long)job.x.shape[0], (long long)instance->bounds.forward_tokens));
    }
    for (int64_t row = 0; row < job.x.shape[0]; row++)
        compute_row(instance, (const struct runner *)object, &job, row);
out:
    return st;
}

static int32_t runner_weights_updated(moxie_runner *handle, const int32_t *ids, uint64_t count,
                                      moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, RUN, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    if (ids == NULL && count > 0) TRY(fail(error, MOXIE_E_INVALID, "ids is NULL, count is not 0"));
    for (uint64_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= object->instance->number[EXPERTS])
            TRY(fail(error, MOXIE_E_INVALID, "ids: %d is no local expert", ids[i]));
    // Nothing was copied at create, so nothing has to be copied again.
out:
    return st;
}

static void runner_destroy(moxie_runner *handle)
{
    destroy(handle, RUN);
}

static const moxie_runner_api runner_api = {.struct_size = sizeof(moxie_runner_api),
                                            .create = runner_create,
                                            .run = runner_run,
                                            .weights_updated = runner_weights_updated,
                                            .destroy = runner_destroy};

const moxie_traits tutorial_traits = {.struct_size = sizeof(moxie_traits),
                                      .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD),
                                      .id_spaces = 1u << MOXIE_IDS_GLOBAL |
                                                   1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
                                      .no_expert_id = -1,
                                      .weights_applied_by = MOXIE_BY_RUNNER,
                                      .scaling_applied_by = MOXIE_BY_RUNNER,
                                      .output_is_reduced = 1,
                                      .reduction_group = 1,
                                      .formats = 1u << MOXIE_FORMAT_F32 | 1u << MOXIE_FORMAT_BF16,
                                      .graph = MOXIE_GRAPH_EAGER_ONLY,
                                      .row_align_bytes = 1};

const moxie_runner_info tutorial_runner = {sizeof(moxie_runner_info), 0,          "tutorial", "cpu",
                                           &tutorial_traits,          &runner_api};
