// What a cell's times are held against: what the experts, the products and the links allow at best.

#include "hosts/cli/bench_report.h"
#include "hosts/cli/numbers.h"

#include <stdlib.h>
#include <string.h>

#define SAMPLE_NUMBERS 6

// One repetition as rank 0 sent it. Rows are those of one forward.
struct sample {
    double time_us, spread_us;
    double rows, sent_most, came_most; // that leave a rank; leave one; come to one
    double event_us;
};

// What the draw of one repetition allows at best.
struct floor {
    double us;    // of one forward, the mean over those of the repetition
    double bytes; // of the experts hit, over all forwards
    int bound_by_bytes;
};

// Pairs of each expert, over all ranks.
static void count_pairs(const struct bench_options *options, struct draw draw, int64_t tokens,
                        int32_t *ids, int64_t *pairs)
{
    memset(pairs, 0, (size_t)options->shape.experts * sizeof *pairs);
    for (draw.rank = 0; draw.rank < draw.ranks; draw.rank++) {
        bench_draw_ids(&options->shape, &draw, tokens, ids);
        for (int64_t i = 0; i < tokens * options->shape.top_k; i++)
            pairs[ids[i]]++;
    }
}

// The floor of what shares one memory: the experts first..end-1.
static struct floor floor_of(const struct bench_run *run, const int64_t *pairs, int64_t first,
                             int64_t end)
{
    const struct bench_shape *shape = &run->options->shape;
    double expert_bytes = (double)bench_layer_bytes(shape, run->options->format, 1);
    struct floor floor = {0, 0, 0};
    double flops = 0;
    double bytes_us = 0;
    double flops_us = 0;

    for (int64_t expert = first; expert < end; expert++) {
        floor.bytes += pairs[expert] > 0 ? expert_bytes : 0;
        flops += 6.0 * (double)pairs[expert] * (double)shape->hidden * (double)shape->intermediate;
    }
    bytes_us = 1e6 * floor.bytes / run->anchors.read_bytes_per_s;
    flops_us = 1e6 * flops / run->anchors.f32_flops_per_s;
    floor.us = bytes_us > flops_us ? bytes_us : flops_us;
    floor.bound_by_bytes = bytes_us > flops_us;
    return floor;
}

// Of one forward. Ranks share the memory of a machine, and have one GPU each, of which the slowest
// decides.
static struct floor forward_floor(const struct bench_run *run, const int64_t *pairs)
{
    int64_t experts = run->options->shape.experts;
    int ranks = (int)run->options->rank.ranks;
    struct floor worst = {0, 0, 0};

    if (run->forwards == 1) return floor_of(run, pairs, 0, experts);
    for (int rank = 0; rank < ranks; rank++) {
        struct floor floor = floor_of(run, pairs, bench_experts_first(experts, ranks, rank),
                                      bench_experts_first(experts, ranks, rank + 1));

        if (floor.us > worst.us) worst = floor;
    }
    return worst;
}

// The floors of the repetitions of one cell; 0 when memory is lacking.
static int find_floors(const struct bench_run *run, int index, int count, struct floor *floors)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    int64_t tokens = options->tokens[index];
    int32_t *ids = malloc((size_t)(tokens * shape->top_k) * sizeof *ids);
    int64_t *pairs = malloc((size_t)shape->experts * sizeof *pairs);
    int enough = ids != NULL && pairs != NULL;

    memset(floors, 0, (size_t)count * sizeof *floors);
    for (int i = 0; i < count * run->forwards && enough && options->op == BENCH_LAYER; i++) {
        const struct draw draw = {index, i, 0, (int)options->rank.ranks, options->skew};
        struct floor *floor = &floors[i / run->forwards];
        struct floor forward;

        count_pairs(options, draw, tokens, ids, pairs);
        forward = forward_floor(run, pairs);
        floor->us += forward.us / run->forwards;
        floor->bytes += forward.bytes;
        floor->bound_by_bytes = forward.bound_by_bytes;
    }
    free(ids);
    free(pairs);
    return enough;
}

static int read_sample(const json_t *from, struct sample *to)
{
    double *const numbers[SAMPLE_NUMBERS] = {&to->time_us,   &to->spread_us, &to->rows,
                                             &to->sent_most, &to->came_most, &to->event_us};

    if (json_array_size(from) != SAMPLE_NUMBERS) return 0;
    for (size_t i = 0; i < SAMPLE_NUMBERS; i++)
        *numbers[i] = json_number_value(json_array_get(from, i));
    return 1;
}

// What dispatch, then combine, take at best where one GPU sends so much.
static double wire_floor_us(const struct bench_run *run, const struct sample *sample)
{
    return 1e6 * wire_bytes(&run->row, run->options->op, sample->sent_most, sample->came_most) /
           WIRE_BYTES_PER_S;
}

static double median(double *numbers, int count)
{
    numbers_sort(numbers, count);
    return numbers_quantile(numbers, count, 0.5);
}

