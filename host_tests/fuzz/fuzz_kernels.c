// What kernels read from memory that a peer or a host may write: ids, counts, maps, slots, pairs
// and numbers of any value, over buffers of exactly the bytes that the arguments give them.

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/rows.h"
#include "kernels/kernels.h"

#include "host_tests/fuzz/fuzz.h"

#include <string.h>

#define RANKS_MAX 4
#define ROWS_MAX  5

static void run_here(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t index), void *arg)
{
    (void)ctx;
    for (uint64_t i = 0; i < tasks; i++)
        task(arg, i);
}

static struct cpu_stream stream = {.parallel_for = run_here, .workers = 1};

// Sizes of one input, all small and all legal.
struct sizes {
    int32_t rows, top_k, hidden, experts, ranks;
    int32_t format; // of rows: F32, BF16 or F16
};

static struct sizes take_sizes(struct fuzz_input *input)
{
    static const int32_t widths[] = {1, 7, 16, 32, 128, 130};
    uint8_t form = fuzz_u8(input);

    return (struct sizes){.rows = 1 + form % ROWS_MAX,
                          .top_k = 1 + (form >> 3) % 3,
                          .hidden = widths[fuzz_below(input, 6)],
                          .experts = 1 + (int32_t)fuzz_below(input, 6),
                          .ranks = 1 + (form >> 6),
                          .format = FORMAT_F32 + (int32_t)fuzz_below(input, 3)};
}

static int64_t float_bytes(int32_t format)
{
    return format == FORMAT_F32 ? 4 : 2;
}

// Numbers of any bits; not all of them from the input, so that it stays short.
static void *take_numbers(struct fuzz_input *input, int64_t bytes)
{
    size_t known = bytes < 32 ? (size_t)bytes : 32;
    unsigned char *at = fuzz_place((size_t)bytes, 0);

    fuzz_bytes(input, at, known);
    for (size_t i = known; i < (size_t)bytes; i++)
        at[i] = at[i - known];
    return at;
}

// An id or index: near the valid ones, or anything.
static int32_t take_index(struct fuzz_input *input, int32_t count)
{
    uint8_t form = fuzz_u8(input);

    if (form < 192) return form % (count + 2) - 1;
    return form < 224 ? (int32_t)fuzz_i64(input) : (int32_t)fuzz_u32(input);
}

static int32_t *take_indices(struct fuzz_input *input, int64_t entries, int32_t count)
{
    int32_t *at = fuzz_place((size_t)entries * sizeof *at, 0);

    for (int64_t i = 0; i < entries; i++)
        at[i] = take_index(input, count);
    return at;
}

static void *take_ids(struct fuzz_input *input, int64_t entries, int32_t count, int32_t id_bytes)
{
    int64_t *at;

    if (id_bytes == 4) return take_indices(input, entries, count);
    at = fuzz_place((size_t)entries * sizeof *at, 0);
    for (int64_t i = 0; i < entries; i++)
        at[i] = fuzz_u8(input) < 192 ? take_index(input, count) : fuzz_i64(input);
    return at;
}

// ---- route, combine, expand --------------------------------------------------------------------

struct routed {
    struct route_args args;
    struct row_slab slabs[RANKS_MAX];
    int64_t positions;
};

