// kernels/cpu/gemm.c: every weight format, order, orientation and instruction set against a plain
// fp64 reference that decodes the weights by the words of abi.h, ragged experts, biases,
// activations, operands, slabs in every format.

#include "kernels/kernels.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/numbers.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>

#define EXPERTS   4
#define ROWS      24
#define PAIRS_MAX 512

// A problem with both products; values are random bytes, made tame.
struct problem {
    int64_t hidden, intermediate;
    int64_t pairs;
    struct weight_view w1, w2;
    unsigned char *memory[8]; // values, scales, globals, bias of both
    float *x;                 // [ROWS, hidden]
    int32_t expert_offset[EXPERTS + 1];
    int32_t pair_row[PAIRS_MAX];
    float pair_weight[PAIRS_MAX];
    int32_t activation;
    int32_t operand;
    float alpha, beta, limit;
    int32_t weight_on_input;
    float *mid, *out;   // [pairs, ..]: what the kernels say
    double *mid_wanted; // what the reference says
    double *out_wanted;
};

static uint32_t seed;

// ---- Weights

static int64_t scale_rows(const struct weight_view *view, int64_t halves)
{
    int64_t half = view->n / halves;

    if (view->format == FORMAT_FP8_BLOCK128) {
        int64_t offset = halves == 2 || view->order == ORDER_PLAIN ? view->block_offset : 0;

        return halves * ((half + offset + 127) / 128);
    }
    return view->n;
}

static int64_t scale_columns(const struct weight_view *view, int64_t k_offset)
{
    switch (view->format) {
    case FORMAT_FP8_BLOCK128:
        return (view->k + k_offset + 127) / 128;
    case FORMAT_NVFP4:
        return view->k / 16;
    case FORMAT_MXFP4:
    case FORMAT_INT4_G32:
        return view->k / 32;
    default:
        return 1;
    }
}

static int64_t scale_bytes(const struct weight_view *view)
{
    if (view->format == FORMAT_NVFP4 || view->format == FORMAT_MXFP4) return 1;
    return view->format == FORMAT_INT4_G32 ? number_bytes(view->scale_format) : 4;
}

static void put_number(int32_t format, unsigned char *at, float value)
{
    numbers_encode(format, &value, 1, at);
}

static unsigned char *make_values(struct weight_view *view)
{
    int64_t element = view->format <= FORMAT_F16 ? number_bytes(view->format) : 1;
    int64_t columns = view->rows_in ? view->n : view->k;
    int64_t rows = view->rows_in ? view->k : view->n;
    // One element of pitch, so that rows are aligned to elements alone.
    int64_t pitch = view->format >= FORMAT_INT4_G32 ? columns / 2 + 1 : (columns + 1) * element;
    unsigned char *values = poisoned((size_t)(EXPERTS * rows * pitch + 1));

    for (int64_t i = 0; i < EXPERTS * rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            if (view->format <= FORMAT_F16)
                put_number(view->format, values + i * pitch + j * element,
                           random_unit(&seed) * 0.1f);
            else if (view->format < FORMAT_INT4_G32)
                values[i * pitch + j] = e4m3_encode(random_unit(&seed) * 3.0f);
            else
                values[i * pitch + j / 2] = (unsigned char)random_next(&seed);
        }
    }
    view->values = values;
    view->row_stride_bytes = pitch;
    view->expert_stride_bytes = rows * pitch;
    return values;
}

static unsigned char *make_scales(struct weight_view *view, int64_t halves, int64_t k_offset)
{
    int64_t columns = scale_columns(view, k_offset), rows = scale_rows(view, halves);
    int64_t element = scale_bytes(view);
    unsigned char *scales = poisoned((size_t)(EXPERTS * (rows * columns + 3) * element));

    view->scales = scales;
    view->scale_row_stride_bytes = columns * element;
    view->scale_expert_stride_bytes = (rows * columns + 3) * element;
    for (int64_t i = 0; i < EXPERTS * (rows * columns + 3); i++) {
        float scale = 0.02f + 0.03f * fabsf(random_unit(&seed));

        if (view->format == FORMAT_MXFP4)
            scales[i] = (unsigned char)(118 + random_next(&seed) % 5);
        else if (view->format == FORMAT_NVFP4)
            scales[i] = e4m3_encode(scale * 100.0f);
        else if (view->format == FORMAT_INT4_G32)
            put_number(view->scale_format, scales + i * element, scale);
        else
            put_number(FORMAT_F32, scales + i * element, scale);
    }
    return scales;
}

static float *make_numbers(int64_t count, float scale)
{
    float *numbers = poisoned((size_t)count * sizeof *numbers);

    for (int64_t i = 0; i < count; i++)
        numbers[i] = random_unit(&seed) * scale;
    return numbers;
}

