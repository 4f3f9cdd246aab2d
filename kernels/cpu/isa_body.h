// The operations of isa.h over the vector of one instruction set. Included once by each isa_*.c,
// after it defined
//   ISA_OPS, ISA_LANES, ISA_ROWS x ISA_COLUMNS (accumulators of a tile, all in registers; at most 4
//   rows), vec, vec_zero, vec_set, vec_load, vec_load_part, vec_store, vec_store_part (n <
//   ISA_LANES, the rest is 0), vec_add, vec_mul, vec_div, vec_fma (a * b + c), vec_sum (in a fixed
//   order), vec_clamp, vec_round, vec_power_of_2, and vec_from_bf16, vec_from_f16, vec_from_e4m3,
//   vec_from_nibbles.

// No guard: this is the body of a file, not a header that others share.

#include "kernels/cpu/isa.h"
#include "kernels/cpu/numbers.h"
#include "kernels/types.h"

#include <math.h>

// A weight row is decoded 1 KiB at a time, a few rows in turn: too short for the hardware to see
// where it goes. Asking for the row's next piece took a decode step of bf16 weights from 5.9 to 4.5
// ms (bench/cpu_gemm 2048,768,32,8 1 1 bf16).
#define AHEAD_BYTES 1024

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(__clang__)
#define MOXIE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MOXIE_UNROLL _Pragma("GCC unroll 8")
#endif

// An address, not a pointer: it may be past the array.
ALWAYS_INLINE void prefetch_ahead(const unsigned char *from)
{
    __builtin_prefetch((const void *)((uintptr_t)from + AHEAD_BYTES));
}

// One accumulator per output, along k: an output's bits are the same in a tile of any size.
ALWAYS_INLINE void tile(const struct dot_args *d, int64_t m, int64_t n, const int rows,
                        const int columns)
{
    const float *a = d->a + m * d->a_stride;
    const float *w = d->w + n * d->w_stride;
    float *c = d->c + m * d->c_stride + n;
    int64_t whole = d->k - d->k % ISA_LANES;
    vec sums[4][ISA_COLUMNS];
    vec left[4];

    MOXIE_UNROLL
    for (int i = 0; i < rows; i++) {
        MOXIE_UNROLL
        for (int j = 0; j < columns; j++)
            sums[i][j] = vec_zero();
    }
    for (int64_t k = 0; k < whole; k += ISA_LANES) {
        MOXIE_UNROLL
        for (int i = 0; i < rows; i++)
            left[i] = vec_load(a + i * d->a_stride + k);
        MOXIE_UNROLL
        for (int j = 0; j < columns; j++) {
            vec right = vec_load(w + j * d->w_stride + k);

            MOXIE_UNROLL
            for (int i = 0; i < rows; i++)
                sums[i][j] = vec_fma(left[i], right, sums[i][j]);
        }
    }
    MOXIE_UNROLL
    for (int i = 0; i < rows; i++) {
        MOXIE_UNROLL
        for (int j = 0; j < columns; j++) {
            vec sum = sums[i][j];

            if (whole < d->k)
                sum = vec_fma(vec_load_part(a + i * d->a_stride + whole, d->k - whole),
                              vec_load_part(w + j * d->w_stride + whole, d->k - whole), sum);
            c[i * d->c_stride + j] += vec_sum(sum);
        }
    }
}

ALWAYS_INLINE void tile_of_rows(const struct dot_args *d, int64_t m, int64_t n, const int columns)
{
    int64_t rows = d->rows - m;

    if (rows >= ISA_ROWS)
        tile(d, m, n, ISA_ROWS, columns);
    else if (rows == 3)
        tile(d, m, n, 3, columns);
    else if (rows == 2)
        tile(d, m, n, 2, columns);
    else
        tile(d, m, n, 1, columns);
}

static void dot(const struct dot_args *args)
{
    int64_t n = 0;

    for (; n + ISA_COLUMNS <= args->columns; n += ISA_COLUMNS) {
        for (int64_t m = 0; m < args->rows; m += ISA_ROWS)
            tile_of_rows(args, m, n, ISA_COLUMNS);
    }
    for (; n < args->columns; n++) {
        for (int64_t m = 0; m < args->rows; m += ISA_ROWS)
            tile_of_rows(args, m, n, 1);
    }
}

