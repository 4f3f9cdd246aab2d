// The tiles of both products, the order in which blocks take them, and what a block keeps in shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_TILE_CUH
#define MOXIE_KERNELS_CUDA_GEMM_TILE_CUH

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/cuda/weights.cuh"
#include "kernels/types.h"

#include <cuda_runtime.h>
#include <stddef.h>

#ifndef GEMMS_WIDE_FROM
#define GEMMS_WIDE_FROM 1 // 0: few tokens of 4-bit weights have wide tiles, however few those are
#endif
#ifndef GEMMS_SOME_PAIRS
#define GEMMS_SOME_PAIRS 80 // of a wide tile of some tokens and 4-bit weights
#endif

namespace {

constexpr int kRows = 128;      // weight rows of a tile
constexpr int kBlockRows = 64;  // of one wgmma
constexpr int kWideRows = 256;  // of a wide tile: 4-bit weights, and few tokens or some
constexpr int kFewPairs = 16;   // up to which they are few, on average for an expert
constexpr int kBlockBytes = kBlockRows * 128; // of a stage
constexpr int kColumns = 256;   // tokens of the largest tile
constexpr int kFew = 16;        // tokens of a launch whose tiles are halves, and of their largest
constexpr int kMiddle = 176;    // of the largest 16-bit one of which five stages fit, not four
constexpr int kMiddleIn = 160;  // and of weights [E, K, N]
constexpr int kPacked = 128;    // of the largest one beside packed weights
constexpr int kPackedMiddle = 80; // of the largest of which three stages fit, not two: worth a second tile for experts of up to
constexpr int kPackedTwice = 96;  // so many
constexpr int kFewPacked = 32;  // of the largest one that is multiplied without wgmma, and of the largest of few tokens
constexpr int kFewWide = 16;    // of the largest wide one without, since there more warps decode while one waits for wgmma
constexpr int kSomePacked = 80; // of the largest wide one, since registers hold no more sums
constexpr int kRowsByWarps = 16; // of the largest packed one whose rows a warp each copies
constexpr int kScalesRaw = 32;   // bytes of scales that wide tiles bring at once for a weight row, those of one to four steps
constexpr int kScalesRow = 64;   // and that they take, as what codes are multiplied by
constexpr int kScaleSlots = 2;   // for so many of all rows
constexpr int kScaled = 192;    // of the largest fp8 one: 64 of a warpgroup, which keeps its sums twice
constexpr int kScaledMiddle = 160; // of the largest of which five stages fit, not four
constexpr int kScaledSmall = 112;  // and six, not five
constexpr int kFewScaled = 80;  // tokens up to which fp8 has them on wgmma's N
constexpr int kScales = kScaled + 4;      // tokens of a box of scales, which begins at a multiple of 4
constexpr int kScalesPitch = 224;         // and whose place is one of 128 bytes
constexpr int kRowBytes = 128;  // of a stage, for each weight row and token
constexpr int kStagesMax = 11;
constexpr int kManyTokens = 64; // token rows of the larger box
constexpr int kFewBoxes = 80;   // token rows up to which one thread asks for all boxes of a step
constexpr int kTurn = 32;       // tokens whose outputs a warpgroup turns into rows at once
constexpr int kTurnPitch = 144; // bytes between their rows: up to 64 outputs, and 16 so that banks differ
constexpr int kExpertsMax = 1024;
constexpr int kBeside = 12;     // tiles of tokens that blocks go through for the same weight rows: all of an expert would come from memory again
                                // for each tile of those; 132 blocks read least if 6 to 12 tiles of 256 tokens share 22 to 11 of 128 weight rows
constexpr int kLotSteps = 6;    // of down's tiles that a block takes at once, a lot, so that it finds the next while it has enough to do
constexpr int kLotTiles = 4;    // of it at most; neighbours by weight rows. Of more steps than kLotSteps / 2 a tile is taken alone
constexpr int kTiles = 2 * kStagesMax; // that the loading threads may be ahead: a tile takes a stage at least, and two lots are known
static_assert(kTiles > kStagesMax + 2 * kLotTiles);
constexpr int kQuantised = 128; // units of mid with one scale, fp8
constexpr int kTurnedFew = kFewScaled * kTurnPitch; // bytes in which a warpgroup keeps 64 units of kFewScaled tokens for it
constexpr int kHalfBytes = kQuantised / 2 * 2; // of a token's units of one half, 16 bits each
static_assert(GEMMS_HALVES_PLACE_BYTES == sizeof(uint32_t) + 2 * kHalfBytes);

// How many tokens experts have, as far as the host knows: so tiles are shaped.
enum expert_tokens { TOKENS_MANY, TOKENS_FEW, TOKENS_SOME };

// What a kernel is compiled for, and which of its two products. e4m3 is multiplied 128 inputs at a time and scaled in fp32; its
// outputs are bf16, but for mid, which is e4m3 again.
template <operand type_, bool is_gate_up_, bool rows_in_, expert_tokens tokens_> struct product {
    static constexpr operand type = type_;
    static constexpr bool is_gate_up = is_gate_up_;
    static constexpr bool rows_in = rows_in_; // weights [E, K, N]
    static constexpr bool is_few = tokens_ == TOKENS_FEW;
    static constexpr bool is_scaled = type == OPERAND_E4M3;
    static constexpr bool is_packed = type >= OPERAND_INT4;
    static constexpr bool is_bf16 = type != OPERAND_F16; // of the outputs
    static constexpr int element_bytes = is_scaled ? 1 : 2;
    static constexpr bool is_half = is_few && !is_packed; // tiles of half the weight rows, and stages of twice the inputs: more even shares of few tiles
    static constexpr bool is_wide = is_packed && tokens_ != TOKENS_MANY; // tiles of twice the weight rows: twice the warps decode beside each other
    static constexpr bool in_pieces = is_packed && is_few && is_gate_up && type != OPERAND_NVFP4; // multiplied as fp8
    static constexpr bool scales_sums = in_pieces || (is_few && type == OPERAND_INT4); // in fp32, and not what is multiplied
    static constexpr int rows = is_half ? kBlockRows : is_wide ? kWideRows : kRows; // of a tile's weights
    static constexpr int parts = is_packed ? 4 : kRows / rows; // of a stage, along K: kRowBytes of each token row, of packed weights a quarter
    static constexpr int part_depth = kRowBytes / element_bytes;
    static constexpr int depth = part_depth * parts; // inputs of a stage
    static constexpr int columns = is_half ? kFew : is_wide ? (is_few ? kFewPacked : kSomePacked) : is_packed ? kPacked : is_scaled ? kScaled : kColumns; // tokens of the largest tile
    static constexpr int columns_by_mma = is_wide && !scales_sums ? kFewWide : kFewPacked; // packed: of the largest multiplied without wgmma
    static constexpr int middle = is_scaled || is_few || is_packed ? columns : rows_in ? kMiddleIn : kMiddle; // of which a stage more fits
    static constexpr int columns_on_n = is_scaled ? kFewScaled : columns;
    static constexpr bool in_lots = !is_gate_up && !rows_in && !is_packed; // where steps are few; weights along N have no registers for it
    static constexpr bool gathers = is_packed || (is_gate_up && !is_scaled); // the loading threads copy tokens; else the engine does
    static constexpr bool quantises = is_gate_up && is_scaled;
    static constexpr int scales_bytes = is_packed && !is_wide ? 48 : 0; // of a weight row, in a stage; of which eight rows are in banks of their own
    static constexpr int loaders = is_scaled ? 4 : 128;       // threads that fill a stage, besides the engine
    static constexpr int warpgroups = is_half ? 1 : is_wide ? 4 : is_scaled ? 3 : 2; // that multiply
    static constexpr int threads = (1 + warpgroups) * 128;
};

// Of mid's 128 units with one scale gate and up have two tiles: a block does one after the other or, apart, two blocks one each.
enum tile_part { TILE_WHOLE, TILE_FIRST, TILE_SECOND, TILE_APART };

struct tile {
    int32_t expert;
    int32_t row_tile;
    int32_t pair;    // first
    int32_t tokens;  // 1..columns of the product; 0: there are no more tiles
    int32_t columns; // token rows that are loaded: N of the wgmma, where tokens are on it
    int32_t part;    // enum tile_part
    int32_t lot_tiles; // of down, of the lot that it is in; 0: of gate_up
    int32_t is_late; // of gate_up, that it is counted by its expert; of down
    uint32_t early;  // tiles of gate_up that the block had before, where this is the first that is late
};

__device__ __forceinline__ bool is_of_down(const tile &t)
{
    return t.lot_tiles > 0;
}

// Of two tiles of gate and up with one scale.
__device__ __forceinline__ bool is_second(const tile &t)
{
    return t.row_tile % 2 != 0;
}

// The row of the results that is a pair's alone, and what the pair is multiplied by.
struct result_place {
    int32_t row;
    float weight;
};

// Where a warp keeps them: behind each of 16 rows of its own, which outputs become, numbers `index` and `index` + 16 in the last 16 bytes
// of its pitch, where no other warp writes.
__device__ __forceinline__ result_place &result_behind(unsigned char *rows, int32_t index)
{
    return reinterpret_cast<result_place *>(rows + (index % 16 + 1) * kTurnPitch)[index / 16 - 2];
}
static_assert(kTurnPitch - 2 * 64 >= 2 * sizeof(result_place));

template <bool is_scaled, bool is_wide = false> struct alignas(1024) block_smem {
    static constexpr int warpgroups = is_wide ? 4 : is_scaled ? 3 : 2;
    static constexpr int weight_rows = is_wide ? kWideRows : kRows; // of 128 bytes, of a stage
    static constexpr int columns = is_wide ? kSomePacked : kColumns; // of the largest tile
    static constexpr int scale_slots = is_wide ? kScaleSlots : 0;
    static constexpr int slot_bytes = weight_rows * kScalesRow;
    static constexpr int stages_bytes = (is_scaled ? 9 * 160 : 8 * 192) * kRowBytes - scale_slots * slot_bytes;
    static constexpr int stages_most = is_scaled ? 7 : kStagesMax;
    static constexpr int turned_last = (is_wide ? 1 : 2) * kTurn * kTurnPitch; // of the last warpgroup
    static constexpr int turned_pitch = is_scaled ? kTurnedFew : turned_last;  // of a warpgroup
    unsigned char stages[stages_bytes + scale_slots * slot_bytes]; // each weight_rows, then columns_most token rows; behind all, slots
    float token_scale[is_scaled ? stages_most : 1][kScalesPitch];
    unsigned char turned[(warpgroups - 1) * turned_pitch + turned_last]; // of each warpgroup, outputs on their way out
    uint64_t full[kStagesMax + scale_slots], empty[kStagesMax + scale_slots]; // of stages, then of slots
    result_place results[is_scaled ? 1 : warpgroups][is_scaled ? 1 : columns]; // of the tile being multiplied
    const unsigned char *token_row[is_scaled ? 1 : is_wide ? 128 : kColumns]; // of the tile being loaded
    int32_t tiles_first[kExpertsMax + 1];  // prefix sums, of tiles of tokens
    int32_t expert_first[kExpertsMax + 1]; // pairs
    uint32_t pairs_most[4 + 4 * warpgroups]; // of the experts that a warp has read
    int32_t columns_most;                  // rows of a stage in this launch, but weight rows
    tile tiles[kTiles];                    // of this block, in turns: a tile is there once its first stage is full
    int32_t row_tiles, pairs_count;        // of gate_up, fp8: as gemm_args has them, or twice as many; all pairs
    int32_t other_is_there;                // 1: the other half of the tile that ends has been left

    // threadIdx.x; beside wide tiles, which leave no register to what is made of it, read anew.
    static __device__ __forceinline__ uint32_t thread()
    {
        return is_wide ? thread_read_anew() : threadIdx.x;
    }

    // Of the tokens that the calling warp stores, up to 64, of wide tiles up to 20.
    __device__ __forceinline__ result_place &result(int32_t warpgroup, int32_t index)
    {
        const int32_t warp = thread() / 32 % 4;

        if constexpr (is_scaled)
            return result_behind(turned + warpgroup * turned_pitch + warp * 16 * kTurnPitch, index);
        else
            return results[warpgroup][warp * (columns / 4) + index];
    }
};
static_assert(sizeof(block_smem<true>) <= 232448 && sizeof(block_smem<false>) <= 232448 && sizeof(block_smem<false, true>) <= 232448);

template <class P> using gemm_smem = block_smem<P::is_scaled, P::is_wide>;

// Of a stage for tiles of up to so many tokens: weights, tokens, and scales of packed weights.
template <class P> __host__ __device__ constexpr int32_t stage_bytes(int32_t columns)
{
    return (gemm_smem<P>::weight_rows + columns * P::parts + P::scales_bytes * kRows / kRowBytes) * kRowBytes;
}

// The slots that a thread goes through, each for the scales of a few steps of a wide tile.
struct slot_ring {
    int32_t slot;
    uint32_t round_odd;

