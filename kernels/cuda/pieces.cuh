// e2m1 and int4 weights, and what they are multiplied by, as fp8. Included by the parts of gemm.cu.
//
// An e2m1 is an e5m2, 2^-14 of it, by its bits alone, and an int4 an e4m3, 2^-9 of it. Of an input, which as bf16 has eight bits, two e4m3
// have four each: the number, scaled so that the largest of its row is below 256, as near as e4m3 comes, and what is left. They sum to it but
// for 2^-17 of the largest at most.
//
// Of a row's 32 inputs lane c of the four that share the row has eight codes, as they lie 8 c to 8 c + 7: the even ones become a word of four,
// the odd ones another, which wgmma wants at 4 c and 16 + 4 c. So do pieces lie: of 128 inputs the numbers, then what is left of them, 128
// bytes each, and behind all of a row what its sums are multiplied by.

#ifndef MOXIE_KERNELS_CUDA_PIECES_CUH
#define MOXIE_KERNELS_CUDA_PIECES_CUH

#include "kernels/cuda/number.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantise.cuh"

#include <stdint.h>

namespace {

constexpr int32_t kPieces = 128; // inputs that lie beside each other

// Inputs of a row that has whole ones of these: past its own, zeros.
__host__ __device__ __forceinline__ int32_t whole_pieces(int32_t inputs)
{
    return (inputs + kPieces - 1) / kPieces * kPieces;
}

// Where in a row what its sums are multiplied by is.
__device__ __forceinline__ int32_t back_at(int32_t inputs)
{
    return whole_pieces(inputs) * 2;
}

// ---- Weights -----------------------------------------------------------------------------------

// Two e8m0 scales of a word of four as bf16, 2^14 times as large.
__device__ __forceinline__ uint32_t times_in_pieces(uint32_t codes, bool are_last)
{
    return (two_scales(codes, are_last) << 7) + 0x07000700u;
}

// What sums of int4 codes as e4m3 are multiplied by.
constexpr float kInt4Rest = 1 << 9;

// Four int4 codes, each the low half of a byte, as e4m3 but for signs: up to 15 its codes are that many times the smallest number.
__device__ __forceinline__ uint32_t magnitudes_of(uint32_t codes)
{
    return __vabsdiffu4(codes & 0x0f0f0f0fu, 0x08080808u);
}

// Eight codes, the even ones and the odd ones: e2m1 as e5m2, or int4, which are 8 more than their number, as e4m3.
template <bool is_e5m2> __device__ __forceinline__ void decode_in_pieces(uint32_t codes, uint32_t &even, uint32_t &odd)
{
    if constexpr (!is_e5m2) {
        even = magnitudes_of(codes) | (~(codes << 4) & 0x80808080u);
        odd = magnitudes_of(codes >> 4) | (~codes & 0x80808080u);
        return;
    }
    even = (codes << 4 & 0x80808080u) | (codes << 1 & 0x0e0e0e0eu);
    odd = (codes & 0x80808080u) | (codes >> 3 & 0x0e0e0e0eu);
}

// ---- Inputs ------------------------------------------------------------------------------------

// What a row's numbers are multiplied by, and what sums of that are, by the bits of the largest of them as bf16, without its sign. A row with
// one that is not finite has no sums.
struct piece_scaling {
    float times, back;
};

__device__ __forceinline__ piece_scaling piece_scaling_of(uint32_t largest)
{
    const uint32_t exponent = max(largest >> 7, 8u); // so that both are normal

    if (exponent == 255) return {0.0f, NAN};
    return {__uint_as_float((261 - exponent) << 23), __uint_as_float((exponent - 7) << 23)};
}

// Four numbers as words of both pieces.
__device__ __forceinline__ void cut_four(const float (&numbers)[4], uint32_t &codes, uint32_t &rest)
{
    uint32_t low, high;
    float left[4];

    codes = fp8_pack(numbers);
    e4m3_to_f16(codes, low, high);
    const float2 first = number_unpack<false>(low), last = number_unpack<false>(high);
    left[0] = numbers[0] - first.x;
    left[1] = numbers[1] - first.y;
    left[2] = numbers[2] - last.x;
    left[3] = numbers[3] - last.y;
    rest = fp8_pack(left);
}

// Eight inputs of bf16 as the four words of their even and odd ones, each the codes and then the rest.
__device__ __forceinline__ void cut_eight(const uint4 &eight, float times, uint32_t (&even)[2], uint32_t (&odd)[2])
{
    float numbers[8], by_turns[2][4];

    unpack_8(eight, true, numbers);
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        by_turns[i % 2][i / 2] = numbers[i] * times;
    cut_four(by_turns[0], even[0], even[1]);
    cut_four(by_turns[1], odd[0], odd[1]);
}

} // namespace

#endif
