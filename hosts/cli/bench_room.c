// Weight sets, rows and ids of the bench on a device with graphs.

#include "hosts/cli/bench_graph.h"
#include "hosts/cli/table.h"

#include <stdlib.h>

// As many weight sets as fit beside the rows and what the library plans.
static int count_sets(struct graphs *graphs, const struct weights_shape *w1,
                      const struct weights_shape *w2, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    uint64_t token_bytes = 2 * bench_row_bytes(job) + (uint64_t)job->shape.top_k * 8;
    uint64_t one = weights_bytes(w1) + weights_bytes(w2);
    uint64_t rest =
        graphs->rank->instance.plan->device_bytes + graphs->rank->instance.plan->symmetric_bytes;
    int wanted = job->op == BENCH_LAYER ? BENCH_FORWARDS : 1; // experts are not run otherwise
    uint64_t rows = 0;
    uint64_t available = 0;
    char texts[3][HUMAN_BYTES];
    int st = EXIT_OK;

    if (one == 0) TRY(fault_set(fault, EXIT_REFUSED, "a rank without experts measures nothing"));
    TRY(graphs->device->table->free_bytes(graphs->device, &available, fault));
    available -= available / 32; // for what an allocator rounds up
    if (!bytes_mul((uint64_t)job->tokens_max * BENCH_FORWARDS, token_bytes, &rows) ||
        !bytes_add(rest, rows, &rest))
        rest = UINT64_MAX;
    if (rest >= available || (available - rest) / one < 1)
        TRY(fault_set(fault, EXIT_REFUSED,
                      "the experts take %s, rows and buffers %s, and %s of %s are free; take fewer "
                      "experts or fewer tokens",
                      human_bytes(one, texts[0]), human_bytes(rest, texts[1]),
                      human_bytes(available, texts[2]), graphs->device->name));
    graphs->sets =
        (available - rest) / one < (uint64_t)wanted ? (int)((available - rest) / one) : wanted;
out:
    return st;
}

static int make_set(struct graphs *graphs, int index, const struct weights_shape *w1,
                    const struct weights_shape *w2, struct fault *fault)
{
    struct layer_set *set = &graphs->set[index];
    struct rank *rank = graphs->rank;
    int st = EXIT_OK;

    TRY(weights_init(&set->w1, graphs->device, w1, fault));
    TRY(weights_init(&set->w2, graphs->device, w2, fault));
    if (index == 0) {
        TRY(bench_fill_weights(&set->w1, 1000 + (uint64_t)rank->link->rank, fault));
        TRY(bench_fill_weights(&set->w2, 2000 + (uint64_t)rank->link->rank, fault));
    } else {
        TRY(weights_copy(&set->w1, &graphs->set[0].w1, fault));
        TRY(weights_copy(&set->w2, &graphs->set[0].w2, fault));
    }
    TRY(rank_create_runner(rank, &set->w1, &set->w2, fault));
    set->runner = rank->runner;
    rank->runner = NULL;
out:
    return st;
}

int bench_make_sets(struct graphs *graphs, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    struct weights_shape w1;
    struct weights_shape w2;
    int st = EXIT_OK;

    bench_weights_shapes(&job->shape, job->format,
                         graphs->rank->instance.plan->bounds->experts_local, &w1, &w2);
    TRY(count_sets(graphs, &w1, &w2, fault));
    for (int i = 0; i < graphs->sets; i++)
        TRY(make_set(graphs, i, &w1, &w2, fault));
out:
    return st;
}

int bench_make_rows(struct graphs *graphs, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    struct device *device = graphs->device;
    uint64_t pairs = (uint64_t)(job->tokens_max * job->shape.top_k);
    uint64_t bytes = (uint64_t)job->tokens_max * bench_row_bytes(job);
    float *weights = malloc(pairs * sizeof *weights);
    int st = EXIT_OK;

    graphs->drawn = malloc(BENCH_FORWARDS * pairs * sizeof *graphs->drawn);
    if (weights == NULL || graphs->drawn == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory for the rows"));
    for (uint64_t i = 0; i < pairs; i++)
        weights[i] = 1.0f / (float)job->shape.top_k;
    TRY(memory_from(&graphs->router_weights, device, weights, pairs * sizeof *weights,
                    "the router weights", fault));
    for (int i = 0; i < BENCH_FORWARDS; i++) {
        TRY(memory_init(&graphs->x[i], device, bytes, "the rows", fault));
        TRY(memory_init(&graphs->y[i], device, bytes, "the rows", fault));
        TRY(memory_init(&graphs->ids[i], device, pairs * sizeof(int32_t), "the ids", fault));
        TRY(bench_fill_rows(&graphs->x[i], device, job->row_format,
                            3000 + (uint64_t)(graphs->rank->link->rank * BENCH_FORWARDS + i),
                            fault));
    }
out:
    free(weights);
    return st;
}

int bench_make_delay(struct graphs *graphs, double fill_bytes_per_s, struct fault *fault)
{
    double bytes = fill_bytes_per_s * graphs->job->delay_us / 1e6;

    if (graphs->job->delay_us <= 0) return EXIT_OK;
    return memory_init(&graphs->delay, graphs->device, (uint64_t)bytes + 1, "the delays", fault);
}

void bench_release(struct graphs *graphs)
{
    struct device *device = graphs->device;

    device_graph_destroy(device, graphs->graph);
    device_graph_destroy(device, graphs->ahead);
    device_event_destroy(device, graphs->before);
    device_event_destroy(device, graphs->after);
    for (int i = 0; i < BENCH_FORWARDS; i++) {
        struct layer_set *set = &graphs->set[i];

        if (set->runner != NULL) graphs->rank->runner_info->api->destroy(set->runner);
        weights_fini(&set->w1);
        weights_fini(&set->w2);
        memory_fini(&graphs->x[i], device);
        memory_fini(&graphs->y[i], device);
        memory_fini(&graphs->ids[i], device);
    }
    memory_fini(&graphs->router_weights, device);
    memory_fini(&graphs->delay, device);
    free(graphs->drawn);
    *graphs = (struct graphs){.rank = graphs->rank, .device = device, .job = graphs->job};
}
