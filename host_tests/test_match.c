// plugin/match.c: runners and dispatchers that do not meet are refused by name, with the nearest
// that works.

#include "plugin/validate.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"
#include "kernels/types.h"
#include "plugin/backends.h"

#include <stdio.h>
#include <string.h>

START_TEST(unknown_names)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "runner", "moxie_cuda");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "runner",
                   "runner 'moxie_cuda' is not registered for device cpu, which has moxie_cpu, or "
                   "none for the host's own: set runner to auto, or device to sm_90");
    ck_assert_int_eq(assert_advice_works(&mock, "runner"), 2);
    mock_set_str(&mock, "runner", "ours"); // of no device
    ck_assert_int_eq(assert_advice_works(&mock, "runner"), 1);
    mock_unset(&mock, "runner");
    mock_set_str(&mock, "dispatcher", "");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "dispatcher",
                   "which has local, allgather, alltoall");
    ck_assert_int_eq(assert_advice_works(&mock, "dispatcher"), 1);
    mock_host_fini(&mock);
}
END_TEST

// What else is wrong is told by what `auto` would be.
START_TEST(unknown_names_hide_nothing)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "runner", "moxie_cpu");
    mock_set_str(&mock, "dispatcher", "ours");
    mock_set_str(&mock, "weight_format", "f32");
    mock_set_str(&mock, "input_format", "f32");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "runner", "which has moxie_cuda");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "dispatcher", "'ours' is not registered");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "weight_format", "moxie_cuda has no kernel");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "input_format", "weight_format is to be bf16");
    // Of a device that is no word nobody knows the names.
    mock_set_str(&mock, "device", "sm90");
    mock_set_str(&mock, "runner", "moxie_cuda");
    mock_unset(&mock, "dispatcher");
    verdict_make(&verdict, &mock);
    ck_assert_ptr_nonnull(verdict_reason(&verdict, "device"));
    ck_assert_ptr_null(verdict_reason(&verdict, "runner"));
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// What stands in for a refused value is not what the host said: no advice goes by it.
START_TEST(nothing_is_judged_by_a_stand_in)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 128);
    mock_set_str(&mock, "dispatcher", "alltoall");
    mock_set_str(&mock, "dispatch_format", "fp8_block128");
    verdict_make(&verdict, &mock);
    ck_assert_ptr_nonnull(verdict_reason(&verdict, "ep_size"));
    ck_assert_ptr_null(verdict_reason(&verdict, "dispatcher"));
    verdict_free(&verdict);
    assert_not_warned(&mock, "dispatch_format");
    mock_host_fini(&mock);

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "weight_format", "fp8");
    mock_set_str(&mock, "activation_format", "fp8");
    mock_set_ranks(&mock, 2);
    mock_set_str(&mock, "dispatch_format", "fp8_block128");
    verdict_make(&verdict, &mock);
    ck_assert_int_eq((int)verdict.report.reasons_count, 1);
    ck_assert_ptr_nonnull(verdict_reason(&verdict, "weight_format"));
    verdict_free(&verdict);
    mock_set_i64(&mock, "hidden_size", 1012);
    verdict_make(&verdict, &mock);
    ck_assert_ptr_null(verdict_reason(&verdict, "hidden_size"));
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// Accepted with or without a GPU, and in a build without its kernels: the tables are plain C.
START_TEST(a_gpu_is_judged_from_its_tables)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    assert_accepted(&mock);
    mock_set_str(&mock, "runner", "moxie_cpu"); // a runner, but of another device
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "runner", "which has moxie_cuda");
    ck_assert_int_eq(assert_advice_works(&mock, "runner"), 2);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(a_gpu_has_limits_of_its_own)
{
    static const struct {
        const char *weights, *key, *word, *text;
        int64_t number;
    } rows[] = {
        {"f32", "weight_format", "f32", "no kernel on sm_90 for weight_format f32: set weight_", 0},
        {"bf16", "input_format", "f16", "input_format is f16 while weight_format is bf16", 0},
        {"bf16", "activation_format", "f16", "activation_format is f16 while", 0},
        {"bf16", "hidden_size", NULL, "multiple of 8 (pad the weights with zeros), and it is", 68},
        {"bf16", "intermediate_size", NULL, "multiple of 8 (pad the weights with zeros)", 97},
        {"bf16", "hidden_size", NULL, "counts the bytes of a row in 32 bits", (1 << 28) + 8},
        {"bf16", "intermediate_size", NULL, "set intermediate_size to 268435456", INT32_MAX - 7},
        {"bf16", "hidden_size", NULL, "set hidden_size to 268435456", INT32_MAX},
        {"bf16", "hidden_size", NULL, "set hidden_size to 268435456", (int64_t)1 << 31},
        {"fp8_tensor", "intermediate_size", NULL, "set intermediate_size to 268435456", INT64_MAX},
        {"bf16", "num_experts", NULL, "takes 1024 experts a rank", 1025},
        {"fp8_channel", "activation_format", "bf16", "is bf16 while weight_format is fp8_ch", 0},
        {"fp8_tensor", "input_format", "f32", "no kernel on sm_90 for input_format f32", 0},
        {"fp8_block128", "hidden_size", NULL, "multiple of 16 (pad the weights", 72},
        {"fp8_block128", "intermediate_size", NULL, "multiple of 16 (pad the weights", 104},
        {"int4_g32", "hidden_size", NULL, "multiple of 32 (pad the weights with zeros), and", 80},
        {"mxfp4", "intermediate_size", NULL, "set intermediate_size to 96", 72},
        {"nvfp4", "hidden_size", NULL, "multiple of 32 (pad the weights with zeros), and", 80},
        {"nvfp4", "intermediate_size", NULL, "set intermediate_size to 64", 48},
        {"int4_g32", "activation_format", "f16",
         "multiplies weights of 4 bits by bf16 rows, and activation_format is f16 while "
         "weight_format is int4_g32: set activation_format to bf16",
         0},
        {"mxfp4", "activation_format", "fp8", "is fp8 while weight_format is mxfp4", 0},
        {"nvfp4", "activation_format", "nvfp4", "is nvfp4 while weight_format is nvfp4", 0},
        {"nvfp4", "activation_format", "f32", "set activation_format to bf16", 0},
        {"mxfp4", "input_format", "f16", "4 bits by bf16 rows, and input_format is f16", 0},
    };

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        struct mock_host mock;

        mock_host_init(&mock);
        mock_set_str(&mock, "device", "sm_90");
        mock_set_str(&mock, "weight_format", rows[i].weights);
        if (rows[i].word != NULL)
            mock_set_str(&mock, rows[i].key, rows[i].word);
        else
            mock_set_i64(&mock, rows[i].key, rows[i].number);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, rows[i].key, rows[i].text);
        ck_assert_int_eq(assert_advice_works(&mock, rows[i].key), 1);
        mock_host_fini(&mock);
    }
}
END_TEST