static void take_routed(struct fuzz_input *input, const struct sizes *s, struct routed *routed)
{
    int32_t id_bytes = fuzz_u8(input) < 128 ? 4 : 8;
    int64_t places = (int64_t)s->rows * s->top_k;

    routed->positions = s->ranks * places;
    for (int32_t i = 0; i < s->ranks; i++)
        routed->slabs[i] = (struct row_slab){
            .rows = take_numbers(input, s->rows * s->hidden * float_bytes(s->format)),
            .ids = take_ids(input, places, s->experts, id_bytes),
            .weights = fuzz_u8(input) < 64 ? NULL : take_numbers(input, places * 4),
            .count = fuzz_u8(input) < 128 ? NULL : take_indices(input, 1, s->rows),
            .row_stride_bytes = s->hidden * float_bytes(s->format),
            .id_stride_bytes = (int64_t)s->top_k * id_bytes,
            .weight_stride_bytes = (int64_t)s->top_k * 4,
            .cap = s->rows,
            .format = s->format,
            .id_bytes = id_bytes,
            .weight_format = FORMAT_F32,
        };
    routed->args = (struct route_args){
        .slabs = routed->slabs,
        .map_count = fuzz_u8(input) & 7,
        .expert_offset = fuzz_place(((size_t)s->experts + 1) * 4, 0),
        .pair_row = fuzz_place((size_t)routed->positions * 4, 0),
        .pair_weight = fuzz_place((size_t)routed->positions * 4, 0),
        .row_pair = fuzz_place((size_t)routed->positions * 4, 0),
        .pairs_max = routed->positions,
        .expert_first = fuzz_u8(input) & 3,
        .experts = s->experts,
        .slabs_count = s->ranks,
        .rows_cap = s->rows,
        .top_k = s->top_k,
        .by = ROUTE_BY_IDS,
    };
    if (routed->args.map_count > 0)
        routed->args.expert_map = take_indices(input, routed->args.map_count, s->experts);
}

// Every pair is of one place of one row, and that place says so.
static void check_routed(const struct routed *routed)
{
    const struct route_args *args = &routed->args;
    int32_t pairs = args->expert_offset[args->experts], placed = 0;

    PROPERTY(args->expert_offset[0] == 0 && pairs >= 0 && pairs <= routed->positions);
    for (int32_t e = 0; e < args->experts; e++)
        PROPERTY(args->expert_offset[e] <= args->expert_offset[e + 1]);
    for (int64_t i = 0; i < routed->positions; i++) {
        int32_t pair = args->row_pair[i];

        if (pair == -1) continue;
        PROPERTY(pair >= 0 && pair < pairs && args->pair_row[pair] == i / args->top_k);
        placed++;
    }
    PROPERTY(placed == pairs);
}

static void take_out(struct fuzz_input *input, const struct sizes *s, struct out_slab *slabs)
{
    for (int32_t i = 0; i < s->ranks; i++) {
        int64_t bytes = s->rows * s->hidden * float_bytes(s->format);

        slabs[i] = (struct out_slab){
            .rows = fuzz_u8(input) == 0xff ? NULL : fuzz_place((size_t)bytes, 0),
            .count = fuzz_u8(input) < 128 ? NULL : take_indices(input, 1, s->rows),
            .row_stride_bytes = s->hidden * float_bytes(s->format),
            .cap = s->rows,
            .format = s->format,
        };
    }
}

static struct combine_args combine_of(struct fuzz_input *input, const struct sizes *s,
                                      int64_t pairs)
{
    return (struct combine_args){
        .pair_out = take_numbers(input, pairs * s->hidden * float_bytes(s->format)),
        .pair_stride_bytes = s->hidden * float_bytes(s->format),
        .pairs = pairs,
        .pair_format = s->format,
        .slabs_count = s->ranks,
        .rows_cap = s->rows,
        .hidden = s->hidden,
        .top_k = s->top_k,
        .scale = 2.5f,
    };
}

static void try_route(struct fuzz_input *input, const struct sizes *s)
{
    struct routed routed;
    struct out_slab out[RANKS_MAX];
    struct combine_args combine;

    take_routed(input, s, &routed);
    PROPERTY(kernels_cpu.route(&routed.args, &stream) == 0);
    check_routed(&routed);
    take_out(input, s, out);
    combine = combine_of(input, s, routed.positions);
    combine.row_pair = routed.args.row_pair;
    combine.pair_weight = routed.args.pair_weight;
    combine.slabs = out;
    // Weights of places without a pair are nobody's to read.
    for (int64_t i = routed.args.expert_offset[s->experts]; i < routed.positions; i++)
        routed.args.pair_weight[i] = 0.0f;
    PROPERTY(kernels_cpu.combine(&combine, &stream) == 0);
}

