// What a model's config.json says, in the words of the configuration.

#include "hosts/cli/model_keys.h"

#include "hosts/cli/json_file.h"

#include <string.h>

#define LAYERS_COUNTED_MAX 4096 // more are no model's

static void set_gate(json_t *keys, const struct model *model)
{
    (void)json_object_set_new(keys, "activation", json_string(model->activation));
    if (strcmp(model->activation, "swigluoai") != 0) return;
    (void)json_object_set_new(keys, "activation_alpha", json_number(model->alpha));
    (void)json_object_set_new(keys, "activation_limit", json_number(model->limit));
}

json_t *model_keys(const struct model *model)
{
    json_t *keys = json_pack("{s:I, s:I, s:I, s:I, s:i}", "hidden_size", (json_int_t)model->hidden,
                             "intermediate_size", (json_int_t)model->intermediate, "num_experts",
                             (json_int_t)model->experts, "top_k", (json_int_t)model->top_k,
                             "apply_router_weight_on_input", model->weight_on_input);

    if (keys != NULL) set_gate(keys, model);
    return keys;
}

// Of its language model, where that says it; null is nothing.
static const json_t *find(const json_t *config, const char *key)
{
    const json_t *value = json_object_get(model_language(config), key);

    if (value == NULL || json_is_null(value)) value = json_object_get(config, key);
    return json_is_null(value) ? NULL : value;
}

static const char *text_of(const json_t *value)
{
    const char *text = json_string_value(value);

    return text != NULL ? text : "";
}

static void set_unread(struct model_said *said, const char *key, const struct fault *why)
{
    (void)json_object_set_new(
        said->unread, key,
        json_pack("{s:i, s:o}", "code", why->code, "text", json_text(why->text)));
}

// ---- What weights and rows are stored as -------------------------------------------------------

static const json_t *dtype_of(const json_t *config)
{
    const json_t *dtype = find(config, "dtype");

    return dtype != NULL ? dtype : find(config, "torch_dtype");
}

static const char *number_word(const json_t *dtype)
{
    static const char *const words[][2] = {
        {"bfloat16", "bf16"}, {"float16", "f16"}, {"float32", "f32"}};

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(words[i][0], text_of(dtype)) == 0) return words[i][1];
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
    if (bits == 4 && strcmp(type, "float") == 0 && strcmp(strategy, "tensor_group") == 0)
        return json_integer_value(json_object_get(weights, "group_size")) == 16 ? "nvfp4" : NULL;
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
static void set_weight_format(struct model_said *said, const json_t *config, const json_t *modelopt)
{
    const json_t *quantised = find(config, "quantization_config"), *from = quantised;
    const char *where = "config.json: quantization_config", *word = NULL;
    char seen[JSON_EXCERPT_BYTES];
    struct fault why;

    if (quantised != NULL) {
        word = quantised_word(quantised);
    } else if (modelopt != NULL) {
        where = "hf_quant_config.json: quantization";
        from = modelopt;
        word = modelopt_word(modelopt);
    } else {
        where = "config.json: dtype";
        from = dtype_of(config);
        word = number_word(from);
    }
    set_number(said->keys, "weight_format", word);
    if (word != NULL || from == NULL) return;
    (void)fault_set(&why, EXIT_REFUSED,
                    "%s is %s, for which weight_format has no word; if the experts are dequantised "
                    "to one of those that `moxie info --keys` has",
                    where, json_excerpt(from, seen));
    set_unread(said, "weight_format", &why);
}

// ---- Layers with experts -----------------------------------------------------------------------

// A count of layers, or of layers in a turn; `otherwise` where nothing says it.
static json_int_t count_of(const json_t *config, const char *key, json_int_t otherwise)
{
    json_int_t count = json_integer_value(find(config, key));

    return count > 0 ? count : otherwise;
}

static int is_listed(const json_t *list, json_int_t layer)
{
    for (size_t i = 0; i < json_array_size(list) && i < LAYERS_COUNTED_MAX; i++)
        if (json_integer_value(json_array_get(list, i)) == layer) return 1;
    return 0;
}

