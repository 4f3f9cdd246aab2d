// The runner.

#include "plugin/runner.h"

#include "kernels/layer.h"
#include "plugin/capture.h"
#include "plugin/config.h"
#include "plugin/dispatcher.h"
#include "plugin/runner_experts.h"
#include "plugin/tensor.h"
#include "plugin/weights_scales.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#define RUNNER_MAGIC 0x4d4f58495252554eu // "MOXIRRUN"

#define RUNNER_BUFFERS                                                                             \
    (1u << BUFFER_EXPERT_OFFSET | 1u << BUFFER_GEMM_PROGRESS | 1u << BUFFER_GEMM_HALVES |          \
     1u << BUFFER_LAYER_TURNS | 1u << BUFFER_LAYER_MID | 1u << BUFFER_PAIR_ROW |                   \
     1u << BUFFER_PAIR_WEIGHT | 1u << BUFFER_ROW_PAIR | 1u << BUFFER_ROUTE_SCRATCH |               \
     1u << BUFFER_X_FP8 | 1u << BUFFER_X_SCALES | 1u << BUFFER_X_WOVEN | 1u << BUFFER_MID |        \
     1u << BUFFER_MID_FP8 | 1u << BUFFER_MID_SCALES | 1u << BUFFER_PAIR_OUT |                      \
     1u << BUFFER_CPU_SCRATCH | 1u << BUFFER_EXPERT_LOAD)

struct moxie_runner {
    uint64_t magic;
    moxie_instance *instance;
    struct layer_weights weights;
    int32_t layer;
    int32_t taken; // holds its buffers
};

int32_t runner_create(moxie_instance *instance, int32_t layer, const moxie_weights *weights,
                      moxie_runner **out, moxie_error *error)
{
    moxie_runner *runner = NULL;
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(instance_accepted(instance, error));
    if (layer < 0 || layer >= instance->plan.limits.layers)
        TRY(fail_with(error, MOXIE_E_INVALID, "layer %d; want 0..%d (num_layers - 1)", layer,
                      instance->plan.limits.layers - 1));
    runner = calloc(1, sizeof *runner);
    if (runner == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "runner: no memory for the handle"));
    runner->instance = instance;
    runner->layer = layer;
    TRY(instance_device(instance, error));
    if (instance->plan.limits.computes) {
        TRY(weights_read(weights, &instance->plan.limits, instance_place(instance),
                         &runner->weights, error));
        TRY(weights_check_scales(&runner->weights, 0, instance->plan.limits.experts_local,
                                 instance->device, error));
    }
    TRY(instance_take(instance, RUNNER_BUFFERS, error));
    runner->taken = 1;
    TRY(capture_clear_load(instance, layer, error));
    runner->magic = handle_magic(RUNNER_MAGIC);
    *out = runner;
    runner = NULL;
out:
    runner_destroy(runner);
    return st;
}

void runner_destroy(moxie_runner *runner)
{
    struct device_visit visit;

    if (runner == NULL) return;
    runner->magic = 0;
    if (runner->taken) {
        (void)instance_visit(runner->instance, &visit);
        instance_drop(runner->instance, RUNNER_BUFFERS);
        instance_leave(runner->instance, &visit);
    }
    free(runner);
}

int runner_is_live(const moxie_runner *runner)
{
    return runner != NULL && runner->magic == handle_magic(RUNNER_MAGIC);
}

moxie_instance *runner_instance(const moxie_runner *runner)
{
    return runner->instance;
}

int runner_takes_weights(const moxie_instance *instance)
{
    return validate_computes(&instance->config);
}

int32_t runner_check_computes(const moxie_runner *runner, moxie_error *error)
{
    if (runner->instance->plan.limits.computes) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "runner is none: a runner of the host's own has the weights and computes, and "
                     "this one only expands and folds: call that one, between dispatch and "
                     "combine, and tell it of new weights, or set runner to auto");
}

static int32_t check_call(const moxie_runner *runner, const moxie_call *call, moxie_error *error)
{
    const struct limits *limits = &runner->instance->plan.limits;

    if (call->slot < 0 || call->slot >= limits->slots)
        return fail_with(error, MOXIE_E_INVALID,
                         "call.slot: %d; want 0..%d (forwards_in_flight_max - 1)", call->slot,
                         limits->slots - 1);
    if (call->layer < 0 || call->layer >= limits->layers)
        return fail_with(error, MOXIE_E_INVALID, "call.layer: %d; want 0..%d (num_layers - 1)",
                         call->layer, limits->layers - 1);
    if (runner->instance->device->tensor_device == MOXIE_DEVICE_CPU && call->stream != NULL)
        return fail_with(error, MOXIE_E_INVALID, "call.stream: %p; want NULL on the CPU",
                         call->stream);
    return MOXIE_OK;
}

