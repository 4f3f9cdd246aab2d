// Finds the experts and the router of one layer by the names that published checkpoints use.

#include "hosts/cli/experts.h"

#include <stdio.h>
#include <string.h>

struct naming {
    const char *probe; // of expert 0's gate, or of the fused gate and up
    const char *gate, *up, *down;
    int fused, gated; // without a gate the up projection stands in its place
};

static const struct naming namings[] = {
    {"0.gate_proj.weight", "gate_proj", "up_proj", "down_proj", 0, 1},
    {"0.w1.weight", "w1", "w3", "w2", 0, 1},
    {"gate_up_proj_blocks", "gate_up_proj", NULL, "down_proj", 1, 1},
    {"gate_up_proj", "gate_up_proj", NULL, "down_proj", 1, 1},
    {"0.up_proj.weight", "up_proj", NULL, "down_proj", 0, 0},
    {"up_proj", "up_proj", NULL, "down_proj", 1, 0},
};

// What stands before and after the layer's number.
static const char *const roots[] = {
    "model.layers.",
    "language_model.model.layers.",
    "model.language_model.layers.",
};

static const char *const modules[] = {"mlp.", "block_sparse_moe.", "feed_forward."};

#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

// Writes "model.layers.3.mlp." for candidate `index`. 0 past the last.
static int module_at(size_t index, int64_t layer, char module[TENSOR_NAME_BYTES])
{
    size_t root = index / LENGTH(modules);

    if (root >= LENGTH(roots)) return 0;
    (void)snprintf(module, TENSOR_NAME_BYTES, "%s%lld.%s", roots[root], (long long)layer,
                   modules[index % LENGTH(modules)]);
    return 1;
}

static const struct naming *probe(const struct checkpoint *checkpoint, const char *prefix,
                                  int gated)
{
    char name[2 * TENSOR_NAME_BYTES];

    for (size_t i = 0; i < LENGTH(namings); i++) {
        (void)snprintf(name, sizeof name, "%s%s", prefix, namings[i].probe);
        if (namings[i].gated == gated && checkpoint_has(checkpoint, name)) return &namings[i];
    }
    return NULL;
}

// Writes module + name to `out` when there is such a tensor.
static void note(const struct checkpoint *checkpoint, const char *module, const char *name,
                 char out[TENSOR_NAME_BYTES])
{
    char full[TENSOR_NAME_BYTES];

    if ((size_t)snprintf(full, sizeof full, "%s%s", module, name) < sizeof full &&
        checkpoint_has(checkpoint, full))
        (void)snprintf(out, TENSOR_NAME_BYTES, "%s", full);
}

static void find_router(struct expert_layout *layout, const struct checkpoint *checkpoint,
                        const char *module)
{
    note(checkpoint, module, "gate.weight", layout->router_weight);
    note(checkpoint, module, "router.weight", layout->router_weight);
    note(checkpoint, module, "router_weight", layout->router_weight);
    note(checkpoint, module, "gate.bias", layout->router_bias);
    note(checkpoint, module, "router.bias", layout->router_bias);
    note(checkpoint, module, "router_bias", layout->router_bias);
    note(checkpoint, module, "gate.e_score_correction_bias", layout->correction_bias);
    note(checkpoint, module, "e_score_correction_bias", layout->correction_bias);
}

