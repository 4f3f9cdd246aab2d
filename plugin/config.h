// The configuration snapshot: every key once, in one table, read once through the host's callbacks
// and never again. config, bounds, plan and validate speak of keys by id; nothing below them knows
// keys.

#ifndef MOXIE_PLUGIN_CONFIG_H
#define MOXIE_PLUGIN_CONFIG_H

#include "plugin/status.h"

// In the order of the table in config.c and of the documentation.
enum config_key {
    KEY_HIDDEN_SIZE,
    KEY_INTERMEDIATE_SIZE,
    KEY_NUM_EXPERTS,
    KEY_TOP_K,
    KEY_NUM_LAYERS,
    KEY_NUM_REDUNDANT_EXPERTS,
    KEY_NUM_FUSED_SHARED_EXPERTS,
    KEY_ACTIVATION,
    KEY_ACTIVATION_ALPHA,
    KEY_ACTIVATION_BETA,
    KEY_ACTIVATION_LIMIT,
    KEY_WEIGHT_FORMAT,
    KEY_ACTIVATION_FORMAT,
    KEY_INPUT_FORMAT,
    KEY_OUTPUT_FORMAT,
    KEY_DISPATCH_FORMAT,
    KEY_RUNNER,
    KEY_DISPATCHER,
    KEY_DEVICE,
    KEY_TRANSPORT,
    KEY_CPU_THREADS,
    KEY_DP_SIZE,
    KEY_TP_SIZE,
    KEY_EP_SIZE,
    KEY_EP_RANK,
    KEY_MAX_PREFILL_TOKENS,
    KEY_CONTEXT_LENGTH,
    KEY_CHUNKED_PREFILL_SIZE,
    KEY_PIPELINE_DYNAMIC_CHUNKING,
    KEY_PREFILL_GRAPH_MAX_TOKENS,
    KEY_DISABLE_PREFILL_GRAPH,
    KEY_DECODE_GRAPH_MAX_BATCH,
    KEY_DISABLE_DECODE_GRAPH,
    KEY_MAX_RUNNING_REQUESTS,
    KEY_WARMUP_TOKENS_MAX,
    KEY_SPECULATIVE_ALGORITHM,
    KEY_SPECULATIVE_DRAFT_TOKENS,
    KEY_DISAGGREGATION_MODE,
    KEY_FORWARD_TOKENS_MAX,
    KEY_MAX_DISPATCH_TOKENS_PER_RANK,
    KEY_DISPATCH_ROUNDS_MAX,
    KEY_FORWARDS_IN_FLIGHT_MAX,
    KEY_ROUTED_SCALING_FACTOR,
    KEY_APPLY_ROUTER_WEIGHT_ON_INPUT,
    KEY_CAPTURE_ROUTED_EXPERTS,
    KEY_COUNT_EXPERT_LOAD,
    KEY_DETERMINISTIC,
    KEY_DEVICE_MEMORY_BUDGET_BYTES,
    KEY_DISPATCH_SMS,
    KEY_TIMEOUT_MS,
    KEY_COUNT
};

enum config_type { CONFIG_I64, CONFIG_F64, CONFIG_STR };

// The words of the enum-valued string keys, by the number that config_word answers. The numbers of
// formats are abi.h's MOXIE_FORMAT_*, those of activations kernels/types.h's.
enum dispatch_format_word { DISPATCH_INPUT, DISPATCH_FP8_BLOCK128, DISPATCH_NVFP4 };
enum device_word { DEVICE_WORD_CPU, DEVICE_WORD_SM_90 };
enum transport_word { TRANSPORT_AUTO, TRANSPORT_SHM, TRANSPORT_NVLINK, TRANSPORT_NCCL };
enum disaggregation_word { DISAGGREGATION_NONE, DISAGGREGATION_PREFILL, DISAGGREGATION_DECODE };

#define CONFIG_TEXT_BYTES 64

struct config_value {
    int64_t i64;                  // CONFIG_I64; a word's number
    double f64;                   // CONFIG_F64
    char text[CONFIG_TEXT_BYTES]; // CONFIG_STR; `runner` and `dispatcher` keep any word
    int32_t found;                // 1: the host set it, 0: the default
    int32_t ok;                   // 0: refused, and the default stands in
    int32_t resolved;             // 1: was `auto`
};

struct config {
    struct config_value values[KEY_COUNT];
};

// The reasons and warnings of a configuration that is being judged. Grows on the heap, at open
// only.
struct report {
    moxie_reason *reasons;
    uint64_t reasons_count, reasons_capacity;
    moxie_reason *warnings;
    uint64_t warnings_count, warnings_capacity;
    int32_t memory_failed; // an entry was lost: open fails with MOXIE_E_MEMORY
};

// Adds a refusal; `code` is MOXIE_E_CONFIG, _UNSUPPORTED or _CAPACITY. The message says the values
// seen and what to set.
void report_reason(struct report *report, int32_t code, enum config_key key, const char *format,
                   ...) __attribute__((format(printf, 4, 5)));
void report_warning(struct report *report, enum config_key key, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void report_fini(struct report *report);

// Reads every key once. Keys that are missing, of the wrong type, out of range or an unknown word
// become reasons, and the default stands in so that later checks can go on. Never fails otherwise.
void config_read(struct config *config, const moxie_host *host, struct report *report);

int64_t config_i64(const struct config *config, enum config_key key);
double config_f64(const struct config *config, enum config_key key);
const char *config_str(const struct config *config, enum config_key key);
// The number of an enum-valued string key.
int32_t config_word(const struct config *config, enum config_key key);
// 1 when the host set the key (to whatever value).
int config_found(const struct config *config, enum config_key key);
// 1 unless the value was refused.
int config_ok(const struct config *config, enum config_key key);
// Replaces `auto` by what it became; `found` stays.
void config_resolve(struct config *config, enum config_key key, const char *word);

const char *config_name(enum config_key key);
enum config_type config_type_of(enum config_key key);
const char *config_help(enum config_key key);
// The words of an enum-valued key as "a, b, c"; "" for others.
const char *config_words(enum config_key key);
// The word that has this number; "" when there is none.
void config_word_text(enum config_key key, int32_t number, char text[CONFIG_TEXT_BYTES]);
// What the key accepts, to follow "set it to": "an integer in 1..32", "one of a, b, c".
void config_wanted(enum config_key key, char *buffer, uint64_t capacity);
// 1 when a host must set the key.
int config_required(enum config_key key);
// 1 when the host set the key to something else than its default.
int config_changed(const struct config *config, enum config_key key);
// 1 when every rank must have the same value.
int config_shared(enum config_key key);
// The value as text, NUL-terminated: integers and reals in full, strings as they are.
void config_print(const struct config *config, enum config_key key, char *buffer,
                  uint64_t capacity);

#endif
