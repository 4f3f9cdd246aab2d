// One rank's share of a run or a bench.

#include "hosts/cli/rank.h"

#include "hosts/cli/json_file.h"

#include <string.h>

// The configuration was accepted before the ranks were started: this repeats what changed since.
static int check_accepted(const struct instance *instance, struct fault *fault)
{
    json_t *reasons = NULL;
    const char *message = NULL;

    if (instance->report->reasons_count == 0) return EXIT_OK;
    reasons = instance_reasons(instance);
    message = json_string_value(json_object_get(json_array_get(reasons, 0), "message"));
    (void)fault_set(fault, EXIT_REFUSED, "refused: %s", message != NULL ? message : "");
    json_decref(reasons);
    return EXIT_REFUSED;
}

// The tables of what the configuration chose, complete.
static int find_backends(struct rank *rank, struct fault *fault)
{
    const char *runner = instance_config(&rank->instance, "runner");
    const char *dispatcher = instance_config(&rank->instance, "dispatcher");
    const char *device = instance_config(&rank->instance, "device");
    struct library_error error;
    int32_t status = MOXIE_OK;

    rank->runner_info = host_runner(&rank->instance.host, runner, device);
    rank->dispatcher_info = host_dispatcher(&rank->instance.host, dispatcher, device);
    if (rank->runner_info == NULL || rank->dispatcher_info == NULL)
        return fault_set(fault, EXIT_TROUBLE,
                         "the library accepted runner %s and dispatcher %s, and registered no such "
                         "pair",
                         runner, dispatcher);
    status = moxie_verify_runner(rank->runner_info, library_error(&error));
    if (status != MOXIE_OK) return fault_from_status(fault, status, runner, error.text);
    status = moxie_verify_dispatcher(rank->dispatcher_info, library_error(&error));
    if (status != MOXIE_OK) return fault_from_status(fault, status, dispatcher, error.text);
    return EXIT_OK;
}

int rank_open(struct rank *rank, struct link *link, const json_t *job, struct fault *fault)
{
    const struct host_bootstrap bootstrap = {link, link_all_gather, link_barrier};
    struct instance_request request = {.plugin = &rank->plugin, .bootstrap = &bootstrap};
    const char *path = NULL;
    int st = EXIT_OK;

    *rank = (struct rank){.link = link};
    path = json_path_read(json_object_get(job, "plugin"), rank->plugin_path);
    rank->config = json_copy(json_object_get(job, "config"));
    if (rank->config == NULL ||
        json_object_set_new(rank->config, "ep_rank", json_integer(link->rank)) != 0)
        TRY(fault_set(fault, EXIT_TROUBLE, "the job has no configuration"));
    TRY(plugin_load(&rank->plugin, path, fault));
    request.config = rank->config;
    request.verbose = json_is_true(json_object_get(job, "verbose"));
    TRY(instance_open(&rank->instance, &request, fault));
    TRY(check_accepted(&rank->instance, fault));
    TRY(find_backends(rank, fault));
    TRY(device_open(&rank->device, rank->runner_info->device, link->rank, fault));
    rank->instance.host.device = &rank->device;
out:
    return st;
}

int rank_create_runner(struct rank *rank, const struct weights *w1, const struct weights *w2,
                       struct fault *fault)
{
    const moxie_weights weights = {
        .struct_size = sizeof weights,
        .w1 = &w1->matrix,
        .w2 = &w2->matrix,
    };
    struct library_error error;
    int32_t status = rank->runner_info->api->create(rank->instance.handle, 0, &weights,
                                                    &rank->runner, library_error(&error));

    if (status != MOXIE_OK) return fault_from_status(fault, status, "the weights", error.text);
    return EXIT_OK;
}

int rank_create_dispatcher(struct rank *rank, struct fault *fault)
{
    struct library_error error;
    int32_t status = rank->dispatcher_info->api->create(rank->instance.handle, &rank->dispatcher,
                                                        library_error(&error));

    if (status != MOXIE_OK) return fault_from_status(fault, status, "the dispatcher", error.text);
    return EXIT_OK;
}

