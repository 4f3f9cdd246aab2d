// Expert ids as hosts and peers write them: int32 or int64, any value.

#ifndef MOXIE_KERNELS_CUDA_IDS_CUH
#define MOXIE_KERNELS_CUDA_IDS_CUH

#include <cuda_runtime.h>

__device__ __forceinline__ int64_t id_read(const void *ids, int64_t index, int32_t id_bytes)
{
    return id_bytes == 8 ? static_cast<const int64_t *>(ids)[index] : static_cast<const int32_t *>(ids)[index];
}

// What an id, or what the map says of it, is counted from `first`: 0..limit-1, or -1 for "no expert".
__device__ __forceinline__ int32_t id_mapped(const int32_t *map, int64_t map_count, int64_t id, int64_t first, int64_t limit)
{
    if (map != nullptr) {
        if (id < 0 || id >= map_count) return -1;
        id = map[id];
    }
    return id >= first && id - first < limit ? static_cast<int32_t>(id - first) : -1;
}

#endif
