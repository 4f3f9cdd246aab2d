// kernels/cpu/router.c: every golden layer's logits, a slow reference on random logits with ties,
// and logits that are no numbers.

#include "kernels/router.h"

#include "kernels/cpu/numbers.h"
#include "kernels/types.h"

#include "host_tests/golden.h"
#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>

static void run(const struct router_args *args, int32_t workers)
{
    struct cpu_stream stream;

    stream_init(&stream, workers, CPU_SCALAR);
    ck_assert_int_eq(router_cpu(args, &stream), 0);
    stream_fini(&stream);
}

struct family {
    const char *path;
    int32_t scoring, renormalize, groups, groups_top;
    double epsilon, scaling_factor;
};

static const struct family families[] = {
    {"layers/mixtral_a.safetensors", SCORING_SOFTMAX, 1, 0, 0, 0.0, 1.0},
    {"layers/qwen2_moe_a.safetensors", SCORING_SOFTMAX, 0, 0, 0, 0.0, 1.0},
    {"layers/qwen3_moe_a.safetensors", SCORING_SOFTMAX, 1, 0, 0, 0.0, 1.0},
    {"layers/qwen3_moe_norenorm.safetensors", SCORING_SOFTMAX, 0, 0, 0, 0.0, 1.0},
    {"layers/qwen3_moe_t1.safetensors", SCORING_SOFTMAX, 1, 0, 0, 0.0, 1.0},
    {"layers/deepseek_v3_a.safetensors", SCORING_SIGMOID, 1, 8, 4, 1e-20, 2.5},
    {"layers/gpt_oss_a.safetensors", SCORING_TOP_K_SOFTMAX, 0, 0, 0, 0.0, 1.0},
    {"layers/llama4_a.safetensors", SCORING_SIGMOID, 0, 0, 0, 0.0, 1.0},
};

START_TEST(golden_layers)
{
    const struct family *family = &families[_i];
    struct golden golden;
    struct golden_tensor logits, ids, weights, bias;
    int32_t got_ids[64 * 8];
    float got_weights[64 * 8];
    struct router_args args = {
        .ids = got_ids,
        .weights = got_weights,
        .logits_format = FORMAT_F32,
        .id_bytes = 4,
        .scoring = family->scoring,
        .renormalize = family->renormalize,
        .groups = family->groups,
        .groups_top = family->groups_top,
        .renormalize_epsilon = family->epsilon,
        .scaling_factor = family->scaling_factor,
    };

    golden_open(&golden, family->path);
    logits = golden_get(&golden, "router_logits");
    ids = golden_get(&golden, "topk_ids");
    weights = golden_get(&golden, "topk_weights");
    args.logits = logits.data;
    args.tokens = (int32_t)logits.shape[0];
    args.experts = (int32_t)logits.shape[1];
    args.top_k = (int32_t)ids.shape[1];
    args.logits_stride_bytes = args.experts * 4;
    args.id_stride_bytes = args.top_k * 4;
    args.weight_stride_bytes = args.top_k * 4;
    if (golden_has(&golden, "e_score_correction_bias")) {
        bias = golden_get(&golden, "e_score_correction_bias");
        args.correction_bias = (const float *)(const void *)bias.data;
    }
    ck_assert_int_le(ids.count, 64 * 8);
    run(&args, 2);
    for (int64_t i = 0; i < ids.count; i++) {
        int64_t at = i;

        // The grouped reference leaves its choice unsorted.
        for (int32_t t = 0; t < args.top_k && family->groups > 0; t++) {
            int64_t other = i - i % args.top_k + t;

            if (got_ids[other] == (int32_t)golden_value(&ids, i)) at = other;
        }
        ck_assert_int_eq(got_ids[at], (int32_t)golden_value(&ids, i));
        ck_assert_double_eq_tol((double)got_weights[at], golden_value(&weights, i), 1e-6);
    }
    golden_close(&golden);
}
END_TEST

#define TOKENS  40
#define EXPERTS 24
#define TOP_K   5

struct input {
    unsigned char logits[TOKENS * EXPERTS * 4];
    float bias[EXPERTS];
    int64_t ids[TOKENS * TOP_K];
    float weights[TOKENS * TOP_K];
};

static struct router_args input_init(struct input *input, int32_t format)
{
    uint32_t seed = 13;

