// What one rank of `moxie bench` does where the device has graphs. One graph holds 8 forwards, each
// with its own rows, routing and weights, so that an expert is read again only after more bytes
// than a cache holds; the routing is drawn anew between replays. Replays are timed by the device's
// events. Nothing lies between two forwards of a graph: a kernel that separates them would have to
// be built for the GPU, and this program has none. The weight sets hold the same numbers, because
// only their addresses matter to the memory.

#include "hosts/cli/bench_check.h"
#include "hosts/cli/numbers.h"
#include "hosts/cli/rank.h"
#include "hosts/cli/table.h"

#include <stdlib.h>
#include <string.h>

#define REPLAYS_MIN 30
// Kernels that multiply for long settle at a lower clock.
#define STEADY_TOKENS 4096
#define STEADY_US     2e6
#define ANCHOR_BYTES  ((uint64_t)1 << 30)
#define ANCHOR_PASSES 9

struct layer_set {
    struct weights w1, w2;
    moxie_runner *runner;
};

struct graphs {
    struct rank *rank;
    struct device *device;
    const struct bench_job *job;
    int sets;
    struct layer_set set[BENCH_FORWARDS];
    struct memory x[BENCH_FORWARDS], y[BENCH_FORWARDS], ids[BENCH_FORWARDS];
    struct memory router_weights; // of every forward: all 1 / k
    int64_t rank_tokens[BOOTSTRAP_RANKS_MAX];
    int32_t *drawn; // [BENCH_FORWARDS, tokens_max, k], what `ids` hold
    void *graph, *before, *after;
};

// ---- Memory ------------------------------------------------------------------------------------

static uint64_t row_bytes_of(const struct bench_job *job)
{
    return (uint64_t)job->shape.hidden * sizeof(uint16_t);
}

// As many weight sets as fit beside the rows and what the library plans.
static int count_sets(struct graphs *graphs, const struct weights_shape *w1,
                      const struct weights_shape *w2, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    uint64_t token_bytes = 2 * row_bytes_of(job) + (uint64_t)job->shape.top_k * 8;
    uint64_t one = weights_bytes(w1) + weights_bytes(w2);
    uint64_t rest = graphs->rank->instance.plan->device_bytes;
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
    graphs->sets = (available - rest) / one < BENCH_FORWARDS ? (int)((available - rest) / one)
                                                             : BENCH_FORWARDS;
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

static int make_sets(struct graphs *graphs, struct fault *fault)
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

static int make_rows(struct graphs *graphs, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    struct device *device = graphs->device;
    uint64_t pairs = (uint64_t)(job->tokens_max * job->shape.top_k);
    uint64_t bytes = (uint64_t)job->tokens_max * row_bytes_of(job);
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
        TRY(bench_fill_rows(&graphs->x[i], device, job->row_format, 3000 + (uint64_t)i, fault));
    }
out:
    free(weights);
    return st;
}

static void release(struct graphs *graphs)
{
    struct device *device = graphs->device;

    device_graph_destroy(device, graphs->graph);
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
    free(graphs->drawn);
    *graphs = (struct graphs){.rank = graphs->rank, .device = device, .job = graphs->job};
}

// ---- Replays -----------------------------------------------------------------------------------

// On a profiler's timeline: what is done, with which shape, format and tokens.
static void range_begin(struct graphs *graphs, const char *what, int64_t tokens)
{
    const struct bench_shape *shape = &graphs->job->shape;
    char name[160];

    (void)snprintf(name, sizeof name, "%s %lld,%lld,%lld,%lld %s tokens %lld", what,
                   (long long)shape->hidden, (long long)shape->intermediate,
                   (long long)shape->experts, (long long)shape->top_k,
                   format_word(graphs->job->format), (long long)tokens);
    graphs->device->table->range_begin(graphs->device, name);
}

static void range_end(struct graphs *graphs)
{
    graphs->device->table->range_end(graphs->device);
}

static int32_t *drawn_of(const struct graphs *graphs, int forward)
{
    int64_t pairs = graphs->job->tokens_max * graphs->job->shape.top_k;

    return graphs->drawn + forward * pairs;
}

