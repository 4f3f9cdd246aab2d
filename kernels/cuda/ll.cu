// dispatch_ll and sum_ll on CUDA: what is for a peer goes out as words with a tag, and what comes is looked at until it is there.
//
// grid   a cluster of up to 8 blocks of 512 threads, as many as the pieces of the rows want: all on the device at once, since each waits for
//        what blocks of peers send, and so few that what waits never keeps another instance's kernels from it. A wait is not followed early.
// bytes  two for each of a row, once a destination; few: bound by the wire's latency, and by how fast a launch's instructions come, so that
//        loops are not unrolled

#include "kernels/cuda/cuda.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/ll_rows.cuh"
#include "kernels/cuda/row8.cuh"

// Pieces that come for each block, where there may be as many.
#ifndef LL_BLOCK_PIECES
#define LL_BLOCK_PIECES kWorkers
#endif
// Of the device.
#ifndef LL_SMS
#define LL_SMS sm_count()
#endif

namespace {

constexpr int32_t kBlocksMax = 8;
template <int32_t format> constexpr int32_t kParts = format == FORMAT_F32 ? 2 : 4; // of a sum, under way at once

struct sum_kernel_args {
    await_kernel_args await;
    ll_results peers[LL_RANKS_MAX];
    const int32_t *counts, *send_slot;
    const unsigned char *words;
    unsigned char *y;
    int64_t words_stride_bytes, rows_stride_bytes, y_stride_bytes;
    int32_t hidden, pieces, tokens, row_words;
    int32_t sends, waits;
};

// words: of eight numbers; 1: as e4m3.
template <int32_t words> __global__ void __launch_bounds__(kThreads, 1) dispatch_ll_kernel(const __grid_constant__ dispatch_kernel_args args)
{
    const await_args &a = args.await.a;
    ll_smem &smem = *dynamic_smem<ll_smem>();
    standing at;
    bool failed;

    griddepcontrol_wait();
    at = begin(args.await, smem, args.sends);
    __syncthreads();
    if (threadIdx.x >= 32) {
        if (args.sends) send_rows<words>(args, at);
        if (args.sends && blockIdx.x == 0) keep_routing(args.push, at);
        if (args.waits) take_rows<words>(args, smem, at);
        finish(smem);
    } else {
        if (args.sends && blockIdx.x == 0) {
            const uint64_t sent = *static_cast<const volatile uint64_t *>(args.push.rows_sent);

            send_counts(args, at, ranks_of_token(args.push, at, tokens_valid(args.push)), sent);
            tell_flags(args.await, at);
        }
        if (args.waits) keep_watch(args.await, smem, at);
    }
    if (!args.waits) return;
    failed = judge_words(a, smem, at, blockIdx.x == 0);
    if (blockIdx.x != 0) return; // if its words have not come, the sum of this layer will be zeros
    clear_ids(a, smem.told, failed);
    take_counts(a, smem.told, failed, at.rows_received);
}

// ---- sum_ll --------------------------------------------------------------------------------------------------------------------

template <int32_t format> constexpr int32_t kWordsOfEight = sizeof(eight<format>) / 8;

// A lane's first word of a piece, the next ones 32 apart, so that a warp's are side by side.
template <int32_t format> __device__ __forceinline__ int32_t word_of_lane(const sum_kernel_args &args, int32_t row, int32_t piece)
{
    return row * args.row_words + piece * 32 * kWordsOfEight<format> + static_cast<int32_t>(threadIdx.x % 32);
}

// Workers: results of the peers' rows to them.
template <int32_t format> __device__ __forceinline__ void return_results(const sum_kernel_args &args, const standing &at)
{
    const await_args &a = args.await.a;
    const int32_t items = a.ranks * a.rows_most * args.pieces, step = item_step();

#pragma unroll 1
    for (int32_t item = first_item(); item < items; item += step) {
        const ll_piece of = piece_of(item, args.pieces);
        const int32_t rank = of.row / a.rows_most, row = of.row - rank * a.rows_most;
        const ll_results &results = args.peers[rank];
        eight<format> numbers;
        unsigned char *to;

        if (of.column >= args.hidden || results.rows == nullptr) continue;
        numbers = load_8<format>(static_cast<const unsigned char *>(results.rows) + row * args.rows_stride_bytes, of.column); // wanted or not
        if (!is_peer(at.active, rank, a.rank) || row >= args.counts[rank]) continue;
        to = static_cast<unsigned char *>(results.words) + word_of_lane<format>(args, row, of.piece) * LL_WORD_BYTES;
#pragma unroll
        for (int32_t i = 0; i < kWordsOfEight<format>; i++)
            store_word(to, 32 * i, pack(numbers.words[2 * i], numbers.words[2 * i + 1]), flag_of(at, false));
    }
}

// The row of `rank` for this token, -1 when it has none.
__device__ __forceinline__ int32_t part_row(const sum_kernel_args &args, int32_t token, int32_t rank)
{
    const await_args &a = args.await.a;
    int32_t row;

    if (rank >= a.ranks) return -1;
    if (rank == a.rank) return token;
    row = args.send_slot[token * a.ranks + rank];
    return row < a.rows_most ? row : -1;
}

// Eight columns of a token from some ranks, in their order.
template <int32_t format> struct sum_parts {
    const unsigned char *from[kParts<format>]; // NULL: the own row, or none
    eight<format> numbers[kParts<format>];
};

// Looks at the words of all parts, until they are there, or once more when nobody need wait any longer. Bit i: part i has not come.
template <int32_t format> __device__ __forceinline__ uint32_t take_results(const ll_smem &smem, const standing &at, sum_parts<format> &p)
{
    constexpr int32_t words = kWordsOfEight<format>;
    const uint64_t tag = flag_of(at, false);

    for (;; spin_pause(kPauseNs)) {
        const bool is_over = read_anew(smem.ended) != 0;
        uint32_t missing = 0;

#pragma unroll
        for (int32_t i = 0; i < kParts<format>; i++) {
            tagged held[words];

#pragma unroll
            for (int32_t j = 0; j < words; j++)
                if (p.from[i] != nullptr) held[j] = load_tagged(p.from[i] + 32 * j * LL_WORD_BYTES);
#pragma unroll
            for (int32_t j = 0; j < words; j++) {
                if (p.from[i] == nullptr) continue;
                if (held[j].tag != tag) missing |= 1u << i;
                p.numbers[i].words[2 * j] = static_cast<uint32_t>(held[j].value);
                p.numbers[i].words[2 * j + 1] = static_cast<uint32_t>(held[j].value >> 32);
            }
        }
        if (missing == 0 || is_over) return missing;
    }
}

// The results of all ranks in `left`, of which a lane knows the row of one.
template <int32_t format>
__device__ __forceinline__ void sum_piece(const sum_kernel_args &args, ll_smem &smem, const standing &at, const ll_piece &of, uint32_t left, int32_t row)
{
    const await_args &a = args.await.a;
    unsigned char *y = args.y + of.row * args.y_stride_bytes;
    float sum[8] = {};

    while (left != 0) {
        sum_parts<format> p = {};
        uint32_t loaded = left, missing;

#pragma unroll
        for (int32_t i = 0; i < kParts<format>; i++, loaded &= loaded - 1) {
            const int32_t rank = __ffs(static_cast<int>(loaded)) - 1, result = __shfl_sync(~0u, row, rank & 31);

            if (loaded == 0 || of.column >= args.hidden) continue;
            if (rank == a.rank)
                p.numbers[i] = is_aligned(y, 16) ? load_8<format>(y, of.column) : load_8_anywhere<format>(y, of.column);
            else
                p.from[i] = args.words + index_of(rank, a.rank) * args.words_stride_bytes +
                            word_of_lane<format>(args, result, of.piece) * LL_WORD_BYTES;
        }
        missing = take_results(smem, at, p);
#pragma unroll
        for (int32_t i = 0; i < kParts<format> && left != 0; i++, left &= left - 1) {
            if ((missing >> i & 1) != 0) miss(smem, __ffs(static_cast<int>(left)) - 1);
            add_8(p.numbers[i], 1.0f, sum);
        }
    }
    if (of.column < args.hidden) store_8(y, format, of.column, sum);
}

// Workers: sums of the own tokens.
template <int32_t format> __device__ __forceinline__ void sum_rows(const sum_kernel_args &args, ll_smem &smem, const standing &at)
{
    const int32_t items = args.tokens * args.pieces, step = item_step();
    // The same in all lanes, which read it apart while another stream may change it: those that part would never meet again.
    const uint32_t active = __shfl_sync(~0u, at.failed != 0 ? 0 : static_cast<uint32_t>(at.active), 0);

#pragma unroll 1
    for (int32_t item = first_item(); item < items; item += step) {
        const ll_piece of = piece_of(item, args.pieces);
        const int32_t row = part_row(args, of.row, threadIdx.x % 32);

        sum_piece<format>(args, smem, at, of, __ballot_sync(~0u, row >= 0) & active, row);
    }
}

// Until all blocks have stored their sums, so that one that has waited in vain may take them back.
__device__ __forceinline__ void await_blocks()
{
    if (gridDim.x == 1) return;
    cluster_arrive();
    cluster_wait();
}

template <int32_t format> __global__ void __launch_bounds__(kThreads, 1) sum_ll_kernel(const __grid_constant__ sum_kernel_args args)
{
    const await_args &a = args.await.a;
    ll_smem &smem = *dynamic_smem<ll_smem>();
    standing at;
    bool missed;

    griddepcontrol_wait();
    at = begin(args.await, smem, false);
    __syncthreads();
    if (threadIdx.x >= 32) {
        if (args.sends && at.failed == 0) return_results<format>(args, at);
        if (args.waits) sum_rows<format>(args, smem, at);
        finish(smem);
    } else {
        if (args.sends && blockIdx.x == 0) tell_flags(args.await, at);
        if (args.waits) keep_watch(args.await, smem, at);
    }
    if (!args.waits) return;
    missed = judge_words(a, smem, at, false);
    await_blocks();
    if (!missed) return;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < args.tokens * args.hidden; i += kThreads)
        number_store(args.y + i / args.hidden * args.y_stride_bytes, i % args.hidden, format, 0.0f);
}

