// quantise on the CPU: a row at a time, see rows.h.

#include "kernels/quantise.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#include <string.h>

#define GRAIN     8
#define FP8_GROUP 128

// A piece's scales, which row_encode writes one after the other.
static void spread_scales(const struct quantise_args *args, const float *from, int64_t first,
                          int64_t count, unsigned char *scales)
{
    scales += first / FP8_GROUP * args->group_stride_bytes;
    for (int64_t i = 0; i * FP8_GROUP < count; i++)
        memcpy(scales + i * args->group_stride_bytes, &from[i], sizeof *from);
}

static void copy_row(const struct quantise_args *args, const struct row_view *from, int64_t row)
{
    int64_t from_stride = from->group_stride_bytes != 0 ? from->group_stride_bytes : 4;
    int64_t stride = args->group_stride_bytes != 0 ? args->group_stride_bytes : 4;
    unsigned char *scales = (unsigned char *)args->scales + row * args->scale_stride_bytes;

    memcpy((unsigned char *)args->rows + row * args->row_stride_bytes, from->values,
           (size_t)args->columns);
    for (int64_t i = 0; i * FP8_GROUP < args->columns; i++)
        memcpy(scales + i * stride, (const unsigned char *)from->scales + i * from_stride, 4);
}

static void quantise_row(const struct quantise_args *args, const struct row_view *from, int64_t row)
{
    unsigned char *values = (unsigned char *)args->rows + row * args->row_stride_bytes;
    unsigned char *scales = (unsigned char *)args->scales + row * args->scale_stride_bytes;
    float global = 0.0f;
    float piece[ROW_PIECE], held[ROW_PIECE / FP8_GROUP];
    int by_group = args->format == FORMAT_FP8_BLOCK128 && args->group_stride_bytes != 0;

    if (from->format == FORMAT_FP8_BLOCK128 && args->format == FORMAT_FP8_BLOCK128) {
        copy_row(args, from, row);
        return;
    }
    if (args->format == FORMAT_NVFP4) global = nvfp4_global(row_largest(from, args->columns));
    row_begin(args->format, global, scales);
    for (int64_t first = 0; first < args->columns; first += ROW_PIECE) {
        struct row_out to = row_piece(args->format, values, scales, first);
        int64_t count = min64(args->columns - first, ROW_PIECE);

        if (by_group) to.scales = held;
        row_decode(from, first, count, piece);
        row_encode(args->format, piece, count, global, &to);
        if (by_group) spread_scales(args, held, first, count, scales);
    }
}

// Row `flat` of what is quantised.
static struct row_view source_row(const struct quantise_args *args, int64_t flat)
{
    if (args->slabs != NULL)
        return slab_row(&args->slabs[flat / args->rows_cap], flat % args->rows_cap);
    return (struct row_view){
        .values = (const unsigned char *)args->x + flat * args->x_stride_bytes,
        .format = args->x_format,
    };
}

// A row of the slabs, to each of its places; none where it is not valid.
static void scatter_row(const struct quantise_args *args, int64_t flat)
{
    const struct row_slab *slab = &args->slabs[flat / args->rows_cap];
    struct row_view from = source_row(args, flat);

    if (flat % args->rows_cap >= count_read(slab->count, slab->cap)) return;
    for (int32_t k = 0; k < args->top_k; k++) {
        int32_t row = args->row_pair[flat * args->top_k + k];

        if (row >= 0) quantise_row(args, &from, row);
    }
}

static void quantise_body(struct work *work, unsigned char *scratch)
{
    const struct quantise_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t row = first; row < end; row++) {
            struct row_view from;

            if (args->row_pair != NULL) {
                scatter_row(args, row);
                continue;
            }
            from = source_row(args, args->x_row != NULL ? args->x_row[row] : row);
            quantise_row(args, &from, row);
        }
    }
}

int32_t quantise_cpu(const struct quantise_args *args, void *stream)
{
    struct work work = {.body = quantise_body, .args = args, .grain = GRAIN};

    work.items = args->row_pair != NULL ? (int64_t)args->slabs_count * args->rows_cap
                                        : count_read(args->count, args->rows_count);
    work_run(&work, stream, work.items * args->columns * 4);
    return 0;
}
