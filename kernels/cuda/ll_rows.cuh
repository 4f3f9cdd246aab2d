// What dispatch_ll does with rows: words of the own tokens go out, and words of the peers' become rows. Included by ll.cu.

#ifndef MOXIE_KERNELS_CUDA_LL_ROWS_CUH
#define MOXIE_KERNELS_CUDA_LL_ROWS_CUH

#include "kernels/cuda/ll_words.cuh"
#include "kernels/cuda/push_args.cuh"
#include "kernels/cuda/quantise.cuh"

namespace {

constexpr int32_t kBatch = 2; // parts of rows that a warp looks at at once

struct dispatch_kernel_args {
    push_args push;
    await_kernel_args await;
    ll_slab in;
    const unsigned char *words;
    int64_t words_stride_bytes;
    int32_t numbers, row_words; // words of a row
    int32_t sends, waits;
};

// ---- Out -----------------------------------------------------------------------------------------------------------------------

// Eight numbers of a lane as words that go out: as they are, or as e4m3 with their group's scale.
template <int32_t words> struct outgoing {
    uint64_t values[words];
    float scale;
};

template <int32_t words> __device__ __forceinline__ outgoing<words> code_eight(const push_args &a, const uint4 &held)
{
    outgoing<words> to = {};

    if constexpr (words == 1) {
        float values[kFp8Lane];
        fp8_eight eight;

        unpack_8(held, a.x_format == FORMAT_BF16, values);
        eight = fp8_code(values, fp8_largest(values));
        to.values[0] = pack(eight.codes.x, eight.codes.y);
        to.scale = eight.scale;
    } else {
        to.values[0] = pack(held.x, held.y);
        to.values[1] = pack(held.z, held.w);
    }
    return to;
}

// To which ranks the token of this lane goes, a bit each.
__device__ __forceinline__ uint32_t ranks_of_token(const push_args &a, const standing &at, int64_t valid)
{
    const int32_t token = threadIdx.x % 32;

    if (at.failed != 0 || token >= a.tokens) return 0;
    return static_cast<uint32_t>(owners<1>(a, valid, token) & at.active & ~(uint64_t{1} << a.rank));
}

// Rows that go to a rank, as bits of their tokens; for the whole warp.
__device__ __forceinline__ uint32_t tokens_to(uint32_t ranks, int32_t rank)
{
    return __ballot_sync(~0u, (ranks >> rank & 1) != 0);
}

// The herald: how many rows each rank gets, to that and to the host.
__device__ __forceinline__ void send_counts(const dispatch_kernel_args &args, const standing &at, uint32_t ranks, uint64_t sent)
{
    const push_args &a = args.push;
    const int32_t own = threadIdx.x;
    int32_t rows = 0;

#pragma unroll 1
    for (int32_t rank = 0; rank < a.ranks; rank++) {
        const int32_t wanted = __popc(tokens_to(ranks, rank));

        if (own == rank) rows = wanted;
        if (is_peer(at.active, rank, a.rank)) sent += rows_counted(a, wanted);
    }
    if (at.failed != 0) return;
    if (own < a.ranks && is_peer(at.active, own, a.rank))
        store_word(static_cast<unsigned char *>(a.to[own].rows), 0, pack_count(rows_counted(a, rows), rows, a.round), flag_of(at, false));
    if (own == 0) tell_rows(a, sent);
}

// A lane's id and weight of a token.
__device__ __forceinline__ uint64_t routing_of(const push_args &a, int64_t valid, int32_t token)
{
    const int32_t lane = threadIdx.x % 32;

    if (lane >= a.top_k) return 0;
    return pack(physical_id(a, valid, token, lane), __float_as_uint(number_load(a.weights + token * a.weight_stride_bytes, lane, a.weight_format)));
}

// Workers of the first block, which takes back ids where a wait has failed: the routing of the own rows, which stay where they are.
__device__ __forceinline__ void keep_routing(const push_args &a, const standing &at)
{
    const int64_t valid = at.failed != 0 ? 0 : tokens_valid(a);
    const push_slab &own = a.to[a.rank];
    const int32_t lane = threadIdx.x % 32;

#pragma unroll 1
    for (int32_t token = own_worker(); token < a.tokens; token += kWorkers) {
        const uint64_t routing = routing_of(a, valid, token);

        if (lane >= a.top_k) continue;
        own.ids[token * a.top_k + lane] = static_cast<int32_t>(routing);
        own.weights[token * a.top_k + lane] = __uint_as_float(static_cast<uint32_t>(routing >> 32));
    }
}

// A piece of a token's row to every rank that it goes to, from the rank after the own one on, and with the first its routing.
template <int32_t words>
__device__ __forceinline__ void send_piece(const dispatch_kernel_args &args, const outgoing<words> &out, const ll_piece &at, uint32_t ranks, int64_t valid,
                                           uint64_t tag)
{
    const push_args &a = args.push;
    const int32_t lane = threadIdx.x % 32, token = at.row, piece = at.piece;
    const uint64_t scales = pack(__float_as_uint(__shfl_sync(~0u, out.scale, 0)), __float_as_uint(__shfl_sync(~0u, out.scale, kFp8Group / kFp8Lane)));
    const uint64_t routing = piece == 0 ? routing_of(a, valid, token) : 0;

#pragma unroll 1
    for (int32_t turn = 1; turn < a.ranks; turn++) {
        const int32_t rank = a.rank + turn < a.ranks ? a.rank + turn : a.rank + turn - a.ranks;
        const uint32_t tokens = tokens_to(ranks, rank);
        const int32_t slot = (tokens >> token & 1) != 0 ? __popc(tokens & ((1u << token) - 1)) : -1;
        unsigned char *row;

        if (piece == 0 && lane == 0) a.send_slot[token * a.ranks + rank] = slot;
        if (slot < 0) continue;
        row = static_cast<unsigned char *>(a.to[rank].rows) + (1 + slot * args.row_words) * LL_WORD_BYTES;
#pragma unroll
        for (int32_t i = 0; i < words; i++)
            store_word(row, LL_ROUTING_WORDS + (piece * words + i) * 32 + lane, out.values[i], tag);
        if (words == 1 && lane == 0) store_word(row, LL_ROUTING_WORDS + args.numbers + piece, scales, tag);
        if (piece == 0 && lane < a.top_k) store_word(row, lane, routing, tag);
    }
}

// Workers.
template <int32_t words> __device__ __forceinline__ void send_rows(const dispatch_kernel_args &args, const standing &at)
{
    const push_args &a = args.push;
    const int32_t items = a.tokens * a.pieces, step = item_step();
    uint32_t ranks = 0;
    int64_t valid = 0;

#pragma unroll 1
    for (int32_t item = first_item(); item < items; item += step) {
        const ll_piece of = piece_of(item, a.pieces);
        uint4 held = {};

        if (of.column < a.hidden) held = *reinterpret_cast<const uint4 *>(a.x + of.row * a.x_stride_bytes + of.column * 2);
        if (item == first_item()) { // while the first numbers are under way
            valid = at.failed != 0 ? 0 : tokens_valid(a);
            ranks = ranks_of_token(a, at, valid);
        }
        send_piece(args, code_eight<words>(a, held), of, ranks, valid, flag_of(at, false));
    }
}

// ---- In ------------------------------------------------------------------------------------------------------------------------

// Words of 32 lanes: part 0 of a row is its routing, which the first block alone takes, since ids and counts have to agree.
struct ll_part {
    int32_t rank, row, part; // rank -1: none
};

// `parts`: of the rows of one rank from one source.
__device__ __forceinline__ ll_part part_of(const await_args &a, const standing &at, int32_t item, int32_t parts, int32_t first)
{
    const int32_t flat = item / parts, rank = flat / a.rows_most;

    return {rank < a.ranks && is_peer(at.active, rank, a.rank) ? rank : -1, flat - rank * a.rows_most, item - flat * parts + first};
}

// Puts a lane's word of numbers or scales where a slab has it.
template <int32_t words> __device__ __forceinline__ void take_word(const dispatch_kernel_args &args, const ll_part &of, uint64_t value)
{
    const push_args &a = args.push;
    const ll_slab &in = args.in;
    const int32_t index = index_of(of.rank, a.rank), lane = threadIdx.x % 32, number = (of.part - 1) * 32 + lane, pair = number - args.numbers;
    const int32_t piece = (of.part - 1) / words, word = (of.part - 1) % words, column = piece * kPieceColumns + lane * kFp8Lane;
    const uint32_t low = static_cast<uint32_t>(value), high = static_cast<uint32_t>(value >> 32);

    if (pair < 0) {
        unsigned char *row = in.rows + index * in.rows_slab_bytes + of.row * a.row_stride_bytes;

        if (column < a.hidden) *reinterpret_cast<uint2 *>(row + (column / kFp8Lane * words + word) * 8) = {low, high};
    } else {
        uint32_t *scales = reinterpret_cast<uint32_t *>(in.scales + index * in.scales_slab_bytes + of.row * a.scale_stride_bytes) + 2 * pair;

        scales[0] = low;
        if ((2 * pair + 1) * kFp8Group < a.hidden) scales[1] = high;
    }
}

// Rows that were sent, of a count that is not refused.
__device__ __forceinline__ int32_t rows_taken(const await_args &a, uint64_t counted)
{
    const ll_count count = unpack_count(counted);

    return count.round == a.round && count.rows <= a.rows_most ? count.sent : 0;
}

// A lane's id and weight, of a row that was sent or only reported; none of a row that is not there, where products count ids of all ranks.
__device__ __forceinline__ void take_routing(const dispatch_kernel_args &args, const ll_part &of, const ll_count &count, uint64_t value)
{
    const push_args &a = args.push;
    const ll_slab &in = args.in;
    const int32_t lane = threadIdx.x % 32, index = index_of(of.rank, a.rank), at = (of.row * a.top_k + lane) * 4;
    const bool is_sent = of.row < count.sent;

    if (lane >= a.top_k || (of.row >= count.rows && !in.ids_by_rank)) return;
    *reinterpret_cast<int32_t *>(in.ids + (in.ids_by_rank ? of.rank : index) * in.ids_slab_bytes + at) = is_sent ? static_cast<int32_t>(value) : -1;
    *reinterpret_cast<uint32_t *>(in.weights + index * in.weights_slab_bytes + at) = is_sent ? static_cast<uint32_t>(value >> 32) : 0;
}

// Some parts of rows at once: looks at their words, and at the count of their source, until they are there, or once more when nobody need
// wait any longer. A count that is refused anyway is waited for alone.
template <int32_t of_eight>
__device__ __forceinline__ void take_parts(const dispatch_kernel_args &args, ll_smem &smem, const standing &at, const ll_part (&parts)[kBatch])
{
    const await_args &a = args.await.a;
    const uint64_t tag = flag_of(at, false);
    const int32_t lane = threadIdx.x % 32;
    tagged words[kBatch] = {}, counts[kBatch] = {};
    bool are_there[kBatch], all_there, is_over;

    for (;; spin_pause(kPauseNs)) {
        is_over = __shfl_sync(~0u, read_anew(smem.ended), 0) != 0;
        all_there = true;
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            const int32_t word = parts[i].part * 32 + lane;
            const unsigned char *from;

            if (parts[i].rank < 0) continue;
            from = args.words + index_of(parts[i].rank, a.rank) * args.words_stride_bytes;
            if (lane == 0) counts[i] = load_tagged(from); // or all lanes' loads wait for that line in turns
            if (word < args.row_words) words[i] = load_tagged(from + (1 + parts[i].row * args.row_words + word) * LL_WORD_BYTES);
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; i++) {
            const int32_t word = parts[i].part * 32 + lane;
            const bool has_word = parts[i].part > 0 ? word < args.row_words : lane < args.push.top_k;

            counts[i] = {__shfl_sync(~0u, counts[i].value, 0), __shfl_sync(~0u, counts[i].tag, 0)};
            are_there[i] = parts[i].rank < 0 || (counts[i].tag == tag && (!has_word || words[i].tag == tag || parts[i].row >= rows_taken(a, counts[i].value)));
            all_there &= are_there[i];
        }
        if (is_over || __all_sync(~0u, all_there)) break;
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; i++) {
        const ll_count count = unpack_count(counts[i].value);

        if (parts[i].rank < 0) continue;
        if (!are_there[i]) {
            miss(smem, parts[i].rank);
        } else if (parts[i].part == 0) {
            if (lane == 0) smem.told[parts[i].rank] = {count.rows, count.round};
            take_routing(args, parts[i], count, words[i].value);
        } else if (parts[i].row < rows_taken(a, counts[i].value) && parts[i].part * 32 + lane < args.row_words) {
            take_word<of_eight>(args, parts[i], words[i].value);
        }
    }
}

