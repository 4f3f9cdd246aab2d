// One rank of a kill run.

#include "host_tests/mortal.h"

#include "host_tests/crew.h"
#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/plan.h"
#include "plugin/runner.h"
#include "plugin/transport.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define SLACK_MS      10000 // of a loaded machine, past a deadline
#define SLOTS_MAX     2
#define EPILOGUE_RUNS 2

// A rank's process.
struct life {
    struct layer_rank rank; // first: the host's ctx is its mock
    const struct world *world;
    struct board *board;
    struct board_seat *seat;
    const struct ordeal *ordeal;
    const struct fate *fate; // or NULL
    const struct layer *layer;
    float *y; // this rank's rows
    int64_t parts[MOXIE_RANKS_MAX];
    int64_t first;
    struct layer_batch batches[SLOTS_MAX];
    moxie_step steps[SLOTS_MAX];
    int32_t index;
    int32_t done; // forwards of this generation
    int32_t armed, countdown;
    int32_t lagging; // its next wait begins late
    void (*log)(void *ctx, int32_t severity, const char *component, const char *text,
                uint64_t length);
};

static struct life *self; // in a rank's process

#define REQUIRE(life, condition, ...)                                                              \
    do {                                                                                           \
        if (!(condition)) board_complain((life)->board, (life)->index, __VA_ARGS__);               \
    } while (0)

// ---- instants ----------------------------------------------------------------------------------

static void strike(struct life *life)
{
    life->armed = 0;
    life->seat->struck = 1;
    (void)raise(life->fate->signal);
}

static void instant(enum instant kind)
{
    struct life *life = self;

    if (life == NULL || !life->armed || life->fate->instant != (int32_t)kind) return;
    if (life->countdown-- == 0) strike(life);
}

// The kernel strikes, wherever the process is then.
static void strike_later(struct life *life)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = life->fate->signal};
    struct itimerspec when = {.it_value.tv_nsec = (long)life->fate->delay_us * 1000};
    timer_t timer;

    life->seat->struck = 1;
    REQUIRE(life,
            timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 &&
                timer_settime(timer, 0, &when, NULL) == 0,
            "no timer: %s", strerror(errno));
}

static void arm(struct life *life, enum instant from, enum instant to)
{
    const struct fate *fate = life->fate;

    if (fate == NULL || life->seat->struck || fate->instant < (int32_t)from ||
        fate->instant > (int32_t)to || fate->generation != life->seat->applied)
        return;
    if (to == AT_TIME && fate->forward != life->done) return;
    life->armed = 1;
    life->countdown = fate->countdown;
    if (fate->instant == AT_TIME) strike_later(life);
}

// A fate that counted past the last instant of its kind strikes now.
static void disarm(struct life *life)
{
    if (!life->armed) return;
    if (life->fate->instant == AT_TIME) (void)usleep(20000);
    if (life->fate->instant == AT_TIME || life->fate->instant == AT_LOG)
        life->armed = 0;
    else
        strike(life);
}

// ---- what is wrapped ---------------------------------------------------------------------------

extern const struct transport_ops __real_transport_shm;
extern struct transport_ops __wrap_transport_shm;
struct transport_ops __wrap_transport_shm;
int __real_shm_open(const char *name, int flags, mode_t mode);
int __wrap_shm_open(const char *name, int flags, mode_t mode);

// After the last flag of a step, before the wait for those of others.
static void lag(int32_t peer, enum flag_word word)
{
    struct life *life = self;
    int32_t last;

    if (life == NULL || !life->lagging) return;
    last = life->ordeal->ranks - 1 - (life->index == life->ordeal->ranks - 1);
    if (peer != last || word != (life->ordeal->lag_combine ? WORD_COMBINE : WORD_DISPATCH)) return;
    life->lagging = 0;
    (void)usleep((useconds_t)life->ordeal->lag_ms * 1000);
}

static void fated_signal(struct transport *transport, struct window *window, int32_t peer,
                         enum flag_word word, uint64_t value)
{
    enum instant kind = word == WORD_DISPATCH || word == WORD_COMBINE ? AT_SIGNAL : AT_REGROUP;

    instant(kind);
    __real_transport_shm.signal(transport, window, peer, word, value);
    instant(kind);
    lag(peer, word);
}

static uint32_t fated_ticket(struct transport *transport, struct window *window)
{
    instant(AT_WAIT);
    return __real_transport_shm.ticket(transport, window);
}

int __wrap_shm_open(const char *name, int flags, mode_t mode)
{
    int fd;

    instant(AT_MEMORY);
    if (self != NULL && (flags & O_CREAT) != 0) board_note_name(self->board, name);
    fd = __real_shm_open(name, flags, mode);
    instant(AT_MEMORY);
    return fd;
}

