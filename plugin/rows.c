// Received rows and result rows.

#include "plugin/rows.h"

#include "plugin/config.h"
#include "plugin/tensor.h"

#include <inttypes.h>
#include <stddef.h>
#include <string.h>

struct rows_reader {
    const moxie_rows *rows;
    const struct limits *limits;
    const char *explained;
    moxie_device device;
    int32_t by_expert;
};

static int32_t check_header(const moxie_rows *rows, const char *name, moxie_error *error)
{
    int many = rows->layout == MOXIE_LAYOUT_RANK_MAJOR;

    if (rows->layout < MOXIE_LAYOUT_STANDARD || rows->layout > MOXIE_LAYOUT_EXPERT_MASKED)
        return fail_with(error, MOXIE_E_UNSUPPORTED, "%s.layout: %d; want a MOXIE_LAYOUT_*", name,
                         rows->layout);
    if (rows->slabs_count == 0 || rows->slabs_count > (many ? (uint32_t)MOXIE_RANKS_MAX : 1u))
        return fail_with(error, MOXIE_E_INVALID, "%s: %u slabs; want %s", name, rows->slabs_count,
                         many ? "1..64" : "1");
    return MOXIE_OK;
}

// The first extents of a slab's tensor: [cap], of EXPERT_MASKED [experts, cap]. The last is left.
static void leading_extents(const struct rows_reader *r, struct tensor_want *want, int64_t cap)
{
    int masked = r->rows->layout == MOXIE_LAYOUT_EXPERT_MASKED;

    want->device = r->device;
    if (masked) want->shape[0] = r->limits->experts_local;
    want->shape[masked] = cap;
    want->ndim = masked + 1;
}

// Whether one stride addresses the rows of all experts of EXPERT_MASKED: where each has one place,
// they may be at any distance.
static int experts_follow(const moxie_tensor *tensor, int32_t layout)
{
    return layout != MOXIE_LAYOUT_EXPERT_MASKED || tensor->data == NULL || tensor->shape[0] <= 1 ||
           tensor->shape[1] == 1 ||
           tensor_stride_bytes(tensor, 0) == tensor->shape[1] * tensor_stride_bytes(tensor, 1);
}

static int32_t check_experts_follow(const moxie_tensor *tensor, int32_t layout, const char *name,
                                    moxie_error *error)
{
    if (experts_follow(tensor, layout)) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "%s: experts are strided; want them one after the other", name);
}

// That stride, of places along dimension `dim`.
static int64_t place_stride_bytes(const moxie_tensor *tensor, int32_t dim)
{
    return tensor_stride_bytes(tensor, dim > 0 && tensor->shape[dim] == 1 ? dim - 1 : dim);
}

// What the scales of quantised rows must be; 0 when rows of this format have none.
static int scales_want(const struct rows_reader *r, const moxie_slab *slab, int32_t format,
                       struct tensor_want *want)
{
    int32_t hidden = r->limits->hidden;

    *want = (struct tensor_want){.name = "rows.slab.scales"};
    if (format != FORMAT_NVFP4 && format != FORMAT_FP8_BLOCK128) return 0;
    want->types = format == FORMAT_NVFP4 ? TENSOR_UINT8 : 1u << MOXIE_FORMAT_F32;
    leading_extents(r, want, slab->rows.shape[slab->rows.ndim - 2]);
    want->shape[want->ndim++] =
        format == FORMAT_NVFP4 ? 4 + hidden / NVFP4_GROUP : ceil_div(hidden, 128);
    return 1;
}

static int is_in_columns(const moxie_tensor *scales, int32_t ndim)
{
    return scales->shape != NULL && scales->strides != NULL && scales->ndim == ndim &&
           scales->shape[ndim - 1] > 1 && scales->strides[ndim - 1] != 1 &&
           !tensor_is_empty(scales);
}

