// plugin/config.c: every key, every type, every hostile answer.

#include "plugin/config.h"

#include "host_tests/suite.h"
#include "host_tests/verdict.h"
#include "kernels/types.h"

#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void read_into(struct config *config, struct report *report, struct mock_host *mock)
{
    memset(report, 0, sizeof *report);
    config_read(config, &mock->host, report);
}

START_TEST(defaults_stand)
{
    struct mock_host mock;
    struct config config;
    struct report report;

    mock_host_init(&mock);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 0);
    ck_assert_uint_eq(mock.reads, KEY_COUNT); // each key once
    ck_assert_int_eq(config_i64(&config, KEY_NUM_LAYERS), 1);
    ck_assert_int_eq(config_i64(&config, KEY_CHUNKED_PREFILL_SIZE), -1);
    ck_assert_int_eq(config_i64(&config, KEY_CPU_THREADS), 4);
    ck_assert_int_eq(config_i64(&config, KEY_TIMEOUT_MS), 30000);
    ck_assert_double_eq(config_f64(&config, KEY_ACTIVATION_ALPHA), 1.702);
    ck_assert_double_eq(config_f64(&config, KEY_ACTIVATION_LIMIT), 0.0);
    ck_assert_str_eq(config_str(&config, KEY_SPECULATIVE_ALGORITHM), "none");
    ck_assert_int_eq(config_word(&config, KEY_WEIGHT_FORMAT), FORMAT_BF16);
    ck_assert_int_eq(config_word(&config, KEY_ACTIVATION_FORMAT), FORMAT_AUTO);
    ck_assert_int_eq(config_word(&config, KEY_ACTIVATION), ACTIVATION_SILU);
    ck_assert_int_eq(config_word(&config, KEY_DEVICE), DEVICE_WORD_CPU);
    ck_assert_int_eq(config_word(&config, KEY_TRANSPORT), TRANSPORT_AUTO);
    ck_assert(config_found(&config, KEY_TOP_K) && !config_found(&config, KEY_NUM_LAYERS));
    ck_assert(config_ok(&config, KEY_NUM_LAYERS));
    mock_host_fini(&mock);
}
END_TEST

// The enum above the table and the table cannot drift apart unseen.
START_TEST(every_row_is_whole)
{
    char wanted[256];

    for (int32_t key = 0; key < KEY_COUNT; key++) {
        ck_assert_msg(config_name((enum config_key)key) != NULL, "key %d has no row", key);
        ck_assert_uint_gt(strlen(config_help((enum config_key)key)), 3);
        config_wanted((enum config_key)key, wanted, sizeof wanted);
        ck_assert_uint_gt(strlen(wanted), 3);
        for (int32_t other = 0; other < key; other++)
            ck_assert_str_ne(config_name((enum config_key)key),
                             config_name((enum config_key)other));
    }
    ck_assert_str_eq(config_name(KEY_HIDDEN_SIZE), "hidden_size");
    ck_assert_str_eq(config_name(KEY_DISPATCH_ROUNDS_MAX), "dispatch_rounds_max");
    ck_assert_str_eq(config_name(KEY_TIMEOUT_MS), "timeout_ms");
    ck_assert(!config_shared(KEY_EP_RANK) && !config_shared(KEY_CPU_THREADS));
    ck_assert(!config_shared(KEY_DEVICE_MEMORY_BUDGET_BYTES) && config_shared(KEY_EP_SIZE));
    ck_assert(config_shared(KEY_TRANSPORT));
    ck_assert(config_required(KEY_TOP_K) && !config_required(KEY_NUM_LAYERS));
}
END_TEST