int mortal_is_left_behind(const char *name)
{
    int fd = __real_shm_open(name, O_RDONLY, 0);

    if (fd >= 0) (void)close(fd);
    return fd >= 0 || errno != ENOENT;
}

void mortal_init(void)
{
    __wrap_transport_shm = __real_transport_shm;
    __wrap_transport_shm.signal = fated_signal;
    __wrap_transport_shm.ticket = fated_ticket;
}

static int32_t on_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct life *life = ctx;

    instant(AT_GATHER);
    board_give(life->board, life->index, send, bytes);
    instant(AT_GATHER);
    return board_take(life->board, life->index, recv, bytes);
}

static int32_t on_barrier(void *ctx)
{
    unsigned char all[BOARD_RANKS_MAX];

    return on_all_gather(ctx, "", all, 1);
}

static void on_log(void *ctx, int32_t severity, const char *component, const char *text,
                   uint64_t length)
{
    struct life *life = ctx;

    if (severity == MOXIE_LOG_ERROR) instant(AT_LOG);
    life->log(ctx, severity, component, text, length);
}

// ---- a rank: create ----------------------------------------------------------------------------

static void configure(struct life *life)
{
    const struct ordeal *ordeal = life->ordeal;
    struct mock_host *mock = &life->rank.mock;
    int64_t most = life->parts[0];

    mock_set_i64(mock, "dp_size", ordeal->ranks);
    mock_set_i64(mock, "tp_size", ordeal->ranks);
    mock_set_i64(mock, "ep_size", ordeal->ranks);
    mock_set_i64(mock, "ep_rank", life->index);
    mock_set_i64(mock, "forward_tokens_max", most);
    mock_set_i64(mock, "max_dispatch_tokens_per_rank", ceil_div(most, ordeal->rounds));
    mock_set_i64(mock, "dispatch_rounds_max", ordeal->rounds);
    mock_set_i64(mock, "forwards_in_flight_max", ordeal->slots);
    mock_set_i64(mock, "timeout_ms", ordeal->timeout_ms);
    mock_set_i64(mock, "cpu_threads", ordeal->threads);
    mock_set_str(mock, "dispatcher", ordeal->dispatcher);
    mock->host.all_gather = on_all_gather;
    mock->host.barrier = on_barrier;
    life->log = mock->host.log;
    mock->host.log = on_log;
}

// The rank's tokens, one batch for each slot.
static void make_batches(struct life *life)
{
    int64_t tokens = life->parts[life->index];

    for (int32_t slot = 0; slot < life->ordeal->slots; slot++) {
        int64_t first = layer_part_first(tokens, life->ordeal->slots, slot);
        moxie_step *step = &life->steps[slot];

        *step = (moxie_step){.struct_size = sizeof *step,
                             .slot = slot,
                             .tokens = layer_part(tokens, life->ordeal->slots, slot)};
        if (life->ordeal->slots == 1) step->rank_tokens = life->parts;
        layer_batch_of(life->layer, life->first + first, step->tokens,
                       life->y + first * life->layer->hidden, &life->batches[slot]);
        life->batches[slot].batch.slot = slot;
    }
}

// Creates the dispatcher. 1: every rank could; a host has its ranks tell each other.
static int create(struct life *life)
{
    enum dispatcher_kind kind;
    int64_t began_ns = clock_ns(), took_ms;
    int32_t all[BOARD_RANKS_MAX], st;
    int gathered;

    layer_rank_prepare(&life->rank, life->layer);
    kind = (enum dispatcher_kind)life->rank.instance->plan.limits.dispatcher;
    arm(life, AT_GATHER, AT_MEMORY);
    st = dispatcher_create(life->rank.instance, kind, &life->rank.dispatcher,
                           &life->rank.mock.error);
    disarm(life);
    took_ms = (clock_ns() - began_ns) / 1000000;
    REQUIRE(life, (st == MOXIE_OK) == (life->rank.dispatcher != NULL), "create: code %d, and %p",
            st, (void *)life->rank.dispatcher);
    REQUIRE(life, life->fate != NULL || took_ms < life->ordeal->gather_timeout_ms + SLACK_MS,
            "create took %d ms", (int)took_ms);
    REQUIRE(life, st == MOXIE_OK || life->rank.mock.text[0] != '\0', "create failed without words");
    board_give(life->board, life->index, &st, sizeof st);
    gathered = board_take(life->board, life->index, all, sizeof st) == 0;
    for (int32_t rank = 0; gathered && rank < life->ordeal->ranks; rank++)
        gathered = all[rank] == MOXIE_OK;
    REQUIRE(life, gathered == !ordeal_in_create(life->ordeal), "create: %s", life->rank.mock.text);
    return gathered;
}

// ---- a rank: forwards --------------------------------------------------------------------------

