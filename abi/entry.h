// The door's tables, one file each, and what every slot does first.

#ifndef MOXIE_ABI_ENTRY_H
#define MOXIE_ABI_ENTRY_H

#include "plugin/instance.h"

// For [any] slots: enter_* asks no thread_check.
#define ENTER_ANY 0
// For [serial] slots that work on the current device, which has to be the instance's.
#define ENTER_STEP (MOXIE_THREAD_INSTANCE_SERIAL | 1 << 8)

// MOXIE_OK when the handle is there and alive and the calling thread may enter a slot tagged `tag`
// (MOXIE_THREAD_* or ENTER_*). `error` has passed error_enter. A host's instance is a handle of it.
int32_t enter_instance(const moxie_instance *handle, int32_t tag, moxie_instance **out,
                       moxie_error *error);
int32_t enter_runner(const moxie_runner *runner, int32_t tag, moxie_error *error);
int32_t enter_dispatcher(const moxie_dispatcher *dispatcher, int32_t tag, moxie_error *error);

// MOXIE_OK unless `pointer` is NULL; `what` names the argument.
int32_t check_pointer(const void *pointer, const char *what, moxie_error *error);

// What open() registers; one entry per row of plugin/backends.h.
extern const moxie_runner_info runner_infos[];
extern const uint32_t runner_infos_count;
extern const moxie_dispatcher_info dispatcher_infos[];
extern const uint32_t dispatcher_infos_count;

extern const moxie_routing_api routing_api;
extern const moxie_expand_api expand_api;

#endif
