// dispatch: one row per (token, destination rank), quantised on the way, pushed into the
// destination's slab of this source rank; slots by prefix sum in token order. A rank's own rows
// never move. Flags are the transport's.

#ifndef MOXIE_KERNELS_DISPATCH_H
#define MOXIE_KERNELS_DISPATCH_H

#include "kernels/types.h"

// This source's slab at one destination. NULL rows with ids: the rank itself, whose rows stay where
// they are (row = token) while ids and weights are written. NULL rows and ids: a rank that is not
// active.
struct push_slab {
    void *rows;     // [cap, hidden] of wire_format
    void *scales;   // as row_slab.scales
    int32_t *ids;   // [cap, top_k] physical ids, -1: no expert
    float *weights; // [cap, top_k]
    struct round_count *count;
};

struct dispatch_args {
    const void *x;               // [tokens, hidden] of x_format
    const void *ids;             // [tokens, top_k] int32 or int64
    const void *weights;         // [tokens, top_k] of weight_format
    const int32_t *tokens_valid; // device, NULL: all; tokens with token_first + index >=
                                 // *tokens_valid have no expert
    int64_t token_first;         // of this round, in the forward's tokens
    const int32_t *expert_map;   // device [map_count]: id -> physical id; NULL: the identity
    const struct push_slab *to;  // [ranks], host array
    const int64_t *expert_first; // [ranks + 1], host array: first physical id of each rank
    const uint32_t *failed;      // device; not 0: nothing is sent, no count is written and the own
                                 // rank's ids become -1; NULL: never
    uint64_t *rows_sent;         // adds up the counts written; no other writer; NULL: not counted
    uint64_t *rows_told;         // the sum, again; mapped host memory; NULL: not told
    int32_t *send_slot; // out [tokens, ranks]: row in the destination's slab; -1: none, own rank
    int64_t x_stride_bytes, id_stride_bytes, weight_stride_bytes;
    int64_t row_stride_bytes, scale_stride_bytes; // of the destination slabs
    int64_t map_count;
    int32_t x_format, wire_format;
    int32_t id_bytes, weight_format;
    int32_t tokens, hidden, top_k;
    int32_t rows_cap; // rows of a destination slab; tokens past it are not sent
    int32_t ranks, rank;
    int32_t everywhere; // 1: every row to every rank (allgather), 0: to the owners of its experts
    int32_t pad_rows;   // everywhere: rows reported at least, those past `tokens` with ids -1
    int32_t round;      // for the counts
    int32_t sms;        // of a GPU, that the rows may take; 0: all
};

int32_t dispatch_cpu(const struct dispatch_args *args, void *stream);

#endif
