// Number formats, exactly: every decode is exact in f32, every encode rounds once, to nearest even.
// Plain integer arithmetic, so that neither rounding mode nor flush-to-zero of the host's thread
// changes a bit.

#ifndef MOXIE_KERNELS_CPU_NUMBERS_H
#define MOXIE_KERNELS_CPU_NUMBERS_H

#include <stdint.h>

extern const float e2m1_values[16]; // by nibble: 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives
extern const float int4_values[16]; // nibble - 8

float bf16_decode(uint16_t bits);
uint16_t bf16_encode(float value); // a NaN stays one, quiet
float f16_decode(uint16_t bits);
uint16_t f16_encode(float value); // past 65504: infinity
float e4m3_decode(uint8_t bits);
uint8_t e4m3_encode(float value); // saturates at 448, infinity too; NaN is 0x7f or 0xff
uint8_t e2m1_encode(float value); // saturates at 6; there is no NaN: it becomes 6
float e8m0_decode(uint8_t bits);  // 2^(bits - 127); 255 is NaN

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

// Bytes of an element of F32, BF16 or F16.
int64_t number_bytes(int32_t format);
// Element `index` of an array of F32, BF16 or F16; the array need not be aligned.
float number_load(int32_t format, const void *array, int64_t index);
// `count` elements of F32, BF16 or F16 to f32, and back with one rounding.
void numbers_decode(int32_t format, const void *from, int64_t count, float *to);
void numbers_encode(int32_t format, const float *from, int64_t count, void *to);

#endif
