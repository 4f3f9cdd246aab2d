// What a step and a batch may be: checks of a host's per-step structs against the limits.

#ifndef MOXIE_PLUGIN_STEP_H
#define MOXIE_PLUGIN_STEP_H

#include "plugin/instance.h"

// A step that was accepted.
struct step_shape {
    int64_t tokens;      // this rank's
    int64_t tokens_most; // of any rank: what every rank derives its rounds from
    int64_t capture_row; // in the whole capture buffer
    const int32_t *tokens_valid;
    int32_t padding;
    int32_t listed; // 1: tokens_most comes from every rank's count, 0: it is the static bound
};

// `local`: the dispatcher has no peers. MOXIE_E_CAPACITY when the step exceeds the plan or the
// capture.
int32_t step_check(const moxie_instance *instance, int local, const moxie_step *step,
                   struct step_shape *shape, moxie_error *error);

// The rounds of a forward, at least one, and the most rows that any rank has in one of them: at
// least 1, as an index is divided by it.
int32_t step_rounds(const struct limits *limits, const struct step_shape *shape);
int32_t step_rows_most(const struct limits *limits, const struct step_shape *shape, int32_t round);

int32_t step_check_slot(const moxie_instance *instance, const char *name, int32_t slot,
                        moxie_error *error);

// One layer's tensors for a step of `tokens` tokens; the slot has been checked.
int32_t step_check_batch(const moxie_instance *instance, int local, int64_t tokens,
                         const moxie_batch *batch, moxie_error *error);

// y of a batch that was checked, in stream order.
void step_zero_y(const moxie_instance *instance, const moxie_batch *batch);

// Of a forward in rounds: y, which the first of them writes, lies over nothing that later ones
// read.
int32_t step_check_rounds(const struct step_shape *shape, const moxie_batch *batch,
                          moxie_error *error);

// Where the rows of a layer lie: its halves come with one batch each.
struct step_rows {
    const void *x, *y;
    int64_t x_stride_bytes, y_stride_bytes;
};

struct step_rows step_rows_of(const moxie_batch *batch);

// The batch of a later half, whose tensors have been checked: y is written where the experts wrote
// it, and with `x_too` the own rows are read where those were that went to the peers. No rows are
// anywhere.
int32_t step_check_rows(const struct step_rows *sent, const moxie_batch *batch, int x_too,
                        moxie_error *error);

#endif
