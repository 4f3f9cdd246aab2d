// What one MoE layer is.

#include "hosts/cli/model.h"

#include "abi.h"
#include "hosts/cli/json_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MODEL_SIZE_MAX ((int64_t)1 << 40)

// What a family does that its config.json does not say.
struct family {
    const char *name;
    int32_t scoring;     // MOXIE_SCORING_*; 0: not known
    const char *method;  // what topk_method may say; NULL: nothing
    int32_t renormalize; // where norm_topk_prob does not say
    const char *norm;    // all that it may say; NULL: either
    double epsilon;
    int32_t router_bias, correction_bias; // its router has one
    int32_t groups, groups_top;           // where n_group and topk_group do not say; 0: none
    double scaling;                       // where routed_scaling_factor does not say; 0: none
    int32_t weight_on_input;
    int32_t fused_rows_in, fused_interleaved;
    const char *activation; // NULL: hidden_act says
    double limit;           // where swiglu_limit does not say; 0: none
};

static const struct family families[] = {
    {.name = "qwen2_moe", .scoring = MOXIE_SCORING_SOFTMAX},
    {.name = "qwen3_moe", .scoring = MOXIE_SCORING_SOFTMAX},
    {.name = "qwen3_next", .scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1},
    {.name = "mixtral", .scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1, .norm = "true"},
    // Where it says true, DeepSeek's own code normalises in place of scaling; transformers scales.
    {.name = "deepseek_v2", .scoring = MOXIE_SCORING_SOFTMAX, .method = "greedy", .norm = "false"},
    {.name = "deepseek_v3",
     .scoring = MOXIE_SCORING_SIGMOID,
     .method = "noaux_tc",
     .renormalize = 1,
     .epsilon = 1e-20,
     .correction_bias = 1,
     .groups = 8,
     .groups_top = 4,
     .scaling = 2.5},
    {.name = "kimi_k2",
     .scoring = MOXIE_SCORING_SIGMOID,
     .method = "noaux_tc",
     .renormalize = 1,
     .epsilon = 1e-20,
     .correction_bias = 1,
     .groups = 8,
     .groups_top = 4,
     .scaling = 2.5},
    {.name = "glm4_moe",
     .scoring = MOXIE_SCORING_SIGMOID,
     .renormalize = 1,
     .epsilon = 1e-20,
     .correction_bias = 1},
    {.name = "gpt_oss",
     .scoring = MOXIE_SCORING_TOP_K_SOFTMAX,
     .router_bias = 1,
     .fused_rows_in = 1,
     .fused_interleaved = 1,
     .activation = "swigluoai",
     .limit = 7},
    {.name = "llama4",
     .scoring = MOXIE_SCORING_SIGMOID,
     .norm = "false",
     .weight_on_input = 1,
     .fused_rows_in = 1},
    {.name = "llama4_text",
     .scoring = MOXIE_SCORING_SIGMOID,
     .norm = "false",
     .weight_on_input = 1,
     .fused_rows_in = 1},
};

int model_is_gated(const struct model *model)
{
    return strcmp(model->activation, "relu2") != 0;
}

void model_families(char text[MODEL_FAMILIES_BYTES])
{
    const size_t count = sizeof families / sizeof families[0];
    size_t used = 0;

    for (size_t i = 0; i < count && used < MODEL_FAMILIES_BYTES; i++) {
        const char *before = i == 0 ? "" : i + 1 < count ? ", " : " and ";

        used += (size_t)snprintf(text + used, MODEL_FAMILIES_BYTES - used, "%s%s", before,
                                 families[i].name);
    }
}

// Experts can be loaded; ids and weights must be given.
static const struct family unknown_family = {.name = ""};

static const struct family *family_find(const char *name)
{
    for (size_t i = 0; i < sizeof families / sizeof families[0]; i++)
        if (strcmp(families[i].name, name) == 0) return &families[i];
    return &unknown_family;
}

