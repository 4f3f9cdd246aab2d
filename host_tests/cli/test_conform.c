// What conform judges by: number formats, the reference, and verdicts that stand.

#include "hosts/cli/conform_layer.h"
#include "hosts/cli/conform_stage.h"

#include "host_tests/suite.h"

#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

START_TEST(small_formats_are_decoded)
{
    ck_assert_double_eq(decode_e4m3(0x00), 0);
    ck_assert_double_eq(decode_e4m3(0x01), 0x1p-9);
    ck_assert_double_eq(decode_e4m3(0x08), 0x1p-6);
    ck_assert_double_eq(decode_e4m3(0x38), 1);
    ck_assert_double_eq(decode_e4m3(0x7e), 448);
    ck_assert_double_eq(decode_e4m3(0xb8), -1);
    ck_assert_double_nan(decode_e4m3(0x7f));
    ck_assert_double_nan(decode_e4m3(0xff));
    ck_assert_double_eq(decode_e2m1(0x1), 0.5);
    ck_assert_double_eq(decode_e2m1(0xf), -6);
    ck_assert_double_eq(decode_e8m0(127), 1);
    ck_assert_double_eq(decode_e8m0(0), 0x1p-127);
    ck_assert_double_nan(decode_e8m0(255));
}
END_TEST

// Every normal number comes back from its own value; half way goes to even.
START_TEST(halves_round_to_even)
{
    const int32_t formats[] = {MOXIE_FORMAT_BF16, MOXIE_FORMAT_F16};

    for (int i = 0; i < 2; i++) {
        const unsigned exponent = i == 0 ? 0x7f80 : 0x7c00, one = i == 0 ? 0x3f80 : 0x3c00;
        const double step = i == 0 ? 0x1p-7 : 0x1p-10;
        uint16_t none = 0;

        for (unsigned code = 0; code < 0x10000; code++) {
            uint16_t bits = (uint16_t)code, back = 0;

            if ((code & exponent) == 0 || (code & exponent) == exponent) continue;
            number_write(&back, formats[i], 0, number_read(&bits, formats[i], 0));
            ck_assert_uint_eq(back, bits);
        }
        number_write(&none, formats[i], 0, NAN);
        ck_assert(isnan(number_read(&none, formats[i], 0)));
        for (unsigned k = 0; k < 4; k++) {
            uint16_t bits = 0;

            number_write(&bits, formats[i], 0, 1 + (k + 0.5) * step);
            ck_assert_uint_eq(bits, one + k + (k & 1));
        }
    }
}
END_TEST

// One expert of one unit, by hand: gate 2x, up 3x, down 5.
START_TEST(the_reference_is_the_definition)
{
    const struct layer_spec spec = {.hidden = 1,
                                    .intermediate = 1,
                                    .experts = 1,
                                    .weight_format = MOXIE_FORMAT_F32,
                                    .order = MOXIE_ORDER_UP_GATE,
                                    .activation = "silu",
                                    .seed = 1};
    struct check check = {.plugin = ""};
    struct layer layer = {0};
    double x = 0.5, mid = 0, y = 0;

    ck_assert_int_eq(layer_make(&layer, &spec, &check), VERDICT_PASS);
    layer.w1.exact[0] = 3;
    layer.w1.exact[1] = 2;
    layer.w2.exact[0] = 5;
    reference_expert(&layer, 0, &x, &mid, &y);
    ck_assert_double_eq_tol(y, 1 / (1 + exp(-1.0)) * 1.5 * 5, 1e-12);
    layer.spec.order = MOXIE_ORDER_GATE_UP;
    reference_expert(&layer, 0, &x, &mid, &y);
    ck_assert_double_eq_tol(y, 1.5 / (1 + exp(-1.5)) * 1 * 5, 1e-12);
    layer_free(&layer);
}
END_TEST

START_TEST(a_wrong_row_is_seen)
{
    const struct tokens_spec spec = {.count = 4,
                                     .hidden = 8,
                                     .top_k = 1,
                                     .experts = 2,
                                     .x_format = MOXIE_FORMAT_F32,
                                     .y_format = MOXIE_FORMAT_F32,
                                     .weight_format = MOXIE_FORMAT_F32,
                                     .id_bytes = 4,
                                     .pad = 3,
                                     .scaling = 1,
                                     .seed = 3};
    struct check check = {.plugin = ""};
    struct tokens tokens = {0};
    float *y = NULL;

    ck_assert_int_eq(tokens_make(&tokens, &spec, &check), VERDICT_PASS);
    ck_assert_int_eq(tokens_untouched(&tokens, &check), VERDICT_PASS);
    y = (float *)(void *)(tokens.y + tokens.batch.y.byte_offset);
    for (int i = 0; i < 32; i++)
        tokens.want[i] = y[i / 8 * 11 + i % 8] = 1;
    ck_assert_int_eq(tokens_compare(&tokens, 1e-6, &check), VERDICT_PASS);
    y[2 * 11 + 7] = 1.01f;
    ck_assert_int_eq(tokens_compare(&tokens, 1e-3, &check), VERDICT_FAIL);
    ck_assert_ptr_nonnull(strstr(check.message, "token 2 of 4"));
    check = (struct check){.plugin = ""};
    y[2 * 11 + 7] = 1;
    y[8] = 0; // between rows 0 and 1
    ck_assert_int_eq(tokens_compare(&tokens, 1e-3, &check), VERDICT_FAIL);
    ck_assert_ptr_nonnull(strstr(check.message, "around y's rows"));
    tokens_free(&tokens);
}
END_TEST