    __device__ __forceinline__ void advance()
    {
        if (++slot < kScaleSlots) return;
        slot = 0;
        round_odd ^= 1;
    }
};

// The stages that a thread goes through, over all its tiles. The fewer tokens the largest tile has, the more stages there are,
// and the more bytes under way.
struct stage_ring {
    int32_t bytes; // of a stage
    int32_t count;
    int32_t stage;
    uint32_t round_odd;
    slot_ring scales; // of wide tiles

    template <class Smem>
    __device__ __forceinline__ explicit stage_ring(const Smem &smem)
        : bytes((smem.weight_rows + uniform(smem.columns_most)) * kRowBytes), count(min(Smem::stages_bytes / bytes, Smem::stages_most)), stage(0), round_odd(0),
          scales{0, 0}
    {
    }

    // As many stages on, `count` of them at most.
    __device__ __forceinline__ void advance(int32_t stages = 1)
    {
        stage += stages;
        if (stage < count) return;
        stage -= count;
        round_odd ^= 1;
    }

    template <class Smem> __device__ __forceinline__ unsigned char *weights(Smem &smem) const
    {
        return smem.stages + stage * bytes;
    }

    template <class Smem> __device__ __forceinline__ unsigned char *tokens(Smem &smem) const
    {
        return weights(smem) + smem.weight_rows * kRowBytes;
    }
};

// Gives a stage back to those who load, for a warp that has read it.
template <class Smem> __device__ __forceinline__ void release_stage(Smem &smem, int32_t stage)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(&smem.empty[stage]);
}

