// How e4m3 rows that lie once, for all their experts, come into shared memory: their numbers are gathered by 16-byte copies, while their
// scales, which lie in the order of the pairs, come in boxes. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_GATHER_CUH
#define MOXIE_KERNELS_CUDA_GEMM_GATHER_CUH

#include "kernels/cuda/gemm_load.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// A loading thread's share: the same 16 bytes of every step's of each sixteenth token row. Tokens past the tile's own are its last one.
struct gathered_codes {
    static constexpr int rows = kScaled / 16;
    static constexpr int behind = 2; // steps that a warp asks for before it waits for one
    uint32_t offset[rows];           // from the first row
    int32_t waiting;                 // steps asked for and not waited for
};
static_assert(gathered_codes::behind < block_smem<true>::stages_bytes / ((kRows + kScaled) * kRowBytes), "or who multiplies has no stage");

// Without a register for it where others multiply.
__device__ __forceinline__ int32_t loading_thread()
{
    return static_cast<int32_t>(thread_read_anew() % 128);
}

// The flat rows that this lane finds for its warp: number `lane` and `lane` + 32 of its 48; asked for a tile ahead, so that nobody waits
// for them.
__device__ __forceinline__ void look_up_codes(const gemms_args_device &args, const tile &t, int32_t (&flat)[2])
{
    const int32_t thread = loading_thread(), first = thread % 32 / 4 * 16 + thread / 32 * 4 + thread % 4;

#pragma unroll
    for (int32_t i = 0; i < 2; i++)
        flat[i] = args.pair_row[t.pair + max(min(first + i * 128, t.tokens - 1), 0)];
}

__device__ __forceinline__ void find_codes(const gemms_args_device &args, const int32_t (&flat)[2], gathered_codes &to)
{
    const int32_t lane = loading_thread() % 32;
    const uint32_t stride = static_cast<uint32_t>(args.slabs[0].row_stride_bytes);

#pragma unroll
    for (int32_t i = 0; i < gathered_codes::rows; i++)
        to.offset[i] = static_cast<uint32_t>(__shfl_sync(~0u, flat[i / 8], i % 8 * 4 + lane / 8)) * stride + lane % 8 * 16;
}

// This warp's copies into the stage `back` before the ring's have landed.
__device__ __forceinline__ void arrive_codes(block_smem<true> &smem, const stage_ring &ring, int32_t back)
{
    const int32_t stage = ring.stage - back;

    fence_proxy_async(); // here, since those who multiply have no time for it
    __syncwarp();
    if (elect_one()) mbarrier_arrive(&smem.full[stage < 0 ? stage + ring.count : stage]);
}

// Steps of a tile of gate_up, for every loading thread. A warp says that a step is there once it has asked for the next two.
template <class P>
__device__ __forceinline__ void load_codes(const gemms_args_device &args, gemm_smem<P> &smem, const tile &t, gathered_codes &from, stage_ring &ring,
                                           const steps &which)
{
    const gemm_args &own = args.gate_up;
    const int32_t n = loading_thread() / 8, chunk = loading_thread() % 8, rows = t.columns - n;
    const uint32_t place = n * kRowBytes + (chunk ^ (n & 7)) * 16;

    for (int32_t step = which.first, k = step * P::depth; step < which.end; step++, k += P::depth, ring.advance()) {
        const unsigned char *first = args.slabs[0].rows + k;
        const uint32_t bytes = min(max(own.depth - k - chunk * 16, 0), 16); // zeros past the row's end
        uint32_t to;

        mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
        if (is_turn(step) && elect_one()) {
            if (step >= which.ahead) begin_stage<P>(own, smem, ring, t, k);
            load_token_scales<P>(own, smem, ring, t, k);
        }
        __syncwarp();
        to = smem_address(ring.tokens(smem)) + place;
#pragma unroll
        for (int32_t i = 0; i < gathered_codes::rows; i++)
            if (i * 16 < rows) cp_async(to + i * 16 * kRowBytes, first + from.offset[i], bytes);
        cp_async_commit();
        if (from.waiting < gathered_codes::behind) {
            from.waiting++;
            continue;
        }
        cp_async_wait<gathered_codes::behind>();
        arrive_codes(smem, ring, gathered_codes::behind);
    }
}

// As load_gate_up does where rows come in another way.
template <class U, class D>
__device__ __forceinline__ int32_t gather_gate_up(const gemms_args_device &args, gemm_smem<U> &smem, tile_source<U, D> &source, stage_ring &ring)
{
    const int32_t last = steps_of<U>(args.gate_up), filled = min(last - 1, ring.count);
    int32_t at = 0, ahead = steps_ahead<U>(args, smem.tiles[0]), flat[2];
    gathered_codes from;

    from.waiting = 0;
    if (is_of_gate_up(smem.tiles[0])) look_up_codes(args, smem.tiles[0], flat);
    while (is_of_gate_up(smem.tiles[at])) {
        const tile &t = smem.tiles[at];
        const int32_t next = (at + 1) % kTiles;

        find_codes(args, flat, from);
        load_codes<U>(args, smem, t, from, ring, {0, filled, ahead, 0});
        if (finds_tiles<U>()) source.put(next, source.next(t), true);
        bar_sync<1, 128>(); // the next tile is there
        if (is_of_gate_up(smem.tiles[next])) look_up_codes(args, smem.tiles[next], flat);
        load_codes<U>(args, smem, t, from, ring, {filled, last, 0, 0});
        at = next;
        ahead = 0;
    }
    cp_async_wait<0>();
    for (; from.waiting > 0; from.waiting--)
        arrive_codes(smem, ring, from.waiting);
    return at;
}

} // namespace

#endif
