// Finds the experts of one layer in a checkpoint and loads those that a rank owns. The names,
// dtypes and shapes of the tensors decide the format; config.json is not asked, since they are what
// would be read:
//   <layer>.mlp.experts.E.{gate_proj,up_proj,down_proj}.weight        bf16, f16, f32 (Qwen,
//   DeepSeek)
//     with .weight_scale_inv                                          fp8 in 128 x 128 blocks
//     (DeepSeek-V3) with .weight_scale and .weight_scale_2                          nvfp4
//     (ModelOpt)
//   <layer>.block_sparse_moe.experts.E.{w1,w3,w2}.weight              the same (Mixtral)
//   <layer>.mlp.experts.E.{up_proj,down_proj}.weight                  the same, for relu2: no gate
//   <layer>.mlp.experts.{gate_up_proj,down_proj}[_bias]               fused bf16, f16, f32
//   (gpt-oss, Llama 4)
//     with _blocks and _scales                                        mxfp4 (gpt-oss)
// A layer file holds the fused names without a prefix; up_proj instead of gate_up_proj for relu2.

#ifndef MOXIE_HOSTS_CLI_EXPERTS_H
#define MOXIE_HOSTS_CLI_EXPERTS_H

#include "hosts/cli/model.h"
#include "hosts/cli/weights.h"

#define TENSOR_NAME_BYTES 256
#define LAYER_FILE        (-1) // instead of a layer's number

// Where a layer's experts and router are.
struct expert_layout {
    char prefix[TENSOR_NAME_BYTES]; // "model.layers.3.mlp.experts."
    const char *gate, *up, *down;   // per expert: "gate_proj", ...; fused: gate is both. Without
                                    // a gate it is the up projection, and up is NULL
    int fused;
    struct weights_shape w1, w2;             // all experts
    char router_weight[TENSOR_NAME_BYTES];   // "" where there is none
    char router_bias[TENSOR_NAME_BYTES];     // "" where there is none
    char correction_bias[TENSOR_NAME_BYTES]; // "" where there is none
};

// Where a loader puts what it reads, and what it tells meanwhile; `report` may be NULL.
struct load_target {
    struct device *device;
    void *ctx;
    void (*report)(void *ctx, double share);
};

// Checks names, dtypes and shapes of the first and the last expert.
int experts_describe(struct expert_layout *layout, struct checkpoint *checkpoint,
                     const struct model *model, int64_t layer, struct fault *fault);

// The check alone, for a layout whose names are found.
int experts_check(const struct expert_layout *layout, struct checkpoint *checkpoint,
                  struct fault *fault);

struct experts {
    struct weights w1, w2; // do not move
};

// The experts first..first+count-1, and no others.
struct expert_range {
    int64_t first, count;
};

// On failure nothing is held.
int experts_load(struct experts *experts, const struct expert_layout *layout,
                 struct checkpoint *checkpoint, struct expert_range range,
                 const struct load_target *target, struct fault *fault);
// Accepts a zeroed struct.
void experts_fini(struct experts *experts);

#endif
