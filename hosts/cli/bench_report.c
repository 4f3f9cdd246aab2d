// Quantiles, floors, table and JSON of the bench.

#include "hosts/cli/bench_report.h"

#include "hosts/cli/json_file.h"
#include "hosts/cli/numbers.h"
#include "hosts/cli/table.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

// Experts that at least one token of any rank chose.
static int64_t experts_hit(const struct bench_options *options, struct draw draw, int64_t tokens,
                           int32_t *ids, uint8_t *seen)
{
    int64_t hit = 0;

    memset(seen, 0, (size_t)options->shape.experts);
    for (draw.rank = 0; draw.rank < options->rank.ranks; draw.rank++) {
        bench_draw_ids(&options->shape, &draw, tokens, ids);
        for (int64_t i = 0; i < tokens * options->shape.top_k; i++) {
            hit += !seen[ids[i]];
            seen[ids[i]] = 1;
        }
    }
    return hit;
}

// What the draw of one repetition allows at best.
struct floor {
    double us;    // of one forward, the mean over those of the repetition
    double bytes; // of the experts hit, over all forwards
    int bound_by_bytes;
};

// The floors of the repetitions of one cell; 0 when memory is lacking.
static int find_floors(const struct bench_run *run, int index, int count, struct floor *floors)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    int64_t tokens = options->tokens[index];
    double flops = 6.0 * (double)tokens * (double)options->rank.ranks * (double)shape->top_k *
                   (double)shape->hidden * (double)shape->intermediate;
    double flops_us = 1e6 * flops / run->anchors.f32_flops_per_s;
    double expert_bytes = (double)bench_layer_bytes(shape, options->format, 1);
    int32_t *ids = malloc((size_t)(tokens * shape->top_k) * sizeof *ids);
    uint8_t *seen = malloc((size_t)shape->experts);
    int enough = ids != NULL && seen != NULL;

    for (int i = 0; i < count * run->forwards && enough; i++) {
        const struct draw draw = {index, i, 0};
        double bytes = expert_bytes * (double)experts_hit(options, draw, tokens, ids, seen);
        double bytes_us = 1e6 * bytes / run->anchors.read_bytes_per_s;
        struct floor *floor = &floors[i / run->forwards];

        if (i % run->forwards == 0) *floor = (struct floor){0, 0, 0};
        floor->us += (bytes_us > flops_us ? bytes_us : flops_us) / run->forwards;
        floor->bytes += bytes;
        floor->bound_by_bytes = bytes_us > flops_us;
    }
    free(ids);
    free(seen);
    return enough;
}

int bench_fill_cell(struct bench_run *run, int index, const json_t *times, struct fault *fault)
{
    struct cell *cell = &run->cells[index];
    int count = (int)json_array_size(times);
    struct floor floors[BENCH_REPETITIONS_MAX];
    double times_us[BENCH_REPETITIONS_MAX];
    double floors_us[BENCH_REPETITIONS_MAX];
    double shares[BENCH_REPETITIONS_MAX];
    int by_bytes = 0;

    if (count < 1 || count > BENCH_REPETITIONS_MAX)
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no times");
    if (!find_floors(run, index, count, floors))
        return fault_set(fault, EXIT_TROUBLE, "out of memory");
    for (int i = 0; i < count; i++) {
        times_us[i] = json_real_value(json_array_get(times, (size_t)i));
        floors_us[i] = floors[i].us;
        shares[i] = floors[i].us / times_us[i];
        by_bytes += floors[i].bound_by_bytes;
        cell->touched_bytes += floors[i].bytes / count;
    }
    numbers_sort(times_us, count);
    numbers_sort(floors_us, count);
    numbers_sort(shares, count);
    cell->repetitions = count;
    cell->bound_by_bytes = 2 * by_bytes > count;
    cell->median_us = numbers_quantile(times_us, count, 0.5);
    cell->p10_us = numbers_quantile(times_us, count, 0.1);
    cell->p90_us = numbers_quantile(times_us, count, 0.9);
    cell->floor_us = numbers_quantile(floors_us, count, 0.5);
    cell->share = numbers_quantile(shares, count, 0.5);
    return EXIT_OK;
}