// A row without an expert has to be zero, not small.
START_TEST(a_row_of_nobody_is_zero)
{
    const struct tokens_spec spec = {.count = 2,
                                     .hidden = 2,
                                     .top_k = 1,
                                     .experts = 2,
                                     .x_format = MOXIE_FORMAT_F32,
                                     .y_format = MOXIE_FORMAT_F32,
                                     .weight_format = MOXIE_FORMAT_F32,
                                     .id_bytes = 4,
                                     .scaling = 1,
                                     .seed = 3};
    const float seen[] = {1e6f, 1e6f, 0, 1e-6f};
    struct check check = {.plugin = ""};
    struct tokens tokens = {0};

    ck_assert_int_eq(tokens_make(&tokens, &spec, &check), VERDICT_PASS);
    memcpy(tokens.y, seen, sizeof seen);
    tokens.want[0] = tokens.want[1] = 1e6;
    ck_assert_int_eq(tokens_compare(&tokens, 1e-3, &check), VERDICT_FAIL);
    ck_assert_ptr_nonnull(strstr(check.message, "token 1 of 2"));
    tokens_free(&tokens);
}
END_TEST

START_TEST(the_first_verdict_stands)
{
    struct check check = {.plugin = ""};

    check_at(&check, "here");
    ck_assert_int_eq(broken(&check, "once\n\xff"), VERDICT_FAIL);
    check_at(&check, "there");
    ck_assert_int_eq(broken(&check, "twice"), VERDICT_FAIL);
    ck_assert_int_eq(skipped(&check, "thrice"), VERDICT_FAIL);
    ck_assert_str_eq(check.where, "here");
    ck_assert_str_eq(check.message, "once??");
}
END_TEST

static void *crash_elsewhere(void *arg)
{
    struct check check = {.plugin = "", .trace = 1};
    // Not NULL, which a sanitizer would see before the processor does.
    volatile int *nobodys = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    check_at(&check, "the %s", "thread\nthat crashes");
    switch (*(const int *)arg) {
    case SIGSEGV:
        *nobodys = 1;
        break;
    case SIGFPE:
        (void)raise(SIGFPE);
        break;
    default:
        abort();
    }
    return NULL;
}

// The last place in the trace is another thread's.
static void crash_between(int number)
{
    struct check check = {.plugin = "", .trace = 1};
    pthread_t thread;

    trace_crashes();
    check_at(&check, "the thread that goes on");
    (void)pthread_create(&thread, NULL, crash_elsewhere, &number);
    (void)pthread_join(thread, NULL);
    _exit(EXIT_SUCCESS);
}

START_TEST(a_crash_names_the_place_of_its_thread)
{
    const int numbers[] = {SIGABRT, SIGSEGV, SIGFPE};
    int ends[2], status = 0;

    for (int i = 0; i < 3; i++) {
        char text[65536] = "";
        size_t length = 0;
        ssize_t got = 0;
        pid_t child = -1;

        ck_assert_int_eq(pipe(ends), 0);
        child = fork();
        ck_assert_int_ge(child, 0);
        if (child == 0) {
            (void)dup2(ends[1], STDERR_FILENO);
            (void)close(ends[1]);
            crash_between(numbers[i]);
        }
        (void)close(ends[1]);
        while ((got = read(ends[0], text + length, sizeof text - 1 - length)) > 0)
            length += (size_t)got;
        (void)close(ends[0]);
        ck_assert_int_eq(waitpid(child, &status, 0), child);
        // A sanitizer turns a signal into an exit code of its own.
        ck_assert_msg(WIFSIGNALED(status) ? WTERMSIG(status) == numbers[i]
                                          : WEXITSTATUS(status) != EXIT_SUCCESS,
                      "status %d", status);
        ck_assert_msg(strstr(text, "\n" CRASH_MARK "the thread?that crashes\n") != NULL, "%s",
                      text);
    }
}
END_TEST

// Names are unique, and every rule says what it holds.
START_TEST(rules_have_names)
{
    for (int i = 0; i < conform_rules_count; i++) {
        ck_assert_ptr_eq(rule_find(conform_rules[i].name), &conform_rules[i]);
        ck_assert_uint_gt(strlen(conform_rules[i].holds), 8);
    }
    ck_assert_ptr_null(rule_find("nothing"));
    ck_assert_ptr_nonnull(rule_find(RULE_FORWARD));
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, small_formats_are_decoded);
    tcase_add_test(tests, halves_round_to_even);
    tcase_add_test(tests, the_reference_is_the_definition);
    tcase_add_test(tests, a_wrong_row_is_seen);
    tcase_add_test(tests, a_row_of_nobody_is_zero);
    tcase_add_test(tests, the_first_verdict_stands);
    tcase_add_test(tests, a_crash_names_the_place_of_its_thread);
    tcase_add_test(tests, rules_have_names);
}

SUITE_MAIN("conform", 60, add)