struct gemm_slab {
    const unsigned char *rows;
    int64_t row_stride_bytes;
};

// Where halves of mid's 128 units wait for each other when two blocks have one each. A pair has a place for each of its couples.
struct gemm_halves {
    uint32_t *there;     // [places], of the first pair of a tile or of a warp's share of it; of this launch: one of the two is there
    const uint32_t *launch;
    unsigned char *rows; // [places][2] of kHalfBytes
    int32_t places;      // 0: a block does both
};

// One of the products, on the device.
struct gemm_args {
    CUtensorMap weights;
    CUtensorMap tokens;       // but where they are gathered: boxes of 8 rows
    CUtensorMap many_tokens;  // and of kManyTokens
    CUtensorMap token_scales; // fp8: boxes of kScales
    weight_scales scales;
    packed_scales packed;
    const unsigned char *rows; // packed: of mid, and in pieces of x
    int64_t rows_stride_bytes;
    const int32_t *row_of_pair; // in pieces: of those rows; NULL: a pair's own number
    const float *pair_weight; // gate_up: router weight on the input, or NULL
    const void *bias;
    int64_t bias_expert_stride_bytes;
    unsigned char *out;
    int64_t out_stride_bytes;
    const int32_t *result_row; // down: rows of out by pair; NULL: a pair's own number
    const float *result_weight;
    float result_scale;
    float *out_scales; // by group of kQuantised outputs; NULL where they are not quantised
    int64_t out_group_stride;
    int32_t bias_format;
    int32_t depth;     // K
    int32_t outputs;   // columns of out: units, or hidden
    int32_t row_tiles; // tiles that an expert's weights are taken by, of two, where they share a scale of mid; of down, lots
    int32_t lot_tiles; // of down
    int32_t order;     // enum row_order of w1
    activation_terms activation;
    int32_t gathers;     // gate_up, fp8: 1: token rows lie once and are gathered
    int32_t evicts_last; // 1: rows by pair leave the L2 last
    int32_t is_bare; // 1: outputs are sums, or SiLU of gate times up, without bias: an end with no look at limits and biases for each
    gemm_halves halves; // gate_up, fp8
};

