// Rows and result rows of the push protocol.

#include "plugin/exchange.h"

#include "plugin/exchange_flags.h"
#include "plugin/tensor.h"

#include <inttypes.h>
#include <unistd.h>

// A section of the window of `owner` has a piece for every other rank, in the order of ranks. This
// is the one for `other`.
static unsigned char *piece(unsigned char *base, int64_t section, int64_t piece_bytes,
                            int32_t other, int32_t owner)
{
    return base + section + (other < owner ? other : other - 1) * piece_bytes;
}

// Where this rank writes what `to` gets: its piece of that rank's window, or, where NCCL carries it
// there, that rank's piece of this one's staging.
static unsigned char *piece_to(const struct window *window, int64_t section, int64_t piece_bytes,
                               int32_t me, int32_t to)
{
    unsigned char *base = window_to(window, to);

    if (window->staging != NULL) return piece(base, section, piece_bytes, to, me);
    return piece(base, section, piece_bytes, me, to);
}

// ---- windows -----------------------------------------------------------------------------------

void exchange_choose(struct exchange_group *group)
{
    const moxie_instance *instance = group->instance;

    group->pid = getpid();
    if (instance->device->windows == NULL)
        group->ops = instance->plan.limits.ranks > 1 ? &transport_shm : &transport_self;
    else
        group->ops = instance->plan.limits.staged ? &transport_nccl : &transport_nvlink;
    if (group->ops->signal != NULL)
        group->flags = &exchange_flags_host;
    else
        group->flags = instance->plan.limits.staged ? &exchange_flags_nccl : &exchange_flags_device;
}

int32_t exchange_check_process(const struct exchange_group *group, moxie_error *error)
{
    int64_t pid = group->transport != NULL ? getpid() : group->pid;

    if (pid == group->pid) return MOXIE_OK;
    return fail_with(error, MOXIE_E_INVALID,
                     "this dispatcher is process %" PRId64 "'s, and this is process %" PRId64
                     ", forked from it; create a dispatcher here, on all ranks anew",
                     group->pid, pid);
}

int32_t exchange_open(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                      moxie_error *error)
{
    char text[FAILURE_TEXT_BYTES];
    moxie_error seen = failure_error(text);
    int32_t st = MOXIE_OK;

    for (int32_t i = 0; i < slots_count; i++)
        TRY(group->ops->window_open(group->transport, (uint64_t)group->instance->plan.window.bytes,
                                    &slots[i].window, error));
    if (group->ops->agree == NULL) return group->flags->open(group, slots, slots_count, error);
    TRY(group->ops->agree(group->transport, group->flags->open(group, slots, slots_count, &seen),
                          &seen, error));
out:
    return st;
}

void exchange_close(struct exchange_group *group, struct exchange *slots, int32_t slots_count)
{
    group->flags->close(group);
    for (int32_t i = 0; i < slots_count; i++) {
        if (slots[i].window != NULL) group->ops->window_close(group->transport, slots[i].window);
        slots[i].window = NULL;
    }
    group->beat_window = NULL;
}

// ---- dispatch ----------------------------------------------------------------------------------

int32_t exchange_launched(const struct exchange_group *group, struct exchange *slot,
                          const struct exchange_round *round, int32_t answer, const char *kernel,
                          moxie_error *error)
{
    const struct device *device = group->instance->device;

    if (answer == 0 && !slot->went_out)
        slot->went_out =
            device->is_capturing == NULL || !device->is_capturing(round->batch->stream);
    return instance_launched(group->instance, answer, kernel, error);
}

// Where a rank's ids are for the experts: `slab` of its own or of its window, or their place among
// few.
static void *ids_of(const struct exchange_group *group, const struct exchange_round *round,
                    int32_t rank, void *slab)
{
    int32_t *few = exchange_few_ids(group, round);

    return few == NULL ? slab
                       : few + (int64_t)rank * round->rows_most * exchange_limits(group)->top_k;
}