static void take_family(struct model *model, const char *name)
{
    const struct family *family = family_find(name);

    *model = (struct model){
        .activation = family->activation,
        .alpha = 1.702, // where swiglu_alpha does not say
        .limit = family->limit,
        .weight_on_input = family->weight_on_input,
        .scoring = family->scoring,
        .renormalize = family->renormalize,
        .epsilon = family->epsilon,
        .router_bias = family->router_bias,
        .correction_bias = family->correction_bias,
        .scaling = 1,
        .fused_rows_in = family->fused_rows_in,
        .fused_interleaved = family->fused_interleaved,
    };
    (void)snprintf(model->family, sizeof model->family, "%s", name);
}

// A word of the configuration key for a word of the checkpoint; NULL when there is none.
static const char *activation_word(const char *name)
{
    static const char *const words[][2] = {
        {"silu", "silu"},           {"swish", "silu"},          {"gelu", "gelu"},
        {"relu2", "relu2"},         {"swigluoai", "swigluoai"}, {"gelu_pytorch_tanh", "gelu_tanh"},
        {"gelu_tanh", "gelu_tanh"},
    };

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(words[i][0], name) == 0) return words[i][1];
    return NULL;
}

// The names that families have for a size, the first of which that is there says it.
#define NAMES_MAX 7

static const struct size_names {
    const char *key;
    const char *names[NAMES_MAX];
} size_names[MODEL_SIZES] = {
    [MODEL_HIDDEN] = {"hidden_size", {"hidden_size", "d_model"}},
    [MODEL_INTERMEDIATE] = {"intermediate_size",
                            {"moe_intermediate_size", "expert_ffn_hidden_size",
                             "intermediate_size"}},
    [MODEL_EXPERTS] = {"num_experts",
                       {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}},
    [MODEL_TOP_K] = {"top_k",
                     {"num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "top_k_experts",
                      "num_experts_per_token", "num_selected_experts"}},
};

const char *model_size_key(enum model_size size)
{
    return size_names[size].key;
}

static const json_t *first_of(const json_t *config, const char *const *names, int count,
                              const char **name)
{
    for (int i = 0; i < count && names[i] != NULL; i++) {
        const json_t *value = json_object_get(config, names[i]);

        *name = names[i];
        if (value != NULL && !json_is_null(value)) return value;
    }
    return NULL;
}

// Of each layer the same, where a list says it for each.
static const json_t *same_of_all(const json_t *value)
{
    for (size_t i = 1; i < json_array_size(value); i++)
        if (!json_equal(json_array_get(value, 0), json_array_get(value, i))) return value;
    return json_array_size(value) > 0 ? json_array_get(value, 0) : value;
}

static int no_size(const struct size_names *names, struct fault *fault)
{
    char text[256];
    size_t used = 0;

    for (int i = 0; i < NAMES_MAX && names->names[i] != NULL; i++)
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i == 0 ? "" : ", ",
                                 names->names[i]);
    return fault_set(fault, EXIT_TROUBLE,
                     "config.json: no %s (known as %s), which a mixture-of-experts model has",
                     names->key, text);
}

int model_size(const json_t *language, enum model_size size, int64_t *out, struct fault *fault)
{
    const struct size_names *names = &size_names[size];
    const char *name = NULL;
    char seen[JSON_EXCERPT_BYTES];
    const json_t *value = first_of(language, names->names, NAMES_MAX, &name);

    if (value == NULL) return no_size(names, fault);
    value = same_of_all(value);
    if (!json_is_integer(value) || json_integer_value(value) < 1 ||
        json_integer_value(value) > MODEL_SIZE_MAX)
        return fault_set(fault, EXIT_TROUBLE, "config.json: %s is %s; want a size from 1 to 2^40",
                         name, json_excerpt(value, seen));
    *out = json_integer_value(value);
    return EXIT_OK;
}