static int32_t refuse_capacity(moxie_instance *instance, int32_t code)
{
    instance->stats.refused += code == MOXIE_E_CAPACITY;
    return code;
}

static int32_t read_rows(const moxie_runner *runner, const moxie_call *call, const moxie_rows *rows,
                         struct rows_view *view, moxie_error *error)
{
    moxie_instance *instance = runner->instance;
    int32_t st = MOXIE_OK;

    TRY(check_call(runner, call, error));
    TRY(rows_read(rows, &instance->plan.limits, instance_place(instance), instance->explained, view,
                  error));
    TRY(rows_check_counts(view, &instance->plan.limits, instance_place(instance),
                          instance->explained, error));
out:
    return refuse_capacity(instance, st);
}

// What a layout by expert does not use has not been checked.
static int lie_over(const moxie_tensor *results, const struct rows_view *view, const moxie_rows *in)
{
    const int by_ids = view->by == ROUTE_BY_IDS;
    int found = by_ids &&
                (tensor_overlap(&in->counts, results) || tensor_overlap(&in->expert_map, results));

    for (uint32_t i = 0; i < in->slabs_count && !found; i++) {
        const moxie_slab *slab = &in->slabs[i];

        found = tensor_overlap(&slab->rows, results) || tensor_overlap(&slab->scales, results) ||
                (by_ids &&
                 (tensor_overlap(&slab->ids, results) || tensor_overlap(&slab->weights, results)));
    }
    return found;
}

// Whether results lie in what the products may still read when the first of them are written: in
// one slab, which down may do, or in slabs of so few rows that one launch may do everything.
static int are_overwritten(const struct rows_view *view, const moxie_rows *in,
                           const moxie_rows *out)
{
    int64_t rows = 0;

    for (int32_t i = 0; i < view->slabs_count; i++)
        rows += view->slabs[i].cap;
    if (view->slabs_count > 1 && rows > LAYER_TOKENS) return 0;
    for (uint32_t i = 0; i < out->slabs_count; i++)
        if (lie_over(&out->slabs[i].rows, view, in)) return 1;
    return 0;
}

// Blocks copy and sum rows in any order: nothing that one writes may another read, or write.
static int32_t check_apart(const char *call, const moxie_tensor *other,
                           const moxie_tensor *const *written, int32_t count, moxie_error *error)
{
    for (int32_t i = 0; i < count; i++)
        if (tensor_overlap(other, written[i]))
            return fail_with(error, MOXIE_E_INVALID,
                             "%s: what is written at %p lies over what is read or written at %p; "
                             "want them apart",
                             call, (const void *)tensor_data(written[i]),
                             (const void *)tensor_data(other));
    return MOXIE_OK;
}

static int32_t check_results_apart(const char *call, const moxie_tensor *read,
                                   const moxie_rows *out, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    for (uint32_t i = 0; i < out->slabs_count; i++) {
        const moxie_tensor *const written = &out->slabs[i].rows;

        TRY(check_apart(call, read, &written, 1, error));
    }
out:
    return st;
}

// How many rows of a slab have a result is read while the results are written. All rows of STANDARD
// have one.
static int32_t check_counts_apart(const char *call, const moxie_rows *counted,
                                  const moxie_rows *out, moxie_error *error)
{
    if (counted->layout != MOXIE_LAYOUT_RANK_MAJOR) return MOXIE_OK;
    return check_results_apart(call, &counted->counts, out, error);
}

int32_t runner_run(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                   const moxie_rows *out, moxie_error *error)
{
    moxie_instance *instance = runner->instance;
    struct rows_view view;
    struct out_view results;
    struct experts_job job = {.instance = instance,
                              .weights = &runner->weights,
                              .in = &view,
                              .out = &results,
                              .slot = call->slot,
                              .layer = runner->layer,
                              .stream = instance_stream(instance, call->stream)};
    int32_t st = MOXIE_OK;

    TRY(runner_check_computes(runner, error));
    TRY(read_rows(runner, call, in, &view, error));
    if (instance->slot_users[call->slot] != NULL)
        TRY(dispatcher_check_process(instance->slot_users[call->slot], error));
    TRY(rows_out(out, &view, &instance->plan.limits, instance_place(instance), &results, error));
    TRY(check_counts_apart("run", in, out, error));
    job.in_place = are_overwritten(&view, in, out);
    TRY(experts_run(&job, error));
out:
    return st;
}

