// gate_up and down on sm_90a in one launch, bf16, f16 and e4m3: c[128 weight rows x N tokens] += w . x^T, weights on wgmma's M, tokens
// on its N, so that one family serves one token and thousands.
//
// grid   one block an SM, persistent; tiles in the order product, expert, group of up to 12 tiles of tokens, weight rows, tokens, each
//        to the block that is free, so that the tiles which share a piece of the weights, or tokens, run beside each other and read it
//        from HBM once; down's begin while the last of gate_up's run, with their weights where mid is not there yet
// block  3 warpgroups: one loads, two multiply 64 weight rows each; e4m3 has a third for many tokens, of which each takes 64. Few
//        tokens of 16 bits: 2, and tiles of 64 weight rows, by 128 inputs a stage; few and some of 4 bits: 5, and tiles of 256 weight rows
// smem   4 to 11 stages of 128 weight rows and 256, 176 (weights [E, K, N]: 160; e4m3: 192, 160, 112), 128, 64, 32, 16 or 8 token
//        rows of 128 bytes (64 inputs, e4m3 128), swizzled; e4m3 7 at most
// N      8 to 256 (e4m3: 80, and 128 weight rows beside many tokens), chosen for each tile from the expert's real count: a
//        captured graph replays with any
//
// Gate and up of eight units alternate in the weight tile (a 5-D tensor map; nothing is repacked), so a thread's
// accumulator rows r and r + 8 are gate and up of the same unit and the activation needs no exchange. gate_up's token rows are
// gathered by index with 16-byte copies, as are e4m3's that lie once; those of down and most of e4m3 lie in pair order and come by tensor
// map. A pair's sum runs
// over K in a fixed order, so its bits do not depend on its batch mates. e4m3 sums 128 inputs in the tensor core, then in
// fp32 with the scales of both sides; many tokens go on its M (gemm_many.cuh), and mid leaves as e4m3 (gemm_quantise.cuh).
// Weights of 4 bits are decoded in registers (gemm_packed.cuh), of mxfp4 and int4 and few tokens gate_up's to fp8 (gemm_pieces.cuh).

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm_args.cuh"
#include "kernels/cuda/gemm_finish.cuh"
#include "kernels/cuda/gemm_gather.cuh"
#include "kernels/cuda/gemm_load.cuh"
#include "kernels/cuda/gemm_many.cuh"
#include "kernels/cuda/gemm_packed.cuh"
#include "kernels/cuda/gemm_pieces.cuh"
#include "kernels/cuda/gemm_quantise.cuh"
#include "kernels/cuda/gemm_scale.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/gemm_weave.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cuda_runtime.h>

