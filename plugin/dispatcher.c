// The dispatcher.

#include "plugin/dispatcher.h"

#include "plugin/capture.h"
#include "plugin/digest.h"
#include "plugin/exchange_flags.h"
#include "plugin/log.h"
#include "plugin/step.h"
#include "plugin/tensor.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DISPATCHER_MAGIC 0x4d4f584944495350u // "MOXIDISP"
#define DISPATCHER_BUFFERS                                                                         \
    (1u << BUFFER_SEND_SLOT | 1u << BUFFER_OWN_IDS | 1u << BUFFER_OWN_WEIGHTS |                    \
     1u << BUFFER_FEW_IDS | 1u << BUFFER_STAGING | 1u << BUFFER_CAPTURE |                          \
     1u << BUFFER_CPU_SCRATCH)

enum slot_state { SLOT_IDLE, SLOT_BEGUN, SLOT_SENT, SLOT_RECEIVED, SLOT_RETURNED };

// What the next call of a slot in this state must be, for errors.
static const char *const slot_next[] = {
    [SLOT_IDLE] = "begin_forward",    [SLOT_BEGUN] = "dispatch or dispatch_send",
    [SLOT_SENT] = "dispatch_recv",    [SLOT_RECEIVED] = "combine or combine_send",
    [SLOT_RETURNED] = "combine_recv",
};

struct slot {
    int32_t state; // enum slot_state
    struct step_shape shape;
    struct exchange_round round; // between dispatch_send and combine_recv
    struct step_rows rows;       // of that layer
};

struct moxie_dispatcher {
    uint64_t magic;
    moxie_instance *instance;
    int32_t kind;          // enum dispatcher_kind
    int32_t taken;         // holds its buffers
    uint64_t bytes_mapped; // of all windows, counted in the instance's stats
    struct exchange_group group;
    struct slot slots[MOXIE_SLOTS_MAX];
    // [MOXIE_SLOTS_MAX]. Apart: with them inside, free() gives a handle's pages back to the system,
    // and a host that uses a dead handle faults in dispatcher_is_live instead of being refused.
    struct exchange *exchanges;
    // The sticky failure. Any thread may poll: what is said of it is read and written under the
    // lock.
    _Atomic int32_t failed;
    int32_t failed_rank;
    char failed_text[FAILURE_TEXT_BYTES];
    pthread_mutex_t failure_lock;
};

static const struct limits *limits_of(const moxie_dispatcher *dispatcher)
{
    return &dispatcher->instance->plan.limits;
}

static int is_local(const moxie_dispatcher *dispatcher)
{
    return dispatcher->kind == DISPATCHER_LOCAL;
}

// Its layers are over, whether they ended or not.
static void leave_slots(const moxie_dispatcher *dispatcher)
{
    for (int32_t i = 0; i < MOXIE_SLOTS_MAX; i++) {
        if (dispatcher->instance->slot_users[i] == dispatcher)
            dispatcher->instance->slot_users[i] = NULL;
    }
}

// ---- create and destroy ------------------------------------------------------------------------

// From the configuration, which stands whether or not there is a plan.
static struct bootstrap bootstrap_of(const moxie_instance *instance)
{
    return (struct bootstrap){.all_gather = instance->host.all_gather,
                              .ctx = instance->host.ctx,
                              .rank = (int32_t)config_i64(&instance->config, KEY_EP_RANK),
                              .ranks = (int32_t)config_i64(&instance->config, KEY_EP_SIZE),
                              .device = instance->device,
                              .windows = instance->plan.limits.slots,
                              .timeout_ms = instance->plan.limits.timeout_ms};
}