// Those of `experts`, or of all where that is NULL.
static int32_t check_updated(const moxie_runner *runner, const int32_t *experts, uint64_t count,
                             moxie_error *error)
{
    const moxie_instance *instance = runner->instance;
    int32_t experts_local = instance->plan.limits.experts_local;
    int32_t st = MOXIE_OK;

    if (experts == NULL)
        return weights_check_scales(&runner->weights, 0, experts_local, instance->device, error);
    for (uint64_t i = 0; i < count; i++) {
        int32_t expert = experts[i];

        if (expert < 0 || expert >= experts_local)
            TRY(fail_with(error, MOXIE_E_INVALID, "ids[%" PRIu64 "]: %d; want a local expert 0..%d",
                          i, expert, experts_local - 1));
        TRY(weights_check_scales(&runner->weights, expert, 1, instance->device, error));
    }
out:
    return st;
}

int32_t runner_weights_updated(moxie_runner *runner, const int32_t *experts, uint64_t count,
                               moxie_error *error)
{
    struct device_visit visit;
    int32_t st = runner_check_computes(runner, error);

    if (st != MOXIE_OK) return st;
    st = instance_launched(runner->instance, instance_visit(runner->instance, &visit),
                           "weights_updated", error);
    if (st == MOXIE_OK) st = check_updated(runner, experts, count, error);
    instance_leave(runner->instance, &visit);
    return st;
}

// ---- moxie.expand/1 ----------------------------------------------------------------------------

static int32_t check_index(const moxie_runner *runner, const moxie_tensor *row_index, int64_t rows,
                           moxie_error *error)
{
    struct tensor_want want = {.name = "row_index",
                               .shape = {rows, runner->instance->plan.limits.top_k},
                               .ndim = 2,
                               .types = TENSOR_INT32,
                               .device = instance_place(runner->instance)};
    int32_t st = MOXIE_OK;

    TRY(tensor_check(row_index, &want, error));
    if (rows > 1 && tensor_stride_bytes(row_index, 0) != 4 * want.shape[1])
        TRY(fail_with(error, MOXIE_E_UNSUPPORTED, "row_index: strided; want it compact"));
out:
    return st;
}

// Whether a row's scales follow each other, and rows lie by one stride.
static int scales_are_in_rows(const struct row_slab *slab)
{
    return slab->group_stride_bytes == 0 && slab->expert_rows == 0;
}

// Those that are written. Others are read by any stride.
static int32_t check_scales_compact(const moxie_tensor *scales, int64_t stride_bytes,
                                    moxie_error *error)
{
    int64_t compact_bytes;

    if (scales->data == NULL) return MOXIE_OK;
    compact_bytes = scales->shape[scales->ndim - 1] * tensor_element_bytes(scales);
    if (stride_bytes == compact_bytes || tensor_is_empty(scales)) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "expand: out.slab.scales: %" PRId64 " bytes between rows; want them compact, "
                     "%" PRId64,
                     stride_bytes, compact_bytes);
}

// Rows are copied as they are. A dispatcher's own slab is x, its peers' are of the wire.
static int32_t check_formats(const moxie_instance *instance, const struct rows_view *from,
                             int32_t format, moxie_error *error)
{
    const int on_cpu = instance->device->tensor_device == MOXIE_DEVICE_CPU;
    const int taken = on_cpu || format == FORMAT_BF16 || format == FORMAT_F16;
    char seen[CONFIG_TEXT_BYTES], written[CONFIG_TEXT_BYTES];
    int32_t slab = 0;

    while (taken && slab < from->slabs_count && from->slabs[slab].format == format)
        slab++;
    if (slab == from->slabs_count) return MOXIE_OK;
    config_word_text(KEY_WEIGHT_FORMAT, from->slabs[slab].format, seen);
    config_word_text(KEY_WEIGHT_FORMAT, format, written);
    return fail_with(error, taken ? MOXIE_E_INVALID : MOXIE_E_UNSUPPORTED,
                     "expand: slab %d: rows of format %s into rows of format %s; want all of one "
                     "format%s (of a dispatcher's rows: set dispatch_format to input)",
                     slab, seen, written, on_cpu ? "" : ", bf16 or f16");
}

