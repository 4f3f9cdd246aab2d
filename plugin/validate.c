// The verdict on the snapshot: what every key must satisfy together with the others. Backends are
// matched in match.c, keys without effect found in unused.c, the memory budget judged in budget.c.

#include "plugin/validate.h"

#include "kernels/types.h"
#include "plugin/backends.h"
#include "plugin/threads.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

// ---- auto --------------------------------------------------------------------------------------

static int is_auto(const struct config *config, enum config_key key)
{
    return strcmp(config_str(config, key), "auto") == 0;
}

// The first backend of a kind on a device, or with any id when `id` is -1; NULL when there is none.
static const struct backend *backend_first(enum backend_kind kind, int32_t id, const char *device)
{
    for (uint32_t i = 0; i < backends_count; i++) {
        const struct backend *backend = &backends[i];

        if (backend->kind == (int32_t)kind && (id < 0 || backend->id == id) &&
            strcmp(backend->device, device) == 0)
            return backend;
    }
    return NULL;
}

const struct backend *validate_auto(const struct config *config, enum backend_kind kind)
{
    const char *device = config_str(config, KEY_DEVICE);

    if (kind == BACKEND_RUNNER) return backend_first(kind, -1, device);
    return backend_first(
        kind, config_i64(config, KEY_EP_SIZE) == 1 ? DISPATCHER_LOCAL : DISPATCHER_ALLTOALL,
        device);
}

void validate_resolve(struct config *config)
{
    const struct backend *runner = validate_auto(config, BACKEND_RUNNER);
    const struct backend *dispatcher = validate_auto(config, BACKEND_DISPATCHER);
    int one_format = runner != NULL && runner->one_format;
    char operands[CONFIG_TEXT_BYTES];

    if (is_auto(config, KEY_RUNNER) && runner != NULL)
        config_resolve(config, KEY_RUNNER, runner->name);
    if (is_auto(config, KEY_DISPATCHER) && dispatcher != NULL)
        config_resolve(config, KEY_DISPATCHER, dispatcher->name);
    if (is_auto(config, KEY_TRANSPORT))
        config_resolve(config, KEY_TRANSPORT,
                       config_word(config, KEY_DEVICE) == DEVICE_WORD_CPU ? "shm" : "nvlink");
    if (!is_auto(config, KEY_ACTIVATION_FORMAT)) return;
    config_word_text(KEY_ACTIVATION_FORMAT,
                     one_format ? backend_operand_format(config_word(config, KEY_WEIGHT_FORMAT))
                                : FORMAT_F32,
                     operands);
    config_resolve(config, KEY_ACTIVATION_FORMAT, operands);
}

void validate_explain(const struct config *config, enum config_key key, char *buffer,
                      uint64_t capacity)
{
    const char *name = config_name(key);
    const char *value = config_str(config, key);

    if (capacity > 0) buffer[0] = '\0';
    if (!config->values[key].resolved) return;
    if (key == KEY_DISPATCHER)
        (void)snprintf(buffer, capacity, "%s = %s: ep_size is %" PRId64, name, value,
                       config_i64(config, KEY_EP_SIZE));
    else if (key == KEY_ACTIVATION_FORMAT && config_word(config, KEY_DEVICE) != DEVICE_WORD_CPU)
        (void)snprintf(buffer, capacity, "%s = %s: device is %s, and weight_format %s", name, value,
                       config_str(config, KEY_DEVICE), config_str(config, KEY_WEIGHT_FORMAT));
    else
        (void)snprintf(buffer, capacity, "%s = %s: device is %s", name, value,
                       config_str(config, KEY_DEVICE));
}

int32_t validate_dispatcher(const struct config *config)
{
    const struct backend *dispatcher = backend_find(
        BACKEND_DISPATCHER, config_str(config, KEY_DISPATCHER), config_str(config, KEY_DEVICE));

    return dispatcher == NULL ? -1 : dispatcher->id;
}

int validate_computes(const struct config *config)
{
    return strcmp(config_str(config, KEY_RUNNER), BACKEND_RUNNER_NONE) != 0;
}