static void make_matrix(struct problem *problem, struct weight_view *view, int index)
{
    int64_t halves = view->order == ORDER_PLAIN ? 1 : 2;
    unsigned char **memory = problem->memory + 4 * index;

    memory[0] = make_values(view);
    if (view->format > FORMAT_F16)
        memory[1] = make_scales(view, index == 1 ? 1 : halves, index == 1 ? view->block_offset : 0);
    memory[2] = (unsigned char *)make_numbers(EXPERTS * 2, 0.1f);
    view->globals = (const float *)(void *)memory[2];
    memory[3] = poisoned((size_t)(EXPERTS * view->n) * 2);
    for (int64_t i = 0; i < EXPERTS * view->n; i++)
        put_number(FORMAT_BF16, memory[3] + 2 * i, random_unit(&seed));
    view->bias = memory[3];
    view->bias_format = FORMAT_BF16;
    view->bias_expert_stride_bytes = view->n * 2;
}

// ---- The reference

// The scale of one weight: `row` is its row, `unit` its unit, `up` its half, as abi.h counts them.
static double scale_at(const struct weight_view *view, int64_t e, int64_t row, int64_t unit, int up,
                       int64_t k)
{
    const unsigned char *scales =
        (const unsigned char *)view->scales + e * view->scale_expert_stride_bytes;
    const unsigned char *of_row = scales + row * view->scale_row_stride_bytes;
    int w2 = view->order == ORDER_PLAIN && view->reserved == 2;
    int64_t block_row = (unit + (w2 ? 0 : view->block_offset)) / 128;
    int64_t block = (k + (w2 ? view->block_offset : 0)) / 128;

    switch (view->format) {
    case FORMAT_FP8_TENSOR:
        return (double)number_load(FORMAT_F32, scales, up * (view->global_stride - 1));
    case FORMAT_FP8_CHANNEL:
        return (double)number_load(FORMAT_F32, scales, row);
    case FORMAT_FP8_BLOCK128:
        if ((up && view->order != ORDER_UP_GATE) || (!up && view->order == ORDER_UP_GATE))
            block_row += (view->n / 2 + view->block_offset + 127) / 128;
        return (double)number_load(FORMAT_F32, scales + block_row * view->scale_row_stride_bytes,
                                   block);
    case FORMAT_INT4_G32:
        return (double)number_load(view->scale_format, of_row, k / 32);
    case FORMAT_MXFP4:
        return ldexp(1.0, of_row[k / 32] - 127);
    case FORMAT_NVFP4:
        return (double)e4m3_decode(of_row[k / 16]) *
               (double)view->globals[e * view->global_stride + up * (view->global_stride - 1)];
    default:
        return 1.0;
    }
}

static int64_t row_at(const struct weight_view *view, int64_t unit, int up)
{
    switch (view->order) {
    case ORDER_GATE_UP:
        return up ? view->n / 2 + unit : unit;
    case ORDER_UP_GATE:
        return up ? unit : view->n / 2 + unit;
    case ORDER_INTERLEAVED:
        return 2 * unit + up;
    default:
        return unit;
    }
}

static double weight_at(const struct weight_view *view, int64_t e, int64_t unit, int up, int64_t k)
{
    int64_t row = row_at(view, unit, up);
    const unsigned char *expert =
        (const unsigned char *)view->values + e * view->expert_stride_bytes;
    const unsigned char *of_row = expert + (view->rows_in ? k : row) * view->row_stride_bytes;
    double value;

    if (view->format <= FORMAT_F16)
        return (double)number_load(view->format, of_row, view->rows_in ? row : k);
    if (view->format < FORMAT_INT4_G32)
        value = (double)e4m3_decode(of_row[k]);
    else if (view->format == FORMAT_INT4_G32)
        value = (of_row[k / 2] >> (4 * (k % 2)) & 15) - 8;
    else
        value = (double)e2m1_values[of_row[k / 2] >> (4 * (k % 2)) & 15];
    return value * scale_at(view, e, row, unit, up, k);
}

static double product(const struct weight_view *view, int64_t e, int64_t unit, int up,
                      const double *a)
{
    const unsigned char *bias =
        (const unsigned char *)view->bias + e * view->bias_expert_stride_bytes;
    double sum = 0.0;

    for (int64_t k = 0; k < view->k; k++)
        sum += weight_at(view, e, unit, up, k) * a[k];
    if (view->bias == NULL) return sum;
    return sum + (double)number_load(view->bias_format, bias, row_at(view, unit, up));
}