// Scales of fp8 may lie in columns, as TMA reads them: a matrix [ceil(hidden / 128), cap], or one
// of each expert, whose last two dimensions have changed places.
static int32_t check_columns(const moxie_tensor *scales, struct tensor_want want,
                             moxie_error *error)
{
    const int32_t last = want.ndim - 1;
    int64_t shape[3], strides[3], rows = want.shape[last - 1];
    moxie_tensor turned = *scales;

    memcpy(shape, scales->shape, (size_t)want.ndim * sizeof *shape);
    memcpy(strides, scales->strides, (size_t)want.ndim * sizeof *strides);
    shape[last] = scales->shape[last - 1];
    shape[last - 1] = scales->shape[last];
    strides[last] = scales->strides[last - 1];
    strides[last - 1] = scales->strides[last];
    if (strides[last - 1] == 0)
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "%s: the last dimension has stride 0; want a scale for each 128 columns",
                         want.name);
    turned.shape = shape;
    turned.strides = strides;
    want.name = "rows.slab.scales, in columns";
    want.shape[last - 1] = want.shape[last];
    want.shape[last] = rows;
    return tensor_check(&turned, &want, error);
}

// Of fp8. A GPU counts floats in 32 bits.
static int32_t take_strides(const struct rows_reader *r, const moxie_tensor *scales,
                            struct row_slab *to, moxie_error *error)
{
    const int32_t places = scales->ndim - 2;
    int64_t groups = scales->shape[places + 1];
    int64_t group_bytes = tensor_stride_bytes(scales, places + 1);
    int64_t row_bytes = place_stride_bytes(scales, places);

    if (r->device.type != MOXIE_DEVICE_CPU &&
        (row_bytes / 4 > INT32_MAX || (groups - 1) * (group_bytes / 4) > INT32_MAX))
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "rows.slab.scales: %" PRId64 " bytes between rows and %" PRId64
                         " between their %" PRId64 " scales; this device takes less than 8 GiB "
                         "from a row to the next, and from its first scale to its last",
                         row_bytes, group_bytes, groups);
    to->scale_stride_bytes = row_bytes;
    if (group_bytes != 4) to->group_stride_bytes = group_bytes;
    if (experts_follow(scales, r->rows->layout)) return MOXIE_OK;
    to->expert_rows = (int32_t)scales->shape[1];
    to->scale_expert_stride_bytes = tensor_stride_bytes(scales, 0);
    return MOXIE_OK;
}

static int32_t read_scales(const struct rows_reader *r, const moxie_slab *slab, struct row_slab *to,
                           moxie_error *error)
{
    const moxie_tensor *scales = &slab->scales;
    struct tensor_want want;
    int32_t st = MOXIE_OK;

    if (!scales_want(r, slab, to->format, &want)) {
        if (scales->data != NULL)
            TRY(fail_with(error, MOXIE_E_INVALID,
                          "rows.slab.scales: given, but rows of this format have no scales"));
        goto out;
    }
    if (to->format == FORMAT_FP8_BLOCK128 && is_in_columns(scales, want.ndim))
        TRY(check_columns(scales, want, error));
    else
        TRY(tensor_check(scales, &want, error));
    to->scales = tensor_data(scales);
    if (to->format == FORMAT_FP8_BLOCK128) {
        TRY(take_strides(r, scales, to, error));
        goto out;
    }
    TRY(check_experts_follow(scales, r->rows->layout, want.name, error));
    to->scale_stride_bytes = place_stride_bytes(scales, want.ndim - 2);
out:
    return st;
}

int32_t rows_check_aligned(const char *name, const void *rows, int64_t stride_bytes,
                           moxie_error *error)
{
    if (((uintptr_t)rows | (uintptr_t)stride_bytes) % 16 == 0) return MOXIE_OK;
    return fail_with(error, MOXIE_E_UNSUPPORTED,
                     "%s: at %p with %" PRId64
                     " bytes between rows; want both to be multiples of 16",
                     name, rows, stride_bytes);
}

