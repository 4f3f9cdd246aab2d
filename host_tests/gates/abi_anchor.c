// The published types alone, for abidiff: a library of this file is what abi/baseline was made
// from.
//
// libmoxie.so itself will not do. Its opaque handles are whole types there, so that private changes
// cry wolf, and abidiff's filters for private types then hide every change behind them as well. The
// extensions' tables are handed out as const void *, so no exported symbol leads to them.

#include "abi.h"

extern const moxie_routing_api anchor_routing;
extern const moxie_expand_api anchor_expand;

__attribute__((visibility("default"))) const moxie_routing_api anchor_routing = {0};
__attribute__((visibility("default"))) const moxie_expand_api anchor_expand = {0};

int32_t moxie_get_api_v1(const moxie_request *request, const moxie_api **api, moxie_error *error)
{
    return request != NULL && api != NULL && error != NULL ? MOXIE_OK : MOXIE_E_INVALID;
}
