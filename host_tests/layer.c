// A golden layer as a host would hand it over.

#include "host_tests/layer.h"

#include "plugin/dispatcher.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <check.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void optional(const struct golden *golden, const char *name, struct golden_tensor *tensor)
{
    memset(tensor, 0, sizeof *tensor);
    if (golden_has(golden, name)) *tensor = golden_get(golden, name);
}

void layer_open(struct layer *layer, const char *name)
{
    char path[96], layout[64];

    memset(layer, 0, sizeof *layer);
    (void)snprintf(path, sizeof path, "layers/%s.safetensors", name);
    golden_open(&layer->golden, path);
    layer->tokens = golden_int(&layer->golden, "num_tokens");
    layer->hidden = golden_int(&layer->golden, "hidden_size");
    layer->intermediate = golden_int(&layer->golden, "intermediate_size");
    layer->experts = golden_int(&layer->golden, "num_experts");
    layer->top_k = golden_int(&layer->golden, "top_k");
    golden_text(&layer->golden, "weight_layout", layout, sizeof layout);
    layer->orientation = strncmp(layout, "[E,H", 4) == 0 ? MOXIE_ROWS_IN : MOXIE_ROWS_OUT;
    layer->order =
        strstr(layout, "interleaved") != NULL ? MOXIE_ORDER_INTERLEAVED : MOXIE_ORDER_GATE_UP;
    layer->x = golden_get(&layer->golden, "hidden_states");
    layer->ids = golden_get(&layer->golden, "topk_ids");
    layer->weights = golden_get(&layer->golden, "topk_weights");
    layer->want = golden_get(&layer->golden, "routed_output");
    layer->w1 = golden_get(&layer->golden, "gate_up_proj");
    layer->w2 = golden_get(&layer->golden, "down_proj");
    optional(&layer->golden, "gate_up_proj_bias", &layer->w1_bias);
    optional(&layer->golden, "down_proj_bias", &layer->w2_bias);
}

void layer_close(struct layer *layer)
{
    golden_close(&layer->golden);
}

void layer_configure(const struct layer *layer, struct mock_host *mock)
{
    char text[32];

    mock_set_i64(mock, "hidden_size", layer->hidden);
    mock_set_i64(mock, "intermediate_size", layer->intermediate);
    mock_set_i64(mock, "num_experts", layer->experts);
    mock_set_i64(mock, "top_k", layer->top_k);
    mock_set_i64(mock, "cpu_threads", 2);
    mock_set_str(mock, "output_format", "f32");
    golden_text(&layer->golden, "activation", text, sizeof text);
    mock_set_str(mock, "activation", text);
    if (strcmp(text, "swigluoai") == 0) mock_set_f64(mock, "activation_limit", 7.0);
    golden_text(&layer->golden, "apply_router_weight_on_input", text, sizeof text);
    if (strcmp(text, "1") == 0) mock_set_i64(mock, "apply_router_weight_on_input", 1);
}

static moxie_tensor slice(const struct golden_tensor *whole, int64_t first, int64_t count,
                          int64_t *dims, uint32_t type)
{
    int64_t row_bytes = whole->bytes / whole->shape[0];

    dims[0] = count;
    for (int32_t i = 1; i < whole->ndim; i++)
        dims[i] = whole->shape[i];
    // Only read through; DLPack has no const.
    return tensor_make((void *)(uintptr_t)(whole->data + first * row_bytes), whole->ndim, dims,
                       NULL, type);
}

void layer_weights_of(const struct layer *layer, int64_t first, int64_t count,
                      struct layer_weights_view *view)
{
    const uint32_t bf16 = 1u << MOXIE_FORMAT_BF16;

    memset(view, 0, sizeof *view);
    view->w1 = (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                              .format = MOXIE_FORMAT_BF16,
                              .order = layer->order,
                              .orientation = layer->orientation};
    view->w2 = (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                              .format = MOXIE_FORMAT_BF16,
                              .order = MOXIE_ORDER_PLAIN,
                              .orientation = layer->orientation};
    view->w1.values = slice(&layer->w1, first, count, view->dims[0], bf16);
    view->w2.values = slice(&layer->w2, first, count, view->dims[1], bf16);
    if (layer->w1_bias.data != NULL) {
        view->w1.bias = slice(&layer->w1_bias, first, count, view->dims[2], bf16);
        view->w2.bias = slice(&layer->w2_bias, first, count, view->dims[3], bf16);
    }
    view->weights =
        (moxie_weights){.struct_size = sizeof(moxie_weights), .w1 = &view->w1, .w2 = &view->w2};
}