static json_t *cpu_document(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    json_t *cells = json_array();

    for (int i = 0; i < options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        (void)json_array_append_new(
            cells,
            json_pack("{s:I, s:i, s:f, s:f, s:f, s:f, s:s, s:f}", "tokens",
                      (json_int_t)options->tokens[i], "repetitions", cell->repetitions, "median_us",
                      cell->median_us, "p10_us", cell->p10_us, "p90_us", cell->p90_us, "floor_us",
                      cell->floor_us, "floor_by", cell->bound_by_bytes ? "bytes" : "flops",
                      "share_of_floor", cell->share));
    }
    return json_pack("{s:{s:I, s:I, s:I, s:I}, s:s, s:s, s:s, s:I, s:I, s:{s:f, s:f}, s:o}",
                     "shape", "hidden_size", (json_int_t)shape->hidden, "intermediate_size",
                     (json_int_t)shape->intermediate, "num_experts", (json_int_t)shape->experts,
                     "top_k", (json_int_t)shape->top_k, "weight_format",
                     format_word(options->format), "runner", run->runner, "dispatcher",
                     run->dispatcher, "ranks", (json_int_t)options->rank.ranks, "threads_per_rank",
                     (json_int_t)rank_threads(&options->rank), "anchors", "read_gb_per_s",
                     run->anchors.read_bytes_per_s / 1e9, "f32_gflops",
                     run->anchors.f32_flops_per_s / 1e9, "cells", cells);
}

// A new row with all but its share of the floor, column 6, which is said in two ways.
static void print_times(struct table *table, int64_t tokens, const struct cell *cell)
{
    table_cell(table, 0, "%lld", (long long)tokens);
    table_cell(table, 1, "%.1f", cell->median_us);
    table_cell(table, 2, "%.1f", cell->p10_us);
    table_cell(table, 3, "%.1f", cell->p90_us);
    table_cell(table, 4, "%.1f", cell->floor_us);
    table_cell(table, 5, "%s", cell->bound_by_bytes ? "bytes" : "flops");
    table_cell(table, 7, "%d", cell->repetitions);
}

static void print_cpu(const struct bench_run *run)
{
    static const char *const heading[] = {"tokens",   "median us", "p10",   "p90",
                                          "floor us", "by",        "share", "runs"};
    const struct bench_options *options = run->options;
    struct table table;

    (void)printf("%s: %s weights, %s, %s, %lld x %lld threads\n", options->shape_text,
                 format_word(options->format), run->runner, run->dispatcher,
                 (long long)options->rank.ranks, (long long)rank_threads(&options->rank));
    (void)printf("this machine reads %.1f GB/s and computes %.1f GFLOP/s in f32\n\n",
                 run->anchors.read_bytes_per_s / 1e9, run->anchors.f32_flops_per_s / 1e9);
    table_init(&table, 8, 0xdfu, heading);
    for (int i = 0; i < options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        print_times(&table, options->tokens[i], cell);
        table_cell(&table, 6, "%.0f%%", 100 * cell->share);
    }
    table_print(&table, 0);
    table_fini(&table);
}

// Bytes of weights between two reads of the same expert.
static double reuse_bytes(const struct bench_run *run, const struct cell *cell)
{
    return cell->touched_bytes * run->device.sets / run->forwards;
}

// The larger change of the two rates over the run, as a share.
static double drift_of(const struct bench_device *device)
{
    double copy = fabs(device->copy[1] / device->copy[0] - 1);
    double fill = fabs(device->fill[1] / device->fill[0] - 1);

    return copy > fill ? copy : fill;
}

