// record: what every token of a layer chose, as physical ids; -1 where it is no expert or the token
// is padding.

#ifndef MOXIE_KERNELS_RECORD_H
#define MOXIE_KERNELS_RECORD_H

#include "kernels/types.h"

struct record_args {
    const void *ids; // [tokens, top_k] int32 or int64
    int64_t id_stride_bytes;
    const int32_t *expert_map;   // device [map_count]: id -> physical id; NULL: itself
    const int32_t *tokens_valid; // device; NULL: all. Tokens from *tokens_valid - token_first on
                                 // are padding
    int32_t *out;                // out [tokens, top_k], rows out_stride apart
    int64_t map_count;
    int64_t token_first;
    int64_t out_stride; // int32s
    int32_t id_bytes;   // 4 or 8
    int32_t tokens;
    int32_t top_k;
    int32_t experts;      // ids (of expert_map, what it gives) are 0..experts - 1
    int32_t expert_first; // of which the first is this physical one
};

int32_t record_cpu(const struct record_args *args, void *stream);

#endif
