// What gemm.cu's kernels are launched with, made of the args that CPU kernels have, or why there is no kernel. Included by gemm.cu alone.

#ifndef MOXIE_KERNELS_CUDA_GEMM_ARGS_CUH
#define MOXIE_KERNELS_CUDA_GEMM_ARGS_CUH

#include "kernels/cuda/activation.cuh"
#include "kernels/cuda/gemm_tile.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/tensor_map.cuh"
#include "kernels/gemm.h"
#include "kernels/route.h"

#include <algorithm>
#include <limits.h>

namespace {

constexpr int64_t kL2Bytes = 48 << 20; // for rows by pair, of the 50 MB of an H200

CUtensorMapDataType numbers_of(int32_t format)
{
    return format == FORMAT_BF16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
           : format == FORMAT_F16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
}

// The weights of all experts, `rows` of a box. Rows along K and gated: (K, 8 units, gate | up, units / 8, expert), whatever their order.
// Packed ones are pairs along K, in bytes.
tensor_map_shape weights_shape(const weight_view &view, int32_t experts, cuuint32_t rows)
{
    cuuint64_t row = view.row_stride_bytes, expert = view.expert_stride_bytes;
    cuuint64_t k = is_packed(view.format) ? view.k / 2 : view.k, units = view.n / 2;
    cuuint32_t depth = is_packed(view.format) ? kRowBytes : kRowBytes / element_bytes_of(view.format);

    if (experts == 1) expert = row * (view.rows_in ? view.k : view.n);
    if (view.rows_in)
        return {3, {cuuint64_t(view.n), k, cuuint64_t(experts)}, {row, expert}, {kBlockRows, depth, 1}};
    if (view.order == ORDER_PLAIN)
        return {3, {k, cuuint64_t(view.n), cuuint64_t(experts)}, {row, expert}, {depth, rows, 1}};
    if (view.order == ORDER_INTERLEAVED)
        return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {2 * row, row, 16 * row, expert}, {depth, 8, 2, rows / 16, 1}};
    return {5, {k, 8, 2, units / 8, cuuint64_t(experts)}, {row, units * row, 8 * row, expert}, {depth, 8, 2, rows / 16, 1}};
}

void take_weights(gemm_args &to, const weight_view &view)
{
    to.bias = view.bias;
    to.bias_format = view.bias_format;
    to.bias_expert_stride_bytes = view.bias_expert_stride_bytes;
    to.order = view.order;
    to.depth = static_cast<int32_t>(view.k);
    to.scales = scales_of(view);
    if (is_packed(view.format)) to.packed = packed_scales_of(view);
}

// Of what the weights are multiplied with.
int32_t rows_format_of(const weight_view &view)
{
    if (is_packed(view.format)) return FORMAT_BF16;
    return element_bytes_of(view.format) == 1 ? FORMAT_FP8_BLOCK128 : view.format;
}

// Of both products, to be made at once.
struct map_requests {
    tensor_map_request maps[8];
    int32_t count;
};

void ask_for_weights(map_requests &asked, gemm_args &to, const weight_view &by, int32_t experts, int32_t tile_rows)
{
    asked.maps[asked.count++] = {&to.weights, by.values, numbers_of(by.format), weights_shape(by, experts, tile_rows)};
}

// Of rows in the order of the pairs, which come in boxes, and of their scales, where they have any, by group.
cudaError_t ask_for_rows(map_requests &asked, gemm_args &to, const weight_view &by, const row_slab &rows)
{
    const CUtensorMapDataType numbers = numbers_of(rows_format_of(by));
    const cuuint32_t depth = kRowBytes / element_bytes_of(by.format);
    const cuuint64_t k = by.k, groups = (k + 127) / 128, cap = rows.cap, stride = rows.row_stride_bytes, group_stride = rows.group_stride_bytes;

    if (rows.format != rows_format_of(by)) return cudaErrorInvalidValue;
    asked.maps[asked.count++] = {&to.tokens, rows.rows, numbers, {3, {k, cap, 1}, {stride, stride * cap}, {depth, 8, 1}}};
    asked.maps[asked.count++] = {&to.many_tokens, rows.rows, numbers, {3, {k, cap, 1}, {stride, stride * cap}, {depth, kManyTokens, 1}}};
    if (rows.format != FORMAT_FP8_BLOCK128) return cudaSuccess;
    if (rows.scale_stride_bytes != 4) return cudaErrorInvalidValue;
    asked.maps[asked.count++] = {&to.token_scales,
                                 rows.scales,
                                 CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                                 {3, {cap, groups, 1}, {group_stride, group_stride * groups}, {kScales, 1, 1}}};
    return cudaSuccess;
}

// Rows of any slab, which are gathered.
cudaError_t take_slabs(gemms_args_device &to, const gate_up_args &from)
{
    const int64_t row_bytes = from.w1.k * element_bytes_of(from.w1.format);

    for (int32_t i = 0; i < from.slabs_count; i++) {
        const row_slab &slab = from.slabs[i];

        if (slab.format != rows_format_of(from.w1)) return cudaErrorInvalidValue;
        to.slabs[i] = {static_cast<const unsigned char *>(slab.rows), slab.row_stride_bytes};
    }
    to.pair_row = from.pair_row;
    to.rows_cap = from.rows_cap;
    if (from.slabs_count == 1 && from.slabs[0].row_stride_bytes < 2 * row_bytes)
        to.rows_bytes = (from.slabs[0].cap - 1) * from.slabs[0].row_stride_bytes + row_bytes;
    return cudaSuccess;
}

