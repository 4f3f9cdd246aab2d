// Random tokens, what a layer must make of them, and the comparison.

#include "hosts/cli/conform_layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define POISON        0xff // a NaN in every format of y
#define PADDED_OFFSET 64   // byte_offset of padded tensors

enum batch_tensor { TENSOR_X, TENSOR_IDS, TENSOR_WEIGHTS, TENSOR_Y };

// Elements from one row of a tensor to the next.
static int64_t pitch(const struct tokens *tokens, enum batch_tensor which)
{
    const struct tokens_spec *spec = &tokens->spec;
    int wide = which == TENSOR_X || which == TENSOR_Y;

    return (wide ? spec->hidden : spec->top_k) + spec->pad;
}

static int64_t element_bytes(const struct tokens *tokens, enum batch_tensor which)
{
    const struct tokens_spec *spec = &tokens->spec;

    switch (which) {
    case TENSOR_X:
        return number_bytes(spec->x_format);
    case TENSOR_IDS:
        return spec->id_bytes;
    case TENSOR_WEIGHTS:
        return number_bytes(spec->weight_format);
    default:
        return number_bytes(spec->y_format);
    }
}

static int64_t offset(const struct tokens *tokens)
{
    return tokens->spec.pad > 0 ? PADDED_OFFSET : 0;
}

static moxie_tensor describe(struct tokens *tokens, enum batch_tensor which, unsigned char *data,
                             moxie_dtype dtype)
{
    int wide = which == TENSOR_X || which == TENSOR_Y;
    moxie_tensor tensor =
        conform_tensor(data, dtype, 2, tokens->shapes[wide ? 0 : 1], tokens->strides[which]);

    tokens->strides[which][0] = pitch(tokens, which);
    tokens->strides[which][1] = 1;
    if (tokens->spec.pad == 0) tensor.strides = NULL;
    tensor.byte_offset = (uint64_t)offset(tokens);
    return tensor;
}

static void describe_batch(struct tokens *tokens)
{
    const struct tokens_spec *spec = &tokens->spec;
    const moxie_dtype ids = {MOXIE_DTYPE_INT, (uint8_t)(8 * spec->id_bytes), 1};

    tokens->shapes[0][0] = tokens->shapes[1][0] = spec->count;
    tokens->shapes[0][1] = spec->hidden;
    tokens->shapes[1][1] = spec->top_k;
    tokens->batch = (moxie_batch){
        .struct_size = sizeof tokens->batch,
        .id_space = MOXIE_IDS_GLOBAL,
        .x = describe(tokens, TENSOR_X, tokens->x, dtype_of(spec->x_format)),
        .ids = describe(tokens, TENSOR_IDS, tokens->ids, ids),
        .weights = describe(tokens, TENSOR_WEIGHTS, tokens->weights, dtype_of(spec->weight_format)),
        .y = describe(tokens, TENSOR_Y, tokens->y, dtype_of(spec->y_format)),
    };
}

void tokens_set(struct tokens *tokens, int64_t token, int64_t place, int64_t id, int64_t expert)
{
    unsigned char *at = tokens->ids + offset(tokens) +
                        (token * pitch(tokens, TENSOR_IDS) + place) * tokens->spec.id_bytes;
    int32_t narrow = (int32_t)id;

    if (tokens->spec.id_bytes == 8)
        memcpy(at, &id, sizeof id);
    else
        memcpy(at, &narrow, sizeof narrow);
    tokens->experts[token * tokens->spec.top_k + place] = expert;
}

// Different experts for each place, as a router chooses them.
static void roll_ids(struct tokens *tokens, struct dice *dice)
{
    const struct tokens_spec *spec = &tokens->spec;
    int64_t steps = (spec->experts - 1) / (spec->top_k > 1 ? spec->top_k - 1 : 1);

    for (int64_t token = 0; token < spec->count; token++) {
        int64_t first = dice_below(dice, spec->experts);
        int64_t step = 1 + dice_below(dice, steps);

        for (int64_t place = 0; place < spec->top_k; place++) {
            int64_t expert = (first + place * step) % spec->experts;

            tokens_set(tokens, token, place, expert, expert);
        }
    }
}

static void roll_numbers(struct tokens *tokens, struct dice *dice)
{
    const struct tokens_spec *spec = &tokens->spec;
    unsigned char *x = tokens->x + offset(tokens), *weights = tokens->weights + offset(tokens);

    for (int64_t token = 0; token < spec->count; token++) {
        for (int64_t i = 0; i < spec->hidden; i++) {
            int64_t at = token * pitch(tokens, TENSOR_X) + i;

            number_write(x, spec->x_format, at, 2 * dice_real(dice));
            tokens->x_exact[token * spec->hidden + i] = number_read(x, spec->x_format, at);
        }
        for (int64_t i = 0; i < spec->top_k; i++) {
            int64_t at = token * pitch(tokens, TENSOR_WEIGHTS) + i;

            number_write(weights, spec->weight_format, at, 0.6 + 0.4 * dice_real(dice));
            tokens->weights_exact[token * spec->top_k + i] =
                number_read(weights, spec->weight_format, at);
        }
    }
}

