// Weights of four bits, multiplied as bf16: decoded on the way from shared memory to the registers that wgmma and mma read their M from.
// Included by gemm.cu and gemm_load.cuh.
//
// A stage has 128 bytes of each weight row, 256 inputs, swizzled. Of a row's 32 inputs lane c of the four that share the row has four bytes,
// 8 c to 8 c + 7, which are what wgmma and mma want of it because the other operand is woven (gemm_weave.cuh). Scales lie behind a stage's
// tokens as bf16 numbers, made by the warp that multiplies the row; where tiles are wide, in slots behind all stages, 64 bytes a row, those of
// one to four steps, made by the loading threads: bf16 numbers, too, or of int4 and few tokens fp32 ones, which sums are multiplied by.

#ifndef MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH
#define MOXIE_KERNELS_CUDA_GEMM_PACKED_CUH

#include "kernels/cuda/gemm_packed_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// ---- By who multiplies -------------------------------------------------------------------------

// Of a warp's sixteen weight rows: this lane's are r and r + 8.
struct packed_rows {
    int32_t matrix_row; // bytes from a stage's begin, of the row that it gives the address of
    int32_t row;        // r
    int32_t slot_steps; // that share a slot, where tiles are wide
    prepared_scales prepared;
};

template <class P> __device__ __forceinline__ packed_rows find_packed_rows(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    const int32_t lane = threadIdx.x % 32, first = warpgroup * kBlockRows + threadIdx.x / 32 % 4 * 16;
    packed_rows rows = {(first + lane % 16) * kRowBytes, first + lane / 4, slot_steps<P>(args.packed), {0, 0}};

    if (!P::is_wide) rows.prepared = find_prepared<P>(args, t, first + lane / 2);
    return rows;
}

// Where those of row r or r + 8 are, for part of a step.
template <class P>
__device__ __forceinline__ const uint32_t *part_scales(gemm_smem<P> &smem, const packed_rows &rows, const stage_ring &ring, int32_t half, int32_t step, int32_t part)
{
    constexpr int32_t words = packed_part<P>::words_count;
    const int32_t row = rows.row + half * 8, first = (P::is_wide ? (step & (rows.slot_steps - 1)) * P::parts + part : part) * words;
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
            to.scales[i][word] = part_scales<P>(smem, rows, ring, i, step, part)[word];
}

// Waits for a step, and prepares what the calling warp decodes of it.
template <class P, bool by_wgmma>
__device__ __forceinline__ void begin_packed_step(const gemm_args &args, gemm_smem<P> &smem, const packed_rows &rows, const stage_ring &ring,
                                                  int32_t step)
{
    mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
    if (by_wgmma) fence_proxy_async(); // copies of threads brought the tokens
    if constexpr (!P::is_wide)
        prepare_scales<P>(args.packed, rows.prepared, ring, smem, step);
    else if (begins_slot<P>(args.packed, step))
        mbarrier_wait(&smem.full[barrier_of(ring.scales)], ring.scales.round_odd);
}

// Gives back what a step has been read from, and its slot of scales with the last that shares it.
template <class P> __device__ __forceinline__ void end_wide_step(const gemm_args &args, gemm_smem<P> &smem, stage_ring &ring, int32_t step, int32_t steps)
{
    release_stage(smem, ring.stage);
    if (!ends_slot<P>(args.packed, step, steps)) return;
    release_stage(smem, barrier_of(ring.scales));
    ring.scales.advance();
}

// A wide tile by wgmma, 32 inputs of the warp's rows at a time, which are half `block` of a part: multiply(tokens, read, part, block), where
// `tokens` describes the step's, waits for what wgmma makes of them, and the other warps decode meanwhile.
template <class P, class Multiply>
__device__ __forceinline__ void each_wide_block(const gemm_args &args, gemm_smem<P> &smem, const packed_rows &rows, stage_ring &ring, const Multiply &multiply)
{
    const int32_t steps = steps_of<P>(args);

    for (int32_t step = 0; step < steps; step++, ring.advance()) {
        const uint32_t tokens = wgmma_descriptor(ring.tokens(smem));

        begin_packed_step<P, true>(args, smem, rows, ring, step);
#pragma unroll
        for (int32_t part = 0; part < P::parts; part++) {
            packed_part<P> read;

            read_part<P>(smem, rows, ring, step, part, read);
#pragma unroll
            for (int32_t block = 0; block < 2; block++)
                multiply(tokens, read, part, block);
        }
        end_wide_step<P>(args, smem, ring, step, steps);
    }
}

// What sums of 32 inputs, half `block` of a part's, are multiplied by, of weight rows r and r + 8.
template <class P> __device__ __forceinline__ float2 scales_of_rows(const packed_part<P> &from, int32_t block)
{
    if constexpr (P::type == OPERAND_INT4) return {__uint_as_float(from.scales[0][block]), __uint_as_float(from.scales[1][block])};
    const float2 low = number_unpack<true>(from.scales[0][0]), high = number_unpack<true>(from.scales[1][0]);

    return block != 0 ? float2{low.y, high.y} : float2{low.x, high.x};
}

template <int N> __device__ __forceinline__ void add_scaled(const float (&part)[N / 2], const float2 &rows, float (&sums)[N / 2])
{
#pragma unroll
    for (int32_t i = 0; i < N / 2; i++)
        sums[i] = fmaf(part[i], i & 2 ? rows.y : rows.x, sums[i]);
}

} // namespace

#endif
