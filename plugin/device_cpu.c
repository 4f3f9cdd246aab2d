// The CPU as a device: plain memory, no streams, nothing to capture.

#include "plugin/device.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t cpu_allocate(const moxie_allocation *request, void **memory)
{
    size_t align = request->align < sizeof(void *) ? sizeof(void *) : (size_t)request->align;

    return posix_memalign(memory, align, (size_t)request->bytes);
}

static void cpu_release(const moxie_allocation *request, void *memory)
{
    (void)request;
    free(memory);
}

static int32_t cpu_ordinal(void)
{
    return 0;
}

static int32_t cpu_fill(void *memory, int32_t byte, int64_t bytes)
{
    memset(memory, byte, (size_t)bytes);
    return 0;
}

static int32_t cpu_fetch(void *to, const void *from, int64_t bytes)
{
    memcpy(to, from, (size_t)bytes);
    return 0;
}

static void cpu_zero(void *memory, int64_t bytes, void *stream)
{
    (void)stream;
    memset(memory, 0, (size_t)bytes);
}

static int32_t cpu_prepare(moxie_error *error)
{
    (void)error;
    return MOXIE_OK;
}

static int32_t cpu_probe(char reason[160])
{
    (void)snprintf(reason, 160, "always there");
    return 1;
}

static const char *cpu_error_text(int32_t code)
{
    return code == ENOMEM ? "out of memory" : "a CPU kernel refused its arguments";
}

static int32_t cpu_status(int32_t answer)
{
    if (answer == 0) return MOXIE_OK;
    return answer == ENOMEM ? MOXIE_E_MEMORY : MOXIE_E_DEVICE;
}

const struct device device_cpu = {
    .name = "cpu",
    .tensor_device = MOXIE_DEVICE_CPU,
    .kernels = &kernels_cpu,
    .allocate = cpu_allocate,
    .release = cpu_release,
    .ordinal = cpu_ordinal,
    .fill = cpu_fill,
    .fetch = cpu_fetch,
    .zero = cpu_zero,
    .prepare = cpu_prepare,
    .probe = cpu_probe,
    .error_text = cpu_error_text,
    .status = cpu_status,
};
