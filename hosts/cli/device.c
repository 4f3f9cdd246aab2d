// Devices by name, and the count of what is held on them.

#include "hosts/cli/device.h"

#include "hosts/cli/table.h"

#include <string.h>

#define MEMORY_ALIGN_BYTES 256 // what a GPU's allocator gives, and more than any vector wants

const struct device_table *device_find(const char *word)
{
    if (strcmp(word, "cpu") == 0) return &device_cpu;
    return strncmp(word, "sm_", 3) == 0 ? &device_cuda : NULL;
}

int device_open(struct device *device, const char *word, int32_t rank, struct fault *fault)
{
    int st = EXIT_OK;

    *device = (struct device){.table = device_find(word)};
    if (device->table == NULL)
        return fault_set(fault, EXIT_REFUSED,
                         "the command knows no memory of device %s: use cpu or sm_90", word);
    st = device->table->open(device, rank, fault);
    if (st != EXIT_OK) {
        device->table->close(device);
        *device = (struct device){.table = NULL};
    }
    return st;
}

int device_finish(struct device *device, int st, struct fault *fault)
{
    char text[HUMAN_BYTES];
    int late = device->late.code;

    if (device->table == NULL) return st;
    device->table->close(device);
    if (st == EXIT_OK && late != EXIT_OK)
        st = fault_set(fault, late, "%s", device->late.text);
    else if (st == EXIT_OK && device->bytes_held > 0)
        st = fault_set(fault, EXIT_TROUBLE, "%s of %s were not released",
                       human_bytes(device->bytes_held, text), device->name);
    *device = (struct device){.table = NULL};
    return st;
}

// Keeps the first failure of a release, which nobody can act upon before the end.
static void keep(struct device *device, int st, const struct fault *fault)
{
    if (st != EXIT_OK && device->late.code == EXIT_OK) device->late = *fault;
}

int device_take(struct device *device, const moxie_allocation *request, void **memory,
                struct fault *fault)
{
    int st = device->table->allocate(device, request, memory, fault);

    if (st == EXIT_OK) device->bytes_held += request->bytes;
    return st;
}

void device_drop(struct device *device, const moxie_allocation *request, void *memory)
{
    struct fault fault;
    int st = device->table->release(device, request, memory, &fault);

    if (st == EXIT_OK) device->bytes_held -= request->bytes;
    keep(device, st, &fault);
}

// An allocation of nothing is refused by some allocators.
static moxie_allocation request_of(uint64_t bytes, const char *what)
{
    return (moxie_allocation){
        .struct_size = sizeof(moxie_allocation),
        .kind = MOXIE_MEMORY_DEVICE,
        .bytes = bytes > 0 ? bytes : 1,
        .align = MEMORY_ALIGN_BYTES,
        .name = what,
    };
}

int memory_init(struct memory *memory, struct device *device, uint64_t bytes, const char *what,
                struct fault *fault)
{
    const moxie_allocation request = request_of(bytes, what);
    void *at = NULL;
    int st = device_take(device, &request, &at, fault);

    *memory = (struct memory){.at = at, .bytes = bytes};
    return st;
}

int memory_from(struct memory *memory, struct device *device, const void *from, uint64_t bytes,
                const char *what, struct fault *fault)
{
    int st = EXIT_OK;

    TRY(memory_init(memory, device, bytes, what, fault));
    TRY(device->table->copy_in(device, memory->at, from, bytes, fault));
out:
    return st;
}

void memory_fini(struct memory *memory, struct device *device)
{
    const moxie_allocation request = request_of(memory->bytes, "");

    if (memory->at != NULL) device_drop(device, &request, memory->at);
    *memory = (struct memory){.at = NULL};
}

void device_graph_destroy(struct device *device, void *graph)
{
    struct fault fault;

    if (graph != NULL) keep(device, device->table->graph_destroy(device, graph, &fault), &fault);
}

void device_event_destroy(struct device *device, void *event)
{
    struct fault fault;

    if (event != NULL) keep(device, device->table->event_destroy(device, event, &fault), &fault);
}
