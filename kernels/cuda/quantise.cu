// quantise on CUDA: rows of 16- or 32-bit numbers to e4m3 with an f32 scale per 128, each to one place or to one for each of its
// experts, or there its scales alone. Of many rows a second launch takes the scales to their places.
//
// grid   a warp up to 1024 numbers of a row, the same ones of each of its rows; the valid rows of all slabs, one after the other.
//        Scales: a warp 32 places, 16 groups of each, the same ones of all
// smem   the valid rows before each slab
// bytes  the rows once, half or a quarter of them written to each place, at 2.2 to 2.9 TB/s, a 32nd more each time scales are written or
//        read; and up to 34 MB of weights into the L2, which the next launch would wait for

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/quantise.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/cuda/walk.cuh"

#include <limits.h>

namespace {

constexpr int kThreads = kSharingThreads;
constexpr int kBatch = 4; // loads of a lane under way at once
constexpr int32_t kPiece = kBatch * kFp8Warp;
constexpr int32_t kSpread = 16; // groups of a lane, where scales go to their places
constexpr int64_t kFewWarps = 512; // in 64 blocks, so that products beside them find SMs

// Weights asked for ahead: rows of a tile; warps that ask, which all run at once; ids for an expert: most have rows, and memory bounds
// their products.
constexpr int32_t kAheadRows = 128;
constexpr uint32_t kAheadWarps = 4096;
constexpr int64_t kAheadIdsLeast = 2, kAheadIdsMost = 64;

struct slab {
    const unsigned char *rows, *scales;
    const int32_t *count;
    int64_t row_stride_bytes;
    int32_t scale_stride, group_stride; // floats
    int32_t cap, format;
    int32_t by_words; // 16-bit rows that can be read by eight numbers
};

// The weights that the next launch reads first, as if every expert had rows: memory has time for them while route works and rows are coded.
struct weights_ahead {
    const unsigned char *values;
    int64_t row_stride_bytes, expert_stride_bytes;
    int64_t ids_least, ids_most;
    int32_t rows, tiles;         // of an expert
    int32_t step_rows, gap_rows; // from one tile to the next, and between a tile's halves
    uint32_t rows_asked;         // of all tiles; 0: none
    uint32_t bytes;              // of a row
};

struct args {
    slab slabs[KERNEL_RANKS_MAX];
    const int32_t *row_pair, *x_row, *count;
    unsigned char *rows;
    float *scales, *row_scales;
    int64_t row_stride_bytes, scale_stride, group_stride; // of scales: floats
    int64_t scale_expert_stride; // of the only slab's, where expert_rows is not 0
    int32_t expert_rows;
    int32_t slabs_count, rows_cap, top_k, rows_count, columns;
    int32_t early, rows_once;
    int32_t by_eight; // rows can be written by eight numbers
    uint32_t writers; // warps that code the same piece of a row, each for its share of the row's places
    weights_ahead ahead;
};

// Two slabs a lane of the first warp.
static_assert(KERNEL_RANKS_MAX <= 64, "rows_before");

__device__ int32_t rows_valid(const args &a, int32_t index)
{
    const slab &s = a.slabs[index];

    if (index >= a.slabs_count) return 0;
    return s.count == nullptr ? s.cap : min(max(*s.count, 0), s.cap);
}

// rows_before[slab], and at its end the sum.
__device__ void sum_rows(const args &a, int32_t *rows_before)
{
    int32_t lane = threadIdx.x % 32;

    if (threadIdx.x < 32) {
        int32_t even = rows_valid(a, 2 * lane), own = even + rows_valid(a, 2 * lane + 1), before = sum_before(own);

        rows_before[2 * lane] = before;
        rows_before[2 * lane + 1] = before + even;
        if (lane == 31) rows_before[KERNEL_RANKS_MAX] = before + own;
    }
    __syncthreads();
}

// Eight bytes from `column` on, as many as there are.
__device__ __forceinline__ uint2 load_codes(const unsigned char *from, int32_t column, int32_t columns, bool by_eight)
{
    uint2 codes = {};

    if (by_eight) return *reinterpret_cast<const uint2 *>(from + column);
    for (int32_t j = 0; j < kFp8Lane && column + j < columns; j++)
        (j < 4 ? codes.x : codes.y) |= static_cast<uint32_t>(from[column + j]) << 8 * (j % 4);
    return codes;
}

__device__ __forceinline__ void store_codes(unsigned char *to, int32_t column, int32_t columns, uint2 codes)
{
    for (int32_t j = 0; j < kFp8Lane && column + j < columns; j++)
        to[column + j] = static_cast<unsigned char>((j < 4 ? codes.x : codes.y) >> 8 * (j % 4));
}

// kPiece numbers of a row, this lane's from column `first` on, or as many as there are: of any format, and anywhere.
__device__ __forceinline__ void code(const args &a, const slab &s, int64_t x_row, int32_t first, fp8_eight (&to)[kBatch])
{
    const unsigned char *from = s.rows + x_row * s.row_stride_bytes;

#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        float values[kFp8Lane] = {};

        for (int32_t j = 0; j < kFp8Lane; j++) {
            int32_t column = first + i * kFp8Warp + j;

            if (column < a.columns) values[j] = number_load(from, column, s.format);
        }
        to[i] = fp8_code(values, fp8_largest(values));
    }
}

