// gate_up and down on the CPU: c[pair, unit] = a[pair, :] . w[unit, :], both rows of f32 along k.
//
// A tile is up to 128 pairs of one expert by 48 units, of gate and up both, so that the activation
// runs on what is still in cache. Nothing is packed: the weights are decoded along k, or read where
// they lie, 512 inputs at a time. Every output is the sum of its pieces in ascending order, each
// piece summed by cpu_ops.dot, so neither the tile nor the worker changes its bits. Few rows read
// each weight row from end to end, as the memory likes it; many rows keep a piece of all units in
// cache.

#include "kernels/gemm.h"

#include "kernels/cpu/activation.h"
#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/cpu/weights.h"
#include "kernels/cpu/work.h"

#include <string.h>

#define TILE_ROWS    128
#define TILE_UNITS   PANEL_COLUMNS
#define A_FLOATS     (TILE_ROWS * PANEL_K)
#define STREAM_ROWS  16 // at most this many rows: weight rows are read end to end
#define STREAM_UNITS 12 // this many at a time

_Static_assert(PANEL_K == ROW_PIECE, "a piece of a row meets a panel");

struct scratch {
    float a[A_FLOATS];
    float w[PANEL_COLUMNS * PANEL_K];
    float c[TILE_ROWS * 2 * TILE_UNITS]; // [row, half, unit]
    float global[TILE_ROWS];             // nvfp4 operands: scale of each row
    float factor[2][TILE_UNITS];
    float bias[2][TILE_UNITS];
};

_Static_assert(sizeof(struct scratch) <= CPU_SCRATCH_BYTES, "scratch holds a tile");

// One of the two products.
struct gemm {
    // Columns k..k + count of a pair's input row, before operand_round, and the format for that.
    int32_t (*fetch)(const struct gemm *gemm, int64_t pair, int64_t k, int64_t count, float *to);
    // One row of sums, [halves, TILE_UNITS], finished and stored.
    void (*store)(const struct gemm *gemm, int64_t pair, int64_t unit, int64_t units, float *row);
    const struct cpu_ops *ops;
    const struct weight_view *view;
    const int32_t *expert_offset;
    const struct gate_up_args *gate_up; // one of the two
    const struct down_args *down;
    const float *pair_weight; // multiplies the sums before the bias, or NULL
    const unsigned char *a;   // rows by pair that can be multiplied where they lie, or NULL
    int64_t a_stride_bytes;
    int64_t experts, units, k;
    struct weight_half half[2];
    int32_t halves;
    int32_t operand;
};

struct tile {
    const struct gemm *gemm;
    struct scratch *scratch;
    int64_t expert;
    int64_t pair, rows;
    int64_t unit, units;
    const float *a;   // [rows, ..] from column a_first on
    int64_t a_stride; // elements
    int64_t a_first;
};

// ---- Input rows

// Rows that arrive as the product wants them are not rounded again, whatever their neighbours are.
static int32_t row_operand(const struct gemm *gemm, int32_t format)
{
    int same =
        format == gemm->operand || (format == FORMAT_FP8_BLOCK128 && gemm->operand == FORMAT_FP8);

    return same ? FORMAT_F32 : gemm->operand;
}

static int32_t fetch_row(const struct gemm *gemm, int64_t pair, int64_t k, int64_t count, float *to)
{
    const struct gate_up_args *args = gemm->gate_up;
    int64_t flat = args->pair_row != NULL ? args->pair_row[pair] : pair;
    const struct row_slab *slab;
    struct row_view row;

    if (flat < 0 || flat / args->rows_cap >= args->slabs_count) {
        memset(to, 0, (size_t)count * sizeof *to);
        return FORMAT_F32;
    }
    slab = &args->slabs[flat / args->rows_cap];
    row = slab_row(slab, flat % args->rows_cap);
    if (row.format == FORMAT_BF16)
        gemm->ops->from_bf16((const unsigned char *)row.values + 2 * k, count, to);
    else if (row.format == FORMAT_F16)
        gemm->ops->from_f16((const unsigned char *)row.values + 2 * k, count, to);
    else
        row_decode(&row, k, count, to);
    return row_operand(gemm, row.format);
}

