// What one rank of `moxie bench` does where the device has graphs. One graph holds 8 forwards, each
// with its own rows, routing and weights, so that an expert is read again only after more bytes
// than a cache holds; the routing is drawn anew between replays. Replays are timed by the device's
// events. Nothing lies between two forwards of a graph: a kernel that separates them would have to
// be built for the GPU, and this program has none. The weight sets hold the same numbers, because
// only their addresses matter to the memory. Over several ranks all of them replay together, and a
// time is that of the slowest.

#include "hosts/cli/bench_graph.h"

#include <stdlib.h>
#include <string.h>

// Kernels that multiply for long settle at a lower clock.
#define STEADY_TOKENS 4096
#define STEADY_US     2e6
#define REASON_BYTES  256

// What a rank says of one replay.
struct sample {
    double total_us, time_us, event_us;
    double sent, came; // rows, of one forward
};

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

// The routings of a replay, one for each of its forwards.
static int draw(struct graphs *graphs, int cell, int replay, struct fault *fault)
{
    struct device *device = graphs->device;
    const struct bench_shape *shape = &graphs->job->shape;
    int64_t tokens = graphs->job->tokens[cell];
    uint64_t bytes = (uint64_t)(tokens * shape->top_k) * sizeof(int32_t);
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct draw which = {cell, replay * BENCH_FORWARDS + i, graphs->rank->link->rank,
                                   graphs->rank->link->ranks, graphs->job->skew};

        bench_draw_ids(shape, &which, tokens, bench_drawn(graphs, i));
        TRY(device->table->copy_in(device, graphs->ids[i].at, bench_drawn(graphs, i), bytes,
                                   fault));
    }
out:
    return st;
}

struct forward bench_forward(const struct graphs *graphs, int forward)
{
    const struct bench_job *job = graphs->job;

    return (struct forward){
        .rank_tokens = graphs->rank_tokens,
        .x = graphs->x[forward].at,
        .ids = graphs->ids[forward].at,
        .weights = graphs->router_weights.at,
        .y = graphs->y[forward].at,
        .x_format = job->row_format,
        .y_format = job->row_format,
        .id_bytes = 4,
        .hidden = job->shape.hidden,
        .top_k = job->shape.top_k,
    };
}

