// The verdict on a configuration: all reasons at once, without a device and without weights.

#ifndef MOXIE_PLUGIN_VALIDATE_H
#define MOXIE_PLUGIN_VALIDATE_H

#include "plugin/bounds.h"
#include "plugin/plan.h"

// What `auto` becomes: runner, dispatcher, activation_format. Unknown names stay, for validate to refuse.
void validate_resolve(struct config *config);

// Judges snapshot and bounds before the plan is made.
void validate_config(const struct config *config, const struct bounds *bounds, struct report *report);

// Judges the plan against device_memory_budget_bytes.
void validate_plan(const struct config *config, const struct plan *plan, struct report *report);

#endif
