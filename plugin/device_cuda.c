// A CUDA GPU of compute capability 9.0 as a device. The one file of the rooms that sees CUDA
// headers.

#include "kernels/cuda/cuda.h"
#include "plugin/device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t cuda_allocate(const moxie_allocation *request, void **memory)
{
    size_t align = request->align < sizeof(void *) ? sizeof(void *) : (size_t)request->align;

    // cudaMalloc aligns to 256 bytes, more than any buffer asks for.
    if (request->kind == MOXIE_MEMORY_DEVICE) return (int32_t)cudaMalloc(memory, request->bytes);
    if (request->kind == MOXIE_MEMORY_PINNED)
        return (int32_t)cudaMallocHost(memory, request->bytes);
    return posix_memalign(memory, align, (size_t)request->bytes) == 0 ? cudaSuccess
                                                                      : cudaErrorMemoryAllocation;
}

static void cuda_release(const moxie_allocation *request, void *memory)
{
    if (request->kind == MOXIE_MEMORY_DEVICE)
        (void)cudaFree(memory);
    else if (request->kind == MOXIE_MEMORY_PINNED)
        (void)cudaFreeHost(memory);
    else
        free(memory);
}

static int32_t cuda_ordinal(void)
{
    int device = 0;

    (void)cudaGetDevice(&device);
    return device;
}

static int32_t cuda_fill(void *memory, int32_t byte, int64_t bytes)
{
    cudaError_t st = cudaMemset(memory, byte, (size_t)bytes);

    return (int32_t)(st == cudaSuccess ? cudaDeviceSynchronize() : st);
}

static int32_t cuda_fetch(void *to, const void *from, int64_t bytes)
{
    return (int32_t)cudaMemcpy(to, from, (size_t)bytes, cudaMemcpyDeviceToHost);
}

static void cuda_zero(void *memory, int64_t bytes, void *stream)
{
    (void)cudaMemsetAsync(memory, 0, (size_t)bytes, stream);
}

static int cuda_is_capturing(void *stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

    return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
           status == cudaStreamCaptureStatusActive;
}

static int32_t cuda_synchronize(void)
{
    return (int32_t)cudaDeviceSynchronize();
}

static int32_t cuda_stream_open(void **stream)
{
    return (int32_t)cudaStreamCreateWithFlags((cudaStream_t *)stream, cudaStreamNonBlocking);
}

static int32_t cuda_stream_finish(void *stream)
{
    return (int32_t)cudaStreamSynchronize(stream);
}

static void cuda_stream_close(void *stream)
{
    if (stream != NULL) (void)cudaStreamDestroy(stream);
}

// ---- The driver --------------------------------------------------------------------------------

// One of its functions, looked up through the runtime so that libcuda is not linked.
static int32_t find_function(const char *name, void *at)
{
    enum cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    cudaError_t st =
        cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found);

    if (st == cudaSuccess && found != cudaDriverEntryPointSuccess) st = cudaErrorSymbolNotFound;
    memcpy(at, &function, sizeof function);
    return (int32_t)st;
}

// ---- Other threads -----------------------------------------------------------------------------

// By the driver's contexts: cudaSetDevice back to a device that the thread has not used makes a
// context there, of some hundred MiB.
struct contexts {
    CUresult (*get_current)(CUcontext *);
    CUresult (*set_current)(CUcontext);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*release)(CUdevice);
};

static int32_t find_contexts(struct contexts *contexts)
{
    int32_t st = find_function("cuCtxGetCurrent", &contexts->get_current);

    if (st == 0) st = find_function("cuCtxSetCurrent", &contexts->set_current);
    if (st == 0) st = find_function("cuDevicePrimaryCtxRetain", &contexts->retain);
    if (st == 0) st = find_function("cuDevicePrimaryCtxRelease", &contexts->release);
    return st;
}

static int32_t cuda_visit(int32_t ordinal, struct device_visit *visit)
{
    struct contexts contexts;
    CUcontext before = NULL, context = NULL;
    int32_t st = find_contexts(&contexts);

    *visit = (struct device_visit){NULL, -1};
    if (st == 0) st = (int32_t)contexts.get_current(&before);
    if (st != 0 || (before != NULL && cuda_ordinal() == ordinal)) return st;
    st = (int32_t)contexts.retain(&context, ordinal);
    if (st != 0) return st;
    st = (int32_t)contexts.set_current(context);
    if (st == 0)
        *visit = (struct device_visit){before, ordinal};
    else
        (void)contexts.release(ordinal);
    return st;
}

