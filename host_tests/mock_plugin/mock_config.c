// The keys, and the one reading of them.

#include "host_tests/mock_plugin/mock.h"

#include <float.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum key_kind { KEY_I64, KEY_F64, KEY_WORD, KEY_TEXT };

struct key_row {
    const char *name, *help;
    const char *words; // KEY_WORD: "a b c"; KEY_TEXT: the default
    int64_t least, most, standard;
    double real;
    int32_t kind, required, per_rank;
};

#define NUMBER(key, low, high, normal)                                                             \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .least = low, .most = high,              \
        .standard = normal                                                                         \
    }
#define REQUIRED(key, high)                                                                        \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .least = 1, .most = high, .standard = 1, \
        .required = 1                                                                              \
    }
#define OF_A_RANK(key, low, high, normal)                                                          \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .least = low, .most = high,              \
        .standard = normal, .per_rank = 1                                                          \
    }
#define REAL(key, normal)                                                                          \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .real = normal, .kind = KEY_F64          \
    }
#define WORD(key, of, normal)                                                                      \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .words = of, .standard = normal,         \
        .kind = KEY_WORD                                                                           \
    }
#define TEXT(key, normal)                                                                          \
    {                                                                                              \
        .name = key, .help = "see docs/configuration.md", .words = normal, .kind = KEY_TEXT        \
    }
#define ANY INT64_MAX

