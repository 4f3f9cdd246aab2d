// Expert ids as hosts and peers write them: int32 or int64, any value.

#ifndef MOXIE_KERNELS_CUDA_IDS_CUH
#define MOXIE_KERNELS_CUDA_IDS_CUH

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

#endif