static int32_t *own_ids(const struct exchange_group *group, const struct exchange_round *round)
{
    void *slab = memory_slot(&group->instance->memory, BUFFER_OWN_IDS, round->slot);

    return ids_of(group, round, exchange_limits(group)->rank, slab);
}

static struct push_slab push_to(const struct exchange_group *group, const struct exchange *slot,
                                const struct exchange_round *round, int32_t to)
{
    const struct window_layout *w = &group->instance->plan.window;
    const struct memory *memory = &group->instance->memory;
    int32_t me = exchange_limits(group)->rank;
    const struct window *window = slot->window;

    if (to == me)
        return (struct push_slab){
            .ids = own_ids(group, round),
            .weights = memory_slot(memory, BUFFER_OWN_WEIGHTS, round->slot),
        };
    if (!exchange_is_peer(group, to)) return (struct push_slab){0};
    return (struct push_slab){
        .rows = piece_to(window, w->rows, w->rows_slab_bytes, me, to),
        .scales = piece_to(window, w->scales, w->scales_slab_bytes, me, to),
        .ids = (int32_t *)(void *)piece_to(window, w->ids, w->ids_slab_bytes, me, to),
        .weights = (float *)(void *)piece_to(window, w->weights, w->weights_slab_bytes, me, to),
        .count = (struct round_count *)(void *)piece_to(window, w->counts, FLAG_LINE_BYTES, me, to),
    };
}

// Whether rows and results of this round go as words with a tag: the same on every rank, since it
// hangs on nothing of a rank's own. A later round would have to undo the results of earlier ones.
static int goes_as_words(const struct exchange_group *group, const struct exchange_round *round)
{
    return round->rows_most <= group->instance->plan.window.ll_rows && round->index == 0;
}

static const unsigned char *at_token(const moxie_tensor *tensor, int64_t token)
{
    const unsigned char *data = tensor_data(tensor);

    return data == NULL ? NULL : data + token * tensor_stride_bytes(tensor, 0);
}

static struct dispatch_args dispatch_stage(const struct exchange_group *group,
                                           const struct exchange_round *round)
{
    const struct limits *limits = exchange_limits(group);
    const moxie_batch *batch = round->batch;

    return (struct dispatch_args){
        .x = at_token(&batch->x, round->first),
        .ids = at_token(&batch->ids, round->first),
        .weights = at_token(&batch->weights, round->first),
        .tokens_valid = round->tokens_valid,
        .token_first = round->first,
        .expert_map = (const int32_t *)(const void *)tensor_data(&batch->expert_map),
        .expert_first = group->expert_first,
        .send_slot = memory_slot(&group->instance->memory, BUFFER_SEND_SLOT, round->slot),
        .x_stride_bytes = tensor_stride_bytes(&batch->x, 0),
        .id_stride_bytes = tensor_stride_bytes(&batch->ids, 0),
        .weight_stride_bytes = tensor_stride_bytes(&batch->weights, 0),
        .row_stride_bytes = limits->row_bytes,
        .scale_stride_bytes = limits->scale_bytes,
        .map_count = batch->expert_map.data != NULL ? batch->expert_map.shape[0] : 0,
        .x_format = limits->input_format,
        .wire_format = limits->wire_format,
        .id_bytes = (int32_t)tensor_element_bytes(&batch->ids),
        .weight_format = tensor_format(&batch->weights),
        .tokens = round->tokens,
        .hidden = limits->hidden,
        .top_k = limits->top_k,
        .rows_cap = (int32_t)limits->rows_cap,
        .ranks = limits->ranks,
        .rank = limits->rank,
        .failed = group->state == NULL ? NULL : &group->state->failed,
        .rows_sent = group->state == NULL ? &group->instance->stats.rows_sent
                                          : &group->state->rows_sent[round->slot],
        .rows_told = group->report == NULL ? NULL : &group->report->rows_sent[round->slot],
        .everywhere = group->everywhere,
        .pad_rows = round->pad_rows,
        .round = round->index,
        .sms = limits->dispatch_sms,
    };
}

