// What the commands about a configuration file share.

#include "hosts/cli/config_command.h"

#include "hosts/cli/json_file.h"
#include "hosts/cli/options.h"

#define WANTED "a configuration is wanted: a JSON file"

struct config_options {
    struct common_options common;
    const char *config;
};

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct config_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->common;
        return 0;
    case ARGP_KEY_ARG:
        if (options->config != NULL) argp_error(state, "one configuration at a time");
        if (text[0] == '\0') argp_error(state, WANTED);
        options->config = text;
        return 0;
    case ARGP_KEY_NO_ARGS:
        argp_error(state, WANTED);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};

int config_command(int argc, char **argv, const struct config_command *command, struct fault *fault)
{
    const struct argp argp = {NULL, parse, "CONFIG.json", command->doc, children, NULL, NULL};
    struct config_options options = {.config = NULL};
    struct plugin plugin = {.api = NULL};
    struct instance_request request = {.plugin = &plugin};
    struct instance instance = {.api = NULL};
    int st = EXIT_OK;

    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    TRY(json_file_read(options.config, &request.config, fault));
    TRY(plugin_load(&plugin, options.common.plugin, fault));
    request.verbose = options.common.verbose;
    TRY(instance_open(&instance, &request, fault));
    st = command->show(&instance, options.common.json, fault);
out:
    st = json_refusal(options.common.json, st, fault);
    st = instance_finish(&instance, st, fault);
    plugin_unload(&plugin);
    json_decref(request.config);
    return st;
}