static void poison(struct life *life)
{
    memset(life->y, 0xff,
           (size_t)(life->parts[life->index] * life->layer->hidden) * sizeof *life->y);
}

static int is_zero(const moxie_tensor *y)
{
    const float *values = y->data;

    for (int64_t i = 0; i < y->shape[0] * y->shape[1]; i++)
        if (values[i] != 0.0f) return 0;
    return 1;
}

// Two layers whose halves interleave. On failure *failed is the slot whose call it was.
static int32_t fly(struct life *life, int32_t *failed)
{
    moxie_dispatcher *dispatcher = life->rank.dispatcher;
    moxie_error *error = &life->rank.mock.error;
    const moxie_rows *in[SLOTS_MAX], *out[SLOTS_MAX];
    int32_t st = MOXIE_OK, slot;

    for (slot = 0; slot < 2; slot++)
        TRY(dispatcher_dispatch_send(dispatcher, &life->batches[slot].batch, error));
    for (slot = 0; slot < 2; slot++)
        TRY(dispatcher_dispatch_recv(dispatcher, &life->batches[slot].batch, &in[slot], &out[slot],
                                     error));
    for (slot = 0; slot < 2; slot++) {
        moxie_call call = {.struct_size = sizeof call, .slot = slot};

        TRY(runner_run(life->rank.runner, &call, in[slot], out[slot], error));
        TRY(dispatcher_combine_send(dispatcher, &life->batches[slot].batch, error));
    }
    for (slot = 1; slot >= 0; slot--)
        TRY(dispatcher_combine_recv(dispatcher, &life->batches[slot].batch, error));
out:
    *failed = slot;
    return st;
}

static int32_t forward(struct life *life, int32_t *failed)
{
    moxie_error *error = &life->rank.mock.error;

    poison(life);
    for (int32_t slot = 0; slot < life->ordeal->slots; slot++) {
        int32_t st = dispatcher_begin_forward(life->rank.dispatcher, &life->steps[slot], error);

        REQUIRE(life, st == MOXIE_OK, "begin_forward: %s", life->rank.mock.text);
    }
    *failed = 0;
    if (life->ordeal->slots == 2) return fly(life, failed);
    return forward_run(life->rank.dispatcher, life->rank.runner, &life->batches[0].batch, error);
}

static void check_rows(struct life *life)
{
    int64_t hidden = life->layer->hidden, subset = 0;
    const float *want;
    double difference;

    for (int32_t i = 0; i < life->seat->applied; i++)
        subset |= board_lost_rank(life->board, i) == life->ordeal->fates[0].rank ? 1 : 2;
    want = life->world->wants + subset * life->world->count + life->first * hidden;
    difference = crew_difference(life->y, want, life->parts[life->index] * hidden);
    REQUIRE(life, difference <= 1e-6, "forward %d after %d losses: rows are off by %g", life->done,
            life->seat->applied, difference);
}

// Every call answers as the failed one did, and leaves y zero.
static void check_sticky(struct life *life)
{
    moxie_dispatcher *dispatcher = life->rank.dispatcher;
    moxie_error *error = &life->rank.mock.error;
    int32_t named = error->rank, st;
    char text[16];

    poison(life);
    for (int32_t slot = 0; slot < life->ordeal->slots; slot++) {
        const moxie_batch *batch = &life->batches[slot].batch;

        st = dispatcher_combine_recv(dispatcher, batch, error);
        REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "combine_recv: %d", st);
        REQUIRE(life, is_zero(&batch->y), "slot %d: y is not zero after combine_recv failed", slot);
    }
    poison(life);
    st = forward_run(dispatcher, life->rank.runner, &life->batches[0].batch, error);
    REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "forward again: %d", st);
    REQUIRE(life, is_zero(&life->batches[0].batch.y), "y is not zero after forward failed again");
    st = dispatcher_begin_forward(dispatcher, &life->steps[0], error);
    REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "begin_forward: %d", st);
    st = dispatcher_poll_error(dispatcher, error);
    REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "poll_error: %d", st);
    (void)snprintf(text, sizeof text, "rank %d ", named);
    REQUIRE(life, strstr(life->rank.mock.text, text) != NULL, "no \"%s\" in: %s", text,
            life->rank.mock.text);
}

static int was_stopped(const struct life *life)
{
    return life->fate != NULL && life->fate->signal == SIGSTOP && life->seat->struck;
}

