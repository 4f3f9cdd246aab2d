// Rules of several ranks, for every dispatcher that sums over them.

#include "hosts/cli/conform_crew.h"
#include "hosts/cli/fault.h"

#include <stdlib.h>
#include <string.h>

// One forward of so many tokens on each rank, against the reference.
static int compare(struct seat *seat, const int64_t *counts, int listed)
{
    struct stage *stage = &seat->stage;
    int st = VERDICT_PASS;

    stage->tokens_spec.count = counts[seat->rank];
    TRY(tokens_make(&stage->tokens, &stage->tokens_spec, &seat->check));
    TRY(reference_compute(&stage->tokens, &stage->layer, &seat->check));
    TRY(crew_forward(seat, listed ? counts : NULL));
    TRY(tokens_compare(&stage->tokens, stage_tolerance(&stage->engine, stage->tokens.spec.y_format),
                       &seat->check));
out:
    return st;
}

// With the list of counts and without.
static int compare_both(struct seat *seat, const int64_t *counts)
{
    int st = VERDICT_PASS;

    for (int listed = 0; listed < 2; listed++)
        TRY(compare(seat, counts, listed));
out:
    return st;
}

static int run_if_accepted(const struct crew_job *job, struct check *check)
{
    int accepted = 0;
    int st = VERDICT_PASS;

    TRY(crew_accepted(job, check, &accepted));
    if (accepted) TRY(crew_run(job, check));
out:
    return st;
}

// ---- Forward -----------------------------------------------------------------------------------

static int play_forward(struct seat *seat)
{
    static const int64_t counts[][CREW_RANKS_MAX] = {
        {5, 3, 7, 1}, {1, 1, 1, 1}, {BASE_TOKENS_MAX, 2, 5, BASE_TOKENS_MAX}};
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        TRY(compare_both(seat, counts[i]));
out:
    return st;
}

// Five tokens of one DP rank over four ranks: two of each, as ranks pad.
static void prepare_padded(struct seat *seat)
{
    engine_set_i64(&seat->stage.engine, "forward_tokens_max", 5);
    engine_set_i64(&seat->stage.engine, "capture_routed_experts", 1);
}

static int play_padded(struct seat *seat)
{
    static const int64_t counts[CREW_RANKS_MAX] = {2, 2, 2, 2};
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    TRY(compare_both(seat, counts));
out:
    return st;
}

// Thirteen tokens of a rank in dispatches of four at most.
static void prepare_rounds(struct seat *seat)
{
    engine_set_i64(&seat->stage.engine, "max_dispatch_tokens_per_rank", 4);
    engine_set_i64(&seat->stage.engine, "dispatch_rounds_max", 4);
}

static int play_rounds(struct seat *seat)
{
    static const int64_t counts[CREW_RANKS_MAX] = {13, 3};
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    TRY(compare_both(seat, counts));
out:
    return st;
}

static int visit_forward(const char *name, struct check *check)
{
    const struct crew_job padded = {.dispatcher = name,
                                    .ranks = CREW_RANKS_MAX,
                                    .dp_size = 1,
                                    .prepare = prepare_padded,
                                    .play = play_padded};
    const struct crew_job rounds = {.dispatcher = name,
                                    .ranks = 2,
                                    .dp_size = 2,
                                    .prepare = prepare_rounds,
                                    .play = play_rounds};
    int st = VERDICT_PASS;

    for (int32_t ranks = 2; ranks <= CREW_RANKS_MAX; ranks += 2) {
        const struct crew_job job = {
            .dispatcher = name, .ranks = ranks, .dp_size = ranks, .play = play_forward};

        TRY(run_if_accepted(&job, check));
    }
    TRY(run_if_accepted(&padded, check));
    TRY(run_if_accepted(&rounds, check));
out:
    return st;
}

int rule_ranks_forward(struct check *check)
{
    return crew_each_dispatcher(check, visit_forward);
}

// ---- Ranks without tokens ----------------------------------------------------------------------

