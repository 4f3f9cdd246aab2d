// Number formats in double precision.

#include "hosts/cli/conform_numbers.h"

#include <math.h>
#include <string.h>

double decode_e4m3(uint8_t code)
{
    double sign = (code & 0x80) != 0 ? -1 : 1;
    int exponent = code >> 3 & 0xf;
    int mantissa = code & 7;

    if ((code & 0x7f) == 0x7f) return NAN;
    if (exponent == 0) return sign * ldexp(mantissa, -9);
    return sign * ldexp(8 + mantissa, exponent - 10);
}

double decode_e2m1(uint8_t code)
{
    static const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};

    return (code & 8) != 0 ? -values[code & 7] : values[code & 7];
}

double decode_e8m0(uint8_t code)
{
    return code == 255 ? NAN : ldexp(1, code - 127);
}

int64_t number_bytes(int32_t format)
{
    return format == MOXIE_FORMAT_F32 ? 4 : 2;
}

static double read_f16(uint16_t code)
{
    double sign = (code & 0x8000) != 0 ? -1 : 1;
    int exponent = code >> 10 & 0x1f;
    int mantissa = code & 0x3ff;

    if (exponent == 31) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * ldexp(mantissa, -24);
    return sign * ldexp(1024 + mantissa, exponent - 25);
}

double number_read(const void *numbers, int32_t format, int64_t index)
{
    const unsigned char *at = (const unsigned char *)numbers + index * number_bytes(format);
    uint32_t bits = 0;
    uint16_t half = 0;
    float single = 0;

    if (format == MOXIE_FORMAT_F32) {
        memcpy(&single, at, sizeof single);
        return single;
    }
    memcpy(&half, at, sizeof half);
    if (format == MOXIE_FORMAT_F16) return read_f16(half);
    bits = (uint32_t)half << 16;
    memcpy(&single, &bits, sizeof single);
    return single;
}

// 11 significant bits; nothing here is small enough to be subnormal, but for zero.
static uint16_t write_f16(double value)
{
    int exponent = 0;
    double fraction = frexp(fabs(value), &exponent);
    double mantissa = nearbyint(ldexp(fraction, 11));
    uint16_t sign = signbit(value) ? 0x8000 : 0;

    if (isnan(value)) return 0x7e00;
    if (value == 0 || exponent < -13) return sign;
    if (mantissa >= 2048) {
        mantissa = 1024;
        exponent++;
    }
    if (exponent > 16) return (uint16_t)(sign | 0x7c00);
    return (uint16_t)(sign | (unsigned)(exponent + 14) << 10 | ((unsigned)mantissa & 0x3ff));
}

void number_write(void *numbers, int32_t format, int64_t index, double value)
{
    unsigned char *at = (unsigned char *)numbers + index * number_bytes(format);
    float single = (float)value;
    uint32_t bits = 0;
    uint16_t half = 0;

    if (format == MOXIE_FORMAT_F32) {
        memcpy(at, &single, sizeof single);
        return;
    }
    memcpy(&bits, &single, sizeof bits);
    half = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    if (format == MOXIE_FORMAT_F16) half = write_f16(value);
    memcpy(at, &half, sizeof half);
}

moxie_dtype dtype_of(int32_t format)
{
    switch (format) {
    case MOXIE_FORMAT_F32:
        return (moxie_dtype){MOXIE_DTYPE_FLOAT, 32, 1};
    case MOXIE_FORMAT_BF16:
        return (moxie_dtype){MOXIE_DTYPE_BFLOAT, 16, 1};
    case MOXIE_FORMAT_F16:
        return (moxie_dtype){MOXIE_DTYPE_FLOAT, 16, 1};
    case MOXIE_FORMAT_INT4_G32:
    case MOXIE_FORMAT_MXFP4:
    case MOXIE_FORMAT_NVFP4:
        return (moxie_dtype){MOXIE_DTYPE_UINT, 8, 1};
    default:
        return (moxie_dtype){MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    }
}

static const char *const words[] = {
    [MOXIE_FORMAT_AUTO] = "auto",
    [MOXIE_FORMAT_F32] = "f32",
    [MOXIE_FORMAT_BF16] = "bf16",
    [MOXIE_FORMAT_F16] = "f16",
    [MOXIE_FORMAT_FP8_TENSOR] = "fp8_tensor",
    [MOXIE_FORMAT_FP8_CHANNEL] = "fp8_channel",
    [MOXIE_FORMAT_FP8_BLOCK128] = "fp8_block128",
    [MOXIE_FORMAT_INT4_G32] = "int4_g32",
    [MOXIE_FORMAT_MXFP4] = "mxfp4",
    [MOXIE_FORMAT_NVFP4] = "nvfp4",
    [MOXIE_FORMAT_FP8] = "fp8",
};

const char *format_key(int32_t format)
{
    return words[format];
}

int32_t format_called(const char *word)
{
    for (int32_t i = 1; i < (int32_t)(sizeof words / sizeof words[0]); i++)
        if (strcmp(words[i], word) == 0) return i;
    return MOXIE_FORMAT_AUTO;
}

uint64_t dice_roll(struct dice *dice)
{
    dice->state ^= dice->state >> 12;
    dice->state ^= dice->state << 25;
    dice->state ^= dice->state >> 27;
    return dice->state * 0x2545f4914f6cdd1du;
}

double dice_real(struct dice *dice)
{
    return (double)(int64_t)(dice_roll(dice) >> 11) / (double)((int64_t)1 << 52) - 1;
}

int64_t dice_below(struct dice *dice, int64_t bound)
{
    return (int64_t)(dice_roll(dice) >> 1) % bound;
}
