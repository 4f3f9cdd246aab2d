// route on CUDA: ids of all received rows to the pairs of every local expert, no host.
//
// route_kernel: few positions, and layouts by expert
// grid   1 block of 256 to 1024 threads; each warp owns a contiguous piece of the positions, so that pairs come in order of slab,
//        row and place in the top-k, the same in every run
// smem   a counter per (warp, expert), then the first pair of each; expert and weight of each of few positions
// bytes  ids once, 8 bytes a pair, 12 a position
//
// count_kernel, then fill_kernel: many positions; each block has a contiguous share of those in valid rows
// grid   a block of 1024 threads per 1024 positions, at most one an SM
// smem   count: a counter per expert; fill: as route_kernel, and per expert the pairs of all blocks and of those before
// bytes  ids once, 8 bytes a pair, 12 a position; every block reads the counters of all: 4 per (block, expert) a block

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/number.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/search.cuh"

#include <cuda_runtime.h>

namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32; // at most
constexpr int kExpertsMax = 1024;
constexpr int kBlocksMax = 132; // the SMs of an H200: a block takes most of one

// One block takes 8 us for 2048 positions and 3 us for every 1024 more; two launches 11 for 8192, and 14 for 131072.
constexpr int64_t kAloneMax = 2048;
constexpr int64_t kFewMax = 512;
constexpr int64_t kShareMin = kThreads; // a position a thread: fewer would not end sooner
constexpr int kBatch = 2;

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
    int32_t *experts;     // [blocks, share_max]: the expert at each position of the share, -1: none; NULL: one block
};

