// moxie bench: how fast a layer runs, as a share of what this machine allows.

#include "hosts/cli/bench_check.h"
#include "hosts/cli/bench_report.h"
#include "hosts/cli/bootstrap.h"
#include "hosts/cli/commands.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/preflight.h"
#include "hosts/cli/table.h"

#include <stdlib.h>
#include <string.h>

enum {
    OPTION_SHAPE = 0x3000,
    OPTION_TOKENS,
    OPTION_WEIGHT_FORMAT,
    OPTION_ROW_FORMAT,
    OPTION_SECONDS,
    OPTION_OP,
    OPTION_REPLAYS,
    OPTION_SKEW,
    OPTION_DELAY_US
};

#define BENCH_TOKENS_MAX (1LL << 32)

static void parse_tokens(struct bench_options *options, const char *text, struct argp_state *state)
{
    options->cells = 0;
    for (const char *next = text; next != NULL; options->cells++) {
        char *end = NULL;
        long long tokens = strtoll(next, &end, 10); // past 64 bits it is the largest

        if (end == next || (*end != ',' && *end != '\0'))
            argp_error(state, "--tokens %s: wanted is a list like 1,16,256", text);
        if (tokens < 1 || tokens > BENCH_TOKENS_MAX)
            argp_error(state, "--tokens %s: %.*s is not from 1 to %lld", text, (int)(end - next),
                       next, BENCH_TOKENS_MAX);
        if (options->cells == BENCH_CELLS_MAX)
            argp_error(state, "--tokens: at most %d numbers", BENCH_CELLS_MAX);
        options->tokens[options->cells] = tokens;
        next = *end == ',' ? end + 1 : NULL;
    }
}

// Options that say how, not what.
static error_t parse_measuring(int key, char *text, struct argp_state *state)
{
    struct bench_options *options = state->input;

    switch (key) {
    case OPTION_SECONDS:
        options->seconds = option_number(state, "--seconds", text);
        return 0;
    case OPTION_OP:
        options->op = bench_op_parse(text);
        if (options->op < 0)
            argp_error(state, "--op %s: there are layer, dispatch, combine, both", text);
        return 0;
    case OPTION_REPLAYS:
        options->replays = (int)option_integer(state, "--replays", text, 1, BENCH_REPETITIONS_MAX);
        return 0;
    case OPTION_SKEW:
        options->skew = option_number(state, "--skew", text);
        if (options->skew < 1) argp_error(state, "--skew %s: wanted is 1 or more", text);
        return 0;
    case OPTION_DELAY_US:
        options->delay_us = option_number(state, "--delay-us", text);
        if (options->delay_us > BENCH_DELAY_US_MAX)
            argp_error(state, "--delay-us %s: at most %.0f", text, BENCH_DELAY_US_MAX);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct bench_options *options = state->input;
    const char *wanted = NULL;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->rank;
        return 0;
    case OPTION_SHAPE:
        options->shape_text = text;
        wanted = bench_shape_parse(&options->shape, text);
        if (wanted != NULL) argp_error(state, "--shape %s: wanted is %s", text, wanted);
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
    case OPTION_ROW_FORMAT:
        options->row_format = format_from_word(text);
        if (format_element_bytes(options->row_format) != 2)
            argp_error(state, "--row-format %s: there are bf16 and f16", text);
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no argument is wanted: \"%s\"", text);
        return 0;
    case ARGP_KEY_END:
        if (options->shape_text == NULL || options->cells == 0)
            argp_error(state, "wanted are --shape and --tokens");
        return 0;
    default:
        return parse_measuring(key, text, state);
    }
}

