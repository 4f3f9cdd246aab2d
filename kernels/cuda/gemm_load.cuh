// How a tile's weights and tokens come into shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH
#define MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH

#include "kernels/cuda/gemm_packed.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/ptx.cuh"

#include <type_traits>

namespace {

// A loading thread's share of the gather: the same 16 bytes of every step's of each sixteenth token row, or each eighth where a step has
// twice the inputs. Tokens past the tile's own are its last one: nothing is stored for them.
template <class P> struct gathered {
    static constexpr int threads = P::depth * P::element_bytes / 16; // of a row
    static constexpr int stride = 128 / threads;                     // between a thread's rows
    static constexpr int rows = P::columns / stride;
    static constexpr int looked_up = (P::columns + 127) / 128;
    const unsigned char *row[rows];
};

// What a loading thread keeps for the steps of a tile of gate_up.
template <class P> using tile_load = std::conditional_t<P::is_packed, loaded_scales<P>, gathered<P>>;

// Few rows into the L2, while route works: they were there before it began. Behind the weights that all blocks ask for they would
// come last, and nothing is multiplied without them.
__device__ __forceinline__ void prefetch_rows(const gemms_args_device &args)
{
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 128;

    if (at < args.rows_bytes) prefetch_l2(args.slabs[0].rows + at);
}

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
                                          int32_t thread, tile_load<P> &to)
{
#pragma unroll
    for (int32_t i = 0; i < gathered<P>::looked_up; i++) {
        int32_t index = flat[i] / args.rows_cap, row = flat[i] % args.rows_cap;
        const gemm_slab &slab = args.slabs[index];

        smem.token_row[thread + i * 128] = slab.rows + row * slab.row_stride_bytes;
    }
    bar_sync<1, 128>();
    if constexpr (!P::is_packed) {
#pragma unroll
        for (int32_t i = 0; i < gathered<P>::rows; i++)
            to.row[i] = smem.token_row[thread / gathered<P>::threads + i * gathered<P>::stride] + thread % gathered<P>::threads * 16;
    }
}

// A stage's inputs of the tile's token rows, from byte `at` of the rows on, swizzled as the copy engine would. Past the end of
// the rows, `left` bytes from there, zeros.
template <class P>
__device__ __forceinline__ void gather(const gathered<P> &from, unsigned char *tokens, int32_t left, int32_t at, int32_t columns, int32_t thread)
{
    constexpr int32_t stride = gathered<P>::stride;
    int32_t n = thread / gathered<P>::threads, chunk = thread % gathered<P>::threads;
    uint32_t to = smem_address(tokens) + (chunk / 8 * columns + n) * kRowBytes + (chunk % 8 ^ (n & 7)) * 16;
    uint32_t bytes = chunk * 16 < left ? 16 : 0;
    int32_t rows = columns - n;

#pragma unroll
    for (int32_t i = 0; i < gathered<P>::rows; i++) {
        // Few tokens do not go past what only more would have; a look at every row costs many more than it saves them.
        if ((i == 1 || i == 4) && i * stride >= columns) return;
        if (i * stride < rows) cp_async(to + i * stride * kRowBytes, from.row[i] + at, bytes);
    }
}

// The same where a step has so many inputs that a warp copies a row of it, of few rows. Row n is at row_at(n).
template <class P, class Rows>
__device__ __forceinline__ void gather_by_warps(const Rows &row_at, unsigned char *tokens, int32_t left, int32_t at, int32_t columns)
{
    const int32_t lane = threadIdx.x % 32;
    const uint32_t to = smem_address(tokens) + lane / 8 * columns * kRowBytes, bytes = lane * 16 < left ? 16 : 0;

    static_assert(P::depth * P::element_bytes == 32 * 16);
#pragma unroll 2
    for (int32_t n = threadIdx.x / 32 % 4; n < columns; n += 4)
        cp_async(to + n * kRowBytes + (lane % 8 ^ (n & 7)) * 16, row_at(n) + at + lane * 16, bytes);
}

