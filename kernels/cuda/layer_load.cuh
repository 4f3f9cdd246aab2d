// The stages of a whole layer in one launch: which tiles a block has, and how their weights come into shared memory. Included by layer.cu
// alone.

#ifndef MOXIE_KERNELS_CUDA_LAYER_LOAD_CUH
#define MOXIE_KERNELS_CUDA_LAYER_LOAD_CUH

#include "kernels/cuda/layer_jobs.cuh"

namespace {

// The stages that a warp goes through, over all its tiles.
struct stage_ring {
    int32_t count, stage;
    uint32_t round_odd;

    __device__ __forceinline__ void advance()
    {
        if (++stage < count) return;
        stage = 0;
        round_odd ^= 1;
    }
};

// A stage has one warp that loads it and one that multiplies it, round by round: a wait for a parity cannot tell a round from the one
// before the last.
template <class P> __device__ __forceinline__ bool is_loaded_by(const stage_ring &ring)
{
    return ring.stage % kLoaders == (static_cast<int32_t>(threadIdx.x) - P::loading) / 32;
}

template <class P> __device__ __forceinline__ unsigned char *stage_at(layer_smem &smem, int32_t stage)
{
    return smem.stages + stage * P::stage_bytes;
}

// A tile's rows: of the matrix, the first of each half, or where gate and up lie in turns the first of their kind; high -1: there is no
// second half. And the rows of blocks of scales.
struct tile_rows {
    int32_t low, high;
    int32_t low_block, high_block;
};

// Of the matrix, row `index` of a half.
__device__ __forceinline__ int32_t row_at(const layer_product &by, int32_t first, int32_t index, bool is_high)
{
    return by.order == ORDER_INTERLEAVED ? 2 * (first + index) + is_high : first + index;
}

// gate_up: gate and up of eight units.
__device__ __forceinline__ tile_rows rows_of_up(const layer_product &by, int32_t group)
{
    const int32_t unit = group * kHalf, block = unit / 128, second = by.scales.second_block + block;

    if (by.order == ORDER_PLAIN) return {unit, -1, block, block};
    if (by.order == ORDER_INTERLEAVED) return {unit, unit, block, second};
    if (by.order == ORDER_UP_GATE) return {by.outputs + unit, unit, second, block};
    return {unit, by.outputs + unit, block, second};
}

__device__ __forceinline__ tile_rows rows_of_down(int32_t output, int32_t end)
{
    const bool has_high = output + kHalf < end;

    return {output, has_high ? output + kHalf : -1, output / 128, (output + kHalf) / 128};
}

// The block's share of down: outputs, in eights, each of all jobs.
struct share {
    int32_t first, end;
};

__device__ __forceinline__ share share_of_down(const layer_args_device &args)
{
    const int32_t block = blockIdx.x, first = (block * args.eights_each + min(block, args.eights_more)) * kHalf;

    return {first, first + (args.eights_each + (block < args.eights_more)) * kHalf};
}

__device__ __forceinline__ int32_t tiles_of_up(const layer_args_device &args, const layer_smem &smem)
{
    return smem.jobs_count * (args.up.outputs / kHalf);
}

// ---- Loading -----------------------------------------------------------------------------------

// Which of an expert's scales the rows of a half have, where they have no more than two.
__device__ __forceinline__ int32_t scale_of_half(const layer_product &by, bool is_high)
{
    return is_high && by.order != ORDER_PLAIN && by.scales.halves > 1;
}

// A stage's scales, a lane one: of the weights' blocks, or of whole rows. Every lane arrives once its copy is there.
__device__ __forceinline__ void load_scales(const layer_product &by, layer_smem &smem, int32_t stage, int32_t expert, const tile_rows &rows, int32_t group)
{
    const int32_t lane = threadIdx.x % 32, index = lane % kHalf;
    const bool is_high = lane >= kHalf;
    const float *from = by.scales.scales + expert * by.scales.expert_stride;
    bool is_there = lane < kRows && (!is_high || rows.high >= 0);

    if (by.scales.format == FORMAT_FP8_BLOCK128) {
        from += static_cast<int64_t>(is_high ? rows.high_block : rows.low_block) * by.scales.row_stride + group + index;
        is_there = is_there && (group + index) * kFp8Group < by.depth;
    } else if (by.scales.format == FORMAT_FP8_CHANNEL) {
        from += row_at(by, is_high ? rows.high : rows.low, index, is_high);
    } else {
        from += scale_of_half(by, is_high);
    }
    if (is_there) cp_async_4(smem_address(&smem.stage_scale[stage][lane]), from);
    cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
}

// Where a weight row of a tile has its scales, of 4 bits.
__device__ __forceinline__ const unsigned char *packed_row(const layer_product &by, int32_t expert, const tile_rows &rows, int32_t row)
{
    const bool is_high = row >= kHalf;

    return scales_of_row(by.packed, expert, row_at(by, is_high ? rows.high : rows.low, row % kHalf, is_high));
}

// A stage's of them, `begin` bytes along the rows, as they are, with what lies beside them in 16 bytes, and zeros past a row's end. Two lanes
// share a row. Every lane arrives once its copies are there.
template <class P>
__device__ __forceinline__ void load_packed_scales(const layer_product &by, layer_smem &smem, int32_t stage, int32_t expert, const tile_rows &rows,
                                                   int32_t begin)
{
    const int32_t lane = threadIdx.x % 32, row = lane % kRows, bytes = P::units * by.packed.step_bytes;
    const uint32_t to = smem_address(stage_at<P>(smem, stage)) + 2 * P::half_bytes + row * P::scale_pitch_bytes;

    if (row < kHalf || rows.high >= 0) {
        const scales_span span(by.packed, packed_row(by, expert, rows, row), begin, bytes);

        for (int32_t at = lane / kRows * 16; at < bytes + 15; at += 32)
            span.copy(to, at);
    }
    cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
}

// Of a stage that has so many bytes of its rows and more.
template <class P> __device__ __forceinline__ int32_t units_of(int32_t left)
{
    return min((left + kUnitBytes - 1) / kUnitBytes, P::units);
}

// A stage of a tile, `at` bytes along its rows, and zeros past their end. By one warp.
template <class P>
__device__ __forceinline__ void load_stage(const layer_product &by, layer_smem &smem, int32_t expert, const tile_rows &rows, const stage_ring &ring, int32_t at)
{
    const bool has_high = rows.high >= 0;
    unsigned char *to = stage_at<P>(smem, ring.stage);
    uint64_t *full = &smem.full[ring.stage];

    mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
    if (elect_one()) {
        const int32_t boxes = by.is_whole ? 1 : units_of<P>(by.row_bytes - at), box_bytes = by.is_whole ? P::half_bytes : kHalfUnitBytes;

        mbarrier_arrive_expect_tx(full, (has_high ? 2 : 1) * boxes * box_bytes);
        for (int32_t box = 0; box < boxes; box++, to += kHalfUnitBytes) {
            const int32_t byte = by.is_whole ? 0 : at + box * kUnitBytes, unit = by.is_whole ? at / kUnitBytes : 0;

            cp_async_bulk_tensor_5d<true>(to, &by.map, full, byte, rows.low, 0, unit, expert);
            if (has_high) cp_async_bulk_tensor_5d<true>(to + P::half_bytes, &by.map, full, byte, rows.high, by.order == ORDER_INTERLEAVED, unit, expert);
        }
    }
    __syncwarp();
    if (P::is_scaled) load_scales(by, smem, ring.stage, expert, rows, at / kFp8Group);
    if (P::is_packed) load_packed_scales<P>(by, smem, ring.stage, expert, rows, at / kUnitBytes * by.packed.step_bytes);
}

// Of a tile the stages of this loading warp: who has asked for copies is held for 500 cycles, so there are several. `asked` is the last one.
template <class P>
__device__ __forceinline__ void load_tile(const layer_product &by, layer_smem &smem, int32_t expert, const tile_rows &rows, stage_ring &ring,
                                          stage_ring &asked)
{
    for (int32_t at = 0; at < by.row_bytes; at += P::row_bytes, ring.advance()) {
        if (!is_loaded_by<P>(ring)) continue;
        load_stage<P>(by, smem, expert, rows, ring, at);
        asked = ring;
    }
}

// ---- Tiles of gate_up --------------------------------------------------------------------------

// Of the block's tiles this one; waits until it is found.
__device__ __forceinline__ tile tile_at(layer_smem &smem, int32_t number)
{
    mbarrier_wait(&smem.found[number % kTiles], number / kTiles % 2);
    return smem.tiles[number % kTiles];
}

// By who finds it, once the stages of the one before are asked for.
__device__ __forceinline__ void publish_tile(layer_smem &smem, int32_t number, const tile &t)
{
    const int32_t before = number - 1;

    if (before >= 0) mbarrier_wait(&smem.begun[before % kTiles], before / kTiles % 2);
    smem.tiles[number % kTiles] = t;
    mbarrier_arrive(&smem.found[number % kTiles]);
}

// The tiles of a turn: first half of what each block will have, then one at a time, so that all end at once.
struct tile_range {
    int32_t first, end;
};

__device__ __forceinline__ tile_range tiles_of_turn(const layer_args_device &args, const layer_smem &smem, uint32_t turn)
{
    const int32_t blocks = gridDim.x, all = tiles_of_up(args, smem), chunk = max(args.by_turns.divide(all), 1), index = static_cast<int32_t>(turn);
    const int32_t first = index < blocks ? index * chunk : blocks * (chunk - 1) + index;

    return {first, min(first + (index < blocks ? chunk : 1), all)};
}

__device__ __forceinline__ tile tile_of(const layer_args_device &args, int32_t index)
{
    const int32_t job = args.by_groups.divide(index);

    return {job, index - job * (args.up.outputs / kHalf)};
}

// By one thread.
__device__ __forceinline__ first_turn take_first(const layer_args_device &args)
{
    return {atomicAdd(&args.turns->taken, 1u), __ldcg(&args.turns->launches)};
}

// By that thread, from the first turn on; what comes next is asked for ahead, since an answer takes 2 us behind the weights of all
// blocks. The last tile has no job. The last block makes all turns those of the next launch.
__device__ __forceinline__ void find_tiles(const layer_args_device &args, layer_smem &smem)
{
    const int32_t all = tiles_of_up(args, smem);
    tile_range now = tiles_of_turn(args, smem, smem.first.turn);
    uint32_t next = atomicAdd(&args.turns->taken, 1u);
    int32_t number = 0;

    while (now.first < all) {
        for (; now.first < now.end; now.first++)
            publish_tile(smem, number++, tile_of(args, now.first));
        now = tiles_of_turn(args, smem, next);
        if (now.first < all) next = atomicAdd(&args.turns->taken, 1u);
    }
    // No answer comes after the block has left, when others may have begun to count anew.
    publish_tile(smem, number, {-1, static_cast<int32_t>(next)});
    if (atomicAdd(&args.turns->left, 1u) == gridDim.x - 1) *args.turns = {0, 0, smem.first.launches + 1, 0};
}

// ---- The loading warps -------------------------------------------------------------------------

// The half of mid that the next launch writes.
template <class P> __device__ __forceinline__ void clear_mid(const layer_args_device &args, const layer_smem &smem)
{
    const int64_t threads = kLoaders * 32;
    uint4 *half = reinterpret_cast<uint4 *>(mid_half(args, smem, 1));

    for (int64_t i = blockIdx.x * threads + threadIdx.x - P::loading; i < args.mid_words / 4; i += gridDim.x * threads)
        half[i] = {};
}

// The block's first tile, which nobody has to be asked for.
__device__ __forceinline__ tile first_tile(const layer_args_device &args, const layer_smem &smem)
{
    const tile_range turn = tiles_of_turn(args, smem, smem.first.turn);

    return turn.first < turn.end ? tile_of(args, turn.first) : tile{-1, 0};
}

template <class P> __device__ __forceinline__ void load_all(const layer_args_device &args, layer_smem &smem)
{
    stage_ring ring = {stages_of<P>(args, smem), 0, 0}, asked = {};
    share of;
    tile t = first_tile(args, smem);

    for (int32_t number = 0; t.job >= 0; t = tile_at(smem, ++number)) {
        if (is_loaded_by<P>(ring) && threadIdx.x % 32 == 0) mbarrier_arrive(&smem.begun[number % kTiles]);
        load_tile<P>(args.up, smem, smem.jobs[t.job].expert, rows_of_up(args.up, t.group), ring, asked);
    }
    of = share_of_down(args);
    // Memory answers in the order in which it is asked, more or less, and for gate_up's weights others wait: of down's, nothing is asked
    // for before it has a stage.
    if (asked.count > 0) mbarrier_wait(&smem.full[asked.stage], asked.round_odd);
    for (int32_t output = of.first; output < of.end; output += kRows)
        for (int32_t job = 0; job < smem.jobs_count; job++)
            load_tile<P>(args.down, smem, smem.jobs[job].expert, rows_of_down(output, of.end), ring, asked);
    clear_mid<P>(args, smem);
}

} // namespace

#endif