namespace {

// Of a block's warpgroups the first loads.
enum { kProducer, kConsumer0 };

// Registers of a thread. A block is launched with kLaunched for each, and warpgroups that ask for more than others gave back wait
// for ever.
template <class P> constexpr int kLaunched = 65536 / P::threads / 8 * 8;
template <class P> constexpr int kLoading = P::is_wide ? 96 : P::is_scaled ? 56 : P::is_packed ? 88 : 72;
template <class P> constexpr int kMultiplying = P::is_wide ? 96 : P::is_scaled ? 152 : P::is_packed ? 208 : 216;

// Units of mid up to which fp8 rows are gathered: where memory is fast, and where it is not.
constexpr int32_t kGatherUnitsFast = 256, kGatherUnitsSlow = 512;
constexpr int64_t kFastMemory = 4000000000; // kB/s

// A thread's sums of what its warpgroup multiplies. Where weight rows lie along K, that is one block of 64 rows and all
// tokens; rows_in, both blocks and half of the tokens: gate and up of a unit, in two blocks then, still meet in one thread.
template <int N, class P> struct sums {
    static constexpr int blocks = P::rows_in ? 2 : 1;
    static constexpr int tokens = P::rows_in && N > 8 ? N / 2 : N;
    float c[blocks][tokens / 2];
};

template <int N, class P>
__device__ __forceinline__ void multiply(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring,
                                         sums<N, P> &to)
{
    constexpr bool rows_in = P::rows_in;
    constexpr int tokens = to.tokens, next_part = tokens * kRowBytes >> 4;
    const bool elected = threadIdx.x % 128 == 0;
    uint64_t *multiplied = nullptr; // the stage before

    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance()) {
        uint32_t a = wgmma_descriptor(ring.weights(smem) + (rows_in ? 0 : warpgroup * kBlockBytes));
        uint32_t b = wgmma_descriptor(ring.tokens(smem) + (rows_in ? warpgroup * tokens * kRowBytes : 0));

        mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
        if (P::gathers) fence_proxy_async(); // copies of threads brought the tokens
        wgmma_fence();
#pragma unroll
        for (int32_t i = 0; i < 4 * P::parts; i++)
#pragma unroll
            for (int32_t block = 0; block < to.blocks; block++)
                wgmma<tokens, P::is_bf16, rows_in>::run(to.c[block],
                                                        a + (block + i / 4) * (kBlockBytes >> 4) + i % 4 * wgmma_next_inputs<rows_in>,
                                                        b + i / 4 * next_part + i % 4 * wgmma_next_inputs<false>);
        wgmma_commit();
        wgmma_wait<1>();
        if (elected && multiplied != nullptr) mbarrier_arrive(multiplied);
        multiplied = &smem.empty[ring.stage];
    }
    find_results<tokens, P>(args, smem, t, warpgroup, rows_in ? warpgroup * tokens : 0); // beside the last steps
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(multiplied);
}

template <class P> __device__ __forceinline__ row_scales<P::is_gate_up> row_scales_of_thread(const gemm_args &args, const tile &t, int32_t warpgroup)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;

    return find_scales<P>(args, t, find_rows_of<P>(args, t, warpgroup * kBlockRows + warp * 16, lane / 4));
}

// e4m3: 128 inputs in the tensor core, then fp32 with the scales of both. Those are read while it works.
template <int N, class P>
__device__ __forceinline__ void multiply_scaled(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup,
                                                stage_ring &ring, sums<N, P> &to)
{
    const row_scales<P::is_gate_up> rows = row_scales_of_thread<P>(args, t, warpgroup);
    const int32_t lane = threadIdx.x % 32, first = (t.pair & 3) + lane % 4 * 2;
    float part_sums[N / 2];

#pragma unroll
    for (int32_t i = 0; i < N / 2; i++)
        part_sums[i] = 0.0f;
    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance()) {
        uint32_t a = wgmma_descriptor(ring.weights(smem) + warpgroup * kBlockBytes);
        uint32_t b = wgmma_descriptor(ring.tokens(smem));
        float2 weight = rows.of_block(k / P::depth), token[N / 8];

        mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
        wgmma_fence();
#pragma unroll
        for (int32_t part = 0; part < 4; part++)
            wgmma_e4m3<N>::run(part_sums, a + part * wgmma_next_inputs<false>, b + part * wgmma_next_inputs<false>, part);
        wgmma_commit();
#pragma unroll
        for (int32_t block = 0; block < N / 8; block++)
            token[block] = {smem.token_scale[ring.stage][first + block * 8], smem.token_scale[ring.stage][first + block * 8 + 1]};
        wgmma_wait<0>();
        release_stage(smem, ring.stage);
#pragma unroll
        for (int32_t i = 0; i < N / 2; i++)
            to.c[0][i] += part_sums[i] * ((i & 1 ? token[i / 4].y : token[i / 4].x) * (i & 2 ? weight.y : weight.x));
    }
    find_results<N, P>(args, smem, t, warpgroup, 0);
#pragma unroll
    for (int32_t i = 0; i < N / 2; i++)
        to.c[0][i] *= i & 2 ? rows.whole.y : rows.whole.x;
}

