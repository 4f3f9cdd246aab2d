// What every rank must have in common.

#include "plugin/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MOXIE_SOURCE_ID
#define MOXIE_SOURCE_ID "unknown"
#endif

#define NAMES_BYTES 1024 // the names of all keys fit

// What a rank says of itself first. Never changes, so that ranks of any two builds understand it.
struct head {
    uint32_t abi;
    uint32_t values_bytes; // what it will send next
    int32_t status;
    int32_t rank, ranks;
    int32_t ready; // 0: it has no memory for what comes next
    char source_id[48];
};

_Static_assert(sizeof(struct head) == 72, "builds must agree on what they compare first");

// The shared keys, printed; the others are empty.
struct values {
    char text[KEY_COUNT][CONFIG_TEXT_BYTES];
};

const char *digest_source_id(void)
{
    return MOXIE_SOURCE_ID;
}

static struct head describe(const struct bootstrap *bootstrap, int32_t status, int32_t ready)
{
    struct head head = {.abi = MOXIE_ABI_VERSION,
                        .values_bytes = sizeof(struct values),
                        .status = status,
                        .rank = bootstrap->rank,
                        .ranks = bootstrap->ranks,
                        .ready = ready};

    (void)snprintf(head.source_id, sizeof head.source_id, "%s", MOXIE_SOURCE_ID);
    return head;
}

static int32_t compare_head(const struct head *mine, struct head *other, int32_t rank,
                            moxie_error *error)
{
    const int32_t code = MOXIE_E_COLLECTIVE_MISMATCH;
    const int same_build = memcmp(other->source_id, mine->source_id, sizeof mine->source_id) == 0 &&
                           other->values_bytes == mine->values_bytes;

    if (other->abi == 0)
        return fail_rank(error, code, rank,
                         "all_gather brought nothing for rank %d; is ep_size %d the number of its "
                         "ranks?",
                         rank, mine->ranks);
    if (other->abi != mine->abi)
        return fail_rank(
            error, code, rank, "rank %d speaks ABI %u.%u, this rank %u.%u; load the same library",
            rank, other->abi >> 16, other->abi & 0xffff, mine->abi >> 16, mine->abi & 0xffff);
    text_clean(other->source_id, sizeof other->source_id);
    if (!same_build)
        return fail_rank(error, code, rank,
                         "rank %d runs build %s, this rank %s; load the same library", rank,
                         other->source_id, mine->source_id);
    if (other->rank != rank || other->ranks != mine->ranks)
        return fail_rank(
            error, code, rank,
            "place %d of all_gather holds ep_rank %d of %d; want %d of %d: give every rank its "
            "own ep_rank, and all_gather in that order",
            rank, other->rank, other->ranks, rank, mine->ranks);
    return MOXIE_OK;
}

static int differs(const struct values *mine, const struct values *other, int32_t key)
{
    return memcmp(other->text[key], mine->text[key], CONFIG_TEXT_BYTES) != 0;
}

static int32_t compare_values(const struct values *mine, struct values *other, int32_t rank,
                              moxie_error *error)
{
    char also[NAMES_BYTES] = "";
    int32_t first = 0, length = 0;

    while (first < KEY_COUNT && !differs(mine, other, first))
        first++;
    if (first == KEY_COUNT) return MOXIE_OK;
    for (int32_t key = first + 1; key < KEY_COUNT && length < NAMES_BYTES; key++) {
        if (!differs(mine, other, key)) continue;
        length += snprintf(also + length, (size_t)(NAMES_BYTES - length), "%s%s",
                           length == 0 ? "; also " : ", ", config_name((enum config_key)key));
    }
    text_clean(other->text[first], CONFIG_TEXT_BYTES);
    return fail_rank(error, MOXIE_E_COLLECTIVE_MISMATCH, rank,
                     "%s is %s on rank %d and %s here; set it alike on every rank%s",
                     config_name((enum config_key)first), other->text[first], rank,
                     mine->text[first], also);
}

