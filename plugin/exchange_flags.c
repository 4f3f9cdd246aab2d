// Flags, waits and generations of the push protocol.

#include "plugin/exchange_flags.h"

#include "plugin/exchange_verdict.h"

#include <stdatomic.h>

static uint64_t stamp(const struct exchange_group *group, const struct exchange *slot)
{
    return group->generation << FLAG_EPOCH_BITS | slot->epoch;
}

int exchange_is_peer(const struct exchange_group *group, int32_t rank)
{
    return rank != exchange_limits(group)->rank && (group->active >> rank & 1) != 0;
}

void exchange_signal(struct exchange_group *group, struct exchange *slot, enum flag_word word)
{
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
        if (exchange_is_peer(group, rank))
            group->ops->signal(group->transport, slot->window, rank, word, stamp(group, slot));
    }
}

// ---- generations -------------------------------------------------------------------------------

void exchange_regroup(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                      uint64_t active)
{
    group->active = active;
    group->generation++;
    for (int32_t i = 0; i < slots_count; i++) {
        slots[i].epoch = 0;
        for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
            if (rank == exchange_limits(group)->rank) continue;
            group->ops->signal(group->transport, slots[i].window, rank, WORD_ACTIVE, active);
            group->ops->signal(group->transport, slots[i].window, rank, WORD_GENERATION,
                               group->generation);
        }
    }
}

int32_t exchange_check_peers(struct exchange_group *group, struct exchange *slot,
                             moxie_error *error)
{
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
        uint64_t generation, active;
        uint32_t kind;

        if (!exchange_is_peer(group, rank)) continue;
        generation = group->ops->read(group->transport, slot->window, rank, WORD_GENERATION);
        // Told before the generation, so at least as new.
        active = group->ops->read(group->transport, slot->window, rank, WORD_ACTIVE);
        // No mask grows, so one without this rank is final in whatever generation; 0 is none yet.
        if (active != 0 && (active >> exchange_limits(group)->rank & 1) == 0)
            kind = VERDICT_LEFT_OUT;
        else if (generation > group->generation)
            kind = VERDICT_MOVED_ON;
        else if (generation < group->generation || active == 0 || active == group->active)
            continue;
        // As none grows, one with more ranks was so in this generation. One with fewer may be of
        // the next, which is then told in a moment: to follow is right in either case.
        else if ((active & ~group->active) != 0)
            kind = VERDICT_MASKS;
        else
            kind = VERDICT_MOVED_ON;
        return verdict_say(&(struct flag_verdict){.kind = kind,
                                                  .rank = rank,
                                                  .generation = group->generation,
                                                  .told_generation = generation,
                                                  .told_active = active},
                           group, error);
    }
    return MOXIE_OK;
}

// ---- waits -------------------------------------------------------------------------------------

// One wait: its clock, and what it had heard of the peers by the middle of it.
struct watch {
    int64_t beat_ns; // between two beats
    int64_t next_ns, middle_ns, deadline_ns;
    int32_t noted; // `beats` is filled
    uint64_t beats[MOXIE_RANKS_MAX];
};

static struct watch watch_start(const struct exchange_group *group)
{
    const int64_t wait_ns = (int64_t)exchange_limits(group)->timeout_ms * 1000000;
    const int64_t now_ns = clock_ns();

    return (struct watch){.beat_ns = wait_ns / FLAG_BEATS,
                          .next_ns = now_ns + wait_ns / FLAG_BEATS,
                          .middle_ns = now_ns + wait_ns / 2,
                          .deadline_ns = now_ns + wait_ns};
}

static uint64_t beat_of(const struct exchange_group *group, int32_t rank)
{
    return group->ops->read(group->transport, group->beat_window, rank, WORD_BEAT);
}

// Says that this rank waits, and in the middle notes how far the others' words are. A process that
// was stopped across the middle cannot tell who was alive meanwhile: it listens for a while more.
static void watch_beat(struct exchange_group *group, struct watch *watch, int64_t now_ns)
{
    group->beats++;
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
        if (exchange_is_peer(group, rank))
            group->ops->signal(group->transport, group->beat_window, rank, WORD_BEAT, group->beats);
    }
    watch->next_ns = now_ns + watch->beat_ns;
    if (watch->noted || now_ns < watch->middle_ns) return;
    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++)
        watch->beats[rank] = beat_of(group, rank);
    watch->noted = 1;
    if (watch->deadline_ns < now_ns + 2 * watch->beat_ns)
        watch->deadline_ns = now_ns + 2 * watch->beat_ns;
}

// The deadline has passed, and the ranks of the set `silent` owe a flag. The first of them that did
// not wait itself is to blame.
static int32_t give_up(const struct exchange_group *group, const struct exchange *slot,
                       const struct watch *watch, uint64_t silent, enum flag_word word,
                       moxie_error *error)
{
    struct flag_verdict verdict = {.kind = VERDICT_ALL_WAIT,
                                   .rank = -1,
                                   .word = (uint32_t)word,
                                   .epoch = slot->epoch,
                                   .generation = group->generation,
                                   .silent = silent};

    for (int32_t rank = 0; rank < exchange_limits(group)->ranks && verdict.rank < 0; rank++) {
        if ((silent >> rank & 1) == 0 || beat_of(group, rank) != watch->beats[rank]) continue;
        verdict.kind = VERDICT_SILENT;
        verdict.rank = rank;
    }
    return verdict_say(&verdict, group, error);
}

