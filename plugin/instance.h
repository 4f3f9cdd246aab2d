// The instance: the snapshot and everything derived from it at open, the planned memory, and what lives on it. Arguments
// have passed the door: structs are of the current size, required pointers are there.

#ifndef MOXIE_PLUGIN_INSTANCE_H
#define MOXIE_PLUGIN_INSTANCE_H

#include "plugin/status.h"

// The tables that open() hands to the host; made by the door, alive as long as the library.
struct registry {
    const moxie_runner_info *runners;
    uint32_t runners_count;
    uint32_t dispatchers_count;
    const moxie_dispatcher_info *dispatchers;
};

// `host` is the door's copy of the caller's struct and is copied again.
int32_t instance_open(const moxie_host *host, const struct registry *registry, moxie_instance **out,
                      moxie_error *error);
int32_t instance_close(moxie_instance *instance, moxie_error *error);

// 1 for a handle that open() made and close() has not taken.
int instance_is_live(const moxie_instance *instance);
// Asks the host's thread_check, if any; MOXIE_E_INVALID and a HOST_MISBEHAVING log line on a wrong thread.
int32_t instance_check_thread(const moxie_instance *instance, int32_t tag, moxie_error *error);

int32_t instance_config(const moxie_instance *instance, uint64_t index, moxie_config_entry *entry);
int32_t instance_validate(const moxie_instance *instance, const moxie_report **report);
int32_t instance_plan(const moxie_instance *instance, const moxie_plan **plan, moxie_error *error);
int32_t instance_captured(const moxie_instance *instance, moxie_captured *captured, moxie_error *error);
void instance_stats(const moxie_instance *instance, moxie_stats *stats);

#endif