// Packed: a warp decodes its 16 weight rows, 64 inputs at a time, into registers, beside what wgmma multiplies with those before. What it
// decodes it reads just before, or with fewer tokens, where wgmma takes less time, one part ahead.
template <int N, class P>
__device__ __forceinline__ void multiply_packed(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring,
                                                sums<N, P> &to)
{
    constexpr int next_part = N * kRowBytes >> 4, ahead = N <= kPackedMiddle ? 1 : 0;
    const packed_rows rows = find_packed_rows<P>(args, t, warpgroup);
    const packed_codes codes = codes_of();
    const int32_t steps = steps_of<P>(args);
    packed_part<P> read;
    uint32_t weights[2][4][4];

    begin_packed_step<P, true>(args, smem, rows, ring, 0);
    read_part<P>(smem, rows, ring, 0, 0, read);
    decode_part<P>(codes, read, weights[0]);
    if (ahead) read_part<P>(smem, rows, ring, 0, 1, read);
    for (int32_t step = 0; step < steps; step++) {
        const uint32_t b = wgmma_descriptor(ring.tokens(smem));
        const stage_ring now = ring;
        const bool is_last = step + 1 == steps;
        const auto read_next = [&](int32_t part) { // of this step, or from P::parts on of the next
            if (part < P::parts) {
                read_part<P>(smem, rows, now, step, part, read);
            } else if (!is_last) {
                if (part == P::parts) begin_packed_step<P, true>(args, smem, rows, ring, step + 1);
                read_part<P>(smem, rows, ring, step + 1, part - P::parts, read);
            }
        };

        ring.advance();
#pragma unroll
        for (int32_t part = 0; part < P::parts; part++) {
            wgmma_fence_registers(weights[part % 2]);
#pragma unroll
            for (int32_t i = 0; i < 4; i++)
                wgmma_packed<N>::run(to.c[0], weights[part % 2][i], b + part * next_part + i * wgmma_next_inputs<false>);
            wgmma_commit();
            if (!ahead) read_next(part + 1);
            if (part + 1 < P::parts || !is_last) decode_part<P>(codes, read, weights[(part + 1) % 2]);
            if (ahead) read_next(part + 2);
            wgmma_wait<0>();
        }
        release_stage(smem, now.stage);
    }
}

// In wide tiles.
template <int N, class P>
__device__ __forceinline__ void multiply_packed_wide(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring,
                                                     sums<N, P> &to)
{
    constexpr int next_part = N * kRowBytes >> 4;
    const packed_rows rows = find_packed_rows<P>(args, t, warpgroup);
    const packed_codes codes = codes_of();

    each_wide_block<P>(args, smem, rows, ring, [&](uint32_t tokens, const packed_part<P> &read, int32_t part, int32_t block) {
        const uint32_t inputs = tokens + part * next_part + block * 2 * wgmma_next_inputs<false>;
        uint32_t weights[2][4];

        decode_block<P>(codes, read, block, weights);
        wgmma_fence_registers(weights);
        wgmma_packed<N>::run(to.c[0], weights[0], inputs);
        wgmma_packed<N>::run(to.c[0], weights[1], inputs + wgmma_next_inputs<false>);
        wgmma_commit();
        wgmma_wait<0>();
    });
}

