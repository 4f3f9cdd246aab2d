// layer: a whole layer of few tokens in one launch, where launches would take as long as the
// weights: what route, tally, quantise (of x), gemms and combine of these args do one after the
// other. Its sums are fp32 to the end: a result's bits do not depend on its batch mates, but they
// are not those of the launches one by one.

#ifndef MOXIE_KERNELS_LAYER_H
#define MOXIE_KERNELS_LAYER_H

#include "kernels/combine.h"
#include "kernels/gemm.h"
#include "kernels/quantise.h"
#include "kernels/route.h"
#include "kernels/tally.h"

#define LAYER_UNFIT     (-1) // no error: nothing was launched, since there is no code for these args
#define LAYER_TURNS     2    // uint64 that blocks count in
#define LAYER_POSITIONS 128  // choices of all tokens, at most
#define LAYER_TOKENS    8    // at most

// Tokens of a launch, at most, where an expert has so many weights; 0: none. If each choice has an
// expert of its own, layers of more weights are faster launch by launch (kernels/README.md,
// ladder), those of many choices sooner than those of few: each block goes through every choice's
// mid.
static inline int32_t layer_tokens(double expert_weights, int32_t is_fp8, int32_t top_k)
{
    static const struct {
        int32_t choices;
        double weights_bytes;
    } bounds[2][2] = {{{16, 288 << 20}, {LAYER_POSITIONS, 216 << 20}},
                      {{40, 192 << 20}, {LAYER_POSITIONS, 96 << 20}}};
    const double token_bytes = expert_weights * (is_fp8 ? 1 : 2) * top_k;
    int32_t most = 0;

    for (int32_t i = 0; i < 2; i++) {
        const double by_weights = bounds[is_fp8 != 0][i].weights_bytes / token_bytes;
        int32_t tokens = bounds[is_fp8 != 0][i].choices / top_k;

        if (tokens > LAYER_TOKENS) tokens = LAYER_TOKENS;
        if (by_weights < tokens) tokens = (int32_t)by_weights;
        if (tokens > most) most = tokens;
    }
    return most;
}

struct layer_args {
    struct route_args route;       // one slab by ids; what it writes need not be there
    struct tally_args tally;       // load NULL: not counted
    struct quantise_args quantise; // of x; rows NULL: x is multiplied as it is
    struct gemms_args gemms;
    struct combine_args combine; // results may not lie in what route and gemms read
    uint64_t *turns; // device [LAYER_TURNS], 0 before the first launch, then the launches' own;
                     // NULL: unfit
    uint32_t *mid;   // device [2][mid_words], the same; 16-byte aligned. Two launches with the same
                     // may not overlap
    int64_t mid_words; // of two numbers, a multiple of 4; fewer than cap * top_k * intermediate / 2
                       // of the slab: unfit
};

#endif