int validate_has_wire(const struct config *config)
{
    return config_i64(config, KEY_EP_SIZE) > 1 && validate_dispatcher(config) != DISPATCHER_LOCAL;
}

// ---- Ranks and counts --------------------------------------------------------------------------

// What else has to change when ep_size becomes 1: " and KEY to VALUE" for each.
static void with_one_rank(const struct config *config, char *buffer, size_t capacity)
{
    int local = config->values[KEY_DISPATCHER].resolved || config_i64(config, KEY_TP_SIZE) == 1 ||
                validate_dispatcher(config) <= DISPATCHER_LOCAL;

    (void)snprintf(buffer, capacity, "%s%s",
                   config_i64(config, KEY_EP_RANK) > 0 ? " and ep_rank to 0" : "",
                   local ? "" : " and dispatcher to local");
}

static void check_ranks(const struct config *config, struct report *report)
{
    int64_t tp_size = config_i64(config, KEY_TP_SIZE);
    int64_t ep_size = config_i64(config, KEY_EP_SIZE);
    int64_t ep_rank = config_i64(config, KEY_EP_RANK);
    int known = config_ok(config, KEY_EP_SIZE) && config_ok(config, KEY_TP_SIZE);
    char one[64], other[96] = "";

    with_one_rank(config, one, sizeof one);
    if (tp_size == 1)
        (void)snprintf(other, sizeof other, ", or tp_size to %" PRId64, ep_size);
    else if (tp_size <= MOXIE_RANKS_MAX && ep_rank < tp_size)
        (void)snprintf(other, sizeof other, ", or ep_size to %" PRId64, tp_size);
    else if (tp_size <= MOXIE_RANKS_MAX)
        (void)snprintf(other, sizeof other, ", or ep_size to %" PRId64 " and ep_rank to %" PRId64,
                       tp_size, tp_size - 1);
    if (known && ep_size != 1 && ep_size != tp_size)
        report_reason(report, MOXIE_E_CONFIG, KEY_EP_SIZE,
                      "ep_size %" PRId64 " is neither 1 nor tp_size %" PRId64
                      ": set ep_size to 1%s%s",
                      ep_size, tp_size, one, other);
    if (config_ok(config, KEY_EP_SIZE) && ep_rank >= ep_size)
        report_reason(report, MOXIE_E_CONFIG, KEY_EP_RANK,
                      "ep_rank %" PRId64 " is not below ep_size %" PRId64
                      ": set ep_rank to %" PRId64 "%s",
                      ep_rank, ep_size, ep_size - 1, ep_size == 1 ? "" : " or less");
}

static void check_counts(const struct config *config, struct report *report)
{
    static const struct {
        enum config_key key;
        int32_t most;
        const char *why;
    } rows[] = {
        {KEY_NUM_LAYERS, INT32_MAX, "layers are counted in 32 bits"},
        {KEY_TP_SIZE, INT32_MAX, "ranks are counted in 32 bits"},
        {KEY_DP_SIZE, INT32_MAX, "ranks are counted in 32 bits"},
        {KEY_CPU_THREADS, THREADS_WORKERS_MAX, "a pool has no more"},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (config_i64(config, rows[i].key) <= rows[i].most) continue;
        if (rows[i].key == KEY_CPU_THREADS &&
            (!config_ok(config, KEY_DEVICE) || config_word(config, KEY_DEVICE) != DEVICE_WORD_CPU))
            continue; // no pool
        report_reason(report, MOXIE_E_UNSUPPORTED, rows[i].key,
                      "%s is %" PRId64 ", and %s: set it to %d or less", config_name(rows[i].key),
                      config_i64(config, rows[i].key), rows[i].why, rows[i].most);
    }
}

// ---- Meaning -----------------------------------------------------------------------------------

