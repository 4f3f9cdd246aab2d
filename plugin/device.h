// What differs between a GPU and a CPU besides the kernels: memory, streams, capture, error texts.

#ifndef MOXIE_PLUGIN_DEVICE_H
#define MOXIE_PLUGIN_DEVICE_H

#include "kernels/kernels.h"
#include "plugin/status.h"

struct device {
    const char *name;      // the word of the key `device`
    int32_t tensor_device; // MOXIE_DEVICE_* of every tensor a host passes
    const struct kernels *kernels;
    // Memory for hosts without an allocator of their own. `align` is a power of two.
    int32_t (*allocate)(const moxie_allocation *request, void **memory);
    void (*release)(const moxie_allocation *request, void *memory);
    // 1 while `stream` is being captured into a graph.
    int (*capturing)(void *stream);
    // The current device among those of tensor_device, for tensors that a host gets.
    int32_t (*ordinal)(void);
    // Every byte of device memory, before it returns; not while a stream is captured.
    int32_t (*fill)(void *memory, int32_t byte, int64_t bytes);
    // In stream order.
    void (*zero)(void *memory, int64_t bytes, void *stream);
    // Loads every kernel, so that no launch has to. MOXIE_E_UNAVAILABLE when the machine's device
    // is another.
    int32_t (*prepare)(moxie_error *error);
    // As device_probe.
    int32_t (*probe)(char reason[160]);
    // Words for a kernel launcher's non-zero answer.
    const char *(*error_text)(int32_t code);
};

extern const struct device device_cpu;
#ifdef MOXIE_HAS_CUDA
extern const struct device device_cuda;
#endif

// The device of that word of the key `device`; NULL when this build has none.
const struct device *device_find(const char *name);

// How well the device of that word would serve here: 0 cannot. Always fills `reason`.
int32_t device_probe(const char *name, char reason[160]);

#endif