static void try_expand(struct fuzz_input *input, const struct sizes *s)
{
    struct routed routed;
    int masked = fuzz_u8(input) & 1;
    struct expand_args args;
    int64_t rows;
    int32_t per_expert;

    take_routed(input, s, &routed);
    PROPERTY(kernels_cpu.route(&routed.args, &stream) == 0);
    per_expert = masked ? 1 + (int32_t)fuzz_below(input, ROWS_MAX) : 0;
    rows = masked ? (int64_t)s->experts * per_expert : routed.positions;
    args = (struct expand_args){
        .slabs = routed.slabs,
        .expert_offset = routed.args.expert_offset,
        .pair_row = routed.args.pair_row,
        .pair_weight = routed.args.pair_weight,
        .row_pair = routed.args.row_pair,
        .rows = fuzz_place((size_t)(rows * s->hidden * float_bytes(s->format)), 0),
        .weights = fuzz_place((size_t)rows * 4, 0),
        .counts = fuzz_place(((size_t)s->experts + !masked) * 4, 0),
        .row_index = fuzz_place((size_t)routed.positions * 4, 0),
        .row_stride_bytes = s->hidden * float_bytes(s->format),
        .experts = s->experts,
        .slabs_count = s->ranks,
        .rows_cap = s->rows,
        .rows_per_expert = per_expert,
        .masked = masked,
        .hidden = s->hidden,
        .top_k = s->top_k,
    };
    PROPERTY(kernels_cpu.expand(&args, &stream) == 0);
    for (int64_t i = 0; i < routed.positions; i++)
        PROPERTY(args.row_index[i] >= -1 && args.row_index[i] < rows);
}

// Layouts by expert, whose counts are the host's or a peer's.
static void try_by_expert(struct fuzz_input *input, const struct sizes *s)
{
    int masked = fuzz_u8(input) & 1;
    int32_t rows = masked ? s->rows * s->experts : s->rows;
    int64_t pairs_max = 1 + fuzz_below(input, 12);
    struct row_slab slab = {.weights =
                                fuzz_u8(input) < 64 ? NULL : take_numbers(input, (int64_t)rows * 4),
                            .weight_stride_bytes = 4,
                            .cap = rows,
                            .weight_format = FORMAT_F32};
    struct route_args args = {
        .slabs = &slab,
        .expert_counts = take_indices(input, s->experts + !masked, rows),
        .expert_offset = fuzz_place(((size_t)s->experts + 1) * 4, 0),
        .pair_row = fuzz_place((size_t)pairs_max * 4, 0),
        .pair_weight = fuzz_place((size_t)pairs_max * 4, 0),
        .pairs_max = pairs_max,
        .experts = s->experts,
        .slabs_count = 1,
        .rows_cap = rows,
        .rows_per_expert = masked ? s->rows : 0,
        .top_k = 1,
        .by = masked ? ROUTE_BY_COUNTS : ROUTE_BY_PREFIX,
    };
    struct sizes one = *s;
    struct combine_args combine;
    struct out_slab out[RANKS_MAX];

    one.ranks = 1;
    one.top_k = 1;
    one.rows = rows;
    PROPERTY(kernels_cpu.route(&args, &stream) == 0);
    for (int32_t e = 0; e < s->experts; e++)
        PROPERTY(args.expert_offset[e] <= args.expert_offset[e + 1]);
    PROPERTY(args.expert_offset[s->experts] <= pairs_max);
    for (int32_t i = 0; i < args.expert_offset[s->experts]; i++)
        PROPERTY(args.pair_row[i] >= 0 && args.pair_row[i] < rows);
    take_out(input, &one, out);
    combine = combine_of(input, &one, pairs_max);
    combine.pair_row = args.pair_row;
    combine.pairs_count = &args.expert_offset[s->experts];
    combine.pair_weight = args.pair_weight;
    combine.slabs = out;
    if (out[0].rows != NULL) PROPERTY(kernels_cpu.combine(&combine, &stream) == 0);
}

