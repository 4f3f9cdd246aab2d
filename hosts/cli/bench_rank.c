// What one rank of `moxie bench` does: random weights and rows, then timed forwards cell by cell.

#include "hosts/cli/bench.h"
#include "hosts/cli/rank.h"

#include <stdlib.h>
#include <string.h>

struct bench {
    struct rank rank;
    struct bench_shape shape;
    struct weights w1, w2;
    struct forward forward;
    int64_t rank_tokens[BOOTSTRAP_RANKS_MAX];
    int64_t tokens_max;
    double seconds; // for each cell
    int32_t *ids;   // [tokens_max, k]
    float *weights; // [tokens_max, k]
    uint8_t *x, *y; // bf16 [tokens_max, H]
};

static int read_job(struct bench *bench, const json_t *job, int32_t *format, struct fault *fault)
{
    const json_t *cells = json_object_get(job, "tokens");
    const char *shape = json_string_value(json_object_get(job, "shape"));
    const char *word = json_string_value(json_object_get(job, "weight_format"));
    size_t index = 0;
    json_t *value = NULL;

    bench->seconds = json_number_value(json_object_get(job, "seconds"));
    for (index = 0; index < json_array_size(cells); index++) {
        value = json_array_get(cells, index);
        if (json_integer_value(value) > bench->tokens_max)
            bench->tokens_max = json_integer_value(value);
    }
    *format = word != NULL ? format_from_word(word) : MOXIE_FORMAT_AUTO;
    if (shape != NULL && bench_shape_parse(&bench->shape, shape)) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "the job has no shape");
}

static int make_weights(struct bench *bench, int32_t format, struct fault *fault)
{
    const struct moxie_bounds *bounds = bench->rank.instance.plan->bounds;
    struct weights_shape w1;
    struct weights_shape w2;
    int st = EXIT_OK;

    bench_weights_shapes(&bench->shape, format, bounds->experts_local, &w1, &w2);
    TRY(weights_init(&bench->w1, &w1, fault));
    TRY(weights_init(&bench->w2, &w2, fault));
    bench_fill_weights(&bench->w1, 1000 + (uint64_t)bench->rank.link->rank);
    bench_fill_weights(&bench->w2, 2000 + (uint64_t)bench->rank.link->rank);
out:
    return st;
}

static int make_rows(struct bench *bench, struct fault *fault)
{
    uint64_t pairs = (uint64_t)(bench->tokens_max * bench->shape.top_k);
    uint64_t row_bytes = (uint64_t)bench->shape.hidden * 2;
    uint64_t bytes = 0;

    if (bytes_mul((uint64_t)bench->tokens_max, row_bytes, &bytes)) {
        bench->x = malloc(bytes + 1);
        bench->y = malloc(bytes + 1);
        bench->ids = malloc(pairs * sizeof *bench->ids + 1);
        bench->weights = malloc(pairs * sizeof *bench->weights + 1);
    }
    if (bench->x == NULL || bench->y == NULL || bench->ids == NULL || bench->weights == NULL)
        return fault_set(fault, EXIT_TROUBLE, "out of memory for the rows");
    bench_fill_rows(bench->x, bytes, 3000 + (uint64_t)bench->rank.link->rank);
    memset(bench->y, 0, bytes);
    for (uint64_t i = 0; i < pairs; i++)
        bench->weights[i] = 1.0f / (float)bench->shape.top_k;
    bench->forward = (struct forward){
        .rank_tokens = bench->rank_tokens,
        .x = bench->x,
        .ids = bench->ids,
        .weights = bench->weights,
        .y = bench->y,
        .x_format = MOXIE_FORMAT_BF16,
        .y_format = MOXIE_FORMAT_BF16,
        .id_bytes = 4,
        .hidden = bench->shape.hidden,
        .top_k = bench->shape.top_k,
    };
    return EXIT_OK;
}

// One forward with the routing of `repetition`; the time is that of the slowest rank.
static int repeat(struct bench *bench, int cell, int repetition, double *time_us,
                  struct fault *fault)
{
    const struct draw draw = {cell, repetition, bench->rank.link->rank};
    double own_us = 0;
    int st = EXIT_OK;

    bench_draw_ids(&bench->shape, &draw, bench->rank_tokens[draw.rank], bench->ids);
    TRY(rank_time_forward(&bench->rank, &bench->forward, &own_us, fault));
    TRY(rank_max(&bench->rank, own_us, time_us, fault));
out:
    return st;
}

static int send_cell(const struct bench *bench, int cell, json_t *times_us, struct fault *fault)
{
    json_t *result =
        json_pack("{s:i, s:s, s:s, s:O}", "cell", cell, "runner", bench->rank.runner_info->name,
                  "dispatcher", bench->rank.dispatcher_info->name, "times_us", times_us);
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
    json_t *times_us = json_array();
    double time_us = 0;
    double fitting = 0;
    int repetitions = BENCH_REPETITIONS_MIN;
    int st = EXIT_OK;

    for (int i = 0; i < bench->rank.link->ranks; i++)
        bench->rank_tokens[i] = tokens;
    TRY(repeat(bench, cell, BENCH_REPETITIONS_MAX, &time_us, fault));
    TRY(repeat(bench, cell, BENCH_REPETITIONS_MAX + 1, &time_us, fault));
    fitting = bench->seconds * 1e6 / time_us;
    if (fitting > BENCH_REPETITIONS_MIN)
        repetitions = fitting < BENCH_REPETITIONS_MAX ? (int)fitting : BENCH_REPETITIONS_MAX;
    for (int i = 0; i < repetitions; i++) {
        TRY(repeat(bench, cell, i, &time_us, fault));
        (void)json_array_append_new(times_us, json_real(time_us));
        link_progress(bench->rank.link, (double)(i + 1) / repetitions);
    }
    TRY(send_cell(bench, cell, times_us, fault));
out:
    json_decref(times_us);
    return st;
}

static int run_cells(struct bench *bench, const json_t *cells, struct fault *fault)
{
    int count = (int)json_array_size(cells);
    int st = EXIT_OK;

    for (int cell = 0; cell < count; cell++)
        TRY(run_cell(bench, cell, json_integer_value(json_array_get(cells, (size_t)cell)), fault));
out:
    return st;
}

int bench_rank(struct link *link, const json_t *job, struct fault *fault)
{
    struct bench *bench = calloc(1, sizeof *bench);
    int32_t format = MOXIE_FORMAT_AUTO;
    int st = EXIT_OK;

    if (bench == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(read_job(bench, job, &format, fault));
    TRY(rank_open(&bench->rank, link, job, fault));
    TRY(make_weights(bench, format, fault));
    TRY(make_rows(bench, fault));
    TRY(rank_create(&bench->rank, &bench->w1, &bench->w2, fault));
    TRY(run_cells(bench, json_object_get(job, "tokens"), fault));
out:
    st = rank_finish(&bench->rank, st, fault);
    weights_fini(&bench->w1);
    weights_fini(&bench->w2);
    free(bench->ids);
    free(bench->weights);
    free(bench->x);
    free(bench->y);
    free(bench);
    return st;
}
