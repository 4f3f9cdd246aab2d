// A CUDA GPU as a device, by the driver's API. The context is the device's primary one, which the
// runtime inside a plugin uses too, so that both see the same memory and streams. The stream is an
// ordinary one: copies of the host wait for its work, and its work for them.

#include "hosts/cli/device.h"

#include "hosts/cli/cuda_driver.h"
#include "hosts/cli/nvtx.h"
#include "hosts/cli/table.h"

#include <stdlib.h>

struct cuda {
    struct cuda_driver driver;
    struct nvtx nvtx;
    int device;
    void *context; // NULL: none retained
};

// What to do about a result, where the driver's words do not say it.
static const char *advice(cuda_result result)
{
    switch (result) {
    case 3:
    case 4:
    case 999:
        return "look into the kernel's log, and whether nvidia-smi answers";
    case 34:
        return "the toolkit's stub was loaded; take its folder out of LD_LIBRARY_PATH";
    case 803:
        return "install a driver that is as new as the library's CUDA";
    case CUDA_NO_DEVICE:
    case 101:
        return "see nvidia-smi and CUDA_VISIBLE_DEVICES, or use --device cpu";
    case 802:
        return "the machine's GPUs wait for a service, such as nvidia-fabricmanager";
    case 46:
        return "another process has the GPU; wait, or choose another by CUDA_VISIBLE_DEVICES";
    case 700:
    case 715:
    case 716:
    case 718:
    case 719:
        return "a kernel of the library went wrong; run under compute-sanitizer and report it";
    case 900:
    case 901:
    case 906:
        return "the library did what a graph cannot hold; report it";
    default:
        return "see the documentation of the call";
    }
}

static const struct cuda_driver *driver_of(const struct device *device)
{
    const struct cuda *cuda = device->state;

    return &cuda->driver;
}

// The outcome of a call: its name, the driver's words, and what to change.
static int check(const struct device *device, cuda_result result, const char *call,
                 struct fault *fault)
{
    const char *words = NULL;

    if (result == 0) return EXIT_OK;
    if (driver_of(device)->error_string(result, &words) != 0 || words == NULL)
        words = "an error that the driver has no words for";
    return fault_set(fault, result == CUDA_NO_DEVICE ? EXIT_REFUSED : EXIT_TROUBLE,
                     "%s: %s (CUDA error %d): %s", call, words, result, advice(result));
}

// Of an address that came from cuMemAlloc.
static cuda_address address_of(const void *memory)
{
    return (cuda_address)(uintptr_t)memory;
}

