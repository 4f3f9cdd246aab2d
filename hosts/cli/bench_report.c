// Quantiles, floors, table and JSON of the bench.

#include "hosts/cli/bench_report.h"

#include "hosts/cli/json_file.h"
#include "hosts/cli/table.h"

#include <math.h>

// Of several ranks: what their rows are on the way, and how unevenly they go.
static void add_exchange(const struct bench_run *run, json_t *document)
{
    (void)json_object_set_new(document, "dispatch_format", json_string(run->dispatch_format));
    (void)json_object_set_new(document, "skew", json_number(run->options->skew));
}

static void print_exchange(const struct bench_run *run)
{
    if (run->options->rank.ranks == 1) return;
    (void)printf(", %s between ranks", run->dispatch_format);
    if (run->options->skew != 0) (void)printf(", skew %g", run->options->skew);
}

static json_t *cpu_document(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    json_t *cells = json_array(), *document = NULL;

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
    document =
        json_pack("{s:{s:I, s:I, s:I, s:I}, s:s, s:s, s:s, s:s, s:I, s:I, s:{s:f, s:f}, s:o}",
                  "shape", "hidden_size", (json_int_t)shape->hidden, "intermediate_size",
                  (json_int_t)shape->intermediate, "num_experts", (json_int_t)shape->experts,
                  "top_k", (json_int_t)shape->top_k, "weight_format", format_word(options->format),
                  "row_format", format_word(options->row_format), "runner", run->runner,
                  "dispatcher", run->dispatcher, "ranks", (json_int_t)options->rank.ranks,
                  "threads_per_rank", (json_int_t)rank_threads(&options->rank), "anchors",
                  "read_gb_per_s", run->anchors.read_bytes_per_s / 1e9, "f32_gflops",
                  run->anchors.f32_flops_per_s / 1e9, "cells", cells);
    if (document != NULL && options->rank.ranks > 1) add_exchange(run, document);
    return document;
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

    (void)printf("%s: %s weights, %s rows, %s, %s, %lld x %lld threads", options->shape_text,
                 format_word(options->format), format_word(options->row_format), run->runner,
                 run->dispatcher, (long long)options->rank.ranks,
                 (long long)rank_threads(&options->rank));
    print_exchange(run);
    (void)printf("\nthis machine reads %.1f GB/s and computes %.1f GFLOP/s in f32\n\n",
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

// What binds most.
static const char *bound_by(const struct bench_run *run, const struct cell *cell)
{
    if (run->options->op != BENCH_LAYER) return "wire";
    return cell->bound_by_bytes ? "bytes" : "flops";
}

static json_t *collectives_of(const struct cell *cell)
{
    json_t *found = json_object();

    for (int i = 0; i < cell->collectives_count; i++) {
        const struct collective_times *times = &cell->collectives[i];

        (void)json_object_set_new(
            found, times->name,
            json_pack("{s:i, s:f, s:f, s:f, s:f, s:f, s:f}", "replays", times->replays, "median_us",
                      times->median_us, "p10_us", times->p10_us, "p90_us", times->p90_us,
                      "spread_us", times->spread_us, "bytes", times->bytes, "wire_gb_per_s",
                      1e-3 * times->bytes / times->median_us));
    }
    return found;
}

// What only several ranks have.
static json_t *wire_of(const struct bench_run *run, const struct cell *cell)
{
    return json_pack("{s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "spread_us",
                     cell->spread_us, "rows_per_rank", cell->rows, "rows_sent_most",
                     cell->sent_most, "rows_received_most", cell->came_most, "wire_bytes",
                     wire_bytes(&run->row, run->options->op, cell->rows, cell->rows),
                     "wire_gb_per_s", cell->wire_gb_per_s, "logical_gb_per_s",
                     cell->logical_gb_per_s, "wire_floor_us", cell->wire_floor_us, "wire_share",
                     cell->wire_floor_us / cell->median_us, "nccl", collectives_of(cell));
}

static int has_events(const struct bench_run *run)
{
    return run->options->op == BENCH_DISPATCH || run->options->op == BENCH_COMBINE;
}

static json_t *gpu_cells(const struct bench_run *run)
{
    json_t *cells = json_array();

    for (int i = 0; i < run->options->cells; i++) {
        const struct cell *cell = &run->cells[i];
        json_t *of =
            json_pack("{s:I, s:i, s:f, s:f, s:f, s:f, s:s, s:f, s:f, s:o}", "tokens",
                      (json_int_t)run->options->tokens[i], "replays", cell->repetitions,
                      "median_us", cell->median_us, "p10_us", cell->p10_us, "p90_us", cell->p90_us,
                      "floor_us", cell->floor_us, "floor_by", bound_by(run, cell), "times_floor",
                      1 / cell->share, "reuse_mb", reuse_bytes(run, cell) / 1e6, "relative_error",
                      json_number(cell->relative_error));

        if (has_events(run)) (void)json_object_set_new(of, "event_us", json_number(cell->event_us));
        if (run->options->rank.ranks > 1) {
            json_t *wire = wire_of(run, cell);

            (void)json_object_update(of, wire);
            json_decref(wire);
        }
        (void)json_array_append_new(cells, of);
    }
    return cells;
}

// Of several ranks, beside what one has, too.
static void add_ranks(const struct bench_run *run, json_t *document)
{
    const struct bench_options *options = run->options;
    const char *reason = run->device.no_nccl;

    (void)json_object_set_new(document, "op", json_string(bench_op_word(options->op)));
    add_exchange(run, document);
    (void)json_object_set_new(document, "delay_us", json_number(options->delay_us));
    (void)json_object_set_new(document, "dispatch_sms", json_integer(options->rank.dispatch_sms));
    (void)json_object_set_new(document, "row_bytes",
                              json_pack("{s:I, s:I}", "dispatch",
                                        (json_int_t)run->row.dispatch_bytes, "result",
                                        (json_int_t)run->row.result_bytes));
    (void)json_object_set_new(document, "wire_floor_of_gb_per_s",
                              json_real(WIRE_BYTES_PER_S / 1e9));
    (void)json_object_set_new(document, "no_nccl",
                              reason[0] != '\0' ? json_string(reason) : json_null());
}

static json_t *gpu_document(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    const struct bench_device *device = &run->device;
    json_t *document = json_pack(
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

    if (document != NULL && options->rank.ranks > 1) add_ranks(run, document);
    return document;
}

static void print_device(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_device *device = &run->device;

    (void)printf("%s: %s, %s, %s on %s, graphs of %d forwards over %d sets of weights\n",
                 options->shape_text, format_word(options->format), run->runner, run->dispatcher,
                 device->name, run->forwards, device->sets);
    if (options->op == BENCH_LAYER)
        (void)printf("the floor is that of %.1f TB/s and %.0f TFLOP/s (%s)\n",
                     run->anchors.read_bytes_per_s / 1e12, run->anchors.f32_flops_per_s / 1e12,
                     format_is_fp8(options->format) ? "fp8" : "16-bit");
    (void)printf("the driver copies %.0f, then %.0f GB/s (read and written) and fills %.0f, then "
                 "%.0f GB/s\n\n",
                 device->copy[0] / 1e9, device->copy[1] / 1e9, device->fill[0] / 1e9,
                 device->fill[1] / 1e9);
}

static void print_one_rank(const struct bench_run *run)
{
    static const char *const heading[] = {"tokens",   "median us", "p10",     "p90",
                                          "floor us", "by",        "x floor", "replays"};
    struct table table;

    table_init(&table, 8, 0xdfu, heading);
    for (int i = 0; i < run->options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        print_times(&table, run->options->tokens[i], cell);
        table_cell(&table, 6, "%.2f", 1 / cell->share);
    }
    table_print(&table, 0);
    table_fini(&table);
}

static void print_collectives(const struct bench_run *run)
{
    static const char *const heading[] = {"tokens", "NCCL",   "median us", "p10",
                                          "p90",    "spread", "GB/s",      "replays"};
    struct table table;

    if (run->device.no_nccl[0] != '\0') {
        (void)printf("\nno NCCL beside it: %s\n", run->device.no_nccl);
        return;
    }
    table_init(&table, 8, 0xfdu, heading);
    for (int i = 0; i < run->options->cells; i++)
        for (int j = 0; j < run->cells[i].collectives_count; j++) {
            const struct collective_times *times = &run->cells[i].collectives[j];

            table_cell(&table, 0, "%lld", (long long)run->options->tokens[i]);
            table_cell(&table, 1, "%s", times->name);
            table_cell(&table, 2, "%.1f", times->median_us);
            table_cell(&table, 3, "%.1f", times->p10_us);
            table_cell(&table, 4, "%.1f", times->p90_us);
            table_cell(&table, 5, "%.1f", times->spread_us);
            table_cell(&table, 6, "%.1f", 1e-3 * times->bytes / times->median_us);
            table_cell(&table, 7, "%d", times->replays);
        }
    (void)printf("\n");
    table_print(&table, 0);
    table_fini(&table);
}

static void print_ranks(const struct bench_run *run)
{
    static const char *const heading[] = {"tokens",  "median us", "p10",     "p90",
                                          "spread",  "floor us",  "x floor", "wire floor",
                                          "of wire", "wire GB/s", "logical", "replays"};
    const struct bench_options *options = run->options;
    struct table table;

    (void)printf(
        "%s over %lld ranks; the links' floor is that of %.0f GB/s from a GPU, and rows of "
        "%llu bytes, results of %llu\n\n",
        bench_op_word(options->op), (long long)options->rank.ranks, WIRE_BYTES_PER_S / 1e9,
        (unsigned long long)run->row.dispatch_bytes, (unsigned long long)run->row.result_bytes);
    table_init(&table, 12, 0xfffu, heading);
    for (int i = 0; i < options->cells; i++) {
        const struct cell *cell = &run->cells[i];

        table_cell(&table, 0, "%lld", (long long)options->tokens[i]);
        table_cell(&table, 1, "%.1f", cell->median_us);
        table_cell(&table, 2, "%.1f", cell->p10_us);
        table_cell(&table, 3, "%.1f", cell->p90_us);
        table_cell(&table, 4, "%.1f", cell->spread_us);
        table_cell(&table, 5, "%.1f", cell->floor_us);
        table_cell(&table, 6, "%.2f", 1 / cell->share);
        table_cell(&table, 7, "%.1f", cell->wire_floor_us);
        table_cell(&table, 8, "%.0f%%", 100 * cell->wire_floor_us / cell->median_us);
        table_cell(&table, 9, "%.1f", cell->wire_gb_per_s);
        table_cell(&table, 10, "%.1f", cell->logical_gb_per_s);
        table_cell(&table, 11, "%d", cell->repetitions);
    }
    table_print(&table, 0);
    table_fini(&table);
    print_collectives(run);
}

static void print_gpu(const struct bench_run *run)
{
    const struct bench_options *options = run->options;
    const struct bench_device *device = &run->device;

    print_device(run);
    if (options->rank.ranks > 1)
        print_ranks(run);
    else
        print_one_rank(run);
    if (drift_of(device) > BENCH_DRIFT_MAX)
        (void)printf("the driver's rates drifted by %.0f%%: measure again\n",
                     100 * drift_of(device));
    for (int i = 0; i < options->cells && options->op == BENCH_LAYER; i++)
        if (reuse_bytes(run, &run->cells[i]) < BENCH_GPU_REUSE_BYTES)
            (void)printf(
                "%lld tokens: an expert comes again after %.0f MB, which a cache may hold\n",
                (long long)options->tokens[i], reuse_bytes(run, &run->cells[i]) / 1e6);
}

json_t *bench_document(const struct bench_run *run)
{
    json_t *document = run->forwards > 1 ? gpu_document(run) : cpu_document(run);

    (void)json_object_set_new(document, "build",
                              json_pack("{s:s, s:s}", "version", run->build->version, "source_id",
                                        run->build->source_id));
    return document;
}

void bench_print(const struct bench_run *run)
{
    if (run->forwards > 1)
        print_gpu(run);
    else
        print_cpu(run);
}
