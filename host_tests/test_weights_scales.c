// plugin/weights_scales.c: 4-bit scales at the edge of what f32 holds, and those that a device has,
// which come in pieces.

#include "plugin/weights_scales.h"

#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPERTS 3
#define ORDINAL 5 // of the device that the weights lie on

#define CAPTURING 900 // what the device answers while a graph is captured

// What lies so far beyond the host's memory is the device's.
#define BEYOND ((uintptr_t)1 << 46)

// The device's work since its last reset.
static struct {
    int32_t synchronized, fetches, fails_at; // fails_at: the fetch that fails, from 1 on; 0: none
    int32_t unsynchronized;                  // fetches before anything was waited for
    int32_t visits, left, left_behind;       // left_behind: as many waits as leaves
    int64_t bytes_most;
    int32_t fetch_answer, synchronize_answer; // fetch's where it fails
} told;

static int32_t device_fetch(void *to, const void *from, int64_t bytes)
{
    told.fetches++;
    told.unsynchronized += told.synchronized == 0;
    if (bytes > told.bytes_most) told.bytes_most = bytes;
    if (told.fetches == told.fails_at) return told.fetch_answer;
    memcpy(to, (const void *)((uintptr_t)from - BEYOND), (size_t)bytes);
    return 0;
}

static int32_t device_synchronize(void)
{
    told.synchronized++;
    return told.synchronize_answer;
}

static int32_t device_status(int32_t answer)
{
    if (answer == 0) return MOXIE_OK;
    return answer == CAPTURING ? MOXIE_E_CAPTURING : MOXIE_E_DEVICE;
}

struct sample {
    struct layer_weights weights;
    unsigned char *values[2], *scales[2]; // as the host sees them
    struct device device;
    struct said said;
};

static struct weight_view *view_of(struct sample *s, int32_t matrix)
{
    return matrix == 0 ? &s->weights.w1 : &s->weights.w2;
}

// `stride`: bytes from a row's scales to the next's; 0: they are compact.
static void sample_matrix(struct sample *s, int32_t matrix, int64_t n, int64_t k, int64_t stride)
{
    struct weight_view *view = view_of(s, matrix);
    int64_t beyond = s->device.synchronize != NULL ? (int64_t)BEYOND : 0;

    view->n = n;
    view->k = k;
    view->row_stride_bytes = k / 2;
    view->expert_stride_bytes = n * view->row_stride_bytes;
    view->scale_row_stride_bytes =
        stride != 0 ? stride : k / (view->format == FORMAT_NVFP4 ? NVFP4_GROUP : 32);
    view->scale_expert_stride_bytes = n * view->scale_row_stride_bytes;
    s->values[matrix] = calloc(EXPERTS, (size_t)view->expert_stride_bytes);
    s->scales[matrix] = calloc(EXPERTS, (size_t)view->scale_expert_stride_bytes);
    ck_assert(s->values[matrix] != NULL && s->scales[matrix] != NULL);
    view->values = (const void *)((uintptr_t)s->values[matrix] + (uintptr_t)beyond);
    view->scales = (const void *)((uintptr_t)s->scales[matrix] + (uintptr_t)beyond);
}

static void sample_free(struct sample *s)
{
    for (int32_t matrix = 0; matrix < 2; matrix++) {
        free(s->values[matrix]);
        free(s->scales[matrix]);
    }
}

// All zero, on a device whose memory the host cannot see, or on the CPU.
static void sample_init(struct sample *s, int32_t format, int32_t on_device)
{
    memset(s, 0, sizeof *s);
    memset(&told, 0, sizeof told);
    s->device = device_cpu;
    if (on_device) {
        s->device.fetch = device_fetch;
        s->device.synchronize = device_synchronize;
        s->device.status = device_status;
    }
    s->weights.w1.format = s->weights.w2.format = format;
    sample_matrix(s, 0, 320, 192, 0);
    sample_matrix(s, 1, 192, 160, 0);
    said_init(&s->said);
}

// Of one more layout.
static void sample_lay(struct sample *s, int32_t matrix, int64_t n, int64_t k, int64_t stride)
{
    free(s->values[matrix]);
    free(s->scales[matrix]);
    sample_matrix(s, matrix, n, k, stride);
}

static int32_t check(struct sample *s)
{
    return weights_check_scales(&s->weights, 0, EXPERTS, &s->device, &s->said.error);
}

struct block {
    int32_t matrix;
    int64_t expert, row, block;
};

