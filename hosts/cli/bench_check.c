// Checks of what a device has computed.

#include "hosts/cli/bench_check.h"

#include "hosts/cli/conform_numbers.h"
#include "hosts/cli/router.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK_BYTES  ((uint64_t)4 << 20)
#define NUMBERS_MAX  (CHUNK_BYTES / sizeof(uint16_t)) // widened at once: one row at least
#define NUMBERS_MANY 512                              // of a row, whose roundings average out
#define BLOCK        128                              // of fp8_block128

// Index of the first number whose exponent is all ones; `count` when there is none.
static uint64_t first_not_finite(const uint16_t *numbers, uint64_t count, int32_t format)
{
    uint16_t exponent = format == MOXIE_FORMAT_BF16 ? 0x7f80 : 0x7c00;

    for (uint64_t i = 0; i < count; i++)
        if ((numbers[i] & exponent) == exponent) return i;
    return count;
}

int bench_check_rows(struct device *device, const struct output *output, int64_t first,
                     int64_t count, struct fault *fault)
{
    uint64_t row_bytes = (uint64_t)output->hidden * sizeof(uint16_t);
    uint64_t begin = (uint64_t)first * row_bytes;
    uint64_t bytes = (uint64_t)count * row_bytes;
    uint64_t chunk_bytes = bytes < CHUNK_BYTES ? bytes : CHUNK_BYTES;
    uint16_t *chunk = malloc(chunk_bytes + 1); // of no rows, too
    int st = EXIT_OK;

    if (chunk == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    for (uint64_t done = 0; done < bytes; done += chunk_bytes) {
        uint64_t part = bytes - done < chunk_bytes ? bytes - done : chunk_bytes;
        uint64_t numbers = part / sizeof *chunk;
        uint64_t found = 0;

        TRY(device->table->copy_out(device, chunk, output->y->at + begin + done, part, fault));
        found = first_not_finite(chunk, numbers, output->format);
        if (found < numbers)
            TRY(fault_set(fault, EXIT_TOLERANCE,
                          "the output was not written, or is not finite: token %lld, column %lld",
                          (long long)((begin + done + 2 * found) / row_bytes),
                          (long long)((begin + done + 2 * found) % row_bytes / 2)));
    }
out:
    free(chunk);
    return st;
}

int bench_check_possible(const struct bench_shape *shape, int32_t format, struct fault *fault)
{
    if (format == MOXIE_FORMAT_F32)
        return fault_set(fault, EXIT_REFUSED,
                         "on a device with graphs the bench checks what is computed, and can do so "
                         "for weights of 16 bits or fewer, not in %s",
                         format_word(format));
    if ((uint64_t)shape->hidden > NUMBERS_MAX || (uint64_t)shape->intermediate > NUMBERS_MAX)
        return fault_set(
            fault, EXIT_REFUSED,
            "on a device with graphs the bench checks what is computed, and can do so "
            "for rows of at most %llu numbers, not with hidden %lld, intermediate %lld",
            (unsigned long long)NUMBERS_MAX, (long long)shape->hidden,
            (long long)shape->intermediate);
    return EXIT_OK;
}

double bench_check_error_max(int32_t format, const struct bench_shape *shape)
{
    if (!format_is_fp8(format)) return 2e-2;
    return shape->hidden < NUMBERS_MANY || shape->intermediate < NUMBERS_MANY ? 1e-1 : 6e-2;
}

// Room for some rows of a matrix, narrow and widened, and for the scales of one expert.
struct rows_room {
    uint8_t *narrow, *scales;
    float *wide;
    float globals[2]; // of the expert: nvfp4, gate's and up's
    float codes[256]; // what the codes of e4m3 stand for
};

// The scales of one row of an expert's weights, in the shapes of moxie_matrix: one, or with
// fp8_block128 one per 128 inputs. Gate and up have scales, and blocks of rows, of their own.
static const float *row_scales(const struct weights_shape *shape, const void *of_expert,
                               uint64_t row)
{
    const float *scales = of_expert;
    uint64_t halves = shape->order == MOXIE_ORDER_PLAIN ? 1 : 2;
    uint64_t half_rows = (uint64_t)shape->outputs / halves;
    uint64_t half = row / half_rows;
    uint64_t half_blocks = (half_rows + BLOCK - 1) / BLOCK;
    uint64_t columns = ((uint64_t)shape->inputs + BLOCK - 1) / BLOCK;

    if (shape->format == MOXIE_FORMAT_FP8_TENSOR) return scales + half;
    if (shape->format == MOXIE_FORMAT_FP8_CHANNEL) return scales + row;
    return scales + (half * half_blocks + row % half_rows / BLOCK) * columns;
}

// Of a group of 4-bit weights.
static float group_scale(int32_t format, const struct rows_room *room, uint64_t group)
{
    float scale = 0;

    switch (format) {
    case MOXIE_FORMAT_MXFP4:
        return (float)decode_e8m0(room->scales[group]);
    case MOXIE_FORMAT_NVFP4:
        return room->codes[room->scales[group]];
    default:
        memcpy(&scale, room->scales + group * sizeof scale, sizeof scale);
        return scale;
    }
}

// Two weights a byte, the first in its low half.
static void widen_packed(const struct weights_shape *shape, uint64_t first, uint64_t rows,
                         const struct rows_room *room)
{
    uint64_t inputs = (uint64_t)shape->inputs, group = (uint64_t)format_group(shape->format);
    uint64_t gate_rows =
        shape->order == MOXIE_ORDER_PLAIN ? (uint64_t)shape->outputs : (uint64_t)shape->outputs / 2;

    for (uint64_t i = 0; i < rows * inputs; i++) {
        uint64_t row = first + i / inputs;
        uint8_t code = room->narrow[i / 2] >> i % 2 * 4 & 0xf;
        float number =
            shape->format == MOXIE_FORMAT_INT4_G32 ? (float)code - 8.0f : (float)decode_e2m1(code);

        if (shape->format == MOXIE_FORMAT_NVFP4) number *= room->globals[row >= gate_rows];
        room->wide[i] = number * group_scale(shape->format, room, (first * inputs + i) / group);
    }
}

// Rows first..first+rows-1 of an expert, from room->narrow.
static void widen_rows(const struct weights_shape *shape, uint64_t first, uint64_t rows,
                       const struct rows_room *room)
{
    uint64_t inputs = (uint64_t)shape->inputs;
    uint64_t per_scale = shape->format == MOXIE_FORMAT_FP8_BLOCK128 ? BLOCK : inputs;

    if (format_is_packed(shape->format)) {
        widen_packed(shape, first, rows, room);
        return;
    }
    if (!format_is_fp8(shape->format)) {
        widen(room->narrow, shape->format, rows * inputs, room->wide);
        return;
    }
    for (uint64_t i = 0; i < rows; i++) {
        const float *scales = row_scales(shape, room->scales, first + i);

        for (uint64_t k = 0; k < inputs; k++)
            room->wide[i * inputs + k] =
                room->codes[room->narrow[i * inputs + k]] * scales[k / per_scale];
    }
}

// Of one expert, where the format has any.
static int fetch_scales(const struct weights *weights, int32_t expert, struct rows_room *room,
                        struct fault *fault)
{
    struct device *device = weights->device;
    uint64_t bytes = weights->scale_bytes, global_bytes = weights->global_bytes;
    int st = EXIT_OK;

    if (bytes > 0)
        TRY(device->table->copy_out(device, room->scales,
                                    weights->scales.at + (uint64_t)expert * bytes, bytes, fault));
    if (global_bytes > 0)
        TRY(device->table->copy_out(device, room->globals,
                                    weights->globals.at + (uint64_t)expert * global_bytes,
                                    global_bytes, fault));
out:
    return st;
}

// out[outputs] += scale * (rows of the expert in `weights`) x in[inputs].
static int multiply(const struct weights *weights, int32_t expert, const double *in, double scale,
                    double *out, struct rows_room *room, struct fault *fault)
{
    struct device *device = weights->device;
    uint64_t inputs = (uint64_t)weights->shape.inputs;
    uint64_t outputs = (uint64_t)weights->shape.outputs;
    uint64_t row_bytes = weights->value_bytes / outputs;
    uint64_t rows_max = NUMBERS_MAX / inputs;
    const uint8_t *from = weights->values.at + (uint64_t)expert * weights->value_bytes;
    int st = EXIT_OK;

    TRY(fetch_scales(weights, expert, room, fault));
    for (uint64_t row = 0; row < outputs; row += rows_max) {
        uint64_t rows = outputs - row < rows_max ? outputs - row : rows_max;

        TRY(device->table->copy_out(device, room->narrow, from + row * row_bytes, rows * row_bytes,
                                    fault));
        widen_rows(&weights->shape, row, rows, room);
        for (uint64_t i = 0; i < rows; i++) {
            double sum = 0;

            for (uint64_t k = 0; k < inputs; k++)
                sum += (double)room->wide[i * inputs + k] * in[k];
            out[row + i] += scale * sum;
        }
    }
out:
    return st;
}

// The vectors of one token.
struct vectors {
    double *x, *both, *mid; // [H], [2I] gate then up, [I]
    struct rows_room room;
};

static int vectors_init(struct vectors *vectors, const struct token *token, struct fault *fault)
{
    size_t hidden = (size_t)token->w2->shape.outputs;
    size_t intermediate = (size_t)token->w2->shape.inputs;
    uint64_t scale_bytes = token->w1->scale_bytes > token->w2->scale_bytes ? token->w1->scale_bytes
                                                                           : token->w2->scale_bytes;

    *vectors = (struct vectors){
        .x = calloc(hidden, sizeof(double)),
        .both = calloc(2 * intermediate, sizeof(double)),
        .mid = calloc(intermediate, sizeof(double)),
        .room = {.narrow = malloc(CHUNK_BYTES),
                 .wide = malloc(NUMBERS_MAX * sizeof(float)),
                 .scales = malloc(scale_bytes + 1)},
    };
    for (int code = 0; code < 256; code++)
        vectors->room.codes[code] = (float)decode_e4m3((uint8_t)code);
    if (vectors->x != NULL && vectors->both != NULL && vectors->mid != NULL &&
        vectors->room.narrow != NULL && vectors->room.wide != NULL && vectors->room.scales != NULL)
        return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "out of memory");
}

