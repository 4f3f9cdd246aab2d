// 8- and 16-bit numbers, rounded to nearest even as the GPU's conversions are.

#ifndef MOXIE_EMULATOR_NUMBERS_H
#define MOXIE_EMULATOR_NUMBERS_H

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

static inline float from_f16(uint16_t bits)
{
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    float value = exponent == 31  ? (fraction != 0 ? NAN : INFINITY)
                  : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                                  : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);

    return bits >> 15 != 0 ? -value : value;
}

static inline uint16_t to_f16(float value)
{
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float magnitude = std::fabs(value);
    int exponent;

    if (std::isnan(value)) return 0x7fff;
    if (magnitude == 0.0f) return sign;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    (void)std::frexp(magnitude, &exponent);
    // The last place of the result is 2^(exponent - 11), and 2^-24 below the normal numbers.
    exponent = exponent - 11 < -24 ? -24 : exponent - 11;
    magnitude = std::nearbyint(std::ldexp(magnitude, -exponent));
    if (exponent == -24) return static_cast<uint16_t>(sign | static_cast<int>(magnitude));
    return static_cast<uint16_t>(sign | (static_cast<int>(magnitude) + ((exponent + 24) << 10)));
}

static inline float from_e4m3(uint8_t bits)
{
    int exponent = bits >> 3 & 15, fraction = bits & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                : std::ldexp(static_cast<float>(fraction + 8), exponent - 10);

    if ((bits & 0x7f) == 0x7f) return NAN;
    return bits >> 7 != 0 ? -value : value;
}

// Saturates; NaN stays.
static inline uint8_t to_e4m3(float value)
{
    uint8_t sign = std::signbit(value) ? 0x80 : 0;
    float magnitude = std::fabs(value);
    int exponent;

    if (std::isnan(value)) return 0x7f;
    if (magnitude == 0.0f) return sign;
    if (magnitude >= 448.0f) return sign | 0x7e;
    (void)std::frexp(magnitude, &exponent);
    // The last place of the result is 2^(exponent - 4), and 2^-9 below the normal numbers.
    exponent = exponent - 4 < -9 ? -9 : exponent - 4;
    magnitude = std::nearbyint(std::ldexp(magnitude, -exponent));
    if (exponent == -9) return static_cast<uint8_t>(sign | static_cast<int>(magnitude));
    return static_cast<uint8_t>(sign | (static_cast<int>(magnitude) + ((exponent + 9) << 3)));
}

} // namespace emulator

#endif
