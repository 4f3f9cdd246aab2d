// One rank of a soak.

#include "host_tests/gpu/soak_lane.h"

#include "plugin/transport.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define EPILOGUE_RUNS  2
#define GRAVE_MS       10000 // for the launcher to bury a rank that has died
#define VERDICT_FACTOR 4     // of timeout_ms, for a forward that fails
#define SLACK_MS       3000  // of a loaded machine

static struct soak_life *self; // in a rank's process

static void note(struct soak_life *life, const char *step)
{
    life->trace->step = step;
    life->trace->generation = life->seat->applied;
    life->trace->forward = life->done;
}

// ---- instants ----------------------------------------------------------------------------------

static void strike(struct soak_life *life)
{
    life->armed = 0;
    life->seat->struck = 1;
    (void)raise(SIGKILL);
}

void soak_instant(struct soak_life *life, int32_t kind)
{
    if (life->armed && life->fate->instant == kind && life->countdown-- == 0) strike(life);
}

// The kernel strikes, wherever the process is then.
static void strike_later(struct soak_life *life)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct itimerspec when = {.it_value.tv_nsec = (long)life->fate->delay_us * 1000};
    timer_t timer;

    life->seat->struck = 1;
    SOAK_REQUIRE(life,
                 timer_create(CLOCK_MONOTONIC, &event, &timer) == 0 &&
                     timer_settime(timer, 0, &when, NULL) == 0,
                 "no timer: %s", strerror(errno));
}

static void arm(struct soak_life *life, enum soak_instant from, enum soak_instant to)
{
    const struct soak_fate *fate = life->fate;

    if (fate == NULL || life->seat->struck || fate->instant < (int32_t)from ||
        fate->instant > (int32_t)to || fate->generation != life->seat->applied)
        return;
    if (to == SOAK_AT_HALF && fate->forward != life->done) return;
    life->countdown = fate->countdown;
    if (fate->instant == SOAK_AT_HALF || fate->instant == SOAK_AT_GATHER)
        life->armed = 1;
    else
        strike_later(life);
}

// A fate that counted past the last instant of its kind strikes now.
static void disarm(struct soak_life *life)
{
    if (life->armed) strike(life);
}

// ---- what a process holds ----------------------------------------------------------------------

// Descriptors but those of devices, which a driver opens when it likes.
static int32_t open_files(void)
{
    DIR *folder = opendir("/proc/self/fd");
    const struct dirent *entry;
    int32_t count = 0;

    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        char target[16] = "";

        if (readlinkat(dirfd(folder), entry->d_name, target, sizeof target - 1) > 0)
            count += strncmp(target, "/dev/", 5) != 0;
    }
    if (folder != NULL) (void)closedir(folder);
    return count;
}

// Mappings of the emulator's shared memory; a real device's have no such name.
static int32_t shared_mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    int32_t count = 0;
    char line[512];

    while (maps != NULL && fgets(line, sizeof line, maps) != NULL)
        count += strstr(line, "/memfd:emulator") != NULL;
    if (maps != NULL) (void)fclose(maps);
    return count;
}

// ---- create ------------------------------------------------------------------------------------

static int32_t on_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct soak_life *life = self;

    (void)ctx;
    soak_instant(life, SOAK_AT_GATHER);
    board_give(life->board, life->index, send, bytes);
    soak_instant(life, SOAK_AT_GATHER);
    return board_take(life->board, life->index, recv, bytes);
}

static int32_t on_barrier(void *ctx)
{
    unsigned char all[BOARD_RANKS_MAX];

    return on_all_gather(ctx, "", all, 1);
}