// The same of more rows: eight lanes copy one, so that a warp finds the addresses of four at once, each for all parts of the row.
template <class P, class Rows>
__device__ __forceinline__ void gather_by_lanes(const Rows &row_at, unsigned char *tokens, int32_t left, int32_t at, int32_t columns)
{
    const int32_t first = gemm_smem<P>::thread() % 128 / 8, chunk = gemm_smem<P>::thread() % 8;
    const uint32_t to = smem_address(tokens) + (chunk ^ (first & 7)) * 16;

#pragma unroll 2
    for (int32_t n = first; n < columns; n += 16) {
        const unsigned char *from = row_at(n) + at + chunk * 16;

#pragma unroll
        for (int32_t part = 0; part < P::parts; part++)
            cp_async(to + (part * columns + n) * kRowBytes, from + part * kRowBytes, part * kRowBytes + chunk * 16 < left ? 16 : 0);
    }
}

// Two blocks of 64 rows, [64 rows][64 inputs], or rows_in [64 inputs][64 rows]: gate and up of 64 units, or rows in their order.
// Where rows lie along K a tensor map can put gate and up of eight units in turns, so both blocks hold both.
template <class P, bool read_once>
__device__ __forceinline__ void load_weights(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    unsigned char *to = ring.weights(smem);
    uint64_t *full = &smem.full[ring.stage];

    if (!P::rows_in) {
#pragma unroll
        for (int32_t part = 0; part < (P::is_packed ? 1 : P::parts); part++, to += kBlockBytes, k += P::part_depth)
            if (args.order != ORDER_PLAIN)
                cp_async_bulk_tensor_5d<read_once>(to, &args.weights, full, k, 0, 0, t.row_tile * (P::rows / 16), t.expert);
            else
                cp_async_bulk_tensor_3d<read_once>(to, &args.weights, full, k, t.row_tile * P::rows, t.expert);
    } else {
        int32_t first = t.row_tile * kRows, second = first + kBlockRows;

        if (args.order == ORDER_GATE_UP || args.order == ORDER_UP_GATE) {
            int32_t unit = t.row_tile * kBlockRows;

            first = unit + (args.order == ORDER_UP_GATE ? args.outputs : 0);
            second = unit + (args.order == ORDER_UP_GATE ? 0 : args.outputs);
        }
        cp_async_bulk_tensor_3d<read_once>(to, &args.weights, full, first, k, t.expert);
        cp_async_bulk_tensor_3d<read_once>(to + kBlockBytes, &args.weights, full, second, k, t.expert);
    }
}

// After a warp has asked for a box it is held for 500 cycles, in which the engine could begin four: so the loading warps take turns.
constexpr int32_t kLoadingWarps = 4;

// Of them, this one.
__device__ __forceinline__ int32_t loading_warp()
{
    return threadIdx.x / 32 % kLoadingWarps;
}

// Whether the calling thread is one of those that find tiles, all in the same way: of fp8 a warp, which is sooner done. In 16 bits it has no
// registers for that.
template <class P> __device__ __forceinline__ bool finds_tiles()
{
    return P::is_scaled ? loading_warp() == 0 : threadIdx.x % 128 == 0;
}

// Whether a loading warp asks for the weights of a tile's step.
__device__ __forceinline__ bool is_turn(int32_t step)
{
    return step % kLoadingWarps == loading_warp();
}

// Token rows that the copy engine brings of a tile. Of fp8 and many, in large boxes, the last of which may lie over the one before it.
template <class P> __device__ __forceinline__ int32_t boxed_rows(const tile &t)
{
    return P::is_scaled && t.columns > kFewBoxes ? (t.columns + kManyTokens - 1) / kManyTokens * kManyTokens : t.columns;
}

// A step's scales of the tile's token rows. For one thread.
template <class P>
__device__ __forceinline__ void load_token_scales(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    cp_async_bulk_tensor_3d<false>(smem.token_scale[ring.stage], &args.token_scales, &smem.full[ring.stage], t.pair & ~3, k / P::depth, 0);
}

