// A host that fails once, at every place and every time in the life of a rank: it hears of it in
// words, nothing is held, the same call made again works, and ranks beside it leave in time.

#include "host_tests/life.h"
#include "host_tests/suite.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define LAYER      "qwen3_moe_norenorm"
#define RANKS      3
#define TOKENS     7
#define CALLS_MAX  100 // at one place, in one life
#define DEADLINE_S 10  // for three ranks to leave

static const struct fault no_fault;
static const char *const dispatchers[] = {"local", "alltoall"};

// A few of its tokens: what is swept is calls.
static void open_small(struct layer *layer)
{
    layer_open(layer, LAYER);
    layer->tokens = TOKENS;
}

static struct life *life_new(const struct layer *layer, const char *dispatcher,
                             const struct fault *fault)
{
    struct life *life = malloc(sizeof *life);

    ck_assert_ptr_nonnull(life);
    life_init(life, layer, dispatcher, fault);
    return life;
}

static void life_free(struct life *life)
{
    life_end(life);
    free(life);
}

static void passes(const struct life *life)
{
    ck_assert_msg(life->stopped_at == LIFE_STEPS, "%s: %d %s",
                  life_step_name((enum life_step)life->stopped_at), life->code, life->text);
}

static void clean_life(const struct layer *layer, const char *dispatcher)
{
    struct life *life = life_new(layer, dispatcher, &no_fault);

    fault_host_arm(&life->host);
    life_go(life, LIFE_OPEN);
    passes(life);
    life_free(life);
}

// ---- One rank ----------------------------------------------------------------------------------

static const struct {
    int32_t place, way, code;
    uint64_t calls_min; // that a life makes there
} failures[] = {
    {FAULT_LIBC, FAULT_FAILS, MOXIE_E_MEMORY, 5},
    {FAULT_ALLOCATE, FAULT_FAILS, MOXIE_E_MEMORY, 8},
    {FAULT_ALLOCATE, ALLOCATE_NULL, MOXIE_E_MEMORY, 8},
    {FAULT_ALLOCATE, ALLOCATE_JUNK, MOXIE_E_MEMORY, 8},
    {FAULT_ALLOCATE, ALLOCATE_ASKEW, MOXIE_E_MEMORY, 8},
    {FAULT_REGISTER, FAULT_FAILS, MOXIE_E_UNAVAILABLE, 4},
    {FAULT_THREAD_CHECK, FAULT_FAILS, MOXIE_E_INVALID, 15},
};

// One failing call of a life on its way through; 0 when the life makes no such call.
static int fails_once(const struct layer *layer, const char *dispatcher, const struct fault *fault,
                      int32_t code)
{
    struct life *life = life_new(layer, dispatcher, fault);
    int32_t struck;

    // A warning, so that open allocates.
    mock_set_i64(&life->host.mock, "max_prefill_tokens", 7);
    fault_host_arm(&life->host);
    life_go(life, LIFE_OPEN);
    struck = life->host.struck;
    // A refused destroy has no answer; the life has made it again.
    if (struck && (fault->place != FAULT_THREAD_CHECK || life->stopped_at != LIFE_STEPS)) {
        ck_assert_msg(life->code == code, "call %u, at %s: %d %s", (unsigned)fault->call,
                      life_step_name((enum life_step)life->stopped_at), life->code, life->text);
        life_go(life, (enum life_step)life->stopped_at);
    }
    passes(life);
    if (fault->place == FAULT_THREAD_CHECK)
        ck_assert_int_eq(mock_logged(&life->host.mock, "HOST_MISBEHAVING"), struck);
    life_free(life);
    return struck;
}

START_TEST(a_call_that_failed_works_when_made_again)
{
    struct layer layer;

    open_small(&layer);
    for (size_t i = 0; i < sizeof dispatchers / sizeof dispatchers[0]; i++) {
        struct fault fault = {.place = failures[_i].place, .way = failures[_i].way, .call = 1};

        while (fails_once(&layer, dispatchers[i], &fault, failures[_i].code)) {
            fault.call++;
            ck_assert_uint_lt(fault.call, CALLS_MAX);
        }
        ck_assert_uint_gt(fault.call, failures[_i].calls_min);
    }
    layer_close(&layer);
}
END_TEST

