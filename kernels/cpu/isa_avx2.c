// isa.h in AVX2, FMA and F16C.

#if defined(__x86_64__)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ISA_OPS     cpu_ops_avx2
#define ISA_LANES   8
#define ISA_ROWS    3
#define ISA_COLUMNS 4

typedef __m256 vec;

static inline __m256i first_lanes(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)n),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline vec vec_zero(void)
{
    return _mm256_setzero_ps();
}

static inline vec vec_set(float value)
{
    return _mm256_set1_ps(value);
}

static inline vec vec_load(const float *from)
{
    return _mm256_loadu_ps(from);
}

static inline vec vec_load_part(const float *from, int64_t n)
{
    return _mm256_maskload_ps(from, first_lanes(n));
}

static inline void vec_store(float *to, vec value)
{
    _mm256_storeu_ps(to, value);
}

static inline void vec_store_part(float *to, vec value, int64_t n)
{
    _mm256_maskstore_ps(to, first_lanes(n), value);
}

static inline vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

static inline vec vec_mul(vec a, vec b)
{
    return _mm256_mul_ps(a, b);
}

static inline vec vec_div(vec a, vec b)
{
    return _mm256_div_ps(a, b);
}

static inline vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline float vec_sum(vec a)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));

    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// A NaN stays one.
static inline vec vec_clamp(vec a, float low, float high)
{
    return _mm256_min_ps(vec_set(high), _mm256_max_ps(vec_set(low), a));
}

static inline vec vec_round(vec a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vec vec_power_of_2(vec n)
{
    __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));

    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
}

static inline vec vec_from_bf16(const unsigned char *from)
{
    __m128i half = _mm_loadu_si128((const __m128i_u *)from);

    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

static inline vec vec_from_f16(const unsigned char *from)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i_u *)from));
}

// Through f16, whose exponent is biased by 8 more and whose subnormals hold those of e4m3.
static inline vec vec_from_e4m3(const unsigned char *from)
{
    __m128i byte = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i_u *)from));
    __m128i magnitude = _mm_and_si128(byte, _mm_set1_epi16(0x7f));
    __m128i nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_xor_si128(byte, magnitude), 8);
    __m128i half = _mm_or_si128(sign, _mm_slli_epi16(magnitude, 7));

    half = _mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), vec_set(256.0f));
}

static inline vec vec_from_nibbles(const unsigned char *from, const float values[16])
{
    __m128i byte, low, high;
    __m256i index;
    __m256 first, second;
    int32_t word;

    memcpy(&word, from, sizeof word);
    byte = _mm_cvtsi32_si128(word);
    low = _mm_and_si128(byte, _mm_set1_epi8(15));
    high = _mm_and_si128(_mm_srli_epi16(byte, 4), _mm_set1_epi8(15));
    index = _mm256_cvtepu8_epi32(_mm_unpacklo_epi8(low, high));
    first = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), index);
    second = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), index);
    // Bit 3 of the nibble, moved to the sign, says which half of the table.
    return _mm256_blendv_ps(first, second, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}

#include "kernels/cpu/isa_body.h"

#else
typedef int isa_avx2_is_for_x86_64;
#endif