static int find_names(struct expert_layout *layout, const struct checkpoint *checkpoint,
                      int64_t layer, int gated, struct fault *fault)
{
    const struct naming *naming = NULL;
    char module[TENSOR_NAME_BYTES] = "";

    if (layer == LAYER_FILE) naming = probe(checkpoint, layout->prefix, gated);
    for (size_t i = 0; layer != LAYER_FILE && naming == NULL && module_at(i, layer, module); i++) {
        (void)snprintf(layout->prefix, sizeof layout->prefix, "%.*sexperts.",
                       TENSOR_NAME_BYTES - 16, module);
        naming = probe(checkpoint, layout->prefix, gated);
    }
    if (naming == NULL && layer == LAYER_FILE)
        return fault_set(fault, EXIT_TROUBLE, "%s: no tensor %s; is this a layer file?",
                         checkpoint->files[0].path, gated ? "gate_up_proj" : "up_proj");
    if (naming == NULL)
        return fault_set(fault, EXIT_TROUBLE,
                         "%s: layer %lld holds no experts under a known name "
                         "(model.layers.%lld.mlp.experts.0.%s.weight and others); does it "
                         "exist, and is it a mixture-of-experts layer?",
                         checkpoint->folder, (long long)layer, (long long)layer,
                         gated ? "gate_proj" : "up_proj");
    layout->gate = naming->gate;
    layout->up = naming->up;
    layout->down = naming->down;
    layout->fused = naming->fused;
    find_router(layout, checkpoint, module);
    return EXIT_OK;
}

// A tensor of the first expert, or of all: of the projection, gate, up or down.
static void name_of(const struct expert_layout *layout, const char *projection, const char *suffix,
                    char name[2 * TENSOR_NAME_BYTES])
{
    (void)snprintf(name, (size_t)2 * TENSOR_NAME_BYTES, "%s%s%s%s", layout->prefix,
                   layout->fused ? "" : "0.", projection, suffix);
}

static int has_part(const struct checkpoint *checkpoint, const struct expert_layout *layout,
                    const char *projection, const char *suffix)
{
    char name[2 * TENSOR_NAME_BYTES];

    name_of(layout, projection, suffix, name);
    return checkpoint_has(checkpoint, name);
}

static int has_suffix(const struct checkpoint *checkpoint, const struct expert_layout *layout,
                      const char *suffix)
{
    return has_part(checkpoint, layout, layout->gate, suffix);
}

static int32_t plain_format(enum word word)
{
    switch (word) {
    case WORD_F32:
        return MOXIE_FORMAT_F32;
    case WORD_BF16:
        return MOXIE_FORMAT_BF16;
    case WORD_F16:
        return MOXIE_FORMAT_F16;
    default:
        return MOXIE_FORMAT_AUTO;
    }
}

// The name of the first projection that is stored with a bias; NULL: none is.
static const char *find_biased(const struct checkpoint *checkpoint,
                               const struct expert_layout *layout)
{
    const char *const projections[] = {layout->gate, layout->up, layout->down};

    for (size_t i = 0; i < LENGTH(projections); i++)
        if (projections[i] != NULL &&
            has_part(checkpoint, layout, projections[i], layout->fused ? "_bias" : ".bias"))
            return projections[i];
    return NULL;
}

// The dtype of a tensor named like the first expert's gate.
static int word_of(struct checkpoint *checkpoint, const struct expert_layout *layout,
                   const char *suffix, enum word *word, struct fault *fault)
{
    char name[2 * TENSOR_NAME_BYTES];
    struct located located;
    int st = EXIT_OK;

    name_of(layout, layout->gate, suffix, name);
    st = checkpoint_find(checkpoint, name, &located, fault);
    if (st == EXIT_OK) *word = located.tensor->word;
    return st;
}

static int find_format(struct expert_layout *layout, struct checkpoint *checkpoint, int32_t *format,
                       struct fault *fault)
{
    int blocks = layout->fused && has_suffix(checkpoint, layout, "_blocks");
    const char *suffix = blocks ? "_blocks" : layout->fused ? "" : ".weight";
    enum word word = WORD_UNKNOWN;
    int st = word_of(checkpoint, layout, suffix, &word, fault);

    if (st != EXIT_OK) return st;
    *format = plain_format(word);
    if (blocks && word == WORD_U8) *format = MOXIE_FORMAT_MXFP4;
    if (word == WORD_F8_E4M3 && has_suffix(checkpoint, layout, ".weight_scale_inv"))
        *format = MOXIE_FORMAT_FP8_BLOCK128;
    if (word == WORD_U8 && has_suffix(checkpoint, layout, ".weight_scale_2"))
        *format = MOXIE_FORMAT_NVFP4;
    if (*format != MOXIE_FORMAT_AUTO) return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED,
                     "experts stored as %s under %s are of no known format; known are F32, BF16, "
                     "F16, F8_E4M3 with weight_scale_inv, U8 with weight_scale and weight_scale_2 "
                     "(nvfp4), U8 blocks and scales (mxfp4)",
                     word_name(word), layout->prefix);
}

