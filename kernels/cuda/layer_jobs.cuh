// The args of a whole layer in one launch, the jobs that its ids make, and the rows they multiply. Included by layer.cu alone.

#ifndef MOXIE_KERNELS_CUDA_LAYER_JOBS_CUH
#define MOXIE_KERNELS_CUDA_LAYER_JOBS_CUH

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/packed.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/cuda/warp.cuh"
#include "kernels/cuda/weights.cuh"
#include "kernels/layer.h"

namespace {

constexpr int kLoaders = 4; // warps of a block
constexpr int kPositions = LAYER_POSITIONS;
constexpr int kTokens = LAYER_TOKENS;  // at most: N of mma
constexpr int kHalf = 8;               // weight rows of half a tile: gate of as many units, or up; or outputs
constexpr int kRows = 2 * kHalf;       // M of mma
constexpr int kSums = kRows * kTokens; // of a tile
constexpr int kUnitBytes = 128;        // of each row, that a warp multiplies at once
constexpr int kHalfUnitBytes = kHalf * kUnitBytes;
constexpr int kSkewBytes = 64; // behind an operand row, so that two rows lie in other banks
constexpr int kStagesMost = 12, kStagesLeast = 4;
constexpr int kTiles = 64;              // that who finds them may be ahead of who multiplies them: a tile takes a stage at least
constexpr int kParts = 32;              // stages whose sums wait at once, of gate_up for the last of their tile, of down to be added; a power of two
constexpr int kSmemBytes = 232448;      // that a block may have
constexpr int kFirstBytes = 32 << 10;   // of gate_up's, at most, before it knows its tiles
static_assert(kTiles > kParts + 2 * kStagesMost + 2);

// What a kernel is compiled for. e4m3 is multiplied as fp16, which holds every code. has_slabs: rows are those of several ranks, of whose
// choices few are here; else they are at equal distances, and what follows from the number of tokens is known before.
template <operand type_, bool several> struct product {
    static constexpr operand type = type_;
    static constexpr bool has_slabs = several;
    static constexpr bool is_scaled = type == OPERAND_E4M3;
    static constexpr bool is_packed = type >= OPERAND_INT4;
    static constexpr bool multiplies_bf16 = type == OPERAND_BF16 || is_packed;
    static constexpr bool mid_is_bf16 = type != OPERAND_F16;
    static constexpr int bits = is_packed ? 4 : is_scaled ? 8 : 16; // of a weight
    static constexpr int depth = kUnitBytes * 8 / bits;             // inputs of a unit
    static constexpr int pieces = depth / 8;                        // of 16 bytes of an operand row, of a unit
    static constexpr int units = is_packed ? 4 : 8;                 // of a stage: with weights of 4 bits each takes longer
    static constexpr int row_bytes = units * kUnitBytes;            // of a row, that a stage has
    static constexpr int half_bytes = units * kHalfUnitBytes;       // of a stage, [units][kHalf][kUnitBytes], swizzled by 128 bytes
    // Behind both halves, of each packed row: scales, with up to 15 bytes before them, then what codes are multiplied by. Of eight rows in other banks.
    static constexpr int scale_pitch_bytes = is_packed ? units * (type == OPERAND_MXFP4 ? 16 : 32) + 16 : 0;
    // A block: warps that multiply, one that finds tiles of gate_up, and those that load.
    static constexpr int warps = is_packed ? 12 : 11;
    static constexpr int multiplying = warps * 32, finding = multiplying, loading = finding + 32, threads = loading + kLoaders * 32;
    static constexpr int groups = is_packed ? multiplying / kSums : 1; // of 16 outputs of down whose parts it multiplies without a pause
    static constexpr int stages_enough = is_packed ? warps : 8; // where down has no more parts
    static constexpr int stage_bytes = 2 * half_bytes + (kRows * scale_pitch_bytes + 1023) / 1024 * 1024;
};

// Divisions take longer than what they are for. The number times the divisor is below 2^31.
struct divider {
    uint32_t inverse; // 2^31 / divisor, rounded up