// A name that nobody has is judged by the runner that `auto` would be.
START_TEST(columns_are_counted_by_the_runner)
{
    static const char *const keys[] = {"hidden_size", "intermediate_size"};
    struct mock_host mock;

    for (int32_t i = 0; i < 2; i++) {
        mock_host_init(&mock);
        mock_set_i64(&mock, keys[i], (int64_t)1 << 31);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, keys[i],
                       "moxie_cpu on cpu counts columns in 32 bits, and ");
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, keys[i], "_size to 2147483647 or less");
        ck_assert_int_eq(assert_advice_works(&mock, keys[i]), 1);
        mock_set_str(&mock, "runner", "ours");
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, keys[i], "moxie_cpu on cpu counts columns");
        mock_set_str(&mock, "device", "sm_90");
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, keys[i],
                       "moxie_cuda on sm_90 counts the bytes of a row in 32 bits, and ");
        mock_host_fini(&mock);
    }
}
END_TEST

// What does not go with the weights is told once, also beside weights that it has no kernel for:
// doing all that is said is enough.
START_TEST(a_gpu_wants_one_format_of_a_key)
{
    static const struct {
        const char *weights, *input, *activation; // NULL: not set
        const char *fine[3];                      // what is advised of them
    } rows[] = {
        {"f16", "f32", "f32", {"f16", "f16", "f16"}},
        {"bf16", "f32", NULL, {"bf16", "bf16", NULL}},
        {"fp8_block128", "f32", "f32", {"fp8_block128", "bf16", "fp8"}},
        {"f32", "f16", NULL, {"bf16", "bf16", NULL}},
        {"f32", "f32", "f32", {"bf16", "bf16", "bf16"}},
        {"int4_g32", "f16", NULL, {"int4_g32", "bf16", NULL}},
        {"mxfp4", "f32", "f32", {"mxfp4", "bf16", "bf16"}},
        {"nvfp4", NULL, "fp8", {"nvfp4", NULL, "bf16"}},
    };
    static const char *const keys[] = {"weight_format", "input_format", "activation_format"};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char *const set[] = {rows[i].weights, rows[i].input, rows[i].activation};
        uint64_t wrong = 0;
        struct mock_host mock;
        struct verdict verdict;
        char text[64];

        mock_host_init(&mock);
        mock_set_str(&mock, "device", "sm_90");
        for (int32_t k = 0; k < 3; k++)
            if (set[k] != NULL) mock_set_str(&mock, keys[k], set[k]);
        for (int32_t k = 0; k < 3; k++) {
            if (set[k] == NULL || strcmp(set[k], rows[i].fine[k]) == 0) continue;
            (void)snprintf(text, sizeof text, "set %s to %s", keys[k], rows[i].fine[k]);
            assert_refused(&mock, MOXIE_E_UNSUPPORTED, keys[k], text);
            wrong++;
        }
        verdict_make(&verdict, &mock);
        ck_assert_uint_eq(verdict.report.reasons_count, wrong);
        verdict_free(&verdict);
        for (int32_t k = 0; k < 3; k++)
            if (set[k] != NULL) mock_set_str(&mock, keys[k], rows[i].fine[k]);
        assert_accepted(&mock);
        mock_host_fini(&mock);
    }
}
END_TEST