// For few tokens by mma, which costs less than wgmma for 64 rows whose numbers are in registers. Both give the same bits.
template <int N, class P>
__device__ __forceinline__ void multiply_packed_few(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring,
                                                    sums<N, P> &to)
{
    const packed_rows rows = find_packed_rows<P>(args, t, warpgroup);
    const packed_codes codes = codes_of();
    const int32_t lane = threadIdx.x % 32, steps = steps_of<P>(args);

    for (int32_t step = 0; step < steps; step++, ring.advance()) {
        const uint32_t tokens = smem_address(ring.tokens(smem)) + lane % 8 * kRowBytes;

        begin_packed_step<P, false>(args, smem, rows, ring, step);
#pragma unroll
        for (int32_t part = 0; part < P::parts; part++) {
            packed_part<P> read;
            uint32_t weights[4][4];

            read_part<P>(smem, rows, ring, step, part, read);
            decode_part<P, true, !P::scales_sums>(codes, read, weights);
#pragma unroll
            for (int32_t block = 0; block < 2; block++)
#pragma unroll
                for (int32_t n = 0; n < N; n += 8) {
                    const int32_t piece = (block * 4 + lane / 8) ^ lane % 8;
                    float(&own)[4] = *reinterpret_cast<float(*)[4]>(&to.c[0][n / 2]);
                    float part_sums[4] = {};
                    float(&c)[4] = P::scales_sums ? part_sums : own;
                    uint32_t inputs[4];

                    load_matrices(inputs, tokens + (part * N + n) * kRowBytes + piece * 16);
                    mma<true>(c, weights[block * 2], inputs[0], inputs[1]);
                    mma<true>(c, weights[block * 2 + 1], inputs[2], inputs[3]);
                    if (P::scales_sums) add_scaled<8>(part_sums, scales_of_rows(read, block), own);
                }
        }
        if constexpr (P::is_wide)
            end_wide_step<P>(args, smem, ring, step, steps);
        else
            release_stage(smem, ring.stage);
    }
}

// What a tile of packed weights needs before its end, by the warpgroup that has its sums.
template <int N, class P>
__device__ __forceinline__ void scale_packed(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, sums<N, P> &to)
{
    find_results<N, P>(args, smem, t, warpgroup, 0);
    if constexpr (P::type == OPERAND_MXFP4) {
#pragma unroll
        for (int32_t i = 0; i < N / 2; i++)
            to.c[0][i] *= kE8m0Rest;
    }
    if constexpr (P::type == OPERAND_NVFP4) {
        const float2 scale = row_scales_of_thread<P>(args, t, warpgroup).whole, whole = {scale.x * kE4m3Rest, scale.y * kE4m3Rest};

#pragma unroll
        for (int32_t i = 0; i < N / 2; i++)
            to.c[0][i] *= i & 2 ? whole.y : whole.x;
    }
}

template <int N, class P>
__device__ __forceinline__ void finish(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, sums<N, P> &from)
{
    constexpr int blocks = from.blocks, tokens = from.tokens;
    constexpr bool rows_in = P::rows_in, keeps = P::quantises;
    const bool gated = P::is_gate_up && args.order != ORDER_PLAIN;
    const int32_t first_token = rows_in ? warpgroup * tokens : 0;
    turning<P> to = {&smem, smem.turned + warpgroup * smem.turned_pitch, warpgroup, first_token,
                     min(first_token + tokens, t.tokens),
                     t.row_tile * kBlockRows,
                     keeps && gated && is_second(t) ? 32 : 0};

    if (P::is_gate_up && args.pair_weight != nullptr) {
#pragma unroll
        for (int32_t block = 0; block < blocks; block++)
            weigh<tokens>(args, t, first_token, from.c[block]);
    }
    if (rows_in && gated && args.order != ORDER_INTERLEAVED) {
        finish_blocks<tokens>(args, t, to, from.c[0], from.c[blocks - 1]);
        return;
    }
#pragma unroll
    for (int32_t block = 0; block < blocks; block++) {
        int32_t row = t.row_tile * P::rows + (rows_in ? block : warpgroup) * kBlockRows;

        to.first_output = gated ? row / 2 : row;
        if (!P::is_gate_up && args.result_row != nullptr)
            finish_plain<tokens, !P::is_gate_up>(args, t, to, from.c[block]);
        else if (!gated)
            finish_plain<tokens, false>(args, t, to, from.c[block]);
        else if (rows_in)
            finish_neighbours<tokens>(args, t, to, from.c[block]);
        else if (!P::is_scaled && args.is_bare)
            finish_turns<tokens, true>(args, t, to, from.c[block]);
        else
            finish_turns<tokens, false>(args, t, to, from.c[block]);
    }
}