// fold: the row_index is the host's.
static void try_fold(struct fuzz_input *input, const struct sizes *s)
{
    int64_t positions = (int64_t)s->ranks * s->rows * s->top_k;
    int64_t pairs = 1 + fuzz_below(input, 8);
    struct combine_args combine = combine_of(input, s, pairs);
    struct out_slab out[RANKS_MAX];

    take_out(input, s, out);
    combine.row_pair = take_indices(input, positions, (int32_t)pairs);
    combine.slabs = out;
    PROPERTY(kernels_cpu.combine(&combine, &stream) == 0);
}

// ---- dispatch and sum --------------------------------------------------------------------------

struct pushed {
    struct dispatch_args args;
    struct push_slab to[RANKS_MAX];
    int64_t expert_first[RANKS_MAX + 1];
};

static void take_slabs(struct fuzz_input *input, const struct sizes *s, struct pushed *pushed)
{
    struct dispatch_args *args = &pushed->args;
    size_t places = (size_t)args->rows_cap * (size_t)s->top_k;

    for (int32_t r = 0; r < s->ranks; r++) {
        struct push_slab *to = &pushed->to[r];
        uint8_t form = fuzz_u8(input);

        *to = (struct push_slab){.rows = NULL};
        if (form >= 224) continue; // not active
        to->ids = fuzz_place(places * 4, 0);
        to->weights = fuzz_place(places * 4, 0);
        to->count = fuzz_taken(input, sizeof *to->count);
        if (r == args->rank) continue;
        to->rows = fuzz_place((size_t)(args->rows_cap * args->row_stride_bytes), 0);
        if (args->scale_stride_bytes > 0)
            to->scales = fuzz_place((size_t)(args->rows_cap * args->scale_stride_bytes), 0);
    }
}

static void take_pushed(struct fuzz_input *input, struct sizes *s, struct pushed *pushed)
{
    static const int32_t wires[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16, FORMAT_FP8_BLOCK128,
                                    FORMAT_NVFP4};
    int32_t wire = wires[fuzz_below(input, 5)], id_bytes = fuzz_u8(input) < 128 ? 4 : 8;
    int64_t first = 0;

    if (wire == FORMAT_NVFP4) s->hidden = 16 + s->hidden / 16 * 16;
    pushed->args = (struct dispatch_args){
        .x = take_numbers(input, s->rows * s->hidden * float_bytes(s->format)),
        .ids = take_ids(input, (int64_t)s->rows * s->top_k, s->experts, id_bytes),
        .weights = take_numbers(input, (int64_t)s->rows * s->top_k * 4),
        .tokens_valid = fuzz_u8(input) < 128 ? NULL : take_indices(input, 1, s->rows),
        .token_first = fuzz_u8(input) & 3,
        .to = pushed->to,
        .expert_first = pushed->expert_first,
        .send_slot = fuzz_place((size_t)s->rows * (size_t)s->ranks * 4, 0),
        .x_stride_bytes = s->hidden * float_bytes(s->format),
        .id_stride_bytes = (int64_t)s->top_k * id_bytes,
        .weight_stride_bytes = (int64_t)s->top_k * 4,
        .row_stride_bytes = row_bytes(wire, s->hidden),
        .scale_stride_bytes = (row_scale_bytes(wire, s->hidden) + 15) & ~(int64_t)15,
        .map_count = fuzz_u8(input) & 7,
        .x_format = s->format,
        .wire_format = wire,
        .id_bytes = id_bytes,
        .weight_format = FORMAT_F32,
        .tokens = s->rows,
        .hidden = s->hidden,
        .top_k = s->top_k,
        .rows_cap = s->rows + (int32_t)fuzz_below(input, 2),
        .ranks = s->ranks,
        .rank = (int32_t)fuzz_below(input, (uint32_t)s->ranks),
        .everywhere = fuzz_u8(input) & 1,
        .pad_rows = (int32_t)fuzz_below(input, ROWS_MAX + 2),
    };
    for (int32_t r = 0; r <= s->ranks; r++) {
        pushed->expert_first[r] = first;
        first += fuzz_below(input, 4);
    }
    if (pushed->args.map_count > 0)
        pushed->args.expert_map = take_indices(input, pushed->args.map_count, s->experts);
    take_slabs(input, s, pushed);
}

