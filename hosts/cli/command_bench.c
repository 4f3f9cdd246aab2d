// moxie bench: how fast a layer runs, as a share of what this machine allows.

#include "hosts/cli/bench.h"
#include "hosts/cli/bootstrap.h"
#include "hosts/cli/commands.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/machine.h"
#include "hosts/cli/numbers.h"
#include "hosts/cli/preflight.h"
#include "hosts/cli/table.h"

#include <stdlib.h>
#include <string.h>

struct bench_options {
    struct rank_options rank;
    struct bench_shape shape;
    const char *shape_text; // NULL until given
    int32_t format;
    int cells;
    int64_t tokens[BENCH_CELLS_MAX]; // per rank
    double seconds;                  // for each cell
};

enum { OPTION_SHAPE = 0x3000, OPTION_TOKENS, OPTION_WEIGHT_FORMAT, OPTION_SECONDS };

static void parse_tokens(struct bench_options *options, const char *text, struct argp_state *state)
{
    options->cells = 0;
    for (const char *next = text; next != NULL; options->cells++) {
        char *end = NULL;
        long long tokens = strtoll(next, &end, 10);

        if (end == next || tokens < 1 || tokens > (int64_t)1 << 32 || (*end != ',' && *end != '\0'))
            argp_error(state, "--tokens %s: wanted is a list like 1,16,256", text);
        if (options->cells == BENCH_CELLS_MAX)
            argp_error(state, "--tokens: at most %d numbers", BENCH_CELLS_MAX);
        options->tokens[options->cells] = tokens;
        next = *end == ',' ? end + 1 : NULL;
    }
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct bench_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->rank;
        return 0;
    case OPTION_SHAPE:
        options->shape_text = text;
        if (!bench_shape_parse(&options->shape, text))
            argp_error(state,
                       "--shape %s: wanted is HIDDEN,INTERMEDIATE,EXPERTS,TOP_K with TOP_K at most "
                       "%d, or q30b, q235b, dsv3ep8, mixtral",
                       text, MOXIE_TOP_K_MAX);
        return 0;
    case OPTION_TOKENS:
        parse_tokens(options, text, state);
        return 0;
    case OPTION_WEIGHT_FORMAT:
        options->format = format_from_word(text);
        if (options->format == MOXIE_FORMAT_AUTO)
            argp_error(state,
                       "--weight-format %s: there are f32, bf16, f16, fp8_tensor, fp8_channel, "
                       "fp8_block128, int4_g32, mxfp4, nvfp4",
                       text);
        return 0;
    case OPTION_SECONDS:
        options->seconds = option_number(state, "--seconds", text);
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no argument is wanted: \"%s\"", text);
        return 0;
    case ARGP_KEY_END:
        if (options->shape_text == NULL || options->cells == 0)
            argp_error(state, "wanted are --shape and --tokens");
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option table_of_options[] = {
    {"shape", OPTION_SHAPE, "H,I,E,k|NAME", 0,
     "hidden, intermediate, experts, top-k; or q30b, q235b, dsv3ep8, mixtral", 1},
    {"tokens", OPTION_TOKENS, "LIST", 0, "tokens of each rank, like 1,16,256", 1},
    {"weight-format", OPTION_WEIGHT_FORMAT, "F", 0, "bf16 unless given", 1},
    {"seconds", OPTION_SECONDS, "S", 0, "time for each number of tokens (default 2)", 1},
    {0},
};

static const struct argp_child children[] = {{&rank_argp, 0, NULL, 0}, {0}};

static const char doc[] =
    "Times the forward of one layer with random weights, bf16 rows and a fresh routing in every "
    "repetition. The floor is the larger of two times: the weights of the experts that the routing "
    "hits at the read bandwidth of this machine, and 6*T*k*H*I operations at its f32 peak; both "
    "are measured first. Weights that fit into a cache can be under the floor.\vOver several ranks "
    "a time is that of the slowest, and the floor counts all of them, since they share this "
    "machine.";

static json_t *make_config(const struct bench_options *options)
{
    json_int_t ranks = options->rank.ranks;
    int64_t longest = 1;
    json_t *config = NULL;

    for (int i = 0; i < options->cells; i++)
        if (options->tokens[i] > longest) longest = options->tokens[i];
    config = json_pack(
        "{s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:I}", "hidden_size",
        (json_int_t)options->shape.hidden, "intermediate_size",
        (json_int_t)options->shape.intermediate, "num_experts", (json_int_t)options->shape.experts,
        "top_k", (json_int_t)options->shape.top_k, "weight_format", format_word(options->format),
        "dp_size", ranks, "tp_size", ranks, "ep_size", ranks, "forward_tokens_max",
        (json_int_t)longest, "cpu_threads", (json_int_t)rank_threads(&options->rank));
    if (config != NULL) rank_options_configure(&options->rank, config);
    return config;
}

