// route on CUDA: ids of all received rows to the pairs of every local expert, one block, no host.
//
// grid   1 block of 1024 threads; each warp owns a contiguous piece of the positions, so that pairs come in order of slab,
//        row and place in the top-k, the same in every run
// smem   a counter per (warp, expert), then sums
// bytes  ids twice, 8 bytes a pair, 4 a position

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kExpertsMax = 1024;
constexpr int kBatch = 8;

struct slab {
    const void *ids;
    const void *weights;
    const int32_t *count;
    int64_t id_stride_bytes, weight_stride_bytes;
    int32_t cap, id_bytes, weight_format;
};

struct args {
    slab slabs[KERNEL_RANKS_MAX];
    const int32_t *tokens_valid, *expert_map, *expert_counts;
    int32_t *expert_offset, *pair_row, *row_pair;
    float *pair_weight;
    int64_t pairs_max, map_count, expert_first;
    int32_t experts, slabs_count, rows_cap, rows_per_expert, top_k, by, valid_slab;
};

// Rows of a slab that may have an expert.
__device__ int32_t rows_valid(const args &a, int32_t index)
{
    const slab &s = a.slabs[index];
    int32_t rows = s.count == nullptr ? s.cap : min(max(*s.count, 0), s.cap);

    if (a.tokens_valid != nullptr && index == a.valid_slab) rows = min(rows, max(*a.tokens_valid, 0));
    return min(rows, a.rows_cap);
}

// Positions fit 32 bits (the plan refuses more), and 32-bit divisions are an order cheaper.
struct place {
    uint32_t slab, row, k;
};

__device__ __forceinline__ place place_of(const args &a, uint32_t position)
{
    uint32_t flat = position / a.top_k;
    uint32_t slab = flat / a.rows_cap;

    return {slab, flat - slab * a.rows_cap, position - flat * a.top_k};
}

// The local expert at a position, or -1.
__device__ __forceinline__ int32_t expert_at(const args &a, const int32_t *valid, uint32_t position)
{
    place at = place_of(a, position);
    const slab &s = a.slabs[at.slab];
    const void *row = static_cast<const unsigned char *>(s.ids) + at.row * s.id_stride_bytes;

    if (static_cast<int32_t>(at.row) >= valid[at.slab]) return -1;
    return id_mapped(a.expert_map, a.map_count, id_read(row, at.k, s.id_bytes), a.expert_first, a.experts);
}

__device__ __forceinline__ float weight_at(const args &a, uint32_t position)
{
    place at = place_of(a, position);
    const slab &s = a.slabs[at.slab];

    if (s.weights == nullptr) return 1.0f;
    return number_load(static_cast<const unsigned char *>(s.weights) + at.row * s.weight_stride_bytes, at.k, s.weight_format);
}

// The exclusive sum over all threads; `total` is the same for all.
__device__ int32_t block_sum(int32_t value, int32_t *warps, int32_t *total)
{
    int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = value;

    for (int32_t step = 1; step < 32; step *= 2) {
        int32_t before = __shfl_up_sync(~0u, sum, step);

        if (lane >= step) sum += before;
    }
    if (lane == 31) warps[warp] = sum;
    __syncthreads();
    if (warp == 0) {
        int32_t all = warps[lane];

        for (int32_t step = 1; step < 32; step *= 2) {
            int32_t before = __shfl_up_sync(~0u, all, step);

            if (lane >= step) all += before;
        }
        warps[lane] = all;
    }
    __syncthreads();
    *total = warps[31];
    return sum - value + (warp == 0 ? 0 : warps[warp - 1]);
}