static json_t *gpu_cells(const struct bench_run *run)
{
    json_t *cells = json_array();

    for (int i = 0; i < run->options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        (void)json_array_append_new(
            cells, json_pack("{s:I, s:i, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:o}", "tokens",
                             (json_int_t)run->options->tokens[i], "replays", cell->repetitions,
                             "median_us", cell->median_us, "p10_us", cell->p10_us, "p90_us",
                             cell->p90_us, "floor_us", cell->floor_us, "floor_by",
                             cell->bound_by_bytes ? "bytes" : "flops", "times_floor",
                             1 / cell->share, "reuse_mb", reuse_bytes(run, cell) / 1e6,
                             "relative_error", json_number(cell->relative_error)));
    }
    return cells;
}

static json_t *gpu_document(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    const struct bench_device *device = &run->device;

    return json_pack(
        "{s:{s:I, s:I, s:I, s:I}, s:s, s:s, s:s, s:s, s:s, s:I, s:i, s:i, s:{s:f, s:f, "
        "s:s}, s:{s:[f, f], s:[f, f], s:f}, s:o}",
        "shape", "hidden_size", (json_int_t)shape->hidden, "intermediate_size",
        (json_int_t)shape->intermediate, "num_experts", (json_int_t)shape->experts, "top_k",
        (json_int_t)shape->top_k, "weight_format", format_word(options->format), "row_format",
        format_word(options->row_format), "runner", run->runner, "dispatcher", run->dispatcher,
        "device", device->name, "ranks", (json_int_t)options->rank.ranks, "forwards_per_graph",
        run->forwards, "weight_sets", device->sets, "floor_of", "read_gb_per_s",
        run->anchors.read_bytes_per_s / 1e9, "tflops", run->anchors.f32_flops_per_s / 1e12,
        "operands", format_is_fp8(options->format) ? "fp8" : "16-bit", "anchors",
        "driver_copy_gb_per_s", device->copy[0] / 1e9, device->copy[1] / 1e9,
        "driver_fill_gb_per_s", device->fill[0] / 1e9, device->fill[1] / 1e9, "drift",
        drift_of(device), "cells", gpu_cells(run));
}

static void print_gpu(const struct bench_run *run)
{
    static const char *const heading[] = {"tokens",   "median us", "p10",     "p90",
                                          "floor us", "by",        "x floor", "replays"};
    const struct bench_options *options = run->options;
    const struct bench_device *device = &run->device;
    struct table table;

    (void)printf("%s: %s, %s, %s on %s, graphs of %d forwards over %d sets of weights\n",
                 options->shape_text, format_word(options->format), run->runner, run->dispatcher,
                 device->name, run->forwards, device->sets);
    (void)printf("the floor is that of %.1f TB/s and %.0f TFLOP/s (%s)\n",
                 run->anchors.read_bytes_per_s / 1e12, run->anchors.f32_flops_per_s / 1e12,
                 format_is_fp8(options->format) ? "fp8" : "16-bit");
    (void)printf("the driver copies %.0f, then %.0f GB/s (read and written) and fills %.0f, then "
                 "%.0f GB/s\n\n",
                 device->copy[0] / 1e9, device->copy[1] / 1e9, device->fill[0] / 1e9,
                 device->fill[1] / 1e9);
    table_init(&table, 8, 0xdfu, heading);
    for (int i = 0; i < options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        print_times(&table, options->tokens[i], cell);
        table_cell(&table, 6, "%.2f", 1 / cell->share);
    }
    table_print(&table, 0);
    table_fini(&table);
    if (drift_of(device) > BENCH_DRIFT_MAX)
        (void)printf("the driver's rates drifted by %.0f%%: measure again\n",
                     100 * drift_of(device));
    for (int i = 0; i < options->cells; i++)
        if (reuse_bytes(run, &run->cells[i]) < BENCH_GPU_REUSE_BYTES)
            (void)printf(
                "%lld tokens: an expert comes again after %.0f MB, which a cache may hold\n",
                (long long)options->tokens[i], reuse_bytes(run, &run->cells[i]) / 1e6);
}

json_t *bench_document(const struct bench_run *run)
{
    return run->forwards > 1 ? gpu_document(run) : cpu_document(run);
}

void bench_print(const struct bench_run *run)
{
    if (run->forwards > 1)
        print_gpu(run);
    else
        print_cpu(run);
}