static void check_speculative(const struct config *config, struct report *report)
{
    const char *algorithm = config_str(config, KEY_SPECULATIVE_ALGORITHM);
    int64_t draft = config_i64(config, KEY_SPECULATIVE_DRAFT_TOKENS);

    if (!config_ok(config, KEY_SPECULATIVE_ALGORITHM) ||
        !config_ok(config, KEY_SPECULATIVE_DRAFT_TOKENS) ||
        !config_ok(config, KEY_DISAGGREGATION_MODE))
        return;
    // Without decode there are no draft tokens.
    if (config_word(config, KEY_DISAGGREGATION_MODE) == DISAGGREGATION_PREFILL) return;
    if (algorithm[0] == '\0' || strcmp(algorithm, "none") == 0 || draft >= 1) return;
    report_reason(report, MOXIE_E_CONFIG, KEY_SPECULATIVE_DRAFT_TOKENS,
                  "unresolved configuration: speculative_algorithm is '%s' and "
                  "speculative_draft_tokens is %s0: validate after the speculative settings are "
                  "resolved, or set speculative_draft_tokens to 1 or more",
                  algorithm,
                  config_found(config, KEY_SPECULATIVE_DRAFT_TOKENS) ? "" : "absent, so ");
}

// Parameters that only one activation has, and the flag that only one top_k allows.
static void check_honoured(const struct config *config, struct report *report)
{
    static const enum config_key parameters[] = {KEY_ACTIVATION_ALPHA, KEY_ACTIVATION_BETA,
                                                 KEY_ACTIVATION_LIMIT};
    static const char *const neutral[] = {"1.702", "1", "0"};
    int has_parameters = config_word(config, KEY_ACTIVATION) == ACTIVATION_SWIGLUOAI;
    int64_t top_k = config_i64(config, KEY_TOP_K);
    double limit = config_f64(config, KEY_ACTIVATION_LIMIT);
    char seen[64];

    if (!validate_computes(config)) return; // whether they are is the host's affair
    for (int32_t i = 0; i < 3; i++) {
        if (has_parameters || !config_ok(config, KEY_ACTIVATION) ||
            !config_changed(config, parameters[i]))
            continue;
        config_print(config, parameters[i], seen, sizeof seen);
        report_reason(report, MOXIE_E_UNSUPPORTED, parameters[i],
                      "%s is %s, and activation %s would not honour it: set it to %s, or "
                      "activation to swigluoai",
                      config_name(parameters[i]), seen, config_str(config, KEY_ACTIVATION),
                      neutral[i]);
    }
    if (limit != 0 && (float)limit == 0 && has_parameters)
        report_reason(report, MOXIE_E_CONFIG, KEY_ACTIVATION_LIMIT,
                      "activation_limit is %g, which 32 bits have as 0, and that is none: set it "
                      "to 0, or to 1e-38 or more",
                      limit);
    if (config_i64(config, KEY_APPLY_ROUTER_WEIGHT_ON_INPUT) == 1 && top_k > 1)
        report_reason(report, MOXIE_E_CONFIG, KEY_APPLY_ROUTER_WEIGHT_ON_INPUT,
                      "apply_router_weight_on_input is 1 and top_k is %" PRId64
                      ", where a row has several weights: set apply_router_weight_on_input to 0, "
                      "or top_k to 1",
                      top_k);
}

// A runner that takes rows of whole 16 bytes wants more columns of 4-bit weights than a group has.
static int counts_rows(const struct config *config)
{
    const struct backend *runner = backend_find(BACKEND_RUNNER, config_str(config, KEY_RUNNER),
                                                config_str(config, KEY_DEVICE));

    if (runner == NULL) runner = validate_auto(config, BACKEND_RUNNER);
    return runner != NULL && runner->row_multiple_bytes > 0;
}

