// Tiles of gate_up with e2m1 or int4 weights and few tokens, multiplied as fp8 (pieces.cuh). Included by gemm.cu alone.
//
// A stage has 128 bytes of each weight row, 256 inputs, and of each token row numbers of 128 of them, their rest, and both of the other 128.
// A number and its rest go to the same sums, of 32 inputs, which have one scale in a weight row.

#ifndef MOXIE_KERNELS_CUDA_GEMM_PIECES_CUH
#define MOXIE_KERNELS_CUDA_GEMM_PIECES_CUH

#include "kernels/cuda/gemm_packed.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// Lane n's: what sums of the tile's token n are multiplied by, up to 32.
template <class P> __device__ __forceinline__ float find_token_scale(const gemm_args &args, const tile &t)
{
    const int32_t pair = t.pair + min(static_cast<int32_t>(threadIdx.x % 32), t.tokens - 1);
    const int64_t row = args.row_of_pair != nullptr ? __ldcg(&args.row_of_pair[pair]) : pair;

    static_assert(P::columns <= 32);
    return __ldcg(reinterpret_cast<const float *>(args.rows + row * args.rows_stride_bytes + back_at(args.depth)));
}

template <int N, class P> __device__ __forceinline__ void scale_tokens(float own, float (&sums)[N / 2])
{
    constexpr float rest = P::type == OPERAND_INT4 ? kInt4Rest : 1.0f; // apart: the scale alone may be as large as an fp32

#pragma unroll
    for (int32_t n = 0; n < N; n += 8)
#pragma unroll
        for (int32_t i = 0; i < 2; i++) {
            const float scale = __shfl_sync(~0u, own, n + threadIdx.x % 4 * 2 + i);

            sums[n / 2 + i] = sums[n / 2 + i] * scale * rest;
            sums[n / 2 + 2 + i] = sums[n / 2 + 2 + i] * scale * rest;
        }
}

template <int N, class P>
__device__ __forceinline__ void multiply_pieces(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring,
                                                float (&sums)[N / 2])
{
    constexpr int next_piece = N * kRowBytes >> 4;
    constexpr bool is_e5m2 = P::type == OPERAND_MXFP4;
    const packed_rows rows = find_packed_rows<P>(args, t, warpgroup);
    const float token_scale = find_token_scale<P>(args, t);
    float part_sums[N / 2] = {};

    each_wide_block<P>(args, smem, rows, ring, [&](uint32_t tokens, const packed_part<P> &read, int32_t part, int32_t block) {
        const uint32_t numbers = tokens + part / 2 * 2 * next_piece + (part % 2 * 2 + block) * wgmma_next_inputs<false>;
        uint32_t weights[1][4];

        decode_in_pieces<is_e5m2>(read.codes[block * 2], weights[0][0], weights[0][2]);
        decode_in_pieces<is_e5m2>(read.codes[block * 2 + 1], weights[0][1], weights[0][3]);
        wgmma_fence_registers(weights);
        wgmma_pieces<N, is_e5m2, 0>::run(part_sums, weights[0], numbers);
        wgmma_pieces<N, is_e5m2, 1>::run(part_sums, weights[0], numbers + next_piece);
        wgmma_commit();
        wgmma_wait<0>();
        add_scaled<N>(part_sums, scales_of_rows(read, block), sums);
    });
    scale_tokens<N, P>(token_scale, sums);
}

} // namespace

#endif
