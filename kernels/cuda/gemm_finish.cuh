// What becomes of a tile's sums: router weight on the input, bias, activation, 16-bit rows. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_FINISH_CUH
#define MOXIE_KERNELS_CUDA_GEMM_FINISH_CUH

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/gemm_weave.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

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

// Where a warpgroup's outputs become pieces of out's rows: kTurn tokens at a time, in two halves of it that take turns, or of wide tiles in
// one. What is to be quantised is kept there instead, all tokens of it.
template <class P> struct turning {
    gemm_smem<P> *smem;
    unsigned char *buffer;
    int32_t warpgroup;
    int32_t first_token;  // of the tile, where the sums begin
    int32_t end_token;    // of the tile, where they or its tokens end
    int32_t first_output; // of the warpgroup
    int32_t kept_output;  // of what is kept, where the outputs begin
};

// Where this lane's row of a block goes: 8 tokens from n on, a token's 8 outputs from `output` of the warpgroup on.
template <class P> __device__ __forceinline__ unsigned char *turned_at(const turning<P> &to, int32_t n, int32_t output)
{
    return to.buffer + (P::quantises ? n : n % (P::is_wide ? kTurn : 2 * kTurn)) * kTurnPitch + (P::quantises ? to.kept_output + output : output) * 2;
}

template <class P> __device__ __forceinline__ void warpgroup_sync(int32_t warpgroup)
{
    if (P::is_wide && warpgroup == 2)
        bar_sync<4, 128>();
    else if (P::is_wide && warpgroup == 3)
        bar_sync<5, 128>();
    else if (warpgroup == 0)
        bar_sync<2, 128>();
    else
        bar_sync<3, 128>();
}

// Where a pair's result goes. Looked up before a tile's end, by the warp that will store it.
__device__ __forceinline__ void find_result(const gemm_args &args, const tile &t, int32_t token, result_place &to)
{
    const int32_t pair = t.pair + token;

    if (token >= t.tokens) return;
    to = {__ldcg(&args.result_row[pair]), args.result_weight != nullptr ? __ldcg(&args.result_weight[pair]) : 1.0f};
}

// Of the tokens of a warpgroup, a warp stores four of every 16.
template <int N, class P>
__device__ __forceinline__ void find_results(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, int32_t first_token)
{
    if constexpr (!P::is_gate_up) {
        if (args.result_row == nullptr) return;
        for (int32_t i = smem.thread() % 32; i < (N + 15) / 16 * 4; i += 32) {
            int32_t token = i / 4 * 16 + threadIdx.x / 32 % 4 * 4 + i % 4;

            find_result(args, t, first_token + token, smem.result(warpgroup, i));
        }
    }
}

// Eight outputs, 16 bytes, as combine would write them.
template <bool is_bf16>
__device__ __forceinline__ void store_result(const gemm_args &args, const result_place &to, int32_t output, uint4 words)
{
#pragma unroll
    for (uint32_t *word : {&words.x, &words.y, &words.z, &words.w}) {
        float2 two = number_unpack<is_bf16>(*word);

        *word = number_pack<is_bf16>(fmaf(to.weight, two.x, 0.0f) * args.result_scale, fmaf(to.weight, two.y, 0.0f) * args.result_scale);
    }
    *reinterpret_cast<uint4 *>(args.out + to.row * args.out_stride_bytes + output * 2) = words;
}

// Eight units of mid, woven as weights of four bits want it.
__device__ __forceinline__ void store_woven(const gemm_args &args, unsigned char *row, int32_t output, const uint4 &words)
{
    unsigned char *to = row + output / kWovenInputs * kWovenInputs * 2 + output % kWovenInputs / 8 * 4;
    uint32_t woven[4];

    woven_of(words, woven);
#pragma unroll
    for (int32_t i = 0; i < 4; i++)
        store_pair(args, to + i * kWovenBytes, woven[i]);
}

