// The small parts: tokens over ranks, shapes and routings of the bench, weights in memory, tables.

#include "hosts/cli/bench_check.h"
#include "hosts/cli/conform_numbers.h"
#include "hosts/cli/inputs.h"
#include "hosts/cli/machine.h"
#include "hosts/cli/preflight.h"
#include "hosts/cli/progress.h"
#include "hosts/cli/router.h"
#include "hosts/cli/table.h"
#include "hosts/cli/wire.h"

#include "host_tests/suite.h"

#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

START_TEST(tokens_are_split_without_gap)
{
    for (int64_t tokens = 0; tokens < 20; tokens++)
        for (int64_t ranks = 1; ranks < 9; ranks++) {
            int64_t next = 0;

            for (int64_t rank = 0; rank < ranks; rank++) {
                struct token_range part = token_part(tokens, ranks, rank);

                ck_assert_int_eq(part.first, next);
                ck_assert_int_eq(part.count, tokens / ranks + (rank < tokens % ranks));
                next += part.count;
            }
            ck_assert_int_eq(next, tokens);
        }
}
END_TEST

START_TEST(halves_are_widened)
{
    static const uint16_t f16[] = {0x3c00, 0xc000, 0x0001, 0x7c00, 0x7bff, 0x8000, 0x7e00};
    static const float f32[] = {1, -2, 0x1p-24f, INFINITY, 65504, -0.0f};
    static const uint16_t bf16[] = {0x3f80, 0xc020};
    float out[7];

    widen(f16, MOXIE_FORMAT_F16, 7, out);
    ck_assert_mem_eq(out, f32, sizeof f32);
    ck_assert(isnan(out[6]));
    widen(bf16, MOXIE_FORMAT_BF16, 2, out);
    ck_assert_float_eq(out[0], 1);
    ck_assert_float_eq(out[1], -2.5f);
    widen(f32, MOXIE_FORMAT_F32, 3, out);
    ck_assert_mem_eq(out, f32, 3 * sizeof *f32);
}
END_TEST

START_TEST(shapes_of_the_bench)
{
    static const struct {
        const char *text, *wanted; // the bound, and no other
    } wrong[] = {
        {"", "HIDDEN,INTERMEDIATE,EXPERTS,TOP_K, or q30b"},
        {"q30", "or q30b"},
        {"1,2,3", "or q30b"},
        {"1,2,3,", "or q30b"},
        {"1,2,3,4,5", "or q30b"},
        {"1,2,x,1", "or q30b"},
        {"0,2,3,1", "each from 1 to 1099511627776"},
        {"-1,2,3,1", "each from 1 to"},
        {"1,2,3,0", "each from 1 to"},
        {"1099511627777,2,3,1", "each from 1 to"},
        {"99999999999999999999,1,1,1", "each from 1 to"},
        {"1,2,3,4", "TOP_K at most EXPERTS"},
        {"64,64,8,9", "TOP_K at most EXPERTS"},
        {"1,2,64,33", "TOP_K at most 32"},
        {"1,1,4294967296,1", "EXPERTS at most 2147483647"},
    };
    struct bench_shape shape;

    ck_assert_ptr_null(bench_shape_parse(&shape, "q30b"));
    ck_assert_int_eq(shape.intermediate, 768);
    ck_assert_ptr_null(bench_shape_parse(&shape, "8,16,32,4"));
    ck_assert_int_eq(shape.hidden, 8);
    ck_assert_int_eq(shape.top_k, 4);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const char *wanted = bench_shape_parse(&shape, wrong[i].text);

        ck_assert_msg(wanted != NULL && strstr(wanted, wrong[i].wanted) != NULL, "%s: %s",
                      wrong[i].text, wanted == NULL ? "accepted" : wanted);
    }
}
END_TEST

START_TEST(routings_choose_different_experts)
{
    static const struct bench_shape shape = {8, 8, 9, 8};
    const struct draw draw = {1, 2, 3, 1, 0};
    const struct draw other = {1, 3, 3, 1, 0};
    int32_t ids[50 * 8];
    int32_t again[50 * 8];
    int hit[9] = {0};

    bench_draw_ids(&shape, &draw, 50, ids);
    bench_draw_ids(&shape, &draw, 50, again);
    ck_assert_mem_eq(ids, again, sizeof ids);
    bench_draw_ids(&shape, &other, 50, again);
    ck_assert_mem_ne(ids, again, sizeof ids);
    for (int token = 0; token < 50; token++) {
        unsigned seen = 0;

        for (int i = 0; i < 8; i++) {
            int32_t id = ids[8 * token + i];

            ck_assert_int_ge(id, 0);
            ck_assert_int_lt(id, 9);
            ck_assert_uint_eq(seen >> id & 1u, 0);
            seen |= 1u << id;
            hit[id]++;
        }
    }
    for (int i = 0; i < 9; i++)
        ck_assert_int_gt(hit[i], 30);
}
END_TEST