static const struct key_row keys[KEY_COUNT] = {
    [KEY_HIDDEN_SIZE] = REQUIRED("hidden_size", ANY),
    [KEY_INTERMEDIATE_SIZE] = REQUIRED("intermediate_size", ANY),
    [KEY_NUM_EXPERTS] = REQUIRED("num_experts", ANY),
    [KEY_TOP_K] = REQUIRED("top_k", MOXIE_TOP_K_MAX),
    [KEY_NUM_LAYERS] = NUMBER("num_layers", 1, ANY, 1),
    [KEY_NUM_REDUNDANT_EXPERTS] = NUMBER("num_redundant_experts", 0, ANY, 0),
    [KEY_NUM_FUSED_SHARED_EXPERTS] = NUMBER("num_fused_shared_experts", 0, ANY, 0),
    [KEY_ACTIVATION] = WORD("activation", "silu gelu gelu_tanh swigluoai relu2", 0),
    [KEY_ACTIVATION_ALPHA] = REAL("activation_alpha", 1.702),
    [KEY_ACTIVATION_BETA] = REAL("activation_beta", 1.0),
    [KEY_ACTIVATION_LIMIT] = REAL("activation_limit", 0.0),
    [KEY_WEIGHT_FORMAT] = WORD("weight_format",
                               "f32 bf16 f16 fp8_tensor fp8_channel fp8_block128 int4_g32 mxfp4 "
                               "nvfp4",
                               1),
    [KEY_ACTIVATION_FORMAT] = WORD("activation_format", "auto f32 bf16 f16 fp8 nvfp4", 0),
    [KEY_INPUT_FORMAT] = WORD("input_format", "bf16 f16 f32", 0),
    [KEY_OUTPUT_FORMAT] = WORD("output_format", "bf16 f16 f32", 0),
    [KEY_DISPATCH_FORMAT] = WORD("dispatch_format", "input fp8_block128 nvfp4", 0),
    [KEY_RUNNER] = TEXT("runner", "auto"),
    [KEY_DISPATCHER] = TEXT("dispatcher", "auto"),
    [KEY_DEVICE] = WORD("device", "cpu sm_90", 0),
    [KEY_TRANSPORT] = WORD("transport", "auto shm nvlink nccl", 0),
    [KEY_CPU_THREADS] = OF_A_RANK("cpu_threads", 1, ANY, 4),
    [KEY_DP_SIZE] = NUMBER("dp_size", 1, ANY, 1),
    [KEY_TP_SIZE] = NUMBER("tp_size", 1, ANY, 1),
    [KEY_EP_SIZE] = NUMBER("ep_size", 1, MOXIE_RANKS_MAX, 1),
    [KEY_EP_RANK] = OF_A_RANK("ep_rank", 0, ANY, 0),
    [KEY_MAX_PREFILL_TOKENS] = NUMBER("max_prefill_tokens", 0, ANY, 0),
    [KEY_CONTEXT_LENGTH] = NUMBER("context_length", 0, ANY, 0),
    [KEY_CHUNKED_PREFILL_SIZE] = NUMBER("chunked_prefill_size", -1, ANY, -1),
    [KEY_PIPELINE_DYNAMIC_CHUNKING] = NUMBER("pipeline_dynamic_chunking", 0, 1, 0),
    [KEY_PREFILL_GRAPH_MAX_TOKENS] = NUMBER("prefill_graph_max_tokens", 0, ANY, 0),
    [KEY_DISABLE_PREFILL_GRAPH] = NUMBER("disable_prefill_graph", 0, 1, 0),
    [KEY_DECODE_GRAPH_MAX_BATCH] = NUMBER("decode_graph_max_batch", 0, ANY, 0),
    [KEY_DISABLE_DECODE_GRAPH] = NUMBER("disable_decode_graph", 0, 1, 0),
    [KEY_MAX_RUNNING_REQUESTS] = NUMBER("max_running_requests", 0, ANY, 0),
    [KEY_WARMUP_TOKENS_MAX] = NUMBER("warmup_tokens_max", 0, ANY, 0),
    [KEY_SPECULATIVE_ALGORITHM] = TEXT("speculative_algorithm", "none"),
    [KEY_SPECULATIVE_DRAFT_TOKENS] = NUMBER("speculative_draft_tokens", 0, ANY, 0),
    [KEY_DISAGGREGATION_MODE] = WORD("disaggregation_mode", "none prefill decode", 0),
    [KEY_FORWARD_TOKENS_MAX] = NUMBER("forward_tokens_max", 0, ANY, 0),
    [KEY_MAX_DISPATCH_TOKENS_PER_RANK] = NUMBER("max_dispatch_tokens_per_rank", 0, ANY, 0),
    [KEY_DISPATCH_ROUNDS_MAX] = NUMBER("dispatch_rounds_max", 1, ANY, 1),
    [KEY_FORWARDS_IN_FLIGHT_MAX] = NUMBER("forwards_in_flight_max", 1, MOXIE_SLOTS_MAX, 1),
    [KEY_ROUTED_SCALING_FACTOR] = REAL("routed_scaling_factor", 1.0),
    [KEY_APPLY_ROUTER_WEIGHT_ON_INPUT] = NUMBER("apply_router_weight_on_input", 0, 1, 0),
    [KEY_CAPTURE_ROUTED_EXPERTS] = NUMBER("capture_routed_experts", 0, 1, 0),
    [KEY_DETERMINISTIC] = NUMBER("deterministic", 0, 1, 0),
    [KEY_DEVICE_MEMORY_BUDGET_BYTES] = OF_A_RANK("device_memory_budget_bytes", 0, ANY, 0),
    [KEY_TIMEOUT_MS] = NUMBER("timeout_ms", 1, ANY, 30000),
};

const char *key_name(enum key key)
{
    return keys[key].name;
}

const char *key_type(enum key key)
{
    static const char *const types[] = {"i64", "f64", "str", "str"};

    return types[keys[key].kind];
}

const char *key_help(enum key key)
{
    return keys[key].help;
}

int key_is_per_rank(enum key key)
{
    return keys[key].per_rank;
}

