// A whole layer of few tokens in one launch on sm_90a, bf16, f16, e4m3 and 4 bits: weights are read once.
//
// grid   one block an SM. Tiles of gate_up, eight units of a job, go each to the block that is free; then a block has a share of down,
//        of a job once its mid is there. Only blocks that run have tiles, so nobody waits for a block that has not begun
// block  11 warps that multiply, of 4 bits 12, by mma, one that finds tiles of gate_up, and 4 that load, down's weights once the block's of gate_up are
//        there. A warp that multiplies a job's stage of down waits for that job's mid alone, while others are at work on gate_up
// smem   4 to 12 stages of 16 weight rows by 1024 bytes, of 4 bits 512 and their scales, each of which one warp multiplies; the sums of up to
//        32, which the last of a tile's warps adds, or of down all of them; and the operand rows: those of x and those of mid
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
template <class P> __device__ __forceinline__ void make_barriers(layer_smem &smem, int32_t warp)
{
    constexpr bool has_scales = P::is_scaled || P::is_packed;
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
        mbarrier_init(&smem.full[warp * stages + i], 1 + (has_scales ? 32 : 0));
        mbarrier_init(&smem.empty[warp * stages + i], 1);
    }
#pragma unroll
    for (int32_t i = 0; i < parts; i++) {
        mbarrier_init(&smem.read[warp * parts + i], 1);
        if (P::groups > 1) mbarrier_init(&smem.kept[warp * parts + i], 1);
    }
    fence_mbarrier_init();
}

// Into the L2.
template <class P> __device__ __forceinline__ void touch_rows(const layer_args_device &args, int32_t thread)
{
    // No branch: lanes that may have parted here take a longer way through every shuffle of the jobs'.
    const auto last = [&](int32_t token) { return P::has_slabs && token >= args.tokens - args.tokens_coded ? args.up.depth - 1 : INT32_MAX; };

    for (int32_t token = 0; token < args.tokens && thread * 128 < args.up.depth * 2; token++)
        prefetch_l2(at_token<P>(row_of<P>(args, token).x, token, args.strides.x_bytes) + min(thread * 128, last(token)));
    if (thread >= args.tokens) return;
    const layer_row &row = row_of<P>(args, thread);
    prefetch_l2(at_token<P>(row.ids, thread, args.strides.id_bytes));
    if (row.router_weights != nullptr) prefetch_l2(at_token<P>(row.router_weights, thread, args.strides.router_weight_bytes));
}

template <class P>
__device__ __forceinline__ void keep_all_rows(const layer_args_device &args, layer_smem &smem, int32_t thread, int32_t threads)
{
    keep_rows<P>(args, smem, thread, threads);
    if (P::has_slabs && P::is_scaled) keep_coded_rows<P>(args, smem, thread, threads);
}

template <int type, bool has_slabs>
__global__ void __launch_bounds__(product<static_cast<operand>(type), has_slabs>::threads, 1) layer_kernel(const __grid_constant__ layer_args_device args)
{
    using P = product<static_cast<operand>(type), has_slabs>;
    layer_smem &smem = *dynamic_smem<layer_smem>();
    const int32_t thread = threadIdx.x, warp = uniform(thread / 32);

    if (warp >= P::loading / 32 && elect_one()) make_barriers<P>(smem, warp - P::loading / 32);
    if (thread == P::finding) {
        prefetch_tensormap(&args.up.map);
        prefetch_tensormap(&args.down.map);
    }
    if (thread < kTiles) smem.summed[thread] = 0;
    if (thread == kTiles) smem.looks = 0;
    touch_rows<P>(args, thread);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (thread == P::finding) smem.first = take_first(args);
    if (P::has_slabs && thread > P::finding && thread <= P::finding + args.tokens) {
        // Now: what is looked at after the first products comes behind all weights, if no cache has it.
        const int32_t token = thread - P::finding - 1;

        smem.results[token] = result_of<P>(args, token);
    }
    // Who loads need not wait for x.
    if (thread < kPositions)
        find_jobs<P>(args, smem);
    else if (thread < P::multiplying)
        keep_all_rows<P>(args, smem, thread - kPositions, P::multiplying - kPositions);
    if (thread < kPositions || thread >= P::multiplying) bar_sync<3, P::threads - (P::multiplying - kPositions)>();
    if (thread < P::multiplying) multiplying_sync<P>();
    if (thread >= P::loading) {
        load_all<P>(args, smem);
    } else if (thread >= P::finding) {
        if (thread == P::finding) find_tiles(args, smem);
    } else {
        if (args.load != nullptr && blockIdx.x == 0 && thread < kPositions && smem.key[thread] >= 0)
            atomicAdd(&args.load[smem.key[thread] / kKeys], 1ull);
        multiply_all<P>(args, smem);
    }
}

