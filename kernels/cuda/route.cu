// route on CUDA: ids of all received rows to the pairs of every local expert, no host.
//
// route_kernel: few positions, and layouts by expert
// grid   a cluster of up to 8 blocks of 256 to 1024 threads, each with a contiguous share of the positions in valid rows; a warp owns a
//        contiguous piece of that, so that pairs come in order of slab, row and place in the top-k, the same in every run
// smem   a counter per (warp, expert), then the first pair of each; pairs of each expert, which the other blocks read; expert and weight
//        of each position of the share
// bytes  ids once, 8 bytes a pair, 12 a position
//
// count_kernel, then fill_kernel: many positions; each block has a contiguous share of those in valid rows
// grid   a block of 1024 threads per 1024 positions, at most one an SM
// smem   count: a counter per expert; fill: as route_kernel, and per expert the pairs of all blocks and of those before
// bytes  ids once, 8 bytes a pair, 12 a position; every block reads the counters of all: 4 per (block, expert) a block

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ptx.cuh"
#include "kernels/cuda/route_share.cuh"
#include "kernels/gemm.h"

#include <cuda_runtime.h>

namespace {


// One block takes 5 us for 512 positions, a cluster 5 for 2048, 8 for 8192 and 15 for 16384, two launches 12 for 8192 and 15 for 131072.
constexpr int64_t kAloneMax = 512;     // of one block
constexpr int64_t kClusterMax = 8192;  // of one cluster
constexpr int64_t kClusterBlocks = 8;  // at most: more have to be asked for
constexpr int64_t kClusterShareMin = 256;
constexpr int64_t kShareMin = kThreads; // of many blocks: a position a thread, fewer would not end sooner

// The rows are in order of their experts already, one pair a row. `firsts` has room for two numbers of each expert, of which the block has
// a thread for each.
__device__ void route_by_expert(const args &a, int32_t *warps, int32_t *firsts)
{
    const int32_t e = threadIdx.x, rows = rows_valid(a, 0);
    int32_t *pairs = firsts + a.experts, first = 0, count = 0, total, pair;

    if (a.by == ROUTE_BY_PREFIX) {
        // Each is read once: of one that changes meanwhile, too, no row has two experts.
        if (e < a.experts) firsts[e + 1] = a.expert_counts[e + 1];
        if (e == 0 && a.experts > 0) firsts[0] = a.expert_counts[0];
        __syncthreads();
        first = block_max(e < a.experts ? max(firsts[e], 0) : 0, warps); // where they fall back, a row would have two experts
        count = e < a.experts ? max(min(firsts[e + 1], rows), 0) - first : 0;
    } else if (e < a.experts) {
        first = e * a.rows_per_expert;
        count = min(min(max(a.expert_counts[e], 0), a.rows_per_expert), rows - first);
    }
    count = max(count, 0);
    pair = block_sum(count, warps, &total);
    if (e < a.experts) {
        firsts[e] = first;
        pairs[e] = pair;
        a.expert_offset[e + 1] = static_cast<int32_t>(min(static_cast<int64_t>(pair) + count, a.pairs_max));
    }
    if (e == 0) a.expert_offset[0] = 0;
    __syncthreads();
    for (pair = threadIdx.x; pair < min(static_cast<int64_t>(total), a.pairs_max); pair += blockDim.x) {
        const int32_t expert = last_at_most(pairs, a.experts, pair), row = firsts[expert] + pair - pairs[expert];

        a.pair_row[pair] = row;
        a.pair_weight[pair] = weight_at(a, {0, static_cast<uint32_t>(row), 0});
    }
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
        a.progress[GEMM_PROGRESS_TAKEN] = 0;
        fence_device();
    }
    if (threadIdx.x == 0) griddepcontrol_launch_dependents();
    if (clears && threadIdx.x == 0) atomicAdd(&a.progress[GEMM_PROGRESS_LAUNCH], 2u); // which nobody waits for
    for (int32_t i = GEMM_PROGRESS_TAKEN + 1 + threadIdx.x; clears && i < GEMM_PROGRESS_WORDS + a.experts; i += blockDim.x)
        a.progress[i] = 0;
}

// Of a block of a cluster, all in dynamic memory.
struct block_words {
    int32_t warps[kWarps], rows_before[KERNEL_RANKS_MAX + 1];
};

// What the blocks of the cluster have of this thread's expert; the caller waits for the cluster once more before it ends, so that what it
// has left in `shown` is there for all.
__device__ expert_pairs pairs_of_cluster(const args &a, int32_t own, int32_t *shown)
{
    const int32_t e = threadIdx.x;
    int32_t counts[kClusterBlocks] = {};
    expert_pairs pairs = {};

    if (e < a.experts) shown[e] = own;
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (uint32_t block = 0; block < kClusterBlocks; block++) // all under way before the first is looked at
        if (e < a.experts) counts[block] = read_of_block(&shown[e], min(block, gridDim.x - 1));
#pragma unroll
    for (uint32_t block = 0; block < kClusterBlocks; block++) {
        pairs.all += block < gridDim.x ? counts[block] : 0;
        pairs.before += block < blockIdx.x ? counts[block] : 0;
    }
    cluster_arrive();
    return pairs;
}