static int config_number(const json_t *config, const char *key, double *out, struct fault *fault)
{
    const json_t *value = json_object_get(config, key);

    if (value == NULL || json_is_null(value)) return EXIT_OK;
    if (!json_is_number(value))
        return fault_set(fault, EXIT_TROUBLE, "config.json: %s is not a number", key);
    *out = json_number_value(value);
    return EXIT_OK;
}

static int config_count(const json_t *config, const char *key, int64_t *out, struct fault *fault)
{
    const json_t *value = json_object_get(config, key);

    if (value == NULL || json_is_null(value)) return EXIT_OK;
    if (!json_is_integer(value) || json_integer_value(value) < 0 ||
        json_integer_value(value) > MODEL_SIZE_MAX)
        return fault_set(fault, EXIT_TROUBLE, "config.json: %s is not a count", key);
    *out = json_integer_value(value);
    return EXIT_OK;
}

// Which gate a limit or a scale belongs to, and whether a bias is added to up, is in a model's
// code: plain silu would be other numbers.
static int config_gate(const struct model *model, const json_t *config, struct fault *fault)
{
    static const char *const keys[] = {"swiglu_limit", "swiglu_limits", "swiglu_alpha"};
    char seen[JSON_EXCERPT_BYTES];

    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const json_t *value = json_object_get(config, keys[i]);

        if (value == NULL || json_is_null(value)) continue;
        return fault_set(fault, EXIT_REFUSED,
                         "config.json: %s is %s, and what the family (model_type) \"%s\" makes "
                         "of it is not known; for gpt_oss it is",
                         keys[i], json_excerpt(value, seen), model->family);
    }
    return EXIT_OK;
}

int model_activation(struct model *model, const json_t *language, struct fault *fault)
{
    static const char *const names[] = {"hidden_act", "mlp_hidden_act", "hidden_activation",
                                        "activation_function"};
    const char *name = NULL, *word = NULL;
    char seen[JSON_EXCERPT_BYTES];
    const json_t *value = first_of(language, names, 4, &name);
    int st = EXIT_OK;

    if (model->activation != NULL) {
        st = config_number(language, "swiglu_alpha", &model->alpha, fault);
        return st != EXIT_OK ? st : config_number(language, "swiglu_limit", &model->limit, fault);
    }
    st = config_gate(model, language, fault);
    if (st != EXIT_OK || value == NULL) return st;
    word = json_string_value(value);
    model->activation = word != NULL ? activation_word(word) : NULL;
    if (model->activation != NULL) return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED,
                     "config.json: %s %s has no kernel; silu, gelu, gelu_pytorch_tanh and relu2 "
                     "have",
                     name, json_excerpt(value, seen));
}

// What the router depends on and is not known. Experts whose ids and weights are given run
// nevertheless.
static void doubt(struct model *model, const char *key, const char *seen, const char *values)
{
    if (model->unrouted[0] != '\0') return;
    (void)snprintf(model->unrouted, sizeof model->unrouted,
                   "config.json: %s is %s, and for the family %s only %s is known", key, seen,
                   model->family, values);
}

// The same of a key's value, unless it is absent or `known` is 1.
static void doubt_value(struct model *model, const json_t *config, const char *key, int known,
                        const char *values)
{
    const json_t *value = json_object_get(config, key);
    char seen[JSON_EXCERPT_BYTES];

    if (value == NULL || json_is_null(value) || known) return;
    doubt(model, key, json_excerpt(value, seen), values);
}

// What the family's own configuration has for absent keys; null is a value, and says none.
static int config_groups(struct model *model, const json_t *config, struct fault *fault)
{
    const struct family *family = family_find(model->family);
    int st = EXIT_OK;

    if (json_object_get(config, "n_group") == NULL) model->groups = family->groups;
    if (json_object_get(config, "topk_group") == NULL) model->groups_top = family->groups_top;
    if (json_object_get(config, "routed_scaling_factor") == NULL && family->scaling > 0)
        model->scaling = family->scaling;
    TRY(config_count(config, "n_group", &model->groups, fault));
    TRY(config_count(config, "topk_group", &model->groups_top, fault));
    TRY(config_number(config, "routed_scaling_factor", &model->scaling, fault));
out:
    return st;
}