// `to` must hold the worst case: every place of every row has a local expert, or for EXPERT_MASKED
// all rows choose the same one with every place.
static int32_t check_expanded(const moxie_instance *instance, const struct rows_view *from,
                              const struct rows_view *to, moxie_error *error)
{
    int64_t rows = to->layout == MOXIE_LAYOUT_EXPERT_MASKED ? to->rows_per_expert : to->rows_cap;
    int32_t st = MOXIE_OK;

    if (from->by != ROUTE_BY_IDS || to->by == ROUTE_BY_IDS)
        TRY(fail_with(
            error, MOXIE_E_INVALID,
            "expand: from layout %d to %d; want STANDARD or RANK_MAJOR to an EXPERT_ layout",
            from->layout, to->layout));
    TRY(check_formats(instance, from, to->slabs[0].format, error));
    for (int32_t i = 0; i < from->slabs_count; i++)
        if (!scales_are_in_rows(&from->slabs[i]) || !scales_are_in_rows(&to->slabs[0]))
            TRY(fail_with(error, MOXIE_E_UNSUPPORTED,
                          "expand: slab %d: scales in columns; want each row's compact, in and "
                          "out, and experts one after the other",
                          i));
    if (to->slabs[0].cap > 0 &&
        (to->slabs[0].weights == NULL || to->slabs[0].weight_format != FORMAT_F32 ||
         to->slabs[0].weight_stride_bytes != 4))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "expand: out needs compact f32 weights, one per row"));
    if (rows < from->pairs_max)
        TRY(fail_with(error, MOXIE_E_CAPACITY,
                      "expand: out has %" PRId64 " rows; the worst case is %" PRId64
                      ": %d slabs, each counted as of %d rows (the largest), times top_k, %d",
                      rows, from->pairs_max, from->slabs_count, from->rows_cap, from->top_k));
out:
    return st;
}

// Before the same is said of rows that come, where a larger plan would help: of these fewer do.
static int32_t check_expanded_most(const moxie_instance *instance, const struct rows_view *from,
                                   const moxie_rows *out, moxie_error *error)
{
    const int64_t most = instance->plan.limits.pairs_max;
    const moxie_tensor *rows = out->slabs_count == 0 ? NULL : &out->slabs->rows;

    if (out->layout != MOXIE_LAYOUT_EXPERT_CONTIGUOUS || rows == NULL || rows->shape == NULL ||
        rows->ndim != 2 || rows->shape[0] <= most)
        return MOXIE_OK;
    return fail_with(error, MOXIE_E_CAPACITY,
                     "expand: out has %" PRId64 " rows; want at most %" PRId64
                     ", the plan's rows times top_k, and %" PRId64 " are enough for these",
                     rows->shape[0], most, from->pairs_max);
}

static int32_t check_expand_apart(const moxie_rows *in, const moxie_rows *out,
                                  const moxie_tensor *row_index, moxie_error *error)
{
    const moxie_tensor *const written[] = {&out->slabs->rows, &out->slabs->scales,
                                           &out->slabs->weights, &out->counts, row_index};
    int32_t st = MOXIE_OK;

    for (uint32_t i = 0; i < in->slabs_count; i++) {
        TRY(check_apart("expand", &in->slabs[i].rows, written, 5, error));
        TRY(check_apart("expand", &in->slabs[i].scales, written, 5, error));
    }
    for (int32_t i = 0; i < 5; i++)
        TRY(check_apart("expand", written[i], written + i + 1, 4 - i, error));
out:
    return st;
}

