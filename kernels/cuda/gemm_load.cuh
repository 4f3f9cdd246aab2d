// How a tile's weights and tokens come into shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH
#define MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// A loading thread's share of the gather: the same 16 bytes of every 128 of each sixteenth token row. Tokens past the tile's own
// are its last one: nothing is stored for them.
template <class P> struct gathered {
    static constexpr int rows = P::columns / 16;
    static constexpr int looked_up = (P::columns + 127) / 128;
    const unsigned char *row[rows];
};

// The flat rows whose addresses this thread finds for all; asked for a tile ahead, so that nobody waits for them.
template <class P>
__device__ __forceinline__ void look_up(const gemms_args_device &args, const tile &t, int32_t thread, int32_t (&flat)[gathered<P>::looked_up])
{
#pragma unroll
    for (int32_t i = 0; i < gathered<P>::looked_up; i++) {
        int32_t pair = t.pair + max(min(thread + i * 128, t.tokens - 1), 0);

        flat[i] = args.pair_row != nullptr ? args.pair_row[pair] : pair;
    }
}

template <class P>
__device__ __forceinline__ void find_rows(const gemms_args_device &args, gemm_smem<P> &smem, const int32_t (&flat)[gathered<P>::looked_up],
                                          int32_t thread, gathered<P> &to)
{
#pragma unroll
    for (int32_t i = 0; i < gathered<P>::looked_up; i++) {
        int32_t index = flat[i] / args.rows_cap, row = flat[i] % args.rows_cap;
        const gemm_slab &slab = args.slabs[index];

        smem.token_row[thread + i * 128] = slab.rows + row * slab.row_stride_bytes;
    }
    bar_sync<1, 128>();
#pragma unroll
    for (int32_t i = 0; i < gathered<P>::rows; i++)
        to.row[i] = smem.token_row[thread / 8 + i * 16] + thread % 8 * 16;
}

// A stage's inputs of the tile's token rows, from byte `at` of the rows on, swizzled as the copy engine would. Past the end of
// the rows, `left` bytes from there, zeros.
template <class P>
__device__ __forceinline__ void gather(const gathered<P> &from, unsigned char *tokens, int32_t left, int32_t at, int32_t columns, int32_t thread)
{
    int32_t n = thread / 8, chunk = thread % 8;
    uint32_t to = smem_address(tokens) + n * kRowBytes + (chunk ^ (n & 7)) * 16;
    uint32_t bytes = chunk * 16 < left ? 16 : 0;

#pragma unroll
    for (int32_t i = 0; i < gathered<P>::rows; i++)
        if (i * 16 < columns) cp_async(to + i * 16 * kRowBytes, from.row[i] + at, bytes);
}

// Two blocks of 64 rows, [64 rows][64 inputs], or rows_in [64 inputs][64 rows]: gate and up of 64 units, or rows in their order.
// Where rows lie along K a tensor map can put gate and up of eight units in turns, so both blocks hold both.
template <class P>
__device__ __forceinline__ void load_weights(const gemm_args &args, unsigned char *to, uint64_t *full, const tile &t, int32_t k)
{
    if (!P::rows_in && args.order != ORDER_PLAIN) {
        cp_async_bulk_tensor_5d(to, &args.weights, full, k, 0, 0, t.row_tile * 8, t.expert);
    } else if (!P::rows_in) {
        cp_async_bulk_tensor_3d(to, &args.weights, full, k, t.row_tile * kRows, t.expert);
    } else {
        int32_t first = t.row_tile * kRows, second = first + kBlockRows;

        if (args.order == ORDER_GATE_UP || args.order == ORDER_UP_GATE) {
            int32_t unit = t.row_tile * kBlockRows;

            first = unit + (args.order == ORDER_UP_GATE ? args.outputs : 0);
            second = unit + (args.order == ORDER_UP_GATE ? 0 : args.outputs);
        }
        cp_async_bulk_tensor_3d(to, &args.weights, full, first, k, t.expert);
        cp_async_bulk_tensor_3d(to + kBlockBytes, &args.weights, full, second, k, t.expert);
    }
}

// This warp's share of the tile's token rows and of their scales. Rows past the tile's own belong to the next expert, or are zeros.
// For one thread of each warp, since asking for a box takes time; the first warp, which asks for the weights, comes last.
template <class P>
__device__ __forceinline__ void load_tokens(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    uint64_t *full = &smem.full[ring.stage];
    int32_t large = t.columns / kManyTokens, boxes = large + t.columns % kManyTokens / 8;

#pragma unroll 1
    for (int32_t box = (threadIdx.x / 32 + 3) % 4; box < boxes + P::is_scaled; box += 4) {
        int32_t n = box < large ? box * kManyTokens : large * kManyTokens + (box - large) * 8;

        if (box == boxes)
            cp_async_bulk_tensor_3d(smem.token_scale[ring.stage], &args.token_scales, full, t.pair & ~3, k / P::depth, 0);
        else
            cp_async_bulk_tensor_3d(ring.tokens(smem) + n * kRowBytes, box < large ? &args.many_tokens : &args.tokens, full, k, t.pair + n, 0);
    }
}