static const struct argp_option table_of_options[] = {
    {"shape", OPTION_SHAPE, "H,I,E,k|NAME", 0,
     "hidden and intermediate size, experts, top-k, like 2048,768,128,8; or a name: q30b (those "
     "numbers), q235b (4096,1536,128,8), dsv3ep8 (7168,2048,32,1), mixtral (4096,14336,8,2), dsv3 "
     "(7168,2048,256,8), h4096e256 (4096,2048,256,6)",
     1},
    {"tokens", OPTION_TOKENS, "LIST", 0, "tokens of each rank, like 1,16,256", 1},
    {"weight-format", OPTION_WEIGHT_FORMAT, "F", 0,
     "f32, bf16 (default), f16, fp8_tensor, fp8_channel, fp8_block128, int4_g32, mxfp4 or nvfp4",
     1},
    {"row-format", OPTION_ROW_FORMAT, "F", 0, "of x and y: bf16 (default) or f16", 1},
    {"seconds", OPTION_SECONDS, "S", 0,
     "time for each number of tokens (default 2), at most 1000 repetitions", 1},
    {"op", OPTION_OP, "WORD", 0,
     "what is timed over several GPUs: layer (default), dispatch, combine, or both without experts",
     2},
    {"replays", OPTION_REPLAYS, "N", 0,
     "replay each graph at least N times (default 30; a result of fewer does not count)", 2},
    {"skew", OPTION_SKEW, "F", 0, "rank 0 gets F times the mean number of rows (default: uniform)",
     2},
    {"delay-us", OPTION_DELAY_US, "D", 0,
     "over several ranks, each starts a replay a random time of up to D microseconds late", 2},
    {0},
};

static const struct argp_child children[] = {{&rank_argp, 0, NULL, 0}, {0}};

static const char doc[] =
    "Times the forward of one layer with random weights and rows, and a fresh routing in every "
    "repetition, beside its floor, the shortest time that the hardware allows. On a CPU that is "
    "the longer of two times: to read the weights of the experts that the routing hits at the read "
    "bandwidth of this machine, and to do 6*tokens*k*H*I operations at its f32 peak; both rates "
    "are measured first. Weights that fit into a cache can be under the floor.\n"
    "On a GPU a time is an eighth of a replay of a graph of 8 forwards, which follow each other "
    "directly and have their own rows, routings and, as far as memory goes, weights. The floor "
    "there is that of an H200: 4.5 TB/s and 790 TFLOP/s, with fp8 weights 1580. Outputs are "
    "poisoned before and one token is computed again after, so f32 weights are refused.\v"
    "Over several ranks a time is that of the slowest rank. On a CPU the floor is that of all "
    "ranks together, since they share this machine. On GPUs it is that of the rank with the most "
    "to do, plus the time of the bytes that leave the busiest GPU at 350 GB/s; spread is how far "
    "the fastest rank was from the slowest. --op both times dispatch, the owners' reduction of "
    "result rows that are already there, and combine. --op dispatch and --op combine time its two "
    "halves, by events inside the graph; the reduction is in the second. Where libnccl.so.2 is "
    "found, NCCL's collectives of as many tokens and bytes are timed in turns with the layer.\n\n"
    "Examples:\n"
    "  moxie bench --shape q30b --tokens 1,64,4096\n"
    "  moxie bench --shape dsv3 --tokens 8 --runner moxie_cuda --ranks 8 --op both";

static json_t *make_config(const struct bench_options *options)
{
    json_int_t ranks = options->rank.ranks;
    int64_t longest = 1;
    json_t *config = NULL;

    for (int i = 0; i < options->cells; i++)
        if (options->tokens[i] > longest) longest = options->tokens[i];
    config = json_pack(
        "{s:I, s:I, s:I, s:I, s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "hidden_size",
        (json_int_t)options->shape.hidden, "intermediate_size",
        (json_int_t)options->shape.intermediate, "num_experts", (json_int_t)options->shape.experts,
        "top_k", (json_int_t)options->shape.top_k, "weight_format", format_word(options->format),
        "input_format", format_word(options->row_format), "output_format",
        format_word(options->row_format), "dp_size", ranks, "tp_size", ranks, "ep_size", ranks,
        "forward_tokens_max", (json_int_t)longest, "cpu_threads",
        (json_int_t)rank_threads(&options->rank));
    if (config != NULL) rank_options_configure(&options->rank, config);
    return config;
}

static int check_weights(const struct bench_options *options, struct fault *fault)
{
    if (bench_layer_bytes(&options->shape, options->format, options->shape.experts) > 0)
        return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED,
                     "%s weights of this shape cannot be made: past 2^62 bytes, or not whole "
                     "groups of inputs",
                     format_word(options->format));
}