START_TEST(words_have_the_numbers_of_the_abi)
{
    static const struct {
        const char *word;
        int32_t number;
    } formats[] = {{"f32", MOXIE_FORMAT_F32},
                   {"bf16", MOXIE_FORMAT_BF16},
                   {"f16", MOXIE_FORMAT_F16},
                   {"fp8_tensor", MOXIE_FORMAT_FP8_TENSOR},
                   {"fp8_channel", MOXIE_FORMAT_FP8_CHANNEL},
                   {"fp8_block128", MOXIE_FORMAT_FP8_BLOCK128},
                   {"int4_g32", MOXIE_FORMAT_INT4_G32},
                   {"mxfp4", MOXIE_FORMAT_MXFP4},
                   {"nvfp4", MOXIE_FORMAT_NVFP4}};
    struct mock_host mock;
    struct config config;
    struct report report;
    char text[CONFIG_TEXT_BYTES];

    mock_host_init(&mock);
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++) {
        mock_set_str(&mock, "weight_format", formats[i].word);
        read_into(&config, &report, &mock);
        ck_assert_int_eq(config_word(&config, KEY_WEIGHT_FORMAT), formats[i].number);
        config_word_text(KEY_WEIGHT_FORMAT, formats[i].number, text);
        ck_assert_str_eq(text, formats[i].word);
    }
    mock_set_str(&mock, "activation_format", "fp8");
    mock_set_str(&mock, "activation", "relu2");
    mock_set_str(&mock, "dispatch_format", "nvfp4");
    mock_set_str(&mock, "disaggregation_mode", "decode");
    mock_set_str(&mock, "transport", "nccl");
    read_into(&config, &report, &mock);
    ck_assert_int_eq(config_word(&config, KEY_ACTIVATION_FORMAT), MOXIE_FORMAT_FP8);
    ck_assert_int_eq(config_word(&config, KEY_ACTIVATION), ACTIVATION_RELU2);
    ck_assert_int_eq(config_word(&config, KEY_DISPATCH_FORMAT), DISPATCH_NVFP4);
    ck_assert_int_eq(config_word(&config, KEY_DISAGGREGATION_MODE), DISAGGREGATION_DECODE);
    ck_assert_int_eq(config_word(&config, KEY_TRANSPORT), TRANSPORT_NCCL);
    config_word_text(KEY_WEIGHT_FORMAT, 99, text);
    ck_assert_str_eq(text, "");
    mock_host_fini(&mock);
}
END_TEST

static void assert_reason(struct mock_host *mock, const char *key, const char *message)
{
    struct config config;
    struct report report;

    read_into(&config, &report, mock);
    ck_assert_uint_eq(report.reasons_count, 1);
    ck_assert_str_eq(report.reasons[0].key, key);
    ck_assert_str_eq(report.reasons[0].message, message);
    ck_assert_int_eq(report.reasons[0].code, MOXIE_E_CONFIG);
    report_fini(&report);
}

// Refused as it is, the host has set it.
START_TEST(a_value_of_the_wrong_type_is_found)
{
    struct mock_host mock;
    struct config config;
    struct report report;

    mock_host_init(&mock);
    mock_set_code(&mock, "ep_size", MOXIE_CONFIG_WRONG_TYPE);
    read_into(&config, &report, &mock);
    ck_assert(config_found(&config, KEY_EP_SIZE) && !config_ok(&config, KEY_EP_SIZE));
    report_fini(&report);
    mock_unset(&mock, "top_k");
    read_into(&config, &report, &mock);
    ck_assert(!config_found(&config, KEY_TOP_K) && !config_ok(&config, KEY_TOP_K));
    report_fini(&report);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(reasons_say_what_to_set)
{
    struct mock_host mock;

    mock_host_init(&mock);
    mock_unset(&mock, "top_k");
    assert_reason(&mock, "top_k", "top_k is missing: set it to an integer in 1..32");
    mock_set_i64(&mock, "top_k", 33);
    assert_reason(&mock, "top_k", "top_k is 33: set it to an integer in 1..32");
    mock_set_f64(&mock, "top_k", 2.0);
    assert_reason(&mock, "top_k", "top_k has the wrong type: set it to an integer in 1..32");
    mock_set_i64(&mock, "top_k", 2);
    mock_set_i64(&mock, "num_layers", 0);
    assert_reason(&mock, "num_layers",
                  "num_layers is 0: set it to an integer of at least 1, or leave it out for 1");
    mock_unset(&mock, "num_layers");
    mock_set_i64(&mock, "deterministic", 2);
    assert_reason(&mock, "deterministic",
                  "deterministic is 2: set it to the integer 0 or 1, or leave it out for 0");
    mock_unset(&mock, "deterministic");
    mock_set_str(&mock, "activation", "swish");
    assert_reason(&mock, "activation",
                  "activation is 'swish': set it to one of silu, gelu, gelu_tanh, swigluoai, "
                  "relu2, or leave it out "
                  "for silu");
    mock_set_str(&mock, "activation", "sil"); // a prefix is no word
    assert_reason(&mock, "activation",
                  "activation is 'sil': set it to one of silu, gelu, gelu_tanh, swigluoai, relu2, "
                  "or leave it out for "
                  "silu");
    mock_set_str(&mock, "activation", "silux"); // nor is a continuation
    assert_reason(&mock, "activation",
                  "activation is 'silux': set it to one of silu, gelu, gelu_tanh, swigluoai, "
                  "relu2, or leave it out for silu");
    mock_unset(&mock, "activation");
    mock_set_code(&mock, "ep_size", MOXIE_CONFIG_WRONG_TYPE);
    assert_reason(
        &mock, "ep_size",
        "ep_size has the wrong type: set it to an integer in 1..64, or leave it out for 1");
    ck_assert(!mock_logged(&mock, "HOST_MISBEHAVING"));
    mock_set_code(&mock, "ep_size", 77);
    assert_reason(&mock, "ep_size",
                  "ep_size has no value: its getter answered 77, no MOXIE_CONFIG_*: set it to an "
                  "integer in 1..64, or leave it out for 1");
    ck_assert(mock_logged(&mock, "HOST_MISBEHAVING config: ep_size has no value"));
    mock_host_fini(&mock);
}
END_TEST

START_TEST(reals_are_finite)
{
    static const double refused[] = {NAN, INFINITY, -INFINITY, 1e300, -1.0};
    struct mock_host mock;
    struct config config;
    struct report report;
    char text[64];

    mock_host_init(&mock);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        mock_set_f64(&mock, "activation_limit", refused[i]);
        read_into(&config, &report, &mock);
        ck_assert_uint_eq(report.reasons_count, 1);
        ck_assert_double_eq(config_f64(&config, KEY_ACTIVATION_LIMIT), 0.0);
        report_fini(&report);
    }
    mock_set_i64(&mock, "activation_limit", 7); // an integer is a number
    mock_set_f64(&mock, "routed_scaling_factor", 0.1);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 0);
    ck_assert_double_eq(config_f64(&config, KEY_ACTIVATION_LIMIT), 7.0);
    config_print(&config, KEY_ROUTED_SCALING_FACTOR, text, sizeof text);
    ck_assert_str_eq(text, "0.1");
    mock_set_f64(&mock, "activation_alpha", (float)1.702); // as a host of 32-bit numbers has it
    read_into(&config, &report, &mock);
    ck_assert(!config_changed(&config, KEY_ACTIVATION_ALPHA));
    mock_set_f64(&mock, "routed_scaling_factor", 1.0 / 3.0);
    read_into(&config, &report, &mock);
    config_print(&config, KEY_ROUTED_SCALING_FACTOR, text, sizeof text);
    ck_assert_double_eq(strtod(text, NULL), 1.0 / 3.0);
    mock_host_fini(&mock);
}
END_TEST

