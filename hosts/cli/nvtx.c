// Finds the functions of NVTX's library.

#include "hosts/cli/nvtx.h"

#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

// Of NVTX 3, and of NVTX 2, which older CUDAs have.
static const char *const libraries[] = {"libnvtx3interop.so.1", "libnvToolsExt.so.1"};

void nvtx_load(struct nvtx *nvtx)
{
    void *library = NULL;
    void *push = NULL;
    void *pop = NULL;

    *nvtx = (struct nvtx){NULL, NULL};
    for (size_t i = 0; library == NULL && i < sizeof libraries / sizeof libraries[0]; i++)
        library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) return;
    push = dlsym(library, "nvtxRangePushA");
    pop = dlsym(library, "nvtxRangePop");
    if (push == NULL || pop == NULL) return;
    // A function's address is no object's in C; POSIX promises that the bits are the same.
    memcpy(&nvtx->push, &push, sizeof push);
    memcpy(&nvtx->pop, &pop, sizeof pop);
}
