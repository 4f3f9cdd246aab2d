// The devices of this build.

#include "plugin/device.h"

#include <stdio.h>
#include <string.h>

static const struct device *const devices[] = {
    &device_cpu,
#ifdef MOXIE_HAS_CUDA
    &device_cuda,
#endif
};

const struct device *device_find(const char *name)
{
    for (size_t i = 0; i < sizeof devices / sizeof devices[0]; i++) {
        if (strcmp(devices[i]->name, name) == 0) return devices[i];
    }
    return NULL;
}

const char *device_earlier(const struct device *device, int32_t status)
{
    return status == MOXIE_E_DEVICE && device->synchronize != NULL
               ? "; work that was launched before this may have failed"
               : "";
}

int32_t device_check(const struct device *device, int32_t answer, const char *what,
                     moxie_error *error)
{
    int32_t st;

    if (answer == 0) return MOXIE_OK;
    st = device->status(answer);
    return fail_with(error, st, "%s: %s (%d)%s", what, device->error_text(answer), answer,
                     device_earlier(device, st));
}

int32_t device_probe(const char *name, char reason[160])
{
    const struct device *device = device_find(name);

    if (device != NULL) return device->probe(reason);
    (void)snprintf(reason, 160, "this library was built without %s kernels", name);
    return 0;
}
