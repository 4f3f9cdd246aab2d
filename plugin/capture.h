// What hosts read of past layers. The routed-experts capture: the physical ids that every layer
// chose, kept in one planned buffer int32 [dp_size * capture_tokens, num_layers, top_k], a slice
// per data-parallel rank, forward_tokens rows or more, where the ranks that share it may pad. The
// expert load: rows that each local expert has computed, int64 [num_layers,
// experts_local].

#ifndef MOXIE_PLUGIN_CAPTURE_H
#define MOXIE_PLUGIN_CAPTURE_H

#include "plugin/status.h"

// Rows [first, first + tokens) of the buffer, from ids int32 or int64 [tokens, top_k].
struct capture_rows {
    const void *ids;
    int64_t id_stride_bytes;
    int32_t id_bytes;
    int32_t tokens;
    const int32_t *expert_map; // id -> physical id; NULL: the identity
    int64_t map_count;
    int64_t row_first;           // in the whole buffer
    const int32_t *tokens_valid; // of the step: its tokens from there on have no expert; NULL: all
    int64_t token_first;         // in the step
    void *stream;                // the host's
    int32_t layer;
    int32_t are_local; // ids, and what expert_map gives, name local experts
};

// Every entry becomes -1 ("no expert"), where no dispatcher but the new one is alive.
int32_t capture_clear(moxie_instance *instance, moxie_error *error);

// The layer's counters of expert load become 0, with the first runner those of all layers; a no-op
// without them.
int32_t capture_clear_load(moxie_instance *instance, int32_t layer, moxie_error *error);

// Records in stream order; a no-op without the capture. The rows were checked by capture_check.
int32_t capture_record(moxie_instance *instance, const struct capture_rows *rows,
                       moxie_error *error);

// Rows of a step in a slice of `rows`.
struct capture_place {
    int64_t row;   // step.capture_row
    int64_t added; // of the ranks of the same DP rank before this one
    int64_t tokens, rows;
    int32_t listed; // 0: `added` is as many as they may have, by no rank_tokens
};

// MOXIE_E_CAPACITY when they would overrun it.
int32_t capture_check(const moxie_instance *instance, const struct capture_place *place,
                      moxie_error *error);

// The slice of captured->dp_rank and the counters of expert load as tensors.
int32_t capture_view(const moxie_instance *instance, moxie_captured *captured, moxie_error *error);

#endif