static int32_t join_peers(moxie_dispatcher *dispatcher, moxie_error *error)
{
    const struct bootstrap bootstrap = bootstrap_of(dispatcher->instance);
    const struct limits *limits = limits_of(dispatcher);
    struct exchange_group *group = &dispatcher->group;
    int32_t st = MOXIE_OK;

    group->instance = dispatcher->instance;
    group->everywhere = dispatcher->kind == DISPATCHER_ALLGATHER;
    exchange_choose(group);
    group->active = limits->ranks == 64 ? UINT64_MAX : (UINT64_C(1) << limits->ranks) - 1;
    for (int32_t rank = 0; rank <= limits->ranks; rank++)
        group->expert_first[rank] = experts_first(limits->physical_experts, limits->ranks, rank);
    TRY(group->ops->create(&bootstrap, &group->transport, error));
    TRY(exchange_open(group, dispatcher->exchanges, limits->slots, error));
    dispatcher->bytes_mapped =
        dispatcher->exchanges[0].window->bytes_mapped * (uint64_t)limits->slots;
    dispatcher->instance->stats.bytes_allocated += dispatcher->bytes_mapped;
out:
    return st;
}

// Every rank takes part with its status, so that one that fails takes all with it, in words.
static int32_t agree(const moxie_instance *instance, int32_t status, moxie_error *error)
{
    const struct bootstrap bootstrap = bootstrap_of(instance);

    if (bootstrap.ranks <= 1 || (status != MOXIE_OK && bootstrap.all_gather == NULL)) return status;
    if (bootstrap.all_gather == NULL)
        return fail_with(error, MOXIE_E_INVALID,
                         "create: ep_size is %d, but the host has no all_gather and barrier",
                         bootstrap.ranks);
    return digest_compare(&bootstrap, &instance->config, status, error);
}

static int32_t prepare(moxie_dispatcher *dispatcher, moxie_error *error)
{
    moxie_instance *instance = dispatcher->instance;
    int32_t st = MOXIE_OK;

    TRY(instance_accepted(instance, error));
    if (dispatcher->kind != limits_of(dispatcher)->dispatcher)
        TRY(fail_with(
            error, MOXIE_E_INVALID,
            "create: the configuration chose dispatcher %s; create that one, or set the key",
            config_str(&instance->config, KEY_DISPATCHER)));
    TRY(instance_device(instance, error));
    TRY(instance_take(instance, DISPATCHER_BUFFERS, error));
    dispatcher->taken = 1;
    TRY(capture_clear(instance, error));
out:
    return st;
}

int32_t dispatcher_create(moxie_instance *instance, enum dispatcher_kind kind,
                          moxie_dispatcher **out, moxie_error *error)
{
    moxie_dispatcher *dispatcher = NULL;
    int32_t st = MOXIE_OK;

    *out = NULL;
    dispatcher = calloc(1, sizeof *dispatcher);
    if (dispatcher != NULL) {
        (void)pthread_mutex_init(&dispatcher->failure_lock, NULL);
        dispatcher->exchanges = calloc(MOXIE_SLOTS_MAX, sizeof *dispatcher->exchanges);
    }
    if (dispatcher == NULL || dispatcher->exchanges == NULL)
        TRY(agree(instance,
                  fail_with(error, MOXIE_E_MEMORY, "dispatcher: no memory for the handle"), error));
    dispatcher->instance = instance;
    dispatcher->kind = (int32_t)kind;
    TRY(agree(instance, prepare(dispatcher, error), error));
    if (!is_local(dispatcher)) TRY(join_peers(dispatcher, error));
    dispatcher->magic = handle_magic(DISPATCHER_MAGIC);
    *out = dispatcher;
    dispatcher = NULL;
out:
    dispatcher_destroy(dispatcher);
    return st;
}

void dispatcher_destroy(moxie_dispatcher *dispatcher)
{
    struct device_visit visit;

    if (dispatcher == NULL) return;
    dispatcher->magic = 0;
    if (dispatcher->taken) (void)instance_visit(dispatcher->instance, &visit);
    if (dispatcher->group.transport != NULL) {
        dispatcher->instance->stats.bytes_allocated -= dispatcher->bytes_mapped;
        exchange_close(&dispatcher->group, dispatcher->exchanges, limits_of(dispatcher)->slots);
        dispatcher->group.ops->destroy(dispatcher->group.transport);
    }
    if (dispatcher->instance != NULL) leave_slots(dispatcher);
    if (dispatcher->taken) instance_drop(dispatcher->instance, DISPATCHER_BUFFERS);
    if (dispatcher->taken) instance_leave(dispatcher->instance, &visit);
    (void)pthread_mutex_destroy(&dispatcher->failure_lock);
    free(dispatcher->exchanges);
    free(dispatcher);
}