static int find_bias(struct expert_layout *layout, struct checkpoint *checkpoint, int32_t *format,
                     struct fault *fault)
{
    const char *biased = find_biased(checkpoint, layout);
    enum word word = WORD_UNKNOWN;
    int st = EXIT_OK;

    *format = MOXIE_FORMAT_AUTO;
    if (biased == NULL) return EXIT_OK;
    if (!layout->fused)
        return fault_set(fault, EXIT_REFUSED,
                         "%s0.%s.bias: experts that are stored one by one are known without "
                         "biases, and would be computed without",
                         layout->prefix, biased);
    TRY(word_of(checkpoint, layout, "_bias", &word, fault));
    *format = plain_format(word);
    if (*format == MOXIE_FORMAT_AUTO)
        TRY(fault_set(fault, EXIT_REFUSED, "biases stored as %s; F32, BF16 and F16 can be used",
                      word_name(word)));
out:
    return st;
}

// Whether fused experts are [E, K, N], by their own shapes, of which one tells, since outputs of
// the one are inputs of the other; what the family says where a file has neither.
static int are_rows_in(const struct expert_layout *layout, struct checkpoint *checkpoint,
                       const struct model *model)
{
    const int64_t wide = (model_is_gated(model) ? 2 : 1) * model->intermediate;
    const struct {
        const char *name;
        int64_t inputs, outputs;
    } sides[] = {{layout->down, model->intermediate, model->hidden},
                 {layout->gate, model->hidden, wide}};

    for (size_t i = 0; i < LENGTH(sides); i++) {
        char name[2 * TENSOR_NAME_BYTES];
        struct located located;
        struct fault none;
        const int64_t *shape;

        (void)snprintf(name, sizeof name, "%s%s", layout->prefix, sides[i].name);
        if (checkpoint_find(checkpoint, name, &located, &none) != EXIT_OK) continue;
        shape = located.tensor->shape;
        if (located.tensor->ndim != 3 || sides[i].inputs == sides[i].outputs) continue;
        if (shape[1] == sides[i].inputs && shape[2] == sides[i].outputs) return 1;
        if (shape[1] == sides[i].outputs && shape[2] == sides[i].inputs) return 0;
    }
    return model->fused_rows_in;
}

int experts_describe(struct expert_layout *layout, struct checkpoint *checkpoint,
                     const struct model *model, int64_t layer, struct fault *fault)
{
    struct weights_shape shape = {.experts = model->experts};
    int gated = model_is_gated(model);
    int st = EXIT_OK;

    *layout = (struct expert_layout){.gate = NULL};
    TRY(find_names(layout, checkpoint, layer, gated, fault));
    TRY(find_format(layout, checkpoint, &shape.format, fault));
    TRY(find_bias(layout, checkpoint, &shape.bias_format, fault));
    if (layout->fused && shape.format != MOXIE_FORMAT_MXFP4 &&
        are_rows_in(layout, checkpoint, model))
        shape.orientation = MOXIE_ROWS_IN;
    layout->w1 = shape;
    layout->w1.order =
        layout->fused && model->fused_interleaved ? MOXIE_ORDER_INTERLEAVED : MOXIE_ORDER_GATE_UP;
    if (!gated) layout->w1.order = MOXIE_ORDER_PLAIN;
    layout->w1.outputs = (gated ? 2 : 1) * model->intermediate;
    layout->w1.inputs = model->hidden;
    layout->w2 = shape;
    layout->w2.order = MOXIE_ORDER_PLAIN;
    layout->w2.outputs = model->hidden;
    layout->w2.inputs = model->intermediate;
    TRY(experts_check(layout, checkpoint, fault));
out:
    return st;
}
