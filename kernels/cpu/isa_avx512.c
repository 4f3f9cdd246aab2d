// isa.h in AVX-512 (F, BW, DQ, VL), AVX2, FMA and F16C.

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>

#define ISA_OPS     cpu_ops_avx512
#define ISA_LANES   16
#define ISA_ROWS    4
#define ISA_COLUMNS 6

typedef __m512 vec;

static inline __mmask16 first_lanes(int64_t n)
{
    return (__mmask16)((1u << n) - 1u);
}

static inline vec vec_zero(void)
{
    return _mm512_setzero_ps();
}

static inline vec vec_set(float value)
{
    return _mm512_set1_ps(value);
}

static inline vec vec_load(const float *from)
{
    return _mm512_loadu_ps(from);
}

static inline vec vec_load_part(const float *from, int64_t n)
{
    return _mm512_maskz_loadu_ps(first_lanes(n), from);
}

static inline void vec_store(float *to, vec value)
{
    _mm512_storeu_ps(to, value);
}

static inline void vec_store_part(float *to, vec value, int64_t n)
{
    _mm512_mask_storeu_ps(to, first_lanes(n), value);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm512_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm512_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline float vec_sum(vec a)
{
    return _mm512_reduce_add_ps(a);
}

// A NaN stays one.
static inline vec vec_clamp(vec a, float low, float high)
{
    return _mm512_min_ps(vec_set(high), _mm512_max_ps(vec_set(low), a));
}

static inline vec vec_round(vec a)
{
    return _mm512_cvtepi32_ps(_mm512_cvtps_epi32(a));
}

static inline vec vec_power_of_2(vec n)
{
    __m512i biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));

    return _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23));
}

static inline vec vec_from_bf16(const unsigned char *from)
{
    __m256i half = _mm256_loadu_si256((const __m256i_u *)from);

    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline vec vec_from_f16(const unsigned char *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i_u *)from));
}

// Through f16, whose exponent is biased by 8 more and whose subnormals hold those of e4m3.
static inline vec vec_from_e4m3(const unsigned char *from)
{
    __m256i byte = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i_u *)from));
    __m256i magnitude = _mm256_and_si256(byte, _mm256_set1_epi16(0x7f));
    __m256i nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(byte, magnitude), 8);
    __m256i half = _mm256_or_si256(sign, _mm256_slli_epi16(magnitude, 7));

    half = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    return _mm512_mul_ps(_mm512_cvtph_ps(half), vec_set(256.0f));
}

static inline vec vec_from_nibbles(const unsigned char *from, const float values[16])
{
    __m128i byte = _mm_loadl_epi64((const __m128i_u *)from);
    __m128i low = _mm_and_si128(byte, _mm_set1_epi8(15));
    __m128i high = _mm_and_si128(_mm_srli_epi16(byte, 4), _mm_set1_epi8(15));

    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(low, high)),
                                 _mm512_loadu_ps(values));
}

#include "kernels/cpu/isa_body.h"

#else
typedef int isa_avx512_is_for_x86_64;
#endif
