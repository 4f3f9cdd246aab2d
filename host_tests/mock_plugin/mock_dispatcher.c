// The dispatchers: what a step and a batch may be, and the rows of a round.

#include "host_tests/mock_plugin/mock.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

static const char *const next_call[] = {
    [SLOT_IDLE] = "begin_forward",    [SLOT_BEGUN] = "dispatch or dispatch_send",
    [SLOT_SENT] = "dispatch_recv",    [SLOT_RECEIVED] = "combine or combine_send",
    [SLOT_RETURNED] = "combine_recv",
};

static int is_local(const struct dispatcher *dispatcher)
{
    return dispatcher->kind == DISPATCHER_LOCAL;
}

int64_t physical_expert(const struct instance *instance, const struct view *map, int32_t id_space,
                        int64_t id)
{
    const struct limits *limits = &instance->limits;

    if (map->data != NULL && id >= 0 && id < map->shape[0])
        id = view_integer(map, id, 0);
    else if (map->data != NULL && !HAS_FAULT(FAULT_MAP_FALLS_THROUGH))
        id = -1;
    if (id_space == MOXIE_IDS_LOCAL)
        return id >= 0 && id < limits->experts_local ? limits->expert_first + id : -1;
    return id >= 0 && id < limits->physical_experts ? id : -1;
}

// ---- A batch -----------------------------------------------------------------------------------

static int32_t read_tensors(const struct call *call, int64_t tokens, struct batch *batch)
{
    const struct limits *limits = &call->instance->limits;
    const struct want x = {"batch.x", limits->input_type, 2, {tokens, limits->hidden, 0}, 0};
    const struct want ids = {"batch.ids", TYPE_IDS, 2, {tokens, limits->top_k, 0}, 0};
    const struct want weights = {"batch.weights", TYPE_FLOATS, 2, {tokens, limits->top_k, 0}, 0};
    const struct want y = {"batch.y", limits->output_type, 2, {tokens, limits->hidden, 0}, 0};
    const struct want map = {"batch.expert_map", TYPE_I32, 1, {-1, 0, 0}, 1};
    const moxie_batch *given = &batch->given;
    int32_t st = MOXIE_OK;

    TRY(view_read(&call->caller, &x, &given->x, &batch->x));
    TRY(view_read(&call->caller, &ids, &given->ids, &batch->ids));
    TRY(view_read(&call->caller, &weights, &given->weights, &batch->weights));
    TRY(view_read(&call->caller, &y, &given->y, &batch->y));
    TRY(view_read(&call->caller, &map, &given->expert_map, &batch->map));
    if (view_overlap(&batch->x, &batch->y))
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "batch.y overlaps batch.x"));
    if (view_rows_overlap(&batch->y))
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "batch.y: its rows overlap"));
out:
    return st;
}

static int32_t check_numbers(const struct call *call, const struct dispatcher *dispatcher,
                             const moxie_batch *given)
{
    const struct limits *limits = &call->instance->limits;
    int32_t most = is_local(dispatcher) ? MOXIE_IDS_LOCAL : MOXIE_IDS_PHYSICAL;

    if (given->slot < 0 || given->slot >= limits->slots)
        return fail_with(&call->caller, MOXIE_E_INVALID, "batch.slot is %d; want 0..%d",
                         given->slot, limits->slots - 1);
    if (given->layer < 0 || given->layer >= limits->layers)
        return fail_with(&call->caller, MOXIE_E_INVALID, "batch.layer is %d; want 0..%" PRId64,
                         given->layer, limits->layers - 1);
    if ((given->id_space < MOXIE_IDS_GLOBAL || given->id_space > most) &&
        !HAS_FAULT(FAULT_ANY_ID_SPACE))
        return fail_with(&call->caller, MOXIE_E_INVALID, "batch.id_space is %d", given->id_space);
    if (given->stream != NULL)
        return fail_with(&call->caller, MOXIE_E_INVALID, "batch.stream: want NULL on the CPU");
    return MOXIE_OK;
}

