// moxie run: one layer of a checkpoint over R processes, compared with its reference.

#include "hosts/cli/bootstrap.h"
#include "hosts/cli/commands.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/model_keys.h"
#include "hosts/cli/numbers.h"
#include "hosts/cli/preflight.h"
#include "hosts/cli/router.h"
#include "hosts/cli/table.h"
#include "hosts/cli/target.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct run_options {
    struct rank_options rank;
    struct source_paths paths;
    const char *output; // NULL: not written
    double tolerance;   // negative: none
};

enum { OPTION_MODEL = 0x2000, OPTION_LAYER, OPTION_INPUT, OPTION_LAYER_FILE, OPTION_TOLERANCE };

static void check_options(const struct run_options *options, struct argp_state *state)
{
    const struct source_paths *paths = &options->paths;

    if (paths->layer_file != NULL && (paths->model != NULL || paths->layer >= 0))
        argp_error(state, "--layer-file stands for --model and --layer; give one or the other");
    if (paths->layer_file == NULL &&
        (paths->model == NULL || paths->layer < 0 || paths->input == NULL))
        argp_error(state, "wanted is --model DIR --layer N --input FILE, or --layer-file FILE");
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct run_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->rank;
        return 0;
    case OPTION_MODEL:
        options->paths.model = option_path(state, "--model", text);
        return 0;
    case OPTION_LAYER:
        options->paths.layer = option_integer(state, "--layer", text, 0, 1000000);
        return 0;
    case OPTION_INPUT:
        options->paths.input = option_path(state, "--input", text);
        return 0;
    case OPTION_LAYER_FILE:
        options->paths.layer_file = option_path(state, "--layer-file", text);
        return 0;
    case 'o':
        options->output = option_path(state, "--output", text);
        return 0;
    case OPTION_TOLERANCE:
        options->tolerance = option_number(state, "--tolerance", text);
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no argument is wanted: \"%s\"", text);
        return 0;
    case ARGP_KEY_END:
        check_options(options, state);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option table_of_options[] = {
    {"model", OPTION_MODEL, "DIR", 0,
     "a Hugging Face folder: config.json with model.safetensors or a sharded index", 1},
    {"layer", OPTION_LAYER, "N", 0, "which layer of the model, from 0", 1},
    {"input", OPTION_INPUT, "FILE", 0,
     "safetensors with hidden_states [T, H], and optionally topk_ids and topk_weights [T, k] and "
     "routed_output [T, H]",
     1},
    {"layer-file", OPTION_LAYER_FILE, "FILE", 0,
     "instead of these three, one safetensors file with weights and inputs of one layer", 1},
    {"output", 'o', "FILE", 0,
     "write the result to a safetensors file, as tensor `output`, f32 [T, H]; replaces a regular "
     "file, but none that this run reads",
     30},
    {"tolerance", OPTION_TOLERANCE, "X", 0, "exit code 3 if the relative error exceeds X", 30},
    {0},
};

static const struct argp_child children[] = {{&rank_argp, 0, NULL, 0}, {0}};

static const char doc[] =
    "Runs the experts of one layer: R processes share the experts, and each takes a contiguous "
    "part of the tokens. If the input file has no topk_ids and topk_weights, the model's router "
    "chooses, provided that it is a known one. Ids outside the experts add nothing, and are "
    "counted. If the file has routed_output, the result is compared with it: relative_error is ||y "
    "- reference|| / ||reference||.\v"
    "Checkpoints may be named as published for Qwen3-MoE, Mixtral, DeepSeek-V3 (fp8), gpt-oss "
    "(mxfp4), ModelOpt (nvfp4) and Llama 4.\n\n"
    "Example:\n"
    "  moxie run --model DIR --layer 1 --input FILE --ranks 4 --tolerance 2e-6";

