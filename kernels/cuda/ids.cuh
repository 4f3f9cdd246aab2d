// Expert ids as hosts and peers write them: int32 or int64, any value.

#ifndef MOXIE_KERNELS_CUDA_IDS_CUH
#define MOXIE_KERNELS_CUDA_IDS_CUH

#include "kernels/route.h"

#include <cuda_runtime.h>

// Of launches that may read before they have waited: past the L1, which may be older than what they read.
enum read_past { READ_CACHED, READ_PAST_L1 };

template <read_past past = READ_CACHED, class Number> __device__ __forceinline__ Number number_read(const Number *at)
{
    return past == READ_PAST_L1 ? __ldcg(at) : *at;
}

template <read_past past = READ_CACHED> __device__ __forceinline__ int64_t id_read(const void *ids, int64_t index, int32_t id_bytes)
{
    if (id_bytes == 8) return number_read<past>(static_cast<const long long *>(ids) + index);
    return number_read<past>(static_cast<const int32_t *>(ids) + index);
}

// What an id, or what the map says of it, is counted from `first`: 0..limit-1, or -1 for "no expert".
template <read_past past = READ_CACHED>
__device__ __forceinline__ int32_t id_mapped(const int32_t *map, int64_t map_count, int64_t id, int64_t first, int64_t limit)
{
    if (map != nullptr) {
        if (id < 0 || id >= map_count) return -1;
        id = number_read<past>(map + id);
    }
    return id >= first && id - first < limit ? static_cast<int32_t>(id - first) : -1;
}

// Ids of one slab, as route reads them, or of several that follow each other.
struct slab_ids {
    const unsigned char *ids; // [rows, top_k]
    const int32_t *rows_valid; // NULL: all
    const int32_t *expert_map;
    int64_t row_stride_bytes, map_count, expert_first;
    int32_t id_bytes, rows, top_k;
};

static inline slab_ids ids_of(const route_args &from)
{
    const row_slab &slab = from.slabs[0];
    const bool is_one = from.slabs_count == 1;

    return {static_cast<const unsigned char *>(slab.ids),
            is_one ? slab.count : nullptr,
            from.expert_map,
            slab.id_stride_bytes,
            from.map_count,
            from.expert_first,
            slab.id_bytes,
            is_one ? min(slab.cap, from.rows_cap) : from.slabs_count * from.rows_cap,
            from.top_k};
}

// Rows that are valid.
template <read_past past = READ_CACHED> __device__ __forceinline__ int32_t rows_in(const slab_ids &from)
{
    int32_t rows = from.rows;

    if (from.rows_valid != nullptr) rows = min(rows, max(number_read<past>(from.rows_valid), 0));
    return rows;
}

// The local expert of a row's choice, -1: none; whether the row is valid is another question.
template <read_past past = READ_CACHED>
__device__ __forceinline__ int32_t expert_in(const slab_ids &from, int32_t row, int32_t choice, int32_t experts)
{
    const int64_t id = id_read<past>(from.ids + row * from.row_stride_bytes, choice, from.id_bytes);

    return id_mapped<past>(from.expert_map, from.map_count, id, from.expert_first, experts);
}

#endif
