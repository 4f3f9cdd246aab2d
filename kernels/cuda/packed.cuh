// Weights of four bits and their scales, as the bf16 numbers that mma and wgmma multiply. Included by the parts of gemm.cu and layer.cu.
//
// Of a row's 32 inputs lane c of the four that share the row has four bytes, 8 c to 8 c + 7. Of their codes i and i + 4 become a word of two
// numbers, since both are at the same place of 16 bits, and of eight inputs so do those that these are multiplied by.

#ifndef MOXIE_KERNELS_CUDA_PACKED_CUH
#define MOXIE_KERNELS_CUDA_PACKED_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/weights.cuh"

#include <stdint.h>

namespace {

// ---- Scales ------------------------------------------------------------------------------------

// Where bytes of a row's scales begin, of 16, and where they end.
struct scales_span {
    const unsigned char *first;
    int32_t before, end;

    __device__ __forceinline__ scales_span(const packed_scales &by, const unsigned char *row, int32_t begin, int32_t bytes)
        : first(row + begin), before(reinterpret_cast<uintptr_t>(first) & 15), end(before + min(bytes, by.row_bytes - begin))
    {
    }

    // The 16 bytes that begin `at` behind those in which they begin; zeros past their end.
    __device__ __forceinline__ void copy(uint32_t to, int32_t at) const
    {
        cp_async(to + at, first - before + (at < end ? at : 0), max(min(end - at, 16), 0));
    }
};

__device__ __forceinline__ const unsigned char *scales_of_row(const packed_scales &by, int64_t expert, int64_t row)
{
    return by.scales + expert * by.expert_stride_bytes + row * by.row_stride_bytes;
}

// What e8m0 scales are multiplied by so that 2^126 times as much is finite, up to GEMMS_E8M0_MOST, and e4m3 ones, of which all are.
// The sums get it back.
constexpr float kE8m0Rest = 1 << 20, kE4m3Rest = 1 << 10;

__device__ __forceinline__ float float_of(float number)
{
    return number;
}

__device__ __forceinline__ float float_of(__nv_bfloat16 number)
{
    return __bfloat162float(number);
}

__device__ __forceinline__ float float_of(__half number)
{
    return __half2float(number);
}

// What numbers of 2^-126 are multiplied by, 2^126 / kE4m3Rest times the scale, for two e4m3 codes, each the low byte of a half.
__device__ __forceinline__ uint32_t times_of_e4m3(uint32_t codes)
{
    const uint32_t shifted = codes << 4, sign = shifted & 0x08000800u;

    return bf16_multiply(bf16_multiply(shifted + sign * 15, 0x7b807b80u), 0x79807980u); // 2^120, which makes it the scale, and 2^116
}

// The same for e8m0, with kE8m0Rest.
__device__ __forceinline__ uint32_t times_of_e8m0(uint32_t codes)
{
    return (codes << 7) + 0x35003500u; // 106 more
}

// Of a word of four scales the first two or the last, each the low byte of a half.
__device__ __forceinline__ uint32_t two_scales(uint32_t codes, bool are_last)
{
    return bytes_by(codes, 0, are_last ? 0x4342 : 0x4140);
}

template <operand type> __device__ __forceinline__ uint32_t times_of(uint32_t codes, bool are_last)
{
    const uint32_t two = two_scales(codes, are_last);

    return type == OPERAND_NVFP4 ? times_of_e4m3(two) : times_of_e8m0(two);
}

// Two bf16 whose sum a scale is, but for what is below them.
__device__ __forceinline__ uint32_t split(float scale)
{
    const float high = number_unpack<true>(number_pack<true>(scale, scale)).x;

    return number_pack<true>(high, scale - high);
}

// Of a row's scales as they are, from byte `low` of `row` on, each of its two lanes makes `count` words of two, what codes are multiplied by:
// they take the place of the scales.
template <operand type, class Scale, int count> __device__ __forceinline__ void prepare_row_as(unsigned char *row, int32_t low)
{
    const int32_t first = threadIdx.x % 2 * count;
    uint32_t *to = reinterpret_cast<uint32_t *>(row) + first;
    uint32_t made[count];

    if constexpr (type == OPERAND_INT4) {
#pragma unroll
        for (int32_t i = 0; i < count; i++)
            made[i] = split(float_of(reinterpret_cast<const Scale *>(row + low)[first + i]));
    } else {
        const uint32_t *words = reinterpret_cast<const uint32_t *>(row + low / 4 * 4) + first / 2;
        uint32_t next = words[0];

#pragma unroll
        for (int32_t i = 0; i < count; i += 2) {
            const uint32_t word = next;

            next = words[i / 2 + 1];
            made[i] = times_of<type>(shifted_by(word, next, low % 4 * 8), false);
            made[i + 1] = times_of<type>(shifted_by(word, next, low % 4 * 8), true);
        }
    }
    __syncwarp();
#pragma unroll
    for (int32_t i = 0; i < count; i++)
        to[i] = made[i];
    __syncwarp();
}

// Those of so many times 256 inputs. For all lanes of a warp.
template <operand type, int steps> __device__ __forceinline__ void prepare_row(int32_t scale_format, unsigned char *row, int32_t low)
{
    constexpr int count = steps * (type == OPERAND_MXFP4 ? 2 : 4);

    if (type != OPERAND_INT4 || scale_format == FORMAT_BF16)
        prepare_row_as<type, __nv_bfloat16, count>(row, low);
    else if (scale_format == FORMAT_F16)
        prepare_row_as<type, __half, count>(row, low);
    else
        prepare_row_as<type, float, count>(row, low);
}

// ---- Codes -------------------------------------------------------------------------------------

// A constant in a register, since the compiler would move it to one wherever it is used: of a bf16, the bits of an e2m1. And where this
// lane's scale lies in a word of two.
struct packed_codes {
    uint32_t number;
    uint32_t scale;
};

__device__ __forceinline__ packed_codes codes_of()
{
    return {in_register(0x81c081c0), threadIdx.x % 4 < 2 ? 0x1010u : 0x3232u};
}

// What a number is multiplied by, twice a bf16. INT4: and what is added to that, since a scale of 16 or 32 bits is the sum of two.
struct packed_factor {
    uint32_t times, plus;
};

// Of both halves of a word the e2m1 code at bit 0 or 4, as bf16: their exponent and mantissa become the lowest exponent bits and the highest
// of the mantissa, which makes 2^-126 of the number, those below the normal ones too. One multiplication copies all four bits to where these
// belong and to where the sign does, and runs beside the instructions that pick bits.
template <int bit> __device__ __forceinline__ uint32_t small_of(const packed_codes &by, uint32_t codes)
{
    return (codes & 0x000f000fu << bit) * ((1 << 12 | 1 << 6) >> bit) & by.number;
}

// Eight codes as four words of two bf16, of codes i and i + 4. INT4 without `is_scaled`, which sums are then: the codes' numbers alone.
template <operand type, bool is_scaled> __device__ __forceinline__ void decode_eight(const packed_codes &by, uint32_t codes, const packed_factor &factor, uint32_t (&to)[4])
{
    if constexpr (type == OPERAND_INT4) {
#pragma unroll
        for (int32_t i = 0; i < 4; i++) {
            const uint32_t number = bf16_fma((codes >> 4 * i & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u); // 128 + code - 136

            to[i] = is_scaled ? bf16_fma(number, factor.times, bf16_multiply(number, factor.plus)) : number;
        }
    } else {
#pragma unroll
        for (int32_t i = 0; i < 4; i += 2) {
            to[i] = bf16_multiply(small_of<0>(by, codes >> 4 * i), factor.times);
            to[i + 1] = bf16_multiply(small_of<4>(by, codes >> 4 * i), factor.times);
        }
    }
}

// Of 32 of the 64 inputs that two words are for, of mxfp4 the first alone.
template <operand type> __device__ __forceinline__ packed_factor factor_of(const packed_codes &by, const uint32_t (&words)[2], int32_t block)
{
    if (type == OPERAND_MXFP4) return {block != 0 ? twice<true>(words[0]) : twice<false>(words[0]), 0};
    if (type == OPERAND_NVFP4) return {bytes_by(words[block], 0, by.scale), 0};
    return {twice<false>(words[block]), twice<true>(words[block])};
}

// What 64 inputs of both weight rows are decoded from.
template <class P> struct packed_part {
    static constexpr int words_count = P::type == OPERAND_MXFP4 ? 1 : 2;
    uint32_t codes[4]; // of 32 inputs of both rows, then of the other 32
    uint32_t scales[2][2];
};

// 32 inputs of it, twice what wgmma and mma take. Without the second row, zeros.
template <class P, bool has_second = true, bool is_scaled = true>
__device__ __forceinline__ void decode_block(const packed_codes &by, const packed_part<P> &from, int32_t block, uint32_t (*weights)[4])
{
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        uint32_t words[4] = {};

        if (i == 0 || has_second) decode_eight<P::type, is_scaled>(by, from.codes[block * 2 + i], factor_of<P::type>(by, from.scales[i], block), words);
#pragma unroll
        for (int32_t word = 0; word < 4; word++)
            weights[word / 2][word % 2 * 2 + i] = words[word];
    }
}

template <class P, bool has_second = true, bool is_scaled = true>
__device__ __forceinline__ void decode_part(const packed_codes &by, const packed_part<P> &from, uint32_t (&weights)[4][4])
{
#pragma unroll
    for (int32_t block = 0; block < 2; block++)
        decode_block<P, has_second, is_scaled>(by, from, block, weights + block * 2);
}

// ---- Inputs ------------------------------------------------------------------------------------

// Eight inputs as their four words.
__device__ __forceinline__ void woven_of(const uint4 &eight, uint32_t (&words)[4])
{
    words[0] = bytes_by(eight.x, eight.z, 0x5410);
    words[1] = bytes_by(eight.x, eight.z, 0x7632);
    words[2] = bytes_by(eight.y, eight.w, 0x5410);
    words[3] = bytes_by(eight.y, eight.w, 0x7632);
}

} // namespace

#endif