static int play_idle(struct seat *seat)
{
    static const int64_t counts[][CREW_RANKS_MAX] = {{4, 0}, {0, 3}, {0, 0}, {1, 0}, {6, 2}};
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++)
        TRY(compare_both(seat, counts[i]));
out:
    return st;
}

static int visit_idle(const char *name, struct check *check)
{
    const struct crew_job job = {
        .dispatcher = name, .ranks = 2, .dp_size = 2, .tokens = {1, 0}, .play = play_idle};

    return crew_run(&job, check);
}

int rule_ranks_idle(struct check *check)
{
    return crew_each_dispatcher(check, visit_idle);
}

// ---- Halves, and two forwards in flight --------------------------------------------------------

// One layer of a slot, in the halves that the schedule asks for.
enum half { HALF_BEGIN, HALF_SEND, HALF_EXPERTS, HALF_SUM };

static int play_half(struct seat *seat, struct tokens *tokens, enum half half)
{
    static const char *const names[] = {"begin_forward", "dispatch_send",
                                        "dispatch_recv, run, combine_send", "combine_recv"};
    struct engine *engine = &seat->stage.engine;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    const moxie_step step = {
        .struct_size = sizeof step, .slot = tokens->batch.slot, .tokens = tokens->spec.count};
    const moxie_call call = {.struct_size = sizeof call, .slot = tokens->batch.slot};
    const moxie_rows *in = NULL, *out = NULL;
    moxie_error *error = engine_error(engine);
    int32_t status = MOXIE_OK;

    check_at(&seat->check, "%s of slot %d", names[half], tokens->batch.slot);
    switch (half) {
    case HALF_BEGIN:
        status = api->begin_forward(engine->dispatcher, &step, error);
        break;
    case HALF_SEND:
        status = api->dispatch_send(engine->dispatcher, &tokens->batch, error);
        break;
    case HALF_EXPERTS:
        status = api->dispatch_recv(engine->dispatcher, &tokens->batch, &in, &out, error);
        if (status == MOXIE_OK)
            status = engine->runner_info->api->run(engine->runners_made[0], &call, in, out, error);
        if (status == MOXIE_OK)
            status = api->combine_send(engine->dispatcher, &tokens->batch, error);
        break;
    default:
        status = api->combine_recv(engine->dispatcher, &tokens->batch, error);
        break;
    }
    return expect_status(&seat->check, status, MOXIE_OK, engine->text);
}

static int play_halves(struct seat *seat)
{
    struct tokens *tokens = &seat->stage.tokens;
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    // Against forward: that the numbers are right is for rule ranks-forward.
    TRY(crew_forward(seat, NULL));
    for (int64_t i = 0; i < tokens->spec.count * BASE_HIDDEN; i++)
        tokens->want[i] = tokens_y(tokens, i / BASE_HIDDEN, i % BASE_HIDDEN);
    tokens_poison(tokens);
    for (int half = HALF_BEGIN; half <= HALF_SUM; half++)
        TRY(play_half(seat, tokens, (enum half)half));
    check_at(&seat->check, "the halves, against forward");
    TRY(tokens_compare(tokens, stage_tolerance(&seat->stage.engine, tokens->spec.y_format),
                       &seat->check));
out:
    return st;
}

static int visit_halves(const char *name, struct check *check)
{
    const struct crew_job job = {
        .dispatcher = name, .ranks = 2, .dp_size = 2, .tokens = {5, 9}, .play = play_halves};

    return crew_run(&job, check);
}

int rule_ranks_halves(struct check *check)
{
    return crew_each_dispatcher(check, visit_halves);
}

static void prepare_in_flight(struct seat *seat)
{
    engine_set_i64(&seat->stage.engine, "forwards_in_flight_max", 2);
}