static void fill_wire(const struct bench_run *run, struct cell *cell, const struct sample *samples,
                      int64_t tokens)
{
    const struct bench_shape *shape = &run->options->shape;
    double logical = wire_bytes(&run->row, run->options->op, (double)(tokens * shape->top_k),
                                (double)(tokens * shape->top_k));
    double numbers[5][BENCH_REPETITIONS_MAX];
    double bytes = 0;

    for (int i = 0; i < cell->repetitions; i++) {
        const struct sample *sample = &samples[i];

        bytes = wire_bytes(&run->row, run->options->op, sample->rows, sample->rows);
        numbers[0][i] = sample->spread_us;
        numbers[1][i] = sample->event_us;
        numbers[2][i] = wire_floor_us(run, sample);
        numbers[3][i] = 1e-3 * bytes / sample->time_us;
        numbers[4][i] = 1e-3 * logical / sample->time_us;
        cell->rows += sample->rows / cell->repetitions;
        cell->sent_most += sample->sent_most / cell->repetitions;
        cell->came_most += sample->came_most / cell->repetitions;
    }
    cell->spread_us = median(numbers[0], cell->repetitions);
    cell->event_us = median(numbers[1], cell->repetitions);
    cell->wire_floor_us = median(numbers[2], cell->repetitions);
    cell->wire_gb_per_s = median(numbers[3], cell->repetitions);
    cell->logical_gb_per_s = median(numbers[4], cell->repetitions);
}

static void fill_times(const struct bench_run *run, struct cell *cell, const struct sample *samples,
                       const struct floor *floors)
{
    double times_us[BENCH_REPETITIONS_MAX];
    double floors_us[BENCH_REPETITIONS_MAX];
    double shares[BENCH_REPETITIONS_MAX];
    int count = cell->repetitions;
    int by_bytes = 0;

    for (int i = 0; i < count; i++) {
        times_us[i] = samples[i].time_us;
        floors_us[i] = floors[i].us + wire_floor_us(run, &samples[i]);
        shares[i] = floors_us[i] / times_us[i];
        by_bytes += floors[i].bound_by_bytes;
        cell->touched_bytes += floors[i].bytes / count;
    }
    cell->bound_by_bytes = 2 * by_bytes > count;
    cell->median_us = median(times_us, count);
    cell->p10_us = numbers_quantile(times_us, count, 0.1);
    cell->p90_us = numbers_quantile(times_us, count, 0.9);
    cell->floor_us = median(floors_us, count);
    cell->share = median(shares, count);
}

int bench_fill_cell(struct bench_run *run, int index, const json_t *samples, struct fault *fault)
{
    struct cell *cell = &run->cells[index];
    size_t count = json_array_size(samples);
    struct floor floors[BENCH_REPETITIONS_MAX];
    struct sample found[BENCH_REPETITIONS_MAX];

    if (count < 1 || count > BENCH_REPETITIONS_MAX)
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no times");
    for (size_t i = 0; i < count; i++)
        if (!read_sample(json_array_get(samples, i), &found[i]))
            return fault_set(fault, EXIT_TROUBLE, "rank 0 sent times that are none");
    if (!find_floors(run, index, (int)count, floors))
        return fault_set(fault, EXIT_TROUBLE, "out of memory");
    cell->repetitions = (int)count;
    fill_times(run, cell, found, floors);
    fill_wire(run, cell, found, run->options->tokens[index]);
    return EXIT_OK;
}

int bench_fill_collectives(struct bench_run *run, int index, const json_t *found,
                           struct fault *fault)
{
    struct cell *cell = &run->cells[index];
    const char *name = NULL;
    json_t *collective = NULL;

    json_object_foreach((json_t *)(uintptr_t)found, name, collective)
    {
        const json_t *samples = json_object_get(collective, "samples");
        struct collective_times *times = &cell->collectives[cell->collectives_count];
        int count = (int)json_array_size(samples);
        double numbers[2][BENCH_REPETITIONS_MAX];

        if (count < 1 || count > BENCH_REPETITIONS_MAX ||
            cell->collectives_count == BENCH_COLLECTIVES_MAX)
            return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no times of NCCL's %s", name);
        for (int i = 0; i < 2 * count; i++)
            numbers[i % 2][i / 2] = json_number_value(
                json_array_get(json_array_get(samples, (size_t)i / 2), (size_t)i % 2));
        (void)snprintf(times->name, sizeof times->name, "%s", name);
        times->median_us = median(numbers[0], count);
        times->p10_us = numbers_quantile(numbers[0], count, 0.1);
        times->p90_us = numbers_quantile(numbers[0], count, 0.9);
        times->spread_us = median(numbers[1], count);
        times->bytes = json_number_value(json_object_get(collective, "bytes"));
        times->replays = count;
        cell->collectives_count++;
    }
    return EXIT_OK;
}
