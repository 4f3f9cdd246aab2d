// The planned buffers of an instance: made when the first runner or dispatcher needs them, shared
// by all layers, given back with the last user. Nothing else holds planned memory but the windows.

#ifndef MOXIE_PLUGIN_MEMORY_H
#define MOXIE_PLUGIN_MEMORY_H

#include "plugin/device.h"
#include "plugin/plan.h"

struct memory {
    const moxie_host *host; // its allocator, or the device's when it has none
    const struct device *device;
    const struct plan *plan;
    struct {
        void *base;
        int32_t users;
    } buffers[BUFFER_COUNT];
    uint64_t bytes_held;
};

// Takes every buffer of `set` (1u << enum buffer_id) that the plan has. On failure none is taken.
int32_t memory_take(struct memory *memory, uint32_t set, moxie_error *error);
void memory_drop(struct memory *memory, uint32_t set);

// A buffer of the plan that every taker has of its own: *base, or NULL when the plan does not have
// it. unmake of NULL is a no-op.
int32_t memory_make(struct memory *memory, enum buffer_id id, void **base, moxie_error *error);
void memory_unmake(struct memory *memory, enum buffer_id id, void *base);

// The piece of `slot`, NULL when the plan does not have the buffer.
void *memory_slot(const struct memory *memory, enum buffer_id id, int32_t slot);

#endif