static int play_in_flight(struct seat *seat)
{
    // The second forward's rows travel while the first one's experts compute.
    static const struct {
        int slot;
        enum half half;
    } schedule[] = {{0, HALF_BEGIN},   {1, HALF_BEGIN}, {0, HALF_SEND}, {1, HALF_SEND},
                    {0, HALF_EXPERTS}, {0, HALF_SUM},   {0, HALF_SEND}, {1, HALF_EXPERTS},
                    {0, HALF_EXPERTS}, {1, HALF_SUM},   {0, HALF_SUM}};
    struct stage *stage = &seat->stage;
    struct tokens second = {0};
    double tolerance = 0;
    int st = VERDICT_PASS;

    TRY(crew_create(seat));
    tolerance = stage_tolerance(&stage->engine, stage->tokens.spec.y_format);
    TRY(reference_compute(&stage->tokens, &stage->layer, &seat->check));
    stage->tokens_spec.seed += 50;
    stage->tokens_spec.count = seat->rank == 0 ? 9 : 2;
    TRY(tokens_make(&second, &stage->tokens_spec, &seat->check));
    TRY(reference_compute(&second, &stage->layer, &seat->check));
    second.batch.slot = 1;
    for (size_t i = 0; i < sizeof schedule / sizeof schedule[0]; i++)
        TRY(play_half(seat, schedule[i].slot == 0 ? &stage->tokens : &second, schedule[i].half));
    check_at(&seat->check, "two layers of slot 0, with slot 1 between");
    TRY(tokens_compare(&stage->tokens, tolerance, &seat->check));
    check_at(&seat->check, "slot 1, with slot 0 between");
    TRY(tokens_compare(&second, tolerance, &seat->check));
out:
    tokens_free(&second);
    return st;
}

static int visit_in_flight(const char *name, struct check *check)
{
    const struct crew_job job = {.dispatcher = name,
                                 .ranks = 2,
                                 .dp_size = 2,
                                 .tokens = {5, 3},
                                 .prepare = prepare_in_flight,
                                 .play = play_in_flight};

    return run_if_accepted(&job, check);
}

int rule_ranks_in_flight(struct check *check)
{
    return crew_each_dispatcher(check, visit_in_flight);
}

// ---- Ranks that do not fit ---------------------------------------------------------------------

static void prepare_differ(struct seat *seat)
{
    engine_set_i64(&seat->stage.engine, "intermediate_size",
                   BASE_INTERMEDIATE * (seat->rank == 0 ? 1 : 2));
}

// Every rank's create fails with `wanted`, and leaves nothing.
static int play_refused(struct seat *seat, int32_t wanted)
{
    struct engine *engine = &seat->stage.engine;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    check_at(&seat->check, "dispatcher.create");
    engine->dispatcher = NULL;
    status = engine->dispatcher_info->api->create(engine->instance, &engine->dispatcher,
                                                  engine_error(engine));
    if (status == MOXIE_OK) TRY(broken(&seat->check, "returned OK"));
    if (wanted != MOXIE_OK) TRY(expect_status(&seat->check, status, wanted, engine->text));
    if (engine->dispatcher != NULL) TRY(broken(&seat->check, "refused, and *out is not NULL"));
out:
    return st;
}

static int play_differ(struct seat *seat)
{
    return play_refused(seat, MOXIE_E_COLLECTIVE_MISMATCH);
}

static int visit_differ(const char *name, struct check *check)
{
    const struct crew_job job = {.dispatcher = name,
                                 .ranks = 2,
                                 .dp_size = 2,
                                 .prepare = prepare_differ,
                                 .play = play_differ};

    return crew_run(&job, check);
}

int rule_ranks_differ(struct check *check)
{
    return crew_each_dispatcher(check, visit_differ);
}

static int32_t no_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    (void)ctx;
    (void)send;
    (void)recv;
    (void)bytes;
    return -1;
}

static int32_t no_barrier(void *ctx)
{
    (void)ctx;
    return -1;
}

static void prepare_unreachable(struct seat *seat)
{
    seat->stage.engine.host.all_gather = no_gather;
    seat->stage.engine.host.barrier = no_barrier;
}