// The same of 16-bit numbers that can be read by eight.
__device__ __forceinline__ void code_words(const args &a, const slab &s, int64_t x_row, int32_t first, fp8_eight (&to)[kBatch])
{
    const unsigned char *from = s.rows + x_row * s.row_stride_bytes;
    const bool is_bf16 = s.format == FORMAT_BF16;
    uint4 words[kBatch] = {};
    float largest[kBatch], values[kFp8Lane];
    fp8_scaling by[kBatch];

#pragma unroll
    for (int32_t i = 0; i < kBatch; i++)
        if (first + i * kFp8Warp < a.columns) words[i] = *reinterpret_cast<const uint4 *>(from + (first + i * kFp8Warp) * 2);
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++)
        largest[i] = fp8_largest(words[i], is_bf16);
    fp8_scalings_of(largest, by);
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        unpack_8(words[i], is_bf16, values);
        to[i] = {fp8_codes(values, by[i].inverse), by[i].scale};
    }
}

// A row's, in floats.
__device__ __forceinline__ int64_t scales_at(const args &a, const slab &s, int64_t row)
{
    int64_t expert;

    if (a.expert_rows == 0) return row * s.scale_stride;
    expert = row / a.expert_rows;
    return expert * a.scale_expert_stride + (row - expert * a.expert_rows) * s.scale_stride;
}

// The same of a row that is e4m3 already.
__device__ __forceinline__ void copy(const args &a, const slab &s, int64_t x_row, int32_t first, fp8_eight (&to)[kBatch])
{
    const unsigned char *from = s.rows + x_row * s.row_stride_bytes;
    const float *scales = reinterpret_cast<const float *>(s.scales) + scales_at(a, s, x_row);
    bool by_eight = a.columns % kFp8Lane == 0 && is_aligned(from, 8);

#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Warp;

        if (column >= a.columns) break;
        to[i] = {load_codes(from, column, a.columns, by_eight), scales[column / kFp8Group * s.group_stride]};
    }
}

__device__ __forceinline__ int32_t groups_of(const args &a)
{
    return (a.columns + kFp8Group - 1) / kFp8Group;
}

// A piece's scales, `to` where that of the row's first group goes, the others group_stride further each.
__device__ __forceinline__ void store_scales(const args &a, float *to, int64_t group_stride, int32_t first, const fp8_eight (&from)[kBatch])
{
    if (first % kFp8Group != 0) return;
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++)
        if (first + i * kFp8Warp < a.columns) to[(first + i * kFp8Warp) / kFp8Group * group_stride] = from[i].scale;
}

// A piece's codes.
__device__ __forceinline__ void store_row(const args &a, int64_t row, int32_t first, const fp8_eight (&from)[kBatch])
{
    unsigned char *to = a.rows + row * a.row_stride_bytes;

#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        int32_t column = first + i * kFp8Warp;

        if (column >= a.columns) break;
        if (a.by_eight)
            *reinterpret_cast<uint2 *>(to + column) = from[i].codes;
        else
            store_codes(to, column, a.columns, from[i].codes);
    }
}

