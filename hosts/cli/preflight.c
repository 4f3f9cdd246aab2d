// What is refused before ranks are started.

#include "hosts/cli/preflight.h"

#include <errno.h>

// Each rank has its own tokens here, so nobody could sum partial outputs.
static int check_reduced(const struct instance *instance, const struct rank_options *options,
                         struct fault *fault)
{
    const char *name = instance_config(instance, "dispatcher");
    const moxie_dispatcher_info *dispatcher = host_dispatcher(&instance->host, name);

    if (options->ranks == 1 || dispatcher == NULL || dispatcher->traits->output_is_reduced)
        return EXIT_OK;
    return fault_set(
        fault, EXIT_REFUSED,
        "dispatcher %s leaves the sum over ranks to its host, and wants the same tokens on every "
        "rank; over %lld ranks choose one that moves rows (allgather, alltoall)",
        name, (long long)options->ranks);
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
    TRY(instance_open(instance, &request, fault));
    warnings = instance_warnings(instance);
    (void)snprintf(before, sizeof before, "%s:", program_invocation_name);
    warnings_print(stderr, before, warnings);
    json_decref(warnings);
    if (instance->report->reasons_count > 0)
        TRY(instance_refuse(instance, options->common.json, 0, fault));
    TRY(check_reduced(instance, options, fault));
out:
    return st;
}
