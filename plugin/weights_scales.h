// The scales of 4-bit weights: what no kernel looks for in them.

#ifndef MOXIE_PLUGIN_WEIGHTS_SCALES_H
#define MOXIE_PLUGIN_WEIGHTS_SCALES_H

#include "plugin/device.h"
#include "plugin/weights.h"

// That no scale of mxfp4 overflows with its values, or is over GEMMS_E8M0_MOST on a GPU, and none
// of nvfp4 is NaN, of `count` local experts from `first` on; other formats are not looked at. What
// lies on a GPU, the current one, is fetched: not while a stream is captured.
int32_t weights_check_scales(const struct layer_weights *weights, int32_t first, int32_t count,
                             const struct device *device, moxie_error *error);

#endif
