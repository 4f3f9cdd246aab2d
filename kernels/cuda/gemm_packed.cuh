// Weights of four bits, multiplied as bf16: decoded on the way from shared memory to the registers that wgmma and mma read their M from.
// Included by gemm.cu and gemm_load.cuh.
//
// A stage has 128 bytes of each weight row, 256 inputs, swizzled. Of a row's 32 inputs lane c of the four that share the row has four bytes,
// 8 c to 8 c + 7, which are what wgmma and mma want of it because the other operand is woven (gemm_weave.cuh). Scales lie in slots behind the
// stages, 32 bytes a row, those of one to four steps, as bf16 numbers: made by the loading threads where tiles are wide, else by the warp that
// multiplies the row.

#ifndef MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH
#define MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH

#include "kernels/cuda/gemm_packed_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// ---- Decoding ----------------------------------------------------------------------------------

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

// Eight codes as four words of two bf16, of codes i and i + 4.
template <operand type> __device__ __forceinline__ void decode_eight(const packed_codes &by, uint32_t codes, const packed_factor &factor, uint32_t (&to)[4])
{
    if constexpr (type == OPERAND_INT4) {
#pragma unroll
        for (int32_t i = 0; i < 4; i++) {
            const uint32_t number = bf16_fma((codes >> 4 * i & 0x000f000fu) | 0x43004300u, 0x3f803f80u, 0xc308c308u); // 128 + code - 136

            to[i] = bf16_fma(number, factor.times, bf16_multiply(number, factor.plus));
        }
    } else {
#pragma unroll
        for (int32_t i = 0; i < 4; i += 2) {
            to[i] = bf16_multiply(small_of<0>(by, codes >> 4 * i), factor.times);
            to[i + 1] = bf16_multiply(small_of<4>(by, codes >> 4 * i), factor.times);
        }
    }
}

// ---- By who multiplies -------------------------------------------------------------------------

// Of a warp's sixteen weight rows: this lane's are r and r + 8.
struct packed_rows {
    int32_t matrix_row; // bytes from a stage's begin, of the row that it gives the address of
    int32_t row;        // r
    prepared_scales prepared;
};

template <class P> __device__ __forceinline__ packed_rows find_packed_rows(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    const int32_t lane = threadIdx.x % 32, first = warpgroup * kBlockRows + threadIdx.x / 32 % 4 * 16;
    packed_rows rows = {(first + lane % 16) * kRowBytes, first + lane / 4, {0, 0}};

    if (!P::is_wide) rows.prepared = find_prepared<P>(args, t, first + lane / 2);
    return rows;
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

// Where those of a row are, for part of a step.
template <class P>
__device__ __forceinline__ const uint32_t *part_scales(gemm_smem<P> &smem, const stage_ring &ring, int32_t row, int32_t step, int32_t part)
{
    constexpr int32_t words = packed_part<P>::words_count;
    const int32_t first = (P::is_wide ? step % kSlotSteps<P> * P::parts + part : part) * words;
    const unsigned char *scales;

    if constexpr (P::is_wide)
        scales = slot_scales<P>(smem, ring.scales) + slot_at(row, first / 4) + first % 4 * 4;
    else
        scales = stage_scales<P>(smem, ring) + row * P::scales_bytes + first * 4;
    return reinterpret_cast<const uint32_t *>(scales);
}

template <class P>
__device__ __forceinline__ void read_part(gemm_smem<P> &smem, const packed_rows &rows, const stage_ring &ring, int32_t step, int32_t part,
                                          packed_part<P> &to)
{
    const int32_t lane = threadIdx.x % 32, piece = (part * 2 + lane / 16) ^ lane % 8;

    load_matrices(to.codes, smem_address(ring.weights(smem)) + rows.matrix_row + piece * 16);
#pragma unroll
    for (int32_t i = 0; i < 2; i++)
#pragma unroll
        for (int32_t word = 0; word < to.words_count; word++)
            to.scales[i][word] = part_scales<P>(smem, ring, rows.row + i * 8, step, part)[word];
}

// Four times what wgmma and mma take.
template <class P> __device__ __forceinline__ void decode_part(const packed_codes &by, const packed_part<P> &from, uint32_t (&weights)[4][4])
{
#pragma unroll
    for (int32_t block = 0; block < 2; block++)
#pragma unroll
        for (int32_t i = 0; i < 2; i++) {
            uint32_t words[4];

            decode_eight<P::type>(by, from.codes[block * 2 + i], factor_of<P::type>(by, from.scales[i], block), words);
#pragma unroll
            for (int32_t word = 0; word < 4; word++)
                weights[block * 2 + word / 2][word % 2 * 2 + i] = words[word];
        }
}

} // namespace

#endif
