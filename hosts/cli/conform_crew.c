// Several ranks as threads.

#include "hosts/cli/conform_crew.h"

#include "hosts/cli/fault.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define GATHER_TIMEOUT_S 20
#define TIMEOUT_MS       10000 // of a wait for a peer

// ---- The bootstrap -----------------------------------------------------------------------------

// Waits until every rank has come. 0, or -1 when one does not.
static int32_t meet(struct crew *crew)
{
    uint64_t round = crew->round;
    struct timespec until;

    if (++crew->arrived == crew->job->ranks) {
        crew->arrived = 0;
        crew->round++;
        (void)pthread_cond_broadcast(&crew->changed);
        return 0;
    }
    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += GATHER_TIMEOUT_S;
    while (crew->round == round && !crew->broken)
        if (pthread_cond_timedwait(&crew->changed, &crew->lock, &until) != 0) crew->broken = 1;
    return crew->round != round ? 0 : -1;
}

int32_t crew_all_gather(struct seat *seat, const void *send, void *recv, uint64_t bytes)
{
    struct crew *crew = seat->crew;
    int32_t answer = -1;

    (void)pthread_mutex_lock(&crew->lock);
    if (crew->broken) goto out;
    crew->sent[seat->rank] = send;
    if (crew->arrived == 0) crew->bytes = bytes;
    if (crew->bytes != bytes) crew->broken = 1;
    if (crew->broken || meet(crew) != 0) goto out;
    for (int32_t i = 0; i < crew->job->ranks; i++)
        memcpy((unsigned char *)recv + (uint64_t)i * bytes, crew->sent[i], bytes);
    // Nobody's bytes go away before all have read them.
    answer = meet(crew);
out:
    (void)pthread_cond_broadcast(&crew->changed);
    (void)pthread_mutex_unlock(&crew->lock);
    return answer;
}

static int32_t all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct engine *engine = ctx;

    return crew_all_gather(engine->seat, send, recv, bytes);
}

static int32_t barrier(void *ctx)
{
    unsigned char all[CREW_RANKS_MAX];

    return all_gather(ctx, "", all, 1);
}

static void crew_break(struct seat *seat)
{
    struct crew *crew = seat->crew;

    (void)pthread_mutex_lock(&crew->lock);
    crew->broken = 1;
    if (crew->first_broken < 0) crew->first_broken = seat->rank;
    (void)pthread_cond_broadcast(&crew->changed);
    (void)pthread_mutex_unlock(&crew->lock);
}

// ---- A rank ------------------------------------------------------------------------------------

static int seat_init(struct seat *seat)
{
    const struct crew_job *job = seat->crew->job;
    struct stage *stage = &seat->stage;
    struct engine *engine = &stage->engine;
    int st = VERDICT_PASS;

    TRY(stage_init_again(stage, &seat->check)); // whoever has a crew looked at the plugin alone
    engine->seat = seat;
    engine->host.all_gather = all_gather;
    engine->host.barrier = barrier;
    engine_set_i64(engine, "tp_size", job->ranks);
    engine_set_i64(engine, "ep_size", job->ranks);
    engine_set_i64(engine, "dp_size", job->dp_size);
    engine_set_i64(engine, "ep_rank", seat->rank);
    engine_set_i64(engine, "cpu_threads", 1);
    engine_set_i64(engine, "timeout_ms", TIMEOUT_MS);
    if (job->dispatcher != NULL) engine_set_str(engine, "dispatcher", job->dispatcher);
    stage->tokens_spec.count = job->tokens[seat->rank];
    stage->tokens_spec.seed = 100 + (uint64_t)seat->rank;
    if (job->prepare != NULL) job->prepare(seat);
out:
    return st;
}

static void *seat_main(void *arg)
{
    struct seat *seat = arg;
    struct stage *stage = &seat->stage;
    int st = VERDICT_PASS;

    TRY(seat_init(seat));
    TRY(layer_make(&stage->layer, &stage->layer_spec, &seat->check));
    TRY(tokens_make(&stage->tokens, &stage->tokens_spec, &seat->check));
    TRY(engine_open(&stage->engine));
    TRY(seat->crew->job->play(seat));
out:
    if (st != VERDICT_PASS) crew_break(seat);
    return NULL;
}

int crew_create(struct seat *seat)
{
    return engine_create(&seat->stage.engine, &seat->stage.layer, 1);
}