static void from_bf16(const void *from, int64_t count, float *to)
{
    const unsigned char *bytes = from;
    int64_t i = 0;

    for (; i + ISA_LANES <= count; i += ISA_LANES) {
        prefetch_ahead(bytes + 2 * i);
        vec_store(to + i, vec_from_bf16(bytes + 2 * i));
    }
    numbers_decode(FORMAT_BF16, bytes + 2 * i, count - i, to + i);
}

static void from_f16(const void *from, int64_t count, float *to)
{
    const unsigned char *bytes = from;
    int64_t i = 0;

    for (; i + ISA_LANES <= count; i += ISA_LANES) {
        prefetch_ahead(bytes + 2 * i);
        vec_store(to + i, vec_from_f16(bytes + 2 * i));
    }
    numbers_decode(FORMAT_F16, bytes + 2 * i, count - i, to + i);
}

static void from_e4m3(const void *from, int64_t count, float scale, float *to)
{
    const unsigned char *bytes = from;
    int64_t i = 0;

    for (; i + ISA_LANES <= count; i += ISA_LANES)
        vec_store(to + i, vec_mul(vec_from_e4m3(bytes + i), vec_set(scale)));
    for (; i < count; i++)
        to[i] = e4m3_decode(bytes[i]) * scale;
}

static void from_nibbles(const void *from, int64_t count, const float values[16],
                         const float *scales, int64_t group, float *to)
{
    const unsigned char *bytes = from;
    int64_t i = 0;

    for (; i + ISA_LANES <= count; i += ISA_LANES)
        vec_store(to + i,
                  vec_mul(vec_from_nibbles(bytes + i / 2, values), vec_set(scales[i / group])));
    for (; i < count; i++)
        to[i] = values[(bytes[i / 2] >> (i % 2 * 4)) & 15] * scales[i / group];
}

// exp by 2^n and a polynomial on +-ln(2)/2; under 2 ulp inside +-87, and clamped there.
ALWAYS_INLINE vec vec_exp(vec x)
{
    vec n, r, p;

    x = vec_clamp(x, -87.0f, 87.0f);
    n = vec_round(vec_mul(x, vec_set(1.44269504f)));
    r = vec_fma(n, vec_set(-0.693359375f), x);
    r = vec_fma(n, vec_set(2.12194440e-4f), r);
    p = vec_fma(vec_set(1.9875691500e-4f), r, vec_set(1.3981999507e-3f));
    p = vec_fma(p, r, vec_set(8.3334519073e-3f));
    p = vec_fma(p, r, vec_set(4.1665795894e-2f));
    p = vec_fma(p, r, vec_set(1.6666665459e-1f));
    p = vec_fma(p, r, vec_set(5.0000001201e-1f));
    p = vec_add(vec_fma(p, vec_mul(r, r), r), vec_set(1.0f));
    return vec_mul(p, vec_power_of_2(n));
}

ALWAYS_INLINE vec vec_swish(vec x, float alpha)
{
    const vec power = vec_mul(x, vec_set(-alpha));
    // Past the clamp e is infinite: 1.6e-38 of a gate of -1e38 would be left of it.
    const vec past = vec_clamp(vec_add(power, vec_set(-87.0f)), 0.0f, INFINITY);
    const vec e = vec_fma(past, vec_set(3e38f), vec_exp(power));

    return vec_div(x, vec_add(e, vec_set(1.0f)));
}

static void swish(float *x, int64_t count, float alpha)
{
    int64_t i = 0;

    for (; i + ISA_LANES <= count; i += ISA_LANES)
        vec_store(x + i, vec_swish(vec_load(x + i), alpha));
    if (i < count)
        vec_store_part(x + i, vec_swish(vec_load_part(x + i, count - i), alpha), count - i);
}

const struct cpu_ops ISA_OPS = {
    .dot = dot,
    .from_bf16 = from_bf16,
    .from_f16 = from_f16,
    .from_e4m3 = from_e4m3,
    .from_nibbles = from_nibbles,
    .swish = swish,
};
