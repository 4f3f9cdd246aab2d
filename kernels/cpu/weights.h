// Weights as the inner product wants them: rows of f32 along k.

#ifndef MOXIE_KERNELS_CPU_WEIGHTS_H
#define MOXIE_KERNELS_CPU_WEIGHTS_H

#include "kernels/cpu/isa.h"
#include "kernels/types.h"

#define PANEL_COLUMNS 48  // output features of a panel, at most
#define PANEL_K       512 // inputs of a panel, at most; panels begin at multiples of it

// The rows of gate, of up or of a whole plain projection: unit u is row first + u * step.
struct weight_half {
    int64_t first, step;
    int64_t block_first; // fp8_block128: row of the scales of unit 0's block when nothing is offset
    int64_t global;      // fp8_tensor, nvfp4: index among the expert's scales
    int64_t unit_offset; // fp8_block128: units and inputs that another shard owns
    int64_t k_offset;
};

// `up` 0: gate, or all of a plain projection. The offset of `view` shifts units of w1 and inputs of
// w2.
struct weight_half w1_half(const struct weight_view *view, int64_t intermediate, int up);
struct weight_half w2_half(const struct weight_view *view);

struct panel {
    const struct weight_view *view;
    struct weight_half half;
    int64_t expert;
    int64_t unit, units; // first, and how many: 1..PANEL_COLUMNS
    int64_t k, k_count;  // first, and how many: 1..PANEL_K
};

// The panel in f32, [units, k_count], rows *stride elements apart: where it lies when that is what
// the host stores, else in `scratch`, PANEL_COLUMNS * PANEL_K. Scales that hold for a whole row are
// left to panel_finish.
const float *panel_load(const struct panel *panel, const struct cpu_ops *ops, float *scratch,
                        int64_t *stride);

// What the products of a panel's units still lack: x = x * factor + bias.
void panel_finish(const struct panel *panel, float factor[PANEL_COLUMNS],
                  float bias[PANEL_COLUMNS]);

#endif
