// plugin/routing.c: every golden layer's logits give its ids and weights; whatever else a host
// passes is refused before anything is written.

#include "plugin/routing.h"

#include "host_tests/golden.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <fenv.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define TOKENS_MAX 64

struct family {
    const char *layer;
    int32_t unordered; // its model takes the top k in no order
    moxie_routing routing;
};

static const struct family families[] = {
    {"mixtral_a", 0, {.scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1}},
    {"qwen2_moe_a", 0, {.scoring = MOXIE_SCORING_SOFTMAX}},
    {"qwen3_moe_a", 0, {.scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1}},
    {"qwen3_moe_norenorm", 0, {.scoring = MOXIE_SCORING_SOFTMAX}},
    {"qwen3_moe_t1", 0, {.scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1}},
    {"gpt_oss_a", 0, {.scoring = MOXIE_SCORING_TOP_K_SOFTMAX}},
    {"llama4_a", 0, {.scoring = MOXIE_SCORING_SIGMOID}},
    {"deepseek_v3_a",
     1,
     {.scoring = MOXIE_SCORING_SIGMOID,
      .renormalize = 1,
      .groups = 8,
      .groups_top = 4,
      .renormalize_epsilon = 1e-20,
      .scaling_factor = 2.5}},
};
#define FAMILIES ((int)(sizeof families / sizeof families[0]))

// ---- Goldens -----------------------------------------------------------------------------------

// Where the golden's pair `at` is among the token's `top_k` results.
static int64_t place_of(const struct golden_tensor *want_ids, int64_t at, int64_t top_k,
                        const int64_t *ids, int32_t unordered)
{
    int64_t first = at / top_k * top_k;

    for (int64_t i = first; unordered && i < first + top_k; i++) {
        if (ids[i] == (int64_t)golden_value(want_ids, at)) return i;
    }
    return at;
}

static void check_golden(const struct golden *golden, int32_t unordered, const int64_t *ids,
                         const float *weights)
{
    struct golden_tensor want_ids = golden_get(golden, "topk_ids");
    struct golden_tensor want_weights = golden_get(golden, "topk_weights");

    for (int64_t i = 0; i < want_ids.count; i++) {
        int64_t at = place_of(&want_ids, i, want_ids.shape[1], ids, unordered);
        double want = golden_value(&want_weights, i);

        ck_assert_int_eq(ids[at], (int64_t)golden_value(&want_ids, i));
        ck_assert_msg(fabs((double)weights[at] - want) <= 1e-6 * fabs(want),
                      "weight %d: %.9g, want %.9g", (int)i, (double)weights[at], want);
    }
}

// Logits, bias and results of a layer, all compact.
START_TEST(goldens)
{
    moxie_routing routing = families[_i].routing;
    struct golden golden;
    struct golden_tensor logits, bias;
    moxie_tensor from, to_ids, to_weights;
    int64_t dims[2];
    int64_t ids[TOKENS_MAX * MOXIE_TOP_K_MAX];
    float weights[TOKENS_MAX * MOXIE_TOP_K_MAX];
    char path[64];
    struct said said;

    said_init(&said);
    (void)snprintf(path, sizeof path, "layers/%s.safetensors", families[_i].layer);
    golden_open(&golden, path);
    logits = golden_get(&golden, "router_logits");
    dims[0] = logits.shape[0];
    dims[1] = golden_int(&golden, "top_k");
    ck_assert_int_le(dims[0], TOKENS_MAX);
    routing.struct_size = sizeof routing;
    if (golden_has(&golden, "e_score_correction_bias")) {
        bias = golden_get(&golden, "e_score_correction_bias");
        routing.correction_bias =
            tensor_make((void *)(uintptr_t)bias.data, 1, bias.shape, NULL, 1u << MOXIE_FORMAT_F32);
    }
    from =
        tensor_make((void *)(uintptr_t)logits.data, 2, logits.shape, NULL, 1u << MOXIE_FORMAT_F32);
    to_ids = tensor_make(ids, 2, dims, NULL, TENSOR_INT64);
    to_weights = tensor_make(weights, 2, dims, NULL, 1u << MOXIE_FORMAT_F32);
    ACCEPTED(&said, routing_route(&routing, &from, &to_ids, &to_weights, NULL, &said.error));
    check_golden(&golden, families[_i].unordered, ids, weights);
    golden_close(&golden);
}
END_TEST