// Where gate_up writes: mid, or what becomes of it.
cudaError_t take_mid(gemm_args &to, const gate_up_args &from, const quantise_args &by)
{
    if (from.operand_format != FORMAT_FP8) {
        to.out = static_cast<unsigned char *>(from.mid);
        to.out_stride_bytes = from.mid_stride_bytes;
        return cudaSuccess;
    }
    if (by.rows == nullptr || by.format != FORMAT_FP8_BLOCK128 || by.columns != from.intermediate || by.scale_stride_bytes != 4)
        return cudaErrorInvalidValue;
    to.out = static_cast<unsigned char *>(by.rows);
    to.out_stride_bytes = by.row_stride_bytes;
    to.out_scales = static_cast<float *>(by.scales);
    to.out_group_stride = by.group_stride_bytes / 4;
    return cudaSuccess;
}

cudaError_t take_gate_up(gemms_args_device &to, map_requests &asked, const gate_up_args &from, const quantise_args &quantise, int32_t tile_rows)
{
    const bool is_fp8 = from.operand_format == FORMAT_FP8, plain = from.w1.order == ORDER_PLAIN;
    gemm_args &own = to.gate_up;
    cudaError_t st;

    if (!has_code(from) || from.experts > kExpertsMax || (is_fp8 && from.slabs_count != 1))
        return cudaErrorInvalidValue;
    take_weights(own, from.w1);
    own.pair_weight = from.pair_weight;
    own.outputs = from.intermediate;
    own.row_tiles = (from.intermediate + tile_rows / 2 - 1) / (tile_rows / 2);
    if (plain || is_fp8) own.row_tiles = (from.intermediate + tile_rows - 1) / tile_rows;
    own.activation = terms_of(from);
    own.is_bare = own.bias == nullptr && from.activation == ACTIVATION_SILU;
    own.gathers = is_fp8 && from.pair_row != nullptr;
    if (own.gathers && from.rows_cap * from.slabs[0].row_stride_bytes > UINT32_MAX) return cudaErrorInvalidValue;
    if (is_packed(from.w1.format)) { // one slab, of woven rows
        own.rows = static_cast<const unsigned char *>(from.slabs[0].rows);
        own.rows_stride_bytes = from.slabs[0].row_stride_bytes;
        own.row_of_pair = from.pair_row;
    }
    st = take_mid(own, from, quantise);
    if (st == cudaSuccess && (!is_fp8 || own.gathers)) st = take_slabs(to, from);
    ask_for_weights(asked, own, from.w1, from.experts, tile_rows);
    return st == cudaSuccess && is_fp8 ? ask_for_rows(asked, own, from.w1, from.slabs[0]) : st;
}

cudaError_t take_down(gemms_args_device &to, map_requests &asked, const down_args &from, int32_t tile_rows)
{
    const int32_t parts = is_packed(from.w2.format) ? 4 : kRows / tile_rows, step_depth = kRowBytes / element_bytes_of(from.w2.format) * parts;
    const int32_t steps = static_cast<int32_t>((from.w2.k + step_depth - 1) / step_depth);
    row_slab mid = {};
    gemm_args &own = to.down;

    if (!has_code(from) || from.pairs_max > INT_MAX || reinterpret_cast<uintptr_t>(from.pair_out) % 16 != 0 || from.pair_stride_bytes % 16 != 0)
        return cudaErrorInvalidValue;
    take_weights(own, from.w2);
    mid.rows = from.mid;
    mid.scales = from.mid_scales;
    mid.row_stride_bytes = from.mid_stride_bytes;
    mid.scale_stride_bytes = from.mid_scale_stride_bytes;
    mid.group_stride_bytes = from.mid_group_stride_bytes;
    mid.cap = static_cast<int32_t>(from.pairs_max);
    mid.format = from.mid_format;
    own.out = static_cast<unsigned char *>(from.pair_out);
    own.out_stride_bytes = from.pair_stride_bytes;
    own.result_row = from.result_row;
    own.result_weight = from.result_weight;
    own.result_scale = from.result_scale;
    own.is_bare = own.bias == nullptr;
    own.outputs = static_cast<int32_t>(from.w2.n);
    own.lot_tiles = from.w2.rows_in || is_packed(from.w2.format) ? 1 : max(min(kLotSteps / steps, kLotTiles), 1);
    own.row_tiles = static_cast<int32_t>((from.w2.n + tile_rows * own.lot_tiles - 1) / (tile_rows * own.lot_tiles));
    own.rows = static_cast<const unsigned char *>(from.mid);
    own.rows_stride_bytes = from.mid_stride_bytes;
    ask_for_weights(asked, own, from.w2, from.experts, tile_rows);
    return ask_for_rows(asked, own, from.w2, mid);
}