static int32_t fetch_mid(const struct gemm *gemm, int64_t pair, int64_t k, int64_t count, float *to)
{
    const struct down_args *args = gemm->down;
    struct row_view row = {
        .values = (const unsigned char *)args->mid + pair * args->mid_stride_bytes,
        .group_stride_bytes = args->mid_group_stride_bytes,
        .format = args->mid_format,
    };

    if (args->mid_scales != NULL)
        row.scales = (const unsigned char *)args->mid_scales + pair * args->mid_scale_stride_bytes;
    row_decode(&row, k, count, to);
    return gemm->operand;
}

// The scale of a whole row that is rounded to nvfp4, before its first piece is.
static float row_global(const struct tile *tile, int64_t row)
{
    const struct gemm *gemm = tile->gemm;
    float magnitude = 0.0f;
    float piece[PANEL_K];

    for (int64_t k = 0; k < gemm->k; k += PANEL_K) {
        int64_t count = min64(gemm->k - k, PANEL_K);

        if (gemm->fetch(gemm, tile->pair + row, k, count, piece) != FORMAT_NVFP4) return 0.0f;
        magnitude = largest(piece, count, magnitude);
    }
    return nvfp4_global(magnitude);
}

static void gather(const struct tile *tile, int64_t k, float *to, int64_t stride)
{
    const struct gemm *gemm = tile->gemm;
    int64_t count = min64(gemm->k - k, PANEL_K);

    for (int64_t row = 0; row < tile->rows; row++) {
        int32_t format = gemm->fetch(gemm, tile->pair + row, k, count, to + row * stride);

        operand_round(format, to + row * stride, count, tile->scratch->global[row]);
    }
}

// ---- A tile

static void multiply(const struct tile *tile, int32_t half, int64_t unit, int64_t units, int64_t k)
{
    const struct gemm *gemm = tile->gemm;
    struct panel panel = {
        .view = gemm->view,
        .half = gemm->half[half],
        .expert = tile->expert,
        .unit = tile->unit + unit,
        .units = units,
        .k = k,
        .k_count = min64(gemm->k - k, PANEL_K),
    };
    struct dot_args dot = {
        .a = tile->a + (k - tile->a_first),
        .c = tile->scratch->c + half * TILE_UNITS + unit,
        .a_stride = tile->a_stride,
        .c_stride = 2 * TILE_UNITS,
        .rows = tile->rows,
        .columns = units,
        .k = panel.k_count,
    };

    dot.w = panel_load(&panel, gemm->ops, tile->scratch->w, &dot.w_stride);
    gemm->ops->dot(&dot);
}

// All of k for a few units at a time; the input rows are there from end to end.
static void multiply_streaming(struct tile *tile)
{
    const struct gemm *gemm = tile->gemm;
    // A row of rows_in holds units, not inputs: the more of them at a time, the less of a cache
    // line is wasted.
    int64_t step = gemm->view->rows_in ? TILE_UNITS : STREAM_UNITS;

    if (gemm->a == NULL) {
        tile->a = tile->scratch->a;
        tile->a_stride = gemm->k;
        for (int64_t k = 0; k < gemm->k; k += PANEL_K)
            gather(tile, k, tile->scratch->a + k, tile->a_stride);
    }
    for (int32_t half = 0; half < gemm->halves; half++) {
        for (int64_t unit = 0; unit < tile->units; unit += step) {
            for (int64_t k = 0; k < gemm->k; k += PANEL_K)
                multiply(tile, half, unit, min64(tile->units - unit, step), k);
        }
    }
}

// All units for a piece of k at a time.
static void multiply_blocked(struct tile *tile)
{
    const struct gemm *gemm = tile->gemm;

    for (int64_t k = 0; k < gemm->k; k += PANEL_K) {
        if (gemm->a == NULL) {
            tile->a = tile->scratch->a;
            tile->a_stride = PANEL_K;
            tile->a_first = k;
            gather(tile, k, tile->scratch->a, PANEL_K);
        }
        for (int32_t half = 0; half < gemm->halves; half++)
            multiply(tile, half, 0, tile->units, k);
    }
}

