// gemms: the two grouped GEMMs over ragged experts. gate_up gathers its rows by index, adds the
// bias and applies the activation in its epilogue; down writes one row per pair. No atomics on
// numbers: a pair's bits do not depend on its batch mates. An operand_format other than F32 rounds
// the input rows; rows that arrive as fp8 or nvfp4, where it is that, are not rounded again.

#ifndef MOXIE_KERNELS_GEMM_H
#define MOXIE_KERNELS_GEMM_H

#include "kernels/quantise.h"
#include "kernels/route.h"
#include "kernels/types.h"

#include <stddef.h>

struct gate_up_args {
    const struct row_slab *slabs; // [slabs_count], host array. CUDA, fp8: one, e4m3 with its scales
                                  // by group (scale_stride_bytes 4) and in the order of the pairs,
                                  // of which there are `cap`, made by a launch right before that
                                  // waited for route, or is `early` where route is given
    const int32_t *expert_offset; // [experts + 1]
    const int32_t *pair_row;      // [pairs] flat rows; NULL: a pair's row is its own number. CUDA,
                                  // fp8: rows lie by it, rows_cap of them in less than 4 GB, and
                                  // their scales in the order of the pairs all the same
    const float *pair_weight;     // router weight on input: multiplies the sums before the bias, so
                                  // that rows are rounded the same whatever it is; NULL: not
    struct weight_view w1; // n = 2 * intermediate, or intermediate with ORDER_PLAIN; k = hidden
    void *mid; // out [pairs, intermediate] of mid_format, rows pitched to mid_stride_bytes. CUDA,
               // fp8: not written
    int64_t mid_stride_bytes;
    int32_t mid_format; // F32, BF16 or F16; CUDA: that of the operands, BF16 for fp8
    int32_t experts;    // 0: nothing is computed
    int32_t slabs_count;
    int32_t rows_cap;
    int32_t hidden;
    int32_t intermediate;
    int32_t activation;       // enum activation
    int32_t operand_format;   // what the product multiplies: F32, BF16, F16, FP8 (1 x 128) or NVFP4
    float alpha, beta, limit; // of ACTIVATION_SWIGLUOAI; limit 0: none
    int32_t reserved;
};

struct down_args {
    const int32_t *expert_offset; // [experts + 1]
    const void *mid;              // [pairs, intermediate] of mid_format
    int64_t mid_stride_bytes;
    struct weight_view w2; // n = hidden, k = intermediate; CUDA: rows_in as w1
    void *pair_out;        // out [pairs, hidden] of pair_format; with result_row [rows, hidden]
    int64_t pair_stride_bytes;
    // Where a pair is all that its row's result is made of: the row of pair_out that becomes
    // result_scale * result_weight * the pair, with the bits that combine would give it. NULL: a
    // pair's row is its own number. CUDA: pair_out may not overlap slabs.
    const int32_t *result_row;  // [pairs]
    const float *result_weight; // [pairs]; NULL: 1
    const void *mid_scales;     // mid of FP8_BLOCK128: as row_slab.scales, CUDA by group; else NULL
    int64_t mid_scale_stride_bytes, mid_group_stride_bytes;
    int64_t pairs_max;   // rows of mid
    int32_t mid_format;  // F32, BF16, F16, or FP8_BLOCK128: as it is multiplied
    int32_t pair_format; // F32, BF16 or F16; CUDA: that of the operands, BF16 for fp8
    int32_t experts;
    int32_t operand_format;
    float result_scale; // with result_row
    int32_t reserved;
};

// The largest e8m0 scale, as its code, of mxfp4 weights on CUDA: 2^21.
#define GEMMS_E8M0_MOST 148

#define GEMMS_IDS_MAX 2048 // more are sooner read from expert_offset

