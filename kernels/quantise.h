// quantise: rows to fp8 (e4m3, f32 scale = amax / 448 per 1 x 128) or nvfp4 (e2m1, e4m3 scale per
// 16, f32 scale = amax / (6 * 448) per row). Round to nearest even, saturating. A block without a
// scale, all zero or too small for one, has scale 0 and values 0; one that holds an infinity or a
// NaN decodes to NaNs, and so does a whole nvfp4 row.

#ifndef MOXIE_KERNELS_QUANTISE_H
#define MOXIE_KERNELS_QUANTISE_H

#include "kernels/types.h"

struct quantise_args {
    const struct row_slab *slabs; // host array [slabs_count], instead of x, x_row and count: row r
                                  // of slab s becomes row s * rows_cap + r; slabs of `format`
                                  // already are left out. NULL: x
    const int32_t *x_row; // device [rows_count]: the row of x that each row comes from; NULL: its
                          // own
    const void *x;        // [rows, columns] of x_format
    void *rows;           // out, of `format`: fp8 [rows, columns], nvfp4 [rows, columns / 2]
    void *scales;         // out, as row_slab.scales
    const int32_t *count; // device: rows to write, up to rows_count; NULL: all
    int64_t x_stride_bytes, row_stride_bytes, scale_stride_bytes;
    int32_t x_format;
    int32_t format; // FP8_BLOCK128 or NVFP4
    int32_t slabs_count, rows_cap;
    int32_t rows_count; // without slabs
    int32_t columns;    // nvfp4: a multiple of 16
};

int32_t quantise_cpu(const struct quantise_args *args, void *stream);

#endif
