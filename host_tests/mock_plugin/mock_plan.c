// The verdict and the plan: pure functions of the snapshot.

#include "host_tests/mock_plugin/mock.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALIGN_BYTES  128
#define SIZE_MAX_ANY ((int64_t)1 << 20) // columns and experts that a slow plugin need not exceed
#define TOKENS_MAX   ((int64_t)1 << 31)
#define PLAN_MAX     ((int64_t)1 << 46)
#define HUGE_SIZE    ((int64_t)1 << 62) // where sums and products stop

extern char **environ;

static int64_t add(int64_t a, int64_t b)
{
    int64_t sum;

    return __builtin_add_overflow(a, b, &sum) || sum > HUGE_SIZE ? HUGE_SIZE : sum;
}

static int64_t multiply(int64_t a, int64_t b)
{
    int64_t product;

    if (!__builtin_mul_overflow(a, b, &product)) return product > HUGE_SIZE ? HUGE_SIZE : product;
    if (HAS_FAULT(FAULT_OVERFLOW_CRASH)) abort();
    return HUGE_SIZE;
}

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static int64_t divide_up(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t number(const struct instance *instance, enum key key)
{
    return instance->values[key].number;
}

static int speculates(const struct instance *instance)
{
    const char *algorithm = instance->values[KEY_SPECULATIVE_ALGORITHM].text;

    return algorithm[0] != '\0' && strcmp(algorithm, "none") != 0;
}

// ---- Bounds ------------------------------------------------------------------------------------

// Tokens that a key brings into a forward, in the order in which a tie is decided.
struct source {
    enum key key;
    int64_t tokens;
};

#define SOURCES 7

static void list_sources(const struct instance *instance, struct source sources[SOURCES])
{
    int64_t mode = number(instance, KEY_DISAGGREGATION_MODE);
    int64_t each =
        speculates(instance) ? larger(number(instance, KEY_SPECULATIVE_DRAFT_TOKENS), 1) : 1;
    int64_t chunk = larger(number(instance, KEY_CHUNKED_PREFILL_SIZE), 0);
    int64_t prefills = mode != DECODE_ONLY, decodes = mode != PREFILL_ONLY;

    if (number(instance, KEY_PIPELINE_DYNAMIC_CHUNKING) != 0)
        chunk = add(multiply(chunk, 5), 3) / 4;
    sources[0] = (struct source){KEY_MAX_PREFILL_TOKENS,
                                 prefills * number(instance, KEY_MAX_PREFILL_TOKENS)};
    sources[1] = (struct source){KEY_CHUNKED_PREFILL_SIZE, prefills * chunk};
    sources[2] = (struct source){KEY_CONTEXT_LENGTH,
                                 prefills * (chunk == 0) * number(instance, KEY_CONTEXT_LENGTH)};
    sources[3] = (struct source){KEY_PREFILL_GRAPH_MAX_TOKENS,
                                 prefills * !number(instance, KEY_DISABLE_PREFILL_GRAPH) *
                                     number(instance, KEY_PREFILL_GRAPH_MAX_TOKENS)};
    sources[4] = (struct source){KEY_DECODE_GRAPH_MAX_BATCH,
                                 decodes * !number(instance, KEY_DISABLE_DECODE_GRAPH) *
                                     multiply(number(instance, KEY_DECODE_GRAPH_MAX_BATCH), each)};
    sources[5] =
        (struct source){KEY_MAX_RUNNING_REQUESTS,
                        decodes * multiply(number(instance, KEY_MAX_RUNNING_REQUESTS), each)};
    sources[6] = (struct source){KEY_WARMUP_TOKENS_MAX, number(instance, KEY_WARMUP_TOKENS_MAX)};
}

static void bound_forward(struct instance *instance)
{
    struct source sources[SOURCES];
    moxie_bounds *bounds = &instance->bounds;
    int64_t own = number(instance, KEY_FORWARD_TOKENS_MAX);

    list_sources(instance, sources);
    bounds->prefill = larger(larger(sources[0].tokens, sources[1].tokens),
                             larger(sources[2].tokens, sources[3].tokens));
    bounds->decode = larger(sources[4].tokens, sources[5].tokens);
    bounds->forward_tokens = 1;
    bounds->dominant = "minimum";
    if (own > 0) {
        bounds->forward_tokens = own;
        bounds->dominant = key_name(KEY_FORWARD_TOKENS_MAX);
        return;
    }
    for (int32_t i = SOURCES - 1; i >= 0; i--) {
        if (sources[i].tokens < bounds->forward_tokens) continue;
        bounds->forward_tokens = sources[i].tokens;
        bounds->dominant = key_name(sources[i].key);
    }
}

static void bound_ranks(struct instance *instance)
{
    moxie_bounds *bounds = &instance->bounds;
    int64_t dp_size = number(instance, KEY_DP_SIZE), tp_size = number(instance, KEY_TP_SIZE);
    int64_t cap = number(instance, KEY_MAX_DISPATCH_TOKENS_PER_RANK);

    bounds->physical_experts =
        add(add(number(instance, KEY_NUM_EXPERTS), number(instance, KEY_NUM_REDUNDANT_EXPERTS)),
            number(instance, KEY_NUM_FUSED_SHARED_EXPERTS));
    bounds->allgather_rows = multiply(dp_size, bounds->forward_tokens);
    bounds->capture_rows = bounds->allgather_rows;
    bounds->dispatch_required = bounds->dispatch_tokens = bounds->alltoall_rows = -1;
    bounds->dispatch_call_tokens_max = bounds->forward_call_tokens_max = -1;
    bounds->expert_first = bounds->experts_local = -1;
    if (tp_size % dp_size != 0) return;
    bounds->dispatch_required = divide_up(bounds->forward_tokens, tp_size / dp_size);
    bounds->dispatch_tokens =
        cap > 0 ? cap
                : divide_up(bounds->dispatch_required, number(instance, KEY_DISPATCH_ROUNDS_MAX));
    bounds->alltoall_rows = multiply(number(instance, KEY_EP_SIZE), bounds->dispatch_tokens);
}

// What no bound can be computed without is refused: then all are unknown.
static void bound_nothing(moxie_bounds *bounds)
{
    *bounds = (moxie_bounds){
        .forward_tokens = -1,
        .dominant = "unknown",
        .prefill = -1,
        .decode = -1,
        .dispatch_required = -1,
        .dispatch_tokens = -1,
        .allgather_rows = -1,
        .alltoall_rows = -1,
        .capture_rows = -1,
        .dispatch_call_tokens_max = -1,
        .forward_call_tokens_max = -1,
        .physical_experts = -1,
        .expert_first = -1,
        .experts_local = -1,
    };
}

// ---- Rules -------------------------------------------------------------------------------------

static void judge_sizes(struct instance *instance)
{
    static const enum key sizes[] = {
        KEY_HIDDEN_SIZE,           KEY_INTERMEDIATE_SIZE,        KEY_NUM_EXPERTS,
        KEY_NUM_REDUNDANT_EXPERTS, KEY_NUM_FUSED_SHARED_EXPERTS, KEY_NUM_LAYERS};
    struct verdict *verdict = &instance->verdict;
    const moxie_bounds *bounds = &instance->bounds;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (number(instance, sizes[i]) > SIZE_MAX_ANY)
            verdict_add(verdict, MOXIE_E_UNSUPPORTED, sizes[i],
                        "%s is %" PRId64 ": set it to %" PRId64 " or less", key_name(sizes[i]),
                        number(instance, sizes[i]), SIZE_MAX_ANY);
    }
    if (!instance->values[KEY_TOP_K].refused &&
        number(instance, KEY_TOP_K) > bounds->physical_experts)
        verdict_add(
            verdict, MOXIE_E_CONFIG, KEY_TOP_K,
            "top_k is %" PRId64 " of %" PRId64 " physical experts: set it to %" PRId64 " or less",
            number(instance, KEY_TOP_K), bounds->physical_experts, bounds->physical_experts);
    if (multiply(bounds->allgather_rows, number(instance, KEY_TOP_K)) >= TOKENS_MAX)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_FORWARD_TOKENS_MAX,
                    "%" PRId64 " rows x top_k pass 2^31 (forward_tokens %" PRId64
                    " from %s): set forward_tokens_max",
                    bounds->allgather_rows, bounds->forward_tokens, bounds->dominant);
}