    __device__ __forceinline__ int32_t divide(int32_t number) const
    {
        return static_cast<int32_t>(static_cast<uint64_t>(static_cast<uint32_t>(number) * 2) * inverse >> 32);
    }
};

// One of the two products, on the device.
struct layer_product {
    CUtensorMap map; // (K bytes, rows, 2 if gate and up lie in turns, units, experts): boxes of kHalf rows, of a stage or of a unit
    const unsigned char *weights;
    int64_t expert_stride_bytes, row_stride_bytes;
    weight_scales scales;
    packed_scales packed;
    const void *bias; // NULL: none
    int64_t bias_expert_stride_bytes;
    int32_t bias_format;
    int32_t order;
    int32_t depth;     // K
    int32_t row_bytes; // of K inputs
    int32_t stages;    // of a tile
    int32_t is_whole;  // 1: rows are whole units, and a box is half a stage; 0: it is half a unit
    divider by_stages;
    int32_t outputs;   // units, or hidden
    int32_t eights;         // of numbers, of an operand row
    int32_t operand_offset; // bytes, from the stages to the first operand row
    int32_t operand_pitch_bytes; // to the next; of down negative
    int32_t scale_offset; // bytes, from the first operand row to their scales, f32 [rows, scale_pitch]
    int32_t scale_pitch;
};

struct layer_turns {
    uint32_t taken; // tiles of gate_up; 0 before each launch, and after it
    uint32_t left;  // blocks that will not look at them again; the same
    uint32_t launches;
    uint32_t reserved;
};
static_assert(sizeof(layer_turns) == LAYER_TURNS * sizeof(uint64_t));

// A token: a row of a slab.
struct layer_row {
    const unsigned char *x;
    const float *scales; // of x of e4m3
    const unsigned char *ids;
    const unsigned char *router_weights; // NULL: 1
    unsigned char *y;
    const int32_t *rows_valid;    // of its slab; NULL: all
    const int32_t *results_valid; // rows that have a result, the others stay; NULL: all
    int32_t index;                // in its slab
    int32_t scale_stride;         // between groups
    int32_t id_bytes, router_weight_format, y_format;
};

struct row_strides {
    int64_t x_bytes, id_bytes, router_weight_bytes, y_bytes;
};

struct layer_args_device {
    layer_product up, down;
    activation_terms activation;
    const int32_t *expert_map;
    int64_t map_count, expert_first;
    unsigned long long *load; // NULL: not counted
    uint32_t *mid; // [2][mid_words], of which each launch has another half than the last: numbers [tokens * top_k, intermediate]
    int64_t mid_words;
    layer_turns *turns;
    int32_t experts, tokens, top_k;
    int32_t tokens_coded; // whose x is of e4m3: the last ones
    int32_t x_is_bf16;    // the others'
    divider by_top_k;
    divider by_groups; // of eight units
    divider by_eights; // of an operand row of x
    divider by_turns;  // of half of all tiles
    int32_t first_jobs;   // whose weights of gate_up go into the L2 at once
    uint32_t first_bytes; // each block's share of one
    int32_t eights_each, eights_more; // of outputs of down: of each block, and how many blocks have one more
    int32_t weighs_input;    // 1: the router's weight multiplies the input row, 0: the result
    float scale;
    int32_t stages;          // of one slab
    row_strides strides;     // of one slab
    layer_row rows[kTokens]; // of one slab the first; looked at before the first product alone
};

// A choice has an operand row of down if its expert is here: the stages take what that leaves, and no more than are enough or than down
// has parts, each of which then has a warp of its own.
template <class P> __host__ __device__ __forceinline__ int32_t stages_for(const layer_product &down, int32_t choices)
{
    const int32_t room = (down.operand_offset + (choices - 1) * down.operand_pitch_bytes) / P::stage_bytes;

    return min(room, min(max(choices * down.stages, P::stages_enough), P::warps));
}

// An expert and the tokens that chose it, each by one of its choices; a token that chose it twice has two jobs.
struct job {
    int32_t expert;
    uint32_t tokens;            // a bit for each
    uint8_t choice[kTokens];   // counted over all tokens, of several slabs over what is here
    float weight[kTokens];     // the router's
};

// Eight units of a job. `job` -1: there are no more.
struct tile {
    int32_t job, group;
};

// A block's first turn to take tiles, and how many launches there were before this one.
struct first_turn {
    uint32_t turn, launches;
};

// Where a token's result goes.
struct layer_result {
    unsigned char *y; // NULL: there is none
    int32_t format;
};

struct layer_smem {
    float sums[kParts][kSums]; // of stages; down: weighed, and zeros for other tokens than the job's
    float stage_scale[kStagesMost][kRows]; // of the weights, first half of the rows and second: by group of 128 inputs, or by row
    uint64_t full[kStagesMost], empty[kStagesMost];
    uint64_t read[kParts]; // that sums have been
    uint64_t kept[kParts]; // that a part's operand rows of down have been, where one pass has several outputs of a part
    tile tiles[kTiles];                     // of gate_up, in turns
    uint64_t found[kTiles], begun[kTiles]; // that they are there, and their stages asked for
    uint32_t summed[kTiles];               // stages whose sums are there
    first_turn first;                      // there with the jobs
    int32_t down_first;                    // stage of down among all of the block's
    int32_t expert[kPositions]; // -1: none
    int32_t key[kPositions];    // expert * kKeys + how often the token had it before; -1: none
    job jobs[kPositions];
    uint32_t leaders[kPositions / 32]; // a bit for each position that is its job's first
    int32_t jobs_count;
    int32_t stages_count;          // of several slabs, as are these
    int32_t looks;                 // at mid that a wait begins with: 0, or, once one was in vain, all that there may be
    layer_result results[kTokens];
    alignas(1024) unsigned char stages[]; // [stages_count][stage_bytes]; at the end mid's rows and scales, and x's
};

// ---- Jobs --------------------------------------------------------------------------------------

constexpr int32_t kKeys = KERNEL_TOP_K_MAX;

// A token's row, of one slab the first; then its pointers go on to the token by at_token.
template <class P> __device__ __forceinline__ const layer_row &row_of(const layer_args_device &args, int32_t token)
{
    return args.rows[P::has_slabs ? token : 0];
}

template <class P, class Byte> __device__ __forceinline__ Byte *at_token(Byte *row, int32_t token, int64_t stride_bytes)
{
    return P::has_slabs ? row : row + token * stride_bytes;
}

template <class P> __device__ __forceinline__ int32_t index_of(const layer_row &row, int32_t token)
{
    return P::has_slabs ? row.index : token;
}

// The id first: of one slab, where it is asked for behind the count of rows, 4 tokens of fp8 take 0.8 us more.
template <class P> __device__ __forceinline__ int32_t expert_of(const layer_args_device &args, int32_t token, int32_t choice, float &weight)
{
    const layer_row &row = row_of<P>(args, token);
    const int64_t id = id_read(at_token<P>(row.ids, token, args.strides.id_bytes), choice, row.id_bytes);
    const int32_t expert = id_mapped(args.expert_map, args.map_count, id, args.expert_first, args.experts);
    int32_t rows = INT32_MAX;

    if (row.router_weights != nullptr)
        weight = number_load(at_token<P>(row.router_weights, token, args.strides.router_weight_bytes), choice, row.router_weight_format);
    if (row.rows_valid != nullptr) rows = *row.rows_valid;
    return index_of<P>(row, token) < rows ? expert : -1;
}

// This block's share of gate_up's weights of the first jobs into the L2: what all blocks load first, before any of them knows what of it.
__device__ __forceinline__ void ask_first(const layer_args_device &args, int32_t job, int32_t expert)
{
    const layer_product &by = args.up;

    if (job >= args.first_jobs) return;
    prefetch_l2_bulk(by.weights + expert * by.expert_stride_bytes + static_cast<int64_t>(blockIdx.x) * args.first_bytes, args.first_bytes);
}

// A position's place among the jobs, which are in the order of their keys, so that a token's do not depend on its batch mates.
struct job_place {
    int32_t key; // expert * kKeys + how often the token had it before; -1: it has no expert
    int32_t job;    // keys below it
    int32_t choice; // of several slabs those before it that are here, else its position
    int32_t here;   // of several slabs, all of them
};

template <class P> __device__ __forceinline__ job_place place_at(int32_t position)
{
    return {-1, 0, P::has_slabs ? 0 : position, 0};
}

// Another position's key.
template <class P> __device__ __forceinline__ void count_choice(job_place &at, int32_t its, bool is_before)
{
    if constexpr (P::has_slabs) {
        at.choice += its >= 0 && is_before;
        at.here += its >= 0;
    }
}

__device__ __forceinline__ void keep_job(layer_smem &smem, const job_place &at, int32_t token, float weight)
{
    job &to = smem.jobs[at.job];

    if (at.key < 0) return;
    to.expert = at.key / kKeys;
    to.choice[token] = static_cast<uint8_t>(at.choice);
    to.weight[token] = weight;
    atomicOr(&to.tokens, 1u << token);
}

// Up to 32 positions: one warp needs nobody else.
template <class P> __device__ __forceinline__ void find_few_jobs(const layer_args_device &args, layer_smem &smem)
{
    const int32_t positions = args.tokens * args.top_k, position = threadIdx.x, token = args.by_top_k.divide(position);
    int32_t expert = -1;
    float weight = 1.0f;
    uint32_t same, leaders;
    job_place at = place_at<P>(position);

    if (position < positions) expert = expert_of<P>(args, token, position - token * args.top_k, weight);
    smem.jobs[position].tokens = 0;
    same = __match_any_sync(~0u, expert) & ~(~0u << position); // of those before it
    if (expert >= 0) at.key = expert * kKeys + __popc(same >> token * args.top_k);
    smem.key[position] = at.key;
    same = __match_any_sync(~0u, at.key) & ~(~0u << position);
    leaders = __ballot_sync(~0u, at.key >= 0 && same == 0);
    for (int32_t other = 0; other < positions; other++) {
        const int32_t its = __shfl_sync(~0u, at.key, other);

        at.job += (leaders >> other & 1) != 0 && its < at.key;
        count_choice<P>(at, its, other < position);
    }
    if (leaders >> position & 1) ask_first(args, at.job, expert);
    __syncwarp(); // no job has tokens yet
    keep_job(smem, at, token, weight);
    if (position != 0) return;
    smem.jobs_count = __popc(leaders);
    if (P::has_slabs) smem.stages_count = stages_for<P>(args.down, at.here);
}

// By the first kPositions threads.
template <class P> __device__ __forceinline__ void find_jobs(const layer_args_device &args, layer_smem &smem)
{
    const int32_t positions = args.tokens * args.top_k, position = threadIdx.x, token = args.by_top_k.divide(position);
    int32_t expert = -1, leader = position;
    float weight = 1.0f;
    uint32_t leaders;
    job_place at = place_at<P>(position);

    if (positions <= 32) {
        if (position < 32)
            find_few_jobs<P>(args, smem);
        else
            smem.key[position] = -1;
        return;
    }
    if (position < positions) expert = expert_of<P>(args, token, position - token * args.top_k, weight);
    smem.expert[position] = expert;
    bar_sync<1, kPositions>();
    if (expert >= 0) {
        at.key = expert * kKeys;
        for (int32_t other = token * args.top_k; other < position; other++)
            at.key += smem.expert[other] == expert;
    }
    smem.key[position] = at.key;
    smem.jobs[position].tokens = 0;
    bar_sync<1, kPositions>();
    for (int32_t other = position - 1; other >= 0 && at.key >= 0; other--)
        if (smem.key[other] == at.key) leader = other;
    leaders = __ballot_sync(~0u, at.key >= 0 && leader == position);
    if (position % 32 == 0) smem.leaders[position / 32] = leaders;
    bar_sync<1, kPositions>();
    for (int32_t other = 0; other < positions; other++) {
        const int32_t its = smem.key[other];

        at.job += (smem.leaders[other / 32] >> other % 32 & 1) != 0 && its < at.key;
        count_choice<P>(at, its, other < position);
    }
    if (at.key >= 0 && leader == position) ask_first(args, at.job, expert);
    keep_job(smem, at, token, weight);
    if (position != 0) return;
    if (P::has_slabs) smem.stages_count = stages_for<P>(args.down, at.here);
    smem.jobs_count = __popc(smem.leaders[0]) + __popc(smem.leaders[1]) + __popc(smem.leaders[2]) + __popc(smem.leaders[3]);
}
static_assert(kPositions == 4 * 32);

template <class P> __device__ __forceinline__ int32_t stages_of(const layer_args_device &args, const layer_smem &smem)
{
    return P::has_slabs ? smem.stages_count : args.stages;
}

template <class P> __device__ __forceinline__ layer_result result_of(const layer_args_device &args, int32_t token)
{
    const layer_row &row = row_of<P>(args, token);
    const bool is_there = row.results_valid == nullptr || index_of<P>(row, token) < __ldcg(row.results_valid);

    return {is_there ? at_token<P>(row.y, token, args.strides.y_bytes) : nullptr, row.y_format};
}

// ---- Operand rows ------------------------------------------------------------------------------

__device__ __forceinline__ unsigned char *operand_of(const layer_product &by, layer_smem &smem)
{
    return smem.stages + by.operand_offset;
}

// Eight numbers of x's rows of 16 bits, zeros behind their end.
template <class P> __device__ __forceinline__ uint4 row_piece(const layer_args_device &args, int32_t item, int32_t items)
{
    const int32_t row = args.by_eights.divide(item), column = (item - row * args.up.eights) * 8;

    if (item >= items || column >= args.up.depth) return {};
    return __ldcg(reinterpret_cast<const uint4 *>(at_token<P>(row_of<P>(args, row).x, row, args.strides.x_bytes) + column * 2));
}

// Where an operand row has its eight numbers from `column` on: those that the lanes of a row multiply at once lie side by side, a lane's
// being of 32 bytes of weights, of 4 bits each of four.
template <class P> __device__ __forceinline__ int32_t piece_offset(int32_t column)
{
    const int32_t piece = column / 8, in_unit = piece % P::pieces;

    if (P::is_packed) return piece * 16;
    return (piece - in_unit + in_unit % (P::pieces / 4) * 4 + in_unit / (P::pieces / 4)) * 16;
}

// Eight numbers of an operand row as mma takes them: of e4m3 codes as fp16, with the scale of their group; for weights of 4 bits woven.
struct operand_eight {
    uint4 words;
    float scale;
};

// e4m3: half a warp a group of 128.
template <class P> __device__ __forceinline__ operand_eight code_eight(const uint4 &words, bool is_bf16)
{
    operand_eight to = {words, 0.0f};

    if constexpr (P::is_scaled) {
        float values[kFp8Lane];
        fp8_eight coded;

        unpack_8(words, is_bf16, values);
        coded = fp8_code(values, fp8_largest(words, is_bf16));
        e4m3_to_f16(coded.codes.x, to.words.x, to.words.y);
        e4m3_to_f16(coded.codes.y, to.words.z, to.words.w);
        to.scale = coded.scale;
    } else if constexpr (P::is_packed) {
        uint32_t woven[4];

        woven_of(words, woven);
        to.words = {woven[0], woven[1], woven[2], woven[3]};
    }
    return to;
}

template <class P>
__device__ __forceinline__ void keep_eight(const layer_product &by, unsigned char *to, const operand_eight &eight, int32_t row, int32_t column)
{
    if (P::is_scaled && column % kFp8Group == 0)
        reinterpret_cast<float *>(to + by.scale_offset)[row * by.scale_pitch + column / kFp8Group] = eight.scale;
    *reinterpret_cast<uint4 *>(to + row * by.operand_pitch_bytes + piece_offset<P>(column)) = eight.words;
}

// Rows of x of 16 bits. The next numbers are under way meanwhile.
template <class P>
__device__ __forceinline__ void keep_rows(const layer_args_device &args, layer_smem &smem, int32_t thread, int32_t threads)
{
    const layer_product &by = args.up;
    const int32_t items = (args.tokens - (P::has_slabs ? args.tokens_coded : 0)) * by.eights;
    uint4 next = row_piece<P>(args, thread, items);

    for (int32_t first = 0; first < items; first += threads) { // all lanes of a warp go on or none
        const int32_t item = first + thread, row = args.by_eights.divide(item), column = (item - row * by.eights) * 8;
        const uint4 words = next;
        operand_eight eight;

        next = row_piece<P>(args, item + threads, items);
        eight = code_eight<P>(words, P::is_scaled ? args.x_is_bf16 : P::mid_is_bf16);
        if (item < items) keep_eight<P>(by, operand_of(by, smem), eight, row, column);
    }
}

// Those that came as e4m3, which are the last.
template <class P>
__device__ __forceinline__ void keep_coded_rows(const layer_args_device &args, layer_smem &smem, int32_t thread, int32_t threads)
{
    const layer_product &by = args.up;
    const int32_t first = args.tokens - args.tokens_coded;

#pragma unroll 1
    for (int32_t item = thread; item < args.tokens_coded * by.eights; item += threads) {
        const int32_t coded = args.by_eights.divide(item), column = (item - coded * by.eights) * 8, row = first + coded;
        const layer_row &from = args.rows[row];
        operand_eight eight = {};

        if (column < by.depth) {
            const uint2 codes = __ldcg(reinterpret_cast<const uint2 *>(from.x + column));

            e4m3_to_f16(codes.x, eight.words.x, eight.words.y);
            e4m3_to_f16(codes.y, eight.words.z, eight.words.w);
            eight.scale = __ldcg(from.scales + column / kFp8Group * from.scale_stride);
        }
        keep_eight<P>(by, operand_of(by, smem), eight, row, column);
    }
}

// ---- mid ---------------------------------------------------------------------------------------

// Between blocks a word of two numbers that is zero is not there yet, so that nothing waits for a count of what has ended; of two zeros the
// first has a sign. Each launch writes one half of mid, and clears the other.
constexpr int kLooks = 3;            // of a lane, under way at once
constexpr int kLookColumns = 32 * 8; // of a warp's lanes
// Of several slabs: a dispatcher keeps few ids where no peer writes. In slabs of a host's own they may change while blocks read them, which
// then have unequal jobs, and nobody makes what one waits for. So a block's looks at what is missing end, after a second; in one slab, which
// who calls writes himself, after a minute.
#ifndef LAYER_LOOKS_MOST
#define LAYER_LOOKS_MOST (1 << 20)
#endif
#ifndef LAYER_LOOKS_ALONE_MOST
#define LAYER_LOOKS_ALONE_MOST (1 << 26)
#endif
template <class P> constexpr int32_t kLooksMost = P::has_slabs ? LAYER_LOOKS_MOST : LAYER_LOOKS_ALONE_MOST;

// Of this launch 0, of the next 1.
__device__ __forceinline__ uint32_t *mid_half(const layer_args_device &args, const layer_smem &smem, uint32_t next)
{
    return args.mid + ((smem.first.launches + next) % 2) * args.mid_words;
}

// Eight numbers of mid, or zeros, as the thread saw them last.
struct mid_eight {
    const uint32_t *from; // NULL: zeros
    uint4 numbers;

