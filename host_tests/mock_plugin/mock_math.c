// Reference arithmetic: one number at a time, in double.

#include "host_tests/mock_plugin/mock.h"

#include <math.h>
#include <string.h>

int64_t type_bytes(uint32_t type)
{
    switch (type) {
    case TYPE_I64:
        return 8;
    case TYPE_F32:
    case TYPE_I32:
        return 4;
    case TYPE_BF16:
    case TYPE_F16:
        return 2;
    default:
        return 1;
    }
}

// A float of so many bits, whose largest exponent is one like any other.
static double decode_float(uint32_t bits, int32_t exponent_bits, int32_t mantissa_bits)
{
    int32_t bias = (1 << (exponent_bits - 1)) - 1;
    int32_t exponent = (int32_t)(bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    uint32_t mantissa = bits & ((1u << mantissa_bits) - 1);
    double sign = (bits >> (exponent_bits + mantissa_bits) & 1) != 0 ? -1.0 : 1.0;

    if (exponent == 0) return sign * ldexp((double)mantissa, 1 - bias - mantissa_bits);
    return sign * ldexp((double)(mantissa | 1u << mantissa_bits), exponent - bias - mantissa_bits);
}

static double decode_f16(uint32_t bits)
{
    double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;

    if ((bits & 0x7c00) != 0x7c00) return decode_float(bits, 5, 10);
    return (bits & 0x3ff) != 0 ? (double)NAN : sign * (double)INFINITY;
}

static double decode_e4m3(uint32_t bits)
{
    return (bits & 0x7f) == 0x7f ? (double)NAN : decode_float(bits, 4, 3);
}

double number_load(uint32_t type, const unsigned char *at)
{
    uint16_t half = 0;
    uint32_t word = 0;
    float single;

    switch (type) {
    case TYPE_E4M3:
        return decode_e4m3(*at);
    case TYPE_U8:
        return *at;
    case TYPE_F16:
        memcpy(&half, at, sizeof half);
        return decode_f16(half);
    case TYPE_BF16:
        memcpy(&half, at, sizeof half);
        word = (uint32_t)half << 16;
        break;
    default:
        memcpy(&word, at, sizeof word);
        break;
    }
    memcpy(&single, &word, sizeof single);
    return (double)single;
}

// The nearest number with `digits` binary digits whose last place is at least 2^least.
static double round_to(double value, int32_t digits, int32_t least)
{
    int32_t exponent;

    if (value == 0.0 || !isfinite(value)) return value;
    exponent = ilogb(value) - (digits - 1);
    if (exponent < least) exponent = least;
    return ldexp(nearbyint(ldexp(value, -exponent)), exponent);
}

static uint16_t encode_f16(double value)
{
    double rounded = round_to(value, 11, -24), size = fabs(rounded);
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    int32_t exponent;

    if (isnan(value)) return (uint16_t)(sign | 0x7e00);
    if (size > 65504.0) return (uint16_t)(sign | 0x7c00);
    if (size < ldexp(1.0, -14)) return (uint16_t)(sign | (uint16_t)ldexp(size, 24));
    exponent = ilogb(size);
    // The leading digit, 2^10, carries into the exponent.
    return (uint16_t)(sign + ((exponent + 14) << 10) + (int32_t)ldexp(size, 10 - exponent));
}

void number_store(uint32_t type, double value, unsigned char *at)
{
    float single = (float)(type == TYPE_BF16 ? round_to(value, 8, -133) : value);
    uint32_t word;
    uint16_t half;

    memcpy(&word, &single, sizeof word);
    if (type == TYPE_F32) {
        memcpy(at, &word, sizeof word);
        return;
    }
    half = type == TYPE_F16 ? encode_f16(value) : (uint16_t)(word >> 16);
    if (type == TYPE_BF16 && isnan(value)) half = (uint16_t)(half | 0x40);
    memcpy(at, &half, sizeof half);
}

double e2m1(int32_t nibble)
{
    static const double sizes[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

    return (nibble & 8) != 0 ? -sizes[nibble & 7] : sizes[nibble & 7];
}

double e8m0(int32_t exponent)
{
    return exponent == 255 ? (double)NAN : ldexp(1.0, exponent - 127);
}