int crew_forward(struct seat *seat, const int64_t *counts)
{
    struct engine *engine = &seat->stage.engine;
    const moxie_step step = {
        .struct_size = sizeof step, .tokens = seat->stage.tokens.spec.count, .rank_tokens = counts};
    int st = VERDICT_PASS;

    TRY(expect_status(&seat->check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    TRY(expect_status(&seat->check, engine_run(engine, &seat->stage.tokens), MOXIE_OK,
                      engine->text));
out:
    return st;
}

// ---- The crew ----------------------------------------------------------------------------------

static void take_verdict(const struct crew *crew, const struct seat *seats, struct check *check)
{
    const struct check *seen = NULL;

    if (crew->first_broken < 0) return;
    seen = &seats[crew->first_broken].check;
    check->verdict = seen->verdict;
    (void)snprintf(check->where, sizeof check->where, "rank %d of %d, %.20s, %.80s",
                   crew->first_broken, crew->job->ranks,
                   crew->job->dispatcher != NULL ? crew->job->dispatcher : "auto", seen->where);
    memcpy(check->message, seen->message, sizeof check->message);
}

// Waits of it end by a clock that nobody sets.
static void changed_init(pthread_cond_t *changed)
{
    pthread_condattr_t attributes;

    (void)pthread_condattr_init(&attributes);
    (void)pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    (void)pthread_cond_init(changed, &attributes);
    (void)pthread_condattr_destroy(&attributes);
}

int crew_run(const struct crew_job *job, struct check *check)
{
    struct crew crew = {.job = job, .first_broken = -1};
    struct seat *seats = calloc((size_t)job->ranks, sizeof *seats);
    pthread_t threads[CREW_RANKS_MAX];
    int32_t started = 0;

    if (seats == NULL) return skipped(check, "out of memory");
    (void)pthread_mutex_init(&crew.lock, NULL);
    changed_init(&crew.changed);
    for (; started < job->ranks; started++) {
        struct seat *seat = &seats[started];

        seat->crew = &crew;
        seat->rank = started;
        seat->check = (struct check){.plugin = check->plugin, .trace = check->trace};
        if (pthread_create(&threads[started], NULL, seat_main, seat) != 0) break;
    }
    if (started < job->ranks) {
        (void)skipped(check, "no thread for rank %d", started);
        crew_break(&seats[started]);
    }
    for (int32_t i = 0; i < started; i++)
        (void)pthread_join(threads[i], NULL);
    // Dispatchers wait for no peer when they are destroyed.
    for (int32_t i = 0; i < started; i++)
        stage_fini(&seats[i].stage);
    if (check->verdict == VERDICT_PASS) take_verdict(&crew, seats, check);
    (void)pthread_cond_destroy(&crew.changed);
    (void)pthread_mutex_destroy(&crew.lock);
    free(seats);
    return check->verdict;
}

int crew_accepted(const struct crew_job *job, struct check *check, int *accepted)
{
    struct crew crew = {.job = job, .first_broken = -1};
    struct seat *seat = calloc(1, sizeof *seat);
    int st = VERDICT_PASS;

    *accepted = 0;
    if (seat == NULL) return skipped(check, "out of memory");
    seat->crew = &crew;
    seat->check = (struct check){.plugin = check->plugin, .trace = check->trace};
    TRY(seat_init(seat));
    TRY(stage_try(&seat->stage.engine, accepted));
out:
    stage_fini(&seat->stage);
    if (st != VERDICT_PASS) *check = seat->check;
    free(seat);
    return st;
}

int crew_each_dispatcher(struct check *check, int (*visit)(const char *name, struct check *check))
{
    char names[ENGINE_BACKENDS_MAX][ENGINE_TEXT_BYTES];
    struct stage stage;
    int count = 0, visited = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(engine_open(&stage.engine));
    for (int i = 0; i < stage.engine.dispatchers_count; i++)
        if (stage.engine.dispatchers[i]->traits->output_is_reduced)
            (void)snprintf(names[count++], sizeof names[0], "%s",
                           stage.engine.dispatchers[i]->name);
    for (int i = 0; i < count; i++) {
        const struct crew_job job = {.dispatcher = names[i], .ranks = 2, .dp_size = 2};
        int accepted = 0;

        TRY(crew_accepted(&job, check, &accepted));
        if (!accepted) continue;
        TRY(visit(names[i], check));
        visited++;
    }
    check_at(check, "dispatchers");
    if (visited == 0) TRY(skipped(check, "none of several ranks is accepted"));
out:
    stage_fini(&stage);
    return st;
}