// ---- The launches --------------------------------------------------------------------------------------------------------------

// A worker for each piece that comes, and so few blocks that all ranks may wait in all slots on one device, with half of it left.
launch_shape shape_of(const await_args &await, int32_t hidden, int32_t sms)
{
    const int64_t pieces = await.rows_most * (await.ranks - 1) * ll_pieces(hidden);
    int32_t most = std::min(kBlocksMax, LL_SMS / (2 * await.ranks * KERNEL_SLOTS_MAX)), blocks = 1;

    if (sms > 0) most = std::min(most, sms);
    while (2 * blocks <= most && blocks * LL_BLOCK_PIECES < pieces)
        blocks *= 2;
    return {static_cast<unsigned>(blocks), kThreads, sizeof(ll_smem), LAUNCH_EARLY, blocks > 1 ? static_cast<unsigned>(blocks) : 0};
}

await_kernel_args await_of(const await_args &from)
{
    await_kernel_args to = {from, copy_windows(from.peers, from.ranks), copy_windows(from.peer_beats, from.ranks), 0};

    to.a.is_ll = 1;
    return to;
}

typedef void (*sum_entry)(sum_kernel_args);
typedef void (*dispatch_entry)(dispatch_kernel_args);

sum_entry sum_entry_of(int32_t format)
{
    switch (format) {
    case FORMAT_F32:
        return sum_ll_kernel<FORMAT_F32>;
    case FORMAT_BF16:
        return sum_ll_kernel<FORMAT_BF16>;
    case FORMAT_F16:
        return sum_ll_kernel<FORMAT_F16>;
    default:
        return nullptr;
    }
}