// By every rule that families have for it, of which a config.json has one or two.
static int has_experts(const json_t *config, json_int_t layer)
{
    static const char *const first[] = {"first_k_dense_replace", "num_dense_layers",
                                        "moe_layer_num_skipped", "moe_layer_start_index"};
    static const char *const every[] = {"decoder_sparse_step", "interleave_moe_layer_step",
                                        "moe_layer_interval"};
    const json_t *experts = find(config, "moe_layers");
    const json_t *turns = find(config, "moe_layer_freq");
    const char *pattern = text_of(find(config, "hybrid_override_pattern"));
    const json_t *mlps = find(config, "mlp_layer_types"), *mlp = NULL;
    const json_t *blocks = find(config, "layers_block_type");
    json_int_t period = count_of(config, "expert_layer_period", 1);

    if (json_array_size(mlps) > 0) {
        mlp = json_array_get(mlps, (size_t)layer);
        return json_is_string(mlp) && strcmp(text_of(mlp), "dense") != 0;
    }
    if (json_array_size(blocks) > 0)
        return strcmp(text_of(json_array_get(blocks, (size_t)layer)), "moe") == 0;
    if (json_array_size(experts) > 0) return is_listed(experts, layer);
    if (pattern[0] != '\0')
        return layer < (json_int_t)strnlen(pattern, LAYERS_COUNTED_MAX) && pattern[layer] == 'E';
    if (json_array_size(turns) > 0)
        return json_integer_value(json_array_get(turns, (size_t)layer)) != 0;
    for (size_t i = 0; i < sizeof first / sizeof first[0]; i++)
        if (layer < count_of(config, first[i], 0)) return 0;
    for (size_t i = 0; i < sizeof every / sizeof every[0]; i++)
        if ((layer + 1) % count_of(config, every[i], 1) != 0) return 0;
    return !is_listed(find(config, "mlp_only_layers"), layer) &&
           layer <= count_of(config, "moe_layer_end_index", layer) &&
           layer % count_of(config, "moe_layer_freq", 1) == 0 &&
           layer % period == count_of(config, "expert_layer_offset", 0) % period;
}

// Which key says how many layers there are: a list with a word for each, or a number. NULL: none.
static const char *layers_key(const json_t *config, json_int_t *layers)
{
    static const char *const keys[] = {"mlp_layer_types", "layers_block_type", "num_hidden_layers",
                                       "num_layers"};

    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        const json_t *value = find(config, keys[i]);
        int is_list = i < 2;

        *layers = is_list ? (json_int_t)json_array_size(value) : json_integer_value(value);
        if (*layers > 0 || (value != NULL && !is_list)) return keys[i];
    }
    return NULL;
}

static void set_layers(struct model_said *said, const json_t *config)
{
    json_int_t layers = 0, with_experts = 0;
    const char *key = layers_key(config, &layers);
    char seen[JSON_EXCERPT_BYTES];
    struct fault why;

    if (layers < 1 || layers > LAYERS_COUNTED_MAX) {
        if (key == NULL)
            (void)fault_set(&why, EXIT_TROUBLE,
                            "config.json: no count of layers (known as num_hidden_layers, "
                            "num_layers)");
        else
            (void)fault_set(&why, EXIT_TROUBLE, "config.json: %s is %s; want 1 to %d layers", key,
                            json_excerpt(find(config, key), seen), LAYERS_COUNTED_MAX);
        set_unread(said, "num_layers", &why);
        return;
    }
    for (json_int_t layer = 0; layer < layers; layer++)
        with_experts += has_experts(config, layer);
    (void)json_object_set_new(said->keys, "num_layers",
                              json_integer(with_experts > 0 ? with_experts : layers));
}

// ---- All of it ---------------------------------------------------------------------------------

static void set_sizes(struct model_said *said, const json_t *language)
{
    for (int i = 0; i < MODEL_SIZES; i++) {
        enum model_size size = (enum model_size)i;
        struct fault why;
        int64_t value = 0;

        if (model_size(language, size, &value, &why) == EXIT_OK)
            (void)json_object_set_new(said->keys, model_size_key(size), json_integer(value));
        else
            set_unread(said, model_size_key(size), &why);
    }
}

static void set_activation(struct model_said *said, const json_t *language)
{
    struct model model;
    struct fault why;

    model_family(&model, language);
    if (model.weight_on_input)
        (void)json_object_set_new(said->keys, "apply_router_weight_on_input", json_integer(1));
    if (model_activation(&model, language, &why) != EXIT_OK)
        set_unread(said, "activation", &why);
    else if (model.activation != NULL)
        set_gate(said->keys, &model);
}

int model_keys_read(const char *folder, struct model_said *said, struct fault *fault)
{
    json_t *config = NULL, *modelopt = NULL;
    const char *rows = NULL;
    int st = EXIT_OK;

    *said = (struct model_said){json_object(), json_object()};
    if (said->keys == NULL || said->unread == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(folder_read_json(folder, "config.json", 0, &config, fault));
    TRY(folder_read_json(folder, "hf_quant_config.json", 1, &modelopt, fault));
    set_sizes(said, model_language(config));
    set_activation(said, model_language(config));
    set_layers(said, config);
    set_weight_format(said, config, json_object_get(modelopt, "quantization"));
    rows = number_word(dtype_of(config));
    set_number(said->keys, "input_format", rows);
    set_number(said->keys, "output_format", rows);
out:
    json_decref(config);
    json_decref(modelopt);
    return st;
}

void model_said_free(struct model_said *said)
{
    json_decref(said->keys);
    json_decref(said->unread);
    *said = (struct model_said){NULL, NULL};
}
