// What the kernels of route are made of: positions of ids, the shares of them that blocks and warps have, the counters of those. Included
// by route.cu alone.

#ifndef MOXIE_KERNELS_CUDA_ROUTE_SHARE_CUH
#define MOXIE_KERNELS_CUDA_ROUTE_SHARE_CUH

#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/types.h"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32; // at most
constexpr int kExpertsMax = 1024;
constexpr int kBatch = 2;
constexpr int kRowsAtOnce = 8; // of counters, read before the first is written

static_assert(kExpertsMax <= kThreads, "scan: a thread an expert");

struct slab {
    const void *ids;
    const void *weights;
    const int32_t *count;
    int64_t id_stride_bytes, weight_stride_bytes;
    int32_t cap, id_bytes, weight_format;
};

// What the blocks of a count leave for those of the fill, who read neither ids nor counts of slabs again: a peer may have
// written others, and the two must agree.
struct scratch {
    int32_t *histograms;  // [blocks, experts]
    int32_t *sizes;       // [blocks]: positions in the share
    int32_t *rows_before; // [blocks, slabs + 1]: valid rows before each slab, as the block saw them
    int32_t *experts;     // [blocks, share_max]: the expert at each position of the share, -1: none; NULL: one cluster
};

struct args {
    slab slabs[KERNEL_RANKS_MAX];
    scratch left;
    const int32_t *expert_map, *expert_counts;
    int32_t *expert_offset, *pair_row, *row_pair;
    float *pair_weight;
    uint32_t *progress;
    int64_t pairs_max, map_count, expert_first, share_max;
    uint32_t share_min;
    int32_t experts, slabs_count, rows_cap, rows_per_expert, top_k, by;
    int32_t kept; // positions that a block keeps in shared memory
    int32_t pairs_counted; // up to which the products may count pairs of their own; 0: they read expert_offset
};

// Rows of a slab that may have an expert.
__device__ int32_t rows_valid(const args &a, int32_t index)
{
    const slab &s = a.slabs[index];
    int32_t rows = s.count == nullptr ? s.cap : min(max(*s.count, 0), s.cap);

    return min(rows, a.rows_cap);
}

// Positions fit 32 bits (the plan refuses more), and 32-bit divisions are an order cheaper.
struct place {
    uint32_t slab, row, k;
};

// The place of a position that is counted over valid rows alone.
__device__ __forceinline__ place place_of(const args &a, const int32_t *rows_before, uint32_t valid_position)
{
    uint32_t flat = valid_position / a.top_k;
    uint32_t slab = last_at_most(rows_before, a.slabs_count, static_cast<int32_t>(flat));

    return {slab, flat - rows_before[slab], valid_position - flat * a.top_k};
}

__device__ __forceinline__ uint32_t flat_row(const args &a, const place &at)
{
    return at.slab * a.rows_cap + at.row;
}

// The local expert at a place, or -1.
__device__ __forceinline__ int32_t expert_at(const args &a, const place &at)
{
    const slab &s = a.slabs[at.slab];
    const void *row = static_cast<const unsigned char *>(s.ids) + at.row * s.id_stride_bytes;

    return id_mapped(a.expert_map, a.map_count, id_read(row, at.k, s.id_bytes), a.expert_first, a.experts);
}

__device__ __forceinline__ float weight_at(const args &a, const place &at)
{
    const slab &s = a.slabs[at.slab];

    if (s.weights == nullptr) return 1.0f;
    return number_load(static_cast<const unsigned char *>(s.weights) + at.row * s.weight_stride_bytes, at.k, s.weight_format);
}

// The exclusive sum over all threads; `total` is the same for all.
__device__ int32_t block_sum(int32_t value, int32_t *warps, int32_t *total)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = sum_before(value) + value;

    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int32_t of_warp = lane < static_cast<int32_t>(blockDim.x) / 32 ? warps[lane] : 0;

        warps[lane] = of_warp + sum_before(of_warp);
    }
    __syncthreads();
    *total = warps[31];
    return sum - value + (warp == 0 ? 0 : warps[warp - 1]);
}

// The largest of the threads up to this one.
__device__ int32_t block_max(int32_t value, int32_t *warps)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, most = max_until(value);

    if (lane == 31) warps[warp] = most;
    __syncthreads();
    if (warp == 0) warps[lane] = max_until(lane < static_cast<int32_t>(blockDim.x) / 32 ? warps[lane] : 0);
    __syncthreads();
    if (warp > 0) most = max(most, warps[warp - 1]);
    __syncthreads();
    return most;
}

