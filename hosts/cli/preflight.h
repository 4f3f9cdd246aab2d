// What is refused before ranks are started: once and with every reason, not by each of them.

#ifndef MOXIE_HOSTS_CLI_PREFLIGHT_H
#define MOXIE_HOSTS_CLI_PREFLIGHT_H

#include "hosts/cli/device.h"
#include "hosts/cli/instance.h"
#include "hosts/cli/options.h"

// Loads the library, gives a named runner the device it is for unless the configuration names one,
// opens an instance, prints its warnings. When it answers anything but EXIT_OK, the reasons are
// said. The caller closes both in any case.
int preflight(struct instance *instance, struct plugin *plugin, const struct rank_options *options,
              json_t *config, struct fault *fault);

// What the ranks will compute on; after a preflight that answered EXIT_OK.
const struct device_table *preflight_device(const struct instance *instance);

#endif
