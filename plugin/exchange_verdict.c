// Why a wait failed.

#include "plugin/exchange_verdict.h"

#include <inttypes.h>

#define AGREE                                                                                      \
    "pass the same step.rank_tokens, or NULL, on every rank, and start again: by "                 \
    "set_active_ranks with the same ranks, or over NCCL by new dispatchers"

// `verdict->rank` goes on with the ranks it told, this one among them.
static int32_t say_moved_on(const struct flag_verdict *verdict, const struct exchange_group *group,
                            moxie_error *error)
{
    uint64_t gone = group->active & ~verdict->told_active;
    int32_t first = 0;

    // Nobody is gone, so none is named: a host leaves out the rank that is.
    if (gone == 0)
        return fail_rank(error, MOXIE_E_PEER, -1,
                         "rank %d has moved on to generation %" PRIu64
                         " with the same ranks, this rank is in %" PRIu64
                         "; call set_active_ranks as often as it has",
                         verdict->rank, verdict->told_generation, verdict->generation);
    while ((gone >> first & 1) == 0)
        first++;
    return fail_rank(
        error, MOXIE_E_PEER, first,
        "rank %d was left out by rank %d, which is in generation %" PRIu64 ", this rank in %" PRIu64
        "; call set_active_ranks with the same ranks (0x%" PRIx64 ")",
        first, verdict->rank, verdict->told_generation, verdict->generation, verdict->told_active);
}

static int32_t say_silent(const struct flag_verdict *verdict, const struct exchange_group *group,
                          moxie_error *error)
{
    const char *awaited = verdict->word == WORD_DISPATCH ? "rows" : "results";
    const int32_t timeout_ms = group->instance->plan.limits.timeout_ms;
    int32_t silent = 0;

    for (int32_t rank = 0; rank < MOXIE_RANKS_MAX; rank++)
        silent += (int32_t)(verdict->silent >> rank & 1);
    if (verdict->kind == VERDICT_ALL_WAIT)
        return fail_with(error, MOXIE_E_TIMEOUT,
                         "the ranks 0x%" PRIx64 " sent no %s of epoch %" PRIu64
                         ", generation %" PRIu64
                         " within timeout_ms = %d, but they are alive and wait themselves; every "
                         "rank must make the same calls in the same order; set_active_ranks with "
                         "the same ranks starts again",
                         verdict->silent, awaited, verdict->epoch, verdict->generation, timeout_ms);
    return fail_rank(error, MOXIE_E_PEER, verdict->rank,
                     "rank %d sent no %s of epoch %" PRIu64 ", generation %" PRIu64
                     " within timeout_ms = %d (silent in all: %d): it is gone (call "
                     "set_active_ranks without it), did not make this call (a rank without tokens "
                     "makes it too), or needs longer (set timeout_ms higher)",
                     verdict->rank, awaited, verdict->epoch, verdict->generation, timeout_ms,
                     silent);
}

static int32_t say_rows(const struct flag_verdict *verdict, moxie_error *error)
{
    return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, verdict->rank,
                     "rank %d has sent %d rows of epoch %" PRIu64 ", and by this rank's step no "
                     "rank has more than %d; " AGREE,
                     verdict->rank, verdict->told_rows, verdict->epoch, verdict->rows_most);
}

// Forwards of other sizes have other numbers of rounds.
static int32_t say_round(const struct flag_verdict *verdict, moxie_error *error)
{
    return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, verdict->rank,
                     "rank %d sends round %d of its layer, and this rank round %d (epoch %" PRIu64
                     "); " AGREE,
                     verdict->rank, verdict->told_round, verdict->round, verdict->epoch);
}

// Few rows go another way, and which are few hangs on the step and the round.
static int32_t say_way(const struct flag_verdict *verdict, moxie_error *error)
{
    return fail_rank(
        error, MOXIE_E_COLLECTIVE_MISMATCH, verdict->rank,
        "rank %d has other rank_tokens, or is in another round of its layer, than this "
        "rank: one of the two has few rows in epoch %" PRIu64 "; " AGREE,
        verdict->rank, verdict->epoch);
}

static int32_t say_masks(const struct flag_verdict *verdict, const struct exchange_group *group,
                         moxie_error *error)
{
    return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, verdict->rank,
                     "rank %d goes on with the ranks 0x%" PRIx64 ", this rank with 0x%" PRIx64
                     ", both in generation %" PRIu64 "; pass one mask to set_active_ranks on all "
                     "ranks, without any rank that one of them has left out",
                     verdict->rank, verdict->told_active, group->active, verdict->generation);
}

int32_t verdict_say(const struct flag_verdict *verdict, const struct exchange_group *group,
                    moxie_error *error)
{
    switch (verdict->kind) {
    case VERDICT_NONE:
        return MOXIE_OK;
    case VERDICT_LEFT_OUT:
        return fail_rank(error, MOXIE_E_PEER, verdict->rank,
                         "rank %d has left this rank out, which is in generation %" PRIu64
                         ", and goes on with the ranks 0x%" PRIx64 "; destroy this dispatcher",
                         verdict->rank, verdict->generation, verdict->told_active);
    case VERDICT_MOVED_ON:
        return say_moved_on(verdict, group, error);
    case VERDICT_ROWS:
        return say_rows(verdict, error);
    case VERDICT_ROUND:
        return say_round(verdict, error);
    case VERDICT_WAY:
        return say_way(verdict, error);
    case VERDICT_MASKS:
        return say_masks(verdict, group, error);
    default:
        return say_silent(verdict, group, error);
    }
}
