// isa.h in plain C, on any machine: what the others are tested against.

#include "kernels/cpu/numbers.h"
#include "kernels/types.h"

#include <math.h>
#include <string.h>

#define ISA_OPS     cpu_ops_scalar
#define ISA_LANES   8
#define ISA_ROWS    2
#define ISA_COLUMNS 2

typedef struct vec {
    float lane[ISA_LANES];
} vec;

static inline vec vec_set(float value)
{
    vec to;

    for (int i = 0; i < ISA_LANES; i++)
        to.lane[i] = value;
    return to;
}

static inline vec vec_zero(void)
{
    return vec_set(0.0f);
}

static inline vec vec_load(const float *from)
{
    vec to;

    memcpy(to.lane, from, sizeof to.lane);
    return to;
}

static inline vec vec_load_part(const float *from, int64_t n)
{
    vec to = vec_zero();

    memcpy(to.lane, from, (size_t)n * sizeof *from);
    return to;
}

static inline void vec_store(float *to, vec value)
{
    memcpy(to, value.lane, sizeof value.lane);
}

static inline void vec_store_part(float *to, vec value, int64_t n)
{
    memcpy(to, value.lane, (size_t)n * sizeof *to);
}

static inline vec vec_add(vec a, vec b)
{
    for (int i = 0; i < ISA_LANES; i++)
        a.lane[i] += b.lane[i];
    return a;
}

static inline vec vec_mul(vec a, vec b)
{
    for (int i = 0; i < ISA_LANES; i++)
        a.lane[i] *= b.lane[i];
    return a;
}

static inline vec vec_div(vec a, vec b)
{
    for (int i = 0; i < ISA_LANES; i++)
        a.lane[i] /= b.lane[i];
    return a;
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return vec_add(vec_mul(a, b), c);
}

static inline float vec_sum(vec a)
{
    const float *x = a.lane;

    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// A NaN stays one.
static inline vec vec_clamp(vec a, float low, float high)
{
    for (int i = 0; i < ISA_LANES; i++)
        a.lane[i] = a.lane[i] < low ? low : a.lane[i] > high ? high : a.lane[i];
    return a;
}

static inline vec vec_round(vec a)
{
    for (int i = 0; i < ISA_LANES; i++)
        a.lane[i] = rintf(a.lane[i]);
    return a;
}

// A NaN's power is any number: its polynomial is a NaN already.
static inline vec vec_power_of_2(vec n)
{
    for (int i = 0; i < ISA_LANES; i++) {
        int32_t power = n.lane[i] == n.lane[i] ? (int32_t)n.lane[i] : 0;
        uint32_t bits = (uint32_t)(power + 127) << 23;

        memcpy(&n.lane[i], &bits, sizeof bits);
    }
    return n;
}

static inline vec vec_from_bf16(const unsigned char *from)
{
    vec to;

    numbers_decode(FORMAT_BF16, from, ISA_LANES, to.lane);
    return to;
}

static inline vec vec_from_f16(const unsigned char *from)
{
    vec to;

    numbers_decode(FORMAT_F16, from, ISA_LANES, to.lane);
    return to;
}

static inline vec vec_from_e4m3(const unsigned char *from)
{
    vec to;

    for (int i = 0; i < ISA_LANES; i++)
        to.lane[i] = e4m3_decode(from[i]);
    return to;
}

static inline vec vec_from_nibbles(const unsigned char *from, const float values[16])
{
    vec to;

    for (int i = 0; i < ISA_LANES; i++)
        to.lane[i] = values[(from[i / 2] >> (i % 2 * 4)) & 15];
    return to;
}

#include "kernels/cpu/isa_body.h"
