// A CUDA GPU of compute capability 9.0 as a device. The one file of the rooms that sees CUDA
// headers.

#include "kernels/cuda/cuda.h"
#include "plugin/device.h"

#include <cuda_runtime_api.h>

#include <stdio.h>
#include <stdlib.h>

static int32_t cuda_allocate(const moxie_allocation *request, void **memory)
{
    size_t align = request->align < sizeof(void *) ? sizeof(void *) : (size_t)request->align;

    // cudaMalloc aligns to 256 bytes, more than any buffer asks for.
    if (request->kind == MOXIE_MEMORY_DEVICE) return (int32_t)cudaMalloc(memory, request->bytes);
    if (request->kind == MOXIE_MEMORY_PINNED)
        return (int32_t)cudaMallocHost(memory, request->bytes);
    return posix_memalign(memory, align, (size_t)request->bytes);
}

static void cuda_release(const moxie_allocation *request, void *memory)
{
    if (request->kind == MOXIE_MEMORY_DEVICE)
        (void)cudaFree(memory);
    else if (request->kind == MOXIE_MEMORY_PINNED)
        (void)cudaFreeHost(memory);
    else
        free(memory);
}

static int cuda_capturing(void *stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

    return cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
           status != cudaStreamCaptureStatusNone;
}

static int32_t cuda_ordinal(void)
{
    int device = 0;

    (void)cudaGetDevice(&device);
    return device;
}

static int32_t cuda_fill(void *memory, int32_t byte, int64_t bytes)
{
    cudaError_t st = cudaMemset(memory, byte, (size_t)bytes);

    return (int32_t)(st == cudaSuccess ? cudaDeviceSynchronize() : st);
}

static void cuda_zero(void *memory, int64_t bytes, void *stream)
{
    (void)cudaMemsetAsync(memory, 0, (size_t)bytes, stream);
}

// 0 and a reason when the current device is not a 9.0.
static int is_hopper(char reason[160])
{
    int device = 0, major = 0, minor = 0;
    cudaError_t st = cudaGetDevice(&device);

    if (st == cudaSuccess)
        st = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (st == cudaSuccess)
        st = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (st != cudaSuccess) {
        (void)cudaGetLastError();
        (void)snprintf(reason, 160, "no CUDA device can be used: %s", cudaGetErrorString(st));
        return 0;
    }
    (void)snprintf(reason, 160, "device %d has compute capability %d.%d; the kernels are for 9.0",
                   device, major, minor);
    return major == 9 && minor == 0;
}

static int32_t cuda_probe(char reason[160])
{
    return is_hopper(reason) ? 100 : 0;
}

static int32_t cuda_prepare(moxie_error *error)
{
    char reason[160];
    int32_t answer;

    if (!is_hopper(reason))
        return fail_with(error, MOXIE_E_UNAVAILABLE, "%s; set device to cpu", reason);
    answer = kernels_cuda_load();
    if (answer == 0) return MOXIE_OK;
    return fail_with(error, MOXIE_E_DEVICE, "the kernels cannot be loaded: %s",
                     cudaGetErrorString((cudaError_t)answer));
}

static const char *cuda_error_text(int32_t code)
{
    return cudaGetErrorString((cudaError_t)code);
}

const struct device device_cuda = {
    .name = "sm_90",
    .tensor_device = MOXIE_DEVICE_CUDA,
    .kernels = &kernels_cuda,
    .allocate = cuda_allocate,
    .release = cuda_release,
    .capturing = cuda_capturing,
    .ordinal = cuda_ordinal,
    .fill = cuda_fill,
    .zero = cuda_zero,
    .prepare = cuda_prepare,
    .probe = cuda_probe,
    .error_text = cuda_error_text,
};
