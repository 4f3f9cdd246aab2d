// What the programs in C measure with: a clock, memory, and the order of times.

#ifndef MOXIE_BENCH_MEASURE_H
#define MOXIE_BENCH_MEASURE_H

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static inline int64_t now_ns(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000 + time.tv_nsec;
}

// At a multiple of 64; the program ends where there is none. owner: caller
static inline void *allocate(int64_t bytes)
{
    void *memory = aligned_alloc(64, ((size_t)bytes + 63) / 64 * 64);

    if (memory == NULL) {
        (void)fprintf(stderr, "%s: no memory for %lld bytes\n", program_invocation_short_name,
                      (long long)bytes);
        exit(1);
    }
    return memory;
}

static inline int by_value(const void *a, const void *b)
{
    const int64_t *x = a, *y = b;

    return (*x > *y) - (*x < *y);
}

// Ascending.
static inline void sort_times(int64_t *times, int64_t count)
{
    qsort(times, (size_t)count, sizeof times[0], by_value);
}

#endif