static int run_layers(struct graphs *graphs, struct fault *fault)
{
    struct rank *rank = graphs->rank;
    int st = EXIT_OK;

    for (int i = 0; i < BENCH_FORWARDS; i++) {
        const struct forward forward = bench_forward(graphs, i);

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
    TRY((graphs->rounds != NULL ? bench_rounds_prepare : run_layers)(graphs, fault));
    TRY(graphs->device->table->synchronise(graphs->device, fault));
out:
    range_end(graphs);
    return st;
}

int bench_capture(struct graphs *graphs, int (*enqueue)(struct graphs *, struct fault *),
                  void **graph, struct fault *fault)
{
    struct device *device = graphs->device;
    struct fault ending;
    int st = EXIT_OK;
    int ended = EXIT_OK;

    TRY(device->table->capture_begin(device, fault));
    st = enqueue(graphs, fault);
    ended = device->table->capture_end(device, graph, &ending);
    if (st == EXIT_OK && ended != EXIT_OK) {
        *fault = ending;
        st = ended;
    }
out:
    return st;
}

static int capture(struct graphs *graphs, int64_t tokens, struct fault *fault)
{
    int st = EXIT_OK;

    range_begin(graphs, "capture", tokens);
    if (graphs->rounds == NULL) {
        TRY(bench_capture(graphs, run_layers, &graphs->graph, fault));
    } else {
        TRY(bench_capture(graphs, bench_rounds_prepare, &graphs->ahead, fault));
        TRY(bench_capture(graphs, bench_rounds_run, &graphs->graph, fault));
    }
    TRY(bench_nccl_begin(graphs, tokens, fault));
out:
    range_end(graphs);
    return st;
}

// The start of this rank put off, by what keeps the device itself busy: what the host waits, the
// graph ahead would hide.
static int start_late(struct graphs *graphs, struct fault *fault)
{
    uint64_t seed = graphs->replays << 8 ^ (uint64_t)graphs->rank->link->rank;
    uint64_t bytes = (uint64_t)(bench_random(seed) * (double)graphs->delay.bytes);

    if (bytes == 0) return EXIT_OK;
    return graphs->device->table->fill(graphs->device, graphs->delay.at, 0x3c, bytes, fault);
}

int bench_replay_graph(struct graphs *graphs, void *ahead, void *graph, double *total_us,
                       struct fault *fault)
{
    struct device *device = graphs->device;
    uint64_t bytes =
        (uint64_t)graphs->rank_tokens[graphs->rank->link->rank] * bench_row_bytes(graphs->job);
    int st = EXIT_OK;

    graphs->replays++;
    if (graphs->rank->link->ranks > 1 && link_barrier(graphs->rank->link) != 0)
        TRY(fault_set(fault, EXIT_TROUBLE, "the other ranks cannot be reached"));
    TRY(device->table->graph_launch(device, ahead, fault));
    for (int i = 0; i < BENCH_FORWARDS; i++)
        TRY(device->table->fill(device, graphs->y[i].at, BENCH_POISON, bytes, fault));
    TRY(start_late(graphs, fault));
    TRY(device->table->event_record(device, graphs->before, fault));
    TRY(device->table->graph_launch(device, graph, fault));
    TRY(device->table->event_record(device, graphs->after, fault));
    TRY(device->table->synchronise(device, fault));
    TRY(device->table->elapsed_us(device, graphs->before, graphs->after, total_us, fault));
out:
    return st;
}

// Rows that this rank has sent and got so far. Nothing moves where there is one.
static int count_rows(const struct rank *rank, double *sent, double *came, struct fault *fault)
{
    moxie_stats stats = {.struct_size = sizeof stats};
    struct library_error error;
    int32_t status = MOXIE_OK;

    *sent = *came = 0;
    if (rank->link->ranks == 1) return EXIT_OK;
    status = rank->instance.api->stats(rank->instance.handle, &stats, library_error(&error));
    if (status != MOXIE_OK) return fault_from_status(fault, status, "stats", error.text);
    *sent = (double)stats.rows_sent;
    *came = (double)stats.rows_received;
    return EXIT_OK;
}

static int merge(struct rank *rank, const struct sample *own, struct replayed *all,
                 struct fault *fault)
{
    struct sample samples[BOOTSTRAP_RANKS_MAX];
    double fastest_us = own->time_us;
    int st = EXIT_OK;

    *all = (struct replayed){0};
    TRY(rank_gather(rank, own, samples, sizeof samples[0], fault));
    for (int i = 0; i < rank->link->ranks; i++) {
        const struct sample *sample = &samples[i];

        if (sample->total_us > all->total_us) all->total_us = sample->total_us;
        if (sample->time_us > all->time_us) all->time_us = sample->time_us;
        if (sample->time_us < fastest_us) fastest_us = sample->time_us;
        if (sample->event_us > all->event_us) all->event_us = sample->event_us;
        if (sample->sent > all->sent_most) all->sent_most = sample->sent;
        if (sample->came > all->came_most) all->came_most = sample->came;
        all->rows += sample->sent / rank->link->ranks;
    }
    all->spread_us = all->time_us - fastest_us;
out:
    return st;
}

// The first graph keeps the device busy until the second, which is timed, has reached it; over
// several ranks it also lets them begin the second together.
static int replay(struct graphs *graphs, int64_t tokens, struct replayed *all, struct fault *fault)
{
    void *ahead = graphs->ahead != NULL ? graphs->ahead : graphs->graph;
    const double forwards = 2 * BENCH_FORWARDS; // of both graphs
    struct sample own = {0};
    double sent = 0;
    double came = 0;
    int st = EXIT_OK;

    range_begin(graphs, "replay", tokens);
    TRY(count_rows(graphs->rank, &sent, &came, fault));
    TRY(bench_replay_graph(graphs, ahead, graphs->graph, &own.total_us, fault));
    own.time_us = own.total_us / BENCH_FORWARDS;
    TRY(bench_rounds_time(graphs, &own.time_us, &own.event_us, fault));
    TRY(count_rows(graphs->rank, &own.sent, &own.came, fault));
    own.sent = (own.sent - sent) / forwards;
    own.came = (own.came - came) / forwards;
    TRY(merge(graphs->rank, &own, all, fault));
out:
    range_end(graphs);
    return st;
}

static int check_outputs(struct graphs *graphs, int64_t tokens, int all, struct fault *fault)
{
    int st = EXIT_OK;

    range_begin(graphs, "check", tokens);
    TRY(bench_check_outputs(graphs, tokens, all, fault));
out:
    range_end(graphs);
    return st;
}

static int check_numbers(struct graphs *graphs, int64_t tokens, double *relative_error,
                         struct fault *fault)
{
    int st = EXIT_OK;

    range_begin(graphs, "check", tokens);
    TRY(bench_check_numbers(graphs, tokens, relative_error, fault));
out:
    range_end(graphs);
    return st;
}

// How many replays fit into the time for a cell. Large cells first run for a while. All ranks see
// the same times, so that they do the same.
static int settle(struct graphs *graphs, int64_t tokens, int *replays, struct fault *fault)
{
    const int least = graphs->job->replays;
    double budget_us = graphs->job->seconds * 1e6;
    double spent_us = 0;
    struct replayed replayed = {0};
    int st = EXIT_OK;

    range_begin(graphs, "settle", tokens);
    do {
        TRY(replay(graphs, tokens, &replayed, fault));
        spent_us += replayed.total_us;
    } while (replayed.total_us > 0 && tokens >= STEADY_TOKENS && spent_us < STEADY_US);
    *replays = least;
    if (replayed.total_us > 0 && budget_us / replayed.total_us > least)
        *replays = budget_us / replayed.total_us < BENCH_REPETITIONS_MAX
                       ? (int)(budget_us / replayed.total_us)
                       : BENCH_REPETITIONS_MAX;
out:
    range_end(graphs);
    return st;
}

// ---- Cells -------------------------------------------------------------------------------------

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

static void append(json_t *samples, const struct replayed *replayed)
{
    (void)json_array_append_new(samples,
                                json_pack("[f, f, f, f, f, f]", replayed->time_us,
                                          replayed->spread_us, replayed->rows, replayed->sent_most,
                                          replayed->came_most, replayed->event_us));
}

static int replay_nccl(struct graphs *graphs, int64_t tokens, int backwards, struct fault *fault)
{
    int st = EXIT_OK;

    if (graphs->collectives == NULL) return EXIT_OK;
    range_begin(graphs, "NCCL", tokens);
    TRY(bench_nccl_replay(graphs, backwards, fault));
out:
    range_end(graphs);
    return st;
}

// Moxie, then the collectives beside it; then the other way round: what warms up or slows down
// meets all alike. The last outputs are left as they are, for the checks.
static int run_turn(struct graphs *graphs, int cell, int turn, int last, json_t *samples,
                    struct fault *fault)
{
    int64_t tokens = graphs->job->tokens[cell];
    int ends = turn % 2 == 1 || last; // Moxie's replay ends the turn
    struct replayed replayed = {0};
    int st = EXIT_OK;

    TRY(draw(graphs, cell, turn, fault));
    if (ends) TRY(replay_nccl(graphs, tokens, 1, fault));
    TRY(replay(graphs, tokens, &replayed, fault));
    TRY(check_outputs(graphs, tokens, last, fault));
    append(samples, &replayed);
    if (!ends) TRY(replay_nccl(graphs, tokens, 0, fault));
out:
    return st;
}

static int run_cell(struct graphs *graphs, int cell, struct fault *fault)
{
    const struct rank *rank = graphs->rank;
    int64_t tokens = graphs->job->tokens[cell];
    json_t *samples = json_array();
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
        TRY(run_turn(graphs, cell, i, i == replays - 1, samples, fault));
        link_progress(rank->link, (double)(i + 1) / replays);
    }
    TRY(check_numbers(graphs, tokens, &relative_error, fault));
    TRY(send(graphs,
             json_pack("{s:i, s:s, s:s, s:O, s:f, s:o*}", "cell", cell, "runner",
                       rank->runner_info->name, "dispatcher", rank->dispatcher_info->name,
                       "samples", samples, "relative_error", relative_error, "nccl",
                       bench_nccl_end(graphs)),
             fault));
out:
    device_graph_destroy(graphs->device, graphs->graph);
    device_graph_destroy(graphs->device, graphs->ahead);
    graphs->graph = graphs->ahead = NULL;
    json_decref(samples);
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

static int run_cells(struct graphs *graphs, char *reason, struct fault *fault)
{
    int st = EXIT_OK;

    TRY(bench_make_sets(graphs, fault));
    TRY(bench_make_rows(graphs, fault));
    TRY(rank_create_dispatcher(graphs->rank, fault));
    TRY(bench_rounds_open(graphs, fault));
    TRY(bench_nccl_open(graphs, reason, REASON_BYTES, fault));
    for (int cell = 0; cell < graphs->job->cells; cell++)
        TRY(run_cell(graphs, cell, fault));
out:
    bench_nccl_close(graphs, st);
    bench_rounds_close(graphs);
    return st;
}

int bench_graphs(struct rank *rank, const struct bench_job *job, struct fault *fault)
{
    struct graphs graphs = {.rank = rank, .device = &rank->device, .job = job};
    struct rates rates[2] = {{0, 0}, {0, 0}};
    char reason[REASON_BYTES] = "";
    int sets = 0;
    int st = EXIT_OK;

    TRY(make_events(&graphs, fault));
    TRY(bench_measure_rates(&graphs, &rates[0], fault));
    TRY(bench_make_delay(&graphs, rates[0].fill, fault));
    TRY(run_cells(&graphs, reason, fault));
    sets = graphs.sets;
    bench_release(&graphs);
    TRY(make_events(&graphs, fault));
    TRY(bench_measure_rates(&graphs, &rates[1], fault));
    TRY(send(&graphs,
             json_pack("{s:s, s:i, s:[f, f], s:[f, f], s:s}", "device", rank->device.name,
                       "weight_sets", sets, "copy_bytes_per_s", rates[0].copy, rates[1].copy,
                       "fill_bytes_per_s", rates[0].fill, rates[1].fill, "no_nccl", reason),
             fault));
out:
    bench_release(&graphs);
    return st;
}
