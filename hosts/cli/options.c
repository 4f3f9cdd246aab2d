// What all commands share on the command line.

#include "hosts/cli/options.h"

#include "hosts/cli/bootstrap.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/machine.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#define SLACK_MS_MIN 2000

enum option_key {
    OPTION_PLUGIN = 0x1000, // past every character: none of these has a short form
    OPTION_JSON,
    OPTION_RANKS,
    OPTION_THREADS,
    OPTION_TIMEOUT,
    OPTION_RUNNER,
    OPTION_DISPATCHER,
    OPTION_DISPATCH_FORMAT,
    OPTION_DISPATCH_SMS,
    OPTION_DEVICE,
};

int64_t option_integer(const struct argp_state *state, const char *option, const char *text,
                       int64_t least, int64_t most)
{
    char *end = NULL;
    long long value = 0;

    errno = 0;
    value = strtoll(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < least || value > most)
        argp_error(state, "%s %s: wanted is an integer from %lld to %lld", option, text,
                   (long long)least, (long long)most);
    return value;
}

double option_number(const struct argp_state *state, const char *option, const char *text)
{
    char *end = NULL;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !isfinite(value) || value < 0)
        argp_error(state, "%s %s: wanted is a number from 0 up", option, text);
    return value;
}

const char *option_path(const struct argp_state *state, const char *option, const char *text)
{
    // Empty is what a variable of a script is that was never set, and names nothing.
    if (text[0] == '\0') argp_error(state, "%s: a path is wanted", option);
    return text;
}

static error_t parse_common(int key, char *text, struct argp_state *state)
{
    struct common_options *options = state->input;

    switch (key) {
    case OPTION_PLUGIN:
        options->plugin = option_path(state, "--plugin", text);
        return 0;
    case OPTION_JSON:
        options->json = 1;
        return 0;
    case 'v':
        options->verbose = 1;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option common_table[] = {
    {"plugin", OPTION_PLUGIN, "PATH", 0,
     "the library to load (default: $MOXIE_PLUGIN, else libmoxie.so beside this program, in ../lib "
     "or where it was installed); a name without a slash is a file of this folder, or the system's "
     "to find",
     90},
    {"json", OPTION_JSON, NULL, 0, "print one JSON document and nothing else, also when refused",
     90},
    {"verbose", 'v', NULL, 0, "print what the library logs, from INFO on, to standard error", 90},
    {0},
};

const struct argp common_argp = {.options = common_table, .parser = parse_common};

static error_t parse_rank(int key, char *text, struct argp_state *state)
{
    struct rank_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->common;
        return 0;
    case OPTION_RANKS:
        options->ranks = option_integer(state, "--ranks", text, 1, BOOTSTRAP_RANKS_MAX);
        return 0;
    case OPTION_THREADS:
        options->threads = option_integer(state, "--threads", text, 1, 1024);
        return 0;
    case OPTION_TIMEOUT:
        options->timeout_s = option_integer(state, "--timeout", text, 1, 86400);
        return 0;
    case OPTION_RUNNER:
        options->runner = text;
        return 0;
    case OPTION_DISPATCHER:
        options->dispatcher = text;
        return 0;
    case OPTION_DISPATCH_FORMAT:
        options->dispatch_format = text;
        return 0;
    case OPTION_DISPATCH_SMS:
        options->dispatch_sms = option_integer(state, "--dispatch-sms", text, 0, INT32_MAX);
        return 0;
    case OPTION_DEVICE:
        options->device = text;
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option rank_table[] = {
    {"ranks", OPTION_RANKS, "R", 0, "processes to spread the experts over (default 1)", 10},
    {"threads", OPTION_THREADS, "N", 0, "threads of each rank (default: cores / ranks)", 10},
    {"timeout", OPTION_TIMEOUT, "SECONDS", 0,
     "how long a rank waits for another (default 300); the run ends when a rank is silent for half "
     "as long again, or for 2 s more if that is longer",
     10},
    {"runner", OPTION_RUNNER, "NAME", 0, "a runner that moxie info lists (default auto)", 20},
    {"device", OPTION_DEVICE, "WORD", 0,
     "cpu or sm_90 (default: that of --runner, else cpu); on sm_90 rank r takes visible GPU r", 20},
    {"dispatcher", OPTION_DISPATCHER, "NAME", 0,
     "a dispatcher that moxie info lists (default auto)", 20},
    {"dispatch-format", OPTION_DISPATCH_FORMAT, "WORD", 0,
     "format of rows between ranks: input (as they come, default), fp8_block128 or nvfp4", 20},
    {"dispatch-sms", OPTION_DISPATCH_SMS, "N", 0,
     "SMs of a GPU that moving rows between ranks may use (default 0: all)", 20},
    {0},
};

static const struct argp_child rank_children[] = {{&common_argp, 0, NULL, 0}, {0}};

const struct argp rank_argp = {
    .options = rank_table, .parser = parse_rank, .children = rank_children};

void rank_options_init(struct rank_options *options)
{
    *options = (struct rank_options){.ranks = 1, .timeout_s = 300};
}

void rank_options_configure(const struct rank_options *options, json_t *config)
{
    if (options->runner != NULL)
        (void)json_object_set_new(config, "runner", json_text(options->runner));
    if (options->dispatcher != NULL)
        (void)json_object_set_new(config, "dispatcher", json_text(options->dispatcher));
    if (options->dispatch_format != NULL)
        (void)json_object_set_new(config, "dispatch_format", json_text(options->dispatch_format));
    if (options->dispatch_sms > 0)
        (void)json_object_set_new(config, "dispatch_sms", json_integer(options->dispatch_sms));
    if (options->device != NULL)
        (void)json_object_set_new(config, "device", json_text(options->device));
    // Nobody waits for anybody on one rank.
    if (options->ranks > 1)
        (void)json_object_set_new(config, "timeout_ms", json_integer(options->timeout_s * 1000));
}

int64_t rank_silence_ms(const struct rank_options *options)
{
    int64_t timeout_ms = options->timeout_s * 1000;
    int64_t slack_ms = timeout_ms / 2 > SLACK_MS_MIN ? timeout_ms / 2 : SLACK_MS_MIN;

    return timeout_ms + slack_ms;
}

int64_t rank_threads(const struct rank_options *options)
{
    int64_t share = machine_cores() / options->ranks;

    if (options->threads > 0) return options->threads;
    return share > 0 ? share : 1;
}