static void configure(struct soak_life *life, struct mock_host *mock)
{
    const struct soak_run *run = life->run;
    int64_t most = life->world->layer.tokens;

    mock_set_str(mock, "device", "sm_90");
    mock_set_i64(mock, "dp_size", run->ranks);
    mock_set_i64(mock, "tp_size", run->ranks);
    mock_set_i64(mock, "ep_size", run->ranks);
    mock_set_i64(mock, "ep_rank", life->index);
    mock_set_i64(mock, "forward_tokens_max", most);
    mock_set_i64(mock, "max_dispatch_tokens_per_rank", ceil_div(most, run->rounds));
    mock_set_i64(mock, "dispatch_rounds_max", run->rounds);
    mock_set_i64(mock, "forwards_in_flight_max", run->slots);
    mock_set_i64(mock, "timeout_ms", run->timeout_ms);
    mock_set_str(mock, "dispatcher", run->dispatcher);
    if (run->fp8 > 0) mock_set_str(mock, "weight_format", "fp8_channel");
    if (run->fp8 > 1) mock_set_str(mock, "dispatch_format", "fp8_block128");
    // Memory is the device's own.
    mock->host.allocate = NULL;
    mock->host.release = NULL;
    mock->host.all_gather = on_all_gather;
    mock->host.barrier = on_barrier;
}

// Everything but the dispatcher.
static void prepare(struct soak_life *life, struct soak_member *member)
{
    static const struct registry none;
    struct layer_rank *rank = &member->rank;
    moxie_error *error = &rank->mock.error;
    const moxie_plan *plan = NULL;

    layer_rank_init(rank, &life->world->layer, NULL, life->index);
    configure(life, &rank->mock);
    SOAK_REQUIRE(life, instance_open(&rank->mock.host, &none, &rank->instance, error) == MOXIE_OK,
                 "open: %s", rank->mock.text);
    SOAK_REQUIRE(life, instance_plan(rank->instance, &plan, error) == MOXIE_OK, "plan: %s",
                 rank->mock.text);
    layer_weights_of(&life->world->layer, plan->bounds->expert_first, plan->bounds->experts_local,
                     &member->weights);
    gpu_upload_weights(&member->weights, life->run->fp8 ? member->scale_dims : NULL);
    SOAK_REQUIRE(life,
                 runner_create(rank->instance, 0, &member->weights.weights, &rank->runner, error) ==
                     MOXIE_OK,
                 "runner: %s", rank->mock.text);
}

static int32_t join(struct soak_member *member)
{
    struct layer_rank *rank = &member->rank;

    return dispatcher_create(rank->instance,
                             (enum dispatcher_kind)rank->instance->plan.limits.dispatcher,
                             &rank->dispatcher, &rank->mock.error);
}

static void leave(struct soak_life *life)
{
    for (int32_t i = 0; i < life->run->instances; i++) {
        dispatcher_destroy(life->members[i].rank.dispatcher);
        life->members[i].rank.dispatcher = NULL;
    }
}

// Creates the dispatchers. 1: every rank could; a host has its ranks tell each other.
static int create(struct soak_life *life)
{
    int32_t all[BOARD_RANKS_MAX], st = MOXIE_OK;
    const char *text = "";
    int gathered;

    note(life, "create");
    arm(life, SOAK_AT_GATHER, SOAK_AT_BIRTH);
    for (int32_t i = 0; i < life->run->instances && st == MOXIE_OK; i++) {
        struct layer_rank *rank = &life->members[i].rank;

        st = join(&life->members[i]);
        text = rank->mock.text;
        SOAK_REQUIRE(life, (st == MOXIE_OK) == (rank->dispatcher != NULL), "create: %d, and %p", st,
                     (void *)rank->dispatcher);
        SOAK_REQUIRE(life, st == MOXIE_OK || text[0] != '\0', "create failed without words");
    }
    disarm(life);
    note(life, "telling whether it could create");
    board_give(life->board, life->index, &st, sizeof st);
    gathered = board_take(life->board, life->index, all, sizeof st) == 0;
    for (int32_t rank = 0; gathered && rank < life->run->ranks; rank++)
        gathered = all[rank] == MOXIE_OK;
    SOAK_REQUIRE(life, gathered || life->board->dead != 0, "create: %d, %s", st, text);
    SOAK_REQUIRE(life, st == MOXIE_OK || st == MOXIE_E_PEER || st == MOXIE_E_UNAVAILABLE,
                 "create: %d, %s", st, text);
    return gathered;
}

// ---- verdicts ----------------------------------------------------------------------------------