static void judge_ranks(struct instance *instance)
{
    struct verdict *verdict = &instance->verdict;
    int64_t dp = number(instance, KEY_DP_SIZE), tp = number(instance, KEY_TP_SIZE);
    int64_t ep = number(instance, KEY_EP_SIZE), rank = number(instance, KEY_EP_RANK);

    if (tp % dp != 0)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_DP_SIZE,
                    "tp_size %" PRId64 " is not divisible by dp_size %" PRId64 ": set dp_size to 1",
                    tp, dp);
    if (ep != 1 && ep != tp)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_EP_SIZE,
                    "ep_size is %" PRId64 " and tp_size %" PRId64 ": set ep_size to 1 or %" PRId64,
                    ep, tp, tp);
    if (rank >= ep)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_EP_RANK,
                    "ep_rank is %" PRId64 " of %" PRId64 " ranks: set it to 0..%" PRId64, rank, ep,
                    ep - 1);
}

// What the slow kernels do not do.
static void judge_kernels(struct instance *instance)
{
    struct verdict *verdict = &instance->verdict;
    int64_t format = number(instance, KEY_WEIGHT_FORMAT);
    int64_t group = format == 8 ? 16 : format == 6 || format == 7 ? 32 : 1;

    if (HAS_FAULT(FAULT_NOTHING_ACCEPTED))
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_WEIGHT_FORMAT,
                    "no kernel multiplies any weights: leave this plugin alone");
    if (number(instance, KEY_TRANSPORT) > 1)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_TRANSPORT,
                    "transport is %s, and the ranks here are CPUs: set transport to auto",
                    instance->values[KEY_TRANSPORT].text);
    if (number(instance, KEY_DEVICE) != 0)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_DEVICE,
                    "no kernels for device %s: set device to cpu",
                    instance->values[KEY_DEVICE].text);
    if (number(instance, KEY_ACTIVATION_FORMAT) > 1)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_ACTIVATION_FORMAT,
                    "no kernel multiplies %s: set activation_format to f32",
                    instance->values[KEY_ACTIVATION_FORMAT].text);
    if (number(instance, KEY_DISPATCH_FORMAT) != 0)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_DISPATCH_FORMAT,
                    "no kernel dispatches %s: set dispatch_format to input",
                    instance->values[KEY_DISPATCH_FORMAT].text);
    for (int32_t i = 0; i < 2; i++) {
        enum key key = i == 0 ? KEY_HIDDEN_SIZE : KEY_INTERMEDIATE_SIZE;

        if (!instance->values[key].refused && number(instance, key) % group != 0)
            verdict_add(verdict, MOXIE_E_UNSUPPORTED, key,
                        "%s is %" PRId64 ", no multiple of the %" PRId64
                        " columns of a scale: set weight_format to bf16",
                        key_name(key), number(instance, key), group);
    }
}

