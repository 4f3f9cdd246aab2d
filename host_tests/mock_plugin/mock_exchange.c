// What goes between ranks: everything goes to everyone, through the host's bootstrap. That is slow,
// and correct by inspection.

#include "host_tests/mock_plugin/mock.h"

#include <stdlib.h>
#include <string.h>

// What a rank says of itself when a dispatcher is created.
struct introduction {
    uint32_t bytes, abi;
    int32_t rank, ranks, status, dispatcher;
    char values[KEY_COUNT][TEXT_BYTES];
};

static void introduce(const struct instance *instance, int32_t status, struct introduction *me)
{
    memset(me, 0, sizeof *me);
    me->bytes = sizeof *me;
    me->abi = MOXIE_ABI_VERSION;
    me->rank = (int32_t)instance->values[KEY_EP_RANK].number;
    me->ranks = (int32_t)instance->values[KEY_EP_SIZE].number;
    me->status = status;
    for (int32_t key = 0; key < KEY_COUNT; key++) {
        if (!key_is_per_rank((enum key)key))
            memcpy(me->values[key], instance->printed[key], TEXT_BYTES);
    }
}

static int32_t compare(const struct call *call, const struct introduction *me,
                       const struct introduction *all)
{
    for (int32_t rank = 0; rank < me->ranks; rank++) {
        const struct introduction *other = &all[rank];

        if (other->bytes != me->bytes || other->abi != me->abi)
            return fail_rank(&call->caller, MOXIE_E_COLLECTIVE_MISMATCH, rank,
                             "rank %d runs another ABI or build", rank);
        if (other->rank != rank || other->ranks != me->ranks)
            return fail_rank(&call->caller, MOXIE_E_COLLECTIVE_MISMATCH, rank,
                             "place %d of all_gather holds ep_rank %d of %d", rank, other->rank,
                             other->ranks);
        for (int32_t key = 0; key < KEY_COUNT; key++) {
            if (memcmp(other->values[key], me->values[key], TEXT_BYTES) != 0 &&
                !HAS_FAULT(FAULT_IGNORED_DIFFERENCE))
                return fail_rank(&call->caller, MOXIE_E_COLLECTIVE_MISMATCH, rank,
                                 "%s is %.63s on rank %d and %.63s here", key_name((enum key)key),
                                 other->values[key], rank, me->values[key]);
        }
    }
    for (int32_t rank = 0; rank < me->ranks; rank++) {
        if (all[rank].status != MOXIE_OK)
            return fail_rank(&call->caller, MOXIE_E_UNAVAILABLE, rank,
                             "create: rank %d failed with code %d", rank, all[rank].status);
    }
    return MOXIE_OK;
}

int32_t exchange_agree(const struct call *call, int32_t status)
{
    const moxie_host *host = &call->instance->host;
    struct introduction *all = NULL, me;
    int32_t st = status;

    introduce(call->instance, status, &me);
    if (me.ranks <= 1) return status;
    if (host->all_gather == NULL)
        return fail_with(&call->caller, MOXIE_E_INVALID,
                         "create: ep_size is %d and the host has no all_gather", me.ranks);
    all = calloc((size_t)me.ranks, sizeof *all);
    if (all == NULL) TRY(fail_with(&call->caller, MOXIE_E_MEMORY, "create: no memory"));
    if (host->all_gather(host->ctx, &me, all, sizeof me) != 0) {
        if (HAS_FAULT(FAULT_ALONE)) goto out;
        TRY(fail_with(&call->caller, MOXIE_E_UNAVAILABLE, "create: all_gather failed"));
    }
    TRY(status);
    TRY(compare(call, &me, all));
    if (host->barrier(host->ctx) != 0)
        TRY(fail_with(&call->caller, MOXIE_E_UNAVAILABLE, "create: the barrier failed"));
out:
    free(all);
    return st;
}

// `bytes` of every rank, in rank order.
static int32_t gather(const struct call *call, const unsigned char *send, unsigned char *recv,
                      int64_t bytes)
{
    const moxie_host *host = &call->instance->host;
    int32_t rank = call->instance->limits.rank;

    if (call->instance->limits.ranks == 1) {
        memcpy(recv, send, (size_t)bytes);
        return MOXIE_OK;
    }
    if (host->all_gather(host->ctx, send, recv, (uint64_t)bytes) != 0)
        return fail_with(&call->caller, MOXIE_E_TIMEOUT,
                         "all_gather failed: a rank cannot be reached");
    if (memcmp(recv + rank * bytes, send, (size_t)bytes) != 0)
        return fail_with(&call->caller, MOXIE_E_INVALID,
                         "all_gather: place %d of the answer is not what rank %d sent", rank, rank);
    return MOXIE_OK;
}

int32_t exchange_rows(const struct call *call, int32_t slot)
{
    const struct limits *limits = &call->instance->limits;
    int64_t bytes = limits->block.bytes;
    const unsigned char *send = call->instance->memory[BUFFER_OUTGOING];
    unsigned char *recv = call->instance->memory[BUFFER_RECEIVED];

    if (!HAS_FAULT(FAULT_SHARED_SLOTS)) send += slot * bytes;
    return gather(call, send, recv + slot * limits->ranks * bytes, bytes);
}

static void add_up(const struct limits *limits, const unsigned char *returned, int64_t bytes,
                   struct view *y, int64_t tokens)
{
    int64_t element = type_bytes(limits->output_type);
    int32_t ranks = HAS_FAULT(FAULT_LOST_RANK) && limits->ranks > 2 ? 2 : limits->ranks;

    for (int64_t token = 0; token < tokens; token++) {
        for (int64_t h = 0; h < limits->hidden; h++) {
            const unsigned char *at = returned + (token * limits->hidden + h) * element;
            double sum = 0.0;

            for (int32_t rank = 0; rank < ranks; rank++)
                sum += number_load(limits->output_type, at + rank * bytes);
            number_store(limits->output_type, sum, view_at(y, token, h, 0));
        }
    }
}

int32_t exchange_results(const struct call *call, int32_t slot, struct view *y, int64_t tokens)
{
    const struct limits *limits = &call->instance->limits;
    int64_t bytes = limits->call_tokens_max * limits->hidden * type_bytes(limits->output_type);
    const unsigned char *results = call->instance->memory[BUFFER_RESULTS];
    unsigned char *returned = call->instance->memory[BUFFER_RETURNED];
    int32_t st = MOXIE_OK;

    results += slot * limits->ranks * bytes;
    for (int32_t rank = 0; rank < limits->ranks; rank++) {
        TRY(gather(call, results + rank * bytes, returned, bytes));
        if (rank == limits->rank) add_up(limits, returned, bytes, y, tokens);
    }
out:
    return st;
}