static int play_unreachable(struct seat *seat)
{
    return play_refused(seat, MOXIE_OK);
}

// Without the callbacks, either validate refuses, or create does.
static int visit_bootstrap(const char *name, struct check *check)
{
    const struct crew_job unreachable = {.dispatcher = name,
                                         .ranks = 2,
                                         .dp_size = 2,
                                         .prepare = prepare_unreachable,
                                         .play = play_unreachable};
    struct stage stage = {.check = NULL};
    struct engine *engine = &stage.engine;
    int st = VERDICT_PASS;

    TRY(crew_run(&unreachable, check));
    TRY(stage_init(&stage, check));
    engine_set_i64(engine, "tp_size", 2);
    engine_set_i64(engine, "ep_size", 2);
    engine_set_i64(engine, "dp_size", 2);
    engine_set_str(engine, "dispatcher", name);
    check_at(check, "ep_size 2 without all_gather and barrier");
    if (engine_try_open(engine) != MOXIE_OK || !engine_accepted(engine)) goto out;
    TRY(engine_choose(engine));
    check_at(check, "dispatcher.create without all_gather and barrier");
    if (engine->dispatcher_info->api->create(engine->instance, &engine->dispatcher,
                                             engine_error(engine)) == MOXIE_OK)
        TRY(broken(check, "returned OK"));
out:
    stage_fini(&stage);
    return st;
}

int rule_ranks_bootstrap(struct check *check)
{
    return crew_each_dispatcher(check, visit_bootstrap);
}

// ---- A dispatcher whose host sums --------------------------------------------------------------

static void prepare_shared(struct seat *seat)
{
    seat->stage.tokens_spec.seed = 5; // the same tokens on both
}

static int play_shared(struct seat *seat)
{
    struct stage *stage = &seat->stage;
    struct tokens *tokens = &stage->tokens;
    int64_t numbers = tokens->spec.count * BASE_HIDDEN;
    double *parts = conform_room(&seat->check, 3 * numbers, sizeof *parts);
    int st = VERDICT_PASS;

    if (parts == NULL) TRY(seat->check.verdict);
    TRY(crew_create(seat));
    TRY(reference_compute(tokens, &stage->layer, &seat->check));
    TRY(engine_forward(&stage->engine, tokens));
    for (int64_t i = 0; i < numbers; i++)
        parts[2 * numbers + i] = tokens_y(tokens, i / BASE_HIDDEN, i % BASE_HIDDEN);
    if (crew_all_gather(seat, parts + 2 * numbers, parts, (uint64_t)numbers * sizeof *parts) != 0)
        TRY(skipped(&seat->check, "the other rank did not come"));
    for (int64_t i = 0; i < numbers; i++)
        number_write(tokens->y, tokens->spec.y_format, i, parts[i] + parts[numbers + i]);
    check_at(&seat->check, "the sum of both ranks");
    TRY(tokens_compare(tokens, 2 * stage_tolerance(&stage->engine, tokens->spec.y_format),
                       &seat->check));
out:
    free(parts);
    return st;
}

int rule_host_reduces(struct check *check)
{
    struct crew_job job = {
        .ranks = 2, .dp_size = 1, .tokens = {5, 5}, .prepare = prepare_shared, .play = play_shared};
    char name[ENGINE_TEXT_BYTES] = "";
    struct stage stage;
    int accepted = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(engine_open(&stage.engine));
    for (int i = 0; i < stage.engine.dispatchers_count; i++)
        if (!stage.engine.dispatchers[i]->traits->output_is_reduced)
            strncpy(name, stage.engine.dispatchers[i]->name, sizeof name - 1);
    job.dispatcher = name;
    if (name[0] != '\0') TRY(crew_accepted(&job, check, &accepted));
    check_at(check, "two ranks of a dispatcher whose host sums");
    if (!accepted) TRY(skipped(check, "are not accepted"));
    TRY(crew_run(&job, check));
out:
    stage_fini(&stage);
    return st;
}
