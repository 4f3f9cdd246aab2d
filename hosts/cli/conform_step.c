// Rules of a step on one rank: ids, tensors, order, capacity.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <string.h>

// ---- Ids ---------------------------------------------------------------------------------------

int rule_no_expert_ids(struct check *check)
{
    static const int64_t narrow[] = {-1, BASE_EXPERTS, BASE_EXPERTS + 1, INT32_MAX, INT32_MIN};
    static const int64_t wide[] = {-1,        BASE_EXPERTS,     INT64_MAX,
                                   INT64_MIN, (int64_t)1 << 32, ((int64_t)1 << 32) + 1};
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        const int64_t *ids = bytes == 4 ? narrow : wide;
        int count = (int)(bytes == 4 ? sizeof narrow : sizeof wide) / 8;

        stage.tokens_spec.id_bytes = bytes;
        for (int i = 0; i < count; i++) {
            TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
            tokens_set(&stage.tokens, 1, 0, ids[i], -1); // beside an expert
            tokens_set(&stage.tokens, 3, 0, ids[i], -1); // alone: the row is zero
            tokens_set(&stage.tokens, 3, 1, ids[i], -1);
            TRY(reference_compute(&stage.tokens, &stage.layer, check));
            TRY(engine_forward(&stage.engine, &stage.tokens));
            check_at(check, "int%d id %lld", 8 * bytes, (long long)ids[i]);
            TRY(tokens_compare(&stage.tokens,
                               stage_tolerance(&stage.engine, stage.tokens.spec.y_format), check));
        }
    }
out:
    stage_fini(&stage);
    return st;
}

int rule_duplicate_ids(struct check *check)
{
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (int64_t token = 0; token < 3; token++)
        for (int64_t place = 0; place < BASE_TOP_K; place++)
            tokens_set(&stage.tokens, token, place, token + 1, token + 1);
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

int rule_id_spaces(struct check *check)
{
    struct stage stage;
    uint32_t spaces = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    spaces = stage.engine.dispatcher_info->traits->id_spaces;
    // On one rank without copies of experts an id is the same in every space.
    for (int32_t space = MOXIE_IDS_GLOBAL; space <= MOXIE_IDS_LOCAL; space++) {
        if ((spaces >> space & 1) == 0) continue;
        stage.tokens.batch.id_space = space;
        TRY(stage_compare(&stage));
    }
    for (int32_t space = 0; space <= 4; space += 4) {
        const moxie_step step = {.struct_size = sizeof step, .tokens = stage.tokens.spec.count};
        int32_t status = MOXIE_OK;

        TRY(expect_status(check, engine_begin(&stage.engine, &step), MOXIE_OK, stage.engine.text));
        stage.tokens.batch.id_space = space;
        status = engine_run(&stage.engine, &stage.tokens);
        check_at(check, "id_space %d", space);
        TRY(expect_status(check, status, MOXIE_E_INVALID, stage.engine.text));
    }
out:
    stage_fini(&stage);
    return st;
}

int rule_expert_map(struct check *check)
{
    // Fewer ids than experts: those past its end are no expert, whatever lies there, and even if
    // one without a map would be.
    int32_t map[] = {3, 0, 1, 2};
    int64_t count = 3;
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (int64_t token = 0; token < stage.tokens.spec.count; token++)
        for (int64_t place = 0; place < BASE_TOP_K; place++) {
            int64_t id = (token + 3 * place) % (count + 1);
            int64_t past = place == 0 ? count : 100;

            tokens_set(&stage.tokens, token, place, id < count ? id : past,
                       id < count ? map[id] : -1);
        }
    stage.tokens.batch.expert_map =
        conform_tensor(map, (moxie_dtype){MOXIE_DTYPE_INT, 32, 1}, 1, &count, NULL);
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

// ---- Tensors -----------------------------------------------------------------------------------

int rule_strided_tensors(struct check *check)
{
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    stage.tokens_spec.pad = 32;
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        stage.tokens_spec.id_bytes = bytes;
        TRY(stage_start(&stage));
        TRY(stage_compare(&stage));
        engine_destroy(&stage.engine);
        TRY(expect_status(check, engine_close(&stage.engine), MOXIE_OK, stage.engine.text));
    }
out:
    stage_fini(&stage);
    return st;
}

// What is wrong with a batch. Each change is undone by the next copy.
static void spoil(moxie_batch *batch, int which, int64_t shape[2])
{
    switch (which) {
    case 0:
        batch->x.data = NULL;
        return;
    case 1:
        shape[0] = batch->x.shape[0] + 1;
        shape[1] = batch->x.shape[1];
        batch->x.shape = shape;
        return;
    case 2:
        shape[0] = batch->y.shape[0];
        shape[1] = batch->y.shape[1] - 1;
        batch->y.shape = shape;
        return;
    case 3:
        batch->ids.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 32, 1};
        return;
    case 4:
        batch->weights.ndim = 1;
        return;
    case 5:
        batch->y.shape = NULL;
        return;
    case 6:
        batch->x.dtype.lanes = 4;
        return;
    case 7:
        batch->y.data = batch->x.data;
        return;
    case 8:
        batch->layer = 7;
        return;
    case 9:
        batch->slot = 3;
        return;
    default:
        batch->x.device.type = MOXIE_DEVICE_CUDA;
        return;
    }
}

