// The host over a JSON object: typed answers, and what is said about unknown keys.

#include "hosts/cli/host.h"

#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static json_t *config;
static struct host host;
static moxie_host table;

static void set_up(void)
{
    struct fault fault;

    config = json_pack("{s:i, s:I, s:f, s:s, s:b, s:n, s:[], s:{}, s:s}", "top_k", 8, "large",
                       (json_int_t)1 << 62, "limit", 7.5, "activation", "silu", "flag", 1, "null",
                       "list", "object", "empty", "");
    ck_assert_ptr_nonnull(config);
    ck_assert_int_eq(host_init(&host, config, "moxie test", NULL, &fault), EXIT_OK);
    table = host_table(&host, MOXIE_ABI_VERSION);
}

static void tear_down(void)
{
    host_fini(&host);
    json_decref(config);
}

START_TEST(integers_are_integers)
{
    static const char *const wrong[] = {"limit", "activation", "flag", "null", "list", "object"};
    int64_t value = -1;

    ck_assert_int_eq(table.get_i64(table.ctx, "top_k", &value), MOXIE_CONFIG_FOUND);
    ck_assert_int_eq(value, 8);
    ck_assert_int_eq(table.get_i64(table.ctx, "large", &value), MOXIE_CONFIG_FOUND);
    ck_assert_int_eq(value, (int64_t)1 << 62);
    ck_assert_int_eq(table.get_i64(table.ctx, "absent", &value), MOXIE_CONFIG_ABSENT);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_int_eq(table.get_i64(table.ctx, wrong[i], &value), MOXIE_CONFIG_WRONG_TYPE);
}
END_TEST

START_TEST(reals_may_be_integers)
{
    static const char *const wrong[] = {"activation", "flag", "null", "list", "object"};
    double value = -1;

    ck_assert_int_eq(table.get_f64(table.ctx, "limit", &value), MOXIE_CONFIG_FOUND);
    ck_assert_double_eq(value, 7.5);
    ck_assert_int_eq(table.get_f64(table.ctx, "top_k", &value), MOXIE_CONFIG_FOUND);
    ck_assert_double_eq(value, 8);
    ck_assert_int_eq(table.get_f64(table.ctx, "absent", &value), MOXIE_CONFIG_ABSENT);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++)
        ck_assert_int_eq(table.get_f64(table.ctx, wrong[i], &value), MOXIE_CONFIG_WRONG_TYPE);
}
END_TEST

START_TEST(strings_are_cut_and_measured)
{
    char buffer[8] = "xxxxxxx";
    uint64_t length = 99;

    ck_assert_int_eq(table.get_str(table.ctx, "activation", buffer, 8, &length),
                     MOXIE_CONFIG_FOUND);
    ck_assert_str_eq(buffer, "silu");
    ck_assert_uint_eq(length, 4);
    ck_assert_int_eq(table.get_str(table.ctx, "activation", buffer, 3, &length),
                     MOXIE_CONFIG_FOUND);
    ck_assert_str_eq(buffer, "si");
    ck_assert_uint_eq(length, 4);
    buffer[0] = 'x';
    ck_assert_int_eq(table.get_str(table.ctx, "activation", buffer, 0, &length),
                     MOXIE_CONFIG_FOUND);
    ck_assert_int_eq(buffer[0], 'x');
    ck_assert_int_eq(table.get_str(table.ctx, "empty", buffer, 8, &length), MOXIE_CONFIG_FOUND);
    ck_assert_str_eq(buffer, "");
    ck_assert_int_eq(table.get_str(table.ctx, "top_k", buffer, 8, &length),
                     MOXIE_CONFIG_WRONG_TYPE);
    ck_assert_int_eq(table.get_str(table.ctx, "absent", buffer, 8, &length), MOXIE_CONFIG_ABSENT);
}
END_TEST

START_TEST(memory_is_aligned)
{
    const moxie_allocation request = {
        .struct_size = sizeof request, .kind = MOXIE_MEMORY_HOST, .bytes = 5, .align = 4096};
    const moxie_allocation small = {
        .struct_size = sizeof small, .kind = MOXIE_MEMORY_HOST, .bytes = 5, .align = 1};
    void *memory = NULL;

    ck_assert_int_eq(table.allocate(table.ctx, &request, &memory), 0);
    ck_assert_uint_eq((uintptr_t)memory % 4096, 0);
    table.release(table.ctx, &request, memory);
    ck_assert_int_eq(table.allocate(table.ctx, &small, &memory), 0);
    table.release(table.ctx, &small, memory);
}
END_TEST

START_TEST(nobody_can_be_reached_alone)
{
    char byte = 0;

    ck_assert_int_ne(table.all_gather(table.ctx, &byte, &byte, 1), 0);
    ck_assert_int_ne(table.barrier(table.ctx), 0);
}
END_TEST