// What each key becomes is for the report; here nothing breaks, and nothing is left.
START_TEST(whatever_a_getter_says_a_life_ends_well)
{
    struct fault fault = {.place = FAULT_GETTER, .way = _i, .call = 1};
    int32_t struck = 1, refused = 0;
    struct layer layer;

    open_small(&layer);
    for (; struck; fault.call++) {
        struct life *life = life_new(&layer, "local", &fault);

        ck_assert_uint_lt(fault.call, CALLS_MAX);
        fault_host_arm(&life->host);
        life_go(life, LIFE_OPEN);
        struck = life->host.struck;
        refused += life->code == MOXIE_E_CONFIG;
        life_free(life);
    }
    ck_assert_int_ge(refused, 4); // of the required keys at least
    clean_life(&layer, "local");
    layer_close(&layer);
}
END_TEST

// The library finds work that no task took, and work done twice, or by tasks that there are not,
// does no harm.
START_TEST(a_parallel_for_that_skips_tasks_costs_time_alone)
{
    struct layer layer;

    layer_open(&layer, LAYER);
    for (size_t i = 0; i < sizeof dispatchers / sizeof dispatchers[0]; i++) {
        struct fault fault = {.place = FAULT_PARALLEL_FOR, .way = _i, .call = 1};
        int32_t struck = 1;

        for (; struck; fault.call++) {
            struct life *life = life_new(&layer, dispatchers[i], &fault);

            ck_assert_uint_lt(fault.call, CALLS_MAX);
            fault_host_arm(&life->host);
            life_go(life, LIFE_OPEN);
            passes(life);
            struck = life->host.struck;
            life_free(life);
        }
        ck_assert_uint_gt(fault.call, 3);
    }
    layer_close(&layer);
}
END_TEST

// ---- The wrong thread --------------------------------------------------------------------------

static _Thread_local int32_t is_engine_thread;

static int32_t on_engine_thread(void *ctx, int32_t tag)
{
    (void)ctx;
    (void)tag;
    return is_engine_thread;
}

struct errand {
    struct life *life;
    enum life_step step;
    int32_t code;
};

static void *run_errand(void *arg)
{
    struct errand *errand = arg;

    errand->code = life_step(errand->life, errand->step);
    return NULL;
}

