// Rules of numbers: what the experts compute, for every format and function that the plugin takes,
// against the reference in double precision.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <stdlib.h>
#include <string.h>

// One configuration and layer against the reference, when the plugin accepts it.
static int compare_when_accepted(struct stage *stage, int *compared)
{
    struct engine *engine = &stage->engine;
    struct check *check = stage->check;
    char place[CHECK_WHERE_BYTES];
    int accepted = 0;
    int st = VERDICT_PASS;

    memcpy(place, check->where, sizeof place);
    TRY(stage_try(engine, &accepted));
    if (!accepted) goto out;
    TRY(stage_start(stage));
    TRY(reference_compute(&stage->tokens, &stage->layer, check));
    TRY(engine_forward(engine, &stage->tokens));
    check_at(check, "%s, multiplied as %.20s", place, engine_config(engine, "activation_format"));
    TRY(tokens_compare(&stage->tokens, stage_tolerance(engine, stage->tokens.spec.y_format),
                       check));
    engine_destroy(engine);
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    (*compared)++;
out:
    return st;
}

int rule_plain_forward(struct check *check)
{
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

int rule_weight_formats(struct check *check)
{
    static const int32_t operands[] = {MOXIE_FORMAT_AUTO, MOXIE_FORMAT_F32, MOXIE_FORMAT_BF16,
                                       MOXIE_FORMAT_F16,  MOXIE_FORMAT_FP8, MOXIE_FORMAT_NVFP4};
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (int32_t format = MOXIE_FORMAT_F32; format <= MOXIE_FORMAT_NVFP4; format++) {
        engine_set_str(&stage.engine, "weight_format", format_key(format));
        stage.layer_spec.weight_format = format;
        for (size_t i = 0; i < sizeof operands / sizeof operands[0]; i++) {
            engine_set_str(&stage.engine, "activation_format", format_key(operands[i]));
            check_at(check, "weights %s, activation_format %s", format_key(format),
                     format_key(operands[i]));
            TRY(compare_when_accepted(&stage, &compared));
        }
    }
    check_at(check, "weight formats");
    if (compared == 0) TRY(broken(check, "none is accepted"));
out:
    stage_fini(&stage);
    return st;
}

// A layer that is stored differently.
struct variant {
    const char *what;
    int32_t order, orientation, bias_format, scale_format, scale_halves;
    int32_t weight_format; // AUTO: the base's, which must be f32, bf16 or f16 to be turned
};

int rule_weight_layouts(struct check *check)
{
    static const struct variant variants[] = {
        {"up before gate", MOXIE_ORDER_UP_GATE, 0, 0, 0, 1, 0},
        {"gate and up interleaved", MOXIE_ORDER_INTERLEAVED, 0, 0, 0, 1, 0},
        {"a row per input feature", MOXIE_ORDER_GATE_UP, MOXIE_ROWS_IN, 0, 0, 1, 0},
        {"turned and interleaved", MOXIE_ORDER_INTERLEAVED, MOXIE_ROWS_IN, 0, 0, 1, 0},
        {"f32 biases", MOXIE_ORDER_GATE_UP, 0, MOXIE_FORMAT_F32, 0, 1, 0},
        {"bf16 biases, interleaved", MOXIE_ORDER_INTERLEAVED, 0, MOXIE_FORMAT_BF16, 0, 1, 0},
        {"f16 biases, up first", MOXIE_ORDER_UP_GATE, 0, MOXIE_FORMAT_F16, 0, 1, 0},
        {"fp8_tensor, a scale per half", MOXIE_ORDER_GATE_UP, 0, 0, 0, 2, MOXIE_FORMAT_FP8_TENSOR},
        {"fp8_block128, up first", MOXIE_ORDER_UP_GATE, 0, 0, 0, 1, MOXIE_FORMAT_FP8_BLOCK128},
        {"int4_g32, bf16 scales", MOXIE_ORDER_GATE_UP, 0, 0, MOXIE_FORMAT_BF16, 1,
         MOXIE_FORMAT_INT4_G32},
        {"int4_g32, f16 scales", MOXIE_ORDER_GATE_UP, 0, 0, MOXIE_FORMAT_F16, 1,
         MOXIE_FORMAT_INT4_G32},
        {"mxfp4, interleaved", MOXIE_ORDER_INTERLEAVED, 0, 0, 0, 1, MOXIE_FORMAT_MXFP4},
        {"nvfp4, a global scale per half", MOXIE_ORDER_GATE_UP, 0, 0, 0, 2, MOXIE_FORMAT_NVFP4},
    };
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (size_t i = 0; i < sizeof variants / sizeof variants[0]; i++) {
        const struct variant *variant = &variants[i];
        int32_t format = variant->weight_format != MOXIE_FORMAT_AUTO ? variant->weight_format
                                                                     : stage.base.weight_format;

        if (variant->orientation == MOXIE_ROWS_IN && format > MOXIE_FORMAT_F16) continue;
        stage.layer_spec.weight_format = format;
        stage.layer_spec.order = variant->order;
        stage.layer_spec.orientation = variant->orientation;
        stage.layer_spec.bias_format = variant->bias_format;
        stage.layer_spec.scale_halves = variant->scale_halves;
        stage.layer_spec.scale_format =
            variant->scale_format != MOXIE_FORMAT_AUTO ? variant->scale_format : MOXIE_FORMAT_F32;
        engine_set_str(&stage.engine, "weight_format", format_key(format));
        check_at(check, "%s", variant->what);
        TRY(compare_when_accepted(&stage, &compared));
    }
out:
    stage_fini(&stage);
    return st;
}

int rule_activations(struct check *check)
{
    static const char *const activations[] = {"silu", "gelu", "gelu_tanh", "swigluoai", "relu2"};
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (size_t i = 0; i < sizeof activations / sizeof activations[0]; i++) {
        engine_set_str(&stage.engine, "activation", activations[i]);
        stage.layer_spec.activation = activations[i];
        check_at(check, "%s", activations[i]);
        TRY(compare_when_accepted(&stage, &compared));
    }
    stage.layer_spec.activation = "swigluoai";
    stage.layer_spec.alpha = 1.5;
    stage.layer_spec.beta = 0.5;
    stage.layer_spec.limit = 0.75;
    engine_set_str(&stage.engine, "activation", "swigluoai");
    engine_set_f64(&stage.engine, "activation_alpha", 1.5);
    engine_set_f64(&stage.engine, "activation_beta", 0.5);
    engine_set_f64(&stage.engine, "activation_limit", 0.75);
    check_at(check, "swigluoai with alpha 1.5, beta 0.5, limit 0.75");
    TRY(compare_when_accepted(&stage, &compared));
    check_at(check, "activations");
    if (compared == 0) TRY(broken(check, "none is accepted"));
out:
    stage_fini(&stage);
    return st;
}

int rule_number_formats(struct check *check)
{
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (int32_t x = MOXIE_FORMAT_F32; x <= MOXIE_FORMAT_F16; x++)
        for (int32_t y = MOXIE_FORMAT_F32; y <= MOXIE_FORMAT_F16; y++)
            for (int32_t weights = MOXIE_FORMAT_F32; weights <= MOXIE_FORMAT_F16; weights++) {
                stage.tokens_spec.x_format = x;
                stage.tokens_spec.y_format = y;
                stage.tokens_spec.weight_format = weights;
                stage.tokens_spec.id_bytes = weights == MOXIE_FORMAT_BF16 ? 8 : 4;
                engine_set_str(&stage.engine, "input_format", format_key(x));
                engine_set_str(&stage.engine, "output_format", format_key(y));
                check_at(check, "x %s, y %s, router weights %s, int%d ids", format_key(x),
                         format_key(y), format_key(weights), 8 * stage.tokens_spec.id_bytes);
                TRY(compare_when_accepted(&stage, &compared));
            }
    check_at(check, "number formats");
    if (compared == 0) TRY(broken(check, "none is accepted"));
out:
    stage_fini(&stage);
    return st;
}

int rule_router_weight_on_input(struct check *check)
{
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    engine_set_i64(&stage.engine, "apply_router_weight_on_input", 1);
    check_at(check, "apply_router_weight_on_input with top_k 2");
    TRY(stage_try(&stage.engine, &compared));
    if (compared) TRY(broken(check, "is accepted; it is legal only with top_k 1"));
    engine_set_i64(&stage.engine, "top_k", 1);
    stage.tokens_spec.top_k = 1;
    stage.tokens_spec.weight_on_input = 1;
    check_at(check, "apply_router_weight_on_input with top_k 1");
    TRY(compare_when_accepted(&stage, &compared));
    if (!compared) TRY(skipped(check, "is not accepted"));
out:
    stage_fini(&stage);
    return st;
}

int rule_scaling_factor(struct check *check)
{
    struct stage stage;
    int compared = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    engine_set_f64(&stage.engine, "routed_scaling_factor", 2.5);
    stage.tokens_spec.scaling = 2.5;
    check_at(check, "routed_scaling_factor 2.5");
    TRY(compare_when_accepted(&stage, &compared));
    if (!compared) TRY(skipped(check, "is not accepted"));
out:
    stage_fini(&stage);
    return st;
}

// In place: the runner keeps the host's addresses.
static void copy_weights(struct matrix_room *to, const struct matrix_room *from)
{
    int64_t values = to->spec->experts * to->n * to->k;

    memcpy(to->exact, from->exact, (size_t)values * sizeof *to->exact);
    memcpy(to->values, from->values, (size_t)(values * number_bytes(to->spec->weight_format)));
}

int rule_weights_updated(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    const int32_t ids[] = {0, 3};
    const int32_t bad[] = {0, BASE_EXPERTS};
    struct layer other = {0};
    int st = VERDICT_PASS;

    TRY(stage_open(&stage, check));
    if (stage.base.weight_format > MOXIE_FORMAT_F16)
        TRY(skipped(check, "no plain configuration has f32, bf16 or f16 weights"));
    TRY(stage_compare(&stage));
    stage.layer_spec.seed = 77;
    TRY(layer_make(&other, &stage.layer_spec, check));
    copy_weights(&stage.layer.w1, &other.w1);
    copy_weights(&stage.layer.w2, &other.w2);
    check_at(check, "weights_updated of all");
    TRY(expect_status(check,
                      engine->runner_info->api->weights_updated(engine->runners_made[0], NULL, 0,
                                                                engine_error(engine)),
                      MOXIE_OK, engine->text));
    TRY(stage_compare(&stage));
    check_at(check, "weights_updated of two");
    TRY(expect_status(check,
                      engine->runner_info->api->weights_updated(engine->runners_made[0], ids, 2,
                                                                engine_error(engine)),
                      MOXIE_OK, engine->text));
    check_at(check, "weights_updated of an expert that is not there");
    TRY(expect_status(check,
                      engine->runner_info->api->weights_updated(engine->runners_made[0], bad, 2,
                                                                engine_error(engine)),
                      MOXIE_E_INVALID, engine->text));
out:
    stage_fini(&stage);
    layer_free(&other);
    return st;
}

int rule_deterministic(struct check *check)
{
    struct stage stage;
    unsigned char *first = NULL;
    int accepted = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    engine_set_i64(&stage.engine, "deterministic", 1);
    stage.tokens_spec.count = BASE_TOKENS_MAX;
    TRY(stage_try(&stage.engine, &accepted));
    check_at(check, "deterministic 1");
    if (!accepted) TRY(skipped(check, "is not accepted"));
    TRY(stage_start(&stage));
    TRY(engine_forward(&stage.engine, &stage.tokens));
    first = conform_room(check, (int64_t)stage.tokens.y_bytes, 1);
    if (first == NULL) TRY(check->verdict);
    memcpy(first, stage.tokens.y, stage.tokens.y_bytes);
    for (int i = 0; i < 8; i++) {
        tokens_poison(&stage.tokens);
        TRY(engine_forward(&stage.engine, &stage.tokens));
        if (memcmp(first, stage.tokens.y, stage.tokens.y_bytes) != 0)
            TRY(broken(check, "run %d gave other bits than the first", i + 2));
    }
out:
    stage_fini(&stage);
    free(first);
    return st;
}