int dispatcher_is_live(const moxie_dispatcher *dispatcher)
{
    return dispatcher != NULL && dispatcher->magic == handle_magic(DISPATCHER_MAGIC);
}

moxie_instance *dispatcher_instance(const moxie_dispatcher *dispatcher)
{
    return dispatcher->instance;
}

// ---- failure -----------------------------------------------------------------------------------

// With the lock.
static int32_t say_stuck(const moxie_dispatcher *dispatcher, moxie_error *error)
{
    int32_t failed = atomic_load(&dispatcher->failed);

    if (failed == MOXIE_OK) return MOXIE_OK;
    return fail_rank(error, failed, dispatcher->failed_rank, "%s", dispatcher->failed_text);
}

static int32_t stuck(moxie_dispatcher *dispatcher, moxie_error *error)
{
    int32_t failed;

    if (atomic_load(&dispatcher->failed) == MOXIE_OK) return MOXIE_OK;
    (void)pthread_mutex_lock(&dispatcher->failure_lock);
    failed = say_stuck(dispatcher, error);
    (void)pthread_mutex_unlock(&dispatcher->failure_lock);
    return failed;
}

// Of a wait in stream order, which does not stick by itself.
static int32_t wait_failure(const moxie_dispatcher *dispatcher, moxie_error *error)
{
    if (dispatcher->group.transport == NULL) return MOXIE_OK;
    return dispatcher->group.flags->failure(&dispatcher->group, error);
}

int32_t dispatcher_check_process(const moxie_dispatcher *dispatcher, moxie_error *error)
{
    return exchange_check_process(&dispatcher->group, error);
}

// Both under the lock: whom a wait names hangs on the ranks of its generation, and they change only
// when its failure has stuck.
int32_t dispatcher_poll_error(moxie_dispatcher *dispatcher, moxie_error *error)
{
    int32_t st = dispatcher_check_process(dispatcher, error);

    if (st != MOXIE_OK) return st;
    (void)pthread_mutex_lock(&dispatcher->failure_lock);
    st = say_stuck(dispatcher, error);
    if (st == MOXIE_OK) st = wait_failure(dispatcher, error);
    (void)pthread_mutex_unlock(&dispatcher->failure_lock);
    return st;
}

// Makes a failure that happened among the ranks stick.
static void stick(moxie_dispatcher *dispatcher, int32_t code, const moxie_error *seen)
{
    moxie_instance *instance = dispatcher->instance;

    (void)pthread_mutex_lock(&dispatcher->failure_lock);
    dispatcher->failed_rank = seen->rank;
    (void)snprintf(dispatcher->failed_text, FAILURE_TEXT_BYTES, "%s", seen->text);
    atomic_store(&dispatcher->failed, code);
    (void)pthread_mutex_unlock(&dispatcher->failure_lock);
    instance->stats.peer_failures++;
    leave_slots(dispatcher);
    log_line(&instance->host, MOXIE_LOG_ERROR, "dispatcher", "%s", seen->text);
}

// A layer of which nothing has run may begin anew: no peer has been told of it.
static void leave_layer(moxie_dispatcher *dispatcher, int32_t slot)
{
    dispatcher->slots[slot].state = SLOT_BEGUN;
    if (!is_local(dispatcher)) dispatcher->instance->slot_users[slot] = NULL;
}

// Whether the failure sticks: it came from a peer, or a peer may wait for the rest of the layer.
static int sticks(const moxie_dispatcher *dispatcher, int32_t slot, int32_t code)
{
    return dispatcher->exchanges[slot].went_out || code == MOXIE_E_PEER ||
           code == MOXIE_E_TIMEOUT || code == MOXIE_E_COLLECTIVE_MISMATCH ||
           wait_failure(dispatcher, NULL) != MOXIE_OK;
}

