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
    const moxie_step step = {.struct_size = sizeof step, .tokens = BASE_TOKENS_MAX + 1};

    return stage->engine.dispatcher_info->api->begin_forward(stage->engine.dispatcher, &step,
                                                             error);
}

static int32_t fail_forward(struct stage *stage, moxie_error *error)
{
    return stage->engine.api->forward(stage->engine.dispatcher, stage->engine.runners_made[0], NULL,
                                      error);
}

static int32_t fail_close(struct stage *stage, moxie_error *error)
{
    return stage->engine.api->close(stage->engine.instance, error);
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
    {"begin_forward of too many tokens", fail_begin, MOXIE_E_CAPACITY},
    {"forward of NULL", fail_forward, MOXIE_E_INVALID},
    {"close with a living runner", fail_close, MOXIE_E_INVALID},
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