// On a GPU rows are multiplied as they are. Where there are none, they may lie anywhere.
static int32_t check_device_rows(const struct limits *limits, const struct row_slab *rows, int any,
                                 moxie_error *error)
{
    const int fp8 = limits->operand_format == FORMAT_FP8;
    char seen[CONFIG_TEXT_BYTES], weights[CONFIG_TEXT_BYTES], wanted[CONFIG_TEXT_BYTES];

    // What the host's own runner takes of a dispatcher is not read here, but expanded.
    if (limits->computes && (fp8 ? rows->format == FORMAT_F32 || rows->format == FORMAT_NVFP4
                                 : rows->format != limits->operand_format)) {
        config_word_text(KEY_WEIGHT_FORMAT, rows->format, seen);
        config_word_text(KEY_WEIGHT_FORMAT, limits->weight_format, weights);
        config_word_text(KEY_WEIGHT_FORMAT, limits->operand_format, wanted);
        return fail_with(error, MOXIE_E_UNSUPPORTED,
                         "rows.slab.rows: format %s; with weight_format %s this device takes rows "
                         "of format %s",
                         seen, weights, fp8 ? "fp8_block128, bf16 or f16" : wanted);
    }
    if (!any) return MOXIE_OK;
    return rows_check_aligned("rows.slab.rows", rows->rows, rows->row_stride_bytes, error);
}

// The payload. Half as many columns as hidden_size, beside scales, are nvfp4; where there are no
// rows, scales may have no data.
static int32_t read_payload(const struct rows_reader *r, const moxie_slab *slab,
                            struct row_slab *to, moxie_error *error)
{
    const moxie_tensor *rows = &slab->rows;
    int32_t hidden = r->limits->hidden;
    struct tensor_want want = {.name = "rows.slab.rows",
                               .types = TENSOR_FORMATS_FLOAT | TENSOR_E4M3};
    int32_t st = MOXIE_OK;

    leading_extents(r, &want, -1);
    want.shape[want.ndim++] = hidden;
    to->format = tensor_format(rows);
    if (to->format == MOXIE_FORMAT_FP8_TENSOR) to->format = FORMAT_FP8_BLOCK128;
    if (tensor_columns(rows) == hidden / 2 &&
        (slab->scales.data != NULL || tensor_is_empty(rows))) {
        if (hidden % NVFP4_GROUP != 0)
            TRY(fail_with(error, MOXIE_E_UNSUPPORTED,
                          "rows.slab.rows: nvfp4, and hidden_size %d; want a multiple of %d: give "
                          "rows of another format",
                          hidden, NVFP4_GROUP));
        want.shape[want.ndim - 1] = hidden / 2;
        want.types = TENSOR_UINT8;
        to->format = FORMAT_NVFP4;
    }
    TRY(tensor_check(rows, &want, error));
    TRY(check_experts_follow(rows, r->rows->layout, want.name, error));
    to->rows = tensor_data(rows);
    to->row_stride_bytes = place_stride_bytes(rows, want.ndim - 2);
    if (r->device.type != MOXIE_DEVICE_CPU)
        TRY(check_device_rows(r->limits, to, !tensor_is_empty(rows), error));
    TRY(read_scales(r, slab, to, error));
out:
    return st;
}

static int32_t read_ids(const struct rows_reader *r, const moxie_slab *slab, struct row_slab *to,
                        moxie_error *error)
{
    struct tensor_want ids = {.name = "rows.slab.ids",
                              .shape = {to->cap, r->limits->top_k},
                              .ndim = 2,
                              .types = TENSOR_INT32 | TENSOR_INT64,
                              .device = r->device};
    struct tensor_want weights = {.name = "rows.slab.weights",
                                  .shape = {to->cap, r->limits->top_k},
                                  .ndim = 2,
                                  .types = TENSOR_FORMATS_FLOAT,
                                  .device = r->device};
    int32_t st = MOXIE_OK;

    if (r->by_expert) {
        leading_extents(r, &weights, slab->rows.shape[slab->rows.ndim - 2]);
        weights.optional = 1;
    } else {
        TRY(tensor_check(&slab->ids, &ids, error));
        to->ids = tensor_data(&slab->ids);
        to->id_stride_bytes = tensor_stride_bytes(&slab->ids, 0);
        to->id_bytes = (int32_t)tensor_element_bytes(&slab->ids);
    }
    TRY(tensor_check(&slab->weights, &weights, error));
    to->weights = tensor_data(&slab->weights);
    if (to->weights != NULL) {
        TRY(check_experts_follow(&slab->weights, r->rows->layout, weights.name, error));
        to->weight_stride_bytes =
            place_stride_bytes(&slab->weights, r->by_expert ? weights.ndim - 1 : 0);
        to->weight_format = tensor_format(&slab->weights);
    }
out:
    return st;
}