static void vectors_fini(struct vectors *vectors)
{
    free(vectors->x);
    free(vectors->both);
    free(vectors->mid);
    free(vectors->room.narrow);
    free(vectors->room.wide);
    free(vectors->room.scales);
}

static int compute(const struct token *token, struct vectors *v, double *y, struct fault *fault)
{
    size_t hidden = (size_t)token->w2->shape.outputs;
    size_t intermediate = (size_t)token->w2->shape.inputs;
    double scale = (double)(1.0f / (float)token->top_k);
    int st = EXIT_OK;

    widen(token->x, token->x_format, hidden, v->room.wide);
    for (size_t i = 0; i < hidden; i++)
        v->x[i] = (double)v->room.wide[i];
    for (int64_t k = 0; k < token->top_k; k++) {
        int64_t expert = token->experts[k] - token->expert_first;

        if (expert < 0 || expert >= token->w1->shape.experts) continue;
        memset(v->both, 0, 2 * intermediate * sizeof *v->both);
        TRY(multiply(token->w1, (int32_t)expert, v->x, 1, v->both, &v->room, fault));
        for (size_t i = 0; i < intermediate; i++)
            v->mid[i] = v->both[i] / (1 + exp(-v->both[i])) * v->both[intermediate + i];
        TRY(multiply(token->w2, (int32_t)expert, v->mid, scale, y, &v->room, fault));
    }
out:
    return st;
}

