// moxie check: whether a configuration can work.

#include "hosts/cli/commands.h"
#include "hosts/cli/config_command.h"
#include "hosts/cli/json_file.h"

static const char doc[] =
    "Says whether the configuration can work, and if not, prints every reason at once, each with "
    "the key to change and the value to set. Needs no GPU and no weights. The exit code is 2 if "
    "the configuration is refused.\v"
    "CONFIG.json is one JSON object; `moxie info --keys` lists the keys. CONFIG.json "
    "overrides --model, and --set overrides both.\n\n"
    "Example:\n"
    "  moxie check --model DIR --set max_prefill_tokens=8192";

static int show(const struct instance *instance, json_t *model, int as_json, struct fault *fault)
{
    int ok = instance->report->reasons_count == 0;
    json_t *reasons = instance_reasons(instance);
    json_t *warnings = instance_warnings(instance);
    int st = EXIT_OK;

    if (as_json) {
        st = json_print(json_pack("{s:b, s:O*, s:s?, s:s?, s:o, s:o}", "ok", ok, "model", model,
                                  "runner", ok ? instance_config(instance, "runner") : NULL,
                                  "dispatcher", ok ? instance_config(instance, "dispatcher") : NULL,
                                  "reasons", reasons, "warnings", warnings),
                        fault);
        return st != EXIT_OK || ok ? st : EXIT_REFUSED;
    }
    if (ok)
        (void)printf("The configuration works: runner %s, dispatcher %s.\n",
                     instance_config(instance, "runner"), instance_config(instance, "dispatcher"));
    else
        (void)printf("The configuration is refused, for %zu reason%s:\n", json_array_size(reasons),
                     json_array_size(reasons) == 1 ? "" : "s");
    reasons_print(stdout, reasons);
    warnings_print(stdout, " ", warnings);
    json_decref(reasons);
    json_decref(warnings);
    return ok ? EXIT_OK : EXIT_REFUSED;
}

int command_check(int argc, char **argv, struct fault *fault)
{
    static const struct config_command command = {doc, show};

    return config_command(argc, argv, &command, fault);
}