// A step of the slot's round with the peers, where there are any; what sticks is told, too.
static int32_t take_step(moxie_dispatcher *dispatcher, int32_t slot,
                         int32_t (*step)(struct exchange_group *, struct exchange *,
                                         const struct exchange_round *, moxie_error *),
                         moxie_error *error)
{
    const struct exchange_round *round = &dispatcher->slots[slot].round;
    char text[FAILURE_TEXT_BYTES];
    moxie_error seen = failure_error(text);
    int32_t answer;

    if (is_local(dispatcher)) return MOXIE_OK;
    answer = step(&dispatcher->group, &dispatcher->exchanges[slot], round, &seen);
    if (answer == MOXIE_OK) return MOXIE_OK;
    if (!sticks(dispatcher, slot, answer)) {
        leave_layer(dispatcher, slot);
        return fail_rank(error, answer, seen.rank, "%s", seen.text);
    }
    stick(dispatcher, answer, &seen);
    step_zero_y(dispatcher->instance, round->batch);
    return stuck(dispatcher, error);
}

// As dispatcher_poll_error; a wait that has failed in stream order sticks from here on.
static int32_t notice(moxie_dispatcher *dispatcher, moxie_error *error)
{
    char text[FAILURE_TEXT_BYTES];
    moxie_error seen = failure_error(text);
    int32_t st = MOXIE_OK;

    if (atomic_load(&dispatcher->failed) == MOXIE_OK) st = wait_failure(dispatcher, &seen);
    if (st != MOXIE_OK) stick(dispatcher, st, &seen);
    return stuck(dispatcher, error);
}

// The failure that sticks, before anything else is looked at. A batch that could run, of another
// slot or of a later step, gets the y of one that failed.
static int32_t check_failure(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                             moxie_error *error)
{
    int32_t st = notice(dispatcher, error);

    if (st != MOXIE_OK && batch->y.ndim == 2 && batch->y.shape != NULL &&
        step_check_batch(dispatcher->instance, is_local(dispatcher), batch->y.shape[0], batch,
                         NULL) == MOXIE_OK)
        step_zero_y(dispatcher->instance, batch);
    return st;
}

int32_t dispatcher_set_active_ranks(moxie_dispatcher *dispatcher, const uint8_t *active,
                                    moxie_error *error)
{
    const struct limits *limits = limits_of(dispatcher);
    struct exchange_group *group = &dispatcher->group;
    uint64_t mask = 0;
    int32_t st = MOXIE_OK;

    if (is_local(dispatcher))
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "set_active_ranks: dispatcher local has no peers");
    TRY(dispatcher_check_process(dispatcher, error));
    for (int32_t rank = 0; rank < limits->ranks; rank++)
        mask |= (uint64_t)(active[rank] != 0) << rank;
    if ((mask >> limits->rank & 1) == 0)
        return fail_with(error, MOXIE_E_INVALID, "set_active_ranks: active[%d] of this rank is 0",
                         limits->rank);
    if ((mask & ~group->active) != 0)
        return fail_with(error, MOXIE_E_INVALID,
                         "set_active_ranks: a rank once left out cannot return (now 0x%" PRIx64
                         ", asked 0x%" PRIx64 "); create the dispatchers anew",
                         group->active, mask);
    (void)notice(dispatcher, NULL);
    TRY(group->flags->regroup(group, dispatcher->exchanges, limits->slots, mask, error));
    for (int32_t i = 0; i < limits->slots; i++)
        dispatcher->slots[i].state = SLOT_IDLE;
    leave_slots(dispatcher);
    atomic_store(&dispatcher->failed, MOXIE_OK);
out:
    return st;
}

// ---- a layer -----------------------------------------------------------------------------------

static int32_t refuse_capacity(moxie_dispatcher *dispatcher, int32_t code)
{
    dispatcher->instance->stats.refused += code == MOXIE_E_CAPACITY;
    return code;
}

int32_t dispatcher_begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                                 moxie_error *error)
{
    struct slot *slot;
    struct step_shape shape;
    int32_t st = MOXIE_OK;

    TRY(dispatcher_check_process(dispatcher, error));
    TRY(notice(dispatcher, error));
    TRY(step_check(dispatcher->instance, is_local(dispatcher), step, &shape, error));
    slot = &dispatcher->slots[step->slot];
    if (slot->state > SLOT_BEGUN)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "begin_forward: slot %d is inside a layer; next is %s", step->slot,
                      slot_next[slot->state]));
    *slot = (struct slot){.state = SLOT_BEGUN, .shape = shape};
