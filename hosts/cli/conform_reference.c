// The layer in double precision, from its definition alone.

#include "hosts/cli/conform_layer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

static double activate(const struct layer_spec *spec, double gate, double up)
{
    double limit = spec->limit > 0 ? spec->limit : INFINITY;

    if (strcmp(spec->activation, "silu") == 0) return gate * sigmoid(gate) * up;
    if (strcmp(spec->activation, "gelu") == 0) return 0.5 * gate * erfc(-gate * M_SQRT1_2) * up;
    if (strcmp(spec->activation, "gelu_tanh") == 0)
        return 0.5 * gate * (1 + tanh(sqrt(2 / M_PI) * (gate + 0.044715 * gate * gate * gate))) *
               up;
    if (strcmp(spec->activation, "relu2") == 0) return gate > 0 ? gate * gate : 0;
    gate = fmin(gate, limit);
    up = fmax(fmin(up, limit), -limit);
    return gate * sigmoid(spec->alpha * gate) * (up + spec->beta);
}

// Row of w1 that holds unit i of the gate (half 0) or of up (half 1).
static int64_t row_of(const struct layer_spec *spec, int64_t half, int64_t i)
{
    switch (spec->order) {
    case MOXIE_ORDER_INTERLEAVED:
        return 2 * i + half;
    case MOXIE_ORDER_UP_GATE:
        return (1 - half) * spec->intermediate + i;
    default:
        return half * spec->intermediate + i;
    }
}

static double product(const struct matrix_room *room, int64_t expert, int64_t row, const double *x)
{
    const double *w = room->exact + (expert * room->n + row) * room->k;
    double sum = room->exact_bias[expert * room->n + row];

    for (int64_t i = 0; i < room->k; i++)
        sum += w[i] * x[i];
    return sum;
}

void reference_expert(const struct layer *layer, int64_t expert, const double *x, double *mid,
                      double *y)
{
    const struct layer_spec *spec = &layer->spec;
    int gated = layer_is_gated(spec);

    for (int64_t i = 0; i < spec->intermediate; i++) {
        double gate = product(&layer->w1, expert, gated ? row_of(spec, 0, i) : i, x);
        double up = gated ? product(&layer->w1, expert, row_of(spec, 1, i), x) : 1;

        mid[i] = activate(spec, gate, up);
    }
    for (int64_t i = 0; i < spec->hidden; i++)
        y[i] = product(&layer->w2, expert, i, mid);
}

static void add_place(struct tokens *tokens, const struct layer *layer, int64_t at, double *room)
{
    const struct tokens_spec *spec = &tokens->spec;
    int64_t token = at / spec->top_k;
    double weight = tokens->weights_exact[at];
    double *x = room, *mid = room + spec->hidden, *y = mid + layer->spec.intermediate;

    if (tokens->experts[at] < 0) return;
    for (int64_t i = 0; i < spec->hidden; i++)
        x[i] = tokens->x_exact[token * spec->hidden + i] * (spec->weight_on_input ? weight : 1);
    reference_expert(layer, tokens->experts[at], x, mid, y);
    for (int64_t i = 0; i < spec->hidden; i++)
        tokens->want[token * spec->hidden + i] +=
            y[i] * (spec->weight_on_input ? 1 : weight) * spec->scaling;
}

int reference_compute(struct tokens *tokens, const struct layer *layer, struct check *check)
{
    const struct tokens_spec *spec = &tokens->spec;
    double *room = conform_room(check, 2 * spec->hidden + layer->spec.intermediate, sizeof *room);

    if (room == NULL) return check->verdict;
    memset(tokens->want, 0, (size_t)(spec->count * spec->hidden) * sizeof *tokens->want);
    for (int64_t at = 0; at < spec->count * spec->top_k; at++)
        add_place(tokens, layer, at, room);
    free(room);
    return VERDICT_PASS;
}
