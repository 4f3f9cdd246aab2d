// One rule in a process of its own, with a deadline: a plugin that crashes or hangs breaks that
// rule and no other.

#ifndef MOXIE_HOSTS_CLI_CONFORM_WALK_H
#define MOXIE_HOSTS_CLI_CONFORM_WALK_H

#include "hosts/cli/conform.h"
#include "hosts/cli/fault.h"

#include <jansson.h>

struct walk {
    const char *plugin; // path
    int64_t deadline_s; // of one rule
    int verbose;        // what the plugin prints goes to standard error
};

// Runs the rule and fills check->verdict, where and message. A fault is trouble of this command.
int walk_rule(const struct walk *walk, const struct rule *rule, struct check *check,
              struct fault *fault);

// One verdict as JSON. owner: caller
json_t *walk_row(const struct rule *rule, const struct check *check);

#endif