static void cuda_leave(const struct device_visit *visit)
{
    struct contexts contexts;

    if (visit->ordinal < 0 || find_contexts(&contexts) != 0) return;
    (void)contexts.set_current(visit->before);
    (void)contexts.release(visit->ordinal);
}

// ---- Windows: the driver's virtual memory ------------------------------------------------------

#define GRANULE_BYTES (2 << 20)

struct driver {
    CUresult (*granularity)(size_t *, const CUmemAllocationProp *,
                            CUmemAllocationGranularity_flags);
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    CUresult (*release)(CUmemGenericAllocationHandle);
    CUresult (*export_handle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                              unsigned long long);
    CUresult (*import_handle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*give_back)(CUdeviceptr, size_t);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
};

static int32_t find_driver(struct driver *driver)
{
    const struct {
        const char *name;
        void *at;
    } functions[] = {
        {"cuMemGetAllocationGranularity", &driver->granularity},
        {"cuMemCreate", &driver->create},
        {"cuMemRelease", &driver->release},
        {"cuMemExportToShareableHandle", &driver->export_handle},
        {"cuMemImportFromShareableHandle", &driver->import_handle},
        {"cuMemAddressReserve", &driver->reserve},
        {"cuMemAddressFree", &driver->give_back},
        {"cuMemMap", &driver->map},
        {"cuMemUnmap", &driver->unmap},
        {"cuMemSetAccess", &driver->set_access},
    };
    int32_t st = 0;

    for (size_t i = 0; i < sizeof functions / sizeof functions[0] && st == 0; i++)
        st = find_function(functions[i].name, functions[i].at);
    return st;
}

// Addresses of the current device for all of a handle's memory.
static int32_t map_handle(const struct driver *driver, CUmemGenericAllocationHandle handle,
                          uint64_t bytes, void **memory)
{
    const CUmemAccessDesc access = {
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda_ordinal()},
        .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUdeviceptr at = 0;
    int mapped = 0;
    CUresult st = driver->reserve(&at, bytes, 0, 0, 0);

    if (st != CUDA_SUCCESS) return (int32_t)st;
    st = driver->map(at, bytes, 0, handle, 0);
    mapped = st == CUDA_SUCCESS;
    if (mapped) st = driver->set_access(at, bytes, &access, 1);
    if (st != CUDA_SUCCESS) {
        if (mapped) (void)driver->unmap(at, bytes);
        (void)driver->give_back(at, bytes);
        return (int32_t)st;
    }
    *memory = (void *)(uintptr_t)at;
    return 0;
}

static void cuda_window_unmap(void *memory, uint64_t bytes)
{
    struct driver driver;

    if (find_driver(&driver) != 0) return;
    (void)driver.unmap((CUdeviceptr)(uintptr_t)memory, bytes);
    (void)driver.give_back((CUdeviceptr)(uintptr_t)memory, bytes);
}

static int32_t cuda_window_make(uint64_t bytes, void **memory, int *fd)
{
    const CUmemAllocationProp prop = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = cuda_ordinal()}};
    CUmemGenericAllocationHandle handle = 0;
    struct driver driver;
    size_t granule = 0;
    // Makes the device's context, which the driver's functions need, and refuses while capturing.
    int32_t st = (int32_t)cudaDeviceSynchronize();

    if (st == 0) st = find_driver(&driver);
    if (st == 0)
        st = (int32_t)driver.granularity(&granule, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    // The plan counts in granules of this size on every machine.
    if (st == 0 && (granule == 0 || GRANULE_BYTES % granule != 0)) st = CUDA_ERROR_NOT_SUPPORTED;
    if (st == 0) st = (int32_t)driver.create(&handle, bytes, &prop, 0);
    if (st != 0) return st;
    st = map_handle(&driver, handle, bytes, memory);
    if (st == 0) st = cuda_fill(*memory, 0, (int64_t)bytes);
    if (st == 0)
        st = (int32_t)driver.export_handle(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    // The memory stays while it is mapped, or its descriptor is open.
    (void)driver.release(handle);
    if (st == 0 || *memory == NULL) return st;
    cuda_window_unmap(*memory, bytes);
    *memory = NULL;
    return st;
}

static int32_t cuda_window_map(int fd, uint64_t bytes, void **memory)
{
    CUmemGenericAllocationHandle handle = 0;
    struct driver driver;
    int32_t st = find_driver(&driver);

    if (st == 0)
        st = (int32_t)driver.import_handle(&handle, (void *)(uintptr_t)fd,
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (st != 0) return st;
    st = map_handle(&driver, handle, bytes, memory);
    (void)driver.release(handle);
    return st;
}

static const struct device_windows cuda_windows = {.granule_bytes = GRANULE_BYTES,
                                                   .make = cuda_window_make,
                                                   .map = cuda_window_map,
                                                   .unmap = cuda_window_unmap};

// ---- The device --------------------------------------------------------------------------------

static cudaError_t capability(int device, int *major, int *minor)
{
    cudaError_t st = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device);

    if (st != cudaSuccess) return st;
    return cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device);
}

