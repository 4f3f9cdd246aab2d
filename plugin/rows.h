// Received rows and result rows as hosts and dispatchers describe them, checked and turned into
// what kernels read.

#ifndef MOXIE_PLUGIN_ROWS_H
#define MOXIE_PLUGIN_ROWS_H

#include "kernels/route.h"
#include "plugin/plan.h"

// moxie_rows as kernels see it. Slab arrays live on the caller's stack; of `slabs`, those past
// slabs_count are not set.
struct rows_view {
    const int32_t *expert_counts; // EXPERT_ layouts
    const int32_t *expert_map;
    int64_t map_count;
    int64_t expert_first; // subtracted from (mapped) ids
    int64_t pairs_max;    // pairs that route may make
    int32_t layout;
    int32_t by; // enum route_by
    int32_t slabs_count;
    int32_t rows_cap;        // flat rows per slab
    int32_t rows_per_expert; // EXPERT_MASKED
    int32_t top_k;           // 1 in EXPERT_ layouts
    struct row_slab slabs[MOXIE_RANKS_MAX];
};

struct out_view {
    int32_t slabs_count;
    int32_t rows_cap;
    struct out_slab slabs[MOXIE_RANKS_MAX];
};

// Checks every tensor, and that the rows fit the plan (MOXIE_E_CAPACITY with both numbers and
// `explained`).
int32_t rows_read(const moxie_rows *rows, const struct limits *limits, moxie_device device,
                  const char *explained, struct rows_view *view, moxie_error *error);

// Of rows that have been read: MOXIE_E_CAPACITY when EXPERT_MASKED counts come to more than the
// plan holds. Those of a GPU cannot be read here, and route drops what is past it.
int32_t rows_check_counts(const struct rows_view *view, const struct limits *limits,
                          moxie_device device, const char *explained, moxie_error *error);

// A GPU reads rows 16 bytes at a time: MOXIE_E_UNSUPPORTED naming the tensor when they lie
// otherwise.
int32_t rows_check_aligned(const char *name, const void *rows, int64_t stride_bytes,
                           moxie_error *error);

// The results of `in`: checks that `out` has a row for every row of it.
int32_t rows_out(const moxie_rows *out, const struct rows_view *in, const struct limits *limits,
                 moxie_device device, struct out_view *view, moxie_error *error);

// Rows that belong to no others, as many as fit the plan. Of a RANK_MAJOR `out` those that its
// counts say have a result.
int32_t rows_out_alone(const moxie_rows *out, const struct limits *limits, moxie_device device,
                       struct out_view *view, moxie_error *error);

#endif
