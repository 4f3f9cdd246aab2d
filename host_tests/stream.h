// What the kernels' suites share: streams of real threads over poisoned scratch, numbers that look
// random and are the same every time.

#ifndef MOXIE_HOST_TESTS_STREAM_H
#define MOXIE_HOST_TESTS_STREAM_H

#include "kernels/cpu/cpu.h"

// A stream of `workers` threads; the scratch is full of NaNs, with a canary behind it.
void stream_init(struct cpu_stream *stream, int32_t workers, enum cpu_isa isa);
// Checks the canary.
void stream_fini(struct cpu_stream *stream);

uint32_t random_next(uint32_t *state); // xorshift; *state is not 0
float random_unit(uint32_t *state);    // -1..1

// Memory full of 0xff bytes, which are NaNs in every format and -1 in every integer.
void *poisoned(size_t bytes);

#endif
