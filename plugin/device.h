// What differs between a GPU and a CPU besides the kernels: memory, streams, capture, error texts.

#ifndef MOXIE_PLUGIN_DEVICE_H
#define MOXIE_PLUGIN_DEVICE_H

#include "kernels/kernels.h"
#include "plugin/status.h"

// Device memory that other processes can map, passed between them as descriptors.
struct device_windows {
    int64_t granule_bytes; // sizes are multiples of it
    // Zeroed memory of the current device, and a descriptor of it that the caller closes. Not while
    // a stream is captured.
    int32_t (*make)(uint64_t bytes, void **memory, int *fd);
    // Another process's, or another device's of this one, where the current device can reach it.
    int32_t (*map)(int fd, uint64_t bytes, void **memory);
    // Of both.
    void (*unmap)(void *memory, uint64_t bytes);
};

struct device {
    const char *name;      // the word of the key `device`
    int32_t tensor_device; // MOXIE_DEVICE_* of every tensor a host passes
    const struct kernels *kernels;
    // Memory for hosts without an allocator of their own. `align` is a power of two.
    int32_t (*allocate)(const moxie_allocation *request, void **memory);
    void (*release)(const moxie_allocation *request, void *memory);
    // The current device among those of tensor_device, for tensors that a host gets.
    int32_t (*ordinal)(void);
    // Every byte of device memory, before it returns; not while a stream is captured.
    int32_t (*fill)(void *memory, int32_t byte, int64_t bytes);
    // From device memory to the host's, before it returns; not while a stream is captured.
    int32_t (*fetch)(void *to, const void *from, int64_t bytes);
    // In stream order.
    void (*zero)(void *memory, int64_t bytes, void *stream);
    // NULL: the windows between ranks are host memory, and the host waits for flags; the
    // five ops that follow are NULL, too.
    const struct device_windows *windows;
    // 1 while what is launched on `stream` becomes part of a graph.
    int (*is_capturing)(void *stream);
    // Waits for everything that was launched on that device; the current one stays the current one.
    int32_t (*synchronize)(int32_t ordinal);
    // A stream that no other waits for, or is waited for by; waits for what was launched on it.
    // Neither while a stream is captured. `stream_close` of NULL is a no-op.
    int32_t (*stream_open)(void **stream);
    int32_t (*stream_finish)(void *stream);
    void (*stream_close)(void *stream);
    // Loads every kernel, so that no launch has to. MOXIE_E_UNAVAILABLE when the machine's device
    // is another.
    int32_t (*prepare)(moxie_error *error);
    // As device_probe.
    int32_t (*probe)(char reason[160]);
    // Words for the non-zero answer of a kernel launcher or of an op above.
    const char *(*error_text)(int32_t code);
    // 1 for the answer of what must not be called while a graph is captured.
    int (*is_capture_error)(int32_t code);
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