// Bytes of all experts' weights; 0 past 2^62, or where the format cannot cut the shape.
static uint64_t layer_bytes(const struct bench_options *options, int64_t experts)
{
    struct weights_shape w1;
    struct weights_shape w2;
    uint64_t both = 0;

    bench_weights_shapes(&options->shape, options->format, experts, &w1, &w2);
    if (weights_bytes(&w1) == 0 || weights_bytes(&w2) == 0 ||
        !bytes_add(weights_bytes(&w1), weights_bytes(&w2), &both))
        return 0;
    return both;
}

// Refuses before anything is allocated what this machine cannot hold.
static int check_memory(const struct bench_options *options, const moxie_plan *plan,
                        struct fault *fault)
{
    uint64_t weights = layer_bytes(options, options->shape.experts);
    uint64_t available = machine_memory_available();
    uint64_t ranks = (uint64_t)options->rank.ranks;
    uint64_t rows = 0;
    uint64_t planned = 0;
    uint64_t needed = 0;
    char needed_text[HUMAN_BYTES];
    char available_text[HUMAN_BYTES];

    if (weights == 0)
        return fault_set(fault, EXIT_REFUSED,
                         "%s weights of this shape cannot be made: past 2^62 bytes, or not whole "
                         "groups of inputs",
                         format_word(options->format));
    // x and y in bf16, ids and weights.
    if (!bytes_mul((uint64_t)plan->bounds->forward_tokens,
                   (uint64_t)(options->shape.hidden * 4 + options->shape.top_k * 8), &rows) ||
        !bytes_add(plan->device_bytes, plan->symmetric_bytes, &planned) ||
        !bytes_add(planned, plan->pinned_bytes, &planned) ||
        !bytes_add(planned, plan->host_bytes, &planned) || !bytes_add(planned, rows, &planned) ||
        !bytes_mul(planned, ranks, &planned) || !bytes_add(planned, weights, &needed))
        needed = UINT64_MAX;
    if (needed <= available) return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED,
                     "this needs %s, and %s are free; take fewer experts, a smaller "
                     "--weight-format or fewer tokens",
                     human_bytes(needed, needed_text), human_bytes(available, available_text));
}

// One number of tokens.
struct cell {
    int repetitions;
    int bound_by_bytes; // in most repetitions
    double median_us, p10_us, p90_us, floor_us, share;
};

struct bench_run {
    const struct bench_options *options;
    struct anchors anchors;
    struct cell cells[BENCH_CELLS_MAX];
    char runner[64], dispatcher[64];
};

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

// The floors of the repetitions of one cell; 0 when memory is lacking.
static int find_floors(const struct bench_run *run, int index, int count, double *floors_us,
                       int *bound_by_bytes)
{
    const struct bench_options *options = run->options;
    const struct bench_shape *shape = &options->shape;
    int64_t tokens = options->tokens[index];
    double flops = 6.0 * (double)tokens * (double)options->rank.ranks * (double)shape->top_k *
                   (double)shape->hidden * (double)shape->intermediate;
    double flops_us = 1e6 * flops / run->anchors.f32_flops_per_s;
    int32_t *ids = malloc((size_t)(tokens * shape->top_k) * sizeof *ids);
    uint8_t *seen = malloc((size_t)shape->experts);
    int by_bytes = 0;

    for (int i = 0; i < count && ids != NULL && seen != NULL; i++) {
        const struct draw draw = {index, i, 0};
        int64_t hit = experts_hit(options, draw, tokens, ids, seen);
        double bytes = (double)layer_bytes(options, 1) * (double)hit;
        double bytes_us = 1e6 * bytes / run->anchors.read_bytes_per_s;

        by_bytes += bytes_us > flops_us;
        floors_us[i] = bytes_us > flops_us ? bytes_us : flops_us;
    }
    *bound_by_bytes = 2 * by_bytes > count;
    count = ids != NULL && seen != NULL;
    free(ids);
    free(seen);
    return count;
}

static int fill_cell(struct bench_run *run, int index, const json_t *times, struct fault *fault)
{
    struct cell *cell = &run->cells[index];
    int count = (int)json_array_size(times);
    double times_us[BENCH_REPETITIONS_MAX];
    double floors_us[BENCH_REPETITIONS_MAX];
    double shares[BENCH_REPETITIONS_MAX];

    if (count < 1 || count > BENCH_REPETITIONS_MAX)
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no times");
    if (!find_floors(run, index, count, floors_us, &cell->bound_by_bytes))
        return fault_set(fault, EXIT_TROUBLE, "out of memory");
    for (int i = 0; i < count; i++) {
        times_us[i] = json_real_value(json_array_get(times, (size_t)i));
        shares[i] = floors_us[i] / times_us[i];
    }
    numbers_sort(times_us, count);
    numbers_sort(floors_us, count);
    numbers_sort(shares, count);
    cell->repetitions = count;
    cell->median_us = numbers_quantile(times_us, count, 0.5);
    cell->p10_us = numbers_quantile(times_us, count, 0.1);
    cell->p90_us = numbers_quantile(times_us, count, 0.9);
    cell->floor_us = numbers_quantile(floors_us, count, 0.5);
    cell->share = numbers_quantile(shares, count, 0.5);
    return EXIT_OK;
}

