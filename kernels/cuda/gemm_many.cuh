// Tiles of many tokens in e4m3: tokens on wgmma's M and 128 weight rows on its N, so that a thread has two tokens, and two scales
// of them a step to read. With tokens on N it had 32, and shared memory, which feeds wgmma too, had no time for them. A warpgroup
// has 64 tokens: with three of them the tensor core is always busy, because two multiply while one scales. Included by gemm.cu
// alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_MANY_CUH
#define MOXIE_KERNELS_CUDA_GEMM_MANY_CUH

#include "kernels/cuda/gemm_finish.cuh"
#include "kernels/cuda/gemm_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// A warp's sums are 16 tokens x 128 weight rows: a lane has tokens r = lane / 4 and r + 8 of weight rows lane % 4 * 2 and the next
// of each eight, in the order (r, n), (r, n + 1), (r + 8, n), (r + 8, n + 1). Gate and up take turns by eight, so they meet.
struct many_sums {
    float c[kRows / 2];
};

constexpr int kWarpTokens = 16;
constexpr int kWarpBytes = kWarpTokens * kTurnPitch; // of the buffers in which outputs become rows
static_assert(4 * kWarpBytes == 2 * kTurn * kTurnPitch);

template <class P> __device__ __forceinline__ unsigned char *warp_buffer(gemm_smem<P> &smem, int32_t warpgroup)
{
    return smem.turned + warpgroup * smem.turned_pitch + threadIdx.x / 32 % 4 * kWarpBytes;
}

// The warp's first, of the tile.
__device__ __forceinline__ int32_t warp_token(int32_t warpgroup)
{
    return warpgroup * kBlockRows + threadIdx.x / 32 % 4 * kWarpTokens;
}

// This lane's; the other is eight on.
__device__ __forceinline__ int32_t first_token(int32_t warpgroup)
{
    return warp_token(warpgroup) + threadIdx.x % 32 / 4;
}

// The scales of the weight rows as a whole, where they have any. The tile has no row past the last one that is stored.
template <class P> __device__ __forceinline__ void scale_rows(const gemm_args &args, const tile &t, many_sums &sums)
{
    if (args.scales.format == FORMAT_FP8_BLOCK128) return;
#pragma unroll
    for (int32_t n = 0; n < kRows; n += 16)
#pragma unroll
        for (int32_t i = 0; i < 2; i++) {
            float2 whole = find_scales<P>(args, t, find_rows_of<P>(args, t, n, threadIdx.x % 4 * 2 + i)).whole;

            sums.c[n / 2 + i] *= whole.x;
            sums.c[n / 2 + i + 2] *= whole.x;
            sums.c[n / 2 + i + 4] *= whole.y;
            sums.c[n / 2 + i + 6] *= whole.y;
        }
}

template <class P>
__device__ __forceinline__ void multiply_many(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup,
                                              stage_ring &ring, many_sums &sums)
{
    // Every block of 128 weight rows that has one row of the tile has all.
    row_scales<P::is_gate_up> rows = find_scales<P>(args, t, find_rows_of<P>(args, t, 0, 0));
    const int32_t token = (t.pair & 3) + first_token(warpgroup);
    float2 weight = rows.of_block(0), next = {1.0f, 1.0f};
    many_sums part;

#pragma unroll
    for (int32_t i = 0; i < kRows / 2; i++)
        part.c[i] = 0.0f;
    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance()) {
        uint32_t a = wgmma_descriptor(ring.tokens(smem) + warpgroup * kBlockBytes);
        uint32_t b = wgmma_descriptor(ring.weights(smem));
        float low, high;

        // Asked for a step ahead, so that nobody waits for them.
        if (k + P::depth < args.depth && rows.low != nullptr) {
            rows.low++;
            next = rows.of_block(0);
        }
        mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
        low = smem.token_scale[ring.stage][token];
        high = smem.token_scale[ring.stage][token + 8];
        wgmma_fence();
#pragma unroll
        for (int32_t i = 0; i < 4; i++)
            wgmma_e4m3<kRows>::run(part.c, a + i * wgmma_next_inputs<false>, b + i * wgmma_next_inputs<false>, i);
        wgmma_commit();
        wgmma_wait<0>();
        release_stage(smem, ring.stage);
#pragma unroll
        for (int32_t i = 0; i < kRows / 2; i++)
            sums.c[i] += part.c[i] * ((i & 2 ? high : low) * (i & 4 ? weight.y : weight.x));
        weight = next;
    }
    scale_rows<P>(args, t, sums);
}

// The router's weight of each token's input.
__device__ __forceinline__ void weigh_tokens(const gemm_args &args, const tile &t, int32_t token, many_sums &sums)
{
    float weight[2];

#pragma unroll
    for (int32_t half = 0; half < 2; half++)
        weight[half] = token + half * 8 < t.tokens ? args.pair_weight[t.pair + token + half * 8] : 0.0f;
#pragma unroll
    for (int32_t i = 0; i < kRows / 2; i++)
        sums.c[i] *= weight[i / 2 % 2];
}