static int config_router(struct model *model, const json_t *config, struct fault *fault)
{
    const json_t *norm = json_object_get(config, "norm_topk_prob");
    const char *scoring = json_string_value(json_object_get(config, "scoring_func"));
    const char *method = json_string_value(json_object_get(config, "topk_method"));
    const char *known = family_find(model->family)->method;
    const char *norms = family_find(model->family)->norm;
    int softmax = scoring != NULL && strcmp(scoring, "softmax") == 0;
    int sigmoid = scoring != NULL && strcmp(scoring, "sigmoid") == 0;
    char groups[JSON_EXCERPT_BYTES];
    int st = config_groups(model, config, fault);

    if (st != EXIT_OK || model->scoring == 0) return st;
    // Of null a family's code makes false, where it reads it.
    if (norm != NULL && norms == NULL) model->renormalize = json_is_true(norm);
    if (softmax) model->scoring = MOXIE_SCORING_SOFTMAX;
    if (sigmoid) model->scoring = MOXIE_SCORING_SIGMOID;
    doubt_value(model, config, "scoring_func", softmax || sigmoid, "softmax or sigmoid");
    doubt_value(model, config, "topk_method",
                method != NULL && known != NULL && strcmp(method, known) == 0,
                known != NULL ? known : "none");
    // Groups are chosen by their two best; models that score by softmax choose them by their best.
    if (model->groups > 1 && model->scoring == MOXIE_SCORING_SOFTMAX) {
        (void)snprintf(groups, sizeof groups, "%lld", (long long)model->groups);
        doubt(model, "n_group", groups, "1 with softmax");
    }
    doubt_value(model, config, "norm_topk_prob",
                json_is_boolean(norm) &&
                    (norms == NULL || strcmp(norms, json_is_true(norm) ? "true" : "false") == 0),
                norms != NULL ? norms : "true or false");
    return st;
}

const json_t *model_language(const json_t *config)
{
    static const char *const parts[] = {"text_config", "language_config", "llm_config"};
    const json_t *thinker = json_object_get(config, "thinker_config");

    if (json_object_get(config, "hidden_size") != NULL) return config;
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        const json_t *part = json_object_get(config, parts[i]);

        if (json_is_object(part)) return part;
    }
    return json_is_object(thinker) ? model_language(thinker) : config;
}

void model_family(struct model *model, const json_t *language)
{
    const char *family = json_string_value(json_object_get(language, "model_type"));

    take_family(model, family != NULL ? family : "");
}

int model_from_config(struct model *model, const struct checkpoint *checkpoint, struct fault *fault)
{
    const json_t *config = model_language(checkpoint->config);
    int64_t *const sizes[MODEL_SIZES] = {
        [MODEL_HIDDEN] = &model->hidden,
        [MODEL_INTERMEDIATE] = &model->intermediate,
        [MODEL_EXPERTS] = &model->experts,
        [MODEL_TOP_K] = &model->top_k,
    };
    int st = EXIT_OK;

    model_family(model, config);
    for (int size = 0; size < MODEL_SIZES; size++)
        TRY(model_size(config, (enum model_size)size, sizes[size], fault));
    TRY(model_activation(model, config, fault));
    if (model->activation == NULL) model->activation = "silu"; // where no family says another
    TRY(config_router(model, config, fault));
out:
    return st;
}

static int metadata_size(const struct safetensors *file, const char *key, int64_t *out,
                         struct fault *fault)
{
    const char *text = safetensors_metadata(file, key);
    char *end = NULL;
    long long value = 0;

    if (text == NULL)
        return fault_set(
            fault, EXIT_TROUBLE,
            "%s: no metadata key %s; --layer-file wants a file that describes its layer",
            file->path, key);
    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < 1 || value > MODEL_SIZE_MAX)
        return fault_set(fault, EXIT_TROUBLE, "%s: metadata %s is not a size from 1 to 2^40",
                         file->path, key);
    *out = value;
    return EXIT_OK;
}