template <int N, class P>
__device__ __forceinline__ void consume(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring)
{
    sums<N, P> own;

    // Without it the compiler keeps the sums apart from wgmma's registers, spills them and serialises wgmma.
#pragma unroll
    for (int32_t block = 0; block < own.blocks; block++)
#pragma unroll
        for (int32_t i = 0; i < own.tokens / 2; i++)
            own.c[block][i] = 0.0f;
    if constexpr (P::is_scaled)
        multiply_scaled<N, P>(args, smem, t, warpgroup, ring, own);
    else if constexpr (P::in_pieces)
        multiply_pieces<N, P>(args, smem, t, warpgroup, ring, own.c[0]);
    else if constexpr (P::is_packed) {
        if constexpr (N <= P::columns_by_mma)
            multiply_packed_few<N, P>(args, smem, t, warpgroup, ring, own);
        else if constexpr (P::is_wide)
            multiply_packed_wide<N, P>(args, smem, t, warpgroup, ring, own);
        else
            multiply_packed<N, P>(args, smem, t, warpgroup, ring, own);
        scale_packed<N, P>(args, smem, t, warpgroup, own);
    } else
        multiply<N, P>(args, smem, t, warpgroup, ring, own);
    finish<N, P>(args, smem, t, warpgroup, own);
}

template <class P>
__device__ __forceinline__ void consume_many(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring)
{
    many_sums own;

#pragma unroll
    for (int32_t i = 0; i < kRows / 2; i++)
        own.c[i] = 0.0f;
    multiply_many<P>(args, smem, t, warpgroup, ring, own);
    if (P::is_gate_up && args.pair_weight != nullptr) weigh_tokens(args, t, first_token(warpgroup), own);
    if constexpr (P::is_gate_up)
        finish_many_quantised<P>(args, smem, t, warpgroup, own);
    else
        finish_many<P>(args, smem, t, warpgroup, own);
}

// By N, of all that columns_for gives.
template <int N, class P>
__device__ __forceinline__ void consume_columns(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t columns,
                                                int32_t warpgroup, stage_ring &ring)
{
    constexpr int next = N == 8 || (P::rows_in && N < 64) ? N * 2 : N + (P::rows_in ? 32 : 16);

    if (columns == N)
        consume<N, P>(args, smem, t, warpgroup, ring);
    else if constexpr (next <= P::columns_on_n)
        consume_columns<next, P>(args, smem, t, columns, warpgroup, ring);
}

// By who brings the rows; U and D are the two products.
template <class U, class D>
__device__ __forceinline__ int32_t load_gate_up_any(const gemms_args_device &args, gemm_smem<U> &smem, asked<U> &first, tile_source<U, D> &source,
                                                    stage_ring &ring)
{
    if constexpr (U::is_scaled)
        if (args.gate_up.gathers) return gather_gate_up<U, D>(args, smem, source, ring);
    return load_gate_up<U, D>(args, smem, first, source, ring);
}

template <class U, class D> __device__ __forceinline__ void producer_loop(const gemms_args_device &args, gemm_smem<U> &smem, asked<U> &first)
{
    tile_source<U, D> source = {args, smem, {args, smem, U::is_scaled}, first.index, 0};
    stage_ring ring(smem);
    int32_t at;

    at = load_gate_up_any<U, D>(args, smem, first, source, ring);
    if (D::in_lots && args.down.lot_tiles > 1)
        load_down<U, D, D::in_lots>(args, smem, source, ring, at);
    else
        load_down<U, D, false>(args, smem, source, ring, at);
    // One more stage, with nothing in it, so that the other warpgroups see the end.
    if (threadIdx.x % 32 != 0) return;
    mbarrier_wait(&smem.empty[ring.stage], ring.round_odd ^ 1);
    mbarrier_arrive(&smem.full[ring.stage], U::loaders / kLoadingWarps + (threadIdx.x % 128 == 0));
}

// Gives a tile's stages back for a warpgroup that has no share of it.
template <class P>
__device__ __forceinline__ void let_pass(const gemm_args &args, gemm_smem<P> &smem, stage_ring &ring)
{
    for (int32_t k = 0; k < args.depth; k += P::depth, ring.advance()) {
        mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
        release_stage(smem, ring.stage);
    }
}

