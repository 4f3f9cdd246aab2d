// The experts' part of the forward path: the one place that knows the order route, gemm, gemm,
// combine.

#ifndef MOXIE_PLUGIN_RUNNER_EXPERTS_H
#define MOXIE_PLUGIN_RUNNER_EXPERTS_H

#include "plugin/instance.h"
#include "plugin/rows.h"
#include "plugin/weights.h"

// One layer's experts over received rows.
struct experts_job {
    moxie_instance *instance;
    const struct layer_weights *weights;
    const struct rows_view *in;
    const struct out_view *out;
    int32_t slot;     // whose buffers
    int32_t in_place; // 1: results may lie in rows, ids or what they mean; not told of several
                      // slabs with more than LAYER_TOKENS rows
    int32_t layer;
    void *stream; // the kernels'
};

// Which rows each local expert gets, in the slot's buffers; `route` says where they are. Reads
// `instance`, `in`, `slot` and `stream` of the job.
int32_t experts_route(const struct experts_job *job, struct route_args *route, moxie_error *error);

// route, gate_up, down, combine; on a GPU with fp8 weights, quantise before each product. A few
// tokens there in one launch.
int32_t experts_run(const struct experts_job *job, moxie_error *error);

#endif
