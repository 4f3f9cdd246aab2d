// Token bounds. A number that cannot be computed is -1 and makes everything that needs it -1, so
// that one bad key does not hide the bounds that do not depend on it.

#include "plugin/bounds.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

// A number of a product, by the name it has in a reason.
struct factor {
    const char *name;
    int64_t value;
};

static int64_t value_of(const struct config *config, enum config_key key)
{
    return config_ok(config, key) ? config_i64(config, key) : -1;
}

static int64_t larger(int64_t a, int64_t b)
{
    if (a < 0 || b < 0) return -1;
    return a > b ? a : b;
}

// `value` unless `flag` is 1, then 0.
static int64_t unless(int64_t flag, int64_t value)
{
    if (flag < 0) return -1;
    return flag != 0 ? 0 : value;
}

int64_t bounds_tokens_countable(const struct config *config)
{
    int64_t dp_size = config_i64(config, KEY_DP_SIZE);
    int64_t rows = INT32_MAX / config_i64(config, KEY_TOP_K);
    // A dispatcher pads each EP rank's share by at most one row.
    int64_t tokens = (rows - config_i64(config, KEY_EP_SIZE)) / dp_size;

    return tokens < 1 ? 1 : tokens;
}

// ---- What dominates ----------------------------------------------------------------------------

static int is_decode_key(int32_t key)
{
    return key == KEY_DECODE_GRAPH_MAX_BATCH || key == KEY_MAX_RUNNING_REQUESTS;
}

// Tokens that one key brings into a forward.
static int64_t tokens_from(const struct bounds *bounds, const struct config *config,
                           enum config_key key)
{
    int64_t value = config_i64(config, key);
    int prefills = config_word(config, KEY_DISAGGREGATION_MODE) != DISAGGREGATION_DECODE;
    int decodes = config_word(config, KEY_DISAGGREGATION_MODE) != DISAGGREGATION_PREFILL;

    switch (key) {
    case KEY_FORWARD_TOKENS_MAX:
    case KEY_WARMUP_TOKENS_MAX:
        return value;
    case KEY_MAX_PREFILL_TOKENS:
        return prefills ? value : 0;
    case KEY_CHUNKED_PREFILL_SIZE:
        return prefills ? bounds->chunk : 0;
    case KEY_CONTEXT_LENGTH:
        return prefills && bounds->chunk == 0 ? value : 0;
    case KEY_PREFILL_GRAPH_MAX_TOKENS:
        return prefills ? unless(config_i64(config, KEY_DISABLE_PREFILL_GRAPH), value) : 0;
    case KEY_DECODE_GRAPH_MAX_BATCH:
        value = unless(config_i64(config, KEY_DISABLE_DECODE_GRAPH), value);
        break;
    default:
        break;
    }
    if (!decodes || !size_mul(value, bounds->tokens_per_request, &value)) return 0;
    return value;
}

// In this order a tie goes to the first.
static const enum config_key dominants[] = {
    KEY_FORWARD_TOKENS_MAX,   KEY_MAX_PREFILL_TOKENS,       KEY_CHUNKED_PREFILL_SIZE,
    KEY_CONTEXT_LENGTH,       KEY_PREFILL_GRAPH_MAX_TOKENS, KEY_DECODE_GRAPH_MAX_BATCH,
    KEY_MAX_RUNNING_REQUESTS, KEY_WARMUP_TOKENS_MAX,
};
#define DOMINANTS_COUNT (sizeof dominants / sizeof dominants[0])

static int32_t dominant_key(const struct bounds *bounds, const struct config *config)
{
    if (bounds->forward_tokens < 0) return KEY_COUNT;
    for (size_t i = 0; i < DOMINANTS_COUNT; i++) {
        if (tokens_from(bounds, config, dominants[i]) == bounds->forward_tokens)
            return (int32_t)dominants[i];
    }
    return KEY_COUNT;
}

