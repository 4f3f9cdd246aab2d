// Finds the fake NVTX from a test.

#include "host_tests/cli/fake_nvtx.h"

#include <dlfcn.h>
#include <string.h>

static int take(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);

    memcpy(function, &address, sizeof address);
    return address != NULL;
}

int fake_nvtx_find(struct fake_nvtx *fake, const char *file)
{
    void *library = dlopen(file, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) return 0;
    return take(library, "fake_nvtx_depth", &fake->depth) &&
           take(library, "fake_nvtx_event", &fake->event) &&
           take(library, "fake_nvtx_reset", &fake->reset);
}
