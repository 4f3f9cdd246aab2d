// The extension moxie.routing/1.

#include "plugin/routing.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/fp_mode.h"
#include "kernels/router.h"
#include "plugin/tensor.h"

#include <math.h>

_Static_assert((int)SCORING_SOFTMAX == MOXIE_SCORING_SOFTMAX &&
                   (int)SCORING_TOP_K_SOFTMAX == MOXIE_SCORING_TOP_K_SOFTMAX &&
                   (int)SCORING_SIGMOID == MOXIE_SCORING_SIGMOID,
               "kernels and ABI number scorings alike");

static int32_t check_routing(const moxie_routing *routing, int64_t experts, int64_t top_k,
                             moxie_error *error)
{
    int64_t groups = routing->groups > 1 ? routing->groups : 1;

    if (top_k < 1 || top_k > MOXIE_TOP_K_MAX || top_k > experts)
        return fail_with(error, MOXIE_E_INVALID,
                         "routing: top-k %lld of %lld experts; want 1..%lld", (long long)top_k,
                         (long long)experts,
                         (long long)(experts < MOXIE_TOP_K_MAX ? experts : MOXIE_TOP_K_MAX));
    if (experts > ROUTER_EXPERTS_MAX)
        return fail_with(error, MOXIE_E_UNSUPPORTED, "routing: %lld experts; want at most %d",
                         (long long)experts, ROUTER_EXPERTS_MAX);
    if (routing->groups < 0 || groups > ROUTER_GROUPS_MAX || experts % groups != 0)
        return fail_with(error, MOXIE_E_INVALID,
                         "routing.groups: %d; want up to %d that divide %lld experts",
                         routing->groups, ROUTER_GROUPS_MAX, (long long)experts);
    if (groups > 1 && (routing->groups_top < 1 || routing->groups_top > groups ||
                       routing->groups_top * (experts / groups) < top_k))
        return fail_with(
            error, MOXIE_E_INVALID,
            "routing.groups_top: %d of %d groups of %lld experts cannot give the top %lld",
            routing->groups_top, routing->groups, (long long)(experts / groups), (long long)top_k);
    if (groups > 1 && routing->scoring == MOXIE_SCORING_TOP_K_SOFTMAX)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "routing.groups: %d with MOXIE_SCORING_TOP_K_SOFTMAX; want 0 or 1, or "
                         "another scoring",
                         routing->groups);
    if (!isfinite((float)routing->scaling_factor))
        return fail_with(error, MOXIE_E_INVALID,
                         "routing.scaling_factor: %g; want a number that 32 bits have",
                         routing->scaling_factor);
    if (!isfinite((float)routing->renormalize_epsilon) || routing->renormalize_epsilon < 0)
        return fail_with(error, MOXIE_E_INVALID,
                         "routing.renormalize_epsilon: %g; want 0 or more, that 32 bits have",
                         routing->renormalize_epsilon);
    return MOXIE_OK;
}

// What is read while results are written lies elsewhere.
static int32_t check_apart(const moxie_routing *routing, const moxie_tensor *logits,
                           const moxie_tensor *ids, const moxie_tensor *weights, moxie_error *error)
{
    const struct {
        const char *name;
        const moxie_tensor *tensor;
    } inputs[] = {{"logits", logits}, {"routing.correction_bias", &routing->correction_bias}};

    for (size_t i = 0; i < sizeof inputs / sizeof inputs[0]; i++)
        if (tensor_overlap(ids, inputs[i].tensor) || tensor_overlap(weights, inputs[i].tensor))
            return fail_with(error, MOXIE_E_INVALID,
                             "ids and weights: they lie over %s, which is read meanwhile; give "
                             "each memory of its own",
                             inputs[i].name);
    return MOXIE_OK;
}

static int32_t check_tensors(const moxie_routing *routing, const moxie_tensor *logits,
                             const moxie_tensor *ids, const moxie_tensor *weights,
                             moxie_error *error)
{
    const moxie_device cpu = {MOXIE_DEVICE_CPU, 0};
    struct tensor_want want = {.name = "logits",
                               .shape = {-1, -1},
                               .ndim = 2,
                               .types = TENSOR_FORMATS_FLOAT,
                               .device = cpu};
    int64_t experts;
    int32_t st = MOXIE_OK;

    TRY(tensor_check(logits, &want, error));
    experts = logits->shape[1];
    if (logits->shape[0] > INT32_MAX)
        TRY(fail_with(error, MOXIE_E_CAPACITY, "logits: more than 2^31 - 1 tokens"));
    want =
        (struct tensor_want){"ids", {logits->shape[0], -1}, 2, TENSOR_INT32 | TENSOR_INT64, cpu, 0};
    TRY(tensor_check(ids, &want, error));
    want = (struct tensor_want){
        "weights", {ids->shape[0], ids->shape[1]}, 2, 1u << MOXIE_FORMAT_F32, cpu, 0};
    TRY(tensor_check(weights, &want, error));
    if (tensor_rows_overlap(ids) || tensor_rows_overlap(weights) || tensor_overlap(ids, weights))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "ids and weights: their rows overlap; give each memory of its own"));
    want = (struct tensor_want){"routing.correction_bias", {experts}, 1,
                                1u << MOXIE_FORMAT_F32,    cpu,       1};
    TRY(tensor_check(&routing->correction_bias, &want, error));
    TRY(check_apart(routing, logits, ids, weights, error));
    TRY(check_routing(routing, experts, ids->shape[1], error));
out:
    return st;
}

int32_t routing_route(const moxie_routing *routing, const moxie_tensor *logits,
                      const moxie_tensor *ids, const moxie_tensor *weights, void *stream,
                      moxie_error *error)
{
    // Routing has no instance, so no threads of its own: the caller's does all.
    struct cpu_stream cpu = {.workers = 1, .isa = (int32_t)cpu_isa_best()};
    struct router_args args;
    const fp_mode before = fp_mode_begin();
    int32_t st = MOXIE_OK;

    if (stream != NULL) TRY(fail_with(error, MOXIE_E_INVALID, "stream: want NULL on the CPU"));
    TRY(check_tensors(routing, logits, ids, weights, error));
    args = (struct router_args){
        .logits = tensor_data(logits),
        .correction_bias = (const float *)(const void *)tensor_data(&routing->correction_bias),
        .ids = tensor_data(ids),
        .weights = (float *)(void *)tensor_data(weights),
        .logits_stride_bytes = tensor_stride_bytes(logits, 0),
        .id_stride_bytes = tensor_stride_bytes(ids, 0),
        .weight_stride_bytes = tensor_stride_bytes(weights, 0),
        .logits_format = tensor_format(logits),
        .id_bytes = (int32_t)tensor_element_bytes(ids),
        .tokens = (int32_t)logits->shape[0],
        .experts = (int32_t)logits->shape[1],
        .top_k = (int32_t)ids->shape[1],
        .scoring = routing->scoring,
        .renormalize = routing->renormalize,
        .groups = routing->groups,
        .groups_top = routing->groups_top,
        .renormalize_epsilon = routing->renormalize_epsilon,
        .scaling_factor = routing->scaling_factor == 0 ? 1 : routing->scaling_factor,
    };
    if (router_cpu(&args, &cpu) != 0)
        TRY(fail_with(error, MOXIE_E_DEVICE, "routing: a CPU kernel refused its arguments"));
out:
    fp_mode_end(before);
    return st;
}