void layer_batch_of(const struct layer *layer, int64_t first, int64_t tokens, float *y,
                    struct layer_batch *batch)
{
    memset(batch, 0, sizeof *batch);
    batch->batch.struct_size = sizeof(moxie_batch);
    batch->batch.id_space = MOXIE_IDS_GLOBAL;
    batch->batch.x = slice(&layer->x, first, tokens, batch->dims[0], 1u << MOXIE_FORMAT_BF16);
    batch->batch.ids = slice(&layer->ids, first, tokens, batch->dims[1], TENSOR_INT32);
    batch->batch.weights =
        slice(&layer->weights, first, tokens, batch->dims[2], 1u << MOXIE_FORMAT_F32);
    batch->dims[3][0] = tokens;
    batch->dims[3][1] = layer->hidden;
    batch->batch.y = tensor_make(y, 2, batch->dims[3], NULL, 1u << MOXIE_FORMAT_F32);
}

int64_t layer_part(int64_t tokens, int64_t ranks, int64_t rank)
{
    return tokens / ranks + (rank < tokens % ranks);
}

int64_t layer_part_first(int64_t tokens, int64_t ranks, int64_t rank)
{
    int64_t extra = tokens % ranks;

    return tokens / ranks * rank + (rank < extra ? rank : extra);
}

void layer_parts(const struct layer *layer, int32_t ranks, int64_t parts[MOXIE_RANKS_MAX])
{
    for (int32_t rank = 0; rank < ranks; rank++)
        parts[rank] = layer_part(layer->tokens, ranks, rank);
}

float *layer_poisoned(const struct layer *layer)
{
    size_t bytes = (size_t)(layer->tokens * layer->hidden) * sizeof(float);
    float *y = malloc(bytes);

    ck_assert_ptr_nonnull(y);
    memset(y, 0xff, bytes);
    return y;
}

void layer_rank_init(struct layer_rank *rank, const struct layer *layer, struct mock_group *group,
                     int32_t index)
{
    memset(rank, 0, sizeof *rank);
    mock_host_init(&rank->mock);
    layer_configure(layer, &rank->mock);
    if (group != NULL) mock_host_join(&rank->mock, group, index);
}

void layer_rank_prepare(struct layer_rank *rank, const struct layer *layer)
{
    static const struct registry none;
    struct layer_weights_view view;
    const moxie_plan *plan = NULL;
    moxie_error *error = &rank->mock.error;

    ck_assert_msg(instance_open(&rank->mock.host, &none, &rank->instance, error) == MOXIE_OK, "%s",
                  rank->mock.text);
    ck_assert_msg(instance_plan(rank->instance, &plan, error) == MOXIE_OK, "%s", rank->mock.text);
    layer_weights_of(layer, plan->bounds->expert_first, plan->bounds->experts_local, &view);
    ck_assert_msg(runner_create(rank->instance, 0,
                                runner_takes_weights(rank->instance) ? &view.weights : NULL,
                                &rank->runner, error) == MOXIE_OK,
                  "%s", rank->mock.text);
}

void layer_rank_open(struct layer_rank *rank, const struct layer *layer)
{
    moxie_error *error = &rank->mock.error;

    layer_rank_prepare(rank, layer);
    ck_assert_msg(dispatcher_create(rank->instance,
                                    (enum dispatcher_kind)rank->instance->plan.limits.dispatcher,
                                    &rank->dispatcher, error) == MOXIE_OK,
                  "%s", rank->mock.text);
}

void layer_rank_close(struct layer_rank *rank)
{
    dispatcher_destroy(rank->dispatcher);
    runner_destroy(rank->runner);
    ck_assert_int_eq(instance_close(rank->instance, &rank->mock.error), MOXIE_OK);
    mock_host_fini(&rank->mock);
}