// Where words of rows are put, which is where rows would be.
static struct ll_slab slabs_of_words(const struct exchange_group *group,
                                     const struct exchange *slot,
                                     const struct exchange_round *round)
{
    const struct window_layout *w = &group->instance->plan.window;
    unsigned char *base = slot->window->base;
    int32_t *few = exchange_few_ids(group, round);
    struct ll_slab slabs = {
        .rows = base + w->rows,
        .scales = base + w->scales,
        .ids = base + w->ids,
        .weights = base + w->weights,
        .rows_slab_bytes = w->rows_slab_bytes,
        .scales_slab_bytes = w->scales_slab_bytes,
        .ids_slab_bytes = w->ids_slab_bytes,
        .weights_slab_bytes = w->weights_slab_bytes,
    };

    if (few != NULL) {
        slabs.ids = (unsigned char *)few;
        slabs.ids_slab_bytes = round->rows_most * (int64_t)exchange_limits(group)->top_k * 4;
        slabs.ids_by_rank = 1;
    }
    return slabs;
}

// One launch, or the halves of it.
static int32_t dispatch_words(struct exchange_group *group, struct exchange *slot,
                              const struct exchange_round *round, int sends, int waits,
                              moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;
    const struct window *window = slot->window;
    struct push_slab to[MOXIE_RANKS_MAX];
    struct exchange_peers peers;
    struct dispatch_ll_args args = {
        .dispatch = dispatch_stage(group, round),
        .await = exchange_await_stage(group, slot, round, WORD_DISPATCH, &peers),
        .words = window->base + w->ll,
        .in = slabs_of_words(group, slot, round),
        .words_stride_bytes = w->ll_slab_bytes,
        .sends = sends,
        .waits = waits,
    };

    args.dispatch.to = to;
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        to[rank] = push_to(group, slot, round, rank);
        if (exchange_is_peer(group, rank))
            to[rank].rows = piece_to(window, w->ll, w->ll_slab_bytes, limits->rank, rank);
    }
    return exchange_launched(
        group, slot, round,
        group->instance->device->kernels->dispatch_ll(&args, round->batch->stream), "dispatch_ll",
        error);
}

int32_t exchange_dispatch_send(struct exchange_group *group, struct exchange *slot,
                               const struct exchange_round *round, moxie_error *error)
{
    moxie_instance *instance = group->instance;
    struct push_slab to[MOXIE_RANKS_MAX];
    struct dispatch_args args = dispatch_stage(group, round);
    int32_t st = MOXIE_OK;

    TRY(group->flags->begin(group, slot, error));
    if (goes_as_words(group, round)) {
        if (!round->joined) TRY(dispatch_words(group, slot, round, 1, 0, error));
        goto out;
    }
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++)
        to[rank] = push_to(group, slot, round, rank);
    args.to = to;
    TRY(exchange_launched(
        group, slot, round,
        instance->device->kernels->dispatch(&args, instance_stream(instance, round->batch->stream)),
        "dispatch", error));
    TRY(group->flags->send(group, slot, round, WORD_DISPATCH, error));
out:
    return st;
}

// ---- what came, and where results go -----------------------------------------------------------

// A row-strided 2-D tensor.
static moxie_tensor strided(void *data, int64_t rows, int64_t columns, int64_t stride_bytes,
                            uint32_t type, struct exchange_extent *extent)
{
    moxie_tensor tensor = tensor_make(data, 2, extent->dims, extent->strides, type);

    extent->dims[0] = rows;
    extent->dims[1] = columns;
    extent->strides[0] = stride_bytes / tensor_element_bytes(&tensor);
    extent->strides[1] = 1;
    return tensor;
}

