// kernels/cpu/gemm.c: every weight format, order, orientation and instruction set against the fp64
// reference; biases, activations, operands, slabs in every format; bits that depend on nothing
// else.

#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/numbers.h"

#include "host_tests/reference.h"
#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>

static void run_slabs(struct problem *problem, struct cpu_stream *stream,
                      const struct row_slab *slabs, int32_t slabs_count, int32_t rows_cap)
{
    struct gate_up_args gate_up = {
        .slabs = slabs,
        .expert_offset = problem->expert_offset,
        .pair_row = problem->pair_row,
        .pair_weight = problem->weight_on_input ? problem->pair_weight : NULL,
        .w1 = problem->w1,
        .mid = problem->mid,
        .mid_stride_bytes = problem->intermediate * 4,
        .mid_format = FORMAT_F32,
        .experts = EXPERTS,
        .slabs_count = slabs_count,
        .rows_cap = rows_cap,
        .hidden = (int32_t)problem->hidden,
        .intermediate = (int32_t)problem->intermediate,
        .activation = problem->activation,
        .operand_format = problem->operand,
        .alpha = problem->alpha,
        .beta = problem->beta,
        .limit = problem->limit,
    };
    struct down_args down = {
        .expert_offset = problem->expert_offset,
        .mid = problem->mid,
        .mid_stride_bytes = problem->intermediate * 4,
        .w2 = problem->w2,
        .pair_out = problem->out,
        .pair_stride_bytes = problem->hidden * 4,
        .mid_format = FORMAT_F32,
        .pair_format = FORMAT_F32,
        .experts = EXPERTS,
        .operand_format = problem->operand,
    };

    ck_assert_int_eq(gate_up_cpu(&gate_up, stream), 0);
    ck_assert_int_eq(down_cpu(&down, stream), 0);
}

static void run_problem(struct problem *problem, int32_t workers, enum cpu_isa isa)
{
    struct row_slab slab = {
        .rows = problem->x,
        .row_stride_bytes = problem->hidden * 4,
        .cap = ROWS,
        .format = FORMAT_F32,
    };
    struct cpu_stream stream;

    stream_init(&stream, workers, isa);
    run_slabs(problem, &stream, &slab, 1, ROWS);
    stream_fini(&stream);
}

static double error_of(const float *got, const double *want, int64_t count)
{
    double difference = 0.0, norm = 0.0;

    for (int64_t i = 0; i < count; i++) {
        difference += ((double)got[i] - want[i]) * ((double)got[i] - want[i]);
        norm += want[i] * want[i];
    }
    return sqrt(difference / norm);
}

static void check_problem(struct problem *problem, double bound)
{
    double mid, out;

    problem_reference(problem);
    mid = error_of(problem->mid, problem->mid_wanted, problem->pairs * problem->intermediate);
    out = error_of(problem->out, problem->out_wanted, problem->pairs * problem->hidden);
    ck_assert_msg(mid <= bound && out <= bound, "format %d order %d rows_in %d: %g %g",
                  problem->w1.format, problem->w1.order, problem->w1.rows_in, mid, out);
}

// With ThreadSanitizer, which takes a minute for all, the best alone: they race alike.
static int runs_isa(int isa)
{
#ifdef __SANITIZE_THREAD__
    return isa == (int)cpu_isa_best();
#else
    return isa <= (int)cpu_isa_best();
#endif
}

START_TEST(every_format_and_order)
{
    struct problem problem;
    int32_t format = FORMAT_F32 + _i / 3;
    int isa = _i % 3;

    if (!runs_isa(isa)) return;
    for (int32_t order = ORDER_PLAIN; order <= ORDER_INTERLEAVED; order++) {
        problem_init(&problem, format, order, 0);
        run_problem(&problem, 2, (enum cpu_isa)isa);
        check_problem(&problem, 5e-7);
        problem_fini(&problem);
    }
}
END_TEST

START_TEST(rows_in)
{
    struct problem problem;

    if (!runs_isa(_i)) return;
    for (int32_t format = FORMAT_F32; format <= FORMAT_F16; format++) {
        for (int32_t order = ORDER_PLAIN; order <= ORDER_INTERLEAVED; order++) {
            problem_init(&problem, format, order, 1);
            run_problem(&problem, 1, (enum cpu_isa)_i);
            check_problem(&problem, 5e-7);
            problem_fini(&problem);
        }
    }
}
END_TEST

START_TEST(activations)
{
    struct problem problem;

    for (int isa = CPU_SCALAR; isa <= CPU_AVX512; isa++) {
        if (!runs_isa(isa)) continue;
        problem_init(&problem, FORMAT_F32, ORDER_GATE_UP, 0);
        problem.activation = _i / 2;
        problem.limit = _i % 2 == 1 ? 1.5f : 0.0f;
        run_problem(&problem, 2, (enum cpu_isa)isa);
        check_problem(&problem, 6e-7);
        problem_fini(&problem);
    }
}
END_TEST