// Part of a pair's row, which is read again soon.
template <class Words> __device__ __forceinline__ void store_pair(const gemm_args &args, unsigned char *to, const Words &words)
{
    if (args.evicts_last)
        store_evict_last(to, words);
    else
        *reinterpret_cast<Words *>(to) = words;
}

// What blocks tell each other. But for `launch` 0 before each launch: `taken` before route lets it begin, the others before it ends. Early and
// late tiles of gate_up are counted by each warp that has stored its share.
struct gemm_progress {
    uint32_t launch; // another number in each
    uint32_t taken; // tiles, of gate_up and then of down
    uint32_t early; // tiles of gate_up that have ended, but for the late ones
};
static_assert(sizeof(gemm_progress) == GEMM_PROGRESS_WORDS * 4 && offsetof(gemm_progress, launch) == GEMM_PROGRESS_LAUNCH * 4 &&
              offsetof(gemm_progress, taken) == GEMM_PROGRESS_TAKEN * 4);

struct gemms_args_device {
    gemm_args gate_up, down;
    gemm_slab slabs[KERNEL_RANKS_MAX]; // to gather from
    const int32_t *pair_row;           // by which
    const int32_t *expert_offset;
    slab_ids counted; // few; ids NULL: expert_offset is read, behind route
    gemm_progress *progress;
    uint32_t *late; // [experts]: late tiles that have ended
    int64_t rows_bytes; // of the only slab, as far as a line for each thread reaches; 0: several slabs, or rows apart
    int32_t experts;
    int32_t rows_cap;
};

