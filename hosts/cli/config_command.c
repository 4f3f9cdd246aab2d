// What the commands about a configuration file share.

#include "hosts/cli/config_command.h"

#include "hosts/cli/json_file.h"
#include "hosts/cli/model_keys.h"
#include "hosts/cli/options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WANTED "a configuration is wanted: a JSON file, --model or --set"

enum { OPTION_MODEL = 0x100, OPTION_SET };

struct config_options {
    struct common_options common;
    const char *config, *model; // NULL: none
    json_t *set;
};

// A number, true or false as JSON has them; any other text is a word.
static void set_key(json_t *set, const char *text, const struct argp_state *state)
{
    const char *equals = strchr(text, '=');
    char *key = equals != NULL && equals > text ? strndup(text, (size_t)(equals - text)) : NULL;
    json_t *value = key != NULL ? json_loads(equals + 1, JSON_DECODE_ANY, NULL) : NULL;

    if (key == NULL) argp_error(state, "--set: \"%s\"; want KEY=VALUE", text);
    if (!json_is_number(value) && !json_is_boolean(value)) {
        json_decref(value);
        value = json_string(equals + 1);
    }
    if (json_object_set_new(set, key, value) != 0)
        argp_error(state, "--set: \"%s\" is not in UTF-8", text);
    free(key);
}

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct config_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->common;
        return 0;
    case OPTION_MODEL:
        options->model = option_path(state, "--model", text);
        return 0;
    case OPTION_SET:
        set_key(options->set, text, state);
        return 0;
    case ARGP_KEY_ARG:
        if (options->config != NULL) argp_error(state, "one configuration at a time");
        if (text[0] == '\0') argp_error(state, WANTED);
        options->config = text;
        return 0;
    case ARGP_KEY_END:
        if (options->config == NULL && options->model == NULL &&
            json_object_size(options->set) == 0)
            argp_error(state, WANTED);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option table_of_options[] = {
    {"model", OPTION_MODEL, "DIR", 0,
     "a Hugging Face folder, from whose config.json sizes, activation and formats of the experts "
     "are taken; weights are not read",
     1},
    {"set", OPTION_SET, "KEY=VALUE", 0, "set one configuration key; may be repeated", 1},
    {0},
};

static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};

static void print_model(const char *folder, json_t *keys)
{
    const char *key = NULL;
    json_t *value = NULL;
    int first = 1;

    (void)printf("From %s/config.json:", folder);
    json_object_foreach(keys, key, value)
    {
        char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);

        (void)printf("%s %s %s", first ? "" : ",", key, text != NULL ? text : "");
        free(text);
        first = 0;
    }
    (void)printf("\n\n");
}

// Keys that only the model could have said, and did not: all of them at once.
static int refuse_unread(const struct config_options *options, const json_t *config, json_t *unread,
                         struct fault *fault)
{
    const char *key = NULL;
    json_t *why = NULL;
    int code = EXIT_OK;

    json_object_foreach(unread, key, why)
    {
        int its = (int)json_integer_value(json_object_get(why, "code"));
        const char *text = json_string_value(json_object_get(why, "text"));

        if (json_object_get(config, key) != NULL) continue;
        if (code == EXIT_OK)
            (void)fault_set(fault, its, "%s: %s: --set %s=VALUE", options->model, text, key);
        else
            fault_add(fault, "%s: --set %s=VALUE", text, key);
        if (code != EXIT_TROUBLE) code = its;
    }
    if (code != EXIT_OK) fault->code = code;
    return code;
}

// What the model says, over it the file, over both --set.
static int read_config(const struct config_options *options, struct model_said *said, json_t **out,
                       struct fault *fault)
{
    json_t *file = NULL;
    int st = EXIT_OK;

    *out = json_object();
    if (options->model != NULL) {
        TRY(model_keys_read(options->model, said, fault));
        if (!options->common.json) print_model(options->model, said->keys);
    }
    if (options->config != NULL) TRY(json_file_read(options->config, &file, fault));
    if (*out == NULL || (said->keys != NULL && json_object_update(*out, said->keys) != 0) ||
        (file != NULL && json_object_update(*out, file) != 0) ||
        json_object_update(*out, options->set) != 0)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(refuse_unread(options, *out, said->unread, fault));
out:
    json_decref(file);
    return st;
}

int config_command(int argc, char **argv, const struct config_command *command, struct fault *fault)
{
    const struct argp argp = {
        table_of_options, parse, "[CONFIG.json]", command->doc, children, NULL, NULL};
    struct config_options options = {.config = NULL, .set = json_object()};
    struct plugin plugin = {.api = NULL};
    struct instance_request request = {.plugin = &plugin};
    struct instance instance = {.api = NULL};
    struct model_said said = {NULL, NULL};
    int st = EXIT_OK;

    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    TRY(read_config(&options, &said, &request.config, fault));
    TRY(plugin_load(&plugin, options.common.plugin, fault));
    request.verbose = options.common.verbose;
    TRY(instance_open(&instance, &request, fault));
    st = command->show(&instance, said.keys, options.common.json, fault);
out:
    st = json_refusal(options.common.json, st, instance_warnings(&instance), fault);
    st = instance_finish(&instance, st, fault);
    plugin_unload(&plugin);
    json_decref(request.config);
    json_decref(options.set);
    model_said_free(&said);
    return st;
}