// Writes the scale of a block, and its last value as a nibble.
static void set_block(struct sample *s, const struct block *at, uint8_t scale, uint8_t nibble)
{
    const struct weight_view *view = view_of(s, at->matrix);
    int64_t block_bytes = view->format == FORMAT_NVFP4 ? 8 : 16;

    s->scales[at->matrix][at->expert * view->scale_expert_stride_bytes +
                          at->row * view->scale_row_stride_bytes + at->block] = scale;
    s->values[at->matrix][at->expert * view->expert_stride_bytes +
                          at->row * view->row_stride_bytes + (at->block + 1) * block_bytes - 1] =
        (uint8_t)(nibble << 4);
}

static const char *const names[2] = {"weights.w1.scales", "weights.w2.scales"};

// ---- What they may be --------------------------------------------------------------------------

// 2^21 is the largest that a GPU has numbers for.
START_TEST(e8m0_scales_stay_finite)
{
    // The nibbles of 0, 1.5, 2, 3, 4, 6, -6.
    static const struct {
        uint8_t scale, nibble;
        int32_t fine;
    } blocks[] = {{0, 7, 1},    {127, 7, 1},  {148, 7, 1}, {149, 0, 1},  {252, 7, 1}, {252, 15, 1},
                  {253, 5, 1},  {253, 13, 1}, {253, 6, 0}, {253, 14, 0}, {254, 3, 1}, {254, 4, 0},
                  {254, 12, 0}, {254, 0, 1},  {255, 0, 0}, {255, 7, 0}};
    struct sample s;
    char scale[48];

    sample_init(&s, FORMAT_MXFP4, _i);
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        for (int32_t matrix = 0; matrix < 2; matrix++) {
            const struct block at = {matrix, 2, 7, 3};

            set_block(&s, &at, blocks[i].scale, blocks[i].nibble);
            (void)snprintf(scale, sizeof scale, "scale %d of expert 2", blocks[i].scale);
            if (blocks[i].fine && _i == 1 && blocks[i].scale > 148)
                SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), names[matrix], scale,
                     "row 7, block 3", "2^21 at most", "device to cpu");
            else if (blocks[i].fine)
                ACCEPTED(&s.said, check(&s));
            else
                SAID(&s.said, MOXIE_E_INVALID, check(&s), names[matrix], scale, "row 7, block 3");
            set_block(&s, &at, 0, 0);
        }
    }
    sample_free(&s);
}
END_TEST

START_TEST(low_nibbles_count_too)
{
    const struct block first = {0, 0, 0, 0};
    struct sample s;

    sample_init(&s, FORMAT_MXFP4, _i);
    set_block(&s, &first, 253, 0);
    if (_i == 0)
        ACCEPTED(&s.said, check(&s));
    else
        SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "scale 253", "2^126");
    s.values[0][0] = 6;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "scale 253", "expert 0, row 0, block 0");
    sample_free(&s);
}
END_TEST

START_TEST(nvfp4_scales_are_numbers)
{
    const struct block low = {1, 1, 9, 4}, last = {0, 2, 319, 11};
    struct sample s;

    sample_init(&s, FORMAT_NVFP4, _i);
    set_block(&s, &low, 0x7e, 7); // 448
    ACCEPTED(&s.said, check(&s));
    set_block(&s, &low, 0x7f, 7);
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "weights.w2.scales", "expert 1, row 9, block 4",
         "NaN");
    set_block(&s, &last, 0xff, 0);
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "expert");
    set_block(&s, &low, 0, 0);
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "weights.w1.scales", "expert 2, row 319, block 11");
    sample_free(&s);
}
END_TEST

// weights_updated names the experts that the host rewrote: the others are not looked at again.
START_TEST(experts_are_checked_alone)
{
    const struct block middle = {1, 1, 0, 0};
    struct sample s;

    sample_init(&s, FORMAT_MXFP4, _i);
    set_block(&s, &middle, 255, 0);
    ACCEPTED(&s.said, weights_check_scales(&s.weights, 0, 1, &s.device, &s.said.error));
    ACCEPTED(&s.said, weights_check_scales(&s.weights, 2, 1, &s.device, &s.said.error));
    ACCEPTED(&s.said, weights_check_scales(&s.weights, 0, 0, &s.device, &s.said.error));
    for (int32_t count = 1; count <= 2; count++)
        SAID(&s.said, MOXIE_E_INVALID,
             weights_check_scales(&s.weights, 1, count, &s.device, &s.said.error),
             "weights.w2.scales", "expert 1, row 0, block 0");
    sample_free(&s);
}
END_TEST

// ---- On a device -------------------------------------------------------------------------------

START_TEST(other_scales_are_not_fetched)
{
    struct sample s;

    for (int32_t format = FORMAT_F32; format < FORMAT_COUNT; format++) {
        if (format == FORMAT_MXFP4 || format == FORMAT_NVFP4) continue;
        sample_init(&s, format, 1);
        ACCEPTED(&s.said, check(&s));
        ck_assert_int_eq(told.fetches + told.synchronized, 0);
        sample_free(&s);
    }
}
END_TEST