static void judge_flags(struct instance *instance)
{
    static const enum key parameters[] = {KEY_ACTIVATION_ALPHA, KEY_ACTIVATION_BETA,
                                          KEY_ACTIVATION_LIMIT};
    static const double neutral[] = {1.702, 1.0, 0.0};
    struct verdict *verdict = &instance->verdict;

    for (int32_t i = 0; i < 3; i++) {
        if (instance->values[parameters[i]].real != neutral[i] &&
            number(instance, KEY_ACTIVATION) != SWIGLUOAI)
            verdict_add(verdict, MOXIE_E_UNSUPPORTED, parameters[i],
                        "%s is %g, which activation %s does not have: leave it out",
                        key_name(parameters[i]), instance->values[parameters[i]].real,
                        instance->values[KEY_ACTIVATION].text);
    }
    if (instance->values[KEY_ACTIVATION_LIMIT].real < 0)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_ACTIVATION_LIMIT,
                    "activation_limit is %g: set it to 0 or more",
                    instance->values[KEY_ACTIVATION_LIMIT].real);
    if (number(instance, KEY_APPLY_ROUTER_WEIGHT_ON_INPUT) != 0 && number(instance, KEY_TOP_K) > 1)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_APPLY_ROUTER_WEIGHT_ON_INPUT,
                    "apply_router_weight_on_input is 1 and top_k %" PRId64 ": set it to 0",
                    number(instance, KEY_TOP_K));
    if (speculates(instance) && number(instance, KEY_SPECULATIVE_DRAFT_TOKENS) < 1)
        verdict_add(verdict, MOXIE_E_CONFIG, KEY_SPECULATIVE_DRAFT_TOKENS,
                    "speculative_algorithm is set and speculative_draft_tokens is not: set it to "
                    "1 or more");
}

