// The runner: one layer's experts, from received rows to result rows. Arguments have passed the
// door.

#ifndef MOXIE_PLUGIN_RUNNER_H
#define MOXIE_PLUGIN_RUNNER_H

#include "plugin/status.h"

// Whether create wants weights. Without, they are not looked at.
int runner_takes_weights(const moxie_instance *instance);
// MOXIE_E_UNSUPPORTED where nothing but expand and fold can be had of it.
int32_t runner_check_computes(const moxie_runner *runner, moxie_error *error);

int32_t runner_create(moxie_instance *instance, int32_t layer, const moxie_weights *weights,
                      moxie_runner **out, moxie_error *error);
int32_t runner_run(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                   const moxie_rows *out, moxie_error *error);
int32_t runner_weights_updated(moxie_runner *runner, const int32_t *experts, uint64_t count,
                               moxie_error *error);
void runner_destroy(moxie_runner *runner);

// The extension moxie.expand/1.
int32_t runner_expand(moxie_runner *runner, const moxie_call *call, const moxie_rows *in,
                      const moxie_rows *out, const moxie_tensor *row_index, moxie_error *error);
int32_t runner_fold(moxie_runner *runner, const moxie_call *call, const moxie_rows *expanded,
                    const moxie_tensor *row_index, const moxie_rows *out, moxie_error *error);

int runner_is_live(const moxie_runner *runner);
moxie_instance *runner_instance(const moxie_runner *runner);

#endif
