// The dispatchers' tables: one per kind, alike but for create.

#include "abi/entry.h"

#include "abi/decode.h"
#include "plugin/backends.h"
#include "plugin/dispatcher.h"

static int32_t create_kind(moxie_instance *handle, enum dispatcher_kind kind,
                           moxie_dispatcher **out, moxie_error *error)
{
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(out, "out", error));
    *out = NULL;
    TRY(enter_instance(handle, MOXIE_THREAD_INIT, &instance, error));
    TRY(instance_begin_create(instance, error));
    st = dispatcher_create(instance, kind, out, error);
    instance_end_create(instance);
out:
    return st;
}

static int32_t slot_create_local(moxie_instance *instance, moxie_dispatcher **out,
                                 moxie_error *error)
{
    return create_kind(instance, DISPATCHER_LOCAL, out, error);
}

static int32_t slot_create_allgather(moxie_instance *instance, moxie_dispatcher **out,
                                     moxie_error *error)
{
    return create_kind(instance, DISPATCHER_ALLGATHER, out, error);
}

static int32_t slot_create_alltoall(moxie_instance *instance, moxie_dispatcher **out,
                                    moxie_error *error)
{
    return create_kind(instance, DISPATCHER_ALLTOALL, out, error);
}

static int32_t slot_begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                                  moxie_error *error)
{
    moxie_step decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_dispatcher(dispatcher, MOXIE_THREAD_INSTANCE_SERIAL, error));
    TRY(decode_step(&decoded, step, error));
    TRY(dispatcher_begin_forward(dispatcher, &decoded, error));
out:
    return st;
}

// What the five slots that take a batch do first. `error` has passed error_enter.
static int32_t enter_batch(const moxie_dispatcher *dispatcher, const moxie_batch *batch,
                           moxie_batch *decoded, moxie_error *error)
{
    int32_t st = enter_dispatcher(dispatcher, ENTER_STEP, error);

    return st == MOXIE_OK ? decode_batch(decoded, batch, error) : st;
}

// Both out pointers are there and NULL.
static int32_t clear_rows(const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    if (in == NULL || out == NULL) return check_pointer(NULL, in == NULL ? "in" : "out", error);
    *in = NULL;
    *out = NULL;
    return MOXIE_OK;
}

static int32_t slot_dispatch_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                  moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_dispatch_send(dispatcher, &decoded, error));
out:
    return st;
}

static int32_t slot_dispatch_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                  const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(clear_rows(in, out, error));
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_dispatch_recv(dispatcher, &decoded, in, out, error));
out:
    return st;
}

static int32_t slot_dispatch(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                             const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(clear_rows(in, out, error));
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_dispatch_send(dispatcher, &decoded, error));
    TRY(dispatcher_dispatch_recv(dispatcher, &decoded, in, out, error));
out:
    return st;
}

static int32_t slot_combine_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_combine_send(dispatcher, &decoded, error));
out:
    return st;
}

static int32_t slot_combine_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_combine_recv(dispatcher, &decoded, error));
out:
    return st;
}

static int32_t slot_combine(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                            moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_batch(dispatcher, batch, &decoded, error));
    TRY(dispatcher_combine_send(dispatcher, &decoded, error));
    TRY(dispatcher_combine_recv(dispatcher, &decoded, error));
out:
    return st;
}

static int32_t slot_poll_error(moxie_dispatcher *dispatcher, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_dispatcher(dispatcher, ENTER_ANY, error));
    TRY(dispatcher_poll_error(dispatcher, error));
out:
    return st;
}

static int32_t slot_set_active_ranks(moxie_dispatcher *dispatcher, const uint8_t *active,
                                     moxie_error *error)
{
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_dispatcher(dispatcher, ENTER_STEP, error));
    TRY(check_pointer(active, "active", error));
    TRY(dispatcher_set_active_ranks(dispatcher, active, error));
out:
    return st;
}

static void slot_destroy(moxie_dispatcher *dispatcher)
{
    moxie_instance *instance;

    if (dispatcher == NULL || enter_dispatcher(dispatcher, MOXIE_THREAD_INIT, NULL) != MOXIE_OK)
        return;
    instance = dispatcher_instance(dispatcher);
    if (instance_begin_create(instance, NULL) != MOXIE_OK) return;
    dispatcher_destroy(dispatcher);
    instance_end_create(instance);
}

#define DISPATCHER_API(kind)                                                                       \
    {                                                                                              \
        .struct_size = sizeof(moxie_dispatcher_api), .create = slot_create_##kind,                 \
        .begin_forward = slot_begin_forward, .dispatch = slot_dispatch, .combine = slot_combine,   \
        .dispatch_send = slot_dispatch_send, .dispatch_recv = slot_dispatch_recv,                  \
        .combine_send = slot_combine_send, .combine_recv = slot_combine_recv,                      \
        .poll_error = slot_poll_error, .set_active_ranks = slot_set_active_ranks,                  \
        .destroy = slot_destroy,                                                                   \
    }

static const moxie_dispatcher_api local_api = DISPATCHER_API(local);
static const moxie_dispatcher_api allgather_api = DISPATCHER_API(allgather);
static const moxie_dispatcher_api alltoall_api = DISPATCHER_API(alltoall);

const moxie_dispatcher_info dispatcher_infos[] = {
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "local",
     .device = "cpu",
     .traits = &traits_local,
     .api = &local_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "allgather",
     .device = "cpu",
     .traits = &traits_push,
     .api = &allgather_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "alltoall",
     .device = "cpu",
     .traits = &traits_push,
     .api = &alltoall_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "local",
     .device = "sm_90",
     .traits = &traits_local_cuda,
     .api = &local_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "allgather",
     .device = "sm_90",
     .traits = &traits_push_cuda,
     .api = &allgather_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "alltoall",
     .device = "sm_90",
     .traits = &traits_push_cuda,
     .api = &alltoall_api},
};

const uint32_t dispatcher_infos_count = sizeof dispatcher_infos / sizeof dispatcher_infos[0];
