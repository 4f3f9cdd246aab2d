// The table of keys, and the one reading of it. A key's string, type, range, default, words and
// help stand here once; everyone else uses its number.

#include "plugin/config.h"

#include "kernels/types.h"
#include "plugin/log.h"

#include <float.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum key_flag {
    REQUIRED = 1,
    PER_RANK = 2, // ranks may differ in it
};

struct key_row {
    const char *name;
    const char *help;
    enum config_type type;
    uint32_t flags;         // enum key_flag
    int64_t i64, min, max;  // CONFIG_I64: default and range
    double f64, low;        // CONFIG_F64: default and lower bound; all are finite in 32 bits
    const char *text;       // CONFIG_STR: default
    const char *words;      // CONFIG_STR: "a, b, c"; NULL: any text
    const int32_t *numbers; // of the words; NULL: their positions
};

static const int32_t weight_numbers[] = {FORMAT_F32,        FORMAT_BF16,        FORMAT_F16,
                                         FORMAT_FP8_TENSOR, FORMAT_FP8_CHANNEL, FORMAT_FP8_BLOCK128,
                                         FORMAT_INT4_G32,   FORMAT_MXFP4,       FORMAT_NVFP4};
static const int32_t activation_numbers[] = {FORMAT_AUTO, FORMAT_F32, FORMAT_BF16,
                                             FORMAT_F16,  FORMAT_FP8, FORMAT_NVFP4};
static const int32_t row_numbers[] = {FORMAT_BF16, FORMAT_F16, FORMAT_F32};

static const char weight_words[] = "f32, bf16, f16, fp8_tensor, fp8_channel, fp8_block128, "
                                   "int4_g32, mxfp4, nvfp4";
static const char activation_words[] = "auto, f32, bf16, f16, fp8, nvfp4";
static const char row_words[] = "bf16, f16, f32";

#define I64(key, low_i64, high_i64, standard, key_flags, text_help)                                \
    {                                                                                              \
        .name = key, .help = text_help, .type = CONFIG_I64, .flags = key_flags, .i64 = standard,   \
        .min = low_i64, .max = high_i64                                                            \
    }
#define F64(key, low_f64, standard, text_help)                                                     \
    {                                                                                              \
        .name = key, .help = text_help, .type = CONFIG_F64, .f64 = standard, .low = low_f64        \
    }
#define STR(key, key_words, word_numbers, standard, text_help)                                     \
    {                                                                                              \
        .name = key, .help = text_help, .type = CONFIG_STR, .text = standard, .words = key_words,  \
        .numbers = word_numbers                                                                    \
    }
#define ANY INT64_MAX // no upper bound of its own

