// The dispatchers' slots, and forward.

#include "host_tests/mock_plugin/mock.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

// ---- create and destroy ------------------------------------------------------------------------

static int32_t prepare(const struct call *call, int32_t kind)
{
    int32_t st = MOXIE_OK;

    TRY(instance_accepted(call));
    if (kind != call->instance->limits.dispatcher)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "create: the configuration chose dispatcher %s",
                      call->instance->printed[KEY_DISPATCHER]));
    TRY(memory_take(call));
out:
    return st;
}

static int32_t create(moxie_instance *handle, enum dispatcher_kind kind, moxie_dispatcher **out,
                      moxie_error *error)
{
    struct dispatcher *dispatcher = NULL;
    struct call call = {.caller = {.error = error_begin(error)}};
    int32_t prepared = MOXIE_E_INVALID;
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail_with(&call.caller, MOXIE_E_INVALID, "out is NULL");
    if (!HAS_FAULT(FAULT_GARBAGE_OUT)) *out = NULL;
    TRY(call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INIT, error));
    prepared = prepare(&call, (int32_t)kind);
    TRY(exchange_agree(&call, prepared));
    dispatcher = calloc(1, sizeof *dispatcher);
    if (dispatcher == NULL) TRY(fail_with(&call.caller, MOXIE_E_MEMORY, "create: no memory"));
    dispatcher->instance = call.instance;
    dispatcher->kind = (int32_t)kind;
    *out = handle_make(HANDLE_DISPATCHER, dispatcher, handle);
    if (*out == NULL) TRY(fail_with(&call.caller, MOXIE_E_MEMORY, "create: no memory"));
    dispatcher = NULL;
out:
    if (st != MOXIE_OK && prepared == MOXIE_OK) memory_drop(call.instance);
    free(dispatcher);
    call_leave(&call);
    return st;
}

static int32_t create_local(moxie_instance *instance, moxie_dispatcher **out, moxie_error *error)
{
    return create(instance, DISPATCHER_LOCAL, out, error);
}

static int32_t create_allgather(moxie_instance *instance, moxie_dispatcher **out,
                                moxie_error *error)
{
    return create(instance, DISPATCHER_ALLGATHER, out, error);
}

static int32_t create_alltoall(moxie_instance *instance, moxie_dispatcher **out, moxie_error *error)
{
    return create(instance, DISPATCHER_ALLTOALL, out, error);
}

static void destroy(moxie_dispatcher *handle)
{
    struct call call;

    if (handle == NULL) return;
    if (call_enter(&call, handle, HANDLE_DISPATCHER, MOXIE_THREAD_INIT, NULL) == MOXIE_OK) {
        handle_kill(handle);
        memory_drop(call.instance);
        free(call.body);
    }
    call_leave(&call);
}

// ---- begin -------------------------------------------------------------------------------------

static int32_t check_step(const struct call *call, const moxie_step *step)
{
    int32_t slots = call->instance->limits.slots;

    if (step->slot < 0 || step->slot >= slots)
        return fail_with(&call->caller, MOXIE_E_INVALID, "step.slot is %d; want 0..%d", step->slot,
                         slots - 1);
    if (step->tokens < 0)
        return fail_with(&call->caller, MOXIE_E_INVALID, "step.tokens is %" PRId64, step->tokens);
    if (step->padding < MOXIE_PADDING_NONE || step->padding > MOXIE_PADDING_SUM_LEN)
        return fail_with(&call->caller, MOXIE_E_INVALID, "step.padding is %d", step->padding);
    if (step->phase < MOXIE_PHASE_MIXED || step->phase > MOXIE_PHASE_IDLE)
        return fail_with(&call->caller, MOXIE_E_INVALID, "step.phase is %d", step->phase);
    if (step->capture_row < 0)
        return fail_with(&call->caller, MOXIE_E_INVALID, "step.capture_row is %" PRId64,
                         step->capture_row);
    return MOXIE_OK;
}

static int32_t check_capacity(const struct call *call, int32_t rank, int64_t tokens)
{
    int64_t most = call->instance->limits.forward_tokens_max;

    if (tokens <= most || HAS_FAULT(FAULT_LOST_ERROR)) return MOXIE_OK;
    return fail_with(&call->caller, MOXIE_E_CAPACITY,
                     "rank %d has %" PRId64 " tokens; the plan holds %" PRId64
                     " (forward_tokens %" PRId64 " from %s)",
                     rank, tokens, most, call->instance->bounds.forward_tokens,
                     call->instance->bounds.dominant);
}

static int32_t count_tokens(const struct call *call, int local, const moxie_step *step,
                            struct slot *slot)
{
    const struct limits *limits = &call->instance->limits;
    int32_t st = MOXIE_OK;

