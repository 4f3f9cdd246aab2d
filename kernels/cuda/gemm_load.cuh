// How a tile's weights and tokens come into shared memory. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH
#define MOXIE_KERNELS_CUDA_GEMM_LOAD_CUH

#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/ptx.cuh"

namespace {

// Where a tile's rows and scales lie, one address a token.
template <class P> __device__ __forceinline__ void find_rows(const gemm_args &args, gemm_smem &smem, const tile &t, int32_t thread)
{
    bar_sync<1, 128>(); // the copies of the tile before have read their addresses
    for (int32_t n = thread; n < P::columns; n += 128) {
        const unsigned char *row = nullptr, *scales = nullptr;

        if (n < t.tokens && P::is_gate_up) {
            int32_t flat = args.pair_row != nullptr ? args.pair_row[t.pair + n] : t.pair + n;
            const gemm_slab &slab = args.slabs[flat / args.rows_cap];

            row = slab.rows + flat % args.rows_cap * slab.row_stride_bytes;
            scales = slab.scales + flat % args.rows_cap * slab.scale_stride_bytes;
        } else if (n < t.tokens) {
            scales = args.slabs[0].scales + (t.pair + n) * args.slabs[0].scale_stride_bytes;
        }
        if (P::is_gate_up) smem.token_row[n] = row;
        if (P::is_scaled) smem.scale_row[n] = reinterpret_cast<const float *>(scales);
    }
    bar_sync<1, 128>();
}

// A stage's inputs of every token row of the tile, from byte `at` of the rows on, swizzled as the copy engine would.
__device__ __forceinline__ void gather(const gemm_args &args, gemm_smem &smem, int32_t stage, int32_t left, int32_t at,
                                       int32_t columns, int32_t thread)
{
    int32_t chunk = thread % 8;
    uint32_t base = smem_address(smem.tokens[stage]);

    left -= chunk * 16;
    for (int32_t n = thread / 8; n < columns; n += 16) {
        const unsigned char *row = smem.token_row[n];
        uint32_t bytes = row != nullptr && left > 0 ? 16 : 0;
        const unsigned char *from = bytes != 0 ? row + at + chunk * 16 : args.slabs[0].rows;

        cp_async<16>(base + n * kRowBytes + ((chunk ^ (n & 7)) * 16), from, bytes);
    }
}

__device__ __forceinline__ void gather_scales(const gemm_args &args, gemm_smem &smem, int32_t stage, int32_t block, int32_t columns,
                                              int32_t thread)
{
    for (int32_t n = thread; n < columns; n += 128) {
        const float *scales = smem.scale_row[n];

        cp_async<4>(smem_address(&smem.token_scale[stage][n]), scales != nullptr ? scales + block : args.scales.scales,
                    scales != nullptr ? 4 : 0);
    }
}

// Two blocks of 64 rows, [64 rows][64 inputs], or rows_in [64 inputs][64 rows]: gate and up of 64 units, or rows in their order.
// Where rows lie along K a tensor map can put gate and up of eight units in turns, so both blocks hold both.
template <class P>
__device__ __forceinline__ void load_weights(const gemm_args &args, gemm_smem &smem, int32_t stage, const tile &t, int32_t k)
{
    unsigned char *to = smem.weights[stage];
    uint64_t *full = &smem.full[stage];

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

// As many token rows as the tile's wgmma reads. Rows past the tile's own belong to the next expert, or are zeros.
__device__ __forceinline__ void load_tokens(const gemm_args &args, gemm_smem &smem, int32_t stage, const tile &t, int32_t k,
                                            int32_t columns)
{
    const CUtensorMap *map = columns < kManyTokens ? &args.tokens : &args.many_tokens;
    int32_t box = columns < kManyTokens ? 8 : kManyTokens;

    for (int32_t n = 0; n < columns; n += box)
        cp_async_bulk_tensor_3d(smem.tokens[stage] + n * kRowBytes, map, &smem.full[stage], k, t.pair + n, 0);
}

template <class P> __device__ __forceinline__ void producer_loop(const gemm_args &args, gemm_smem &smem)
{
    constexpr int32_t element_bytes = kRowBytes / P::depth;
    const int32_t thread = threadIdx.x % 128;
    uint32_t step = 0; // of all tiles

    for (int32_t index = blockIdx.x; index < smem.tile_first[args.experts]; index += gridDim.x) {
        tile t = find_tile<P>(args, smem, index);
        int32_t columns = tile_columns(t.tokens);

        if (P::copies) find_rows<P>(args, smem, t, thread);
        for (int32_t k = 0; k < args.depth; k += P::depth, step++) {
            uint32_t stage = step % kStages, round = step / kStages;

            mbarrier_wait(&smem.empty[stage], (round & 1) ^ 1);
            if (thread == 0) {
                mbarrier_arrive_expect_tx(&smem.full[stage], (kRows + (P::is_gate_up ? 0 : columns)) * kRowBytes);
                load_weights<P>(args, smem, stage, t, k);
                if (!P::is_gate_up) load_tokens(args, smem, stage, t, k, columns);
            }
            if (!P::copies) continue;
            if (P::is_gate_up) gather(args, smem, stage, (args.depth - k) * element_bytes, k * element_bytes, columns, thread);
            if (P::is_scaled) gather_scales(args, smem, stage, k / P::depth, columns, thread);
            cp_async_commit();
            if (step < kLag) continue;
            cp_async_wait<kLag>();
            fence_proxy_async();
            mbarrier_arrive(&smem.full[(step - kLag) % kStages]);
        }
    }
    if (!P::copies) return;
    cp_async_wait<0>();
    fence_proxy_async();
    for (uint32_t late = step < kLag ? 0 : step - kLag; late < step; late++)
        mbarrier_arrive(&smem.full[late % kStages]);
}

} // namespace

#endif