// Sets a locale whose decimal point is `point`, from a file as glibc reads it: six entries, of
// which the first is the point, and the fourth that as one wide character.
static void locale_write(const char *folder, const char *point)
{
    char path[128], strings[24] = {0};
    const uint32_t head[] = {0x20031115 ^ LC_NUMERIC, 6, 32, 40, 40, 44, 48, 40};
    FILE *file;

    (void)snprintf(strings, 8, "%s", point);
    strings[12] = point[0];
    (void)snprintf(path, sizeof path, "%s/odd", folder);
    ck_assert_int_eq(mkdir(path, 0700), 0);
    (void)snprintf(path, sizeof path, "%s/odd/LC_NUMERIC", folder);
    file = fopen(path, "w");
    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(head, sizeof head, 1, file), 1);
    ck_assert_uint_eq(fwrite(strings, sizeof strings, 1, file), 1);
    ck_assert_int_eq(fclose(file), 0);
    ck_assert_int_eq(setenv("LOCPATH", folder, 1), 0);
    ck_assert_ptr_nonnull(setlocale(LC_NUMERIC, "odd"));
    ck_assert_int_eq(unlink(path), 0);
    (void)snprintf(path, sizeof path, "%s/odd", folder);
    ck_assert_int_eq(rmdir(path), 0);
    ck_assert_int_eq(rmdir(folder), 0);
}

START_TEST(numbers_do_not_follow_the_locale)
{
    static const struct {
        double value;
        const char *text;
    } cases[] = {{0.1, "0.1"}, {-2.5e-7, "-2.5e-07"}, {7, "7"}, {1e30, "1e+30"}};
    static const char *const points[] = {",", "\xd9\xab"};
    char folder[] = "/tmp/moxie-XXXXXX", seen[64], text[64];
    struct mock_host mock;
    struct config config;
    struct report report;

    ck_assert_ptr_nonnull(mkdtemp(folder));
    locale_write(folder, points[_i]);
    (void)snprintf(seen, sizeof seen, "%.1f", 0.5);
    ck_assert_msg(strstr(seen, points[_i]) != NULL, "the locale prints %s", seen);
    mock_host_init(&mock);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mock_set_f64(&mock, "activation_alpha", cases[i].value);
        read_into(&config, &report, &mock);
        ck_assert_uint_eq(report.reasons_count, 0);
        config_print(&config, KEY_ACTIVATION_ALPHA, text, sizeof text);
        ck_assert_str_eq(text, cases[i].text);
    }
    mock_set_f64(&mock, "activation_limit", -1.5);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 1);
    ck_assert_ptr_nonnull(strstr(report.reasons[0].message, "is -1.5: "));
    report_fini(&report);
    mock_host_fini(&mock);
    ck_assert_ptr_nonnull(setlocale(LC_NUMERIC, "C"));
}
END_TEST

