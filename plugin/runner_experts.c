// The experts' part of the forward path.

#include "plugin/runner_experts.h"

// The buffers that one slot's experts work in.
struct experts_buffers {
    int32_t *expert_offset;
    uint32_t *gemm_progress;
    int32_t *pair_row;
    float *pair_weight;
    int32_t *row_pair;
    void *route_scratch;
    int64_t route_scratch_bytes;
    void *x_fp8, *x_scales;
    void *mid, *mid_fp8, *mid_scales;
    void *pair_out;
    int64_t mid_stride_bytes;
    int64_t pair_stride_bytes;
};

static struct experts_buffers buffers_of(const struct experts_job *job)
{
    const struct memory *memory = &job->instance->memory;
    const struct limits *limits = &job->instance->plan.limits;
    // pair_out is free while rows are routed: down is the first to write it, and combine, the last
    // to read it, was before in the slot's stream.
    const enum buffer_id scratch = limits->computes ? BUFFER_PAIR_OUT : BUFFER_ROUTE_SCRATCH;

    return (struct experts_buffers){
        .expert_offset = memory_slot(memory, BUFFER_EXPERT_OFFSET, job->slot),
        .gemm_progress = memory_slot(memory, BUFFER_GEMM_PROGRESS, job->slot),
        .pair_row = memory_slot(memory, BUFFER_PAIR_ROW, job->slot),
        .pair_weight = memory_slot(memory, BUFFER_PAIR_WEIGHT, job->slot),
        .row_pair = memory_slot(memory, BUFFER_ROW_PAIR, job->slot),
        .route_scratch = memory_slot(memory, scratch, job->slot),
        .route_scratch_bytes = job->instance->plan.slot_bytes[scratch],
        .x_fp8 = memory_slot(memory, BUFFER_X_FP8, job->slot),
        .x_scales = memory_slot(memory, BUFFER_X_SCALES, job->slot),
        .mid = memory_slot(memory, BUFFER_MID, job->slot),
        .mid_fp8 = memory_slot(memory, BUFFER_MID_FP8, job->slot),
        .mid_scales = memory_slot(memory, BUFFER_MID_SCALES, job->slot),
        .pair_out = memory_slot(memory, BUFFER_PAIR_OUT, job->slot),
        .mid_stride_bytes = limits->mid_bytes,
        .pair_stride_bytes = limits->pair_bytes,
    };
}

static struct route_args route_stage(const struct experts_job *job, const struct experts_buffers *b)
{
    const struct rows_view *in = job->in;

    return (struct route_args){
        .slabs = in->slabs,
        .expert_map = in->expert_map,
        .expert_counts = in->expert_counts,
        .expert_offset = b->expert_offset,
        .pair_row = b->pair_row,
        .pair_weight = b->pair_weight,
        .progress = b->gemm_progress,
        .row_pair = b->row_pair,
        .scratch = b->route_scratch,
        .scratch_bytes = b->route_scratch_bytes,
        .pairs_max = in->pairs_max,
        .map_count = in->map_count,
        .expert_first = in->expert_first,
        .experts = job->instance->plan.limits.experts_local,
        .slabs_count = in->slabs_count,
        .rows_cap = in->rows_cap,
        .rows_per_expert = in->rows_per_expert,
        .top_k = in->top_k,
        .by = in->by,
    };
}

// x as the product multiplies it, and where each pair's row is.
struct operand_rows {
    const struct row_slab *slabs;
    const int32_t *pair_row; // NULL: rows lie in the order of the pairs
    int32_t slabs_count;
    int32_t rows_cap;
};

// Few ids, which the products count themselves instead of waiting for route. Those of several slabs
// only where no peer writes, or blocks could count different ones.
static int are_counted(const struct experts_job *job)
{
    const struct rows_view *in = job->in;
    const int32_t *few = memory_slot(&job->instance->memory, BUFFER_FEW_IDS, job->slot);
    const int are_few = few != NULL && in->slabs[0].count == few &&
                        in->slabs[0].ids == few + KERNEL_RANKS_MAX; // as dispatch gave them

    return in->by == ROUTE_BY_IDS && (in->slabs_count == 1 || are_few) &&
           gemms_can_count(in->slabs, in->slabs_count, in->rows_cap, in->top_k);
}