// Workers: the first block's take routing before the rest.
template <int32_t of_eight> __device__ __forceinline__ void take_rows(const dispatch_kernel_args &args, ll_smem &smem, const standing &at)
{
    const await_args &a = args.await.a;
    const int32_t rows = a.ranks * a.rows_most, parts = (args.row_words + 31) / 32 - 1, routings = blockIdx.x == 0 ? rows : 0;
    const int32_t end = routings + (rows * parts - static_cast<int32_t>(blockIdx.x) + static_cast<int32_t>(gridDim.x) - 1) / static_cast<int32_t>(gridDim.x);
    const auto part_at = [&](int32_t at_own) {
        if (at_own < routings) return part_of(a, at, at_own, 1, 0);
        return part_of(a, at, (at_own - routings) * static_cast<int32_t>(gridDim.x) + static_cast<int32_t>(blockIdx.x), parts, 1);
    };

#pragma unroll 1
    for (int32_t first = own_worker(); first < end; first += kBatch * kWorkers)
        take_parts<of_eight>(args, smem, at, {part_at(first), part_at(first + kWorkers)});
}

// The first block: where products count ids of all ranks, none behind the rows that are counted, whatever a peer has written since.
__device__ __forceinline__ void clear_ids(const await_args &a, const round_count *told, bool failed)
{
    if (a.ids == nullptr) return;
#pragma unroll 1
    for (int32_t i = threadIdx.x; i < a.ranks * a.rows_most * a.top_k; i += kThreads) {
        const int32_t flat = i / a.top_k, rank = flat / a.rows_most;

        if (failed || flat - rank * a.rows_most >= told[rank].rows) a.ids[i] = -1;
    }
}

} // namespace

#endif
