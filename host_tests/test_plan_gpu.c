// plugin/plan.c: what a GPU's kernels want between the products, by the formats of weights.

#include "plugin/plan.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"
#include "kernels/types.h"

// On a GPU with fp8 weights mid is there twice, and the quantised x fits pair_out, however narrow.
START_TEST(fp8_on_a_gpu_is_quantised_between)
{
    static const int64_t sizes[] = {16, 64, 7168};
    const struct limits *limits;
    struct verdict verdict;
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_i64(&mock, "hidden_size", sizes[_i]);
    mock_set_i64(&mock, "intermediate_size", 192);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_X_FP8], 0);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_MID_FP8], 0);
    verdict_free(&verdict);
    mock_set_str(&mock, "weight_format", "fp8_block128");
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    limits = &verdict.plan.limits;
    ck_assert_int_eq(limits->operand_format, FORMAT_FP8);
    ck_assert_int_eq(limits->mid_format, FORMAT_BF16);
    ck_assert_int_ge(verdict.plan.slot_bytes[BUFFER_MID_FP8], limits->pairs_max * 192);
    ck_assert_int_ge(verdict.plan.slot_bytes[BUFFER_MID_SCALES], limits->pairs_max * 2 * 4);
    ck_assert_int_ge(limits->x_fp8_bytes, sizes[_i]);
    ck_assert_int_ge(limits->fp8_group_bytes, limits->pairs_max * 4);
    ck_assert_int_ge(verdict.plan.slot_bytes[BUFFER_X_FP8],
                     limits->pairs_max * limits->x_fp8_bytes);
    ck_assert_int_ge(verdict.plan.slot_bytes[BUFFER_X_SCALES],
                     (sizes[_i] + 127) / 128 * limits->fp8_group_bytes);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_MID], 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// On a GPU with 4-bit weights everything but them is as with bf16 weights, but that x is there
// twice; no layer is one launch.
START_TEST(packed_weights_on_a_gpu_have_rows_of_bf16)
{
    static const char *const formats[] = {"int4_g32", "mxfp4", "nvfp4"};
    struct verdict packed, plain;
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_i64(&mock, "hidden_size", 2048);
    mock_set_i64(&mock, "intermediate_size", 96);
    verdict_make(&plain, &mock);
    ck_assert_uint_eq(plain.report.reasons_count, 0);
    mock_set_str(&mock, "weight_format", formats[_i]);
    verdict_make(&packed, &mock);
    ck_assert_uint_eq(packed.report.reasons_count, 0);
    ck_assert_int_eq(packed.plan.limits.operand_format, FORMAT_BF16);
    ck_assert_int_eq(packed.plan.limits.mid_format, FORMAT_BF16);
    ck_assert_int_eq(packed.plan.limits.pair_format, FORMAT_BF16);
    ck_assert_int_eq(packed.plan.limits.mid_bytes, 256); // 192, pitched
    ck_assert_int_eq(packed.plan.slot_bytes[BUFFER_MID], packed.plan.limits.pairs_max * 256);
    ck_assert_int_gt(plain.plan.slot_bytes[BUFFER_LAYER_MID], 0);
    ck_assert_int_eq(plain.plan.slot_bytes[BUFFER_X_WOVEN], 0);
    plain.plan.slot_bytes[BUFFER_X_WOVEN] = packed.plan.limits.pairs_max * (4096 + 128);
    for (int32_t id = 0; id < BUFFER_COUNT; id++)
        ck_assert_int_eq(packed.plan.slot_bytes[id], plain.plan.slot_bytes[id]);
    verdict_free(&packed);
    verdict_free(&plain);
    mock_host_fini(&mock);
}
END_TEST

