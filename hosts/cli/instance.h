// One opened instance and what the library says about its configuration.

#ifndef MOXIE_HOSTS_CLI_INSTANCE_H
#define MOXIE_HOSTS_CLI_INSTANCE_H

#include "hosts/cli/host.h"
#include "hosts/cli/plugin.h"

#include <stdio.h>

struct instance {
    const moxie_api *api;
    moxie_instance *handle;
    const moxie_report *report;
    const moxie_plan *plan; // has bounds alone when refused
    struct host host;
};

// What to open an instance with; all borrowed.
struct instance_request {
    const struct plugin *plugin;
    json_t *config;
    const struct host_bootstrap *bootstrap; // NULL: one that reaches nobody
    int verbose;                            // print the library's log from INFO on
};

// Opens, validates and plans. A refused configuration opens too: look at report->reasons_count.
// The warnings against it are not logged, nor that it is refused: instance_warnings and
// instance_reasons have them. The address of `instance`
// must not change until instance_close.
int instance_open(struct instance *instance, const struct instance_request *request,
                  struct fault *fault);
// Accepts a zeroed, half-opened or closed instance.
int instance_close(struct instance *instance, struct fault *fault);

// Closes at the end of a function whose outcome is `st`, and returns the outcome with closing
// counted: a fault of closing stands only where there was none before.
int instance_finish(struct instance *instance, int st, struct fault *fault);

// The snapshot's value of a key, with `auto` resolved; "" when there is no such key.
const char *instance_config(const struct instance *instance, const char *key);

// [{"code", "key", "message"}] and [{"key", "message"}], the latter with unknown keys, and empty
// where no configuration has been judged. owner: caller
json_t *instance_reasons(const struct instance *instance);
json_t *instance_warnings(const struct instance *instance);

// The bounds; those that a refused configuration does not allow to compute are left out. owner:
// caller
json_t *instance_bounds(const struct instance *instance);

// Every reason (or warning) in lines that a person reads.
void reasons_print(FILE *stream, json_t *reasons);
void warnings_print(FILE *stream, const char *before, json_t *warnings);

// {"ok":false,"reasons":[...],"warnings":[...]} and, when `bounds`, the bounds, on standard output;
// or the reasons in lines on standard error. Returns EXIT_REFUSED, or a fault.
int instance_refuse(const struct instance *instance, int as_json, int bounds, struct fault *fault);

#endif
