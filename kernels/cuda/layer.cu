// A whole layer of few tokens in one launch on sm_90a, bf16, f16 and e4m3: weights are read once.
//
// grid   one block an SM. Tiles of gate_up, eight units of a job, go each to the block that is free; then a block has a share of down,
//        of a job once its mid is there. Only blocks that run have tiles, so nobody waits for a block that has not begun
// block  11 warps that multiply, by mma, one that finds tiles of gate_up, and 4 that load, down's weights once the block's of gate_up are
//        there. A warp that multiplies a job's stage of down waits for that job's mid alone, while others are at work on gate_up
// smem   4 to 11 stages of 16 weight rows by 1024 bytes, each of which one warp multiplies; the sums of up to 32, which the last of a
//        tile's warps adds, or of down all of them; and the operand rows: those of x and those of mid
//
// Every block reads all ids, and makes a job of each expert and the tokens that chose it. Of down a block has the same few outputs of all
// jobs, so that it weighs and sums a token's results itself, in the order of their experts. The stages' sums are added in their order in
// fp32: bits do not depend on batch mates. mid passes through memory in words that say whether they are there, so that no count of ended
// tiles stands between its writers and its readers. x and mid of e4m3 are coded by each block for itself, with the bits of quantise; products of
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

// By one lane of each loading warp, of which the compiler knows: otherwise barriers are made in loops over lanes, with a fence for each.
__device__ __forceinline__ void make_barriers(layer_smem &smem, int32_t warp, bool is_scaled)
{
    constexpr int32_t tiles = kTiles / kLoaders, stages = (kStagesMost + kLoaders - 1) / kLoaders, parts = kParts / kLoaders;

    static_assert(kTiles % kLoaders == 0 && kParts % kLoaders == 0);
#pragma unroll
    for (int32_t i = 0; i < tiles; i++) {
        mbarrier_init(&smem.found[warp * tiles + i], 1);
        mbarrier_init(&smem.begun[warp * tiles + i], 1);
    }
#pragma unroll
    for (int32_t i = 0; i < stages; i++) {
        if (warp * stages + i >= kStagesMost) break;
        mbarrier_init(&smem.full[warp * stages + i], 1 + (is_scaled ? 32 : 0));
        mbarrier_init(&smem.empty[warp * stages + i], 1);
    }
#pragma unroll
    for (int32_t i = 0; i < parts; i++)
        mbarrier_init(&smem.read[warp * parts + i], 1);
    fence_mbarrier_init();
}

// Into the L2.
__device__ __forceinline__ void touch_rows(const layer_args_device &args, int32_t thread)
{
    for (int32_t token = 0; token < args.tokens && thread * 128 < args.up.depth * 2; token++)
        prefetch_l2(args.x + token * args.x_stride_bytes + thread * 128);
    if (thread >= args.tokens) return;
    prefetch_l2(args.ids.ids + thread * args.ids.row_stride_bytes);
    if (args.router_weights != nullptr) prefetch_l2(args.router_weights + thread * args.router_weight_stride_bytes);
}