// clang-format off
static const struct key_row keys[KEY_COUNT] = {
    [KEY_HIDDEN_SIZE] = I64("hidden_size", 1, ANY, 1, REQUIRED, "columns of a token"),
    [KEY_INTERMEDIATE_SIZE] = I64("intermediate_size", 1, ANY, 1, REQUIRED,
        "columns between the two GEMMs, per expert, per rank after a tensor-parallel split"),
    [KEY_NUM_EXPERTS] = I64("num_experts", 1, ANY, 1, REQUIRED,
        "logical experts of a layer, over all ranks"),
    [KEY_TOP_K] = I64("top_k", 1, MOXIE_TOP_K_MAX, 1, REQUIRED,
        "experts of a token, fused shared ones included"),
    [KEY_NUM_LAYERS] = I64("num_layers", 1, ANY, 1, 0, "MoE layers that share this instance"),
    [KEY_NUM_REDUNDANT_EXPERTS] = I64("num_redundant_experts", 0, ANY, 0, 0,
        "copies of logical experts; physical ids are logical, then redundant, then shared"),
    [KEY_NUM_FUSED_SHARED_EXPERTS] = I64("num_fused_shared_experts", 0, ANY, 0, 0,
        "shared experts computed as routed ones"),
    [KEY_ACTIVATION] = STR("activation", "silu, gelu, gelu_tanh, swigluoai, relu2", NULL, "silu",
        "between the two GEMMs; relu2 has no gate"),
    [KEY_ACTIVATION_ALPHA] = F64("activation_alpha", -FLT_MAX, 1.702,
        "swigluoai: out = gate * sigmoid(alpha * gate) * (up + beta)"),
    [KEY_ACTIVATION_BETA] = F64("activation_beta", -FLT_MAX, 1.0,
        "swigluoai: see activation_alpha"),
    [KEY_ACTIVATION_LIMIT] = F64("activation_limit", 0.0, 0.0,
        "swigluoai: gate is clamped above, up both ways; 0 = no limit"),
    [KEY_WEIGHT_FORMAT] = STR("weight_format", weight_words, weight_numbers, "bf16",
        "number format of the expert weights"),
    [KEY_ACTIVATION_FORMAT] = STR("activation_format", activation_words, activation_numbers, "auto",
        "number format of the rows that the GEMMs multiply; the snapshot says what auto became"),
    [KEY_INPUT_FORMAT] = STR("input_format", row_words, row_numbers, "bf16",
        "number format of x"),
    [KEY_OUTPUT_FORMAT] = STR("output_format", row_words, row_numbers, "bf16",
        "number format of y, and of result rows between ranks"),
    [KEY_DISPATCH_FORMAT] = STR("dispatch_format", "input, fp8_block128, nvfp4", NULL, "input",
        "number format of dispatched rows between ranks; with fp8 weights on a GPU fp8_block128 gives "
        "the same bits as input"),
    [KEY_RUNNER] = STR("runner", NULL, NULL, "auto",
        "a registered name (moxie_cpu, moxie_cuda), auto, or none: the host's own, for which "
        "nothing is planned but what the extension moxie.expand/1 needs"),
    [KEY_DISPATCHER] = STR("dispatcher", NULL, NULL, "auto",
        "a registered name (local, allgather, alltoall); auto = local for ep_size 1, else alltoall"),
    [KEY_DEVICE] = STR("device", "cpu, sm_90", NULL, "cpu",
        "where the layers run; validate and plan go by it without looking for it"),
    [KEY_TRANSPORT] = STR("transport", "auto, shm, nvlink, nccl", NULL, "auto",
        "how rows travel between ranks: shm on CPUs, nvlink between the GPUs of a host, nccl "
        "between hosts; auto = shm or nvlink"),
    [KEY_CPU_THREADS] = I64("cpu_threads", 1, ANY, 4, PER_RANK,
        "threads that compute, the calling one included; with the host's parallel_for, "
        "tasks of a call: as many as its pool has threads"),
    [KEY_DP_SIZE] = I64("dp_size", 1, ANY, 1, 0, "data-parallel ranks of the attention"),
    [KEY_TP_SIZE] = I64("tp_size", 1, ANY, 1, 0,
        "all ranks of the MoE group; tp_size / dp_size of them share a DP rank's tokens"),
    [KEY_EP_SIZE] = I64("ep_size", 1, MOXIE_RANKS_MAX, 1, 0,
        "ranks over which the experts are spread: 1 or tp_size"),
    [KEY_EP_RANK] = I64("ep_rank", 0, ANY, 0, PER_RANK, "this rank, 0..ep_size-1"),
    [KEY_MAX_PREFILL_TOKENS] = I64("max_prefill_tokens", 0, ANY, 0, 0,
        "most prompt tokens one DP rank puts into one forward"),
    [KEY_CONTEXT_LENGTH] = I64("context_length", 0, ANY, 0, 0,
        "longest single prompt; counts when chunking is off"),
    [KEY_CHUNKED_PREFILL_SIZE] = I64("chunked_prefill_size", -1, ANY, -1, 0,
        "most tokens of one prefill chunk; -1 or 0 = chunking off"),
    [KEY_PIPELINE_DYNAMIC_CHUNKING] = I64("pipeline_dynamic_chunking", 0, 1, 0, 0,
        "1 = chunks c may grow to (5c + 3) / 4"),
    [KEY_PREFILL_GRAPH_MAX_TOKENS] = I64("prefill_graph_max_tokens", 0, ANY, 0, 0,
        "largest captured prefill graph"),
    [KEY_DISABLE_PREFILL_GRAPH] = I64("disable_prefill_graph", 0, 1, 0, 0, "1 = no prefill graphs"),
    [KEY_DECODE_GRAPH_MAX_BATCH] = I64("decode_graph_max_batch", 0, ANY, 0, 0,
        "largest captured decode batch, in requests"),
    [KEY_DISABLE_DECODE_GRAPH] = I64("disable_decode_graph", 0, 1, 0, 0, "1 = no decode graphs"),
    [KEY_MAX_RUNNING_REQUESTS] = I64("max_running_requests", 0, ANY, 0, 0,
        "most requests that decode together, per DP rank"),
    [KEY_WARMUP_TOKENS_MAX] = I64("warmup_tokens_max", 0, ANY, 0, 0,
        "largest warm-up, profile or autotune forward"),
    [KEY_SPECULATIVE_ALGORITHM] = STR("speculative_algorithm", NULL, NULL, "none",
        "none = off; any other name = on"),
    [KEY_SPECULATIVE_DRAFT_TOKENS] = I64("speculative_draft_tokens", 0, ANY, 0, 0,
        "tokens of each request in a verify step"),
    [KEY_DISAGGREGATION_MODE] = STR("disaggregation_mode", "none, prefill, decode", NULL, "none",
        "which of the two this engine does, when prefill and decode are on different ones"),
    [KEY_FORWARD_TOKENS_MAX] = I64("forward_tokens_max", 0, ANY, 0, 0,
        "the host's own bound of one DP rank's forward; above 0 it replaces the derived one"),
    [KEY_MAX_DISPATCH_TOKENS_PER_RANK] = I64("max_dispatch_tokens_per_rank", 0, ANY, 0, 0,
        "capacity of the all-to-all in tokens per source rank; 0 = derived"),
    [KEY_DISPATCH_ROUNDS_MAX] = I64("dispatch_rounds_max", 1, ANY, 1, 0,
        "most rounds that moxie_api.forward may split a forward into"),
    [KEY_FORWARDS_IN_FLIGHT_MAX] = I64("forwards_in_flight_max", 1, MOXIE_SLOTS_MAX, 1, 0,
        "forwards that may overlap; buffers and windows are multiplied by it"),
    [KEY_ROUTED_SCALING_FACTOR] = F64("routed_scaling_factor", -FLT_MAX, 1.0,
        "multiplies the output of a layer, once"),
    [KEY_APPLY_ROUTER_WEIGHT_ON_INPUT] = I64("apply_router_weight_on_input", 0, 1, 0, 0,
        "1 = the router weight multiplies the expert's input; legal only with top_k 1"),
    [KEY_CAPTURE_ROUTED_EXPERTS] = I64("capture_routed_experts", 0, 1, 0, 0,
        "1 = record the chosen expert ids of every layer"),
    [KEY_COUNT_EXPERT_LOAD] = I64("count_expert_load", 0, 1, 0, 0,
        "1 = count the rows that each expert of every layer computes"),
    [KEY_DETERMINISTIC] = I64("deterministic", 0, 1, 0, 0,
        "1 = required, and refused if no kernel has it; 0 = no promise"),
    [KEY_DEVICE_MEMORY_BUDGET_BYTES] = I64("device_memory_budget_bytes", 0, ANY, 0, PER_RANK,
        "device and symmetric bytes of the plan must fit into it; 0 = unknown"),
    [KEY_DISPATCH_SMS] = I64("dispatch_sms", 0, INT32_MAX, 0, PER_RANK,
        "SMs of a GPU that moving rows between ranks may use, the reduction of results included; "
        "0 = all"),
    [KEY_TIMEOUT_MS] = I64("timeout_ms", 1, ANY, 30000, 0,
        "longest wait for a peer; one that is silent for longer is reported"),
};
// clang-format on

