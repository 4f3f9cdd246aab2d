// What memory of this machine can be had without anything being killed for it. The kernel gives
// more than that on paper, and kills a process when pages are touched that it has not.

#ifndef MOXIE_PLUGIN_MEMORY_AVAILABLE_H
#define MOXIE_PLUGIN_MEMORY_AVAILABLE_H

#include <stdint.h>

// Of bytes, UINT64_MAX: the kernel does not say, or there is no limit.
struct memory_available {
    uint64_t machine;
    // What the innermost of this process's control groups that has a limit leaves: a batch system's
    // job has one of its own, and a container sees its own as the root.
    uint64_t group;
    uint64_t above;    // the least that those above it leave
    uint64_t group_id; // of it, the same for every process of it; 0: there is none
};

struct memory_available memory_available(void);

// Where each of the two stands, in words for errors.
#define MEMORY_OF_MACHINE "the machine's"
#define MEMORY_OF_GROUP   "the limit of its control group, as of a container or a job"

#endif