    __device__ __forceinline__ void look()
    {
        if (from != nullptr) numbers = load_relaxed_device(from);
    }

    __device__ __forceinline__ bool is_there() const
    {
        return from == nullptr || min(min(numbers.x, numbers.y), min(numbers.z, numbers.w)) != 0;
    }
};

__device__ __forceinline__ mid_eight mid_eight_at(const layer_product &by, const uint32_t *mid, int32_t row, int32_t column, int32_t end)
{
    mid_eight to = {};

    if (column < end && column < by.depth) to.from = mid + (row * by.depth + column) / 2;
    to.look();
    return to;
}

__device__ __forceinline__ bool are_there(const mid_eight (&at)[kLooks])
{
    bool all = true;

#pragma unroll
    for (int32_t i = 0; i < kLooks; i++)
        all = all && at[i].is_there();
    return all;
}

// The first `count` looks at a row become operand rows, for all lanes of a warp. Codes are under way at once.
template <class P, int count>
__device__ __forceinline__ void keep_looks(const layer_product &by, unsigned char *to, const mid_eight (&at)[kLooks], int32_t row, int32_t column, int32_t end)
{
    operand_eight eights[count];

#pragma unroll
    for (int32_t i = 0; i < count; i++)
        eights[i] = code_eight<P>(at[i].numbers, P::mid_is_bf16);
#pragma unroll
    for (int32_t i = 0; i < count; i++)
        if (column + i * kLookColumns < end) keep_eight<P>(by, to, eights[i], row, column + i * kLookColumns);
}

// Once a warp has looked as often as it may, no later wait of the block's looks again, or each would take as long.
__device__ __forceinline__ int32_t looks_before(const layer_smem &smem)
{
    return *static_cast<const volatile int32_t *>(&smem.looks);
}

// Of a job's rows of mid what a stage of its weights is multiplied with, by the warp that does. Several looks are under way at once.
template <class P> __device__ __forceinline__ void keep_mid(const layer_args_device &args, layer_smem &smem, const job &j, int32_t stage)
{
    constexpr int32_t columns = P::units * P::depth; // of a stage
    const layer_product &by = args.down;
    const int32_t first = stage * columns, end = min(first + columns, by.eights * 8), lane = threadIdx.x % 32;
    const uint32_t *mid = mid_half(args, smem, 0);

    for (uint32_t tokens = j.tokens; tokens != 0; tokens &= tokens - 1) {
        const int32_t row = j.choice[__ffs(tokens) - 1];

        for (int32_t column = first + lane * 8; column - lane * 8 < end; column += kLooks * kLookColumns) { // all lanes go on or none
            mid_eight at[kLooks];

#pragma unroll
            for (int32_t i = 0; i < kLooks; i++)
                at[i] = mid_eight_at(by, mid, row, column + i * kLookColumns, end);
            for (int32_t looks = looks_before(smem); !are_there(at) && looks < kLooksMost<P>; looks++) {
                if (looks == kLooksMost<P> - 1) smem.looks = kLooksMost<P>;
                spin_pause(20);
#pragma unroll
                for (int32_t i = 0; i < kLooks; i++)
                    if (!at[i].is_there()) at[i].look();
            }
            __syncwarp();
            if (column - lane * 8 + kLookColumns >= end)
                keep_looks<P, 1>(by, operand_of(by, smem), at, row, column, end);
            else
                keep_looks<P, kLooks>(by, operand_of(by, smem), at, row, column, end);
        }
    }
    __syncwarp();
}

} // namespace

#endif
