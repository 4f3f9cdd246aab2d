// Warnings: keys that are set and have no effect here, because a host may well set all it knows,
// and bounds that are valid and hardly meant.

#include "plugin/validate.h"

#include <inttypes.h>
#include <stdint.h>
#include <string.h>

static void unused_if(int condition, const struct config *config, enum config_key key,
                      const char *why, struct report *report)
{
    if (condition && config_changed(config, key))
        report_warning(report, key, "%s is unused: %s", config_name(key), why);
}

// What the host's own runner may well honour.
static void unused_runner(const struct config *config, struct report *report)
{
    static const enum config_key keys[] = {KEY_ACTIVATION,
                                           KEY_ACTIVATION_ALPHA,
                                           KEY_ACTIVATION_BETA,
                                           KEY_ACTIVATION_LIMIT,
                                           KEY_WEIGHT_FORMAT,
                                           KEY_ACTIVATION_FORMAT,
                                           KEY_ROUTED_SCALING_FACTOR,
                                           KEY_APPLY_ROUTER_WEIGHT_ON_INPUT};

    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        unused_if(!validate_computes(config), config, keys[i], "runner is none", report);
    if (!validate_computes(config) && config_i64(config, KEY_DETERMINISTIC) == 1)
        report_warning(report, KEY_DETERMINISTIC,
                       "deterministic is 1 and runner is none: it holds for what Moxie sends, "
                       "expands, folds and sums, and whether the host's own runner gives the same "
                       "bits again is its own affair");
}

static void unused_dispatch(const struct config *config, struct report *report)
{
    static const enum config_key wire[] = {KEY_DISPATCH_FORMAT, KEY_TIMEOUT_MS, KEY_TRANSPORT,
                                           KEY_DISPATCH_SMS};
    static const enum config_key rounds[] = {KEY_MAX_DISPATCH_TOKENS_PER_RANK,
                                             KEY_DISPATCH_ROUNDS_MAX};
    int32_t kind = validate_dispatcher(config);
    int alone = config_i64(config, KEY_EP_SIZE) == 1;

    if (!config_ok(config, KEY_EP_SIZE) || !config_ok(config, KEY_DEVICE)) return;
    for (size_t i = 0; i < sizeof wire / sizeof wire[0]; i++)
        unused_if(!validate_has_wire(config), config, wire[i],
                  alone ? "ep_size is 1" : "dispatcher local moves no rows", report);
    unused_if(validate_has_wire(config) && config_word(config, KEY_DEVICE) == DEVICE_WORD_CPU,
              config, KEY_DISPATCH_SMS, "device is cpu", report);
    for (int32_t i = 0; i < 2; i++) {
        unused_if(kind == DISPATCHER_LOCAL, config, rounds[i], "dispatcher is local", report);
        unused_if(kind == DISPATCHER_ALLGATHER, config, rounds[i],
                  "dispatcher allgather moves a forward in one round", report);
    }
    if (kind == DISPATCHER_ALLTOALL && config_i64(config, KEY_DISPATCH_ROUNDS_MAX) > 1)
        report_warning(
            report, KEY_DISPATCH_ROUNDS_MAX,
            "dispatch_rounds_max is %" PRId64
            ": forward() alone splits a forward; dispatch() takes the tokens of one round",
            config_i64(config, KEY_DISPATCH_ROUNDS_MAX));
}

static void unused_prefill(const struct config *config, const struct bounds *bounds,
                           struct report *report)
{
    static const enum config_key keys[] = {KEY_MAX_PREFILL_TOKENS, KEY_CONTEXT_LENGTH,
                                           KEY_CHUNKED_PREFILL_SIZE, KEY_PIPELINE_DYNAMIC_CHUNKING,
                                           KEY_PREFILL_GRAPH_MAX_TOKENS};