void verdict_add(struct verdict *verdict, int32_t code, enum key key, const char *format, ...)
{
    const char *name = code == MOXIE_E_CONFIG        ? "CONFIG"
                       : code == MOXIE_E_UNSUPPORTED ? "UNSUPPORTED"
                                                     : "CAPACITY";
    va_list args;

    if (verdict->count == REASONS_MAX) return;
    if (HAS_FAULT(FAULT_ONE_REASON) && verdict->count == 1) return;
    verdict->reasons[verdict->count] = (moxie_reason){
        .struct_size = sizeof(moxie_reason),
        .code = code,
        .name = name,
        .key = keys[key].name,
        .message = verdict->messages[verdict->count],
    };
    va_start(args, format);
    (void)vsnprintf(verdict->messages[verdict->count], REASON_BYTES, format, args);
    va_end(args);
    verdict->count++;
}

// ---- Words -------------------------------------------------------------------------------------

// Word `index` of "a b c", into `text`; 0 when there are fewer.
static int word_at(const char *words, int64_t index, char text[TEXT_BYTES])
{
    size_t length;

    for (; index > 0 && words != NULL; index--) {
        words = strchr(words, ' ');
        if (words != NULL) words++;
    }
    if (words == NULL) return 0;
    length = strcspn(words, " ");
    (void)snprintf(text, TEXT_BYTES, "%.*s", (int)length, words);
    return 1;
}

static int64_t word_index(const char *words, const char *text)
{
    char word[TEXT_BYTES];

    for (int64_t i = 0; word_at(words, i, word); i++) {
        if (strcmp(word, text) == 0) return i;
    }
    return -1;
}

static void set_default(struct value *value, const struct key_row *row)
{
    *value = (struct value){.number = row->standard, .real = row->real};
    if (row->kind == KEY_WORD) (void)word_at(row->words, row->standard, value->text);
    if (row->kind == KEY_TEXT) (void)snprintf(value->text, TEXT_BYTES, "%s", row->words);
}

void value_print(const struct value *value, enum key key, char text[TEXT_BYTES])
{
    if (keys[key].kind == KEY_I64)
        (void)snprintf(text, TEXT_BYTES, "%" PRId64, value->number);
    else if (keys[key].kind == KEY_F64)
        (void)snprintf(text, TEXT_BYTES, "%.17g", value->real);
    else
        (void)snprintf(text, TEXT_BYTES, "%s", value->text);
}

// ---- Reading -----------------------------------------------------------------------------------

static void refuse(struct verdict *verdict, enum key key, struct value *value, const char *seen)
{
    const struct key_row *row = &keys[key];

    set_default(value, row);
    value->refused = 1;
    if (row->kind == KEY_I64)
        verdict_add(verdict, MOXIE_E_CONFIG, key,
                    "%s %s: set it to an integer in %" PRId64 "..%" PRId64, row->name, seen,
                    row->least, row->most);
    else if (row->kind == KEY_F64)
        verdict_add(verdict, MOXIE_E_CONFIG, key, "%s %s: set it to a finite number", row->name,
                    seen);
    else if (row->kind == KEY_WORD)
        verdict_add(verdict, MOXIE_E_CONFIG, key, "%s %s: set it to one of %s", row->name, seen,
                    row->words);
    else
        verdict_add(verdict, MOXIE_E_CONFIG, key,
                    "%s %s: set it to printable ASCII of at most %d bytes", row->name, seen,
                    TEXT_BYTES - 1);
}

// How the host's answer breaks its contract, in `breach`; "" when it does not.
static void find_breach(const moxie_host *host, const struct key_row *row,
                        const struct value *value, uint64_t length, char breach[REASON_BYTES])
{
    uint64_t written = strnlen(value->text, TEXT_BYTES);
    char other[TEXT_BYTES] = "";
    uint64_t other_length = 0;

    breach[0] = '\0';
    if (row->kind == KEY_I64 || row->kind == KEY_F64) {
        if (host->get_str(host->ctx, row->name, other, sizeof other, &other_length) ==
            MOXIE_CONFIG_FOUND)
            (void)snprintf(breach, REASON_BYTES,
                           "is a number and a string; a key of another type is WRONG_TYPE");
    } else if (written == TEXT_BYTES) {
        (void)snprintf(breach, REASON_BYTES, "has no NUL within the capacity of %d", TEXT_BYTES);
    } else if (written != (length < TEXT_BYTES ? length : TEXT_BYTES - 1)) {
        (void)snprintf(breach, REASON_BYTES, "has %" PRIu64 " bytes, and %" PRIu64 " were written",
                       length, written);
    }
}

