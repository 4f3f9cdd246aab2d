// The rule of error texts: whatever fails says so in the caller's buffer, and only there.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <string.h>

#define GUARD      0x6b
#define TEXT_BYTES 512

// Calls that fail, one after the other.
typedef int32_t (*failing_call)(struct stage *stage, moxie_error *error);

static int32_t fail_open(struct stage *stage, moxie_error *error)
{
    moxie_instance *instance = NULL;

    return stage->engine.api->open(NULL, &instance, error);
}

static int32_t fail_probe(struct stage *stage, moxie_error *error)
{
    return stage->engine.api->probe(NULL, sizeof(moxie_probe), 1, NULL, error);
}

static int32_t fail_runner(struct stage *stage, moxie_error *error)
{
    moxie_runner *runner = NULL;

    return stage->engine.runner_info->api->create(stage->engine.instance, 0, NULL, &runner, error);
}

static int32_t fail_layer(struct stage *stage, moxie_error *error)
{
    moxie_runner *runner = NULL;

    return stage->engine.runner_info->api->create(stage->engine.instance, 99,
                                                  &stage->engine.views[0].weights, &runner, error);
}

static int32_t fail_begin(struct stage *stage, moxie_error *error)
{
    const moxie_step step = {.struct_size = sizeof step, .slot = MOXIE_SLOTS_MAX};

    return stage->engine.dispatcher_info->api->begin_forward(stage->engine.dispatcher, &step,
                                                             error);
}

static int32_t fail_forward(struct stage *stage, moxie_error *error)
{
    return stage->engine.api->forward(stage->engine.dispatcher, stage->engine.runners_made[0], NULL,
                                      error);
}

static int32_t fail_captured(struct stage *stage, moxie_error *error)
{
    moxie_captured captured = {.struct_size = sizeof captured};

    return stage->engine.api->captured(stage->engine.instance, &captured, error);
}

static const struct {
    const char *name;
    failing_call call;
    int32_t wanted;
} calls[] = {
    {"open of NULL", fail_open, MOXIE_E_INVALID},
    {"probe without count", fail_probe, MOXIE_E_INVALID},
    {"runner.create of NULL", fail_runner, MOXIE_E_INVALID},
    {"runner.create of layer 99", fail_layer, MOXIE_E_INVALID},
    {"begin_forward of slot 4", fail_begin, MOXIE_E_INVALID},
    {"forward of NULL", fail_forward, MOXIE_E_INVALID},
    {"captured without the key", fail_captured, MOXIE_E_UNAVAILABLE},
};

// One failing call with a text of `capacity` bytes in the middle of guarded memory.
static int try_text(struct stage *stage, size_t index, uint32_t capacity)
{
    unsigned char memory[TEXT_BYTES + 64];
    char *text = (char *)memory + 32;
    moxie_error error = {
        .struct_size = sizeof error, .code = -7, .rank = -7, .text_bytes = capacity, .text = text};
    int32_t status = MOXIE_OK;

    memset(memory, GUARD, sizeof memory);
    check_at(stage->check, "%s, with room for %u bytes of text", calls[index].name, capacity);
    status = calls[index].call(stage, &error);
    if (status != calls[index].wanted)
        return expect_status(stage->check, status, calls[index].wanted, "");
    if (error.code != status)
        return broken(stage->check, "error.code is %d, and %d was returned", error.code, status);
    if (error.rank != -1) return broken(stage->check, "error.rank is %d, no rank", error.rank);
    for (uint32_t i = 0; i < sizeof memory; i++)
        if ((i < 32 || i >= 32 + capacity) && memory[i] != GUARD)
            return broken(stage->check, "written at byte %d of the text", (int)i - 32);
    if (capacity > 0 && memchr(text, '\0', capacity) == NULL)
        return broken(stage->check, "the text has no end within its capacity");
    if (capacity >= 64 && text[0] == '\0') return broken(stage->check, "the text is empty");
    return VERDICT_PASS;
}

int rule_error_text(struct check *check)
{
    static const uint32_t capacities[] = {TEXT_BYTES, 64, 8, 1, 0};
    struct stage stage;
    moxie_error error = {.struct_size = sizeof error, .text_bytes = 100, .text = NULL};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
        for (size_t j = 0; j < sizeof capacities / sizeof capacities[0]; j++)
            TRY(try_text(&stage, i, capacities[j]));
        check_at(check, "%s, without an error", calls[i].name);
        TRY(expect_status(check, calls[i].call(&stage, NULL), calls[i].wanted, ""));
        check_at(check, "%s, without a text", calls[i].name);
        TRY(expect_status(check, calls[i].call(&stage, &error), calls[i].wanted, ""));
        if (error.code != calls[i].wanted)
            TRY(broken(check, "error.code is %d, and %d was returned", error.code,
                       calls[i].wanted));
    }
out:
    stage_fini(&stage);
    return st;
}

// ---- Out pointers ------------------------------------------------------------------------------

// Fails when a refused call left anything but NULL.
static int check_null(struct check *check, const char *what, int32_t status, const void *out)
{
    check_at(check, "%s", what);
    if (status == MOXIE_OK || out == NULL) return VERDICT_PASS; // that it fails: other rules
    return broken(check, "is refused, and leaves something in its out pointer");
}

// The calls of a dispatcher and a runner that give something out.
static int check_created(struct stage *stage, void *mark)
{
    struct engine *engine = &stage->engine;
    const moxie_rows *in = mark, *out = mark;
    moxie_runner *runner = mark;
    moxie_batch batch = stage->tokens.batch;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    status = engine->runner_info->api->create(engine->instance, 99, &engine->views[0].weights,
                                              &runner, engine_error(engine));
    TRY(check_null(stage->check, "runner.create of layer 99", status, runner));
    runner = mark;
    status =
        engine->runner_info->api->create(engine->instance, 0, NULL, &runner, engine_error(engine));
    TRY(check_null(stage->check, "runner.create of NULL", status, runner));
    batch.slot = MOXIE_SLOTS_MAX;
    status = engine->dispatcher_info->api->dispatch(engine->dispatcher, &batch, &in, &out,
                                                    engine_error(engine));
    TRY(check_null(stage->check, "dispatch of slot 4, in", status, in));
    TRY(check_null(stage->check, "dispatch of slot 4, out", status, out));
out:
    return st;
}

int rule_out_pointers(struct check *check)
{
    static unsigned char foreign[4096]; // no instance
    struct stage stage;
    struct engine *engine = &stage.engine;
    void *mark = foreign;
    moxie_instance *instance = mark;
    const moxie_report *report = mark;
    moxie_dispatcher *dispatcher = mark;
    moxie_host host;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    host = engine->host;
    host.get_i64 = NULL;
    status = engine->api->open(&host, &instance, engine_error(engine));
    TRY(check_null(check, "open without get_i64", status, instance));
    instance = mark;
    status = engine->api->open(NULL, &instance, engine_error(engine));
    TRY(check_null(check, "open of NULL", status, instance));
    status = engine->api->validate(NULL, &report, engine_error(engine));
    TRY(check_null(check, "validate of NULL", status, report));
    TRY(check_created(&stage, mark));
    engine_destroy(engine);
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    engine_set_i64(engine, "top_k", 33);
    TRY(expect_status(check, engine_try_open(engine), MOXIE_OK, engine->text));
    status =
        engine->dispatcher_info->api->create(engine->instance, &dispatcher, engine_error(engine));
    TRY(check_null(check, "dispatcher.create of a refused configuration", status, dispatcher));
out:
    stage_fini(&stage);
    return st;
}