START_TEST(without_bias_and_with_single_scales)
{
    static const int32_t formats[] = {FORMAT_FP8_TENSOR, FORMAT_NVFP4, FORMAT_BF16};
    struct problem problem;

    problem_init(&problem, formats[_i], ORDER_UP_GATE, 0);
    problem.w1.global_stride = 1;
    problem.w1.bias = NULL;
    problem.w2.bias = NULL;
    run_problem(&problem, 1, cpu_isa_best());
    check_problem(&problem, 5e-7);
    problem_fini(&problem);
}
END_TEST

START_TEST(scales_of_every_format)
{
    struct problem problem;

    for (int32_t format = FORMAT_F32; format <= FORMAT_F16; format++) {
        problem_init(&problem, FORMAT_INT4_G32, ORDER_GATE_UP, 0);
        problem_rescale(&problem, format);
        run_problem(&problem, 1, cpu_isa_best());
        check_problem(&problem, 5e-7);
        problem_fini(&problem);
    }
}
END_TEST

START_TEST(operands)
{
    static const int32_t formats[] = {FORMAT_BF16, FORMAT_F16, FORMAT_FP8, FORMAT_NVFP4};
    struct problem problem;

    // A router weight on the input does not change what the rows are rounded to.
    for (int32_t on_input = 0; on_input < 2; on_input++) {
        problem_init(&problem, FORMAT_NVFP4, ORDER_GATE_UP, 0);
        problem.operand = formats[_i];
        problem.weight_on_input = on_input;
        run_problem(&problem, 2, cpu_isa_best());
        check_problem(&problem, 5e-7);
        problem_fini(&problem);
    }
}
END_TEST

// Nothing is the largest that its scale has room for, so that another rounding would change it.
static void dent(int32_t format, unsigned char *row, int64_t columns)
{
    for (int64_t k = 0; k < columns; k++) {
        if (format == FORMAT_FP8_BLOCK128 && (row[k] & 0x7f) > 0x74) row[k] -= 10;
        if (format == FORMAT_NVFP4 && k < columns / 2 && (row[k] & 7) == 7) row[k] -= 2;
        if (format == FORMAT_NVFP4 && k < columns / 2 && (row[k] >> 4 & 7) == 7) row[k] -= 0x20;
    }
}

// Rows that arrive in the operand's format are multiplied as they are, whatever other slabs are; in
// any other, they are decoded first.
START_TEST(slabs_of_every_format)
{
    static const int32_t formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16, FORMAT_FP8_BLOCK128,
                                      FORMAT_NVFP4};
    int32_t format = formats[_i];
    struct problem problem;
    struct cpu_stream stream;
    struct row_slab slabs[3] = {{.format = format, .cap = ROWS / 2},
                                {.format = format, .cap = ROWS / 2},
                                {.format = format == FORMAT_F32 ? FORMAT_BF16 : FORMAT_F32}};
    unsigned char *rows, *scales;
    float *decoded;

    problem_init(&problem, FORMAT_NVFP4, ORDER_GATE_UP, 0);
    rows = poisoned((size_t)(ROWS * problem.hidden) * 4 + 2);
    scales = poisoned((size_t)(ROWS * problem.hidden));
    stream_init(&stream, 2, cpu_isa_best());
    for (int i = 0; i < ROWS; i++) {
        float *x = problem.x + i * problem.hidden;
        unsigned char *row = rows + i * problem.hidden * 4;
        unsigned char *scale = scales + i * problem.hidden;
        struct quantise_args args = {.x = x,
                                     .rows = row,
                                     .scales = scale,
                                     .x_format = FORMAT_F32,
                                     .format = format,
                                     .rows_count = 1,
                                     .columns = (int32_t)problem.hidden};

        (void)quantise_cpu(&args, &stream);
        dent(format, row, problem.hidden);
        for (int64_t k = 0; k < problem.hidden; k++) {
            if (format <= FORMAT_F16)
                x[k] = number_load(format, row, k);
            else if (format == FORMAT_FP8_BLOCK128)
                x[k] = e4m3_decode(row[k]) * number_load(FORMAT_F32, scale, k / 128);
            else
                x[k] = e2m1_values[row[k / 2] >> (4 * (k % 2)) & 15] *
                       e4m3_decode(scale[4 + k / 16]) * number_load(FORMAT_F32, scale, 0);
        }
    }
    for (int i = 0; i < 2; i++) {
        slabs[i].rows = rows + i * (ROWS / 2) * problem.hidden * 4;
        slabs[i].scales = format > FORMAT_F16 ? scales + i * (ROWS / 2) * problem.hidden : NULL;
        slabs[i].row_stride_bytes = problem.hidden * 4;
        slabs[i].scale_stride_bytes = problem.hidden;
    }
    run_slabs(&problem, &stream, slabs, 2, ROWS / 2);
    check_problem(&problem, 5e-7);
    decoded = problem.mid;
    problem.mid = poisoned((size_t)(PAIRS_MAX * problem.intermediate) * 4);
    problem.operand = format == FORMAT_FP8_BLOCK128 ? FORMAT_FP8 : format;
    for (int32_t count = 2; count <= 3; count++) {
        run_slabs(&problem, &stream, slabs, count, ROWS / 2);
        ck_assert_mem_eq(problem.mid, decoded, (size_t)(problem.pairs * problem.intermediate) * 4);
    }
    // Nor are they with a router's weight.
    problem.weight_on_input = 1;
    for (int64_t pair = 0; pair < PAIRS_MAX; pair++)
        problem.pair_weight[pair] = 1.0f;
    run_slabs(&problem, &stream, slabs, 2, ROWS / 2);
    ck_assert_mem_eq(problem.mid, decoded, (size_t)(problem.pairs * problem.intermediate) * 4);
    free(decoded);
    stream_fini(&stream);
    free(rows);
    free(scales);
    problem_fini(&problem);
}
END_TEST