// To the places that lanes have, -1: none. From one to the next only a multiple of the place is added: with few warps an SM, instructions
// are what this takes.
__device__ __forceinline__ void store_all(const args &a, int32_t place, int32_t first, const fp8_eight (&from)[kBatch])
{
    const int32_t batches = (a.columns - first + kFp8Warp - 1) / kFp8Warp; // that this lane has numbers of
    const int64_t next_scale = kFp8Warp / kFp8Group * a.group_stride;
    const bool has_scale = first % kFp8Group == 0 && a.row_scales == nullptr;
    unsigned char *rows = a.rows + first;
    float *scales = a.scales + first / kFp8Group * a.group_stride;

    for (uint32_t left = __ballot_sync(~0u, place >= 0); left != 0; left &= left - 1) {
        const int64_t to = __shfl_sync(~0u, place, __ffs(static_cast<int>(left)) - 1);

        if (!a.by_eight) {
            if (!a.rows_once) store_row(a, to, first, from);
            if (has_scale) store_scales(a, a.scales + to * a.scale_stride, a.group_stride, first, from);
            continue;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            if (i >= batches) break;
            if (!a.rows_once) *reinterpret_cast<uint2 *>(rows + to * a.row_stride_bytes + i * kFp8Warp) = from[i].codes;
            if (has_scale) scales[to * a.scale_stride + i * next_scale] = from[i].scale;
        }
    }
}

// Which row of which slab.
struct source {
    int32_t index, row;
};

__device__ __forceinline__ source source_at(const args &a, const int32_t *rows_before, int32_t at)
{
    int32_t index, row;

    if (a.row_pair != nullptr) {
        index = last_at_most(rows_before, a.slabs_count, at);
        return {index, at - rows_before[index]};
    }
    row = a.x_row != nullptr ? a.x_row[at] : at;
    index = row / a.rows_cap;
    return {index, row - index * a.rows_cap};
}

__device__ __forceinline__ void code_any(const args &a, source from, int32_t first, fp8_eight (&to)[kBatch])
{
    const slab &s = a.slabs[from.index];

    if (s.by_words)
        code_words(a, s, from.row, first, to);
    else if (s.format == FORMAT_FP8_BLOCK128)
        copy(a, s, from.row, first, to);
    else
        code(a, s, from.row, first, to);
}

// Of all slabs'.
__device__ __forceinline__ int64_t row_number(const args &a, source from)
{
    return static_cast<int64_t>(from.index) * a.rows_cap + from.row;
}

// Whether anything of a row goes where its pairs are, of by row_pair.
__device__ __forceinline__ bool is_placed(const args &a)
{
    return !a.rows_once || a.row_scales == nullptr;
}

// Where this lane's copy of a row goes, -1: nowhere, or another writer takes it there.
__device__ __forceinline__ int32_t place_of(const args &a, source from, uint32_t at, uint32_t writer)
{
    int32_t lane = threadIdx.x % 32, place;

    if (a.row_pair == nullptr) return lane == 0 ? static_cast<int32_t>(at) : -1;
    if (!is_placed(a)) return -1;
    if (lane >= a.top_k || lane % a.writers != writer) return -1;
    place = a.row_pair[row_number(a, from) * a.top_k + lane];
    return place < a.rows_count ? place : -1;
}

__device__ __forceinline__ void ask_ahead(const weights_ahead &from, int64_t ids)
{
    constexpr uint32_t warps_a_block = kThreads / 32;
    const uint32_t warps = min(gridDim.x * warps_a_block, kAheadWarps), warp = blockIdx.x * warps_a_block + threadIdx.x / 32;

    if (warp >= warps || ids < from.ids_least || ids > from.ids_most) return;
    for (uint32_t at = warp + threadIdx.x % 32 * warps; at < from.rows_asked; at += 32 * warps) {
        const int32_t tile = static_cast<int32_t>(at) / kAheadRows, expert = tile / from.tiles;
        int32_t row = static_cast<int32_t>(at) % kAheadRows;

        row += (tile - expert * from.tiles) * from.step_rows + (row < kAheadRows / 2 ? 0 : from.gap_rows);
        if (row < from.rows) prefetch_l2_bulk(from.values + expert * from.expert_stride_bytes + row * from.row_stride_bytes, from.bytes);
    }
}