// ---- Launching ---------------------------------------------------------------------------------

// A layer of so few bytes that it is bound by what begins and ends launches. Slabs are those of ranks that share the experts, so that of
// each's choices one in so many is here: all together are as many as one slab has.
bool is_small(const layer_args &from)
{
    const weight_view &w1 = from.gemms.gate_up.w1, &w2 = from.gemms.down.w2;
    const double expert_weights = static_cast<double>(w1.n) * w1.k + static_cast<double>(w2.n) * w2.k;
    const int32_t most = layer_tokens(expert_weights, w2.n, weight_bits_of(w1.format), from.route.top_k);
    int64_t tokens = 0;

    for (int32_t i = 0; i < from.route.slabs_count; i++) {
        tokens += from.route.slabs[i].cap;
        if (from.route.slabs[i].cap > most) return false;
    }
    return tokens > 0 && tokens <= LAYER_TOKENS && tokens * from.route.top_k <= std::min<int64_t>(LAYER_POSITIONS, from.route.pairs_max);
}

bool is_16_bits(int32_t format)
{
    return format == FORMAT_BF16 || format == FORMAT_F16;
}

// Of e4m3 weights, rows of x may be that too.
bool has_rows(const layer_args &from, const row_slab &x)
{
    const int32_t format = from.gemms.gate_up.w1.format;
    const bool fits = element_bytes_of(format) == 1 ? is_16_bits(x.format) || (x.format == FORMAT_FP8_BLOCK128 && x.scales != nullptr)
                                                   : x.format == (is_packed(format) ? FORMAT_BF16 : format);

    return fits && x.ids != nullptr && is_aligned(x.rows, 16) && x.row_stride_bytes % 16 == 0 && x.cap <= from.route.rows_cap;
}

// Rows, those of 16 bits of one format, and of every one a result.
bool takes_slabs(const layer_args &from)
{
    int32_t format = FORMAT_AUTO;

    for (int32_t i = 0; i < from.route.slabs_count; i++) {
        const row_slab &x = from.route.slabs[i];
        const out_slab &y = from.combine.slabs[i];

        if (x.cap == 0) continue;
        if (!has_rows(from, x) || y.rows == nullptr || y.cap < x.cap) return false;
        if (!is_16_bits(x.format)) continue;
        if (format != FORMAT_AUTO && format != x.format) return false;
        format = x.format;
    }
    return true;
}

bool is_layer(const layer_args &from)
{
    const route_args &route = from.route;
    const gate_up_args &gate_up = from.gemms.gate_up;
    const down_args &down = from.gemms.down;
    const bool weighs_input = gate_up.pair_weight != nullptr, weighs_result = from.combine.pair_weight != nullptr;

    return from.turns != nullptr && route.by == ROUTE_BY_IDS && from.combine.slabs_count == route.slabs_count && route.experts > 0 &&
           weighs_input != weighs_result && gate_up.w1.format == down.w2.format && !gate_up.w1.rows_in && !down.w2.rows_in && has_code(gate_up) && has_code(down);
}

divider divider_of(int32_t divisor)
{
    return {static_cast<uint32_t>(((int64_t(1) << 31) + divisor - 1) / divisor)};
}

// See layer_product.
tensor_map_shape map_shape(const layer_product &by, const weight_view &view, int32_t experts, int32_t units)
{
    const bool in_turns = view.order == ORDER_INTERLEAVED;
    const cuuint64_t row = view.row_stride_bytes, expert = experts == 1 ? row * view.n : view.expert_stride_bytes;
    const cuuint64_t bytes = by.row_bytes, rows = in_turns ? view.n / 2 : view.n, kinds = in_turns ? 2 : 1;

    return {5,
            {by.is_whole ? kUnitBytes : bytes, rows, kinds, by.is_whole ? bytes / kUnitBytes : 1, cuuint64_t(experts)},
            {in_turns ? 2 * row : row, row, kUnitBytes, expert},
            {kUnitBytes, kHalf, 1, by.is_whole ? units : 1u, 1}};
}

