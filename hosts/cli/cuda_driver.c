// Finds the functions of the CUDA driver's library.

#include "hosts/cli/cuda_driver.h"

#include <dlfcn.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

// Where a function goes, and the name it is exported under: cuda.h maps some names to these.
struct symbol {
    size_t offset;
    const char *name;
};

#define SYMBOL(member, exported)                                                                   \
    {                                                                                              \
        offsetof(struct cuda_driver, member), exported                                             \
    }

static const struct symbol symbols[] = {
    SYMBOL(init, "cuInit"),
    SYMBOL(error_string, "cuGetErrorString"),
    SYMBOL(device_count, "cuDeviceGetCount"),
    SYMBOL(device_get, "cuDeviceGet"),
    SYMBOL(device_name, "cuDeviceGetName"),
    SYMBOL(context_retain, "cuDevicePrimaryCtxRetain"),
    SYMBOL(context_release, "cuDevicePrimaryCtxRelease_v2"),
    SYMBOL(context_set, "cuCtxSetCurrent"),
    SYMBOL(memory_info, "cuMemGetInfo_v2"),
    SYMBOL(allocate, "cuMemAlloc_v2"),
    SYMBOL(release, "cuMemFree_v2"),
    SYMBOL(allocate_pinned, "cuMemAllocHost_v2"),
    SYMBOL(release_pinned, "cuMemFreeHost"),
    SYMBOL(copy_in, "cuMemcpyHtoD_v2"),
    SYMBOL(copy_out, "cuMemcpyDtoH_v2"),
    SYMBOL(copy, "cuMemcpyDtoDAsync_v2"),
    SYMBOL(fill, "cuMemsetD8Async"),
    SYMBOL(stream_create, "cuStreamCreate"),
    SYMBOL(stream_destroy, "cuStreamDestroy_v2"),
    SYMBOL(stream_synchronise, "cuStreamSynchronize"),
    SYMBOL(capture_begin, "cuStreamBeginCapture_v2"),
    SYMBOL(capture_end, "cuStreamEndCapture"),
    SYMBOL(graph_instantiate, "cuGraphInstantiateWithFlags"),
    SYMBOL(graph_destroy, "cuGraphDestroy"),
    SYMBOL(exec_launch, "cuGraphLaunch"),
    SYMBOL(exec_destroy, "cuGraphExecDestroy"),
    SYMBOL(event_create, "cuEventCreate"),
    SYMBOL(event_record, "cuEventRecord"),
    SYMBOL(event_record_flags, "cuEventRecordWithFlags"),
    SYMBOL(event_elapsed, "cuEventElapsedTime"),
    SYMBOL(event_destroy, "cuEventDestroy_v2"),
};

#define SYMBOLS (sizeof symbols / sizeof symbols[0])

_Static_assert(sizeof(struct cuda_driver) == SYMBOLS * sizeof(void *), "every function has a row");

int cuda_driver_load(struct cuda_driver *driver, struct fault *fault)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL)
        return fault_set(fault, EXIT_REFUSED,
                         "no CUDA driver can be loaded (%s): install NVIDIA's driver, or use "
                         "--device cpu",
                         dlerror());
    for (size_t i = 0; i < SYMBOLS; i++) {
        void *address = dlsym(library, symbols[i].name);

        if (address == NULL)
            return fault_set(fault, EXIT_REFUSED,
                             LIBRARY " has no %s: install a driver of CUDA 12.3 or later, or use "
                                     "--device cpu",
                             symbols[i].name);
        // A function's address is no object's in C; POSIX promises that the bits are the same.
        memcpy((char *)driver + symbols[i].offset, &address, sizeof address);
    }
    return EXIT_OK;
}