// Whether the products may count ids while route works: few of one slab, or few of several that
// follow each other as [slabs_count, rows_cap, top_k]. Of several, ids of rows that are not valid
// must be none: their counts are not looked at.
static inline int gemms_can_count(const struct row_slab *slabs, int32_t slabs_count,
                                  int32_t rows_cap, int32_t top_k)
{
    const int64_t slab = (int64_t)rows_cap * top_k;

    if (slab <= 0 || slabs_count * slab > GEMMS_IDS_MAX || slabs[0].ids == NULL) return 0;
    for (int32_t i = 1; i < slabs_count; i++) {
        const char *ids = (const char *)slabs[0].ids + i * rows_cap * slabs[0].id_stride_bytes;

        if (slabs[i].ids != ids || slabs[i].id_stride_bytes != slabs[0].id_stride_bytes ||
            slabs[i].id_bytes != slabs[0].id_bytes)
            return 0;
    }
    return 1;
}

// Of more than so many ids fp8 rows are sooner gathered by pair_row than copied for each pair, up
// to as many units of mid as the kernel table's gather_units says.
#ifndef GEMMS_GATHER_IDS
#define GEMMS_GATHER_IDS 2048
#endif

// On CUDA the two tiles of gate_up whose 128 units of fp8 mid have one scale, a couple, go to two
// blocks where all couples are so few: half of 132 SMs. Their halves meet in memory: a pair has a
// place for each of its couples, a word and 16 bits a unit.
#ifndef GEMMS_COUPLES
#define GEMMS_COUPLES 66
#endif
#define GEMMS_HALVES_PLACE_BYTES (4 + 2 * 128)

// Places that so many pairs can need, at most 192 of them in a couple.
static inline int64_t gemms_halves_places(int64_t intermediate, int64_t pairs_max)
{
    const int64_t couples = (intermediate + 127) / 128, most = GEMMS_COUPLES * 192;

    if (intermediate <= 64 || couples > GEMMS_COUPLES || pairs_max == 0) return 0;
    return couples < most / pairs_max ? couples * pairs_max : most;
}

// Bytes of a row of x_woven, a multiple of 16: whole 128 inputs, each as 16 bits or as two codes of
// 8, and a scale.
static inline int64_t gemms_woven_bytes(int64_t hidden)
{
    return (hidden + 127) / 128 * 256 + 16;
}

// gate_up, then quantise where it has rows, of mid into what down multiplies, then down. CUDA: one
// launch, which writes pair_out while slabs are read, and whose quantise has format FP8_BLOCK128,
// all columns, scales by group (scale_stride_bytes 4); fp8 weights want it, others do not use it.
struct gemms_args {
    struct gate_up_args gate_up;
    struct quantise_args quantise; // rows NULL: mid is multiplied as gate_up writes it
    struct down_args down;         // expert_offset and experts as gate_up's
    uint32_t *progress;            // CUDA: device [GEMM_PROGRESS_WORDS + experts], as route leaves
                                   // it
    void *halves;          // CUDA, fp8: device [halves_places] of GEMMS_HALVES_PLACE_BYTES, 16-byte
                           // aligned, 0 before the first launch, then the launches' own, which may
                           // not overlap. NULL, or too few: a block does both tiles of a couple
    int64_t halves_places; // the same in all launches
    void *x_woven; // CUDA, weights of 4 bits: device [slabs_count * rows_cap], or where slabs have
                   // no ids [pairs_max], of gemms_woven_bytes pitched to x_woven_stride_bytes,
                   // both multiples of 16: scratch for x in the
                   // order in which codes become numbers, as bf16 or as what sums to it. Others:
                   // not used
    int64_t x_woven_stride_bytes;
    int32_t top_k; // CUDA, weights of 4 bits: pairs of a row of the slabs, at most. How wide tiles
                   // are goes by it and by the slabs' caps, and in mxfp4 and int4 whether x is
                   // multiplied as bf16 or as two codes, which round otherwise
    const struct route_args *route; // CUDA: what made expert_offset, by ids that gemms_can_count:
                                    // they are counted again while it works, by each block, so they
                                    // may not change until gemms has ended, whoever else could
                                    // write there. NULL: it is waited for
};

int32_t gate_up_cpu(const struct gate_up_args *args, void *stream);
int32_t down_cpu(const struct down_args *args, void *stream);
int32_t gemms_cpu(const struct gemms_args *args, void *stream);

#endif