template <int type> __global__ void __launch_bounds__(kThreads, 1) layer_kernel(const __grid_constant__ layer_args_device args)
{
    using P = product<static_cast<operand>(type)>;
    layer_smem &smem = *dynamic_smem<layer_smem>();
    const int32_t thread = threadIdx.x, warp = uniform(thread / 32);

    if (warp >= kLoading / 32 && elect_one()) make_barriers(smem, warp - kLoading / 32, P::is_scaled);
    if (thread == kFinding) {
        prefetch_tensormap(&args.up.map);
        prefetch_tensormap(&args.down.map);
    }
    if (thread < kTiles) smem.summed[thread] = 0;
    touch_rows(args, thread);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (thread == kFinding) smem.first = take_first(args);
    // Who loads need not wait for x.
    if (thread < kPositions)
        find_jobs(args, smem);
    else if (thread < kMultiplying)
        keep_rows<P>(args, smem, thread - kPositions, kMultiplying - kPositions);
    if (thread < kPositions || thread >= kMultiplying) bar_sync<3, kThreads - (kMultiplying - kPositions)>();
    if (thread < kMultiplying) multiplying_sync();
    if (thread >= kLoading) {
        load_all<P>(args, smem);
    } else if (thread >= kFinding) {
        if (thread == kFinding) find_tiles(args, smem);
    } else {
        if (args.load != nullptr && blockIdx.x == 0 && thread < kPositions && smem.key[thread] >= 0)
            atomicAdd(&args.load[smem.key[thread] / kKeys], 1ull);
        multiply_all<P>(args, smem);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

typedef void (*layer_entry)(layer_args_device);

layer_entry entry_of(operand type)
{
    return type == OPERAND_BF16 ? layer_kernel<OPERAND_BF16> : type == OPERAND_F16 ? layer_kernel<OPERAND_F16> : layer_kernel<OPERAND_E4M3>;
}

// A layer of so few bytes that it is bound by what begins and ends launches.
bool is_small(const layer_args &from)
{
    const weight_view &w1 = from.gemms.gate_up.w1, &w2 = from.gemms.down.w2;
    const double expert_weights = static_cast<double>(w1.n) * w1.k + static_cast<double>(w2.n) * w2.k;

    return from.route.slabs[0].cap <= layer_tokens(expert_weights, w2.n, element_bytes_of(w1.format) == 1, from.route.top_k);
}

// Of every row of x one, weighted as the router says, on the input or here.
bool has_results(const layer_args &from)
{
    const out_slab &y = from.combine.slabs[0];
    const row_slab &x = from.route.slabs[0];
    const bool weighs_input = from.gemms.gate_up.pair_weight != nullptr, weighs_result = from.combine.pair_weight != nullptr;

    return y.rows != nullptr && y.cap >= x.cap && weighs_input != weighs_result && from.route.pairs_max >= int64_t(x.cap) * from.route.top_k;
}

bool is_layer(const layer_args &from)
{
    const route_args &route = from.route;
    const gate_up_args &gate_up = from.gemms.gate_up;
    const down_args &down = from.gemms.down;
    const row_slab *x = route.slabs;
    const bool is_fp8 = element_bytes_of(gate_up.w1.format) == 1;

    return from.turns != nullptr && route.by == ROUTE_BY_IDS && route.slabs_count == 1 && from.combine.slabs_count == 1 && x->cap > 0 &&
           x->cap <= route.rows_cap && x->ids != nullptr && route.experts > 0 && has_results(from) &&
           gate_up.w1.format == down.w2.format && !gate_up.w1.rows_in && !down.w2.rows_in && has_code(gate_up) && has_code(down) &&
           (is_fp8 ? x->format == FORMAT_BF16 || x->format == FORMAT_F16 : x->format == gate_up.w1.format) && is_aligned(x->rows, 16) &&
           x->row_stride_bytes % 16 == 0;
}

divider divider_of(int32_t divisor)
{
    return {static_cast<uint32_t>(((int64_t(1) << 31) + divisor - 1) / divisor)};
}

// See layer_product.
tensor_map_shape map_shape(const layer_product &by, const weight_view &view, int32_t experts)
{
    const bool in_turns = view.order == ORDER_INTERLEAVED;
    const cuuint64_t row = view.row_stride_bytes, expert = experts == 1 ? row * view.n : view.expert_stride_bytes;
    const cuuint64_t bytes = by.row_bytes, rows = in_turns ? view.n / 2 : view.n, kinds = in_turns ? 2 : 1;

    return {5,
            {by.is_whole ? kUnitBytes : bytes, rows, kinds, by.is_whole ? bytes / kUnitBytes : 1, cuuint64_t(experts)},
            {in_turns ? 2 * row : row, row, kUnitBytes, expert},
            {kUnitBytes, kHalf, 1, by.is_whole ? kUnits : 1u, 1}};
}

cudaError_t make_maps(layer_args_device &to, const layer_args &from)
{
    const weight_view &w1 = from.gemms.gate_up.w1, &w2 = from.gemms.down.w2;
    const tensor_map_request maps[] = {
        {&to.up.map, w1.values, CU_TENSOR_MAP_DATA_TYPE_UINT8, map_shape(to.up, w1, from.route.experts)},
        {&to.down.map, w2.values, CU_TENSOR_MAP_DATA_TYPE_UINT8, map_shape(to.down, w2, from.route.experts)},
    };

    return tensor_maps_make(maps, 2);
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
    to.is_whole = to.row_bytes % kUnitBytes == 0;
    to.by_stages = divider_of(to.stages);
    to.outputs = outputs;
    to.operand_pitch_bytes = inputs * 2 + kSkewBytes;
    to.scale_offset = rows * to.operand_pitch_bytes;
    to.scale_pitch = P::is_scaled ? inputs / kFp8Group : 0;
}

// Of so many operand rows and their scales.
size_t operand_bytes(const layer_product &by, int32_t rows)
{
    return by.scale_offset + size_t(4) * rows * by.scale_pitch;
}

// Bytes of shared memory, once the products are there, with as many stages as fit, and no more than kStagesEnough or than down has parts:
// each then has a warp of its own; 0: too few.
size_t take_smem(layer_args_device &to)
{
    const size_t up = (operand_bytes(to.up, to.tokens) + 15) / 16 * 16; // rows of down begin there
    const size_t parts = size_t(to.tokens) * to.top_k * to.down.stages;
    const size_t most = std::clamp(parts, size_t(kStagesEnough), size_t(kStagesMost));
    const size_t other = up + operand_bytes(to.down, to.tokens * to.top_k) + sizeof(layer_smem);

    if (other + kStagesLeast * kStageBytes > kSmemBytes || std::max(to.up.stages, to.down.stages) > kParts) return 0;
    to.stages = static_cast<int32_t>(std::min((kSmemBytes - other) / kStageBytes, most));
    to.up.operand_offset = to.stages * kStageBytes;
    to.down.operand_offset = to.up.operand_offset + static_cast<int32_t>(up);
    return other + to.up.operand_offset;
}

// The products, and how many bytes of shared memory they want; 0: there is no room for their rows.
template <class P> size_t take_products(layer_args_device &to, const layer_args &from)
{
    const gate_up_args &gate_up = from.gemms.gate_up;
    const int64_t groups = gate_up.intermediate / kHalf;

    if (std::max(gate_up.hidden, gate_up.intermediate) > kSmemBytes) return 0; // a row has no room
    if (to.tokens * to.top_k * groups * groups > INT32_MAX) return 0;          // see divider
    take_product<P>(to.up, gate_up.w1, gate_up.intermediate, to.tokens);
    take_product<P>(to.down, from.gemms.down.w2, gate_up.hidden, to.tokens * to.top_k);
    to.by_eights = divider_of(eights_of(to.up));
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
    to.y_count = y.count;
    to.y_format = y.format;
    to.tokens = x.cap;
    to.top_k = from.route.top_k;
    to.experts = from.route.experts;
    to.by_top_k = divider_of(to.top_k);
}

// How a grid of so many blocks shares the work out; up_rows: of an expert's weights of gate_up.
void share_out(layer_args_device &to, int32_t blocks, int32_t up_rows)
{
    const int32_t eights = to.down.outputs / kHalf;
    const int64_t up_bytes = (up_rows - 1) * to.up.row_stride_bytes + to.up.row_bytes;

    to.by_groups = divider_of(to.up.outputs / kHalf);
    to.by_turns = divider_of(2 * blocks);
    to.first_bytes = static_cast<uint32_t>(std::min<int64_t>(up_bytes / blocks, kFirstBytes) / 16 * 16);
    to.first_jobs = to.first_bytes == 0 ? 0 : kFirstBytes / to.first_bytes;
    to.eights_each = eights / blocks;
    to.eights_more = eights % blocks;
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

extern "C" int32_t layer_cuda(const struct layer_args *from, void *stream)
{
    const gate_up_args &gate_up = from->gemms.gate_up;
    const operand type = operand_of(gate_up.w1.format);
    const int32_t blocks = sm_count();
    layer_args_device to = {};
    size_t smem_bytes;
    cudaError_t st;

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
    to.mid = from->mid;
    to.mid_words = from->mid_words;
    if (smem_bytes == 0 || to.tokens * to.top_k * gate_up.intermediate > 2 * to.mid_words || to.mid_words % 4 != 0 || !is_aligned(to.mid, 16))
        return LAYER_UNFIT;
    st = make_maps(to, *from);
    if (st != cudaSuccess) return st;
    share_out(to, blocks, static_cast<int32_t>(gate_up.w1.n));
    to.activation = terms_of(gate_up);
    to.weighs_input = gate_up.pair_weight != nullptr;
    to.load = reinterpret_cast<unsigned long long *>(from->tally.load);
    to.turns = reinterpret_cast<layer_turns *>(from->turns);
    to.scale = from->combine.scale;
    return launch(entry_of(type), {static_cast<unsigned>(blocks), kThreads, smem_bytes, LAUNCH_EARLY}, stream, to);
}
