// Rules of lives.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <stdlib.h>
#include <string.h>

#define FOREIGN_BYTES 65536

// Reading memory that was freed is how a plugin may tell a dead handle; a sanitizer ends that.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define FREED_IS_POISON 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define FREED_IS_POISON 1
#endif
#endif

// Passes an instance that is none to every slot that takes one.
static int check_dead_instance(struct stage *stage, moxie_instance *instance)
{
    struct engine *engine = &stage->engine;
    struct check *check = stage->check;
    const moxie_report *report = NULL;
    const moxie_plan *plan = NULL;
    moxie_stats stats = {.struct_size = sizeof stats};
    moxie_captured captured = {.struct_size = sizeof captured};
    moxie_config_entry entry = {.struct_size = sizeof entry};
    int st = VERDICT_PASS;

    check_at(check, "config of a dead instance");
    TRY(expect_status(check, engine->api->config(instance, 0, &entry), MOXIE_E_INVALID, ""));
    check_at(check, "validate of a dead instance");
    TRY(expect_status(check, engine->api->validate(instance, &report, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "plan of a dead instance");
    TRY(expect_status(check, engine->api->plan(instance, &plan, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "captured of a dead instance");
    TRY(expect_status(check, engine->api->captured(instance, &captured, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "stats of a dead instance");
    TRY(expect_status(check, engine->api->stats(instance, &stats, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "close of a dead instance");
    TRY(expect_status(check,
                      instance != NULL ? engine->api->close(instance, engine_error(engine))
                                       : MOXIE_E_INVALID,
                      MOXIE_E_INVALID, engine->text));
out:
    return st;
}

// The same of a dispatcher and a runner.
static int check_dead_parts(struct stage *stage, moxie_runner *runner, moxie_dispatcher *dispatcher)
{
    struct engine *engine = &stage->engine;
    struct check *check = stage->check;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    const moxie_runner_api *runner_api = engine->runner_info->api;
    const moxie_batch *batch = &stage->tokens.batch;
    const moxie_step step = {.struct_size = sizeof step};
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_rows rows = {.struct_size = sizeof rows}, *in = NULL, *out = NULL;
    int st = VERDICT_PASS;

    check_at(check, "begin_forward of a dead dispatcher");
    TRY(expect_status(check, api->begin_forward(dispatcher, &step, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "dispatch of a dead dispatcher");
    TRY(expect_status(check, api->dispatch(dispatcher, batch, &in, &out, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "combine of a dead dispatcher");
    TRY(expect_status(check, api->combine(dispatcher, batch, engine_error(engine)), MOXIE_E_INVALID,
                      engine->text));
    check_at(check, "poll_error of a dead dispatcher");
    TRY(expect_status(check, api->poll_error(dispatcher, engine_error(engine)), MOXIE_E_INVALID,
                      engine->text));
    check_at(check, "run of a dead runner");
    TRY(expect_status(check, runner_api->run(runner, &call, &rows, &rows, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "weights_updated of a dead runner");
    TRY(expect_status(check, runner_api->weights_updated(runner, NULL, 0, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "forward of dead handles");
    TRY(expect_status(check, engine->api->forward(dispatcher, runner, batch, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    check_at(check, "destroy of a dead dispatcher and a dead runner");
    api->destroy(dispatcher);
    runner_api->destroy(runner);
out:
    return st;
}

static int check_handles(struct stage *stage, moxie_instance *instance, moxie_runner *runner,
                         moxie_dispatcher *dispatcher)
{
    int st = VERDICT_PASS;

    TRY(check_dead_instance(stage, instance));
    TRY(check_dead_parts(stage, runner, dispatcher));
out:
    return st;
}

int rule_dead_handles(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_runner *runner = NULL;
    moxie_dispatcher *dispatcher = NULL;
    moxie_instance *instance = NULL;
    void *foreign = NULL;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    check_at(check, "close of NULL");
    TRY(expect_status(check, engine->api->close(NULL, engine_error(engine)), MOXIE_OK,
                      engine->text));
    TRY(check_handles(&stage, NULL, NULL, NULL));
    // Of another library, say.
    foreign = conform_room(check, FOREIGN_BYTES, 1);
    if (foreign == NULL) TRY(check->verdict);
    TRY(check_handles(&stage, foreign, foreign, foreign));
    runner = engine->runners_made[0];
    dispatcher = engine->dispatcher;
    instance = engine->instance;
    engine_destroy(engine);
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
#ifndef FREED_IS_POISON
    TRY(check_handles(&stage, instance, runner, dispatcher));
#else
    (void)runner;
    (void)dispatcher;
    (void)instance;
#endif
out:
    stage_fini(&stage);
    free(foreign);
    return st;
}

int rule_close_refused(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    check_at(check, "close, with a runner and a dispatcher");
    TRY(expect_status(check, engine->api->close(engine->instance, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    TRY(engine_forward(engine, &stage.tokens));
    engine->dispatcher_info->api->destroy(engine->dispatcher);
    engine->dispatcher = NULL;
    check_at(check, "close, with a runner");
    TRY(expect_status(check, engine->api->close(engine->instance, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    engine_destroy(engine);
    TRY(engine_create_dispatcher(engine));
    check_at(check, "close, with a dispatcher");
    TRY(expect_status(check, engine->api->close(engine->instance, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
    engine_destroy(engine);
    check_at(check, "close, with nothing left");
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
out:
    stage_fini(&stage);
    return st;
}

int rule_close_and_reload(struct check *check)
{
    struct stage stage = {.check = NULL};
    int st = VERDICT_PASS;

    for (int i = 0; i < 3; i++) {
        TRY(i == 0 ? stage_init(&stage, check) : stage_init_again(&stage, check));
        TRY(stage_start(&stage));
        TRY(stage_compare(&stage));
        engine_destroy(&stage.engine);
        TRY(expect_status(check, engine_close(&stage.engine), MOXIE_OK, stage.engine.text));
        stage_fini(&stage);
    }
out:
    stage_fini(&stage);
    return st;
}

int rule_two_instances(struct check *check)
{
    struct stage stages[2] = {{.check = NULL}, {.check = NULL}};
    int st = VERDICT_PASS;

    for (int i = 0; i < 2; i++) {
        TRY(i == 0 ? stage_init(&stages[i], check) : stage_init_again(&stages[i], check));
        stages[i].layer_spec.seed = (uint64_t)i + 10;
        stages[i].tokens_spec.seed = (uint64_t)i + 20;
        engine_set_i64(&stages[i].engine, "forward_tokens_max", i == 0 ? 8 : BASE_TOKENS_MAX);
        stages[i].tokens_spec.count = i == 0 ? 8 : 11;
        TRY(stage_start(&stages[i]));
    }
    for (int i = 0; i < 4; i++)
        TRY(stage_compare(&stages[i % 2]));
    {
        struct engine *engine = &stages[0].engine;
        const moxie_step step = {.struct_size = sizeof step, .tokens = 8};

        TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
        check_at(check, "forward with the runner of another instance");
        TRY(expect_status(check,
                          engine->api->forward(engine->dispatcher, stages[1].engine.runners_made[0],
                                               &stages[0].tokens.batch, engine_error(engine)),
                          MOXIE_E_INVALID, engine->text));
    }
    engine_destroy(&stages[0].engine);
    TRY(expect_status(check, engine_close(&stages[0].engine), MOXIE_OK, stages[0].engine.text));
    TRY(stage_compare(&stages[1]));
out:
    stage_fini(&stages[0]);
    stage_fini(&stages[1]);
    return st;
}

// ---- Counters, capture, suspension -------------------------------------------------------------

int rule_stats(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_stats before = {.struct_size = sizeof before}, after = {.struct_size = sizeof after};
    const moxie_step much = {.struct_size = sizeof much, .tokens = BASE_TOKENS_MAX + 1};
    uint64_t planned = 0, refused = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    TRY(expect_status(check, engine->api->stats(engine->instance, &before, engine_error(engine)),
                      MOXIE_OK, engine->text));
    TRY(engine_forward(engine, &stage.tokens));
    TRY(engine_forward(engine, &stage.tokens));
    refused = engine_begin(engine, &much) == MOXIE_E_CAPACITY;
    check_at(check, "stats");
    TRY(expect_status(check, engine->api->stats(engine->instance, &after, engine_error(engine)),
                      MOXIE_OK, engine->text));
    if (after.forwards - before.forwards != 2)
        TRY(broken(check, "forwards grew by %d, after 2", (int)(after.forwards - before.forwards)));
    if (after.tokens - before.tokens != 2 * (uint64_t)stage.tokens.spec.count)
        TRY(broken(check, "tokens grew by %d, after %d", (int)(after.tokens - before.tokens),
                   (int)(2 * stage.tokens.spec.count)));
    if (after.refused - before.refused != refused)
        TRY(broken(check, "refused grew by %d, after %d", (int)(after.refused - before.refused),
                   (int)refused));
    planned = engine->plan->device_bytes + engine->plan->symmetric_bytes +
              engine->plan->pinned_bytes + engine->plan->host_bytes;
    if (after.bytes_allocated > planned || (after.bytes_allocated == 0 && planned > 0))
        TRY(broken(check, "bytes_allocated is %llu, and %llu are planned",
                   (unsigned long long)after.bytes_allocated, (unsigned long long)planned));
out:
    stage_fini(&stage);
    return st;
}

int rule_suspend(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    check_at(check, "suspend");
    status = engine->api->suspend(engine->instance, engine_error(engine));
    if (status == MOXIE_E_UNSUPPORTED) {
        check_at(check, "resume, where suspend is UNSUPPORTED");
        TRY(expect_status(check, engine->api->resume(engine->instance, engine_error(engine)),
                          MOXIE_E_UNSUPPORTED, engine->text));
    } else {
        TRY(expect_status(check, status, MOXIE_OK, engine->text));
        check_at(check, "resume");
        TRY(expect_status(check, engine->api->resume(engine->instance, engine_error(engine)),
                          MOXIE_OK, engine->text));
    }
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

// That `chosen` was captured for the stage's tokens in a layer, from row `row` on.
static int check_captured(struct stage *stage, const moxie_captured *captured, int64_t row,
                          int64_t layer, const int64_t *chosen)
{
    const moxie_tensor *ids = &captured->ids;
    const unsigned char *data = (const unsigned char *)ids->data + ids->byte_offset;

    if (ids->data == NULL || ids->ndim != 3 || ids->shape == NULL || ids->shape[1] != 2 ||
        ids->shape[2] != BASE_TOP_K || ids->shape[0] < row + stage->tokens.spec.count)
        return broken(stage->check, "ids are not [forward_tokens, 2, %d]", BASE_TOP_K);
    for (int64_t i = 0; i < stage->tokens.spec.count * BASE_TOP_K; i++) {
        int64_t token = row + i / BASE_TOP_K, place = i % BASE_TOP_K;
        int64_t at = ids->strides != NULL ? token * ids->strides[0] + layer * ids->strides[1] +
                                                place * ids->strides[2]
                                          : (token * 2 + layer) * BASE_TOP_K + place;
        int32_t seen = 0;

        memcpy(&seen, data + at * (int64_t)sizeof seen, sizeof seen);
        if (seen != chosen[i])
            return broken(stage->check,
                          "token %lld, layer %lld, place %lld: %d, and %lld was chosen",
                          (long long)(i / BASE_TOP_K), (long long)layer, (long long)place, seen,
                          (long long)chosen[i]);
    }
    return VERDICT_PASS;
}

int rule_capture(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_captured captured = {.struct_size = sizeof captured};
    const moxie_step step = {.struct_size = sizeof step, .tokens = 5, .capture_row = 4};
    int64_t first[5 * BASE_TOP_K]; // what layer 0 chose
    int accepted = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    engine_set_i64(engine, "capture_routed_experts", 1);
    engine_set_i64(engine, "num_layers", 2);
    TRY(stage_try(engine, &accepted));
    check_at(check, "capture_routed_experts");
    if (!accepted) TRY(skipped(check, "is not accepted"));
    TRY(stage_start(&stage));
    TRY(engine_create_runner(engine, &stage.layer, 1));
    TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    TRY(expect_status(check, engine_run(engine, &stage.tokens), MOXIE_OK, engine->text));
    memcpy(first, stage.tokens.experts, sizeof first);
    tokens_set(&stage.tokens, 2, 1, -1, -1);
    tokens_set(&stage.tokens, 3, 0, BASE_EXPERTS - 1, BASE_EXPERTS - 1);
    stage.tokens.batch.layer = 1;
    TRY(expect_status(check, engine_run(engine, &stage.tokens), MOXIE_OK, engine->text));
    check_at(check, "captured");
    TRY(expect_status(check,
                      engine->api->captured(engine->instance, &captured, engine_error(engine)),
                      MOXIE_OK, engine->text));
    TRY(check_captured(&stage, &captured, step.capture_row, 0, first));
    TRY(check_captured(&stage, &captured, step.capture_row, 1, stage.tokens.experts));
    captured = (moxie_captured){.struct_size = sizeof captured, .dp_rank = 1};
    check_at(check, "captured of DP rank 1 of 1");
    TRY(expect_status(check,
                      engine->api->captured(engine->instance, &captured, engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
out:
    stage_fini(&stage);
    return st;
}
