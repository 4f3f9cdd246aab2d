// moxie info: what this library is, and what it can do on this machine.

#include "hosts/cli/commands.h"
#include "hosts/cli/instance.h"
#include "hosts/cli/json_file.h"
#include "hosts/cli/options.h"
#include "hosts/cli/table.h"

#include <stdlib.h>
#include <string.h>

#define PROBES_MAX 64

struct info_options {
    struct common_options common;
    int keys;
};

static error_t parse(int key, char *text, struct argp_state *state)
{
    struct info_options *options = state->input;

    switch (key) {
    case ARGP_KEY_INIT:
        state->child_inputs[0] = &options->common;
        return 0;
    case 'k':
        options->keys = 1;
        return 0;
    case ARGP_KEY_ARG:
        argp_error(state, "no argument is wanted: \"%s\"", text);
        return 0;
    default:
        return ARGP_ERR_UNKNOWN;
    }
}

static const struct argp_option table_of_options[] = {
    {"keys", 'k', NULL, 0, "list the configuration keys instead", 10},
    {0},
};

static const struct argp_child children[] = {{&common_argp, 0, NULL, 0}, {0}};

static const char doc[] =
    "Prints who built the library, which ABI versions it speaks, and for each of its runners and "
    "dispatchers how well it would run on this machine and why.";

struct probes {
    moxie_probe entries[PROBES_MAX];
    uint64_t count;
};

static int probe(const struct plugin *plugin, struct probes *probes, struct fault *fault)
{
    struct library_error error;
    int32_t status = MOXIE_OK;

    memset(probes, 0, sizeof *probes);
    for (int i = 0; i < PROBES_MAX; i++)
        probes->entries[i].struct_size = sizeof probes->entries[i];
    status = plugin->api->probe(probes->entries, sizeof probes->entries[0], PROBES_MAX,
                                &probes->count, library_error(&error));
    if (status != MOXIE_OK) return fault_from_status(fault, status, "probe", error.text);
    if (probes->count > PROBES_MAX) probes->count = PROBES_MAX;
    return EXIT_OK;
}

// The devices that backends are for, each once.
static json_t *devices(const struct probes *probes)
{
    json_t *seen = json_object();
    json_t *list = json_array();

    for (uint64_t i = 0; i < probes->count; i++) {
        const char *device = probes->entries[i].device;

        if (json_object_get(seen, device) != NULL) continue;
        (void)json_object_set_new(seen, device, json_true());
        (void)json_array_append_new(list, json_string(device));
    }
    json_decref(seen);
    return list;
}

static void print_version(char *buffer, size_t capacity, uint32_t version)
{
    (void)snprintf(buffer, capacity, "%u.%u", version >> 16, version & 0xffffu);
}

static json_t *info_document(const struct plugin *plugin, const struct probes *probes)
{
    const moxie_build *build = plugin->api->build;
    json_t *backends = json_array();
    char least[24];
    char most[24];
    char agreed[24];

    print_version(least, sizeof least, build->abi_min);
    print_version(most, sizeof most, build->abi_max);
    print_version(agreed, sizeof agreed, plugin->api->abi_version);
    for (uint64_t i = 0; i < probes->count; i++) {
        const moxie_probe *entry = &probes->entries[i];

        (void)json_array_append_new(backends,
                                    json_pack("{s:s, s:s, s:s, s:i, s:s}", "name", entry->name,
                                              "kind", entry->kind, "device", entry->device, "score",
                                              entry->score, "reason", entry->reason));
    }
    return json_pack(
        "{s:o, s:{s:s, s:s, s:s, s:s}, s:{s:s, s:s, s:s}, s:o, s:o, s:{s:i, s:i, s:i}}", "library",
        json_text(plugin->path), "build", "version", build->version, "source_id", build->source_id,
        "compiler", build->compiler, "cuda", build->cuda, "abi", "min", least, "max", most,
        "agreed", agreed, "devices", devices(probes), "backends", backends, "limits", "ranks",
        MOXIE_RANKS_MAX, "top_k", MOXIE_TOP_K_MAX, "forwards_in_flight", MOXIE_SLOTS_MAX);
}

static void print_info(const struct plugin *plugin, const struct probes *probes)
{
    static const char *const heading[] = {"backend", "kind", "device", "score", "why"};
    const moxie_build *build = plugin->api->build;
    struct table table;
    char least[24];
    char most[24];

    print_version(least, sizeof least, build->abi_min);
    print_version(most, sizeof most, build->abi_max);
    (void)printf("library   %s\n", plugin->path);
    (void)printf("version   %s, source %s\n", build->version, build->source_id);
    (void)printf("compiler  %s, CUDA %s\n", build->compiler, build->cuda);
    (void)printf("ABI       %s to %s\n", least, most);
    (void)printf("limits    %d ranks, top-k %d, %d forwards in flight\n\n", MOXIE_RANKS_MAX,
                 MOXIE_TOP_K_MAX, MOXIE_SLOTS_MAX);
    table_init(&table, 5, 1u << 3, heading);
    for (uint64_t i = 0; i < probes->count; i++) {
        const moxie_probe *entry = &probes->entries[i];

        table_cell(&table, 0, "%s", entry->name);
        table_cell(&table, 1, "%s", entry->kind);
        table_cell(&table, 2, "%s", entry->device);
        table_cell(&table, 3, "%d", entry->score);
        table_cell(&table, 4, "%s", entry->reason);
    }
    table_print(&table, 0);
    table_fini(&table);
}