    memset(input, 0xff, sizeof *input);
    for (int i = 0; i < TOKENS * EXPERTS; i++) {
        // Eighths: many ties.
        float logit = rintf(random_unit(&seed) * 16.0f) / 8.0f;

        numbers_encode(format, &logit, 1, input->logits + i * number_bytes(format));
    }
    for (int i = 0; i < EXPERTS; i++)
        input->bias[i] = rintf(random_unit(&seed) * 4.0f) / 8.0f;
    return (struct router_args){
        .logits = input->logits,
        .ids = input->ids,
        .weights = input->weights,
        .logits_stride_bytes = EXPERTS * number_bytes(format),
        .id_stride_bytes = TOP_K * 8,
        .weight_stride_bytes = TOP_K * 4,
        .logits_format = format,
        .id_bytes = 8,
        .tokens = TOKENS,
        .experts = EXPERTS,
        .top_k = TOP_K,
        .scoring = SCORING_SIGMOID,
        .scaling_factor = 1.0,
    };
}

static double logit_at(const struct router_args *args, int token, int expert)
{
    return (double)number_load(args->logits_format, args->logits, token * EXPERTS + expert);
}

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

static double key_at(const struct router_args *args, int token, int expert)
{
    double score = sigmoid(logit_at(args, token, expert));

    return args->correction_bias == NULL ? score : score + (double)args->correction_bias[expert];
}

// 1 when the group of `expert` is among the best.
static int competes(const struct router_args *args, int token, int expert)
{
    double sums[EXPERTS];
    int size, better = 0, group;

    if (args->groups <= 1) return 1;
    size = EXPERTS / args->groups;
    group = expert / size;
    for (int g = 0; g < args->groups; g++) {
        sums[g] = -1e9;
        for (int a = g * size; a < (g + 1) * size; a++) {
            for (int b = g * size; b < a; b++)
                sums[g] = fmax(sums[g], key_at(args, token, a) + key_at(args, token, b));
        }
    }
    for (int g = 0; g < args->groups; g++)
        better += sums[g] > sums[group] || (sums[g] == sums[group] && g < group);
    return better < args->groups_top;
}

// The expert that beats all others but those before it.
static int expected_id(const struct router_args *args, int token, int place)
{
    for (int expert = 0; expert < EXPERTS; expert++) {
        int better = 0;

        if (!competes(args, token, expert)) continue;
        for (int other = 0; other < EXPERTS; other++) {
            double difference = key_at(args, token, other) - key_at(args, token, expert);

            better += competes(args, token, other) &&
                      (difference > 0.0 || (difference == 0.0 && other < expert));
        }
        if (better == place) return expert;
    }
    return -1;
}

START_TEST(ties_go_to_the_lower_id)
{
    static struct input input;
    struct router_args args = input_init(&input, FORMAT_F32 + _i % 3);

    args.correction_bias = _i / 3 % 2 == 1 ? input.bias : NULL;
    args.groups = _i / 6 == 1 ? 6 : 1;
    args.groups_top = 2;
    run(&args, 3);
    for (int token = 0; token < TOKENS; token++) {
        for (int t = 0; t < TOP_K; t++) {
            int id = expected_id(&args, token, t);

            ck_assert_int_eq(input.ids[token * TOP_K + t], id);
            ck_assert_double_eq_tol((double)input.weights[token * TOP_K + t],
                                    sigmoid(logit_at(&args, token, id)), 1e-7);
        }
    }
}
END_TEST

// Whatever the scoring, renormalize divides its weights by their sum plus the epsilon: those of a
// softmax over the top k sum to 1.
START_TEST(an_epsilon_joins_the_sum_of_the_weights)
{
    static struct input input, plain;
    struct router_args args = input_init(&input, FORMAT_F32);
    struct router_args plain_args = input_init(&plain, FORMAT_F32);

    args.scoring = plain_args.scoring = SCORING_SOFTMAX + _i;
    args.renormalize = 1;
    args.renormalize_epsilon = 0.25;
    run(&args, 1);
    run(&plain_args, 1);
    for (int token = 0; token < TOKENS; token++) {
        const float *weights = plain.weights + token * TOP_K;
        double sum = 0.25;

        for (int t = 0; t < TOP_K; t++)
            sum += (double)weights[t];
        for (int t = 0; t < TOP_K; t++)
            ck_assert_double_eq_tol((double)input.weights[token * TOP_K + t],
                                    (double)weights[t] / sum, 1e-6);
    }
}
END_TEST