// Of all kinds of experts that a rank owns.
START_TEST(every_physical_expert_counts)
{
    static const struct {
        const char *key;
        int64_t number, fine;
    } rows[] = {{"num_redundant_experts", 990, 924}, {"num_fused_shared_experts", 925, 924}};
    struct mock_host mock;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        mock_host_init(&mock);
        mock_set_str(&mock, "device", "sm_90");
        mock_set_i64(&mock, "num_experts", 100);
        mock_set_i64(&mock, rows[i].key, rows[i].fine);
        assert_accepted(&mock);
        mock_set_i64(&mock, rows[i].key, rows[i].number);
        assert_refused(&mock, MOXIE_E_UNSUPPORTED, rows[i].key, "to 924 or less");
        ck_assert_int_eq(assert_advice_works(&mock, rows[i].key), 1);
        mock_host_fini(&mock);
    }
}
END_TEST

START_TEST(pushing_needs_ep_ranks)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_str(&mock, "dispatcher", "alltoall");
    assert_accepted(&mock);
    mock_set_i64(&mock, "tp_size", 4);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "dispatcher", "ep_size is 1 while tp_size is 4");
    ck_assert_int_eq(assert_advice_works(&mock, "dispatcher"), 2);
    mock_set_i64(&mock, "tp_size", 128); // more than EP may have
    ck_assert_int_eq(assert_advice_works(&mock, "dispatcher"), 1);
    // Where ep_size has to change, 1 takes a dispatcher and a rank that go with it.
    mock_set_i64(&mock, "tp_size", 4);
    mock_set_i64(&mock, "ep_size", 2);
    mock_set_i64(&mock, "ep_rank", 1);
    assert_refused(&mock, MOXIE_E_CONFIG, "ep_size", "to 1 and ep_rank to 0 and dispatcher to");
    ck_assert_int_eq(assert_advice_works(&mock, "ep_size"), 2);
    // So does fewer than the rank is.
    mock_set_i64(&mock, "ep_size", 8);
    mock_set_i64(&mock, "ep_rank", 4);
    assert_refused(&mock, MOXIE_E_CONFIG, "ep_size", "or ep_size to 4 and ep_rank to 3");
    ck_assert_int_eq(assert_advice_works(&mock, "ep_size"), 2);
    mock_host_fini(&mock);
}
END_TEST

// Judges the mock's configuration against these two and returns the only message, or "".
static const char *judge(struct mock_host *mock, const struct backend *runner,
                         const struct backend *dispatcher, struct verdict *verdict)
{
    report_fini(&verdict->report);
    verdict_make(verdict, mock);
    ck_assert_uint_eq(verdict->report.reasons_count, 0);
    validate_backends(&verdict->config, runner, dispatcher, &verdict->report);
    ck_assert_uint_le(verdict->report.reasons_count, 1);
    return verdict->report.reasons_count == 0 ? "" : verdict->report.reasons[0].message;
}