static int show_info(const struct plugin *plugin, int as_json, struct fault *fault)
{
    struct probes *probes = malloc(sizeof *probes);
    int st = EXIT_OK;

    if (probes == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(probe(plugin, probes, fault));
    if (as_json)
        st = json_print(info_document(plugin, probes), fault);
    else
        print_info(plugin, probes);
out:
    free(probes);
    return st;
}

static int has_reason(json_t *reasons, const char *key)
{
    size_t index = 0;
    json_t *reason = NULL;

    json_array_foreach(reasons, index, reason)
    {
        if (strcmp(json_string_value(json_object_get(reason, "key")), key) == 0) return 1;
    }
    return 0;
}

// Whether the key takes `auto` and makes of it what it makes of nothing: the snapshot shows what
// that became here, and on another machine it may become something else.
static int is_auto(const struct plugin *plugin, const moxie_config_entry *entry)
{
    struct instance instance = {.api = NULL};
    const struct instance_request request = {.plugin = plugin,
                                             .config = json_pack("{s:s}", entry->key, "auto")};
    struct fault fault;
    json_t *reasons = NULL;
    int same = 0;

    if (request.config != NULL && strcmp(entry->type, "str") == 0 &&
        instance_open(&instance, &request, &fault) == EXIT_OK) {
        reasons = instance_reasons(&instance);
        same = !has_reason(reasons, entry->key) &&
               strcmp(instance_config(&instance, entry->key), entry->value) == 0;
    }
    (void)instance_finish(&instance, EXIT_OK, &fault);
    json_decref(reasons);
    json_decref(request.config);
    return same;
}

// What stands for an absent key; an empty configuration is refused for the lack of those that must
// be set.
static const char *default_of(const struct plugin *plugin, const moxie_config_entry *entry,
                              json_t *reasons)
{
    if (has_reason(reasons, entry->key)) return "required";
    return is_auto(plugin, entry) ? "auto" : entry->value;
}

static json_t *keys_document(const struct plugin *plugin, const struct instance *instance)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};
    json_t *reasons = instance_reasons(instance);
    json_t *keys = json_array();

    for (uint64_t i = 0; instance->api->config(instance->handle, i, &entry) == MOXIE_OK; i++)
        (void)json_array_append_new(
            keys, json_pack("{s:s, s:s, s:s, s:s}", "key", entry.key, "type", entry.type, "default",
                            default_of(plugin, &entry, reasons), "help", entry.help));
    json_decref(reasons);
    return json_pack("{s:o}", "keys", keys);
}

static void print_keys(const struct plugin *plugin, const struct instance *instance)
{
    static const char *const heading[] = {"key", "type", "default", "meaning"};
    moxie_config_entry entry = {.struct_size = sizeof entry};
    json_t *reasons = instance_reasons(instance);
    struct table table;

    table_init(&table, 4, 0, heading);
    for (uint64_t i = 0; instance->api->config(instance->handle, i, &entry) == MOXIE_OK; i++) {
        table_cell(&table, 0, "%s", entry.key);
        table_cell(&table, 1, "%s", entry.type);
        table_cell(&table, 2, "%s", default_of(plugin, &entry, reasons));
        table_cell(&table, 3, "%s", entry.help);
    }
    table_print(&table, 0);
    table_fini(&table);
    json_decref(reasons);
}

// The snapshot of an empty configuration shows every key with its default.
static int show_keys(struct plugin *plugin, int as_json, struct fault *fault)
{
    struct instance instance = {.api = NULL};
    const struct instance_request request = {.plugin = plugin, .config = json_object()};
    int st = EXIT_OK;

    if (request.config == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    TRY(instance_open(&instance, &request, fault));
    if (as_json)
        st = json_print(keys_document(plugin, &instance), fault);
    else
        print_keys(plugin, &instance);
out:
    st = instance_finish(&instance, st, fault);
    json_decref(request.config);
    return st;
}

int command_info(int argc, char **argv, struct fault *fault)
{
    const struct argp argp = {table_of_options, parse, NULL, doc, children, NULL, NULL};
    struct info_options options = {.keys = 0};
    struct plugin plugin = {.api = NULL};
    int st = EXIT_OK;

    (void)argp_parse(&argp, argc, argv, 0, NULL, &options);
    TRY(plugin_load(&plugin, options.common.plugin, fault));
    st = options.keys ? show_keys(&plugin, options.common.json, fault)
                      : show_info(&plugin, options.common.json, fault);
out:
    st = json_refusal(options.common.json, st, NULL, fault);
    plugin_unload(&plugin);
    return st;
}