out:
    return refuse_capacity(dispatcher, st);
}

static int32_t check_batch(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                           enum slot_state state, moxie_error *error)
{
    const struct slot *slot;
    int32_t st = MOXIE_OK;

    TRY(dispatcher_check_process(dispatcher, error));
    TRY(check_failure(dispatcher, batch, error));
    TRY(step_check_slot(dispatcher->instance, "batch.slot", batch->slot, error));
    slot = &dispatcher->slots[batch->slot];
    if (slot->state != (int32_t)state)
        TRY(fail_with(error, MOXIE_E_INVALID, "slot %d: called out of order; next is %s",
                      batch->slot, slot_next[slot->state]));
    if (!is_local(dispatcher) && state == SLOT_BEGUN &&
        dispatcher->instance->slot_users[batch->slot] != NULL)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "slot %d: another dispatcher of this instance is inside a layer there; end "
                      "that one first, or use another slot (forwards_in_flight_max)",
                      batch->slot));
    TRY(step_check_batch(dispatcher->instance, is_local(dispatcher), slot->shape.tokens, batch,
                         error));
out:
    return st;
}

int32_t dispatcher_forward_begin(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 int32_t *rounds, moxie_error *error)
{
    moxie_stats *stats = &dispatcher->instance->stats;
    int32_t count, st = MOXIE_OK;

    TRY(check_batch(dispatcher, batch, SLOT_BEGUN, error));
    count = step_rounds(limits_of(dispatcher), &dispatcher->slots[batch->slot].shape);
    if (count > 1) TRY(step_check_rounds(&dispatcher->slots[batch->slot].shape, batch, error));
    *rounds = count;
    stats->forwards++;
    stats->rounds += (uint64_t)*rounds;
out:
    return st;
}

void dispatcher_forward_abandon(moxie_dispatcher *dispatcher, int32_t slot)
{
    if (is_local(dispatcher) || !dispatcher->exchanges[slot].went_out)
        leave_layer(dispatcher, slot);
}

static int32_t capture_round(moxie_dispatcher *dispatcher, const struct slot *slot,
                             const moxie_batch *batch, moxie_error *error)
{
    const struct exchange_round *round = &slot->round;
    struct capture_rows rows = {
        .ids = tensor_data(&batch->ids),
        .id_stride_bytes = tensor_stride_bytes(&batch->ids, 0),
        .id_bytes = (int32_t)tensor_element_bytes(&batch->ids),
        .tokens = round->tokens,
        .expert_map = (const int32_t *)(const void *)tensor_data(&batch->expert_map),
        .map_count = batch->expert_map.data != NULL ? batch->expert_map.shape[0] : 0,
        .row_first = slot->shape.capture_row + round->first,
        .tokens_valid = slot->shape.tokens_valid,
        .token_first = round->first,
        .stream = batch->stream,
        .layer = batch->layer,
        .are_local = batch->id_space == MOXIE_IDS_LOCAL,
    };

    if (rows.ids != NULL)
        rows.ids = (const unsigned char *)rows.ids + round->first * rows.id_stride_bytes;
    return capture_record(dispatcher->instance, &rows, error);
}

int32_t dispatcher_send_round(moxie_dispatcher *dispatcher, const moxie_batch *batch, int32_t round,
                              int joined, moxie_error *error)
{
    const struct limits *limits = limits_of(dispatcher);
    struct slot *slot = &dispatcher->slots[batch->slot];
    int64_t first = round * limits->tokens_max;
    int64_t left = slot->shape.tokens > first ? slot->shape.tokens - first : 0;
    int32_t st = MOXIE_OK;

    slot->round = (struct exchange_round){
        .batch = batch,
        .tokens_valid = slot->shape.tokens_valid,
        .first = left > 0 ? first : 0,
        .earlier = left > 0 ? first : slot->shape.tokens,
        .tokens = (int32_t)(left < limits->tokens_max ? left : limits->tokens_max),
        .slot = batch->slot,
        .rows_most = step_rows_most(limits, &slot->shape, round),
        .joined = joined,
        .index = round,
    };
    if (slot->shape.padding == MOXIE_PADDING_MAX_LEN) slot->round.pad_rows = slot->round.rows_most;
    slot->rows = step_rows_of(batch);
    if (round == 0) dispatcher->exchanges[batch->slot].went_out = 0;
    TRY(capture_round(dispatcher, slot, batch, error));
    TRY(take_step(dispatcher, batch->slot, exchange_dispatch_send, error));
    slot->state = SLOT_SENT;
    if (!is_local(dispatcher)) dispatcher->instance->slot_users[batch->slot] = dispatcher;
    dispatcher->instance->stats.dispatches++;
    dispatcher->instance->stats.tokens += (uint64_t)slot->round.tokens;
out:
    return st;
}