// Tokens n to n + kTurn of the sums leave, `width` outputs of each, 16 bytes a thread, to rows by pair or of the results. The buffer
// may be written again after the next call.
template <int width, bool is_result, class P>
__device__ __forceinline__ void store_turned(const gemm_args &args, const tile &t, const turning<P> &to, int32_t n)
{
    const int32_t pieces = width / 8;

    if (P::quantises) return;
    warpgroup_sync<P>(to.warpgroup);
#pragma unroll
    for (int32_t i = 0; i < kTurn * pieces / 128; i++) {
        int32_t item = i * 128 + threadIdx.x % 128;
        int32_t token = n + item / pieces, output = to.first_output + item % pieces * 8;
        const uint4 *words = reinterpret_cast<const uint4 *>(turned_at(to, token, item % pieces * 8));

        if (to.first_token + token >= to.end_token || output >= args.outputs) continue;
        if (P::is_packed && P::is_gate_up)
            store_woven(args, args.out + (t.pair + to.first_token + token) * args.out_stride_bytes, output, *words);
        else if (is_result)
            store_result<P::is_bf16>(args, to.smem->result(to.warpgroup, token / 16 * 4 + token % 4), output, *words);
        else
            store_pair(args, args.out + (t.pair + to.first_token + token) * args.out_stride_bytes + output * 2, *words);
    }
}

// One unit of two tokens.
template <bool is_bf16, bool bare>
__device__ __forceinline__ uint32_t activate_pair(const gemm_args &args, float2 gate, float2 up, float2 bias)
{
    return number_pack<is_bf16>(activate<bare>(args.activation, gate.x, up.x, bias), activate<bare>(args.activation, gate.y, up.y, bias));
}

// The router's weight of each token's input.
template <int N> __device__ __forceinline__ void weigh(const gemm_args &args, const tile &t, int32_t first_token, float (&c)[N / 2])
{
#pragma unroll
    for (int32_t n = 0; n < N; n += 8) {
        int32_t token = first_token + n + threadIdx.x % 4 * 2;
        float weight = token < t.tokens ? args.pair_weight[t.pair + token] : 0.0f;
        float next = token + 1 < t.tokens ? args.pair_weight[t.pair + token + 1] : 0.0f;

        c[n / 2] *= weight;
        c[n / 2 + 1] *= next;
        c[n / 2 + 2] *= weight;
        c[n / 2 + 3] *= next;
    }
}

// A warp's sums of eight tokens are 16 weight rows: a lane has rows r = lane / 4 and r + 8 of tokens lane % 4 * 2 and the next,
// in the order (r, n), (r, n + 1), (r + 8, n), (r + 8, n + 1). Each finish_ makes outputs of the warp's tokens, kTurn at a time.

// Gate and up take turns by eight rows: a warp has eight units.
template <int N, bool bare, class P>
__device__ __forceinline__ void finish_turns(const gemm_args &args, const tile &t, const turning<P> &to, const float (&c)[N / 2])
{
    const int32_t lane = threadIdx.x % 32, unit = threadIdx.x / 32 % 4 * 8;
    const float2 bias = gate_up_bias(args, t.expert, to.first_output + unit + lane / 4);
    const bool swapped = args.order == ORDER_UP_GATE;

    warpgroup_sync<P>(to.warpgroup); // the buffers have been read
#pragma unroll
    for (int32_t first = 0; first < N; first += kTurn) {
        if (first >= to.end_token) continue;
        if (P::is_wide && first > 0) warpgroup_sync<P>(to.warpgroup); // the only buffer has
#pragma unroll
        for (int32_t n = first; n < first + kTurn && n < N; n += 16) {
            uint32_t packed[2];

#pragma unroll
            for (int32_t i = 0; i < 2; i++) {
                int32_t at = min(n + i * 8, N - 8) / 2; // N 8: twice the same
                float2 low = {c[at], c[at + 1]}, high = {c[at + 2], c[at + 3]};

                packed[i] = activate_pair<P::is_bf16, bare>(args, swapped ? high : low, swapped ? low : high, bias);
            }
            stmatrix_trans(smem_address(turned_at(to, n + lane % 16, unit)), packed[0], packed[1]);
        }
        store_turned<32, false>(args, t, to, first);
    }
}

