// Scales of packed weights, from memory to what codes are multiplied by, in shared memory. Included by gemm_packed.cuh and gemm_load.cuh.

#ifndef MOXIE_KERNELS_CUDA_GEMM_PACKED_SCALE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_PACKED_SCALE_CUH

#include "kernels/cuda/gemm_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// Of the weight row that is number `row` of the tile.
template <class P> __device__ __forceinline__ const unsigned char *packed_row_scales(const gemm_args &args, const tile &t, int32_t row)
{
    const two_rows two = find_rows_of<P>(args, t, row / 16 * 16, row % 8);

    return scales_of_row(args.packed, t.expert, row % 16 < 8 ? two.low : two.high);
}

// A loading thread's rows of a tile, every 128th.
template <class P> struct loaded_scales {
    static constexpr int rows = P::is_packed ? P::rows / 128 : 1;
    const unsigned char *from[rows];
    uint4 pieces[rows][kScalesRaw / 16 + 1]; // wide: what has been asked for, with what lies beside it in 16 bytes
};

// ---- Of a stage, by the warp that multiplies the row -------------------------------------------

template <class P> __device__ __forceinline__ unsigned char *stage_scales(gemm_smem<P> &smem, const stage_ring &ring)
{
    return ring.weights(smem) + ring.bytes - kRows * P::scales_bytes;
}

// A step's, as they are, with what lies beside them in 16 bytes. Past the row's end, zeros.
template <class P>
__device__ __forceinline__ void copy_scales(const packed_scales &by, gemm_smem<P> &smem, const stage_ring &ring, const loaded_scales<P> &rows, int32_t step)
{
    constexpr int32_t most = (P::type == OPERAND_INT4 ? 32 : 16) + 16; // a step's, and what may lie before them
    const scales_span span(by, rows.from[0], step * by.step_bytes, by.step_bytes);
    const uint32_t to = smem_address(stage_scales<P>(smem, ring)) + threadIdx.x % 128 * P::scales_bytes;

#pragma unroll
    for (int32_t at = 0; at < most; at += 16)
        span.copy(to, at);
}

// Where a lane prepares half the scales of a row: bytes from the begin of a stage's, and where they begin, of 16 bytes.
struct prepared_scales {
    int32_t row, low;
};

template <class P> __device__ __forceinline__ prepared_scales find_prepared(const gemm_args &args, const tile &t, int32_t row)
{
    return {row * P::scales_bytes, static_cast<int32_t>(reinterpret_cast<uintptr_t>(packed_row_scales<P>(args, t, row)) & 15)};
}

// A step's: 8 bytes for 64 inputs of a row, of mxfp4 4.
template <class P>
__device__ __forceinline__ void prepare_scales(const packed_scales &by, const prepared_scales &own, const stage_ring &ring, gemm_smem<P> &smem,
                                               int32_t step)
{
    prepare_row<P::type, 1>(by.scale_format, stage_scales<P>(smem, ring) + own.row, (own.low + step * by.step_bytes) & 15);
}

// ---- Wide tiles: of a slot, by the loading threads, which have fewer tokens to copy for each weight

// Where in a slot 16 bytes of a row are: those of eight rows in banks of their own.
__device__ __forceinline__ int32_t slot_at(int32_t row, int32_t piece)
{
    return row * kScalesRow + ((piece ^ row / 2) & 3) * 16;
}

template <class P> __device__ __forceinline__ unsigned char *slot_scales(gemm_smem<P> &smem, const slot_ring &slots)
{
    return smem.stages + gemm_smem<P>::stages_bytes + slots.slot * smem.slot_bytes;
}

// Where a slot's barriers are among those of the stages.
__device__ __forceinline__ int32_t barrier_of(const slot_ring &slots)
{
    return kStagesMax + slots.slot;
}

// Steps that share a slot, a power of two. A tile's first one begins a slot, and its last one ends it.
template <class P> __device__ __forceinline__ int32_t slot_steps(const packed_scales &by)
{
    return P::type == OPERAND_MXFP4 ? 4 : P::type == OPERAND_INT4 && by.scale_format == FORMAT_F32 ? 1 : 2;
}

template <class P> __device__ __forceinline__ bool begins_slot(const packed_scales &by, int32_t step)
{
    return (step & (slot_steps<P>(by) - 1)) == 0;
}

template <class P> __device__ __forceinline__ bool ends_slot(const packed_scales &by, int32_t step, int32_t steps)
{
    return step + 1 == steps || begins_slot<P>(by, step + 1);
}

