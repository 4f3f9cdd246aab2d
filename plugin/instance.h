// The instance: the snapshot and everything derived from it at open, the planned memory, and what
// lives on it. Arguments of the functions have passed the door: structs are of the current size,
// required pointers are there.

#ifndef MOXIE_PLUGIN_INSTANCE_H
#define MOXIE_PLUGIN_INSTANCE_H

#include "kernels/cpu/cpu.h"
#include "kernels/flags.h"
#include "plugin/memory.h"
#include "plugin/threads.h"
#include "plugin/validate.h"

#include <pthread.h>

// The tables that open() hands to the host; made by the door, alive as long as the library.
struct registry {
    const moxie_runner_info *runners;
    const moxie_dispatcher_info *dispatchers;
    uint32_t runners_count;
    uint32_t dispatchers_count;
};

// The report of a dispatcher alive, for stats.
struct report_link {
    const struct flag_report *report;
    struct report_link *next;
};

// What a host has of an instance: its pointer is to this. A block so small that malloc leaves it
// mapped when it is freed, where an instance's own pages may go, so that a dead handle is refused.
struct instance_handle {
    uint64_t magic;
    moxie_instance *instance;
};

struct moxie_instance {
    struct instance_handle *handle;
    moxie_host host; // a copy; `name` points at host_name
    char host_name[CONFIG_TEXT_BYTES];
    struct config config;
    struct bounds bounds;
    struct report report;
    struct plan plan;
    moxie_report public_report;
    moxie_bounds public_bounds;
    moxie_plan public_plan;
    char printed[KEY_COUNT][CONFIG_TEXT_BYTES]; // values, for config()
    char help[KEY_COUNT][256];                  // with the words of a key, for config()
    char explained[192];         // where forward_tokens came from, for capacity errors
    const struct device *device; // NULL: not in this build
    struct memory memory;
    struct threads *threads;     // NULL: the host's parallel_for
    struct cpu_stream stream;    // the CPU's stream
    pthread_mutex_t creating;    // whoever creates or destroys what lives on it, or closes it
    int32_t cancel_before;       // that thread's cancellation state
    int32_t users;               // runners and dispatchers alive
    int32_t ordinal;             // the device that they were made on
    int32_t gather_units;        // its kernels' answer
    moxie_stats stats;           // without what kernels count
    struct report_link *reports; // and where they do
    // Whose layer each slot is inside of: dispatchers with peers share a slot's buffers.
    const moxie_dispatcher *slot_users[MOXIE_SLOTS_MAX];
    int64_t captured_shape[3], captured_strides[3];
    int64_t load_shape[2], load_strides[2];
};

// `host` is the door's copy of the caller's struct and is copied again.
int32_t instance_open(const moxie_host *host, const struct registry *registry, moxie_instance **out,
                      moxie_error *error);
int32_t instance_close(moxie_instance *instance, moxie_error *error);

// Where the tensors of an instance with a device lie, once something was created in it.
static inline moxie_device instance_place(const moxie_instance *instance)
{
    return (moxie_device){instance->device->tensor_device, instance->ordinal};
}

// What the door hands out, and the instance of what it gets back: NULL unless open() of this
// library made it and close() has not taken it.
moxie_instance *instance_handle(const moxie_instance *instance);
moxie_instance *instance_of(const moxie_instance *handle);
// What a living handle of `kind` begins with, in this library alone: another of the process has
// other fields, or other code for them.
uint64_t handle_magic(uint64_t kind);
// Asks the host's thread_check, if any; MOXIE_E_INVALID and a HOST_MISBEHAVING log line on a wrong
// thread.
int32_t instance_check_thread(const moxie_instance *instance, int32_t tag, moxie_error *error);

// MOXIE_E_INVALID when another device is current than what the instance has lies on, whose streams
// and memory are not the calling thread's.
int32_t instance_check_current(const moxie_instance *instance, moxie_error *error);

// Around what creates or destroys runners and dispatchers, and close: from several threads it takes
// turns, and a thread that is cancelled meanwhile ends behind it. MOXIE_E_INVALID and a
// HOST_MISBEHAVING log line from within a callback of one under way, which would wait for itself;
// nothing has begun then.
int32_t instance_begin_create(moxie_instance *instance, moxie_error *error);
void instance_end_create(moxie_instance *instance);

int32_t instance_config(const moxie_instance *instance, uint64_t index, moxie_config_entry *entry);
int32_t instance_validate(const moxie_instance *instance, const moxie_report **report);
int32_t instance_plan(const moxie_instance *instance, const moxie_plan **plan, moxie_error *error);
int32_t instance_captured(const moxie_instance *instance, moxie_captured *captured,
                          moxie_error *error);
void instance_stats(const moxie_instance *instance, moxie_stats *stats);

// Adds what the kernels of a dispatcher have counted.
void instance_count(const struct flag_report *report, moxie_stats *stats);

// MOXIE_E_CONFIG with the first reasons in words when the configuration was refused.
int32_t instance_accepted(const moxie_instance *instance, moxie_error *error);

// MOXIE_E_UNAVAILABLE when this build or machine lacks the configured device; loads its kernels.
// MOXIE_E_INVALID when another one is current than what the instance has already lies on.
int32_t instance_device(moxie_instance *instance, moxie_error *error);

// What a runner or dispatcher takes at create: the buffers of `set` and the threads. On failure
// nothing is taken.
int32_t instance_take(moxie_instance *instance, uint32_t set, moxie_error *error);
void instance_drop(moxie_instance *instance, uint32_t set);

// Between the two the device of what the instance has is the thread's current one, whichever is
// before and after it. Answers as device.visit does; to be left in any case.
int32_t instance_visit(const moxie_instance *instance, struct device_visit *visit);
void instance_leave(const moxie_instance *instance, const struct device_visit *visit);

// What kernels get as their stream: the host's on a GPU, the instance's threads on the CPU.
void *instance_stream(moxie_instance *instance, void *host_stream);

// A kernel launcher's answer as a status.
int32_t instance_launched(const moxie_instance *instance, int32_t answer, const char *kernel,
                          moxie_error *error);

#endif