// The routings of a replay, one for each of its forwards.
static int draw(struct graphs *graphs, int cell, int replay, struct fault *fault)
{
    struct device *device = graphs->device;
    const struct bench_shape *shape = &graphs->job->shape;
    int64_t tokens = graphs->job->tokens[cell];
    uint64_t bytes = (uint64_t)(tokens * shape->top_k) * sizeof(int32_t);
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct draw which = {cell, replay * BENCH_FORWARDS + i, graphs->rank->link->rank};

        bench_draw_ids(shape, &which, tokens, drawn_of(graphs, i));
        TRY(device->table->copy_in(device, graphs->ids[i].at, drawn_of(graphs, i), bytes, fault));
    }
out:
    return st;
}

static int forward_all(struct graphs *graphs, struct fault *fault)
{
    const struct bench_job *job = graphs->job;
    struct rank *rank = graphs->rank;
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct forward forward = {
            .rank_tokens = graphs->rank_tokens,
            .x = graphs->x[i].at,
            .ids = graphs->ids[i].at,
            .weights = graphs->router_weights.at,
            .y = graphs->y[i].at,
            .x_format = job->row_format,
            .y_format = job->row_format,
            .id_bytes = 4,
            .hidden = job->shape.hidden,
            .top_k = job->shape.top_k,
        };

        rank->runner = graphs->set[i % graphs->sets].runner;
        TRY(rank_forward(rank, &forward, fault));
    }
out:
    rank->runner = NULL; // the set's
    return st;
}

// Once without a graph, because the first call of anything may load it.
static int warm_up(struct graphs *graphs, int64_t tokens, struct fault *fault)
{
    int st = EXIT_OK;

    range_begin(graphs, "warm-up", tokens);
    TRY(forward_all(graphs, fault));
    TRY(graphs->device->table->synchronise(graphs->device, fault));
out:
    range_end(graphs);
    return st;
}

static int capture(struct graphs *graphs, int64_t tokens, struct fault *fault)
{
    struct device *device = graphs->device;
    struct fault ending;
    int st = EXIT_OK;
    int ended = EXIT_OK;

    range_begin(graphs, "capture", tokens);
    TRY(device->table->capture_begin(device, fault));
    st = forward_all(graphs, fault);
    ended = device->table->capture_end(device, &graphs->graph, &ending);
    if (st == EXIT_OK && ended != EXIT_OK) {
        *fault = ending;
        st = ended;
    }
out:
    range_end(graphs);
    return st;
}

// Twice: the first keeps the device busy until the second, which is timed, has reached it.
static int replay(struct graphs *graphs, int64_t tokens, double *time_us, struct fault *fault)
{
    struct device *device = graphs->device;
    uint64_t bytes = (uint64_t)tokens * row_bytes_of(graphs->job);
    int st = EXIT_OK;

    range_begin(graphs, "replay", tokens);
    TRY(device->table->graph_launch(device, graphs->graph, fault));
    for (int i = 0; i < BENCH_FORWARDS; i++)
        TRY(device->table->fill(device, graphs->y[i].at, BENCH_POISON, bytes, fault));
    TRY(device->table->event_record(device, graphs->before, fault));
    TRY(device->table->graph_launch(device, graphs->graph, fault));
    TRY(device->table->event_record(device, graphs->after, fault));
    TRY(device->table->synchronise(device, fault));
    TRY(device->table->elapsed_us(device, graphs->before, graphs->after, time_us, fault));
out:
    range_end(graphs);
    return st;
}

// The first and the last row of every forward, or all of them.
static int check_outputs(struct graphs *graphs, int64_t tokens, int all, struct fault *fault)
{
    int st = EXIT_OK;

    range_begin(graphs, "check", tokens);
    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct output output = {&graphs->y[i], graphs->job->shape.hidden,
                                      graphs->job->row_format};

        TRY(bench_check_rows(graphs->device, &output, 0, all ? tokens : 1, fault));
        if (!all) TRY(bench_check_rows(graphs->device, &output, tokens - 1, 1, fault));
    }
out:
    range_end(graphs);
    return st;
}