// rows_before[slab], and at its end the sum. Ends with a barrier, which whatever was written to shared memory before it
// has passed as well.
__device__ void sum_rows(const args &a, int32_t *rows_before, int32_t *warps)
{
    int32_t index = threadIdx.x, rows = index < a.slabs_count ? rows_valid(a, index) : 0, total = rows, before = 0;

    if (a.slabs_count > 1) before = block_sum(rows, warps, &total);
    if (index < a.slabs_count) rows_before[index] = before;
    if (index == 0) rows_before[a.slabs_count] = total;
    __syncthreads();
}

// Positions [first, first + size) of those in valid rows.
struct share {
    uint32_t first, size;
};

// Of the rows that there are, not of those that there could be: all slabs but one may be empty.
__device__ share share_of(const args &a, const int32_t *rows_before)
{
    uint32_t positions = static_cast<uint32_t>(rows_before[a.slabs_count]) * a.top_k;
    uint32_t size = max((positions + gridDim.x - 1) / gridDim.x, a.share_min);
    uint32_t first = min(blockIdx.x * size, positions);

    return {first, min(size, positions - first)};
}

// The positions of a warp, counted from the first of its block's share.
struct piece {
    uint32_t first, end;
};

// Few positions go to few warps, whose counts are soon added up.
__device__ uint32_t piece_size(const share &s)
{
    uint32_t warps = blockDim.x / 32;

    return max((s.size + warps - 1) / warps, 32u);
}

__device__ int32_t warps_used(const share &s)
{
    return static_cast<int32_t>((s.size + piece_size(s) - 1) / piece_size(s));
}

__device__ piece piece_of(const share &s)
{
    uint32_t size = piece_size(s);
    uint32_t first = min(threadIdx.x / 32 * size, s.size);

    return {first, min(first + size, s.size)};
}

// Where the experts of a block's positions wait between the two passes, to become pairs: in shared memory (one block or cluster), in
// scratch (many blocks), or, where neither fits, in row_pair itself, which the second pass overwrites position by position. Of many
// blocks it is memory that no other touches, so that those which saw different counts spoil no more than their own pairs.
struct kept {
    int32_t *experts; // NULL: in row_pair, which one block that has too many for its shared memory has to itself
    float *weights;   // NULL: they are read when pairs are made
};

__device__ kept kept_left(const args &a)
{
    return {&a.left.experts[blockIdx.x * a.share_max], nullptr};
}

__device__ kept kept_shared(const args &a, int32_t *memory)
{
    if (a.kept == 0) return {nullptr, nullptr};
    return {memory, reinterpret_cast<float *>(memory + a.kept)};
}

__device__ __forceinline__ int32_t *expert_of(const args &a, const kept &in, uint32_t index, const place &at)
{
    return in.experts != nullptr ? &in.experts[index] : &a.row_pair[flat_row(a, at) * a.top_k + at.k];
}

