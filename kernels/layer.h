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
#define LAYER_TOKENS    8    // of all slabs, at most

// Tokens of a slab, at most, where an expert has so many weights; 0: none. Launch by launch costs
// more to begin with and less for each choice: one launch pays for the weights of the choices, if
// each has an expert of its own, and for each of their results. Where a row has one choice,
// launches save its sum. The numbers, for weights of 16, 8 and 4 bits, are where both took the same
// on an H200 (kernels/README.md, ladder).
static inline int32_t layer_tokens(double expert_weights, double hidden, int32_t weight_bits,
                                   int32_t top_k)
{
    static const struct {
        double weights, results;
    } most[3] = {{540e6, 150e3}, {600e6, 140e3}, {200e6, 400e3}};
    const int32_t by = weight_bits >= 16 ? 0 : weight_bits == 8 ? 1 : 2;
    const double choice_share = expert_weights / most[by].weights + hidden / most[by].results;
    const double by_share = (top_k == 1 ? 0.5 : 1) / (choice_share * top_k);
    int32_t tokens = LAYER_POSITIONS / top_k;

    if (tokens > LAYER_TOKENS) tokens = LAYER_TOKENS;
    return by_share < tokens ? (int32_t)by_share : tokens;
}

struct layer_args {
    struct route_args route; // by ids, of all slabs together LAYER_TOKENS rows; what it writes
                             // need not be there
    struct tally_args tally; // load NULL: not counted
    struct quantise_args quantise; // of x; rows NULL: x is multiplied as it is
    struct gemms_args gemms;
    struct combine_args combine; // results may not lie in what route and gemms read
    uint64_t *turns; // device [LAYER_TURNS], 0 before the first launch, then the launches' own;
                     // NULL: unfit
    uint32_t *mid;   // device [2][mid_words], the same; 16-byte aligned. Two launches with the same
                     // may not overlap
    int64_t mid_words; // of two numbers, a multiple of 4; fewer than top_k * intermediate / 2 for
                       // each row of the slabs: unfit
};

#endif
