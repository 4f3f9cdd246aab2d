// What becomes of the stages of a whole layer in one launch: products, mid, results. Included by layer.cu alone.

#ifndef MOXIE_KERNELS_CUDA_LAYER_MULTIPLY_CUH
#define MOXIE_KERNELS_CUDA_LAYER_MULTIPLY_CUH

#include "kernels/cuda/layer_jobs.cuh"
#include "kernels/cuda/layer_load.cuh"

namespace {

// ---- Multiplying -------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint4 &words, int32_t index)
{
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Half a unit of 16 rows, of which a lane has 16 bytes of rows r and r + 8, times its token's inputs.
template <class P> __device__ __forceinline__ void multiply_half(const uint4 &low, const uint4 &high, const uint4 *inputs, float (&sums)[4])
{
    constexpr int32_t pieces = P::is_scaled ? 2 : 1;
    uint4 b[pieces] = {};

    if (inputs != nullptr)
#pragma unroll
        for (int32_t i = 0; i < pieces; i++)
            b[i] = inputs[i];
    if constexpr (!P::is_scaled) {
        mma<P::multiplies_bf16>(sums, {low.x, high.x, low.y, high.y}, b[0].x, b[0].y);
        mma<P::multiplies_bf16>(sums, {low.z, high.z, low.w, high.w}, b[0].z, b[0].w);
    } else {
#pragma unroll
        for (int32_t word = 0; word < 4; word++) {
            uint32_t a[4];

            e4m3_to_f16(word_of(low, word), a[0], a[2]);
            e4m3_to_f16(word_of(high, word), a[1], a[3]);
            mma<P::multiplies_bf16>(sums, a, word_of(b[word / 2], word % 2 * 2), word_of(b[word / 2], word % 2 * 2 + 1));
        }
    }
}

// What a lane multiplies with its rows of a job.
struct lane_inputs {
    const uint4 *inputs;                 // of token lane / 4; NULL: zeros
    const float *even_scale, *odd_scale; // of tokens lane % 4 * 2 and the next; NULL: 0
};

// From input `first` on. `row` is the operand row of each token; NULL: its own number.
template <class P>
__device__ __forceinline__ lane_inputs inputs_of(const layer_product &by, const unsigned char *operand, uint32_t tokens, const uint8_t *row, int32_t first)
{
    const int32_t lane = threadIdx.x % 32, r = lane / 4, token = lane % 4 * 2;
    const float *scales = reinterpret_cast<const float *>(operand + by.scale_offset) + first / kFp8Group;
    lane_inputs to = {};

    if (tokens >> r & 1)
        to.inputs = reinterpret_cast<const uint4 *>(operand + (row != nullptr ? row[r] : r) * by.operand_pitch_bytes + first * 2 +
                                                    lane % 4 * (32 / P::element_bytes));
    if (P::is_scaled && tokens >> token & 1) to.even_scale = scales + (row != nullptr ? row[token] : token) * by.scale_pitch;
    if (P::is_scaled && tokens >> token >> 1 & 1) to.odd_scale = scales + (row != nullptr ? row[token + 1] : token + 1) * by.scale_pitch;
    return to;
}

// A unit of bytes, of which `left` are there. Two sums in turns, so that products need not wait for each other.
template <class P>
__device__ __forceinline__ void multiply_unit(const unsigned char *rows, int32_t left, bool has_high, const uint4 *inputs, float (&even)[4], float (&odd)[4])
{
    constexpr int32_t half = P::is_scaled ? 8 : 4; // a unit's inputs, pieces of 16 bytes
    uint4 low[2] = {}, high[2] = {};

#pragma unroll
    for (int32_t i = 0; i < 2; i++) {
        const bool is_there = i * 64 + static_cast<int32_t>(threadIdx.x % 4) * 16 < left;

        if (is_there) low[i] = *reinterpret_cast<const uint4 *>(rows + i * 64);
        if (is_there && has_high) high[i] = *reinterpret_cast<const uint4 *>(rows + kHalf * kRowPitch + i * 64);
    }
    multiply_half<P>(low[0], high[0], inputs, even);
    multiply_half<P>(low[1], high[1], inputs != nullptr ? inputs + half : nullptr, odd);
}

// A stage, of which `left` bytes of each row are there: the tile's sums over its inputs, where one warp leaves them to be added.
template <class P>
__device__ __forceinline__ void multiply_stage(const layer_product &by, layer_smem &smem, const stage_ring &ring, lane_inputs from, int32_t left,
                                               bool has_high, float (&to)[kSums])
{
    const int32_t lane = threadIdx.x % 32, r = lane / 4;
    const bool by_block = by.scales.format == FORMAT_FP8_BLOCK128;
    const unsigned char *rows = stage_at(smem, ring.stage) + r * kRowPitch + lane % 4 * 16;
    const float *scales = &smem.stage_scale[ring.stage][by_block ? 0 : r];
    float even[4] = {}, odd[4] = {}, sums[4] = {};

    mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
#pragma unroll 2
    for (int32_t unit = 0; unit < kRowBytes / kUnitBytes && left > 0; unit++, left -= kUnitBytes, rows += kUnitBytes) {
        multiply_unit<P>(rows, left, has_high, from.inputs, even, odd);
        if (from.inputs != nullptr) from.inputs += P::depth / 8;
        if constexpr (P::is_scaled) {
            const float *scale = scales + (by_block ? unit : 0);
            const float low_scale = scale[0], high_scale = has_high ? scale[kHalf] : 0.0f;
            const float even_scale = from.even_scale != nullptr ? from.even_scale[unit] : 0.0f;
            const float odd_scale = from.odd_scale != nullptr ? from.odd_scale[unit] : 0.0f;

            sums[0] += (even[0] + odd[0]) * (even_scale * low_scale);
            sums[1] += (even[1] + odd[1]) * (odd_scale * low_scale);
            sums[2] += (even[2] + odd[2]) * (even_scale * high_scale);
            sums[3] += (even[3] + odd[3]) * (odd_scale * high_scale);
#pragma unroll
            for (int32_t i = 0; i < 4; i++)
                even[i] = odd[i] = 0.0f;
        }
    }
#pragma unroll
    for (int32_t i = 0; i < 4 && !P::is_scaled; i++)
        sums[i] = even[i] + odd[i];
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&smem.empty[ring.stage]);
    *reinterpret_cast<float4 *>(&to[lane * 4]) = {sums[0], sums[1], sums[2], sums[3]};
}

// Where a tile's sums have an output: a lane has row lane / 4 of tokens lane % 4 * 2 and the next, then row lane / 4 + 8 of both.
__device__ __forceinline__ int32_t number_of(int32_t row, int32_t token)
{
    return (row % kHalf * 4 + token / 2) * 4 + row / kHalf * 2 + token % 2;
}

// ---- gate_up -----------------------------------------------------------------------------------

// The ring is where down's stages begin after it.
template <class P> __device__ __forceinline__ void multiply_up(const layer_args_device &args, layer_smem &smem, stage_ring &ring)
{
    const layer_product &by = args.up;
    const bool has_high = by.order != ORDER_PLAIN;

    if (static_cast<int32_t>(threadIdx.x) / 32 >= args.stages) return; // it has none
    for (int32_t number = 0;; number++) {
        const tile t = tile_at(smem, number);

        if (t.job < 0) break;
        for (int32_t stage = 0; stage < by.stages; stage++, ring.advance()) {
            if (!is_multiplied_by(ring)) continue;
            mbarrier_wait(&smem.read[ring.stage], ring.round_odd ^ 1);
            multiply_stage<P>(by, smem, ring,
                              inputs_of<P>(by, operand_of(args, smem), smem.jobs[t.job].tokens, nullptr, stage * (kRowBytes / P::element_bytes)),
                              by.row_bytes - stage * kRowBytes, has_high, smem.sums[ring.stage]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) mbarrier_arrive(&smem.summed[ring.stage]);
        }
    }
}

__device__ __forceinline__ float bias_at(const layer_product &by, int32_t expert, int32_t row)
{
    if (by.bias == nullptr || row < 0) return 0.0f;
    return number_load(static_cast<const unsigned char *>(by.bias) + expert * by.bias_expert_stride_bytes, row, by.bias_format);
}

// One unit of mid.
template <class P>
__device__ __forceinline__ void end_unit(const layer_args_device &args, const layer_smem &smem, const tile &t, int32_t r, int32_t token, float2 sums)
{
    const job &j = smem.jobs[t.job];
    const tile_rows rows = rows_of_up(args.up, t.group);
    const float2 bias = {bias_at(args.up, j.expert, rows.low + r * rows.apart),
                         bias_at(args.up, j.expert, rows.high < 0 ? -1 : rows.high + r * rows.apart)};
    const int32_t position = j.position[token];
    const float weight = args.weighs_input ? j.weight[token] : 1.0f, gate = sums.x * weight, up = sums.y * weight;
    const float mid = args.up.order == ORDER_PLAIN ? activate_plain(gate + bias.x) : activate<false>(args.activation, gate, up, bias);

    number_store(args.mid + position * args.mid_stride_bytes, t.group * kHalf + r, P::mid_is_bf16 ? FORMAT_BF16 : FORMAT_F16, mid);
}

// By one warp: a lane has unit lane % 8 of tokens lane / 8 and lane / 8 + 4.
template <class P> __device__ __forceinline__ void end_up(const layer_args_device &args, layer_smem &smem)
{
    const int32_t lane = threadIdx.x % 32, r = lane % kHalf, token = lane / kHalf;
    stage_ring ring = {args.stages, 0, 0};
    int32_t number = 0;

    for (;; number++) {
        const tile t = tile_at(smem, number);
        float2 sums[2] = {};

        if (t.job < 0) break;
        for (int32_t stage = 0; stage < args.up.stages; stage++, ring.advance()) {
            const float *from = smem.sums[ring.stage];

            mbarrier_wait(&smem.summed[ring.stage], ring.round_odd);
#pragma unroll
            for (int32_t i = 0; i < 2; i++) {
                sums[i].x += from[number_of(r, token + i * 4)];
                sums[i].y += from[number_of(kHalf + r, token + i * 4)];
            }
            __syncwarp();
            if (lane == 0) mbarrier_arrive(&smem.read[ring.stage]);
        }
#pragma unroll
        for (int32_t i = 0; i < 2; i++)
            if (smem.jobs[t.job].tokens >> (token + i * 4) & 1) end_unit<P>(args, smem, t, r, token + i * 4, sums[i]);
    }
    __syncwarp();
    if (lane == 0 && number > 0) add_release_device(&args.turns->ended, number);
}
static_assert(kHalf * kTokens == 2 * 32);

// ---- down --------------------------------------------------------------------------------------

__device__ __forceinline__ void multiplying_sync()
{
    bar_sync<2, kMultiplying>();
}

// All tiles of gate_up have ended. The last block clears what they were counted in.
__device__ __forceinline__ void await_up(const layer_args_device &args, const layer_smem &smem)
{
    layer_turns *turns = args.turns;

    if (threadIdx.x == 0) {
        while (load_acquire_device(&turns->ended) != static_cast<uint32_t>(tiles_of_up(args, smem)))
            spin_pause(20);
        if (atomicAdd(&turns->left, 1u) == gridDim.x - 1) *turns = {};
    }
    multiplying_sync();
}

// The router's weight of a token's result in a job that it has.
__device__ __forceinline__ float weight_of(const layer_args_device &args, const job &j, int32_t token)
{
    return args.weighs_input ? 1.0f : j.weight[token];
}

// What the biases of a token's experts add to a result.
__device__ __forceinline__ float bias_of(const layer_args_device &args, const layer_smem &smem, int32_t token, int32_t output)
{
    float sum = 0.0f;

    for (int32_t i = 0; i < smem.jobs_count && args.down.bias != nullptr; i++)
        if (smem.jobs[i].tokens >> token & 1)
            sum += weight_of(args, smem.jobs[i], token) * bias_at(args.down, smem.jobs[i].expert, output);
    return sum;
}

// 16 outputs of the share: stages of some jobs at a time, then a thread adds those of its output and token.
template <class P>
__device__ __forceinline__ void multiply_down(const layer_args_device &args, layer_smem &smem, int32_t first, int32_t end, stage_ring &ring)
{
    const layer_product &by = args.down;
    const int32_t rows = min(end - first, kRows), token = threadIdx.x / kRows, row = threadIdx.x % kRows, batch = kParts / by.stages;
    float sum = 0.0f;

    for (int32_t job = 0; job < smem.jobs_count; job += batch) {
        const int32_t jobs = min(batch, smem.jobs_count - job);

        for (int32_t part = 0; part < jobs * by.stages; part++, ring.advance()) {
            if (!is_multiplied_by(ring)) continue;
            const int32_t index = part / by.stages, stage = part - index * by.stages;
            const struct job &j = smem.jobs[job + index];

            multiply_stage<P>(by, smem, ring, inputs_of<P>(by, operand_of(args, smem), j.tokens, j.position, stage * (kRowBytes / P::element_bytes)),
                              by.row_bytes - stage * kRowBytes, rows > kHalf, smem.sums[part]);
        }
        multiplying_sync();
#pragma unroll 4
        for (int32_t i = 0; i < jobs && token < kTokens; i++) {
            const struct job &j = smem.jobs[job + i];
            const float weight = weight_of(args, j, token);
            float of_job = 0.0f;

            for (int32_t part = i * by.stages; part < (i + 1) * by.stages; part++)
                of_job += smem.sums[part][number_of(row, token)];
            if (j.tokens >> token & 1) sum += weight * of_job;
        }
        multiplying_sync();
    }
    if (token < args.tokens && row < rows)
        number_store(args.y + token * args.y_stride_bytes, first + row, args.y_format, (sum + bias_of(args, smem, token, first + row)) * args.scale);
}
static_assert(kMultiplying >= kRows * kTokens);

template <class P> __device__ __forceinline__ void multiply_all(const layer_args_device &args, layer_smem &smem)
{
    const share of = share_of_down(args);
    stage_ring ring = {args.stages, 0, 0};

    multiply_up<P>(args, smem, ring);
    await_up(args, smem);
    keep_rows<P>(args.down, operand_of(args, smem), args.mid, args.mid_stride_bytes, args.tokens * args.top_k, P::mid_is_bf16, threadIdx.x, kMultiplying);
    multiplying_sync();
    for (int32_t first = of.first; first < of.end; first += kRows)
        multiply_down<P>(args, smem, first, of.end, ring);
}

} // namespace

#endif
