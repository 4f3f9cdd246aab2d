// The model's router, for inputs that come without ids: logits here, the choice by the library's
// routing extension.

#ifndef MOXIE_HOSTS_CLI_ROUTER_H
#define MOXIE_HOSTS_CLI_ROUTER_H

#include "hosts/cli/plugin.h"
#include "hosts/cli/source.h"

// Fails when the model's router is not known or not in the checkpoint. Reads nothing.
int router_check(const struct source *source, struct fault *fault);

// Fills ids (int32) and weights of the rows.
int router_route(struct source *source, const struct plugin *plugin, struct rows *rows,
                 struct fault *fault);

// Widens F32, BF16 or F16.
void widen(const void *values, int32_t format, uint64_t count, float *out);

#endif