// The last token of the last forward, by plain loops.
static int check_numbers(struct graphs *graphs, int64_t tokens, double *relative_error,
                         struct fault *fault)
{
    const struct bench_shape *shape = &graphs->job->shape;
    const int last = BENCH_FORWARDS - 1;
    const struct layer_set *set = &graphs->set[last % graphs->sets];
    const struct output output = {&graphs->y[last], shape->hidden, graphs->job->row_format};
    uint64_t row_bytes = row_bytes_of(graphs->job);
    double error_max = bench_check_error_max(graphs->job->format);
    uint8_t *x = malloc(row_bytes);
    struct token token = {
        .w1 = &set->w1,
        .w2 = &set->w2,
        .x = x,
        .x_format = graphs->job->row_format,
        .experts = drawn_of(graphs, last) + (tokens - 1) * shape->top_k,
        .top_k = shape->top_k,
    };
    int st = EXIT_OK;

    range_begin(graphs, "check", tokens);
    if (x == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(graphs->device->table->copy_out(graphs->device, x,
                                        graphs->x[last].at + (uint64_t)(tokens - 1) * row_bytes,
                                        row_bytes, fault));
    TRY(bench_check_token(graphs->device, &output, tokens - 1, &token, relative_error, fault));
    // NaN is none: a layer whose output is zero would pass whatever it computes.
    if (!(*relative_error <= error_max))
        TRY(fault_set(fault, EXIT_TOLERANCE,
                      "%lld tokens: the last one's relative error is %.3e; at most %.0e is wanted",
                      (long long)tokens, *relative_error, error_max));
out:
    range_end(graphs);
    free(x);
    return st;
}

// How many replays fit into the time for a cell. Large cells first run for a while.
static int settle(struct graphs *graphs, int64_t tokens, int *replays, struct fault *fault)
{
    double budget_us = graphs->job->seconds * 1e6;
    double spent_us = 0;
    double time_us = 0;
    int st = EXIT_OK;

    range_begin(graphs, "settle", tokens);
    do {
        TRY(replay(graphs, tokens, &time_us, fault));
        spent_us += time_us;
    } while (time_us > 0 && tokens >= STEADY_TOKENS && spent_us < STEADY_US);
    *replays = REPLAYS_MIN;
    if (time_us > 0 && budget_us / time_us > REPLAYS_MIN)
        *replays = budget_us / time_us < BENCH_REPETITIONS_MAX ? (int)(budget_us / time_us)
                                                               : BENCH_REPETITIONS_MAX;
out:
    range_end(graphs);
    return st;
}

static int send(const struct graphs *graphs, json_t *result, struct fault *fault)
{
    char *text = result != NULL ? json_dumps(result, JSON_COMPACT) : NULL;
    int st = EXIT_OK;

    if (text == NULL)
        st = fault_set(fault, EXIT_TROUBLE, "out of memory");
    else if (graphs->rank->link->rank == 0)
        st = link_send(graphs->rank->link, MESSAGE_RESULT, text, strlen(text), fault);
    free(text);
    json_decref(result);
    return st;
}

static int run_cell(struct graphs *graphs, int cell, struct fault *fault)
{
    const struct rank *rank = graphs->rank;
    int64_t tokens = graphs->job->tokens[cell];
    json_t *times_us = json_array();
    double time_us = 0;
    double relative_error = 0;
    int replays = 0;
    int st = EXIT_OK;

    for (int i = 0; i < rank->link->ranks; i++)
        graphs->rank_tokens[i] = tokens;
    TRY(draw(graphs, cell, BENCH_REPETITIONS_MAX, fault));
    TRY(warm_up(graphs, tokens, fault));
    TRY(capture(graphs, tokens, fault));
    TRY(settle(graphs, tokens, &replays, fault));
    for (int i = 0; i < replays; i++) {
        TRY(draw(graphs, cell, i, fault));
        TRY(replay(graphs, tokens, &time_us, fault));
        TRY(check_outputs(graphs, tokens, i == replays - 1, fault));
        (void)json_array_append_new(times_us, json_real(time_us / BENCH_FORWARDS));
        link_progress(rank->link, (double)(i + 1) / replays);
    }
    TRY(check_numbers(graphs, tokens, &relative_error, fault));
    TRY(send(graphs,
             json_pack("{s:i, s:s, s:s, s:O, s:f}", "cell", cell, "runner", rank->runner_info->name,
                       "dispatcher", rank->dispatcher_info->name, "times_us", times_us,
                       "relative_error", relative_error),
             fault));
out:
    device_graph_destroy(graphs->device, graphs->graph);
    graphs->graph = NULL;
    json_decref(times_us);
    return st;
}

// ---- Anchors -----------------------------------------------------------------------------------

// What the driver's own copy and fill reach, in bytes a second; of a copy, read and written ones.
struct rates {
    double copy, fill;
};

static int time_pass(struct graphs *graphs, struct memory halves[2], int copies, double *time_us,
                     struct fault *fault)
{
    struct device *device = graphs->device;
    int st = EXIT_OK;

