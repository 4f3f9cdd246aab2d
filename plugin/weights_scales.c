// The scales of 4-bit weights.

#include "plugin/weights_scales.h"

#include <inttypes.h>
#include <stdlib.h>

#define PIECE_BYTES (256 << 10) // of scales in the host's memory, unless a row has more

struct expert_range {
    int32_t first, count;
};

// One matrix, whose scales come in pieces of whole rows.
struct checked {
    const struct weight_view *view;
    const struct device *device;
    const char *name;
    unsigned char *piece;  // [rows with what lies between them]
    unsigned char *values; // [k / 2]: mxfp4, of a row whose largest scales are near the end
    int64_t row_bytes, rows_max;
    int32_t e8m0_most; // that the device has numbers for
};

static int32_t fail_capturing(const char *name, moxie_error *error)
{
    return fail_with(error, MOXIE_E_CAPTURING,
                     "%s: no scales can be read while a graph is captured; call create and "
                     "weights_updated before or after",
                     name);
}

static int32_t fetch(const struct checked *c, void *to, const void *from, int64_t bytes,
                     moxie_error *error)
{
    const int32_t answer = c->device->fetch(to, from, bytes);

    if (answer == 0) return MOXIE_OK;
    if (c->device->status(answer) == MOXIE_E_CAPTURING) return fail_capturing(c->name, error);
    return fail_with(error, MOXIE_E_DEVICE, "%s: cannot be read at %p: %s", c->name, from,
                     c->device->error_text(answer));
}

// ---- One row -----------------------------------------------------------------------------------

// The largest magnitude, in units of 0.5, that 32 packed e2m1 values reach.
static int32_t block_magnitude(const unsigned char *packed)
{
    static const int32_t halves[8] = {0, 1, 2, 3, 4, 6, 8, 12};
    int32_t largest = 0;

    for (int32_t i = 0; i < 16; i++) {
        int32_t low = halves[packed[i] & 7], high = halves[packed[i] >> 4 & 7];

        largest = low > largest ? low : largest;
        largest = high > largest ? high : largest;
    }
    return largest;
}

// 2^(e - 127) times a value: finite below 2^128, so 253 takes magnitudes up to 3 and 254 up to 1.5.
static int e8m0_overflows(int32_t exponent, const unsigned char *packed)
{
    if (exponent <= 252) return 0;
    if (exponent == 255) return 1;
    return block_magnitude(packed) > (exponent == 253 ? 6 : 3);
}

static int32_t check_mxfp4(const struct checked *c, const unsigned char *scales, int32_t expert,
                           int64_t row, moxie_error *error)
{
    const struct weight_view *w = c->view;
    const unsigned char *values = (const unsigned char *)w->values +
                                  expert * w->expert_stride_bytes + row * w->row_stride_bytes;
    int64_t at = 0; // of the largest
    int32_t largest, st = MOXIE_OK;

    for (int64_t block = 1; block < w->k / 32; block++) {
        if (scales[block] > scales[at]) at = block;
    }
    largest = scales[at];
    if (largest > 252) {
        TRY(fetch(c, c->values, values, w->k / 2, error));
        for (int64_t block = 0; block < w->k / 32; block++) {
            if (e8m0_overflows(scales[block], c->values + block * 16))
                TRY(fail_with(error, MOXIE_E_INVALID,
                              "%s: e8m0 scale %d of expert %d, row %" PRId64 ", block %" PRId64
                              " is no finite number with its values; the checkpoint is damaged",
                              c->name, scales[block], expert, row, block));
        }
    }
    if (largest > c->e8m0_most)
        TRY(fail_with(error, MOXIE_E_UNSUPPORTED,
                      "%s: e8m0 scale %d of expert %d, row %" PRId64 ", block %" PRId64
                      " is 2^%d; this device takes 2^%d at most: set device to cpu, or scale the "
                      "weights down",
                      c->name, largest, expert, row, at, largest - 127, c->e8m0_most - 127));
out:
    return st;
}