// The configuration that the ranks open with; ep_rank is theirs to set.
static json_t *make_config(const struct run_options *options, const struct source *source)
{
    json_int_t ranks = options->rank.ranks;
    struct token_range longest = token_part(source->inputs.tokens, ranks, 0);
    json_t *config = model_keys(&source->model);
    json_t *more = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I, s:I, s:I}", "weight_format",
                             format_word(source->layout.w1.format), "input_format",
                             format_word(source->inputs.format), "output_format", "f32", "dp_size",
                             ranks, "tp_size", ranks, "ep_size", ranks, "forward_tokens_max",
                             (json_int_t)(longest.count > 0 ? longest.count : 1), "cpu_threads",
                             (json_int_t)rank_threads(&options->rank));
    int failed = config == NULL || more == NULL || json_object_update(config, more) != 0;

    json_decref(more);
    if (failed) {
        json_decref(config);
        return NULL;
    }
    rank_options_configure(&options->rank, config);
    return config;
}

// What the ranks sent.
struct outcome {
    const struct source *source;
    int ranks;
    float *y;          // [T, H]
    json_t *result;    // of rank 0
    int64_t no_expert; // ids of the file that name none
};

static int take(void *ctx, int rank, enum message message, const void *payload, uint64_t bytes,
                struct fault *fault)
{
    struct outcome *outcome = ctx;
    uint64_t hidden = (uint64_t)outcome->source->model.hidden;
    struct token_range range = token_part(outcome->source->inputs.tokens, outcome->ranks, rank);

    if (message == MESSAGE_RESULT) {
        json_decref(outcome->result);
        outcome->result = json_loadb(payload, bytes, 0, NULL);
        return EXIT_OK;
    }
    if (bytes != (uint64_t)range.count * hidden * sizeof *outcome->y)
        return fault_set(fault, EXIT_TROUBLE, "rank %d sent rows of a wrong size", rank);
    memcpy(outcome->y + (uint64_t)range.first * hidden, payload, bytes);
    return EXIT_OK;
}

static int run_ranks(const struct run_options *options, const struct plugin *plugin, json_t *config,
                     struct outcome *outcome, struct fault *fault)
{
    const struct source_paths *paths = &options->paths;
    const struct hub_options hub = {
        .ranks = (int)options->rank.ranks,
        .silence_ms = rank_silence_ms(&options->rank),
        .doing = "loading experts",
    };
    const struct hub_handler handler = {outcome, take};
    json_t *job = json_pack("{s:s, s:o, s:b, s:O, s:{s:o, s:o, s:o, s:I}}", "command", "run",
                            "plugin", json_path(plugin->path), "verbose",
                            options->rank.common.verbose, "config", config, "source", "layer_file",
                            json_path(paths->layer_file), "model", json_path(paths->model), "input",
                            json_path(paths->input), "layer", (json_int_t)paths->layer);
    int st = EXIT_OK;

