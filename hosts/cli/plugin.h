// Finds libmoxie.so and loads it.

#ifndef MOXIE_HOSTS_CLI_PLUGIN_H
#define MOXIE_HOSTS_CLI_PLUGIN_H

#include "abi.h"
#include "abi/loader.h"
#include "hosts/cli/fault.h"

#include <limits.h>

struct plugin {
    const moxie_api *api; // NULL when not loaded
    moxie_library library;
    char path[PATH_MAX];
};

// Fills plugin->path with `path` when given, else $MOXIE_PLUGIN, else what lies beside the
// executable, in ../lib or where the build or the installation has libraries, else what the
// system's loader finds.
int plugin_find(struct plugin *plugin, const char *path, struct fault *fault);
// Whether what was found is a regular file that can be read; the loader waits at a pipe. A name
// without a slash is the loader's to look for. path: as for plugin_find.
int plugin_check_file(const struct plugin *plugin, const char *path, struct fault *fault);
// Whether the loader finds a file of a name without a slash, for who does not load it: asked in a
// process of its own, which has deadline_s seconds. path: as for plugin_find.
int plugin_check_name(const struct plugin *plugin, const char *path, int64_t deadline_s,
                      struct fault *fault);
// Finds, checks and loads.
int plugin_load(struct plugin *plugin, const char *path, struct fault *fault);
// 1 when that file is the library that is loaded, or this program.
int plugin_is(const struct plugin *plugin, const char *path);
// Accepts a zeroed or unloaded plugin.
void plugin_unload(struct plugin *plugin);

// Where a call into the library explains itself.
struct library_error {
    moxie_error error;
    char text[1024];
};

moxie_error *library_error(struct library_error *error);

#endif
