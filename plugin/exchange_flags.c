// Flags, waits and generations of the push protocol.

#include "plugin/exchange_flags.h"

#include <inttypes.h>

// A flag's value. 40 bits of epochs outlast any server; the generation decides before the epoch.
#define EPOCH_BITS 40

// A rank says that it waits this many times within timeout_ms, the first after one part of it: a
// healthy step ends long before that.
#define BEATS 8

static uint64_t stamp(const struct exchange_group *group, const struct exchange *slot)
{
    return group->generation << EPOCH_BITS | slot->epoch;
}

static const struct limits *limits_of(const struct exchange_group *group)
{
    return &group->instance->plan.limits;
}

int exchange_is_peer(const struct exchange_group *group, int32_t rank)
{
    return rank != limits_of(group)->rank && (group->active >> rank & 1) != 0;
}

void exchange_signal(struct exchange_group *group, struct exchange *slot, enum transport_word word)
{
    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
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
        for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
            if (rank == limits_of(group)->rank) continue;
            group->ops->signal(group->transport, slots[i].window, rank, WORD_ACTIVE, active);
            group->ops->signal(group->transport, slots[i].window, rank, WORD_GENERATION,
                               group->generation);
        }
    }
}

// Rank `rank` is in a later generation with the ranks of `active`, this one among them.
static int32_t moved_on(const struct exchange_group *group, int32_t rank, uint64_t generation,
                        uint64_t active, moxie_error *error)
{
    uint64_t gone = group->active & ~active;
    int32_t first = 0;

    // Nobody is gone, so none is named: a host leaves out the rank that is.
    if (gone == 0)
        return fail_rank(error, MOXIE_E_PEER, -1,
                         "rank %d has moved on to generation %" PRIu64
                         " with the same ranks, this rank is in %" PRIu64
                         "; call set_active_ranks as often as it has",
                         rank, generation, group->generation);
    while ((gone >> first & 1) == 0)
        first++;
    return fail_rank(error, MOXIE_E_PEER, first,
                     "rank %d was left out by rank %d, which has moved on to generation %" PRIu64
                     ", this rank is in %" PRIu64
                     "; call set_active_ranks with the same ranks (0x%" PRIx64 ")",
                     first, rank, generation, group->generation, active);
}

int32_t exchange_check_peers(struct exchange_group *group, struct exchange *slot,
                             moxie_error *error)
{
    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
        uint64_t generation, active;

        if (!exchange_is_peer(group, rank)) continue;
        generation = group->ops->read(group->transport, slot->window, rank, WORD_GENERATION);
        // Told before the generation, so at least as new.
        active = group->ops->read(group->transport, slot->window, rank, WORD_ACTIVE);
        // No mask grows, so one without this rank is final in whatever generation; 0 is none yet.
        if (active != 0 && (active >> limits_of(group)->rank & 1) == 0)
            return fail_rank(error, MOXIE_E_PEER, rank,
                             "rank %d has left this rank out, which is in generation %" PRIu64
                             ", and goes on with the ranks 0x%" PRIx64 "; destroy this dispatcher",
                             rank, group->generation, active);
        if (generation > group->generation) return moved_on(group, rank, generation, active, error);
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
    const int64_t now_ns = clock_ns(), wait_ns = (int64_t)limits_of(group)->timeout_ms * 1000000;

    return (struct watch){.beat_ns = wait_ns / BEATS,
                          .next_ns = now_ns + wait_ns / BEATS,
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
    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
        if (exchange_is_peer(group, rank))
            group->ops->signal(group->transport, group->beat_window, rank, WORD_BEAT, group->beats);
    }
    watch->next_ns = now_ns + watch->beat_ns;
    if (watch->noted || now_ns < watch->middle_ns) return;
    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++)
        watch->beats[rank] = beat_of(group, rank);
    watch->noted = 1;
    if (watch->deadline_ns < now_ns + 2 * watch->beat_ns)
        watch->deadline_ns = now_ns + 2 * watch->beat_ns;
}

// The deadline has passed, and the ranks of the set `silent` owe a flag. The first of them that did
// not wait itself is to blame.
static int32_t give_up(const struct exchange_group *group, const struct exchange *slot,
                       const struct watch *watch, uint64_t silent, enum transport_word word,
                       moxie_error *error)
{
    const char *awaited = word == WORD_DISPATCH ? "rows" : "results";
    int32_t mute = -1, count = 0;

    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
        if ((silent >> rank & 1) == 0) continue;
        count++;
        if (mute < 0 && beat_of(group, rank) == watch->beats[rank]) mute = rank;
    }
    if (mute < 0)
        return fail_with(
            error, MOXIE_E_TIMEOUT,
            "the ranks 0x%" PRIx64 " sent no %s of epoch %" PRIu64 ", generation %" PRIu64
            " within timeout_ms = %d, but they are alive and wait themselves; every "
            "rank must make the same calls in the same order; set_active_ranks with "
            "the same ranks starts again",
            silent, awaited, slot->epoch, group->generation, limits_of(group)->timeout_ms);
    return fail_rank(error, MOXIE_E_PEER, mute,
                     "rank %d sent no %s of epoch %" PRIu64 ", generation %" PRIu64
                     " within timeout_ms = %d (silent in all: %d); if it is gone, call "
                     "set_active_ranks without it",
                     mute, awaited, slot->epoch, group->generation, limits_of(group)->timeout_ms,
                     count);
}

// The active peers whose flag has not come, a bit each.
static uint64_t missing(const struct exchange_group *group, const struct exchange *slot,
                        enum transport_word word)
{
    const uint64_t want = stamp(group, slot);
    uint64_t silent = 0;

    for (int32_t rank = 0; rank < limits_of(group)->ranks; rank++) {
        uint64_t seen;

        if (!exchange_is_peer(group, rank)) continue;
        seen = group->ops->read(group->transport, slot->window, rank, word);
        if (seen >> EPOCH_BITS != group->generation || seen < want) silent |= UINT64_C(1) << rank;
    }
    return silent;
}

int32_t exchange_wait(struct exchange_group *group, struct exchange *slot, enum transport_word word,
                      moxie_error *error)
{
    struct watch watch = watch_start(group);
    int32_t st = MOXIE_OK;

    for (;;) {
        // Before the words are read: one that comes after it ends the sleep below.
        uint32_t ticket = group->ops->ticket(group->transport, slot->window);
        uint64_t silent = missing(group, slot, word);
        int64_t now_ns;

        if (silent == 0) break;
        TRY(exchange_check_peers(group, slot, error));
        now_ns = clock_ns();
        if (now_ns >= watch.next_ns) watch_beat(group, &watch, now_ns);
        if (now_ns >= watch.deadline_ns) TRY(give_up(group, slot, &watch, silent, word, error));
        group->ops->wait(group->transport, slot->window, ticket,
                         watch.next_ns < watch.deadline_ns ? watch.next_ns : watch.deadline_ns);
    }
out:
    return st;
}
