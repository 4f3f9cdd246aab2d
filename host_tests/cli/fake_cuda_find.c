// Finds the fake driver from a test.

#include "host_tests/cli/fake_cuda.h"

#include <dlfcn.h>
#include <string.h>

static int take(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);

    memcpy(function, &address, sizeof address);
    return address != NULL;
}

int fake_cuda_find(struct fake_cuda *fake)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) return 0;
    return take(library, "fake_cuda_fail", &fake->break_call) &&
           take(library, "fake_cuda_calls", &fake->calls) &&
           take(library, "fake_cuda_live", &fake->live) &&
           take(library, "fake_cuda_reset", &fake->reset) &&
           take(library, "fake_cuda_launch", &fake->launch);
}