static int32_t read_slab(const struct rows_reader *r, const moxie_slab *slab, struct row_slab *to,
                         moxie_error *error)
{
    int64_t most = r->by_expert ? r->limits->pairs_max : r->limits->rows_max;
    int64_t cap;
    int32_t st = MOXIE_OK;

    *to = (struct row_slab){0};
    TRY(read_payload(r, slab, to, error));
    cap = slab->rows.shape[0];
    // Most rows of a masked layout are empty places: only an index must fit them.
    if (r->rows->layout == MOXIE_LAYOUT_EXPERT_MASKED) {
        most = INT32_MAX;
        if (slab->rows.shape[1] > INT32_MAX || !size_mul(cap, slab->rows.shape[1], &cap))
            cap = INT64_MAX;
    }
    if (cap > most)
        TRY(fail_with(error, MOXIE_E_CAPACITY,
                      "a slab of %" PRId64 " rows; the plan holds %" PRId64 " (%s)", cap, most,
                      r->explained));
    to->cap = (int32_t)cap;
    TRY(read_ids(r, slab, to, error));
out:
    return st;
}

static int32_t read_counts(const struct rows_reader *r, struct rows_view *view, moxie_error *error)
{
    struct tensor_want want = {.name = "rows.counts",
                               .shape = {view->slabs_count},
                               .ndim = 1,
                               .types = TENSOR_INT32,
                               .device = r->device,
                               .optional = r->rows->layout == MOXIE_LAYOUT_STANDARD};
    const int32_t *counts;
    int32_t st = MOXIE_OK;

    if (r->by_expert) want.shape[0] = r->limits->experts_local + (view->by == ROUTE_BY_PREFIX);
    TRY(tensor_check(&r->rows->counts, &want, error));
    counts = (const int32_t *)(const void *)tensor_data(&r->rows->counts);
    if (r->by_expert) {
        view->expert_counts = counts;
        goto out;
    }
    for (int32_t i = 0; counts != NULL && i < view->slabs_count; i++)
        view->slabs[i].count = counts + i;
out:
    return st;
}

static int32_t read_map(const struct rows_reader *r, struct rows_view *view, moxie_error *error)
{
    const moxie_rows *rows = r->rows;
    struct tensor_want want = {.name = "rows.expert_map",
                               .shape = {-1},
                               .ndim = 1,
                               .types = TENSOR_INT32,
                               .device = r->device,
                               .optional = 1};
    int32_t st = MOXIE_OK;

    if (r->by_expert) goto out;
    if (rows->id_space < MOXIE_IDS_GLOBAL || rows->id_space > MOXIE_IDS_LOCAL)
        TRY(fail_with(error, MOXIE_E_INVALID, "rows.id_space: %d; want a MOXIE_IDS_*",
                      rows->id_space));
    TRY(tensor_check(&rows->expert_map, &want, error));
    view->expert_map = (const int32_t *)(const void *)tensor_data(&rows->expert_map);
    view->map_count = view->expert_map != NULL ? rows->expert_map.shape[0] : 0;
    view->expert_first = rows->id_space == MOXIE_IDS_LOCAL ? 0 : r->limits->experts_first;
out:
    return st;
}

int32_t rows_read(const moxie_rows *rows, const struct limits *limits, moxie_device device,
                  const char *explained, struct rows_view *view, moxie_error *error)
{
    static const int32_t by[] = {[MOXIE_LAYOUT_EXPERT_CONTIGUOUS] = ROUTE_BY_PREFIX,
                                 [MOXIE_LAYOUT_EXPERT_MASKED] = ROUTE_BY_COUNTS};
    struct rows_reader r = {rows, limits, explained, device, 0};
    int32_t st = MOXIE_OK;

    memset(view, 0, offsetof(struct rows_view, slabs));
    TRY(check_header(rows, "rows", error));
    view->layout = rows->layout;
    view->by = by[rows->layout];
    r.by_expert = view->by != ROUTE_BY_IDS;
    view->slabs_count = (int32_t)rows->slabs_count;
    view->top_k = r.by_expert ? 1 : limits->top_k;
    for (int32_t i = 0; i < view->slabs_count; i++) {
        TRY(read_slab(&r, &rows->slabs[i], &view->slabs[i], error));
        if (view->slabs[i].cap > view->rows_cap) view->rows_cap = view->slabs[i].cap;
    }
    view->pairs_max = (int64_t)view->slabs_count * view->rows_cap * view->top_k;
    if (r.by_expert && view->pairs_max > limits->pairs_max) view->pairs_max = limits->pairs_max;
    if (view->pairs_max > limits->pairs_max)
        TRY(fail_with(error, MOXIE_E_CAPACITY,
                      "%d slabs, each counted as of %d rows (the largest), take %" PRId64
                      " expert places; the plan holds %" PRId64 " (%s)",
                      view->slabs_count, view->rows_cap, view->pairs_max, limits->pairs_max,
                      explained));
    if (rows->layout == MOXIE_LAYOUT_EXPERT_MASKED)
        view->rows_per_expert = (int32_t)rows->slabs[0].rows.shape[1];
    TRY(read_counts(&r, view, error));
    TRY(read_map(&r, view, error));
out:
    return st;
}