// Formats that scale groups of columns need whole groups.
static void check_groups(const struct config *config, struct report *report)
{
    int32_t weight = config_word(config, KEY_WEIGHT_FORMAT);
    int32_t operand = config_word(config, KEY_ACTIVATION_FORMAT);
    int wire =
        validate_has_wire(config) && config_word(config, KEY_DISPATCH_FORMAT) == DISPATCH_NVFP4;
    int computes = validate_computes(config);
    int64_t weight_group = !computes || counts_rows(config)                      ? 1
                           : weight == FORMAT_INT4_G32 || weight == FORMAT_MXFP4 ? 32
                           : weight == FORMAT_NVFP4                              ? NVFP4_GROUP
                                                                                 : 1;
    int64_t operand_group = computes && operand == FORMAT_NVFP4 ? NVFP4_GROUP : 1;
    const struct {
        enum config_key columns, format;
        int64_t group;
    } rows[] = {
        {KEY_HIDDEN_SIZE, KEY_WEIGHT_FORMAT, weight_group},
        {KEY_HIDDEN_SIZE, KEY_ACTIVATION_FORMAT, operand_group},
        {KEY_HIDDEN_SIZE, KEY_DISPATCH_FORMAT, wire ? NVFP4_GROUP : 1},
        {KEY_INTERMEDIATE_SIZE, KEY_WEIGHT_FORMAT, weight_group},
        {KEY_INTERMEDIATE_SIZE, KEY_ACTIVATION_FORMAT, operand_group},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t columns = config_i64(config, rows[i].columns);
        int64_t group = rows[i].group;

        if (!config_ok(config, rows[i].columns) || columns % group == 0 || columns > INT32_MAX)
            continue;
        report_reason(report, MOXIE_E_UNSUPPORTED, rows[i].columns,
                      "%s %" PRId64 " is no multiple of %" PRId64
                      ", the columns that one scale of %s %s covers: set "
                      "%s to %" PRId64 ", or %s to %s",
                      config_name(rows[i].columns), columns, group, config_name(rows[i].format),
                      config_str(config, rows[i].format), config_name(rows[i].columns),
                      columns < group ? group : columns / group * group,
                      config_name(rows[i].format),
                      rows[i].format == KEY_DISPATCH_FORMAT ? "input" : "bf16");
    }
}

// ---- Between ranks -----------------------------------------------------------------------------

static void check_transport(const struct config *config, struct report *report)
{
    int on_cpu = config_word(config, KEY_DEVICE) == DEVICE_WORD_CPU;
    int32_t transport = config_word(config, KEY_TRANSPORT);

    if (!config_ok(config, KEY_TRANSPORT) || !config_ok(config, KEY_DEVICE) ||
        (transport == TRANSPORT_SHM) == on_cpu)
        return;
    report_reason(report, MOXIE_E_UNSUPPORTED, KEY_TRANSPORT,
                  "transport %s moves rows of %s, and device is %s: set transport to auto",
                  config_str(config, KEY_TRANSPORT), on_cpu ? "GPUs" : "CPUs",
                  config_str(config, KEY_DEVICE));
}

// ---- Capacity ----------------------------------------------------------------------------------

// Rows whose pairs 32-bit indices count.
static int64_t rows_most(const struct config *config)
{
    return INT32_MAX / config_i64(config, KEY_TOP_K);
}

static void check_dispatch_cap(const struct config *config, const struct bounds *bounds,
                               struct report *report)
{
    int64_t cap = config_i64(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK);
    int64_t rounds = config_i64(config, KEY_DISPATCH_ROUNDS_MAX);
    int32_t kind = validate_dispatcher(config);
    char explain[320];
    int64_t total;

    if (kind == DISPATCHER_LOCAL || kind == DISPATCHER_ALLGATHER || cap == 0 ||
        bounds->dispatch_required < 0)
        return;
    if (bounds->forward_tokens > rows_most(config)) return; // refused below, whatever the cap
    // A product past 2^62 is surely enough.
    if (!size_mul(cap, rounds, &total) || total >= bounds->dispatch_required) return;
    bounds_explain(bounds, config, explain, sizeof explain);
    report_reason(
        report, MOXIE_E_CAPACITY, KEY_MAX_DISPATCH_TOKENS_PER_RANK,
        "max_dispatch_tokens_per_rank %" PRId64 " x dispatch_rounds_max %" PRId64
        " is below dispatch_required %" PRId64
        ", the tokens that one rank may bring (%s): set max_dispatch_tokens_per_rank to %" PRId64
        ", or dispatch_rounds_max to %" PRId64,
        cap, rounds, bounds->dispatch_required, explain,
        ceil_div(bounds->dispatch_required, rounds), ceil_div(bounds->dispatch_required, cap));
}

