// What every rank must have in common.

#include "plugin/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef MOXIE_SOURCE_ID
#define MOXIE_SOURCE_ID "unknown"
#endif

// What a rank says of itself. The fields up to `ranks` keep their places in every version.
struct digest {
    uint32_t bytes;
    uint32_t abi;
    int32_t status;
    int32_t rank, ranks;
    uint32_t reserved;
    char source_id[48];
    char values[KEY_COUNT][CONFIG_TEXT_BYTES];
};

const char *digest_source_id(void)
{
    return MOXIE_SOURCE_ID;
}

static void describe(struct digest *digest, const struct bootstrap *bootstrap,
                     const struct config *config, int32_t status)
{
    memset(digest, 0, sizeof *digest);
    digest->bytes = sizeof *digest;
    digest->abi = MOXIE_ABI_VERSION;
    digest->status = status;
    digest->rank = bootstrap->rank;
    digest->ranks = bootstrap->ranks;
    (void)snprintf(digest->source_id, sizeof digest->source_id, "%s", MOXIE_SOURCE_ID);
    for (int32_t key = 0; key < KEY_COUNT; key++) {
        if (config_shared((enum config_key)key))
            config_print(config, (enum config_key)key, digest->values[key], CONFIG_TEXT_BYTES);
    }
}

static int32_t compare(const struct digest *mine, const struct digest *other, int32_t rank,
                       moxie_error *error)
{
    const int32_t code = MOXIE_E_COLLECTIVE_MISMATCH;

    if (other->bytes != mine->bytes || other->abi != mine->abi)
        return fail_rank(
            error, code, rank, "rank %d speaks ABI %u.%u, this rank %u.%u; load the same library",
            rank, other->abi >> 16, other->abi & 0xffff, mine->abi >> 16, mine->abi & 0xffff);
    if (other->rank != rank || other->ranks != mine->ranks)
        return fail_rank(
            error, code, rank,
            "place %d of all_gather holds ep_rank %d of %d; want %d of %d: give every rank its "
            "own ep_rank, and all_gather in that order",
            rank, other->rank, other->ranks, rank, mine->ranks);
    if (memcmp(other->source_id, mine->source_id, sizeof mine->source_id) != 0)
        return fail_rank(error, code, rank,
                         "rank %d runs build %.47s, this rank %.47s; load the same library", rank,
                         other->source_id, mine->source_id);
    for (int32_t key = 0; key < KEY_COUNT; key++) {
        if (memcmp(other->values[key], mine->values[key], CONFIG_TEXT_BYTES) != 0)
            return fail_rank(error, code, rank,
                             "%s is %.63s on rank %d and %.63s here; set it alike on every rank",
                             config_name((enum config_key)key), other->values[key], rank,
                             mine->values[key]);
    }
    return MOXIE_OK;
}

int32_t digest_compare(const struct bootstrap *bootstrap, const struct config *config,
                       int32_t status, moxie_error *error)
{
    struct digest *all = NULL, mine;
    int32_t st = MOXIE_OK;

    describe(&mine, bootstrap, config, status);
    all = calloc((size_t)bootstrap->ranks, sizeof *all);
    if (all == NULL)
        TRY(fail_with(error, MOXIE_E_MEMORY, "create: no memory for the ranks' digests"));
    if (bootstrap->all_gather(bootstrap->ctx, &mine, all, sizeof mine) != 0)
        TRY(fail_with(error, MOXIE_E_UNAVAILABLE,
                      "create: the host's all_gather failed; a rank cannot be reached"));
    TRY(status);
    for (int32_t rank = 0; rank < bootstrap->ranks; rank++)
        TRY(compare(&mine, &all[rank], rank, error));
    for (int32_t rank = 0; rank < bootstrap->ranks; rank++) {
        if (all[rank].status != MOXIE_OK)
            TRY(fail_rank(error, MOXIE_E_UNAVAILABLE, rank,
                          "create: rank %d failed with %s; see its log", rank,
                          status_name(all[rank].status)));
    }
out:
    free(all);
    return st;
}