int rank_stop(struct rank *rank, int st, struct fault *fault)
{
    if (rank->dispatcher != NULL) rank->dispatcher_info->api->destroy(rank->dispatcher);
    if (rank->runner != NULL) rank->runner_info->api->destroy(rank->runner);
    rank->dispatcher = NULL;
    rank->runner = NULL;
    return instance_finish(&rank->instance, st, fault);
}

int rank_finish(struct rank *rank, int st, struct fault *fault)
{
    st = device_finish(&rank->device, st, fault);
    plugin_unload(&rank->plugin);
    json_decref(rank->config);
    *rank = (struct rank){0};
    return st;
}

void rank_describe(const struct rank *rank, const struct forward *forward, struct rank_batch *batch)
{
    int64_t tokens = forward->rank_tokens[rank->link->rank];
    const moxie_device place = rank->device.place;
    const moxie_dtype f32 = {MOXIE_DTYPE_FLOAT, 32, 1};
    const moxie_dtype ids = {MOXIE_DTYPE_INT, (uint8_t)(8 * forward->id_bytes), 1};
    int64_t *x_shape = batch->x_shape;
    int64_t *k_shape = batch->k_shape;

    x_shape[0] = k_shape[0] = tokens;
    x_shape[1] = forward->hidden;
    k_shape[1] = forward->top_k;
    batch->batch = (moxie_batch){
        .struct_size = sizeof batch->batch,
        .id_space = MOXIE_IDS_GLOBAL,
        .x = tensor_at(place, forward->x, format_dtype(forward->x_format), 2, x_shape),
        .ids = tensor_at(place, forward->ids, ids, 2, k_shape),
        .weights = tensor_at(place, forward->weights, f32, 2, k_shape),
        .y = tensor_at(place, forward->y, format_dtype(forward->y_format), 2, x_shape),
        .stream = rank->device.stream,
    };
}

int rank_begin(struct rank *rank, const struct forward *forward, struct fault *fault)
{
    const moxie_step step = {
        .struct_size = sizeof step,
        .tokens = forward->rank_tokens[rank->link->rank],
        .rank_tokens = forward->rank_tokens,
    };
    struct library_error error;
    int32_t status =
        rank->dispatcher_info->api->begin_forward(rank->dispatcher, &step, library_error(&error));

    if (status != MOXIE_OK) return fault_from_status(fault, status, "begin_forward", error.text);
    return EXIT_OK;
}

int rank_forward(struct rank *rank, const struct forward *forward, struct fault *fault)
{
    struct rank_batch batch;
    struct library_error error;
    int32_t status = MOXIE_OK;
    int st = EXIT_OK;

    rank_describe(rank, forward, &batch);
    TRY(rank_begin(rank, forward, fault));
    status = rank->instance.api->forward(rank->dispatcher, rank->runner, &batch.batch,
                                         library_error(&error));
    if (status != MOXIE_OK) TRY(fault_from_status(fault, status, "forward", error.text));
out:
    return st;
}

int rank_time_forward(struct rank *rank, const struct forward *forward, double *time_us,
                      struct fault *fault)
{
    int64_t started_ns = 0;
    int st = EXIT_OK;

    if (link_barrier(rank->link) != 0)
        return fault_set(fault, EXIT_TROUBLE, "the other ranks cannot be reached");
    started_ns = clock_ns();
    TRY(rank_forward(rank, forward, fault));
    TRY(rank->device.table->synchronise(&rank->device, fault));
    *time_us = (double)(clock_ns() - started_ns) / 1000;
out:
    return st;
}

int rank_gather(struct rank *rank, const void *own, void *all, uint64_t bytes, struct fault *fault)
{
    if (rank->link->ranks == 1) {
        memcpy(all, own, bytes);
        return EXIT_OK;
    }
    if (link_all_gather(rank->link, own, all, bytes) == 0) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "the other ranks cannot be reached");
}

int rank_max(struct rank *rank, double value, double *max, struct fault *fault)
{
    double values[BOOTSTRAP_RANKS_MAX];
    int st = EXIT_OK;

    TRY(rank_gather(rank, &value, values, sizeof value, fault));
    *max = values[0];
    for (int i = 1; i < rank->link->ranks; i++)
        if (values[i] > *max) *max = values[i];
out:
    return st;
}
