// The engine's side of the contract, played by the command: configuration from a JSON object,
// memory of a device, log lines on standard error, and the tables of what the library
// registered.

#ifndef MOXIE_HOSTS_CLI_HOST_H
#define MOXIE_HOSTS_CLI_HOST_H

#include "abi.h"
#include "hosts/cli/device.h"

#include <jansson.h>

#define HOST_BACKENDS_MAX 32
#define HOST_NAME         "moxie command"

// How ranks find each other; both non-zero when a rank cannot be reached.
struct host_bootstrap {
    void *ctx;
    int32_t (*all_gather)(void *ctx, const void *send, void *recv, uint64_t bytes);
    int32_t (*barrier)(void *ctx);
};

struct host {
    json_t *config; // borrowed object
    json_t
        *keys_asked; // object: every key the library asked for, and what it is if of another type
    const char *command; // what log lines start with: "moxie plan"
    struct host_bootstrap bootstrap;
    struct device *device; // borrowed: whose memory the library gets; NULL: RAM
    int32_t log_from;      // the lowest severity that is printed
    int verdict_apart;     // errors of `config`, a refusal without its reasons, are not printed
    uint32_t runners_count, dispatchers_count;
    const moxie_runner_info *runners[HOST_BACKENDS_MAX];
    const moxie_dispatcher_info *dispatchers[HOST_BACKENDS_MAX];
};

// `bootstrap` NULL: one that reaches nobody, for commands that never create a dispatcher.
int host_init(struct host *host, json_t *config, const char *command,
              const struct host_bootstrap *bootstrap, struct fault *fault);
void host_fini(struct host *host);

// The table to open an instance with; valid as long as `host`.
moxie_host host_table(struct host *host, uint32_t abi_version);

// Of that name, on that device; "" is any device.
const moxie_runner_info *host_runner(const struct host *host, const char *name, const char *device);
const moxie_dispatcher_info *host_dispatcher(const struct host *host, const char *name,
                                             const char *device);

// What stands for a key that the library wants of another type, as JSON; NULL if it is of that
// type.
const char *host_wrong_type(const struct host *host, const char *key);

// After open(): one {"key", "message"} for every key of the file that the library never asked for,
// with the nearest that it did ask for. NULL when out of memory. owner: caller
json_t *host_unknown_keys(const struct host *host);

#endif
