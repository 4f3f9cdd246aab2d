// A small pool per instance, joined at destroy. No allocation and no lock held across a task in `parallel`.

#ifndef MOXIE_PLUGIN_THREADS_H
#define MOXIE_PLUGIN_THREADS_H

#include "plugin/status.h"

struct threads;

// `workers` >= 1 counts the calling thread, so workers - 1 are started; each blocks all signals.
int32_t threads_create(int32_t workers, struct threads **out, moxie_error *error);

// Runs task(arg, 0..tasks-1), each once, on the pool and the caller, and returns when all are done. One call at a time.
void threads_parallel_for(void *threads, uint64_t tasks, void (*task)(void *arg, uint64_t index), void *arg);

// Joins. NULL is a no-op.
void threads_destroy(struct threads *threads);

#endif