static void check_verdict(struct life *life, int32_t answer, int32_t failed, int64_t took_ms)
{
    int32_t named = life->rank.mock.error.rank;
    int64_t late_ms = took_ms - life->ordeal->timeout_ms;

    REQUIRE(life, answer == MOXIE_E_PEER, "forward: %d, %s", answer, life->rank.mock.text);
    REQUIRE(life, is_zero(&life->batches[failed].batch.y), "y is not zero: %s",
            life->rank.mock.text);
    check_sticky(life);
    life->seat->failures++;
    if (was_stopped(life)) return;
    REQUIRE(life, ordeal_fate(life->ordeal, named) != NULL && life->board->seats[named].struck,
            "blames rank %d, which lives: %s", named, life->rank.mock.text);
    REQUIRE(life, late_ms < SLACK_MS, "the verdict took %d ms", (int)took_ms);
    atomic_fetch_add(&life->world->tally->verdicts, 1);
    if (late_ms > life->world->tally->slowest_ms) life->world->tally->slowest_ms = late_ms;
}

// ---- a rank: from generation to generation -----------------------------------------------------

// Passes what the log has gained to the dispatcher, one loss a call, as every survivor does.
static void regroup(struct life *life)
{
    for (; life->seat->applied < board_lost_count(life->board); life->seat->applied++) {
        uint8_t active[MOXIE_RANKS_MAX];
        int32_t st;

        memset(active, 1, sizeof active);
        for (int32_t i = 0; i <= life->seat->applied; i++)
            active[board_lost_rank(life->board, i)] = 0;
        arm(life, AT_REGROUP, AT_REGROUP);
        st = dispatcher_set_active_ranks(life->rank.dispatcher, active, &life->rank.mock.error);
        disarm(life);
        REQUIRE(life, st == MOXIE_OK, "set_active_ranks: %s", life->rank.mock.text);
    }
    life->done = 0;
}

static void await(struct life *life, int (*ready)(struct life *life), const char *what)
{
    int64_t deadline_ns = clock_ns() + (int64_t)RUN_MS * 1000000;

    while (!ready(life)) {
        REQUIRE(life, clock_ns() < deadline_ns, "%s never came", what);
        (void)usleep(LOOK_US);
    }
}

static int is_left_out(struct life *life)
{
    return board_is_lost(life->board, life->index);
}

static int may_go_on(struct life *life)
{
    return life->board->epilogue || board_lost_count(life->board) > life->seat->applied;
}

// One forward, as its fate will have it. 0: this rank is out.
static int step(struct life *life)
{
    int64_t began_ns = clock_ns();
    int32_t failed, answer;

    arm(life, AT_SIGNAL, AT_TIME);
    arm(life, AT_LOG, AT_LOG);
    life->lagging =
        life->ordeal->lag_rank == life->index && life->ordeal->fates[0].forward == life->done;
    answer = forward(life, &failed);
    disarm(life);
    if (answer == MOXIE_OK) {
        check_rows(life);
        life->done++;
        return 1;
    }
    check_verdict(life, answer, failed, (clock_ns() - began_ns) / 1000000);
    if (was_stopped(life)) {
        await(life, is_left_out, "the survivors' verdict on a stopped rank");
        return 0;
    }
    board_lose(life->board, life->rank.mock.error.rank);
    regroup(life);
    return 1;
}

static void serve(struct life *life)
{
    life->seat->stage = BOARD_RUNNING;
    while (!life->board->epilogue) {
        if (life->done < life->ordeal->forwards) {
            if (!step(life)) {
                life->seat->stage = BOARD_LEFT;
                return;
            }
            continue;
        }
        life->seat->stage = BOARD_FINISHED;
        await(life, may_go_on, "the end");
        if (life->board->epilogue) break;
        life->seat->stage = BOARD_RUNNING;
        regroup(life);
    }
    for (int32_t i = 0; i < EPILOGUE_RUNS; i++) {
        int32_t failed, answer = forward(life, &failed);

        REQUIRE(life, answer == MOXIE_OK, "epilogue: %s", life->rank.mock.text);
        check_rows(life);
    }
}

void mortal_live(const struct world *world, int32_t index)
{
    struct life *life = calloc(1, sizeof *life);

    if (life == NULL) _exit(EXIT_FAILURE);
    life->world = world;
    life->board = world->board;
    life->seat = &world->board->seats[index];
    life->ordeal = &world->ordeal;
    life->fate = ordeal_fate(&world->ordeal, index);
    life->layer = &world->layer;
    life->index = index;
    life->first = layer_part_first(world->layer.tokens, world->ordeal.ranks, index);
    layer_parts(&world->layer, world->ordeal.ranks, life->parts);
    life->y = malloc((size_t)(life->parts[index] * world->layer.hidden) * sizeof *life->y);
    REQUIRE(life, life->y != NULL, "out of memory");
    self = life;
    layer_rank_init(&life->rank, &world->layer, NULL, index);
    configure(life);
    make_batches(life);
    if (create(life)) serve(life);
    layer_rank_close(&life->rank);
    free(life->y);
    free(life);
}