static int take(void *ctx, int rank, enum message message, const void *payload, uint64_t bytes,
                struct fault *fault)
{
    struct bench_run *run = ctx;
    json_t *result = json_loadb(payload, bytes, 0, NULL);
    const char *runner = NULL;
    const char *dispatcher = NULL;
    json_t *times = NULL;
    int index = -1;
    int st = EXIT_OK;

    (void)message;
    if (json_unpack(result, "{s:i, s:s, s:s, s:o}", "cell", &index, "runner", &runner, "dispatcher",
                    &dispatcher, "times_us", &times) != 0 ||
        index < 0 || index >= run->options->cells) {
        st = fault_set(fault, EXIT_TROUBLE, "rank %d sent no result", rank);
    } else {
        (void)snprintf(run->runner, sizeof run->runner, "%s", runner);
        (void)snprintf(run->dispatcher, sizeof run->dispatcher, "%s", dispatcher);
        st = fill_cell(run, index, times, fault);
    }
    json_decref(result);
    return st;
}

static int run_ranks(struct bench_run *run, const struct plugin *plugin, json_t *config,
                     struct fault *fault)
{
    const struct bench_options *options = run->options;
    const struct hub_options hub = {
        .ranks = (int)options->rank.ranks,
        .silence_ms = options->rank.timeout_s * 1000,
        .doing = "measuring",
    };
    const struct hub_handler handler = {run, take};
    json_t *tokens = json_array();
    json_t *job = NULL;
    int st = EXIT_OK;

    for (int i = 0; i < options->cells; i++)
        (void)json_array_append_new(tokens, json_integer(options->tokens[i]));
    job = json_pack("{s:s, s:s, s:b, s:O, s:o, s:s, s:s, s:f}", "command", "bench", "plugin",
                    plugin->path, "verbose", options->rank.common.verbose, "config", config,
                    "tokens", tokens, "shape", options->shape_text, "weight_format",
                    format_word(options->format), "seconds", options->seconds);
    if (job == NULL)
        return fault_set(fault, EXIT_TROUBLE, "out of memory, or a path that is not UTF-8");
    st = hub_run(&hub, job, &handler, fault);
    json_decref(job);
    return st;
}

static json_t *bench_document(const struct bench_run *run)
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

static void print_bench(const struct bench_run *run)
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

        table_cell(&table, 0, "%lld", (long long)options->tokens[i]);
        table_cell(&table, 1, "%.1f", cell->median_us);
        table_cell(&table, 2, "%.1f", cell->p10_us);
        table_cell(&table, 3, "%.1f", cell->p90_us);
        table_cell(&table, 4, "%.1f", cell->floor_us);
        table_cell(&table, 5, "%s", cell->bound_by_bytes ? "bytes" : "flops");
        table_cell(&table, 6, "%.0f%%", 100 * cell->share);
        table_cell(&table, 7, "%d", cell->repetitions);
    }
    table_print(&table, 0);
    table_fini(&table);
}

static int measure_anchors(struct bench_run *run, struct fault *fault)
{
    int64_t threads = rank_threads(&run->options->rank) * run->options->rank.ranks;
    int cores = machine_cores();

    if (anchors_measure(threads < cores ? (int)threads : cores, &run->anchors)) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "no memory or threads to measure this machine with");
}

int command_bench(int argc, char **argv, struct fault *fault)
{
    const struct argp argp = {table_of_options, parse, NULL, doc, children, NULL, NULL};
    struct bench_options options = {.format = MOXIE_FORMAT_BF16, .seconds = 2};
    struct bench_run run = {.options = &options};
    struct plugin plugin = {.api = NULL};
    struct instance instance = {.api = NULL};
    json_t *config = NULL;
    int st = EXIT_OK;

    rank_options_init(&options.rank);
    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    config = make_config(&options);
    if (config == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory, or a name not in UTF-8"));
    TRY(preflight(&instance, &plugin, &options.rank, config, fault));
    TRY(check_memory(&options, instance.plan, fault));
    TRY(measure_anchors(&run, fault));
    TRY(run_ranks(&run, &plugin, config, fault));
    if (options.rank.common.json)
        st = json_print(bench_document(&run), fault);
    else
        print_bench(&run);
out:
    st = instance_finish(&instance, st, fault);
    plugin_unload(&plugin);
    json_decref(config);
    return st;
}