// Everything this library has is supported on the CPU, so the refusals are shown on narrower
// backends.
START_TEST(formats_without_a_kernel)
{
    struct backend runner = *backend_find(BACKEND_RUNNER, "moxie_cpu", "cpu");
    struct backend dispatcher = *backend_find(BACKEND_DISPATCHER, "alltoall", "cpu");
    struct verdict verdict = {.report = {.reasons_count = 0}};
    struct mock_host mock;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    ck_assert_str_eq(judge(&mock, &runner, &dispatcher, &verdict), "");
    runner.weight_formats = BACKEND_BIT(FORMAT_F32) | BACKEND_BIT(FORMAT_FP8_TENSOR);
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "moxie_cpu has no kernel on cpu for weight_format bf16: set weight_format to f32");
    mock_set_str(&mock, "weight_format", "mxfp4");
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "moxie_cpu has no kernel on cpu for weight_format mxfp4: set weight_format to fp8_tensor");
    runner.weight_formats = BACKEND_BIT(FORMAT_MXFP4);
    runner.activation_formats = BACKEND_BIT(FORMAT_BF16);
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "moxie_cpu has no kernel on cpu for activation_format f32: set activation_format to bf16");
    runner.activation_formats = BACKEND_BIT(FORMAT_F32);
    runner.activations = BACKEND_BIT(ACTIVATION_GELU);
    ck_assert_str_eq(judge(&mock, &runner, &dispatcher, &verdict),
                     "moxie_cpu has no kernel on cpu for activation silu: set activation to gelu");
    runner.activations = BACKEND_BIT(ACTIVATION_SILU);
    dispatcher.input_formats = BACKEND_BIT(FORMAT_F16);
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "alltoall has no kernel on cpu for input_format bf16: set input_format to f16");
    dispatcher.wire_formats = BACKEND_BIT(FORMAT_F16); // and says so once
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "alltoall has no kernel on cpu for input_format bf16: set input_format to f16");
    dispatcher.input_formats = runner.input_formats;
    dispatcher.wire_formats = runner.wire_formats;
    runner.output_formats = BACKEND_BIT(FORMAT_F32);
    ck_assert_str_eq(
        judge(&mock, &runner, &dispatcher, &verdict),
        "moxie_cpu has no kernel on cpu for output_format bf16: set output_format to f32");
    runner.output_formats = dispatcher.output_formats;
    mock_set_str(&mock, "dispatch_format", "nvfp4");
    ck_assert_str_eq(judge(&mock, &runner, &dispatcher, &verdict), "");
    dispatcher.wire_formats = BACKEND_BIT(FORMAT_BF16);
    ck_assert_str_eq(judge(&mock, &runner, &dispatcher, &verdict),
                     "alltoall has no kernel on cpu for rows of dispatch_format nvfp4: set "
                     "dispatch_format to input");
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(traits_must_meet)
{
    struct backend runner = *backend_find(BACKEND_RUNNER, "moxie_cpu", "cpu");
    const struct backend *dispatcher = backend_find(BACKEND_DISPATCHER, "local", "cpu");
    moxie_traits traits = *runner.traits;
    struct verdict verdict = {.report = {.reasons_count = 0}};
    struct mock_host mock;

    mock_host_init(&mock);
    runner.traits = &traits;
    ck_assert_str_eq(judge(&mock, &runner, dispatcher, &verdict), "");
    traits.layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_MASKED);
    ck_assert_ptr_nonnull(
        strstr(judge(&mock, &runner, dispatcher, &verdict), "share no row layout"));
    traits.layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD);
    traits.id_spaces = 0;
    ck_assert_ptr_nonnull(
        strstr(judge(&mock, &runner, dispatcher, &verdict), "share no meaning of expert ids"));
    traits.id_spaces = 1u << MOXIE_IDS_LOCAL;
    traits.weights_applied_by = MOXIE_BY_DISPATCHER;
    ck_assert_ptr_nonnull(
        strstr(judge(&mock, &runner, dispatcher, &verdict), "applies the router weights"));
    traits.weights_applied_by = MOXIE_BY_RUNNER;
    traits.scaling_applied_by = MOXIE_BY_HOST;
    ck_assert_ptr_nonnull(
        strstr(judge(&mock, &runner, dispatcher, &verdict), "routed_scaling_factor"));
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