// A destination gets each token once, in order, with ids that are someone's or nobody's.
static void check_pushed(const struct sizes *s, const struct pushed *pushed)
{
    const struct dispatch_args *args = &pushed->args;

    for (int32_t r = 0; r < s->ranks; r++) {
        const struct push_slab *to = &pushed->to[r];
        int32_t next = 0;

        for (int32_t t = 0; t < s->rows; t++) {
            int32_t slot = args->send_slot[t * s->ranks + r];

            PROPERTY(slot == -1 || (slot == next && to->rows != NULL && r != args->rank));
            next += slot >= 0;
        }
        if (to->rows == NULL || r == args->rank) continue;
        PROPERTY(to->count->rows >= next && to->count->rows <= args->rows_cap);
        for (int32_t i = 0; i < to->count->rows * s->top_k; i++)
            PROPERTY(to->ids[i] >= -1 && to->ids[i] < pushed->expert_first[s->ranks]);
    }
}

static void try_dispatch(struct fuzz_input *input, const struct sizes *sizes)
{
    struct sizes s = *sizes;
    struct pushed pushed;

    take_pushed(input, &s, &pushed);
    PROPERTY(kernels_cpu.dispatch(&pushed.args, &stream) == 0);
    check_pushed(&s, &pushed);
}

static void try_sum(struct fuzz_input *input, const struct sizes *s)
{
    int64_t bytes = s->rows * s->hidden * float_bytes(s->format);
    const void *parts[RANKS_MAX];
    struct sum_args args = {
        .y = take_numbers(input, bytes),
        .y_stride_bytes = s->hidden * float_bytes(s->format),
        .parts = parts,
        .part_stride_bytes = s->hidden * float_bytes(s->format),
        .send_slot = take_indices(input, (int64_t)s->rows * s->ranks, s->rows),
        .active = fuzz_u8(input),
        .format = s->format,
        .tokens = s->rows,
        .hidden = s->hidden,
        .ranks = s->ranks,
        .rank = (int32_t)fuzz_below(input, (uint32_t)s->ranks),
        .rows_cap = s->rows,
    };

    for (int32_t r = 0; r < s->ranks; r++)
        parts[r] = fuzz_u8(input) >= 224 ? NULL : take_numbers(input, bytes);
    PROPERTY(kernels_cpu.sum(&args, &stream) == 0);
}

// Numbers of any bits, onto the wire.
static void try_quantise(struct fuzz_input *input, const struct sizes *s)
{
    int32_t format = fuzz_u8(input) < 128 ? FORMAT_FP8_BLOCK128 : FORMAT_NVFP4;
    int32_t columns = format == FORMAT_NVFP4 ? 16 + s->hidden / 16 * 16 : s->hidden;
    struct quantise_args args = {
        .x = take_numbers(input, s->rows * columns * float_bytes(s->format)),
        .x_stride_bytes = columns * float_bytes(s->format),
        .row_stride_bytes = row_bytes(format, columns),
        .scale_stride_bytes = (row_scale_bytes(format, columns) + 15) & ~(int64_t)15,
        .x_format = s->format,
        .format = format,
        .rows_count = s->rows,
        .columns = columns,
    };

    args.rows = fuzz_place((size_t)(s->rows * args.row_stride_bytes), 0);
    args.scales = fuzz_place((size_t)(s->rows * args.scale_stride_bytes), 0);
    PROPERTY(kernels_cpu.quantise(&args, &stream) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const attempts[])(struct fuzz_input *, const struct sizes *) = {
        try_route, try_expand, try_by_expert, try_fold, try_dispatch, try_sum, try_quantise};
    struct fuzz_input input = {data, size};
    uint8_t which = fuzz_u8(&input);
    struct sizes sizes = take_sizes(&input);

    fuzz_reset();
    attempts[which % (sizeof attempts / sizeof attempts[0])](&input, &sizes);
    return 0;
}
