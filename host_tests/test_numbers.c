// kernels/cpu/numbers.c and the decoders of every instruction set: all codes, all ties.

#include "kernels/cpu/isa.h"
#include "kernels/cpu/numbers.h"
#include "kernels/types.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>

// The nearest value with this many mantissa bits, ties to even; subnormal below 2^exponent_min.
static double nearest(double value, int mantissa_bits, int exponent_min)
{
    int exponent = value == 0.0 ? exponent_min : ilogb(value);
    double step;

    if (exponent < exponent_min) exponent = exponent_min;
    step = ldexp(1.0, exponent - mantissa_bits);
    return rint(value / step) * step;
}

static float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

// Calls check on floats of every exponent, on ties between 16-bit and 8-bit codes, and beside them.
static void sweep(void (*check)(float value))
{
    uint32_t seed = 99;

    for (uint32_t high = 0; high < 65536; high++) {
        check(float_of(high << 16));
        check(float_of(high << 16 | 0x8000u));
        check(float_of(high << 16 | 0x7fffu));
        check(float_of(high << 16 | 0x8001u));
        check(float_of(high << 16 | 0x1000u));
        check(float_of(high << 16 | 0x0fffu));
        check(float_of(high << 16 | (random_next(&seed) & 0xffffu)));
    }
}

// Of `got`, what `value` becomes.
#define becomes(condition) assert_many(condition, "%a became %a", (double)value, (double)got)

static void check_bf16(float value)
{
    float got = bf16_decode(bf16_encode(value));

    if (isnan(value))
        becomes(isnan(got));
    else if (isinf(value) || fabs((double)value) >= 0x1.ffp127)
        becomes(isinf(got) && signbit(got) == signbit(value));
    else
        becomes((double)got == nearest((double)value, 7, -126));
}

static void check_f16(float value)
{
    float got = f16_decode(f16_encode(value));

    if (isnan(value))
        becomes(isnan(got));
    else if (fabs((double)value) >= 65520.0)
        becomes(isinf(got) && signbit(got) == signbit(value));
    else
        becomes((double)got == nearest((double)value, 10, -14));
    becomes(signbit(got) == signbit(value));
}

static void check_e4m3(float value)
{
    float got = e4m3_decode(e4m3_encode(value));

    if (isnan(value))
        becomes(isnan(got));
    else if (fabs((double)value) >= 448.0)
        becomes(got == copysignf(448.0f, value));
    else
        becomes((double)got == nearest((double)value, 3, -6));
    becomes(signbit(got) == signbit(value));
}

static void check_e2m1(float value)
{
    float got = e2m1_values[e2m1_encode(value)];

    if (isnan(value) || fabs((double)value) >= 6.0)
        becomes(got == copysignf(6.0f, value));
    else
        becomes((double)got == fmin(fmax(nearest((double)value, 1, 0), -6.0), 6.0));
    becomes(signbit(got) == signbit(value));
}

START_TEST(encoders_round_once)
{
    sweep(check_bf16);
    sweep(check_f16);
    sweep(check_e4m3);
    sweep(check_e2m1);
}
END_TEST

START_TEST(sixteen_bit_codes_come_back)
{
    for (uint32_t code = 0; code < 65536; code++) {
        uint16_t half = (uint16_t)code;

        if (isnan(bf16_decode(half)))
            assert_many(isnan(bf16_decode(bf16_encode(bf16_decode(half)))), "bf16 %04x", half);
        else
            assert_many(bf16_encode(bf16_decode(half)) == half, "bf16 %04x became %04x", half,
                        bf16_encode(bf16_decode(half)));
        if ((half & 0x7c00u) == 0x7c00u && (half & 0x3ffu) != 0)
            assert_many(isnan(f16_decode(half)) && isnan(f16_decode(f16_encode(f16_decode(half)))),
                        "f16 %04x", half);
        else
            assert_many(f16_encode(f16_decode(half)) == half, "f16 %04x became %04x", half,
                        f16_encode(f16_decode(half)));
    }
    ck_assert_float_eq(f16_decode(0x0001), 0x1p-24f);
    ck_assert_float_eq(f16_decode(0x03ff), 1023 * 0x1p-24f);
    ck_assert_float_eq(f16_decode(0x7bff), 65504.0f);
    ck_assert(isinf(f16_decode(0xfc00)) && signbit(f16_decode(0xfc00)));
    ck_assert_float_eq(bf16_decode(0x4049), 3.140625f);
}
END_TEST

START_TEST(every_e4m3_code)
{
    for (int code = 0; code < 256; code++) {
        int exponent = code >> 3 & 15, mantissa = code & 7;
        double magnitude =
            exponent > 0 ? ldexp(1.0 + mantissa / 8.0, exponent - 7) : ldexp(mantissa / 8.0, -6);
        float value = e4m3_decode((uint8_t)code);

        ck_assert((signbit(value) != 0) == (code >= 128));
        if ((code & 127) == 127) {
            ck_assert(isnan(value));
            continue;
        }
        ck_assert_double_eq((double)value, code < 128 ? magnitude : -magnitude);
        ck_assert_int_eq(e4m3_encode(value), code);
    }
    ck_assert_uint_eq(e4m3_encode(INFINITY), 0x7e);
    ck_assert_uint_eq(e4m3_encode(-1e30f), 0xfe);
}
END_TEST