START_TEST(weights_take_what_their_format_takes)
{
    // bytes of one expert: values and scales of w1 [2 * 160, 256]
    static const struct {
        int32_t format;
        uint64_t bytes;
    } rows[] = {
        {MOXIE_FORMAT_F32, 320 * 256 * 4},
        {MOXIE_FORMAT_BF16, 320 * 256 * 2},
        {MOXIE_FORMAT_FP8_TENSOR, 320 * 256 + 2 * 4},
        {MOXIE_FORMAT_FP8_CHANNEL, 320 * 256 + 320 * 4},
        {MOXIE_FORMAT_FP8_BLOCK128, 320 * 256 + 4 * 2 * 4},
        {MOXIE_FORMAT_INT4_G32, 320 * 128 + 320 * 8 * 4},
        {MOXIE_FORMAT_MXFP4, 320 * 128 + 320 * 8},
        {MOXIE_FORMAT_NVFP4, 320 * 128 + 320 * 16 + 2 * 4},
    };
    struct weights_shape shape = {
        .order = MOXIE_ORDER_GATE_UP, .experts = 3, .outputs = 320, .inputs = 256};
    struct weights weights;
    struct device device;
    struct fault fault;

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        shape.format = rows[i].format;
        ck_assert_uint_eq(weights_bytes(&shape), 3 * rows[i].bytes);
        ck_assert_int_eq(format_from_word(format_word(shape.format)), shape.format);
        ck_assert_int_eq(weights_init(&weights, &device, &shape, &fault), EXIT_OK);
        ck_assert_uint_eq(device.bytes_held, 3 * rows[i].bytes);
        ck_assert_int_eq(bench_fill_weights(&weights, 1, &fault), EXIT_OK);
        ck_assert_int_eq(weights.matrix.values.shape[0], 3);
        weights_fini(&weights);
    }
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

// What a floor counts of one expert: gate, up and down, with their scales.
START_TEST(a_layer_takes_its_scales_too)
{
    static const struct {
        int32_t format;
        uint64_t bytes;
    } rows[] = {
        {MOXIE_FORMAT_BF16, 2 * 3 * 160 * 256},
        {MOXIE_FORMAT_FP8_TENSOR, 3 * 160 * 256 + 4 * (2 + 1)},
        {MOXIE_FORMAT_FP8_CHANNEL, 3 * 160 * 256 + 4 * (320 + 256)},
        {MOXIE_FORMAT_FP8_BLOCK128, 3 * 160 * 256 + 4 * (4 * 2 + 2 * 2)},
    };
    static const struct bench_shape shape = {256, 160, 8, 2};

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ck_assert_uint_eq(bench_layer_bytes(&shape, rows[i].format, 3), 3 * rows[i].bytes);
}
END_TEST

