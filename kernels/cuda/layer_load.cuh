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
__device__ __forceinline__ bool is_loaded_by(const stage_ring &ring)
{
    return ring.stage % kLoaders == (static_cast<int32_t>(threadIdx.x) - kLoading) / 32;
}

__device__ __forceinline__ bool is_multiplied_by(const stage_ring &ring)
{
    return ring.stage == static_cast<int32_t>(threadIdx.x) / 32;
}

__device__ __forceinline__ unsigned char *stage_at(layer_smem &smem, int32_t stage)
{
    return smem.stages + stage * kStageBytes;
}

// A tile's rows: of the matrix, the first of each half, and how far apart they are; high -1: there is no second half. And the rows of
// blocks of scales.
struct tile_rows {
    int32_t low, high, apart;
    int32_t low_block, high_block;
};

// gate_up: gate and up of eight units.
__device__ __forceinline__ tile_rows rows_of_up(const layer_product &by, int32_t group)
{
    const int32_t unit = group * kHalf, block = unit / 128, second = by.scales.second_block + block;

    if (by.order == ORDER_PLAIN) return {unit, -1, 1, block, block};
    if (by.order == ORDER_INTERLEAVED) return {2 * unit, 2 * unit + 1, 2, block, second};
    if (by.order == ORDER_UP_GATE) return {by.outputs + unit, unit, 1, second, block};
    return {unit, by.outputs + unit, 1, block, second};
}

__device__ __forceinline__ tile_rows rows_of_down(int32_t output, int32_t end)
{
    const bool has_high = output + kHalf < end;

    return {output, has_high ? output + kHalf : -1, 1, output / 128, (output + kHalf) / 128};
}

// The block's share of down: outputs, in eights, each of all jobs.
struct share {
    int32_t first, end;
};

__device__ __forceinline__ share share_of_down(const layer_args_device &args)
{
    const int32_t eights = args.down.outputs / kHalf, blocks = gridDim.x, block = blockIdx.x, each = eights / blocks, more = eights % blocks;
    const int32_t first = (block * each + min(block, more)) * kHalf;

    return {first, first + (each + (block < more)) * kHalf};
}

__device__ __forceinline__ int32_t tiles_of_up(const layer_args_device &args, const layer_smem &smem)
{
    return smem.jobs_count * (args.up.outputs / kHalf);
}

// ---- Loading -----------------------------------------------------------------------------------

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
        from += (is_high ? rows.high : rows.low) + index * rows.apart;
    } else {
        from += is_high && by.order != ORDER_PLAIN && by.scales.halves > 1;
    }
    if (is_there) cp_async_4(smem_address(&smem.stage_scale[stage][lane]), from);
    cp_async_mbarrier_arrive_noinc(&smem.full[stage]);
}

// A stage of a tile, `at` bytes along its rows. By one warp.
template <class P>
__device__ __forceinline__ void load_stage(const layer_product &by, layer_smem &smem, int32_t expert, const tile_rows &rows, const stage_ring &ring, int32_t at)
{
    const int64_t apart = rows.apart * by.row_stride_bytes;
    const unsigned char *weights = by.weights + expert * by.expert_stride_bytes + at;
    const unsigned char *low = weights + rows.low * by.row_stride_bytes, *high = weights + rows.high * by.row_stride_bytes;
    const int32_t bytes = min(kRowBytes, by.row_bytes - at);
    unsigned char *to = stage_at(smem, ring.stage);
    uint64_t *full = &smem.full[ring.stage];

    mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
    if (elect_one()) {
        mbarrier_arrive_expect_tx(full, (rows.high >= 0 ? kRows : kHalf) * bytes);
#pragma unroll
        for (int32_t r = 0; r < kHalf; r++) {
            cp_async_bulk(to + r * kRowPitch, low + r * apart, bytes, full);
            if (rows.high >= 0) cp_async_bulk(to + (kHalf + r) * kRowPitch, high + r * apart, bytes, full);
        }
    }
    __syncwarp();
    if (P::is_scaled) load_scales(by, smem, ring.stage, expert, rows, at / kFp8Group);
}

// Of a tile the stages of this loading warp: who has asked for copies is held for 500 cycles, so there are several.
template <class P>
__device__ __forceinline__ void load_tile(const layer_product &by, layer_smem &smem, int32_t expert, const tile_rows &rows, stage_ring &ring)
{
    for (int32_t at = 0; at < by.row_bytes; at += kRowBytes, ring.advance())
        if (is_loaded_by(ring)) load_stage<P>(by, smem, expert, rows, ring, at);
}

