// The rules of growing structs: a shorter struct than the first published one is INVALID, a longer
// one is taken when what the plugin does not know is zero, and refused with the offset otherwise.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define GROWN_BYTES 48 // a newer host's fields
#define ROOM_BYTES  512

// One struct that a host passes, in memory where it can be longer than it is.
struct sized {
    const char *name;
    uint32_t bytes;
    // Fills `at` with a struct that works.
    void (*fill)(struct stage *stage, void *at);
    // Passes it. Whatever it makes is taken down again.
    int32_t (*pass)(struct stage *stage, void *at);
    uint32_t first_bytes; // as first published; 0: still `bytes`
};

// ---- What a host passes in ---------------------------------------------------------------------

static void fill_host(struct stage *stage, void *at)
{
    memcpy(at, &stage->engine.host, sizeof stage->engine.host);
}

static int32_t pass_host(struct stage *stage, void *at)
{
    struct engine *engine = &stage->engine;
    moxie_instance *instance = NULL;
    int32_t status = engine->api->open(at, &instance, engine_error(engine));

    if (status == MOXIE_OK) (void)engine->api->close(instance, NULL);
    return status;
}

static int32_t pass_weights(struct stage *stage, void *at)
{
    struct engine *engine = &stage->engine;
    moxie_runner *runner = NULL;
    int32_t status =
        engine->runner_info->api->create(engine->instance, 0, at, &runner, engine_error(engine));

    if (status == MOXIE_OK) engine->runner_info->api->destroy(runner);
    return status;
}

static void fill_weights(struct stage *stage, void *at)
{
    memcpy(at, &stage->engine.views[0].weights, sizeof(moxie_weights));
}

static void fill_matrix(struct stage *stage, void *at)
{
    memcpy(at, &stage->engine.views[0].w2, sizeof(moxie_matrix));
}

static int32_t pass_matrix(struct stage *stage, void *at)
{
    moxie_weights weights = stage->engine.views[0].weights;

    weights.w2 = at;
    return pass_weights(stage, &weights);
}

static void fill_step(struct stage *stage, void *at)
{
    const moxie_step step = {.struct_size = sizeof step, .tokens = stage->tokens.spec.count};

    memcpy(at, &step, sizeof step);
}

static int32_t pass_step(struct stage *stage, void *at)
{
    struct engine *engine = &stage->engine;

    return engine->dispatcher_info->api->begin_forward(engine->dispatcher, at,
                                                       engine_error(engine));
}

static void fill_batch(struct stage *stage, void *at)
{
    memcpy(at, &stage->tokens.batch, sizeof(moxie_batch));
}

static int32_t pass_batch(struct stage *stage, void *at)
{
    struct engine *engine = &stage->engine;

    return engine->api->forward(engine->dispatcher, engine->runners_made[0], at,
                                engine_error(engine));
}

// What dispatch gives out, with one struct replaced on its way to run.
struct passage {
    moxie_call call;
    const moxie_rows *in, *out;
    moxie_rows rows;
};

static int32_t run_passage(struct stage *stage, struct passage *passage, const void *call,
                           const void *in)
{
    struct engine *engine = &stage->engine;

    return engine->runner_info->api->run(
        engine->runners_made[0], call != NULL ? call : &passage->call,
        in != NULL ? in : passage->in, passage->out, engine_error(engine));
}

// Goes through a layer with run's status in the middle. `what`: 0 the call, 1 the rows, 2 a slab.
static int32_t pass_run(struct stage *stage, void *at, int what)
{
    struct engine *engine = &stage->engine;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    struct passage passage = {.call = {.struct_size = sizeof passage.call}};
    moxie_batch *batch = &stage->tokens.batch;
    int32_t status =
        api->dispatch(engine->dispatcher, batch, &passage.in, &passage.out, engine_error(engine));
    uint32_t declared = 0;

    if (status != MOXIE_OK) return status;
    memcpy(&declared, at, sizeof declared);
    passage.rows = *passage.in;
    if (what == 2) {
        // The first slab at its new size, standing alone.
        memcpy((unsigned char *)at + 4, (const unsigned char *)passage.in->slabs + 4,
               sizeof(moxie_slab) - 4);
        passage.rows.slabs = at;
        passage.rows.slab_stride = declared > sizeof(moxie_slab) ? declared : sizeof(moxie_slab);
        status = run_passage(stage, &passage, NULL, &passage.rows);
    } else if (what == 1) {
        memcpy((unsigned char *)at + 4, (const unsigned char *)passage.in + 4,
               sizeof(moxie_rows) - 4);
        status = run_passage(stage, &passage, NULL, at);
    } else {
        status = run_passage(stage, &passage, at, NULL);
    }
    (void)api->combine(engine->dispatcher, batch, NULL);
    return status;
}

