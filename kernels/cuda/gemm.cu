// gate_up and down on sm_90a, bf16 and f16: c[128 weight rows x N tokens] += w . x^T, weights on wgmma's M, tokens on
// its N, so that one family serves one token and thousands.
//
// grid   one block an SM, persistent; tiles in the order expert, weight rows, tokens, so that the tiles which share a
//        piece of the weights run beside each other and read it from HBM once
// block  3 warpgroups: one loads, two multiply 64 weight rows each
// smem   4 stages of 128 weight rows and 256 token rows of 64 inputs (128 bytes, swizzled)
// N      8, 16, 32, 64, 128 or 256, chosen for each tile from the expert's real count: a captured graph replays with any
//
// Gate and up of eight units alternate in the weight tile (a 5-D tensor map; nothing is repacked), so a thread's
// accumulator rows r and r + 8 are gate and up of the same unit and the activation needs no exchange. Token rows are
// gathered by index with 16-byte copies; down reads its rows, which lie in pair order, by tensor map. A pair's sum runs
// over K in steps of 16 in a fixed order, so its bits do not depend on its batch mates.

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/gemm_finish.cuh"
#include "kernels/cuda/gemm_load.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/tensor_map.cuh"

#include <cuda_runtime.h>

namespace {

enum { kProducer, kConsumer0, kConsumer1 };

// Who multiplies what. Where weight rows lie along K, each warpgroup takes one block of 64 rows and all tokens. rows_in, each
// takes both blocks and half of the tokens: gate and up of a unit, in two blocks then, still meet in one thread.
template <int N, bool rows_in> struct share {
    static constexpr int blocks = rows_in ? 2 : 1;
    static constexpr int tokens = rows_in && N > 8 ? N / 2 : N;
};

template <int N, bool is_bf16, bool rows_in>
__device__ __forceinline__ void multiply(const gemm_args &args, gemm_smem &smem, int32_t warpgroup, uint32_t &step,
                                         float (&c)[share<N, rows_in>::blocks][share<N, rows_in>::tokens / 2])
{
    constexpr int blocks = share<N, rows_in>::blocks, tokens = share<N, rows_in>::tokens;
    const bool elected = threadIdx.x % 128 == 0;
    uint32_t first = step;

    for (int32_t k = 0; k < args.depth; k += kDepth, step++) {
        uint32_t stage = step % kStages;
        uint64_t a = wgmma_descriptor(smem.weights[stage] + (rows_in ? 0 : warpgroup * kBlockBytes));
        uint64_t b = wgmma_descriptor(smem.tokens[stage] + (rows_in ? warpgroup * tokens * 128 : 0));

        mbarrier_wait(&smem.full[stage], step / kStages & 1);
        wgmma_fence();
#pragma unroll
        for (int32_t part = 0; part < kDepth / 16; part++)
#pragma unroll
            for (int32_t block = 0; block < blocks; block++)
                wgmma<tokens, is_bf16, rows_in>::run(c[block], a + block * (kBlockBytes >> 4) + part * wgmma_next_inputs<rows_in>,
                                                     b + part * wgmma_next_inputs<false>);
        wgmma_commit();
        if (step == first) continue;
        wgmma_wait<1>();
        if (elected) mbarrier_arrive(&smem.empty[(step - 1) % kStages]);
    }
    wgmma_wait<0>();
    if (elected) mbarrier_arrive(&smem.empty[(step - 1) % kStages]);
}

template <int N, bool is_bf16, bool is_gate_up, bool rows_in>
__device__ __forceinline__ void finish(const gemm_args &args, const tile &t, int32_t warpgroup,
                                       const float (&c)[share<N, rows_in>::blocks][share<N, rows_in>::tokens / 2])
{
    constexpr int blocks = share<N, rows_in>::blocks, tokens = share<N, rows_in>::tokens;
    const bool gated = is_gate_up && args.order != ORDER_PLAIN;
    int32_t warp = threadIdx.x / 32 % 4;
    int32_t token = rows_in ? warpgroup * tokens : 0;

    if (rows_in && gated && args.order != ORDER_INTERLEAVED) {
        finish_blocks<tokens, is_bf16>(args, t, t.row_tile * kBlockRows + warp * 16, token, c[0], c[blocks - 1]);
        return;
    }
#pragma unroll
    for (int32_t block = 0; block < blocks; block++) {
        int32_t row = t.row_tile * kRows + (rows_in ? block : warpgroup) * kBlockRows + warp * 16;

        if (!gated)
            finish_plain<tokens, is_bf16, is_gate_up>(args, t, row, token, c[block]);
        else if (rows_in)
            finish_neighbours<tokens, is_bf16>(args, t, row / 2, token, c[block]);
        else
            finish_turns<tokens, is_bf16>(args, t, row / 2, token, c[block]);
    }
}

template <int N, bool is_bf16, bool is_gate_up, bool rows_in>
__device__ __forceinline__ void consume(const gemm_args &args, gemm_smem &smem, const tile &t, int32_t warpgroup, uint32_t &step)
{
    constexpr int blocks = share<N, rows_in>::blocks, tokens = share<N, rows_in>::tokens;
    float c[blocks][tokens / 2];

    // Without it the compiler keeps the sums apart from wgmma's registers, spills them and serialises wgmma.
#pragma unroll
    for (int32_t block = 0; block < blocks; block++)
#pragma unroll
        for (int32_t i = 0; i < tokens / 2; i++)
            c[block][i] = 0.0f;
    multiply<N, is_bf16, rows_in>(args, smem, warpgroup, step, c);
    finish<N, is_bf16, is_gate_up, rows_in>(args, t, warpgroup, c);
}

template <bool is_bf16, bool is_gate_up, bool rows_in>
__device__ __forceinline__ void consumer_loop(const gemm_args &args, gemm_smem &smem, int32_t warpgroup)
{
    uint32_t step = 0;

    for (int32_t index = blockIdx.x; index < smem.tile_first[args.experts]; index += gridDim.x) {
        tile t = find_tile(args, smem, index);

        switch (tile_columns(t.tokens)) {
        case 8:
            consume<8, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        case 16:
            consume<16, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        case 32:
            consume<32, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        case 64:
            consume<64, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        case 128:
            consume<128, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        default:
            consume<256, is_bf16, is_gate_up, rows_in>(args, smem, t, warpgroup, step);
            break;
        }
    }
}

template <bool is_bf16, bool is_gate_up, bool rows_in>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ gemm_args args)
{
    gemm_smem &smem = *dynamic_smem<gemm_smem>();
    int32_t warpgroup = threadIdx.x / 128;

    if (threadIdx.x == 0) {
        prefetch_tensormap(&args.weights);
        for (int32_t stage = 0; stage < kStages; stage++) {
            mbarrier_init(&smem.full[stage], is_gate_up ? 1 + 128 : 1);
            mbarrier_init(&smem.empty[stage], 2);
        }
        fence_mbarrier_init();
    }
    griddepcontrol_wait();
    make_tables(args, smem);
    griddepcontrol_launch_dependents();
    if (warpgroup == kProducer) {
        setmaxnreg_dec<56>();
        producer_loop<is_gate_up, rows_in>(args, smem);
    } else {
        setmaxnreg_inc<224>();
        consumer_loop<is_bf16, is_gate_up, rows_in>(args, smem, warpgroup - kConsumer0);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

// The weights of all experts. Rows along K and gated: (K, 8 units, gate | up, units / 8, expert), whatever their order.
tensor_map_shape weights_shape(const weight_view &view, int32_t experts)
{
    cuuint64_t row = view.row_stride_bytes, expert = view.expert_stride_bytes;
    cuuint64_t k = view.k, units = view.n / 2;

    if (experts == 1) expert = row * (view.rows_in ? view.k : view.n);
    if (view.rows_in)
        return {3, {cuuint64_t(view.n), k, cuuint64_t(experts)}, {row, expert}, {kBlockRows, kDepth, 1}};
    if (view.order == ORDER_PLAIN)
        return {3, {k, cuuint64_t(view.n), cuuint64_t(experts)}, {row, expert}, {kDepth, kRows, 1}};
    if (view.order == ORDER_INTERLEAVED)
        return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {2 * row, row, 16 * row, expert}, {kDepth, 8, 2, 8, 1}};
    return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {row, units * row, 8 * row, expert}, {kDepth, 8, 2, 8, 1}};
}

