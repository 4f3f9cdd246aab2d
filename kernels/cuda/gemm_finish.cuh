// What becomes of a tile's sums: router weight on the input, bias, activation, 16-bit rows. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_FINISH_CUH
#define MOXIE_KERNELS_CUDA_GEMM_FINISH_CUH

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// erf to 1.5e-7 (Abramowitz and Stegun 7.1.26): far below 16-bit outputs, and short enough to inline everywhere.
__device__ __forceinline__ float erf_short(float x)
{
    float t = __fdividef(1.0f, 1.0f + 0.3275911f * fabsf(x));
    float poly = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));

    return copysignf(1.0f - poly * __expf(-x * x), x);
}

// gate * slope(gate) * up, where the slope is what tells the functions apart.
__device__ __forceinline__ float activate(const gemm_args &args, float gate, float up)
{
    float slope, argument = gate;

    if (args.activation == ACTIVATION_RELU2) return gate > 0.0f ? gate * gate : 0.0f;
    if (args.activation == ACTIVATION_GELU) return gate * (0.5f + 0.5f * erf_short(gate * 0.70710678118654752f)) * up;
    if (args.activation == ACTIVATION_GELU_TANH) argument = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    if (args.activation == ACTIVATION_SWIGLUOAI) {
        if (args.limit > 0.0f) {
            gate = fminf(gate, args.limit);
            up = fminf(fmaxf(up, -args.limit), args.limit);
        }
        argument = args.alpha * gate;
        up += args.beta;
    }
    slope = __fdividef(1.0f, 1.0f + __expf(-argument));
    return gate * slope * up;
}

__device__ __forceinline__ float bias_at(const gemm_args &args, int32_t expert, int64_t row)
{
    const unsigned char *bias = static_cast<const unsigned char *>(args.bias) + expert * args.bias_expert_stride_bytes;

    return number_load(bias, row, args.bias_format);
}

// The bias of gate (x) and up (y) of a unit.
__device__ __forceinline__ float2 gate_up_bias(const gemm_args &args, int32_t expert, int32_t unit)
{
    int64_t gate = unit, up = static_cast<int64_t>(unit) + args.outputs;

    if (args.bias == nullptr || unit >= args.outputs) return {0.0f, 0.0f};
    if (args.order == ORDER_INTERLEAVED) {
        gate = 2 * static_cast<int64_t>(unit);
        up = gate + 1;
    } else if (args.order == ORDER_UP_GATE) {
        gate = up;
        up = unit;
    }
    return {bias_at(args, expert, gate), bias_at(args, expert, up)};
}

// The router's weight of a token's input; 1 where combine applies it.
__device__ __forceinline__ float weight_of(const gemm_args &args, const tile &t, int32_t n)
{
    return args.pair_weight != nullptr && n < t.tokens ? args.pair_weight[t.pair + n] : 1.0f;
}

// Four lanes hold eight outputs of one token: 16 bytes of its row.
__device__ __forceinline__ void store_block(const gemm_args &args, const tile &t, int32_t n, int32_t output, uint32_t packed)
{
    int32_t lane = threadIdx.x % 32;

    n += lane / 4;
    if (n < t.tokens && output < args.outputs)
        *reinterpret_cast<uint32_t *>(args.out + (t.pair + n) * args.out_stride_bytes + (output + lane % 4 * 2) * 2) = packed;
}

// One unit of tokens n and n + 1.
template <bool is_bf16>
__device__ __forceinline__ uint32_t activate_pair(const gemm_args &args, const tile &t, int32_t n, float2 gate, float2 up, float2 bias)
{
    float weight = weight_of(args, t, n), next = weight_of(args, t, n + 1);

    return number_pack<is_bf16>(activate(args, gate.x * weight + bias.x, up.x * weight + bias.y),
                                activate(args, gate.y * next + bias.x, up.y * next + bias.y));
}

// A warp's sums of eight tokens are 16 weight rows: a lane has rows r = lane / 4 and r + 8 of tokens lane % 4 * 2 and the next,
// in the order (r, n), (r, n + 1), (r + 8, n), (r + 8, n + 1). Each finish_ makes eight outputs of eight tokens at a time and
// turns them into pieces of out's rows. `first_token` is the tile's token that the sums begin with.