    TRY(device->table->event_record(device, graphs->before, fault));
    if (copies)
        TRY(device->table->copy(device, halves[0].at, halves[1].at, halves[0].bytes, fault));
    else
        TRY(device->table->fill(device, halves[0].at, 0x3c, halves[0].bytes, fault));
    TRY(device->table->event_record(device, graphs->after, fault));
    TRY(device->table->synchronise(device, fault));
    TRY(device->table->elapsed_us(device, graphs->before, graphs->after, time_us, fault));
out:
    return st;
}

static int measure_rate(struct graphs *graphs, struct memory halves[2], int copies, double *rate,
                        struct fault *fault)
{
    double times_us[ANCHOR_PASSES];
    double bytes = (double)halves[0].bytes * (copies ? 2 : 1);
    int st = EXIT_OK;

    TRY(time_pass(graphs, halves, copies, &times_us[0], fault));
    for (int i = 0; i < ANCHOR_PASSES; i++)
        TRY(time_pass(graphs, halves, copies, &times_us[i], fault));
    numbers_sort(times_us, ANCHOR_PASSES);
    *rate = 1e6 * bytes / numbers_quantile(times_us, ANCHOR_PASSES, 0.5);
out:
    return st;
}

static int measure_rates(struct graphs *graphs, struct rates *rates, struct fault *fault)
{
    struct device *device = graphs->device;
    struct memory halves[2] = {{NULL, 0}, {NULL, 0}};
    uint64_t bytes = 0;
    int st = EXIT_OK;

    TRY(device->table->free_bytes(device, &bytes, fault));
    bytes = bytes / 8 < ANCHOR_BYTES ? bytes / 8 : ANCHOR_BYTES;
    TRY(memory_init(&halves[0], device, bytes, "the anchors", fault));
    TRY(memory_init(&halves[1], device, bytes, "the anchors", fault));
    TRY(bench_fill_rows(&halves[1], device, MOXIE_FORMAT_BF16, 4000, fault));
    TRY(measure_rate(graphs, halves, 1, &rates->copy, fault));
    TRY(measure_rate(graphs, halves, 0, &rates->fill, fault));
out:
    memory_fini(&halves[0], device);
    memory_fini(&halves[1], device);
    return st;
}

static int make_events(struct graphs *graphs, struct fault *fault)
{
    struct device *device = graphs->device;
    int st = EXIT_OK;

    TRY(device->table->event_create(device, &graphs->before, fault));
    TRY(device->table->event_create(device, &graphs->after, fault));
out:
    return st;
}

int bench_graphs(struct rank *rank, const struct bench_job *job, struct fault *fault)
{
    struct graphs graphs = {.rank = rank, .device = &rank->device, .job = job};
    struct rates rates[2] = {{0, 0}, {0, 0}};
    int sets = 0;
    int st = EXIT_OK;

    TRY(make_events(&graphs, fault));
    TRY(measure_rates(&graphs, &rates[0], fault));
    TRY(make_sets(&graphs, fault));
    TRY(make_rows(&graphs, fault));
    TRY(rank_create_dispatcher(rank, fault));
    sets = graphs.sets;
    for (int cell = 0; cell < job->cells; cell++)
        TRY(run_cell(&graphs, cell, fault));
    release(&graphs);
    TRY(make_events(&graphs, fault));
    TRY(measure_rates(&graphs, &rates[1], fault));
    TRY(send(&graphs,
             json_pack("{s:s, s:i, s:[f, f], s:[f, f]}", "device", rank->device.name, "weight_sets",
                       sets, "copy_bytes_per_s", rates[0].copy, rates[1].copy, "fill_bytes_per_s",
                       rates[0].fill, rates[1].fill),
             fault));
out:
    release(&graphs);
    return st;
}
