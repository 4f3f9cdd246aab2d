// What a model's config.json says, in the words of the configuration.

#include "hosts/cli/model_keys.h"

#include "hosts/cli/json_file.h"

#include <string.h>

json_t *model_keys(const struct model *model)
{
    json_t *keys =
        json_pack("{s:I, s:I, s:I, s:I, s:s, s:i}", "hidden_size", (json_int_t)model->hidden,
                  "intermediate_size", (json_int_t)model->intermediate, "num_experts",
                  (json_int_t)model->experts, "top_k", (json_int_t)model->top_k, "activation",
                  model->activation, "apply_router_weight_on_input", model->weight_on_input);

    if (keys == NULL || strcmp(model->activation, "swigluoai") != 0) return keys;
    (void)json_object_set_new(keys, "activation_alpha", json_number(model->alpha));
    (void)json_object_set_new(keys, "activation_limit", json_number(model->limit));
    return keys;
}

// Of its language model, where that says it.
static const json_t *find(const json_t *config, const char *key)
{
    const json_t *value = json_object_get(model_language(config), key);

    return value != NULL && !json_is_null(value) ? value : json_object_get(config, key);
}

static const char *text_of(const json_t *value)
{
    const char *text = json_string_value(value);

    return text != NULL ? text : "";
}

static const char *number_word(const json_t *config)
{
    static const char *const words[][2] = {
        {"bfloat16", "bf16"}, {"float16", "f16"}, {"float32", "f32"}};
    const json_t *dtype = find(config, "dtype");
    const char *name = text_of(dtype != NULL ? dtype : find(config, "torch_dtype"));

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(words[i][0], name) == 0) return words[i][1];
    return NULL;
}

static int is_block_of_128(const json_t *block)
{
    return json_array_size(block) == 2 && json_integer_value(json_array_get(block, 0)) == 128 &&
           json_integer_value(json_array_get(block, 1)) == 128;
}

// By compressed-tensors: of one group of layers, which has to be that of the experts.
static const char *compressed_word(const json_t *quantised)
{
    json_t *groups = json_object_get(quantised, "config_groups");
    const json_t *group = json_object_iter_value(json_object_iter(groups));
    const json_t *weights = json_object_get(group, "weights");
    const char *type = text_of(json_object_get(weights, "type"));
    const char *strategy = text_of(json_object_get(weights, "strategy"));
    json_int_t bits = json_integer_value(json_object_get(weights, "num_bits"));

    if (json_object_size(groups) != 1) return NULL;
    if (bits == 4 && strcmp(type, "int") == 0 && strcmp(strategy, "group") == 0)
        return json_integer_value(json_object_get(weights, "group_size")) == 32 ? "int4_g32" : NULL;
    if (bits != 8 || strcmp(type, "float") != 0) return NULL;
    if (strcmp(strategy, "block") == 0)
        return is_block_of_128(json_object_get(weights, "block_structure")) ? "fp8_block128" : NULL;
    if (strcmp(strategy, "channel") == 0) return "fp8_channel";
    return strcmp(strategy, "tensor") == 0 ? "fp8_tensor" : NULL;
}

static const char *modelopt_word(const json_t *quantised)
{
    const char *algorithm = text_of(json_object_get(quantised, "quant_algo"));

    if (strcmp(algorithm, "NVFP4") == 0) return "nvfp4";
    return strcmp(algorithm, "FP8") == 0 ? "fp8_tensor" : NULL;
}

// Quantised weights; NULL when it has no word.
static const char *quantised_word(const json_t *quantised)
{
    const json_t *block = json_object_get(quantised, "weight_block_size");
    const char *method = text_of(json_object_get(quantised, "quant_method"));

    if (strcmp(method, "compressed-tensors") == 0) return compressed_word(quantised);
    if (strcmp(method, "mxfp4") == 0) return "mxfp4";
    if (strcmp(method, "modelopt") == 0) return modelopt_word(quantised);
    if (strcmp(method, "fp8") != 0) return NULL;
    if (block == NULL || json_is_null(block)) return "fp8_tensor";
    return is_block_of_128(block) ? "fp8_block128" : NULL;
}

static void set_number(json_t *keys, const char *key, const char *word)
{
    if (word != NULL) (void)json_object_set_new(keys, key, json_string(word));
}

// Models of ModelOpt may say it in a file of their own alone.
static void set_weight_format(json_t *keys, const json_t *config, const json_t *modelopt)
{
    const json_t *quantised = find(config, "quantization_config");
    const char *word = NULL;

    if (!json_is_object(quantised) && !json_is_object(modelopt)) {
        set_number(keys, "weight_format", number_word(config));
        return;
    }
    word = json_is_object(quantised) ? quantised_word(quantised) : modelopt_word(modelopt);
    (void)json_object_set_new(keys, "weight_format",
                              word != NULL ? json_string(word) : json_null());
}

// Layers without experts come first where there are such.
static void set_layers(json_t *keys, const json_t *config)
{
    json_int_t layers = json_integer_value(find(config, "num_hidden_layers"));
    json_int_t dense = json_integer_value(find(config, "first_k_dense_replace"));

    if (dense > 0 && dense < layers) layers -= dense;
    if (layers > 0) (void)json_object_set_new(keys, "num_layers", json_integer(layers));
}

int model_keys_read(const char *folder, json_t **keys, struct fault *fault)
{
    struct checkpoint checkpoint = {.config = NULL};
    struct model model;
    json_t *modelopt = NULL;
    int st = EXIT_OK;

    *keys = NULL;
    TRY(folder_read_json(folder, "config.json", 0, &checkpoint.config, fault));
    TRY(folder_read_json(folder, "hf_quant_config.json", 1, &modelopt, fault));
    TRY(model_from_config(&model, &checkpoint, fault));
    *keys = model_keys(&model);
    if (*keys == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    set_layers(*keys, checkpoint.config);
    set_weight_format(*keys, checkpoint.config, json_object_get(modelopt, "quantization"));
    set_number(*keys, "input_format", number_word(checkpoint.config));
    set_number(*keys, "output_format", number_word(checkpoint.config));
out:
    json_decref(checkpoint.config);
    json_decref(modelopt);
    return st;
}
