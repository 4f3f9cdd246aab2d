// A kernel's tiles shared among the stream's workers. Which worker takes which tile changes nothing
// but time, nor does the floating point mode of the threads.

#ifndef MOXIE_KERNELS_CPU_WORK_H
#define MOXIE_KERNELS_CPU_WORK_H

#include "kernels/cpu/cpu.h"

#include <stdatomic.h>

struct work {
    // Runs items until work_next has none. `scratch` is this worker's alone, CPU_SCRATCH_BYTES.
    void (*body)(struct work *work, unsigned char *scratch);
    const void *args;
    int64_t items;
    int64_t grain; // items that a worker takes at a time, >= 1
    unsigned char *scratch;
    int64_t workers; // that there is scratch for
    _Atomic int64_t next;
};

// The next items to do, first..end-1; 0 when there are none. A worker's items ascend.
int work_next(struct work *work, int64_t *first, int64_t *end);

// Does all items: in the caller when there is one worker or one grain of items, or when `bytes`,
// what the work reads and writes, is not worth waking anybody.
void work_run(struct work *work, const struct cpu_stream *stream, int64_t bytes);

#endif