static int32_t check_failed(const struct call *call, const struct dispatcher *dispatcher)
{
    int32_t failed = atomic_load(&dispatcher->failed);

    if (failed == MOXIE_OK) return MOXIE_OK;
    return fail_with(&call->caller, failed, "%s", dispatcher->failed_text);
}

int32_t batch_read(const struct call *call, struct dispatcher *dispatcher, const moxie_batch *given,
                   enum slot_state state, struct batch *batch)
{
    const struct slot *slot;
    int32_t st = MOXIE_OK;

    TRY(struct_read(&call->caller, &shape_batch, "batch", given, &batch->given));
    TRY(check_failed(call, dispatcher));
    TRY(check_numbers(call, dispatcher, &batch->given));
    slot = &dispatcher->slots[batch->given.slot];
    if (slot->state != (int32_t)state && !HAS_FAULT(FAULT_ANY_ORDER))
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "slot %d: out of order; next is %s",
                      batch->given.slot, next_call[slot->state]));
    TRY(read_tensors(call, slot->step.tokens, batch));
    if (state > SLOT_BEGUN && (slot->y != batch->y.data || slot->layer != batch->given.layer) &&
        !HAS_FAULT(FAULT_ANY_ORDER) && !HAS_FAULT(FAULT_ANOTHER_BATCH))
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "slot %d: the batch is not that of the layer's dispatch", batch->given.slot));
out:
    if (st != MOXIE_OK && HAS_FAULT(FAULT_WRITE_ON_REFUSAL) && batch->given.y.data != NULL)
        *(unsigned char *)batch->given.y.data ^= 0x55;
    return st;
}

// ---- Capture -----------------------------------------------------------------------------------

void capture_record(struct instance *instance, const struct slot *slot, const struct batch *batch)
{
    const struct limits *limits = &instance->limits;
    int32_t *capture = instance->memory[BUFFER_CAPTURE];

    if (capture == NULL) return;
    for (int64_t token = 0; token < slot->tokens; token++) {
        int64_t row = slot->capture_row + slot->first + token;
        int32_t *to = capture + (row * limits->layers + batch->given.layer) * limits->top_k;

        for (int32_t k = 0; k < limits->top_k; k++)
            to[k] = (int32_t)physical_expert(instance, &batch->map, batch->given.id_space,
                                             view_integer(&batch->ids, slot->first + token, k));
        if (HAS_FAULT(FAULT_CAPTURED_OVER))
            memcpy(capture + row * limits->layers * limits->top_k, to,
                   (size_t)limits->top_k * sizeof *to);
    }
}

// ---- Sending -----------------------------------------------------------------------------------

static unsigned char *outgoing(const struct instance *instance, int32_t slot)
{
    return (unsigned char *)instance->memory[BUFFER_OUTGOING] + slot * instance->limits.block.bytes;
}

static int64_t valid_tokens(const struct slot *slot)
{
    int64_t valid = slot->step.tokens;

    if (slot->step.tokens_valid != NULL && !HAS_FAULT(FAULT_IGNORED_TOKENS_VALID))
        valid = *slot->step.tokens_valid;
    return valid;
}

static void pack(const struct instance *instance, const struct slot *slot,
                 const struct batch *batch)
{
    const struct limits *limits = &instance->limits;
    unsigned char *block = outgoing(instance, batch->given.slot);
    int64_t row_bytes = limits->hidden * type_bytes(limits->input_type);
    int32_t *ids = (int32_t *)(void *)(block + limits->block.ids);
    float *weights = (float *)(void *)(block + limits->block.weights);
    int64_t valid = valid_tokens(slot);

    memcpy(block, &slot->tokens, sizeof slot->tokens);
    for (int64_t token = 0; token < slot->tokens; token++) {
        int64_t from = slot->first + token;

        memcpy(block + limits->block.rows + token * row_bytes, view_at(&batch->x, from, 0, 0),
               (size_t)row_bytes);
        for (int32_t k = 0; k < limits->top_k; k++) {
            int64_t id = view_integer(&batch->ids, from, k);

            id = physical_expert(instance, &batch->map, batch->given.id_space, id);
            ids[token * limits->top_k + k] = from < valid ? (int32_t)id : -1;
            weights[token * limits->top_k + k] = (float)view_number(&batch->weights, from, k, 0);
        }
    }
}