// The active peers whose flag has not come, a bit each.
static uint64_t missing(const struct exchange_group *group, const struct exchange *slot,
                        enum flag_word word)
{
    const uint64_t want = stamp(group, slot);
    uint64_t silent = 0;

    for (int32_t rank = 0; rank < exchange_limits(group)->ranks; rank++) {
        uint64_t seen;

        if (!exchange_is_peer(group, rank)) continue;
        seen = group->ops->read(group->transport, slot->window, rank, word);
        if (seen != want) silent |= UINT64_C(1) << rank;
    }
    return silent;
}

int32_t exchange_wait(struct exchange_group *group, struct exchange *slot, enum flag_word word,
                      moxie_error *error)
{
    struct watch watch = watch_start(group);
    int32_t st = MOXIE_OK;

    for (;;) {
        // Both before the words are read: one that comes after the ticket ends the sleep below, and
        // a process that was stopped after its look has not looked since the deadline.
        uint32_t ticket = group->ops->ticket(group->transport, slot->window);
        int64_t now_ns = clock_ns();
        uint64_t silent = missing(group, slot, word);

        if (silent == 0) break;
        TRY(exchange_check_peers(group, slot, error));
        if (now_ns >= watch.next_ns) watch_beat(group, &watch, now_ns);
        if (now_ns >= watch.deadline_ns) TRY(give_up(group, slot, &watch, silent, word, error));
        group->ops->wait(group->transport, slot->window, ticket,
                         watch.next_ns < watch.deadline_ns ? watch.next_ns : watch.deadline_ns);
    }
out:
    return st;
}

// ---- the host's table --------------------------------------------------------------------------

static int32_t open_host(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                         moxie_error *error)
{
    (void)error;
    group->beat_window = slots[0].window;
    for (int32_t i = 0; i < slots_count; i++)
        slots[i].counts = slots[i].host_counts;
    return MOXIE_OK;
}

static void close_host(struct exchange_group *group)
{
    (void)group;
}

static int32_t begin_host(struct exchange_group *group, struct exchange *slot, moxie_error *error)
{
    int32_t st = exchange_check_peers(group, slot, error);

    if (st != MOXIE_OK) return st;
    slot->epoch++;
    slot->went_out = 1;
    return MOXIE_OK;
}

static int32_t send_host(struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round, enum flag_word word,
                         moxie_error *error)
{
    (void)round;
    (void)error;
    exchange_signal(group, slot, word);
    return MOXIE_OK;
}

// A peer may write anything there.
static struct round_count count_from(const struct exchange_group *group,
                                     const struct exchange *slot,
                                     const struct exchange_round *round, int32_t from)
{
    int32_t me = exchange_limits(group)->rank;
    const unsigned char *counts = slot->window->base + group->instance->plan.window.counts;
    const struct round_count *told =
        (const void *)(counts + (from < me ? from : from - 1) * FLAG_LINE_BYTES);
    struct round_count count = {0, round->index};

    if (from == me) count.rows = round->tokens;
    if (!exchange_is_peer(group, from)) return count;
    count.rows = __atomic_load_n(&told->rows, __ATOMIC_ACQUIRE);
    count.round = __atomic_load_n(&told->round, __ATOMIC_ACQUIRE);
    if (count.rows < 0) count.rows = 0;
    return count;
}

// What came is of this round, and no more than any rank has; or else of a peer that has gone on,
// which it has told before.
static int32_t check_count(struct exchange_group *group, struct exchange *slot,
                           const struct exchange_round *round, int32_t from,
                           const struct round_count *count, moxie_error *error)
{
    const struct flag_verdict verdict = {
        .kind = count->round != round->index     ? VERDICT_ROUND
                : count->rows > round->rows_most ? VERDICT_ROWS
                                                 : VERDICT_NONE,
        .rank = from,
        .epoch = slot->epoch,
        .rows_most = round->rows_most,
        .told_rows = count->rows,
        .round = round->index,
        .told_round = count->round,
    };
    int32_t st;

    if (verdict.kind == VERDICT_NONE) return MOXIE_OK;
    st = exchange_check_peers(group, slot, error);
    return st == MOXIE_OK ? verdict_say(&verdict, group, error) : st;
}

static int32_t wait_host(struct exchange_group *group, struct exchange *slot,
                         const struct exchange_round *round, enum flag_word word,
                         moxie_error *error)
{
    const struct limits *limits = exchange_limits(group);
    int32_t st = MOXIE_OK;

    TRY(exchange_wait(group, slot, word, error));
    for (int32_t rank = 0; word == WORD_DISPATCH && rank < limits->ranks; rank++) {
        struct round_count count = count_from(group, slot, round, rank);

        TRY(check_count(group, slot, round, rank, &count, error));
        slot->counts[rank] = count.rows;
        if (rank != limits->rank) group->instance->stats.rows_received += (uint64_t)count.rows;
    }
out:
    return st;
}

static int32_t regroup_host(struct exchange_group *group, struct exchange *slots,
                            int32_t slots_count, uint64_t active, moxie_error *error)
{
    (void)error;
    exchange_regroup(group, slots, slots_count, active);
    return MOXIE_OK;
}

// What fails, fails in the call.
static int32_t failure_host(const struct exchange_group *group, moxie_error *error)
{
    (void)group;
    (void)error;
    return MOXIE_OK;
}

const struct exchange_flags exchange_flags_host = {
    .open = open_host,
    .close = close_host,
    .begin = begin_host,
    .send = send_host,
    .wait = wait_host,
    .regroup = regroup_host,
    .failure = failure_host,
};
