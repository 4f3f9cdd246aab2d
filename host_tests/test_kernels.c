// The kernels together: every golden layer through route, gate_up, down and combine, at the error
// that the design allows f32 arithmetic.

#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/isa.h"

#include "host_tests/golden.h"
#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <string.h>

static const char *const layers[] = {
    "layers/deepseek_v3_a.safetensors",      "layers/gpt_oss_a.safetensors",
    "layers/llama4_a.safetensors",           "layers/mixtral_a.safetensors",
    "layers/qwen2_moe_a.safetensors",        "layers/qwen3_moe_a.safetensors",
    "layers/qwen3_moe_norenorm.safetensors", "layers/qwen3_moe_t1.safetensors",
};

struct layer {
    struct golden golden;
    struct golden_tensor x, ids, weights, w1, w2, bias1, bias2, wanted;
    int32_t tokens, top_k, hidden, intermediate, experts;
    int32_t order, rows_in, activation, on_input;
    int64_t pairs;
    int32_t *expert_offset, *pair_row, *row_pair;
    float *pair_weight, *mid, *pair_out, *y;
};

static void layer_init(struct layer *layer, const char *path)
{
    char text[64];

    memset(layer, 0, sizeof *layer);
    golden_open(&layer->golden, path);
    layer->x = golden_get(&layer->golden, "hidden_states");
    layer->ids = golden_get(&layer->golden, "topk_ids");
    layer->weights = golden_get(&layer->golden, "topk_weights");
    layer->w1 = golden_get(&layer->golden, "gate_up_proj");
    layer->w2 = golden_get(&layer->golden, "down_proj");
    layer->wanted = golden_get(&layer->golden, "routed_output");
    if (golden_has(&layer->golden, "gate_up_proj_bias")) {
        layer->bias1 = golden_get(&layer->golden, "gate_up_proj_bias");
        layer->bias2 = golden_get(&layer->golden, "down_proj_bias");
    }
    layer->tokens = (int32_t)layer->x.shape[0];
    layer->hidden = (int32_t)layer->x.shape[1];
    layer->top_k = (int32_t)layer->ids.shape[1];
    layer->experts = (int32_t)layer->w1.shape[0];
    layer->intermediate = (int32_t)golden_int(&layer->golden, "intermediate_size");
    golden_text(&layer->golden, "weight_layout", text, sizeof text);
    layer->rows_in = strncmp(text, "[E,H,2I]", 8) == 0;
    layer->order = strstr(text, "interleaved") != NULL ? ORDER_INTERLEAVED : ORDER_GATE_UP;
    golden_text(&layer->golden, "activation", text, sizeof text);
    layer->activation = strcmp(text, "swigluoai") == 0 ? ACTIVATION_SWIGLUOAI : ACTIVATION_SILU;
    layer->on_input = golden_int(&layer->golden, "apply_router_weight_on_input") == 1;
    layer->pairs = layer->ids.count;
    layer->expert_offset = poisoned(((size_t)layer->experts + 1) * 4);
    layer->pair_row = poisoned((size_t)layer->pairs * 4);
    layer->row_pair = poisoned((size_t)layer->pairs * 4);
    layer->pair_weight = poisoned((size_t)layer->pairs * 4);
    layer->mid = poisoned((size_t)(layer->pairs * layer->intermediate) * 4);
    layer->pair_out = poisoned((size_t)(layer->pairs * layer->hidden) * 4);
    layer->y = poisoned((size_t)layer->x.count * 4);
}

static void layer_fini(struct layer *layer)
{
    free(layer->expert_offset);
    free(layer->pair_row);
    free(layer->row_pair);
    free(layer->pair_weight);
    free(layer->mid);
    free(layer->pair_out);
    free(layer->y);
    golden_close(&layer->golden);
}

static struct weight_view view_of(const struct layer *layer, const struct golden_tensor *values,
                                  const struct golden_tensor *bias, int64_t n, int64_t k)
{
    return (struct weight_view){
        .values = values->data,
        .bias = bias->data,
        .n = n,
        .k = k,
        .expert_stride_bytes = n * k * 2,
        .row_stride_bytes = (layer->rows_in ? n : k) * 2,
        .bias_expert_stride_bytes = n * 2,
        .format = FORMAT_BF16,
        .rows_in = layer->rows_in,
        .bias_format = FORMAT_BF16,
        .global_stride = 1,
    };
}

static void run_route(struct layer *layer, const struct row_slab *slab, struct cpu_stream *stream)
{
    struct route_args route = {
        .slabs = slab,
        .expert_offset = layer->expert_offset,
        .pair_row = layer->pair_row,
        .pair_weight = layer->pair_weight,
        .row_pair = layer->row_pair,
        .pairs_max = layer->pairs,
        .experts = layer->experts,
        .slabs_count = 1,
        .rows_cap = layer->tokens,
        .top_k = layer->top_k,
    };

    ck_assert_int_eq(kernels_cpu.route(&route, stream), 0);
}

