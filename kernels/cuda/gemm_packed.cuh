// Weights of four bits, multiplied as bf16: decoded on the way from shared memory to the registers that wgmma and mma read their M from.
// Included by gemm.cu and gemm_load.cuh.
//
// A stage has 128 bytes of each weight row, 256 inputs, swizzled, and at its end the scales of each row, which the warp that multiplies
// the row makes into bf16 where they are. Of a row's 16 inputs lane c of the four that share the row has 2 c, 2 c + 1, 2 c + 8 and
// 2 c + 9, as wgmma and mma want them: two bytes.

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

// The tables by which codes become bytes, in registers: the compiler would move each to one wherever it is used.
struct packed_codes {
    uint32_t low[2], high[2]; // of codes whose highest bit is not set, and of those whose is
    uint32_t above;           // the byte above
};

template <operand type> __device__ __forceinline__ packed_codes codes_of()
{
    constexpr bool is_int4 = type == OPERAND_INT4;

    return {{in_register(is_int4 ? 0x36343230 : 0x43424140), in_register(is_int4 ? 0x3e3c3a38 : 0x4c484644)},
            {in_register(is_int4 ? 0x46444240 : 0x3d3e3f40), in_register(is_int4 ? 0x4e4c4a48 : 0x34383a3c)},
            in_register(0x42)};
}

// What a number of `decode_four` is multiplied by, and what is added then, twice a bf16. INT4: what 48 is taken away from is multiplied by
// both, since a scale of 16 or 32 bits is the sum of two.
struct packed_factor {
    uint32_t times, plus;
};

// Four codes as bf16, two by two: a code's number x is first a byte, 64 + 2 x, from one of the tables, each of which has 0 for the other's
// codes. Below 0x42 that byte makes a bf16 of 48 + x / 2.
template <operand type>
__device__ __forceinline__ void decode_four(const packed_codes &by, uint32_t codes, const packed_factor &factor, uint32_t &low, uint32_t &high)
{
    const uint32_t bytes = bytes_by(by.low[0], by.low[1], codes) | bytes_by(by.high[0], by.high[1], codes ^ 0x8888);
    uint32_t numbers[2] = {bytes_by(bytes, by.above, 0x4140), bytes_by(bytes, by.above, 0x4342)};

#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        if constexpr (type == OPERAND_INT4) {
            const uint32_t number = bf16_fma(numbers[i], 0x40004000u, 0xc2c0c2c0u);

            numbers[i] = bf16_fma(number, factor.times, bf16_multiply(number, factor.plus));
        } else {
            numbers[i] = bf16_fma(numbers[i], factor.times, factor.plus);
        }
    }
    low = numbers[0];
    high = numbers[1];
}

// ---- Scales, as they are used ------------------------------------------------------------------

// Of a warp's sixteen weight rows: this lane's are r and r + 8, and it prepares half the scales of one.
struct packed_rows {
    int32_t codes;        // bytes from a stage's begin, of r; the other's are eight rows on
    uint32_t lane_bytes;  // of eight bytes of codes, which are its
    int32_t scales;       // bytes from the begin of a stage's scales, of r
    int32_t prepared;     // the same, of the row whose scales it prepares
    int32_t prepared_low; // where those begin, of 16 bytes
};

template <class P> __device__ __forceinline__ packed_rows find_packed_rows(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    const int32_t lane = threadIdx.x % 32, first = warpgroup * kBlockRows + threadIdx.x / 32 % 4 * 16;
    const int32_t row = first + lane / 4, prepared = first + lane / 2;

    return {row * kRowBytes + row % 8 * 16, 0x40 + lane % 4 * 0x11u, row * P::scales_bytes, prepared * P::scales_bytes,
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

// What numbers of 48 + x / 2 are multiplied by, twice the scale, for two e4m3 codes in the bytes 0 and 1.
__device__ __forceinline__ uint32_t times_of_e4m3(uint32_t codes)
{
    const uint32_t shifted = bytes_by(codes, 0, 0x4140) << 4, sign = shifted & 0x08000800u;

    return bf16_multiply(shifted + sign * 15, 0x7c007c00u); // 2^121
}

// The same for e8m0, but 2^-10 of it, so that 48 times as much is finite.
__device__ __forceinline__ uint32_t times_of_e8m0(uint32_t codes)
{
    return bf16_multiply(bytes_by(codes, 0, 0x4140) << 7, 0x3b003b00u); // 2^-9
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

// Of 16 of the 64 inputs that two words are for, of mxfp4 the first alone.
template <operand type> __device__ __forceinline__ packed_factor factor_of(const uint32_t (&words)[2], int32_t sixteen)
{
    const uint32_t word = words[type == OPERAND_MXFP4 ? 0 : sixteen / 2], plus = bf16_multiply(word, 0xc240c240u); // -48
    const bool is_high = (type == OPERAND_MXFP4 ? sixteen / 2 : sixteen % 2) != 0;

    if (type == OPERAND_INT4) return {twice<false>(word), twice<true>(word)};
    return is_high ? packed_factor{twice<true>(word), twice<true>(plus)} : packed_factor{twice<false>(word), twice<false>(plus)};
}

// What 64 inputs of both weight rows are decoded from.
template <class P> struct packed_part {
    static constexpr int words_count = P::type == OPERAND_MXFP4 ? 1 : 2;
    uint4 codes[2][2]; // of a row, 32 inputs each
    uint32_t scales[2][2];
};

template <class P>
__device__ __forceinline__ void read_part(const packed_rows &rows, const stage_ring &ring, gemm_smem<P> &smem, int32_t part, packed_part<P> &to)
{
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        const unsigned char *scales = scales_in<P>(smem, ring) + rows.scales + i * 8 * P::scales_bytes;
        const unsigned char *row = ring.weights(smem) + i * 8 * kRowBytes;

#pragma unroll
        for (int32_t word = 0; word < to.words_count; word++)
            to.scales[i][word] = reinterpret_cast<const uint32_t *>(scales)[part * to.words_count + word];
#pragma unroll
        for (int32_t block = 0; block < 2; block++)
            to.codes[i][block] = *reinterpret_cast<const uint4 *>(row + (rows.codes ^ (part * 2 + block) * 16));
    }
}

// Four times what wgmma and mma take. Of the eight bytes of 16 inputs two are the lane's.
template <class P>
__device__ __forceinline__ void decode_part(const packed_codes &by, const packed_rows &rows, const packed_part<P> &from, uint32_t (&weights)[4][4])
{
#pragma unroll
    for (int32_t i = 0; i < 2; i++)
#pragma unroll
        for (int32_t block = 0; block < 2; block++) {
            const uint4 &codes = from.codes[i][block];
            const uint32_t own[2] = {bytes_by(codes.x, codes.y, rows.lane_bytes), bytes_by(codes.z, codes.w, rows.lane_bytes)};

#pragma unroll
            for (int32_t n = 0; n < 2; n++) {
                uint32_t(&to)[4] = weights[block * 2 + n];

                decode_four<P::type>(by, own[n], factor_of<P::type>(from.scales[i], block * 2 + n), to[i], to[2 + i]);
            }
        }
}

} // namespace

#endif