dispatch_entry dispatch_entry_of(bool is_fp8)
{
    return is_fp8 ? dispatch_ll_kernel<1> : dispatch_ll_kernel<2>;
}

} // namespace

extern "C" int32_t ll_cuda_load(void)
{
    cudaError_t st = cudaSuccess;

    for (bool is_fp8 : {false, true})
        if (st == cudaSuccess) st = load_kernel(dispatch_entry_of(is_fp8));
    for (int32_t format : {FORMAT_F32, FORMAT_BF16, FORMAT_F16})
        if (st == cudaSuccess) st = load_kernel(sum_entry_of(format));
    return st;
}

extern "C" int32_t dispatch_ll_cuda(const struct dispatch_ll_args *from, void *stream)
{
    const dispatch_args &dispatch = from->dispatch;
    dispatch_kernel_args to = {};

    if (!can_push(dispatch) || dispatch.x_format == FORMAT_F32 || from->await.rows_most > ll_rows(dispatch.ranks, dispatch.hidden) || dispatch.tokens > from->await.rows_most)
        return cudaErrorInvalidValue;
    fill(dispatch, &to.push);
    to.push.pieces = static_cast<int32_t>(ll_pieces(dispatch.hidden));
    to.await = await_of(from->await);
    for (int32_t rank = 0; rank < dispatch.ranks; rank++)
        to.await.reached |= uint64_t{dispatch.to[rank].rows != nullptr || rank == dispatch.rank} << rank;
    to.in = from->in;
    to.words = static_cast<const unsigned char *>(from->words);
    to.words_stride_bytes = from->words_stride_bytes;
    to.row_words = static_cast<int32_t>(ll_row_words(dispatch.hidden, dispatch.wire_format));
    to.numbers = static_cast<int32_t>(ll_number_words(dispatch.hidden, dispatch.wire_format));
    to.sends = from->sends;
    to.waits = from->waits;
    return launch(dispatch_entry_of(dispatch.wire_format == FORMAT_FP8_BLOCK128), shape_of(from->await, dispatch.hidden, dispatch.sms), stream, to);
}

