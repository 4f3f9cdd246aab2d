// Ranges with names on the timeline of a profiler, by NVTX. Its own way to be used is headers of
// CUDA's, which building the command must not need: here it is the library that exports the same
// functions to languages without headers. A profiler puts itself into that; without one the
// functions do nothing.

#ifndef MOXIE_HOSTS_CLI_NVTX_H
#define MOXIE_HOSTS_CLI_NVTX_H

struct nvtx {
    int (*push)(const char *name); // NULL, as pop is: no library is there
    int (*pop)(void);
};

// Finds the functions or none of them, which is no fault. The library stays loaded: a profiler has
// threads of its own.
void nvtx_load(struct nvtx *nvtx);

#endif
