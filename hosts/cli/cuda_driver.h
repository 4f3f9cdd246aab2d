// The CUDA driver's own library, by dlopen. Its types are declared here from the documented ABI,
// because building the command must not need CUDA: a result, a device and a capture mode are ints,
// a device address is 64 bits, everything else is a pointer.

#ifndef MOXIE_HOSTS_CLI_CUDA_DRIVER_H
#define MOXIE_HOSTS_CLI_CUDA_DRIVER_H

#include "hosts/cli/fault.h"

#include <stddef.h>
#include <stdint.h>

typedef int cuda_result; // 0: success
typedef uint64_t cuda_address;

#define CUDA_OUT_OF_MEMORY 2
#define CUDA_NO_DEVICE     100
// A capture that forbids unsafe calls of the capturing thread only.
#define CUDA_CAPTURE_THREAD_LOCAL 1
// A recording that a capture keeps, so that every launch of the graph records the event.
#define CUDA_EVENT_RECORD_EXTERNAL 1

struct cuda_driver {
    cuda_result (*init)(unsigned flags);
    cuda_result (*error_string)(cuda_result, const char **text);
    cuda_result (*device_count)(int *count);
    cuda_result (*device_get)(int *device, int ordinal);
    cuda_result (*device_name)(char *name, int capacity, int device);
    cuda_result (*context_retain)(void **context, int device);
    cuda_result (*context_release)(int device);
    cuda_result (*context_set)(void *context);
    cuda_result (*memory_info)(size_t *free, size_t *total);
    cuda_result (*allocate)(cuda_address *memory, size_t bytes);
    cuda_result (*release)(cuda_address memory);
    cuda_result (*allocate_pinned)(void **memory, size_t bytes);
    cuda_result (*release_pinned)(void *memory);
    cuda_result (*copy_in)(cuda_address to, const void *from, size_t bytes);
    cuda_result (*copy_out)(void *to, cuda_address from, size_t bytes);
    cuda_result (*copy)(cuda_address to, cuda_address from, size_t bytes, void *stream);
    cuda_result (*fill)(cuda_address memory, unsigned char byte, size_t bytes, void *stream);
    cuda_result (*stream_create)(void **stream, unsigned flags);
    cuda_result (*stream_destroy)(void *stream);
    cuda_result (*stream_synchronise)(void *stream);
    cuda_result (*capture_begin)(void *stream, int mode);
    cuda_result (*capture_end)(void *stream, void **graph);
    cuda_result (*graph_instantiate)(void **exec, void *graph, unsigned long long flags);
    cuda_result (*graph_destroy)(void *graph);
    cuda_result (*exec_launch)(void *exec, void *stream);
    cuda_result (*exec_destroy)(void *exec);
    cuda_result (*event_create)(void **event, unsigned flags);
    cuda_result (*event_record)(void *event, void *stream);
    cuda_result (*event_record_flags)(void *event, void *stream, unsigned flags);
    cuda_result (*event_elapsed)(float *milliseconds, void *from, void *to);
    cuda_result (*event_destroy)(void *event);
};

// Loads the library and finds every function. It stays loaded: the plugin's runtime uses it too,
// and it has threads of its own.
int cuda_driver_load(struct cuda_driver *driver, struct fault *fault);

#endif