// ---- A small call, for a test to spoil ---------------------------------------------------------

#define TOKENS  3
#define EXPERTS 8
#define TOP_K   2

struct sample {
    moxie_routing routing;
    moxie_tensor logits, ids, weights;
    int64_t logit_dims[2], k_dims[2], bias_dims[1], k_strides[2];
    float from[TOKENS * EXPERTS], bias[EXPERTS];
    int32_t to_ids[TOKENS * 8];
    float to_weights[TOKENS * 8];
    struct said said;
};

static void sample_init(struct sample *s)
{
    memset(s, 0, sizeof *s);
    memset(s->to_ids, 0x5a, sizeof s->to_ids);
    memset(s->to_weights, 0x5a, sizeof s->to_weights);
    for (int32_t i = 0; i < TOKENS * EXPERTS; i++)
        s->from[i] = (float)(i * 5 % EXPERTS);
    memcpy(s->logit_dims, (int64_t[]){TOKENS, EXPERTS}, sizeof s->logit_dims);
    memcpy(s->k_dims, (int64_t[]){TOKENS, TOP_K}, sizeof s->k_dims);
    memcpy(s->k_strides, (int64_t[]){TOP_K, 1}, sizeof s->k_strides);
    s->bias_dims[0] = EXPERTS;
    s->routing = (moxie_routing){
        .struct_size = sizeof s->routing, .scoring = MOXIE_SCORING_SOFTMAX, .renormalize = 1};
    s->logits = tensor_make(s->from, 2, s->logit_dims, NULL, 1u << MOXIE_FORMAT_F32);
    s->ids = tensor_make(s->to_ids, 2, s->k_dims, NULL, TENSOR_INT32);
    s->weights = tensor_make(s->to_weights, 2, s->k_dims, NULL, 1u << MOXIE_FORMAT_F32);
    said_init(&s->said);
}

static int32_t route(struct sample *s)
{
    return routing_route(&s->routing, &s->logits, &s->ids, &s->weights, NULL, &s->said.error);
}

// A refused call has written nothing.
static int32_t refused(struct sample *s)
{
    int32_t answer = route(s);

    for (size_t i = 0; i < sizeof s->to_ids; i++) {
        ck_assert_int_eq(((unsigned char *)s->to_ids)[i], 0x5a);
        ck_assert_int_eq(((unsigned char *)s->to_weights)[i], 0x5a);
    }
    return answer;
}

START_TEST(rows_keep_their_distance)
{
    struct sample s;

    sample_init(&s);
    s.k_strides[0] = 4;
    s.ids.strides = s.weights.strides = s.k_strides;
    ACCEPTED(&s.said, route(&s));
    for (int32_t i = 0; i < TOKENS * 8; i++) {
        int written = i < TOKENS * 4 && i % 4 < TOP_K;

        ck_assert_int_eq(s.to_ids[i] != 0x5a5a5a5a, written);
        if (written) ck_assert_int_eq((int)s.from[i / 4 * EXPERTS + s.to_ids[i]], 7 - i % 4);
    }
    ck_assert_float_eq_tol(s.to_weights[0] + s.to_weights[1], 1.0f, 1e-6f);
}
END_TEST

START_TEST(no_scaling_factor_is_one)
{
    struct sample s;
    float once;

    sample_init(&s);
    ACCEPTED(&s.said, route(&s));
    once = s.to_weights[0];
    s.routing.scaling_factor = 2.5;
    ACCEPTED(&s.said, route(&s));
    ck_assert_float_eq_tol(s.to_weights[0], 2.5f * once, 1e-6f);
}
END_TEST

START_TEST(nothing_is_routed_to_nothing)
{
    struct sample s;

    sample_init(&s);
    s.logit_dims[0] = s.k_dims[0] = 0;
    s.logits.data = s.ids.data = s.weights.data = NULL;
    ACCEPTED(&s.said, refused(&s));
}
END_TEST