void take_halves(gemm_halves &to, const gemms_args &from)
{
    if (from.halves == nullptr) return;
    to.places = static_cast<int32_t>(std::min<int64_t>(from.halves_places, INT_MAX));
    to.launch = from.progress + GEMM_PROGRESS_LAUNCH;
    to.rows = static_cast<unsigned char *>(from.halves);
    to.there = reinterpret_cast<uint32_t *>(to.rows + int64_t{to.places} * 2 * kHalfBytes); // behind them, since rows want 16 bytes
}

cudaError_t take_ids(slab_ids &to, const route_args *from, int64_t pairs_max)
{
    if (from == nullptr) return cudaSuccess;
    if (from->by != ROUTE_BY_IDS || !gemms_can_count(from->slabs, from->slabs_count, from->rows_cap, from->top_k) ||
        int64_t{from->slabs_count} * from->rows_cap * from->top_k > pairs_max)
        return cudaErrorInvalidValue;
    to = ids_of(*from);
    return cudaSuccess;
}

// Whether mid and the pairs' rows do. More of them would push out what else is read again.
bool fits_l2(const gemms_args_device &args, int64_t pairs)
{
    return pairs * (args.gate_up.out_stride_bytes + (args.down.result_row == nullptr ? args.down.out_stride_bytes : 0)) <= kL2Bytes;
}

// Halves of a block's wide tiles from which on they are faster than twice as many others, which share themselves out more evenly.
struct wide_from {
    int64_t gate_up, all;
};

wide_from wide_from_of(int32_t format, bool are_few)
{
    if (!are_few) return {2, 8};
    if (format == FORMAT_INT4_G32) return {1, 0};
    return format == FORMAT_MXFP4 ? wide_from{1, 6} : wide_from{2, 12};
}

// Whether blocks have enough wide tiles.
bool tiles_are_wide(const gemms_args &from, int64_t pairs, bool are_few)
{
    const wide_from least = wide_from_of(from.gate_up.w1.format, are_few);
    const int64_t chosen = std::min(pairs, int64_t{from.gate_up.experts}), blocks = int64_t{GEMMS_WIDE_FROM} * sm_count();
    const int64_t gate_up = chosen * ((from.gate_up.w1.n + kWideRows - 1) / kWideRows), down = chosen * ((from.down.w2.n + kWideRows - 1) / kWideRows);

    return gate_up * 2 >= least.gate_up * blocks && (gate_up + down) * 2 >= least.all * blocks;
}

// Whether an expert's pairs, on average, fill one wide tile, or two where tiles of 128 tokens would be two as well.
bool fill_wide_tiles(int64_t pairs, int64_t experts)
{
    const int64_t one = experts * GEMMS_SOME_PAIRS;

    return pairs <= one || (pairs * 2 >= one * 3 && pairs <= one * 2);
}

// By the bound on them, since the host knows no counts. Few had better have tiles that are halves, or wide; some, wide ones.
expert_tokens tokens_of(const gemms_args &from)
{
    const gate_up_args &gate_up = from.gate_up;
    int64_t tokens = 0, pairs;
    bool are_few;

    for (int32_t i = 0; i < gate_up.slabs_count; i++)
        tokens += gate_up.slabs[i].cap;
    pairs = tokens * from.top_k;
    if (!is_packed(gate_up.w1.format)) return tokens <= kFew && weight_bits_of(gate_up.w1.format) == 16 && !gate_up.w1.rows_in ? TOKENS_FEW : TOKENS_MANY;
    are_few = pairs <= gate_up.experts * kFewPairs;
    if (!fill_wide_tiles(pairs, gate_up.experts) || !tiles_are_wide(from, pairs, are_few)) return TOKENS_MANY;
    return are_few ? TOKENS_FEW : TOKENS_SOME;
}

// tile_rows: weight rows of a tile.
cudaError_t gemms_args_make(gemms_args_device &to, const gemms_args &from, int32_t tile_rows)
{
    const gate_up_args &gate_up = from.gate_up;
    const down_args &down = from.down;
    map_requests asked = {};
    cudaError_t st;

    if (gate_up.w1.format != down.w2.format || gate_up.w1.rows_in != down.w2.rows_in || gate_up.experts != down.experts || gate_up.expert_offset != down.expert_offset)
        return cudaErrorInvalidValue;
    to.expert_offset = gate_up.expert_offset;
    to.progress = reinterpret_cast<gemm_progress *>(from.progress);
    to.late = from.progress + GEMM_PROGRESS_WORDS;
    to.experts = gate_up.experts;
    take_halves(to.gate_up.halves, from);
    st = take_ids(to.counted, from.route, down.pairs_max);
    if (st == cudaSuccess) st = take_gate_up(to, asked, gate_up, from.quantise, tile_rows);
    if (st == cudaSuccess) st = take_down(to, asked, down, tile_rows);
    if (st == cudaSuccess) st = tensor_maps_make(asked.maps, asked.count);
    to.gate_up.evicts_last = to.down.evicts_last = fits_l2(to, down.pairs_max);
    return st;
}

} // namespace

#endif
