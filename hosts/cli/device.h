// Where a rank's tensors lie, and how its work there is ordered, captured and timed: one table for
// RAM, one for a CUDA GPU. The GPU is reached through the driver's own library, found when it is
// needed, so that the command builds and runs where there is no CUDA.

#ifndef MOXIE_HOSTS_CLI_DEVICE_H
#define MOXIE_HOSTS_CLI_DEVICE_H

#include "abi.h"
#include "hosts/cli/fault.h"

struct device;

// Every function answers EXIT_OK or a fault. Memory is named by its address on the device.
struct device_table {
    int32_t type; // MOXIE_DEVICE_*
    int direct;   // its memory is RAM: files may be read into it
    int (*open)(struct device *, int32_t rank, struct fault *);
    // Also after a half-done open.
    void (*close)(struct device *);
    int (*allocate)(struct device *, const moxie_allocation *, void **memory, struct fault *);
    int (*release)(struct device *, const moxie_allocation *, void *memory, struct fault *);
    // Complete when they return, and after all work before them.
    int (*copy_in)(struct device *, void *to, const void *from, uint64_t bytes, struct fault *);
    int (*copy_out)(struct device *, void *to, const void *from, uint64_t bytes, struct fault *);
    int (*synchronise)(struct device *, struct fault *);
    int (*free_bytes)(struct device *, uint64_t *bytes, struct fault *);

    // In the order of the stream, without waiting. These and the rest: NULL where there are no
    // graphs.
    int (*copy)(struct device *, void *to, const void *from, uint64_t bytes, struct fault *);
    int (*fill)(struct device *, void *memory, uint8_t byte, uint64_t bytes, struct fault *);
    // What the stream gets between the two is not run, and becomes the graph. End also gives up.
    int (*capture_begin)(struct device *, struct fault *);
    int (*capture_end)(struct device *, void **graph, struct fault *);
    int (*graph_launch)(struct device *, void *graph, struct fault *);
    int (*graph_destroy)(struct device *, void *graph, struct fault *);
    int (*event_create)(struct device *, void **event, struct fault *);
    int (*event_record)(struct device *, void *event, struct fault *);
    // While capturing only: every launch of the graph records the event there.
    int (*event_capture)(struct device *, void *event, struct fault *);
    // Between two events that the stream has passed.
    int (*elapsed_us)(struct device *, void *from, void *to, double *us, struct fault *);
    int (*event_destroy)(struct device *, void *event, struct fault *);
    // A range of a profiler's timeline, or nothing. Ranges nest, and each is ended by the thread
    // that began it.
    void (*range_begin)(struct device *, const char *name);
    void (*range_end)(struct device *);
};

extern const struct device_table device_cpu, device_cuda;

struct device {
    const struct device_table *table; // NULL: not open
    moxie_device place;               // of every tensor there
    void *stream;                     // where all work goes; NULL in RAM
    char name[96];                    // "NVIDIA H200"
    void *state;                      // the table's
    uint64_t bytes_held;              // taken and not released
    struct fault late;                // the first failure of a release; code EXIT_OK: none
};

// The table for the word of the key `device`; NULL when this command has none.
const struct device_table *device_find(const char *word);

// The rank's: where there are several, rank r gets device r, and past the last they are shared. Do
// not move `device` afterwards.
int device_open(struct device *device, const char *word, int32_t rank, struct fault *fault);
// Closes at the end of a function whose outcome is `st`; what was not released, or not without a
// failure, is a fault where there was none before. Accepts a zeroed device.
int device_finish(struct device *device, int st, struct fault *fault);

// As the callbacks of moxie_host, with the count of bytes_held.
int device_take(struct device *device, const moxie_allocation *request, void **memory,
                struct fault *fault);
void device_drop(struct device *device, const moxie_allocation *request, void *memory);

// The command's own memory on a device.
struct memory {
    uint8_t *at; // NULL: none
    uint64_t bytes;
};

// `what` is for the fault's text.
int memory_init(struct memory *memory, struct device *device, uint64_t bytes, const char *what,
                struct fault *fault);
// memory_init, and `from` copied in.
int memory_from(struct memory *memory, struct device *device, const void *from, uint64_t bytes,
                const char *what, struct fault *fault);
// Accepts a zeroed struct.
void memory_fini(struct memory *memory, struct device *device);

// For what must be given back even after a failure: the fault is kept for device_finish.
void device_graph_destroy(struct device *device, void *graph);
void device_event_destroy(struct device *device, void *event);

#endif
