// Memory of a device for one projection of a rank's experts, in the shapes of moxie_matrix. The
// file loader and the bench fill it.

#ifndef MOXIE_HOSTS_CLI_WEIGHTS_H
#define MOXIE_HOSTS_CLI_WEIGHTS_H

#include "hosts/cli/device.h"

// What a matrix is made of.
struct weights_shape {
    int32_t format;      // MOXIE_FORMAT_*
    int32_t order;       // MOXIE_ORDER_*; PLAIN for the down projection
    int32_t orientation; // MOXIE_ROWS_*
    int32_t bias_format; // MOXIE_FORMAT_F32, _BF16, _F16, or MOXIE_FORMAT_AUTO for none
    int64_t experts;
    int64_t outputs; // N, gate and up counted
    int64_t inputs;  // K
};

struct weights {
    moxie_matrix matrix;   // points into this struct: do not move it
    struct device *device; // borrowed
    struct weights_shape shape;
    uint64_t value_bytes;                          // of one expert, as the three below
    uint64_t scale_bytes;                          // 0: the format has none
    uint64_t global_bytes;                         // 0: the format has none
    uint64_t bias_bytes;                           // 0: no bias
    struct memory values, scales, globals, biases; // of all experts
    int64_t dims[4][3];
};

// Bytes of all experts together, without allocating; 0 when the product is past 2^62 or the shape
// cannot be.
uint64_t weights_bytes(const struct weights_shape *shape);

// w1 and w2 of a layer: `like` has the format, the order of w1's rows and the experts.
void weights_shapes(int64_t hidden, int64_t intermediate, const struct weights_shape *like,
                    struct weights_shape *w1, struct weights_shape *w2);
// Bytes of both; 0 where those of one are.
uint64_t weights_bytes_of_two(const struct weights_shape *w1, const struct weights_shape *w2);

// Allocates and describes; the contents are undefined. On failure nothing is held.
int weights_init(struct weights *weights, struct device *device, const struct weights_shape *shape,
                 struct fault *fault);
// In the order of the device's stream, between weights of one shape on a device that can.
int weights_copy(struct weights *to, const struct weights *from, struct fault *fault);
// Accepts a zeroed struct.
void weights_fini(struct weights *weights);

// "bf16" for MOXIE_FORMAT_BF16; MOXIE_FORMAT_AUTO for a word that is no weight format.
const char *format_word(int32_t format);
int32_t format_from_word(const char *word);

// Whether weights of that format are e4m3 codes with f32 scales.
int format_is_fp8(int32_t format);
// Whether two weights of that format share a byte, and how many inputs have one scale then.
int format_is_packed(int32_t format);
int32_t format_group(int32_t format);
// Bytes of one element of F32, BF16 or F16; 0 for others.
uint64_t format_element_bytes(int32_t format);
moxie_dtype format_dtype(int32_t format);

// The description of compact memory; `shape` must live as long as the tensor.
moxie_tensor tensor_at(moxie_device place, void *data, moxie_dtype dtype, int32_t ndim,
                       int64_t *shape);

#endif
