// quantise on the CPU: a row at a time, see rows.h.

#include "kernels/quantise.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#define GRAIN 8

static void quantise_row(const struct quantise_args *args, int64_t row)
{
    int64_t x_row = args->x_row != NULL ? args->x_row[row] : row;
    struct row_view from = {
        .values = (const unsigned char *)args->x + x_row * args->x_stride_bytes,
        .format = args->x_format,
    };
    unsigned char *values = (unsigned char *)args->rows + row * args->row_stride_bytes;
    unsigned char *scales = (unsigned char *)args->scales + row * args->scale_stride_bytes;
    float global = 0.0f;
    float piece[ROW_PIECE];

    if (args->format == FORMAT_NVFP4) global = nvfp4_global(row_largest(&from, args->columns));
    row_begin(args->format, global, scales);
    for (int64_t first = 0; first < args->columns; first += ROW_PIECE) {
        struct row_out to = row_piece(args->format, values, scales, first);
        int64_t count = min64(args->columns - first, ROW_PIECE);

        row_decode(&from, first, count, piece);
        row_encode(args->format, piece, count, global, &to);
    }
}

static void quantise_body(struct work *work, unsigned char *scratch)
{
    const struct quantise_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t row = first; row < end; row++)
            quantise_row(args, row);
    }
}

static void quantise_rows(const struct quantise_args *args, void *stream)
{
    struct work work = {.body = quantise_body,
                        .args = args,
                        .items = count_read(args->count, args->rows_count),
                        .grain = GRAIN};

    work_run(&work, stream, work.items * args->columns * 4);
}

static void quantise_slab(const struct quantise_args *args, int32_t index, void *stream)
{
    const struct row_slab *slab = &args->slabs[index];
    int64_t first = (int64_t)index * args->rows_cap;
    struct quantise_args of_slab = *args;

    if (slab->format == args->format) return;
    of_slab.x = slab->rows;
    of_slab.x_row = NULL;
    of_slab.rows = (unsigned char *)args->rows + first * args->row_stride_bytes;
    of_slab.scales = (unsigned char *)args->scales + first * args->scale_stride_bytes;
    of_slab.count = slab->count;
    of_slab.x_stride_bytes = slab->row_stride_bytes;
    of_slab.x_format = slab->format;
    of_slab.rows_count = slab->cap;
    quantise_rows(&of_slab, stream);
}

int32_t quantise_cpu(const struct quantise_args *args, void *stream)
{
    if (args->slabs == NULL) quantise_rows(args, stream);
    for (int32_t i = 0; args->slabs != NULL && i < args->slabs_count; i++)
        quantise_slab(args, i, stream);
    return 0;
}