// Rows of an all-to-all round with an explicit cap: the cap is the key to lower, and the rounds the
// one to raise where a forward that can be counted needs more of them then.
static void refuse_cap(const struct config *config, const struct bounds *bounds, int countable,
                       struct report *report)
{
    int64_t most = rows_most(config) / config_i64(config, KEY_EP_SIZE);
    int64_t rounds = ceil_div(bounds->dispatch_required, most);
    char more[96] = "";

    if (countable && rounds > config_i64(config, KEY_DISPATCH_ROUNDS_MAX))
        (void)snprintf(more, sizeof more, " and dispatch_rounds_max to %" PRId64, rounds);
    report_reason(
        report, MOXIE_E_UNSUPPORTED, KEY_MAX_DISPATCH_TOKENS_PER_RANK,
        "ep_size %" PRId64 " x max_dispatch_tokens_per_rank %" PRId64 " rows x top_k %" PRId64
        " pass %d, the most that 32-bit indices count: set max_dispatch_tokens_per_rank to %" PRId64
        "%s",
        config_i64(config, KEY_EP_SIZE), bounds->dispatch_tokens, config_i64(config, KEY_TOP_K),
        INT32_MAX, most, more);
}

// Rows that the host's own bound brings: the dominant key is the one to lower, or the rounds the
// one to raise.
static void refuse_rows(const struct config *config, const struct bounds *bounds, int64_t rows,
                        int64_t rounds, struct report *report)
{
    char explain[320], advice[160], more[64] = "";
    enum config_key key =
        bounds_advise(bounds, config, bounds_tokens_countable(config), advice, sizeof advice);

    bounds_explain(bounds, config, explain, sizeof explain);
    if (rounds > 0)
        (void)snprintf(more, sizeof more, ", or dispatch_rounds_max to %" PRId64, rounds);
    report_reason(report, MOXIE_E_UNSUPPORTED, key,
                  "%" PRId64 " rows x top_k %" PRId64
                  " pass %d, the most that 32-bit indices count (%s): set %s%s",
                  rows, config_i64(config, KEY_TOP_K), INT32_MAX, explain, advice, more);
}

static void check_rows(const struct config *config, const struct bounds *bounds,
                       struct report *report)
{
    int64_t most = rows_most(config);
    int64_t rows = plan_rows_max(config, bounds);
    int pushes = validate_dispatcher(config) == DISPATCHER_ALLTOALL;
    int capped = pushes && config_i64(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK) > 0;
    int64_t host_rows = bounds->forward_tokens;

    if (config_i64(config, KEY_CAPTURE_ROUTED_EXPERTS) == 1 && bounds->capture_rows > host_rows)
        host_rows = bounds->capture_rows;
    // A cap says how many by itself, whatever the forward brings.
    if (rows > most && capped)
        refuse_cap(config, bounds, bounds->allgather_rows >= 0 && host_rows <= most, report);
    if (bounds->allgather_rows < 0) return; // said already
    if (host_rows > most)
        refuse_rows(config, bounds, host_rows, 0, report);
    else if (rows > most && pushes && !capped)
        refuse_rows(config, bounds, rows,
                    ceil_div(bounds->dispatch_required, most / config_i64(config, KEY_EP_SIZE)),
                    report);
    else if (rows > most && !pushes)
        refuse_rows(config, bounds, rows, 0, report);
}

void validate_config(const struct config *config, const struct bounds *bounds,
                     struct report *report)
{
    const char *device = config_str(config, KEY_DEVICE);

    check_ranks(config, report);
    check_counts(config, report);
    check_speculative(config, report);
    check_honoured(config, report);
    check_groups(config, report);
    check_transport(config, report);
    validate_backends(config, backend_find(BACKEND_RUNNER, config_str(config, KEY_RUNNER), device),
                      backend_find(BACKEND_DISPATCHER, config_str(config, KEY_DISPATCHER), device),
                      report);
    check_dispatch_cap(config, bounds, report);
    check_rows(config, bounds, report);
    validate_unused(config, bounds, report);
}