// ---- Words -------------------------------------------------------------------------------------

// The word that `*cursor` points at and its length, moving past it; NULL at the end.
static const char *word_next(const char **cursor, size_t *length)
{
    const char *word = *cursor;

    if (*word == '\0') return NULL;
    *length = strcspn(word, ",");
    *cursor = word + *length;
    if (**cursor != '\0') *cursor += strlen(", ");
    return word;
}

// The number of `text` among the words of a key, or -1.
static int32_t word_number(const struct key_row *row, const char *text)
{
    const char *cursor = row->words;
    const char *word;
    size_t length = 0;

    for (int32_t i = 0; (word = word_next(&cursor, &length)) != NULL; i++) {
        if (strlen(text) == length && memcmp(word, text, length) == 0)
            return row->numbers == NULL ? i : row->numbers[i];
    }
    return -1;
}

void config_word_text(enum config_key key, int32_t number, char text[CONFIG_TEXT_BYTES])
{
    const struct key_row *row = &keys[key];
    const char *cursor = row->words == NULL ? "" : row->words;
    const char *word;
    size_t length = 0;

    text[0] = '\0';
    for (int32_t i = 0; (word = word_next(&cursor, &length)) != NULL; i++) {
        if ((row->numbers == NULL ? i : row->numbers[i]) == number)
            (void)snprintf(text, CONFIG_TEXT_BYTES, "%.*s", (int)length, word);
    }
}

