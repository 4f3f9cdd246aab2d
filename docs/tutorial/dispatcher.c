// Dispatcher `local`: nothing moves, and the order of calls is kept.

#include "docs/tutorial/skeleton.h"

#include <stdlib.h>

enum state { IDLE, BEGUN, SENT, RECEIVED, RETURNED };

struct dispatcher {
    struct object object;
    enum state state;
    int64_t tokens, one;
    const int32_t *tokens_valid;
    const void *y;
    struct extent {
        int64_t shape[2], strides[2];
    } x_extent, ids_extent, weights_extent, y_extent, map_extent;
    moxie_slab in_slab, out_slab;
    moxie_rows in, out;
};

static int32_t dispatcher_create(moxie_instance *handle, moxie_dispatcher **out, moxie_error *error)
{
    struct dispatcher *dispatcher = NULL;
    struct object *object;
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail(error, MOXIE_E_INVALID, "out is NULL");
    *out = NULL;
    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INIT, &object, error));
    TRY(use(object->instance, error));
    dispatcher = calloc(1, sizeof *dispatcher);
    if (dispatcher == NULL) {
        unuse(object->instance);
        TRY(fail(error, MOXIE_E_MEMORY, "no memory for the handle"));
    }
    dispatcher->one = 1;
    enlist(&dispatcher->object, object->instance, DISPATCH);
    *out = (moxie_dispatcher *)dispatcher;
out:
    return st;
}

static int32_t begin_forward(moxie_dispatcher *handle, const moxie_step *given, moxie_error *error)
{
    struct dispatcher *dispatcher;
    struct object *object;
    moxie_step step;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, DISPATCH, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    TAKE(step, given, "step");
    dispatcher = (struct dispatcher *)object;
    if (step.slot != 0 || step.tokens < 0 || dispatcher->state > BEGUN || step.capture_row < 0 ||
        step.padding < 0 || step.padding > MOXIE_PADDING_SUM_LEN || step.phase < 0 ||
        step.phase > MOXIE_PHASE_IDLE)
        TRY(fail(error, MOXIE_E_INVALID, "step: slot %d, %lld tokens, or inside a layer", step.slot,
                 (long long)step.tokens));
    if (step.tokens > object->instance->bounds.forward_tokens) {
        object->instance->stats.refused++;
        TRY(fail(error, MOXIE_E_CAPACITY, "%lld tokens; the plan holds %lld: raise %s",
                 (long long)step.tokens, (long long)object->instance->bounds.forward_tokens,
                 object->instance->bounds.dominant));
    }
    dispatcher->tokens = step.tokens;
    dispatcher->tokens_valid = step.tokens_valid;
    dispatcher->state = BEGUN;
out:
    return st;
}

// The tensor with a shape that lasts until combine: the caller's holds for one call.
static moxie_tensor lasting(moxie_tensor tensor, struct extent *extent)
{
    for (int32_t i = 0; i < tensor.ndim && i < 2; i++) {
        if (tensor.shape != NULL) extent->shape[i] = tensor.shape[i];
        if (tensor.strides != NULL) extent->strides[i] = tensor.strides[i];
    }
    if (tensor.shape != NULL) tensor.shape = extent->shape;
    if (tensor.strides != NULL) tensor.strides = extent->strides;
    return tensor;
}

// One call of a layer: the batch is checked whole, then the slot goes from one state to another.
static int32_t advance(moxie_dispatcher *handle, const moxie_batch *given, enum state from,
                       enum state to, moxie_error *error)
{
    struct dispatcher *dispatcher;
    struct object *object;
    moxie_batch batch;
    struct job job;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, DISPATCH, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    TAKE(batch, given, "batch");
    dispatcher = (struct dispatcher *)object;
    if (dispatcher->state != from || (from > BEGUN && batch.y.data != dispatcher->y))
        TRY(fail(error, MOXIE_E_INVALID, "out of order: begin, then dispatch, run, combine"));
    if (batch.slot != 0 || batch.layer < 0 || batch.layer >= object->instance->number[LAYERS] ||
        batch.id_space < MOXIE_IDS_GLOBAL || batch.id_space > MOXIE_IDS_LOCAL || batch.stream)
        TRY(fail(error, MOXIE_E_INVALID, "batch: slot %d, layer %d, id_space %d, or a stream",
                 batch.slot, batch.layer, batch.id_space));
    dispatcher->in_slab =
        (moxie_slab){.struct_size = sizeof(moxie_slab),
                     .rows = lasting(batch.x, &dispatcher->x_extent),
                     .ids = lasting(batch.ids, &dispatcher->ids_extent),
                     .weights = lasting(batch.weights, &dispatcher->weights_extent)};
    dispatcher->out_slab = (moxie_slab){.struct_size = sizeof(moxie_slab),
                                        .rows = lasting(batch.y, &dispatcher->y_extent)};
    dispatcher->in = (moxie_rows){.struct_size = sizeof(moxie_rows),
                                  .layout = MOXIE_LAYOUT_STANDARD,
                                  .id_space = batch.id_space,
                                  .slabs_count = 1,
                                  .slab_stride = sizeof(moxie_slab),
                                  .slabs = &dispatcher->in_slab,
                                  .expert_map = lasting(batch.expert_map, &dispatcher->map_extent)};
    dispatcher->out = dispatcher->in;
    dispatcher->out.slabs = &dispatcher->out_slab;
    if (dispatcher->tokens_valid != NULL)
        dispatcher->in.counts = (moxie_tensor){(void *)(uintptr_t)dispatcher->tokens_valid,
                                               {MOXIE_DEVICE_CPU, 0},
                                               1,
                                               {MOXIE_DTYPE_INT, 32, 1},
                                               &dispatcher->one,
                                               NULL,
                                               0};
    TRY(read_job(object->instance, &dispatcher->in_slab, &dispatcher->out_slab, &dispatcher->in,
                 dispatcher->tokens, &job, error));
    dispatcher->y = batch.y.data;
    dispatcher->state = to;
    object->instance->stats.tokens += from == BEGUN ? (uint64_t)dispatcher->tokens : 0;
    object->instance->stats.dispatches += from == BEGUN;
    object->instance->stats.combines += to == BEGUN;
out:
    return st;
}