// A warp has stored its share of some tiles of gate_up. To wait until all may see it takes longer than a step, so it is said once for
// all early tiles.
__device__ __forceinline__ void count_tiles(uint32_t *counted, uint32_t tiles)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0) add_release_device(counted, tiles);
}

// `next` is the block's next tile.
__device__ __forceinline__ void count_ended(const gemms_args_device &args, const tile &t, const tile &next)
{
    if (t.part == TILE_FIRST) return;
    if (t.is_late)
        count_tiles(&args.late[t.expert], 1);
    else if (uniform(next.early) != 0)
        count_tiles(&args.progress->early, next.early);
}

template <class P> __device__ __forceinline__ int32_t steps_of(const gemm_args &args)
{
    return (args.depth + P::depth - 1) / P::depth;
}

// Tokens of the largest tile where no expert has more pairs.
template <class P> __device__ __forceinline__ int32_t columns_most_for(int32_t pairs)
{
    int32_t columns = 8;

    while (columns < pairs && columns <= 128)
        columns *= 2;
    if (P::is_scaled && pairs <= kScaledSmall && columns > kScaledSmall) return kScaledSmall;
    if (P::is_scaled && pairs <= kScaledMiddle && columns > kScaledMiddle) return kScaledMiddle;
    if (P::is_packed && !P::is_wide && pairs <= kPackedTwice && columns > kPackedMiddle) return kPackedMiddle;
    if (pairs <= P::middle && columns > P::middle) return P::middle;
    return min(columns, P::columns);
}

// One of three constants, because divisions take longer than all the rest.
template <class P> __device__ __forceinline__ int32_t token_tiles(int32_t pairs, int32_t columns_most)
{
    if (P::is_few) return (pairs + P::columns - 1) / P::columns; // of halves, too: a token may have an expert more than once
    if (columns_most <= 64) return (pairs + 63) / 64;
    if (P::is_packed && columns_most <= kPackedMiddle) return (pairs + kPackedMiddle - 1) / kPackedMiddle;
    if (columns_most <= 128) return (pairs + 127) / 128;
    return (pairs + P::columns - 1) / P::columns;
}

// Tiles are taken in one order: gate_up's by expert, then down's. So a tile waits for tiles alone that running blocks have taken before
// it, and those end. Of gate_up:
struct gate_up_tiles {
    int32_t by_rows; // that an expert's weights are taken by
    int32_t all;

    template <class Smem>
    __device__ __forceinline__ gate_up_tiles(const gemms_args_device &args, const Smem &smem, bool is_scaled)
        : by_rows(is_scaled ? smem.row_tiles : args.gate_up.row_tiles), all(by_rows * smem.tiles_first[args.experts])
    {
    }