__global__ void __launch_bounds__(kThreads, 4) quantise_kernel(const __grid_constant__ args a)
{
    __shared__ int32_t rows_before[KERNEL_RANKS_MAX + 1];
    const row_walk walk = walk_rows((a.columns + kPiece - 1) / kPiece * a.writers);
    const uint32_t writer = walk.piece % a.writers;
    int32_t first = walk.piece / a.writers * kPiece + threadIdx.x % 32 * kFp8Lane, place = -1;
    uint32_t rows = a.rows_count;
    bool waits = a.row_pair != nullptr;

    // Products that read route's counts before they wait may begin when all of this launch have waited for route.
    if (waits) {
        if (a.early) griddepcontrol_launch_dependents();
        sum_rows(a, rows_before);
        rows = rows_before[KERNEL_RANKS_MAX];
        ask_ahead(a.ahead, static_cast<int64_t>(rows) * a.top_k);
    } else {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
        if (a.count != nullptr) rows = min(max(*a.count, 0), a.rows_count);
    }
    for (uint32_t at = walk.first; at < rows; at += walk.step) {
        const source from = source_at(a, rows_before, static_cast<int32_t>(at));
        fp8_eight piece[kBatch];

        if (!waits) place = place_of(a, from, at, writer);
        if (!waits && !a.rows_once && __ballot_sync(~0u, place >= 0) == 0) continue;
        code_any(a, from, first, piece);
        if (a.rows_once) store_row(a, row_number(a, from), first, piece);
        // x was there before route began, which had begun before this could: only the places of pairs are waited for.
        if (waits && is_placed(a)) {
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
            place = place_of(a, from, at, writer);
            waits = false;
        }
        if (a.row_scales != nullptr)
            store_scales(a, a.row_scales + row_number(a, from) * groups_of(a), 1, first, piece);
        store_all(a, place, first, piece);
    }
    if (waits) griddepcontrol_wait();
}

// The scales of many rows from row_scales to the rows that they are of. By group, neighbours in memory are of rows that quantise_kernel
// writes at different times.
__global__ void __launch_bounds__(kThreads) spread_kernel(const __grid_constant__ args a)
{
    const int32_t groups = groups_of(a), lane = threadIdx.x % 32;
    const row_walk walk = walk_rows((groups + kSpread - 1) / kSpread);
    const int32_t first = walk.piece * kSpread, count = min(groups - first, kSpread);
    const int64_t group_stride = a.group_stride;
    uint32_t rows;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    rows = min(max(__ldcg(a.count), 0), a.rows_count);
    for (uint32_t at = walk.first; at < (rows + 31) / 32; at += walk.step) {
        const uint32_t row = at * 32 + lane;
        const float *from;
        float *to = a.scales + row * a.scale_stride + first * group_stride;

        if (row >= rows) continue;
        from = a.row_scales + static_cast<int64_t>(__ldcg(&a.x_row[row])) * groups + first;
        if (groups % 4 != 0) {
            for (int32_t i = 0; i < count; i++)
                to[i * group_stride] = __ldcg(from + i);
            continue;
        }
#pragma unroll
        for (int32_t i = 0; i < kSpread; i += 4) {
            float4 four;

            if (i >= count) break;
            four = __ldcg(reinterpret_cast<const float4 *>(from + i));
            to[i * group_stride] = four.x;
            to[(i + 1) * group_stride] = four.y;
            to[(i + 2) * group_stride] = four.z;
            to[(i + 3) * group_stride] = four.w;
        }
    }
}

// In floats.
int32_t group_stride(int64_t stride_bytes)
{
    return stride_bytes != 0 ? static_cast<int32_t>(stride_bytes / 4) : 1;
}

// The slabs that there are; x is one. Returns how many rows could be read.
int64_t take_slabs(const quantise_args *from, args *to)
{
    int64_t rows = 0;

    if (from->slabs != nullptr && from->slabs_count == 1) {
        to->expert_rows = from->slabs[0].expert_rows;
        to->scale_expert_stride = from->slabs[0].scale_expert_stride_bytes / 4;
    }
    to->slabs_count = from->slabs == nullptr ? 1 : from->slabs_count;
    to->rows_cap = from->slabs == nullptr ? INT_MAX : from->rows_cap;
    to->slabs[0] = {static_cast<const unsigned char *>(from->x), nullptr, nullptr, from->x_stride_bytes, 0, 0, 0, from->x_format, 0};
    for (int32_t i = 0; from->slabs != nullptr && i < from->slabs_count; i++) {
        const row_slab &s = from->slabs[i];

        to->slabs[i] = {static_cast<const unsigned char *>(s.rows),
                        static_cast<const unsigned char *>(s.scales),
                        s.count,
                        s.row_stride_bytes,
                        static_cast<int32_t>(s.scale_stride_bytes / 4),
                        group_stride(s.group_stride_bytes),
                        s.cap,
                        s.format,
                        0};
        rows += s.cap;
    }
    for (int32_t i = 0; i < to->slabs_count; i++) {
        slab &s = to->slabs[i];

        s.by_words = (s.format == FORMAT_BF16 || s.format == FORMAT_F16) && from->columns % kFp8Lane == 0 && is_aligned(s.rows, 16) &&
                     s.row_stride_bytes % 16 == 0;
    }
    return from->row_pair != nullptr ? rows : from->rows_count;
}

