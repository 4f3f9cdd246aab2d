// What the emulated machine has: MOXIE_EMULATOR_DEVICES GPUs, 1 without it.

#ifndef MOXIE_EMULATOR_DEVICE_H
#define MOXIE_EMULATOR_DEVICE_H

#include <cstddef>

namespace emulator
{

constexpr int kDevicesMax = 8;
// Of each: enough for tests, and little enough for any machine.
constexpr size_t kDeviceBytes = size_t{1} << 30;

int device_count();

static inline bool is_device(int ordinal)
{
    return ordinal >= 0 && ordinal < device_count();
}

} // namespace emulator

#endif
