// Why a wait failed: its code, the rank to blame and the words, whoever waited.

#ifndef MOXIE_PLUGIN_EXCHANGE_VERDICT_H
#define MOXIE_PLUGIN_EXCHANGE_VERDICT_H

#include "plugin/exchange.h"

// The verdict's code, MOXIE_E_PEER, _TIMEOUT or _COLLECTIVE_MISMATCH; MOXIE_OK for VERDICT_NONE.
int32_t verdict_say(const struct flag_verdict *verdict, const struct exchange_group *group,
                    moxie_error *error);

#endif