static int64_t rows_most(const struct rows_view *in)
{
    return (int64_t)in->slabs_count * in->rows_cap;
}

// Where the scales of many rows wait for their places: nothing else is in mid until the first
// product. One place a row has no neighbours to wait for.
static float *row_scales_of(const struct experts_job *job, const struct experts_buffers *b)
{
    const struct limits *limits = &job->instance->plan.limits;
    const struct rows_view *in = job->in;
    int64_t scales_bytes = rows_most(in) * limits->x_fp8_groups * 4;

    if (in->pairs_max * (int64_t)limits->hidden < QUANTISE_MANY_BYTES || in->top_k == 1 ||
        scales_bytes > limits->pairs_max * limits->mid_fp8_bytes)
        return NULL;
    return b->mid_fp8;
}

// Whether the products gather rows of e4m3 that lie once, instead of reading, in boxes, a copy for
// each of their experts. A box costs the product less, and a copy costs memory more: so it pays
// where an expert does little with a row, and rows are many.
static int are_gathered(const struct experts_job *job)
{
    const struct limits *limits = &job->instance->plan.limits;
    const struct rows_view *in = job->in;

    return in->top_k > 1 && in->pairs_max > GEMMS_GATHER_IDS &&
           limits->intermediate <= job->instance->gather_units &&
           rows_most(in) * limits->x_fp8_bytes <= UINT32_MAX;
}

// x as e4m3, in the order of the pairs or by row.
static struct quantise_args quantise_x_stage(const struct experts_job *job,
                                             const struct experts_buffers *b)
{
    const struct limits *limits = &job->instance->plan.limits;
    const struct rows_view *in = job->in;
    struct quantise_args args = {
        .slabs = in->slabs,
        .rows = b->x_fp8,
        .scales = b->x_scales,
        .row_stride_bytes = limits->x_fp8_bytes,
        .scale_stride_bytes = 4,
        .group_stride_bytes = limits->fp8_group_bytes,
        .format = FORMAT_FP8_BLOCK128,
        .slabs_count = in->slabs_count,
        .rows_cap = in->rows_cap,
        .top_k = in->top_k,
        .rows_count = (int32_t)in->pairs_max,
        .columns = limits->hidden,
        .x_row = b->pair_row,
        .count = &b->expert_offset[limits->experts_local],
        .early = are_counted(job),
    };

    if (in->by == ROUTE_BY_IDS) {
        args.row_pair = b->row_pair;
        args.row_scales = row_scales_of(job, b);
        args.rows_once = are_gathered(job);
        args.ahead = &job->weights->w1;
        args.ahead_experts = limits->experts_local;
        args.ahead_choices = limits->physical_experts;
    }
    return args;
}

// As x came, or as e4m3 in `quantised`.
static struct operand_rows operand_of(const struct experts_job *job,
                                      const struct experts_buffers *b,
                                      const struct quantise_args *args, struct row_slab *quantised)
{
    const struct rows_view *in = job->in;

    if (args->rows == NULL)
        return (struct operand_rows){in->slabs, b->pair_row, in->slabs_count, in->rows_cap};
    *quantised = (struct row_slab){
        .rows = args->rows,
        .scales = args->scales,
        .row_stride_bytes = args->row_stride_bytes,
        .scale_stride_bytes = args->scale_stride_bytes,
        .group_stride_bytes = args->group_stride_bytes,
        .cap = (int32_t)job->instance->plan.limits.pairs_max, // never 0, as a box wants it
        .format = args->format,
    };
    if (args->rows_once)
        return (struct operand_rows){quantised, b->pair_row, 1, (int32_t)rows_most(in)};
    return (struct operand_rows){quantised, NULL, 1, quantised->cap};
}

static struct gate_up_args gate_up_stage(const struct experts_job *job,
                                         const struct experts_buffers *b,
                                         const struct operand_rows *operand)
{
    const struct limits *limits = &job->instance->plan.limits;

    return (struct gate_up_args){
        .slabs = operand->slabs,
        .expert_offset = b->expert_offset,
        .pair_row = operand->pair_row,
        .pair_weight = limits->weight_on_input ? b->pair_weight : NULL,
        .w1 = job->weights->w1,
        .mid = b->mid,
        .mid_stride_bytes = b->mid_stride_bytes,
        .mid_format = limits->mid_format,
        .experts = limits->experts_local,
        .slabs_count = operand->slabs_count,
        .rows_cap = operand->rows_cap,
        .hidden = limits->hidden,
        .intermediate = limits->intermediate,
        .activation = limits->activation,
        .operand_format = limits->operand_format,
        .alpha = limits->alpha,
        .beta = limits->beta,
        .limit = limits->limit,
    };
}

