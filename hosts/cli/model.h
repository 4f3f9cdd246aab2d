// What one MoE layer is, as the checkpoint's config.json or a layer file's metadata describes it.

#ifndef MOXIE_HOSTS_CLI_MODEL_H
#define MOXIE_HOSTS_CLI_MODEL_H

#include "hosts/cli/checkpoint.h"

#define MODEL_FAMILIES_BYTES 256

struct model {
    int64_t hidden, intermediate, experts, top_k;
    char family[32];        // "qwen3_moe"; "" when unknown
    const char *activation; // a word of the configuration key `activation`
    double alpha, limit;    // swigluoai; limit 0: none
    int weight_on_input;    // the router weight multiplies the expert's input
    int scoring;            // MOXIE_SCORING_*, or 0: no router is known for this family
    int renormalize;
    int router_bias, correction_bias; // its router has one, and is another without
    char unrouted[256]; // why the router that is described is not one that is known; "": it is
    int64_t groups, groups_top;
    double epsilon;        // added to the renormalising sum
    double scaling;        // routed scaling factor
    int fused_rows_in;     // fused experts are [E, K, N]
    int fused_interleaved; // and their gate and up rows alternate
};

// Whether its experts have a gate beside the up projection: all activations but relu2 do.
int model_is_gated(const struct model *model);

// The families whose router is known, in words.
void model_families(char text[MODEL_FAMILIES_BYTES]);

// The part of a config.json that has the language model's sizes: of models of several modalities it
// is a level or two down.
const json_t *model_language(const json_t *config);

// What that part says, key by key, for who does not need all of it.
enum model_size { MODEL_HIDDEN, MODEL_INTERMEDIATE, MODEL_EXPERTS, MODEL_TOP_K, MODEL_SIZES };
const char *model_size_key(enum model_size size); // of the configuration
int model_size(const json_t *language, enum model_size size, int64_t *out, struct fault *fault);
// What the family says and config.json does not; first.
void model_family(struct model *model, const json_t *language);
// Leaves NULL where neither says any.
int model_activation(struct model *model, const json_t *language, struct fault *fault);

int model_from_config(struct model *model, const struct checkpoint *checkpoint,
                      struct fault *fault);
int model_from_layer_file(struct model *model, const struct safetensors *file, struct fault *fault);

#endif
