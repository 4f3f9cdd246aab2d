// expand on the CPU: a pair's row, its scales and its weight to where the layout wants them.

#include "kernels/expand.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/work.h"

#include <string.h>

#define GRAIN 16

static int64_t pairs_of(const struct expand_args *args)
{
    return args->expert_offset[args->experts];
}

// The last expert whose pairs begin at or before `pair`: the one that has it.
static int32_t expert_of(const struct expand_args *args, int64_t pair)
{
    int32_t low = 0, high = args->experts - 1;

    while (low < high) {
        int32_t middle = low + (high - low + 1) / 2;

        if (args->expert_offset[middle] <= pair)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

// Where a pair's row goes, -1 when its expert is full.
static int64_t expanded_row(const struct expand_args *args, int64_t pair)
{
    int32_t expert;
    int64_t row;

    if (!args->masked) return pair;
    expert = expert_of(args, pair);
    row = pair - args->expert_offset[expert];
    return row < args->rows_per_expert ? expert * (int64_t)args->rows_per_expert + row : -1;
}

static void expand_pair(const struct expand_args *args, int64_t pair)
{
    int64_t to = expanded_row(args, pair);
    int64_t flat = args->pair_row[pair];
    const struct row_slab *slab;
    struct row_view row;

    if (to < 0 || flat < 0 || flat / args->rows_cap >= args->slabs_count) return;
    slab = &args->slabs[flat / args->rows_cap];
    row = slab_row(slab, flat % args->rows_cap);
    memcpy((unsigned char *)args->rows + to * args->row_stride_bytes, row.values,
           (size_t)row_bytes(slab->format, args->hidden));
    if (args->scales != NULL && row.scales != NULL)
        memcpy((unsigned char *)args->scales + to * args->scale_stride_bytes, row.scales,
               (size_t)row_scale_bytes(slab->format, args->hidden));
    args->weights[to] = args->pair_weight[pair];
}

static void expand_body(struct work *work, unsigned char *scratch)
{
    const struct expand_args *args = work->args;
    int64_t first, end;

    (void)scratch;
    while (work_next(work, &first, &end)) {
        for (int64_t pair = first; pair < end; pair++)
            expand_pair(args, pair);
    }
}

static void write_counts(const struct expand_args *args)
{
    for (int32_t expert = 0; expert < args->experts; expert++) {
        int64_t rows = args->expert_offset[expert + 1] - (int64_t)args->expert_offset[expert];

        if (args->masked)
            args->counts[expert] = (int32_t)min64(rows, args->rows_per_expert);
        else
            args->counts[expert] = args->expert_offset[expert];
    }
    if (!args->masked) args->counts[args->experts] = (int32_t)pairs_of(args);
}

int32_t expand_cpu(const struct expand_args *args, void *stream)
{
    struct work work = {.body = expand_body, .args = args, .items = pairs_of(args), .grain = GRAIN};
    int64_t positions = args->slabs_count * (int64_t)args->rows_cap * args->top_k;

    work_run(&work, stream, pairs_of(args) * args->hidden * 2);
    for (int64_t i = 0; i < positions; i++) {
        int32_t pair = args->row_pair[i];

        args->row_index[i] =
            pair < 0 || pair >= pairs_of(args) ? -1 : (int32_t)expanded_row(args, pair);
    }
    write_counts(args);
    return 0;
}