static int32_t on_another_thread(struct life *life, enum life_step step)
{
    struct errand errand = {.life = life, .step = step};
    pthread_t thread;

    ck_assert_int_eq(pthread_create(&thread, NULL, run_errand, &errand), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    return errand.code;
}

static void *destroy_all(void *arg)
{
    struct life *life = arg;

    life->dispatcher_api->destroy(life->dispatcher);
    life->runner_api->destroy(life->runner);
    return NULL;
}

// Every slot is called from the wrong thread first; then from the right one it does its work.
START_TEST(a_call_from_the_wrong_thread_does_nothing)
{
    struct layer layer;
    struct life *life;
    pthread_t thread;

    open_small(&layer);
    life = life_new(&layer, dispatchers[_i], &no_fault);
    life->host.mock.host.thread_check = on_engine_thread;
    is_engine_thread = 1;
    for (int32_t step = LIFE_OPEN; step < LIFE_CLOSE; step++) {
        int any = step <= LIFE_PLAN || (_i == 0 && step == LIFE_ACTIVE_RANKS);
        uint64_t lines = life->host.mock.log_lines;

        if (step != LIFE_OPEN)
            ck_assert_int_eq(on_another_thread(life, (enum life_step)step),
                             any ? MOXIE_OK : MOXIE_E_INVALID);
        ck_assert_uint_eq(life->host.mock.log_lines, lines + (step > LIFE_OPEN && !any));
        ck_assert_msg(life_step(life, (enum life_step)step) == MOXIE_OK, "%s: %s",
                      life_step_name((enum life_step)step), life->text);
    }
    ck_assert_int_eq(pthread_create(&thread, NULL, destroy_all, life), 0);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    ck_assert_int_eq(life_api()->close(life->instance, NULL), MOXIE_E_INVALID); // both live
    ck_assert_int_eq(life_step(life, LIFE_CLOSE), MOXIE_OK);
    life_free(life);
    layer_close(&layer);
}
END_TEST

// ---- Lies about sizes --------------------------------------------------------------------------

#define SIZE_OF(step, member) step, offsetof(struct life, member)

// A uint32_t that a step reads: the size of a struct, or how many there are, or how far apart.
static const struct {
    enum life_step step;
    size_t offset;
    int32_t is_size;
} declared[] = {
    {SIZE_OF(LIFE_OPEN, host.mock.host.struct_size), 1},
    {SIZE_OF(LIFE_RUNNER, view.weights.struct_size), 1},
    {SIZE_OF(LIFE_RUNNER, view.w1.struct_size), 1},
    {SIZE_OF(LIFE_RUNNER, view.w2.struct_size), 1},
    {SIZE_OF(LIFE_BEGIN, step.struct_size), 1},
    {SIZE_OF(LIFE_FORWARD, batch.batch.struct_size), 1},
    {SIZE_OF(LIFE_DISPATCH_SEND, batch.batch.struct_size), 1},
    {SIZE_OF(LIFE_DISPATCH_RECV, batch.batch.struct_size), 1},
    {SIZE_OF(LIFE_RUN, call.struct_size), 1},
    {SIZE_OF(LIFE_RUN, rows_in.struct_size), 1},
    {SIZE_OF(LIFE_RUN, rows_in.slabs_count), 0},
    {SIZE_OF(LIFE_RUN, rows_in.slab_stride), 0},
    {SIZE_OF(LIFE_RUN, rows_out.struct_size), 1},
    {SIZE_OF(LIFE_RUN, rows_out.slabs_count), 0},
    {SIZE_OF(LIFE_RUN, rows_out.slab_stride), 0},
    {SIZE_OF(LIFE_RUN, slabs_in[0].struct_size), 1},
    {SIZE_OF(LIFE_COMBINE_SEND, batch.batch.struct_size), 1},
    {SIZE_OF(LIFE_COMBINE_RECV, batch.batch.struct_size), 1},
    {SIZE_OF(LIFE_CAPTURED, captured.struct_size), 1},
    {SIZE_OF(LIFE_STATS, stats.struct_size), 1},
};

static const uint32_t lies[] = {0, 1, 7, (uint32_t)INT32_MAX, UINT32_MAX};

// Each lie in turn, then the truth: the call that refused it has done nothing.
static void lie_about(struct life *life, enum life_step step, size_t which)
{
    unsigned char *at = (unsigned char *)life + declared[which].offset;
    uint32_t truth;

    memcpy(&truth, at, sizeof truth);
    for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
        int32_t code;

        // One slab is as near to the next at any distance.
        if (declared[which].offset == offsetof(struct life, rows_in.slab_stride) && i > 2) continue;
        if (declared[which].offset == offsetof(struct life, rows_out.slab_stride) && i > 2)
            continue;
        if (lies[i] == truth) continue;
        memcpy(at, &lies[i], sizeof lies[i]);
        code = life_step(life, step);
        ck_assert_msg(code == MOXIE_E_INVALID || code == MOXIE_E_UNSUPPORTED,
                      "%u instead of %u at %s, number %u: %d", lies[i], truth, life_step_name(step),
                      (unsigned)which, code);
    }
    memcpy(at, &truth, sizeof truth);
}

START_TEST(lies_about_sizes_are_refused)
{
    struct layer layer;
    struct life *life;

    open_small(&layer);
    life = life_new(&layer, dispatchers[_i], &no_fault);
    fault_host_arm(&life->host);
    for (int32_t step = LIFE_OPEN; step < LIFE_STEPS; step++) {
        for (size_t i = 0; i < sizeof declared / sizeof declared[0]; i++) {
            if (declared[i].step == (enum life_step)step) lie_about(life, declared[i].step, i);
        }
        ck_assert_msg(life_step(life, (enum life_step)step) == MOXIE_OK, "%s: %s",
                      life_step_name((enum life_step)step), life->text);
    }
    life_free(life);
    layer_close(&layer);
}
END_TEST

// ---- Three ranks -------------------------------------------------------------------------------

