// Weights as the host stores them, read one number at a time.

#include "host_tests/mock_plugin/mock.h"

#include <math.h>
#include <string.h>

#define BLOCK 128

static int64_t blocks(int64_t size)
{
    return (size + BLOCK - 1) / BLOCK;
}

static int is_packed(int32_t format)
{
    return format == MOXIE_FORMAT_INT4_G32 || format == MOXIE_FORMAT_MXFP4 ||
           format == MOXIE_FORMAT_NVFP4;
}

static int is_plain(int32_t format)
{
    return format == MOXIE_FORMAT_F32 || format == MOXIE_FORMAT_BF16 || format == MOXIE_FORMAT_F16;
}

static int64_t group_of(int32_t format)
{
    return format == MOXIE_FORMAT_NVFP4 ? 16 : 32;
}

// ---- Reading numbers ---------------------------------------------------------------------------

// 1 when the half lies second among the rows.
static int32_t half_place(const struct matrix *matrix, int32_t half)
{
    return matrix->order == MOXIE_ORDER_UP_GATE ? 1 - half : half;
}

static int64_t row_of(const struct matrix *matrix, int32_t half, int64_t unit)
{
    if (HAS_FAULT(FAULT_WRONG_ORDER_OF_HALVES) && matrix->order == MOXIE_ORDER_UP_GATE)
        return half * matrix->units + unit;
    if (matrix->order == MOXIE_ORDER_INTERLEAVED) return 2 * unit + half;
    return half_place(matrix, half) * matrix->units + unit;
}

static double packed_value(const struct matrix *matrix, int64_t expert, int64_t row, int64_t k)
{
    int32_t both = *view_at(&matrix->values, expert, row, k / 2);
    int32_t nibble = k % 2 == 0 ? both & 15 : both >> 4;

    return matrix->format == MOXIE_FORMAT_INT4_G32 ? nibble - 8 : e2m1(nibble);
}

static double block_scale(const struct matrix *matrix, int64_t expert, int32_t half, int64_t unit,
                          int64_t k)
{
    int64_t row = unit, column = k;

    if (matrix->is_down)
        column += matrix->block_offset;
    else
        row += matrix->block_offset;
    row = row / BLOCK;
    if (half_place(matrix, half) == 1) row += blocks(matrix->block_offset + matrix->units);
    return view_number(&matrix->scales, expert, row, column / BLOCK);
}

// What multiplies the stored value.
static double scale_at(const struct matrix *matrix, int64_t expert, int32_t half, int64_t unit,
                       int64_t k)
{
    const struct view *scales = &matrix->scales, *globals = &matrix->globals;
    int64_t row = row_of(matrix, half, unit);

    switch (matrix->format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        return view_number(scales, expert, scales->ndim == 2 ? half : 0, 0);
    case MOXIE_FORMAT_FP8_CHANNEL:
        return view_number(scales, expert, HAS_FAULT(FAULT_ONE_SCALE_OF_CHANNELS) ? 0 : row, 0);
    case MOXIE_FORMAT_FP8_BLOCK128:
        return block_scale(matrix, expert, half, unit, k);
    case MOXIE_FORMAT_INT4_G32:
        return view_number(scales, expert, row, k / 32);
    case MOXIE_FORMAT_MXFP4:
        return e8m0(*view_at(scales, expert, row, k / 32));
    case MOXIE_FORMAT_NVFP4:
        return view_number(scales, expert, row, k / 16) *
               view_number(globals, expert, globals->ndim == 2 ? half : 0, 0);
    default:
        return 1.0;
    }
}

// Where the run of columns ends that column k is in, and that share a scale.
static int64_t run_end(const struct matrix *matrix, int64_t k)
{
    int64_t offset = matrix->is_down ? matrix->block_offset : 0, end = matrix->columns;

    if (matrix->format == MOXIE_FORMAT_FP8_BLOCK128)
        end = k + BLOCK - (k + offset) % BLOCK;
    else if (is_packed(matrix->format))
        end = k + group_of(matrix->format) - k % group_of(matrix->format);
    return end < matrix->columns ? end : matrix->columns;
}

double weights_dot(const struct matrix *matrix, int64_t expert, int32_t half, int64_t unit,
                   const double *x)
{
    const struct view *values = &matrix->values;
    int64_t columns = matrix->columns, row = row_of(matrix, half, unit);
    int64_t next = values->stride_bytes[matrix->rows_in ? 1 : 2];
    const unsigned char *at =
        view_at(values, expert, matrix->rows_in ? 0 : row, matrix->rows_in ? row : 0);
    double sum = 0.0;

    if (HAS_FAULT(FAULT_WRONG_SUM) && matrix->is_down && columns > 1) columns--;
    for (int64_t k = 0; k < columns;) {
        double scale = scale_at(matrix, expert, half, unit, k);
        int64_t end = run_end(matrix, k);

        for (; k < end && k < columns; k++) {
            double value = is_packed(matrix->format) ? packed_value(matrix, expert, row, k)
                                                     : number_load(values->type, at + k * next);

            sum += x[k] * (value * scale);
        }
    }
    if (matrix->bias.data != NULL) sum += view_number(&matrix->bias, expert, row, 0);
    return sum;
}