cudaError_t make_maps(layer_args_device &to, const layer_args &from, int32_t units)
{
    const weight_view &w1 = from.gemms.gate_up.w1, &w2 = from.gemms.down.w2;
    const tensor_map_request maps[] = {
        {&to.up.map, w1.values, CU_TENSOR_MAP_DATA_TYPE_UINT8, map_shape(to.up, w1, from.route.experts, units)},
        {&to.down.map, w2.values, CU_TENSOR_MAP_DATA_TYPE_UINT8, map_shape(to.down, w2, from.route.experts, units)},
    };

    return tensor_maps_make(maps, 2);
}

template <class P> void take_product(layer_product &to, const weight_view &from, int32_t outputs)
{
    constexpr int32_t multiple = std::max(kFp8Group, P::depth);
    const int32_t inputs = static_cast<int32_t>((from.k + multiple - 1) / multiple * multiple);

    to.weights = static_cast<const unsigned char *>(from.values);
    to.expert_stride_bytes = from.expert_stride_bytes;
    to.row_stride_bytes = from.row_stride_bytes;
    to.scales = scales_of(from);
    if (P::is_packed) to.packed = packed_scales_of(from);
    to.bias = from.bias;
    to.bias_expert_stride_bytes = from.bias_expert_stride_bytes;
    to.bias_format = from.bias_format;
    to.order = from.order;
    to.depth = static_cast<int32_t>(from.k);
    to.row_bytes = to.depth * P::bits / 8;
    to.stages = (to.row_bytes + P::row_bytes - 1) / P::row_bytes;
    to.is_whole = to.row_bytes % kUnitBytes == 0;
    to.by_stages = divider_of(to.stages);
    to.outputs = outputs;
    to.eights = inputs / 8;
    to.operand_pitch_bytes = inputs * 2 + kSkewBytes;
    to.scale_pitch = P::is_scaled ? inputs / kFp8Group : 0;
}

// What lies at the end of shared memory, from the last: x's scales and rows, mid's scales, and its rows from the last place on. Whether the
// stages have room, were all choices here.
template <class P> bool take_smem(layer_args_device &to)
{
    const int32_t choices = to.tokens * to.top_k;
    int32_t end = kSmemBytes - static_cast<int32_t>(sizeof(layer_smem));
    const auto take = [&end](int32_t bytes) { return end = (end - bytes) / 16 * 16; };
    int32_t scales = take(4 * to.tokens * to.up.scale_pitch);

    to.up.operand_offset = take(to.tokens * to.up.operand_pitch_bytes);
    to.up.scale_offset = scales - to.up.operand_offset;
    scales = take(4 * choices * to.down.scale_pitch);
    to.down.operand_offset = take(to.down.operand_pitch_bytes);
    to.down.scale_offset = scales - to.down.operand_offset;
    to.down.operand_pitch_bytes = -to.down.operand_pitch_bytes;
    to.stages = stages_for<P>(to.down, choices);
    return to.stages >= kStagesLeast && std::max(to.up.stages, to.down.stages) <= kParts;
}

// The products; whether there is room for their rows.
template <class P> bool take_products(layer_args_device &to, const layer_args &from)
{
    const gate_up_args &gate_up = from.gemms.gate_up;
    const int64_t groups = gate_up.intermediate / kHalf;

    if (std::max(gate_up.hidden, gate_up.intermediate) > kSmemBytes) return false; // a row has no room
    if (to.tokens * to.top_k * groups * groups > INT32_MAX) return false;          // see divider
    take_product<P>(to.up, gate_up.w1, gate_up.intermediate);
    take_product<P>(to.down, from.gemms.down.w2, gate_up.hidden);
    to.by_eights = divider_of(to.up.eights);
    return take_smem<P>(to);
}

