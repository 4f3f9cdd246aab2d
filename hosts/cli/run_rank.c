// What one rank of `moxie run` does: loads its experts and its tokens, runs the layer, sends its
// rows.

#include "hosts/cli/json_file.h"
#include "hosts/cli/rank.h"
#include "hosts/cli/router.h"

#include <stdlib.h>
#include <string.h>

#define TIMED_US           200000.0
#define TIMED_FORWARDS_MAX 21

struct run {
    struct rank rank;
    char paths[3][PATH_MAX]; // of the source
    struct source source;
    struct experts experts;
    struct rows rows;
    struct memory x, ids, weights, y; // on the device
    struct forward forward;
    int64_t rank_tokens[BOOTSTRAP_RANKS_MAX];
    float *rows_out; // [tokens of this rank, H]
};

static int open_inputs(struct run *run, const json_t *job, struct fault *fault)
{
    const json_t *named = json_object_get(job, "source");
    const struct link *link = run->rank.link;
    const struct source_paths paths = {
        .layer_file = json_path_read(json_object_get(named, "layer_file"), run->paths[0]),
        .model = json_path_read(json_object_get(named, "model"), run->paths[1]),
        .input = json_path_read(json_object_get(named, "input"), run->paths[2]),
        .layer = json_integer_value(json_object_get(named, "layer")),
    };
    struct source *source = &run->source;
    int st = EXIT_OK;

    TRY(source_open(source, &paths, fault));
    for (int i = 0; i < link->ranks; i++)
        run->rank_tokens[i] = token_part(source->inputs.tokens, link->ranks, i).count;
    TRY(rows_read(&run->rows, &source->inputs,
                  token_part(source->inputs.tokens, link->ranks, link->rank), &source->model,
                  fault));
    if (source->inputs.topk_ids == NULL)
        TRY(router_route(source, &run->rank.plugin, &run->rows, fault));
out:
    return st;
}

static int load_experts(struct run *run, struct fault *fault)
{
    const moxie_bounds *bounds = run->rank.instance.plan->bounds;
    const struct expert_range range = {bounds->expert_first, bounds->experts_local};
    const struct load_target target = {&run->rank.device, run->rank.link, link_progress};

    return experts_load(&run->experts, &run->source.layout, &run->source.checkpoint, range, &target,
                        fault);
}

static int prepare_forward(struct run *run, struct fault *fault)
{
    const struct model *model = &run->source.model;
    struct device *device = &run->rank.device;
    uint64_t tokens = (uint64_t)run->rows.range.count;
    uint64_t row_bytes = (uint64_t)model->hidden * format_element_bytes(run->source.inputs.format);
    uint64_t pairs = tokens * (uint64_t)model->top_k;
    uint64_t bytes = 0;
    int st = EXIT_OK;

    if (bytes_mul(tokens, (uint64_t)model->hidden * sizeof *run->rows_out, &bytes))
        run->rows_out = malloc(bytes + 1);
    if (run->rows_out == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory for the output"));
    TRY(memory_from(&run->x, device, run->rows.x, tokens * row_bytes, "the tokens", fault));
    TRY(memory_from(&run->ids, device, run->rows.ids, pairs * (run->rows.wide_ids ? 8 : 4),
                    "the ids", fault));
    TRY(memory_from(&run->weights, device, run->rows.weights, pairs * sizeof(float),
                    "the router weights", fault));
    TRY(memory_init(&run->y, device, bytes, "the output", fault));
    run->forward = (struct forward){
        .rank_tokens = run->rank_tokens,
        .x = run->x.at,
        .ids = run->ids.at,
        .weights = run->weights.at,
        .y = run->y.at,
        .x_format = run->source.inputs.format,
        .y_format = MOXIE_FORMAT_F32,
        .id_bytes = run->rows.wide_ids ? 8 : 4,
        .hidden = model->hidden,
        .top_k = model->top_k,
    };
out:
    return st;
}

// One forward to warm up, then as many as fit into the budget; each counts by its slowest rank.
static int run_forwards(struct run *run, json_t *times_us, struct fault *fault)
{
    double warm_us = 0;
    double time_us = 0;
    double slowest_us = 0;
    int forwards = 1;
    int st = EXIT_OK;

    TRY(rank_time_forward(&run->rank, &run->forward, &time_us, fault));
    TRY(rank_max(&run->rank, time_us, &warm_us, fault));
    while (forwards < TIMED_FORWARDS_MAX && (forwards + 2) * warm_us < TIMED_US)
        forwards += 2;
    for (int i = 0; i < forwards; i++) {
        TRY(rank_time_forward(&run->rank, &run->forward, &time_us, fault));
        TRY(rank_max(&run->rank, time_us, &slowest_us, fault));
        (void)json_array_append_new(times_us, json_real(slowest_us));
    }
out:
    return st;
}

static int send_result(struct run *run, json_t *times_us, struct fault *fault)
{
    const struct link *link = run->rank.link;
    struct device *device = &run->rank.device;
    json_t *result = json_pack("{s:s, s:s, s:O}", "runner", run->rank.runner_info->name,
                               "dispatcher", run->rank.dispatcher_info->name, "times_us", times_us);
    char *text = result != NULL ? json_dumps(result, JSON_COMPACT) : NULL;
    int st = EXIT_OK;

    if (text == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(device->table->copy_out(device, run->rows_out, run->y.at, run->y.bytes, fault));
    TRY(link_send(link, MESSAGE_ROWS, run->rows_out, run->y.bytes, fault));
    if (link->rank == 0) TRY(link_send(link, MESSAGE_RESULT, text, strlen(text), fault));
out:
    free(text);
    json_decref(result);
    return st;
}

int run_rank(struct link *link, const json_t *job, struct fault *fault)
{
    struct run *run = calloc(1, sizeof *run);
    json_t *times_us = json_array();
    int st = EXIT_OK;

    if (run == NULL || times_us == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(rank_open(&run->rank, link, job, fault));
    TRY(open_inputs(run, job, fault));
    TRY(load_experts(run, fault));
    TRY(rank_create_runner(&run->rank, &run->experts.w1, &run->experts.w2, fault));
    TRY(rank_create_dispatcher(&run->rank, fault));
    TRY(prepare_forward(run, fault));
    TRY(run_forwards(run, times_us, fault));
    TRY(send_result(run, times_us, fault));
out:
    json_decref(times_us);
    if (run == NULL) return st;
    st = rank_stop(&run->rank, st, fault);
    experts_fini(&run->experts);
    memory_fini(&run->x, &run->rank.device);
    memory_fini(&run->ids, &run->rank.device);
    memory_fini(&run->weights, &run->rank.device);
    memory_fini(&run->y, &run->rank.device);
    st = rank_finish(&run->rank, st, fault);
    rows_fini(&run->rows);
    source_close(&run->source);
    free(run->rows_out);
    free(run);
    return st;
}
