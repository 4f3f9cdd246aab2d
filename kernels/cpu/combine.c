// combine and sum on the CPU: a row at a time, in pieces of columns, in fp32 and in a fixed order.

#include "kernels/combine.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#include <string.h>

// Rows that a worker takes at a time.
#define GRAIN 16

// ---- combine

static void combine_piece(const struct combine_args *args, const int32_t *pairs, int64_t first,
                          int64_t count, float *sum)
{
    float piece[ROW_PIECE];

    memset(sum, 0, (size_t)count * sizeof *sum);
    for (int32_t t = 0; t < args->top_k; t++) {
        int32_t pair = pairs[t];
        struct row_view row = {.format = args->pair_format};
        float weight;

        if (pair < 0 || pair >= args->pairs) continue;
        row.values = (const unsigned char *)args->pair_out + pair * args->pair_stride_bytes;
        weight = args->pair_weight == NULL ? 1.0f : args->pair_weight[pair];
        row_decode(&row, first, count, piece);
        for (int64_t i = 0; i < count; i++)
            sum[i] += weight * piece[i];
    }
    for (int64_t i = 0; i < count; i++)
        sum[i] *= args->scale;
}

static void combine_row(const struct combine_args *args, int64_t flat)
{
    const struct out_slab *slab = &args->slabs[flat / args->rows_cap];
    int64_t row = flat % args->rows_cap;
    unsigned char *values;
    float sum[ROW_PIECE];

    if (slab->rows == NULL || row >= count_read(slab->count, slab->cap)) return;
    if (args->placed && args->row_pair[flat] >= 0 && args->row_pair[flat] < args->pairs) return;
    values = (unsigned char *)slab->rows + row * slab->row_stride_bytes;
    for (int64_t first = 0; first < args->hidden; first += ROW_PIECE) {
        int64_t count = min64(args->hidden - first, ROW_PIECE);

        combine_piece(args, args->row_pair + flat * args->top_k, first, count, sum);
        numbers_encode(slab->format, sum, count, values + first * number_bytes(slab->format));
    }
}

// The layouts by expert: every pair is a row of its own in the one slab.
static void combine_pair(const struct combine_args *args, int32_t pair)
{
    const struct out_slab *slab = &args->slabs[0];
    int32_t row = args->pair_row[pair];
    unsigned char *values;
    float sum[ROW_PIECE];

    if (slab->rows == NULL || row < 0 || row >= slab->cap) return;
    values = (unsigned char *)slab->rows + row * slab->row_stride_bytes;
    for (int64_t first = 0; first < args->hidden; first += ROW_PIECE) {
        int64_t count = min64(args->hidden - first, ROW_PIECE);

        combine_piece(args, &pair, first, count, sum);
        numbers_encode(slab->format, sum, count, values + first * number_bytes(slab->format));
    }
}

static void combine_body(struct work *work, unsigned char *scratch)
{
    const struct combine_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t i = first; i < end; i++) {
            if (args->row_pair == NULL)
                combine_pair(args, (int32_t)i);
            else
                combine_row(args, i);
        }
    }
}

int32_t combine_cpu(const struct combine_args *args, void *stream)
{
    struct work work = {.body = combine_body, .args = args, .grain = GRAIN};
    int64_t rows = 0;

    for (int32_t i = 0; i < args->slabs_count; i++)
        rows += count_read(args->slabs[i].count, args->slabs[i].cap);
    work.items = args->slabs_count * (int64_t)args->rows_cap;
    if (args->row_pair == NULL) work.items = rows = min64(*args->pairs_count, args->pairs);
    work_run(&work, stream, rows * args->top_k * args->hidden * 4);
    return 0;
}

// ---- sum

// The row of rank `rank` for this token, or NULL.
static const void *sum_part(const struct sum_args *args, int64_t token, int32_t rank)
{
    int32_t slot;

    if ((args->active >> rank & 1u) == 0) return NULL;
    if (rank == args->rank) return (unsigned char *)args->y + token * args->y_stride_bytes;
    slot = args->send_slot[token * args->ranks + rank];
    if (args->parts[rank] == NULL || slot < 0 || slot >= args->rows_cap) return NULL;
    return (const unsigned char *)args->parts[rank] + slot * args->part_stride_bytes;
}

static void sum_row(const struct sum_args *args, int64_t token)
{
    unsigned char *values = (unsigned char *)args->y + token * args->y_stride_bytes;
    float sum[ROW_PIECE], piece[ROW_PIECE];

    for (int64_t first = 0; first < args->hidden; first += ROW_PIECE) {
        int64_t count = min64(args->hidden - first, ROW_PIECE);

        memset(sum, 0, sizeof sum);
        for (int32_t rank = 0; rank < args->ranks; rank++) {
            struct row_view row = {.values = sum_part(args, token, rank), .format = args->format};

            if (row.values == NULL) continue;
            row_decode(&row, first, count, piece);
            for (int64_t i = 0; i < count; i++)
                sum[i] += piece[i];
        }
        numbers_encode(args->format, sum, count, values + first * number_bytes(args->format));
    }
}

static void sum_body(struct work *work, unsigned char *scratch)
{
    const struct sum_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t token = first; token < end; token++)
            sum_row(args, token);
    }
}

static void zero_earlier(const struct sum_args *args)
{
    unsigned char *rows = args->y_earlier;

    for (int64_t token = 0; token < args->tokens_earlier; token++)
        memset(rows + token * args->y_stride_bytes, 0,
               (size_t)(args->hidden * number_bytes(args->format)));
}

int32_t sum_cpu(const struct sum_args *args, void *stream)
{
    struct sum_args seen = *args;
    struct work work = {.body = sum_body, .args = &seen, .items = args->tokens, .grain = GRAIN};

    if (args->active_now != NULL) seen.active = *args->active_now;
    if (has_failed(args->failed)) {
        seen.active = 0;
        zero_earlier(args);
    }
    work_run(&work, stream, (int64_t)args->tokens * args->hidden * 4 * args->ranks);
    return 0;
}
