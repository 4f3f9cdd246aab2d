// combine on CUDA: a row's pairs, weighted and summed in fp32 in slot order, into one result row.
//
// combine_kernel; combine_four_kernel on few SMs
// grid   a warp a row, or four, and 256 columns, 16 bytes a lane and pair; a lane looks up the pair of its own slot, while the row before is
//        summed
// bytes  every pair's row once, every result row once: bound by memory
//
// fill_rows_kernel, where down has written the results
// grid   a warp 32 rows and 1024 columns, a lane looks at one row's pair
// bytes  4 a row, and rows without a pair once

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/row8.cuh"
#include "kernels/cuda/walk.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kColumns = 256; // of a warp: 8 a lane
constexpr int kPairs = 2;        // of a row under way at once, where many warps hide the rest
constexpr int kPairsFew = 8;     // where each warp has a row at most
constexpr int kBlocksOfSm = 6;   // by the registers of all but f32 rows
constexpr int kBlocksOfSmFew = 3;
constexpr int kFillColumns = 1024; // of a warp that fills rows
constexpr int64_t kSpentBytes = 160 << 20; // of pairs' rows that are given up once they have been read

struct args {
    out_slab slabs[KERNEL_RANKS_MAX];
    const unsigned char *pair_out;
    const int32_t *row_pair, *pair_row, *pairs_count;
    const float *pair_weight;
    int64_t pair_stride_bytes;
    int32_t pairs;
    uint32_t slabs_count, slab_first;
    int32_t rows_cap, hidden, top_k, routed, spends;
    float scale;
};

__device__ __forceinline__ float weight_of(const args &a, int32_t pair)
{
    return a.pair_weight != nullptr && pair >= 0 ? a.pair_weight[pair] : 1.0f;
}

// Adds the pairs of the lanes in `left`, in their order, `batch` under way at once. Few of a row at once: their weights are read here,
// where other warps' loads hide it.
template <int32_t format, int32_t batch>
__device__ __forceinline__ void add_pairs(const args &a, uint32_t left, int32_t own_pair, float own_weight, int32_t column, float (&sum)[8])
{
    if (batch <= kPairs) own_weight = weight_of(a, own_pair);
    while (left != 0) {
        eight<format> rows[batch] = {};
        uint32_t loaded = left;

#pragma unroll
        for (int32_t i = 0; i < batch; i++) {
            int32_t pair = __shfl_sync(~0u, own_pair, __ffs(static_cast<int>(loaded)) - 1);

            if (loaded != 0 && column < a.hidden) rows[i] = load_8<format, true>(a.pair_out + pair * a.pair_stride_bytes, column);
            loaded &= loaded - 1;
        }
#pragma unroll
        for (int32_t i = 0; i < batch && left != 0; i++) {
            float weight = __shfl_sync(~0u, own_weight, __ffs(static_cast<int>(left)) - 1);

            add_8(rows[i], weight, sum);
            left &= left - 1;
        }
    }
}

__device__ void store_row(const out_slab &to, int32_t row, int32_t column, float (&sum)[8], float scale)
{
#pragma unroll
    for (int32_t i = 0; i < 8; i++)
        sum[i] *= scale;
    store_8(static_cast<unsigned char *>(to.rows) + row * to.row_stride_bytes, to.format, column, sum);
}

// Whether the slab has that row; by pair_row, a slab has all up to its cap.
__device__ __forceinline__ bool has_row(const args &a, const out_slab &to, int32_t row)
{
    return to.rows != nullptr && row >= 0 && row < to.cap && (a.row_pair == nullptr || to.count == nullptr || row < *to.count);
}

// Rows of the slab with the most; the same in every lane. What was planned for may be many times that.
__device__ __forceinline__ int32_t rows_most(const args &a)
{
    int32_t most = 0;

    for (uint32_t index = threadIdx.x % 32; index < a.slabs_count; index += 32) {
        const out_slab &to = a.slabs[index];

        if (to.rows != nullptr) most = max(most, to.count != nullptr ? min(*to.count, to.cap) : to.cap);
    }
    for (int32_t step = 16; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(~0u, most, step));
    return min(most, a.rows_cap);
}

// A row of the results, or with pair_row a pair of the only slab.
struct place {
    uint32_t row, turn; // slabs take turns
};

