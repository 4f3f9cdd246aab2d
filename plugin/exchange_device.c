// Flags over device memory: kernels signal and wait in stream order, so that a captured graph does
// too. What a replay must read anew (generation, active ranks, epochs, the failure) lies in slot
// 0's own window; what the host is told lies in pinned memory.

#include "plugin/exchange_verdict.h"

#include <string.h>

static const struct kernels *kernels_of(const struct exchange_group *group)
{
    return group->instance->device->kernels;
}

static void find_peers(const struct exchange_group *group, const struct window *window,
                       void *peers[MOXIE_RANKS_MAX])
{
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++)
        peers[rank] = window_to(window, rank);
}

// ---- generations -------------------------------------------------------------------------------

// Every slot begins the group's generation; when it returns all ranks have been told.
static int32_t tell_generation(struct exchange_group *group, struct exchange *slots,
                               int32_t slots_count, moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    moxie_instance *instance = group->instance;
    void *peers[MOXIE_RANKS_MAX];
    int32_t st = MOXIE_OK;

    for (int32_t i = 0; i < slots_count; i++) {
        const struct regroup_args args = {.state = group->state,
                                          .peers = peers,
                                          .generation = group->generation,
                                          .active = group->active,
                                          .slot = i,
                                          .ranks = limits->ranks,
                                          .rank = limits->rank};

        find_peers(group, slots[i].window, peers);
        TRY(instance_launched(instance, kernels_of(group)->regroup(&args, group->stream), "regroup",
                              error));
    }
    TRY(instance_launched(instance, instance->device->stream_finish(group->stream), "regroup",
                          error));
out:
    return st;
}

static int32_t regroup_device(struct exchange_group *group, struct exchange *slots,
                              int32_t slots_count, uint64_t active, moxie_error *error)
{
    uint64_t before = group->active;
    int32_t st = MOXIE_OK;

    // Before anything is told: a device that cannot, says so here.
    TRY(instance_launched(group->instance, group->instance->device->stream_finish(group->stream),
                          "regroup", error));
    group->active = active;
    group->generation++;
    st = tell_generation(group, slots, slots_count, error);
    if (st == MOXIE_OK) {
        // The kind alone: who polls meanwhile copies the rest as it was.
        __atomic_store_n(&group->report->verdict.kind, VERDICT_NONE, __ATOMIC_RELEASE);
    } else {
        group->active = before;
        group->generation--;
    }
out:
    return st;
}

// ---- open and close ----------------------------------------------------------------------------

static int32_t open_device(struct exchange_group *group, struct exchange *slots,
                           int32_t slots_count, moxie_error *error)
{
    const struct window_layout *w = &group->instance->plan.window;
    void *report = NULL;
    int32_t st = MOXIE_OK;

    TRY(instance_launched(group->instance, group->instance->device->stream_open(&group->stream),
                          "stream", error));
    TRY(memory_make(&group->instance->memory, BUFFER_REPORT, &report, error));
    group->report = report;
    memset(report, 0, (size_t)group->instance->plan.slot_bytes[BUFFER_REPORT]);
    group->link = (struct report_link){group->report, group->instance->reports};
    group->instance->reports = &group->link;
    group->beat_window = slots[0].window;
    // Where NCCL waits, the host ends that, and must be able to say so.
    group->state = group->instance->plan.limits.staged
                       ? (struct flag_state *)(group->report + 1)
                       : (struct flag_state *)(void *)(slots[0].window->base + w->state);
    for (int32_t i = 0; i < slots_count; i++)
        slots[i].counts = memory_slot(&group->instance->memory, BUFFER_FEW_IDS, i);
    TRY(tell_generation(group, slots, slots_count, error));
out:
    return st;
}

static void close_device(struct exchange_group *group)
{
    struct report_link **link = &group->instance->reports;

    group->instance->device->stream_close(group->stream);
    group->stream = NULL;
    if (group->report == NULL) return;
    // What still waits reads the windows and writes the report.
    (void)group->instance->device->synchronize();
    while (*link != &group->link)
        link = &(*link)->next;
    *link = group->link.next;
    instance_count(group->report, &group->instance->stats);
    memory_unmake(&group->instance->memory, BUFFER_REPORT, group->report);
    group->report = NULL;
}