    slot->tokens_most = local ? step->tokens : limits->forward_tokens_max;
    slot->listed = !local && step->rank_tokens != NULL;
    TRY(check_capacity(call, limits->rank, step->tokens));
    if (!slot->listed) return MOXIE_OK;
    slot->tokens_most = 0;
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        int64_t tokens = step->rank_tokens[rank];

        if (tokens < 0 || (rank == limits->rank && tokens != step->tokens))
            TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                          "step.rank_tokens[%d] is %" PRId64 "; step.tokens is %" PRId64, rank,
                          tokens, step->tokens));
        TRY(check_capacity(call, rank, tokens));
        if (tokens > slot->tokens_most) slot->tokens_most = tokens;
    }
out:
    return st;
}

// The row of the capture that token 0 of this rank goes to.
static int32_t place_capture(const struct call *call, int local, const moxie_step *step,
                             struct slot *slot)
{
    const struct limits *limits = &call->instance->limits;
    int64_t rows = limits->capture_tokens * (local ? limits->dp_size : 1);
    int64_t dp_rank = local ? 0 : limits->rank / limits->attn_tp;
    int64_t row = step->capture_row;

    slot->capture_row = 0;
    if (limits->capture_tokens == 0) return MOXIE_OK;
    for (int64_t rank = dp_rank * limits->attn_tp; !local && rank < limits->rank; rank++)
        row += step->rank_tokens != NULL ? step->rank_tokens[rank] : limits->forward_tokens_max;
    slot->capture_row = dp_rank * limits->capture_tokens + row;
    if (row <= rows && step->tokens <= rows - row) return MOXIE_OK;
    return fail_with(&call->caller, MOXIE_E_CAPACITY,
                     "capture rows %" PRId64 "..%" PRId64 " of %" PRId64, row, row + step->tokens,
                     rows);
}

// So late that peers have gone on: the place of a crash is that of the thread which crashed, not
// the last one that any thread has named.
static void crash_late(void)
{
    const struct timespec while_peers_go_on = {.tv_nsec = 50000000};

    (void)nanosleep(&while_peers_go_on, NULL);
    abort();
}

static int32_t begin_forward(moxie_dispatcher *handle, const moxie_step *given, moxie_error *error)
{
    struct dispatcher *dispatcher;
    struct slot *slot, wanted = {.state = SLOT_BEGUN};
    moxie_step step;
    struct call call;
    int64_t again = 0;
    int32_t st = MOXIE_OK;
    int local;

    TRY(call_enter(&call, handle, HANDLE_DISPATCHER, MOXIE_THREAD_INSTANCE_SERIAL, error));
    dispatcher = call.body;
    local = dispatcher->kind == DISPATCHER_LOCAL;
    TRY(struct_read(&call.caller, &shape_step, "step", given, &step));
    if (atomic_load(&dispatcher->failed) != MOXIE_OK)
        TRY(fail_with(&call.caller, atomic_load(&dispatcher->failed), "%s",
                      dispatcher->failed_text));
    TRY(check_step(&call, &step));
    slot = &dispatcher->slots[step.slot];
    if (slot->state > SLOT_BEGUN && !HAS_FAULT(FAULT_ANY_ORDER) && !HAS_FAULT(FAULT_BEGIN_INSIDE))
        TRY(fail_with(&call.caller, MOXIE_E_INVALID, "begin_forward: slot %d is inside a layer",
                      step.slot));
    TRY(count_tokens(&call, local, &step, &wanted));
    TRY(place_capture(&call, local, &step, &wanted));
    wanted.step = step;
    *slot = wanted;
    if (HAS_FAULT(FAULT_EMPTY_STEP_CRASH) && step.tokens == 0) crash_late();
    if (HAS_FAULT(FAULT_READS_AGAIN))
        (void)call.instance->host.get_i64(call.instance->host.ctx, "hidden_size", &again);
out:
    if (st == MOXIE_E_CAPACITY) call.instance->stats.refused++;
    call_leave(&call);
    return st;
}

// ---- a layer -----------------------------------------------------------------------------------

static int32_t enter_batch(struct call *call, moxie_dispatcher *handle, const moxie_batch *given,
                           enum slot_state state, struct batch *batch)
{
    int32_t st = MOXIE_OK;

    TRY(call_enter(call, handle, HANDLE_DISPATCHER, MOXIE_THREAD_INSTANCE_SERIAL,
                   call->caller.error));
    TRY(batch_read(call, call->body, given, state, batch));
out:
    return st;
}