// A pair's bits do not depend on how many others there are, nor on the threads.
START_TEST(bits_depend_on_nothing_else)
{
#ifdef __SANITIZE_THREAD__ // many more pairs take a minute there, and race no other way
    static const int32_t mates[] = {1, 2, 5, 16, 17, 127};
#else
    static const int32_t mates[] = {1, 2, 5, 16, 17, 127, 128, 129, 300};
#endif
    int32_t format = FORMAT_F32 + _i / 3;
    enum cpu_isa isa = (enum cpu_isa)(_i % 3);
    struct problem problem;
    float *first;

    if (!runs_isa((int)isa)) return;
    problem_init(&problem, format, ORDER_GATE_UP, 0);
    first = poisoned((size_t)problem.hidden * 4);
    for (size_t i = 0; i < sizeof mates / sizeof mates[0]; i++) {
        for (int e = 0; e <= EXPERTS; e++)
            problem.expert_offset[e] = e == 0 ? 0 : mates[i];
        for (int32_t p = 0; p < mates[i]; p++)
            problem.pair_row[p] = p % 7;
        // The pair to compare is the last one: at another place in its tile each time.
        problem.pair_row[mates[i] - 1] = 9;
        run_problem(&problem, 1 + (int32_t)(i % 3), isa);
        if (i == 0) memcpy(first, problem.out, (size_t)problem.hidden * 4);
        ck_assert_mem_eq(problem.out + (mates[i] - 1) * problem.hidden, first,
                         (size_t)problem.hidden * 4);
    }
    free(first);
    problem_fini(&problem);
}
END_TEST

START_TEST(nothing_to_do)
{
    struct problem problem;

    problem_init(&problem, FORMAT_BF16, ORDER_GATE_UP, 0);
    memset(problem.expert_offset, 0, sizeof problem.expert_offset);
    run_problem(&problem, 2, cpu_isa_best());
    ck_assert(isnan(problem.mid[0]) && isnan(problem.out[0]));
    problem_fini(&problem);
}
END_TEST

// Rows of results, more than pairs: a prime, so that 7 p + 3 hits none twice.
#define RESULTS 67

struct placing {
    int32_t result_row[PAIRS_MAX];
    int32_t row_pair[RESULTS];
    unsigned char *pair_out, *y;
    int64_t stride_bytes;
    int32_t format;
};

// down and combine, or down alone with combine for the rows without a pair.
static void run_placing(struct problem *problem, struct placing *to, int placed,
                        struct cpu_stream *stream)
{
    struct out_slab slab = {
        .rows = to->y, .row_stride_bytes = to->stride_bytes, .cap = RESULTS, .format = to->format};
    struct down_args down = {.expert_offset = problem->expert_offset,
                             .mid = problem->mid,
                             .mid_stride_bytes = problem->intermediate * 4,
                             .w2 = problem->w2,
                             .pair_out = placed ? to->y : to->pair_out,
                             .pair_stride_bytes = to->stride_bytes,
                             .result_row = placed ? to->result_row : NULL,
                             .result_weight = problem->pair_weight,
                             .result_scale = 0.7f,
                             .mid_format = FORMAT_F32,
                             .pair_format = to->format,
                             .experts = EXPERTS,
                             .operand_format = problem->operand};
    struct combine_args combine = {.pair_out = to->pair_out,
                                   .pair_stride_bytes = to->stride_bytes,
                                   .pairs = problem->pairs,
                                   .row_pair = to->row_pair,
                                   .pair_weight = problem->pair_weight,
                                   .slabs = &slab,
                                   .pair_format = to->format,
                                   .slabs_count = 1,
                                   .rows_cap = RESULTS,
                                   .hidden = (int32_t)problem->hidden,
                                   .top_k = 1,
                                   .placed = placed,
                                   .scale = 0.7f};