int rule_bad_tensors(struct check *check)
{
    static const char *const names[] = {"x without data",
                                        "a row of x too many",
                                        "a column of y too few",
                                        "ids that are f32",
                                        "weights of one dimension",
                                        "y without a shape",
                                        "x with 4 lanes",
                                        "y where x is",
                                        "layer 7 of 1",
                                        "slot 3 of 1",
                                        "x on a GPU"};
    struct stage stage;
    struct engine *engine = &stage.engine;
    const moxie_step step = {.struct_size = sizeof step, .tokens = 5};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    for (int i = 0; i < (int)(sizeof names / sizeof names[0]); i++) {
        moxie_batch batch = stage.tokens.batch;
        int64_t shape[2];
        int32_t status = MOXIE_OK;

        spoil(&batch, i, shape);
        check_at(check, "%s", names[i]);
        status = engine->api->forward(engine->dispatcher, engine->runners_made[0], &batch,
                                      engine_error(engine));
        if (status != MOXIE_E_INVALID && status != MOXIE_E_UNSUPPORTED)
            TRY(expect_status(check, status, MOXIE_E_INVALID, engine->text));
        TRY(tokens_untouched(&stage.tokens, check));
    }
    check_at(check, "a good batch after the bad ones");
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

// ---- Tokens ------------------------------------------------------------------------------------

int rule_zero_tokens(struct check *check)
{
    static const int64_t counts[] = {0, 3, 0, BASE_TOKENS_MAX, 1};
    const moxie_step none = {.struct_size = sizeof none};
    moxie_batch *batch = NULL;
    struct stage stage;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        stage.tokens_spec.count = counts[i];
        TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
        TRY(stage_compare(&stage));
    }
    stage.tokens_spec.count = 0;
    TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
    TRY(engine_forward(&stage.engine, &stage.tokens));
    check_at(check, "forward of no tokens");
    TRY(tokens_untouched(&stage.tokens, check));
    batch = &stage.tokens.batch;
    batch->x.data = batch->ids.data = batch->weights.data = batch->y.data = NULL;
    TRY(expect_status(check, engine_begin(&stage.engine, &none), MOXIE_OK, stage.engine.text));
    status = engine_run(&stage.engine, &stage.tokens);
    check_at(check, "forward of no tokens, whose data are NULL");
    TRY(expect_status(check, status, MOXIE_OK, stage.engine.text));
out:
    stage_fini(&stage);
    return st;
}

int rule_tokens_valid(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    int32_t valid = 3;
    const moxie_step step = {.struct_size = sizeof step, .tokens = 5, .tokens_valid = &valid};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    for (valid = 3; valid <= 5; valid += 2) {
        TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
        for (int64_t at = valid * BASE_TOP_K; at < 5 * BASE_TOP_K; at++)
            stage.tokens.experts[at] = -1;
        TRY(reference_compute(&stage.tokens, &stage.layer, check));
        TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
        TRY(expect_status(check, engine_run(engine, &stage.tokens), MOXIE_OK, engine->text));
        check_at(check, "%d of 5 tokens valid", valid);
        TRY(tokens_compare(&stage.tokens, stage_tolerance(engine, stage.tokens.spec.y_format),
                           check));
    }
    // Read by every launch, not by begin_forward.
    TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
    for (int64_t at = 2 * BASE_TOP_K; at < 5 * BASE_TOP_K; at++)
        stage.tokens.experts[at] = -1;
    TRY(reference_compute(&stage.tokens, &stage.layer, check));
    valid = 5;
    TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    valid = 2;
    TRY(expect_status(check, engine_run(engine, &stage.tokens), MOXIE_OK, engine->text));
    check_at(check, "tokens_valid changed between begin_forward and forward");
    TRY(tokens_compare(&stage.tokens, stage_tolerance(engine, stage.tokens.spec.y_format), check));
out:
    stage_fini(&stage);
    return st;
}