// mid as the second product multiplies it.
static struct quantise_args quantise_mid_stage(const struct experts_job *job,
                                               const struct experts_buffers *b)
{
    const struct limits *limits = &job->instance->plan.limits;

    if (b->mid_fp8 == NULL) return (struct quantise_args){0};
    return (struct quantise_args){
        .x = b->mid,
        .rows = b->mid_fp8,
        .scales = b->mid_scales,
        .count = &b->expert_offset[limits->experts_local],
        .x_stride_bytes = b->mid_stride_bytes,
        .row_stride_bytes = limits->mid_fp8_bytes,
        .scale_stride_bytes = 4,
        .group_stride_bytes = limits->fp8_group_bytes,
        .x_format = limits->mid_format,
        .format = FORMAT_FP8_BLOCK128,
        .rows_count = (int32_t)job->in->pairs_max,
        .columns = limits->intermediate,
    };
}

static struct down_args down_stage(const struct experts_job *job, const struct experts_buffers *b)
{
    const struct limits *limits = &job->instance->plan.limits;
    int quantised = b->mid_fp8 != NULL;

    return (struct down_args){
        .expert_offset = b->expert_offset,
        .mid = quantised ? b->mid_fp8 : b->mid,
        .mid_stride_bytes = quantised ? limits->mid_fp8_bytes : b->mid_stride_bytes,
        .mid_scales = b->mid_scales,
        .mid_scale_stride_bytes = 4,
        .mid_group_stride_bytes = limits->fp8_group_bytes,
        .w2 = job->weights->w2,
        .pair_out = b->pair_out,
        .pair_stride_bytes = b->pair_stride_bytes,
        .pairs_max = limits->pairs_max,
        .mid_format = quantised ? FORMAT_FP8_BLOCK128 : limits->mid_format,
        .pair_format = limits->pair_format,
        .experts = limits->experts_local,
        .operand_format = limits->operand_format,
    };
}

static struct combine_args combine_stage(const struct experts_job *job,
                                         const struct experts_buffers *b)
{
    const struct limits *limits = &job->instance->plan.limits;
    int by_ids = job->in->by == ROUTE_BY_IDS;

    return (struct combine_args){
        .pair_out = b->pair_out,
        .pair_stride_bytes = b->pair_stride_bytes,
        .pairs = job->in->pairs_max,
        .row_pair = by_ids ? b->row_pair : NULL,
        .pair_row = by_ids ? NULL : b->pair_row,
        .pairs_count = &b->expert_offset[limits->experts_local],
        .pair_weight = limits->weight_on_input ? NULL : b->pair_weight,
        .slabs = job->out->slabs,
        .pair_format = limits->pair_format,
        .slabs_count = job->in->slabs_count,
        .slab_first = limits->rank + 1,
        .rows_cap = job->in->rows_cap,
        .hidden = limits->hidden,
        .top_k = job->in->top_k,
        .sms = limits->dispatch_sms,
        .routed = limits->experts_local > 0, // or gemms is no launch in between
        .spends = 1,
        .scale = limits->scaling_factor,
    };
}

// Where a result is one pair's alone, down writes it, and combine only fills rows without a pair;
// by expert, there are none. down writes while x is read, and 16 bytes at a time.
static void place_results(const struct experts_job *job, const struct experts_buffers *b,
                          struct down_args *down, struct combine_args *combine)
{
    const struct rows_view *in = job->in;
    const struct out_slab *y = &job->out->slabs[0];

    if (in->slabs_count != 1 || in->top_k != 1 || y->rows == NULL ||
        y->format != down->pair_format || (uintptr_t)y->rows % 16 != 0 ||
        y->row_stride_bytes % 16 != 0 || job->in_place)
        return;
    down->pair_out = y->rows;
    down->pair_stride_bytes = y->row_stride_bytes;
    down->result_row = b->pair_row;
    down->result_weight = combine->pair_weight;
    down->result_scale = combine->scale;
    combine->placed = 1;
}