// ---- Tiles of gate_up --------------------------------------------------------------------------

// Of the block's tiles this one; waits until it is found.
__device__ __forceinline__ tile tile_at(layer_smem &smem, int32_t number)
{
    mbarrier_wait(&smem.found[number % kTiles], number / kTiles % 2);
    return smem.tiles[number % kTiles];
}

// By who finds it, a few tiles before its stages are asked for.
__device__ __forceinline__ void publish_tile(layer_smem &smem, int32_t number, const tile &t)
{
    const int32_t before = number - 1 - kAhead;

    if (before >= 0) mbarrier_wait(&smem.begun[before % kTiles], before / kTiles % 2);
    smem.tiles[number % kTiles] = t;
    mbarrier_arrive(&smem.found[number % kTiles]);
}

// The tiles of a turn: first a third of what each block will have, then one at a time, so that all end at once.
struct tile_range {
    int32_t first, end;
};

__device__ __forceinline__ tile_range tiles_of_turn(const layer_args_device &args, const layer_smem &smem, uint32_t turn)
{
    const int32_t blocks = gridDim.x, all = tiles_of_up(args, smem), chunk = max(all / (3 * blocks), 1), index = static_cast<int32_t>(turn);
    const int32_t first = index < blocks ? index * chunk : blocks * (chunk - 1) + index;

    return {first, min(first + (index < blocks ? chunk : 1), all)};
}

// By one thread, from the block's first turn on; then two are asked for ahead, since an answer takes 2 us behind the weights of all blocks.
// The last tile has no job.
__device__ __forceinline__ void find_tiles(const layer_args_device &args, layer_smem &smem, uint32_t turn)
{
    const int32_t groups = args.up.outputs / kHalf, all = tiles_of_up(args, smem);
    tile_range now = tiles_of_turn(args, smem, turn);
    uint32_t next = atomicAdd(&args.turns->taken, 1u), later = atomicAdd(&args.turns->taken, 1u);
    int32_t number = 0;

    while (now.first < all) {
        for (; now.first < now.end; now.first++)
            publish_tile(smem, number++, {now.first / groups, now.first % groups});
        now = tiles_of_turn(args, smem, next);
        next = later;
        if (now.first < all) later = atomicAdd(&args.turns->taken, 1u);
    }
    // No answer comes after the block has left, when others may have begun to count anew.
    publish_tile(smem, number, {-1, static_cast<int32_t>(next + later)});
}

// ---- The loading warps -------------------------------------------------------------------------

// The rows of the share of down into the L2, of as many jobs as there is room for, while memory has nothing else to do.
template <class P> __device__ __forceinline__ void ask_ahead(const layer_args_device &args, const layer_smem &smem, const share &of)
{
    const layer_product &by = args.down;
    const int64_t bytes = (of.end - of.first - 1) * by.row_stride_bytes + by.row_bytes;

    for (int32_t i = (static_cast<int32_t>(threadIdx.x) - kLoading) / 32; i < smem.jobs_count && (i + 1) * bytes <= kAheadBytes; i += kLoaders)
        if (elect_one())
            prefetch_l2_bulk(by.weights + smem.jobs[i].expert * by.expert_stride_bytes + of.first * by.row_stride_bytes, static_cast<uint32_t>(bytes));
}

template <class P> __device__ __forceinline__ void load_all(const layer_args_device &args, layer_smem &smem)
{
    const share of = share_of_down(args);
    stage_ring ring = {args.stages, 0, 0};

    for (int32_t number = 0;; number++) {
        const tile t = tile_at(smem, number);

        if (t.job < 0) break;
        if (is_loaded_by(ring) && threadIdx.x % 32 == 0) mbarrier_arrive(&smem.begun[number % kTiles]);
        load_tile<P>(args.up, smem, smem.jobs[t.job].expert, rows_of_up(args.up, t.group), ring);
    }
    if (of.end > of.first) ask_ahead<P>(args, smem, of);
    for (int32_t output = of.first; output < of.end; output += kRows)
        for (int32_t job = 0; job < smem.jobs_count; job++)
            load_tile<P>(args.down, smem, smem.jobs[job].expert, rows_of_down(output, of.end), ring);
}

} // namespace

#endif