int rule_capacity(struct check *check)
{
    static const int64_t counts[] = {BASE_TOKENS_MAX + 1, INT32_MAX, (int64_t)1 << 40, INT64_MAX};
    const moxie_step few = {.struct_size = sizeof few, .tokens = 1};
    struct stage stage;
    struct engine *engine = &stage.engine;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    stage.tokens_spec.count = BASE_TOKENS_MAX + 1;
    TRY(stage_start(&stage));
    TRY(expect_status(check, engine_begin(engine, &few), MOXIE_OK, engine->text));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        const moxie_step step = {.struct_size = sizeof step, .tokens = counts[i]};
        int32_t status = engine_begin(engine, &step);

        check_at(check, "begin_forward of %lld tokens, planned are %d", (long long)counts[i],
                 BASE_TOKENS_MAX);
        TRY(expect_status(check, status, MOXIE_E_CAPACITY, engine->text));
    }
    check_at(check, "forward of %d tokens, after refusals", BASE_TOKENS_MAX + 1);
    if (engine->api->forward(engine->dispatcher, engine->runners_made[0], &stage.tokens.batch,
                             engine_error(engine)) == MOXIE_OK)
        TRY(broken(check, "takes more tokens than the plan holds"));
    TRY(tokens_untouched(&stage.tokens, check));
    stage.tokens_spec.count = BASE_TOKENS_MAX;
    TRY(tokens_make(&stage.tokens, &stage.tokens_spec, check));
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

// ---- Order -------------------------------------------------------------------------------------

enum call {
    CALL_BEGIN,
    CALL_SEND,
    CALL_RECV,
    CALL_DISPATCH,
    CALL_COMBINE,
    CALL_RETURN,
    CALL_SUM,
    CALL_ANOTHER
};

static const char *const call_names[] = {
    "begin_forward", "dispatch_send", "dispatch_recv", "dispatch",
    "combine",       "combine_send",  "combine_recv",  "combine of another y"};

// The batch's shapes are the dispatcher's for one call: in and out hold without them until combine.
static int32_t run_without_batch(struct stage *stage, const moxie_rows *in, const moxie_rows *out)
{
    struct engine *engine = &stage->engine;
    struct tokens *tokens = &stage->tokens;
    const moxie_call run = {.struct_size = sizeof run};
    int64_t shapes[3][2], strides[4][2];
    int32_t status;

    memcpy(shapes, tokens->shapes, sizeof shapes);
    memcpy(strides, tokens->strides, sizeof strides);
    memset(tokens->shapes, 0xff, sizeof shapes);
    memset(tokens->strides, 0xff, sizeof strides);
    status =
        engine->runner_info->api->run(engine->runners_made[0], &run, in, out, engine_error(engine));
    memcpy(tokens->shapes, shapes, sizeof shapes);
    memcpy(tokens->strides, strides, sizeof strides);
    return status;
}

static int32_t call(struct stage *stage, enum call which)
{
    struct engine *engine = &stage->engine;
    const moxie_dispatcher_api *api = engine->dispatcher_info->api;
    const moxie_step step = {.struct_size = sizeof step, .tokens = stage->tokens.spec.count};
    const moxie_rows *in = NULL, *out = NULL;
    const moxie_batch *batch = &stage->tokens.batch;
    moxie_batch another = *batch;
    moxie_error *error = engine_error(engine);
    int32_t status = MOXIE_OK;

    switch (which) {
    case CALL_ANOTHER:
        // There is room for one row more.
        another.y.data = (unsigned char *)another.y.data +
                         BASE_HIDDEN * number_bytes(stage->tokens.spec.y_format);
        return api->combine(engine->dispatcher, &another, error);
    case CALL_BEGIN:
        return api->begin_forward(engine->dispatcher, &step, error);
    case CALL_SEND:
        return api->dispatch_send(engine->dispatcher, batch, error);
    case CALL_RETURN:
        return api->combine_send(engine->dispatcher, batch, error);
    case CALL_SUM:
        return api->combine_recv(engine->dispatcher, batch, error);
    case CALL_COMBINE:
        return api->combine(engine->dispatcher, batch, error);
    case CALL_RECV:
        status = api->dispatch_recv(engine->dispatcher, batch, &in, &out, error);
        break;
    default:
        status = api->dispatch(engine->dispatcher, batch, &in, &out, error);
        break;
    }
    if (status != MOXIE_OK) return status;
    // A dispatch is followed by run: nothing else is of interest between them.
    return run_without_batch(stage, in, out);
}