static int32_t check_one_round(const struct call *call, const struct dispatcher *dispatcher,
                               const struct batch *batch)
{
    const struct slot *slot = &dispatcher->slots[batch->given.slot];
    int64_t tokens = slot->listed ? slot->tokens_most : slot->step.tokens;
    int64_t most = call->instance->limits.call_tokens_max;

    if (tokens <= most || HAS_FAULT(FAULT_LOST_ERROR)) return MOXIE_OK;
    if (HAS_FAULT(FAULT_WRITE_ON_REFUSAL) && batch->y.data != NULL) *batch->y.data ^= 0x55;
    call->instance->stats.refused++;
    return fail_with(&call->caller, MOXIE_E_CAPACITY,
                     "dispatch: a rank has %" PRId64 " tokens; one dispatch takes %" PRId64
                     "; use forward, or raise max_dispatch_tokens_per_rank",
                     tokens, most);
}

static int32_t dispatch_send(moxie_dispatcher *handle, const moxie_batch *given, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(enter_batch(&call, handle, given, SLOT_BEGUN, &batch));
    TRY(check_one_round(&call, call.body, &batch));
    TRY(dispatcher_send(&call, call.body, &batch, 0));
out:
    call_leave(&call);
    return st;
}

static int32_t clear_rows(const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    const struct caller caller = {.error = error_begin(error)};

    if (in == NULL || out == NULL)
        return fail_with(&caller, MOXIE_E_INVALID, "%s is NULL", in == NULL ? "in" : "out");
    if (HAS_FAULT(FAULT_GARBAGE_OUT)) return MOXIE_OK;
    *in = NULL;
    *out = NULL;
    return MOXIE_OK;
}

static int32_t receive(const struct call *call, const struct batch *batch, const moxie_rows **in,
                       const moxie_rows **out)
{
    struct dispatcher *dispatcher = call->body;
    int32_t st = dispatcher_receive(call, dispatcher, batch);

    if (st != MOXIE_OK) return st;
    *in = &dispatcher->slots[batch->given.slot].in;
    *out = &dispatcher->slots[batch->given.slot].out;
    return MOXIE_OK;
}

static int32_t dispatch_recv(moxie_dispatcher *handle, const moxie_batch *given,
                             const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(clear_rows(in, out, error));
    TRY(enter_batch(&call, handle, given, SLOT_SENT, &batch));
    TRY(receive(&call, &batch, in, out));
out:
    call_leave(&call);
    return st;
}

static int32_t dispatch(moxie_dispatcher *handle, const moxie_batch *given, const moxie_rows **in,
                        const moxie_rows **out, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(clear_rows(in, out, error));
    TRY(enter_batch(&call, handle, given, SLOT_BEGUN, &batch));
    TRY(check_one_round(&call, call.body, &batch));
    TRY(dispatcher_send(&call, call.body, &batch, 0));
    TRY(receive(&call, &batch, in, out));
out:
    call_leave(&call);
    return st;
}

static int32_t combine_send(moxie_dispatcher *handle, const moxie_batch *given, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct dispatcher *dispatcher;
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(enter_batch(&call, handle, given, SLOT_RECEIVED, &batch));
    dispatcher = call.body;
    dispatcher->slots[batch.given.slot].state = SLOT_RETURNED;
out:
    call_leave(&call);
    return st;
}

// Token 0 of y becomes zero.
static void lose_token(const struct batch *batch)
{
    if (view_bytes(&batch->y) == 0) return;
    memset(batch->y.data, 0, (size_t)(batch->y.shape[1] * type_bytes(batch->y.type)));
}

static int32_t combine_recv(moxie_dispatcher *handle, const moxie_batch *given, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(enter_batch(&call, handle, given, SLOT_RETURNED, &batch));
    TRY(dispatcher_return(&call, call.body, &batch));
    if (HAS_FAULT(FAULT_LOST_HALF) && call.instance->limits.ranks > 1) lose_token(&batch);
out:
    call_leave(&call);
    return st;
}

static int32_t combine(moxie_dispatcher *handle, const moxie_batch *given, moxie_error *error)
{
    struct call call = {.caller = {.error = error}};
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(enter_batch(&call, handle, given, SLOT_RECEIVED, &batch));
    TRY(dispatcher_return(&call, call.body, &batch));
    if (HAS_FAULT(FAULT_LOST_COMBINE)) lose_token(&batch);
out:
    call_leave(&call);
    return st;
}

static int32_t rounds(const struct call *call, const struct dispatcher *dispatcher,
                      const struct batch *batch, const struct runner *runner)
{
    const struct slot *slot = &dispatcher->slots[batch->given.slot];
    struct call step = *call;
    int64_t most = call->instance->limits.call_tokens_max;
    int64_t count = (slot->tokens_most + most - 1) / most;
    int32_t st = MOXIE_OK;

    if (count < 1 || HAS_FAULT(FAULT_ONE_ROUND)) count = 1;
    call->instance->stats.forwards++;
    call->instance->stats.rounds += (uint64_t)count;
    for (int64_t round = 0; round < count; round++) {
        TRY(dispatcher_send(&step, call->body, batch, round));
        TRY(dispatcher_receive(&step, call->body, batch));
        TRY(runner_run(&step, runner, &slot->in, &slot->out));
        TRY(dispatcher_return(&step, call->body, batch));
    }
out:
    return st;
}