extern "C" int32_t sum_ll_cuda(const struct sum_ll_args *from, void *stream)
{
    const sum_args &sum = from->sum;
    const sum_entry entry = sum_entry_of(sum.format);
    sum_kernel_args to = {};

    if (entry == nullptr || sum.hidden % 8 != 0 || from->await.rows_most > ll_rows(sum.ranks, sum.hidden) || sum.tokens_earlier != 0)
        return cudaErrorInvalidValue;
    to.await = await_of(from->await);
    for (int32_t rank = 0; rank < sum.ranks; rank++) {
        to.peers[rank] = from->peers[rank];
        to.await.reached |= uint64_t{from->peers[rank].words != nullptr || rank == sum.rank} << rank;
    }
    to.counts = from->counts;
    to.send_slot = sum.send_slot;
    to.words = static_cast<const unsigned char *>(from->words);
    to.y = static_cast<unsigned char *>(sum.y);
    to.words_stride_bytes = from->words_stride_bytes;
    to.rows_stride_bytes = from->rows_stride_bytes;
    to.y_stride_bytes = sum.y_stride_bytes;
    to.hidden = sum.hidden;
    to.pieces = static_cast<int32_t>(ll_pieces(sum.hidden));
    to.tokens = sum.tokens;
    to.row_words = static_cast<int32_t>(ll_number_words(sum.hidden, sum.format));
    to.sends = from->sends;
    to.waits = from->waits;
    return launch(entry, shape_of(from->await, sum.hidden, sum.sms), stream, to);
}
