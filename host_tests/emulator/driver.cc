// The driver's functions that the command finds by name: those of the runtime under other names.
// The numbers of their results are the same.

#include "host_tests/emulator/device.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <cstring>

#define FUNCTION extern "C" __attribute__((visibility("default"))) int

namespace
{

// A device's primary context is its place here.
char contexts[emulator::kDevicesMax];

void *pointer(uint64_t address)
{
    return reinterpret_cast<void *>(address);
}

} // namespace

FUNCTION cuInit(unsigned)
{
    return cudaSuccess;
}

FUNCTION cuGetErrorString(int error, const char **text)
{
    *text = cudaGetErrorString(static_cast<cudaError_t>(error));
    return cudaSuccess;
}

FUNCTION cuDeviceGetCount(int *count)
{
    return cudaGetDeviceCount(count);
}

FUNCTION cuDeviceGet(int *device, int ordinal)
{
    if (!emulator::is_device(ordinal)) return cudaErrorInvalidDevice;
    *device = ordinal;
    return cudaSuccess;
}

FUNCTION cuDeviceGetName(char *name, int capacity, int)
{
    (void)snprintf(name, static_cast<size_t>(capacity), "an emulated GPU");
    return cudaSuccess;
}

FUNCTION cuDevicePrimaryCtxRetain(void **context, int device)
{
    if (!emulator::is_device(device)) return cudaErrorInvalidDevice;
    *context = &contexts[device];
    return cudaSuccess;
}

FUNCTION cuDevicePrimaryCtxRelease_v2(int device)
{
    return emulator::is_device(device) ? cudaSuccess : cudaErrorInvalidDevice;
}

FUNCTION cuCtxGetCurrent(void **context)
{
    const int device = emulator::current_device();

    *context = device == emulator::kNoDevice ? nullptr : &contexts[device];
    return cudaSuccess;
}

// The runtime's calls of this thread are for the context's device from now on; without a context,
// for the first.
FUNCTION cuCtxSetCurrent(void *context)
{
    for (int device = 0; device < emulator::device_count(); device++)
        if (context == &contexts[device]) return cudaSetDevice(device);
    if (context != nullptr) return cudaErrorDeviceUninitialized;
    emulator::set_current_device(emulator::kNoDevice);
    return cudaSuccess;
}

FUNCTION cuMemGetInfo_v2(size_t *available, size_t *total)
{
    *available = emulator::kDeviceBytes;
    *total = emulator::kDeviceBytes;
    return cudaSuccess;
}

FUNCTION cuMemAlloc_v2(uint64_t *memory, size_t bytes)
{
    void *at = nullptr;
    cudaError_t st = bytes == 0 || bytes > emulator::kDeviceBytes ? cudaErrorMemoryAllocation
                                                                  : cudaMalloc(&at, bytes);

    *memory = reinterpret_cast<uint64_t>(at);
    return st;
}

FUNCTION cuMemFree_v2(uint64_t memory)
{
    return cudaFree(pointer(memory));
}

FUNCTION cuMemAllocHost_v2(void **memory, size_t bytes)
{
    return cudaMallocHost(memory, bytes);
}

FUNCTION cuMemFreeHost(void *memory)
{
    return cudaFreeHost(memory);
}

FUNCTION cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes)
{
    return cudaMemcpy(pointer(to), from, bytes, cudaMemcpyHostToDevice);
}

FUNCTION cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes)
{
    return cudaMemcpy(to, pointer(from), bytes, cudaMemcpyDeviceToHost);
}

FUNCTION cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, cudaStream_t stream)
{
    return cudaMemcpyAsync(pointer(to), pointer(from), bytes, cudaMemcpyDeviceToDevice, stream);
}

FUNCTION cuMemsetD8Async(uint64_t memory, unsigned char byte, size_t bytes, cudaStream_t stream)
{
    return cudaMemsetAsync(pointer(memory), byte, bytes, stream);
}

FUNCTION cuStreamCreate(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithFlags(stream, flags);
}

FUNCTION cuStreamDestroy_v2(cudaStream_t stream)
{
    return cudaStreamDestroy(stream);
}

FUNCTION cuStreamSynchronize(cudaStream_t stream)
{
    return cudaStreamSynchronize(stream);
}

FUNCTION cuStreamBeginCapture_v2(cudaStream_t stream, int)
{
    return cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
}

FUNCTION cuStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    return cudaStreamEndCapture(stream, graph);
}

FUNCTION cuGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                     unsigned long long flags)
{
    return cudaGraphInstantiate(exec, graph, flags);
}

FUNCTION cuGraphDestroy(cudaGraph_t graph)
{
    return cudaGraphDestroy(graph);
}

FUNCTION cuGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    return cudaGraphLaunch(exec, stream);
}

FUNCTION cuGraphExecDestroy(cudaGraphExec_t exec)
{
    return cudaGraphExecDestroy(exec);
}

FUNCTION cuEventCreate(cudaEvent_t *event, unsigned)
{
    return cudaEventCreate(event);
}

FUNCTION cuEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecord(event, stream);
}

// Kept by a capture, as every recording is here; outside of one the driver refuses the flag.
FUNCTION cuEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;

    (void)cudaStreamIsCapturing(stream, &status);
    if (flags != 1 || status != cudaStreamCaptureStatusActive) return cudaErrorInvalidValue;
    return cudaEventRecord(event, stream);
}

FUNCTION cuEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    return cudaEventElapsedTime(milliseconds, from, to);
}

FUNCTION cuEventDestroy_v2(cudaEvent_t event)
{
    return cudaEventDestroy(event);
}