static void put(struct input *input, int expert, float logit)
{
    memcpy(input->logits + expert * 4, &logit, sizeof logit);
}

// With two numbers among NaNs the rest has no expert, whatever the scoring.
START_TEST(a_nan_never_wins)
{
    static struct input input;
    struct router_args args = input_init(&input, FORMAT_F32);

    args.tokens = 1;
    args.scoring = SCORING_SOFTMAX + _i % 3;
    args.renormalize = _i / 3;
    for (int i = 0; i < EXPERTS; i++)
        put(&input, i, NAN);
    put(&input, 7, -1.0f);
    put(&input, 20, 2.0f);
    run(&args, 1);
    ck_assert_int_eq(input.ids[0], 20);
    ck_assert_int_eq(input.ids[1], 7);
    ck_assert(input.weights[0] > input.weights[1] && input.weights[1] > 0.0f);
    for (int t = 2; t < TOP_K; t++) {
        ck_assert_int_eq(input.ids[t], -1);
        ck_assert_float_eq(input.weights[t], 0.0f);
    }
    if (args.renormalize)
        ck_assert_double_eq_tol((double)input.weights[0] + (double)input.weights[1], 1.0, 1e-6);
}
END_TEST

START_TEST(infinities_are_limits)
{
    static struct input input;
    struct router_args args = input_init(&input, FORMAT_F32);

    args.tokens = 1;
    args.scoring = SCORING_SOFTMAX + _i;
    args.scaling_factor = 2.0;
    put(&input, 5, INFINITY);
    put(&input, 0, -INFINITY);
    run(&args, 1);
    ck_assert_int_eq(input.ids[0], 5);
    ck_assert_float_eq(input.weights[0], 2.0f);
    for (int t = 1; t < TOP_K; t++)
        ck_assert(input.weights[t] >= 0.0f && input.weights[t] <= 2.0f);
    for (int i = 0; i < EXPERTS; i++)
        put(&input, i, -INFINITY);
    args.renormalize = 1;
    run(&args, 1);
    for (int t = 0; t < TOP_K; t++) {
        ck_assert_int_eq(input.ids[t], t);
        ck_assert(!isnan(input.weights[t]));
    }
}
END_TEST

START_TEST(more_places_than_experts_in_the_groups)
{
    static struct input input;
    struct router_args args = input_init(&input, FORMAT_F32);

    args.groups = 8;
    args.groups_top = 1;
    run(&args, 1);
    for (int token = 0; token < TOKENS; token++) {
        for (int t = 0; t < TOP_K; t++)
            ck_assert((input.ids[token * TOP_K + t] < 0) == (t >= EXPERTS / 8));
    }
}
END_TEST

// A group of one expert scores what that has: the best groups are the best experts.
START_TEST(a_group_of_one_scores_as_its_expert)
{
    static struct input input, plain;
    struct router_args args = input_init(&input, FORMAT_F32);
    struct router_args plain_args = input_init(&plain, FORMAT_F32);

    args.groups = EXPERTS;
    args.groups_top = TOP_K;
    run(&args, 1);
    run(&plain_args, 1);
    ck_assert_mem_eq(input.ids, plain.ids, sizeof input.ids);
}
END_TEST

START_TEST(groups_that_do_not_fit)
{
    static struct input input;
    struct router_args args = input_init(&input, FORMAT_F32);
    struct cpu_stream stream = {.workers = 1};

    args.groups = 7;
    ck_assert_int_ne(router_cpu(&args, &stream), 0);
    args.groups = 1025;
    args.experts = 1025;
    ck_assert_int_ne(router_cpu(&args, &stream), 0);
    ck_assert_int_eq(input.ids[0], -1);
    ck_assert(isnan(input.weights[0]));
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, golden_layers, 0, (int)(sizeof families / sizeof families[0]));
    tcase_add_loop_test(tests, ties_go_to_the_lower_id, 0, 12);
    tcase_add_loop_test(tests, an_epsilon_joins_the_sum_of_the_weights, 0, 3);
    tcase_add_loop_test(tests, a_nan_never_wins, 0, 6);
    tcase_add_loop_test(tests, infinities_are_limits, 0, 3);
    tcase_add_test(tests, a_group_of_one_scores_as_its_expert);
    tcase_add_test(tests, groups_that_do_not_fit);
    tcase_add_test(tests, more_places_than_experts_in_the_groups);
}

SUITE_MAIN("router", 60, add)