// Finds, keeps and counts the experts of a warp's piece. Whole numbers: the order in which they add up does not show.
__device__ void count_share(const args &a, const int32_t *rows_before, const share &s, const kept &in, int32_t *counts)
{
    piece mine = piece_of(s);

    for (uint32_t base = mine.first + threadIdx.x % 32; base < mine.end; base += 32 * kBatch) {
        int32_t expert[kBatch];
        float weight[kBatch];
        place at[kBatch];

#pragma unroll
        for (uint32_t i = 0; i < kBatch; i++) {
            at[i] = place_of(a, rows_before, s.first + min(base + 32 * i, mine.end - 1));
            if (in.weights != nullptr) weight[i] = weight_at(a, at[i]);
            expert[i] = expert_at(a, at[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; i++) {
            if (base + 32 * i >= mine.end) break;
            *expert_of(a, in, base + 32 * i, at[i]) = expert[i];
            if (in.weights != nullptr) in.weights[base + 32 * i] = weight[i];
            if (expert[i] >= 0) atomicAdd(&counts[expert[i]], 1);
        }
    }
}

// Of a thread's expert: of all blocks, and of those before this one.
struct expert_pairs {
    int32_t all, before;
};

// Of this block. Every row of counts is read by threads of other warps than have written it: a barrier goes before.
__device__ int32_t pairs_of_block(const args &a, const share &s, const int32_t *counts)
{
    int32_t used = warps_used(s), e = threadIdx.x, own = 0;

    if (e >= a.experts) return 0;
#pragma unroll 8
    for (int32_t w = 0; w < used; w++)
        own += counts[w * a.experts + e];
    return own;
}

// Turns counts[warp][expert] of this block into the first pair of each, and writes expert_offset. Returns all pairs. The barrier at the end
// gives each warp its row back.
__device__ int32_t scan(const args &a, const share &s, int32_t *counts, const expert_pairs &pairs, int32_t *warps)
{
    int32_t e = threadIdx.x, used = e < a.experts ? warps_used(s) : 0, total, first = block_sum(pairs.all, warps, &total), next = first + pairs.before;

    if (blockIdx.x == 0 && e < a.experts)
        a.expert_offset[e + 1] = static_cast<int32_t>(min(static_cast<int64_t>(first) + pairs.all, a.pairs_max));
    if (blockIdx.x == 0 && e == 0) a.expert_offset[0] = 0;
    for (int32_t w = 0; w < used; w += kRowsAtOnce) {
        int32_t row[kRowsAtOnce];

#pragma unroll
        for (int32_t i = 0; i < kRowsAtOnce; i++)
            row[i] = w + i < used ? counts[(w + i) * a.experts + e] : 0;
#pragma unroll
        for (int32_t i = 0; i < kRowsAtOnce; i++) {
            if (w + i < used) counts[(w + i) * a.experts + e] = next;
            next += row[i];
        }
    }
    __syncthreads();
    return total;
}

// Lanes with the same expert take consecutive pairs, in order.
__device__ int32_t take(int32_t *next, int32_t expert)
{
    uint32_t same = __match_any_sync(~0u, expert);
    int32_t lane = threadIdx.x % 32, leader = __ffs(same) - 1, first = 0;

    if (expert >= 0 && lane == leader) {
        first = next[expert];
        next[expert] = first + __popc(same);
    }
    first = __shfl_sync(~0u, first, leader);
    return first + __popc(same & ((1u << lane) - 1));
}

// Turns the experts of a warp's piece into pairs; `next` is the warp's own row of counts.
__device__ void fill_share(const args &a, const int32_t *rows_before, const share &s, const kept &in, int32_t *next)
{
    uint32_t lane = threadIdx.x % 32;
    piece mine = piece_of(s);

    for (uint32_t base = mine.first; base < mine.end; base += 32 * kBatch) {
        int32_t expert[kBatch];
        float weight[kBatch];
        place at[kBatch];

#pragma unroll
        for (uint32_t i = 0; i < kBatch; i++) {
            uint32_t index = base + lane + 32 * i, last = min(index, mine.end - 1);

            at[i] = place_of(a, rows_before, s.first + last);
            expert[i] = index < mine.end ? *expert_of(a, in, index, at[i]) : -1;
            weight[i] = in.weights != nullptr ? in.weights[last] : weight_at(a, at[i]);
        }
#pragma unroll
        for (uint32_t i = 0; i < kBatch; i++) {
            int32_t pair;

            if (base + 32 * i >= mine.end) break;
            pair = take(next, expert[i]);
            if (expert[i] < 0 || pair >= a.pairs_max) pair = -1;
            if (pair >= 0) {
                a.pair_row[pair] = static_cast<int32_t>(flat_row(a, at[i]));
                a.pair_weight[pair] = weight[i];
            }
            if (base + lane + 32 * i < mine.end) a.row_pair[flat_row(a, at[i]) * a.top_k + at[i].k] = pair;
            __syncwarp();
        }
    }
}

// The positions of rows that are not valid have no pair.
__device__ void clear_rest(const args &a, const int32_t *rows_before)
{
    for (int32_t i = 0; i < a.slabs_count; i++) {
        uint32_t valid = rows_before[i + 1] - rows_before[i];
        uint32_t first = (static_cast<uint32_t>(i) * a.rows_cap + valid) * a.top_k;
        uint32_t end = (static_cast<uint32_t>(i) + 1) * a.rows_cap * a.top_k;

        for (uint32_t position = first + blockIdx.x * blockDim.x + threadIdx.x; position < end; position += gridDim.x * blockDim.x)
            a.row_pair[position] = -1;
    }
}

// Products that count ids again may count more pairs than this did, should someone have written others meanwhile: theirs are rows, too.
__device__ void fill_rest(const args &a, int32_t pairs)
{
    const int32_t thread = static_cast<int32_t>(blockIdx.x * blockDim.x + threadIdx.x), threads = static_cast<int32_t>(gridDim.x * blockDim.x);

    for (int32_t pair = pairs + thread; pair < a.pairs_counted; pair += threads)
        a.pair_row[pair] = 0;
}

} // namespace

#endif
