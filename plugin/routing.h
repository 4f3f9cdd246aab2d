// The extension moxie.routing/1: from router logits to ids and weights, on the CPU.

#ifndef MOXIE_PLUGIN_ROUTING_H
#define MOXIE_PLUGIN_ROUTING_H

#include "plugin/status.h"

int32_t routing_route(const moxie_routing *routing, const moxie_tensor *logits,
                      const moxie_tensor *ids, const moxie_tensor *weights, void *stream,
                      moxie_error *error);

#endif
