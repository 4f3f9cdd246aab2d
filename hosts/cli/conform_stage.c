// What most rules start from.

#include "hosts/cli/conform_stage.h"

#include "hosts/cli/fault.h"

#include <stdio.h>
#include <string.h>

void base_set(struct engine *engine, const struct base *base)
{
    engine_set_i64(engine, "hidden_size", BASE_HIDDEN);
    engine_set_i64(engine, "intermediate_size", BASE_INTERMEDIATE);
    engine_set_i64(engine, "num_experts", BASE_EXPERTS);
    engine_set_i64(engine, "top_k", BASE_TOP_K);
    engine_set_i64(engine, "forward_tokens_max", BASE_TOKENS_MAX);
    engine_set_i64(engine, "cpu_threads", 2);
    engine_set_str(engine, "weight_format", format_key(base->weight_format));
    engine_set_str(engine, "input_format", format_key(base->input_format));
    engine_set_str(engine, "output_format", format_key(base->output_format));
}

int stage_try(struct engine *engine, int *accepted)
{
    int32_t status = MOXIE_OK;

    *accepted = 0;
    status = engine_try_open(engine);
    if (status != MOXIE_OK) return expect_status(engine->check, status, MOXIE_OK, engine->text);
    *accepted = engine_accepted(engine);
    status = engine_close(engine);
    return expect_status(engine->check, status, MOXIE_OK, engine->text);
}

int base_find(struct engine *engine, struct base *base, int judge)
{
    // The most exact first.
    static const struct base bases[] = {
        {MOXIE_FORMAT_F32, MOXIE_FORMAT_F32, MOXIE_FORMAT_F32},
        {MOXIE_FORMAT_BF16, MOXIE_FORMAT_F32, MOXIE_FORMAT_F32},
        {MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16, MOXIE_FORMAT_F32},
        {MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16},
        {MOXIE_FORMAT_F16, MOXIE_FORMAT_F16, MOXIE_FORMAT_F16},
        {MOXIE_FORMAT_FP8_BLOCK128, MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16},
        {MOXIE_FORMAT_MXFP4, MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16},
        {MOXIE_FORMAT_NVFP4, MOXIE_FORMAT_BF16, MOXIE_FORMAT_BF16},
    };
    char text[400] = "";
    int st = VERDICT_PASS;

    check_at(engine->check, "plain configurations");
    for (size_t i = 0; i < sizeof bases / sizeof bases[0]; i++) {
        int accepted = 0;

        *base = bases[i];
        base_set(engine, base);
        if (engine_try_open(engine) == MOXIE_OK) {
            accepted = engine_accepted(engine);
            (void)engine_reason(engine, text, sizeof text);
        } else {
            (void)snprintf(text, sizeof text, "open: %.300s", engine->text);
        }
        (void)engine_close(engine);
        if (accepted) return VERDICT_PASS;
    }
    st = judge ? broken(engine->check, "none is accepted; of the last: %s", text)
               : skipped(engine->check, "no plain configuration is accepted (rule base-accepted)");
    return st;
}

int stage_init(struct stage *stage, struct check *check)
{
    int st = VERDICT_PASS;

    *stage = (struct stage){.check = check};
    TRY(engine_init(&stage->engine, check));
    TRY(base_find(&stage->engine, &stage->base, 0));
    stage->layer_spec = (struct layer_spec){
        .hidden = BASE_HIDDEN,
        .intermediate = BASE_INTERMEDIATE,
        .experts = BASE_EXPERTS,
        .weight_format = stage->base.weight_format,
        .order = MOXIE_ORDER_GATE_UP,
        .orientation = MOXIE_ROWS_OUT,
        .scale_format = MOXIE_FORMAT_F32,
        .scale_halves = 1,
        .activation = "silu",
        .alpha = 1.702,
        .beta = 1,
        .seed = 1,
    };
    stage->tokens_spec = (struct tokens_spec){
        .count = 5,
        .hidden = BASE_HIDDEN,
        .top_k = BASE_TOP_K,
        .experts = BASE_EXPERTS,
        .x_format = stage->base.input_format,
        .y_format = stage->base.output_format,
        .weight_format = MOXIE_FORMAT_F32,
        .id_bytes = 4,
        .scaling = 1,
        .seed = 2,
    };
out:
    return st;
}

int stage_init_again(struct stage *stage, struct check *check)
{
    char why[CHECK_MESSAGE_BYTES];
    int st = stage_init(stage, check);

    if (st != VERDICT_SKIP) return st;
    memcpy(why, check->message, sizeof why);
    check->verdict = VERDICT_PASS;
    return broken(check, "it worked before in this process, and now: %.700s", why);
}

int stage_start(struct stage *stage)
{
    int st = VERDICT_PASS;

    TRY(layer_make(&stage->layer, &stage->layer_spec, stage->check));
    TRY(tokens_make(&stage->tokens, &stage->tokens_spec, stage->check));
    TRY(engine_open(&stage->engine));
    TRY(engine_create(&stage->engine, &stage->layer, 1));
out:
    return st;
}

int stage_open(struct stage *stage, struct check *check)
{
    int st = stage_init(stage, check);

    return st != VERDICT_PASS ? st : stage_start(stage);
}

void stage_fini(struct stage *stage)
{
    engine_fini(&stage->engine);
    tokens_free(&stage->tokens);
    layer_free(&stage->layer);
}

double stage_tolerance(const struct engine *engine, int32_t output_format)
{
    // Of the operands, then of y: a few units in the last place, and what mid rows lose.
    static const double operands[] = {
        [MOXIE_FORMAT_AUTO] = 1e-5, [MOXIE_FORMAT_F32] = 1e-5,   [MOXIE_FORMAT_BF16] = 1e-2,
        [MOXIE_FORMAT_F16] = 2e-3,  [MOXIE_FORMAT_NVFP4] = 3e-1, [MOXIE_FORMAT_FP8] = 8e-2,
    };
    static const double outputs[] = {
        [MOXIE_FORMAT_F32] = 0, [MOXIE_FORMAT_BF16] = 8e-3, [MOXIE_FORMAT_F16] = 1e-3};
    int32_t operand = format_called(engine_config(engine, "activation_format"));

    if (operand < 0 || (size_t)operand >= sizeof operands / sizeof operands[0]) return 3e-1;
    return operands[operand] + outputs[output_format];
}

int stage_compare(struct stage *stage)
{
    struct engine *engine = &stage->engine;
    int st = VERDICT_PASS;

    TRY(reference_compute(&stage->tokens, &stage->layer, stage->check));
    tokens_poison(&stage->tokens);
    TRY(engine_forward(engine, &stage->tokens));
    TRY(tokens_compare(&stage->tokens, stage_tolerance(engine, stage->tokens.spec.y_format),
                       stage->check));
out:
    return st;
}
