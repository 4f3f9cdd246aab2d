// RAM as a device: every call is complete when it returns, and there are no graphs.

#include "hosts/cli/device.h"

#include "hosts/cli/machine.h"
#include "hosts/cli/table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int cpu_open(struct device *device, int32_t rank, struct fault *fault)
{
    (void)rank;
    (void)fault;
    device->place = (moxie_device){MOXIE_DEVICE_CPU, 0};
    (void)snprintf(device->name, sizeof device->name, "RAM");
    return EXIT_OK;
}

static void cpu_close(struct device *device)
{
    (void)device;
}

static int cpu_allocate(struct device *device, const moxie_allocation *request, void **memory,
                        struct fault *fault)
{
    size_t align = request->align < sizeof(void *) ? sizeof(void *) : (size_t)request->align;
    char text[HUMAN_BYTES];

    (void)device;
    *memory = NULL;
    if (posix_memalign(memory, align, request->bytes) == 0) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "out of memory for %s of %s; use more ranks",
                     human_bytes(request->bytes, text), request->name);
}

static int cpu_release(struct device *device, const moxie_allocation *request, void *memory,
                       struct fault *fault)
{
    (void)device;
    (void)request;
    (void)fault;
    free(memory);
    return EXIT_OK;
}

static int cpu_copy(struct device *device, void *to, const void *from, uint64_t bytes,
                    struct fault *fault)
{
    (void)device;
    (void)fault;
    if (bytes > 0) memcpy(to, from, bytes);
    return EXIT_OK;
}

static int cpu_synchronise(struct device *device, struct fault *fault)
{
    (void)device;
    (void)fault;
    return EXIT_OK;
}

static int cpu_free_bytes(struct device *device, uint64_t *bytes, struct fault *fault)
{
    (void)device;
    (void)fault;
    *bytes = machine_memory_available();
    return EXIT_OK;
}

const struct device_table device_cpu = {
    .type = MOXIE_DEVICE_CPU,
    .direct = 1,
    .open = cpu_open,
    .close = cpu_close,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .copy_in = cpu_copy,
    .copy_out = cpu_copy,
    .synchronise = cpu_synchronise,
    .free_bytes = cpu_free_bytes,
};
