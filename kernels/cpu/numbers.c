// Number formats, see numbers.h.

#include "kernels/cpu/numbers.h"

#include "kernels/types.h"

#include <string.h>

#define F32_INFINITY 0x7f800000u
#define F32_SIGN     0x80000000u

// clang-format off
const float e2m1_values[16] = {
    0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f,
};

const float int4_values[16] = {
    -8.0f, -7.0f, -6.0f, -5.0f, -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f,
};
// clang-format on

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return bits;
}

// value / 2^shift, to nearest even; shift 1..31.
static uint32_t shift_rounded(uint32_t value, uint32_t shift)
{
    uint32_t half = 1u << (shift - 1);
    uint32_t odd = (value >> shift) & 1u;

    return (value + half - 1u + odd) >> shift;
}

float bf16_decode(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

uint16_t bf16_encode(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40u;

    return (uint16_t)((bits & ~F32_SIGN) > F32_INFINITY ? quiet : rounded);
}

float f16_decode(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 31u;
    uint32_t mantissa = half & 1023u;

    if (exponent == 31) return float_of(sign | F32_INFINITY | mantissa << 13);
    if (exponent > 0) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
    return float_of(sign | bits_of((float)mantissa * 0x1p-24f));
}

uint16_t f16_encode(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t exponent = (bits >> 23) & 255u;
    uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;

    bits &= ~F32_SIGN;
    if (bits > F32_INFINITY) return (uint16_t)(sign | 0x7e00u | ((bits >> 13) & 1023u));
    if (bits >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); // halfway past 65504
    if (bits >= 0x38800000u)                                    // normal: 2^-14 and up
        return (uint16_t)(sign | shift_rounded(bits - (112u << 23), 13));
    if (exponent < 102) return (uint16_t)sign; // under half of 2^-24
    return (uint16_t)(sign | shift_rounded(mantissa, 126 - exponent));
}

float e4m3_decode(uint8_t byte)
{
    uint32_t sign = (uint32_t)(byte & 0x80u) << 24;
    uint32_t exponent = (byte >> 3) & 15u;
    uint32_t mantissa = byte & 7u;

    if ((byte & 0x7fu) == 0x7fu) return float_of(sign | 0x7fc00000u);
    if (exponent > 0) return float_of(sign | (exponent + 120) << 23 | mantissa << 20);
    return float_of(sign | bits_of((float)mantissa * 0x1p-9f));
}

uint8_t e4m3_encode(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 24) & 0x80u;
    uint32_t exponent = (bits >> 23) & 255u;
    uint32_t mantissa = (bits & 0x7fffffu) | 0x800000u;

    bits &= ~F32_SIGN;
    if (bits > F32_INFINITY) return (uint8_t)(sign | 0x7fu);
    if (bits >= 0x43e00000u) return (uint8_t)(sign | 0x7eu); // 448 and up
    if (bits >= 0x3c800000u)                                 // normal: 2^-6 and up
        return (uint8_t)(sign | shift_rounded(bits - (120u << 23), 20));
    if (exponent < 117) return (uint8_t)sign; // under half of 2^-9
    return (uint8_t)(sign | shift_rounded(mantissa, 141 - exponent));
}

uint8_t e2m1_encode(float value)
{
    // Halfway between code i and i + 1. Compared as bits, so that a NaN is past them all.
    static const float limits[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 28) & 8u;
    uint32_t code = 0;

    bits &= ~F32_SIGN;
    for (uint32_t i = 0; i < 7; i++) {
        uint32_t limit = bits_of(limits[i]);

        // A tie between codes i and i + 1 goes to the even one.
        code += bits > limit || (bits == limit && (i & 1u) == 1u);
    }
    return (uint8_t)(sign | code);
}

float e8m0_decode(uint8_t byte)
{
    if (byte == 255) return float_of(0x7fc00000u);
    return float_of(byte == 0 ? 0x00400000u : (uint32_t)byte << 23);
}

int64_t number_bytes(int32_t format)
{
    return format == FORMAT_F32 ? 4 : 2;
}

float number_load(int32_t format, const void *array, int64_t index)
{
    float value;

    numbers_decode(format, (const unsigned char *)array + index * number_bytes(format), 1, &value);
    return value;
}

void numbers_decode(int32_t format, const void *from, int64_t count, float *to)
{
    const unsigned char *bytes = from;
    uint16_t half;

    if (format == FORMAT_F32) {
        memcpy(to, from, (size_t)count * sizeof *to);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        memcpy(&half, bytes + 2 * i, sizeof half);
        to[i] = format == FORMAT_BF16 ? bf16_decode(half) : f16_decode(half);
    }
}

void numbers_encode(int32_t format, const float *from, int64_t count, void *to)
{
    unsigned char *bytes = to;
    uint16_t half;

    if (format == FORMAT_F32) {
        memcpy(to, from, (size_t)count * sizeof *from);
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        half = format == FORMAT_BF16 ? bf16_encode(from[i]) : f16_encode(from[i]);
        memcpy(bytes + 2 * i, &half, sizeof half);
    }
}