    // The first late one. A block has two at most when the last is taken: one that it loads, and one that it multiplies.
    __device__ __forceinline__ int32_t first_late() const
    {
        return max(all - 2 * static_cast<int32_t>(gridDim.x), 0);
    }
};

// Two tiles with one scale go apart where they are so few that a block gets no more than one.
__device__ __forceinline__ int32_t row_tiles_for(const gemm_args &args, int32_t token_tiles, int32_t pairs)
{
    const bool apart = args.order != ORDER_PLAIN && args.row_tiles * token_tiles <= GEMMS_COUPLES && args.row_tiles * pairs <= args.halves.places;

    return apart ? (args.outputs + kBlockRows - 1) / kBlockRows : args.row_tiles;
}

// The pairs of each expert, as route counts them. They lie where their sums will.
template <class P> __device__ __forceinline__ void count_ids(const gemms_args_device &args, gemm_smem<P> &smem)
{
    const slab_ids &from = args.counted;
    int32_t rows;

    for (int32_t e = threadIdx.x; e < args.experts; e += P::threads)
        smem.expert_first[e] = 0;
    rows = rows_in<READ_PAST_L1>(from);
    __syncthreads();
    for (int32_t position = threadIdx.x; position < from.rows * from.top_k; position += P::threads) {
        const int32_t row = position / from.top_k;
        const int32_t expert = expert_in<READ_PAST_L1>(from, row, position - row * from.top_k, args.experts);

        if (row < rows && expert >= 0) atomicAdd(&smem.expert_first[expert], 1);
    }
    __syncthreads();
}

// The pairs of each expert, and for each warp those of its largest one.
template <class P> __device__ __forceinline__ void find_counts(const gemms_args_device &args, gemm_smem<P> &smem)
{
    uint32_t most = 0;

    if (args.counted.ids != nullptr) count_ids<P>(args, smem);
    for (int32_t e = threadIdx.x; e < args.experts; e += P::threads) {
        // Past the L1, which may be older than the launch that wrote them.
        if (args.counted.ids == nullptr) smem.expert_first[e] = __ldcg(&args.expert_offset[e + 1]) - __ldcg(&args.expert_offset[e]);
        most = max(most, static_cast<uint32_t>(smem.expert_first[e]));
    }
    most = __reduce_max_sync(~0u, most);
    if (threadIdx.x % 32 == 0) smem.pairs_most[threadIdx.x / 32] = most;
}

// Every block makes the same tables: a lane of the first warp has four experts of every 128. Ends with a block barrier.
template <class P> __device__ __forceinline__ void make_tables(const gemms_args_device &args, gemm_smem<P> &smem)
{
    constexpr int32_t own = 4;
    const int32_t lane = threadIdx.x;

    find_counts<P>(args, smem);
    __syncthreads();
    if (threadIdx.x < 32) {
        const uint32_t most = __reduce_max_sync(~0u, lane < P::threads / 32 ? smem.pairs_most[lane] : 0u);
        const int32_t columns_most = columns_most_for<P>(static_cast<int32_t>(most));
        int32_t pairs_before = 0, tiles_before = 0;

        for (int32_t base = 0; base <= args.experts; base += 32 * own) {
            const int32_t first = base + lane * own;
            int32_t pairs[own], tiles[own], pairs_sum = 0, tiles_sum = 0;

#pragma unroll
            for (int32_t i = 0; i < own; i++) {
                pairs[i] = first + i < args.experts ? smem.expert_first[first + i] : 0;
                tiles[i] = token_tiles<P>(pairs[i], columns_most);
                pairs_sum += pairs[i];
                tiles_sum += tiles[i];
            }
            pairs_before += sum_before(pairs_sum);
            tiles_before += sum_before(tiles_sum);
#pragma unroll
            for (int32_t i = 0; i < own; i++) {
                if (first + i <= args.experts) {
                    smem.expert_first[first + i] = pairs_before;
                    smem.tiles_first[first + i] = tiles_before;
                }
                pairs_before += pairs[i];
                tiles_before += tiles[i];
            }
            pairs_before = __shfl_sync(~0u, pairs_before, 31);
            tiles_before = __shfl_sync(~0u, tiles_before, 31);
        }
        if (lane == 0) smem.columns_most = stage_bytes<P>(columns_most) / kRowBytes - smem.weight_rows;
        if (P::is_scaled && lane == 0) {
            smem.row_tiles = row_tiles_for(args.gate_up, tiles_before, pairs_before);
            smem.pairs_count = pairs_before;
        }
    }
    __syncthreads();
}