    memset(to->y, 0xff, (size_t)(RESULTS * to->stride_bytes));
    ck_assert_int_eq(down_cpu(&down, stream), 0);
    ck_assert_int_eq(combine_cpu(&combine, stream), 0);
}

START_TEST(down_writes_what_combine_would)
{
    struct problem problem;
    struct placing to = {.format = FORMAT_F32 + _i};
    struct cpu_stream stream;
    unsigned char *wanted;
    size_t bytes;

    problem_init(&problem, FORMAT_BF16, ORDER_GATE_UP, 0);
    run_problem(&problem, 2, cpu_isa_best());
    ck_assert_int_lt(problem.pairs, RESULTS);
    to.stride_bytes = problem.hidden * 4 + 8;
    bytes = (size_t)(RESULTS * to.stride_bytes);
    to.pair_out = poisoned(bytes);
    to.y = poisoned(bytes);
    wanted = poisoned(bytes);
    memset(to.row_pair, 0xff, sizeof to.row_pair);
    for (int32_t pair = 0; pair < problem.pairs; pair++) {
        to.result_row[pair] = (7 * pair + 3) % RESULTS;
        to.row_pair[to.result_row[pair]] = pair;
    }
    stream_init(&stream, 2, cpu_isa_best());
    run_placing(&problem, &to, 0, &stream);
    memcpy(wanted, to.y, bytes);
    run_placing(&problem, &to, 1, &stream);
    ck_assert_mem_eq(to.y, wanted, bytes);
    stream_fini(&stream);
    free(wanted);
    free(to.pair_out);
    free(to.y);
    problem_fini(&problem);
}
END_TEST

// Few rows, of more columns than are kept of so many at once.
START_TEST(long_rows_have_room)
{
    enum { LONG = 5120, FEW = 16, OUTPUTS = 4 };

    const int32_t expert_offset[] = {0, FEW};
    float *mid = poisoned(sizeof *mid * LONG * FEW);
    uint16_t *ones = poisoned(sizeof *ones * LONG * OUTPUTS);
    float out[FEW * OUTPUTS];
    const struct down_args args = {
        .expert_offset = expert_offset,
        .mid = mid,
        .mid_stride_bytes = LONG * 4,
        .w2 = {.values = ones,
               .n = OUTPUTS,
               .k = LONG,
               .row_stride_bytes = LONG * 2,
               .format = FORMAT_BF16,
               .order = ORDER_PLAIN},
        .pair_out = out,
        .pair_stride_bytes = OUTPUTS * 4,
        .mid_format = FORMAT_F32,
        .pair_format = FORMAT_F32,
        .experts = 1,
        .operand_format = FORMAT_BF16,
    };
    struct cpu_stream stream;

    for (int32_t i = 0; i < LONG * FEW; i++)
        mid[i] = (float)(i / LONG + 2);
    for (int32_t i = 0; i < LONG * OUTPUTS; i++)
        ones[i] = 0x3f80;
    stream_init(&stream, 1, cpu_isa_best());
    ck_assert_int_eq(down_cpu(&args, &stream), 0);
    stream_fini(&stream);
    for (int32_t i = 0; i < FEW * OUTPUTS; i++)
        ck_assert_float_eq(out[i], (float)(LONG * (i / OUTPUTS + 2)));
    free(ones);
    free(mid);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_format_and_order, 0, 3 * FORMAT_NVFP4);
    tcase_add_loop_test(tests, rows_in, CPU_SCALAR, CPU_AVX512 + 1);
    tcase_add_loop_test(tests, activations, 0, 2 * (ACTIVATION_RELU2 + 1));
    tcase_add_loop_test(tests, without_bias_and_with_single_scales, 0, 3);
    tcase_add_test(tests, scales_of_every_format);
    tcase_add_test(tests, long_rows_have_room);
    tcase_add_loop_test(tests, operands, 0, 4);
    tcase_add_loop_test(tests, slabs_of_every_format, 0, 5);
    tcase_add_loop_test(tests, bits_depend_on_nothing_else, 0, 3 * FORMAT_NVFP4);
    tcase_add_test(tests, nothing_to_do);
    tcase_add_loop_test(tests, down_writes_what_combine_would, 0, 3);
}

SUITE_MAIN("gemm", 280, add)