static void fill_call(struct stage *stage, void *at)
{
    const moxie_call call = {.struct_size = sizeof call};

    (void)stage;
    memcpy(at, &call, sizeof call);
}

static int32_t pass_call(struct stage *stage, void *at)
{
    return pass_run(stage, at, 0);
}

static void fill_rows(struct stage *stage, void *at)
{
    const moxie_rows rows = {.struct_size = sizeof rows};

    (void)stage;
    memcpy(at, &rows, sizeof rows);
}

static int32_t pass_rows(struct stage *stage, void *at)
{
    return pass_run(stage, at, 1);
}

static void fill_slab(struct stage *stage, void *at)
{
    const moxie_slab slab = {.struct_size = sizeof slab};

    (void)stage;
    memcpy(at, &slab, sizeof slab);
}

static int32_t pass_slab(struct stage *stage, void *at)
{
    return pass_run(stage, at, 2);
}

static void fill_request(struct stage *stage, void *at)
{
    const moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};

    (void)stage;
    memcpy(at, &request, sizeof request);
}

static int32_t pass_request(struct stage *stage, void *at)
{
    const moxie_api *api = NULL;
    void *symbol = dlsym(stage->engine.library.handle, "moxie_get_api_v1");
    moxie_get_api_v1_fn get_api = NULL;

    memcpy(&get_api, &symbol, sizeof get_api);
    return get_api(at, &api, engine_error(&stage->engine));
}

static const struct sized sized_in[] = {
    {"moxie_request", sizeof(moxie_request), fill_request, pass_request, 0},
    {"moxie_host", sizeof(moxie_host), fill_host, pass_host, 0},
    {"moxie_weights", sizeof(moxie_weights), fill_weights, pass_weights, 0},
    {"moxie_matrix", sizeof(moxie_matrix), fill_matrix, pass_matrix, 0},
    {"moxie_step", sizeof(moxie_step), fill_step, pass_step, 0},
    {"moxie_batch", sizeof(moxie_batch), fill_batch, pass_batch, 0},
    {"moxie_call", sizeof(moxie_call), fill_call, pass_call, 0},
    {"moxie_rows", sizeof(moxie_rows), fill_rows, pass_rows, 0},
    {"moxie_slab", sizeof(moxie_slab), fill_slab, pass_slab, 0},
};

// ---- What the plugin fills ---------------------------------------------------------------------

static void fill_nothing(struct stage *stage, void *at)
{
    (void)stage;
    (void)at;
}

static int32_t pass_probe(struct stage *stage, void *at)
{
    struct engine *engine = &stage->engine;
    uint64_t count = 0;

    return engine->api->probe(at, ROOM_BYTES, 1, &count, engine_error(engine));
}

static int32_t pass_entry(struct stage *stage, void *at)
{
    stage->engine.text[0] = '\0'; // config has no error
    return stage->engine.api->config(stage->engine.instance, 0, at);
}

static int32_t pass_stats(struct stage *stage, void *at)
{
    return stage->engine.api->stats(stage->engine.instance, at, engine_error(&stage->engine));
}

static int32_t pass_captured(struct stage *stage, void *at)
{
    return stage->engine.api->captured(stage->engine.instance, at, engine_error(&stage->engine));
}

static const struct sized sized_out[] = {
    {"moxie_probe", sizeof(moxie_probe), fill_nothing, pass_probe, 0},
    {"moxie_config_entry", sizeof(moxie_config_entry), fill_nothing, pass_entry, 0},
    {"moxie_stats", sizeof(moxie_stats), fill_nothing, pass_stats, 0},
    {"moxie_captured", sizeof(moxie_captured), fill_nothing, pass_captured,
     offsetof(moxie_captured, load)},
};

// ---- The walk ----------------------------------------------------------------------------------

// Passes the struct with this size declared. With a `dirty` offset one byte there is not zero.
static int32_t pass_sized(struct stage *stage, const struct sized *sized, uint32_t declared,
                          uint32_t dirty)
{
    union {
        uint64_t align;
        unsigned char bytes[ROOM_BYTES];
    } room = {0};

    sized->fill(stage, room.bytes);
    memcpy(room.bytes, &declared, sizeof declared);
    if (dirty != 0) room.bytes[dirty] = 1;
    return sized->pass(stage, room.bytes);
}