START_TEST(backends_are_kept_by_name)
{
    static const moxie_runner_info runner = {.name = "quick"};
    static const moxie_dispatcher_info dispatcher = {.name = "far"};

    ck_assert_int_eq(table.register_runner(table.ctx, &runner), 0);
    ck_assert_int_eq(table.register_dispatcher(table.ctx, &dispatcher), 0);
    ck_assert_ptr_eq(host_runner(&host, "quick", ""), &runner);
    ck_assert_ptr_null(host_runner(&host, "far", ""));
    ck_assert_ptr_eq(host_dispatcher(&host, "far", ""), &dispatcher);
    for (int i = 1; i < HOST_BACKENDS_MAX; i++)
        ck_assert_int_eq(table.register_runner(table.ctx, &runner), 0);
    ck_assert_int_ne(table.register_runner(table.ctx, &runner), 0);
}
END_TEST

// The message about a key of the file, after the library asked for `asked`.
static const char *message_about(const char *key, json_t *warnings)
{
    size_t index = 0;
    json_t *warning = NULL;

    json_array_foreach(warnings, index, warning)
    {
        if (strcmp(json_string_value(json_object_get(warning, "key")), key) == 0)
            return json_string_value(json_object_get(warning, "message"));
    }
    return NULL;
}

START_TEST(unknown_keys_are_named_with_the_nearest)
{
    int64_t value = 0;
    json_t *warnings = NULL;

    (void)json_object_set_new(config, "hiden_size", json_integer(1));
    (void)json_object_set_new(config, "to", json_integer(1));
    (void)table.get_i64(table.ctx, "top_k", &value);
    (void)table.get_i64(table.ctx, "hidden_size", &value);
    (void)table.get_i64(table.ctx, "num_layers", &value);
    warnings = host_unknown_keys(&host);
    ck_assert_ptr_null(message_about("top_k", warnings));
    ck_assert_ptr_nonnull(
        strstr(message_about("hiden_size", warnings), "did you mean hidden_size"));
    ck_assert_ptr_nonnull(message_about("object", warnings));
    ck_assert_ptr_null(strstr(message_about("object", warnings), "did you mean"));
    ck_assert_ptr_null(
        strstr(message_about("to", warnings), "did you mean")); // half of it is a guess
    json_decref(warnings);
}
END_TEST

// Errors of `config` alone are held back, and only where the verdict is said apart.
START_TEST(a_verdict_is_not_logged_twice)
{
    char text[512] = "";
    FILE *kept = tmpfile();
    int stderr_is = dup(STDERR_FILENO);

    ck_assert_ptr_nonnull(kept);
    ck_assert_int_ge(dup2(fileno(kept), STDERR_FILENO), 0);
    for (int apart = 0; apart < 2; apart++) {
        host.verdict_apart = apart;
        table.log(table.ctx, MOXIE_LOG_ERROR, "config", "refused", 7);
        table.log(table.ctx, MOXIE_LOG_ERROR, "device", "lost", 4);
        table.log(table.ctx, MOXIE_LOG_HOST_MISBEHAVING, "config", "bad\x1b\x9b\xc3\xa9", 7);
        table.log(table.ctx, MOXIE_LOG_INFO, "config", "chosen", 6);
    }
    (void)fflush(stderr);
    ck_assert_int_ge(dup2(stderr_is, STDERR_FILENO), 0);
    rewind(kept);
    ck_assert_uint_gt(fread(text, 1, sizeof text - 1, kept), 0);
    ck_assert_str_eq(text, "moxie test: error: config: refused\n"
                           "moxie test: error: device: lost\n"
                           "moxie test: the host misbehaves: config: bad??\xc3\xa9\n"
                           "moxie test: error: device: lost\n"
                           "moxie test: the host misbehaves: config: bad??\xc3\xa9\n");
    (void)fclose(kept);
    (void)close(stderr_is);
}
END_TEST

static void add_tests(TCase *tests)
{
    tcase_add_checked_fixture(tests, set_up, tear_down);
    tcase_add_test(tests, integers_are_integers);
    tcase_add_test(tests, reals_may_be_integers);
    tcase_add_test(tests, strings_are_cut_and_measured);
    tcase_add_test(tests, memory_is_aligned);
    tcase_add_test(tests, nobody_can_be_reached_alone);
    tcase_add_test(tests, backends_are_kept_by_name);
    tcase_add_test(tests, unknown_keys_are_named_with_the_nearest);
    tcase_add_test(tests, a_verdict_is_not_logged_twice);
}

SUITE_MAIN("cli_host", 60, add_tests)
