// The forward path.

#include "plugin/forward.h"

int32_t forward_run(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *batch,
                    moxie_error *error)
{
    moxie_call call = {.struct_size = sizeof call,
                       .slot = batch->slot,
                       .layer = batch->layer,
                       .stream = batch->stream};
    int32_t rounds = 0;
    int32_t st = MOXIE_OK;

    TRY(runner_check_computes(runner, error));
    TRY(dispatcher_forward_begin(dispatcher, batch, &rounds, error));
    for (int32_t round = 0; round < rounds; round++) {
        const moxie_rows *in = NULL, *out = NULL;

        TRY(dispatcher_send_round(dispatcher, batch, round, 1, error));
        TRY(dispatcher_receive_round(dispatcher, batch->slot, &in, &out, error));
        TRY(runner_run(runner, &call, in, out, error));
        TRY(dispatcher_return_round(dispatcher, batch->slot, error));
        TRY(dispatcher_finish_round(dispatcher, batch->slot, error));
    }
out:
    if (st != MOXIE_OK && rounds > 0) dispatcher_forward_abandon(dispatcher, batch->slot);
    return st;
}
