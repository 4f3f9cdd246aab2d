// What this machine has.

#ifndef MOXIE_HOSTS_CLI_MACHINE_H
#define MOXIE_HOSTS_CLI_MACHINE_H

#include <stdint.h>

// Cores that this process may use, at least 1.
int machine_cores(void);

// Memory that can be taken without swapping, within the limits of this process's control group and
// of those above it (a job's, a container's); UINT64_MAX when the system does not say.
uint64_t machine_memory_available(void);

// Ceilings of this machine, measured here and now: the bench divides by them.
struct anchors {
    double read_bytes_per_s; // a sequential read of memory far larger than any cache
    double f32_flops_per_s;  // independent fused multiply-adds, the widest vectors there are
};

// With `threads` threads. 0 when memory or threads are lacking.
int anchors_measure(int threads, struct anchors *anchors);

#endif