    if (job == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    st = hub_run(&hub, job, &handler, fault);
    json_decref(job);
    if (st == EXIT_OK && !json_is_object(outcome->result))
        return fault_set(fault, EXIT_TROUBLE, "rank 0 sent no result");
    return st;
}

// Distances from the reference; both NAN where the file has none.
struct distance {
    double relative, max_abs;
};

static int compare(const struct outcome *outcome, struct distance *distance, struct fault *fault)
{
    const struct inputs *inputs = &outcome->source->inputs;
    const struct tensor *golden = inputs->routed_output;
    double error = 0;
    double norm = 0;
    float *expected = NULL;
    int st = EXIT_OK;

    *distance = (struct distance){NAN, NAN};
    if (golden == NULL) return EXIT_OK;
    expected = malloc(golden->bytes + 1);
    if (expected == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(safetensors_read(inputs->file, golden, 0, golden->bytes, expected, fault));
    distance->max_abs = 0;
    for (uint64_t i = 0; i < golden->bytes / sizeof *expected; i++) {
        double difference = (double)outcome->y[i] - (double)expected[i];

        error += difference * difference;
        norm += (double)expected[i] * (double)expected[i];
        if (fabs(difference) > distance->max_abs) distance->max_abs = fabs(difference);
    }
    distance->relative = error == 0 ? 0 : sqrt(error) / sqrt(norm);
    if (isnan(error)) distance->max_abs = NAN; // comparing has passed it over
out:
    free(expected);
    return st;
}

static double median_ms(const json_t *result)
{
    const json_t *times = json_object_get(result, "times_us");
    double values[64];
    int count = (int)json_array_size(times);

    if (count == 0 || count > 64) return NAN;
    for (int i = 0; i < count; i++)
        values[i] = json_real_value(json_array_get(times, (size_t)i));
    numbers_sort(values, count);
    return numbers_quantile(values, count, 0.5) / 1000;
}

static int is_within(const struct run_options *options, const struct distance *distance)
{
    return options->tolerance < 0 || distance->relative <= options->tolerance;
}

// warnings: of the instance that was opened first; an array, released.
static int report_json(const struct run_options *options, const struct outcome *outcome,
                       const struct distance *distance, json_t *warnings, struct fault *fault)
{
    return json_print(
        json_pack("{s:b, s:I, s:I, s:i, s:O, s:O, s:s, s:o, s:o, s:o, s:o, s:o}", "ok",
                  is_within(options, distance), "tokens",
                  (json_int_t)outcome->source->inputs.tokens, "ids_of_no_expert",
                  (json_int_t)outcome->no_expert, "ranks", outcome->ranks, "runner",
                  json_object_get(outcome->result, "runner"), "dispatcher",
                  json_object_get(outcome->result, "dispatcher"), "weights",
                  format_word(outcome->source->layout.w1.format), "relative_error",
                  json_number(distance->relative), "max_abs_error", json_number(distance->max_abs),
                  "tolerance", json_number(options->tolerance >= 0 ? options->tolerance : NAN),
                  "time_ms", json_number(median_ms(outcome->result)), "warnings", warnings),
        fault);
}

static void report(const struct outcome *outcome, const struct distance *distance)
{
    const char *runner = json_string_value(json_object_get(outcome->result, "runner"));
    const char *dispatcher = json_string_value(json_object_get(outcome->result, "dispatcher"));

    (void)printf("tokens          %lld\n", (long long)outcome->source->inputs.tokens);
    if (outcome->no_expert > 0)
        (void)printf("no expert       %lld of %lld ids\n", (long long)outcome->no_expert,
                     (long long)(outcome->source->inputs.tokens * outcome->source->model.top_k));
    (void)printf("ranks           %d\n", outcome->ranks);
    (void)printf("runner          %s\n", runner);
    (void)printf("dispatcher      %s\n", dispatcher);
    (void)printf("weights         %s\n", format_word(outcome->source->layout.w1.format));
    if (outcome->source->inputs.routed_output == NULL) {
        (void)printf("relative error  (the file has no routed_output to compare with)\n");
    } else {
        (void)printf("relative error  %.3e\n", distance->relative);
        (void)printf("max abs error   %.3e\n", distance->max_abs);
    }
    (void)printf("time            %.3f ms\n", median_ms(outcome->result));
}

static int finish(const struct run_options *options, const struct outcome *outcome,
                  const struct instance *instance, struct fault *fault)
{
    const struct tensor_out tensor = {
        .name = "output",
        .word = WORD_F32,
        .ndim = 2,
        .shape = {outcome->source->inputs.tokens, outcome->source->model.hidden},
        .data = outcome->y,
    };
    struct distance distance;
    int st = EXIT_OK;

    TRY(compare(outcome, &distance, fault));
    // What was measured is said also when it cannot be written.
    if (options->rank.common.json)
        TRY(report_json(options, outcome, &distance, instance_warnings(instance), fault));
    else
        report(outcome, &distance);
    (void)fflush(stdout); // before an interrupt may end what is written
    if (options->output != NULL) TRY(safetensors_write(options->output, &tensor, fault));
    if (!is_within(options, &distance))
        st = fault_set(fault, EXIT_TOLERANCE, "relative error %.3e exceeds the tolerance %.3e",
                       distance.relative, options->tolerance);
out:
    return st;
}

// Ranks of one machine share its memory.
static int check_memory(const struct run_options *options, const struct source *source,
                        const struct instance *instance, struct fault *fault)
{
    const struct model *model = &source->model;
    // x, y and what is sent of it, and y here; ids of 64 bits at most, and weights.
    uint64_t numbers = format_element_bytes(source->inputs.format) + 3 * sizeof(float);
    struct preflight_memory need = {
        .token = (uint64_t)model->hidden * numbers + (uint64_t)model->top_k * 12,
        .ranks = (uint64_t)options->rank.ranks,
        .advice = "take fewer tokens, or another machine",
    };

    if (!bytes_add(weights_bytes(&source->layout.w1), weights_bytes(&source->layout.w2),
                   &need.weights))
        need.weights = UINT64_MAX;
    return preflight_check_memory(instance, &need, fault);
}

static int refuse_output(const char *output, struct fault *fault)
{
    return fault_set(fault, EXIT_TROUBLE,
                     "%s is one of the files that are read; --output would replace it", output);
}

// What can be refused before the library is loaded.
static int check_source(const struct run_options *options, const struct source *source,
                        struct fault *fault)
{
    if (options->tolerance >= 0 && source->inputs.routed_output == NULL)
        return fault_set(fault, EXIT_TROUBLE, "%s: no routed_output to hold --tolerance against",
                         source->inputs.file->path);
    if (options->output != NULL && source_is_in(source, options->output))
        return refuse_output(options->output, fault);
    if (options->output != NULL && target_check(options->output, fault) != EXIT_OK)
        return EXIT_TROUBLE;
    return source->inputs.topk_ids == NULL ? router_check(source, fault) : EXIT_OK;
}

static int allocate_output(struct outcome *outcome, struct fault *fault)
{
    const struct source *source = outcome->source;
    uint64_t bytes = 0;

    if (bytes_mul((uint64_t)source->inputs.tokens,
                  (uint64_t)source->model.hidden * sizeof *outcome->y, &bytes))
        outcome->y = malloc(bytes + 1);
    return outcome->y != NULL ? EXIT_OK
                              : fault_set(fault, EXIT_TROUBLE, "out of memory for the output");
}

int command_run(int argc, char **argv, struct fault *fault)
{
    const struct argp argp = {table_of_options, parse, NULL, doc, children, NULL, NULL};
    struct run_options options = {.paths = {.layer = -1}, .tolerance = -1};
    struct source source = {.layout = {.gate = NULL}};
    struct plugin plugin = {.api = NULL};
    struct instance instance = {.api = NULL};
    struct outcome outcome = {.source = &source};
    json_t *config = NULL;
    int st = EXIT_OK;

    rank_options_init(&options.rank);
    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    outcome.ranks = (int)options.rank.ranks;
    TRY(source_open(&source, &options.paths, fault));
    TRY(check_source(&options, &source, fault));
    config = make_config(&options, &source);
    if (config == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory, or a name not in UTF-8"));
    TRY(preflight(&instance, &plugin, &options.rank, config, fault));
    if (options.output != NULL && plugin_is(&plugin, options.output))
        TRY(refuse_output(options.output, fault));
    if (preflight_device(&instance)->direct) TRY(check_memory(&options, &source, &instance, fault));
    TRY(inputs_count_no_expert(&source.inputs, source.model.experts, &outcome.no_expert, fault));
    TRY(allocate_output(&outcome, fault));
    TRY(run_ranks(&options, &plugin, config, &outcome, fault));
    TRY(finish(&options, &outcome, &instance, fault));
out:
    st = json_refusal(options.rank.common.json, st, instance_warnings(&instance), fault);
    st = instance_finish(&instance, st, fault);
    plugin_unload(&plugin);
    json_decref(outcome.result);
    json_decref(config);
    free(outcome.y);
    source_close(&source);
    return st;
}