// Rows are handed out as they came.
static int32_t receive(moxie_dispatcher *handle, const moxie_batch *batch, enum state from,
                       const moxie_rows **in, const moxie_rows **out_rows, moxie_error *error)
{
    struct dispatcher *dispatcher = (struct dispatcher *)handle;
    int32_t st = MOXIE_OK;

    if (in == NULL || out_rows == NULL) return fail(error, MOXIE_E_INVALID, "in or out is NULL");
    *in = *out_rows = NULL;
    TRY(advance(handle, batch, from, RECEIVED, error));
    *in = &dispatcher->in;
    *out_rows = &dispatcher->out;
out:
    return st;
}

static int32_t dispatch(moxie_dispatcher *handle, const moxie_batch *batch, const moxie_rows **in,
                        const moxie_rows **out, moxie_error *error)
{
    return receive(handle, batch, BEGUN, in, out, error);
}

static int32_t dispatch_send(moxie_dispatcher *handle, const moxie_batch *batch, moxie_error *error)
{
    return advance(handle, batch, BEGUN, SENT, error);
}

static int32_t dispatch_recv(moxie_dispatcher *handle, const moxie_batch *batch,
                             const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    return receive(handle, batch, SENT, in, out, error);
}

static int32_t combine(moxie_dispatcher *handle, const moxie_batch *batch, moxie_error *error)
{
    return advance(handle, batch, RECEIVED, BEGUN, error);
}

static int32_t combine_send(moxie_dispatcher *handle, const moxie_batch *batch, moxie_error *error)
{
    return advance(handle, batch, RECEIVED, RETURNED, error);
}

static int32_t combine_recv(moxie_dispatcher *handle, const moxie_batch *batch, moxie_error *error)
{
    return advance(handle, batch, RETURNED, BEGUN, error);
}

static int32_t poll_error(moxie_dispatcher *handle, moxie_error *error)
{
    struct object *object;

    return enter(handle, DISPATCH, 0, &object, error);
}

static int32_t set_active_ranks(moxie_dispatcher *handle, const uint8_t *active, moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, DISPATCH, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    TRY(fail(error, active == NULL ? MOXIE_E_INVALID : MOXIE_E_UNSUPPORTED, "there are no peers"));
out:
    return st;
}

static void dispatcher_destroy(moxie_dispatcher *handle)
{
    destroy(handle, DISPATCH);
}

int32_t tutorial_forward(moxie_dispatcher *handle, moxie_runner *runner, const moxie_batch *batch,
                         moxie_error *error)
{
    const moxie_call call = {.struct_size = sizeof call};
    const struct object *other = find(runner, RUN, 0);
    const moxie_rows *in, *out_rows;
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, DISPATCH, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    if (other == NULL || other->instance != object->instance)
        TRY(fail(error, MOXIE_E_INVALID, "no living runner of the dispatcher's instance"));
    TRY(dispatch(handle, batch, &in, &out_rows, error));
    object->instance->stats.forwards++;
    object->instance->stats.rounds++;
    TRY(tutorial_runner.api->run(runner, &call, in, out_rows, error));
    TRY(combine(handle, batch, error));
out:
    return st;
}

static const moxie_dispatcher_api dispatcher_api = {.struct_size = sizeof(moxie_dispatcher_api),
                                                    .create = dispatcher_create,
                                                    .begin_forward = begin_forward,
                                                    .dispatch = dispatch,
                                                    .combine = combine,
                                                    .dispatch_send = dispatch_send,
                                                    .dispatch_recv = dispatch_recv,
                                                    .combine_send = combine_send,
                                                    .combine_recv = combine_recv,
                                                    .poll_error = poll_error,
                                                    .set_active_ranks = set_active_ranks,
                                                    .destroy = dispatcher_destroy};

const moxie_dispatcher_info tutorial_dispatcher = {
    sizeof(moxie_dispatcher_info), 0, "local", "cpu", &tutorial_traits, &dispatcher_api};