// ---- Checking what the host described ----------------------------------------------------------

static struct want want_values(const struct matrix *matrix, int64_t experts)
{
    struct want want = {.name = matrix->is_down ? "weights.w2.values" : "weights.w1.values",
                        .ndim = 3,
                        .shape = {experts, matrix->rows, matrix->columns}};

    if (matrix->rows_in) {
        want.shape[1] = matrix->columns;
        want.shape[2] = matrix->rows;
    }
    want.types = matrix->format == MOXIE_FORMAT_F32    ? TYPE_F32
                 : matrix->format == MOXIE_FORMAT_BF16 ? TYPE_BF16
                 : matrix->format == MOXIE_FORMAT_F16  ? TYPE_F16
                                                       : TYPE_E4M3;
    if (is_packed(matrix->format)) {
        want.types = TYPE_U8;
        want.shape[2] = matrix->columns / 2;
    }
    return want;
}

static struct want want_scales(const struct matrix *matrix, const moxie_tensor *given,
                               int64_t experts)
{
    struct want want = {.name = matrix->is_down ? "weights.w2.scales" : "weights.w1.scales",
                        .types = TYPE_F32,
                        .ndim = 3,
                        .shape = {experts, matrix->rows, 0}};
    int64_t halves = matrix->rows / matrix->units;

    switch (matrix->format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        want.ndim = halves == 2 && given->ndim == 2 ? 2 : 1;
        want.shape[1] = 2;
        break;
    case MOXIE_FORMAT_FP8_CHANNEL:
        want.ndim = 2;
        break;
    case MOXIE_FORMAT_FP8_BLOCK128:
        want.shape[1] = matrix->is_down ? blocks(matrix->rows)
                                        : halves * blocks(matrix->block_offset + matrix->units);
        want.shape[2] = blocks(matrix->columns + (matrix->is_down ? matrix->block_offset : 0));
        break;
    default:
        want.shape[2] = matrix->columns / group_of(matrix->format);
        want.types = matrix->format == MOXIE_FORMAT_MXFP4   ? TYPE_U8
                     : matrix->format == MOXIE_FORMAT_NVFP4 ? TYPE_E4M3
                                                            : TYPE_FLOATS;
        break;
    }
    return want;
}

static int32_t check_matrix(const struct caller *caller, const moxie_matrix *given,
                            const char *what, int32_t format)
{
    if (given->format != format)
        return fail_with(caller, MOXIE_E_INVALID, "%s.format is %d; the configuration says %d",
                         what, given->format, format);
    if (given->orientation != MOXIE_ROWS_OUT && given->orientation != MOXIE_ROWS_IN)
        return fail_with(caller, MOXIE_E_INVALID, "%s.orientation is %d", what, given->orientation);
    if (given->orientation == MOXIE_ROWS_IN && !is_plain(format))
        return fail_with(caller, MOXIE_E_UNSUPPORTED,
                         "%s.orientation: MOXIE_ROWS_IN is for f32, bf16 and f16", what);
    if (given->block_offset < 0 || given->block_offset >= BLOCK ||
        (given->block_offset != 0 && format != MOXIE_FORMAT_FP8_BLOCK128))
        return fail_with(caller, MOXIE_E_INVALID, "%s.block_offset is %d", what,
                         given->block_offset);
    if (is_plain(format) && given->scales.data != NULL)
        return fail_with(caller, MOXIE_E_INVALID, "%s.scales: the format has none", what);
    if (format != MOXIE_FORMAT_NVFP4 && given->global_scales.data != NULL)
        return fail_with(caller, MOXIE_E_INVALID, "%s.global_scales: the format has none", what);
    return MOXIE_OK;
}

static int32_t read_matrix(const struct call *call, const moxie_matrix *given, int64_t experts,
                           struct matrix *matrix)
{
    const struct caller *caller = &call->caller;
    const char *what = matrix->is_down ? "weights.w2" : "weights.w1";
    struct want want;
    int32_t st = MOXIE_OK;

    TRY(check_matrix(caller, given, what, matrix->format));
    matrix->order = given->order;
    matrix->rows_in = given->orientation == MOXIE_ROWS_IN;
    matrix->block_offset = given->block_offset;
    want = want_values(matrix, experts);
    TRY(view_read(caller, &want, &given->values, &matrix->values));
    if (!is_plain(matrix->format)) {
        want = want_scales(matrix, &given->scales, experts);
        TRY(view_read(caller, &want, &given->scales, &matrix->scales));
    }
    if (matrix->format == MOXIE_FORMAT_NVFP4) {
        want = (struct want){what, TYPE_F32, 1, {experts, 2, 0}, 0};
        if (matrix->rows != matrix->units && given->global_scales.ndim == 2) want.ndim = 2;
        TRY(view_read(caller, &want, &given->global_scales, &matrix->globals));
    }
    want = (struct want){what, TYPE_FLOATS, 2, {experts, matrix->rows, 0}, 1};
    TRY(view_read(caller, &want, &given->bias, &matrix->bias));
out:
    return st;
}

