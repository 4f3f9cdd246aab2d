// The functions between the two products.

#ifndef MOXIE_KERNELS_CUDA_ACTIVATION_CUH
#define MOXIE_KERNELS_CUDA_ACTIVATION_CUH

#include "kernels/cuda/ptx.cuh"
#include "kernels/gemm.h"

#include <float.h>
#include <math.h>

// gate * sigmoid(gate * p(min(gate^2, kSquareMax))) * (up + beta), after gate <= limit and |up| <= limit; terms are those of -p / ln 2.
struct activation_terms {
    float terms[3];
    float beta, limit;
};

constexpr float kSquareMax = 36.0f; // past |x| = 6 the sigmoid of gelu's is 0 or 1; the other functions have a constant p

// Of gelu's: logit(Phi(x)) = x p(x^2), fitted so that x Phi(x) is at most 2.6e-5 off, a bf16's half step at 0.013.
static inline activation_terms terms_of(const gate_up_args &from)
{
    const float to_power = -1.4426950408889634f; // -1 / ln 2
    const float tanh_slope = 1.5957691216057308f; // 2 sqrt(2 / pi)

    switch (from.activation) {
    case ACTIVATION_GELU:
        return {{to_power * 1.59501575f, to_power * 0.0740113034f, to_power * -0.000703035284f}, 0.0f, INFINITY};
    case ACTIVATION_GELU_TANH:
        return {{to_power * tanh_slope, to_power * tanh_slope * 0.044715f, 0.0f}, 0.0f, INFINITY};
    case ACTIVATION_SWIGLUOAI:
        // Finite, or a gate that is 0 would be no number.
        return {{fmaxf(fminf(to_power * from.alpha, FLT_MAX), -FLT_MAX), 0.0f, 0.0f}, from.beta, from.limit > 0.0f ? from.limit : INFINITY};
    default:
        return {{to_power, 0.0f, 0.0f}, 0.0f, INFINITY};
    }
}

// After the bias of gate (x) and up (y): every function with a gate as straight code, because a thread of gemms runs through up to 64
// copies of it for each tile. `bare`: SiLU, where p is a constant and there is nothing else.
template <bool bare> __device__ __forceinline__ float activate(const activation_terms &by, float gate, float up, float2 bias)
{
    float square, power;

    if (bare) return gate * reciprocal_approx(1.0f + exp2_approx(gate * by.terms[0])) * up;
    gate = min_nan(gate + bias.x, by.limit);
    up = max_nan(min_nan(up + bias.y, by.limit), -by.limit) + by.beta;
    square = fminf(gate * gate, kSquareMax);
    power = exp2_approx(gate * (by.terms[0] + square * (by.terms[1] + square * by.terms[2])));
    return gate * reciprocal_approx(1.0f + power) * up;
}

// relu2, which has no gate.
__device__ __forceinline__ float activate_plain(float x)
{
    return x < 0.0f ? 0.0f : x * x; // NaN stays
}

#endif
