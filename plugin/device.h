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

// What a thread has current besides.
struct device_visit {
    void *before;    // that of the thread; NULL: it has used no device
    int32_t ordinal; // visited; -1: none, the device was current already
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
    // NULL: the windows between ranks are host memory, and the host waits for flags; the ops that
    // follow, up to stream_close, are NULL, too.
    const struct device_windows *windows;
    // 1 while what is launched on `stream` becomes part of a graph.
    int (*is_capturing)(void *stream);
    // Makes that device the thread's current one, and then again what was. A thread that has used
    // no device has none after it: `leave` makes no context. Not to be left when `visit` fails.
    int32_t (*visit)(int32_t ordinal, struct device_visit *visit);
    void (*leave)(const struct device_visit *visit);
    // Waits for everything that was launched on the current device.
    int32_t (*synchronize)(void);
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
    // What an answer of those is to a host: MOXIE_E_CAPTURING of what must not be called while a
    // graph is captured, MOXIE_E_MEMORY where none is left, MOXIE_E_UNAVAILABLE of what the machine
    // cannot do or does not permit, else MOXIE_E_DEVICE; MOXIE_OK of 0.
    int32_t (*status)(int32_t answer);
};

extern const struct device device_cpu;
#ifdef MOXIE_HAS_CUDA
extern const struct device device_cuda;
#endif

// The device of that word of the key `device`; NULL when this build has none.
const struct device *device_find(const char *name);

// What follows the text of an answer of that status: a GPU tells of what has failed when it is
// asked for something next, whatever that is.
const char *device_earlier(const struct device *device, int32_t status);

// MOXIE_OK of 0; else fails with the answer's status and words, behind "`what`: ".
int32_t device_check(const struct device *device, int32_t answer, const char *what,
                     moxie_error *error);

// How well the device of that word would serve here: 0 cannot. Always fills `reason`.
int32_t device_probe(const char *name, char reason[160]);

#endif
