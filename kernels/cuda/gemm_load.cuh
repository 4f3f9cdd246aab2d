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
__device__ __forceinline__ void look_up(const gemm_args &args, const tile &t, int32_t thread, int32_t (&flat)[gathered<P>::looked_up])
{
#pragma unroll
    for (int32_t i = 0; i < gathered<P>::looked_up; i++) {
        int32_t pair = t.pair + max(min(thread + i * 128, t.tokens - 1), 0);

        flat[i] = args.pair_row != nullptr ? args.pair_row[pair] : pair;
    }
}

template <class P>
__device__ __forceinline__ void find_rows(const gemm_args &args, gemm_smem<P> &smem, const int32_t (&flat)[gathered<P>::looked_up],
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

// The block's first tile, and the weights of its first steps, which need nothing but the tables; how many steps those are.
template <class P> __device__ __forceinline__ int32_t load_ahead(const gemm_args &args, gemm_smem<P> &smem)
{
    const bool is_any = static_cast<int32_t>(blockIdx.x) < smem.tile_first[args.experts];
    stage_ring ring(smem);
    int32_t steps = is_any ? min((args.depth + P::depth - 1) / P::depth, ring.count) : 0;

    if (threadIdx.x % 128 == 0) {
        tile t = {};

        if (is_any) t = find_tile<P>(args, smem, blockIdx.x);
        smem.tiles[0] = t;
        for (int32_t step = 0; step < steps; step++, ring.advance())
            begin_stage<P>(args, smem, ring, t, step * P::depth);
    }
    return steps;
}

// The tiles of one block after its first, in order, each for the block that is free. For one thread.
template <class P> struct tile_source {
    const gemm_args &args;
    const gemm_smem<P> &smem;
    int32_t tiles, index;

    // What comes next is asked for a tile ahead, so that nobody waits for the answer. Every block that has a tile asks until it is
    // told that there is none, so `tiles` questions are asked in all, and the last one sets the count to 0 again.
    __device__ __forceinline__ void ask()
    {
        index = static_cast<int32_t>(gridDim.x + atomicInc(args.tiles_taken, tiles - 1));
    }

    __device__ __forceinline__ tile next()
    {
        tile found = {};

        if (index >= tiles) return found;
        found = find_tile<P>(args, smem, index);
        ask();
        return found;
    }
};

// The stages of a tile, from where the ring is. The weights of the first `ahead` are under way. For every thread that gathers, or
// one of each warp: each arrives at every stage, or it could fall behind by a round of the ring and wait for ever.
template <class P>
__device__ __forceinline__ void load_tile(const gemm_args &args, gemm_smem<P> &smem, const tile &t, const gathered<P> &from,
                                          stage_ring &ring, int32_t &ahead)
{
    constexpr int32_t element_bytes = kRowBytes / P::depth;
    const int32_t thread = threadIdx.x % 128;

    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance(), ahead--) {
        uint64_t *full = &smem.full[ring.stage];

        // Those that are under way were free, and may have been used already: the first thread has arrived for them.
        if (ahead <= 0) mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (thread == 0 && ahead <= 0) begin_stage<P>(args, smem, ring, t, k);
        if constexpr (P::gathers) {
            gather<P>(from, ring.tokens(smem), (args.depth - k) * element_bytes, k * element_bytes, t.columns, thread);
            cp_async_mbarrier_arrive_noinc(full);
        } else {
            load_tokens<P>(args, smem, ring, t, k);
            if (thread != 0) mbarrier_arrive(full);
        }
    }
}

// A thread's copies arrive at the stage's barrier by themselves, so that the loads run ahead as far as there are stages. The
// weights of the first `ahead` steps are under way.
template <class P> __device__ __forceinline__ void producer_loop(const gemm_args &args, gemm_smem<P> &smem, int32_t ahead)
{
    const int32_t thread = threadIdx.x % 128;
    const bool loads = P::gathers || thread % 32 == 0;
    int32_t flat[gathered<P>::looked_up];
    tile_source<P> source = {args, smem, smem.tile_first[args.experts], 0};
    gathered<P> from;
    stage_ring ring(smem);
    tile t;

    bar_sync<1, 128>(); // the first tile is there
    t = smem.tiles[0];
    if (thread == 0 && t.tokens > 0) source.ask();
    if (P::gathers) look_up<P>(args, t, thread, flat);
    for (int32_t at = 1; t.tokens > 0; at = (at + 1) % kTiles) {
        tile next;

        if (thread == 0) smem.tiles[at] = source.next();
        bar_sync<1, 128>(); // the next tile is there, and the addresses of the one before have been read
        next = smem.tiles[at];
        if (P::gathers) {
            find_rows<P>(args, smem, flat, thread, from);
            look_up<P>(args, next, thread, flat);
        }
        if (loads) load_tile<P>(args, smem, t, from, ring, ahead);
        __syncwarp();
        t = next;
    }
    // One more stage, with nothing in it, so that the other warpgroups see the end.
    if (!loads) return;
    mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
    mbarrier_arrive(&smem.full[ring.stage]);
    if (P::gathers && thread == 0) mbarrier_arrive(&smem.full[ring.stage]);
}

} // namespace

#endif
