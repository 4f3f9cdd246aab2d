// What every rank must have in common before the first row moves: ABI, build, every shared key.
// Compared at create, so that a difference is an error with a name and not a hang.

#ifndef MOXIE_PLUGIN_DIGEST_H
#define MOXIE_PLUGIN_DIGEST_H

#include "plugin/config.h"
#include "plugin/transport.h"

// The commit this library was built from, or "unknown".
const char *digest_source_id(void);

// Collective. `status` is how this rank fared so far: when any rank fails, all leave here.
// MOXIE_E_COLLECTIVE_MISMATCH names the rank and the field that differs; `status` itself when this
// rank failed; UNAVAILABLE, INVALID or MEMORY where the ranks cannot be heard.
int32_t digest_compare(const struct bootstrap *bootstrap, const struct config *config,
                       int32_t status, moxie_error *error);

#endif