// Resolves the names, and refuses those that nobody registered.
static void judge_backends(struct instance *instance)
{
    static const char *const names[] = {"local", "allgather", "alltoall"};
    struct verdict *verdict = &instance->verdict;
    char *runner = instance->values[KEY_RUNNER].text;
    char *dispatcher = instance->values[KEY_DISPATCHER].text;
    int64_t ep_size = number(instance, KEY_EP_SIZE);

    if (strcmp(runner, "auto") == 0) (void)snprintf(runner, TEXT_BYTES, "%s", runner_info.name);
    if (strcmp(runner, runner_info.name) != 0)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_RUNNER,
                    "no runner is named '%s': set runner to %s", runner, runner_info.name);
    if (strcmp(dispatcher, "auto") == 0)
        (void)snprintf(dispatcher, TEXT_BYTES, "%s", ep_size > 1 ? "alltoall" : "local");
    if (number(instance, KEY_TRANSPORT) == 0)
        (void)snprintf(instance->values[KEY_TRANSPORT].text, TEXT_BYTES, "shm");
    instance->limits.dispatcher = -1;
    for (int32_t i = 0; i < 3; i++) {
        if (strcmp(dispatcher, names[i]) == 0) instance->limits.dispatcher = i;
    }
    if (instance->limits.dispatcher < 0)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_DISPATCHER,
                    "no dispatcher is named '%s': set it to local, allgather or alltoall",
                    dispatcher);
    if (instance->limits.dispatcher > 0 && ep_size == 1 && number(instance, KEY_TP_SIZE) > 1)
        verdict_add(verdict, MOXIE_E_UNSUPPORTED, KEY_DISPATCHER,
                    "dispatcher %s sums over ep_size ranks, and that is 1 of tp_size %" PRId64
                    ": set it to local",
                    dispatcher, number(instance, KEY_TP_SIZE));
    if (number(instance, KEY_ACTIVATION_FORMAT) == 0)
        (void)snprintf(instance->values[KEY_ACTIVATION_FORMAT].text, TEXT_BYTES, "f32");
}

static void judge_cap(struct instance *instance)
{
    const moxie_bounds *bounds = &instance->bounds;
    int64_t cap = number(instance, KEY_MAX_DISPATCH_TOKENS_PER_RANK);
    int64_t rounds = number(instance, KEY_DISPATCH_ROUNDS_MAX);

    if (instance->limits.dispatcher != DISPATCHER_ALLTOALL || cap == 0 ||
        bounds->dispatch_required < 0 || multiply(cap, rounds) >= bounds->dispatch_required)
        return;
    verdict_add(&instance->verdict, MOXIE_E_CAPACITY, KEY_MAX_DISPATCH_TOKENS_PER_RANK,
                "max_dispatch_tokens_per_rank %" PRId64 " x dispatch_rounds_max %" PRId64
                " is below the %" PRId64 " tokens of a forward (%s): set it to %" PRId64,
                cap, rounds, bounds->dispatch_required, bounds->dominant,
                divide_up(bounds->dispatch_required, rounds));
}

// ---- Plan --------------------------------------------------------------------------------------

static int64_t align(int64_t bytes)
{
    return multiply(divide_up(bytes, ALIGN_BYTES), ALIGN_BYTES);
}

static uint32_t row_type(const struct instance *instance, enum key key)
{
    static const uint32_t types[] = {TYPE_BF16, TYPE_F16, TYPE_F32};

    return types[number(instance, key)];
}

