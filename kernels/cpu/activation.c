// The activation functions, see activation.h.

#include "kernels/cpu/activation.h"

#include "kernels/types.h"

#include <math.h>

static void gelu(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = 0.5f * x[i] * erfcf(x[i] * -0.70710678f);
}

// 0.5 x (1 + tanh(u)) = x / (1 + exp(-2 u)), which does not cancel where tanh nears -1.
static void gelu_tanh(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        float u = 0.79788456f * x[i] * (1.0f + 0.044715f * x[i] * x[i]);

        x[i] /= 1.0f + expf(-2.0f * u);
    }
}

static void relu2(float *x, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] < 0.0f ? 0.0f : x[i] * x[i];
}

// A NaN stays one.
static void clamp(float *x, int64_t count, float low, float high)
{
    for (int64_t i = 0; i < count; i++)
        x[i] = x[i] < low ? low : x[i] > high ? high : x[i];
}

static void swigluoai(const struct activation_args *args, const struct cpu_ops *ops, float *gate,
                      float *up, int64_t count)
{
    if (args->limit > 0.0f) {
        clamp(gate, count, -INFINITY, args->limit);
        if (up != NULL) clamp(up, count, -args->limit, args->limit);
    }
    ops->swish(gate, count, args->alpha);
    for (int64_t i = 0; up != NULL && i < count; i++)
        up[i] += args->beta;
}

void activation_apply(const struct activation_args *args, const struct cpu_ops *ops, float *gate,
                      float *up, int64_t count)
{
    switch (args->kind) {
    case ACTIVATION_GELU:
        gelu(gate, count);
        break;
    case ACTIVATION_GELU_TANH:
        gelu_tanh(gate, count);
        break;
    case ACTIVATION_SWIGLUOAI:
        swigluoai(args, ops, gate, up, count);
        break;
    case ACTIVATION_RELU2:
        relu2(gate, count);
        break;
    default:
        ops->swish(gate, count, 1.0f);
        break;
    }
    for (int64_t i = 0; up != NULL && i < count; i++)
        gate[i] *= up[i];
}
