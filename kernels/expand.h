// expand: copies routed rows into a layout by expert, for runners that want one. The inverse is
// combine with row_index as row_pair.

#ifndef MOXIE_KERNELS_EXPAND_H
#define MOXIE_KERNELS_EXPAND_H

#include "kernels/types.h"

struct expand_args {
    const struct row_slab *slabs; // [slabs_count], host array
    const int32_t *expert_offset; // [experts + 1], from route
    const int32_t *pair_row;      // [pairs]
    const float *pair_weight;     // [pairs]
    const int32_t *row_pair;      // [slabs_count * rows_cap, top_k]
    void *rows; // out [rows, hidden], or [experts, rows_per_expert, hidden]; `format` of the slabs
    void *scales;       // out, as row_slab.scales; NULL when the slabs have none
    float *weights;     // out, one per row
    int32_t *counts;    // out: prefix sums [experts + 1], or counts [experts]
    int32_t *row_index; // out [slabs_count * rows_cap, top_k]: expanded row, -1: none
    int64_t row_stride_bytes, scale_stride_bytes;
    int32_t experts;
    int32_t slabs_count;
    int32_t rows_cap;
    int32_t rows_per_expert; // of a masked layout
    int32_t hidden;
    int32_t top_k;
    int32_t masked; // 0: rows of the experts follow each other
};

int32_t expand_cpu(const struct expand_args *args, void *stream);

#endif