START_TEST(small_formats)
{
    static const float want[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

    for (uint8_t i = 0; i < 16; i++) {
        ck_assert_float_eq(e2m1_values[i], i < 8 ? want[i] : -want[i - 8]);
        ck_assert_uint_eq(e2m1_encode(e2m1_values[i]), i);
        ck_assert_float_eq(int4_values[i], (float)(i - 8));
    }
    for (int i = 0; i < 255; i++)
        ck_assert_double_eq((double)e8m0_decode((uint8_t)i), ldexp(1.0, i - 127));
    ck_assert(isnan(e8m0_decode(255)));
}
END_TEST

static const struct cpu_ops *ops_of(int isa)
{
    return cpu_ops_of(&(struct cpu_stream){.isa = isa});
}

static void same_floats(const float *got, const float *want, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        if (isnan(want[i]))
            assert_many(isnan(got[i]), "%a is not a NaN", (double)got[i]);
        else
            assert_many(memcmp(&got[i], &want[i], 4) == 0, "%a is not %a", (double)got[i],
                        (double)want[i]);
    }
}

START_TEST(decoders_agree_on_every_code)
{
    static unsigned char codes[2 * 65536 + 1];
    static float want[65536], got[65536 + 1];
    const struct cpu_ops *ops = ops_of(_i);

    if (_i > (int)cpu_isa_best()) return;
    for (uint32_t i = 0; i < 65536; i++) {
        codes[1 + 2 * i] = (unsigned char)i;
        codes[2 + 2 * i] = (unsigned char)(i >> 8);
    }
    numbers_decode(FORMAT_BF16, codes + 1, 65536, want);
    ops->from_bf16(codes + 1, 65536, got);
    same_floats(got, want, 65536);
    numbers_decode(FORMAT_F16, codes + 1, 65536, want);
    ops->from_f16(codes + 1, 65536, got);
    same_floats(got, want, 65536);
    for (int i = 0; i < 256; i++) {
        codes[1 + i] = (unsigned char)i;
        want[i] = e4m3_decode((uint8_t)i) * 0.3f;
    }
    ops->from_e4m3(codes + 1, 256, 0.3f, got);
    same_floats(got, want, 256);
}
END_TEST

START_TEST(decoders_handle_any_length)
{
    unsigned char bytes[80];
    float scales[5] = {1.0f, 0.3f, -2.0f, 7.0f, 0.5f};
    const struct cpu_ops *ops = ops_of(_i);
    uint32_t seed = 5;

    if (_i > (int)cpu_isa_best()) return;
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)random_next(&seed);
    for (int64_t count = 0; count <= 39; count++) {
        float want[40], got[40] = {0};

        got[count] = 77.0f;
        numbers_decode(FORMAT_BF16, bytes, count, want);
        ops->from_bf16(bytes, count, got);
        same_floats(got, want, count);
        numbers_decode(FORMAT_F16, bytes, count, want);
        ops->from_f16(bytes, count, got);
        same_floats(got, want, count);
        for (int64_t i = 0; i < count; i++)
            want[i] = e4m3_decode(bytes[i]) * 3.0f;
        ops->from_e4m3(bytes, count, 3.0f, got);
        same_floats(got, want, count);
        for (int64_t i = 0; i < count; i++)
            want[i] = e2m1_values[(bytes[i / 2] >> (4 * (i % 2))) & 15] * scales[i / 16];
        ops->from_nibbles(bytes, count, e2m1_values, scales, 16, got);
        same_floats(got, want, count);
        for (int64_t i = 0; i < count; i++)
            want[i] = (float)((int)((bytes[i / 2] >> (4 * (i % 2))) & 15) - 8) * scales[i / 32];
        ops->from_nibbles(bytes, count, int4_values, scales, 32, got);
        same_floats(got, want, count);
        ck_assert_float_eq(got[count], 77.0f);
    }
}
END_TEST

START_TEST(swish_is_accurate)
{
    const struct cpu_ops *ops = ops_of(_i);
    uint32_t seed = 17;

    if (_i > (int)cpu_isa_best()) return;
    for (int i = 0; i < 20000; i++) {
        float x[3] = {random_unit(&seed) * 30.0f, random_unit(&seed), random_unit(&seed) * 1e-4f};
        double want[3];

        for (int j = 0; j < 3; j++)
            want[j] = (double)x[j] / (1.0 + exp(-(double)x[j]));
        ops->swish(x, 3, 1.0f);
        for (int j = 0; j < 3; j++)
            assert_many(fabs((double)x[j] - want[j]) <= 2.5e-7 * fabs(want[j]), "%.9g, not %.9g",
                        (double)x[j], want[j]);
    }
}
END_TEST

START_TEST(swish_at_the_edges)
{
    float x[4] = {1000.0f, -1000.0f, NAN, 0.0f};
    float far[4] = {-1e37f, -3e38f, 3e38f, INFINITY};

    if (_i > (int)cpu_isa_best()) return;
    ops_of(_i)->swish(x, 4, 1.702f);
    ops_of(_i)->swish(far, 4, 1.0f);
    ck_assert(far[0] == 0.0f && far[1] == 0.0f && far[2] == 3e38f && far[3] == INFINITY);
    ck_assert_float_eq(x[0], 1000.0f);
    ck_assert(x[1] <= 0.0f && x[1] > -1e-30f);
    ck_assert(isnan(x[2]));
    ck_assert_float_eq(x[3], 0.0f);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, encoders_round_once);
    tcase_add_test(tests, sixteen_bit_codes_come_back);
    tcase_add_test(tests, every_e4m3_code);
    tcase_add_test(tests, small_formats);
    tcase_add_loop_test(tests, decoders_agree_on_every_code, CPU_SCALAR, CPU_AVX512 + 1);
    tcase_add_loop_test(tests, decoders_handle_any_length, CPU_SCALAR, CPU_AVX512 + 1);
    tcase_add_loop_test(tests, swish_is_accurate, CPU_SCALAR, CPU_AVX512 + 1);
    tcase_add_loop_test(tests, swish_at_the_edges, CPU_SCALAR, CPU_AVX512 + 1);
}

SUITE_MAIN("numbers", 120, add)
