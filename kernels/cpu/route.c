// route on the CPU: one pass in order of the rows says each position's expert, a prefix sum gives
// the experts their pairs, a second pass over what the first wrote fills them. Ids are read in the
// first pass alone.

#include "kernels/route.h"

#include "kernels/cpu/ids.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/gemm.h"

#include <string.h>

// Rows of a slab that may have an expert.
static int64_t rows_valid(const struct route_args *args, int32_t slab)
{
    return min64(count_read(args->slabs[slab].count, args->slabs[slab].cap), args->rows_cap);
}

static void place(const struct route_args *args, int64_t position, int64_t expert)
{
    args->row_pair[position] = (int32_t)expert;
    if (expert >= 0) args->expert_offset[expert + 1]++;
}

static void place_by_ids(const struct route_args *args)
{
    for (int32_t s = 0; s < args->slabs_count; s++) {
        const struct row_slab *slab = &args->slabs[s];
        int64_t rows = rows_valid(args, s);

        for (int64_t row = 0; row < rows; row++) {
            const unsigned char *ids =
                (const unsigned char *)slab->ids + row * slab->id_stride_bytes;

            for (int32_t t = 0; t < args->top_k; t++) {
                int64_t id = id_read(ids, t, slab->id_bytes);

                place(args, (s * (int64_t)args->rows_cap + row) * args->top_k + t,
                      id_mapped(args->expert_map, args->map_count, id, args->expert_first,
                                args->experts));
            }
        }
    }
}

static void prefix_sum(const struct route_args *args, int64_t pairs_max)
{
    int32_t *offset = args->expert_offset;
    int64_t sum = 0;

    for (int32_t expert = 0; expert < args->experts; expert++) {
        int64_t count = offset[expert + 1];

        offset[expert] = (int32_t)sum;
        sum = min64(sum + count, pairs_max);
    }
    offset[args->experts] = (int32_t)sum;
}

// Moves expert_offset[e] from the first pair of expert e to its last; shift_back undoes that.
static void fill(const struct route_args *args, int64_t pairs_max)
{
    for (int32_t s = 0; s < args->slabs_count; s++) {
        const struct row_slab *slab = &args->slabs[s];
        const unsigned char *weights = slab->weights;

        for (int64_t i = 0; i < (int64_t)args->rows_cap * args->top_k; i++) {
            int64_t row = i / args->top_k;
            int64_t flat = s * (int64_t)args->rows_cap + row;
            int32_t *position = &args->row_pair[s * (int64_t)args->rows_cap * args->top_k + i];
            int32_t *next;

            if (*position < 0) continue;
            next = &args->expert_offset[*position];
            *position = -1;
            if (*next >= pairs_max) continue;
            args->pair_row[*next] = (int32_t)flat;
            args->pair_weight[*next] = 1.0f;
            if (weights != NULL)
                args->pair_weight[*next] =
                    number_load(slab->weight_format, weights + row * slab->weight_stride_bytes,
                                i % args->top_k);
            *position = (*next)++;
        }
    }
}

static void shift_back(const struct route_args *args)
{
    for (int32_t expert = args->experts; expert > 0; expert--)
        args->expert_offset[expert] = args->expert_offset[expert - 1];
    args->expert_offset[0] = 0;
}

static void route_by_ids(const struct route_args *args, int64_t pairs_max)
{
    int64_t positions = args->slabs_count * (int64_t)args->rows_cap * args->top_k;

    memset(args->expert_offset, 0, ((size_t)args->experts + 1) * sizeof *args->expert_offset);
    memset(args->row_pair, 0xff, (size_t)positions * sizeof *args->row_pair);
    place_by_ids(args);
    prefix_sum(args, pairs_max);
    fill(args, pairs_max);
    shift_back(args);
    if (!gemms_can_count(args->slabs, args->slabs_count, args->rows_cap, args->top_k)) return;
    for (int64_t pair = args->expert_offset[args->experts]; pair < min64(positions, pairs_max);
         pair++)
        args->pair_row[pair] = 0;
}

// Rows [*first, *last) of the one slab belong to `expert`, when the counts are what they should be.
static void expert_rows(const struct route_args *args, int32_t expert, int64_t *first,
                        int64_t *last)
{
    const int32_t *counts = args->expert_counts + expert;

    if (args->by == ROUTE_BY_PREFIX) {
        *first = id_read(counts, 0, sizeof *counts);
        *last = id_read(counts, 1, sizeof *counts);
    } else {
        *first = expert * (int64_t)args->rows_per_expert;
        *last = *first + count_read(counts, args->rows_per_expert);
    }
    *last = min64(*last, rows_valid(args, 0));
}

// The rows are in order of their experts already, one pair a row.
static void route_by_expert(const struct route_args *args, int64_t pairs_max)
{
    const struct row_slab *slab = &args->slabs[0];
    const unsigned char *weights = slab->weights;
    int64_t next = 0;
    int32_t pairs = 0;

    args->expert_offset[0] = 0;
    for (int32_t expert = 0; expert < args->experts; expert++) {
        int64_t first, last;

        expert_rows(args, expert, &first, &last);
        // Prefix sums that fall back would give a row two experts.
        if (first > next) next = first;
        for (int64_t row = next; row < last && pairs < pairs_max; row++) {
            args->pair_row[pairs] = (int32_t)row;
            args->pair_weight[pairs] =
                weights == NULL ? 1.0f
                                : number_load(slab->weight_format,
                                              weights + row * slab->weight_stride_bytes, 0);
            pairs++;
            next = row + 1;
        }
        args->expert_offset[expert + 1] = pairs;
    }
}

static void clear_progress(const struct route_args *args)
{
    uint32_t launch;

    if (args->progress == NULL) return;
    launch = args->progress[GEMM_PROGRESS_LAUNCH] + 2;
    memset(args->progress, 0,
           (GEMM_PROGRESS_WORDS + (size_t)args->experts) * sizeof *args->progress);
    args->progress[GEMM_PROGRESS_LAUNCH] = launch;
}

int32_t route_cpu(const struct route_args *args, void *stream)
{
    int64_t pairs_max = min64(args->pairs_max, INT32_MAX);

    (void)stream;
    clear_progress(args);
    if (args->by == ROUTE_BY_IDS)
        route_by_ids(args, pairs_max);
    else
        route_by_expert(args, pairs_max);
    return 0;
}
