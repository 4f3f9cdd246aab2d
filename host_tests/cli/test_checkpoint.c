// Folders of checkpoints: what is found, what is loaded for a rank, and what a hostile index cannot
// reach.

#include "hosts/cli/checkpoint.h"
#include "hosts/cli/experts.h"

#include "host_tests/cli/files.h"
#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

#define MODELS MOXIE_GOLDEN_DIR "/models/"

static void write_text(const char *name, const char *text)
{
    (void)file_write(name, text, strlen(text));
}

static void must_open(struct checkpoint *checkpoint, const char *folder)
{
    struct fault fault = {.text = ""};

    ck_assert_msg(checkpoint_open_folder(checkpoint, folder, &fault) == EXIT_OK, "%s", fault.text);
}

// The folder of this test is refused with a text that holds `word`.
static void must_refuse(const char *word)
{
    struct checkpoint checkpoint;
    struct fault fault;

    ck_assert_int_eq(checkpoint_open_folder(&checkpoint, file_folder(), &fault), EXIT_TROUBLE);
    ck_assert_msg(strstr(fault.text, word) != NULL, "no %s in: %s", word, fault.text);
}

START_TEST(folders_without_a_model_are_refused)
{
    must_refuse("config.json");
    write_text("config.json", "{}");
    must_refuse("model.safetensors");
    write_text("config.json", "[]");
    must_refuse("not a JSON object");
    write_text("config.json", "{\"a\":1,\"a\":2}");
    must_refuse("malformed");
}
END_TEST

static const char *const bad_indexes[] = {
    "{}",
    "{\"weight_map\":[]}",
    "{\"weight_map\":{\"t\":7}}",
    "{\"weight_map\":{\"t\":\"\"}}",
    "{\"weight_map\":{\"t\":\"..\"}}",
    "{\"weight_map\":{\"t\":\"../../etc/passwd\"}}",
    "{\"weight_map\":{\"t\":\"/etc/passwd\"}}",
    "{\"weight_map\":{\"t\":\"a/b.safetensors\"}}",
    "{\"weight_map\":{\"t\":\".hidden\"}}",
};

START_TEST(bad_indexes_are_refused)
{
    write_text("config.json", "{}");
    write_text("model.safetensors.index.json", bad_indexes[_i]);
    must_refuse("index.json");
}
END_TEST

static const char shard_header[] =
    "{\"t\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}";

START_TEST(shards_open_when_asked_for)
{
    struct checkpoint checkpoint;
    struct located located;
    struct fault fault;

    write_text("config.json", "{}");
    write_text("model.safetensors.index.json",
               "{\"weight_map\":{\"t\":\"one\",\"u\":\"one\",\"v\":\"absent\"}}");
    (void)file_write_safetensors("one", shard_header, 4);
    must_open(&checkpoint, file_folder());
    ck_assert_int_eq(checkpoint_has(&checkpoint, "v"), 1);
    ck_assert_int_eq(checkpoint_has(&checkpoint, "w"), 0);
    ck_assert_int_eq(checkpoint_find(&checkpoint, "t", &located, &fault), EXIT_OK);
    ck_assert_uint_eq(located.tensor->bytes, 4);
    // Promised by the index, not in the shard; in no shard; in a shard that is not there.
    ck_assert_int_eq(checkpoint_find(&checkpoint, "u", &located, &fault), EXIT_TROUBLE);
    ck_assert_int_eq(checkpoint_find(&checkpoint, "w", &located, &fault), EXIT_TROUBLE);
    ck_assert_int_eq(checkpoint_find(&checkpoint, "v", &located, &fault), EXIT_TROUBLE);
    checkpoint_close(&checkpoint);
}
END_TEST

struct published {
    const char *folder;
    int64_t layer;
    int32_t format, order, orientation, bias_format;
    int64_t outputs, inputs; // of w1
    const char *router;
};

static const struct published published[] = {
    {MODELS "tiny-qwen3-moe", 1, MOXIE_FORMAT_BF16, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT, 0, 128,
     128, "model.layers.1.mlp.gate.weight"},
    {MODELS "tiny-deepseek-v3-fp8", 0, MOXIE_FORMAT_FP8_BLOCK128, MOXIE_ORDER_GATE_UP,
     MOXIE_ROWS_OUT, 0, 320, 256, "model.layers.0.mlp.gate.weight"},
    {MODELS "tiny-gpt-oss-mxfp4", 0, MOXIE_FORMAT_MXFP4, MOXIE_ORDER_INTERLEAVED, MOXIE_ROWS_OUT,
     MOXIE_FORMAT_BF16, 320, 192, "model.layers.0.mlp.router.weight"},
    {MODELS "tiny-qwen3-moe-nvfp4", 0, MOXIE_FORMAT_NVFP4, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT, 0,
     192, 192, ""},
};

static void describe(const struct published *model, struct checkpoint *checkpoint,
                     struct expert_layout *layout)
{
    struct model description;
    struct fault fault = {.text = ""};

