// What sm_90a's tensor core makes of 32 products of fp8 and a sum so far: each term is cut,
// towards zero, to a multiple of 2^-13 of the largest term's power of two, these are added exactly,
// and the sum keeps 13 bits below its first one. A product's power of two is that of its factors,
// whatever their fractions make of it. Told by "MMA-Sim: Bit-Accurate Reference Model of Tensor
// Cores and Matrix Cores" (arXiv 2511.10909) of wgmma with sums in f32; `layer_twin` holds it
// against the device.

#ifndef MOXIE_HOST_TESTS_TENSOR_CORE_H
#define MOXIE_HOST_TESTS_TENSOR_CORE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define TENSOR_CORE_TERMS    32
#define TENSOR_CORE_FRACTION 13
#define TENSOR_CORE_ZERO     (-100) // stands for the exponent of zero, which is never the largest

// Factors, which e4m3 or e5m2 can hold.
struct tensor_core_factors {
    float value[TENSOR_CORE_TERMS];
    int32_t exponent[TENSOR_CORE_TERMS];
    int32_t has_nan;
};

// Of a number that is neither zero nor subnormal.
static inline int32_t tensor_core_exponent(float value)
{
    int32_t bits;

    memcpy(&bits, &value, sizeof bits);
    return (bits >> 23 & 255) - 127;
}

// 2^exponent, which is in the range of normal numbers.
static inline float tensor_core_power(int32_t exponent)
{
    int32_t bits = (exponent + 127) << 23;
    float value;

    memcpy(&value, &bits, sizeof value);
    return value;
}

// from[0], from[step], ..: count of them, at most TENSOR_CORE_TERMS; the rest are zeros. `lowest`
// is the exponent of subnormal ones.
static inline void tensor_core_read_as(int32_t lowest, const float *from, int64_t step,
                                       int32_t count, struct tensor_core_factors *to)
{
    to->has_nan = 0;
    for (int32_t i = 0; i < TENSOR_CORE_TERMS; i++) {
        float value = i < count ? from[i * step] : 0.0f;
        int32_t exponent = tensor_core_exponent(value);

        to->value[i] = value;
        to->exponent[i] = value == 0.0f ? TENSOR_CORE_ZERO : exponent > lowest ? exponent : lowest;
        to->has_nan |= value != value;
    }
}

static inline void tensor_core_read(const float *from, int64_t step, int32_t count,
                                    struct tensor_core_factors *to)
{
    tensor_core_read_as(-6, from, step, count, to);
}

static inline void tensor_core_read_e5m2(const float *from, int64_t step, int32_t count,
                                         struct tensor_core_factors *to)
{
    tensor_core_read_as(-14, from, step, count, to);
}

static inline float tensor_core_sum(const struct tensor_core_factors *a,
                                    const struct tensor_core_factors *b, float sum)
{
    int32_t largest = sum == 0.0f ? 2 * TENSOR_CORE_ZERO : tensor_core_exponent(sum);
    int32_t total, magnitude, excess;
    float places;

    if (a->has_nan || b->has_nan || sum != sum) return NAN;
    for (int32_t i = 0; i < TENSOR_CORE_TERMS; i++) {
        int32_t exponent = a->exponent[i] + b->exponent[i];

        largest = exponent > largest ? exponent : largest;
    }
    if (largest < TENSOR_CORE_ZERO / 2) return 0.0f; // nothing but zeros
    places = tensor_core_power(TENSOR_CORE_FRACTION - largest);
    total = (int32_t)(sum * places);
    for (int32_t i = 0; i < TENSOR_CORE_TERMS; i++)
        total += (int32_t)(a->value[i] * b->value[i] * places);
    if (total == 0) return 0.0f;
    magnitude = total < 0 ? -total : total;
    excess = 31 - __builtin_clz((unsigned)magnitude) - TENSOR_CORE_FRACTION;
    if (excess > 0) magnitude = magnitude >> excess << excess;
    return (float)(total < 0 ? -magnitude : magnitude) *
           tensor_core_power(largest - TENSOR_CORE_FRACTION);
}

#endif