// Every call of `bad` (a set) is refused.
static int check_refused(struct stage *stage, const char *when, uint32_t bad)
{
    int st = VERDICT_PASS;

    for (int which = CALL_BEGIN; which <= CALL_ANOTHER; which++) {
        if ((bad >> which & 1) == 0) continue;
        check_at(stage->check, "%s %s", call_names[which], when);
        TRY(expect_status(stage->check, call(stage, (enum call)which), MOXIE_E_INVALID,
                          stage->engine.text));
    }
out:
    return st;
}

static int check_good(struct stage *stage, const char *when, enum call which)
{
    check_at(stage->check, "%s %s", call_names[which], when);
    return expect_status(stage->check, call(stage, which), MOXIE_OK, stage->engine.text);
}

int rule_call_order(struct check *check)
{
    // What is wrong before begin, then after each good call.
    static const struct {
        enum call good;
        const char *after;
        uint32_t bad;
    } states[] = {
        {CALL_BEGIN, "after begin_forward",
         1u << CALL_RECV | 1u << CALL_COMBINE | 1u << CALL_RETURN | 1u << CALL_SUM},
        {CALL_SEND, "after dispatch_send",
         1u << CALL_BEGIN | 1u << CALL_SEND | 1u << CALL_DISPATCH | 1u << CALL_COMBINE |
             1u << CALL_RETURN | 1u << CALL_SUM},
        {CALL_RECV, "after dispatch_recv and run",
         1u << CALL_BEGIN | 1u << CALL_SEND | 1u << CALL_RECV | 1u << CALL_DISPATCH |
             1u << CALL_SUM | 1u << CALL_ANOTHER},
        {CALL_RETURN, "after combine_send",
         1u << CALL_BEGIN | 1u << CALL_SEND | 1u << CALL_RECV | 1u << CALL_DISPATCH |
             1u << CALL_COMBINE | 1u << CALL_RETURN},
        {CALL_SUM, "after combine_recv",
         1u << CALL_RECV | 1u << CALL_COMBINE | 1u << CALL_RETURN | 1u << CALL_SUM},
    };
    const uint32_t all = (1u << (CALL_SUM + 1)) - 1;
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    TRY(check_refused(&stage, "before begin_forward", all & ~(1u << CALL_BEGIN)));
    for (size_t i = 0; i < sizeof states / sizeof states[0]; i++) {
        TRY(check_good(&stage, "in its turn", states[i].good));
        TRY(check_refused(&stage, states[i].after, states[i].bad));
    }
    check_at(check, "a layer in order, with refused calls between");
    TRY(reference_compute(&stage.tokens, &stage.layer, check));
    TRY(tokens_compare(&stage.tokens, stage_tolerance(&stage.engine, stage.tokens.spec.y_format),
                       check));
    TRY(check_good(&stage, "of the next layer", CALL_DISPATCH));
    TRY(check_good(&stage, "of the next layer", CALL_COMBINE));
out:
    stage_fini(&stage);
    return st;
}

int rule_halves(struct check *check)
{
    static const enum call whole[] = {CALL_BEGIN, CALL_DISPATCH, CALL_COMBINE};
    static const enum call halves[] = {CALL_BEGIN, CALL_SEND, CALL_RECV, CALL_RETURN, CALL_SUM};
    struct stage stage;
    double tolerance = 0;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    // Against each other: that the numbers are right is for other rules.
    TRY(engine_forward(&stage.engine, &stage.tokens));
    for (int64_t i = 0; i < stage.tokens.spec.count * BASE_HIDDEN; i++)
        stage.tokens.want[i] = tokens_y(&stage.tokens, i / BASE_HIDDEN, i % BASE_HIDDEN);
    tolerance = stage_tolerance(&stage.engine, stage.tokens.spec.y_format);
    tokens_poison(&stage.tokens);
    for (size_t i = 0; i < sizeof whole / sizeof whole[0]; i++)
        TRY(check_good(&stage, "of a layer in three calls", whole[i]));
    check_at(check, "dispatch, run, combine, against forward");
    TRY(tokens_compare(&stage.tokens, tolerance, check));
    tokens_poison(&stage.tokens);
    for (size_t i = 0; i < sizeof halves / sizeof halves[0]; i++)
        TRY(check_good(&stage, "of a layer in halves", halves[i]));
    check_at(check, "the halves, against forward");
    TRY(tokens_compare(&stage.tokens, tolerance, check));
out:
    stage_fini(&stage);
    return st;
}
