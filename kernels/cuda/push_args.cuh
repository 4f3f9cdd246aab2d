// What a rank's tokens are on their way to the others: arguments of the kernels, and to which rank a token goes. Included by dispatch.cu and
// ll.cu.

#ifndef MOXIE_KERNELS_CUDA_PUSH_ARGS_CUH
#define MOXIE_KERNELS_CUDA_PUSH_ARGS_CUH

#include "kernels/cuda/ids.cuh"
#include "kernels/cuda/search.cuh"
#include "kernels/dispatch.h"

#include <cuda_runtime.h>

namespace {

struct push_args {
    push_slab to[KERNEL_RANKS_MAX];
    int32_t expert_first[KERNEL_RANKS_MAX + 1];
    const unsigned char *x, *ids, *weights;
    const int32_t *tokens_valid, *expert_map;
    const uint32_t *failed;
    uint64_t *rows_sent, *rows_told;
    int32_t *send_slot;
    int64_t x_stride_bytes, id_stride_bytes, weight_stride_bytes, row_stride_bytes, scale_stride_bytes;
    int64_t token_first, map_count;
    int32_t x_format, id_bytes, weight_format, tokens, hidden, top_k, rows_cap, ranks, rank, everywhere, pad_rows, round;
    int32_t pieces, piece_columns;
};

// Tokens of this round that may have an expert.
__device__ __forceinline__ int64_t tokens_valid(const push_args &a)
{
    int64_t valid = a.tokens_valid == nullptr ? a.tokens : *a.tokens_valid - a.token_first;

    return min(max(valid, static_cast<int64_t>(0)), static_cast<int64_t>(a.tokens));
}

// The physical id at one position, -1 for "no expert". The id is read before it is known whether it counts, not after.
__device__ __forceinline__ int32_t physical_id(const push_args &a, int64_t valid, int32_t token, int32_t t)
{
    int64_t id = id_read(a.ids + token * a.id_stride_bytes, t, a.id_bytes);

    return id_mapped(a.expert_map, a.map_count, token < valid ? id : -1, 0, a.expert_first[a.ranks]);
}

// Rows that the count reports without an expert, up to this one.
__device__ __forceinline__ int32_t padded(const push_args &a)
{
    return a.everywhere ? min(a.pad_rows, a.rows_cap) : 0;
}

// What the count of a rank says to which so many tokens go.
__device__ __forceinline__ int32_t rows_counted(const push_args &a, int32_t wanted)
{
    return max(min(wanted, a.rows_cap), padded(a));
}

// Bit r: rank r owns an expert of the token. So many ids are under way at once.
template <int32_t at_once> __device__ __forceinline__ uint64_t owners(const push_args &a, int64_t valid, int32_t token)
{
    uint64_t ranks = 0;

    if (token >= a.tokens) return 0;
    if (a.everywhere) return ~static_cast<uint64_t>(0);

#pragma unroll at_once
    for (int32_t t = 0; t < a.top_k; t++) {
        int32_t id = physical_id(a, valid, token, t);

        if (id >= 0) ranks |= static_cast<uint64_t>(1) << last_at_most(a.expert_first, a.ranks, id);
    }
    return ranks;
}

__device__ __forceinline__ void tell_rows(const push_args &a, uint64_t sent)
{
    *a.rows_sent = sent;
    if (a.rows_told != nullptr) *a.rows_told = sent;
}

bool can_push(const dispatch_args &from)
{
    bool is_number = from.x_format == FORMAT_F32 || from.x_format == FORMAT_BF16 || from.x_format == FORMAT_F16;

    return is_number && (from.wire_format == from.x_format || from.wire_format == FORMAT_FP8_BLOCK128) && from.hidden % 8 == 0 &&
           from.top_k <= KERNEL_TOP_K_MAX && from.ranks <= KERNEL_RANKS_MAX;
}

void fill(const dispatch_args &from, push_args *to)
{
    for (int32_t rank = 0; rank < from.ranks; rank++)
        to->to[rank] = from.to[rank];
    for (int32_t rank = 0; rank <= from.ranks; rank++)
        to->expert_first[rank] = static_cast<int32_t>(from.expert_first[rank]);
    to->x = static_cast<const unsigned char *>(from.x);
    to->ids = static_cast<const unsigned char *>(from.ids);
    to->weights = static_cast<const unsigned char *>(from.weights);
    to->tokens_valid = from.tokens_valid;
    to->expert_map = from.expert_map;
    to->failed = from.failed;
    to->rows_sent = from.rows_sent;
    to->rows_told = from.rows_told;
    to->send_slot = from.send_slot;
    to->x_stride_bytes = from.x_stride_bytes;
    to->id_stride_bytes = from.id_stride_bytes;
    to->weight_stride_bytes = from.weight_stride_bytes;
    to->row_stride_bytes = from.row_stride_bytes;
    to->scale_stride_bytes = from.scale_stride_bytes;
    to->token_first = from.token_first;
    to->map_count = from.map_count;
    to->x_format = from.x_format;
    to->id_bytes = from.id_bytes;
    to->weight_format = from.weight_format;
    to->tokens = from.tokens;
    to->hidden = from.hidden;
    to->top_k = from.top_k;
    to->rows_cap = from.rows_cap;
    to->ranks = from.ranks;
    to->rank = from.rank;
    to->everywhere = from.everywhere;
    to->pad_rows = from.pad_rows;
    to->round = from.round;
}

} // namespace

#endif