// Of each piece: few have up to one for each of their places, which one warp would write one after the other, 0.2 us each.
uint32_t writers_of(int64_t pieces, int32_t top_k)
{
    const int64_t writers = kFewWarps / max(pieces, int64_t{1});

    return static_cast<uint32_t>(max(min(writers, static_cast<int64_t>(top_k)), int64_t{1}));
}

// Of an expert's rows gate and up of 64 units are a tile, and those of the next 64 the tile after it. Where products begin beside this
// launch, they have asked for the first bytes themselves, and more would be in their rows' way.
weights_ahead take_ahead(const quantise_args &from, unsigned blocks)
{
    const weight_view &w = *from.ahead;
    const int32_t rows = static_cast<int32_t>(w.n), units = w.order == ORDER_PLAIN ? rows : rows / 2;
    const bool in_halves = w.order == ORDER_GATE_UP || w.order == ORDER_UP_GATE;
    weights_ahead to = {};

    to.values = static_cast<const unsigned char *>(w.values);
    to.row_stride_bytes = w.row_stride_bytes;
    to.expert_stride_bytes = w.expert_stride_bytes;
    to.ids_least = kAheadIdsLeast * from.ahead_choices;
    to.ids_most = kAheadIdsMost * from.ahead_choices;
    to.rows = rows;
    to.tiles = (units + 127) / 128;
    to.step_rows = w.order == ORDER_INTERLEAVED ? 256 : 128;
    to.gap_rows = in_halves ? units - 64 : 0;
    to.bytes = static_cast<uint32_t>(min(w.k, int64_t{blocks > kGridSms ? 2048 : 512})) / 16 * 16;
    if (!w.rows_in && to.bytes > 0 && is_aligned(w.values, 16) && w.row_stride_bytes % 16 == 0 && w.expert_stride_bytes % 16 == 0)
        to.rows_asked = static_cast<uint32_t>(min(int64_t{to.tiles} * from.ahead_experts, kGridSms) * kAheadRows);
    return to;
}

} // namespace

extern "C" int32_t quantise_cuda_load(void)
{
    cudaError_t st = load_kernel(quantise_kernel);

    return st == cudaSuccess ? load_kernel(spread_kernel) : st;
}

extern "C" int32_t quantise_cuda(const struct quantise_args *from, void *stream)
{
    int64_t pieces = (from->columns + kPiece - 1) / kPiece;
    args to = {};
    int64_t rows = take_slabs(from, &to);
    launch_shape shape;
    cudaError_t st;

    if (from->format != FORMAT_FP8_BLOCK128 || ((from->row_scales != nullptr || from->rows_once) && from->row_pair == nullptr)) return cudaErrorInvalidValue;
    to.row_pair = from->row_pair;
    to.x_row = from->x_row;
    to.count = from->count;
    to.rows = static_cast<unsigned char *>(from->rows);
    to.scales = static_cast<float *>(from->scales);
    to.row_scales = from->row_scales;
    to.rows_once = from->rows_once;
    to.row_stride_bytes = from->row_stride_bytes;
    to.scale_stride = from->scale_stride_bytes / 4;
    to.group_stride = group_stride(from->group_stride_bytes);
    to.top_k = from->top_k;
    to.rows_count = from->rows_count;
    to.columns = from->columns;
    to.early = from->early;
    to.by_eight = from->columns % kFp8Lane == 0 && is_aligned(from->rows, 8) && from->row_stride_bytes % 8 == 0;
    to.writers = from->row_pair != nullptr && !from->rows_once ? writers_of(rows * pieces, from->top_k) : 1;
    // A warp for each piece of a row at least, and one block where there are no rows: the product after it counts on it.
    shape = shape_for(rows * pieces * to.writers, pieces * to.writers, kGridBlocksMax / kGridSms, 0);
    if (from->row_pair != nullptr && from->ahead != nullptr) to.ahead = take_ahead(*from, shape.blocks);
    st = launch(quantise_kernel, shape, stream, to);
    if (st != cudaSuccess || to.row_scales == nullptr) return st;
    pieces = (from->columns + kSpread * kFp8Group - 1) / (kSpread * kFp8Group);
    shape = shape_for((int64_t{from->rows_count} + 31) / 32 * pieces, pieces, kGridBlocksMax / kGridSms, 0);
    return launch(spread_kernel, shape, stream, to);
}