static int64_t now_ms(void)
{
    return clock_ns() / 1000000;
}

static int is_dead(const struct soak_life *life, int32_t rank)
{
    int64_t until_ms = now_ms() + GRAVE_MS;

    if (rank < 0 || rank >= life->run->ranks || !life->board->seats[rank].struck) return 0;
    while ((life->board->dead >> rank & 1) == 0) {
        if (now_ms() > until_ms) return 0;
        (void)usleep(SOAK_LOOK_US);
    }
    return 1;
}

// The y of the call that failed is zero; where none is known, that of some lane is, and others are
// either zero or right.
static void check_zero(struct soak_life *life, int32_t failed)
{
    int32_t zero = 0;
    char text[160] = "";

    for (int32_t i = 0; i < life->lanes_count; i++) {
        int is_zero = soak_lane_is_zero(life, &life->lanes[i]);

        zero += is_zero;
        SOAK_REQUIRE(life, is_zero || i != failed, "y of the call that failed is not zero");
        // What no call came to is as it was.
        if (is_zero || failed >= 0) continue;
        SOAK_REQUIRE(life, soak_lane_is_right(life, &life->lanes[i], text, sizeof text),
                     "y is neither zero nor right after a failure: %s", text);
    }
    SOAK_REQUIRE(life, zero > 0, "y is not zero after a failure");
}

// Every call answers as the failed one did, and leaves y zero.
static void check_sticky(struct soak_life *life, int32_t named)
{
    struct layer_rank *rank = &life->members[0].rank;
    moxie_error *error = &rank->mock.error;
    int32_t st;

    for (int32_t i = 0; i < life->lanes_count; i++) {
        struct soak_lane *lane = &life->lanes[i];

        soak_lane_poison(life, lane);
        st = i == 0 ? forward_run(rank->dispatcher, rank->runner, &lane->batch.batch, error)
                    : dispatcher_combine_recv(rank->dispatcher, &lane->batch.batch, error);
        SOAK_REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "called again: %d, %s", st,
                     rank->mock.text);
    }
    soak_lanes_fetch(life);
    for (int32_t i = 0; i < life->lanes_count; i++)
        SOAK_REQUIRE(life, soak_lane_is_zero(life, &life->lanes[i]),
                     "y is not zero after a call that came later");
    st = dispatcher_begin_forward(rank->dispatcher, &life->lanes[0].step, error);
    SOAK_REQUIRE(life, st == MOXIE_E_PEER && error->rank == named, "begin_forward: %d, %s", st,
                 rank->mock.text);
}

static void check_verdict(struct soak_life *life, int32_t answer, int32_t failed, int64_t took_ms)
{
    struct layer_rank *rank = &life->members[0].rank;
    int32_t named;
    char text[16];

    note(life, "checking a verdict");
    SOAK_REQUIRE(life, answer == MOXIE_E_PEER, "forward: %d, %s", answer, rank->mock.text);
    SOAK_REQUIRE(life, dispatcher_poll_error(rank->dispatcher, &rank->mock.error) == MOXIE_E_PEER,
                 "poll_error does not answer as the call did: %s", rank->mock.text);
    named = rank->mock.error.rank;
    (void)snprintf(text, sizeof text, "rank %d ", named);
    SOAK_REQUIRE(life, strstr(rank->mock.text, text) != NULL, "no \"%s\" in: %s", text,
                 rank->mock.text);
    SOAK_REQUIRE(life, is_dead(life, named), "blames rank %d, which lives: %s", named,
                 rank->mock.text);
    SOAK_REQUIRE(life, took_ms <= (int64_t)VERDICT_FACTOR * life->run->timeout_ms + SLACK_MS,
                 "the verdict took %d ms: %s", (int)took_ms, rank->mock.text);
    check_zero(life, failed);
    check_sticky(life, named);
    life->seat->failures++;
    atomic_fetch_add(&life->world->tally->verdicts, 1);
    if (took_ms > life->world->tally->slowest_ms) life->world->tally->slowest_ms = took_ms;
    board_lose(life->board, named);
}