layer_row take_row(const row_slab &x, const out_slab &y, int32_t index)
{
    const auto at = [index](const void *rows, int64_t stride_bytes) {
        return rows == nullptr ? nullptr : static_cast<const unsigned char *>(rows) + index * stride_bytes;
    };
    layer_row to = {};

    to.x = at(x.rows, x.row_stride_bytes);
    if (!is_16_bits(x.format)) to.scales = reinterpret_cast<const float *>(at(x.scales, x.scale_stride_bytes));
    to.ids = at(x.ids, x.id_stride_bytes);
    to.router_weights = at(x.weights, x.weight_stride_bytes);
    to.y = static_cast<unsigned char *>(y.rows) + index * y.row_stride_bytes;
    to.rows_valid = x.count;
    to.results_valid = y.count;
    to.index = index;
    to.scale_stride = x.group_stride_bytes == 0 ? 1 : static_cast<int32_t>(x.group_stride_bytes / 4);
    to.id_bytes = x.id_bytes;
    to.router_weight_format = x.weight_format;
    to.y_format = y.format;
    return to;
}

void take_rows(layer_args_device &to, const layer_args &from)
{
    const row_slab &first = from.route.slabs[0];

    to.strides = {first.row_stride_bytes, first.id_stride_bytes, first.weight_stride_bytes, from.combine.slabs[0].row_stride_bytes};
    for (bool is_coded : {false, true}) {
        for (int32_t i = 0; i < from.route.slabs_count; i++) {
            const row_slab &x = from.route.slabs[i];

            if (is_16_bits(x.format) == is_coded) continue;
            for (int32_t index = 0; index < x.cap; index++)
                to.rows[to.tokens++] = take_row(x, from.combine.slabs[i], index);
            if (is_coded)
                to.tokens_coded += x.cap;
            else if (x.cap > 0)
                to.x_is_bf16 = x.format == FORMAT_BF16;
        }
    }
    to.expert_map = from.route.expert_map;
    to.map_count = from.route.map_count;
    to.expert_first = from.route.expert_first;
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

// What there is for a kind of weights.
struct layer_code {
    void (*kernels[2])(layer_args_device); // of one slab, and of several
    bool (*take)(layer_args_device &, const layer_args &);
    unsigned threads;
    int32_t units; // of a stage
};

template <operand type> constexpr layer_code code_of()
{
    using P = product<type, false>;
    return {{layer_kernel<type, false>, layer_kernel<type, true>}, take_products<P>, P::threads, P::units};
}

constexpr layer_code codes[OPERANDS] = {code_of<OPERAND_BF16>(), code_of<OPERAND_F16>(),   code_of<OPERAND_E4M3>(),
                                        code_of<OPERAND_INT4>(), code_of<OPERAND_MXFP4>(), code_of<OPERAND_NVFP4>()};

} // namespace

extern "C" int32_t layer_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (const layer_code &code : codes)
        for (auto kernel : code.kernels)
            if (st == cudaSuccess) st = load_kernel(kernel, kSmemBytes);
    return st;
}

extern "C" int32_t layer_cuda(const struct layer_args *from, void *stream)
{
    const gate_up_args &gate_up = from->gemms.gate_up;
    const layer_code &code = codes[operand_of(gate_up.w1.format)];
    const int32_t blocks = sm_count();
    layer_args_device to = {};
    bool several;
    cudaError_t st;

    if (!is_layer(*from) || !is_small(*from) || !takes_slabs(*from)) return LAYER_UNFIT;
    take_rows(to, *from);
    to.mid = from->mid;
    to.mid_words = from->mid_words;
    if (!code.take(to, *from) || to.tokens * to.top_k * gate_up.intermediate > 2 * to.mid_words || to.mid_words % 4 != 0 || !is_aligned(to.mid, 16))
        return LAYER_UNFIT;
    st = make_maps(to, *from, code.units);
    if (st != cudaSuccess) return st;
    share_out(to, blocks, static_cast<int32_t>(gate_up.w1.n));
    to.activation = terms_of(gate_up);
    to.weighs_input = gate_up.pair_weight != nullptr;
    to.load = reinterpret_cast<unsigned long long *>(from->tally.load);
    to.turns = reinterpret_cast<layer_turns *>(from->turns);
    to.scale = from->combine.scale;
    several = from->route.slabs_count > 1 || to.tokens_coded > 0;
    return launch(code.kernels[several], {static_cast<unsigned>(blocks), code.threads, kSmemBytes, LAUNCH_EARLY}, stream, to);
}