int32_t weights_read(const struct call *call, const moxie_weights *weights, struct runner *runner)
{
    const struct instance *instance = call->instance;
    const struct limits *limits = &instance->limits;
    int gated = instance->values[KEY_ACTIVATION].number != RELU2;
    moxie_weights copy;
    moxie_matrix w1, w2;
    int32_t st = MOXIE_OK;

    TRY(struct_read(&call->caller, &shape_weights, "weights", weights, &copy));
    TRY(struct_read(&call->caller, &shape_matrix, "weights.w1", copy.w1, &w1));
    TRY(struct_read(&call->caller, &shape_matrix, "weights.w2", copy.w2, &w2));
    runner->w1 = (struct matrix){.rows = limits->intermediate * (gated ? 2 : 1),
                                 .columns = limits->hidden,
                                 .units = limits->intermediate};
    runner->w2 = (struct matrix){.rows = limits->hidden,
                                 .columns = limits->intermediate,
                                 .units = limits->hidden,
                                 .is_down = 1};
    // The words of weight_format are in the order of MOXIE_FORMAT_*.
    runner->w1.format = runner->w2.format = (int32_t)instance->values[KEY_WEIGHT_FORMAT].number + 1;
    if (gated ? w1.order < MOXIE_ORDER_GATE_UP || w1.order > MOXIE_ORDER_INTERLEAVED
              : w1.order != MOXIE_ORDER_PLAIN)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "weights.w1.order is %d", w1.order));
    if (w2.order != MOXIE_ORDER_PLAIN)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "weights.w2.order is %d", w2.order));
    if (w1.block_offset != w2.block_offset)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID,
                      "weights: block_offset is %d for w1 and %d for w2", w1.block_offset,
                      w2.block_offset));
    TRY(read_matrix(call, &w1, limits->experts_local, &runner->w1));
    TRY(read_matrix(call, &w2, limits->experts_local, &runner->w2));
    for (int64_t expert = 0; expert < limits->experts_local; expert++)
        TRY(weights_check_expert(call, runner, expert));
out:
    return st;
}

static int32_t check_scales(const struct call *call, const struct matrix *matrix, int64_t expert)
{
    int64_t groups = matrix->columns / group_of(matrix->format);

    if (matrix->format != MOXIE_FORMAT_MXFP4 && matrix->format != MOXIE_FORMAT_NVFP4)
        return MOXIE_OK;
    for (int64_t row = 0; row < matrix->rows; row++) {
        for (int64_t group = 0; group < groups; group++) {
            int32_t scale = *view_at(&matrix->scales, expert, row, group);
            int bad = matrix->format == MOXIE_FORMAT_MXFP4 ? scale == 255 : (scale & 127) == 127;

            if (bad)
                return fail_with(&call->caller, MOXIE_E_INVALID,
                                 "weights.%s.scales: expert %lld, row %lld, group %lld is no "
                                 "number",
                                 matrix->is_down ? "w2" : "w1", (long long)expert, (long long)row,
                                 (long long)group);
        }
    }
    return MOXIE_OK;
}

int32_t weights_check_expert(const struct call *call, const struct runner *runner, int64_t expert)
{
    int32_t st = MOXIE_OK;

    TRY(check_scales(call, &runner->w1, expert));
    TRY(check_scales(call, &runner->w2, expert));
out:
    return st;
}

// FNV-1a over every byte of a tensor, padding between rows left out.
static uint64_t digest_view(uint64_t digest, const struct view *view)
{
    int64_t shape[3] = {1, 1, 1};
    int64_t row_bytes;

    if (view->data == NULL) return digest;
    for (int32_t i = 0; i < view->ndim; i++)
        shape[i] = view->shape[i];
    row_bytes = shape[view->ndim - 1] * type_bytes(view->type);
    shape[view->ndim - 1] = 1;
    for (int64_t i = 0; i < shape[0]; i++) {
        for (int64_t j = 0; j < shape[1]; j++) {
            const unsigned char *row = view_at(view, i, j, 0);

            for (int64_t at = 0; at < row_bytes; at += 8) {
                uint64_t word = 0;

                memcpy(&word, row + at, (size_t)(row_bytes - at < 8 ? row_bytes - at : 8));
                digest = (digest ^ word) * 0x100000001b3u;
                digest ^= digest >> 32;
            }
        }
    }
    return digest;
}

uint64_t weights_digest(const struct runner *runner)
{
    const struct matrix *matrices[] = {&runner->w1, &runner->w2};
    uint64_t digest = 0xcbf29ce484222325u;

    for (int32_t i = 0; i < 2; i++) {
        digest = digest_view(digest, &matrices[i]->values);
        digest = digest_view(digest, &matrices[i]->scales);
        digest = digest_view(digest, &matrices[i]->globals);
        digest = digest_view(digest, &matrices[i]->bias);
    }
    return digest;
}
