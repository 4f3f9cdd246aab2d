// Weights of four bits, multiplied as bf16: decoded on the way from shared memory to the registers that wgmma and mma read their M from.
// Included by gemm.cu and gemm_load.cuh.
//
// A stage has 128 bytes of each weight row, 256 inputs, swizzled, and at its end the scales of each row, which the warp that multiplies
// the row makes into bf16 where they are. Of a row's 32 inputs lane c of the four that share the row has four bytes, 8 c to 8 c + 7, which
// are what wgmma and mma want of it because the other operand is woven (gemm_weave.cuh).

#ifndef MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH
#define MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH

#include "kernels/cuda/gemm_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// ---- Scales, to shared memory ------------------------------------------------------------------

// Of the weight row that is number `row` of the tile.
template <class P> __device__ __forceinline__ const unsigned char *packed_row_scales(const gemm_args &args, const tile &t, int32_t row)
{
    const two_rows two = find_rows_of<P>(args, t, row / 16 * 16, row % 8);
    const packed_scales &from = args.packed;

    return from.scales + t.expert * from.expert_stride_bytes + (row % 16 < 8 ? two.low : two.high) * from.row_stride_bytes;
}

template <class P> __device__ __forceinline__ unsigned char *scales_in(gemm_smem<P> &smem, const stage_ring &ring)
{
    return ring.weights(smem) + ring.bytes - kRows * P::scales_bytes;
}

// A step's of a row, with what lies beside them in 16 bytes. Past the row's end, zeros. For every loading thread.
template <class P>
__device__ __forceinline__ void load_packed_scales(const packed_scales &from, gemm_smem<P> &smem, const stage_ring &ring, const unsigned char *row,
                                                   int32_t step)
{
    const unsigned char *first = row + step * from.step_bytes;
    const int32_t before = reinterpret_cast<uintptr_t>(first) & 15, end = before + min(from.step_bytes, from.row_bytes - step * from.step_bytes);
    constexpr int32_t most = (P::type == OPERAND_INT4 ? 32 : 16) + 16; // a step's, and what may lie before them
    const uint32_t to = smem_address(scales_in<P>(smem, ring)) + threadIdx.x % 128 * P::scales_bytes;

#pragma unroll
    for (int32_t at = 0; at < most; at += 16)
        cp_async(to + at, first - before + (at < end ? at : 0), max(min(end - at, 16), 0));
}

// ---- Decoding ----------------------------------------------------------------------------------

// What e8m0 scales are multiplied by so that 2^126 times as much is finite, up to GEMMS_E8M0_MOST, and e4m3 ones, of which all are.
// The sums get it back.
constexpr float kE8m0Rest = 1 << 20, kE4m3Rest = 1 << 10;

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

// ---- Scales, as they are used ------------------------------------------------------------------

// Of a warp's sixteen weight rows: this lane's are r and r + 8, and it prepares half the scales of one.
struct packed_rows {
    int32_t matrix_row;   // bytes from a stage's begin, of the row that it gives the address of
    int32_t scales;       // bytes from the begin of a stage's scales, of r
    int32_t prepared;     // the same, of the row whose scales it prepares
    int32_t prepared_low; // where those begin, of 16 bytes
};

template <class P> __device__ __forceinline__ packed_rows find_packed_rows(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    const int32_t lane = threadIdx.x % 32, first = warpgroup * kBlockRows + threadIdx.x / 32 % 4 * 16;
    const int32_t row = first + lane / 4, prepared = first + lane / 2;

    return {(first + lane % 16) * kRowBytes, row * P::scales_bytes, prepared * P::scales_bytes,
            static_cast<int32_t>(reinterpret_cast<uintptr_t>(packed_row_scales<P>(args, t, prepared)) & 15)};
}

__device__ __forceinline__ float number_of(float number)
{
    return number;
}

__device__ __forceinline__ float number_of(__nv_bfloat16 number)
{
    return __bfloat162float(number);
}

