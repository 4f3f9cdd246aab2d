// route: ids of all received rows -> the pairs of every local expert. No host sync; one pass
// counts, one prefix sum, one pass fills. Ids that belong to no local expert fall out here.

#ifndef MOXIE_KERNELS_ROUTE_H
#define MOXIE_KERNELS_ROUTE_H

#include "kernels/types.h"

enum route_by {
    ROUTE_BY_IDS,    // rows carry ids: STANDARD and RANK_MAJOR
    ROUTE_BY_PREFIX, // EXPERT_CONTIGUOUS: expert_counts is a prefix sum [experts + 1]
    ROUTE_BY_COUNTS, // EXPERT_MASKED: expert_counts is [experts], expert e's rows start at e *
                     // rows_per_expert
};

struct route_args {
    const struct row_slab *slabs; // [slabs_count], host array
    const int32_t *expert_map;    // device [map_count]: what an id stands for; NULL: itself. Minus
                                  // expert_first: the expert
    const int32_t *expert_counts; // device, ROUTE_BY_PREFIX and _COUNTS
    int32_t *expert_offset; // out [experts + 1]: first pair of each expert; the last is the number
                            // of pairs
    int32_t *pair_row;      // out [pairs_max]: flat row of each pair; of ids that gemms_can_count,
                            // a row behind all pairs, too, for as many as there are positions
    float *pair_weight;     // out [pairs_max]: router weight of each pair, 1 without weights
    uint32_t *progress; // out [GEMM_PROGRESS_WORDS + experts]: zeros, for gemms to count in, but
                        // that of GEMM_PROGRESS_LAUNCH, which is 2 more; NULL: not wanted
    int32_t *row_pair;  // out, ROUTE_BY_IDS [slabs_count * rows_cap, top_k]: pair of each position,
                        // -1: none
    void *scratch; // device, 4-byte aligned: nobody else uses it until the pairs are there. With
                   // route_scratch_bytes() many positions go to many blocks; with less, or NULL,
                   // one has them all
    int64_t scratch_bytes;
    int64_t pairs_max; // capacity; slabs_count * rows_cap * top_k fits; by expert: pairs past it
                       // are dropped
    int64_t map_count;
    int64_t expert_first; // first (mapped) id this rank owns
    int32_t experts;      // local experts
    int32_t slabs_count;
    int32_t rows_cap;        // rows of the largest slab
    int32_t rows_per_expert; // ROUTE_BY_COUNTS
    int32_t top_k;           // 1 for the layouts by expert
    int32_t by;              // enum route_by
};

#define ROUTE_BLOCKS_MAX 132 // of a GPU's SMs: a block takes most of one

// Of `positions` = slabs_count * rows_cap * top_k: two numbers each, and counts of each block.
static inline int64_t route_scratch_bytes(int64_t positions, int64_t experts)
{
    return 4 * (2 * positions + ROUTE_BLOCKS_MAX * (experts + KERNEL_RANKS_MAX + 2));
}

int32_t route_cpu(const struct route_args *args, void *stream);

#endif
