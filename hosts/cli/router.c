// The model's router.

#include "hosts/cli/router.h"

#include "hosts/cli/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static float widen_f16(uint16_t bits)
{
    int exponent = bits >> 10 & 0x1f;
    int mantissa = bits & 0x3ff;
    float magnitude = 0;

    if (exponent == 0)
        magnitude = ldexpf((float)mantissa, -24);
    else if (exponent == 31)
        magnitude = mantissa != 0 ? NAN : INFINITY;
    else
        magnitude = ldexpf((float)(mantissa + 1024), exponent - 25);
    return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

static float widen_bf16(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof value);
    return value;
}

void widen(const void *values, int32_t format, uint64_t count, float *out)
{
    const uint16_t *halves = values;

    if (format == MOXIE_FORMAT_F32) {
        memcpy(out, values, count * sizeof *out);
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        out[i] = format == MOXIE_FORMAT_BF16 ? widen_bf16(halves[i]) : widen_f16(halves[i]);
}

// What a family's router has beside its weight.
static int check_biases(const struct source *source, struct fault *fault)
{
    const struct {
        int wanted;
        const char *found, *name;
    } biases[] = {
        {source->model.router_bias, source->layout.router_bias, "router.bias"},
        {source->model.correction_bias, source->layout.correction_bias, "e_score_correction_bias"},
    };

    for (size_t i = 0; i < sizeof biases / sizeof biases[0]; i++)
        if (biases[i].wanted && biases[i].found[0] == '\0')
            return fault_set(fault, EXIT_TROUBLE,
                             "the checkpoint has no %s for this layer, which routers of the family "
                             "%s have; put topk_ids and topk_weights into the input file",
                             biases[i].name, source->model.family);
    return EXIT_OK;
}

int router_check(const struct source *source, struct fault *fault)
{
    const struct model *model = &source->model;
    char families[MODEL_FAMILIES_BYTES];

    model_families(families);
    if (model->scoring == 0)
        return fault_set(fault, EXIT_REFUSED,
                         "no router is known for the family (model_type) \"%s\", as it is for %s; "
                         "put topk_ids and topk_weights into the input file",
                         model->family, families);
    if (model->unrouted[0] != '\0')
        return fault_set(fault, EXIT_REFUSED,
                         "%s; put topk_ids and topk_weights into the input file", model->unrouted);
    if (source->layout.router_weight[0] == '\0')
        return fault_set(fault, EXIT_TROUBLE,
                         "the checkpoint has no router for this layer; put topk_ids and "
                         "topk_weights into the input file");
    if (model->groups > INT32_MAX || model->groups_top > INT32_MAX)
        return fault_set(fault, EXIT_REFUSED, "n_group and topk_group are too large");
    return check_biases(source, fault);
}

// A tensor of the router as f32 [experts, columns], or with columns 0 [experts], in new memory.
// owner: caller
static int read_f32(struct source *source, const char *name, int64_t columns, float **out,
                    struct fault *fault)
{
    const struct tensor wanted = {
        .word = WORD_F32, .ndim = columns > 0 ? 2 : 1, .shape = {source->model.experts, columns}};
    struct located located;
    int32_t format = MOXIE_FORMAT_AUTO;
    char seen_text[128], wanted_text[128];
    uint64_t count = 0;
    void *raw = NULL;
    int st = EXIT_OK;

    *out = NULL;
    TRY(checkpoint_find(&source->checkpoint, name, &located, fault));
    if (located.tensor->word == WORD_F32) format = MOXIE_FORMAT_F32;
    if (located.tensor->word == WORD_BF16) format = MOXIE_FORMAT_BF16;
    if (located.tensor->word == WORD_F16) format = MOXIE_FORMAT_F16;
    if (format == MOXIE_FORMAT_AUTO || !tensor_same_shape(located.tensor, &wanted)) {
        tensor_print(located.tensor, seen_text, sizeof seen_text);
        tensor_print(&wanted, wanted_text, sizeof wanted_text);
        TRY(fault_set(fault, EXIT_TROUBLE, "%s: tensor %s is %s; wanted is BF16, F16 or %s",
                      located.file->path, name, seen_text, wanted_text));
    }
    count = located.tensor->bytes / format_element_bytes(format);
    raw = malloc(located.tensor->bytes + 1);
    *out = malloc(count * sizeof **out + 1);
    if (raw == NULL || *out == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(safetensors_read(located.file, located.tensor, 0, located.tensor->bytes, raw, fault));
    widen(raw, format, count, *out);
out:
    free(raw);
    return st;
}

struct router {
    float *weight;     // [experts, hidden]
    float *bias;       // [experts], or NULL
    float *correction; // [experts], or NULL
};

static void router_fini(struct router *router)
{
    free(router->weight);
    free(router->bias);
    free(router->correction);
}

static int router_load(struct router *router, struct source *source, struct fault *fault)
{
    const struct expert_layout *layout = &source->layout;
    int st = EXIT_OK;

    *router = (struct router){NULL, NULL, NULL};
    TRY(read_f32(source, layout->router_weight, source->model.hidden, &router->weight, fault));
    if (layout->router_bias[0] != '\0')
        TRY(read_f32(source, layout->router_bias, 0, &router->bias, fault));
    if (layout->correction_bias[0] != '\0')
        TRY(read_f32(source, layout->correction_bias, 0, &router->correction, fault));
out:
    return st;
}

// logits [count, experts] = x * weight^T + bias, summed in double.
static void compute_logits(const struct router *router, const struct model *model, const float *x,
                           int64_t count, float *logits)
{
    for (int64_t token = 0; token < count; token++)
        for (int64_t expert = 0; expert < model->experts; expert++) {
            const float *row = x + token * model->hidden;
            const float *column = router->weight + expert * model->hidden;
            double sum = router->bias != NULL ? (double)router->bias[expert] : 0;

            for (int64_t i = 0; i < model->hidden; i++)
                sum += (double)row[i] * (double)column[i];
            logits[token * model->experts + expert] = (float)sum;
        }
}

static int choose(const struct router *router, const struct source *source,
                  const struct plugin *plugin, float *logits, struct rows *rows,
                  struct fault *fault)
{
    const struct model *model = &source->model;
    const moxie_dtype f32 = {MOXIE_DTYPE_FLOAT, 32, 1};
    const moxie_dtype i32 = {MOXIE_DTYPE_INT, 32, 1};
    int64_t logits_shape[2] = {rows->range.count, model->experts};
    int64_t k_shape[2] = {rows->range.count, model->top_k};
    int64_t bias_shape[1] = {model->experts};
    const moxie_device ram = {MOXIE_DEVICE_CPU, 0};
    moxie_tensor logits_tensor = tensor_at(ram, logits, f32, 2, logits_shape);
    moxie_tensor ids = tensor_at(ram, rows->ids, i32, 2, k_shape);
    moxie_tensor weights = tensor_at(ram, rows->weights, f32, 2, k_shape);
    moxie_routing routing = {
        .struct_size = sizeof routing,
        .scoring = model->scoring,
        .renormalize = model->renormalize,
        .groups = (int32_t)model->groups,
        .groups_top = (int32_t)model->groups_top,
        .renormalize_epsilon = model->epsilon,
        .scaling_factor = model->scaling,
    };
    const moxie_routing_api *api = plugin->api->get_extension(MOXIE_ROUTING_EXTENSION);
    struct library_error error;
    int32_t status = MOXIE_OK;

    if (api == NULL)
        return fault_set(fault, EXIT_REFUSED,
                         "the library has no " MOXIE_ROUTING_EXTENSION
                         "; put topk_ids and topk_weights into the input file");
    if (router->correction != NULL)
        routing.correction_bias = tensor_at(ram, router->correction, f32, 1, bias_shape);
    status = api->route(&routing, &logits_tensor, &ids, &weights, NULL, library_error(&error));
    if (status != MOXIE_OK) return fault_from_status(fault, status, "routing", error.text);
    return EXIT_OK;
}

int router_route(struct source *source, const struct plugin *plugin, struct rows *rows,
                 struct fault *fault)
{
    const struct model *model = &source->model;
    uint64_t numbers = (uint64_t)(rows->range.count * model->hidden);
    struct router router;
    uint64_t logits_bytes = 0;
    float *x = malloc(numbers * sizeof *x + 1);
    float *logits = NULL;
    int st = EXIT_OK;

    TRY(router_load(&router, source, fault));
    if (bytes_mul((uint64_t)rows->range.count, (uint64_t)model->experts * sizeof *logits,
                  &logits_bytes))
        logits = malloc(logits_bytes + 1);
    if (x == NULL || logits == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    widen(rows->x, source->inputs.format, numbers, x);
    compute_logits(&router, model, x, rows->range.count, logits);
    TRY(choose(&router, source, plugin, logits, rows, fault));
out:
    router_fini(&router);
    free(logits);
    free(x);
    return st;
}