// All of the tile's token rows and their scales. Rows past the tile's own belong to the next expert, or are zeros. For one thread.
template <class P>
__device__ __forceinline__ void load_tokens(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    uint64_t *full = &smem.full[ring.stage];

#pragma unroll 1
    for (int32_t n = 0; n < t.columns;) {
        const bool large = !P::is_few && n + kManyTokens <= t.columns;

#pragma unroll
        for (int32_t part = 0; part < P::parts; part++)
            cp_async_bulk_tensor_3d<false>(ring.tokens(smem) + (part * t.columns + n) * kRowBytes, large ? &args.many_tokens : &args.tokens,
                                           full, k + part * P::part_depth, t.pair + n, 0);
        n += large ? kManyTokens : 8;
    }
    if (P::is_scaled) load_token_scales<P>(args, smem, ring, t, k);
}

// This warp's share of them. For one thread of each warp; the one that asks for the weights comes last.
template <class P>
__device__ __forceinline__ void load_token_share(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    uint64_t *full = &smem.full[ring.stage];
    const int32_t rows = boxed_rows<P>(t), large = rows / kManyTokens, boxes = large + rows % kManyTokens / 8;

#pragma unroll 1
    for (int32_t box = (loading_warp() + kLoadingWarps - 1 - k / P::depth % kLoadingWarps) % kLoadingWarps; box < boxes + P::is_scaled;
         box += kLoadingWarps) {
        int32_t n = box < large ? box * kManyTokens : large * kManyTokens + (box - large) * 8;

        if (P::is_scaled && box < large) n = min(n, t.columns - kManyTokens); // 16 bits have no register for it
        if (box == boxes)
            load_token_scales<P>(args, smem, ring, t, k);
        else
            cp_async_bulk_tensor_3d<false>(ring.tokens(smem) + n * kRowBytes, box < large ? &args.many_tokens : &args.tokens, full, k, t.pair + n, 0);
    }
}

// A stage's weights, and how many bytes the copy engine will have brought when it is full. For one thread of the warp whose turn it is.
template <class P>
__device__ __forceinline__ void begin_stage(const gemm_args &args, gemm_smem<P> &smem, const stage_ring &ring, const tile &t, int32_t k)
{
    int32_t scales_bytes = P::is_scaled ? kScales * 4 : 0;

    mbarrier_arrive_expect_tx(&smem.full[ring.stage],
                              (smem.weight_rows + (P::gathers || (P::is_scaled && args.gathers) ? 0 : boxed_rows<P>(t) * P::parts)) * kRowBytes + scales_bytes);
    // Where no expert has pairs for two tiles its weights are read once.
    if (P::is_half || ring.bytes < stage_bytes<P>(P::columns))
        load_weights<P, true>(args, smem, ring, t, P::is_packed ? k / 2 : k);
    else
        load_weights<P, false>(args, smem, ring, t, P::is_packed ? k / 2 : k);
}

// A lot's tiles, from place `at` of the block's on, or the only one.
template <class Smem> __device__ __forceinline__ void put_lot(Smem &smem, int32_t at, tile first)
{
    smem.tiles[at] = first;
    for (int32_t i = 1; i < first.lot_tiles; i++) {
        first.row_tile++;
        smem.tiles[(at + i) % kTiles] = first;
    }
}