// 0 and a reason when the current device is not a 9.0.
static int is_hopper(char reason[160])
{
    int device = 0, major = 0, minor = 0;
    cudaError_t st = cudaGetDevice(&device);

    if (st == cudaSuccess) st = capability(device, &major, &minor);
    if (st != cudaSuccess) {
        (void)cudaGetLastError();
        // The runtime's own words for it suppose that there is a driver.
        if (st == cudaErrorInsufficientDriver)
            (void)snprintf(reason, 160,
                           "no CUDA device can be used: NVIDIA's driver is not installed, or older "
                           "than CUDA %d.%d's",
                           CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        else
            (void)snprintf(reason, 160, "no CUDA device can be used: %s", cudaGetErrorString(st));
        return 0;
    }
    (void)snprintf(reason, 160, "device %d has compute capability %d.%d; the kernels are for 9.0",
                   device, major, minor);
    return major == 9 && minor == 0;
}

// The first device that is a 9.0; -1: none.
static int first_hopper(void)
{
    int devices = 0, major = 0, minor = 0;

    (void)cudaGetDeviceCount(&devices);
    for (int device = 0; device < devices; device++)
        if (capability(device, &major, &minor) == cudaSuccess && major == 9 && minor == 0)
            return device;
    return -1;
}

static int32_t cuda_probe(char reason[160])
{
    return is_hopper(reason) ? 100 : 0;
}

static int32_t cuda_status(int32_t answer)
{
    if (answer >= cudaErrorStreamCaptureUnsupported && answer <= cudaErrorCapturedEvent)
        return MOXIE_E_CAPTURING;
    switch (answer) {
    case cudaSuccess:
        return MOXIE_OK;
    case cudaErrorMemoryAllocation:
        return MOXIE_E_MEMORY;
    case cudaErrorNotPermitted:
    case cudaErrorNotSupported:
        return MOXIE_E_UNAVAILABLE;
    default:
        return MOXIE_E_DEVICE;
    }
}

static int32_t cuda_prepare(moxie_error *error)
{
    char reason[160];
    int32_t answer, st, hopper;

    if (!is_hopper(reason)) {
        hopper = first_hopper();
        if (hopper < 0)
            return fail_with(error, MOXIE_E_UNAVAILABLE, "%s; set device to cpu", reason);
        return fail_with(error, MOXIE_E_UNAVAILABLE,
                         "%s; device %d is one: make it current, or set CUDA_VISIBLE_DEVICES",
                         reason, hopper);
    }
    answer = kernels_cuda_load();
    if (answer == 0) return MOXIE_OK;
    st = cuda_status(answer);
    return fail_with(error, st, "the kernels cannot be loaded: %s%s",
                     cudaGetErrorString((cudaError_t)answer), device_earlier(&device_cuda, st));
}

static const char *cuda_error_text(int32_t code)
{
    return cudaGetErrorString((cudaError_t)code);
}

const struct device device_cuda = {
    .name = "sm_90",
    .tensor_device = MOXIE_DEVICE_CUDA,
    .kernels = &kernels_cuda,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .ordinal = cuda_ordinal,
    .fill = cuda_fill,
    .fetch = cuda_fetch,
    .zero = cuda_zero,
    .windows = &cuda_windows,
    .is_capturing = cuda_is_capturing,
    .visit = cuda_visit,
    .leave = cuda_leave,
    .synchronize = cuda_synchronize,
    .stream_open = cuda_stream_open,
    .stream_finish = cuda_stream_finish,
    .stream_close = cuda_stream_close,
    .prepare = cuda_prepare,
    .probe = cuda_probe,
    .error_text = cuda_error_text,
    .status = cuda_status,
};