static void finish(const struct tile *tile)
{
    const struct gemm *gemm = tile->gemm;
    struct scratch *scratch = tile->scratch;

    for (int32_t half = 0; half < gemm->halves; half++) {
        struct panel panel = {
            .view = gemm->view,
            .half = gemm->half[half],
            .expert = tile->expert,
            .unit = tile->unit,
            .units = tile->units,
        };

        panel_finish(&panel, scratch->factor[half], scratch->bias[half]);
    }
    for (int64_t row = 0; row < tile->rows; row++) {
        int64_t pair = tile->pair + row;
        float weight = gemm->pair_weight == NULL ? 1.0f : gemm->pair_weight[pair];
        float *sums = scratch->c + row * 2 * TILE_UNITS;

        for (int32_t half = 0; half < gemm->halves; half++) {
            for (int64_t unit = 0; unit < tile->units; unit++) {
                float *sum = &sums[half * TILE_UNITS + unit];

                *sum = *sum * scratch->factor[half][unit] * weight + scratch->bias[half][unit];
            }
        }
        gemm->store(gemm, pair, tile->unit, tile->units, sums);
    }
}

static void run_tile(struct tile *tile)
{
    const struct gemm *gemm = tile->gemm;
    struct scratch *scratch = tile->scratch;

    memset(scratch->c, 0, (size_t)tile->rows * 2 * TILE_UNITS * sizeof *scratch->c);
    if (gemm->a != NULL) {
        tile->a = (const float *)(const void *)(gemm->a + tile->pair * gemm->a_stride_bytes);
        tile->a_stride = gemm->a_stride_bytes / (int64_t)sizeof(float);
    }
    for (int64_t row = 0; row < tile->rows; row++)
        scratch->global[row] = gemm->operand == FORMAT_NVFP4 ? row_global(tile, row) : 0.0f;
    if (tile->rows <= STREAM_ROWS && tile->rows * gemm->k <= A_FLOATS)
        multiply_streaming(tile);
    else
        multiply_blocked(tile);
    finish(tile);
}

// ---- All tiles: by expert, then units, then rows

static int64_t expert_rows(const struct gemm *gemm, int64_t expert)
{
    int64_t rows = (int64_t)gemm->expert_offset[expert + 1] - gemm->expert_offset[expert];

    return rows > 0 ? rows : 0;
}

static int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static int64_t expert_tiles(const struct gemm *gemm, int64_t expert)
{
    return ceil_div(expert_rows(gemm, expert), TILE_ROWS) * ceil_div(gemm->units, TILE_UNITS);
}

static void gemm_body(struct work *work, unsigned char *scratch)
{
    const struct gemm *gemm = work->args;
    int64_t expert = 0, first = 0; // and the first item of that expert
    int64_t item, end;

    while (work_next(work, &item, &end)) {
        struct tile tile = {.gemm = gemm, .scratch = (struct scratch *)(void *)scratch};
        int64_t row_tiles, tiles;

        while (item - first >= (tiles = expert_tiles(gemm, expert))) {
            first += tiles;
            expert++;
        }
        row_tiles = ceil_div(expert_rows(gemm, expert), TILE_ROWS);
        tile.expert = expert;
        tile.unit = (item - first) / row_tiles * TILE_UNITS;
        tile.units = min64(gemm->units - tile.unit, TILE_UNITS);
        tile.pair = (item - first) % row_tiles * TILE_ROWS;
        tile.rows = min64(expert_rows(gemm, expert) - tile.pair, TILE_ROWS);
        tile.pair += gemm->expert_offset[expert];
        run_tile(&tile);
    }
}