int32_t dispatcher_send(const struct call *call, struct dispatcher *dispatcher,
                        const struct batch *batch, int64_t round)
{
    struct instance *instance = call->instance;
    struct slot *slot = &dispatcher->slots[batch->given.slot];
    int64_t most = instance->limits.call_tokens_max;
    int64_t left = slot->step.tokens - round * most;

    slot->first = left > 0 ? round * most : 0;
    slot->tokens = left < 0 ? 0 : left < most ? left : most;
    slot->y = batch->y.data;
    slot->layer = batch->given.layer;
    slot->state = SLOT_SENT;
    capture_record(instance, slot, batch);
    instance->stats.dispatches++;
    if (!HAS_FAULT(FAULT_UNCOUNTED_TOKENS)) instance->stats.tokens += (uint64_t)slot->tokens;
    if (is_local(dispatcher)) return MOXIE_OK;
    pack(instance, slot, batch);
    instance->stats.rows_sent += (uint64_t)slot->tokens * (uint64_t)(instance->limits.ranks - 1);
    return MOXIE_OK;
}

// ---- Receiving ---------------------------------------------------------------------------------

static moxie_tensor tensor(void *data, uint32_t type, int32_t ndim, int64_t *shape)
{
    static const struct {
        uint32_t type;
        moxie_dtype dtype;
    } rows[] = {
        {TYPE_F32, {MOXIE_DTYPE_FLOAT, 32, 1}},
        {TYPE_BF16, {MOXIE_DTYPE_BFLOAT, 16, 1}},
        {TYPE_F16, {MOXIE_DTYPE_FLOAT, 16, 1}},
        {TYPE_I32, {MOXIE_DTYPE_INT, 32, 1}},
    };
    moxie_tensor made = {
        .data = data, .device = {MOXIE_DEVICE_CPU, 0}, .ndim = ndim, .shape = shape};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (rows[i].type == type) made.dtype = rows[i].dtype;
    }
    return made;
}

static moxie_rows rows_of(int32_t layout, const moxie_slab *slabs, uint32_t count)
{
    return (moxie_rows){
        .struct_size = sizeof(moxie_rows),
        .layout = layout,
        .id_space = MOXIE_IDS_PHYSICAL,
        .slabs_count = count,
        .slab_stride = sizeof(moxie_slab),
        .slabs = slabs,
    };
}

// The same tensor with a shape that lasts: the host's holds for one call.
static moxie_tensor lasting(moxie_tensor tensor, int64_t extent[2][2])
{
    if (tensor.shape == NULL || tensor.ndim < 1 || tensor.ndim > 2) return tensor; // absent
    if (HAS_FAULT(FAULT_BORROWED_SHAPES)) return tensor;
    memcpy(extent[0], tensor.shape, (size_t)tensor.ndim * sizeof *tensor.shape);
    tensor.shape = extent[0];
    if (tensor.strides == NULL) return tensor;
    memcpy(extent[1], tensor.strides, (size_t)tensor.ndim * sizeof *tensor.strides);
    tensor.strides = extent[1];
    return tensor;
}

static void describe_local(struct slot *slot, const struct batch *batch)
{
    slot->in_slabs[0] = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                     .rows = lasting(batch->given.x, slot->extents[0]),
                                     .ids = lasting(batch->given.ids, slot->extents[1]),
                                     .weights = lasting(batch->given.weights, slot->extents[2])};
    slot->out_slabs[0] = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                      .rows = lasting(batch->given.y, slot->extents[3])};
    slot->in = rows_of(MOXIE_LAYOUT_STANDARD, slot->in_slabs, 1);
    slot->out = rows_of(MOXIE_LAYOUT_STANDARD, slot->out_slabs, 1);
    slot->in.id_space = slot->out.id_space = batch->given.id_space;
    slot->in.expert_map = slot->out.expert_map = lasting(batch->given.expert_map, slot->extents[4]);
    if (slot->step.tokens_valid == NULL) return;
    slot->counts_dim = 1;
    slot->in.counts =
        tensor((void *)(uintptr_t)slot->step.tokens_valid, TYPE_I32, 1, &slot->counts_dim);
}