int32_t experts_route(const struct experts_job *job, struct route_args *route, moxie_error *error)
{
    const struct experts_buffers buffers = buffers_of(job);

    *route = route_stage(job, &buffers);
    return instance_launched(
        job->instance, job->instance->device->kernels->route(route, job->stream), "route", error);
}

// What each expert is about to compute, added to its counter of this layer.
static struct tally_args tally_stage(const struct experts_job *job, const struct experts_buffers *b)
{
    const int32_t experts = job->instance->plan.limits.experts_local;
    int64_t *load = memory_slot(&job->instance->memory, BUFFER_EXPERT_LOAD, 0);

    if (load == NULL || experts == 0) return (struct tally_args){0};
    return (struct tally_args){
        .expert_offset = b->expert_offset,
        .load = load + (int64_t)job->layer * experts,
        .experts = experts,
    };
}

static void layer_stages(const struct experts_job *job, struct layer_args *layer,
                         struct row_slab *quantised)
{
    const struct experts_buffers buffers = buffers_of(job);
    struct operand_rows operand;

    layer->route = route_stage(job, &buffers);
    layer->tally = tally_stage(job, &buffers);
    layer->quantise = quantise_x_stage(job, &buffers);
    layer->gemms.quantise = quantise_mid_stage(job, &buffers);
    layer->gemms.down = down_stage(job, &buffers);
    layer->gemms.progress = buffers.gemm_progress;
    layer->gemms.halves = memory_slot(&job->instance->memory, BUFFER_GEMM_HALVES, job->slot);
    layer->gemms.halves_places =
        job->instance->plan.slot_bytes[BUFFER_GEMM_HALVES] / GEMMS_HALVES_PLACE_BYTES;
    layer->gemms.x_woven = memory_slot(&job->instance->memory, BUFFER_X_WOVEN, job->slot);
    layer->gemms.x_woven_stride_bytes = job->instance->plan.limits.x_woven_bytes;
    layer->gemms.top_k = job->in->top_k;
    layer->gemms.route = layer->quantise.early ? &layer->route : NULL;
    layer->combine = combine_stage(job, &buffers);
    layer->turns = memory_slot(&job->instance->memory, BUFFER_LAYER_TURNS, job->slot);
    layer->mid = memory_slot(&job->instance->memory, BUFFER_LAYER_MID, job->slot);
    layer->mid_words =
        job->instance->plan.slot_bytes[BUFFER_LAYER_MID] / 2 / (int64_t)sizeof *layer->mid;
    operand = operand_of(job, &buffers, &layer->quantise, quantised);
    layer->gemms.gate_up = gate_up_stage(job, &buffers, &operand);
    place_results(job, &buffers, &layer->gemms.down, &layer->combine);
}

// One launch for everything, where the device has one for so few tokens.
static int32_t launch_at_once(const struct experts_job *job, const struct layer_args *layer)
{
    const struct kernels *kernels = job->instance->device->kernels;

    if (kernels->layer == NULL || job->in_place) return LAYER_UNFIT;
    return kernels->layer(layer, job->stream);
}

int32_t experts_run(const struct experts_job *job, moxie_error *error)
{
    const struct kernels *kernels = job->instance->device->kernels;
    const moxie_instance *instance = job->instance;
    struct row_slab quantised;
    struct layer_args layer;
    int32_t answer;
    int32_t st = MOXIE_OK;

    layer_stages(job, &layer, &quantised);
    answer = launch_at_once(job, &layer);
    if (answer != LAYER_UNFIT) return instance_launched(instance, answer, "layer", error);
    TRY(instance_launched(instance, kernels->route(&layer.route, job->stream), "route", error));
    if (layer.tally.load != NULL)
        TRY(instance_launched(instance, kernels->tally(&layer.tally, job->stream), "tally", error));
    if (layer.quantise.rows != NULL)
        TRY(instance_launched(instance, kernels->quantise(&layer.quantise, job->stream), "quantise",
                              error));
    TRY(instance_launched(instance, kernels->gemms(&layer.gemms, job->stream), "gemms", error));
    if (layer.combine.placed && layer.combine.row_pair == NULL) goto out;
    TRY(instance_launched(instance, kernels->combine(&layer.combine, job->stream), "combine",
                          error));
out:
    return st;
}