// Of the host's own runner nothing is known: rows alone are judged.
START_TEST(the_hosts_own_runner_takes_what_it_takes)
{
    struct mock_host mock;
    struct verdict verdict;

    mock_host_init(&mock);
    mock_set_ranks(&mock, 2);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "runner", "none");
    mock_set_str(&mock, "weight_format", "f32");
    mock_set_str(&mock, "activation_format", "nvfp4");
    mock_set_str(&mock, "dispatch_format", "fp8_block128");
    mock_set_i64(&mock, "intermediate_size", INT64_MAX);
    mock_set_i64(&mock, "deterministic", 1);
    mock_set_i64(&mock, "apply_router_weight_on_input", 1); // with a top_k of 2
    mock_set_f64(&mock, "activation_alpha", 3);             // of silu
    assert_warned(&mock, "weight_format", "weight_format is unused: runner is none");
    assert_warned(&mock, "activation_alpha", "runner is none");
    assert_warned(&mock, "deterministic", "holds for what Moxie sends, expands, folds and sums");
    mock_set_i64(&mock, "hidden_size", 72);
    assert_refused(
        &mock, MOXIE_E_UNSUPPORTED, "hidden_size",
        "rows on sm_90 are moved 16 bytes at a time, which takes a hidden_size that is a "
        "multiple of 16 with dispatch_format fp8_block128 (pad rows with zeros), and it "
        "is 72: set hidden_size to 80, or dispatch_format to input");
    ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 2);
    mock_set_i64(&mock, "hidden_size", 68);
    ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 1);
    mock_set_str(&mock, "dispatch_format", "input");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "hidden_size",
                   "that is a multiple of 8 (pad rows with zeros), and it is 68: set hidden_size");
    ck_assert_int_eq(assert_advice_works(&mock, "hidden_size"), 1);
    mock_set_i64(&mock, "hidden_size", 72);
    assert_accepted(&mock);
    mock_set_str(&mock, "dispatch_format", "nvfp4");
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "dispatch_format", "alltoall has no kernel");
    mock_set_str(&mock, "dispatch_format", "input");
    mock_set_i64(&mock, "count_expert_load", 1);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "count_expert_load", "while runner is none");
    mock_set_i64(&mock, "count_expert_load", 0);
    mock_set_i64(&mock, "num_experts", 2050);
    assert_refused(&mock, MOXIE_E_UNSUPPORTED, "num_experts", "takes 1024 experts a rank");
    mock_unset(&mock, "activation_format");
    mock_set_i64(&mock, "num_experts", 8);
    verdict_make(&verdict, &mock);
    ck_assert_int_eq(verdict.plan.limits.intermediate, 0);
    // As beside Moxie's runner: ranks whose runners differ are told so, and of no other key.
    ck_assert_str_eq(config_str(&verdict.config, KEY_ACTIVATION_FORMAT), "bf16");
    verdict_free(&verdict);
    mock_host_fini(&mock);

    mock_host_init(&mock);
    mock_set_str(&mock, "runner", "none");
    mock_set_i64(&mock, "count_expert_load", 1);
    ck_assert_int_eq(assert_advice_works(&mock, "count_expert_load"), 2);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, unknown_names);
    tcase_add_test(tests, unknown_names_hide_nothing);
    tcase_add_test(tests, nothing_is_judged_by_a_stand_in);
    tcase_add_test(tests, a_gpu_is_judged_from_its_tables);
    tcase_add_test(tests, a_gpu_has_limits_of_its_own);
    tcase_add_test(tests, columns_are_counted_by_the_runner);
    tcase_add_test(tests, a_gpu_wants_one_format_of_a_key);
    tcase_add_test(tests, every_physical_expert_counts);
    tcase_add_test(tests, pushing_needs_ep_ranks);
    tcase_add_test(tests, formats_without_a_kernel);
    tcase_add_test(tests, traits_must_meet);
    tcase_add_test(tests, the_hosts_own_runner_takes_what_it_takes);
}

SUITE_MAIN("match", 60, add)
