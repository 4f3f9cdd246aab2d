// A libcuda.so.1 whose device memory is RAM, whose streams run at once, and each of whose functions
// can be made to fail. What a test enqueues by fake_cuda_launch is recorded while a stream is
// captured, and runs when the graph is launched, as a kernel would.

#ifndef MOXIE_HOST_TESTS_FAKE_CUDA_H
#define MOXIE_HOST_TESTS_FAKE_CUDA_H

struct fake_cuda {
    // The `nth` call (from 1) of the function of that exported name answers `result`.
    void (*break_call)(const char *name, int nth, int result);
    // Calls of it since the last reset.
    int (*calls)(const char *name);
    // Contexts, allocations, streams, graphs and events that live.
    int (*live)(void);
    // Forgets failures and counts.
    void (*reset)(void);
    // task(arg), `bytes` of which are copied, in the order of the stream.
    void (*launch)(void (*task)(const void *arg), const void *arg, unsigned long bytes);
};

// 1 when the libcuda.so.1 that is loaded first is this one.
int fake_cuda_find(struct fake_cuda *fake);

#endif
