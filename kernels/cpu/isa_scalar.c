// isa.h in plain C, on any machine: what the others are tested against.

#include "kernels/cpu/numbers.h"
#include "kernels/types.h"

#include <math.h>
#include <string.h>

#define ISA_OPS     cpu_ops_scalar
#define ISA_LANES   4
#define ISA_ROWS    2
#define ISA_COLUMNS 4

// The compiler's own vectors: SSE2, NEON, or whatever the target's baseline has.
typedef float vec __attribute__((vector_size(ISA_LANES * sizeof(float))));

static inline vec vec_set(float value)
{
    return (vec){value, value, value, value};
}

static inline vec vec_zero(void)
{
    return vec_set(0.0f);
}

static inline vec vec_load(const float *from)
{
    vec to;

    memcpy(&to, from, sizeof to);
    return to;
}

static inline vec vec_load_part(const float *from, int64_t n)
{
    vec to = vec_zero();

    memcpy(&to, from, (size_t)n * sizeof *from);
    return to;
}

static inline void vec_store(float *to, vec value)
{
    memcpy(to, &value, sizeof value);
}

static inline void vec_store_part(float *to, vec value, int64_t n)
{
    memcpy(to, &value, (size_t)n * sizeof *to);
}

static inline vec vec_add(vec a, vec b)
{
    return a + b;
}

static inline vec vec_mul(vec a, vec b)
{
    return a * b;
}

static inline vec vec_div(vec a, vec b)
{
    return a / b;
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return a * b + c;
}

static inline float vec_sum(vec a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

// A NaN stays one.
static inline vec vec_clamp(vec a, float low, float high)
{
    for (int i = 0; i < ISA_LANES; i++)
        a[i] = a[i] < low ? low : a[i] > high ? high : a[i];
    return a;
}

static inline vec vec_round(vec a)
{
    for (int i = 0; i < ISA_LANES; i++)
        a[i] = rintf(a[i]);
    return a;
}

// A NaN's power is any number: its polynomial is a NaN already.
static inline vec vec_power_of_2(vec n)
{
    uint32_t bits[ISA_LANES];

    for (int i = 0; i < ISA_LANES; i++)
        bits[i] = (uint32_t)((n[i] == n[i] ? (int32_t)n[i] : 0) + 127) << 23;
    memcpy(&n, bits, sizeof n);
    return n;
}

static inline vec vec_from_bf16(const unsigned char *from)
{
    uint16_t half[ISA_LANES];
    uint32_t bits[ISA_LANES];
    vec to;

    memcpy(half, from, sizeof half);
    for (int i = 0; i < ISA_LANES; i++)
        bits[i] = (uint32_t)half[i] << 16;
    memcpy(&to, bits, sizeof to);
    return to;
}

static inline vec vec_from_f16(const unsigned char *from)
{
    vec to = vec_zero();

    for (int i = 0; i < ISA_LANES; i++)
        to[i] = number_load(FORMAT_F16, from, i);
    return to;
}

static inline vec vec_from_e4m3(const unsigned char *from)
{
    vec to = vec_zero();

    for (int i = 0; i < ISA_LANES; i++)
        to[i] = e4m3_decode(from[i]);
    return to;
}

static inline vec vec_from_nibbles(const unsigned char *from, const float values[16])
{
    vec to = vec_zero();

    for (int i = 0; i < ISA_LANES; i++)
        to[i] = values[(from[i / 2] >> (i % 2 * 4)) & 15];
    return to;
}

#include "kernels/cpu/isa_body.h"
