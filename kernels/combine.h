// combine: a row's pairs, weighted and summed in fp32 in slot order, into one result row; rows
// without a local pair become zero. The destination is local memory or the slab a peer maps: the
// kernel cannot tell. sum: a token's result rows from all ranks, summed in fp32 in rank order.

#ifndef MOXIE_KERNELS_COMBINE_H
#define MOXIE_KERNELS_COMBINE_H

#include "kernels/types.h"

struct combine_args {
    const void *pair_out; // [pairs, hidden] of pair_format
    int64_t pair_stride_bytes;
    int64_t pairs;                // rows of pair_out; an index outside is "none"
    const int32_t *row_pair;      // [slabs_count * rows_cap, top_k], -1: none; NULL: by pair_row
    const int32_t *pair_row;      // flat row of each pair [*pairs_count]; other rows stay
    const int32_t *pairs_count;   // device, with pair_row: pairs in use
    const float *pair_weight;     // [pairs]; NULL: 1
    const struct out_slab *slabs; // [slabs_count], host array; one without rows is left out
    int32_t pair_format;          // F32, BF16 or F16
    int32_t slabs_count;
    int32_t slab_first; // whose rows a device may write first: another one on every rank
    int32_t rows_cap;
    int32_t hidden;
    int32_t top_k;
    int32_t sms;    // of a GPU, that it may take; 0: all
    int32_t routed; // 1: all but pair_out was there before the launch before this one began
    int32_t placed; // 1: rows with a pair are there, from down; the others become zero. One slab,
                    // row_pair, top_k 1
    int32_t spends; // 1: nobody reads pair_out after this, and what it holds may be lost
    float scale;    // multiplies the sum: routed_scaling_factor
};

struct sum_args {
    void *y;         // [tokens, hidden] of `format`; on entry this rank's own result rows
    void *y_earlier; // [tokens_earlier, hidden]: rows of the forward's rounds before this one
    int64_t y_stride_bytes;
    const void *const *parts; // host array [ranks]: rows that rank r returned, [cap, hidden]
    int64_t part_stride_bytes;
    const int32_t *send_slot;   // [tokens, ranks]: the token's row of parts[r], -1: none; the own
                                // rank's is not read
    const uint32_t *failed;     // device; not 0: y and y_earlier become zero; NULL: never
    const uint64_t *active_now; // device; NULL: `active`
    uint64_t active;            // bit r: rank r takes part
    int32_t format;             // F32, BF16 or F16
    int32_t tokens;
    int32_t hidden;
    int32_t ranks;
    int32_t rank;     // own: parts[rank] is unused
    int32_t rows_cap; // rows of each part; an index outside is "none"
    int32_t tokens_earlier;
    int32_t sms; // of a GPU, that it may take; 0: all
};

int32_t combine_cpu(const struct combine_args *args, void *stream);
int32_t sum_cpu(const struct sum_args *args, void *stream);

#endif