// ---- from generation to generation -------------------------------------------------------------

// Passes what the log has gained to the dispatchers, one loss a call, as every survivor does.
static void regroup(struct soak_life *life)
{
    for (; life->seat->applied < board_lost_count(life->board); life->seat->applied++) {
        uint8_t active[MOXIE_RANKS_MAX];

        note(life, "set_active_ranks");
        memset(active, 1, sizeof active);
        for (int32_t i = 0; i <= life->seat->applied; i++)
            active[board_lost_rank(life->board, i)] = 0;
        arm(life, SOAK_AT_REGROUP, SOAK_AT_REGROUP);
        for (int32_t i = 0; i < life->run->instances; i++) {
            struct layer_rank *rank = &life->members[i].rank;
            int32_t st = dispatcher_set_active_ranks(rank->dispatcher, active, &rank->mock.error);

            SOAK_REQUIRE(life, st == MOXIE_OK, "set_active_ranks: %s", rank->mock.text);
            st = dispatcher_poll_error(rank->dispatcher, &rank->mock.error);
            SOAK_REQUIRE(life, st == MOXIE_OK, "after set_active_ranks: %s", rank->mock.text);
        }
    }
    life->done = 0;
    if (life->run->recaptures && life->run->graphs) soak_lanes_capture(life);
}

// A wait may fail in the stream after its call; poll_error then knows.
static int32_t ask(struct soak_life *life, int32_t answer)
{
    for (int32_t i = 0; i < life->run->instances && answer == MOXIE_OK; i++) {
        struct layer_rank *rank = &life->members[i].rank;

        answer = dispatcher_poll_error(rank->dispatcher, &rank->mock.error);
        if (answer != MOXIE_OK && life->run->fates_count == 0)
            board_complain(life->board, life->index, "nobody died: %s", rank->mock.text);
    }
    return answer;
}

static void forward(struct soak_life *life)
{
    int32_t answer, failed;
    int64_t began_ms, took_ms;
    char text[160] = "";

    note(life, "filling its batches");
    soak_lanes_fill(life);
    if (life->lanes[0].part.delay_us > 0) (void)usleep((useconds_t)life->lanes[0].part.delay_us);
    note(life, "begin_forward");
    soak_lanes_begin(life);
    note(life, "the calls of a forward");
    began_ms = now_ms();
    arm(life, SOAK_AT_TIME, SOAK_AT_HALF);
    answer = soak_lanes_call(life, &failed);
    disarm(life);
    note(life, "waiting for the device");
    soak_lanes_fetch(life);
    took_ms = now_ms() - began_ms;
    if (life->seat->struck) (void)usleep((useconds_t)life->fate->delay_us + 1000000);
    answer = ask(life, answer);
    if (answer != MOXIE_OK) {
        check_verdict(life, answer, failed, took_ms);
        regroup(life);
        return;
    }
    note(life, "checking rows");
    for (int32_t i = 0; i < life->lanes_count; i++)
        SOAK_REQUIRE(life, soak_lane_is_right(life, &life->lanes[i], text, sizeof text),
                     "generation %d, forward %d, lane %d%s: %s", life->seat->applied, life->done, i,
                     life->lanes[i].part.replays ? ", a replay" : "", text);
    atomic_fetch_add(&life->world->tally->forwards, life->lanes_count);
    life->done++;
}

static void await_others(struct soak_life *life)
{
    life->seat->stage = BOARD_FINISHED;
    note(life, "waiting for the other ranks to finish");
    while (!life->board->epilogue && board_lost_count(life->board) == life->seat->applied)
        (void)usleep(SOAK_LOOK_US);
    if (life->board->epilogue) return;
    life->seat->stage = BOARD_RUNNING;
    regroup(life);
}

