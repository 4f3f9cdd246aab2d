// The verdict on a configuration: all reasons at once, without a device and without weights.

#ifndef MOXIE_PLUGIN_VALIDATE_H
#define MOXIE_PLUGIN_VALIDATE_H

#include "plugin/backends.h"
#include "plugin/bounds.h"
#include "plugin/plan.h"

// What `auto` becomes: runner, dispatcher, transport, activation_format. Unknown names stay, for
// validate to refuse.
void validate_resolve(struct config *config);
// Why a key that was `auto` became what it is, for the log: "dispatcher = local: ep_size is 1".
// Empty for other keys.
void validate_explain(const struct config *config, enum config_key key, char *buffer,
                      uint64_t capacity);

// Judges snapshot and bounds before the plan is made: everything below but validate_plan.
void validate_config(const struct config *config, const struct bounds *bounds,
                     struct report *report);

// What `auto` would be, of the device; NULL when it has none.
const struct backend *validate_auto(const struct config *config, enum backend_kind kind);

// Judges whether this runner and this dispatcher meet, and have kernels for what is asked of them.
// NULL is a name that nobody has.
void validate_backends(const struct config *config, const struct backend *runner,
                       const struct backend *dispatcher, struct report *report);

// Warns of keys that are set and have no effect here.
void validate_unused(const struct config *config, const struct bounds *bounds,
                     struct report *report);

// 0 when the runner is the host's own.
int validate_computes(const struct config *config);
// 1 when rows travel between ranks: a dispatcher other than `local`, and more than one rank.
int validate_has_wire(const struct config *config);
// enum dispatcher_kind of the key `dispatcher` on the key `device`; -1 when there is none.
int32_t validate_dispatcher(const struct config *config);

// Judges the plan against device_memory_budget_bytes.
void validate_plan(const struct config *config, const struct plan *plan, struct report *report);
// Which keys to set to what, so that the plan's device and symmetric bytes are `budget` or less:
// "KEY to N or less, or "; empty where none helps.
void validate_advise(const struct config *config, int64_t budget, char *advice, uint64_t capacity);

#endif
