// The dispatcher: a slot's state machine around the pushes. Arguments have passed the door.

#ifndef MOXIE_PLUGIN_DISPATCHER_H
#define MOXIE_PLUGIN_DISPATCHER_H

#include "plugin/plan.h"

int32_t dispatcher_create(moxie_instance *instance, enum dispatcher_kind kind,
                          moxie_dispatcher **out, moxie_error *error);
int32_t dispatcher_begin_forward(moxie_dispatcher *dispatcher, const moxie_step *step,
                                 moxie_error *error);
int32_t dispatcher_dispatch_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 moxie_error *error);
int32_t dispatcher_dispatch_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 const moxie_rows **in, const moxie_rows **out, moxie_error *error);
int32_t dispatcher_combine_send(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error);
int32_t dispatcher_combine_recv(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                moxie_error *error);
int32_t dispatcher_poll_error(moxie_dispatcher *dispatcher, moxie_error *error);
// `active` is [ep_size].
int32_t dispatcher_set_active_ranks(moxie_dispatcher *dispatcher, const uint8_t *active,
                                    moxie_error *error);
void dispatcher_destroy(moxie_dispatcher *dispatcher);

int dispatcher_is_live(const moxie_dispatcher *dispatcher);
moxie_instance *dispatcher_instance(const moxie_dispatcher *dispatcher);

// MOXIE_E_INVALID in a child of the process that created one with peers.
int32_t dispatcher_check_process(const moxie_dispatcher *dispatcher, moxie_error *error);

// For forward.c. Checks that the batch can run now, and says in how many rounds.
int32_t dispatcher_forward_begin(moxie_dispatcher *dispatcher, const moxie_batch *batch,
                                 int32_t *rounds, moxie_error *error);
// A forward that failed between its halves: without peers, and where nothing of it has run because
// a capture keeps it, the slot is ready again; with peers, who wait for this rank, only
// set_active_ranks makes it so.
void dispatcher_forward_abandon(moxie_dispatcher *dispatcher, int32_t slot);
// A round of a checked batch: what dispatch_send, dispatch_recv, combine_send and combine_recv do,
// in this order, once they have checked theirs. The batch stays until the round is finished.
// `joined`: each half is followed by the other in the same call.
int32_t dispatcher_send_round(moxie_dispatcher *dispatcher, const moxie_batch *batch, int32_t round,
                              int joined, moxie_error *error);
int32_t dispatcher_receive_round(moxie_dispatcher *dispatcher, int32_t slot, const moxie_rows **in,
                                 const moxie_rows **out, moxie_error *error);
int32_t dispatcher_return_round(moxie_dispatcher *dispatcher, int32_t slot, moxie_error *error);
int32_t dispatcher_finish_round(moxie_dispatcher *dispatcher, int32_t slot, moxie_error *error);

#endif