START_TEST(numbers_that_are_none)
{
    struct sample s;

    sample_init(&s);
    for (int32_t i = 0; i < EXPERTS; i++)
        s.from[i] = i == 5 ? 1.0f : NAN;
    ACCEPTED(&s.said, route(&s));
    ck_assert_int_eq(s.to_ids[0], 5);
    ck_assert_float_eq(s.to_weights[0], 1.0f);
    ck_assert_int_eq(s.to_ids[1], -1);
    ck_assert_float_eq(s.to_weights[1], 0.0f);
}
END_TEST

START_TEST(the_top_k_is_bounded)
{
    struct sample s;
    static float wide[TOKENS * 64];

    sample_init(&s);
    s.k_dims[1] = 0;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "top-k 0 of 8", "1..8");
    s.logit_dims[1] = 1;
    s.k_dims[1] = 2;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "top-k 2 of 1 experts; want 1..1");
    s.logit_dims[1] = 0;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "of 0 experts");
    s.logits.data = wide;
    s.logit_dims[1] = 64;
    s.k_dims[0] = s.logit_dims[0] = 0;
    s.k_dims[1] = MOXIE_TOP_K_MAX;
    ACCEPTED(&s.said, refused(&s));
    s.k_dims[1] = MOXIE_TOP_K_MAX + 1;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "top-k 33 of 64", "1..32");
    s.k_dims[1] = 1;
    s.logit_dims[1] = (1 << 20) + 1;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, refused(&s), "1048577 experts", "1048576");
}
END_TEST

START_TEST(groups_divide_the_experts)
{
    static const int32_t groups[] = {-1, 3, 16, 1025, INT32_MAX, INT32_MIN};
    struct sample s;

    sample_init(&s);
    s.routing.groups_top = 1;
    for (size_t i = 0; i < sizeof groups / sizeof groups[0]; i++) {
        char seen[48];

        (void)snprintf(seen, sizeof seen, "groups: %d", groups[i]);
        s.routing.groups = groups[i];
        SAID(&s.said, MOXIE_E_INVALID, refused(&s), seen, "8 experts");
    }
    s.routing.groups = 8;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "groups_top: 1 of 8 groups of 1 experts", "top 2");
    s.routing.groups_top = 0;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "groups_top: 0 of 8");
    s.routing.groups_top = 9;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "groups_top: 9 of 8");
    s.routing.groups_top = INT32_MIN;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "groups_top: -2147483648");
    s.routing.groups = 1; // none, whatever groups_top says
    ACCEPTED(&s.said, route(&s));
    s.routing.groups = 8;
    s.routing.groups_top = 2;
    ACCEPTED(&s.said, route(&s));
    s.routing.scoring = MOXIE_SCORING_TOP_K_SOFTMAX;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, route(&s), "routing.groups");
}
END_TEST

START_TEST(factors_are_numbers)
{
    // The last is none as a float.
    static const double numbers[] = {(double)NAN, (double)INFINITY, -(double)INFINITY, 1e300};
    struct sample s;

    sample_init(&s);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        s.routing.scaling_factor = numbers[i];
        SAID(&s.said, MOXIE_E_INVALID, refused(&s), "scaling_factor: ");
        s.routing.scaling_factor = 1;
        s.routing.renormalize_epsilon = numbers[i];
        SAID(&s.said, MOXIE_E_INVALID, refused(&s), "renormalize_epsilon: ");
        s.routing.renormalize_epsilon = 0;
    }
    s.routing.renormalize_epsilon = -1e-9;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "renormalize_epsilon: ");
}
END_TEST

// Neither what is refused nor what is routed raises anything in the host's thread.
START_TEST(a_thread_that_traps_is_not_ended)
{
    struct sample s;
    int traps;

    sample_init(&s);
    s.from[0] = -800.0f;
    s.routing.scoring = MOXIE_SCORING_SIGMOID;
    (void)feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
    traps = fegetexcept();
    ACCEPTED(&s.said, route(&s));
    s.routing.scaling_factor = 1e300;
    SAID(&s.said, MOXIE_E_INVALID, route(&s), "scaling_factor");
    ck_assert_int_eq(fegetexcept(), traps);
    (void)fedisableexcept(FE_ALL_EXCEPT);
}
END_TEST