struct trial {
    struct layer layer;
    struct fault fault; // of the victim
    int32_t victim;
    int32_t silent;           // ranks that fail leave without a word to the bootstrap
    int32_t group_timeout_ms; // of the bootstrap
    int32_t timeout_ms;       // of the dispatchers
    struct mock_group *group;
    struct life *lives[RANKS];
};

static void live(void *arg, int32_t rank)
{
    struct trial *trial = arg;
    struct life *life =
        life_new(&trial->layer, "alltoall", rank == trial->victim ? &trial->fault : &no_fault);

    trial->lives[rank] = life;
    life_join(life, trial->group, RANKS, rank);
    mock_set_i64(&life->host.mock, "timeout_ms", trial->timeout_ms);
    fault_host_arm(&life->host);
    life_go(life, LIFE_OPEN);
    if (life->stopped_at != LIFE_STEPS && !trial->silent) mock_group_break(trial->group);
    life_end(life);
}

// Windows that this process still maps, or names of theirs.
static int32_t windows_left(void)
{
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[512];
    int32_t left = 0;

    ck_assert_ptr_nonnull(maps);
    while (fgets(line, sizeof line, maps) != NULL)
        left += strstr(line, "/dev/shm/moxie-") != NULL;
    (void)fclose(maps);
    return left;
}