// `code` is for one that fails.
static int32_t gather(const struct bootstrap *bootstrap, const void *send, void *recv,
                      uint64_t bytes, int32_t code, moxie_error *error)
{
    if (bootstrap->all_gather(bootstrap->ctx, send, recv, bytes) == 0) return MOXIE_OK;
    return fail_with(error, code, "create: the host's all_gather failed; a rank cannot be reached");
}

// All ranks see the same heads, so either all of them pass here or none does.
static int32_t compare_heads(const struct bootstrap *bootstrap, const struct head *mine,
                             struct head *heads, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(gather(bootstrap, mine, heads, sizeof *mine, MOXIE_E_UNAVAILABLE, error));
    for (int32_t rank = 0; rank < bootstrap->ranks; rank++)
        TRY(compare_head(mine, &heads[rank], rank, error));
out:
    return st;
}

static int32_t compare_all_values(const struct bootstrap *bootstrap, const struct config *config,
                                  struct values *all, moxie_error *error)
{
    struct values mine;
    int32_t st = MOXIE_OK;

    memset(&mine, 0, sizeof mine);
    for (int32_t key = 0; key < KEY_COUNT; key++) {
        if (config_shared((enum config_key)key))
            config_print(config, (enum config_key)key, mine.text[key], CONFIG_TEXT_BYTES);
    }
    TRY(gather(bootstrap, &mine, all, sizeof mine, MOXIE_E_PEER, error));
    for (int32_t rank = 0; rank < bootstrap->ranks; rank++)
        TRY(compare_values(&mine, &all[rank], rank, error));
out:
    return st;
}

static int all_ready(const struct head *heads, int32_t ranks)
{
    int ready = 1;

    for (int32_t rank = 0; rank < ranks; rank++)
        ready = ready && heads[rank].ready != 0;
    return ready;
}

static int32_t blame_failed(const struct head *heads, int32_t ranks, moxie_error *error)
{
    for (int32_t rank = 0; rank < ranks; rank++) {
        int32_t status = heads[rank].ready != 0 ? heads[rank].status : MOXIE_E_MEMORY;

        if (status != MOXIE_OK)
            return fail_rank(error, MOXIE_E_UNAVAILABLE, rank,
                             "create: rank %d failed with %s; what its create returned says why",
                             rank, status_name(status));
    }
    return MOXIE_OK;
}

int32_t digest_compare(const struct bootstrap *bootstrap, const struct config *config,
                       int32_t status, moxie_error *error)
{
    struct head heads[MOXIE_RANKS_MAX], mine;
    struct values *all = NULL;
    moxie_error *words; // of a rank that failed before, what it said stands
    int32_t st = MOXIE_OK;

    memset(heads, 0, sizeof heads);
    if (bootstrap->ranks > MOXIE_RANKS_MAX)
        return status != MOXIE_OK
                   ? status
                   : fail_with(error, MOXIE_E_INVALID, "create: ep_size is %d; want at most %d",
                               bootstrap->ranks, MOXIE_RANKS_MAX);
    // As many as a host can have: where ep_size differs, so does what all_gather brings.
    all = calloc(MOXIE_RANKS_MAX, sizeof *all);
    if (all == NULL && status == MOXIE_OK)
        status = fail_with(error, MOXIE_E_MEMORY, "create: no memory for the ranks' keys");
    words = status == MOXIE_OK ? error : NULL;
    mine = describe(bootstrap, status, all != NULL);
    TRY(compare_heads(bootstrap, &mine, heads, words));
    if (all != NULL && all_ready(heads, bootstrap->ranks))
        TRY(compare_all_values(bootstrap, config, all, words));
    TRY(blame_failed(heads, bootstrap->ranks, words));
out:
    free(all);
    return status != MOXIE_OK ? status : st;
}