// Of a GPU, as many tokens as go in one launch: by their weights, their results, and the host's
// bound; of each rank, up to eight in all.
START_TEST(whole_layers_keep_mid_of_few_tokens)
{
    static const struct {
        int64_t hidden, intermediate, top_k, tokens;
        const char *format;
        int64_t choices, ranks;
    } cases[] = {
        {2048, 768, 8, 64, "bf16", 40, 1},
        {2048, 768, 8, 64, "fp8_block128", 40, 1},
        {4096, 1536, 8, 64, "bf16", 16, 1},
        {4096, 1536, 8, 64, "fp8_block128", 16, 1},
        {7168, 256, 8, 64, "fp8_block128", 16, 1},
        {4096, 192, 8, 64, "fp8_block128", 24, 1},
        {4096, 14336, 2, 64, "bf16", 2, 1},
        {4096, 14336, 2, 64, "fp8_block128", 2, 1},
        {7168, 14336, 8, 64, "bf16", 0, 1},
        {7168, 2048, 1, 64, "bf16", 3, 1},
        {2048, 768, 8, 64, "mxfp4", 32, 1},
        {2880, 2880, 4, 64, "mxfp4", 4, 1},
        {4096, 1536, 8, 64, "nvfp4", 8, 1},
        {7168, 2048, 1, 64, "int4_g32", 2, 1},
        {128, 64, 2, 64, "bf16", 16, 1},
        {128, 64, 32, 64, "bf16", 128, 1},
        {128, 64, 2, 3, "bf16", 6, 1},
        {2048, 768, 8, 64, "bf16", 64, 2},
        {4096, 1536, 8, 64, "bf16", 32, 2},
        {4096, 1536, 8, 64, "bf16", 64, 8},
        {128, 64, 2, 3, "bf16", 12, 2},
        {128, 64, 32, 64, "bf16", 128, 2},
    };
    const int64_t numbers = cases[_i].choices * cases[_i].intermediate * 2;
    struct verdict verdict;
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_ranks(&mock, cases[_i].ranks);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "weight_format", cases[_i].format);
    mock_set_i64(&mock, "hidden_size", cases[_i].hidden);
    mock_set_i64(&mock, "intermediate_size", cases[_i].intermediate);
    mock_set_i64(&mock, "top_k", cases[_i].top_k);
    mock_set_i64(&mock, "num_experts", 64);
    mock_set_i64(&mock, "warmup_tokens_max", cases[_i].tokens);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_LAYER_MID], numbers * 2);
    verdict_free(&verdict);
    mock_set_str(&mock, "device", "cpu");
    mock_set_str(&mock, "weight_format", "bf16");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.plan.slot_bytes[BUFFER_LAYER_MID], 0);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// Of the host's own runner nothing is planned but what counts and expands.
START_TEST(the_hosts_own_runner_brings_its_own)
{
    struct verdict none, computes;
    struct mock_host mock;
    const struct limits *limits = &none.plan.limits;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_i64(&mock, "warmup_tokens_max", 5000);
    mock_set_str(&mock, "device", _i == 0 ? "sm_90" : "cpu");
    mock_set_str(&mock, "weight_format", "fp8_block128");
    verdict_make(&computes, &mock);
    mock_set_str(&mock, "runner", "none");
    verdict_make(&none, &mock);
    ck_assert_uint_eq(none.report.reasons_count, 0);
    ck_assert_int_eq(computes.plan.limits.computes, 1);
    ck_assert_int_eq(limits->computes, 0);
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        const int expands =
            id == BUFFER_EXPERT_OFFSET || (id >= BUFFER_PAIR_ROW && id <= BUFFER_ROW_PAIR);

        if (id == BUFFER_ROUTE_SCRATCH) continue;
        ck_assert_int_eq(none.plan.slot_bytes[id],
                         expands || id > BUFFER_CPU_SCRATCH ? computes.plan.slot_bytes[id] : 0);
    }
    ck_assert_int_eq(computes.plan.slot_bytes[BUFFER_ROUTE_SCRATCH], 0);
    ck_assert_int_eq(none.plan.slot_bytes[BUFFER_ROUTE_SCRATCH],
                     _i == 0 ? 4 * (2 * limits->pairs_max + 132 * (4 + 66)) : 0);
    verdict_free(&none);
    verdict_free(&computes);
    mock_host_fini(&mock);
}
END_TEST

// No pool computes there, so that nobody has judged it.
START_TEST(more_threads_than_32_bits_count_on_a_gpu)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_i64(&mock, "cpu_threads", (int64_t)1 << 31);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, 0);
    ck_assert_int_eq(verdict.plan.limits.threads, INT32_MAX);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, whole_layers_keep_mid_of_few_tokens, 0, 18);
    tcase_add_loop_test(tests, packed_weights_on_a_gpu_have_rows_of_bf16, 0, 3);
    tcase_add_loop_test(tests, fp8_on_a_gpu_is_quantised_between, 0, 3);
    tcase_add_loop_test(tests, the_hosts_own_runner_brings_its_own, 0, 2);
    tcase_add_test(tests, more_threads_than_32_bits_count_on_a_gpu);
}

SUITE_MAIN("plan_gpu", 30, add)