int32_t runner_expand(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                      const moxie_rows *out, const moxie_tensor *row_index, moxie_error *error)
{
    moxie_instance *instance = runner->instance;
    struct rows_view from, to;
    struct experts_job job = {.instance = instance,
                              .in = &from,
                              .slot = call->slot,
                              .stream = instance_stream(instance, call->stream)};
    struct route_args route;
    struct expand_args args;
    int32_t st = MOXIE_OK;

    TRY(read_rows(runner, call, in, &from, error));
    TRY(refuse_capacity(instance, check_expanded_most(instance, &from, out, error)));
    // Its counts are yet to be written.
    TRY(refuse_capacity(instance, rows_read(out, &instance->plan.limits, instance_place(instance),
                                            instance->explained, &to, error)));
    TRY(tensor_check_rows_apart(&out->slabs->rows, "expand: out.slab.rows", error));
    TRY(refuse_capacity(instance, check_expanded(instance, &from, &to, error)));
    TRY(check_scales_compact(&out->slabs->scales, to.slabs[0].scale_stride_bytes, error));
    TRY(check_index(runner, row_index, (int64_t)from.slabs_count * from.rows_cap, error));
    TRY(check_expand_apart(in, out, row_index, error));
    TRY(experts_route(&job, &route, error));
    args = (struct expand_args){
        .slabs = from.slabs,
        .expert_offset = route.expert_offset,
        .pair_row = route.pair_row,
        .pair_weight = route.pair_weight,
        .row_pair = route.row_pair,
        .rows = tensor_data(&out->slabs->rows),
        .scales = tensor_data(&out->slabs->scales),
        .weights = (float *)(void *)tensor_data(&out->slabs->weights),
        .counts = (int32_t *)(void *)tensor_data(&out->counts),
        .row_index = (int32_t *)(void *)tensor_data(row_index),
        .row_stride_bytes = to.slabs[0].row_stride_bytes,
        .scale_stride_bytes = to.slabs[0].scale_stride_bytes,
        .experts = instance->plan.limits.experts_local,
        .slabs_count = from.slabs_count,
        .rows_cap = from.rows_cap,
        .rows_per_expert = to.rows_per_expert,
        .hidden = instance->plan.limits.hidden,
        .top_k = from.top_k,
        .masked = to.layout == MOXIE_LAYOUT_EXPERT_MASKED,
    };
    TRY(instance_launched(instance, instance->device->kernels->expand(&args, job.stream), "expand",
                          error));
out:
    return st;
}

int32_t runner_fold(moxie_runner *runner, const moxie_call *call, const moxie_rows *expanded,
                    const moxie_tensor *row_index, const moxie_rows *out, moxie_error *error)
{
    moxie_instance *instance = runner->instance;
    const struct limits *limits = &instance->plan.limits;
    struct out_view from, to;
    struct combine_args args;
    int32_t st = MOXIE_OK;

    TRY(check_call(runner, call, error));
    if (expanded->layout != MOXIE_LAYOUT_EXPERT_CONTIGUOUS &&
        expanded->layout != MOXIE_LAYOUT_EXPERT_MASKED)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "fold: expanded has layout %d; want an EXPERT_ layout", expanded->layout));
    TRY(rows_out_alone(expanded, limits, instance_place(instance), &from, error));
    if (instance->device->tensor_device != MOXIE_DEVICE_CPU)
        TRY(rows_check_aligned("expanded.slab.rows", from.slabs[0].rows,
                               from.slabs[0].row_stride_bytes, error));
    if (out->layout != MOXIE_LAYOUT_STANDARD && out->layout != MOXIE_LAYOUT_RANK_MAJOR)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "fold: out has layout %d; want STANDARD or RANK_MAJOR", out->layout));
    TRY(rows_out_alone(out, limits, instance_place(instance), &to, error));
    TRY(check_index(runner, row_index, (int64_t)to.slabs_count * to.rows_cap, error));
    TRY(check_results_apart("fold", &expanded->slabs->rows, out, error));
    TRY(check_results_apart("fold", row_index, out, error));
    TRY(check_counts_apart("fold", out, out, error));
    if (to.rows_cap == 0) goto out; // and row_index may have no data
    args = (struct combine_args){
        .pair_out = from.slabs[0].rows,
        .pair_stride_bytes = from.slabs[0].row_stride_bytes,
        .pairs = from.slabs[0].cap,
        .row_pair = (const int32_t *)(const void *)tensor_data(row_index),
        .slabs = to.slabs,
        .pair_format = from.slabs[0].format,
        .slabs_count = to.slabs_count,
        .slab_first = limits->rank + 1,
        .rows_cap = to.rows_cap,
        .hidden = limits->hidden,
        .top_k = limits->top_k,
        .sms = limits->dispatch_sms,
        .scale = 1.0f,
    };
    TRY(instance_launched(
        instance,
        instance->device->kernels->combine(&args, instance_stream(instance, call->stream)),
        "combine", error));
out:
    return refuse_capacity(instance, st);
}
