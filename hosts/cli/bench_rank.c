// What one rank of `moxie bench` does: random weights and rows, then timed forwards cell by cell,
// one at a time by the clock. Where the device has graphs, bench_graph.c does it.

#include "hosts/cli/rank.h"

#include <stdlib.h>
#include <string.h>

struct bench {
    struct rank rank;
    struct bench_job job;
    struct weights w1, w2;
    struct forward forward;
    int64_t rank_tokens[BOOTSTRAP_RANKS_MAX];
    int32_t *ids;       // [tokens_max, k]
    float *weights;     // [tokens_max, k]
    struct memory x, y; // row_format [tokens_max, H]
};

static int read_job(struct bench_job *bench, const json_t *job, struct fault *fault)
{
    const json_t *cells = json_object_get(job, "tokens");
    const char *shape = json_string_value(json_object_get(job, "shape"));
    const char *weights = json_string_value(json_object_get(job, "weight_format"));
    const char *rows = json_string_value(json_object_get(job, "row_format"));

    if (shape == NULL || weights == NULL || rows == NULL ||
        bench_op_parse(json_string_value(json_object_get(job, "op"))) < 0 ||
        json_array_size(cells) > BENCH_CELLS_MAX || bench_shape_parse(&bench->shape, shape) != NULL)
        return fault_set(fault, EXIT_TROUBLE, "the job has no shape, no formats or no op");
    bench->format = format_from_word(weights);
    bench->row_format = format_from_word(rows);
    bench->seconds = json_number_value(json_object_get(job, "seconds"));
    bench->op = bench_op_parse(json_string_value(json_object_get(job, "op")));
    bench->replays = (int)json_integer_value(json_object_get(job, "replays"));
    bench->skew = json_number_value(json_object_get(job, "skew"));
    bench->delay_us = json_number_value(json_object_get(job, "delay_us"));
    bench->cells = (int)json_array_size(cells);
    for (int i = 0; i < bench->cells; i++) {
        bench->tokens[i] = json_integer_value(json_array_get(cells, (size_t)i));
        if (bench->tokens[i] > bench->tokens_max) bench->tokens_max = bench->tokens[i];
    }
    return EXIT_OK;
}

static int make_weights(struct bench *bench, struct fault *fault)
{
    struct device *device = &bench->rank.device;
    const struct moxie_bounds *bounds = bench->rank.instance.plan->bounds;
    struct weights_shape w1;
    struct weights_shape w2;
    int st = EXIT_OK;

    bench_weights_shapes(&bench->job.shape, bench->job.format, bounds->experts_local, &w1, &w2);
    TRY(weights_init(&bench->w1, device, &w1, fault));
    TRY(weights_init(&bench->w2, device, &w2, fault));
    TRY(bench_fill_weights(&bench->w1, 1000 + (uint64_t)bench->rank.link->rank, fault));
    TRY(bench_fill_weights(&bench->w2, 2000 + (uint64_t)bench->rank.link->rank, fault));
out:
    return st;
}