// ---- a layer -----------------------------------------------------------------------------------

// The wait for rows looks for peers that have gone on.
static int32_t begin_device(struct exchange_group *group, struct exchange *slot, moxie_error *error)
{
    (void)group;
    (void)slot;
    (void)error;
    return MOXIE_OK;
}

// Where a signal or an await counts its runs, for those who watch what is between.
static uint64_t *mark_of(const struct exchange_group *group, const struct exchange_round *round,
                         uint64_t (*marks)[KERNEL_SLOTS_MAX])
{
    if (!exchange_limits(group)->staged) return NULL;
    return &marks[group->instance->device->is_capturing(round->batch->stream)][round->slot];
}

// A wait that follows at once sends as well, unless NCCL carries what was sent in between.
static int waits_send(const struct exchange_group *group, const struct exchange_round *round)
{
    return round->joined && !exchange_limits(group)->staged;
}

static int32_t send_device(struct exchange_group *group, struct exchange *slot,
                           const struct exchange_round *round, enum flag_word word,
                           moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    void *peers[MOXIE_RANKS_MAX];
    const struct signal_args args = {.state = group->state,
                                     .peers = peers,
                                     .begun = mark_of(group, round, group->report->begun),
                                     .slot = round->slot,
                                     .word = (int32_t)word,
                                     .ranks = limits->ranks,
                                     .rank = limits->rank};

    if (waits_send(group, round)) return MOXIE_OK;
    find_peers(group, slot->window, peers);
    return exchange_launched(group, slot, round,
                             kernels_of(group)->signal(&args, round->batch->stream), "signal",
                             error);
}

struct await_args exchange_await_stage(const struct exchange_group *group,
                                       const struct exchange *slot,
                                       const struct exchange_round *round, enum flag_word word,
                                       struct exchange_peers *peers)
{
    const struct limits *limits = exchange_limits(group);
    const struct window_layout *w = &group->instance->plan.window;

    find_peers(group, slot->window, peers->windows);
    find_peers(group, group->beat_window, peers->beats);
    return (struct await_args){
        .state = group->state,
        .peers = peers->windows,
        .window = slot->window->base,
        .beats = group->beat_window->base,
        .peer_beats = peers->beats,
        .peer_counts = slot->window->base + w->counts,
        .counts = word == WORD_DISPATCH ? slot->counts : NULL,
        .peer_ids = slot->window->base + w->ids,
        .peer_ids_slab_bytes = w->ids_slab_bytes,
        .ids = word == WORD_DISPATCH ? exchange_few_ids(group, round) : NULL,
        .report = group->report,
        .ended = mark_of(group, round, group->report->ended),
        .timeout_ns = (int64_t)limits->timeout_ms * 1000000,
        .slot = round->slot,
        .word = (int32_t)word,
        .ranks = limits->ranks,
        .rank = limits->rank,
        .tokens = round->tokens,
        .rows_most = round->rows_most,
        .round = round->index,
        .top_k = limits->top_k,
    };
}

static int32_t wait_device(struct exchange_group *group, struct exchange *slot,
                           const struct exchange_round *round, enum flag_word word,
                           moxie_error *error)
{
    struct exchange_peers peers;
    struct await_args args = exchange_await_stage(group, slot, round, word, &peers);

    if (!waits_send(group, round)) args.peers = NULL;
    return exchange_launched(group, slot, round,
                             kernels_of(group)->await(&args, round->batch->stream), "await", error);
}

// The kind is written last, so the rest is there when it is.
static int32_t failure_device(const struct exchange_group *group, moxie_error *error)
{
    struct flag_verdict verdict = {.kind = VERDICT_NONE};

    if (group->report == NULL) return MOXIE_OK;
    verdict.kind = __atomic_load_n(&group->report->verdict.kind, __ATOMIC_ACQUIRE);
    if (verdict.kind == VERDICT_NONE) return MOXIE_OK;
    verdict = group->report->verdict;
    return verdict_say(&verdict, group, error);
}

const struct exchange_flags exchange_flags_device = {
    .open = open_device,
    .close = close_device,
    .begin = begin_device,
    .send = send_device,
    .wait = wait_device,
    .regroup = regroup_device,
    .failure = failure_device,
};