int32_t sm_count()
{
    int device = 0, count = 0;

    if (cudaGetDevice(&device) != cudaSuccess) return 1;
    if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
    return count;
}

typedef void (*gemm_entry)(gemm_args);

template <bool is_gate_up> gemm_entry entry_of(bool is_bf16, bool rows_in)
{
    if (is_bf16) return rows_in ? gemm_kernel<true, is_gate_up, true> : gemm_kernel<true, is_gate_up, false>;
    return rows_in ? gemm_kernel<false, is_gate_up, true> : gemm_kernel<false, is_gate_up, false>;
}

template <bool is_gate_up> cudaError_t launch_gemm(const gemm_args &args, const weight_view &view, void *stream)
{
    launch_shape shape = {static_cast<unsigned>(sm_count()), kThreads, sizeof(gemm_smem), LAUNCH_EARLY};

    return launch(entry_of<is_gate_up>(view.format == FORMAT_BF16, view.rows_in != 0), shape, stream, args);
}

void take_weights(gemm_args &to, const weight_view &view)
{
    to.bias = view.bias;
    to.bias_format = view.bias_format;
    to.bias_expert_stride_bytes = view.bias_expert_stride_bytes;
    to.order = view.order;
    to.depth = static_cast<int32_t>(view.k);
}

