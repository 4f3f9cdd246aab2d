// A random layer and random tokens, as bytes for the plugin and as exact numbers for the reference.

#ifndef MOXIE_HOSTS_CLI_CONFORM_LAYER_H
#define MOXIE_HOSTS_CLI_CONFORM_LAYER_H

#include "hosts/cli/conform.h"
#include "hosts/cli/conform_numbers.h"

struct layer_spec {
    int64_t hidden, intermediate, experts;
    int32_t weight_format;
    int32_t order, orientation; // of w1; w2 has the same orientation
    int32_t scale_format;       // int4_g32: f32, bf16 or f16
    int32_t scale_halves;       // fp8_tensor, nvfp4: 2 gives w1 a scale for each half
    int32_t bias_format;        // MOXIE_FORMAT_AUTO: no bias
    const char *activation;
    double alpha, beta, limit; // swigluoai
    uint64_t seed;
};

// One projection of all experts.
struct matrix_room {
    const struct layer_spec *spec;
    int64_t n, k, halves; // halves: 2 for a gated w1
    int64_t scales_shape[3], globals_shape[2];
    int32_t scales_ndim, globals_ndim;
    int64_t scale_bytes; // of one expert
    unsigned char *values, *scales, *bias;
    float *globals;
    double *exact;      // [experts, n, k], rows as stored
    double *exact_bias; // [experts, n]
};

struct layer {
    struct layer_spec spec;
    struct matrix_room w1, w2;
};

// The experts first..first+count-1 as a plugin gets them; `layer` must live as long.
struct layer_view {
    int64_t shapes[2][4][3]; // by matrix, then values, scales, globals, bias
    moxie_matrix w1, w2;
    moxie_weights weights;
};

int layer_is_gated(const struct layer_spec *spec);
int layer_make(struct layer *layer, const struct layer_spec *spec, struct check *check);
void layer_free(struct layer *layer);
void layer_view_of(const struct layer *layer, int64_t first, int64_t count,
                   struct layer_view *view);

struct tokens_spec {
    int64_t count, hidden, top_k, experts;
    int32_t x_format, y_format, weight_format;
    int32_t id_bytes;        // 4 or 8
    int64_t pad;             // elements between two rows of every tensor; also tests byte_offset
    int32_t weight_on_input; // the router weight multiplies the expert's input
    double scaling;          // routed_scaling_factor
    uint64_t seed;
};

// One rank's tokens. `y` starts as NaNs.
struct tokens {
    struct tokens_spec spec;
    unsigned char *x, *ids, *weights, *y;
    uint64_t y_bytes;
    double *x_exact;       // [count, hidden]
    double *weights_exact; // [count, top_k]
    int64_t *experts;      // [count, top_k] what each id stands for; -1: no expert
    double *want;          // [count, hidden] what y must be
    int64_t shapes[3][2], strides[4][2];
    moxie_batch batch;
};

int tokens_make(struct tokens *tokens, const struct tokens_spec *spec, struct check *check);
void tokens_free(struct tokens *tokens);
// Writes an id as the plugin reads it, and what it stands for.
void tokens_set(struct tokens *tokens, int64_t token, int64_t place, int64_t id, int64_t expert);
// NaNs into y again.
void tokens_poison(struct tokens *tokens);
// Fails when any byte of y was written.
int tokens_untouched(const struct tokens *tokens, struct check *check);
// Fails when a row of y is further than `tolerance` from `want`, or a byte between rows was
// written.
int tokens_compare(const struct tokens *tokens, double tolerance, struct check *check);
double tokens_y(const struct tokens *tokens, int64_t token, int64_t column);

// Computes tokens->want in double precision.
int reference_compute(struct tokens *tokens, const struct layer *layer, struct check *check);
// What expert `expert` makes of x [hidden]; `mid` is [intermediate], y [hidden].
void reference_expert(const struct layer *layer, int64_t expert, const double *x, double *mid,
                      double *y);

// Zeroed memory of at least one byte; NULL is a verdict.
void *conform_room(struct check *check, int64_t count, int64_t bytes);

moxie_tensor conform_tensor(void *data, moxie_dtype dtype, int32_t ndim, int64_t *shape,
                            int64_t *strides);

#endif