// Refuses before anything is allocated what this machine cannot hold.
static int check_memory(const struct bench_options *options, const struct instance *instance,
                        struct fault *fault)
{
    const struct preflight_memory need = {
        .weights = bench_layer_bytes(&options->shape, options->format, options->shape.experts),
        // x and y in 16 bits, ids and weights.
        .token = (uint64_t)(options->shape.hidden * 4 + options->shape.top_k * 8),
        .ranks = (uint64_t)options->rank.ranks,
        .advice = "take fewer experts, a smaller --weight-format or fewer tokens",
    };

    return preflight_check_memory(instance, &need, fault);
}

// What a rank on a device with graphs says once of it.
static int take_device(struct bench_run *run, json_t *result, struct fault *fault)
{
    struct bench_device *device = &run->device;
    const char *name = NULL;
    const char *reason = NULL;

    if (json_unpack(result, "{s:s, s:i, s:[f, f], s:[f, f], s:s}", "device", &name, "weight_sets",
                    &device->sets, "copy_bytes_per_s", &device->copy[0], &device->copy[1],
                    "fill_bytes_per_s", &device->fill[0], &device->fill[1], "no_nccl",
                    &reason) != 0)
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no anchors");
    (void)snprintf(device->name, sizeof device->name, "%s", name);
    (void)snprintf(device->no_nccl, sizeof device->no_nccl, "%s", reason);
    return EXIT_OK;
}

// Only keeps what came: while floors are computed, which can take longer than a rank may be silent,
// nobody would be listening.
static int take(void *ctx, int rank, enum message message, const void *payload, uint64_t bytes,
                struct fault *fault)
{
    struct bench_run *run = ctx;
    json_t *result = json_loadb(payload, bytes, 0, NULL);
    const json_t *cell = json_object_get(result, "cell");
    json_int_t index = json_is_integer(cell) ? json_integer_value(cell) : -1;
    int st = EXIT_OK;

    (void)message;
    if (json_object_get(result, "weight_sets") != NULL) {
        st = take_device(run, result, fault);
        json_decref(result);
        return st;
    }
    if (index < 0 || index >= run->options->cells || run->results[index] != NULL) {
        json_decref(result);
        return fault_set(fault, EXIT_TROUBLE, "rank %d sent no result", rank);
    }
    run->results[index] = result;
    return EXIT_OK;
}

static int fill_cell(struct bench_run *run, int index, struct fault *fault)
{
    json_t *result = run->results[index];
    const char *runner = NULL;
    const char *dispatcher = NULL;
    json_t *samples = NULL;
    int st = EXIT_OK;

    if (result == NULL || json_unpack(result, "{s:s, s:s, s:o}", "runner", &runner, "dispatcher",
                                      &dispatcher, "samples", &samples) != 0)
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no result of %lld tokens",
                         (long long)run->options->tokens[index]);
    (void)snprintf(run->runner, sizeof run->runner, "%s", runner);
    (void)snprintf(run->dispatcher, sizeof run->dispatcher, "%s", dispatcher);
    run->cells[index].relative_error = json_number_value(json_object_get(result, "relative_error"));
    TRY(bench_fill_cell(run, index, samples, fault));
    TRY(bench_fill_collectives(run, index, json_object_get(result, "nccl"), fault));
out:
    return st;
}

static int run_ranks(struct bench_run *run, const struct plugin *plugin, json_t *config,
                     struct fault *fault)
{
    const struct bench_options *options = run->options;
    const struct hub_options hub = {
        .ranks = (int)options->rank.ranks,
        .silence_ms = rank_silence_ms(&options->rank),
        .doing = "measuring",
    };
    const struct hub_handler handler = {run, take};
    json_t *tokens = json_array();
    json_t *job = NULL;
    int st = EXIT_OK;

