// The args of a whole layer in one launch, the jobs that its ids make, and the rows they multiply. Included by layer.cu alone.

#ifndef MOXIE_KERNELS_CUDA_LAYER_JOBS_CUH
#define MOXIE_KERNELS_CUDA_LAYER_JOBS_CUH

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/weights.cuh"
#include "kernels/layer.h"

namespace {

// A block: warps that multiply, one that ends tiles of gate_up, one that finds them, and four that load.
constexpr int kWarps = 8, kLoaders = 4;
constexpr int kMultiplying = kWarps * 32, kEnding = kMultiplying, kFinding = kEnding + 32, kLoading = kFinding + 32, kThreads = kLoading + kLoaders * 32;
constexpr int kPositions = LAYER_POSITIONS;
constexpr int kTokens = 8;             // at most: N of mma
constexpr int kHalf = 8;               // weight rows of half a tile: gate of as many units, or up; or outputs
constexpr int kRows = 2 * kHalf;       // M of mma
constexpr int kSums = kRows * kTokens; // of a tile
constexpr int kUnitBytes = 128;        // of each row, that a warp multiplies at once
constexpr int kRowBytes = 1024;        // of a row, that a stage has
constexpr int kRowPitch = kRowBytes + 64;      // so that two rows lie in other banks
constexpr int kStageBytes = kRows * kRowPitch;
constexpr int kStagesMost = kWarps, kStagesLeast = 4;
constexpr int kAhead = 2;               // tiles that are found before the one whose stages are asked for
constexpr int kTiles = 32;              // that who finds them may be ahead of who ends them: a tile takes a stage at least
constexpr int kParts = 32;              // stages of down whose sums wait at once
constexpr int kSmemBytes = 232448;      // that a block may have
constexpr int kAheadBytes = 192 << 10;  // of down's weights, that a block asks for while gate_up ends
static_assert(kTiles > kAhead + kLoaders + 2 * kStagesMost + 2 && kParts >= kStagesMost);

// What a kernel is compiled for. e4m3 is multiplied as fp16, which holds every code.
template <operand type> struct product {
    static constexpr bool is_scaled = type == OPERAND_E4M3;
    static constexpr bool multiplies_bf16 = type == OPERAND_BF16;
    static constexpr bool mid_is_bf16 = type != OPERAND_F16;
    static constexpr int element_bytes = is_scaled ? 1 : 2;
    static constexpr int depth = kUnitBytes / element_bytes; // inputs of a unit
    static constexpr int skew_bytes = is_scaled ? 16 : 64;   // behind an operand row, so that two rows lie in other banks
};

// One of the two products, on the device.
struct layer_product {
    const unsigned char *weights;
    int64_t expert_stride_bytes, row_stride_bytes;
    weight_scales scales;
    const void *bias; // NULL: none
    int64_t bias_expert_stride_bytes;
    int32_t bias_format;
    int32_t order;
    int32_t depth;     // K
    int32_t row_bytes; // of K inputs
    int32_t stages;    // of a tile
    int32_t outputs;   // units, or hidden
    int32_t operand_pitch_bytes;
    int32_t scale_offset; // bytes, from the operand rows to their scales, f32 [rows, scale_pitch]
    int32_t scale_pitch;
};

// 0 before each launch, and after it.
struct layer_turns {
    uint32_t taken; // tiles of gate_up
    uint32_t ended; // of those
    uint32_t left;  // blocks that will look at neither again
    uint32_t reserved;
};
static_assert(sizeof(layer_turns) == LAYER_TURNS * sizeof(uint64_t));

struct layer_args_device {
    layer_product up, down;
    activation_terms activation;
    slab_ids ids;
    const unsigned char *router_weights; // NULL: 1
    int64_t router_weight_stride_bytes;
    const unsigned char *x;
    int64_t x_stride_bytes;
    unsigned char *mid; // [tokens * top_k, intermediate] of 16 bits, by position
    int64_t mid_stride_bytes;
    unsigned char *y;
    int64_t y_stride_bytes;
    unsigned long long *load; // NULL: not counted
    layer_turns *turns;
    int32_t router_weight_format, y_format, x_is_bf16;
    int32_t experts, tokens, top_k;
    int32_t weighs_input;    // 1: the router's weight multiplies the input row, 0: the result
    int32_t operand_offset; // bytes, from the stages to the operand rows
    int32_t stages;
    float scale;
};

// An expert and the tokens that chose it, each by one of its choices; a token that chose it twice has two jobs.
struct job {
    int32_t expert;
    uint32_t tokens;            // a bit for each
    uint8_t position[kTokens]; // of the choice, counted over all tokens
    float weight[kTokens];     // the router's
};

// Eight units of a job. `job` -1: there are no more.
struct tile {
    int32_t job, group;
};

struct layer_smem {
    float sums[kParts][kSums]; // of stages
    float stage_scale[kStagesMost][kRows]; // of the weights, first half of the rows and second: by group of 128 inputs, or by row
    uint64_t full[kStagesMost], empty[kStagesMost];
    uint64_t summed[kStagesMost], read[kStagesMost]; // their sums, of gate_up
    tile tiles[kTiles];                     // of gate_up, in turns
    uint64_t found[kTiles], begun[kTiles]; // that they are there, and that their stages are asked for
    int32_t key[kPositions];  // expert * kKeys + how often the token had it before; -1: none
    job jobs[kPositions];
    uint32_t leaders[kPositions / 32]; // a bit for each position that is its job's first
    int32_t jobs_count;
    alignas(16) unsigned char stages[]; // [args.stages][kStageBytes]; then x's rows and scales, later mid's
};

// ---- Jobs --------------------------------------------------------------------------------------

constexpr int32_t kKeys = KERNEL_TOP_K_MAX;

// What does not depend on each other is asked for at once.
__device__ __forceinline__ int32_t expert_of(const layer_args_device &args, int32_t token, int32_t choice, float &weight)
{
    const int32_t expert = expert_in(args.ids, token, choice, args.experts);

    if (args.router_weights != nullptr)
        weight = number_load(args.router_weights + token * args.router_weight_stride_bytes, choice, args.router_weight_format);
    return token < rows_in(args.ids) ? expert : -1;
}

// By the first kPositions threads. Jobs are in the order of their keys, so that a token's do not depend on its batch mates.
__device__ __forceinline__ void find_jobs(const layer_args_device &args, layer_smem &smem)
{
    const int32_t positions = args.tokens * args.top_k, position = threadIdx.x, token = position / args.top_k;
    int32_t expert = -1, key = -1, leader = position, index = 0;
    float weight = 1.0f;
    uint32_t leaders;

    if (position < positions) expert = expert_of(args, token, position - token * args.top_k, weight);
    smem.key[position] = expert;
    bar_sync<1, kPositions>();
    if (expert >= 0) {
        key = expert * kKeys;
        for (int32_t other = token * args.top_k; other < position; other++)
            key += smem.key[other] == expert;
    }
    bar_sync<1, kPositions>();
    smem.key[position] = key;
    smem.jobs[position].tokens = 0;
    bar_sync<1, kPositions>();
    for (int32_t other = position - 1; other >= 0 && key >= 0; other--)
        if (smem.key[other] == key) leader = other;
    leaders = __ballot_sync(~0u, key >= 0 && leader == position);
    if (position % 32 == 0) smem.leaders[position / 32] = leaders;
    bar_sync<1, kPositions>();
    for (int32_t other = 0; other < positions; other++)
        index += (smem.leaders[other / 32] >> other % 32 & 1) != 0 && smem.key[other] < key;
    if (position == 0) smem.jobs_count = __popc(smem.leaders[0]) + __popc(smem.leaders[1]) + __popc(smem.leaders[2]) + __popc(smem.leaders[3]);
    if (key < 0) return;
    smem.jobs[index].expert = expert;
    smem.jobs[index].position[token] = static_cast<uint8_t>(position);
    smem.jobs[index].weight[token] = weight;
    atomicOr(&smem.jobs[index].tokens, 1u << token);
}
static_assert(kPositions == 4 * 32);

// ---- Operand rows ------------------------------------------------------------------------------

__device__ __forceinline__ unsigned char *operand_of(const layer_args_device &args, layer_smem &smem)
{
    return smem.stages + args.operand_offset;
}

// Eight numbers of the rows, zeros behind their end.
__device__ __forceinline__ uint4 row_piece(const layer_product &by, const unsigned char *rows, int64_t stride_bytes, int32_t item, int32_t items, int32_t eights)
{
    const int32_t row = item / eights, column = (item - row * eights) * 8;

    if (item >= items || column >= by.depth) return {};
    return __ldcg(reinterpret_cast<const uint4 *>(rows + row * stride_bytes + column * 2));
}

// Rows as mma takes them. e4m3: half a warp a group of 128, its codes as fp16, with the scale. The next numbers are under way meanwhile.
template <class P>
__device__ __forceinline__ void keep_rows(const layer_product &by, unsigned char *to, const unsigned char *rows, int64_t stride_bytes, int32_t count,
                                          bool is_bf16, int32_t thread, int32_t threads)
{
    const int32_t eights = (by.operand_pitch_bytes - P::skew_bytes) / 16, items = count * eights;
    uint4 next = row_piece(by, rows, stride_bytes, thread, items, eights);

    for (int32_t first = 0; first < items; first += threads) { // all lanes of a warp go on or none
        const int32_t item = first + thread, row = item / eights, column = (item - row * eights) * 8;
        uint4 words = next;

        next = row_piece(by, rows, stride_bytes, item + threads, items, eights);
        if constexpr (P::is_scaled) {
            float values[kFp8Lane];
            fp8_eight coded;

            unpack_8(words, is_bf16, values);
            coded = fp8_code(values, fp8_largest(words, is_bf16));
            e4m3_to_f16(coded.codes.x, words.x, words.y);
            e4m3_to_f16(coded.codes.y, words.z, words.w);
            if (item < items && column % kFp8Group == 0)
                reinterpret_cast<float *>(to + by.scale_offset)[row * by.scale_pitch + column / kFp8Group] = coded.scale;
        }
        if (item < items) *reinterpret_cast<uint4 *>(to + row * by.operand_pitch_bytes + column * 2) = words;
    }
}

} // namespace

#endif