int32_t slot_forward(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *given,
                     moxie_error *error)
{
    struct call call = {.caller = {.error = error}}, of_runner = call;
    struct batch batch;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&of_runner, runner, HANDLE_RUNNER, THREAD_ANY, error));
    TRY(enter_batch(&call, dispatcher, given, SLOT_BEGUN, &batch));
    if (of_runner.instance != call.instance && !HAS_FAULT(FAULT_FOREIGN_RUNNER))
        TRY(fail_with(&call.caller, MOXIE_E_INVALID,
                      "forward: runner and dispatcher are of two instances"));
    TRY(rounds(&call, call.body, &batch, of_runner.body));
out:
    call_leave(&call);
    return st;
}

// ---- failure -----------------------------------------------------------------------------------

static int32_t poll_error(moxie_dispatcher *handle, moxie_error *error)
{
    const struct dispatcher *dispatcher;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_DISPATCHER, THREAD_ANY, error));
    dispatcher = call.body;
    if (atomic_load(&dispatcher->failed) != MOXIE_OK)
        TRY(fail_with(&call.caller, atomic_load(&dispatcher->failed), "%s",
                      dispatcher->failed_text));
out:
    return st;
}

// The bootstrap has no subsets: every rank or none.
static int32_t set_active_ranks(moxie_dispatcher *handle, const uint8_t *active, moxie_error *error)
{
    struct dispatcher *dispatcher;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_DISPATCHER, MOXIE_THREAD_INSTANCE_SERIAL, error));
    dispatcher = call.body;
    if (active == NULL) TRY(fail_with(&call.caller, MOXIE_E_INVALID, "active is NULL"));
    if (dispatcher->kind == DISPATCHER_LOCAL)
        TRY(fail_with(&call.caller, MOXIE_E_UNSUPPORTED, "dispatcher local has no peers"));
    for (int32_t rank = 0; rank < call.instance->limits.ranks; rank++) {
        if (active[rank] == 0)
            TRY(fail_with(&call.caller,
                          rank == call.instance->limits.rank ? MOXIE_E_INVALID
                                                             : MOXIE_E_UNSUPPORTED,
                          "this plugin cannot go on without rank %d", rank));
    }
    for (int32_t slot = 0; slot < MOXIE_SLOTS_MAX; slot++)
        dispatcher->slots[slot].state = SLOT_IDLE;
    atomic_store(&dispatcher->failed, MOXIE_OK);
out:
    call_leave(&call);
    return st;
}

// ---- Tables ------------------------------------------------------------------------------------

#define DISPATCHER_API(of_kind)                                                                    \
    {                                                                                              \
        .struct_size = sizeof(moxie_dispatcher_api), .create = create_##of_kind,                   \
        .begin_forward = begin_forward, .dispatch = dispatch, .combine = combine,                  \
        .dispatch_send = dispatch_send, .dispatch_recv = dispatch_recv,                            \
        .combine_send = combine_send, .combine_recv = combine_recv,                                \
        .poll_error = TABLE_HAS_FAULT(FAULT_NULL_DISPATCHER_SLOT) ? NULL : poll_error,             \
        .set_active_ranks = set_active_ranks, .destroy = destroy                                   \
    }

static const moxie_dispatcher_api local_api = DISPATCHER_API(local);
static const moxie_dispatcher_api allgather_api = DISPATCHER_API(allgather);
static const moxie_dispatcher_api alltoall_api = DISPATCHER_API(alltoall);

#define PLAIN_FORMATS (1u << MOXIE_FORMAT_F32 | 1u << MOXIE_FORMAT_BF16 | 1u << MOXIE_FORMAT_F16)

static const moxie_traits local_traits = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .reduction_group = 0,
    .formats = PLAIN_FORMATS,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

static const moxie_traits push_traits = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR),
    .id_spaces = 1u << MOXIE_IDS_PHYSICAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .output_is_reduced = 1,
    .formats = PLAIN_FORMATS,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

const moxie_dispatcher_info dispatcher_infos[3] = {
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "local",
     .device = "cpu",
     .traits = &local_traits,
     .api = &local_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "allgather",
     .device = "cpu",
     .traits = &push_traits,
     .api = &allgather_api},
    {.struct_size = sizeof(moxie_dispatcher_info),
     .name = "alltoall",
     .device = "cpu",
     .traits = &push_traits,
     .api = &alltoall_api},
};