// So that an output is neither zero nor infinite: as large as bf16 ones, 2^-6 to 2^-2.
START_TEST(random_fp8_weights_are_of_moderate_size)
{
    const struct weights_shape shape = {
        .format = MOXIE_FORMAT_FP8_CHANNEL, .experts = 2, .outputs = 64, .inputs = 32};
    struct weights weights;
    struct device device;
    struct fault fault;

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    ck_assert_int_eq(weights_init(&weights, &device, &shape, &fault), EXIT_OK);
    ck_assert_int_eq(bench_fill_weights(&weights, 1, &fault), EXIT_OK);
    for (uint64_t i = 0; i < weights.values.bytes; i++) {
        float scale;

        memcpy(&scale, weights.scales.at + i / 32 * sizeof scale, sizeof scale);
        ck_assert_double_ge(fabs(decode_e4m3(weights.values.at[i]) * (double)scale), 0x1p-6);
        ck_assert_double_le(fabs(decode_e4m3(weights.values.at[i]) * (double)scale), 0x1p-2);
    }
    weights_fini(&weights);
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

// A relative error of a layer whose output is zero says nothing, and must not pass for a small one.
START_TEST(a_reference_of_zero_is_no_match)
{
    const struct weights_shape shape = {
        .format = MOXIE_FORMAT_FP8_TENSOR, .experts = 1, .outputs = 16, .inputs = 16};
    const struct weights_shape gated = {.format = MOXIE_FORMAT_FP8_TENSOR,
                                        .order = MOXIE_ORDER_GATE_UP,
                                        .experts = 1,
                                        .outputs = 32,
                                        .inputs = 16};
    uint8_t rows[2][32] = {{0}};
    struct memory y = {rows[0], sizeof rows[0]};
    const struct output output = {&y, 16, MOXIE_FORMAT_BF16};
    struct weights w1, w2;
    struct device device;
    struct fault fault;
    double reference[16] = {0};
    double error = 0;

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    ck_assert_int_eq(weights_init(&w1, &device, &gated, &fault), EXIT_OK);
    ck_assert_int_eq(weights_init(&w2, &device, &shape, &fault), EXIT_OK);
    memset(w1.values.at, 0, w1.values.bytes);
    memset(w1.scales.at, 0, w1.scales.bytes);
    memset(w2.values.at, 0, w2.values.bytes);
    memset(w2.scales.at, 0, w2.scales.bytes);
    const struct token token = {.w1 = &w1,
                                .w2 = &w2,
                                .x = rows[1],
                                .x_format = MOXIE_FORMAT_BF16,
                                .experts = (const int32_t[]){0},
                                .top_k = 1};
    ck_assert_int_eq(bench_check_share(&token, reference, &fault), EXIT_OK);
    ck_assert_int_eq(bench_check_row(&device, &output, 0, reference, &error, &fault), EXIT_OK);
    ck_assert_double_nan(error);
    weights_fini(&w1);
    weights_fini(&w2);
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

// The weight in row n and column k of expert 1, by the words of abi.h.
static double packed_weight(const struct weights *w, int64_t n, int64_t k)
{
    static const double e2m1[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    const int64_t at = (w->shape.outputs + n) * w->shape.inputs + k; // of two experts
    const uint8_t code = (uint8_t)(w->values.at[at / 2] >> (at % 2 == 0 ? 0 : 4) & 15);
    const double number = (code & 8 ? -1 : 1) * e2m1[code & 7];
    const int up = w->shape.order == MOXIE_ORDER_GATE_UP && n >= w->shape.outputs / 2;
    const int64_t halves = w->shape.order == MOXIE_ORDER_GATE_UP ? 2 : 1;
    float scale;

    switch (w->shape.format) {
    case MOXIE_FORMAT_INT4_G32:
        memcpy(&scale, w->scales.at + at / 32 * 4, sizeof scale);
        return ((double)code - 8) * (double)scale;
    case MOXIE_FORMAT_MXFP4:
        return number * ldexp(1, w->scales.at[at / 32] - 127);
    default:
        memcpy(&scale, w->globals.at + (halves + up) * 4, sizeof scale);
        return number * decode_e4m3(w->scales.at[at / 16]) * (double)scale;
    }
}

// Of the only row that is not zero of x: 1 in column 41.
static double packed_output(const struct weights *w1, const struct weights *w2, int64_t n)
{
    double sum = 0;

    for (int64_t unit = 0; unit < 32; unit++) {
        double gate = packed_weight(w1, unit, 41), up = packed_weight(w1, 32 + unit, 41);

        sum += packed_weight(w2, n, unit) * gate / (1 + exp(-gate)) * up;
    }
    return sum;
}

#define WIDE 65536 // inputs of which w1's rows are decoded in two pieces

START_TEST(packed_weights_are_decoded)
{
    static const int32_t formats[] = {MOXIE_FORMAT_INT4_G32, MOXIE_FORMAT_MXFP4,
                                      MOXIE_FORMAT_NVFP4};
    const struct bench_shape shape = {WIDE, 32, 2, 1};
    static const uint16_t x[WIDE] = {[41] = 0x3f80};
    static double y[WIDE];
    struct weights_shape shapes[2];
    struct weights w1, w2;
    struct device device;
    struct fault fault;
    double off = 0, large = 0;

    bench_weights_shapes(&shape, formats[_i], 2, &shapes[0], &shapes[1]);
    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    ck_assert_int_eq(weights_init(&w1, &device, &shapes[0], &fault), EXIT_OK);
    ck_assert_int_eq(weights_init(&w2, &device, &shapes[1], &fault), EXIT_OK);
    ck_assert_int_eq(bench_fill_weights(&w1, 1, &fault), EXIT_OK);
    ck_assert_int_eq(bench_fill_weights(&w2, 7, &fault), EXIT_OK);
    const struct token token = {.w1 = &w1,
                                .w2 = &w2,
                                .x = (const uint8_t *)x,
                                .x_format = MOXIE_FORMAT_BF16,
                                .experts = (const int32_t[]){1},
                                .top_k = 1};
    ck_assert_int_eq(bench_check_share(&token, y, &fault), EXIT_OK);
    for (int64_t n = 0; n < WIDE; n += 97) {
        const double want = packed_output(&w1, &w2, n);

        off += (y[n] - want) * (y[n] - want);
        large += want * want;
    }
    ck_assert_double_gt(large, 0);
    ck_assert_double_le(sqrt(off), 1e-6 * sqrt(large));
    ck_assert_double_eq(bench_check_error_max(formats[_i], &shape), 2e-2);
    weights_fini(&w1);
    weights_fini(&w2);
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

START_TEST(impossible_weights_are_refused)
{
    static const struct weights_shape wrong[] = {
        {.format = MOXIE_FORMAT_BF16, .experts = 1, .outputs = 0, .inputs = 1},
        {.format = MOXIE_FORMAT_BF16, .experts = -1, .outputs = 1, .inputs = 1},
        {.format = MOXIE_FORMAT_AUTO, .experts = 1, .outputs = 1, .inputs = 1},
        {.format = 77, .experts = 1, .outputs = 1, .inputs = 1},
        {.format = MOXIE_FORMAT_NVFP4, .experts = 1, .outputs = 1, .inputs = 24},
        {.format = MOXIE_FORMAT_F32,
         .experts = (int64_t)1 << 40,
         .outputs = (int64_t)1 << 40,
         .inputs = (int64_t)1 << 40},
    };
    struct weights weights;
    struct device device;
    struct fault fault;

    ck_assert_int_eq(device_open(&device, "cpu", 0, &fault), EXIT_OK);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ck_assert_uint_eq(weights_bytes(&wrong[i]), 0);
        ck_assert_int_eq(weights_init(&weights, &device, &wrong[i], &fault), EXIT_TROUBLE);
    }
    ck_assert_int_eq(device_finish(&device, EXIT_OK, &fault), EXIT_OK);
}
END_TEST

// More than a socket holds: by its deadline, and by an interrupt long before.
START_TEST(what_nobody_takes_ends)
{
    static const unsigned char many[1 << 22];
    int ends[2], stop[2];

    ck_assert_int_eq(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    ck_assert_int_eq(pipe(stop), 0);
    ck_assert_int_eq(wire_write(ends[0], many, sizeof many, clock_ns() + 20000000, stop[0]),
                     ETIMEDOUT);
    ck_assert_int_eq(write(stop[1], "", 1), 1);
    ck_assert_int_eq(wire_write(ends[0], many, sizeof many, clock_ns() + 20000000000, stop[0]),
                     EINTR);
    ck_assert_int_eq(wire_write(ends[0], many, sizeof many, clock_ns() + 20000000, -1), ETIMEDOUT);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(close(ends[i]), 0);
        ck_assert_int_eq(close(stop[i]), 0);
    }
}
END_TEST

// Each has what the plan says, and all are on one machine.
START_TEST(ranks_share_the_memory)
{
    const moxie_bounds bounds = {.struct_size = sizeof bounds, .forward_tokens = 1};
    const moxie_plan plan = {.struct_size = sizeof plan,
                             .bounds = &bounds,
                             .device_bytes = machine_memory_available() / 3};
    const struct instance instance = {.plan = &plan};
    struct preflight_memory need = {.ranks = 1, .advice = "take another machine"};
    struct fault fault;

    ck_assert_int_eq(preflight_check_memory(&instance, &need, &fault), EXIT_OK);
    need.ranks = 6;
    ck_assert_int_eq(preflight_check_memory(&instance, &need, &fault), EXIT_REFUSED);
    ck_assert_ptr_nonnull(strstr(fault.text, "take another machine"));
}
END_TEST

START_TEST(bytes_for_people)
{
    static const struct {
        uint64_t bytes;
        const char *text;
    } rows[] = {
        {0, "0 B"},           {1023, "1023 B"},         {1024, "1.0 KiB"},
        {1048575, "1.0 MiB"}, {942342528, "898.7 MiB"}, {(uint64_t)1 << 62, "4.0 EiB"},
    };
    char buffer[HUMAN_BYTES];

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        ck_assert_str_eq(human_bytes(rows[i].bytes, buffer), rows[i].text);
}
END_TEST

static void add_tests(TCase *tests)
{
    tcase_add_test(tests, tokens_are_split_without_gap);
    tcase_add_test(tests, halves_are_widened);
    tcase_add_test(tests, shapes_of_the_bench);
    tcase_add_test(tests, routings_choose_different_experts);
    tcase_add_test(tests, weights_take_what_their_format_takes);
    tcase_add_test(tests, a_layer_takes_its_scales_too);
    tcase_add_test(tests, random_fp8_weights_are_of_moderate_size);
    tcase_add_test(tests, a_reference_of_zero_is_no_match);
    tcase_add_loop_test(tests, packed_weights_are_decoded, 0, 3);
    tcase_add_test(tests, impossible_weights_are_refused);
    tcase_add_test(tests, ranks_share_the_memory);
    tcase_add_test(tests, bytes_for_people);
    tcase_add_test(tests, what_nobody_takes_ends);
}

SUITE_MAIN("cli_parts", 60, add_tests)