// Gate and up are the same rows of two blocks: a warp has sixteen units.
template <int N, class P>
__device__ __forceinline__ void finish_blocks(const gemm_args &args, const tile &t, const turning<P> &to, const float (&gate)[N / 2],
                                              const float (&up)[N / 2])
{
    const int32_t lane = threadIdx.x % 32, unit = threadIdx.x / 32 % 4 * 16;
    const float2 bias[2] = {gate_up_bias(args, t.expert, to.first_output + unit + lane / 4),
                            gate_up_bias(args, t.expert, to.first_output + unit + 8 + lane / 4)};

    warpgroup_sync<P>(to.warpgroup); // the buffers have been read
#pragma unroll
    for (int32_t first = 0; first < N; first += kTurn) {
        if (to.first_token + first >= to.end_token) continue;
        if (P::is_wide && first > 0) warpgroup_sync<P>(to.warpgroup); // the only buffer has
#pragma unroll
        for (int32_t n = first; n < first + kTurn && n < N; n += 8) {
            uint32_t packed[2];

#pragma unroll
            for (int32_t half = 0; half < 2; half++) {
                int32_t at = n / 2 + half * 2;

                packed[half] = activate_pair<P::is_bf16, false>(args, {gate[at], gate[at + 1]}, {up[at], up[at + 1]}, bias[half]);
            }
            stmatrix_trans(smem_address(turned_at(to, n + lane % 8, unit + lane / 8 % 2 * 8)), packed[0], packed[1]);
        }
        store_turned<64, false>(args, t, to, first);
    }
}

// Gate and up are neighbouring rows: a warp has eight units. Lanes of row r and r ^ 1 exchange, so that the even one gets unit
// r / 2 and the odd one the unit four further; after the turn a lane has units j and j + 4 of a token, which go to their places
// one by one.
template <int N, class P>
__device__ __forceinline__ void finish_neighbours(const gemm_args &args, const tile &t, const turning<P> &to, const float (&c)[N / 2])
{
    const int32_t lane = threadIdx.x % 32, unit = threadIdx.x / 32 % 4 * 8;
    const bool odd = lane / 4 % 2 != 0;
    const float2 bias = gate_up_bias(args, t.expert, to.first_output + unit + lane / 8 + odd * 4);

    warpgroup_sync<P>(to.warpgroup); // the buffers have been read
#pragma unroll
    for (int32_t first = 0; first < N; first += kTurn) {
        if (to.first_token + first >= to.end_token) continue;
        if (P::is_wide && first > 0) warpgroup_sync<P>(to.warpgroup); // the only buffer has
#pragma unroll
        for (int32_t n = first; n < first + kTurn && n < N; n += 8) {
            float2 low = {c[n / 2], c[n / 2 + 1]}, high = {c[n / 2 + 2], c[n / 2 + 3]}, got;
            uint16_t *row = reinterpret_cast<uint16_t *>(turned_at(to, n + lane / 4, unit));
            uint32_t packed;

            got.x = __shfl_xor_sync(~0u, odd ? low.x : high.x, 4);
            got.y = __shfl_xor_sync(~0u, odd ? low.y : high.y, 4);
            packed = movmatrix_trans(activate_pair<P::is_bf16, false>(args, odd ? got : low, odd ? high : got, bias));
            row[lane % 4] = static_cast<uint16_t>(packed);
            row[lane % 4 + 4] = static_cast<uint16_t>(packed >> 16);
        }
        store_turned<32, false>(args, t, to, first);
    }
}

// Rows are outputs: a warp has sixteen. Results have code of their own, since a tile runs through all of it.
template <int N, bool is_result, class P>
__device__ __forceinline__ void finish_plain(const gemm_args &args, const tile &t, const turning<P> &to, const float (&c)[N / 2])
{
    const int32_t lane = gemm_smem<P>::thread() % 32, output = gemm_smem<P>::thread() / 32 % 4 * 16;
    float bias[2];

#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        int32_t row = to.first_output + output + half * 8 + lane / 4;

        bias[half] = args.bias != nullptr && row < args.outputs ? bias_at(args, t.expert, row) : 0.0f;
    }
    warpgroup_sync<P>(to.warpgroup); // the buffers have been read
#pragma unroll
    for (int32_t first = 0; first < N; first += kTurn) {
        if (to.first_token + first >= to.end_token) continue;
        if (P::is_wide && first > 0) warpgroup_sync<P>(to.warpgroup); // the only buffer has
#pragma unroll
        for (int32_t n = first; n < first + kTurn && n < N; n += 8) {
            uint32_t packed[2];

#pragma unroll
            for (int32_t half = 0; half < 2; half++) {
                float2 out = {c[n / 2 + half * 2] + bias[half], c[n / 2 + half * 2 + 1] + bias[half]};

                if (P::is_gate_up) out = {activate_plain(out.x), activate_plain(out.y)};
                packed[half] = number_pack<P::is_bf16>(out.x, out.y);
            }
            stmatrix_trans(smem_address(turned_at(to, n + lane % 8, output + lane / 8 % 2 * 8)), packed[0], packed[1]);
        }
        store_turned<64, is_result>(args, t, to, first);
    }
}

} // namespace

#endif
