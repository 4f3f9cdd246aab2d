// The memory budget. The plan is a pure function, so what another value of a key would save is
// found by planning again with it, not by a second formula that could drift.

#include "plugin/validate.h"

#include <inttypes.h>
#include <stdio.h>

#define LARGEST_COUNT 3

static int64_t planned_bytes(const struct plan *plan)
{
    return (int64_t)(plan->device_bytes + plan->symmetric_bytes);
}

// Device and symmetric bytes of the plan with `key` at `value`; INT64_MAX when there is none.
static int64_t bytes_with(const struct config *config, enum config_key key, int64_t value)
{
    struct config changed = *config;
    struct report report = {0};
    struct bounds bounds;
    struct plan plan;
    int64_t bytes = INT64_MAX;

    changed.values[key].i64 = value;
    bounds_compute(&bounds, &changed, &report);
    plan_make(&plan, &changed, &bounds, &report);
    if (plan.buffers_count > 0) bytes = planned_bytes(&plan);
    report_fini(&report);
    return bytes;
}

// A key that may be lowered from `high` to `low`.
struct lever {
    enum config_key key;
    int64_t low, high;
};

// The value of the lever that fits the budget and changes the least, by bisection; -1 when none
// does.
static int64_t value_that_fits(const struct config *config, struct lever lever, int64_t budget)
{
    int64_t low = lever.low, high = lever.high;
    int64_t middle;

    if (bytes_with(config, lever.key, low) > budget) return -1;
    while (high - low > 1) {
        middle = low + (high - low) / 2;
        if (bytes_with(config, lever.key, middle) <= budget)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// The fewest rounds in which an all-to-all of derived capacity fits the budget; 0 when none does.
static int64_t rounds_that_fit(const struct config *config, const struct bounds *bounds,
                               int64_t budget)
{
    int64_t low = config_i64(config, KEY_DISPATCH_ROUNDS_MAX), high = bounds->dispatch_required;
    int64_t middle;

    if (validate_dispatcher(config) != DISPATCHER_ALLTOALL || high <= low ||
        config_i64(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK) > 0 ||
        bytes_with(config, KEY_DISPATCH_ROUNDS_MAX, high) > budget)
        return 0;
    while (high - low > 1) {
        middle = low + (high - low) / 2;
        if (bytes_with(config, KEY_DISPATCH_ROUNDS_MAX, middle) <= budget)
            high = middle;
        else
            low = middle;
    }
    return high;
}

static struct lever dominant_lever(const struct config *config, const struct bounds *bounds)
{
    enum config_key key = KEY_FORWARD_TOKENS_MAX;

    if (bounds->dominant == KEY_COUNT) return (struct lever){key, 0, 0};
    key = (enum config_key)bounds->dominant;
    return (struct lever){key, 1, config_i64(config, key)};
}

// The lever whose half way down saves most.
static struct lever best_lever(const struct config *config, const struct bounds *bounds)
{
    int64_t rounds = config_i64(config, KEY_DISPATCH_ROUNDS_MAX);
    const struct lever levers[] = {
        dominant_lever(config, bounds),
        {KEY_SPECULATIVE_DRAFT_TOKENS, 1, bounds->tokens_per_request},
        {KEY_MAX_DISPATCH_TOKENS_PER_RANK, ceil_div(bounds->dispatch_required, rounds),
         config_i64(config, KEY_MAX_DISPATCH_TOKENS_PER_RANK)},
        {KEY_FORWARDS_IN_FLIGHT_MAX, 1, config_i64(config, KEY_FORWARDS_IN_FLIGHT_MAX)},
        {KEY_CAPTURE_ROUTED_EXPERTS, 0, config_i64(config, KEY_CAPTURE_ROUTED_EXPERTS)},
    };
    struct lever best = {KEY_DEVICE_MEMORY_BUDGET_BYTES, 0, 0};
    int64_t best_bytes = INT64_MAX;
    int64_t bytes;

    for (size_t i = 0; i < sizeof levers / sizeof levers[0]; i++) {
        if (levers[i].high <= levers[i].low) continue;
        bytes =
            bytes_with(config, levers[i].key, levers[i].low + (levers[i].high - levers[i].low) / 2);
        if (bytes >= best_bytes) continue;
        best = levers[i];
        best_bytes = bytes;
    }
    return best;
}

// "pair_out 939524096, mid 268435456, window 824573952": the largest first.
static void largest_print(const struct plan *plan, char *buffer, size_t capacity)
{
    uint32_t taken = 0;
    size_t length = 0;

    buffer[0] = '\0';
    for (int32_t n = 0; n < LARGEST_COUNT && length < capacity; n++) {
        const moxie_buffer *largest = NULL;
        uint32_t index = 0;

        for (uint32_t i = 0; i < plan->buffers_count; i++) {
            const moxie_buffer *row = &plan->buffers[i];

            if ((taken & 1u << i) != 0 || row->kind == MOXIE_MEMORY_HOST ||
                row->kind == MOXIE_MEMORY_PINNED)
                continue;
            if (largest != NULL && row->bytes_mapped <= largest->bytes_mapped) continue;
            largest = row;
            index = i;
        }
        if (largest == NULL) return;
        taken |= 1u << index;
        length += (size_t)snprintf(buffer + length, capacity - length, "%s%s %" PRIu64,
                                   n == 0 ? "" : ", ", largest->name, largest->bytes_mapped);
    }
}

// Writes "KEY to N or less, or " for what fits the budget, or nothing. Returns the key to blame.
static enum config_key advise(const struct config *config, const struct bounds *bounds,
                              int64_t budget, char *advice, size_t capacity)
{
    struct lever lever = best_lever(config, bounds);
    int64_t rounds = rounds_that_fit(config, bounds, budget);
    int64_t value = -1;
    int written = 0;

    if (lever.high > lever.low) value = value_that_fits(config, lever, budget);
    if (value < 0 && bounds->forward_tokens > 1) {
        lever = (struct lever){KEY_FORWARD_TOKENS_MAX, 1, bounds->forward_tokens};
        value = value_that_fits(config, lever, budget);
    }
    advice[0] = '\0';
    if (value >= 0)
        written =
            snprintf(advice, capacity, "%s to %" PRId64 "%s, or ", config_name(lever.key), value,
                     value == 0 || lever.key == KEY_MAX_DISPATCH_TOKENS_PER_RANK ? "" : " or less");
    if (rounds > 0)
        (void)snprintf(advice + written, capacity - (size_t)written, "%s to %" PRId64 ", or ",
                       config_name(KEY_DISPATCH_ROUNDS_MAX), rounds);
    if (value >= 0) return lever.key;
    return rounds > 0 ? KEY_DISPATCH_ROUNDS_MAX : KEY_DEVICE_MEMORY_BUDGET_BYTES;
}

static void refuse_budget(const struct config *config, const struct plan *plan,
                          const struct bounds *bounds, struct report *report)
{
    int64_t budget = config_i64(config, KEY_DEVICE_MEMORY_BUDGET_BYTES);
    char largest[256], explain[320], advice[256];
    enum config_key key = advise(config, bounds, budget, advice, sizeof advice);

    largest_print(plan, largest, sizeof largest);
    bounds_explain(bounds, config, explain, sizeof explain);
    report_reason(report, MOXIE_E_CAPACITY, key,
                  "device %" PRIu64 " + symmetric %" PRIu64
                  " bytes exceed device_memory_budget_bytes %" PRId64
                  " (%s; largest: %s): set %sdevice_memory_budget_bytes to %" PRId64,
                  plan->device_bytes, plan->symmetric_bytes, budget, explain, largest, advice,
                  planned_bytes(plan));
}

void validate_advise(const struct config *config, int64_t budget, char *advice, uint64_t capacity)
{
    struct report scratch = {0};
    struct bounds bounds;

    bounds_compute(&bounds, config, &scratch);
    report_fini(&scratch);
    (void)advise(config, &bounds, budget, advice, capacity);
}

void validate_plan(const struct config *config, const struct plan *plan, struct report *report)
{
    int64_t budget = config_i64(config, KEY_DEVICE_MEMORY_BUDGET_BYTES);
    struct report scratch = {0};
    struct bounds bounds;

    if (budget == 0 || plan->buffers_count == 0 || planned_bytes(plan) <= budget) return;
    bounds_compute(&bounds, config, &scratch);
    report_fini(&scratch);
    refuse_budget(config, plan, &bounds, report);
}