START_TEST(hostile_strings_are_refused)
{
    char longest[MOCK_TEXT_BYTES];
    struct mock_host mock;
    struct config config;
    struct report report;

    mock_host_init(&mock);
    memset(longest, 'a', sizeof longest);
    mock_set_raw(&mock, "speculative_algorithm", longest, 200, 200);
    assert_reason(&mock, "speculative_algorithm",
                  "speculative_algorithm is 200 bytes long: set it to printable ASCII of at most "
                  "63 bytes, or leave it "
                  "out for none");
    mock_set_raw(&mock, "speculative_algorithm", longest, 64, 64);
    assert_reason(&mock, "speculative_algorithm",
                  "speculative_algorithm is 64 bytes long: set it to printable ASCII of at most 63 "
                  "bytes, or leave it out for none");
    mock_set_raw(&mock, "speculative_algorithm", longest, 63, 63);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 0);
    ck_assert_uint_eq(strlen(config_str(&config, KEY_SPECULATIVE_ALGORITHM)), 63);
    mock_set_raw(&mock, "speculative_algorithm", longest, 63, UINT64_MAX);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 1);
    report_fini(&report);
    mock_set_raw(&mock, "speculative_algorithm", "EA\0GLE", 6, 6);
    assert_reason(&mock, "speculative_algorithm",
                  "speculative_algorithm ends at byte 2 of 6: set it to printable ASCII of at most "
                  "63 bytes, or leave "
                  "it out for none");
    mock_set_raw(&mock, "speculative_algorithm", "EAGLE\n%s", 8, 8);
    assert_reason(&mock, "speculative_algorithm",
                  "speculative_algorithm has the byte 0x0a at 5: set it to printable ASCII of at "
                  "most 63 bytes, or "
                  "leave it out for none");
    mock_set_raw(&mock, "speculative_algorithm", "\xff\xfe", 2, 2);
    read_into(&config, &report, &mock);
    ck_assert_uint_eq(report.reasons_count, 1);
    report_fini(&report);
    mock_host_fini(&mock);
}
END_TEST

// A host that answers FOUND and writes neither terminator nor length.
static int32_t get_str_untouched(void *ctx, const char *key, char *buffer, uint64_t capacity,
                                 uint64_t *length)
{
    (void)ctx;
    (void)key;
    (void)length;
    memset(buffer, 'x', capacity);
    return MOXIE_CONFIG_FOUND;
}

START_TEST(an_unterminated_string_is_refused)
{
    struct mock_host mock;
    struct config config;
    struct report report;

    mock_host_init(&mock);
    mock.host.get_str = get_str_untouched;
    read_into(&config, &report, &mock);
    ck_assert_uint_gt(report.reasons_count, 5);
    ck_assert_str_eq(config_str(&config, KEY_DEVICE), "cpu");
    report_fini(&report);
    mock_host_fini(&mock);
}
END_TEST

static void set_wrong_type(struct mock_host *mock, enum config_key key)
{
    if (config_type_of(key) == CONFIG_STR)
        mock_set_i64(mock, config_name(key), 1);
    else
        mock_set_str(mock, config_name(key), "1");
}