__device__ __forceinline__ float number_of(__half number)
{
    return __half2float(number);
}

// What numbers of 2^-126 are multiplied by, 2^126 / kE4m3Rest times the scale, for two e4m3 codes in the bytes 0 and 1.
__device__ __forceinline__ uint32_t times_of_e4m3(uint32_t codes)
{
    const uint32_t shifted = bytes_by(codes, 0, 0x4140) << 4, sign = shifted & 0x08000800u;

    return bf16_multiply(bf16_multiply(shifted + sign * 15, 0x7b807b80u), 0x79807980u); // 2^120, which makes it the scale, and 2^116
}

// The same for e8m0, with kE8m0Rest.
__device__ __forceinline__ uint32_t times_of_e8m0(uint32_t codes)
{
    return (bytes_by(codes, 0, 0x4140) << 7) + 0x35003500u; // 106 more
}

// Two bf16 whose sum a scale is, but for what is below them.
__device__ __forceinline__ uint32_t split(float scale)
{
    const float high = number_unpack<true>(number_pack<true>(scale, scale)).x;

    return number_pack<true>(high, scale - high);
}

// A step's scales of the warp's rows, as what codes are multiplied by, two a word: 8 bytes for 64 inputs of a row, of mxfp4 4.
template <class P, class Scale>
__device__ __forceinline__ void prepare_scales_as(const packed_rows &rows, unsigned char *scales, int32_t begin)
{
    constexpr int words = P::type == OPERAND_MXFP4 ? 2 : 4; // of half a row
    const int32_t first = threadIdx.x % 2 * words;
    const unsigned char *from = scales + rows.prepared + ((rows.prepared_low + begin) & 15);
    uint32_t *to = reinterpret_cast<uint32_t *>(scales + rows.prepared) + first;
    uint32_t made[words];

#pragma unroll
    for (int32_t i = 0; i < words; i++) {
        if constexpr (P::type == OPERAND_INT4) {
            made[i] = split(number_of(reinterpret_cast<const Scale *>(from)[first + i]));
        } else {
            const uint32_t codes = from[(first + i) * 2] | static_cast<uint32_t>(from[(first + i) * 2 + 1]) << 8;

            made[i] = P::type == OPERAND_NVFP4 ? times_of_e4m3(codes) : times_of_e8m0(codes);
        }
    }
    __syncwarp();
#pragma unroll
    for (int32_t i = 0; i < words; i++)
        to[i] = made[i];
    __syncwarp();
}

template <class P>
__device__ __forceinline__ void prepare_scales(const packed_scales &from, const packed_rows &rows, const stage_ring &ring, gemm_smem<P> &smem,
                                               int32_t step)
{
    unsigned char *scales = scales_in<P>(smem, ring);

    if (P::type != OPERAND_INT4 || from.scale_format == FORMAT_BF16)
        prepare_scales_as<P, __nv_bfloat16>(rows, scales, step * from.step_bytes);
    else if (from.scale_format == FORMAT_F16)
        prepare_scales_as<P, __half>(rows, scales, step * from.step_bytes);
    else
        prepare_scales_as<P, float>(rows, scales, step * from.step_bytes);
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

template <class P>
__device__ __forceinline__ void read_part(const packed_rows &rows, const stage_ring &ring, gemm_smem<P> &smem, int32_t part, packed_part<P> &to)
{
    const int32_t lane = threadIdx.x % 32, piece = (part * 2 + lane / 16) ^ lane % 8;

    load_matrices(to.codes, smem_address(ring.weights(smem)) + rows.matrix_row + piece * 16);
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        const unsigned char *scales = scales_in<P>(smem, ring) + rows.scales + i * 8 * P::scales_bytes;

#pragma unroll
        for (int32_t word = 0; word < to.words_count; word++)
            to.scales[i][word] = reinterpret_cast<const uint32_t *>(scales)[part * to.words_count + word];
    }
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
