// A kernel's tiles, see work.h.

#include "kernels/cpu/work.h"

#include "kernels/cpu/fp_mode.h"
#include "kernels/cpu/numbers.h"

// About 10 us of one core: what waking another costs.
#define INLINE_BYTES ((int64_t)64 << 10)

int work_next(struct work *work, int64_t *first, int64_t *end)
{
    *first = atomic_fetch_add_explicit(&work->next, work->grain, memory_order_relaxed);
    *end = min64(*first + work->grain, work->items);
    return *first < work->items;
}

static void work_task(void *arg, uint64_t index)
{
    struct work *work = arg;
    fp_mode before;

    // A host's parallel_for may count past its tasks.
    if (index >= (uint64_t)work->workers) return;
    before = fp_mode_begin();
    // A caller whose kernel needs no scratch may have none.
    work->body(work, work->scratch != NULL ? work->scratch + index * CPU_SCRATCH_BYTES : NULL);
    fp_mode_end(before);
}

void work_run(struct work *work, const struct cpu_stream *stream, int64_t bytes)
{
    int64_t workers = min64(stream->workers, (work->items + work->grain - 1) / work->grain);

    atomic_init(&work->next, 0);
    work->scratch = stream->scratch;
    work->workers = workers;
    if (workers <= 0) return;
    if (workers > 1 && bytes >= INLINE_BYTES)
        stream->parallel_for(stream->ctx, (uint64_t)workers, work_task, work);
    // Also when parallel_for, which cannot answer, has run no task at all.
    if (atomic_load_explicit(&work->next, memory_order_relaxed) < work->items) work_task(work, 0);
}