    if (config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_DECODE) {
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            unused_if(1, config, keys[i], "disaggregation_mode is decode", report);
        return;
    }
    unused_if(bounds->chunk > 0, config, KEY_CONTEXT_LENGTH,
              "chunking is on (chunked_prefill_size)", report);
    unused_if(bounds->chunk == 0, config, KEY_PIPELINE_DYNAMIC_CHUNKING,
              "chunking is off (chunked_prefill_size)", report);
    unused_if(config_i64(config, KEY_DISABLE_PREFILL_GRAPH) == 1, config,
              KEY_PREFILL_GRAPH_MAX_TOKENS, "disable_prefill_graph is 1", report);
}

static void unused_decode(const struct config *config, struct report *report)
{
    static const enum config_key keys[] = {KEY_DECODE_GRAPH_MAX_BATCH, KEY_MAX_RUNNING_REQUESTS,
                                           KEY_SPECULATIVE_DRAFT_TOKENS};
    const char *algorithm = config_str(config, KEY_SPECULATIVE_ALGORITHM);
    int speculates = algorithm[0] != '\0' && strcmp(algorithm, "none") != 0;

    if (config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_PREFILL) {
        for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
            unused_if(1, config, keys[i], "disaggregation_mode is prefill", report);
        return;
    }
    unused_if(config_i64(config, KEY_DISABLE_DECODE_GRAPH) == 1, config, KEY_DECODE_GRAPH_MAX_BATCH,
              "disable_decode_graph is 1", report);
    unused_if(!speculates && config_ok(config, KEY_SPECULATIVE_ALGORITHM), config,
              KEY_SPECULATIVE_DRAFT_TOKENS, "speculative_algorithm is none", report);
}

// A host that gives no bound is valid, and its first forward of two tokens is refused.
static void warn_minimum(const struct config *config, const struct bounds *bounds,
                         struct report *report)
{
    char keys[256];

    if (bounds->forward_tokens < 0 || bounds->dominant != KEY_COUNT) return;
    bounds_list_keys(config, keys, sizeof keys);
    report_warning(report, KEY_FORWARD_TOKENS_MAX,
                   "no key in effect says how many tokens a forward brings, so forward_tokens is "
                   "%" PRId64 ", and a forward of more is refused with MOXIE_E_CAPACITY: set %s, "
                   "or what it is derived from: %s",
                   bounds->forward_tokens, config_name(KEY_FORWARD_TOKENS_MAX), keys);
}

void validate_unused(const struct config *config, const struct bounds *bounds,
                     struct report *report)
{
    int64_t own = config_i64(config, KEY_FORWARD_TOKENS_MAX);

    unused_runner(config, report);
    unused_dispatch(config, report);
    unused_prefill(config, bounds, report);
    unused_decode(config, report);
    warn_minimum(config, bounds, report);
    if (own > 0 && own < bounds->derived_tokens)
        report_warning(report, KEY_FORWARD_TOKENS_MAX,
                       "forward_tokens_max %" PRId64 " is below the %" PRId64
                       " tokens derived from the other keys: a larger forward is refused with "
                       "MOXIE_E_CAPACITY",
                       own, bounds->derived_tokens);
    // A host that spreads experts itself keeps the model's top_k beside a rank's few experts.
    if (config_ok(config, KEY_TOP_K) && bounds->physical_experts >= 0 &&
        config_i64(config, KEY_TOP_K) > bounds->physical_experts)
        report_warning(report, KEY_TOP_K,
                       "top_k %" PRId64 " is more than physical_experts %" PRId64
                       ": of each token some ids must be no expert's, or one's again",
                       config_i64(config, KEY_TOP_K), bounds->physical_experts);
    if (validate_has_wire(config) && config_i64(config, KEY_TIMEOUT_MS) > INT32_MAX)
        report_warning(report, KEY_TIMEOUT_MS,
                       "timeout_ms %" PRId64 " is cut to %d, which is 24 days",
                       config_i64(config, KEY_TIMEOUT_MS), INT32_MAX);
}
