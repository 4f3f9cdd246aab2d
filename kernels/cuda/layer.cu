// A whole layer of few tokens in one launch on sm_90a, bf16, f16 and e4m3: weights are read once, at memory's pace, and nothing else
// takes long.
//
// grid   one block an SM. Tiles of gate_up, eight units of a job, go each to the block that is free; then a block has a share of down,
//        for which it waits until all tiles of gate_up have ended. Only blocks that run have tiles, so nobody waits for a block that
//        has not begun
// block  8 warps that multiply, by mma, one that ends tiles of gate_up, one that finds them, and 4 that load, down's weights while others
//        end gate_up
// smem   4 to 8 stages of 16 weight rows by 1024 bytes, which the warps take in turns; the sums of up to 32; and the operand rows: those
//        of x, then those of mid
//
// Every block reads all ids, and makes a job of each expert and the tokens that chose it. Of down a block has the same few outputs of all
// jobs, so that it weighs and sums a token's results itself, in the order of their experts. The stages' sums are added in their order in
// fp32: bits do not depend on batch mates. x and mid of e4m3 are coded by each block for itself, with the bits of quantise; products of
// codes are exact in mma's fp16.
//
// bytes  weights of experts with tokens

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/layer_jobs.cuh"
#include "kernels/cuda/layer_load.cuh"
#include "kernels/cuda/layer_multiply.cuh"

#include <algorithm>