// Written one after another by all ranks at once, each slab in turn would be the end of every link; so each rank begins with another.
__device__ __forceinline__ uint32_t slab_of(const args &a, uint32_t turn)
{
    uint32_t index = a.slab_first + turn;

    return index < a.slabs_count ? index : index - a.slabs_count;
}

__device__ __forceinline__ place place_after(const args &a, place at, place step)
{
    at.row += step.row;
    at.turn += step.turn;
    if (at.turn < a.slabs_count) return at;
    return {at.row + 1, at.turn - a.slabs_count};
}

// The pair in this lane's slot of the row, -1 for none.
__device__ __forceinline__ int32_t pair_at(const args &a, place at, uint32_t rows)
{
    int32_t lane = threadIdx.x % 32, pair = -1;

    if (at.row >= rows) return -1;
    if (a.row_pair == nullptr)
        pair = lane == 0 ? static_cast<int32_t>(at.row) : -1;
    else if (lane < a.top_k)
        pair = a.row_pair[(static_cast<int64_t>(slab_of(a, at.turn)) * a.rows_cap + at.row) * a.top_k + lane];
    return pair < a.pairs ? pair : -1;
}

// The lines of a row's pairs that a warp has read, from the first lane's column on: dirty ones would go to memory, at several times the
// cost of their bytes. Eight pairs at once, a lane a line.
__device__ __forceinline__ void spend_pairs(const args &a, int32_t own_pair, int32_t column)
{
    const int32_t lane = threadIdx.x % 32;

    __syncwarp(); // all have read
    column += lane % 4 * 64 - lane * 8;
#pragma unroll 1
    for (int32_t slot = lane / 4; slot < KERNEL_TOP_K_MAX; slot += 8) {
        const int32_t pair = __shfl_sync(~0u, own_pair, slot);

        if (pair >= 0 && column < a.hidden) discard_l2(a.pair_out + (pair * a.pair_stride_bytes + column * 2));
        if (a.top_k <= 8) break;
    }
}

// So few registers that enough loads of an SM are under way.
template <int32_t format, int32_t batch>
__global__ void __maxnreg__(batch > kPairs ? 80 : format == FORMAT_F32 ? 64 : 40) combine_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kColumns - 1) / kColumns);
    const place step = {walk.step / a.slabs_count, walk.step % a.slabs_count};
    place at = {walk.first / a.slabs_count, walk.first % a.slabs_count};
    int32_t column = walk.piece * kColumns + threadIdx.x % 32 * 8, pair;
    float weight = 1.0f;
    uint32_t rows;

    if (!a.routed) griddepcontrol_wait();
    rows = a.row_pair == nullptr ? min(max(*a.pairs_count, 0), a.pairs) : rows_most(a);
    pair = pair_at(a, at, rows);
    if (batch > kPairs) weight = weight_of(a, pair); // of the only row
    if (a.routed) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    while (at.row < rows) { // of a warp that is left over it is not, since all slabs together have under 2^31
        const out_slab &to = a.slabs[slab_of(a, at.turn)];
        int32_t row = a.row_pair == nullptr ? a.pair_row[at.row] : static_cast<int32_t>(at.row);
        bool wanted = has_row(a, to, row);
        place next = place_after(a, at, step);
        int32_t pair_next = pair_at(a, next, rows);
        float sum[8] = {};

        if (!wanted) pair = -1;
        add_pairs<format, batch>(a, __ballot_sync(~0u, pair >= 0), pair, weight, column, sum);
        if (wanted && column < a.hidden) store_row(to, row, column, sum, a.scale);
        if (batch <= kPairs && format != FORMAT_F32 && a.spends) spend_pairs(a, pair, column);
        at = next;
        pair = pair_next;
        if (batch > kPairs) weight = weight_of(a, pair);
    }
}

// Where SMs are few, each warp has more under way: four rows at once, and two pairs of each. Of top_k up to 8, so that a warp's lanes
// look up the pairs of all four.
constexpr int kRows = 4, kRowSlots = 8;
constexpr int kFewSms = 32; // 4 GPUs, 4096 tokens: on 24 SMs 1292 us become 1002, on 48 671 become 763

