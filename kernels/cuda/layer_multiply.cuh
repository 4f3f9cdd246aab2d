// What becomes of the stages of a whole layer in one launch: products, mid, results. Included by layer.cu alone.

#ifndef MOXIE_KERNELS_CUDA_LAYER_MULTIPLY_CUH
#define MOXIE_KERNELS_CUDA_LAYER_MULTIPLY_CUH

#include "kernels/cuda/layer_jobs.cuh"
#include "kernels/cuda/layer_load.cuh"
#include "kernels/cuda/layer_packed.cuh"

namespace {

// ---- Multiplying -------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t word_of(const uint4 &words, int32_t index)
{
    return index == 0 ? words.x : index == 1 ? words.y : index == 2 ? words.z : words.w;
}

// Half a unit of 16 rows, of which a lane has 16 bytes of rows r and r + 8, times its token's inputs.
template <class P> __device__ __forceinline__ void multiply_half(const uint4 &low, const uint4 &high, const uint4 *inputs, float (&sums)[4])
{
    const uint4 b = inputs[0];

    if constexpr (!P::is_scaled) {
        mma<P::multiplies_bf16>(sums, {low.x, high.x, low.y, high.y}, b.x, b.y);
        mma<P::multiplies_bf16>(sums, {low.z, high.z, low.w, high.w}, b.z, b.w);
    } else {
        const uint4 more = inputs[4];

#pragma unroll
        for (int32_t word = 0; word < 4; word++) {
            const uint4 &of = word < 2 ? b : more;
            uint32_t a[4];

            e4m3_to_f16(word_of(low, word), a[0], a[2]);
            e4m3_to_f16(word_of(high, word), a[1], a[3]);
            mma<P::multiplies_bf16>(sums, a, word_of(of, word % 2 * 2), word_of(of, word % 2 * 2 + 1));
        }
    }
}

// What a lane multiplies with its rows of a job: of token lane / 4, and the scales of tokens lane % 4 * 2 and the next. Those of another
// token where the job has not that one, whose sums nobody reads.
struct lane_inputs {
    const uint4 *inputs;
    const float *even_scale, *odd_scale;
};

// From stage `stage` on. is_down: operand rows are those of choices, not of tokens.
template <class P, bool is_down>
__device__ __forceinline__ lane_inputs inputs_of(const layer_product &by, const unsigned char *operand, const job &j, int32_t stage)
{
    const int32_t lane = threadIdx.x % 32, r = lane / 4, even = lane % 4 * 2, odd = even + 1, any = __ffs(j.tokens) - 1;
    const unsigned char *at = operand + stage * (P::units * P::pieces * 16);
    auto row = [&](int32_t token) {
        token = j.tokens >> token & 1 ? token : any;
        return is_down ? static_cast<int32_t>(j.choice[token]) : token;
    };
    lane_inputs to = {};

    to.inputs = reinterpret_cast<const uint4 *>(at + row(r) * by.operand_pitch_bytes) + lane % 4;
    if constexpr (P::is_scaled) {
        const float *scales = reinterpret_cast<const float *>(operand + by.scale_offset) + stage * P::units;

        to.even_scale = scales + row(even) * by.scale_pitch;
        to.odd_scale = scales + row(odd) * by.scale_pitch;
    }
    return to;
}

// A lane's 32 bytes of a unit, of rows r and r + 8.
struct lane_weights {
    uint4 low[2], high[2];
};

template <class P> __device__ __forceinline__ lane_weights weights_at(const unsigned char *first, const unsigned char *second)
{
    const auto at = [](const unsigned char *row) { return *reinterpret_cast<const uint4 *>(row); };

    return {{at(first), at(second)}, {at(first + P::half_bytes), at(second + P::half_bytes)}};
}

// What fp8 multiplies a unit's products with: of the rows, and of the tokens.
struct lane_scales {
    const float *rows, *even, *odd;
    int32_t apart; // of the rows', from unit to unit
};

// A unit: two sums in turns, so that products need not wait for each other; of fp8, all at once, scaled.
template <class P>
__device__ __forceinline__ void multiply_unit(const lane_weights &weights, const uint4 *inputs, const lane_scales &scales, int32_t unit, float (&even)[4],
                                              float (&odd)[4])
{
    if constexpr (!P::is_scaled) {
        multiply_half<P>(weights.low[0], weights.high[0], inputs, even);
        multiply_half<P>(weights.low[1], weights.high[1], inputs + P::pieces / 2, odd);
    } else {
        const float low_scale = scales.rows[unit * scales.apart], high_scale = scales.rows[kHalf + unit * scales.apart];
        const float even_scale = scales.even[unit], odd_scale = scales.odd[unit];
        float first[4] = {}, second[4] = {};

        multiply_half<P>(weights.low[0], weights.high[0], inputs, first);
        multiply_half<P>(weights.low[1], weights.high[1], inputs + P::pieces / 2, second);
        even[0] += (first[0] + second[0]) * (even_scale * low_scale);
        even[1] += (first[1] + second[1]) * (odd_scale * low_scale);
        even[2] += (first[2] + second[2]) * (even_scale * high_scale);
        even[3] += (first[3] + second[3]) * (odd_scale * high_scale);
    }
}

// Where a tile's sums have an output: a lane has row lane / 4 of tokens lane % 4 * 2 and the next, then row lane / 4 + 8 of both.
__device__ __forceinline__ int32_t number_of(int32_t row, int32_t token)
{
    return (row % kHalf * 4 + token / 2) * 4 + row / kHalf * 2 + token % 2;
}

// ---- gate_up -----------------------------------------------------------------------------------

__device__ __forceinline__ float bias_at(const layer_product &by, int32_t expert, int32_t row)
{
    if (by.bias == nullptr || row < 0) return 0.0f;
    return number_load(static_cast<const unsigned char *>(by.bias) + expert * by.bias_expert_stride_bytes, row, by.bias_format);
}

// One unit of mid.
template <class P>
__device__ __forceinline__ float end_unit(const layer_args_device &args, const layer_smem &smem, const tile &t, int32_t r, int32_t token, float2 sums)
{
    const job &j = smem.jobs[t.job];
    const tile_rows rows = rows_of_up(args.up, t.group);
    const float2 bias = {bias_at(args.up, j.expert, row_at(args.up, rows.low, r, false)),
                         bias_at(args.up, j.expert, rows.high < 0 ? -1 : row_at(args.up, rows.high, r, true))};
    const float weight = args.weighs_input ? j.weight[token] : 1.0f, gate = sums.x * weight, up = sums.y * weight;

    return args.up.order == ORDER_PLAIN ? activate_plain(gate + bias.x) : activate<false>(args.activation, gate, up, bias);
}

// A tile, of stages from that one on among all of the block's: a lane has unit lane % 8 of token lane / 8, then of the fourth token behind
// that.
template <class P>
__device__ __forceinline__ void end_tile(const layer_args_device &args, const layer_smem &smem, const tile &t, int32_t first)
{
    const int32_t lane = threadIdx.x % 32, r = lane % kHalf;
    const job &j = smem.jobs[t.job];
    uint32_t *mid = mid_half(args, smem, 0) + (t.group * kHalf + r) / 2;

#pragma unroll 1
    for (int32_t token = lane / kHalf; (j.tokens >> (token - lane / kHalf)) != 0; token += 32 / kHalf) {
        const bool is_there = j.tokens >> token & 1;
        float2 sums = {};
        float number = 0.0f, next;

        for (int32_t stage = first; stage < first + args.up.stages; stage++) {
            sums.x += smem.sums[stage % kParts][number_of(r, token)];
            sums.y += smem.sums[stage % kParts][number_of(kHalf + r, token)];
        }
        if (is_there) number = end_unit<P>(args, smem, t, r, token, sums);
        next = __shfl_xor_sync(~0u, number, 1);
        if (is_there && r % 2 == 0) {
            const uint32_t word = number_pack<P::mid_is_bf16>(number, next);

            store_relaxed_device(mid + j.choice[token] * args.up.outputs / 2, word == 0 ? 0x8000u : word);
        }
    }
}
static_assert(kHalf * kTokens == 2 * 32);

// ---- down --------------------------------------------------------------------------------------

template <class P> __device__ __forceinline__ void multiplying_sync()
{
    bar_sync<2, P::multiplying>();
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

// ---- Both --------------------------------------------------------------------------------------

// Where a multiplying warp is. One loop takes it through both products, so that their code is in the cache when down begins.
struct walk {
    int32_t count;  // of the ring
    int32_t next;   // its next stage among all of the block's: those at one place of the ring are its own; past all of them: it has none
    int32_t first;  // stage of the tile, or of these parts of down
    uint32_t round_odd;
    int32_t number; // of the tile
    tile now;
    int32_t added;                            // parts of down, of all outputs so far
    int32_t output, parts_begin, parts_count; // down: 16 outputs of the share, and of their parts (stages of jobs) up to kParts; or several
                                              // times 16, with all of theirs
    float sum;                                // of this thread's output and token
};

// To its next stage of gate_up; false: there is none.
__device__ __forceinline__ bool walk_up(const layer_args_device &args, layer_smem &smem, walk &at)
{
    while (at.now.job >= 0 && at.next >= at.first + args.up.stages) {
        at.first += args.up.stages;
        at.now = tile_at(smem, ++at.number);
    }
    return at.now.job >= 0;
}

__device__ __forceinline__ int32_t parts_of_down(const layer_args_device &args, const layer_smem &smem)
{
    return smem.jobs_count * args.down.stages;
}

// How many times 16 outputs these parts are of.
template <class P> __device__ __forceinline__ int32_t groups_of(int32_t parts_count, int32_t parts)
{
    static_assert(P::groups <= 3);
    return P::groups == 1 || parts == 0 ? 1 : 1 + (parts_count >= 2 * parts) + (parts_count >= 3 * parts);
}

// Which of them a thread has a sum of.
template <class P> __device__ __forceinline__ int32_t group_of()
{
    return P::groups == 1 ? 0 : threadIdx.x / kSums;
}

// What a thread adds of parts that have been multiplied, an output of a token. Who goes on to more of them meets the others first.
template <class P> __device__ __forceinline__ void add_parts(const layer_args_device &args, const layer_smem &smem, walk &at)
{
    static_assert(P::multiplying >= kRows * kTokens);
    const int32_t parts = P::groups == 1 ? at.parts_count : min(at.parts_count, parts_of_down(args, smem));
    const int32_t group = group_of<P>(), token = threadIdx.x / kRows - group * kTokens, row = threadIdx.x % kRows;

    multiplying_sync<P>();
    if (group * parts < at.parts_count && token < args.tokens)
#pragma unroll 4
        for (int32_t part = 0; part < parts; part++)
            at.sum += smem.sums[(smem.down_first + at.added + group * parts + part) % kParts][number_of(row, token)];
}

template <class P> __device__ __forceinline__ void store_result(const layer_args_device &args, const layer_smem &smem, int32_t end, const walk &at)
{
    const int32_t group = group_of<P>(), token = threadIdx.x / kRows - group * kTokens, output = at.output + group * kRows + threadIdx.x % kRows;
    layer_result to;

    if (token >= args.tokens || output >= end) return;
    if (P::groups > 1 && group >= groups_of<P>(at.parts_count, parts_of_down(args, smem))) return;
    to = P::has_slabs ? smem.results[token] : result_of<P>(args, token);
    if (to.y != nullptr) number_store(to.y, output, to.format, (at.sum + bias_of(args, smem, token, output)) * args.scale);
}

// The next outputs, of whose parts those from parts_begin on come now.
template <class P> __device__ __forceinline__ void begin_parts(const layer_args_device &args, const layer_smem &smem, int32_t end, walk &at)
{
    const int32_t parts = parts_of_down(args, smem), left = (end - at.output + kRows - 1) / kRows;
    int32_t count = parts;

    for (int32_t groups = 2; groups <= P::groups && groups <= left && groups * parts <= kParts; groups++)
        count = groups * parts;
    at.parts_count = min(count - at.parts_begin, kParts);
}

// To its next part of down, with all that the block does between parts; false: there is none.
template <class P> __device__ __forceinline__ bool walk_down(const layer_args_device &args, layer_smem &smem, int32_t end, walk &at)
{
    const int32_t parts = parts_of_down(args, smem);

    while (at.output < end && at.next >= at.first + at.parts_count) {
        const int32_t count = at.parts_count;

        add_parts<P>(args, smem, at);
        at.first += count;
        at.added += count;
        at.parts_begin += count;
        if (at.parts_begin >= parts) {
            store_result<P>(args, smem, end, at);
            at.output += groups_of<P>(count, parts) * kRows;
            at.parts_begin = 0;
            at.sum = 0.0f;
        }
        begin_parts<P>(args, smem, end, at);
        if (at.output >= end) break;
        multiplying_sync<P>();
        if (static_cast<int32_t>(threadIdx.x) < count) mbarrier_arrive(&smem.read[(smem.down_first + at.added - count + threadIdx.x) % kParts]);
    }
    return at.output < end;
}

// A part of down: its number among those of its outputs.
struct part_place {
    int32_t group, number, job, stage, output;
};

template <class P> __device__ __forceinline__ part_place place_of(const layer_args_device &args, const layer_smem &smem, const walk &at)
{
    const int32_t parts = parts_of_down(args, smem), index = at.parts_begin + at.next - at.first;
    part_place to = {P::groups == 1 ? 0 : (index >= parts) + (index >= 2 * parts), 0, 0, 0, 0};

    to.number = index - to.group * parts;
    to.job = args.down.by_stages.divide(to.number);
    to.stage = to.number - to.job * args.down.stages;
    to.output = at.output + to.group * kRows;
    return to;
}

// The operand rows of a part, by who multiplies the first outputs with them; who does others meanwhile waits for them.
template <class P> __device__ __forceinline__ void keep_part(const layer_args_device &args, layer_smem &smem, const part_place &part)
{
    if (part.group > 0) {
        mbarrier_wait(&smem.kept[part.number], 0);
        return;
    }
    keep_mid<P>(args, smem, smem.jobs[part.job], part.stage);
    if (P::groups > 1 && part.number < kParts && threadIdx.x % 32 == 0) mbarrier_arrive(&smem.kept[part.number]);
}

// What a stage is multiplied by, and where its sums go.
struct stage_work {
    lane_inputs from;
    int32_t units;
    float even_weight, odd_weight; // of down, of tokens lane % 4 * 2 and the next
    bool has_even, has_odd;
    float *sums;
    packed_work packed;
};

template <class P, bool is_down>
__device__ __forceinline__ stage_work work_of(const layer_args_device &args, layer_smem &smem, const job &j, const tile_rows &rows, int32_t stage, float *sums)
{
    const layer_product &by = is_down ? args.down : args.up;
    const int32_t even = threadIdx.x % 4 * 2, odd = even + 1;
    stage_work to = {};

    to.from = inputs_of<P, is_down>(by, operand_of(by, smem), j, stage);
    to.units = units_of<P>(by.row_bytes - stage * P::row_bytes);
    to.has_even = !is_down || (j.tokens >> even & 1);
    to.has_odd = !is_down || (j.tokens >> odd & 1);
    to.even_weight = is_down ? weight_of(args, j, even) : 1.0f;
    to.odd_weight = is_down ? weight_of(args, j, odd) : 1.0f;
    to.sums = sums + threadIdx.x % 32 * 4;
    if (P::is_packed) to.packed = packed_work_of<P>(by, j.expert, rows, stage);
    return to;
}

// A stage: a lane's sums of the tile over its inputs.
template <class P>
__device__ __forceinline__ float4 multiply_stage(layer_smem &smem, int32_t stage, uint32_t round_odd, bool by_block, const stage_work &work)
{
    const int32_t lane = threadIdx.x % 32, r = lane / 4, chunk = lane % 4 * 2;
    const unsigned char *rows = stage_at<P>(smem, stage) + r * kUnitBytes, *first = rows + (chunk ^ r) * 16, *second = rows + ((chunk + 1) ^ r) * 16;
    const lane_scales scales = {&smem.stage_scale[stage][by_block ? 0 : r], work.from.even_scale, work.from.odd_scale, by_block};
    float even[4] = {}, odd[4] = {};

    mbarrier_wait(&smem.full[stage], round_odd);
    if constexpr (P::is_packed) {
        multiply_packed<P>(stage_at<P>(smem, stage), work.units, work.from.inputs, work.packed, even, odd);
    } else {
#pragma unroll(P::is_scaled ? 2 : 4)
        for (int32_t unit = 0; unit < work.units; unit++)
            multiply_unit<P>(weights_at<P>(first + unit * kHalfUnitBytes, second + unit * kHalfUnitBytes), work.from.inputs + unit * P::pieces, scales, unit,
                             even, odd);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(&smem.empty[stage]);
    if constexpr (P::is_packed)
        return {(even[0] + odd[0]) * work.packed.low_factor, (even[1] + odd[1]) * work.packed.low_factor, (even[2] + odd[2]) * work.packed.high_factor,
                (even[3] + odd[3]) * work.packed.high_factor};
    return {even[0] + odd[0], even[1] + odd[1], even[2] + odd[2], even[3] + odd[3]};
}

// A stage of gate_up has been multiplied: who was last ends the tile.
template <class P> __device__ __forceinline__ void leave_stage(const layer_args_device &args, layer_smem &smem, const walk &at)
{
    const int32_t lane = threadIdx.x % 32;
    uint32_t *summed = &smem.summed[at.number % kTiles];
    uint32_t before = 0;

    __threadfence_block();
    __syncwarp();
    if (lane == 0) before = atomicAdd(summed, 1u);
    if (__shfl_sync(~0u, before, 0) != static_cast<uint32_t>(args.up.stages) - 1) return;
    __threadfence_block();
    end_tile<P>(args, smem, at.now, at.first);
    __syncwarp();
    if (lane != 0) return;
    *summed = 0;
    for (int32_t stage = 0; stage < args.up.stages; stage++)
        mbarrier_arrive(&smem.read[(at.first + stage) % kParts]);
}

template <class P> __device__ __forceinline__ void multiply_all(const layer_args_device &args, layer_smem &smem)
{
    const share of = share_of_down(args);
    const int32_t place = threadIdx.x / 32;
    bool is_down = place >= stages_of<P>(args, smem); // it has no stages
    walk at = {};

    at.count = stages_of<P>(args, smem);
    at.next = is_down ? INT32_MAX : place;
    at.output = of.first;
    begin_parts<P>(args, smem, of.end, at);
    if (!is_down) at.now = tile_at(smem, 0);
    for (;;) {
        stage_work work;
        float4 sums;

        if (!is_down && !walk_up(args, smem, at)) {
            is_down = true;
            if (threadIdx.x == 0) smem.down_first = at.first;
        }
        if (is_down && !walk_down<P>(args, smem, of.end, at)) break;
        if (is_down) {
            const part_place part = place_of<P>(args, smem, at);

            if (at.output == of.first) keep_part<P>(args, smem, part); // for the other outputs, too
            work = work_of<P, true>(args, smem, smem.jobs[part.job], rows_of_down(part.output, of.end), part.stage, smem.sums[at.next % kParts]);
        } else {
            work = work_of<P, false>(args, smem, smem.jobs[at.now.job], rows_of_up(args.up, at.now.group), at.next - at.first, smem.sums[at.next % kParts]);
        }
        sums = multiply_stage<P>(smem, place, at.round_odd, args.up.scales.format == FORMAT_FP8_BLOCK128, work);
        mbarrier_wait(&smem.read[at.next % kParts], at.next / kParts % 2 ^ 1);
        *reinterpret_cast<float4 *>(work.sums) = {work.has_even ? sums.x * work.even_weight : 0.0f, work.has_odd ? sums.y * work.odd_weight : 0.0f,
                                                  work.has_even ? sums.z * work.even_weight : 0.0f, work.has_odd ? sums.w * work.odd_weight : 0.0f};
        if (!is_down) leave_stage<P>(args, smem, at);
        at.next += at.count;
        at.round_odd ^= 1;
    }
}

} // namespace

#endif
