// What is refused before ranks are started.

#include "hosts/cli/preflight.h"

#include "hosts/cli/machine.h"
#include "hosts/cli/table.h"

#include <errno.h>
#include <string.h>

#define BACKENDS_MAX 64

// Each rank has its own tokens here, so nobody could sum partial outputs.
static int check_reduced(const struct instance *instance, const struct rank_options *options,
                         struct fault *fault)
{
    const char *name = instance_config(instance, "dispatcher");
    const char *device = instance_config(instance, "device");
    const moxie_dispatcher_info *dispatcher = host_dispatcher(&instance->host, name, device);

    if (options->ranks == 1 || dispatcher == NULL || dispatcher->traits->output_is_reduced)
        return EXIT_OK;
    return fault_set(
        fault, EXIT_REFUSED,
        "dispatcher %s leaves the sum over ranks to its host, and wants the same tokens on every "
        "rank; over %lld ranks choose one that moves rows (allgather, alltoall)",
        name, (long long)options->ranks);
}

// What the library offers, as many as there is room for; 0 when it does not say.
static uint64_t probe_all(const moxie_api *api, moxie_probe entries[BACKENDS_MAX])
{
    uint64_t count = 0;

    for (int i = 0; i < BACKENDS_MAX; i++)
        entries[i] = (moxie_probe){.struct_size = sizeof entries[i]};
    if (api->probe(entries, sizeof entries[0], BACKENDS_MAX, &count, NULL) != MOXIE_OK) return 0;
    return count < BACKENDS_MAX ? count : BACKENDS_MAX;
}

// How many runners the library offers under that name, for that device or, where it is empty, any;
// the first of them.
static int find_runners(const moxie_api *api, const char *name, const char *device,
                        moxie_probe *first)
{
    moxie_probe entries[BACKENDS_MAX];
    uint64_t count = probe_all(api, entries);
    int found = 0;

    for (uint64_t i = 0; i < count; i++) {
        if (strcmp(entries[i].kind, "runner") != 0 || strcmp(entries[i].name, name) != 0 ||
            (device[0] != '\0' && strcmp(entries[i].device, device) != 0))
            continue;
        if (found++ == 0) *first = entries[i];
    }
    return found;
}

static void choose_device(const struct plugin *plugin, json_t *config)
{
    const char *runner = json_string_value(json_object_get(config, "runner"));
    moxie_probe offered;

    if (runner == NULL || json_object_get(config, "device") != NULL) return;
    // A library for CPUs alone may not have the key.
    if (find_runners(plugin->api, runner, "", &offered) == 1 && strcmp(offered.device, "cpu") != 0)
        (void)json_object_set_new(config, "device", json_string(offered.device));
}

const struct device_table *preflight_device(const struct instance *instance)
{
    const moxie_runner_info *runner = host_runner(
        &instance->host, instance_config(instance, "runner"), instance_config(instance, "device"));

    return runner != NULL ? device_find(runner->device) : NULL;
}

// A runner may be registered and its device absent, or offered and not registered. A library for
// CPUs alone may not have the key `device`.
static int check_device(const struct instance *instance, struct fault *fault)
{
    const char *name = instance_config(instance, "runner");
    const char *device = instance_config(instance, "device");
    const moxie_runner_info *runner = host_runner(&instance->host, name, device);
    moxie_probe entry;
    int is_offered = find_runners(instance->api, name, device, &entry) > 0;

    if (is_offered && (runner == NULL || entry.score == 0))
        return fault_set(fault, EXIT_REFUSED,
                         "runner %s cannot run on device %s here: %s; `moxie info` says what can",
                         name, entry.device, entry.reason);
    if (runner == NULL && strcmp(name, "none") == 0)
        return fault_set(fault, EXIT_REFUSED,
                         "runner none leaves experts to a runner of the host's own, and this "
                         "command computes them: name another runner, or auto");
    if (runner == NULL)
        return fault_set(fault, EXIT_REFUSED,
                         "the library has no runner %s%s%s; `moxie info` says what it has", name,
                         device[0] != '\0' ? " for device " : "", device);
    if (device_find(runner->device) != NULL) return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED,
                     "runner %s is for device %s, whose memory the command does not know; it knows "
                     "cpu and sm_90",
                     name, runner->device);
}

int preflight(struct instance *instance, struct plugin *plugin, const struct rank_options *options,
              json_t *config, struct fault *fault)
{
    const struct instance_request request = {
        .plugin = plugin,
        .config = config,
        .verbose = options->common.verbose,
    };
    json_t *warnings = NULL;
    char before[64];
    int st = EXIT_OK;

    TRY(plugin_load(plugin, options->common.plugin, fault));
    choose_device(plugin, config);
    TRY(instance_open(instance, &request, fault));
    warnings = instance_warnings(instance);
    (void)snprintf(before, sizeof before, "%s:", program_invocation_name);
    warnings_print(stderr, before, warnings);
    json_decref(warnings);
    if (instance->report->reasons_count > 0)
        TRY(instance_refuse(instance, options->common.json, 0, fault));
    TRY(check_device(instance, fault));
    TRY(check_reduced(instance, options, fault));
out:
    return st;
}

int preflight_check_memory(const struct instance *instance, const struct preflight_memory *need,
                           struct fault *fault)
{
    const moxie_plan *plan = instance->plan;
    uint64_t available = machine_memory_available();
    uint64_t rows = 0;
    uint64_t planned = 0;
    uint64_t needed = 0;
    char needed_text[HUMAN_BYTES];
    char available_text[HUMAN_BYTES];

    if (!bytes_mul((uint64_t)plan->bounds->forward_tokens, need->token, &rows) ||
        !bytes_add(plan->device_bytes, plan->symmetric_bytes, &planned) ||
        !bytes_add(planned, plan->pinned_bytes, &planned) ||
        !bytes_add(planned, plan->host_bytes, &planned) || !bytes_add(planned, rows, &planned) ||
        !bytes_mul(planned, need->ranks, &planned) || !bytes_add(planned, need->weights, &needed))
        needed = UINT64_MAX;
    if (needed <= available) return EXIT_OK;
    return fault_set(fault, EXIT_REFUSED, "this needs %s, and %s are free; %s",
                     human_bytes(needed, needed_text), human_bytes(available, available_text),
                     need->advice);
}