// Tokens of this rank in one call, and rows of one run.
static void limit_tokens(struct instance *instance)
{
    const moxie_bounds *bounds = &instance->bounds;
    struct limits *limits = &instance->limits;
    int64_t required = bounds->dispatch_required;

    limits->forward_tokens_max = required;
    limits->call_tokens_max =
        limits->dispatcher == DISPATCHER_ALLTOALL ? bounds->dispatch_tokens : required;
    limits->rows_max = multiply(limits->ranks, limits->call_tokens_max);
    if (limits->dispatcher != DISPATCHER_LOCAL) return;
    // The host brings the tokens of every DP rank, padded as it gathers them.
    limits->rows_max = larger(bounds->allgather_rows, multiply(limits->ranks, required));
    limits->call_tokens_max = limits->forward_tokens_max = limits->rows_max;
}

static int64_t first_expert(const struct limits *limits, int64_t rank)
{
    int64_t each = limits->physical_experts / limits->ranks;
    int64_t more = limits->physical_experts % limits->ranks;

    return rank * each + (rank < more ? rank : more);
}

static void limit(struct instance *instance)
{
    struct limits *limits = &instance->limits;
    struct block *block = &limits->block;
    int64_t cap;

    limits->hidden = number(instance, KEY_HIDDEN_SIZE);
    limits->intermediate = number(instance, KEY_INTERMEDIATE_SIZE);
    limits->layers = number(instance, KEY_NUM_LAYERS);
    limits->top_k = (int32_t)number(instance, KEY_TOP_K);
    limits->ranks = (int32_t)number(instance, KEY_EP_SIZE);
    limits->rank = (int32_t)number(instance, KEY_EP_RANK);
    limits->dp_size = (int32_t)number(instance, KEY_DP_SIZE);
    limits->attn_tp = number(instance, KEY_TP_SIZE) / limits->dp_size;
    limits->slots = (int32_t)number(instance, KEY_FORWARDS_IN_FLIGHT_MAX);
    limits->input_type = row_type(instance, KEY_INPUT_FORMAT);
    limits->output_type = row_type(instance, KEY_OUTPUT_FORMAT);
    limits->physical_experts = instance->bounds.physical_experts;
    limits->expert_first = first_expert(limits, limits->rank);
    limits->experts_local = first_expert(limits, limits->rank + 1) - limits->expert_first;
    // As many as the ranks that share a DP rank may bring when each pads its own share.
    limits->capture_tokens = number(instance, KEY_CAPTURE_ROUTED_EXPERTS) != 0
                                 ? multiply(limits->attn_tp, instance->bounds.dispatch_required)
                                 : 0;
    limit_tokens(instance);
    cap = limits->call_tokens_max;
    block->rows = ALIGN_BYTES; // the count lies before
    block->ids =
        add(block->rows, align(multiply(cap, limits->hidden * type_bytes(limits->input_type))));
    block->weights = add(block->ids, align(multiply(cap, limits->top_k * 4)));
    block->bytes = add(block->weights, align(multiply(cap, limits->top_k * 4)));
    instance->bounds.dispatch_call_tokens_max = limits->call_tokens_max;
    instance->bounds.forward_call_tokens_max = limits->forward_tokens_max;
    instance->bounds.expert_first = limits->expert_first;
    instance->bounds.experts_local = limits->experts_local;
}

static void plan_buffer(struct instance *instance, enum buffer buffer, int32_t kind, int64_t bytes,
                        const char *why)
{
    static const char *const names[] = {"scratch", "outgoing", "received",
                                        "results", "returned", "capture"};
    moxie_plan *plan = &instance->plan;
    uint64_t rounded = (uint64_t)align(bytes);

    if (bytes == 0) return;
    instance->planned[plan->buffers_count] = (int32_t)buffer;
    instance->buffers[plan->buffers_count++] = (moxie_buffer){
        .struct_size = sizeof(moxie_buffer),
        .kind = kind,
        .name = names[buffer],
        .bytes = rounded,
        .bytes_mapped = rounded,
        .align = ALIGN_BYTES,
        .why = why,
    };
    if (kind == MOXIE_MEMORY_HOST)
        plan->host_bytes += rounded;
    else
        plan->device_bytes += rounded;
}