template <class P>
__device__ __forceinline__ void consume_tile(const gemm_args &args, gemm_smem<P> &smem, const tile &t, int32_t warpgroup, stage_ring &ring)
{
    const int32_t columns = uniform(t.columns);

    if constexpr (P::is_scaled) {
        bool many = columns > P::columns_on_n;

        if (warpgroup * kBlockRows >= (many ? columns : kRows)) {
            let_pass<P>(args, smem, ring);
            return;
        }
        if (many) {
            consume_many<P>(args, smem, t, warpgroup, ring);
            return;
        }
    }
    consume_columns<8, P>(args, smem, t, columns, warpgroup, ring);
    if constexpr (P::quantises)
        if (t.part != TILE_FIRST) quantise_kept<P>(args, smem, t, warpgroup);
}

template <class U, class D> __device__ __forceinline__ void consumer_loop(const gemms_args_device &args, gemm_smem<U> &smem, int32_t warpgroup)
{
    stage_ring ring(smem);

    for (int32_t at = 0;; at = (at + 1) % kTiles) {
        const tile &t = smem.tiles[at]; // read again where it is needed, which costs fewer registers
        int32_t ended = at;

        mbarrier_wait(&smem.full[ring.stage], ring.round_odd);
        if (uniform(t.tokens) == 0) return;
        if (uniform(t.lot_tiles) != 0) {
            consume_tile<D>(args.down, smem, t, warpgroup, ring);
            continue;
        }
        consume_tile<U>(args.gate_up, smem, t, warpgroup, ring);
        asm volatile("" : "+r"(ended)); // or addresses take registers that a tile wants
        count_ended(args, smem.tiles[ended], smem.tiles[(ended + 1) % kTiles]);
    }
}

template <int type, bool is_gate_up, bool rows_in, int tokens>
using product_of = product<static_cast<operand>(type), is_gate_up, rows_in, static_cast<expert_tokens>(tokens)>;

