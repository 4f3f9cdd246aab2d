// The host's allocator.

#ifndef MOXIE_HOSTS_CLI_CONFORM_MEMORY_H
#define MOXIE_HOSTS_CLI_CONFORM_MEMORY_H

#include "hosts/cli/conform_engine.h"

int32_t memory_allocate(void *ctx, const moxie_allocation *request, void **memory);
void memory_release(void *ctx, const moxie_allocation *request, void *memory);
// Frees what the plugin left behind.
void memory_drop(struct engine *engine);

#endif