// Word `i` of what codes are multiplied by, of 32 scales.
template <class P> __device__ __forceinline__ uint32_t made_of(const uint32_t (&codes)[8], int32_t i)
{
    if constexpr (P::in_pieces) return times_in_pieces(codes[i / 2], i % 2 != 0);
    return times_of<P::type>(codes[i / 2], i % 2 != 0);
}

// From byte `begin` of the rows' on; past the end of them, whatever follows in 16 bytes.
template <class P> __device__ __forceinline__ void ask_scales(const packed_scales &by, loaded_scales<P> &to, int32_t begin)
{
#pragma unroll
    for (int32_t i = 0; i < to.rows; i++) {
        const scales_span span(by, to.from[i], begin, kScalesRaw);

#pragma unroll
        for (int32_t piece = 0; piece < kScalesRaw / 16 + 1; piece++)
            if (piece * 16 < span.end) to.pieces[i][piece] = __ldg(reinterpret_cast<const uint4 *>(span.first - span.before) + piece);
    }
}

// The bytes that begin `before` bytes into three times 16, of which the first `valid` are scales: zeros instead of the others, because what
// they are multiplied by are zeros, too.
__device__ __forceinline__ void align_scales(const uint4 (&from)[3], int32_t before, int32_t valid, uint32_t (&to)[8])
{
    uint32_t words[12] = {from[0].x, from[0].y, from[0].z, from[0].w, from[1].x, from[1].y, from[1].z, from[1].w, from[2].x, from[2].y, from[2].z, from[2].w};

    if (before != 0) { // of most weights it is 0, and warps that decode have the time that this takes
#pragma unroll
        for (int32_t i = 0; i < 10; i++)
            words[i] = before & 8 ? words[i + 2] : words[i];
#pragma unroll
        for (int32_t i = 0; i < 9; i++)
            words[i] = before & 4 ? words[i + 1] : words[i];
#pragma unroll
        for (int32_t i = 0; i < 8; i++)
            words[i] = shifted_by(words[i], words[i + 1], before % 4 * 8);
    }
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        to[i] = words[i];
    if (valid >= kScalesRaw) return;
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        to[i] = valid >= i * 4 + 4 ? to[i] : valid <= i * 4 ? 0 : to[i] & ((1u << valid % 4 * 8) - 1);
}

template <int words, class Word> __device__ __forceinline__ void store_words(unsigned char *slot, int32_t row, const Word &word)
{
#pragma unroll
    for (int32_t i = 0; i < words; i += 4)
        *reinterpret_cast<uint4 *>(slot + slot_at(row, i / 4)) = {word(i), word(i + 1), word(i + 2), word(i + 3)};
}

// Of an int4 scale.
template <class P> __device__ __forceinline__ uint32_t made_of_number(float scale)
{
    return P::scales_sums ? __float_as_uint(scale) : split(scale);
}

// Of number `i` of 16 bits each.
template <class P, bool is_bf16> __device__ __forceinline__ uint32_t made_of_half(const uint32_t (&halves)[8], int32_t i)
{
    const float2 two = number_unpack<is_bf16>(halves[i / 2]);

    return made_of_number<P>(i % 2 != 0 ? two.y : two.x);
}

// What was asked for, as what codes or sums are multiplied by.
template <class P>
__device__ __forceinline__ void store_scales(const packed_scales &by, gemm_smem<P> &smem, const slot_ring &slots, const loaded_scales<P> &from, int32_t begin)
{
    const int32_t row = threadIdx.x % 128;

#pragma unroll
    for (int32_t i = 0; i < from.rows; i++) {
        unsigned char *slot = slot_scales<P>(smem, slots) + i * 128 * kScalesRow;
        uint32_t codes[8];

        align_scales(from.pieces[i], scales_span(by, from.from[i], begin, kScalesRaw).before, by.row_bytes - begin, codes);
        if (P::type != OPERAND_INT4)
            store_words<16>(slot, row, [&](int32_t word) { return made_of<P>(codes, word); });
        else if (by.scale_format == FORMAT_BF16)
            store_words<16>(slot, row, [&](int32_t word) { return made_of_half<P, true>(codes, word); });
        else if (by.scale_format == FORMAT_F16)
            store_words<16>(slot, row, [&](int32_t word) { return made_of_half<P, false>(codes, word); });
        else
            store_words<8>(slot, row, [&](int32_t word) { return made_of_number<P>(__uint_as_float(codes[word])); });
    }
}

} // namespace

#endif