static int32_t gemm_run(const struct gemm *gemm, const struct cpu_stream *stream)
{
    struct work work = {.body = gemm_body, .args = gemm, .grain = 1};

    for (int64_t expert = 0; expert < gemm->experts; expert++)
        work.items += expert_tiles(gemm, expert);
    work_run(&work, stream, work.items * TILE_UNITS * gemm->halves * gemm->k);
    return 0;
}

// ---- gate and up

static void store_gate_up(const struct gemm *gemm, int64_t pair, int64_t unit, int64_t units,
                          float *row)
{
    const struct gate_up_args *args = gemm->gate_up;
    struct activation_args activation = {
        .kind = args->activation,
        .alpha = args->alpha,
        .beta = args->beta,
        .limit = args->limit,
    };
    unsigned char *mid = (unsigned char *)args->mid + pair * args->mid_stride_bytes;

    activation_apply(&activation, gemm->ops, row, gemm->halves == 2 ? row + TILE_UNITS : NULL,
                     units);
    numbers_encode(args->mid_format, row, units, mid + unit * number_bytes(args->mid_format));
}

int32_t gate_up_cpu(const struct gate_up_args *args, void *stream)
{
    struct gemm gemm = {
        .fetch = fetch_row,
        .store = store_gate_up,
        .ops = cpu_ops_of(stream),
        .view = &args->w1,
        .expert_offset = args->expert_offset,
        .gate_up = args,
        .pair_weight = args->pair_weight,
        .experts = args->experts,
        .units = args->intermediate,
        .k = args->hidden,
        .half = {w1_half(&args->w1, args->intermediate, 0),
                 w1_half(&args->w1, args->intermediate, 1)},
        .halves = args->w1.order == ORDER_PLAIN ? 1 : 2,
        .operand = args->operand_format,
    };

    return gemm_run(&gemm, stream);
}

// ---- down

// What combine makes of a pair that is alone in its row.
static void weigh_result(const struct down_args *args, int64_t pair, int64_t units, float *row)
{
    const float weight = args->result_weight == NULL ? 1.0f : args->result_weight[pair];
    unsigned char rounded[4 * TILE_UNITS];
    const struct row_view view = {.values = rounded, .format = args->pair_format};

    numbers_encode(args->pair_format, row, units, rounded);
    row_decode(&view, 0, units, row);
    for (int64_t i = 0; i < units; i++)
        row[i] = (0.0f + weight * row[i]) * args->result_scale;
}

static void store_down(const struct gemm *gemm, int64_t pair, int64_t unit, int64_t units,
                       float *row)
{
    const struct down_args *args = gemm->down;
    int64_t to = args->result_row == NULL ? pair : args->result_row[pair];
    unsigned char *out = (unsigned char *)args->pair_out + to * args->pair_stride_bytes;

    if (args->result_row != NULL) weigh_result(args, pair, units, row);
    numbers_encode(args->pair_format, row, units, out + unit * number_bytes(args->pair_format));
}

int32_t down_cpu(const struct down_args *args, void *stream)
{
    struct gemm gemm = {
        .fetch = fetch_mid,
        .store = store_down,
        .ops = cpu_ops_of(stream),
        .view = &args->w2,
        .expert_offset = args->expert_offset,
        .down = args,
        .a_stride_bytes = args->mid_stride_bytes,
        .experts = args->experts,
        .units = args->w2.n,
        .k = args->w2.k,
        .half = {w2_half(&args->w2)},
        .halves = 1,
        .operand = args->mid_format == FORMAT_FP8_BLOCK128 ? FORMAT_F32 : args->operand_format,
    };

    if (args->mid_format == FORMAT_F32 && args->operand_format == FORMAT_F32) gemm.a = args->mid;
    return gemm_run(&gemm, stream);
}

// ---- both

int32_t gemms_cpu(const struct gemms_args *args, void *stream)
{
    int32_t st = gate_up_cpu(&args->gate_up, stream);

    if (st == 0 && args->quantise.rows != NULL) st = quantise_cpu(&args->quantise, stream);
    return st != 0 ? st : down_cpu(&args->down, stream);
}