struct args {
    slab slabs[KERNEL_RANKS_MAX];
    scratch left;
    const int32_t *tokens_valid, *expert_map, *expert_counts;
    int32_t *expert_offset, *pair_row, *row_pair;
    float *pair_weight;
    uint32_t *progress;
    int64_t pairs_max, map_count, expert_first, share_max;
    int32_t experts, slabs_count, rows_cap, rows_per_expert, top_k, by, valid_slab;
    int32_t kept; // positions that one block keeps in shared memory
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
    uint32_t size = max((positions + gridDim.x - 1) / gridDim.x, static_cast<uint32_t>(kShareMin));
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

// Where the positions of a block's share wait to become pairs. With many blocks it is memory that no other touches, so that
// blocks which saw different counts spoil no more than their own pairs.
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

// Turns counts[warp][expert] of this block into the first pair of each, and writes expert_offset. `all` has the pairs of
// all blocks, `before` those of the blocks before this one; NULL: there is one. Every row of counts is read by threads of
// other warps than have written it: a barrier goes before, and the one at the end gives each warp its row back.
__device__ void scan(const args &a, const share &s, int32_t *counts, const int32_t *all, const int32_t *before, int32_t *warps)
{
    int32_t e = threadIdx.x, used = warps_used(s), own = 0, sum, total, first;

    for (int32_t w = 0; e < a.experts && w < used; w++) {
        int32_t count = counts[w * a.experts + e];

        counts[w * a.experts + e] = own;
        own += count;
    }
    sum = all != nullptr && e < a.experts ? all[e] : own;
    first = block_sum(sum, warps, &total);
    if (blockIdx.x == 0 && e < a.experts) 
        a.expert_offset[e + 1] = static_cast<int32_t>(min(static_cast<int64_t>(first) + sum, a.pairs_max));
    if (blockIdx.x == 0 && e == 0) a.expert_offset[0] = 0;
    if (before != nullptr && e < a.experts) first += before[e];
    for (int32_t w = 0; e < a.experts && w < used; w++)
        counts[w * a.experts + e] += first;
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

// The rows are in order of their experts already, one pair a row.
__device__ void route_by_expert(const args &a, int32_t *warps)
{
    int32_t rows = rows_valid(a, 0), done = 0;

    for (int32_t base = 0; base < a.experts; base += blockDim.x) {
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
            a.pair_weight[pair + i] = weight_at(a, {0, static_cast<uint32_t>(first + i), 0});
        }
        done += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) a.expert_offset[0] = 0;
}

__device__ void zero(int32_t *numbers, int32_t count)
{
    for (int32_t i = threadIdx.x; i < count; i += blockDim.x)
        numbers[i] = 0;
}

// One block clears what the products count in: their tiles before they may begin, since those that count ids themselves do not wait for
// the end of this.
__device__ void clear_progress(const args &a)
{
    const bool clears = a.progress != nullptr && blockIdx.x == 0;

    if (clears && threadIdx.x == 0) {
        a.progress[0] = 0;
        fence_device();
    }
    if (threadIdx.x == 0) griddepcontrol_launch_dependents();
    for (int32_t i = 1 + threadIdx.x; clears && i < GEMM_PROGRESS_WORDS + a.experts; i += blockDim.x)
        a.progress[i] = 0;
}

__global__ void __launch_bounds__(kThreads, 1) route_kernel(const __grid_constant__ args a)
{
    int32_t *counts = dynamic_smem<int32_t>(); // [warps, experts]
    __shared__ int32_t warps[kWarps], rows_before[KERNEL_RANKS_MAX + 1];
    int32_t *own = counts + threadIdx.x / 32 * a.experts;

    griddepcontrol_wait();
    clear_progress(a);
    if (a.by != ROUTE_BY_IDS) {
        route_by_expert(a, warps);
        return;
    }
    const int32_t counters = blockDim.x / 32 * a.experts;
    const kept in = kept_shared(a, counts + counters);

    zero(counts, counters);
    sum_rows(a, rows_before, warps);
    share every = share_of(a, rows_before);
    count_share(a, rows_before, every, in, own);
    __syncthreads();
    scan(a, every, counts, nullptr, nullptr, warps);
    fill_share(a, rows_before, every, in, own);
    clear_rest(a, rows_before);
}

__global__ void __launch_bounds__(kThreads, 1) count_kernel(const __grid_constant__ args a)
{
    int32_t *counts = dynamic_smem<int32_t>(); // [experts]
    __shared__ int32_t warps[kWarps], rows_before[KERNEL_RANKS_MAX + 1];

    griddepcontrol_wait();
    clear_progress(a);
    zero(counts, a.experts);
    sum_rows(a, rows_before, warps);
    share mine = share_of(a, rows_before);
    if (threadIdx.x == 0) a.left.sizes[blockIdx.x] = static_cast<int32_t>(mine.size);
    if (static_cast<int32_t>(threadIdx.x) <= a.slabs_count)
        a.left.rows_before[blockIdx.x * (a.slabs_count + 1) + threadIdx.x] = rows_before[threadIdx.x];
    count_share(a, rows_before, mine, kept_left(a), counts);
    // Every warp adds to the same counters.
    __syncthreads();
    for (int32_t e = threadIdx.x; e < a.experts; e += kThreads)
        a.left.histograms[blockIdx.x * a.experts + e] = counts[e];
    clear_rest(a, rows_before);
}

// Groups of as many threads as there are experts take the blocks in turns.
__device__ void sum_histograms(const args &a, const int32_t *sizes, int32_t *all, int32_t *before)
{
    int32_t e = threadIdx.x % a.experts, groups = kThreads / a.experts, sum = 0, earlier = 0;
    int32_t blocks = gridDim.x, self = blockIdx.x;

    if (static_cast<int32_t>(threadIdx.x) >= groups * a.experts) return;
#pragma unroll 8
    for (int32_t b = threadIdx.x / a.experts; b < blocks; b += groups) {
        int32_t count = sizes[b] == 0 ? 0 : a.left.histograms[b * a.experts + e];

        sum += count;
        earlier += b < self ? count : 0;
    }
    if (sum != 0) atomicAdd(&all[e], sum);
    if (earlier != 0) atomicAdd(&before[e], earlier);
}

// Counts its share once more, now by warp, from what the count has left.
__device__ void count_again(const args &a, const share &s, int32_t *counts)
{
    piece mine = piece_of(s);

    for (uint32_t i = mine.first + threadIdx.x % 32; i < mine.end; i += 32) {
        int32_t expert = a.left.experts[blockIdx.x * a.share_max + i];

        if (expert >= 0) atomicAdd(&counts[expert], 1);
    }
}

__global__ void __launch_bounds__(kThreads, 1) fill_kernel(const __grid_constant__ args a)
{
    int32_t *counts = dynamic_smem<int32_t>(), *all = counts + kWarps * a.experts, *before = all + a.experts;
    __shared__ int32_t warps[kWarps], rows_before[KERNEL_RANKS_MAX + 1], sizes[kBlocksMax];
    int32_t thread = threadIdx.x, *own = counts + thread / 32 * a.experts;

    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    // The first block writes expert_offset, with a share or without.
    if (blockIdx.x > 0 && a.left.sizes[blockIdx.x] == 0) return;
    zero(counts, (kWarps + 2) * a.experts);
    if (thread < static_cast<int32_t>(gridDim.x)) sizes[thread] = a.left.sizes[thread];
    if (thread <= a.slabs_count) rows_before[thread] = a.left.rows_before[blockIdx.x * (a.slabs_count + 1) + thread];
    // Counters are zero and the three arrays whole before the first is added to and they are read.
    __syncthreads();
    share mine = share_of(a, rows_before);
    count_again(a, mine, own);
    sum_histograms(a, sizes, all, before);
    // scan reads what every warp has counted, and sums that threads of several warps added up.
    __syncthreads();
    scan(a, mine, counts, all, before, warps);
    fill_share(a, rows_before, mine, kept_left(a), own);
}

args args_of(const route_args *from)
{
    args to = {};

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
    to.progress = from->progress;
    to.map_count = from->map_count;
    to.expert_first = from->expert_first;
    to.pairs_max = from->pairs_max;
    to.experts = from->experts;
    to.slabs_count = from->slabs_count;
    to.rows_cap = from->rows_cap;
    to.rows_per_expert = from->rows_per_expert;
    to.top_k = from->top_k;
    to.by = from->by;
    to.valid_slab = from->valid_slab;
    return to;
}

int64_t divided_up(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

// How many blocks share the positions, by what there could be: how many there are only the device knows. 1: one launch
// does it, or the scratch is too small for two.
unsigned place_scratch(const route_args *from, args *to)
{
    int64_t positions = static_cast<int64_t>(from->slabs_count) * from->rows_cap * from->top_k;
    int64_t blocks = divided_up(positions, kShareMin), bytes;
    int32_t *next = static_cast<int32_t *>(from->scratch);

    if (from->by != ROUTE_BY_IDS || positions <= kAloneMax || next == nullptr) return 1;
    blocks = blocks < kBlocksMax ? blocks : kBlocksMax;
    to->share_max = divided_up(positions, blocks) > kShareMin ? divided_up(positions, blocks) : kShareMin;
    bytes = blocks * (from->experts + 1 + from->slabs_count + 1 + to->share_max) * static_cast<int64_t>(sizeof(int32_t));
    if (bytes > from->scratch_bytes) return 1;
    to->left.histograms = next;
    to->left.sizes = next += blocks * from->experts;
    to->left.rows_before = next += blocks;
    to->left.experts = next += blocks * (from->slabs_count + 1);
    return static_cast<unsigned>(blocks);
}

// One block. Few positions take few warps, whose counts are soon added up, but a thread for each expert.
launch_shape shape_alone(const route_args *from, args *to)
{
    int64_t positions = static_cast<int64_t>(from->slabs_count) * from->rows_cap * from->top_k, threads = kThreads;

    if (from->by == ROUTE_BY_IDS && positions <= kAloneMax) {
        to->kept = static_cast<int32_t>(positions);
        threads = positions <= kFewMax ? 256 : 512;
        if (threads < from->experts) threads = divided_up(from->experts, 32) * 32;
    }
    return {1, static_cast<unsigned>(threads), (threads / 32 * from->experts + to->kept * 2) * sizeof(int32_t), LAUNCH_EARLY};
}

} // namespace

extern "C" int32_t route_cuda_load(void)
{
    constexpr int counters = kExpertsMax * sizeof(int32_t);
    cudaError_t status = load_kernel(count_kernel);

    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(route_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      kWarps * counters + static_cast<int>(kAloneMax * 2 * sizeof(int32_t)));
    if (status == cudaSuccess)
        status = cudaFuncSetAttribute(fill_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (kWarps + 2) * counters);
    return status;
}

extern "C" int32_t route_cuda(const struct route_args *from, void *stream)
{
    size_t counters = from->experts * sizeof(int32_t);
    cudaError_t status;
    unsigned blocks;
    args to;

    if (from->experts > kExpertsMax) return cudaErrorInvalidValue;
    to = args_of(from);
    blocks = place_scratch(from, &to);
    if (blocks == 1) return launch(route_kernel, shape_alone(from, &to), stream, to);
    status = launch(count_kernel, {blocks, kThreads, counters, LAUNCH_EARLY}, stream, to);
    if (status != cudaSuccess) return status;
    return launch(fill_kernel, {blocks, kThreads, (kWarps + 2) * counters, LAUNCH_EARLY}, stream, to);
}