// 1 when keys other than the dominant one bring more than `tokens` as well.
static int others_exceed(const struct bounds *bounds, const struct config *config, int64_t tokens)
{
    for (size_t i = 0; i < DOMINANTS_COUNT; i++) {
        if ((int32_t)dominants[i] != bounds->dominant &&
            tokens_from(bounds, config, dominants[i]) > tokens)
            return 1;
    }
    return 0;
}

const char *bounds_dominant(const struct bounds *bounds)
{
    return bounds->dominant == KEY_COUNT ? "minimum"
                                         : config_name((enum config_key)bounds->dominant);
}

void bounds_list_keys(const struct config *config, char *buffer, uint64_t capacity)
{
    const int64_t mode = config_word(config, KEY_DISAGGREGATION_MODE);
    uint64_t used = 0;

    buffer[0] = '\0';
    for (size_t i = 0; i < DOMINANTS_COUNT && used < capacity; i++) {
        const enum config_key key = dominants[i];

        if (key == KEY_FORWARD_TOKENS_MAX) continue;
        if (key != KEY_WARMUP_TOKENS_MAX &&
            mode == (is_decode_key((int32_t)key) ? DISAGGREGATION_PREFILL : DISAGGREGATION_DECODE))
            continue;
        used += (uint64_t)snprintf(buffer + used, capacity - used, "%s%s", used > 0 ? ", " : "",
                                   config_name(key));
    }
}

void bounds_explain(const struct bounds *bounds, const struct config *config, char *buffer,
                    uint64_t capacity)
{
    char from[160] = "";
    int64_t value;

    if (bounds->forward_tokens < 0) {
        (void)snprintf(buffer, capacity, "forward_tokens cannot be computed");
        return;
    }
    if (bounds->dominant != KEY_COUNT) {
        value = config_i64(config, (enum config_key)bounds->dominant);
        if (is_decode_key(bounds->dominant) && bounds->tokens_per_request > 1)
            (void)snprintf(from, sizeof from, " %" PRId64 " x %s %" PRId64, value,
                           config_name(KEY_SPECULATIVE_DRAFT_TOKENS), bounds->tokens_per_request);
        else if (bounds->dominant == KEY_CHUNKED_PREFILL_SIZE && bounds->chunk != value)
            (void)snprintf(from, sizeof from, " %" PRId64 " x 5/4 (%s)", value,
                           config_name(KEY_PIPELINE_DYNAMIC_CHUNKING));
        else
            (void)snprintf(from, sizeof from, " %" PRId64, value);
    }
    (void)snprintf(buffer, capacity, "forward_tokens = %" PRId64 ": %s%s", bounds->forward_tokens,
                   bounds_dominant(bounds), from);
}

enum config_key bounds_advise(const struct bounds *bounds, const struct config *config,
                              int64_t tokens, char *buffer, uint64_t capacity)
{
    enum config_key key =
        bounds->dominant == KEY_COUNT ? KEY_FORWARD_TOKENS_MAX : (enum config_key)bounds->dominant;
    int64_t requests = config_i64(config, key);
    int64_t value = tokens;

    if (key == KEY_CHUNKED_PREFILL_SIZE && bounds->chunk != requests) value = tokens / 5 * 4;
    if (is_decode_key((int32_t)key) && bounds->tokens_per_request > requests) {
        key = KEY_SPECULATIVE_DRAFT_TOKENS;
        value = tokens / requests;
    } else if (is_decode_key((int32_t)key)) {
        value = tokens / bounds->tokens_per_request;
    }
    // Where no single key does it, the host's own bound does.
    if (value < 1 || others_exceed(bounds, config, tokens)) {
        key = KEY_FORWARD_TOKENS_MAX;
        value = tokens;
    }
    (void)snprintf(buffer, capacity, "%s to %" PRId64 " or less", config_name(key), value);
    return key;
}

// ---- Computing ---------------------------------------------------------------------------------

// Whether forward_tokens is derived: a host that gives it may say anything else of what it is from.
static int is_derived(const struct config *config)
{
    return config_i64(config, KEY_FORWARD_TOKENS_MAX) == 0;
}