static int64_t tensor_bytes(const struct tokens *tokens, enum batch_tensor which)
{
    return 2 * offset(tokens) +
           (tokens->spec.count + 1) * pitch(tokens, which) * element_bytes(tokens, which);
}

int tokens_make(struct tokens *tokens, const struct tokens_spec *spec, struct check *check)
{
    struct dice dice = {.state = spec->seed * 2 + 1};
    int64_t places = spec->count * spec->top_k;

    tokens_free(tokens);
    tokens->spec = *spec;
    tokens->y_bytes = (uint64_t)tensor_bytes(tokens, TENSOR_Y);
    tokens->x = conform_room(check, tensor_bytes(tokens, TENSOR_X), 1);
    tokens->ids = conform_room(check, tensor_bytes(tokens, TENSOR_IDS), 1);
    tokens->weights = conform_room(check, tensor_bytes(tokens, TENSOR_WEIGHTS), 1);
    tokens->y = conform_room(check, (int64_t)tokens->y_bytes, 1);
    tokens->x_exact = conform_room(check, spec->count * spec->hidden, sizeof *tokens->x_exact);
    tokens->weights_exact = conform_room(check, places, sizeof *tokens->weights_exact);
    tokens->experts = conform_room(check, places, sizeof *tokens->experts);
    tokens->want = conform_room(check, spec->count * spec->hidden, sizeof *tokens->want);
    if (check->verdict != VERDICT_PASS) return check->verdict;
    roll_ids(tokens, &dice);
    roll_numbers(tokens, &dice);
    describe_batch(tokens);
    tokens_poison(tokens);
    return VERDICT_PASS;
}

void tokens_free(struct tokens *tokens)
{
    free(tokens->x);
    free(tokens->ids);
    free(tokens->weights);
    free(tokens->y);
    free(tokens->x_exact);
    free(tokens->weights_exact);
    free(tokens->experts);
    free(tokens->want);
    *tokens = (struct tokens){0};
}

void tokens_poison(struct tokens *tokens)
{
    memset(tokens->y, POISON, tokens->y_bytes);
}

int tokens_untouched(const struct tokens *tokens, struct check *check)
{
    for (uint64_t i = 0; i < tokens->y_bytes; i++)
        if (tokens->y[i] != POISON)
            return broken(check, "byte %llu of y was written", (unsigned long long)i);
    return VERDICT_PASS;
}

double tokens_y(const struct tokens *tokens, int64_t token, int64_t column)
{
    return number_read(tokens->y + offset(tokens), tokens->spec.y_format,
                       token * pitch(tokens, TENSOR_Y) + column);
}

// The bytes of y that belong to no row.
static int check_padding(const struct tokens *tokens, struct check *check)
{
    int64_t row = pitch(tokens, TENSOR_Y) * number_bytes(tokens->spec.y_format);
    int64_t used = tokens->spec.hidden * number_bytes(tokens->spec.y_format);
    int64_t first = offset(tokens);

    for (int64_t i = 0; i < (int64_t)tokens->y_bytes; i++) {
        int64_t at = i - first;

        if (at >= 0 && at < tokens->spec.count * row && at % row < used) continue;
        if (tokens->y[i] != POISON)
            return broken(check, "byte %lld of the memory around y's rows was written",
                          (long long)i);
    }
    return VERDICT_PASS;
}

int tokens_compare(const struct tokens *tokens, double tolerance, struct check *check)
{
    const struct tokens_spec *spec = &tokens->spec;
    double total = 0;

    for (int64_t i = 0; i < spec->count * spec->hidden; i++)
        total += tokens->want[i] * tokens->want[i];
    if (spec->count > 0) total = sqrt(total / (double)spec->count); // of a usual row
    for (int64_t token = 0; token < spec->count; token++) {
        double error = 0, size = 0, allowed = 0;

        for (int64_t i = 0; i < spec->hidden; i++) {
            double want = tokens->want[token * spec->hidden + i];
            double off = tokens_y(tokens, token, i) - want;

            error += off * off;
            size += want * want;
        }
        // A row that is small because its terms cancel is held to the size of the others.
        allowed = tolerance * fmax(sqrt(size), size > 0 ? total : 0);
        if (!(sqrt(error) <= allowed))
            return broken(check,
                          "token %lld of %lld is %.3g away from the reference, relative to its "
                          "size; allowed is %.3g",
                          (long long)token, (long long)spec->count,
                          size > 0 ? sqrt(error / size) : sqrt(error), tolerance);
    }
    return check_padding(tokens, check);
}