// What the tensor maps and 16-byte copies need.
bool fits(const weight_view &view)
{
    return (view.format == FORMAT_BF16 || view.format == FORMAT_F16) && view.k % 8 == 0 && view.n % (view.order == ORDER_PLAIN ? 8 : 16) == 0 &&
           view.row_stride_bytes % 16 == 0 && view.expert_stride_bytes % 16 == 0 &&
           reinterpret_cast<uintptr_t>(view.values) % 16 == 0;
}

} // namespace

extern "C" int32_t gemm_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (int32_t i = 0; i < 8 && st == cudaSuccess; i++) {
        gemm_entry entry = i & 4 ? entry_of<true>(i & 1, i & 2) : entry_of<false>(i & 1, i & 2);

        st = cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(gemm_smem));
    }
    return st;
}

extern "C" int32_t gate_up_cuda(const struct gate_up_args *args, void *stream)
{
    bool is_bf16 = args->w1.format == FORMAT_BF16;
    gemm_args to = {};
    cudaError_t st;

    if (!fits(args->w1) || args->experts > kExpertsMax || args->mid_format != args->w1.format ||
        args->operand_format != args->w1.format)
        return cudaErrorInvalidValue;
    take_weights(to, args->w1);
    for (int32_t i = 0; i < args->slabs_count; i++) {
        if (args->slabs[i].format != args->w1.format) return cudaErrorInvalidValue;
        to.slabs[i].rows = static_cast<const unsigned char *>(args->slabs[i].rows);
        to.slabs[i].row_stride_bytes = args->slabs[i].row_stride_bytes;
    }
    to.expert_offset = args->expert_offset;
    to.pair_row = args->pair_row;
    to.pair_weight = args->pair_weight;
    to.out = static_cast<unsigned char *>(args->mid);
    to.out_stride_bytes = args->mid_stride_bytes;
    to.experts = args->experts;
    to.outputs = args->intermediate;
    to.row_tiles = args->w1.order == ORDER_PLAIN ? (args->intermediate + kRows - 1) / kRows : (args->intermediate + 63) / 64;
    to.rows_cap = args->rows_cap;
    to.activation = args->activation;
    to.alpha = args->alpha;
    to.beta = args->beta;
    to.limit = args->limit;
    st = tensor_map_make(&to.weights, args->w1.values, is_bf16, weights_shape(args->w1, args->experts));
    if (st != cudaSuccess) return st;
    return launch_gemm<true>(to, args->w1, stream);
}

extern "C" int32_t down_cuda(const struct down_args *args, void *stream)
{
    bool is_bf16 = args->w2.format == FORMAT_BF16;
    cuuint64_t stride = args->mid_stride_bytes, pairs = args->pairs_max;
    tensor_map_shape mid = {3, {cuuint64_t(args->w2.k), pairs, 1}, {stride, stride * pairs}, {kDepth, 8, 1}};
    gemm_args to = {};
    cudaError_t st;

    if (!fits(args->w2) || args->experts > kExpertsMax || args->mid_format != args->w2.format ||
        args->pair_format != args->w2.format || args->operand_format != args->w2.format)
        return cudaErrorInvalidValue;
    take_weights(to, args->w2);
    to.expert_offset = args->expert_offset;
    to.out = static_cast<unsigned char *>(args->pair_out);
    to.out_stride_bytes = args->pair_stride_bytes;
    to.experts = args->experts;
    to.outputs = static_cast<int32_t>(args->w2.n);
    to.row_tiles = static_cast<int32_t>((args->w2.n + kRows - 1) / kRows);
    st = tensor_map_make(&to.weights, args->w2.values, is_bf16, weights_shape(args->w2, args->experts));
    if (st != cudaSuccess) return st;
    mid.box[1] = 8;
    st = tensor_map_make(&to.tokens, args->mid, is_bf16, mid);
    if (st != cudaSuccess) return st;
    mid.box[1] = kManyTokens;
    st = tensor_map_make(&to.many_tokens, args->mid, is_bf16, mid);
    if (st != cudaSuccess) return st;
    return launch_gemm<false>(to, args->w2, stream);
}
