// Expert ids as hosts and peers write them: int32 or int64, any value, read once.

#ifndef MOXIE_KERNELS_CPU_IDS_H
#define MOXIE_KERNELS_CPU_IDS_H

#include <stddef.h>
#include <stdint.h>

// Element `index` of an array of int32 (id_bytes 4) or int64, which may be written meanwhile.
static inline int64_t id_read(const void *ids, int64_t index, int32_t id_bytes)
{
    if (id_bytes == 8) return __atomic_load_n((const int64_t *)ids + index, __ATOMIC_RELAXED);
    return __atomic_load_n((const int32_t *)ids + index, __ATOMIC_RELAXED);
}

// What an id, or what the map says of it, is counted from `first`: 0..limit-1, or -1 for "no
// expert".
static inline int64_t id_mapped(const int32_t *map, int64_t map_count, int64_t id, int64_t first,
                                int64_t limit)
{
    if (map != NULL && (id < 0 || id >= map_count)) return -1;
    if (map != NULL) id = __atomic_load_n(map + id, __ATOMIC_RELAXED);
    return id >= first && id - first < limit ? id - first : -1;
}

#endif