// The biases of outputs `output` and the next: of gate (x) and up (y) of each, or of the outputs (x).
template <class P, bool gated, bool bare>
__device__ __forceinline__ void find_bias(const gemm_args &args, const tile &t, int32_t output, float2 (&bias)[2])
{
#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        if (bare)
            bias[i] = {};
        else if (gated)
            bias[i] = gate_up_bias(args, t.expert, output + i);
        else
            bias[i].x = args.bias != nullptr && output + i < args.outputs ? bias_at(args, t.expert, output + i) : 0.0f;
    }
}

// A lane's two outputs of token r, or of r + 8, from weight rows n on.
template <class P, bool gated, bool bare>
__device__ __forceinline__ uint32_t finish_two(const gemm_args &args, const many_sums &sums, int32_t n, int32_t half, const float2 (&bias)[2])
{
    const float *c = &sums.c[n / 2 + half * 2];
    float2 out = bare ? float2{c[0], c[1]} : float2{c[0] + bias[0].x, c[1] + bias[1].x};

    if constexpr (gated) {
        bool swapped = args.order == ORDER_UP_GATE;
        float2 low = {c[0], c[1]}, high = {c[4], c[5]}, gate = swapped ? high : low, up = swapped ? low : high;

        out = {activate<bare>(args.activation, gate.x, up.x, bias[0]), activate<bare>(args.activation, gate.y, up.y, bias[1])};
    } else if (P::is_gate_up) {
        out = {activate_plain(out.x), activate_plain(out.y)};
    }
    return number_pack<true>(out.x, out.y);
}

// 128 bytes of outputs of each of the warp's tokens, 16 a lane.
template <class P>
__device__ __forceinline__ void store_rows(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, int32_t output)
{
    constexpr int output_bytes = P::quantises ? 1 : 2;
    const int32_t lane = threadIdx.x % 32, piece = lane % 8 * (16 / output_bytes), token = warp_token(warpgroup);
    unsigned char *buffer = warp_buffer<P>(smem, warpgroup);

    __syncwarp();
#pragma unroll
    for (int32_t row = lane / 8; row < kWarpTokens; row += 4) {
        const uint4 *words = reinterpret_cast<const uint4 *>(buffer + row * kTurnPitch + piece * output_bytes);

        if (token + row >= t.tokens || output + piece >= args.outputs) continue;
        if (!P::is_gate_up && args.result_row != nullptr)
            store_result<true>(args, result_behind(buffer, row), output + piece, *words);
        else
            store_pair(args, args.out + (t.pair + token + row) * args.out_stride_bytes + (output + piece) * output_bytes, *words);
    }
    __syncwarp();
}

// Of the warpgroup's four warps: a tile with tokens on N, before this one, had them read each other's rows of the buffers.
template <class P> __device__ __forceinline__ void many_sync(int32_t warpgroup)
{
    if (warpgroup == 2)
        bar_sync<5, 128>();
    else
        warpgroup_sync<P>(warpgroup);
}

// Rows of 64 outputs at a time, one of each weight row.
template <class P, bool bare>
__device__ __forceinline__ void finish_many_as(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, const many_sums &sums)
{
    const int32_t lane = threadIdx.x % 32, output = t.row_tile * kRows;
    unsigned char *buffer = warp_buffer<P>(smem, warpgroup);
    const uint32_t row = smem_address(buffer) + lane % 16 * kTurnPitch + lane / 16 * 16;
    result_place result = {};

    // Asked for here, kept below: its answer comes while the first columns are packed.
    if (args.result_row != nullptr && lane < kWarpTokens) find_result(args, t, warp_token(warpgroup) + lane, result);
    many_sync<P>(warpgroup);

#pragma unroll
    for (int32_t first = 0; first < kRows; first += 64) {
#pragma unroll
        for (int32_t n = first; n < first + 64; n += 16) {
            uint32_t blocks[4];

#pragma unroll
            for (int32_t i = 0; i < 2; i++) {
                float2 bias[2];

                find_bias<P, false, bare>(args, t, output + n + i * 8 + lane % 4 * 2, bias);
                blocks[i * 2] = finish_two<P, false, bare>(args, sums, n + i * 8, 0, bias);
                blocks[i * 2 + 1] = finish_two<P, false, bare>(args, sums, n + i * 8, 1, bias);
            }
            stmatrix(row + (n - first) * 2, blocks);
        }
        if (first == 0 && lane < kWarpTokens) result_behind(buffer, lane) = result;
        store_rows<P>(args, smem, t, warpgroup, output + first);
    }
}

template <class P>
__device__ __forceinline__ void finish_many(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, const many_sums &sums)
{
    if (args.is_bare)
        finish_many_as<P, true>(args, smem, t, warpgroup, sums);
    else
        finish_many_as<P, false>(args, smem, t, warpgroup, sums);
}

} // namespace

#endif
