// The forward path: the one place that knows the order route, dispatch, gemm, gemm, combine, and the rounds around it.

#ifndef MOXIE_PLUGIN_FORWARD_H
#define MOXIE_PLUGIN_FORWARD_H

#include "plugin/status.h"

int32_t forward_run(moxie_dispatcher *dispatcher, moxie_runner *runner, const moxie_batch *batch, moxie_error *error);

#endif