static int check_short(struct stage *stage, const struct sized *sized)
{
    const uint32_t first_bytes = sized->first_bytes > 0 ? sized->first_bytes : sized->bytes;
    const uint32_t sizes[] = {0, 4, first_bytes - 1, UINT32_MAX};
    int st = VERDICT_PASS;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_at(stage->check, "%s with struct_size %u", sized->name, sizes[i]);
        TRY(expect_status(stage->check, pass_sized(stage, sized, sizes[i], 0), MOXIE_E_INVALID,
                          stage->engine.text));
    }
out:
    return st;
}

static int check_long(struct stage *stage, const struct sized *sized)
{
    uint32_t grown = sized->bytes + GROWN_BYTES;

    check_at(stage->check, "%s, %d zero bytes longer", sized->name, GROWN_BYTES);
    return expect_status(stage->check, pass_sized(stage, sized, grown, 0), MOXIE_OK,
                         stage->engine.text);
}

static int check_dirty(struct stage *stage, const struct sized *sized)
{
    const uint32_t offsets[] = {sized->bytes, sized->bytes + GROWN_BYTES - 1};
    char digits[16];
    int st = VERDICT_PASS;

    for (size_t i = 0; i < sizeof offsets / sizeof offsets[0]; i++) {
        check_at(stage->check, "%s with a newer field at offset %u", sized->name, offsets[i]);
        TRY(expect_status(stage->check,
                          pass_sized(stage, sized, sized->bytes + GROWN_BYTES, offsets[i]),
                          MOXIE_E_UNSUPPORTED, stage->engine.text));
        (void)snprintf(digits, sizeof digits, "%u", offsets[i]);
        if (!text_says(stage->engine.text, ENGINE_ERROR_BYTES, digits))
            TRY(broken(stage->check, "the text does not say the offset %u: \"%.300s\"", offsets[i],
                       stage->engine.text));
    }
out:
    return st;
}

int rule_struct_sizes_in(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_step step;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    fill_step(&stage, &step);
    for (size_t i = 0; i < sizeof sized_in / sizeof sized_in[0]; i++) {
        const struct sized *sized = &sized_in[i];

        if (engine_begin(engine, &step) != MOXIE_OK)
            TRY(broken(check, "a step that works is refused: %.300s", engine->text));
        TRY(check_short(&stage, sized));
        TRY(check_long(&stage, sized));
        TRY(check_dirty(&stage, sized));
    }
out:
    stage_fini(&stage);
    return st;
}

// A struct that the plugin fills: nothing past the declared size is written, struct_size stays.
static int check_filled(struct stage *stage, const struct sized *sized, uint32_t declared)
{
    union {
        uint64_t align;
        unsigned char bytes[ROOM_BYTES];
    } room = {0};
    uint32_t after = 0;
    int st = VERDICT_PASS;

    memset(room.bytes + declared, 0xff, sizeof room.bytes - declared);
    memcpy(room.bytes, &declared, sizeof declared);
    check_at(stage->check, "%s of %u bytes", sized->name, declared);
    TRY(expect_status(stage->check, sized->pass(stage, room.bytes), MOXIE_OK, stage->engine.text));
    memcpy(&after, room.bytes, sizeof after);
    if (after != declared) TRY(broken(stage->check, "struct_size became %u", after));
    for (uint32_t i = declared; i < sizeof room.bytes; i++)
        if (room.bytes[i] != 0xff) TRY(broken(stage->check, "byte %u was written", i));
out:
    return st;
}

int rule_struct_sizes_out(struct check *check)
{
    struct stage stage;
    int captures = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    engine_set_i64(&stage.engine, "capture_routed_experts", 1);
    TRY(stage_try(&stage.engine, &captures));
    if (!captures) engine_unset(&stage.engine, "capture_routed_experts");
    TRY(stage_start(&stage));
    for (size_t i = 0; i < sizeof sized_out / sizeof sized_out[0]; i++) {
        const struct sized *sized = &sized_out[i];

        if (!captures && sized->pass == pass_captured) continue;
        TRY(check_short(&stage, sized));
        if (sized->first_bytes > 0) TRY(check_filled(&stage, sized, sized->first_bytes));
        TRY(check_filled(&stage, sized, sized->bytes));
        TRY(check_filled(&stage, sized, sized->bytes + GROWN_BYTES));
    }
out:
    stage_fini(&stage);
    return st;
}
