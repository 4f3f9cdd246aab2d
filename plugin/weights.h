// Weights as a host describes them, checked and turned into what kernels read. Nothing is copied.

#ifndef MOXIE_PLUGIN_WEIGHTS_H
#define MOXIE_PLUGIN_WEIGHTS_H

#include "kernels/types.h"
#include "plugin/plan.h"

struct layer_weights {
    struct weight_view w1;
    struct weight_view w2;
};

// Checks shapes, dtypes, orders and scale layouts against the limits; what the tensors have in them
// is not looked at. `device` is where they must be.
int32_t weights_read(const moxie_weights *weights, const struct limits *limits, moxie_device device,
                     struct layer_weights *out, moxie_error *error);

#endif