static double activated(const struct problem *problem, double gate, double up)
{
    double limit = (double)problem->limit;

    switch (problem->activation) {
    case ACTIVATION_GELU:
        return 0.5 * gate * erfc(-gate / sqrt(2.0)) * up;
    case ACTIVATION_GELU_TANH:
        return 0.5 * gate *
               (1.0 + tanh(sqrt(2.0 / acos(-1.0)) * (gate + 0.044715 * pow(gate, 3)))) * up;
    case ACTIVATION_SWIGLUOAI:
        if (limit > 0.0) {
            gate = fmin(gate, limit);
            up = fmax(fmin(up, limit), -limit);
        }
        return gate / (1.0 + exp(-(double)problem->alpha * gate)) * (up + (double)problem->beta);
    case ACTIVATION_RELU2:
        return gate > 0.0 ? gate * gate * up : 0.0;
    default:
        return gate / (1.0 + exp(-gate)) * up;
    }
}

// What the product multiplies, by the operand's format.
static void rounded(const struct problem *problem, const double *row, int64_t count, double *to)
{
    static unsigned char values[4096];
    static unsigned char scales[4096];
    static float from[4096];
    struct cpu_stream stream = {.workers = 1};
    struct quantise_args args = {.x = from,
                                 .rows = values,
                                 .scales = scales,
                                 .x_format = FORMAT_F32,
                                 .format = problem->operand == FORMAT_FP8 ? FORMAT_FP8_BLOCK128
                                                                          : problem->operand,
                                 .rows_count = 1,
                                 .columns = (int32_t)count};

    for (int64_t i = 0; i < count; i++)
        from[i] = (float)row[i];
    if (problem->operand == FORMAT_FP8 || problem->operand == FORMAT_NVFP4)
        (void)quantise_cpu(&args, &stream);
    for (int64_t i = 0; i < count; i++) {
        to[i] = row[i];
        if (problem->operand == FORMAT_BF16) to[i] = (double)bf16_decode(bf16_encode(from[i]));
        if (problem->operand == FORMAT_F16) to[i] = (double)f16_decode(f16_encode(from[i]));
        if (problem->operand == FORMAT_FP8)
            to[i] = (double)(e4m3_decode(values[i]) * number_load(FORMAT_F32, scales, i / 128));
        if (problem->operand == FORMAT_NVFP4)
            to[i] = (double)(e2m1_values[values[i / 2] >> (4 * (i % 2)) & 15] *
                             e4m3_decode(scales[4 + i / 16]) * number_load(FORMAT_F32, scales, 0));
    }
}

static void reference(struct problem *problem)
{
    double *a = poisoned((size_t)(problem->hidden + problem->intermediate) * sizeof *a);

    for (int64_t e = 0; e < EXPERTS; e++) {
        for (int64_t p = problem->expert_offset[e]; p < problem->expert_offset[e + 1]; p++) {
            const float *x = problem->x + problem->pair_row[p] * problem->hidden;
            double *mid = problem->mid_wanted + p * problem->intermediate;

            for (int64_t k = 0; k < problem->hidden; k++)
                a[k] = problem->weight_on_input ? (double)(x[k] * problem->pair_weight[p])
                                                : (double)x[k];
            rounded(problem, a, problem->hidden, a);
            for (int64_t i = 0; i < problem->intermediate; i++) {
                double up =
                    problem->w1.order == ORDER_PLAIN ? 1.0 : product(&problem->w1, e, i, 1, a);

                mid[i] = activated(problem, product(&problem->w1, e, i, 0, a), up);
            }
            // From the kernels' own mid, so that each product is judged alone.
            for (int64_t i = 0; i < problem->intermediate; i++)
                a[i] = (double)problem->mid[p * problem->intermediate + i];
            rounded(problem, a, problem->intermediate, a);
            for (int64_t i = 0; i < problem->hidden; i++)
                problem->out_wanted[p * problem->hidden + i] = product(&problem->w2, e, i, 0, a);
        }
    }
    free(a);
}

// ---- Running

