// mid of fp8 on its way out of gate_up: 128 units of a token as e4m3 with one scale, with the bits of quantise. Gate and up of 128
// units are two tiles, one after the other; the first one's outputs wait in shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_QUANTISE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_QUANTISE_CUH

#include "kernels/cuda/gemm_many.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/quantise.cuh"

namespace {

// The first unit of a tile's 128.
__device__ __forceinline__ int32_t first_quantised(const gemm_args &args, const tile &t)
{
    if (args.order == ORDER_PLAIN) return t.row_tile * kQuantised;
    return (t.row_tile - is_second(t)) * kBlockRows;
}

__device__ __forceinline__ float *scale_at(const gemm_args &args, const tile &t, int32_t first, int32_t token)
{
    return args.out_scales + first / kQuantised * args.out_group_stride + t.pair + token;
}

// ---- Halves that two blocks have ---------------------------------------------------------------

template <class P> __device__ __forceinline__ int32_t place_of(const gemm_smem<P> &smem, const tile &t, int32_t token)
{
    return t.row_tile / 2 * smem.pairs_count + t.pair + token;
}

__device__ __forceinline__ unsigned char *half_at(const gemm_halves &halves, int32_t place, bool second)
{
    return halves.rows + (place * 2 + second) * kHalfBytes;
}

// What says of a half that it is there: by launch, since one whose blocks saw other ids each may leave a half that no other meets. Never 0.
__device__ __forceinline__ uint32_t mark_of(const gemm_halves &halves)
{
    return __ldcg(halves.launch) | 1;
}

// What this thread, and those it has met, left of its half is there for the other block; whether that has left its own.
__device__ __forceinline__ bool meet_other(const gemm_halves &halves, int32_t place, uint32_t mark)
{
    uint32_t there;

    fence_device();
    there = atomicExch(&halves.there[place], mark);
    fence_device();
    return there == mark;
}

// ---- Tokens on N -------------------------------------------------------------------------------

// Where eight units of a token were kept: of gate and up each warpgroup had every other 32 of them, of one matrix one half.
template <class P>
__device__ __forceinline__ const unsigned char *kept_at(const gemm_args &args, const gemm_smem<P> &smem, int32_t token, int32_t unit)
{
    const bool plain = args.order == ORDER_PLAIN;
    const int32_t warpgroup = plain ? unit / 64 : unit / 32 % 2, output = plain ? unit % 64 : unit / 64 * 32 + unit % 32;

    return smem.turned + warpgroup * smem.turned_pitch + token * kTurnPitch + output * 2;
}

// What was kept of one half, for the block that has the other; whether that came first.
template <class P> __device__ __forceinline__ bool exchange_kept(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t thread)
{
    constexpr int32_t pieces = kHalfBytes / 16;
    const int32_t first_place = place_of<P>(smem, t, 0);
    const uint32_t mark = mark_of(args.halves); // on its way meanwhile

    for (int32_t i = thread; i < t.tokens * pieces; i += 256) {
        const int32_t token = i / pieces, piece = i % pieces;
        uint4 *own = reinterpret_cast<uint4 *>(half_at(args.halves, first_place + token, is_second(t)));

        own[piece] = *reinterpret_cast<const uint4 *>(kept_at<P>(args, smem, token, is_second(t) * kBlockRows + piece * 8));
    }
    bar_sync<4, 256>();
    if (thread == 0) smem.other_is_there = meet_other(args.halves, first_place, mark);
    bar_sync<4, 256>();
    return smem.other_is_there;
}

// By the two warpgroups that kept them: half a warp a token.
template <class P> __device__ __forceinline__ void quantise_kept(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup)
{
    const int32_t lane = threadIdx.x % 16, unit = lane * kFp8Lane, first = first_quantised(args, t);
    const bool is_there = unit < kBlockRows || args.order == ORDER_PLAIN || t.part != TILE_WHOLE;
    const unsigned char *other = nullptr; // of the first token

    bar_sync<4, 256>();
    if (t.part == TILE_APART) {
        if (!exchange_kept<P>(args, smem, t, warpgroup * 128 + threadIdx.x % 128)) return;
        if (unit / kBlockRows != is_second(t)) other = half_at(args.halves, place_of<P>(smem, t, 0), !is_second(t)) + unit % kBlockRows * 2;
    }
    for (int32_t token = (warpgroup * 128 + threadIdx.x % 128) / 16; token / 2 * 2 < t.tokens; token += 16) {
        float values[kFp8Lane];
        uint4 words = {};
        fp8_eight coded;

        if (other != nullptr)
            words = __ldcg(reinterpret_cast<const uint4 *>(other + min(token, t.tokens - 1) * 2 * kHalfBytes));
        else if (is_there)
            words = *reinterpret_cast<const uint4 *>(kept_at<P>(args, smem, token, unit));
        unpack_8(words, true, values);
        coded = fp8_code(values, fp8_largest(words, true));
        if (token >= t.tokens) continue;
        if (first + unit < args.outputs)
            store_pair(args, args.out + (t.pair + token) * args.out_stride_bytes + first + unit, coded.codes);
        if (lane == 0) *scale_at(args, t, first, token) = coded.scale;
    }
    bar_sync<4, 256>(); // both have read
}

// ---- Tokens on M -------------------------------------------------------------------------------

// A lane's outputs of two tokens, r and r + 8 of the warp's, two units of each eight: (group of eight, token) in turns.
template <int count> struct lane_words {
    uint32_t of[count];
};

// The largest magnitude of each token, among all lanes that have its units.
template <int count> __device__ __forceinline__ uint32_t largest_words(const lane_words<count> &words)
{
    uint32_t low = 0, high = 0;

#pragma unroll
    for (int32_t i = 0; i < count; i += 2) {
        low = __vmaxu2(low, words.of[i] & 0x7fff7fffu);
        high = __vmaxu2(high, words.of[i + 1] & 0x7fff7fffu);
    }
    return max(low & 0xffffu, low >> 16) | max(high & 0xffffu, high >> 16) << 16;
}

// Into rows of the warp's buffer, from unit `first` on.
template <int count>
__device__ __forceinline__ void code_lane_words(const lane_words<count> &words, const fp8_scaling (&by)[2], unsigned char *buffer, int32_t first)
{
    const int32_t lane = threadIdx.x % 32;

#pragma unroll
    for (int32_t half = 0; half < 2; half++) {
        unsigned char *row = buffer + (lane / 4 + half * 8) * kTurnPitch + first + lane % 4 * 2;

#pragma unroll
        for (int32_t i = 0; i < count; i += 8) {
            float values[kFp8Lane];
            uint2 codes;

            unpack_8({words.of[i + half], words.of[i + half + 2], words.of[i + half + 4], words.of[i + half + 6]}, true, values);
            codes = fp8_codes(values, by[half].inverse);
            *reinterpret_cast<uint16_t *>(row + i * 4) = static_cast<uint16_t>(codes.x);
            *reinterpret_cast<uint16_t *>(row + i * 4 + 8) = static_cast<uint16_t>(codes.x >> 16);
            *reinterpret_cast<uint16_t *>(row + i * 4 + 16) = static_cast<uint16_t>(codes.y);
            *reinterpret_cast<uint16_t *>(row + i * 4 + 24) = static_cast<uint16_t>(codes.y >> 16);
        }
    }
}

// A warp's own half, for the block that has the other; whether that came first, and then what it left.
template <class P>
__device__ __forceinline__ bool exchange_words(const gemm_halves &halves, const gemm_smem<P> &smem, const tile &t, int32_t token,
                                               const lane_words<16> &own, lane_words<16> &other)
{
    constexpr int32_t eight_on = 8 * 2 * kHalfBytes / 4, half_words = kHalfBytes / 4;
    const int32_t lane = threadIdx.x % 32, place = place_of<P>(smem, t, token), tokens = t.tokens - token - lane / 4;
    uint32_t *words = reinterpret_cast<uint32_t *>(half_at(halves, place + lane / 4, is_second(t))) + lane % 4;
    const uint32_t mark = mark_of(halves); // on its way meanwhile
    int32_t is_there = 0;

    if (uniform(t.tokens - token) <= 0) return false;
#pragma unroll
    for (int32_t i = 0; i < 16; i++)
        if (i % 2 * 8 < tokens) words[i / 2 * 4 + i % 2 * eight_on] = own.of[i];
    __syncwarp();
    if (lane == 0) is_there = meet_other(halves, place, mark);
    if (__shfl_sync(~0u, is_there, 0) == 0) return false;
    words += is_second(t) ? -half_words : half_words;
#pragma unroll
    for (int32_t i = 0; i < 16; i++)
        if (i % 2 * 8 < tokens) other.of[i] = __ldcg(&words[i / 2 * 4 + i % 2 * eight_on]);
    return true;
}

template <class P, bool gated, bool bare>
__device__ __forceinline__ void finish_many_quantised_as(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, const many_sums &sums)
{
    constexpr int eight = gated ? 16 : 8; // weight rows of eight units
    const int32_t lane = threadIdx.x % 32, token = warp_token(warpgroup);
    const int32_t first = first_quantised(args, t);
    const bool second = gated && is_second(t), both = gated && t.part != TILE_WHOLE;
    unsigned char *buffer = warp_buffer<P>(smem, warpgroup);
    uint32_t *kept = reinterpret_cast<uint32_t *>(buffer) + lane;
    lane_words<2 * kRows / eight> own;
    lane_words<16> other = {};
    fp8_scaling by[2];
    uint32_t largest;

#pragma unroll
    for (int32_t n = 0; n < kRows; n += eight) {
        float2 bias[2];

        find_bias<P, gated, bare>(args, t, t.row_tile * (kRows / eight * 8) + n / eight * 8 + lane % 4 * 2, bias);
        own.of[n / eight * 2] = finish_two<P, gated, bare>(args, sums, n, 0, bias);
        own.of[n / eight * 2 + 1] = finish_two<P, gated, bare>(args, sums, n, 1, bias);
    }
    if (gated && t.part == TILE_FIRST) {
#pragma unroll
        for (int32_t i = 0; i < 16; i++)
            kept[i * 32] = own.of[i];
        return;
    }
    if constexpr (gated) {
        if (t.part == TILE_SECOND) {
#pragma unroll
            for (int32_t i = 0; i < 16; i++)
                other.of[i] = kept[i * 32];
        }
        if (t.part == TILE_APART && !exchange_words<P>(args.halves, smem, t, token, own, other)) return;
    }
    largest = __vmaxu2(largest_words(own), largest_words(other));
    largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = __vmaxu2(largest, __shfl_xor_sync(~0u, largest, 2)); // and all have read what was kept
    by[0] = fp8_scaling_of(__uint_as_float(largest << 16));
    by[1] = fp8_scaling_of(__uint_as_float(largest & 0xffff0000u));
    code_lane_words(own, by, buffer, second ? kBlockRows : 0);
    if (both) code_lane_words(other, by, buffer, second ? 0 : kBlockRows);
    store_rows<P>(args, smem, t, warpgroup, first);
#pragma unroll
    for (int32_t half = 0; half < 2; half++)
        if (lane % 4 == 0 && token + lane / 4 + half * 8 < t.tokens) *scale_at(args, t, first, token + lane / 4 + half * 8) = by[half].scale;
}

template <class P>
__device__ __forceinline__ void finish_many_quantised(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, const many_sums &sums)
{
    if (args.order == ORDER_PLAIN)
        finish_many_quantised_as<P, false, false>(args, smem, t, warpgroup, sums);
    else if (args.is_bare)
        finish_many_quantised_as<P, true, true>(args, smem, t, warpgroup, sums);
    else
        finish_many_quantised_as<P, true, false>(args, smem, t, warpgroup, sums);
}

} // namespace

#endif