static int32_t check_nvfp4(const struct checked *c, const unsigned char *scales, int32_t expert,
                           int64_t row, moxie_error *error)
{
    for (int64_t block = 0; block < c->row_bytes; block++) {
        if ((scales[block] & 0x7f) == 0x7f)
            return fail_with(error, MOXIE_E_INVALID,
                             "%s: the e4m3 scale of expert %d, row %" PRId64 ", block %" PRId64
                             " is NaN; the checkpoint is damaged",
                             c->name, expert, row, block);
    }
    return MOXIE_OK;
}

// ---- All of them -------------------------------------------------------------------------------

static int32_t check_expert(const struct checked *c, int32_t expert, moxie_error *error)
{
    const struct weight_view *w = c->view;
    const unsigned char *scales =
        (const unsigned char *)w->scales + expert * w->scale_expert_stride_bytes;
    int32_t st = MOXIE_OK;

    for (int64_t first = 0; first < w->n; first += c->rows_max) {
        const int64_t left = w->n - first, rows = left < c->rows_max ? left : c->rows_max;

        TRY(fetch(c, c->piece, scales + first * w->scale_row_stride_bytes,
                  (rows - 1) * w->scale_row_stride_bytes + c->row_bytes, error));
        for (int64_t i = 0; i < rows; i++) {
            const unsigned char *row = c->piece + i * w->scale_row_stride_bytes;

            if (w->format == FORMAT_MXFP4)
                TRY(check_mxfp4(c, row, expert, first + i, error));
            else
                TRY(check_nvfp4(c, row, expert, first + i, error));
        }
    }
out:
    return st;
}

static int32_t check_view(const struct weight_view *view, const char *name,
                          const struct expert_range *experts, const struct device *device,
                          moxie_error *error)
{
    const int64_t row_bytes = view->k / (view->format == FORMAT_MXFP4 ? 32 : NVFP4_GROUP);
    const int64_t values_bytes = view->format == FORMAT_MXFP4 ? view->k / 2 : 0;
    const int64_t stride = view->scale_row_stride_bytes;
    const int64_t piece_bytes = row_bytes > PIECE_BYTES ? row_bytes : PIECE_BYTES;
    struct checked c = {.view = view,
                        .device = device,
                        .name = name,
                        .row_bytes = row_bytes,
                        .e8m0_most = device->synchronize != NULL ? GEMMS_E8M0_MOST : 255,
                        .rows_max = stride == 0 ? view->n : (piece_bytes - row_bytes) / stride + 1};
    int32_t st = MOXIE_OK;

    c.piece = malloc((size_t)(piece_bytes + values_bytes));
    if (c.piece == NULL)
        TRY(fail_with(error, MOXIE_E_MEMORY, "%s: no memory for a part of them", name));
    c.values = c.piece + piece_bytes;
    for (int32_t i = 0; i < experts->count; i++)
        TRY(check_expert(&c, experts->first + i, error));
out:
    free(c.piece);
    return st;
}

int32_t weights_check_scales(const struct layer_weights *weights, int32_t first, int32_t count,
                             const struct device *device, moxie_error *error)
{
    const int32_t format = weights->w1.format; // of both
    const struct expert_range experts = {first, count};
    int32_t answer = 0;
    int32_t st = MOXIE_OK;

    if (count == 0 || (format != FORMAT_MXFP4 && format != FORMAT_NVFP4)) return MOXIE_OK;
    // Whatever stream the host writes weights on.
    if (device->synchronize != NULL) answer = device->synchronize();
    if (device->status(answer) == MOXIE_E_CAPTURING)
        TRY(fail_capturing("weights.w1.scales", error));
    if (answer != 0)
        TRY(fail_with(error, MOXIE_E_DEVICE, "weights: work before they are read has failed: %s",
                      device->error_text(answer)));
    TRY(check_view(&weights->w1, "weights.w1.scales", &experts, device, error));
    TRY(check_view(&weights->w2, "weights.w2.scales", &experts, device, error));
out:
    return st;
}