// The same tensor with a shape that lasts: the caller's holds for one call.
static moxie_tensor lasting(moxie_tensor tensor, struct exchange_extent *extent)
{
    for (int32_t i = 0; i < tensor.ndim && i < 2; i++) {
        extent->dims[i] = tensor.shape[i];
        extent->strides[i] = tensor_stride_bytes(&tensor, i) / tensor_element_bytes(&tensor);
    }
    tensor.shape = extent->dims;
    tensor.strides = extent->strides;
    return tensor;
}

// The part of a batch tensor that this round covers.
static moxie_tensor part(const moxie_tensor *whole, const struct exchange_round *round,
                         struct exchange_extent *extent)
{
    moxie_tensor tensor = lasting(*whole, extent);

    extent->dims[0] = round->tokens;
    tensor.byte_offset += (uint64_t)(round->first * tensor_stride_bytes(whole, 0));
    return tensor;
}

static void describe_own(const struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round)
{
    const struct limits *limits = exchange_limits(group);
    const struct memory *memory = &group->instance->memory;
    struct exchange_dims *dims = &slot->dims[limits->rank];
    moxie_slab *in = &slot->in_slabs[limits->rank], *out = &slot->out_slabs[limits->rank];

    *in = (moxie_slab){.struct_size = sizeof *in};
    *out = (moxie_slab){.struct_size = sizeof *out};
    in->rows = part(&round->batch->x, round, &dims->rows);
    in->ids = strided(own_ids(group, round), round->tokens, limits->top_k,
                      (int64_t)limits->top_k * 4, TENSOR_INT32, &dims->ids);
    in->weights =
        strided(memory_slot(memory, BUFFER_OWN_WEIGHTS, round->slot), round->tokens, limits->top_k,
                (int64_t)limits->top_k * 4, 1u << MOXIE_FORMAT_F32, &dims->weights);
    out->rows = part(&round->batch->y, round, &dims->results);
}

static void describe_payload(const struct exchange_group *group, struct exchange *slot,
                             int32_t from, int64_t cap)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;
    moxie_slab *in = &slot->in_slabs[from];
    struct exchange_dims *dims = &slot->dims[from];
    unsigned char *base = slot->window->base;
    unsigned char *rows = piece(base, w->rows, w->rows_slab_bytes, from, limits->rank);
    unsigned char *scales = piece(base, w->scales, w->scales_slab_bytes, from, limits->rank);

    switch (limits->wire_format) {
    case FORMAT_FP8_BLOCK128:
        in->rows = strided(rows, cap, limits->hidden, limits->row_bytes, TENSOR_E4M3, &dims->rows);
        in->scales = strided(scales, cap, ceil_div(limits->hidden, 128), limits->scale_bytes,
                             1u << MOXIE_FORMAT_F32, &dims->scales);
        break;
    case FORMAT_NVFP4:
        in->rows =
            strided(rows, cap, limits->hidden / 2, limits->row_bytes, TENSOR_UINT8, &dims->rows);
        in->scales = strided(scales, cap, 4 + limits->hidden / 16, limits->scale_bytes,
                             TENSOR_UINT8, &dims->scales);
        break;
    default:
        in->rows = strided(rows, cap, limits->hidden, limits->row_bytes, 1u << limits->wire_format,
                           &dims->rows);
        break;
    }
}

// Where results of that rank's rows go: into its window, or, where they go on as words, into the
// place that its results have in the own one.
static unsigned char *results_for(const struct exchange_group *group, const struct exchange *slot,
                                  const struct exchange_round *round, int32_t from)
{
    const struct window_layout *w = &group->instance->plan.window;
    int32_t me = exchange_limits(group)->rank;

    if (goes_as_words(group, round))
        return piece(slot->window->base, w->results, w->results_slab_bytes, from, me);
    return piece_to(slot->window, w->results, w->results_slab_bytes, me, from);
}