static void serve(struct soak_life *life)
{
    life->seat->stage = BOARD_RUNNING;
    if (life->run->graphs) soak_lanes_capture(life);
    while (!life->board->epilogue) {
        if (life->done < life->run->forwards)
            forward(life);
        else
            await_others(life);
    }
    for (int32_t i = 0; i < EPILOGUE_RUNS; i++) {
        int32_t failures, losses = 0;

        // A rank that died after its last forward is missed here for the first time.
        do {
            failures = life->seat->failures;
            forward(life);
        } while (failures != life->seat->failures && ++losses < life->run->ranks);
        SOAK_REQUIRE(life, failures == life->seat->failures, "the last forwards failed");
    }
}

// ---- life --------------------------------------------------------------------------------------

static void open_reference(struct soak_life *life)
{
    static const struct registry none;
    struct soak_member *member = &life->reference;
    struct layer_rank *rank = &member->rank;
    moxie_error *error = &rank->mock.error;

    layer_rank_init(rank, &life->world->layer, NULL, 0);
    mock_set_i64(&rank->mock, "forward_tokens_max", life->world->layer.tokens);
    mock_set_i64(&rank->mock, "cpu_threads", 1);
    mock_set_str(&rank->mock, "dispatcher", "local");
    if (life->run->fp8) mock_set_str(&rank->mock, "weight_format", "fp8_channel");
    layer_weights_of(&life->world->layer, 0, life->world->layer.experts, &member->weights);
    if (life->run->fp8) gpu_quantise_weights(&member->weights, member->scale_dims);
    SOAK_REQUIRE(life,
                 instance_open(&rank->mock.host, &none, &rank->instance, error) == MOXIE_OK &&
                     runner_create(rank->instance, 0, &member->weights.weights, &rank->runner,
                                   error) == MOXIE_OK &&
                     dispatcher_create(rank->instance, DISPATCHER_LOCAL, &rank->dispatcher,
                                       error) == MOXIE_OK,
                 "the reference: %s", rank->mock.text);
}

static void close_reference(struct soak_life *life)
{
    layer_rank_close(&life->reference.rank);
    if (life->run->fp8) gpu_free_quantised(&life->reference.weights);
}

// Dispatchers that come and go first, so that whatever the device's driver opens once is open. 1:
// it could; a rank that was faster may have died meanwhile.
static int rehearse(struct soak_life *life)
{
    int32_t st = MOXIE_OK;

    note(life, "a first create");
    for (int32_t i = 0; i < life->run->instances && st == MOXIE_OK; i++)
        st = join(&life->members[i]);
    SOAK_REQUIRE(life, st == MOXIE_OK || (st == MOXIE_E_PEER && life->board->dead != 0),
                 "a first create: %d, %s", st, life->members[0].rank.mock.text);
    leave(life);
    return st == MOXIE_OK;
}

static void close_members(struct soak_life *life)
{
    for (int32_t i = 0; i < life->run->instances; i++) {
        layer_rank_close(&life->members[i].rank);
        gpu_free_weights(&life->members[i].weights);
    }
}

void soak_live(const struct soak_world *world, int32_t index)
{
    struct soak_life *life = calloc(1, sizeof *life);
    int32_t files, left;
    int devices = 0;

    if (life == NULL) _exit(EXIT_FAILURE);
    life->world = world;
    life->run = &world->run;
    life->board = world->board;
    life->seat = &world->board->seats[index];
    life->trace = &world->traces[index];
    life->fate = soak_fate_of(&world->run, index);
    life->index = index;
    self = life;
    note(life, "opening");
    SOAK_DEVICE(life, cudaGetDeviceCount(&devices));
    SOAK_DEVICE(life, cudaSetDevice(index % devices));
    open_reference(life);
    for (int32_t i = 0; i < world->run.instances; i++)
        prepare(life, &life->members[i]);
    soak_lanes_open(life);
    files = open_files();
    if (rehearse(life)) {
        files = open_files();
        if (create(life)) serve(life);
    }
    note(life, "destroying");
    leave(life);
    left = open_files() - files;
    SOAK_REQUIRE(life, left == 0, "%d descriptors were left open", left);
    left = shared_mappings();
    SOAK_REQUIRE(life, left == 0, "%d windows were left mapped", left);
    note(life, "closing");
    soak_lanes_close(life);
    close_members(life);
    close_reference(life);
    free(life);
}
