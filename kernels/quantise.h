// quantise: rows to fp8 (e4m3, f32 scale = amax / 448 per 1 x 128; a code is that of x * (448 /
// amax), each of the three rounded once) or nvfp4 (e2m1, e4m3 scale per 16, f32 scale = amax /
// (6 * 448) per row; a group's scale is that of (amax of the group / 6) / the row's, a code that of
// x / (both scales' product), all in f32, each operation rounded once). Round to nearest even,
// saturating. A block without a scale, all zero or too small for one (fp8: amax under 2^-100), has
// scale 0 and values 0; one that holds an infinity or a NaN decodes to NaNs, and so does a whole
// nvfp4 row. Rows that are fp8 already are copied. Without rows it is launched all the same:
// gate_up's launch counts on it.

#ifndef MOXIE_KERNELS_QUANTISE_H
#define MOXIE_KERNELS_QUANTISE_H

#include "kernels/types.h"

#define FP8_LARGEST 448.0f // of e4m3
// Of fp8 to write: as many push a scale out of an L2 of 50 MB before those it shares a sector with.
#ifndef QUANTISE_MANY_BYTES
#define QUANTISE_MANY_BYTES (INT64_C(96) << 20)
#endif
#define FP8_SMALLEST 0x1p-100f // a group whose largest magnitude is less has no scale

struct quantise_args {
    const struct row_slab *slabs; // host array [slabs_count], instead of x: row r of slab s is row
                                  // s * rows_cap + r of it. NULL: x
    const void *x;                // [rows, columns] of x_format
    const int32_t *row_pair; // device [slabs_count * rows_cap, top_k]: the rows that a valid row of
                             // the slabs becomes, -1: none; NULL: by x_row
    const int32_t *x_row;    // device [rows_count]: the row that each row comes from; NULL: its own
    const int32_t *count;    // device: rows to write, up to rows_count; NULL: all
    float *row_scales; // CUDA, by row_pair: device scratch [slabs_count * rows_cap, groups of 128],
                       // 16-byte aligned, where scales are before they go to their rows, as x_row
                       // and count say; for QUANTISE_MANY_BYTES to write. NULL: each goes there at
                       // once. Otherwise x_row and count are not used by row_pair
    void *rows;        // out, of `format`: fp8 [rows, columns], nvfp4 [rows, columns / 2]
    void *scales;      // out, as row_slab.scales
    int64_t x_stride_bytes, row_stride_bytes, scale_stride_bytes;
    int64_t group_stride_bytes; // fp8: between the scales of a row; 0: 4
    int32_t x_format;
    int32_t format; // FP8_BLOCK128 or NVFP4
    int32_t slabs_count, rows_cap, top_k;
    int32_t rows_count; // of `rows`; by row_pair: places from there on are none
    int32_t columns;    // nvfp4: a multiple of 16
    int32_t rows_once;  // by row_pair: 1: a row becomes one of `rows`, of its own number, whatever
                        // number of places its scales go to
    int32_t early; // CUDA, by row_pair: 1: the next launch reads nothing that route writes before
                   // it has waited for this one
    int32_t ahead_experts, ahead_choices; // of `ahead`; and that an id may choose
    const struct weight_view *ahead; // host; CUDA, by row_pair: [ahead_experts], what multiplies
                                     // the rows in the next launch, whose first bytes may be asked
                                     // for while route works; NULL: nothing is
};

int32_t quantise_cpu(const struct quantise_args *args, void *stream);

#endif