// Gate and up take turns by eight rows: `first_unit` is the first of the warp's eight.
template <int N, bool is_bf16>
__device__ __forceinline__ void finish_turns(const gemm_args &args, const tile &t, int32_t first_unit, int32_t first_token,
                                             const float (&c)[N / 2])
{
    const int32_t lane = threadIdx.x % 32;
    const float2 bias = gate_up_bias(args, t.expert, first_unit + lane / 4);
    const bool swapped = args.order == ORDER_UP_GATE;

#pragma unroll
    for (int32_t block = 0; block < N / 8; block++) {
        int32_t n = first_token + block * 8;
        float2 low = {c[block * 4], c[block * 4 + 1]}, high = {c[block * 4 + 2], c[block * 4 + 3]};
        uint32_t packed = activate_pair<is_bf16>(args, t, n + lane % 4 * 2, swapped ? high : low, swapped ? low : high, bias);

        store_block(args, t, n, first_unit, movmatrix_trans(packed));
    }
}

// Gate and up are the same rows of two blocks: `first_unit` is the first of the warp's sixteen.
template <int N, bool is_bf16>
__device__ __forceinline__ void finish_blocks(const gemm_args &args, const tile &t, int32_t first_unit, int32_t first_token,
                                              const float (&gate)[N / 2], const float (&up)[N / 2])
{
    const int32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        int32_t unit = first_unit + half * 8;
        float2 bias = gate_up_bias(args, t.expert, unit + lane / 4);

#pragma unroll
        for (int32_t block = 0; block < N / 8; block++) {
            int32_t n = first_token + block * 8, i = block * 4 + half * 2;
            uint32_t packed =
                activate_pair<is_bf16>(args, t, n + lane % 4 * 2, {gate[i], gate[i + 1]}, {up[i], up[i + 1]}, bias);

            store_block(args, t, n, unit, movmatrix_trans(packed));
        }
    }
}

// Gate and up are neighbouring rows: `first_unit` is the first of the warp's eight. Lanes of row r and r ^ 1 exchange, so that
// the even one gets unit r / 2 and the odd one the unit four further; after the turn a lane has units j and j + 4 of a token,
// and the four lanes exchange once more.
template <int N, bool is_bf16>
__device__ __forceinline__ void finish_neighbours(const gemm_args &args, const tile &t, int32_t first_unit, int32_t first_token,
                                                  const float (&c)[N / 2])
{
    const int32_t lane = threadIdx.x % 32;
    const bool odd = lane / 4 % 2 != 0;
    const float2 bias = gate_up_bias(args, t.expert, first_unit + lane / 8 + odd * 4);

#pragma unroll
    for (int32_t block = 0; block < N / 8; block++) {
        int32_t n = first_token + block * 8;
        float2 low = {c[block * 4], c[block * 4 + 1]}, high = {c[block * 4 + 2], c[block * 4 + 3]}, got;
        uint32_t packed, left, right;

        got.x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 4);
        got.y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 4);
        packed = movmatrix_trans(activate_pair<is_bf16>(args, t, n + lane % 4 * 2, odd ? got : low, odd ? high : got, bias));
        left = __shfl_sync(~0u, packed, lane / 4 * 4 + lane * 2 % 4);
        right = __shfl_sync(~0u, packed, lane / 4 * 4 + lane * 2 % 4 + 1);
        packed = lane % 4 < 2 ? (left & 0xffff) | right << 16 : left >> 16 | (right & 0xffff0000);
        store_block(args, t, n, first_unit, packed);
    }
}

// Rows are outputs: `first_output` is the first of the warp's sixteen.
template <int N, bool is_bf16, bool activates>
__device__ __forceinline__ void finish_plain(const gemm_args &args, const tile &t, int32_t first_output, int32_t first_token,
                                             const float (&c)[N / 2])
{
    const int32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        int32_t output = first_output + half * 8;
        int32_t row = output + lane / 4;
        float bias = args.bias != nullptr && row < args.outputs ? bias_at(args, t.expert, row) : 0.0f;

#pragma unroll
        for (int32_t block = 0; block < N / 8; block++) {
            int32_t n = first_token + block * 8;
            float2 out = {c[block * 4 + half * 2], c[block * 4 + half * 2 + 1]};

            if (activates) {
                out.x = activate(args, out.x * weight_of(args, t, n + lane % 4 * 2) + bias, 1.0f);
                out.y = activate(args, out.y * weight_of(args, t, n + lane % 4 * 2 + 1) + bias, 1.0f);
            } else {
                out = {out.x + bias, out.y + bias};
            }
            store_block(args, t, n, output, movmatrix_trans(number_pack<is_bf16>(out.x, out.y)));
        }
    }
}

} // namespace

#endif
