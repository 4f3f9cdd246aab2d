// What the commands about a configuration file share: arguments, library, instance.

#ifndef MOXIE_HOSTS_CLI_CONFIG_COMMAND_H
#define MOXIE_HOSTS_CLI_CONFIG_COMMAND_H

#include "hosts/cli/instance.h"

struct config_command {
    const char *doc; // of --help
    // What is said about the opened instance, and what --model said, NULL without one. Returns an
    // exit code.
    int (*show)(const struct instance *instance, json_t *model, int as_json, struct fault *fault);
};

int config_command(int argc, char **argv, const struct config_command *command,
                   struct fault *fault);

#endif