static void describe_peer(const struct exchange_group *group, struct exchange *slot,
                          const struct exchange_round *round, int32_t from)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;
    struct exchange_dims *dims = &slot->dims[from];
    moxie_slab *in = &slot->in_slabs[from], *out = &slot->out_slabs[from];
    unsigned char *base = slot->window->base;

    *in = (moxie_slab){.struct_size = sizeof *in};
    *out = (moxie_slab){.struct_size = sizeof *out};
    describe_payload(group, slot, from, round->rows_most);
    in->ids = strided(
        ids_of(group, round, from, piece(base, w->ids, w->ids_slab_bytes, from, limits->rank)),
        round->rows_most, limits->top_k, limits->id_bytes, TENSOR_INT32, &dims->ids);
    in->weights = strided(piece(base, w->weights, w->weights_slab_bytes, from, limits->rank),
                          round->rows_most, limits->top_k, limits->weight_bytes,
                          1u << MOXIE_FORMAT_F32, &dims->weights);
    out->rows = strided(results_for(group, slot, round, from), round->rows_most, limits->hidden,
                        limits->result_bytes, 1u << limits->output_format, &dims->results);
}

// Windows are mapped for the instance's device.
static void place(moxie_slab *slab, moxie_device device)
{
    slab->rows.device = device;
    slab->scales.device = device;
    slab->ids.device = device;
    slab->weights.device = device;
}

static moxie_rows describe_rows(const struct limits *limits, moxie_slab *slabs)
{
    return (moxie_rows){.struct_size = sizeof(moxie_rows),
                        .layout = MOXIE_LAYOUT_RANK_MAJOR,
                        .id_space = MOXIE_IDS_PHYSICAL,
                        .slabs_count = (uint32_t)limits->ranks,
                        .slab_stride = sizeof(moxie_slab),
                        .slabs = slabs};
}

int32_t exchange_dispatch_recv(struct exchange_group *group, struct exchange *slot,
                               const struct exchange_round *round, moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    int32_t st = MOXIE_OK;

    if (goes_as_words(group, round))
        TRY(dispatch_words(group, slot, round, round->joined, 1, error));
    else
        TRY(group->flags->wait(group, slot, round, WORD_DISPATCH, error));
    slot->in = describe_rows(limits, slot->in_slabs);
    slot->out = describe_rows(limits, slot->out_slabs);
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        if (rank == limits->rank)
            describe_own(group, slot, round);
        else
            describe_peer(group, slot, round, rank);
        place(&slot->in_slabs[rank], instance_place(group->instance));
        place(&slot->out_slabs[rank], instance_place(group->instance));
    }
    slot->counts_dim = limits->ranks;
    slot->in.counts = tensor_make(slot->counts, 1, &slot->counts_dim, NULL, TENSOR_INT32);
    slot->in.counts.device = slot->in_slabs[0].rows.device;
    slot->out.counts = slot->in.counts;
out:
    return st;
}

// ---- without peers -----------------------------------------------------------------------------

void exchange_describe_local(const moxie_instance *instance, struct exchange *slot,
                             const struct exchange_round *round)
{
    const moxie_batch *batch = round->batch;
    struct exchange_dims *dims = &slot->dims[0];
    const moxie_rows rows = {.struct_size = sizeof rows,
                             .layout = MOXIE_LAYOUT_STANDARD,
                             .id_space = batch->id_space,
                             .slabs_count = 1,
                             .slab_stride = sizeof(moxie_slab)};

    slot->in_slabs[0] = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                     .rows = lasting(batch->x, &dims->rows),
                                     .ids = lasting(batch->ids, &dims->ids),
                                     .weights = lasting(batch->weights, &dims->weights)};
    slot->out_slabs[0] =
        (moxie_slab){.struct_size = sizeof(moxie_slab), .rows = lasting(batch->y, &dims->results)};
    slot->in = rows;
    if (batch->expert_map.data != NULL)
        slot->in.expert_map = lasting(batch->expert_map, &dims->map);
    slot->in.slabs = slot->in_slabs;
    slot->out = rows;
    slot->out.slabs = slot->out_slabs;
    if (round->tokens_valid != NULL) {
        slot->counts_dim = 1;
        // Read by the kernels only; DLPack has no const.
        slot->in.counts = tensor_make((void *)(uintptr_t)round->tokens_valid, 1, &slot->counts_dim,
                                      NULL, TENSOR_INT32);
        slot->in.counts.device = instance_place(instance);
    }
}