static int make_rows(struct bench *bench, struct fault *fault)
{
    const struct bench_job *job = &bench->job;
    struct device *device = &bench->rank.device;
    uint64_t pairs = (uint64_t)(job->tokens_max * job->shape.top_k);
    uint64_t row_bytes = (uint64_t)job->shape.hidden * format_element_bytes(job->row_format);
    uint64_t bytes = 0;
    int st = EXIT_OK;

    if (bytes_mul((uint64_t)job->tokens_max, row_bytes, &bytes)) {
        bench->ids = malloc(pairs * sizeof *bench->ids + 1);
        bench->weights = malloc(pairs * sizeof *bench->weights + 1);
    }
    if (bench->ids == NULL || bench->weights == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory for the rows"));
    TRY(memory_init(&bench->x, device, bytes, "the rows", fault));
    TRY(memory_init(&bench->y, device, bytes, "the rows", fault));
    TRY(bench_fill_rows(&bench->x, device, job->row_format, 3000 + (uint64_t)bench->rank.link->rank,
                        fault));
    memset(bench->y.at, 0, bytes);
    for (uint64_t i = 0; i < pairs; i++)
        bench->weights[i] = 1.0f / (float)job->shape.top_k;
    bench->forward = (struct forward){
        .rank_tokens = bench->rank_tokens,
        .x = bench->x.at,
        .ids = bench->ids,
        .weights = bench->weights,
        .y = bench->y.at,
        .x_format = job->row_format,
        .y_format = job->row_format,
        .id_bytes = 4,
        .hidden = job->shape.hidden,
        .top_k = job->shape.top_k,
    };
out:
    return st;
}

// One forward with the routing of `repetition`; the time is that of the slowest rank.
static int repeat(struct bench *bench, int cell, int repetition, double *time_us,
                  struct fault *fault)
{
    const struct draw draw = {cell, repetition, bench->rank.link->rank, bench->rank.link->ranks,
                              bench->job.skew};
    double own_us = 0;
    int st = EXIT_OK;

    bench_draw_ids(&bench->job.shape, &draw, bench->rank_tokens[draw.rank], bench->ids);
    TRY(rank_time_forward(&bench->rank, &bench->forward, &own_us, fault));
    TRY(rank_max(&bench->rank, own_us, time_us, fault));
out:
    return st;
}

static int send_cell(const struct bench *bench, int cell, json_t *samples, struct fault *fault)
{
    json_t *result =
        json_pack("{s:i, s:s, s:s, s:O}", "cell", cell, "runner", bench->rank.runner_info->name,
                  "dispatcher", bench->rank.dispatcher_info->name, "samples", samples);
    char *text = result != NULL ? json_dumps(result, JSON_COMPACT) : NULL;
    int st = EXIT_OK;

    if (text == NULL)
        st = fault_set(fault, EXIT_TROUBLE, "out of memory");
    else if (bench->rank.link->rank == 0)
        st = link_send(bench->rank.link, MESSAGE_RESULT, text, strlen(text), fault);
    free(text);
    json_decref(result);
    return st;
}

// Two forwards to warm up, the second of which says how many fit into the budget.
static int run_cell(struct bench *bench, int cell, int64_t tokens, struct fault *fault)
{
    json_t *samples = json_array();
    double time_us = 0;
    double fitting = 0;
    int repetitions = BENCH_REPETITIONS_MIN;
    int st = EXIT_OK;

    for (int i = 0; i < bench->rank.link->ranks; i++)
        bench->rank_tokens[i] = tokens;
    TRY(repeat(bench, cell, BENCH_REPETITIONS_MAX, &time_us, fault));
    TRY(repeat(bench, cell, BENCH_REPETITIONS_MAX + 1, &time_us, fault));
    fitting = bench->job.seconds * 1e6 / time_us;
    if (fitting > BENCH_REPETITIONS_MIN)
        repetitions = fitting < BENCH_REPETITIONS_MAX ? (int)fitting : BENCH_REPETITIONS_MAX;
    for (int i = 0; i < repetitions; i++) {
        TRY(repeat(bench, cell, i, &time_us, fault));
        (void)json_array_append_new(
            samples, json_pack("[f, f, f, f, f, f]", time_us, 0.0, 0.0, 0.0, 0.0, 0.0));
        link_progress(bench->rank.link, (double)(i + 1) / repetitions);
    }
    TRY(send_cell(bench, cell, samples, fault));
out:
    json_decref(samples);
    return st;
}

static int run_cells(struct bench *bench, struct fault *fault)
{
    int st = EXIT_OK;

    TRY(make_weights(bench, fault));
    TRY(make_rows(bench, fault));
    TRY(rank_create_runner(&bench->rank, &bench->w1, &bench->w2, fault));
    TRY(rank_create_dispatcher(&bench->rank, fault));
    for (int cell = 0; cell < bench->job.cells; cell++)
        TRY(run_cell(bench, cell, bench->job.tokens[cell], fault));
out:
    return st;
}

int bench_rank(struct link *link, const json_t *job, struct fault *fault)
{
    struct bench *bench = calloc(1, sizeof *bench);
    int st = EXIT_OK;

    if (bench == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(read_job(&bench->job, job, fault));
    TRY(rank_open(&bench->rank, link, job, fault));
    if (bench->rank.device.table->capture_begin != NULL)
        TRY(bench_graphs(&bench->rank, &bench->job, fault));
    else
        TRY(run_cells(bench, fault));
out:
    st = rank_stop(&bench->rank, st, fault);
    weights_fini(&bench->w1);
    weights_fini(&bench->w2);
    memory_fini(&bench->x, &bench->rank.device);
    memory_fini(&bench->y, &bench->rank.device);
    st = rank_finish(&bench->rank, st, fault);
    free(bench->ids);
    free(bench->weights);
    free(bench);
    return st;
}
