// The hidden states of a run, and where given the routing and the reference output: a model's
// golden file, or the layer file itself.

#ifndef MOXIE_HOSTS_CLI_INPUTS_H
#define MOXIE_HOSTS_CLI_INPUTS_H

#include "hosts/cli/experts.h"

struct inputs {
    const struct safetensors *file;
    const struct tensor *hidden_states; // [T, H] f32, bf16 or f16
    const struct tensor *topk_ids;      // [T, k] i32 or i64, or NULL: route by the model's router
    const struct tensor *topk_weights;  // [T, k] f32, or NULL like the ids
    const struct tensor *routed_output; // [T, H] f32, or NULL: nothing to compare with
    int64_t tokens;
    int32_t format; // MOXIE_FORMAT_* of the hidden states
};

// Checks presence, dtypes and shapes against the model.
int inputs_describe(struct inputs *inputs, const struct safetensors *file,
                    const struct model *model, struct fault *fault);

// How many of the file's ids name none of the experts, and add nothing to their tokens' rows.
int inputs_count_no_expert(const struct inputs *inputs, int64_t experts, int64_t *count,
                           struct fault *fault);

// A part of the tokens.
struct token_range {
    int64_t first, count;
};

// Contiguous parts; the first tokens % ranks ranks have one more.
struct token_range token_part(int64_t tokens, int64_t ranks, int64_t rank);

// One rank's tokens in memory. Every pointer is non-NULL, also without tokens.
struct rows {
    struct token_range range;
    uint8_t *x;     // [count, H] in the file's format
    uint8_t *ids;   // [count, k] int32, or int64 when wide_ids
    float *weights; // [count, k]
    int wide_ids;
};

// Reads the range; ids and weights are left undefined where the file has none. On failure nothing
// is held.
int rows_read(struct rows *rows, const struct inputs *inputs, struct token_range range,
              const struct model *model, struct fault *fault);
void rows_fini(struct rows *rows);

#endif