// The tiles of one block, in order, each for the block that is free. By who finds_tiles.
template <class U, class D> struct tile_source {
    const gemms_args_device &args;
    gemm_smem<U> &smem;
    gate_up_tiles of_gate_up;
    uint32_t index; // of the next tile, as the first lane was answered
    uint32_t early; // tiles so far

    __device__ __forceinline__ void ask()
    {
        if (!U::is_scaled || threadIdx.x % 32 == 0) index = atomicAdd(&args.progress->taken, 1u);
    }

    // Kept by each thread, because memory waits for what is looked up between two tiles; in 16 bits there are no registers for it.
    __device__ __forceinline__ gate_up_tiles tiles_of_gate_up() const
    {
        return U::is_scaled ? of_gate_up : gate_up_tiles(args, smem, false);
    }

    __device__ __forceinline__ tile find() const
    {
        return find_tile<U, D>(args, smem, tiles_of_gate_up(), static_cast<int32_t>(U::is_scaled ? uniform(index) : index));
    }

    // Of gate_up, what comes next is asked for a tile ahead, so that nobody waits for the answer. Of down it is when mid is there: a
    // block that waits for that would keep tiles from those who are free first.
    __device__ __forceinline__ tile next(const tile &before)
    {
        tile found = before;

        if (!U::is_packed && before.part == TILE_FIRST) { // packed weights have no such tiles, nor a register for the question
            found.row_tile++;
            found.part = TILE_SECOND;
            return found;
        }
        found = find();
        early += !before.is_late;
        if (!before.is_late && found.is_late) found.early = early;
        if (found.tokens > 0 && !is_of_down(found)) ask();
        return found;
    }

    // A tile, or all of its lot, to a place of the block's.
    __device__ __forceinline__ void put(int32_t at, const tile &found, bool in_lots) const
    {
        if (U::is_scaled && threadIdx.x % 32 != 0) return;
        if (in_lots)
            put_lot(smem, at, found);
        else
            smem.tiles[at] = found;
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
__device__ __forceinline__ bool mid_is_there(const gemms_args_device &args, const gemm_smem<P> &smem, const gate_up_tiles &of, int32_t expert, bool &early_ended)
{
    const int32_t early = of.first_late();
    const int32_t late = of.by_rows * smem.tiles_first[expert + 1] - max(of.by_rows * smem.tiles_first[expert], early);

    early_ended = early_ended || have_ended<P>(&args.progress->early, early);
    return early_ended && have_ended<P>(&args.late[expert], late);
}

// Steps of a tile: of those before `ahead` this warp's weights are under way.
struct steps {
    int32_t first, end, ahead;
    int32_t before; // of the lot, those of its tiles before this one
};

// Rows that are gathered, of gate_up. For every loading thread. A thread's copies arrive at the stage's barrier by themselves, so that
// the loads run ahead as far as there are stages.
template <class P>
__device__ __forceinline__ void load_gathered(const gemm_args &args, gemm_smem<P> &smem, const tile &t, const gathered<P> &from,
                                              stage_ring &ring, const steps &which)
{
    constexpr int32_t element_bytes = P::element_bytes;
    const int32_t thread = threadIdx.x % 128;

    for (int32_t step = which.first, k = step * P::depth; step < which.end; step++, k += P::depth, ring.advance()) {
        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (step >= which.ahead && is_turn(step) && elect_one()) begin_stage<P>(args, smem, ring, t, k);
        gather<P>(from, ring.tokens(smem), (args.depth - k) * element_bytes, k * element_bytes, t.columns, thread);
        cp_async_mbarrier_arrive_noinc(&smem.full[uniform(ring.stage)]);
    }
}

// Whether the loading warps take the steps of a tile whose rows come in boxes in turns, and pass the others': for few boxes that is sooner
// done than if all go through every step. A wait for a parity tells a round from the one before, not from the one before that: so a warp may
// pass stages if it waits at least once a round, and all meet before the next tile.
__device__ __forceinline__ bool in_turns(const tile &t)
{
    return t.columns <= kFewBoxes;
}

template <class P>
__device__ __forceinline__ void load_boxes_in_turns(const gemm_args &args, gemm_smem<P> &smem, const tile &t, stage_ring &ring, const steps &which)
{
    static_assert(gemm_smem<P>::stages_bytes / ((kRows + P::columns * P::parts) * kRowBytes) >= kLoadingWarps, "from turn to turn at most a round");

    for (int32_t step = which.first, k = step * P::depth; step < which.end; step++, k += P::depth, ring.advance()) {
        if (!is_turn(which.before + step)) continue;
        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (!elect_one()) continue;
        if (step >= which.ahead) begin_stage<P>(args, smem, ring, t, k);
        load_tokens<P>(args, smem, ring, t, k);
        mbarrier_arrive(&smem.full[ring.stage], P::loaders);
    }
}

// Of the loading thread's weight rows, the first scales of a tile.
template <class P> __device__ __forceinline__ void begin_scales(const gemm_args &args, const tile &t, loaded_scales<P> &to)
{
#pragma unroll
    for (int32_t i = 0; i < to.rows; i++)
        to.from[i] = packed_row_scales<P>(args, t, threadIdx.x % 128 + i * 128);
    if constexpr (P::is_wide) ask_scales<P>(args.packed, to, 0);
}

// Wide: the scales of the steps from this one on that share a slot, if it is their first.
template <class P>
__device__ __forceinline__ void load_slot(const gemm_args &args, gemm_smem<P> &smem, stage_ring &ring, int32_t step, loaded_scales<P> &scales)
{
    const packed_scales &by = args.packed;
    const int32_t begin = step * by.step_bytes;

    if (!begins_slot<P>(by, step)) return;
    mbarrier_wait(&smem.empty[barrier_of(ring.scales)], ring.scales.round_odd ^ 1);
    store_scales<P>(by, smem, ring.scales, scales, begin);
    mbarrier_arrive(&smem.full[barrier_of(ring.scales)]);
    ring.scales.advance();
    if (step + slot_steps<P>(by) < steps_of<P>(args)) ask_scales<P>(by, scales, begin + kScalesRaw);
}

// The same beside packed weights: of either product, since a step has as many boxes of rows as four of others.
template <class P, class Rows>
__device__ __forceinline__ void load_packed(const gemm_args &args, gemm_smem<P> &smem, const tile &t, const Rows &row_at, stage_ring &ring,
                                            const steps &which, loaded_scales<P> &scales)
{
    if (which.first == 0) begin_scales<P>(args, t, scales);
    for (int32_t step = which.first, k = step * P::depth; step < which.end; step++, k += P::depth, ring.advance()) {
        const int32_t left = ((P::in_pieces ? whole_pieces(args.depth) : args.depth) - k) * P::element_bytes, at = k * P::element_bytes;

        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (step >= which.ahead && is_turn(step) && elect_one()) begin_stage<P>(args, smem, ring, t, k);
        if (t.columns <= kRowsByWarps)
            gather_by_warps<P>(row_at, ring.tokens(smem), left, at, t.columns);
        else
            gather_by_lanes<P>(row_at, ring.tokens(smem), left, at, t.columns);
        if constexpr (!P::is_wide) copy_scales<P>(args.packed, smem, ring, scales, step);
        cp_async_mbarrier_arrive_noinc(&smem.full[uniform(ring.stage)]);
        if constexpr (P::is_wide) load_slot<P>(args, smem, ring, step, scales);
    }
}

// Of down, whose rows lie in the order of the pairs. Past the tile's own it is the last one.
template <class P>
__device__ __forceinline__ void load_packed_down(const gemm_args &args, gemm_smem<P> &smem, const tile &t, stage_ring &ring, const steps &which)
{
    const unsigned char *rows = args.rows + t.pair * args.rows_stride_bytes;
    const auto row_at = [&](int32_t n) { return rows + min(n, t.tokens - 1) * args.rows_stride_bytes; };
    loaded_scales<P> scales;

    load_packed<P>(args, smem, t, row_at, ring, which, scales);
}

// Rows that come in boxes, for the loading warps.
template <class P>
__device__ __forceinline__ void load_boxes(const gemm_args &args, gemm_smem<P> &smem, const tile &t, stage_ring &ring, const steps &which)
{
    if (in_turns(t)) {
        load_boxes_in_turns<P>(args, smem, t, ring, which);
        return;
    }
    for (int32_t step = which.first, k = step * P::depth; step < which.end; step++, k += P::depth, ring.advance()) {
        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (!elect_one()) continue;
        if (step >= which.ahead && is_turn(step)) begin_stage<P>(args, smem, ring, t, k);
        load_token_share<P>(args, smem, ring, t, k);
        mbarrier_arrive(&smem.full[ring.stage], P::loaders / kLoadingWarps);
    }
}

// All tiles of a lot of down, of which `t` is the first and then the last.
template <class P>
__device__ __forceinline__ void load_lot(const gemm_args &args, gemm_smem<P> &smem, tile &t, stage_ring &ring, int32_t ahead)
{
    steps which = {0, steps_of<P>(args), ahead, 0};

    for (;;) {
        load_boxes<P>(args, smem, t, ring, which);
        if (--t.lot_tiles == 0) return;
        which.ahead = 0;
        which.before += which.end;
        t.row_tile++;
    }
}

// How often a warp of a launch looks for mid at most, more than a minute: it is not there before only where the host, or a peer, wrote
// over ids or counts while blocks counted them, which then have other tiles each.
#ifndef GEMMS_LOOKS_MOST
#define GEMMS_LOOKS_MOST (1 << 26)
#endif

// Of a block's tiles of down.
struct mid_waits {
    bool early_ended;
    int32_t looks; // so far
};

// Until mid is there, the loading warps ask for weights as far as there is room; the first step of this one whose weights are not under
// way.
template <class P>
__device__ __forceinline__ int32_t await_mid(const gemms_args_device &args, gemm_smem<P> &smem, const gate_up_tiles &of, const tile &t, stage_ring ring,
                                             mid_waits &waits)
{
    const int32_t last = min(steps_of<P>(args.down), ring.count);
    int32_t step = loading_warp();

    ring.advance(step);
    while (!__all_sync(~0u, mid_is_there<P>(args, smem, of, t.expert, waits.early_ended)) && waits.looks < GEMMS_LOOKS_MOST) {
        waits.looks++;
        if (step >= last || !__all_sync(~0u, mbarrier_test(&smem.empty[ring.stage], ring.round_odd ^ 1))) {
            spin_pause(20);
            continue;
        }
        if (elect_one()) begin_stage<P>(args.down, smem, ring, t, step * P::depth);
        step += kLoadingWarps;
        ring.advance(kLoadingWarps);
    }
    fence_proxy_async_global(); // threads wrote it, and the engine reads it
    return step;
}

__device__ __forceinline__ bool is_of_gate_up(const tile &t)
{
    return t.tokens > 0 && !is_of_down(t);
}

// Of the block's first tile, whose weights need nothing but the tables; not many, behind which its tokens would wait, and fewer where
// those are looked up after them.
template <class U> __device__ __forceinline__ int32_t steps_ahead(const gemms_args_device &args, const tile &t)
{
    const int32_t most = args.counted.ids != nullptr || U::is_packed ? kLoadingWarps / 2 : kLoadingWarps; // packed may have two stages

    return is_of_gate_up(t) ? min(steps_of<U>(args.gate_up) - 1, most) : 0;
}

// What has been asked for before the first weights, behind which an answer takes 4 us.
template <class U> struct asked {
    uint32_t index; // the block's second tile, for the first loading thread
    int32_t flat[gathered<U>::looked_up]; // rows of its first one; where ids are counted, nobody knows them yet
};

// The first tile of the block, by the first loading thread, and the weights of its first steps, one for a warp.
template <class U, class D>
__device__ __forceinline__ void load_ahead(const gemms_args_device &args, gemm_smem<U> &smem, uint32_t index, asked<U> &first)
{
    const int32_t thread = threadIdx.x % 128;
    stage_ring ring(smem);

    if (finds_tiles<U>()) {
        const tile_source<U, D> source = {args, smem, {args, smem, U::is_scaled}, index, 0};

        source.put(0, source.find(), true);
    }
    bar_sync<1, 128>(); // the tile is there
    if (!is_of_gate_up(smem.tiles[0])) return;
    if (thread == 0) first.index = atomicAdd(&args.progress->taken, 1u);
    if (U::gathers && args.counted.ids == nullptr) look_up<U>(args, smem.tiles[0], thread, first.flat);
    ring.advance(loading_warp());
    if (loading_warp() < steps_ahead<U>(args, smem.tiles[0]) && elect_one())
        begin_stage<U>(args.gate_up, smem, ring, smem.tiles[0], loading_warp() * U::depth);
}

// Of a tile of gate_up, for the loading threads.
template <class P>
__device__ __forceinline__ void load_steps(const gemms_args_device &args, gemm_smem<P> &smem, const tile &t, tile_load<P> &from,
                                           stage_ring &ring, const steps &which)
{
    if constexpr (P::is_packed)
        load_packed<P>(args.gate_up, smem, t, [&smem](int32_t n) { return smem.token_row[n]; }, ring, which, from);
    else if constexpr (P::gathers)
        load_gathered<P>(args.gate_up, smem, t, from, ring, which);
    else
        load_boxes<P>(args.gate_up, smem, t, ring, which);
}

// The block's tiles of gate_up, and the first after them, whose place is returned. What comes next is found once as much is under way as
// there is room for, but for a last step: those who multiply see what comes next when they have seen that.
template <class U, class D>
__device__ __forceinline__ int32_t load_gate_up(const gemms_args_device &args, gemm_smem<U> &smem, asked<U> &first,
                                                tile_source<U, D> &source, stage_ring &ring)
{
    const int32_t thread = threadIdx.x % 128, last = steps_of<U>(args.gate_up), filled = min(last - 1, ring.count);
    int32_t at = 0;
    tile t = smem.tiles[0];
    int32_t ahead = steps_ahead<U>(args, t);

    if (U::gathers && args.counted.ids != nullptr && is_of_gate_up(t)) look_up<U>(args, t, thread, first.flat);
    while (is_of_gate_up(t)) {
        tile_load<U> from;

        if (U::is_packed) bar_sync<1, 128>(); // the addresses of the tile before have been read
        if (U::gathers) find_rows<U>(args, smem, first.flat, thread, from);
        load_steps<U>(args, smem, t, from, ring, {0, filled, ahead, 0});
        at = (at + 1) % kTiles;
        if (finds_tiles<U>()) source.put(at, source.next(t), true);
        bar_sync<1, 128>(); // the next tile is there, and the addresses of this one have been read
        if (U::gathers && !is_of_down(smem.tiles[at])) look_up<U>(args, smem.tiles[at], thread, first.flat);
        load_steps<U>(args, smem, t, from, ring, {filled, last, 0, 0});
        if (!U::gathers && in_turns(t)) bar_sync<1, 128>(); // all of its steps have been asked for
        t = smem.tiles[at];
        ahead = 0;
    }
    return at;
}

// The block's tiles of down, from that place on. `in_lots` is known when compiled, so that tiles of many steps go through no loop that
// they do not need.
template <class U, class D, bool in_lots>
__device__ __forceinline__ void load_down(const gemms_args_device &args, gemm_smem<U> &smem, tile_source<U, D> &source, stage_ring &ring, int32_t at)
{
    mid_waits waits = {};

    for (tile t = smem.tiles[at]; t.tokens > 0; t = smem.tiles[at]) {
        int32_t ahead = await_mid<D>(args, smem, source.tiles_of_gate_up(), t, ring, waits);

        at = (at + (in_lots ? t.lot_tiles : 1)) % kTiles;
        if (finds_tiles<U>()) source.ask();
        if constexpr (in_lots) {
            load_lot<D>(args.down, smem, t, ring, ahead);
            if (finds_tiles<U>()) source.put(at, source.next(t), true);
        } else {
            if constexpr (D::is_packed)
                load_packed_down<D>(args.down, smem, t, ring, {0, steps_of<D>(args.down), ahead, 0});
            else
                load_boxes<D>(args.down, smem, t, ring, {0, steps_of<D>(args.down), ahead, 0});
            if (finds_tiles<U>()) source.put(at, source.next(t), false);
        }
        bar_sync<1, 128>(); // the next tiles are there, and all steps of these have been asked for
    }
}

} // namespace

#endif