static double seconds(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static void run_ranks(struct trial *trial)
{
    double begin = seconds();

    trial->group = mock_group_create(RANKS, trial->group_timeout_ms);
    mock_ranks_run(RANKS, live, trial);
    mock_group_destroy(trial->group);
    ck_assert_double_lt(seconds() - begin, DEADLINE_S);
    ck_assert_int_eq(windows_left(), 0);
}

static void forget_ranks(struct trial *trial)
{
    for (int32_t rank = 0; rank < RANKS; rank++) {
        free(trial->lives[rank]);
        trial->lives[rank] = NULL;
    }
}

static int stopped_together(const struct life *life)
{
    return life->stopped_at <= LIFE_FORWARD_AGAIN;
}

// Whoever still needed the victim has failed as well, and blames nobody else for its silence.
static int rank_explained(const struct trial *trial, const struct life *life)
{
    const struct life *victim = trial->lives[trial->victim];

    if (stopped_together(victim) != stopped_together(life)) return 0;
    if (!stopped_together(life) || life == victim) return 1;
    if (life->stopped_at < LIFE_DISPATCHER) return 0;
    return life->stopped_at < LIFE_BEGIN || life->blamed == trial->victim || life->blamed == -1;
}

static int explained(const struct trial *trial)
{
    int all = 1;

    for (int32_t rank = 0; rank < RANKS; rank++)
        all = all && rank_explained(trial, trial->lives[rank]);
    return all && (trial->lives[trial->victim]->host.struck ||
                   trial->lives[trial->victim]->stopped_at == LIFE_STEPS);
}

// Runs it, and once more with more patience: a machine that is busy makes ranks seem silent.
static void try_ranks(struct trial *trial)
{
    const struct fault fault = trial->fault;
    const int32_t group_timeout_ms = trial->group_timeout_ms;
    char text[1024] = "";
    size_t used = 0;

    trial->timeout_ms = 120;
    run_ranks(trial);
    if (explained(trial)) return;
    forget_ranks(trial);
    trial->timeout_ms = 3000;
    trial->group_timeout_ms *= 5;
    trial->fault.late_ms *= 4;
    run_ranks(trial);
    trial->group_timeout_ms = group_timeout_ms;
    trial->fault = fault;
    for (int32_t rank = 0; rank < RANKS && used < sizeof text; rank++)
        used += (size_t)snprintf(text + used, sizeof text - used, "\nrank %d, %s: %d %.200s", rank,
                                 life_step_name((enum life_step)trial->lives[rank]->stopped_at),
                                 trial->lives[rank]->code, trial->lives[rank]->text);
    ck_assert_msg(explained(trial), "call %u of rank %d%s", (unsigned)trial->fault.call,
                  trial->victim, text);
}

static void clean_lives(const struct trial *after)
{
    struct trial trial = {.layer = after->layer, .group_timeout_ms = 20000, .timeout_ms = 20000};

    run_ranks(&trial);
    for (int32_t rank = 0; rank < RANKS; rank++)
        passes(trial.lives[rank]);
    forget_ranks(&trial);
}

static const struct {
    int32_t place, way;
    int32_t code; // the victim's; 0: any
    int32_t silent, group_timeout_ms, late_ms;
    int32_t passes; // it is no fault
    int32_t shared; // many calls, of which every victim gets its third
} between_ranks[] = {
    {.place = FAULT_LIBC, .code = MOXIE_E_MEMORY},
    {.place = FAULT_LIBC, .code = MOXIE_E_MEMORY, .silent = 1, .group_timeout_ms = 100},
    {.place = FAULT_ALLOCATE, .code = MOXIE_E_MEMORY},
    {.place = FAULT_REGISTER, .code = MOXIE_E_UNAVAILABLE},
    {.place = FAULT_GETTER, .shared = 1},
    {.place = FAULT_GETTER, .way = GETTER_WRONG_TYPE, .shared = 1},
    {.place = FAULT_ALL_GATHER},
    {.place = FAULT_ALL_GATHER, .silent = 1, .group_timeout_ms = 100},
    {.place = FAULT_ALL_GATHER, .way = ALL_GATHER_AFTER},
    {.place = FAULT_ALL_GATHER, .way = ALL_GATHER_LATE, .late_ms = 30, .passes = 1},
    {.place = FAULT_ALL_GATHER, .way = ALL_GATHER_LATE, .late_ms = 200, .group_timeout_ms = 60},
    {.place = FAULT_BARRIER},
    {.place = FAULT_THREAD_CHECK, .code = MOXIE_E_INVALID, .shared = 1},
};

#define BETWEEN_RANKS ((int)(sizeof between_ranks / sizeof between_ranks[0]))

// One failing call of one rank; 0 when its life makes no such call.
static int one_rank_fails(struct trial *trial, int32_t kind)
{
    const struct life *victim;
    int32_t struck;

    try_ranks(trial);
    victim = trial->lives[trial->victim];
    struck = victim->host.struck;
    if (!struck || between_ranks[kind].passes) passes(victim);
    if (victim->stopped_at != LIFE_STEPS && between_ranks[kind].code != 0)
        ck_assert_int_eq(victim->code, between_ranks[kind].code);
    forget_ranks(trial);
    return struck;
}

START_TEST(when_one_rank_fails_all_leave_in_time)
{
    const int32_t kind = _i % BETWEEN_RANKS;
    struct trial trial = {.victim = _i / BETWEEN_RANKS};
    int32_t timeout_ms = between_ranks[kind].group_timeout_ms;

    trial.silent = between_ranks[kind].silent;
    trial.group_timeout_ms = timeout_ms > 0 ? timeout_ms : 5000;
    trial.fault =
        (struct fault){.place = between_ranks[kind].place,
                       .way = between_ranks[kind].way,
                       .late_ms = between_ranks[kind].late_ms,
                       .call = between_ranks[kind].shared ? 1 + (uint64_t)trial.victim : 1};
    open_small(&trial.layer);
    while (one_rank_fails(&trial, kind)) {
        trial.fault.call += between_ranks[kind].shared ? RANKS : 1;
        ck_assert_uint_lt(trial.fault.call, CALLS_MAX);
    }
    clean_lives(&trial);
    layer_close(&trial.layer);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, a_call_that_failed_works_when_made_again, 0,
                        sizeof failures / sizeof failures[0]);
    tcase_add_loop_test(tests, whatever_a_getter_says_a_life_ends_well, FAULT_FAILS,
                        GETTER_ODD + 1);
    tcase_add_loop_test(tests, a_parallel_for_that_skips_tasks_costs_time_alone,
                        PARALLEL_FOR_NO_TASK, PARALLEL_FOR_PAST + 1);
    tcase_add_loop_test(tests, a_call_from_the_wrong_thread_does_nothing, 0, 2);
    tcase_add_loop_test(tests, lies_about_sizes_are_refused, 0, 2);
    tcase_add_loop_test(tests, when_one_rank_fails_all_leave_in_time, 0, RANKS * BETWEEN_RANKS);
}

SUITE_MAIN("faults", 60, add)
