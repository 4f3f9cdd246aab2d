// Rows of activations: as they arrive, as they go on the wire, and as a product multiplies them.

#ifndef MOXIE_KERNELS_CPU_ROWS_H
#define MOXIE_KERNELS_CPU_ROWS_H

#include "kernels/types.h"

// Columns are worked on in pieces that begin at multiples of this: whole groups of every format.
#define ROW_PIECE 512

// Numbers that share a scale in fp8.
#define FP8_GROUP 128

// Bytes of a row of F32, BF16, F16, FP8_BLOCK128 or NVFP4, and of its scales (0 where there are
// none).
int64_t row_bytes(int32_t format, int64_t columns);
int64_t row_scale_bytes(int32_t format, int64_t columns);

// A count that a peer may be writing: read once, 0..cap; NULL is cap.
int32_t count_read(const int32_t *count, int32_t cap);

// A flag that others may be writing: read once; NULL is never.
int has_failed(const uint32_t *failed);

// One row in any of those formats.
struct row_view {
    const void *values;
    const void *scales;
    int64_t group_stride_bytes; // fp8; 0: 4
    int32_t format;
};

// Bytes between the scales of a row, where 0 stands for 4.
int64_t group_stride(int64_t stride_bytes);

struct row_view slab_row(const struct row_slab *slab, int64_t row);

// Columns first..first + count of a row as f32, exactly; first is a multiple of ROW_PIECE.
void row_decode(const struct row_view *row, int64_t first, int64_t count, float *to);

// The largest magnitude; a NaN wins.
float largest(const float *values, int64_t count, float before);
float row_largest(const struct row_view *row, int64_t columns);

// nvfp4's f32 scale of a row whose largest magnitude this is.
float nvfp4_global(float magnitude);

// Where a piece of an encoded row goes: its values, and its scales where there are any.
struct row_out {
    void *values;
    void *scales;
};

// Bytes of the scales of a piece: nvfp4's f32 comes once, before them.
int64_t piece_scale_bytes(int32_t format, int64_t columns);

// The place of the columns from `first`, a multiple of ROW_PIECE, in a row and its scales.
struct row_out row_piece(int32_t format, void *values, void *scales, int64_t first);

// Writes what comes before the scales of a row: nvfp4's f32.
void row_begin(int32_t format, float global, void *scales);

// Encodes at most ROW_PIECE columns. `global` is nvfp4's.
void row_encode(int32_t format, const float *from, int64_t count, float global,
                const struct row_out *to);

// What a product multiplies: rounds in place to F32, BF16, F16, FP8 (1 x 128) or NVFP4, at most
// ROW_PIECE columns.
void operand_round(int32_t format, float *values, int64_t count, float global);

#endif