void config_wanted(enum config_key key, char *buffer, uint64_t capacity)
{
    const struct key_row *row = &keys[key];

    if (row->type == CONFIG_STR && row->words != NULL)
        (void)snprintf(buffer, capacity, "one of %s", row->words);
    else if (row->type == CONFIG_STR)
        (void)snprintf(buffer, capacity, "printable ASCII of at most %d bytes",
                       CONFIG_TEXT_BYTES - 1);
    else if (row->type == CONFIG_F64 && row->low == 0.0)
        (void)snprintf(buffer, capacity, "a 32-bit finite number of at least 0");
    else if (row->type == CONFIG_F64)
        (void)snprintf(buffer, capacity, "a 32-bit finite number");
    else if (row->min == 0 && row->max == 1)
        (void)snprintf(buffer, capacity, "the integer 0 or 1");
    else if (row->max == ANY)
        (void)snprintf(buffer, capacity, "an integer of at least %" PRId64, row->min);
    else
        (void)snprintf(buffer, capacity, "an integer in %" PRId64 "..%" PRId64, row->min, row->max);
}

// ---- Reading -----------------------------------------------------------------------------------

static void value_default(struct config_value *value, const struct key_row *row)
{
    memset(value, 0, sizeof *value);
    value->ok = 1;
    value->i64 = row->i64;
    value->f64 = row->f64;
    if (row->type != CONFIG_STR) return;
    (void)snprintf(value->text, sizeof value->text, "%s", row->text);
    value->i64 = row->words == NULL ? 0 : word_number(row, row->text);
}

// A locale chooses nothing of what %g prints but the decimal point, which may be several bytes. The
// host's is replaced, because ranks compare the text and hosts read it.
static void point_replace(char *number)
{
    char *point = number + strspn(number, "+-0123456789einfa");
    const char *digits = point + strcspn(point, "0123456789");

    if (*point == '\0') return;
    memmove(point + 1, digits, strlen(digits) + 1);
    *point = '.';
}