    must_open(checkpoint, model->folder);
    ck_assert_int_eq(model_from_config(&description, checkpoint, &fault), EXIT_OK);
    ck_assert_msg(experts_describe(layout, checkpoint, &description, model->layer, &fault) ==
                      EXIT_OK,
                  "%s", fault.text);
}

START_TEST(published_formats_are_found)
{
    const struct published *model = &published[_i];
    struct checkpoint checkpoint;
    struct expert_layout layout;

    describe(model, &checkpoint, &layout);
    ck_assert_int_eq(layout.w1.format, model->format);
    ck_assert_int_eq(layout.w1.order, model->order);
    ck_assert_int_eq(layout.w1.orientation, model->orientation);
    ck_assert_int_eq(layout.w1.bias_format, model->bias_format);
    ck_assert_int_eq(layout.w1.outputs, model->outputs);
    ck_assert_int_eq(layout.w1.inputs, model->inputs);
    ck_assert_int_eq(layout.w2.order, MOXIE_ORDER_PLAIN);
    if (model->router[0] != '\0') ck_assert_str_eq(layout.router_weight, model->router);
    checkpoint_close(&checkpoint);
}
END_TEST

static void same_experts(const struct weights *all, const struct weights *part, uint64_t first)
{
    uint64_t count = (uint64_t)part->shape.experts;

    ck_assert_mem_eq(all->values.at + first * all->value_bytes, part->values.at,
                     count * part->value_bytes);
    if (all->scale_bytes > 0)
        ck_assert_mem_eq(all->scales.at + first * all->scale_bytes, part->scales.at,
                         count * part->scale_bytes);
    if (all->global_bytes > 0)
        ck_assert_mem_eq(all->globals.at + first * all->global_bytes, part->globals.at,
                         count * part->global_bytes);
    if (all->bias_bytes > 0)
        ck_assert_mem_eq(all->biases.at + first * all->bias_bytes, part->biases.at,
                         count * part->bias_bytes);
}

START_TEST(a_rank_loads_its_own_experts)
{
    struct device device;
    const struct load_target silent = {&device, NULL, NULL};
    struct checkpoint checkpoint;
    struct expert_layout layout;
    struct experts all;
    struct experts part;
    struct fault fault;
    int64_t count = 0;

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    describe(&published[_i], &checkpoint, &layout);
    count = layout.w1.experts;
    ck_assert_int_eq(
        experts_load(&all, &layout, &checkpoint, (struct expert_range){0, count}, &silent, &fault),
        EXIT_OK);
    ck_assert_int_eq(
        experts_load(&part, &layout, &checkpoint, (struct expert_range){3, 2}, &silent, &fault),
        EXIT_OK);
    same_experts(&all.w1, &part.w1, 3);
    same_experts(&all.w2, &part.w2, 3);
    experts_fini(&part);
    ck_assert_int_eq(
        experts_load(&part, &layout, &checkpoint, (struct expert_range){count, 0}, &silent, &fault),
        EXIT_OK);
    experts_fini(&part);
    ck_assert_int_eq(experts_load(&part, &layout, &checkpoint, (struct expert_range){count - 1, 2},
                                  &silent, &fault),
                     EXIT_TROUBLE);
    experts_fini(&all);
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
    checkpoint_close(&checkpoint);
}
END_TEST

START_TEST(a_layer_that_is_not_there_is_a_fault)
{
    struct checkpoint checkpoint;
    struct expert_layout layout;
    struct model model;
    struct fault fault;

    must_open(&checkpoint, published[0].folder);
    ck_assert_int_eq(model_from_config(&model, &checkpoint, &fault), EXIT_OK);
    ck_assert_int_eq(experts_describe(&layout, &checkpoint, &model, 7, &fault), EXIT_TROUBLE);
    ck_assert_ptr_nonnull(strstr(fault.text, "layer 7"));
    // Sizes that the tensors do not have.
    model.hidden *= 2;
    ck_assert_int_eq(experts_describe(&layout, &checkpoint, &model, 1, &fault), EXIT_TROUBLE);
    model.hidden /= 2;
    model.experts++;
    ck_assert_int_eq(experts_describe(&layout, &checkpoint, &model, 1, &fault), EXIT_TROUBLE);
    checkpoint_close(&checkpoint);
}
END_TEST

static const char *const bad_configs[] = {
    "{}",
    "{\"num_experts\":8}",
    "{\"num_experts\":\"8\",\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":"
    "2}",
    "{\"num_experts\":0,\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":2}",
    "{\"num_experts\":-1,\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":2}",
    "{\"num_experts\":4611686018427387904,\"hidden_size\":4,\"moe_intermediate_size\":4,"
    "\"num_experts_per_tok\":2}",
    "{\"num_experts\":8,\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":2,"
    "\"n_group\":-1}",
    "{\"num_experts\":8,\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":2,"
    "\"routed_scaling_factor\":\"2\"}",
    "{\"num_experts\":8,\"hidden_size\":4,\"moe_intermediate_size\":4,\"num_experts_per_tok\":2,"
    "\"hidden_act\":\"tanhshrink\"}",
};