START_TEST(every_key_of_the_wrong_type)
{
    struct mock_host mock;
    struct verdict verdict;

    for (int32_t key = 0; key < KEY_COUNT; key++) {
        mock_host_init(&mock);
        set_wrong_type(&mock, (enum config_key)key);
        assert_refused(&mock, MOXIE_E_CONFIG, config_name((enum config_key)key), "wrong type");
        mock_host_fini(&mock);
    }
    // All at once: a reason for each.
    mock_host_init(&mock);
    for (int32_t key = 0; key < KEY_COUNT; key++)
        set_wrong_type(&mock, (enum config_key)key);
    verdict_make(&verdict, &mock);
    ck_assert_uint_eq(verdict.report.reasons_count, KEY_COUNT);
    ck_assert_int_eq(verdict.bounds.forward_tokens, -1);
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

START_TEST(every_integer_at_the_edges)
{
    static const int64_t edges[] = {
        INT64_MAX,        INT64_MAX - 1,    (int64_t)1 << 62, ((int64_t)1 << 62) + 1,
        (int64_t)1 << 53, (int64_t)1 << 31, INT32_MAX,        -2,
        INT64_MIN};
    struct mock_host mock;
    struct verdict verdict;

    for (int32_t key = 0; key < KEY_COUNT; key++) {
        if (config_type_of((enum config_key)key) != CONFIG_I64) continue;
        for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
            mock_host_init(&mock);
            mock_set_str(&mock, "speculative_algorithm", "EAGLE");
            mock_set_i64(&mock, "speculative_draft_tokens", 2);
            mock_set_i64(&mock, "max_running_requests", 3);
            mock_set_i64(&mock, "capture_routed_experts", 1);
            mock_set_i64(&mock, config_name((enum config_key)key), edges[i]);
            verdict_make(&verdict, &mock);
            if (edges[i] < 0)
                ck_assert_ptr_nonnull(verdict_reason(&verdict, config_name((enum config_key)key)));
            for (uint64_t n = 0; n < verdict.report.reasons_count; n++)
                ck_assert_msg(strstr(verdict.report.reasons[n].message, "set ") != NULL, "%s",
                              verdict.report.reasons[n].message);
            ck_assert_msg(verdict.report.reasons_count > 0 || verdict.plan.buffers_count > 0,
                          "%s = %jd", config_name((enum config_key)key), (intmax_t)edges[i]);
            verdict_free(&verdict);
            mock_host_fini(&mock);
        }
    }
}
END_TEST

START_TEST(auto_is_replaced)
{
    struct mock_host mock;
    struct verdict verdict;
    char text[128];

    mock_host_init(&mock);
    verdict_make(&verdict, &mock);
    ck_assert_str_eq(config_str(&verdict.config, KEY_RUNNER), "moxie_cpu");
    ck_assert_str_eq(config_str(&verdict.config, KEY_DISPATCHER), "local");
    ck_assert_int_eq(config_word(&verdict.config, KEY_ACTIVATION_FORMAT), FORMAT_F32);
    ck_assert(!config_found(&verdict.config, KEY_RUNNER) &&
              !config_changed(&verdict.config, KEY_RUNNER));
    validate_explain(&verdict.config, KEY_DISPATCHER, text, sizeof text);
    ck_assert_str_eq(text, "dispatcher = local: ep_size is 1");
    validate_explain(&verdict.config, KEY_RUNNER, text, sizeof text);
    ck_assert_str_eq(text, "runner = moxie_cpu: device is cpu");
    verdict_free(&verdict);
    mock_set_i64(&mock, "ep_size", 2);
    mock_set_i64(&mock, "tp_size", 2);
    mock_set_str(&mock, "runner", "moxie_cpu");
    verdict_make(&verdict, &mock);
    ck_assert_str_eq(config_str(&verdict.config, KEY_DISPATCHER), "alltoall");
    validate_explain(&verdict.config, KEY_RUNNER, text, sizeof text);
    ck_assert_str_eq(text, "");
    verdict_free(&verdict);
    mock_set_str(&mock, "device", "sm_90");
    mock_set_str(&mock, "weight_format", "fp8_block128");
    verdict_make(&verdict, &mock);
    validate_explain(&verdict.config, KEY_ACTIVATION_FORMAT, text, sizeof text);
    ck_assert_str_eq(text,
                     "activation_format = fp8: device is sm_90, and weight_format fp8_block128");
    verdict_free(&verdict);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, defaults_stand);
    tcase_add_test(tests, every_row_is_whole);
    tcase_add_test(tests, words_have_the_numbers_of_the_abi);
    tcase_add_test(tests, a_value_of_the_wrong_type_is_found);
    tcase_add_test(tests, reasons_say_what_to_set);
    tcase_add_test(tests, reals_are_finite);
    tcase_add_loop_test(tests, numbers_do_not_follow_the_locale, 0, 2);
    tcase_add_test(tests, hostile_strings_are_refused);
    tcase_add_test(tests, an_unterminated_string_is_refused);
    tcase_add_test(tests, every_key_of_the_wrong_type);
    tcase_add_test(tests, every_integer_at_the_edges);
    tcase_add_test(tests, auto_is_replaced);
}

SUITE_MAIN("config", 60, add)