static void value_print(const struct config_value *value, enum config_type type, char *buffer,
                        uint64_t capacity)
{
    if (type == CONFIG_STR) {
        (void)snprintf(buffer, capacity, "%s", value->text);
        return;
    }
    if (type == CONFIG_I64) {
        (void)snprintf(buffer, capacity, "%" PRId64, value->i64);
        return;
    }
    // The shorter form when it reads back as the same number.
    (void)snprintf(buffer, capacity, "%.15g", value->f64);
    if (strtod(buffer, NULL) != value->f64) (void)snprintf(buffer, capacity, "%.17g", value->f64);
    point_replace(buffer);
}

// Refuses what the host answered: "KEY SEEN: set it to WANTED". The default stands in.
static void refuse(struct config_value *value, enum config_key key, const char *seen,
                   struct report *report)
{
    char wanted[256], standard[CONFIG_TEXT_BYTES];
    const char *name = keys[key].name;

    value_default(value, &keys[key]);
    value->ok = 0;
    config_wanted(key, wanted, sizeof wanted);
    value_print(value, keys[key].type, standard, sizeof standard);
    if (config_required(key))
        report_reason(report, MOXIE_E_CONFIG, key, "%s %s: set it to %s", name, seen, wanted);
    else
        report_reason(report, MOXIE_E_CONFIG, key, "%s %s: set it to %s, or leave it out for %s",
                      name, seen, wanted, standard);
}

static int32_t read_i64(struct config_value *value, enum config_key key, const moxie_host *host,
                        struct report *report)
{
    const struct key_row *row = &keys[key];
    int64_t seen = row->i64;
    int32_t code = host->get_i64(host->ctx, row->name, &seen);
    char text[64];

    if (code != MOXIE_CONFIG_FOUND) return code;
    value->i64 = seen;
    if (seen >= row->min && seen <= row->max) return code;
    (void)snprintf(text, sizeof text, "is %" PRId64, seen);
    refuse(value, key, text, report);
    return code;
}

static int32_t read_f64(struct config_value *value, enum config_key key, const moxie_host *host,
                        struct report *report)
{
    const struct key_row *row = &keys[key];
    double seen = row->f64;
    int32_t code = host->get_f64(host->ctx, row->name, &seen);
    char number[32], text[64];

    if (code != MOXIE_CONFIG_FOUND) return code;
    value->f64 = seen;
    if (seen >= row->low && seen <= (double)FLT_MAX) return code; // not so for a NaN
    (void)snprintf(number, sizeof number, "%g", seen);
    point_replace(number);
    (void)snprintf(text, sizeof text, "is %s", number);
    refuse(value, key, text, report);
    return code;
}

// What is wrong with a string that the host wrote, or 0. `bytes` has CONFIG_TEXT_BYTES.
static int text_refused(const char *bytes, uint64_t length, char *why, uint64_t capacity)
{
    uint64_t written = strnlen(bytes, CONFIG_TEXT_BYTES);

    if (length >= CONFIG_TEXT_BYTES) {
        (void)snprintf(why, capacity, "is %" PRIu64 " bytes long", length);
        return 1;
    }
    if (written != length) {
        (void)snprintf(why, capacity, "ends at byte %" PRIu64 " of %" PRIu64, written, length);
        return 1;
    }
    for (uint64_t i = 0; i < length; i++) {
        if (bytes[i] >= 0x20 && bytes[i] <= 0x7e) continue;
        (void)snprintf(why, capacity, "has the byte 0x%02x at %" PRIu64, (unsigned char)bytes[i],
                       i);
        return 1;
    }
    return 0;
}

static int32_t read_str(struct config_value *value, enum config_key key, const moxie_host *host,
                        struct report *report)
{
    const struct key_row *row = &keys[key];
    char seen[CONFIG_TEXT_BYTES] = "";
    char why[CONFIG_TEXT_BYTES + 32];
    uint64_t length = 0;
    int32_t code = host->get_str(host->ctx, row->name, seen, sizeof seen, &length);

