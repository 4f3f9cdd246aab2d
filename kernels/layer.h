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
#define LAYER_WEIGHTS   (96 << 20) // bytes, at most, if each choice has an expert of its own

// Tokens of a launch, at most, where an expert has so many bytes of weights; 0: none.
static inline int32_t layer_tokens(double expert_bytes, int32_t top_k)
{
    const double by_weights = LAYER_WEIGHTS / (expert_bytes * top_k);
    const int32_t by_choices = LAYER_POSITIONS / top_k,
                  most = by_choices < LAYER_TOKENS ? by_choices : LAYER_TOKENS;

    return by_weights < most ? (int32_t)by_weights : most;
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