// Absent keys leave *out alone.
static int metadata_number(const struct safetensors *file, const char *key, double *out,
                           struct fault *fault)
{
    const char *text = safetensors_metadata(file, key);
    char *end = NULL;
    double value = 0;

    if (text == NULL) return EXIT_OK;
    value = strtod(text, &end);
    if (end == text || *end != '\0')
        return fault_set(fault, EXIT_TROUBLE, "%s: metadata %s is not a number", file->path, key);
    *out = value;
    return EXIT_OK;
}

static int metadata_layout(struct model *model, const struct safetensors *file, struct fault *fault)
{
    static const struct {
        const char *text;
        int gated, rows_in, interleaved;
    } layouts[] = {
        {"[E,2I,H] gate then up", 1, 0, 0},
        {"[E,2I,H] gate and up interleaved", 1, 0, 1},
        {"[E,H,2I] gate then up", 1, 1, 0},
        {"[E,H,2I] gate and up interleaved", 1, 1, 1},
        {"[E,I,H]", 0, 0, 0},
        {"[E,H,I]", 0, 1, 0},
    };
    const char *text = safetensors_metadata(file, "weight_layout");
    int gated = model_is_gated(model);

    for (size_t i = 0; text != NULL && i < sizeof layouts / sizeof layouts[0]; i++)
        if (layouts[i].gated == gated && strcmp(layouts[i].text, text) == 0) {
            model->fused_rows_in = layouts[i].rows_in;
            model->fused_interleaved = layouts[i].interleaved;
            return EXIT_OK;
        }
    if (!gated)
        return fault_set(
            fault, EXIT_TROUBLE,
            "%s: metadata weight_layout is not one of \"%s\", \"%s\", which activation "
            "%s has",
            file->path, layouts[4].text, layouts[5].text, model->activation);
    return fault_set(fault, EXIT_TROUBLE,
                     "%s: metadata weight_layout is not one of \"%s\", \"%s\", \"%s\", \"%s\"",
                     file->path, layouts[0].text, layouts[1].text, layouts[2].text,
                     layouts[3].text);
}

static int metadata_flag(const struct safetensors *file, const char *key, int otherwise)
{
    const char *text = safetensors_metadata(file, key);

    return text == NULL ? otherwise : strcmp(text, "1") == 0;
}

int model_from_layer_file(struct model *model, const struct safetensors *file, struct fault *fault)
{
    const char *family = safetensors_metadata(file, "family");
    const char *activation = safetensors_metadata(file, "activation");
    int st = EXIT_OK;

    take_family(model, family != NULL ? family : "");
    TRY(metadata_size(file, "hidden_size", &model->hidden, fault));
    TRY(metadata_size(file, "intermediate_size", &model->intermediate, fault));
    TRY(metadata_size(file, "num_experts", &model->experts, fault));
    TRY(metadata_size(file, "top_k", &model->top_k, fault));
    model->activation = activation_word(activation != NULL ? activation : "silu");
    if (model->activation == NULL)
        TRY(fault_set(fault, EXIT_REFUSED, "%s: activation %s has no kernel", file->path,
                      activation));
    TRY(metadata_layout(model, file, fault));
    TRY(metadata_number(file, "alpha", &model->alpha, fault));
    TRY(metadata_number(file, "limit", &model->limit, fault));
    TRY(metadata_number(file, "routed_scaling_factor", &model->scaling, fault));
    model->weight_on_input = metadata_flag(file, "apply_router_weight_on_input", 0);
    model->renormalize = metadata_flag(file, "norm_topk_prob", model->renormalize);
    if (safetensors_metadata(file, "n_group") != NULL) {
        TRY(metadata_size(file, "n_group", &model->groups, fault));
        TRY(metadata_size(file, "topk_group", &model->groups_top, fault));
    }
out:
    return st;
}
