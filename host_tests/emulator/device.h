// What the emulated machine has: MOXIE_EMULATOR_DEVICES GPUs, 1 without it.

#ifndef MOXIE_EMULATOR_DEVICE_H
#define MOXIE_EMULATOR_DEVICE_H

#include "cuda_runtime_api.h"

#include <cstddef>
#include <functional>

namespace emulator
{

constexpr int kDevicesMax = 8;
// Of each: enough for tests, and little enough for any machine.
constexpr size_t kDeviceBytes = size_t{1} << 30;

int device_count();

// The calling thread's, kNoDevice before it has used one.
constexpr int kNoDevice = -1;
int current_device();
// kNoDevice: none any more.
void set_current_device(int device);

static inline bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < device_count();
}

// Enqueues what may wait for another rank. From then on the stream, or the thread's own where
// `stream` is null, runs on a thread of its own, in order, and nobody who launches waits. Work of
// graphs goes there when it is replayed.
cudaError_t enqueue_wait(cudaStream_t stream, std::function<void()> work);

} // namespace emulator

#endif