static int cuda_open(struct device *device, int32_t rank, struct fault *fault)
{
    struct cuda *cuda = calloc(1, sizeof *cuda);
    int count = 0;
    int ordinal = 0;
    int st = EXIT_OK;

    device->state = cuda;
    if (cuda == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(cuda_driver_load(&cuda->driver, fault));
    nvtx_load(&cuda->nvtx);
    TRY(check(device, cuda->driver.init(0), "cuInit", fault));
    TRY(check(device, cuda->driver.device_count(&count), "cuDeviceGetCount", fault));
    if (count < 1) TRY(check(device, CUDA_NO_DEVICE, "cuDeviceGetCount", fault));
    ordinal = rank % count;
    TRY(check(device, cuda->driver.device_get(&cuda->device, ordinal), "cuDeviceGet", fault));
    TRY(check(device,
              cuda->driver.device_name(device->name, (int)sizeof device->name, cuda->device),
              "cuDeviceGetName", fault));
    TRY(check(device, cuda->driver.context_retain(&cuda->context, cuda->device),
              "cuDevicePrimaryCtxRetain", fault));
    TRY(check(device, cuda->driver.context_set(cuda->context), "cuCtxSetCurrent", fault));
    TRY(check(device, cuda->driver.stream_create(&device->stream, 0), "cuStreamCreate", fault));
    device->place = (moxie_device){MOXIE_DEVICE_CUDA, ordinal};
out:
    return st;
}

static void cuda_close(struct device *device)
{
    struct cuda *cuda = device->state;

    if (cuda == NULL) return;
    if (device->stream != NULL) (void)cuda->driver.stream_destroy(device->stream);
    if (cuda->context != NULL) {
        (void)cuda->driver.context_set(NULL);
        (void)cuda->driver.context_release(cuda->device);
    }
    free(cuda);
}

// With what is free, which tells whether the request or a neighbour is too large.
static int out_of_memory(const struct device *device, const moxie_allocation *request,
                         struct fault *fault)
{
    size_t available = 0;
    size_t total = 0;
    char asked_text[HUMAN_BYTES];
    char available_text[HUMAN_BYTES];
    char total_text[HUMAN_BYTES];

    (void)driver_of(device)->memory_info(&available, &total);
    return fault_set(fault, EXIT_TROUBLE,
                     "cuMemAlloc: %s for %s, and %s of the %s of %s are free: take fewer experts "
                     "or tokens, or end what else uses the GPU",
                     human_bytes(request->bytes, asked_text), request->name,
                     human_bytes(available, available_text), human_bytes(total, total_text),
                     device->name);
}

static int cuda_allocate(struct device *device, const moxie_allocation *request, void **memory,
                         struct fault *fault)
{
    const struct cuda_driver *driver = driver_of(device);
    cuda_address address = 0;
    cuda_result result = 0;

    *memory = NULL;
    if (request->kind == MOXIE_MEMORY_PINNED)
        return check(device, driver->allocate_pinned(memory, request->bytes), "cuMemAllocHost",
                     fault);
    if (request->kind != MOXIE_MEMORY_DEVICE)
        return device_cpu.allocate(NULL, request, memory, fault);
    result = driver->allocate(&address, request->bytes);
    if (result == CUDA_OUT_OF_MEMORY) return out_of_memory(device, request, fault);
    *memory = (void *)(uintptr_t)address;
    return check(device, result, "cuMemAlloc", fault);
}

static int cuda_release(struct device *device, const moxie_allocation *request, void *memory,
                        struct fault *fault)
{
    const struct cuda_driver *driver = driver_of(device);

    if (request->kind == MOXIE_MEMORY_PINNED)
        return check(device, driver->release_pinned(memory), "cuMemFreeHost", fault);
    if (request->kind != MOXIE_MEMORY_DEVICE)
        return device_cpu.release(NULL, request, memory, fault);
    return check(device, driver->release(address_of(memory)), "cuMemFree", fault);
}

static int cuda_copy_in(struct device *device, void *to, const void *from, uint64_t bytes,
                        struct fault *fault)
{
    if (bytes == 0) return EXIT_OK;
    return check(device, driver_of(device)->copy_in(address_of(to), from, bytes), "cuMemcpyHtoD",
                 fault);
}

static int cuda_copy_out(struct device *device, void *to, const void *from, uint64_t bytes,
                         struct fault *fault)
{
    if (bytes == 0) return EXIT_OK;
    return check(device, driver_of(device)->copy_out(to, address_of(from), bytes), "cuMemcpyDtoH",
                 fault);
}

static int cuda_synchronise(struct device *device, struct fault *fault)
{
    return check(device, driver_of(device)->stream_synchronise(device->stream),
                 "cuStreamSynchronize", fault);
}

static int cuda_free_bytes(struct device *device, uint64_t *bytes, struct fault *fault)
{
    size_t available = 0;
    size_t total = 0;
    int st =
        check(device, driver_of(device)->memory_info(&available, &total), "cuMemGetInfo", fault);

    *bytes = available;
    return st;
}

static int cuda_copy(struct device *device, void *to, const void *from, uint64_t bytes,
                     struct fault *fault)
{
    return check(device,
                 driver_of(device)->copy(address_of(to), address_of(from), bytes, device->stream),
                 "cuMemcpyDtoDAsync", fault);
}

static int cuda_fill(struct device *device, void *memory, uint8_t byte, uint64_t bytes,
                     struct fault *fault)
{
    return check(device, driver_of(device)->fill(address_of(memory), byte, bytes, device->stream),
                 "cuMemsetD8Async", fault);
}

static int cuda_capture_begin(struct device *device, struct fault *fault)
{
    return check(device,
                 driver_of(device)->capture_begin(device->stream, CUDA_CAPTURE_THREAD_LOCAL),
                 "cuStreamBeginCapture", fault);
}

static int cuda_capture_end(struct device *device, void **graph, struct fault *fault)
{
    const struct cuda_driver *driver = driver_of(device);
    void *captured = NULL;
    int st = EXIT_OK;

    *graph = NULL;
    TRY(check(device, driver->capture_end(device->stream, &captured), "cuStreamEndCapture", fault));
    TRY(check(device, driver->graph_instantiate(graph, captured, 0), "cuGraphInstantiate", fault));
out:
    if (captured != NULL) (void)driver->graph_destroy(captured);
    return st;
}

static int cuda_graph_launch(struct device *device, void *graph, struct fault *fault)
{
    return check(device, driver_of(device)->exec_launch(graph, device->stream), "cuGraphLaunch",
                 fault);
}

static int cuda_graph_destroy(struct device *device, void *graph, struct fault *fault)
{
    return check(device, driver_of(device)->exec_destroy(graph), "cuGraphExecDestroy", fault);
}

static int cuda_event_create(struct device *device, void **event, struct fault *fault)
{
    return check(device, driver_of(device)->event_create(event, 0), "cuEventCreate", fault);
}

static int cuda_event_record(struct device *device, void *event, struct fault *fault)
{
    return check(device, driver_of(device)->event_record(event, device->stream), "cuEventRecord",
                 fault);
}

static int cuda_event_capture(struct device *device, void *event, struct fault *fault)
{
    return check(
        device,
        driver_of(device)->event_record_flags(event, device->stream, CUDA_EVENT_RECORD_EXTERNAL),
        "cuEventRecordWithFlags", fault);
}

static int cuda_elapsed_us(struct device *device, void *from, void *to, double *us,
                           struct fault *fault)
{
    float milliseconds = 0;
    int st = check(device, driver_of(device)->event_elapsed(&milliseconds, from, to),
                   "cuEventElapsedTime", fault);

    *us = 1000.0 * (double)milliseconds;
    return st;
}

static int cuda_event_destroy(struct device *device, void *event, struct fault *fault)
{
    return check(device, driver_of(device)->event_destroy(event), "cuEventDestroy", fault);
}

static void cuda_range_begin(struct device *device, const char *name)
{
    const struct cuda *cuda = device->state;

    if (cuda->nvtx.push != NULL) (void)cuda->nvtx.push(name);
}

static void cuda_range_end(struct device *device)
{
    const struct cuda *cuda = device->state;

    if (cuda->nvtx.pop != NULL) (void)cuda->nvtx.pop();
}

const struct device_table device_cuda = {
    .type = MOXIE_DEVICE_CUDA,
    .open = cuda_open,
    .close = cuda_close,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .copy_in = cuda_copy_in,
    .copy_out = cuda_copy_out,
    .synchronise = cuda_synchronise,
    .free_bytes = cuda_free_bytes,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .capture_begin = cuda_capture_begin,
    .capture_end = cuda_capture_end,
    .graph_launch = cuda_graph_launch,
    .graph_destroy = cuda_graph_destroy,
    .event_create = cuda_event_create,
    .event_record = cuda_event_record,
    .event_capture = cuda_event_capture,
    .elapsed_us = cuda_elapsed_us,
    .event_destroy = cuda_event_destroy,
    .range_begin = cuda_range_begin,
    .range_end = cuda_range_end,
};
