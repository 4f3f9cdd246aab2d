// A small pool per instance, joined at destroy. A parallel_for allocates nothing and holds no lock.

#ifndef MOXIE_PLUGIN_THREADS_H
#define MOXIE_PLUGIN_THREADS_H

#include "plugin/status.h"

#define THREADS_WORKERS_MAX 1024

struct threads;

// `workers` in 1..THREADS_WORKERS_MAX counts the calling thread, so workers - 1 are started; each
// blocks all signals but those of its own faults. When one cannot be started the others are joined,
// and MOXIE_E_UNAVAILABLE or MOXIE_E_MEMORY says which.
int32_t threads_create(int32_t workers, struct threads **out, moxie_error *error);

// Runs task(arg, 0..tasks-1), each once, on the pool and the caller, and returns when all are done;
// what the tasks wrote is visible then. One call at a time: a call made while another runs (from a
// task, say) runs its tasks by itself.
void threads_parallel_for(void *threads, uint64_t tasks, void (*task)(void *arg, uint64_t index),
                          void *arg);

// Joins. NULL is a no-op. In the child of a fork(), which has none of the threads, parallel_for
// runs every task on the caller, and destroy only frees.
void threads_destroy(struct threads *threads);

#endif
