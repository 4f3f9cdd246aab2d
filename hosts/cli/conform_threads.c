// Rules of threads: who may enter a slot, and what several may do at once.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <stdio.h>
#include <stdlib.h>

// The call returned INVALID and told the log that the host misbehaved.
static int check_thread(struct engine *engine, const char *name, int32_t status)
{
    uint64_t logged = engine->host_misbehaving;

    engine->host_misbehaving = 0;
    check_at(engine->check, "%s on a thread that thread_check refuses", name);
    if (status != MOXIE_E_INVALID)
        return expect_status(engine->check, status, MOXIE_E_INVALID, engine->text);
    if (logged == 0) return broken(engine->check, "is not logged as HOST_MISBEHAVING");
    return VERDICT_PASS;
}

// Each of these would not be INVALID on a thread that is allowed.
static int check_init_slots(struct stage *stage)
{
    struct engine *engine = &stage->engine;
    moxie_runner *runner = NULL;
    moxie_dispatcher *dispatcher = NULL;
    int st = VERDICT_PASS;

    TRY(check_thread(engine, "runner.create",
                     engine->runner_info->api->create(engine->instance, 0,
                                                      &engine->views[0].weights, &runner,
                                                      engine_error(engine))));
    TRY(check_thread(
        engine, "dispatcher.create",
        engine->dispatcher_info->api->create(engine->instance, &dispatcher, engine_error(engine))));
    TRY(check_thread(engine, "suspend",
                     engine->api->suspend(engine->instance, engine_error(engine))));
    TRY(check_thread(engine, "resume",
                     engine->api->resume(engine->instance, engine_error(engine))));
out:
    return st;
}

// The same, after begin_forward.
static int check_serial_slots(struct stage *stage)
{
    struct engine *engine = &stage->engine;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    const moxie_batch *batch = &stage->tokens.batch;
    const moxie_step step = {.struct_size = sizeof step, .tokens = stage->tokens.spec.count};
    const moxie_rows *in = NULL, *out = NULL;
    moxie_captured captured = {.struct_size = sizeof captured};
    moxie_stats stats = {.struct_size = sizeof stats};
    int st = VERDICT_PASS;

    TRY(check_thread(engine, "begin_forward",
                     api->begin_forward(engine->dispatcher, &step, engine_error(engine))));
    TRY(check_thread(engine, "forward",
                     engine->api->forward(engine->dispatcher, engine->runners_made[0], batch,
                                          engine_error(engine))));
    TRY(check_thread(engine, "dispatch_send",
                     api->dispatch_send(engine->dispatcher, batch, engine_error(engine))));
    TRY(check_thread(engine, "dispatch",
                     api->dispatch(engine->dispatcher, batch, &in, &out, engine_error(engine))));
    TRY(check_thread(engine, "weights_updated",
                     engine->runner_info->api->weights_updated(engine->runners_made[0], NULL, 0,
                                                               engine_error(engine))));
    TRY(check_thread(engine, "captured",
                     engine->api->captured(engine->instance, &captured, engine_error(engine))));
    TRY(check_thread(engine, "stats",
                     engine->api->stats(engine->instance, &stats, engine_error(engine))));
out:
    return st;
}

// A layer, of which run and combine come on a refused thread first.
static int check_layer(struct stage *stage)
{
    struct engine *engine = &stage->engine;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    const moxie_runner_api *runner_api = engine->runner_info->api;
    moxie_runner *runner = engine->runners_made[0];
    const moxie_batch *batch = &stage->tokens.batch;
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in = NULL, *out = NULL;
    int st = VERDICT_PASS;

    check_at(stage->check, "dispatch, run and combine, after refusals");
    TRY(expect_status(stage->check,
                      api->dispatch(engine->dispatcher, batch, &in, &out, engine_error(engine)),
                      MOXIE_OK, engine->text));
    engine->thread_answer = 0;
    TRY(check_thread(engine, "run", runner_api->run(runner, &call, in, out, engine_error(engine))));
    TRY(check_thread(engine, "combine",
                     api->combine(engine->dispatcher, batch, engine_error(engine))));
    engine->thread_answer = 1;
    check_at(stage->check, "run and combine, after refusals");
    TRY(expect_status(stage->check, runner_api->run(runner, &call, in, out, engine_error(engine)),
                      MOXIE_OK, engine->text));
    TRY(expect_status(stage->check, api->combine(engine->dispatcher, batch, engine_error(engine)),
                      MOXIE_OK, engine->text));
out:
    return st;
}

// What is tagged any is not asked about.
static int check_any(struct engine *engine)
{
    const moxie_report *report = NULL;
    const moxie_plan *plan = NULL;
    moxie_config_entry entry = {.struct_size = sizeof entry};

    check_at(engine->check, "slots tagged any, on a thread that thread_check refuses");
    if (engine->api->validate(engine->instance, &report, engine_error(engine)) != MOXIE_OK ||
        engine->api->plan(engine->instance, &plan, engine_error(engine)) != MOXIE_OK ||
        engine->api->config(engine->instance, 0, &entry) != MOXIE_OK ||
        engine->dispatcher_info->api->poll_error(engine->dispatcher, engine_error(engine)) !=
            MOXIE_OK)
        return broken(engine->check, "refused: %.300s", engine->text);
    return VERDICT_PASS;
}