int32_t dispatcher_receive_round(moxie_dispatcher *dispatcher, int32_t slot, const moxie_rows **in,
                                 const moxie_rows **out, moxie_error *error)
{
    struct exchange *exchange = &dispatcher->exchanges[slot];
    int32_t st = MOXIE_OK;

    TRY(take_step(dispatcher, slot, exchange_dispatch_recv, error));
    if (is_local(dispatcher))
        exchange_describe_local(dispatcher->instance, exchange, &dispatcher->slots[slot].round);
    dispatcher->slots[slot].state = SLOT_RECEIVED;
    *in = &exchange->in;
    *out = &exchange->out;
out:
    return st;
}

int32_t dispatcher_return_round(moxie_dispatcher *dispatcher, int32_t slot, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(take_step(dispatcher, slot, exchange_combine_send, error));
    dispatcher->slots[slot].state = SLOT_RETURNED;
out:
    return st;
}

int32_t dispatcher_finish_round(moxie_dispatcher *dispatcher, int32_t slot, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(take_step(dispatcher, slot, exchange_combine_recv, error));
    dispatcher->slots[slot].state = SLOT_BEGUN;
    dispatcher->instance->slot_users[slot] = NULL;
    dispatcher->instance->stats.combines++;
out:
    return st;
}

// ---- the halves --------------------------------------------------------------------------------

// As check_batch, of a later half than dispatch_send: from here on the round's batch.
static int32_t check_half(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                          enum slot_state state, moxie_error *error)
{
    struct slot *slot;
    int32_t st = MOXIE_OK;

    TRY(check_batch(dispatcher, batch, state, error));
    slot = &dispatcher->slots[batch->slot];
    TRY(step_check_rows(&slot->rows, batch, state == SLOT_SENT, error));
    slot->round.batch = batch;
out:
    return st;
}

int32_t dispatcher_dispatch_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 moxie_error *error)
{
    const struct step_shape *shape;
    int64_t tokens;
    int32_t st = MOXIE_OK;

    TRY(check_batch(dispatcher, batch, SLOT_BEGUN, error));
    shape = &dispatcher->slots[batch->slot].shape;
    tokens = shape->listed ? shape->tokens_most : shape->tokens;
    if (tokens > limits_of(dispatcher)->tokens_max)
        TRY(fail_with(
            error, MOXIE_E_CAPACITY,
            "dispatch: a rank has %" PRId64 " tokens; one dispatch takes %" PRId64
            ". Use forward(), which splits into rounds, or raise max_dispatch_tokens_per_rank",
            tokens, limits_of(dispatcher)->tokens_max));
    TRY(dispatcher_send_round(dispatcher, batch, 0, 0, error));
out:
    return refuse_capacity(dispatcher, st);
}

int32_t dispatcher_dispatch_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 const moxie_rows **in, const moxie_rows **out, moxie_error *error)
{
    int32_t st = check_half(dispatcher, batch, SLOT_SENT, error);

    return st == MOXIE_OK ? dispatcher_receive_round(dispatcher, batch->slot, in, out, error) : st;
}

int32_t dispatcher_combine_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error)
{
    int32_t st = check_half(dispatcher, batch, SLOT_RECEIVED, error);

    return st == MOXIE_OK ? dispatcher_return_round(dispatcher, batch->slot, error) : st;
}

int32_t dispatcher_combine_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error)
{
    int32_t st = check_half(dispatcher, batch, SLOT_RETURNED, error);

    return st == MOXIE_OK ? dispatcher_finish_round(dispatcher, batch->slot, error) : st;
}