namespace {

// By one thread.
__device__ __forceinline__ void make_barriers(layer_smem &smem, bool is_scaled)
{
    for (int32_t i = 0; i < kTiles; i++) {
        mbarrier_init(&smem.found[i], 1);
        mbarrier_init(&smem.begun[i], 1);
    }
    for (int32_t stage = 0; stage < kStagesMost; stage++) {
        mbarrier_init(&smem.full[stage], 1 + (is_scaled ? 32 : 0));
        mbarrier_init(&smem.empty[stage], 1);
        mbarrier_init(&smem.summed[stage], 1);
        mbarrier_init(&smem.read[stage], 1);
    }
    fence_mbarrier_init();
}

// Into the constant cache, whose lines come a microsecond after the first look at each.
__device__ __forceinline__ void touch_args(const layer_args_device &args)
{
    const uint32_t *words = reinterpret_cast<const uint32_t *>(&args);

#pragma unroll
    for (size_t i = 0; i < sizeof args / 4; i += 16)
        asm volatile("" ::"r"(words[i]));
}

// Into the L2.
__device__ __forceinline__ void touch_rows(const layer_args_device &args, int32_t thread)
{
    const int32_t lines = (args.up.depth * 2 + 127) / 128;

    if (thread < args.tokens * lines) prefetch_l2(args.x + thread / lines * args.x_stride_bytes + thread % lines * 128);
    if (thread < args.tokens) prefetch_l2(args.ids.ids + thread * args.ids.row_stride_bytes);
    if (thread < args.tokens && args.router_weights != nullptr) prefetch_l2(args.router_weights + thread * args.router_weight_stride_bytes);
}

template <int type> __global__ void __launch_bounds__(kThreads, 1) layer_kernel(const __grid_constant__ layer_args_device args)
{
    using P = product<static_cast<operand>(type)>;
    layer_smem &smem = *dynamic_smem<layer_smem>();
    uint32_t turn = 0; // the block's first, of the thread that finds tiles

    if (threadIdx.x == kFinding) make_barriers(smem, P::is_scaled);
    if (threadIdx.x == 0) touch_args(args);
    touch_rows(args, static_cast<int32_t>(threadIdx.x));
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (threadIdx.x == kFinding) turn = atomicAdd(&args.turns->taken, 1u);
    if (threadIdx.x < kPositions)
        find_jobs(args, smem);
    else if (threadIdx.x < kMultiplying)
        keep_rows<P>(args.up, operand_of(args, smem), args.x, args.x_stride_bytes, args.tokens, P::is_scaled ? args.x_is_bf16 : P::mid_is_bf16,
                     threadIdx.x - kPositions, kMultiplying - kPositions);
    __syncthreads();
    if (threadIdx.x >= kLoading) {
        load_all<P>(args, smem);
    } else if (threadIdx.x >= kFinding) {
        if (threadIdx.x == kFinding) find_tiles(args, smem, turn);
    } else if (threadIdx.x >= kEnding) {
        end_up<P>(args, smem);
    } else {
        if (args.load != nullptr && blockIdx.x == 0 && threadIdx.x < kPositions && smem.key[threadIdx.x] >= 0)
            atomicAdd(&args.load[smem.key[threadIdx.x] / kKeys], 1ull);
        multiply_all<P>(args, smem);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

typedef void (*layer_entry)(layer_args_device);

layer_entry entry_of(operand type)
{
    return type == OPERAND_BF16 ? layer_kernel<OPERAND_BF16> : type == OPERAND_F16 ? layer_kernel<OPERAND_F16> : layer_kernel<OPERAND_E4M3>;
}

// A layer of so few bytes that it is bound by what begins and ends launches: of weights, if each choice has an expert of its own. From an
// H200: 75 MB of bf16 take 27 us both ways, 38 MB of fp8 18 instead of 24, and 75 31 instead of 33; 151 MB of either more than launch by
// launch.
constexpr int64_t kWeightBytes = 96 << 20;

bool is_small(const layer_args &from)
{
    const weight_view &w1 = from.gemms.gate_up.w1, &w2 = from.gemms.down.w2;
    const double expert_bytes = (static_cast<double>(w1.n) * w1.k + static_cast<double>(w2.n) * w2.k) * element_bytes_of(w1.format);

    return from.route.slabs[0].cap * from.route.top_k * expert_bytes <= kWeightBytes;
}

bool is_layer(const layer_args &from)
{
    const route_args &route = from.route;
    const gate_up_args &gate_up = from.gemms.gate_up;
    const down_args &down = from.gemms.down;
    const row_slab *x = route.slabs;
    const bool is_fp8 = element_bytes_of(gate_up.w1.format) == 1;

    return from.turns != nullptr && route.by == ROUTE_BY_IDS && route.slabs_count == 1 && from.combine.slabs_count == 1 && x->cap > 0 &&
           x->cap <= route.rows_cap && x->cap <= kTokens && x->cap * route.top_k <= kPositions && x->ids != nullptr && route.experts > 0 &&
           gate_up.w1.format == down.w2.format && !gate_up.w1.rows_in && !down.w2.rows_in && fits(gate_up.w1) && fits(down.w2) &&
           formats_meet(gate_up.w1, gate_up.operand_format, gate_up.mid_format) && formats_meet(down.w2, down.operand_format, down.pair_format) &&
           (gate_up.w1.order == ORDER_PLAIN) == (gate_up.activation == ACTIVATION_RELU2) &&
           (is_fp8 ? x->format == FORMAT_BF16 || x->format == FORMAT_F16 : x->format == gate_up.w1.format) && is_aligned(x->rows, 16) &&
           x->row_stride_bytes % 16 == 0;
}

template <class P> void take_product(layer_product &to, const weight_view &from, int32_t outputs, int32_t rows)
{
    const int32_t inputs = static_cast<int32_t>((from.k + kFp8Group - 1) / kFp8Group * kFp8Group);

    to.weights = static_cast<const unsigned char *>(from.values);
    to.expert_stride_bytes = from.expert_stride_bytes;
    to.row_stride_bytes = from.row_stride_bytes;
    to.scales = scales_of(from);
    to.bias = from.bias;
    to.bias_expert_stride_bytes = from.bias_expert_stride_bytes;
    to.bias_format = from.bias_format;
    to.order = from.order;
    to.depth = static_cast<int32_t>(from.k);
    to.row_bytes = to.depth * P::element_bytes;
    to.stages = (to.row_bytes + kRowBytes - 1) / kRowBytes;
    to.outputs = outputs;
    to.operand_pitch_bytes = inputs * 2 + P::skew_bytes;
    to.scale_offset = rows * to.operand_pitch_bytes;
    to.scale_pitch = P::is_scaled ? inputs / kFp8Group : 0;
}

// Bytes of shared memory, once the products are there, with as many stages as fit; 0: too few.
size_t take_smem(layer_args_device &to)
{
    const size_t up = to.up.scale_offset + size_t(4) * to.tokens * to.up.scale_pitch;
    const size_t down = to.down.scale_offset + size_t(4) * to.tokens * to.top_k * to.down.scale_pitch;
    const size_t other = std::max(up, down) + sizeof(layer_smem);

    if (other + kStagesLeast * kStageBytes > kSmemBytes || to.down.stages > kParts) return 0;
    to.stages = static_cast<int32_t>(std::min((kSmemBytes - other) / kStageBytes, size_t(kStagesMost)));
    to.operand_offset = to.stages * kStageBytes;
    return other + to.operand_offset;
}

// The products, and how many bytes of shared memory they want; 0: there is no room for their rows.
template <class P> size_t take_products(layer_args_device &to, const layer_args &from)
{
    const gate_up_args &gate_up = from.gemms.gate_up;

    if (std::max(gate_up.hidden, gate_up.intermediate) > kSmemBytes) return 0; // a row has no room
    take_product<P>(to.up, gate_up.w1, gate_up.intermediate, to.tokens);
    take_product<P>(to.down, from.gemms.down.w2, gate_up.hidden, to.tokens * to.top_k);
    return take_smem(to);
}

void take_rows(layer_args_device &to, const layer_args &from)
{
    const row_slab &x = from.route.slabs[0];
    const out_slab &y = from.combine.slabs[0];

    to.ids = ids_of(from.route);
    to.router_weights = static_cast<const unsigned char *>(x.weights);
    to.router_weight_stride_bytes = x.weight_stride_bytes;
    to.router_weight_format = x.weight_format;
    to.x = static_cast<const unsigned char *>(x.rows);
    to.x_stride_bytes = x.row_stride_bytes;
    to.x_is_bf16 = x.format == FORMAT_BF16;
    to.y = static_cast<unsigned char *>(y.rows);
    to.y_stride_bytes = y.row_stride_bytes;
    to.y_format = y.format;
    to.tokens = x.cap;
    to.top_k = from.route.top_k;
    to.experts = from.route.experts;
}

} // namespace

extern "C" int32_t layer_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (operand type : {OPERAND_BF16, OPERAND_F16, OPERAND_E4M3}) {
        if (st == cudaSuccess) st = load_kernel(entry_of(type));
        if (st == cudaSuccess) st = cudaFuncSetAttribute(entry_of(type), cudaFuncAttributeMaxDynamicSharedMemorySize, kSmemBytes);
    }
    return st;
}

// mid lies where route may write, which nothing here needs.
extern "C" int32_t layer_cuda(const struct layer_args *from, void *stream)
{
    const gate_up_args &gate_up = from->gemms.gate_up;
    const operand type = operand_of(gate_up.w1.format);
    layer_args_device to = {};
    size_t smem_bytes;

    if (!is_layer(*from) || !is_small(*from)) return LAYER_UNFIT;
    take_rows(to, *from);
    switch (type) {
    case OPERAND_BF16:
        smem_bytes = take_products<product<OPERAND_BF16>>(to, *from);
        break;
    case OPERAND_F16:
        smem_bytes = take_products<product<OPERAND_F16>>(to, *from);
        break;
    default:
        smem_bytes = take_products<product<OPERAND_E4M3>>(to, *from);
    }
    to.mid = static_cast<unsigned char *>(from->route.scratch);
    to.mid_stride_bytes = (static_cast<int64_t>(gate_up.intermediate) * 2 + 127) / 128 * 128;
    if (smem_bytes == 0 || to.tokens * to.top_k * to.mid_stride_bytes > from->route.scratch_bytes || !is_aligned(to.mid, 16))
        return LAYER_UNFIT;
    to.activation = terms_of(gate_up);
    to.weighs_input = gate_up.pair_weight != nullptr;
    to.load = reinterpret_cast<unsigned long long *>(from->tally.load);
    to.turns = reinterpret_cast<layer_turns *>(from->turns);
    to.scale = from->combine.scale;
    return launch(entry_of(type), {static_cast<unsigned>(sm_count()), kThreads, smem_bytes, LAUNCH_EARLY}, stream, to);
}