START_TEST(bad_configs_are_refused)
{
    struct checkpoint checkpoint;
    struct model model;
    struct fault fault;

    write_text("config.json", bad_configs[_i]);
    (void)file_write_safetensors("model.safetensors", shard_header, 4);
    must_open(&checkpoint, file_folder());
    ck_assert_int_ne(model_from_config(&model, &checkpoint, &fault), EXIT_OK);
    ck_assert_ptr_nonnull(strstr(fault.text, "config.json"));
    checkpoint_close(&checkpoint);
}
END_TEST

// What the families' configuration classes in transformers 5.23 have for keys that are absent; of
// kimi_k2, which has a copy of it, DeepSeek's.
static const struct absent {
    const char *family, *keys;
    int64_t groups, groups_top;
    double scaling;
    int renormalize;
} absent[] = {
    {"qwen2_moe", "", 0, 0, 1, 0},
    {"qwen3_moe", "", 0, 0, 1, 0},
    {"qwen3_next", "", 0, 0, 1, 1},
    {"mixtral", "", 0, 0, 1, 1},
    {"deepseek_v2", "", 0, 0, 1, 0},
    {"deepseek_v3", "", 8, 4, 2.5, 1},
    {"kimi_k2", "", 8, 4, 2.5, 1},
    {"glm4_moe", "", 0, 0, 1, 1},
    {"gpt_oss", "", 0, 0, 1, 0},
    {"llama4_text", "", 0, 0, 1, 0},
    {"deepseek_v3", ",\"n_group\":16,\"routed_scaling_factor\":1", 16, 4, 1, 1},
    {"deepseek_v3", ",\"topk_group\":2,\"norm_topk_prob\":false", 8, 2, 2.5, 0},
    {"deepseek_v3",
     ",\"n_group\":null,\"topk_group\":null,\"routed_scaling_factor\":null,"
     "\"norm_topk_prob\":null",
     0, 0, 1, 0},
    {"mixtral", ",\"norm_topk_prob\":null", 0, 0, 1, 1},
};

START_TEST(absent_keys_are_what_the_family_has)
{
    const struct absent *wanted = &absent[_i];
    struct checkpoint checkpoint;
    struct model model;
    struct fault fault;
    char config[512];

    (void)snprintf(config, sizeof config,
                   "{\"model_type\":\"%s\",\"num_experts\":32,\"hidden_size\":64,"
                   "\"moe_intermediate_size\":32,\"num_experts_per_tok\":4%s}",
                   wanted->family, wanted->keys);
    write_text("config.json", config);
    (void)file_write_safetensors("model.safetensors", shard_header, 4);
    must_open(&checkpoint, file_folder());
    ck_assert_int_eq(model_from_config(&model, &checkpoint, &fault), EXIT_OK);
    ck_assert_str_eq(model.unrouted, "");
    ck_assert_int_eq(model.groups, wanted->groups);
    ck_assert_int_eq(model.groups_top, wanted->groups_top);
    ck_assert_double_eq(model.scaling, wanted->scaling);
    ck_assert_int_eq(model.renormalize, wanted->renormalize);
    checkpoint_close(&checkpoint);
}
END_TEST

START_TEST(a_language_model_may_be_one_level_down)
{
    struct checkpoint checkpoint;
    struct model model;
    struct fault fault;

    write_text("config.json",
               "{\"model_type\":\"llama4\",\"text_config\":{\"model_type\":\"llama4_text\","
               "\"hidden_size\":64,\"intermediate_size\":128,\"num_local_experts\":8,"
               "\"num_experts_per_tok\":1}}");
    (void)file_write_safetensors("model.safetensors", shard_header, 4);
    must_open(&checkpoint, file_folder());
    ck_assert_int_eq(model_from_config(&model, &checkpoint, &fault), EXIT_OK);
    ck_assert_str_eq(model.family, "llama4_text");
    ck_assert_int_eq(model.hidden, 64);
    ck_assert_int_eq(model.intermediate, 128);
    ck_assert_int_eq(model.weight_on_input, 1);
    checkpoint_close(&checkpoint);
}
END_TEST

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, folders_without_a_model_are_refused);
    tcase_add_loop_test(tests, bad_indexes_are_refused, 0, COUNT(bad_indexes));
    tcase_add_test(tests, shards_open_when_asked_for);
    tcase_add_loop_test(tests, published_formats_are_found, 0, COUNT(published));
    tcase_add_loop_test(tests, a_rank_loads_its_own_experts, 0, COUNT(published));
    tcase_add_test(tests, a_layer_that_is_not_there_is_a_fault);
    tcase_add_loop_test(tests, bad_configs_are_refused, 0, COUNT(bad_configs));
    tcase_add_loop_test(tests, absent_keys_are_what_the_family_has, 0, COUNT(absent));
    tcase_add_test(tests, a_language_model_may_be_one_level_down);
}

SUITE_MAIN("cli_checkpoint", 60, add_tests)