static void run_products(struct layer *layer, const struct row_slab *slab,
                         struct cpu_stream *stream)
{
    struct gate_up_args gate_up = {
        .slabs = slab,
        .expert_offset = layer->expert_offset,
        .pair_row = layer->pair_row,
        .pair_weight = layer->on_input ? layer->pair_weight : NULL,
        .w1 = view_of(layer, &layer->w1, &layer->bias1, 2 * layer->intermediate, layer->hidden),
        .mid = layer->mid,
        .mid_stride_bytes = layer->intermediate * 4,
        .mid_format = FORMAT_F32,
        .experts = layer->experts,
        .slabs_count = 1,
        .rows_cap = layer->tokens,
        .hidden = layer->hidden,
        .intermediate = layer->intermediate,
        .activation = layer->activation,
        .operand_format = FORMAT_F32,
        .alpha = 1.702f,
        .beta = 1.0f,
        .limit = (float)golden_int(&layer->golden, "limit"),
    };
    struct down_args down = {
        .expert_offset = layer->expert_offset,
        .mid = layer->mid,
        .mid_stride_bytes = layer->intermediate * 4,
        .w2 = view_of(layer, &layer->w2, &layer->bias2, layer->hidden, layer->intermediate),
        .pair_out = layer->pair_out,
        .pair_stride_bytes = layer->hidden * 4,
        .mid_format = FORMAT_F32,
        .pair_format = FORMAT_F32,
        .experts = layer->experts,
        .operand_format = FORMAT_F32,
    };

    gate_up.w1.order = layer->order;
    ck_assert_int_eq(gate_up_cpu(&gate_up, stream), 0);
    ck_assert_int_eq(down_cpu(&down, stream), 0);
}

static void run_layer(struct layer *layer, struct cpu_stream *stream)
{
    struct row_slab slab = {
        .rows = layer->x.data,
        .ids = layer->ids.data,
        .weights = layer->weights.data,
        .row_stride_bytes = layer->hidden * 2,
        .id_stride_bytes = layer->top_k * 4,
        .weight_stride_bytes = layer->top_k * 4,
        .cap = layer->tokens,
        .format = FORMAT_BF16,
        .id_bytes = 4,
        .weight_format = FORMAT_F32,
    };
    struct out_slab out = {
        .rows = layer->y,
        .row_stride_bytes = layer->hidden * 4,
        .cap = layer->tokens,
        .format = FORMAT_F32,
    };
    struct combine_args combine = {
        .pair_out = layer->pair_out,
        .pair_stride_bytes = layer->hidden * 4,
        .pairs = layer->pairs,
        .row_pair = layer->row_pair,
        .pair_weight = layer->on_input ? NULL : layer->pair_weight,
        .slabs = &out,
        .pair_format = FORMAT_F32,
        .slabs_count = 1,
        .rows_cap = layer->tokens,
        .hidden = layer->hidden,
        .top_k = layer->top_k,
        .scale = 1.0f,
    };

    run_route(layer, &slab, stream);
    run_products(layer, &slab, stream);
    ck_assert_int_eq(kernels_cpu.combine(&combine, stream), 0);
}

START_TEST(golden_layers)
{
    struct layer layer;
    struct cpu_stream stream;
    double error;

    for (int isa = 0; isa <= (int)cpu_isa_best(); isa++) {
        layer_init(&layer, layers[_i]);
        stream_init(&stream, 1 + isa, (enum cpu_isa)isa);
        run_layer(&layer, &stream);
        error = golden_error(layer.y, &layer.wanted);
        ck_assert_msg(error <= 1e-6, "%s: %g", layers[_i], error);
        stream_fini(&stream);
        layer_fini(&layer);
    }
}
END_TEST

// Every other test runs the sets up to the best: one that is not found is not tested, nor used. The
// compiler looks by itself.
START_TEST(the_best_instructions_are_found)
{
    struct cpu_stream stream = {.isa = CPU_SCALAR};

    ck_assert_ptr_eq(cpu_ops_of(&stream), &cpu_ops_scalar);
#if defined(__x86_64__)
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");

    ck_assert_int_eq(cpu_isa_best(), avx2 ? avx512 ? CPU_AVX512 : CPU_AVX2 : CPU_SCALAR);
    stream.isa = CPU_AVX2;
    ck_assert_ptr_eq(cpu_ops_of(&stream), &cpu_ops_avx2);
    stream.isa = CPU_AVX512;
    ck_assert_ptr_eq(cpu_ops_of(&stream), &cpu_ops_avx512);
#else
    ck_assert_int_eq(cpu_isa_best(), CPU_SCALAR);
#endif
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, the_best_instructions_are_found);
    tcase_add_loop_test(tests, golden_layers, 0, (int)(sizeof layers / sizeof layers[0]));
}

SUITE_MAIN("kernels", 120, add)