    for (int i = 0; i < options->cells; i++)
        (void)json_array_append_new(tokens, json_integer(options->tokens[i]));
    job = json_pack("{s:s, s:o, s:b, s:O, s:o, s:s, s:s, s:s, s:f}", "command", "bench", "plugin",
                    json_path(plugin->path), "verbose", options->rank.common.verbose, "config",
                    config, "tokens", tokens, "shape", options->shape_text, "weight_format",
                    format_word(options->format), "row_format", format_word(options->row_format),
                    "seconds", options->seconds);
    if (job == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    (void)json_object_set_new(job, "op", json_string(bench_op_word(options->op)));
    (void)json_object_set_new(
        job, "replays", json_integer(options->replays > 0 ? options->replays : BENCH_REPLAYS));
    (void)json_object_set_new(job, "skew", json_real(options->skew));
    (void)json_object_set_new(job, "delay_us", json_real(options->delay_us));
    TRY(hub_run(&hub, job, &handler, fault));
    for (int i = 0; i < options->cells; i++)
        TRY(fill_cell(run, i, fault));
out:
    json_decref(job);
    return st;
}

// The ceilings that the floors divide by.
static int find_anchors(struct bench_run *run, struct fault *fault)
{
    int64_t threads = rank_threads(&run->options->rank) * run->options->rank.ranks;
    int cores = machine_cores();

    if (run->forwards > 1) {
        run->anchors = (struct anchors){BENCH_GPU_BYTES_PER_S, format_is_fp8(run->options->format)
                                                                   ? BENCH_GPU_FP8_FLOPS_PER_S
                                                                   : BENCH_GPU_FLOPS_PER_S};
        return EXIT_OK;
    }
    if (anchors_measure(threads < cores ? (int)threads : cores, &run->anchors)) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "no memory or threads to measure this machine with");
}

// What only several ranks, or only GPUs, can be asked for.
static int check_ranks(const struct bench_run *run, struct fault *fault)
{
    const struct bench_options *options = run->options;
    int alone = run->forwards == 1 || options->rank.ranks == 1;
    double most = bench_skew_max(&options->shape, (int)options->rank.ranks);

    if (alone && options->op != BENCH_LAYER)
        return fault_set(fault, EXIT_REFUSED,
                         "--op %s is for several ranks on GPUs: see --ranks and --runner",
                         bench_op_word(options->op));
    if (alone && options->delay_us > 0)
        return fault_set(fault, EXIT_REFUSED,
                         "--delay-us %g is for several ranks on GPUs: see --ranks and --runner",
                         options->delay_us);
    if (run->forwards == 1 && options->replays > 0)
        return fault_set(fault, EXIT_REFUSED,
                         "--replays %d is of graphs, and the device has none: take --seconds, or a "
                         "GPU by --runner",
                         options->replays);
    if (options->skew > most)
        return fault_set(fault, EXIT_REFUSED,
                         "--skew %g: %lld different experts a token over %lld ranks allow %g",
                         options->skew, (long long)options->shape.top_k,
                         (long long)options->rank.ranks, most);
    return EXIT_OK;
}

static json_t *document_of(const struct bench_run *run, const struct instance *instance)
{
    json_t *document = bench_document(run);

    (void)json_object_set_new(document, "ok", json_true());
    (void)json_object_set_new(document, "warnings", instance_warnings(instance));
    return document;
}

int command_bench(int argc, char **argv, struct fault *fault)
{
    const struct argp argp = {table_of_options, parse, NULL, doc, children, NULL, NULL};
    struct bench_options options = {
        .format = MOXIE_FORMAT_BF16,
        .row_format = MOXIE_FORMAT_BF16,
        .seconds = 2,
    };
    struct bench_run run = {.options = &options, .forwards = 1};
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
    run.build = plugin.api->build;
    TRY(check_weights(&options, fault));
    if (preflight_device(&instance)->capture_begin != NULL) run.forwards = BENCH_FORWARDS;
    TRY(check_ranks(&run, fault));
    run.dispatch_format = instance_config(&instance, "dispatch_format");
    run.row = wire_rows_of(&options.shape, options.row_format, run.dispatch_format);
    if (run.forwards == 1)
        TRY(check_memory(&options, &instance, fault));
    else
        TRY(bench_check_possible(&options.shape, options.format, fault));
    TRY(find_anchors(&run, fault));
    TRY(run_ranks(&run, &plugin, config, fault));
    if (options.rank.common.json)
        st = json_print(document_of(&run, &instance), fault);
    else
        bench_print(&run);
out:
    st = json_refusal(options.rank.common.json, st, instance_warnings(&instance), fault);
    st = instance_finish(&instance, st, fault);
    plugin_unload(&plugin);
    for (int i = 0; i < options.cells; i++)
        json_decref(run.results[i]);
    json_decref(config);
    return st;
}