// The pair in this lane's slot of its row, if it is one: whoever looks at it waits for it. Results are counted over all slabs, which
// take turns; `step` from one of the four to the next.
__device__ __forceinline__ int32_t pair_of_four(const args &a, uint32_t first, uint32_t step, uint32_t count)
{
    const uint32_t result = first + threadIdx.x % 32 / kRowSlots * step, turn = result % a.slabs_count;
    const int32_t slot = threadIdx.x % kRowSlots;

    if (result >= count || slot >= a.top_k) return -1;
    return a.row_pair[(static_cast<int64_t>(slab_of(a, turn)) * a.rows_cap + result / a.slabs_count) * a.top_k + slot];
}

template <int32_t format>
__global__ void __launch_bounds__(kAloneThreads, 1) combine_four_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kColumns - 1) / kColumns);
    const int32_t column = walk.piece * kColumns + threadIdx.x % 32 * 8;
    uint32_t count;
    int32_t pair;

    if (!a.routed) griddepcontrol_wait();
    count = rows_most(a) * a.slabs_count;
    pair = pair_of_four(a, walk.first, walk.step, count);
    if (a.routed) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    for (uint32_t first = walk.first; first < count; first += kRows * walk.step) {
        const int32_t own_pair = pair < a.pairs ? pair : -1;
        const uint32_t has_pair = __ballot_sync(~0u, own_pair >= 0);
        const float own_weight = weight_of(a, own_pair);
        eight<format> loaded[kRows][kPairs] = {};

#pragma unroll
        for (int32_t i = 0; i < kRows; i++) {
            uint32_t left = has_pair & 0xffu << i * kRowSlots;

#pragma unroll
            for (int32_t j = 0; j < kPairs; j++, left &= left - 1) {
                int32_t of_slot = __shfl_sync(~0u, own_pair, __ffs(static_cast<int>(left)) - 1);

                if (left != 0 && column < a.hidden) loaded[i][j] = load_8<format, true>(a.pair_out + of_slot * a.pair_stride_bytes, column);
            }
        }
        pair = pair_of_four(a, first + kRows * walk.step, walk.step, count);
#pragma unroll
        for (int32_t i = 0; i < kRows; i++) {
            const uint32_t result = first + i * walk.step;
            const int32_t row = static_cast<int32_t>(result / a.slabs_count);
            const out_slab &to = a.slabs[slab_of(a, result % a.slabs_count)];
            uint32_t left = has_pair & 0xffu << i * kRowSlots;
            float sum[8] = {};

#pragma unroll
            for (int32_t j = 0; j < kPairs && left != 0; j++, left &= left - 1) {
                float weight = __shfl_sync(~0u, own_weight, __ffs(static_cast<int>(left)) - 1);

                add_8(loaded[i][j], weight, sum);
            }
            if (left != 0) add_pairs<format, kPairs>(a, left, own_pair, own_weight, column, sum);
            if (result < count && column < a.hidden && has_row(a, to, row)) store_row(to, row, column, sum, a.scale);
        }
    }
}

// Zeros for the rows of the only slab that have no pair: of 32 rows a lane looks at one each, and the warp fills its piece of those.
// They are nobody else's, so down need not have ended.
__global__ void fill_rows_kernel(const __grid_constant__ args a)
{
    const row_walk walk = walk_rows((a.hidden + kFillColumns - 1) / kFillColumns);
    const out_slab &to = a.slabs[0];
    const int32_t lane = threadIdx.x % 32, column_end = min((walk.piece + 1) * kFillColumns, a.hidden);
    uint32_t rows;

    if (!a.routed) griddepcontrol_wait();
    rows = rows_most(a);
    for (uint32_t first = walk.first * 32; first < rows; first += walk.step * 32) { // of a warp that is left over it is past all
        uint32_t row = first + lane;
        uint32_t left = __ballot_sync(~0u, row < rows && static_cast<uint32_t>(a.row_pair[row]) >= static_cast<uint32_t>(a.pairs));

        for (; left != 0; left &= left - 1) {
            unsigned char *values = static_cast<unsigned char *>(to.rows) + (first + __ffs(static_cast<int>(left)) - 1) * to.row_stride_bytes;
            const float zeros[8] = {};

            for (int32_t column = walk.piece * kFillColumns + lane * 8; column < column_end; column += 256)
                store_8(values, to.format, column, zeros);
        }
    }
    if (a.routed) griddepcontrol_wait(); // whoever waits for this launch waits for the one before it too
}

