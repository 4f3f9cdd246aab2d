// quantise on the CPU: a row at a time, see rows.h.

#include "kernels/quantise.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#include <string.h>

#define GRAIN 8

// Which of `rows` and of `scales` a row becomes; scales -1: none.
struct place {
    int64_t row, scales;
};

// The scales of `columns` numbers of a row, which lie `from_stride` bytes apart, from column
// `first` of `row` on.
static void put_scales(const struct quantise_args *args, const void *from, int64_t from_stride,
                       int64_t row, int64_t first, int64_t columns)
{
    int64_t stride = group_stride(args->group_stride_bytes);
    unsigned char *to = args->scales;

    if (row < 0) return;
    to += row * args->scale_stride_bytes + first / FP8_GROUP * stride;
    for (int64_t i = 0; i * FP8_GROUP < columns; i++)
        memcpy(to + i * stride, (const unsigned char *)from + i * from_stride, sizeof(float));
}

static void copy_row(const struct quantise_args *args, const struct row_view *from, struct place to)
{
    memcpy((unsigned char *)args->rows + to.row * args->row_stride_bytes, from->values,
           (size_t)args->columns);
    put_scales(args, from->scales, group_stride(from->group_stride_bytes), to.scales, 0,
               args->columns);
}

static void quantise_row(const struct quantise_args *args, const struct row_view *from,
                         struct place place)
{
    unsigned char *values = (unsigned char *)args->rows + place.row * args->row_stride_bytes;
    unsigned char *scales = (unsigned char *)args->scales + place.row * args->scale_stride_bytes;
    float global = 0.0f;
    float piece[ROW_PIECE], held[ROW_PIECE / FP8_GROUP];
    int is_fp8 = args->format == FORMAT_FP8_BLOCK128;

    if (is_fp8 && from->format == FORMAT_FP8_BLOCK128) {
        copy_row(args, from, place);
        return;
    }
    if (args->format == FORMAT_NVFP4) global = nvfp4_global(row_largest(from, args->columns));
    row_begin(args->format, global, scales);
    for (int64_t first = 0; first < args->columns; first += ROW_PIECE) {
        struct row_out to = row_piece(args->format, values, scales, first);
        int64_t count = min64(args->columns - first, ROW_PIECE);

        if (is_fp8) to.scales = held;
        row_decode(from, first, count, piece);
        row_encode(args->format, piece, count, global, &to);
        if (is_fp8) put_scales(args, held, sizeof *held, place.scales, first, count);
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
    if (args->rows_once) quantise_row(args, &from, (struct place){flat, -1});
    for (int32_t k = 0; k < args->top_k; k++) {
        int32_t row = args->row_pair[flat * args->top_k + k];

        if (row >= 0 && row < args->rows_count)
            quantise_row(args, &from, (struct place){args->rows_once ? flat : row, row});
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
            quantise_row(args, &from, (struct place){row, row});
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