static void plan_buffers(struct instance *instance)
{
    const struct limits *limits = &instance->limits;
    int64_t result_bytes =
        multiply(limits->call_tokens_max, limits->hidden * type_bytes(limits->output_type));
    int64_t slots = limits->slots, ranks = limits->ranks;
    int64_t row = 2 * limits->hidden + limits->intermediate;

    if (HAS_FAULT(FAULT_READS_ENVIRONMENT)) {
        for (char **at = environ; at != NULL && *at != NULL; at++)
            row += ALIGN_BYTES;
    }
    plan_buffer(instance, BUFFER_SCRATCH, MOXIE_MEMORY_DEVICE,
                multiply(TASKS * (int64_t)sizeof(double), row),
                "a row, its intermediate and its sum in double, for each of 8 tasks");
    if (limits->dispatcher != DISPATCHER_LOCAL) {
        plan_buffer(instance, BUFFER_OUTGOING, MOXIE_MEMORY_HOST,
                    multiply(slots, limits->block.bytes), "this rank's rows, as they are sent");
        plan_buffer(instance, BUFFER_RECEIVED, MOXIE_MEMORY_DEVICE,
                    multiply(slots * ranks, limits->block.bytes), "every rank's rows");
        plan_buffer(instance, BUFFER_RESULTS, MOXIE_MEMORY_DEVICE,
                    multiply(slots * ranks, align(result_bytes)), "what the experts made of them");
        plan_buffer(instance, BUFFER_RETURNED, MOXIE_MEMORY_HOST,
                    multiply(ranks, align(result_bytes)), "every rank's results for one rank");
    }
    plan_buffer(instance, BUFFER_CAPTURE, MOXIE_MEMORY_DEVICE,
                multiply(multiply(limits->dp_size * limits->capture_tokens, limits->layers),
                         limits->top_k * 4),
                "the chosen expert ids");
}

static void judge_plan(struct instance *instance)
{
    const moxie_plan *plan = &instance->plan;
    int64_t budget = number(instance, KEY_DEVICE_MEMORY_BUDGET_BYTES);

    for (uint64_t i = 0; i < plan->buffers_count; i++) {
        if (instance->buffers[i].bytes > (uint64_t)PLAN_MAX)
            verdict_add(&instance->verdict, MOXIE_E_UNSUPPORTED, KEY_FORWARD_TOKENS_MAX,
                        "buffer %s would take 2^46 bytes or more: set forward_tokens_max lower",
                        instance->buffers[i].name);
    }
    if (instance->verdict.count == 0 && budget > 0 && plan->device_bytes > (uint64_t)budget)
        verdict_add(&instance->verdict, MOXIE_E_CONFIG, KEY_DEVICE_MEMORY_BUDGET_BYTES,
                    "the plan takes %" PRIu64 " device bytes and the budget is %" PRId64
                    ": raise it, or lower %s",
                    plan->device_bytes, budget, instance->bounds.dominant);
}

void judge(struct instance *instance)
{
    struct verdict *verdict = &instance->verdict;
    int unreadable = verdict->count > 0;

    bound_forward(instance);
    bound_ranks(instance);
    judge_sizes(instance);
    judge_ranks(instance);
    judge_kernels(instance);
    judge_flags(instance);
    judge_backends(instance);
    judge_cap(instance);
    instance->plan = (moxie_plan){.struct_size = sizeof(moxie_plan),
                                  .buffer_stride = sizeof(moxie_buffer),
                                  .bounds = &instance->bounds};
    if (verdict->count == 0) {
        limit(instance);
        plan_buffers(instance);
        judge_plan(instance);
    }
    if (verdict->count > 0)
        instance->plan = (moxie_plan){.struct_size = sizeof(moxie_plan),
                                      .buffer_stride = sizeof(moxie_buffer),
                                      .bounds = &instance->bounds};
    else
        instance->plan.buffers = instance->buffers;
    if (unreadable) bound_nothing(&instance->bounds);
    instance->bounds.struct_size = sizeof instance->bounds;
    instance->report = (moxie_report){.struct_size = sizeof(moxie_report),
                                      .reason_stride = sizeof(moxie_reason),
                                      .reasons_count = verdict->count,
                                      .reasons = verdict->reasons,
                                      .warnings = verdict->reasons};
    for (int32_t key = 0; key < KEY_COUNT; key++)
        value_print(&instance->values[key], (enum key)key, instance->printed[key]);
}