START_TEST(wrong_tensors_are_named)
{
    static const char *const names[] = {"logits", "ids", "weights", "routing.correction_bias"};
    struct sample s;

    sample_init(&s);
    s.routing.correction_bias = tensor_make(s.bias, 1, s.bias_dims, NULL, 1u << MOXIE_FORMAT_F32);
    for (int32_t i = 0; i < 4; i++) {
        moxie_tensor *tensors[] = {&s.logits, &s.ids, &s.weights, &s.routing.correction_bias};
        moxie_tensor saved = *tensors[i];

        tensors[i]->ndim++;
        SAID(&s.said, MOXIE_E_INVALID, refused(&s), names[i], "dimensions");
        *tensors[i] = saved;
        tensors[i]->dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 64, 1};
        SAID(&s.said, MOXIE_E_UNSUPPORTED, refused(&s), names[i], "64 bits");
        *tensors[i] = saved;
        tensors[i]->device.type = MOXIE_DEVICE_CUDA;
        SAID(&s.said, MOXIE_E_INVALID, refused(&s), names[i], "device type 2");
        *tensors[i] = saved;
        tensors[i]->data = NULL;
        if (i < 3) SAID(&s.said, MOXIE_E_INVALID, refused(&s), names[i], "NULL");
        *tensors[i] = saved;
    }
    s.bias_dims[0] = EXPERTS - 1;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "routing.correction_bias", "[7]", "[8]");
    s.bias_dims[0] = EXPERTS;
    s.k_dims[0] = TOKENS - 1;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids", "[2, 2]", "[3, *]");
    s.k_dims[0] = TOKENS;
    ACCEPTED(&s.said, route(&s));
}
END_TEST

START_TEST(results_have_rows_of_their_own)
{
    struct sample s;

    sample_init(&s);
    s.k_strides[0] = 1;
    s.ids.strides = s.k_strides;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids and weights", "overlap");
    s.ids.strides = NULL;
    s.weights.strides = s.k_strides;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids and weights", "overlap");
    s.weights.strides = NULL;
    s.weights.data = s.to_ids + 1;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids and weights", "overlap");
    s.weights.data = s.logits.data;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids and weights", "over logits");
    s.weights.data = s.to_weights;
    s.routing.correction_bias = s.logits;
    s.routing.correction_bias.data = s.to_ids;
    s.routing.correction_bias.shape = &s.logit_dims[1];
    s.routing.correction_bias.ndim = 1;
    SAID(&s.said, MOXIE_E_INVALID, refused(&s), "ids and weights", "over routing.correction_bias");
}
END_TEST

START_TEST(too_many_tokens_are_refused)
{
    int64_t strides[2] = {0, 1};
    struct sample s;

    sample_init(&s);
    s.logit_dims[0] = s.k_dims[0] = (int64_t)INT32_MAX + 1;
    s.logits.strides = strides;
    SAID(&s.said, MOXIE_E_CAPACITY, refused(&s), "logits", "tokens");
}
END_TEST

START_TEST(the_cpu_has_no_stream)
{
    struct sample s;

    sample_init(&s);
    SAID(&s.said, MOXIE_E_INVALID,
         routing_route(&s.routing, &s.logits, &s.ids, &s.weights, &s, &s.said.error), "stream",
         "NULL");
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, goldens, 0, FAMILIES);
    tcase_add_test(tests, rows_keep_their_distance);
    tcase_add_test(tests, no_scaling_factor_is_one);
    tcase_add_test(tests, nothing_is_routed_to_nothing);
    tcase_add_test(tests, numbers_that_are_none);
    tcase_add_test(tests, the_top_k_is_bounded);
    tcase_add_test(tests, groups_divide_the_experts);
    tcase_add_test(tests, factors_are_numbers);
    tcase_add_test(tests, a_thread_that_traps_is_not_ended);
    tcase_add_test(tests, wrong_tensors_are_named);
    tcase_add_test(tests, results_have_rows_of_their_own);
    tcase_add_test(tests, too_many_tokens_are_refused);
    tcase_add_test(tests, the_cpu_has_no_stream);
}

SUITE_MAIN("routing", 20, add)
