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

// What the ranks of one machine will hold in its memory, beside what the plan says.
struct preflight_memory {
    uint64_t weights; // bytes, of all experts
    uint64_t token;   // bytes for each token that a rank may have
    uint64_t ranks;
    const char *advice; // what to do where that is too much
};

// Refuses what does not fit, which is better than being killed half way. For devices whose memory
// is the machine's; after a preflight that answered EXIT_OK.
int preflight_check_memory(const struct instance *instance, const struct preflight_memory *need,
                           struct fault *fault);

#endif