template <int type, bool rows_in, int tokens>
__global__ void __launch_bounds__((product_of<type, true, rows_in, tokens>::threads), 1)
    gemms_kernel(const __grid_constant__ gemms_args_device args)
{
    using U = product_of<type, true, rows_in, tokens>;
    using D = product_of<type, false, rows_in, tokens>;
    gemm_smem<U> &smem = *dynamic_smem<gemm_smem<U>>();
    int32_t warpgroup = uniform(threadIdx.x / 128);
    uint32_t taken = 0;
    asked<U> first = {};

    static_assert(U::is_half || kLoading<U> + U::warpgroups * kMultiplying<U> <= (1 + U::warpgroups) * kLaunched<U>);

    if (threadIdx.x == 0) {
        prefetch_tensormap(&args.gate_up.weights);
        prefetch_tensormap(&args.down.weights);
        for (int32_t stage = 0; stage < kStagesMax + smem.scale_slots; stage++) {
            mbarrier_init(&smem.full[stage], (stage < kStagesMax) + U::loaders); // of a stage the engine, too
            // A warp, or a warpgroup, releases a stage.
            mbarrier_init(&smem.empty[stage], U::is_scaled || U::is_packed ? 4 * U::warpgroups : U::warpgroups);
        }
        fence_mbarrier_init();
    }
    // What is loaded as boxes was made by a launch that had waited for route, so the offsets are there before it is; and ids were there
    // before route let this begin.
    if (U::gathers && !U::is_packed) prefetch_rows(args); // woven rows are being written
    if (U::gathers && args.counted.ids == nullptr) griddepcontrol_wait();
    if (threadIdx.x == 0) taken = atomicAdd(&args.progress->taken, 1u);
    make_tables<U>(args, smem);
    if (warpgroup == kProducer) load_ahead<U, D>(args, smem, taken, first);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (warpgroup == kProducer) {
        if constexpr (!U::is_half) setmaxnreg_dec<kLoading<U>>();
        producer_loop<U, D>(args, smem, first);
    } else {
        if constexpr (!U::is_half) setmaxnreg_inc<kMultiplying<U>>();
        consumer_loop<U, D>(args, smem, warpgroup - kConsumer0);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

struct gemms_entry {
    void (*kernel)(gemms_args_device);
    unsigned threads;
    size_t smem_bytes;
    int32_t tile_rows;
    bool in_pieces; // x
};

template <int type, bool rows_in, expert_tokens tokens = TOKENS_MANY> gemms_entry entry()
{
    using U = product_of<type, true, rows_in, tokens>;

    return {gemms_kernel<type, rows_in, tokens>, U::threads, sizeof(gemm_smem<U>), U::rows, U::in_pieces};
}

template <int type> gemms_entry entry_of(bool rows_in, expert_tokens tokens)
{
    if (tokens == TOKENS_FEW) return entry<type, false, TOKENS_FEW>();
    if constexpr (type >= OPERAND_INT4) {
        if (tokens == TOKENS_SOME) return entry<type, false, TOKENS_SOME>();
    } else {
        if (rows_in) return entry<type, true>();
    }
    return entry<type, false>();
}

// By the operand, how many tokens experts have, and if many, whether weights are [E, K, N].
gemms_entry entry_of(operand type, bool rows_in, expert_tokens tokens)
{
    switch (type) {
    case OPERAND_BF16:
        return entry_of<OPERAND_BF16>(rows_in, tokens);
    case OPERAND_F16:
        return entry_of<OPERAND_F16>(rows_in, tokens);
    case OPERAND_INT4:
        return entry_of<OPERAND_INT4>(false, tokens);
    case OPERAND_MXFP4:
        return entry_of<OPERAND_MXFP4>(false, tokens);
    case OPERAND_NVFP4:
        return entry_of<OPERAND_NVFP4>(false, tokens);
    default:
        return entry<OPERAND_E4M3, false>();
    }
}

} // namespace

extern "C" int32_t gemm_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (int32_t i = 0; i < 6 * OPERANDS && st == cudaSuccess; i++) {
        gemms_entry entry = entry_of(static_cast<operand>(i / 6), i & 1, static_cast<expert_tokens>(i % 6 / 2));

        st = load_kernel(entry.kernel, entry.smem_bytes);
    }
    if (st == cudaSuccess) st = load_kernel(weave_kernel<false>);
    return st == cudaSuccess ? load_kernel(weave_kernel<true>) : st;
}

// A copy for each pair costs memory, gathering costs the product: so it is a matter of how fast memory is, an H100's 3.35 TB/s or an H200's 4.9.
extern "C" int32_t gather_units_cuda(void)
{
    const int64_t bytes_a_clock = device_attribute(cudaDevAttrGlobalMemoryBusWidth) / 8 * 2; // at both edges
    const int64_t clock_khz = device_attribute(cudaDevAttrMemoryClockRate);

    return bytes_a_clock * clock_khz < kFastMemory ? kGatherUnitsSlow : kGatherUnitsFast;
}

extern "C" int32_t gemms_cuda(const struct gemms_args *from, void *stream)
{
    gemms_args args = *from;
    gemms_args_device to = {};
    row_slab woven;
    const gemms_entry by = entry_of(operand_of(from->gate_up.w1.format), from->gate_up.w1.rows_in != 0, tokens_of(*from));
    cudaError_t st = cudaSuccess;

    if (args.gate_up.experts == 0) return cudaSuccess; // of which there is no tensor map
    if (is_packed(args.gate_up.w1.format)) st = weave_rows(args, woven, by.in_pieces, stream);
    if (st == cudaSuccess) st = gemms_args_make(to, args, by.tile_rows);
    if (st != cudaSuccess) return st;
    return launch(by.kernel, {static_cast<unsigned>(sm_count()), by.threads, by.smem_bytes, LAUNCH_EARLY}, stream, to);
}