__global__ void __launch_bounds__(kThreads, 1) route_kernel(const __grid_constant__ args a)
{
    block_words &words = *dynamic_smem<block_words>();
    int32_t *shown = reinterpret_cast<int32_t *>(&words + 1), *counts = shown + a.experts; // [warps, experts]
    int32_t *own = counts + threadIdx.x / 32 * a.experts, pairs;

    griddepcontrol_wait();
    clear_progress(a);
    if (a.by != ROUTE_BY_IDS) {
        route_by_expert(a, words.warps, shown);
        return;
    }
    const int32_t counters = blockDim.x / 32 * a.experts;
    const kept in = kept_shared(a, counts + counters);

    zero(counts, counters);
    sum_rows(a, words.rows_before, words.warps);
    share mine = share_of(a, words.rows_before);
    count_share(a, words.rows_before, mine, in, own);
    __syncthreads();
    pairs = pairs_of_block(a, mine, counts);
    pairs = scan(a, mine, counts, gridDim.x > 1 ? pairs_of_cluster(a, pairs, shown) : expert_pairs{pairs, 0}, words.warps);
    fill_share(a, words.rows_before, mine, in, own);
    fill_rest(a, pairs);
    clear_rest(a, words.rows_before);
    if (gridDim.x > 1) cluster_wait();
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
    __shared__ int32_t warps[kWarps], rows_before[KERNEL_RANKS_MAX + 1], sizes[ROUTE_BLOCKS_MAX];
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
    scan(a, mine, counts, thread < a.experts ? expert_pairs{all[thread], before[thread]} : expert_pairs{}, warps);
    fill_share(a, rows_before, mine, kept_left(a), own);
}

args args_of(const route_args *from)
{
    args to = {};

    for (int32_t i = 0; i < from->slabs_count; i++) {
        const row_slab &s = from->slabs[i];

        to.slabs[i] = {s.ids, s.weights, s.count, s.id_stride_bytes, s.weight_stride_bytes, s.cap, s.id_bytes, s.weight_format};
    }
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
    return to;
}

int64_t divided_up(int64_t number, int64_t by)
{
    return (number + by - 1) / by;
}

int64_t positions_of(const route_args *from)
{
    return static_cast<int64_t>(from->slabs_count) * from->rows_cap * from->top_k;
}

// How many blocks share the positions, by what there could be: how many there are only the device knows. 1: one launch
// does it, or the scratch is too small for two.
unsigned place_scratch(const route_args *from, args *to)
{
    int64_t positions = positions_of(from), blocks = divided_up(positions, kShareMin), bytes;
    int32_t *next = static_cast<int32_t *>(from->scratch);

    if (from->by != ROUTE_BY_IDS || positions <= kClusterMax || next == nullptr || from->experts == 0) return 1;
    blocks = blocks < ROUTE_BLOCKS_MAX ? blocks : ROUTE_BLOCKS_MAX;
    to->share_min = static_cast<uint32_t>(kShareMin);
    to->share_max = divided_up(positions, blocks) > kShareMin ? divided_up(positions, blocks) : kShareMin;
    bytes = blocks * (from->experts + 1 + from->slabs_count + 1 + to->share_max) * static_cast<int64_t>(sizeof(int32_t));
    if (bytes > from->scratch_bytes) return 1;
    to->left.histograms = next;
    to->left.sizes = next += blocks * from->experts;
    to->left.rows_before = next += blocks;
    to->left.experts = next += blocks * (from->slabs_count + 1);
    return static_cast<unsigned>(blocks);
}

// One block or cluster. Few positions take few warps, whose counts are soon added up, but a thread for each expert.
launch_shape shape_of_cluster(const route_args *from, args *to)
{
    const int64_t positions = positions_of(from);
    int64_t blocks = 1, share = positions, threads = kThreads;

    if (from->by == ROUTE_BY_IDS && positions <= kClusterMax) {
        if (positions > kAloneMax) blocks = divided_up(positions, kClusterShareMin);
        if (blocks > kClusterBlocks) blocks = kClusterBlocks;
        share = divided_up(positions, blocks);
        threads = divided_up(share, 32 * kBatch) * 32;
        threads = threads < 256 ? 256 : threads > kThreads ? kThreads : threads;
        if (threads < from->experts) threads = divided_up(from->experts, 32) * 32;
        to->kept = static_cast<int32_t>(share > kClusterShareMin ? share : kClusterShareMin);
    }
    to->share_min = static_cast<uint32_t>(kClusterShareMin);
    if (from->by == ROUTE_BY_IDS && gemms_can_count(from->slabs, from->slabs_count, from->rows_cap, from->top_k))
        to->pairs_counted = static_cast<int32_t>(min(positions, from->pairs_max));
    return {static_cast<unsigned>(blocks), static_cast<unsigned>(threads),
            sizeof(block_words) + ((1 + threads / 32) * from->experts + to->kept * 2) * sizeof(int32_t), LAUNCH_EARLY,
            blocks > 1 ? static_cast<unsigned>(blocks) : 0};
}

} // namespace

extern "C" int32_t route_cuda_load(void)
{
    constexpr int counters = kExpertsMax * sizeof(int32_t);
    cudaError_t status = load_kernel(count_kernel);

    if (status == cudaSuccess)
        status = load_kernel(route_kernel, sizeof(block_words) + (1 + kWarps) * counters + kClusterMax / kClusterBlocks * 2 * sizeof(int32_t));
    if (status == cudaSuccess) status = load_kernel(fill_kernel, (kWarps + 2) * counters);
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
    if (blocks == 1) return launch(route_kernel, shape_of_cluster(from, &to), stream, to);
    status = launch(count_kernel, {blocks, kThreads, counters, LAUNCH_EARLY}, stream, to);
    if (status != cudaSuccess) return status;
    return launch(fill_kernel, {blocks, kThreads, (kWarps + 2) * counters, LAUNCH_EARLY}, stream, to);
}