// Turns counts[warp][expert] into the first pair of each, and writes expert_offset.
__device__ void scan(const args &a, int32_t *counts, int32_t *warps)
{
    int32_t done = 0;

    for (int32_t base = 0; base < a.experts; base += kThreads) {
        int32_t e = base + threadIdx.x, sum = 0, total, first;

        for (int32_t w = 0; e < a.experts && w < kWarps; w++) {
            int32_t count = counts[w * a.experts + e];

            counts[w * a.experts + e] = sum;
            sum += count;
        }
        first = done + block_sum(sum, warps, &total);
        for (int32_t w = 0; e < a.experts && w < kWarps; w++)
            counts[w * a.experts + e] += first;
        if (e < a.experts) a.expert_offset[e + 1] = first + sum;
        done += total;
    }
    if (threadIdx.x == 0) a.expert_offset[0] = 0;
    __syncthreads();
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

// Two passes over a warp's piece, kBatch positions of each lane at a time so that their loads overlap: the first leaves
// each position's expert in row_pair, the second turns it into the pair.
__device__ void route_by_ids(const args &a, const int32_t *valid, int32_t *counts, int32_t *warps)
{
    uint32_t positions = static_cast<uint32_t>(a.slabs_count) * a.rows_cap * a.top_k;
    uint32_t piece = (positions + kWarps - 1) / kWarps;
    uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t first = warp * piece, end = min(first + piece, positions);
    int32_t *next = counts + warp * a.experts;

    for (uint32_t base = first; base < end; base += 32 * kBatch) {
        int32_t expert[kBatch];

#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            uint32_t position = base + lane + 32 * i;

            expert[i] = position < end ? expert_at(a, valid, position) : -1;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            uint32_t position = base + lane + 32 * i;

            if (position < end) a.row_pair[position] = expert[i];
            take(next, expert[i]);
            __syncwarp();
        }
    }
    __syncthreads();
    scan(a, counts, warps);
    for (uint32_t base = first; base < end; base += 32 * kBatch) {
        int32_t expert[kBatch];
        float weight[kBatch];

#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            uint32_t position = base + lane + 32 * i;

            expert[i] = position < end ? a.row_pair[position] : -1;
            weight[i] = position < end ? weight_at(a, position) : 0.0f;
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            uint32_t position = base + lane + 32 * i;
            int32_t pair = take(next, expert[i]);

            if (expert[i] >= 0) {
                a.pair_row[pair] = static_cast<int32_t>(position / a.top_k);
                a.pair_weight[pair] = weight[i];
            }
            if (position < end) a.row_pair[position] = expert[i] >= 0 ? pair : -1;
            __syncwarp();
        }
    }
}

// The rows are in order of their experts already, one pair a row.
__device__ void route_by_expert(const args &a, int32_t *warps)
{
    int32_t rows = rows_valid(a, 0), done = 0;

    for (int32_t base = 0; base < a.experts; base += kThreads) {
        int32_t e = base + threadIdx.x, first = 0, count = 0, total, pair;

        if (e < a.experts && a.by == ROUTE_BY_PREFIX) {
            first = max(a.expert_counts[e], 0);
            count = min(a.expert_counts[e + 1], rows) - first;
        } else if (e < a.experts) {
            first = e * a.rows_per_expert;
            count = min(min(max(a.expert_counts[e], 0), a.rows_per_expert), rows - first);
        }
        count = max(count, 0);
        pair = done + block_sum(count, warps, &total);
        if (e < a.experts) a.expert_offset[e + 1] = static_cast<int32_t>(min(static_cast<int64_t>(pair) + count, a.pairs_max));
        for (int32_t i = 0; i < count && pair + i < a.pairs_max; i++) {
            a.pair_row[pair + i] = first + i;
            a.pair_weight[pair + i] = weight_at(a, first + i);
        }
        done += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) a.expert_offset[0] = 0;
}

__global__ void __launch_bounds__(kThreads, 1) route_kernel(const __grid_constant__ args a)
{
    int32_t *counts = dynamic_smem<int32_t>(); // [kWarps, experts]
    __shared__ int32_t warps[kWarps], valid[KERNEL_RANKS_MAX];

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    if (static_cast<int32_t>(threadIdx.x) < a.slabs_count) valid[threadIdx.x] = rows_valid(a, threadIdx.x);
    for (int32_t i = threadIdx.x; a.by == ROUTE_BY_IDS && i < kWarps * a.experts; i += kThreads)
        counts[i] = 0;
    __syncthreads();
    if (a.by == ROUTE_BY_IDS)
        route_by_ids(a, valid, counts, warps);
    else
        route_by_expert(a, warps);
}

} // namespace

extern "C" int32_t route_cuda_load(void)
{
    return cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWarps * kExpertsMax * 4);
}

extern "C" int32_t route_cuda(const struct route_args *from, void *stream)
{
    args to = {};

    if (from->experts > kExpertsMax) return cudaErrorInvalidValue;
    for (int32_t i = 0; i < from->slabs_count; i++) {
        const row_slab &s = from->slabs[i];

        to.slabs[i] = {s.ids, s.weights, s.count, s.id_stride_bytes, s.weight_stride_bytes, s.cap, s.id_bytes, s.weight_format};
    }
    to.tokens_valid = from->tokens_valid;
    to.expert_map = from->expert_map;
    to.expert_counts = from->expert_counts;
    to.expert_offset = from->expert_offset;
    to.pair_row = from->pair_row;
    to.row_pair = from->row_pair;
    to.pair_weight = from->pair_weight;
    to.pairs_max = from->pairs_max;
    to.map_count = from->map_count;
    to.expert_first = from->expert_first;
    to.experts = from->experts;
    to.slabs_count = from->slabs_count;
    to.rows_cap = from->rows_cap;
    to.rows_per_expert = from->rows_per_expert;
    to.top_k = from->top_k;
    to.by = from->by;
    to.valid_slab = from->valid_slab;
    return launch(route_kernel, {1, kThreads, kWarps * from->experts * sizeof(int32_t), LAUNCH_AFTER}, stream, to);
}