int32_t rows_check_counts(const struct rows_view *view, const struct limits *limits,
                          moxie_device device, const char *explained, moxie_error *error)
{
    int64_t rows = 0;

    if (view->by != ROUTE_BY_COUNTS || device.type != MOXIE_DEVICE_CPU) return MOXIE_OK;
    for (int32_t expert = 0; expert < limits->experts_local; expert++) {
        int32_t count = view->expert_counts[expert];

        if (count > 0) rows += count < view->rows_per_expert ? count : view->rows_per_expert;
    }
    if (rows <= limits->pairs_max) return MOXIE_OK;
    return fail_with(error, MOXIE_E_CAPACITY,
                     "rows.counts: %" PRId64 " rows of all experts; the plan holds %" PRId64
                     " expert places (%s)",
                     rows, limits->pairs_max, explained);
}

static int32_t read_out_slab(const moxie_tensor *rows, const struct tensor_want *want,
                             struct out_slab *to, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    *to = (struct out_slab){0};
    TRY(tensor_check(rows, want, error));
    to->rows = tensor_data(rows);
    to->row_stride_bytes = place_stride_bytes(rows, want->ndim - 2);
    to->format = tensor_format(rows);
    TRY(check_experts_follow(rows,
                             want->ndim == 3 ? MOXIE_LAYOUT_EXPERT_MASKED : MOXIE_LAYOUT_STANDARD,
                             want->name, error));
    TRY(tensor_check_rows_apart(rows, "out.slab.rows", error));
out:
    return st;
}

// Results are written in any order: slabs share no place. Ranges are compared first, because each
// forward of 64 ranks has 2016 pairs.
static int32_t check_slabs_apart(const moxie_rows *out, moxie_error *error)
{
    uintptr_t first[MOXIE_RANKS_MAX], end[MOXIE_RANKS_MAX];

    for (uint32_t i = 0; i < out->slabs_count; i++) {
        const moxie_tensor *rows = &out->slabs[i].rows;

        first[i] = (uintptr_t)tensor_data(rows);
        end[i] = first[i] + (uintptr_t)rows->shape[0] * (uintptr_t)tensor_stride_bytes(rows, 0);
        for (uint32_t j = 0; j < i; j++)
            if (first[i] < end[j] && first[j] < end[i] && tensor_overlap(rows, &out->slabs[j].rows))
                return fail_with(error, MOXIE_E_INVALID,
                                 "out: slabs %u and %u overlap each other, at %p and %p; give each "
                                 "memory of its own",
                                 j, i, (const void *)tensor_data(&out->slabs[j].rows),
                                 (const void *)tensor_data(rows));
    }
    return MOXIE_OK;
}

// What the rows of an `out` must be, but for how many there are.
static struct tensor_want want_of_out(const moxie_rows *out, const struct limits *limits,
                                      moxie_device device)
{
    struct tensor_want want = {.name = "out.slab.rows",
                               .shape = {-1, limits->hidden},
                               .ndim = 2,
                               .types = TENSOR_FORMATS_FLOAT,
                               .device = device};

    if (out->layout != MOXIE_LAYOUT_EXPERT_MASKED) return want;
    want.ndim = 3;
    want.shape[0] = limits->experts_local;
    want.shape[1] = -1;
    want.shape[2] = limits->hidden;
    return want;
}