// Whether rows of pairs may be given up, and whether that is worth it: of many more than the L2 has, most have gone to memory before.
bool may_spend(const combine_args &from)
{
    return from.spends && from.row_pair != nullptr && reinterpret_cast<uintptr_t>(from.pair_out) % 128 == 0 && from.pair_stride_bytes % 128 == 0 &&
           from.pairs * from.pair_stride_bytes <= kSpentBytes;
}

typedef void (*combine_entry)(args);

// The kernel for pairs of that format; NULL when there is none.
combine_entry entry_of(int32_t format, bool few)
{
    switch (format) {
    case FORMAT_F32:
        return few ? combine_kernel<FORMAT_F32, kPairsFew / 2> : combine_kernel<FORMAT_F32, kPairs>;
    case FORMAT_BF16:
        return few ? combine_kernel<FORMAT_BF16, kPairsFew> : combine_kernel<FORMAT_BF16, kPairs>;
    case FORMAT_F16:
        return few ? combine_kernel<FORMAT_F16, kPairsFew> : combine_kernel<FORMAT_F16, kPairs>;
    default:
        return nullptr;
    }
}

// That of few SMs; NULL where they are not, where rows have many slots, or pairs of f32 would take too many registers.
combine_entry entry_of_few_sms(const combine_args &from)
{
    if (from.sms == 0 || from.sms > kFewSms || from.row_pair == nullptr || from.top_k > kRowSlots || from.pair_format == FORMAT_F32) return nullptr;
    return from.pair_format == FORMAT_BF16 ? combine_four_kernel<FORMAT_BF16> : combine_four_kernel<FORMAT_F16>;
}

} // namespace

extern "C" int32_t combine_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (int32_t format : {FORMAT_F32, FORMAT_BF16, FORMAT_F16})
        for (bool few : {false, true})
            if (st == cudaSuccess) st = load_kernel(entry_of(format, few), kAloneSmemBytes);
    for (combine_entry entry : {combine_four_kernel<FORMAT_BF16>, combine_four_kernel<FORMAT_F16>, fill_rows_kernel})
        if (st == cudaSuccess) st = load_kernel(entry, kAloneSmemBytes);
    return st;
}

extern "C" int32_t combine_cuda(const struct combine_args *from, void *stream)
{
    int64_t pieces = (from->hidden + kColumns - 1) / kColumns, items = pieces * from->slabs_count * from->rows_cap;
    bool few = from->sms == 0 && items <= kGridSms * kBlocksOfSmFew * (kSharingThreads / 32);
    combine_entry entry;
    args to = {};

    if (from->hidden % 8 != 0 || entry_of(from->pair_format, few) == nullptr) return cudaErrorInvalidValue;
    if (from->slabs_count == 0) return cudaSuccess;
    for (int32_t i = 0; i < from->slabs_count; i++)
        to.slabs[i] = from->slabs[i];
    to.pair_out = static_cast<const unsigned char *>(from->pair_out);
    to.row_pair = from->row_pair;
    to.pair_row = from->pair_row;
    to.pairs_count = from->pairs_count;
    to.pair_weight = from->pair_weight;
    to.pair_stride_bytes = from->pair_stride_bytes;
    to.pairs = static_cast<int32_t>(min(from->pairs, static_cast<int64_t>(INT32_MAX)));
    to.slabs_count = from->row_pair != nullptr ? from->slabs_count : 1;
    to.slab_first = from->row_pair != nullptr && from->slab_first < from->slabs_count ? from->slab_first : 0;
    to.rows_cap = from->rows_cap;
    to.hidden = from->hidden;
    to.top_k = from->top_k;
    to.routed = from->routed;
    to.spends = may_spend(*from);
    to.scale = from->scale;
    if (from->placed) {
        int64_t fill_pieces = (from->hidden + kFillColumns - 1) / kFillColumns, fill_items = fill_pieces * ((from->rows_cap + 31) / 32);

        if (from->row_pair == nullptr || from->slabs_count != 1 || from->top_k != 1) return cudaErrorInvalidValue;
        return launch(fill_rows_kernel, shape_for(fill_items, fill_pieces, kBlocksOfSm, from->sms), stream, to);
    }
    // Counts live on the device: the grid covers the capacity.
    entry = entry_of_few_sms(*from);
    return launch(entry != nullptr ? entry : entry_of(from->pair_format, few), shape_for(items, pieces, kBlocksOfSm, from->sms), stream, to);
}
