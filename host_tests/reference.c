// A problem and its fp64 reference, see reference.h.

#include "host_tests/reference.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/numbers.h"
#include "kernels/quantise.h"

#include "host_tests/stream.h"

#include <math.h>
#include <stdlib.h>

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
    // Gate, up and one that is nobody's.
    memory[2] = (unsigned char *)make_numbers(EXPERTS * 3, 0.1f);
    view->globals = (const float *)(void *)memory[2];
    view->global_expert_stride_bytes = 3 * sizeof(float);
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
               (double)view->globals[e * view->global_expert_stride_bytes / (int64_t)sizeof(float) +
                                     up * (view->global_stride - 1)];
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

// All of one half of an expert, [units, k]: decoding is what takes the time.
static double *decoded(const struct weight_view *view, int64_t e, int64_t units, int up)
{
    double *weights = poisoned((size_t)(units * view->k) * sizeof *weights);

    for (int64_t i = 0; i < units; i++) {
        for (int64_t k = 0; k < view->k; k++)
            weights[i * view->k + k] = weight_at(view, e, i, up, k);
    }
    return weights;
}

static double product(const struct weight_view *view, const double *weights, int64_t e,
                      int64_t unit, int up, const double *a)
{
    const unsigned char *bias =
        (const unsigned char *)view->bias + e * view->bias_expert_stride_bytes;
    double sum = 0.0;

    for (int64_t k = 0; k < view->k; k++)
        sum += weights[unit * view->k + k] * a[k];
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

static void expert_reference(struct problem *problem, int64_t e, double *a)
{
    const struct weight_view *w1 = &problem->w1, *w2 = &problem->w2;
    const int gated = w1->order != ORDER_PLAIN;
    double *gate = decoded(w1, e, problem->intermediate, 0);
    double *up = decoded(w1, e, gated ? problem->intermediate : 0, 1);
    double *down = decoded(w2, e, problem->hidden, 0);

    for (int64_t p = problem->expert_offset[e]; p < problem->expert_offset[e + 1]; p++) {
        const float *x = problem->x + problem->pair_row[p] * problem->hidden;
        double *mid = problem->mid_wanted + p * problem->intermediate;

        for (int64_t k = 0; k < problem->hidden; k++)
            a[k] = (double)x[k];
        rounded(problem, a, problem->hidden, a);
        for (int64_t k = 0; problem->weight_on_input && k < problem->hidden; k++)
            a[k] *= (double)problem->pair_weight[p];
        for (int64_t i = 0; i < problem->intermediate; i++)
            mid[i] = activated(problem, product(w1, gate, e, i, 0, a),
                               gated ? product(w1, up, e, i, 1, a) : 1.0);
        // From the kernels' own mid, so that each product is judged alone.
        for (int64_t i = 0; i < problem->intermediate; i++)
            a[i] = (double)problem->mid[p * problem->intermediate + i];
        rounded(problem, a, problem->intermediate, a);
        for (int64_t i = 0; i < problem->hidden; i++)
            problem->out_wanted[p * problem->hidden + i] = product(w2, down, e, i, 0, a);
    }
    free(gate);
    free(up);
    free(down);
}

void problem_reference(struct problem *problem)
{
    double *a = poisoned((size_t)(problem->hidden + problem->intermediate) * sizeof *a);

    for (int64_t e = 0; e < EXPERTS; e++) {
        if (problem->expert_offset[e] < problem->expert_offset[e + 1])
            expert_reference(problem, e, a);
    }
    free(a);
}

// ---- A problem

void problem_init(struct problem *problem, int32_t format, int32_t order, int32_t rows_in)
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

void problem_fini(struct problem *problem)
{
    for (int i = 0; i < 8; i++)
        free(problem->memory[i]);
    free(problem->x);
    free(problem->mid);
    free(problem->out);
    free(problem->mid_wanted);
    free(problem->out_wanted);
}

void problem_rescale(struct problem *problem, int32_t scale_format)
{
    free(problem->memory[1]);
    free(problem->memory[5]);
    problem->w1.scale_format = scale_format;
    problem->w2.scale_format = scale_format;
    problem->memory[1] = make_scales(&problem->w1, 2, 0);
    problem->memory[5] = make_scales(&problem->w2, 1, 0);
}