int rule_thread_tags(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_step step = {.struct_size = sizeof step};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    step.tokens = stage.tokens.spec.count;
    TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    engine->host_misbehaving = 0;
    engine->thread_answer = 0;
    TRY(check_init_slots(&stage));
    TRY(check_serial_slots(&stage));
    TRY(check_any(engine));
    engine->thread_answer = 1;
    TRY(check_layer(&stage));
    TRY(stage_compare(&stage));
    engine_destroy(engine);
    engine->thread_answer = 0;
    TRY(check_thread(engine, "close", engine->api->close(engine->instance, engine_error(engine))));
    engine->thread_answer = 1;
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
out:
    engine->thread_answer = 1;
    stage_fini(&stage);
    return st;
}

// As many layers, each loaded by a thread of its own.
#define LOADERS       4
#define LOADER_ROUNDS 16

struct loader {
    struct stage *stage;
    pthread_mutex_t *gate;    // held by who starts the loaders
    pthread_barrier_t *round; // of all loaders
    const int *is_called_off; // read behind the gate
    struct layer_view view;
    int32_t layer;
    int32_t status; // the first that was not OK
    char text[ENGINE_ERROR_BYTES];
};

static void *load(void *ctx)
{
    struct loader *loader = ctx;
    const struct engine *engine = &loader->stage->engine;
    const moxie_runner_api *api = engine->runner_info->api;

    (void)pthread_mutex_lock(loader->gate);
    (void)pthread_mutex_unlock(loader->gate);
    for (int i = 0; i < LOADER_ROUNDS && !*loader->is_called_off; i++) {
        char text[ENGINE_ERROR_BYTES] = "";
        moxie_error error = {
            .struct_size = sizeof error, .rank = -1, .text_bytes = sizeof text, .text = text};
        moxie_runner *runner = NULL;
        int32_t status = MOXIE_OK;

        (void)pthread_barrier_wait(loader->round);
        status =
            api->create(engine->instance, loader->layer, &loader->view.weights, &runner, &error);
        (void)pthread_barrier_wait(loader->round); // all live at once
        if (status == MOXIE_OK) api->destroy(runner);
        if (status == MOXIE_OK || loader->status != MOXIE_OK) continue;
        loader->status = status;
        (void)snprintf(loader->text, sizeof loader->text, "%.*s", ENGINE_ERROR_BYTES - 1, text);
    }
    return NULL;
}

// Runs all loaders to their end. Skips where there are no threads for them.
static int run_loaders(struct stage *stage, struct loader *loaders)
{
    const moxie_bounds *bounds = stage->engine.plan->bounds;
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    pthread_barrier_t round;
    pthread_t threads[LOADERS];
    int32_t started = 0;
    int is_called_off = 0;

    if (pthread_barrier_init(&round, NULL, LOADERS) != 0)
        return skipped(stage->check, "no barrier for %d threads", LOADERS);
    (void)pthread_mutex_lock(&gate);
    for (; started < LOADERS; started++) {
        struct loader *loader = &loaders[started];

        loader->stage = stage;
        loader->gate = &gate;
        loader->round = &round;
        loader->is_called_off = &is_called_off;
        loader->layer = started;
        layer_view_of(&stage->layer, bounds->expert_first, bounds->experts_local, &loader->view);
        if (pthread_create(&threads[started], NULL, load, loader) != 0) break;
    }
    is_called_off = started < LOADERS;
    (void)pthread_mutex_unlock(&gate);
    for (int32_t i = 0; i < started; i++)
        (void)pthread_join(threads[i], NULL);
    (void)pthread_barrier_destroy(&round);
    return is_called_off ? skipped(stage->check, "no thread for layer %d", started) : VERDICT_PASS;
}

int rule_creates_at_once(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    struct loader *loaders = calloc(LOADERS, sizeof *loaders);
    uint64_t held = 0;
    int accepted = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    if (loaders == NULL) TRY(skipped(check, "out of memory"));
    engine_set_i64(engine, "num_layers", LOADERS);
    TRY(stage_try(engine, &accepted));
    check_at(check, "num_layers %d", LOADERS);
    if (!accepted) TRY(skipped(check, "is not accepted"));
    TRY(layer_make(&stage.layer, &stage.layer_spec, check));
    TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
    TRY(engine_open(engine));
    held = engine->bytes_live;
    TRY(engine_create_runner(engine, &stage.layer, 0));
    engine_destroy(engine);
    if (engine->bytes_live != held || engine->memory_note[0] != '\0')
        TRY(skipped(check, "one runner alone gives its memory back wrongly (rule memory-freed)"));
    check_at(check, "create and destroy of runners by %d threads at once", LOADERS);
    TRY(run_loaders(&stage, loaders));
    for (int32_t i = 0; i < LOADERS; i++)
        TRY(expect_status(check, loaders[i].status, MOXIE_OK, loaders[i].text));
    if (engine->bytes_live != held)
        TRY(broken(check, "%llu bytes are held afterwards, and %llu were before",
                   (unsigned long long)engine->bytes_live, (unsigned long long)held));
    if (engine->memory_note[0] != '\0') TRY(broken(check, "%s", engine->memory_note));
    TRY(engine_create(engine, &stage.layer, 1));
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    free(loaders);
    return st;
}