static int64_t chunk_of(const struct config *config, struct report *report)
{
    int64_t size = config_i64(config, KEY_CHUNKED_PREFILL_SIZE);
    int64_t dynamic = value_of(config, KEY_PIPELINE_DYNAMIC_CHUNKING);
    int64_t chunk;

    if (!config_ok(config, KEY_CHUNKED_PREFILL_SIZE) || dynamic < 0) return -1;
    if (size <= 0) return 0;
    if (dynamic == 0) return size;
    // (5 * size + 3) / 4 without the intermediate product.
    if (size_add(size, size / 4 + (size % 4 != 0), &chunk)) return chunk;
    if (!is_derived(config) ||
        config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_DECODE)
        return -1;
    report_reason(report, MOXIE_E_CONFIG, KEY_CHUNKED_PREFILL_SIZE,
                  "chunked_prefill_size %" PRId64
                  " grown by 5/4 (pipeline_dynamic_chunking) passes 2^62: set "
                  "chunked_prefill_size to %" PRId64 " or less",
                  size, bounds_tokens_countable(config) / 5 * 4);
    return -1;
}

static int64_t prefill_of(const struct bounds *bounds, const struct config *config)
{
    int64_t graph = unless(value_of(config, KEY_DISABLE_PREFILL_GRAPH),
                           value_of(config, KEY_PREFILL_GRAPH_MAX_TOKENS));
    int64_t context = bounds->chunk == 0 ? value_of(config, KEY_CONTEXT_LENGTH) : 0;

    if (!config_ok(config, KEY_DISAGGREGATION_MODE)) return -1;
    if (config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_DECODE) return 0;
    return larger(larger(value_of(config, KEY_MAX_PREFILL_TOKENS), bounds->chunk),
                  larger(context, graph));
}

static int64_t tokens_per_request_of(const struct config *config)
{
    const char *algorithm = config_str(config, KEY_SPECULATIVE_ALGORITHM);

    if (!config_ok(config, KEY_SPECULATIVE_ALGORITHM)) return -1;
    if (algorithm[0] == '\0' || strcmp(algorithm, "none") == 0) return 1;
    return larger(value_of(config, KEY_SPECULATIVE_DRAFT_TOKENS), 1);
}

static int64_t decode_of(const struct bounds *bounds, const struct config *config,
                         struct report *report)
{
    int64_t graph = unless(value_of(config, KEY_DISABLE_DECODE_GRAPH),
                           value_of(config, KEY_DECODE_GRAPH_MAX_BATCH));
    int64_t running = value_of(config, KEY_MAX_RUNNING_REQUESTS);
    int64_t requests = larger(graph, running);
    int64_t draft = bounds->tokens_per_request;
    enum config_key requests_key =
        graph >= running ? KEY_DECODE_GRAPH_MAX_BATCH : KEY_MAX_RUNNING_REQUESTS;
    enum config_key key = requests >= draft ? requests_key : KEY_SPECULATIVE_DRAFT_TOKENS;
    int64_t decode, most;
    char each[64] = "";

    if (!config_ok(config, KEY_DISAGGREGATION_MODE)) return -1;
    if (config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_PREFILL) return 0;
    if (requests < 0 || draft < 0) return -1;
    if (size_mul(requests, draft, &decode)) return decode;
    if (!is_derived(config)) return -1;
    most = bounds_tokens_countable(config) / (requests >= draft ? draft : requests);
    if (draft > 1) (void)snprintf(each, sizeof each, " x speculative_draft_tokens %" PRId64, draft);
    report_reason(report, MOXIE_E_CONFIG, key,
                  "decode = %s %" PRId64 "%s passes 2^62: set %s to %" PRId64 " or less",
                  config_name(requests_key), requests, each, config_name(key), most < 1 ? 1 : most);
    return -1;
}