// Rows of STANDARD are the host's own output: those past the count are written too, as zero.
static const int32_t *count_of_results(const struct rows_view *in, int32_t slab)
{
    return in->by == ROUTE_BY_IDS && in->layout != MOXIE_LAYOUT_STANDARD ? in->slabs[slab].count
                                                                         : NULL;
}

int32_t rows_out(const moxie_rows *out, const struct rows_view *in, const struct limits *limits,
                 moxie_device device, struct out_view *view, moxie_error *error)
{
    struct tensor_want want = want_of_out(out, limits, device);
    int32_t st = MOXIE_OK;

    memset(view, 0, offsetof(struct out_view, slabs));
    TRY(check_header(out, "out", error));
    if (out->layout != in->layout || out->slabs_count != (uint32_t)in->slabs_count)
        TRY(fail_with(error, MOXIE_E_INVALID, "out: layout %d with %u slabs; in has %d with %d",
                      out->layout, out->slabs_count, in->layout, in->slabs_count));
    view->slabs_count = in->slabs_count;
    view->rows_cap = in->rows_cap;
    for (int32_t i = 0; i < view->slabs_count; i++) {
        if (want.ndim == 3)
            want.shape[1] = in->rows_per_expert;
        else
            want.shape[0] = in->slabs[i].cap;
        TRY(read_out_slab(&out->slabs[i].rows, &want, &view->slabs[i], error));
        view->slabs[i].cap = in->slabs[i].cap;
        view->slabs[i].count = count_of_results(in, i);
    }
    TRY(check_slabs_apart(out, error));
out:
    return st;
}

// How many rows of each slab have a result; NULL: all of them.
static int32_t read_out_counts(const moxie_rows *out, moxie_device device, const int32_t **counts,
                               moxie_error *error)
{
    const struct tensor_want want = {.name = "out.counts",
                                     .shape = {out->slabs_count},
                                     .ndim = 1,
                                     .types = TENSOR_INT32,
                                     .device = device,
                                     .optional = 1};
    int32_t st = MOXIE_OK;

    *counts = NULL;
    if (out->layout != MOXIE_LAYOUT_RANK_MAJOR) goto out;
    TRY(tensor_check(&out->counts, &want, error));
    *counts = (const int32_t *)(const void *)tensor_data(&out->counts);
out:
    return st;
}

int32_t rows_out_alone(const moxie_rows *out, const struct limits *limits, moxie_device device,
                       struct out_view *view, moxie_error *error)
{
    const struct tensor_want want = want_of_out(out, limits, device);
    int64_t most = out->layout == MOXIE_LAYOUT_EXPERT_MASKED       ? INT32_MAX
                   : out->layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS ? limits->pairs_max
                                                                   : limits->rows_max;
    const int32_t *counts = NULL;
    int32_t st = MOXIE_OK;

    memset(view, 0, offsetof(struct out_view, slabs));
    TRY(check_header(out, "out", error));
    TRY(read_out_counts(out, device, &counts, error));
    view->slabs_count = (int32_t)out->slabs_count;
    for (int32_t i = 0; i < view->slabs_count; i++) {
        const moxie_tensor *rows = &out->slabs[i].rows;
        struct out_slab *to = &view->slabs[i];
        int64_t rows_count;

        TRY(read_out_slab(rows, &want, to, error));
        rows_count = rows->shape[0];
        if (want.ndim == 3 && !size_mul(rows_count, rows->shape[1], &rows_count))
            rows_count = INT64_MAX;
        if (rows_count > most)
            TRY(fail_with(error, MOXIE_E_CAPACITY, "out: %" PRId64 " rows; the plan holds %" PRId64,
                          rows_count, most));
        to->cap = (int32_t)rows_count;
        if (counts != NULL) to->count = counts + i;
        if (to->cap > view->rows_cap) view->rows_cap = to->cap;
    }
    TRY(check_slabs_apart(out, error));
    if ((int64_t)view->slabs_count * view->rows_cap > most)
        TRY(fail_with(
            error, MOXIE_E_CAPACITY,
            "out: %d slabs, each counted as of %d rows (the largest); the plan holds %" PRId64
            " rows in all",
            view->slabs_count, view->rows_cap, most));
out:
    return st;
}