// Three of each expert, in rows that are compact, apart, or each alone; and of a whole expert.
START_TEST(pieces_are_bounded)
{
    static const struct {
        int64_t n, k, stride;
        int32_t pieces; // of an expert
    } cases[] = {{5000, 4096, 0, 3}, {700, 512, 1000, 3}, {3, 64, 300 << 10, 3}, {64, 64, 0, 1}};
    struct sample s;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const struct block near = {0, 2, cases[i].n - 1, cases[i].k / 32 - 1};

        sample_init(&s, FORMAT_MXFP4, 1);
        sample_lay(&s, 0, cases[i].n, cases[i].k, cases[i].stride);
        ACCEPTED(&s.said, check(&s));
        ck_assert_int_eq(told.fetches, EXPERTS * (cases[i].pieces + 1)); // w2 has one
        ck_assert_int_le(told.bytes_most, 256 << 10);
        ck_assert_int_eq(told.synchronized, 1);
        ck_assert_int_eq(told.unsynchronized, 0);
        for (int64_t row = 0; row<cases[i].n; row += cases[i].n> 100 ? 97 : 1) {
            const struct block at = {0, 1, row, row % (cases[i].k / 32)};
            char text[64];

            (void)snprintf(text, sizeof text, "expert 1, row %d, block %d", (int)row,
                           (int)at.block);
            set_block(&s, &at, 255, 0);
            SAID(&s.said, MOXIE_E_INVALID, check(&s), text);
            set_block(&s, &at, 0, 0);
        }
        set_block(&s, &near, 255, 0);
        SAID(&s.said, MOXIE_E_INVALID, check(&s), "expert 2");
        sample_free(&s);
    }
}
END_TEST

// A row may have more than a piece, and all rows the same scales.
START_TEST(rows_of_any_length_and_distance)
{
    const struct block last = {1, 2, 1, (300 << 10) - 1};
    struct sample s;

    sample_init(&s, FORMAT_NVFP4, 1);
    sample_lay(&s, 1, 2, (int64_t)16 * (300 << 10), 0);
    ACCEPTED(&s.said, check(&s));
    ck_assert_int_eq(told.bytes_most, 300 << 10);
    set_block(&s, &last, 0x7f, 0);
    SAID(&s.said, MOXIE_E_INVALID, check(&s), names[1], "expert 2, row 1, block 307199");
    sample_free(&s);

    sample_init(&s, FORMAT_NVFP4, 1);
    s.weights.w1.scale_row_stride_bytes = 0;
    ACCEPTED(&s.said, check(&s));
    s.scales[0][5] = 0x7f;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), names[0], "expert 0, row 0, block 5");
    sample_free(&s);
}
END_TEST

// Of mxfp4 the values of a row, once, where one of its scales needs them.
START_TEST(values_are_fetched_where_they_matter)
{
    const struct block one = {0, 1, 5, 2}, beside = {0, 1, 5, 4}, below = {0, 1, 6, 2};
    struct sample s;

    sample_init(&s, FORMAT_MXFP4, 1);
    set_block(&s, &below, 148, 7);
    ACCEPTED(&s.said, check(&s));
    ck_assert_int_eq(told.fetches, 2 * EXPERTS);
    told.fetches = 0;
    set_block(&s, &below, 252, 7);
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "scale 252 of expert 1, row 6, block 2");
    ck_assert_int_eq(told.fetches, 2);
    told.fetches = 0;
    set_block(&s, &one, 253, 5);
    set_block(&s, &beside, 254, 3);
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "scale 254 of expert 1, row 5, block 4");
    ck_assert_int_eq(told.fetches, 3);
    sample_free(&s);
}
END_TEST

START_TEST(what_cannot_be_fetched_is_said)
{
    const struct block one = {1, EXPERTS - 1, 3, 0};
    struct sample s;

    sample_init(&s, FORMAT_MXFP4, 1);
    set_block(&s, &one, 253, 0);
    told.fetch_answer = 7;
    for (int32_t i = 1; i <= 2 * EXPERTS + 1; i++) {
        told.fetches = 0;
        told.fails_at = i;
        SAID(&s.said, MOXIE_E_DEVICE, check(&s), names[i > EXPERTS], "cannot be read at 0x",
             s.device.error_text(7));
    }
    told.fails_at = 0;
    told.fetches = 0;
    told.synchronize_answer = 9;
    SAID(&s.said, MOXIE_E_DEVICE, check(&s), "before they are read", s.device.error_text(9));
    ck_assert_int_eq(told.fetches, 0);
    told.synchronize_answer = 0;
    s.weights.w2.k = (int64_t)1 << 60;
    SAID(&s.said, MOXIE_E_MEMORY, check(&s), names[1]);
    sample_free(&s);
}
END_TEST

