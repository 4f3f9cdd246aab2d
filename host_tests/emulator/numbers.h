// 8- and 16-bit numbers, rounded to nearest even as the GPU's conversions are.

#ifndef MOXIE_EMULATOR_NUMBERS_H
#define MOXIE_EMULATOR_NUMBERS_H

#include "host_tests/tensor_core.h"

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulator
{

static inline float from_bf16(uint16_t bits)
{
    uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;

    std::memcpy(&value, &wide, sizeof value);
    return value;
}

static inline uint16_t to_bf16(float value)
{
    uint32_t bits;

    std::memcpy(&bits, &value, sizeof bits);
    if (std::isnan(value)) return 0x7fff;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Numbers narrower than bf16: a sign, then an exponent, then `fraction` bits, whose lowest place is
// 2^lowest.
struct narrow {
    int fraction, lowest;
};

// By powers of two, since ldexp would be half of what a conversion takes.
static inline float widened(narrow n, uint32_t magnitude)
{
    int exponent = static_cast<int>(magnitude >> n.fraction);
    float value = static_cast<float>(magnitude & ((1u << n.fraction) - 1));

    if (exponent == 0) return value * tensor_core_power(n.lowest);
    return (value + static_cast<float>(1u << n.fraction)) *
           tensor_core_power(n.lowest + exponent - 1);
}

// Of a finite magnitude below the largest.
static inline uint32_t narrowed(narrow n, float magnitude)
{
    int exponent;

    (void)std::frexp(magnitude, &exponent);
    exponent -= n.fraction + 1; // of the last place of the result
    if (magnitude == 0.0f || exponent < n.lowest) exponent = n.lowest;
    return static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, -exponent))) +
           (static_cast<uint32_t>(exponent - n.lowest) << n.fraction);
}

constexpr narrow kF16Shape = {10, -24}, kE4m3Shape = {3, -9};

static inline float from_f16(uint16_t bits)
{
    float value = widened(kF16Shape, bits & 0x7fffu);

    if ((bits & 0x7c00) == 0x7c00) value = (bits & 1023) != 0 ? NAN : INFINITY;
    return bits >> 15 != 0 ? -value : value;
}

static inline uint16_t to_f16(float value)
{
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;

    if (std::isnan(value)) return 0x7fff;
    if (std::fabs(value) >= 65520.0f) return sign | 0x7c00;
    return static_cast<uint16_t>(sign | narrowed(kF16Shape, std::fabs(value)));
}

static inline float from_e4m3(uint8_t bits)
{
    float value = widened(kE4m3Shape, bits & 0x7fu);

    if ((bits & 0x7f) == 0x7f) return NAN;
    return bits >> 7 != 0 ? -value : value;
}

// The first half of a 16-bit number.
static inline float from_e5m2(uint8_t bits)
{
    return from_f16(static_cast<uint16_t>(bits << 8));
}

// Saturates; NaN stays.
static inline uint8_t to_e4m3(float value)
{
    uint8_t sign = std::signbit(value) ? 0x80 : 0;

    if (std::isnan(value)) return 0x7f;
    if (std::fabs(value) >= 448.0f) return sign | 0x7e;
    return static_cast<uint8_t>(sign | narrowed(kE4m3Shape, std::fabs(value)));
}

} // namespace emulator

#endif