static int printable(const char *text)
{
    for (; *text != '\0'; text++) {
        if (*text < 0x20 || *text > 0x7e) return 0;
    }
    return 1;
}

// What the host answers for one key: MOXIE_CONFIG_*.
static int32_t ask(const moxie_host *host, const struct key_row *row, struct value *value,
                   uint64_t *length)
{
    if (row->kind == KEY_I64) return host->get_i64(host->ctx, row->name, &value->number);
    if (row->kind == KEY_F64) return host->get_f64(host->ctx, row->name, &value->real);
    return host->get_str(host->ctx, row->name, value->text, TEXT_BYTES, length);
}

static void judge_value(struct verdict *verdict, enum key key, struct value *value, uint64_t length)
{
    const struct key_row *row = &keys[key];
    char seen[2 * TEXT_BYTES];

    if (row->kind == KEY_I64 && (value->number < row->least || value->number > row->most)) {
        (void)snprintf(seen, sizeof seen, "is %" PRId64, value->number);
        refuse(verdict, key, value, seen);
    } else if (row->kind == KEY_F64 &&
               !(value->real >= -(double)FLT_MAX && value->real <= (double)FLT_MAX)) {
        (void)snprintf(seen, sizeof seen, "is %g", value->real);
        refuse(verdict, key, value, seen);
    } else if (row->kind == KEY_TEXT && (length >= TEXT_BYTES || !printable(value->text))) {
        refuse(verdict, key, value, "is no name");
    } else if (row->kind == KEY_WORD) {
        (void)snprintf(seen, sizeof seen, "is '%s'", value->text);
        value->number = length < TEXT_BYTES ? word_index(row->words, value->text) : -1;
        if (value->number < 0) refuse(verdict, key, value, seen);
    }
}

// A host that misbehaves still opens; the key is refused.
static void misbehaves(const moxie_host *host, struct verdict *verdict, enum key key,
                       struct value *value, const char *breach)
{
    log_line(host, MOXIE_LOG_HOST_MISBEHAVING, "the configuration's %s %s", keys[key].name, breach);
    refuse(verdict, key, value, breach);
}

static void read_key(const moxie_host *host, enum key key, struct value *value,
                     struct verdict *verdict)
{
    const struct key_row *row = &keys[key];
    char breach[REASON_BYTES] = "";
    uint64_t length = 0;
    int32_t code;

    set_default(value, row);
    code = ask(host, row, value, &length);
    if (code == MOXIE_CONFIG_FOUND) find_breach(host, row, value, length, breach);
    if (code < MOXIE_CONFIG_FOUND || code > MOXIE_CONFIG_WRONG_TYPE)
        (void)snprintf(breach, sizeof breach, "is answered by its getter with %d", code);
    if (breach[0] != '\0') {
        misbehaves(host, verdict, key, value, breach);
    } else if (code == MOXIE_CONFIG_FOUND) {
        judge_value(verdict, key, value, length);
    } else {
        set_default(value, row);
        if (code == MOXIE_CONFIG_WRONG_TYPE && !HAS_FAULT(FAULT_WRONG_TYPE_TAKEN))
            refuse(verdict, key, value, "has the wrong type");
        else if (row->required && !HAS_FAULT(FAULT_NOTHING_REQUIRED))
            refuse(verdict, key, value, "is missing");
    }
    value->found = code != MOXIE_CONFIG_ABSENT;
}

void config_read(const moxie_host *host, struct value values[KEY_COUNT], struct verdict *verdict)
{
    for (int32_t key = 0; key < KEY_COUNT; key++)
        read_key(host, (enum key)key, &values[key], verdict);
}
