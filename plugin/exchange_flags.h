// What the ranks tell each other in one slot: flags with generation and epoch, waits for them with
// a deadline, whom a wait blames that ends without, and generations.
//
// Who is to blame: when a rank dies between the flags of two peers, one peer goes on and then waits
// for the dead rank and for the peer that is stuck. Both are silent, and have sent the same. So a
// rank that waits for long says so in WORD_BEAT, and a silent rank that was heard to wait is not
// the one to blame.

#ifndef MOXIE_PLUGIN_EXCHANGE_FLAGS_H
#define MOXIE_PLUGIN_EXCHANGE_FLAGS_H

#include "plugin/exchange.h"

// `rank` is another one and takes part.
int exchange_is_peer(const struct exchange_group *group, int32_t rank);

// Stores this generation and epoch in `word` at every active peer.
void exchange_signal(struct exchange_group *group, struct exchange *slot, enum flag_word word);

// Waits until `word`, WORD_DISPATCH or WORD_COMBINE, of every active peer is of this generation and
// epoch. MOXIE_E_PEER names the rank to blame; MOXIE_E_TIMEOUT when all who are silent were heard.
int32_t exchange_wait(struct exchange_group *group, struct exchange *slot, enum flag_word word,
                      moxie_error *error);

// MOXIE_E_PEER when a peer has left this rank out, in whatever generation, is in a later one, or
// goes on with fewer ranks; MOXIE_E_COLLECTIVE_MISMATCH when it keeps more in the same generation.
int32_t exchange_check_peers(struct exchange_group *group, struct exchange *slot,
                             moxie_error *error);

// Starts the next generation with these ranks and tells all ranks, those left out too.
void exchange_regroup(struct exchange_group *group, struct exchange *slots, int32_t slots_count,
                      uint64_t active);

#endif