static void problem_init(struct problem *problem, int32_t format, int32_t order, int32_t rows_in)
{
    static const int32_t rows_of_expert[EXPERTS] = {3, 0, 1, 18};
    struct weight_view view = {.format = format, .rows_in = rows_in, .global_stride = 2};
    int packed = format >= FORMAT_INT4_G32;

    seed = 1 + (uint32_t)(format * 100 + order * 10 + rows_in);
    *problem = (struct problem){
        .hidden = packed ? 608 : 601,
        .intermediate = packed ? 96 : 77,
        .operand = FORMAT_F32,
        .alpha = 1.702f,
        .beta = 1.0f,
    };
    view.scale_format = FORMAT_F16;
    view.block_offset = format == FORMAT_FP8_BLOCK128 ? 90 : 0;
    problem->w1 = view;
    problem->w1.order = order;
    problem->w1.n = problem->intermediate * (order == ORDER_PLAIN ? 1 : 2);
    problem->w1.k = problem->hidden;
    problem->w2 = view;
    problem->w2.global_stride = 1;
    problem->w2.n = problem->hidden;
    problem->w2.k = problem->intermediate;
    problem->w2.reserved = 2; // this test's mark: the offset shifts inputs
    make_matrix(problem, &problem->w1, 0);
    make_matrix(problem, &problem->w2, 1);
    problem->x = make_numbers(ROWS * problem->hidden, 1.0f);
    for (int e = 0; e < EXPERTS; e++) {
        problem->expert_offset[e] = (int32_t)problem->pairs;
        for (int32_t i = 0; i < rows_of_expert[e]; i++) {
            problem->pair_row[problem->pairs] = (int32_t)(random_next(&seed) % ROWS);
            problem->pair_weight[problem->pairs++] = random_unit(&seed);
        }
    }
    problem->expert_offset[EXPERTS] = (int32_t)problem->pairs;
    problem->mid = poisoned((size_t)(PAIRS_MAX * problem->intermediate) * 4);
    problem->out = poisoned((size_t)(PAIRS_MAX * problem->hidden) * 4);
    problem->mid_wanted = poisoned((size_t)(PAIRS_MAX * problem->intermediate) * 8);
    problem->out_wanted = poisoned((size_t)(PAIRS_MAX * problem->hidden) * 8);
}

static void problem_fini(struct problem *problem)
{
    for (int i = 0; i < 8; i++)
        free(problem->memory[i]);
    free(problem->x);
    free(problem->mid);
    free(problem->out);
    free(problem->mid_wanted);
    free(problem->out_wanted);
}

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

    ck_assert_int_eq(kernels_cpu.gate_up(&gate_up, stream), 0);
    ck_assert_int_eq(kernels_cpu.down(&down, stream), 0);
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

    reference(problem);
    mid = error_of(problem->mid, problem->mid_wanted, problem->pairs * problem->intermediate);
    out = error_of(problem->out, problem->out_wanted, problem->pairs * problem->hidden);
    ck_assert_msg(mid <= bound && out <= bound, "format %d order %d rows_in %d: %g %g",
                  problem->w1.format, problem->w1.order, problem->w1.rows_in, mid, out);
}

START_TEST(every_format_and_order)
{
    struct problem problem;
    int32_t format = FORMAT_F32 + _i / 3;
    int isa = _i % 3;

    if (isa > (int)cpu_isa_best()) return;
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

    for (int32_t format = FORMAT_F32; format <= FORMAT_F16; format++) {
        for (int32_t order = ORDER_PLAIN; order <= ORDER_INTERLEAVED; order++) {
            if (_i > (int)cpu_isa_best()) return;
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

    for (int isa = 0; isa <= (int)cpu_isa_best(); isa++) {
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
        problem.w1.scale_format = format;
        problem.w2.scale_format = format;
        free(problem.memory[1]);
        free(problem.memory[5]);
        problem.memory[1] = make_scales(&problem.w1, 2, 0);
        problem.memory[5] = make_scales(&problem.w2, 1, 0);
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

    // A router weight on the input is applied before the rounding.
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

// Rows that arrive in the operand's format are multiplied as they are; in any other, they are
// decoded first.
START_TEST(slabs_of_every_format)
{
    static const int32_t formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16, FORMAT_FP8_BLOCK128,
                                      FORMAT_NVFP4};
    int32_t format = formats[_i];
    struct problem problem;
    struct cpu_stream stream;
    struct row_slab slabs[2] = {{.format = format, .cap = ROWS / 2},
                                {.format = format, .cap = ROWS / 2}};
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
    static const int32_t mates[] = {1, 2, 5, 16, 17, 127, 128, 129, 300};
    int32_t format = FORMAT_F32 + _i / 3;
    enum cpu_isa isa = (enum cpu_isa)(_i % 3);
    struct problem problem;
    float *first;

    if (isa > cpu_isa_best()) return;
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

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_format_and_order, 0, 3 * FORMAT_NVFP4);
    tcase_add_loop_test(tests, rows_in, CPU_SCALAR, CPU_AVX512 + 1);
    tcase_add_loop_test(tests, activations, 0, 2 * (ACTIVATION_RELU2 + 1));
    tcase_add_loop_test(tests, without_bias_and_with_single_scales, 0, 3);
    tcase_add_test(tests, scales_of_every_format);
    tcase_add_loop_test(tests, operands, 0, 4);
    tcase_add_loop_test(tests, slabs_of_every_format, 0, 5);
    tcase_add_loop_test(tests, bits_depend_on_nothing_else, 0, 3 * FORMAT_NVFP4);
    tcase_add_test(tests, nothing_to_do);
}

SUITE_MAIN("gemm", 280, add)