static void describe_rank(const struct instance *instance, struct slot *slot, int32_t place,
                          int32_t rank)
{
    const struct limits *limits = &instance->limits;
    unsigned char *block = (unsigned char *)instance->memory[BUFFER_RECEIVED] +
                           (place * limits->ranks + rank) * limits->block.bytes;
    unsigned char *results = instance->memory[BUFFER_RESULTS];
    struct slot_dims *dims = &slot->dims[rank];
    moxie_slab *in = &slot->in_slabs[rank], *out = &slot->out_slabs[rank];
    int64_t cap = limits->call_tokens_max, count;

    memcpy(&count, block, sizeof count);
    slot->counts[rank] = (int32_t)(count < 0 ? 0 : count > cap ? cap : count);
    dims->rows[0] = dims->choices[0] = cap;
    dims->rows[1] = limits->hidden;
    dims->choices[1] = limits->top_k;
    results +=
        (place * limits->ranks + rank) * cap * limits->hidden * type_bytes(limits->output_type);
    *in = (moxie_slab){.struct_size = sizeof *in};
    *out = (moxie_slab){.struct_size = sizeof *out};
    in->rows = tensor(block + limits->block.rows, limits->input_type, 2, dims->rows);
    in->ids = tensor(block + limits->block.ids, TYPE_I32, 2, dims->choices);
    in->weights = tensor(block + limits->block.weights, TYPE_F32, 2, dims->choices);
    out->rows = tensor(results, limits->output_type, 2, dims->rows);
}

// A failure among the ranks stays, and y becomes zero.
static int32_t stick(const struct call *call, struct dispatcher *dispatcher,
                     const struct batch *batch, int32_t code)
{
    if (code == MOXIE_OK || code == MOXIE_E_INVALID) return code;
    (void)snprintf(dispatcher->failed_text, sizeof dispatcher->failed_text,
                   "all_gather failed in a step: a rank cannot be reached");
    for (int64_t token = 0; token < batch->y.shape[0]; token++)
        memset(view_at(&batch->y, token, 0, 0), 0,
               (size_t)(batch->y.shape[1] * type_bytes(batch->y.type)));
    call->instance->stats.peer_failures++;
    atomic_store(&dispatcher->failed, code);
    return code;
}

int32_t dispatcher_receive(const struct call *call, struct dispatcher *dispatcher,
                           const struct batch *batch)
{
    const struct limits *limits = &call->instance->limits;
    struct slot *slot = &dispatcher->slots[batch->given.slot];
    int32_t st = MOXIE_OK;

    slot->state = SLOT_RECEIVED;
    if (is_local(dispatcher)) {
        describe_local(slot, batch);
        return MOXIE_OK;
    }
    TRY(stick(call, dispatcher, batch, exchange_rows(call, batch->given.slot)));
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        describe_rank(call->instance, slot, batch->given.slot, rank);
        if (rank != limits->rank)
            call->instance->stats.rows_received += (uint64_t)slot->counts[rank];
    }
    slot->counts_dim = limits->ranks;
    slot->in = rows_of(MOXIE_LAYOUT_RANK_MAJOR, slot->in_slabs, (uint32_t)limits->ranks);
    slot->out = rows_of(MOXIE_LAYOUT_RANK_MAJOR, slot->out_slabs, (uint32_t)limits->ranks);
    slot->in.counts = slot->out.counts = tensor(slot->counts, TYPE_I32, 1, &slot->counts_dim);
out:
    return st;
}

int32_t dispatcher_return(const struct call *call, struct dispatcher *dispatcher,
                          const struct batch *batch)
{
    struct slot *slot = &dispatcher->slots[batch->given.slot];
    struct view part = batch->y;
    int32_t st = MOXIE_OK;

    call->instance->stats.combines++;
    slot->state = SLOT_BEGUN;
    if (is_local(dispatcher)) return MOXIE_OK;
    if (part.data != NULL) part.data += slot->first * part.stride_bytes[0];
    TRY(stick(call, dispatcher, batch,
              exchange_results(call, batch->given.slot, &part, slot->tokens)));
out:
    return st;
}