static int64_t gcd(int64_t a, int64_t b)
{
    int64_t rest;

    while (b != 0) {
        rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static int64_t attn_tp_of(const struct config *config, struct report *report)
{
    int64_t dp_size = value_of(config, KEY_DP_SIZE);
    int64_t tp_size = value_of(config, KEY_TP_SIZE);

    if (dp_size < 0 || tp_size < 0) return -1;
    if (tp_size % dp_size == 0) return tp_size / dp_size;
    report_reason(report, MOXIE_E_CONFIG, KEY_DP_SIZE,
                  "tp_size %" PRId64 " is not divisible by dp_size %" PRId64
                  " (tp_size counts all ranks of the MoE group): set dp_size to %" PRId64,
                  tp_size, dp_size, gcd(tp_size, dp_size));
    return -1;
}

static const enum config_key expert_keys[3] = {KEY_NUM_EXPERTS, KEY_NUM_REDUNDANT_EXPERTS,
                                               KEY_NUM_FUSED_SHARED_EXPERTS};

// Which of the counts to lower, and to how many: the largest, beside the others. Where those leave
// it nothing, copies and shared experts go, in the words of `more`.
static int32_t experts_advise(const int64_t counts[3], int64_t limit, int64_t *most, char *more,
                              uint64_t capacity)
{
    int64_t others = 0;
    int32_t largest = 0;
    uint64_t used = 0;

    for (int32_t i = 1; i < 3; i++)
        if (counts[i] > counts[largest]) largest = i;
    for (int32_t i = 0; i < 3; i++)
        if (i != largest) others += counts[i] < limit ? counts[i] : limit;
    more[0] = '\0';
    if (others >= limit) {
        if (counts[0] >= limit) largest = 0;
        others = largest == 0 ? 0 : counts[0];
        for (int32_t i = 1; i < 3; i++)
            if (i != largest && counts[i] > 0 && used < capacity)
                used += (uint64_t)snprintf(more + used, capacity - used, " and %s to 0",
                                           config_name(expert_keys[i]));
    }
    *most = limit - others;
    return largest;
}

int64_t bounds_experts(const struct config *config, int64_t limit, const char *before,
                       const char *after, struct report *report)
{
    int64_t counts[3], most;
    int64_t sum = -1;
    char more[96];
    int32_t key;

    for (int32_t i = 0; i < 3; i++) {
        counts[i] = value_of(config, expert_keys[i]);
        if (counts[i] < 0) return -1;
    }
    if (!size_add(counts[0], counts[1], &sum) || !size_add(sum, counts[2], &sum)) sum = -1;
    if (sum >= 0 && sum <= limit) return sum;
    key = experts_advise(counts, limit, &most, more, sizeof more);
    report_reason(report, MOXIE_E_UNSUPPORTED, expert_keys[key],
                  "%s num_experts %" PRId64 " + num_redundant_experts %" PRId64
                  " + num_fused_shared_experts %" PRId64 " %s: set %s to %" PRId64 " or less%s",
                  before, counts[0], counts[1], counts[2], after, config_name(expert_keys[key]),
                  most, more);
    return sum;
}

static int64_t forward_rows(const struct bounds *bounds, const struct config *config,
                            struct factor ranks, struct factor tokens, struct report *report)
{
    char explain[320], advice[160];
    enum config_key key;
    int64_t rows;

    if (ranks.value < 0 || tokens.value < 0) return -1;
    if (size_mul(ranks.value, tokens.value, &rows)) return rows;
    bounds_explain(bounds, config, explain, sizeof explain);
    key = bounds_advise(bounds, config, bounds_tokens_countable(config), advice, sizeof advice);
    if (ranks.value > tokens.value) {
        key = KEY_DP_SIZE; // ep_size is at most MOXIE_RANKS_MAX
        (void)snprintf(advice, sizeof advice, "dp_size to 1");
    }
    report_reason(report, MOXIE_E_CONFIG, key,
                  "%s %" PRId64 " x %s %" PRId64 " passes 2^62 rows (%s): set %s", ranks.name,
                  ranks.value, tokens.name, tokens.value, explain, advice);
    return -1;
}

// Rows of one all-to-all round. An explicit cap has a key of its own to lower.
static int64_t round_rows(const struct bounds *bounds, const struct config *config,
                          struct report *report)
{
    const char *word = config_str(config, KEY_DISPATCHER);
    int64_t ep_size = value_of(config, KEY_EP_SIZE);
    int64_t rows;

    if (ep_size < 0 || bounds->dispatch_tokens < 0) return -1;
    if (size_mul(ep_size, bounds->dispatch_tokens, &rows)) return rows;
    if (config_i64(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK) == 0)
        return -1; // the rows of a forward said why
    if (strcmp(word, "local") == 0 || strcmp(word, "allgather") == 0) return -1; // has no rounds
    report_reason(report, MOXIE_E_CONFIG, KEY_MAX_DISPATCH_TOKENS_PER_RANK,
                  "ep_size %" PRId64 " x max_dispatch_tokens_per_rank %" PRId64
                  " passes 2^62 rows: set max_dispatch_tokens_per_rank to %" PRId64 " or less",
                  ep_size, bounds->dispatch_tokens,
                  INT32_MAX / config_i64(config, KEY_TOP_K) / ep_size);
    return -1;
}

static void ranks_compute(struct bounds *bounds, const struct config *config, struct report *report)
{
    int64_t cap = value_of(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK);
    int64_t rounds = value_of(config, KEY_DISPATCH_ROUNDS_MAX);
    struct factor dp_size = {config_name(KEY_DP_SIZE), value_of(config, KEY_DP_SIZE)};
    struct factor ep_size = {config_name(KEY_EP_SIZE), value_of(config, KEY_EP_SIZE)};
    struct factor forward = {"forward_tokens", bounds->forward_tokens};
    struct factor required = {"dispatch_required", -1};
    int64_t padded_rows = -1;

    bounds->attn_tp = attn_tp_of(config, report);
    if (bounds->forward_tokens >= 0 && bounds->attn_tp > 0)
        required.value = ceil_div(bounds->forward_tokens, bounds->attn_tp);
    bounds->dispatch_required = required.value;
    bounds->dispatch_tokens = -1;
    if (cap > 0)
        bounds->dispatch_tokens = cap;
    else if (cap == 0 && rounds > 0 && required.value > 0)
        bounds->dispatch_tokens = ceil_div(required.value, rounds);
    bounds->allgather_rows = forward_rows(bounds, config, dp_size, forward, report);
    if (bounds->allgather_rows >= 0)
        padded_rows = forward_rows(bounds, config, ep_size, required, report);
    bounds->gather_rows = larger(bounds->allgather_rows, padded_rows);
    bounds->alltoall_rows = round_rows(bounds, config, report);
    bounds->capture_rows = bounds->allgather_rows;
}

void bounds_compute(struct bounds *bounds, const struct config *config, struct report *report)
{
    int64_t own = value_of(config, KEY_FORWARD_TOKENS_MAX);
    char passes[32];

    memset(bounds, 0, sizeof *bounds);
    bounds->tokens_per_request = tokens_per_request_of(config);
    bounds->chunk = chunk_of(config, report);
    bounds->prefill = prefill_of(bounds, config);
    bounds->decode = decode_of(bounds, config, report);
    bounds->derived_tokens = larger(larger(bounds->prefill, bounds->decode),
                                    larger(value_of(config, KEY_WARMUP_TOKENS_MAX), 1));
    bounds->forward_tokens = own > 0 ? own : -1;
    if (own == 0) bounds->forward_tokens = bounds->derived_tokens;
    bounds->dominant = dominant_key(bounds, config);
    (void)snprintf(passes, sizeof passes, "passes %d", EXPERTS_MAX);
    bounds->physical_experts =
        bounds_experts(config, EXPERTS_MAX, "physical_experts =", passes, report);
    ranks_compute(bounds, config, report);
}

int64_t experts_first(int64_t experts, int64_t ranks, int64_t rank)
{
    int64_t rest = experts % ranks;

    return rank * (experts / ranks) + (rank < rest ? rank : rest);
}
