// The forward path: the one place that knows the order dispatch, run, combine, and the rounds
// around it. What run does is in runner_experts.h.

#ifndef MOXIE_PLUGIN_FORWARD_H
#define MOXIE_PLUGIN_FORWARD_H

#include "plugin/dispatcher.h"
#include "plugin/runner.h"

// The one-call forward: dispatch, run and combine of one layer, in rounds.
int32_t forward_run(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *batch,
                    moxie_error *error);

#endif