int bench_check_share(const struct token *token, double *y, struct fault *fault)
{
    struct vectors v = {.x = NULL};
    int st = EXIT_OK;

    assert((uint64_t)token->w1->shape.inputs <= NUMBERS_MAX);
    assert((uint64_t)token->w2->shape.inputs <= NUMBERS_MAX);
    TRY(vectors_init(&v, token, fault));
    TRY(compute(token, &v, y, fault));
out:
    vectors_fini(&v);
    return st;
}

int bench_check_row(struct device *device, const struct output *output, int64_t row,
                    const double *reference, double *relative_error, struct fault *fault)
{
    uint64_t hidden = (uint64_t)output->hidden;
    uint64_t row_bytes = hidden * sizeof(uint16_t);
    uint16_t *narrow = malloc(row_bytes);
    float *wide = malloc(hidden * sizeof *wide);
    double error = 0;
    double norm = 0;
    int st = EXIT_OK;

    *relative_error = NAN;
    if (narrow == NULL || wide == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(device->table->copy_out(device, narrow, output->y->at + (uint64_t)row * row_bytes,
                                row_bytes, fault));
    widen(narrow, output->format, hidden, wide);
    for (uint64_t i = 0; i < hidden; i++) {
        double difference = (double)wide[i] - reference[i];

        error += difference * difference;
        norm += reference[i] * reference[i];
    }
    *relative_error = sqrt(error) / sqrt(norm);
out:
    free(narrow);
    free(wide);
    return st;
}