// A stage's weights, and how many bytes the copy engine will have brought when it is full.
template <class P>
__device__ __forceinline__ void begin_stage(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    uint64_t *full = &smem.full[ring.stage];
    int32_t scales_bytes = P::is_scaled ? kScales * 4 : 0;

    mbarrier_arrive_expect_tx(full, (kRows + (P::gathers ? 0 : t.columns)) * kRowBytes + scales_bytes);
    load_weights<P>(args, ring.weights(smem), full, t, k);
}

// The tiles of one block, in order, each for the block that is free. For one thread.
template <class U, class D> struct tile_source {
    const gemms_args_device &args;
    const gemm_smem<U> &smem;
    uint32_t index; // of the next tile, as it was answered
    uint32_t early; // tiles so far

    __device__ __forceinline__ void ask()
    {
        index = atomicAdd(&args.progress->taken, 1u);
    }

    // Of gate_up, what comes next is asked for a tile ahead, so that nobody waits for the answer. Of down it is when mid is there: a
    // block that waits for that would keep tiles from those who are free first.
    __device__ __forceinline__ tile next(const tile &before)
    {
        tile found = before;

        if (before.part == TILE_FIRST) {
            found.row_tile++;
            found.part = TILE_SECOND;
            return found;
        }
        found = find_tile<U, D>(args, smem, static_cast<int32_t>(index));
        early += !before.is_late;
        if (!before.is_late && found.is_late) found.early = early;
        if (found.tokens > 0 && !found.is_down) ask();
        return found;
    }
};

// Whether `tiles` of gate_up have been counted, by every warp that multiplies.
template <class P> __device__ __forceinline__ bool have_ended(const uint32_t *counted, int32_t tiles)
{
    return tiles <= 0 || load_acquire_device(counted) == static_cast<uint32_t>(tiles * P::warpgroups * 4);
}

// Whether all that a tile of down multiplies is there: the early tiles of all experts, which are there for good once they were, and the
// late ones of its own. Most experts have none, and then nothing is read.
template <class P>
__device__ __forceinline__ bool mid_is_there(const gemms_args_device &args, const gemm_smem<P> &smem, int32_t expert, bool &early_ended)
{
    const int32_t early = first_late(args, smem.tiles_first), row_tiles = args.gate_up.row_tiles;
    const int32_t late = row_tiles * smem.tiles_first[expert + 1] - max(row_tiles * smem.tiles_first[expert], early);

    early_ended = early_ended || have_ended<P>(&args.progress->early, early);
    return early_ended && have_ended<P>(&args.late[expert], late);
}

// Rows that are gathered, of gate_up. For every loading thread. A thread's copies arrive at the stage's barrier by themselves, so that
// the loads run ahead as far as there are stages.
template <class P>
__device__ __forceinline__ void load_gathered(const gemm_args &args, gemm_smem<P> &smem, const tile &t, const gathered<P> &from, stage_ring &ring)
{
    constexpr int32_t element_bytes = kRowBytes / P::depth;
    const int32_t thread = threadIdx.x % 128;

    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance()) {
        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (thread == 0) begin_stage<P>(args, smem, ring, t, k);
        gather<P>(from, ring.tokens(smem), (args.depth - k) * element_bytes, k * element_bytes, t.columns, thread);
        cp_async_mbarrier_arrive_noinc(&smem.full[ring.stage]);
    }
}

// Rows that come in boxes, for one thread of each warp. The weights of the first `ahead` steps are under way.
template <class P>
__device__ __forceinline__ void load_boxes(const gemm_args &args, gemm_smem<P> &smem, const tile &t, stage_ring &ring, int32_t ahead)
{
    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance(), ahead--) {
        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (threadIdx.x % 128 == 0 && ahead <= 0) begin_stage<P>(args, smem, ring, t, k);
        load_tokens<P>(args, smem, ring, t, k);
        mbarrier_arrive(&smem.full[ring.stage], P::loaders / 4);
    }
}

// Until mid is there, the first of those threads loads weights as far as there is room; of how many steps.
template <class P>
__device__ __forceinline__ int32_t await_mid(const gemms_args_device &args, gemm_smem<P> &smem, const tile &t, stage_ring ring, bool &early_ended)
{
    const int32_t steps = threadIdx.x % 128 == 0 ? min(steps_of<P>(args.down), ring.count) : 0;
    int32_t ahead = 0;

    while (!mid_is_there<P>(args, smem, t.expert, early_ended)) {
        if (ahead == steps || !mbarrier_test(&smem.empty[ring.stage], ring.round_odd ^ 1)) {
            spin_pause(20);
            continue;
        }
        begin_stage<P>(args.down, smem, ring, t, ahead * P::depth);
        ahead++;
        ring.advance();
    }
    fence_proxy_async_global(); // threads wrote it, and the engine reads it
    return ahead;
}