START_TEST(nothing_is_read_while_a_graph_is_captured)
{
    struct sample s;

    sample_init(&s, FORMAT_NVFP4, 1);
    told.synchronize_answer = CAPTURING;
    SAID(&s.said, MOXIE_E_CAPTURING, check(&s), "while a graph is captured", "before or after");
    ck_assert_int_eq(told.fetches, 0);
    told.synchronize_answer = 0;
    told.fetch_answer = CAPTURING; // a capture that another thread began since
    told.fails_at = EXPERTS + 1;
    SAID(&s.said, MOXIE_E_CAPTURING, check(&s), names[1], "while a graph is captured");
    sample_free(&s);
}
END_TEST

static int32_t device_visit(int32_t ordinal, struct device_visit *visit)
{
    ck_assert_int_eq(ordinal, ORDINAL);
    told.visits++;
    *visit = (struct device_visit){&told, ordinal};
    return 0;
}

static void device_leave(const struct device_visit *visit)
{
    ck_assert_ptr_eq(visit->before, &told);
    told.left++;
    told.left_behind += told.synchronized == told.left;
}

// Matrices of zeros.
static moxie_matrix matrix_of(int32_t order, unsigned char *zeros, int64_t *dims)
{
    return (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                          .format = MOXIE_FORMAT_MXFP4,
                          .order = order,
                          .values = tensor_make(zeros, 3, dims, NULL, TENSOR_UINT8),
                          .scales = tensor_make(zeros, 3, dims + 3, NULL, TENSOR_UINT8)};
}

// What the host has launched there rewrites the weights, whatever device it made current since.
START_TEST(the_device_of_the_weights_is_waited_for)
{
    static const struct registry none;
    static unsigned char zeros[2 * 128 * 32];
    int64_t dims[2][6] = {{2, 128, 32, 2, 128, 2}, {2, 64, 32, 2, 64, 2}};
    moxie_matrix w1 = matrix_of(MOXIE_ORDER_GATE_UP, zeros, dims[0]);
    moxie_matrix w2 = matrix_of(MOXIE_ORDER_PLAIN, zeros, dims[1]);
    const moxie_weights weights = {.struct_size = sizeof weights, .w1 = &w1, .w2 = &w2};
    struct device device = device_cpu;
    const int32_t expert = 1;
    moxie_instance *instance;
    moxie_runner *runner;
    struct mock_host mock;
    struct said said;

    said_init(&said);
    memset(&told, 0, sizeof told);
    mock_host_init(&mock);
    mock_set_i64(&mock, "intermediate_size", 64);
    mock_set_i64(&mock, "num_experts", 2);
    mock_set_str(&mock, "weight_format", "mxfp4");
    ACCEPTED(&said, instance_open(&mock.host, &none, &instance, &said.error));
    ACCEPTED(&said, runner_create(instance, 0, &weights, &runner, &said.error));
    device.visit = device_visit;
    device.leave = device_leave;
    device.synchronize = device_synchronize;
    instance->device = &device;
    instance->ordinal = ORDINAL;
    ACCEPTED(&said, runner_weights_updated(runner, NULL, 0, &said.error));
    ACCEPTED(&said, runner_weights_updated(runner, &expert, 1, &said.error));
    ck_assert_int_eq(told.synchronized, 2);
    ck_assert_int_eq(told.visits, 2);
    runner_destroy(runner);
    ck_assert_int_eq(told.visits, 3);
    ck_assert_int_eq(told.left, 3);
    ck_assert_int_eq(told.left_behind, 3); // what was waited for there
    instance->device = &device_cpu;
    ACCEPTED(&said, instance_close(instance, &said.error));
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, e8m0_scales_stay_finite, 0, 2);
    tcase_add_loop_test(tests, low_nibbles_count_too, 0, 2);
    tcase_add_loop_test(tests, nvfp4_scales_are_numbers, 0, 2);
    tcase_add_loop_test(tests, experts_are_checked_alone, 0, 2);
    tcase_add_test(tests, other_scales_are_not_fetched);
    tcase_add_test(tests, pieces_are_bounded);
    tcase_add_test(tests, rows_of_any_length_and_distance);
    tcase_add_test(tests, values_are_fetched_where_they_matter);
    tcase_add_test(tests, what_cannot_be_fetched_is_said);
    tcase_add_test(tests, nothing_is_read_while_a_graph_is_captured);
    tcase_add_test(tests, the_device_of_the_weights_is_waited_for);
}

SUITE_MAIN("weights_scales", 30, add)