// ---- combine -----------------------------------------------------------------------------------

static struct sum_args sum_stage(const struct exchange_group *group, const struct exchange *slot,
                                 const struct exchange_round *round)
{
    const struct limits *limits = exchange_limits(group);

    return (struct sum_args){
        .y = tensor_data(&slot->out_slabs[limits->rank].rows),
        .y_earlier = tensor_data(&round->batch->y),
        .y_stride_bytes = tensor_stride_bytes(&round->batch->y, 0),
        .part_stride_bytes = limits->result_bytes,
        .send_slot = memory_slot(&group->instance->memory, BUFFER_SEND_SLOT, round->slot),
        .failed = group->state == NULL ? NULL : &group->state->failed,
        .active_now = group->state == NULL ? NULL : &group->state->active,
        .active = group->active,
        .format = limits->output_format,
        .tokens = round->tokens,
        .hidden = limits->hidden,
        .ranks = limits->ranks,
        .rank = limits->rank,
        .rows_cap = (int32_t)limits->rows_cap,
        .tokens_earlier = (int32_t)round->earlier,
        .sms = limits->dispatch_sms,
    };
}

// One launch, or the halves of it.
static int32_t sum_words(struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round, int sends, int waits,
                         moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;
    struct ll_results results[MOXIE_RANKS_MAX] = {{0}};
    struct exchange_peers peers;
    const struct sum_ll_args args = {
        .sum = sum_stage(group, slot, round),
        .await = exchange_await_stage(group, slot, round, WORD_COMBINE, &peers),
        .peers = results,
        .counts = slot->counts,
        .words = slot->window->base + w->ll_results,
        .words_stride_bytes = w->ll_results_slab_bytes,
        .rows_stride_bytes = limits->result_bytes,
        .sends = sends,
        .waits = waits,
    };

    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        if (exchange_is_peer(group, rank))
            results[rank] = (struct ll_results){
                .rows = results_for(group, slot, round, rank),
                .words = piece_to(slot->window, w->ll_results, w->ll_results_slab_bytes,
                                  limits->rank, rank),
            };
    }
    return exchange_launched(group, slot, round,
                             group->instance->device->kernels->sum_ll(&args, round->batch->stream),
                             "sum_ll", error);
}

int32_t exchange_combine_send(struct exchange_group *group, struct exchange *slot,
                              const struct exchange_round *round, moxie_error *error)
{
    if (!goes_as_words(group, round))
        return group->flags->send(group, slot, round, WORD_COMBINE, error);
    return round->joined ? MOXIE_OK : sum_words(group, slot, round, 1, 0, error);
}

int32_t exchange_combine_recv(struct exchange_group *group, struct exchange *slot,
                              const struct exchange_round *round, moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;
    moxie_instance *instance = group->instance;
    const void *parts[MOXIE_RANKS_MAX] = {NULL};
    struct sum_args args = sum_stage(group, slot, round);
    int32_t st = MOXIE_OK;

    if (goes_as_words(group, round)) return sum_words(group, slot, round, round->joined, 1, error);
    TRY(group->flags->wait(group, slot, round, WORD_COMBINE, error));
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        if (rank != limits->rank)
            parts[rank] =
                piece(slot->window->base, w->results, w->results_slab_bytes, rank, limits->rank);
    }
    args.parts = parts;
    TRY(exchange_launched(
        group, slot, round,
        instance->device->kernels->sum(&args, instance_stream(instance, round->batch->stream)),
        "sum", error));
out:
    return st;
}