// N of the wgmma for so many tokens: 8, or a multiple of 16; where a warpgroup takes half of them, 16 or a multiple of 32. Past
// columns_on_n, whole blocks of M.
template <class P> __device__ __forceinline__ int32_t columns_for(int32_t tokens)
{
    if (tokens <= 8) return 8;
    if (tokens > P::columns_on_n) return (tokens + 63) / 64 * 64;
    if (!P::rows_in) return (tokens + 15) / 16 * 16;
    return tokens <= 16 ? 16 : (tokens + 31) / 32 * 32;
}

// Many tiles of tokens are taken in even groups, each by all weight rows: the first of the group, with `tiles` that it has and `within`
// it, instead of within the expert.
__device__ __forceinline__ int32_t first_beside(int32_t row_tiles, int32_t &within, int32_t &tiles)
{
    const int32_t groups = (tiles + kBeside - 1) / kBeside, wide = (tiles + groups - 1) / groups;
    const int32_t first = within / (wide * row_tiles) * wide;

    within -= first * row_tiles;
    tiles = min(wide, tiles - first);
    return first;
}

// The tiles of an expert share its pairs evenly: a small last one would read the weights again for few tokens. Of fp8 for a warp.
template <class U, class D>
__device__ __forceinline__ tile find_tile(const gemms_args_device &args, const gemm_smem<U> &smem, const gate_up_tiles &of_gate_up, int32_t index)
{
    int32_t row_tiles = of_gate_up.by_rows, pairs, tiles, share, before = 0;
    tile found = {};

    found.is_late = index >= of_gate_up.first_late();
    if (index >= of_gate_up.all) {
        index -= of_gate_up.all;
        row_tiles = args.down.row_tiles;
        found.lot_tiles = 1;
    }
    if (index >= row_tiles * smem.tiles_first[args.experts]) return found;
    found.expert = U::is_scaled ? last_at_most_of_warp(smem.tiles_first, args.experts, index, row_tiles)
                                : last_at_most(smem.tiles_first, args.experts, index, row_tiles);
    found.row_tile = index - row_tiles * smem.tiles_first[found.expert];
    found.pair = smem.expert_first[found.expert];
    share = pairs = smem.expert_first[found.expert + 1] - found.pair;
    tiles = smem.tiles_first[found.expert + 1] - smem.tiles_first[found.expert];
    if (tiles > 1) { // divisions take longer than all the rest
        int32_t within = found.row_tile, first = 0;

        share = (pairs + tiles - 1) / tiles;
        share = is_of_down(found) ? columns_for<D>(share) : columns_for<U>(share);
        if (tiles > kBeside) first = first_beside(row_tiles, within, tiles);
        found.row_tile = within / tiles;
        before = (first + within - found.row_tile * tiles) * share;
    }
    if (U::is_scaled && !is_of_down(found) && args.gate_up.order != ORDER_PLAIN) {
        const bool apart = row_tiles != args.gate_up.row_tiles;

        if (!apart) found.row_tile *= 2;
        if ((found.row_tile | 1) * kBlockRows < args.gate_up.outputs) found.part = apart ? TILE_APART : TILE_FIRST;
    }
    if (is_of_down(found) && args.down.lot_tiles > 1) {
        found.row_tile *= args.down.lot_tiles;
        found.lot_tiles = min(args.down.lot_tiles, (args.down.outputs + D::rows - 1) / D::rows - found.row_tile);
    }
    found.pair += before;
    found.tokens = min(share, pairs - before);
    found.columns = is_of_down(found) ? columns_for<D>(found.tokens) : columns_for<U>(found.tokens);
    // On M, no more rows than a stage has: those past them are whatever lies there, and nothing is stored for them.
    if (U::is_scaled && found.tokens > U::columns_on_n) found.columns = (found.tokens + 7) / 8 * 8;
    return found;
}

} // namespace

#endif
