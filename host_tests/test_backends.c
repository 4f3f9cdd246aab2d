// plugin/backends.c: the tables agree with each other, with the words of the configuration, and
// with what the kernels do.

#include "plugin/backends.h"

#include "host_tests/suite.h"
#include "kernels/cpu/cpu.h"
#include "kernels/types.h"
#include "plugin/config.h"
#include "plugin/plan.h"

#include <string.h>

START_TEST(every_backend_is_found)
{
    for (uint32_t i = 0; i < backends_count; i++) {
        const struct backend *backend = &backends[i];

        ck_assert_ptr_eq(
            backend_find((enum backend_kind)backend->kind, backend->name, backend->device),
            backend);
    }
    ck_assert_ptr_null(backend_find(BACKEND_RUNNER, "local", "cpu"));
    ck_assert_ptr_null(backend_find(BACKEND_DISPATCHER, "moxie_cpu", "cpu"));
    ck_assert_ptr_null(backend_find(BACKEND_RUNNER, "moxie_cpu", "sm_90"));
    ck_assert_ptr_null(backend_find(BACKEND_RUNNER, "", "cpu"));
    ck_assert_ptr_null(backend_find(BACKEND_RUNNER, "moxie_cp", "cpu"));
}
END_TEST

START_TEST(dispatchers_are_numbered)
{
    static const char *const names[] = {"local", "allgather", "alltoall"};

    for (int32_t id = DISPATCHER_LOCAL; id <= DISPATCHER_ALLTOALL; id++) {
        const struct backend *backend = backend_find(BACKEND_DISPATCHER, names[id], "cpu");

        ck_assert_ptr_nonnull(backend);
        ck_assert_int_eq(backend->id, id);
    }
}
END_TEST

// A runner that takes what a dispatcher gives, and one of the two applies each factor.
START_TEST(every_pair_meets)
{
    const moxie_traits *runner = &traits_runner_cpu;

    for (uint32_t i = 0; i < backends_count; i++) {
        const moxie_traits *dispatcher = backends[i].traits;

        ck_assert_uint_eq(dispatcher->struct_size, sizeof *dispatcher);
        ck_assert_uint_eq(dispatcher->reserved0, 0);
        ck_assert_int_eq(dispatcher->no_expert_id, -1);
        ck_assert_uint_ne(dispatcher->row_align_bytes, 0);
        ck_assert_uint_eq(dispatcher->row_align_bytes & (dispatcher->row_align_bytes - 1), 0);
        if (backends[i].kind != BACKEND_DISPATCHER) continue;
        ck_assert_uint_ne(dispatcher->layouts, 0);
        ck_assert_uint_eq(dispatcher->layouts & ~runner->layouts, 0);
        ck_assert_uint_eq(dispatcher->id_spaces & ~runner->id_spaces, 0);
        ck_assert_uint_eq(dispatcher->formats & ~runner->formats, 0);
        ck_assert_int_eq(dispatcher->weights_applied_by, MOXIE_BY_RUNNER);
        ck_assert_int_eq(dispatcher->scaling_applied_by, MOXIE_BY_RUNNER);
        ck_assert_uint_ge(dispatcher->row_align_bytes, runner->row_align_bytes);
    }
    ck_assert_int_eq(traits_local.output_is_reduced, 0);
    ck_assert_int_eq(traits_push.output_is_reduced, 1);
}
END_TEST

// Every word of a format key is a format that the CPU has kernels for: its table is complete.
static uint32_t words_of(enum config_key key)
{
    uint32_t bits = 0;

    for (int32_t number = 0; number < FORMAT_COUNT; number++) {
        char text[CONFIG_TEXT_BYTES];

        config_word_text(key, number, text);
        if (text[0] != '\0' && strcmp(text, "auto") != 0) bits |= BACKEND_BIT(number);
    }
    return bits;
}

START_TEST(the_cpu_runs_every_word)
{
    const struct backend *cpu = backend_find(BACKEND_RUNNER, "moxie_cpu", "cpu");

    ck_assert_ptr_nonnull(cpu);
    ck_assert_uint_eq(cpu->weight_formats, words_of(KEY_WEIGHT_FORMAT));
    ck_assert_uint_eq(cpu->activation_formats, words_of(KEY_ACTIVATION_FORMAT));
    ck_assert_uint_eq(cpu->input_formats, words_of(KEY_INPUT_FORMAT));
    ck_assert_uint_eq(cpu->output_formats, words_of(KEY_OUTPUT_FORMAT));
    ck_assert_uint_eq(cpu->activations,
                      BACKEND_BIT(ACTIVATION_SILU) | BACKEND_BIT(ACTIVATION_GELU) |
                          BACKEND_BIT(ACTIVATION_GELU_TANH) | BACKEND_BIT(ACTIVATION_SWIGLUOAI) |
                          BACKEND_BIT(ACTIVATION_RELU2));
    for (uint32_t i = 0; i < backends_count; i++) {
        ck_assert_uint_eq(backends[i].input_formats & ~backends[i].wire_formats, 0);
        if (backends[i].kind == BACKEND_DISPATCHER)
            ck_assert_uint_eq(backends[i].wire_formats & ~cpu->wire_formats, 0);
    }
}
END_TEST

START_TEST(probing_gives_a_score_and_a_reason)
{
    for (uint32_t i = 0; i < backends_count; i++) {
        char reason[160], again[160];
        int32_t score;

        memset(reason, 'x', sizeof reason);
        score = backend_probe(&backends[i], reason);
        if (strcmp(backends[i].device, "cpu") == 0) ck_assert_int_gt(score, 0);
        ck_assert_ptr_nonnull(memchr(reason, '\0', sizeof reason));
        ck_assert_uint_gt(strlen(reason), 0);
        ck_assert_int_eq(backend_probe(&backends[i], again), score);
        ck_assert_str_eq(reason, again);
        if (&backends[i] == backend_find(BACKEND_RUNNER, "moxie_cpu", "cpu")) {
            static const char *const isas[] = {"scalar", "avx2", "avx512"};

            ck_assert_ptr_nonnull(strstr(reason, isas[cpu_isa_best()]));
            ck_assert_int_eq(score, 10 * (1 + (int32_t)cpu_isa_best()));
        }
    }
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, every_backend_is_found);
    tcase_add_test(tests, dispatchers_are_numbered);
    tcase_add_test(tests, every_pair_meets);
    tcase_add_test(tests, the_cpu_runs_every_word);
    tcase_add_test(tests, probing_gives_a_score_and_a_reason);
}

SUITE_MAIN("backends", 10, add)