// The first tile of the block and, where its rows come in boxes, the weights of its first steps, which need nothing but the tables;
// how many steps those are. For one thread.
template <class U, class D> __device__ __forceinline__ int32_t load_ahead(const gemms_args_device &args, gemm_smem<U> &smem, uint32_t index, stage_ring ring)
{
    const tile t = find_tile<U, D>(args, smem, static_cast<int32_t>(index));
    int32_t steps = 0;

    smem.tiles[0] = t;
    if constexpr (!U::gathers) {
        if (t.tokens > 0 && !t.is_down) steps = min(steps_of<U>(args.gate_up), ring.count);
        for (int32_t step = 0; step < steps; step++, ring.advance())
            begin_stage<U>(args.gate_up, smem, ring, t, step * U::depth);
    }
    return steps;
}

// The block takes no more tiles. The last one leaves the counts as they were: nobody waits any more, and who was waited for has counted.
__device__ __forceinline__ void end_progress(const gemms_args_device &args)
{
    gemm_progress &progress = *args.progress;

    fence_device();
    if (atomicAdd(&progress.left, 1u) != gridDim.x - 1) return;
    fence_device();
    progress.taken = progress.left = progress.early = 0;
    for (int32_t e = 0; e < args.experts; e++)
        args.late[e] = 0;
}

// The block's tiles of gate_up, and the first after them, whose place is returned. Of the first tile, the weights of the first `ahead`
// steps are under way.
template <class U, class D>
__device__ __forceinline__ int32_t load_gate_up(const gemms_args_device &args, gemm_smem<U> &smem, tile_source<U, D> &source, stage_ring &ring, [[maybe_unused]] int32_t ahead)
{
    const int32_t thread = threadIdx.x % 128;
    int32_t flat[gathered<U>::looked_up], at = 0;
    tile t = smem.tiles[0];

    if (thread == 0 && t.tokens > 0 && !t.is_down) source.ask();
    if (U::gathers && !t.is_down) look_up<U>(args, t, thread, flat);
    while (t.tokens > 0 && !t.is_down) {
        tile next;

        at = (at + 1) % kTiles;
        if (thread == 0) smem.tiles[at] = source.next(t);
        bar_sync<1, 128>(); // the next tile is there, and the addresses of the one before have been read
        next = smem.tiles[at];
        if constexpr (U::gathers) {
            gathered<U> from;

            find_rows<U>(args, smem, flat, thread, from);
            if (!next.is_down) look_up<U>(args, next, thread, flat);
            load_gathered<U>(args.gate_up, smem, t, from, ring);
        } else {
            if (thread % 32 == 0) load_boxes<U>(args.gate_up, smem, t, ring, ahead);
            ahead = 0;
        }
        __syncwarp();
        t = next;
    }
    return at;
}

// The block's tiles of down, from that place on.
template <class U, class D>
__device__ __forceinline__ void load_down(const gemms_args_device &args, gemm_smem<U> &smem, tile_source<U, D> &source, stage_ring &ring, int32_t at)
{
    const int32_t thread = threadIdx.x % 128;
    bool early_ended = false;

    for (tile t = smem.tiles[at]; t.tokens > 0; t = smem.tiles[at]) {
        at = (at + 1) % kTiles;
        if (thread % 32 == 0) {
            int32_t ahead = await_mid<D>(args, smem, t, ring, early_ended);

            if (thread == 0) source.ask();
            load_boxes<D>(args.down, smem, t, ring, ahead);
        }
        __syncwarp();
        if (thread == 0) smem.tiles[at] = source.next(t);
        bar_sync<1, 128>(); // the next tile is there
    }
}

// U and D are the two products.
template <class U, class D> __device__ __forceinline__ void producer_loop(const gemms_args_device &args, gemm_smem<U> &smem, int32_t ahead)
{
    tile_source<U, D> source = {args, smem, 0, 0};
    stage_ring ring(smem);
    int32_t at;

    bar_sync<1, 128>(); // the first tile is there
    at = load_gate_up<U, D>(args, smem, source, ring, ahead);
    load_down<U, D>(args, smem, source, ring, at);
    // One more stage, with nothing in it, so that the other warpgroups see the end.
    if (threadIdx.x % 32 != 0) return;
    mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
    mbarrier_arrive(&smem.full[ring.stage], U::loaders / 4 + (threadIdx.x % 128 == 0));
    if (threadIdx.x % 128 == 0) end_progress(args);
}

} // namespace

#endif
