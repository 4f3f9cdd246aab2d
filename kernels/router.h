// router: logits -> top-k ids and weights. Best first, ties to the lower id; a NaN never wins, and
// a token with fewer than top_k numbers gets -1 and weight 0 for the rest. Arithmetic in fp32 (fp64
// sums on the CPU).

#ifndef MOXIE_KERNELS_ROUTER_H
#define MOXIE_KERNELS_ROUTER_H

#include "kernels/types.h"

#define ROUTER_EXPERTS_MAX (1 << 20)
#define ROUTER_GROUPS_MAX  1024

enum scoring { SCORING_NONE, SCORING_SOFTMAX, SCORING_TOP_K_SOFTMAX, SCORING_SIGMOID };

struct router_args {
    const void *logits;           // [tokens, experts] of logits_format
    const float *correction_bias; // [experts], for the choice only; NULL: none
    void *ids;                    // out [tokens, top_k] int32 or int64
    float *weights;               // out [tokens, top_k]
    int64_t logits_stride_bytes, id_stride_bytes, weight_stride_bytes;
    int32_t logits_format; // F32, BF16 or F16
    int32_t id_bytes;      // 4 or 8
    int32_t tokens;
    int32_t experts;            // up to ROUTER_EXPERTS_MAX
    int32_t top_k;              // 1..KERNEL_TOP_K_MAX
    int32_t scoring;            // enum scoring
    int32_t renormalize;        // 1: weights /= sum + epsilon
    int32_t groups, groups_top; // groups <= 1: none, up to ROUTER_GROUPS_MAX; experts divide by it
    int32_t reserved;
    double renormalize_epsilon;
    double scaling_factor;
};

// EINVAL when groups, experts and top_k do not fit each other.
int32_t router_cpu(const struct router_args *args, void *stream);

#endif