    if (code != MOXIE_CONFIG_FOUND) return code;
    if (text_refused(seen, length, why, sizeof why)) {
        refuse(value, key, why, report);
        return code;
    }
    (void)snprintf(value->text, sizeof value->text, "%s", seen);
    if (row->words == NULL) return code;
    value->i64 = word_number(row, seen);
    if (value->i64 >= 0) return code;
    (void)snprintf(why, sizeof why, "is '%s'", seen);
    refuse(value, key, why, report);
    return code;
}

static void read_key(struct config_value *value, enum config_key key, const moxie_host *host,
                     struct report *report)
{
    const struct key_row *row = &keys[key];
    char why[96];
    int32_t code;

    value_default(value, row);
    if (row->type == CONFIG_I64)
        code = read_i64(value, key, host, report);
    else if (row->type == CONFIG_F64)
        code = read_f64(value, key, host, report);
    else
        code = read_str(value, key, host, report);
    if (code == MOXIE_CONFIG_ABSENT && (row->flags & REQUIRED) != 0)
        refuse(value, key, "is missing", report);
    if (code == MOXIE_CONFIG_WRONG_TYPE) refuse(value, key, "has the wrong type", report);
    if (code < MOXIE_CONFIG_FOUND || code > MOXIE_CONFIG_WRONG_TYPE) {
        (void)snprintf(why, sizeof why, "has no value: its getter answered %d, no MOXIE_CONFIG_*",
                       code);
        refuse(value, key, why, report);
        log_line(host, MOXIE_LOG_HOST_MISBEHAVING, "config", "%s %s", row->name, why);
    }
    value->found = code != MOXIE_CONFIG_ABSENT;
}

void config_read(struct config *config, const moxie_host *host, struct report *report)
{
    for (int32_t key = 0; key < KEY_COUNT; key++)
        read_key(&config->values[key], (enum config_key)key, host, report);
}

// ---- The snapshot ------------------------------------------------------------------------------

int64_t config_i64(const struct config *config, enum config_key key)
{
    return config->values[key].i64;
}

double config_f64(const struct config *config, enum config_key key)
{
    return config->values[key].f64;
}

const char *config_str(const struct config *config, enum config_key key)
{
    return config->values[key].text;
}

int32_t config_word(const struct config *config, enum config_key key)
{
    return (int32_t)config->values[key].i64;
}

int config_found(const struct config *config, enum config_key key)
{
    return config->values[key].found;
}

int config_ok(const struct config *config, enum config_key key)
{
    return config->values[key].ok;
}

int config_changed(const struct config *config, enum config_key key)
{
    const struct config_value *value = &config->values[key];
    const struct key_row *row = &keys[key];

    if (!value->found || !value->ok || value->resolved) return 0;
    if (row->type == CONFIG_STR) return strcmp(value->text, row->text) != 0;
    return row->type == CONFIG_I64 ? value->i64 != row->i64
                                   : (float)value->f64 != (float)row->f64; // as it is kept
}

void config_resolve(struct config *config, enum config_key key, const char *word)
{
    struct config_value *value = &config->values[key];

    (void)snprintf(value->text, sizeof value->text, "%s", word);
    value->resolved = 1;
    value->i64 = keys[key].words == NULL ? 0 : word_number(&keys[key], value->text);
}

const char *config_name(enum config_key key)
{
    return keys[key].name;
}

enum config_type config_type_of(enum config_key key)
{
    return keys[key].type;
}

const char *config_help(enum config_key key)
{
    return keys[key].help;
}

const char *config_words(enum config_key key)
{
    return keys[key].words == NULL ? "" : keys[key].words;
}

int config_required(enum config_key key)
{
    return (keys[key].flags & REQUIRED) != 0;
}

int config_shared(enum config_key key)
{
    return (keys[key].flags & PER_RANK) == 0;
}

void config_print(const struct config *config, enum config_key key, char *buffer, uint64_t capacity)
{
    value_print(&config->values[key], keys[key].type, buffer, capacity);
}
