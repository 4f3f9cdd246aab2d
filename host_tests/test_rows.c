// plugin/rows.c: the four layouts as a host or a foreign dispatcher describes them, and everything
// that does not fit.

#include "plugin/rows.h"

#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <stdio.h>
#include <string.h>

#define HIDDEN  256
#define TOP_K   2
#define EXPERTS 3
#define CAP     5
#define SLABS   MOXIE_RANKS_MAX

// Rows of one layout; every tensor has memory of its own.
struct sample {
    moxie_rows rows;
    moxie_slab slabs[SLABS];
    int64_t row_dims[3], id_dims[2], weight_dims[2], scale_dims[3], count_dims[1], map_dims[1];
    unsigned char *values, *scales;
    int64_t ids[SLABS * CAP * TOP_K];
    float weights[SLABS * CAP * TOP_K];
    int32_t counts[SLABS], map[7];
    struct limits limits;
    struct rows_view view;
    struct said said;
};

static moxie_slab *slab_of(struct sample *s, uint32_t index)
{
    return &s->slabs[index];
}

static int32_t read_rows(struct sample *s)
{
    // Poisoned: what the view does not set itself must not be looked at.
    memset(&s->view, 0xa5, sizeof s->view);
    return rows_read(&s->rows, &s->limits, (moxie_device){MOXIE_DEVICE_CPU, 0},
                     "forward_tokens = 40", &s->view, &s->said.error);
}

static void set_slab(struct sample *s, uint32_t index)
{
    moxie_slab *slab = slab_of(s, index);
    int64_t at = (int64_t)index * CAP * TOP_K;
    int32_t layout = s->rows.layout, masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;

    slab->struct_size = sizeof *slab;
    slab->rows = tensor_make(s->values + (size_t)index * CAP * HIDDEN * 4, masked ? 3 : 2,
                             s->row_dims, NULL, 1u << MOXIE_FORMAT_F32);
    slab->weights = tensor_make(s->weights + at, layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS ? 1 : 2,
                                s->weight_dims, NULL, 1u << MOXIE_FORMAT_F32);
    if (layout <= MOXIE_LAYOUT_RANK_MAJOR)
        slab->ids = tensor_make(s->ids + at, 2, s->id_dims, NULL, TENSOR_INT64);
}

static void sample_init(struct sample *s, int32_t layout, uint32_t slabs)
{
    int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED, by_ids = layout <= MOXIE_LAYOUT_RANK_MAJOR;

    memset(s, 0, sizeof *s);
    s->values = calloc(SLABS, (size_t)CAP * HIDDEN * 4);
    s->scales = calloc(SLABS, (size_t)CAP * HIDDEN);
    ck_assert(s->values != NULL && s->scales != NULL);
    s->limits = (struct limits){.rows_max = SLABS * CAP,
                                .pairs_max = SLABS * CAP * TOP_K,
                                .experts_first = 4,
                                .experts_local = EXPERTS,
                                .hidden = HIDDEN,
                                .top_k = TOP_K};
    memcpy(s->row_dims, masked ? (int64_t[]){EXPERTS, CAP, HIDDEN} : (int64_t[]){CAP, HIDDEN, 0},
           sizeof s->row_dims);
    memcpy(s->weight_dims, masked ? (int64_t[]){EXPERTS, CAP} : (int64_t[]){CAP, TOP_K},
           sizeof s->weight_dims);
    memcpy(s->id_dims, (int64_t[]){CAP, TOP_K}, sizeof s->id_dims);
    s->count_dims[0] = by_ids ? slabs : EXPERTS + !masked;
    s->map_dims[0] = 7;
    s->rows = (moxie_rows){.struct_size = sizeof s->rows,
                           .layout = layout,
                           .id_space = MOXIE_IDS_PHYSICAL,
                           .slabs_count = slabs,
                           .slab_stride = sizeof s->slabs[0],
                           .slabs = s->slabs};
    if (layout != MOXIE_LAYOUT_STANDARD)
        s->rows.counts = tensor_make(s->counts, 1, s->count_dims, NULL, TENSOR_INT32);
    for (uint32_t i = 0; i < slabs; i++)
        set_slab(s, i);
    said_init(&s->said);
}

static void sample_fini(struct sample *s)
{
    free(s->values);
    free(s->scales);
}

// ---- What is right -----------------------------------------------------------------------------

START_TEST(standard_is_one_slab)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.by, ROUTE_BY_IDS);
    ck_assert_int_eq(s.view.slabs_count, 1);
    ck_assert_int_eq(s.view.rows_cap, CAP);
    ck_assert_int_eq(s.view.top_k, TOP_K);
    ck_assert_int_eq(s.view.pairs_max, CAP * TOP_K);
    ck_assert_int_eq(s.view.expert_first, 4);
    ck_assert_ptr_null(s.view.expert_map);
    ck_assert_ptr_eq(s.view.slabs[0].rows, s.values);
    ck_assert_ptr_null(s.view.slabs[0].scales);
    ck_assert_ptr_null(s.view.slabs[0].count);
    ck_assert_int_eq(s.view.slabs[0].row_stride_bytes, HIDDEN * 4);
    ck_assert_int_eq(s.view.slabs[0].id_bytes, 8);
    ck_assert_int_eq(s.view.slabs[0].id_stride_bytes, TOP_K * 8);
    ck_assert_int_eq(s.view.slabs[0].weight_stride_bytes, TOP_K * 4);
    ck_assert_int_eq(s.view.slabs[0].format, FORMAT_F32);
    s.rows.counts = tensor_make(s.counts, 1, s.count_dims, NULL, TENSOR_INT32);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_ptr_eq(s.view.slabs[0].count, s.counts);
    sample_fini(&s);
}
END_TEST

START_TEST(rank_major_takes_64_slabs)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_RANK_MAJOR, SLABS);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.slabs_count, SLABS);
    ck_assert_int_eq(s.view.pairs_max, SLABS * CAP * TOP_K);
    for (int32_t i = 0; i < SLABS; i++) {
        ck_assert_ptr_eq(s.view.slabs[i].rows, s.values + (size_t)i * CAP * HIDDEN * 4);
        ck_assert_ptr_eq(s.view.slabs[i].ids, s.ids + (size_t)i * CAP * TOP_K);
        ck_assert_ptr_eq(s.view.slabs[i].count, s.counts + i);
    }
    sample_fini(&s);
}
END_TEST

START_TEST(experts_have_counts)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_EXPERT_CONTIGUOUS, 1);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.by, ROUTE_BY_PREFIX);
    ck_assert_int_eq(s.view.top_k, 1);
    ck_assert_int_eq(s.view.pairs_max, CAP);
    ck_assert_ptr_eq(s.view.expert_counts, s.counts);
    ck_assert_int_eq(s.view.slabs[0].weight_stride_bytes, 4);
    ck_assert_int_eq(s.view.rows_per_expert, 0);
    sample_fini(&s);
    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED, 1);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.by, ROUTE_BY_COUNTS);
    ck_assert_int_eq(s.view.rows_per_expert, CAP);
    ck_assert_int_eq(s.view.slabs[0].cap, EXPERTS * CAP);
    ck_assert_int_eq(s.view.slabs[0].row_stride_bytes, HIDDEN * 4);
    ck_assert_int_eq(s.view.slabs[0].weight_stride_bytes, 4);
    memset(&slab_of(&s, 0)->weights, 0, sizeof(moxie_tensor)); // every weight is 1
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_ptr_null(s.view.slabs[0].weights);
    sample_fini(&s);
}
END_TEST

START_TEST(ids_are_counted_from_their_space)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    s.rows.id_space = MOXIE_IDS_LOCAL;
    s.rows.expert_map = tensor_make(s.map, 1, s.map_dims, NULL, TENSOR_INT32);
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.expert_first, 0);
    ck_assert_ptr_eq(s.view.expert_map, s.map);
    ck_assert_int_eq(s.view.map_count, 7);
    s.rows.id_space = MOXIE_IDS_GLOBAL;
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.expert_first, 4);
    s.rows.id_space = 0;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.id_space: 0");
    s.rows.id_space = 4;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.id_space: 4");
    s.rows.id_space = MOXIE_IDS_LOCAL;
    s.rows.expert_map.dtype.bits = 64;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.expert_map", "int32");
    s.map_dims[0] = -1;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.expert_map");
    sample_fini(&s);
}
END_TEST

START_TEST(strides_are_kept)
{
    int64_t row_strides[2] = {HIDDEN / 2, 1}, id_strides[2] = {TOP_K + 1, 1};
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    s.row_dims[0] = s.id_dims[0] = s.weight_dims[0] = 3;
    slab_of(&s, 0)->rows.strides = row_strides; // rows that are read may overlap
    slab_of(&s, 0)->ids = tensor_make(s.ids, 2, s.id_dims, id_strides, TENSOR_INT32);
    slab_of(&s, 0)->weights.dtype = (moxie_dtype){MOXIE_DTYPE_BFLOAT, 16, 1};
    slab_of(&s, 0)->weights.strides = id_strides;
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.slabs[0].cap, 3);
    ck_assert_int_eq(s.view.slabs[0].row_stride_bytes, HIDDEN * 2);
    ck_assert_int_eq(s.view.slabs[0].id_bytes, 4);
    ck_assert_int_eq(s.view.slabs[0].id_stride_bytes, (TOP_K + 1) * 4);
    ck_assert_int_eq(s.view.slabs[0].weight_stride_bytes, (TOP_K + 1) * 2);
    ck_assert_int_eq(s.view.slabs[0].weight_format, FORMAT_BF16);
    sample_fini(&s);
}
END_TEST

// ---- Quantised rows ----------------------------------------------------------------------------

static void quantise(struct sample *s, int32_t format)
{
    int masked = s->rows.layout == MOXIE_LAYOUT_EXPERT_MASKED;
    moxie_slab *slab = slab_of(s, 0);
    int fp8 = format == FORMAT_FP8_BLOCK128;

    s->row_dims[masked + 1] = fp8 ? HIDDEN : HIDDEN / 2;
    slab->rows =
        tensor_make(s->values, masked + 2, s->row_dims, NULL, fp8 ? TENSOR_E4M3 : TENSOR_UINT8);
    memcpy(s->scale_dims, s->row_dims, sizeof s->scale_dims);
    s->scale_dims[masked + 1] = fp8 ? HIDDEN / 128 : 4 + HIDDEN / 16;
    slab->scales = tensor_make(s->scales, masked + 2, s->scale_dims, NULL,
                               fp8 ? 1u << MOXIE_FORMAT_F32 : TENSOR_UINT8);
}

START_TEST(quantised_rows_have_scales)
{
    static const int32_t formats[] = {FORMAT_FP8_BLOCK128, FORMAT_NVFP4};
    static const char *const scales[] = {"2]", "20]"};
    struct sample s;

    for (int32_t at = 0; at < 8; at++) {
        int32_t layout = at / 2 + 1, format = formats[at % 2];
        int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;

        sample_init(&s, layout, 1);
        quantise(&s, format);
        ACCEPTED(&s.said, read_rows(&s));
        ck_assert_int_eq(s.view.slabs[0].format, format);
        ck_assert_ptr_eq(s.view.slabs[0].scales, s.scales);
        ck_assert_int_eq(s.view.slabs[0].row_stride_bytes,
                         format == FORMAT_NVFP4 ? HIDDEN / 2 : HIDDEN);
        ck_assert_int_eq(s.view.slabs[0].scale_stride_bytes,
                         format == FORMAT_NVFP4 ? 4 + HIDDEN / 16 : HIDDEN / 128 * 4);
        s.scale_dims[masked + 1]++;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales", "want", scales[at % 2]);
        s.scale_dims[masked + 1]--;
        s.scale_dims[masked]--;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales", "want");
        s.scale_dims[masked]++;
        slab_of(&s, 0)->scales.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 16, 1};
        SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.scales");
        sample_fini(&s);
    }
}
END_TEST

START_TEST(scales_belong_to_their_rows)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    quantise(&s, FORMAT_FP8_BLOCK128);
    slab_of(&s, 0)->scales.data = NULL;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales", "data is NULL");
    quantise(&s, FORMAT_NVFP4);
    slab_of(&s, 0)->scales.data = NULL;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows", "[5, 128]", "[*, 256]");
    // A packed row is bytes: as many columns of bf16 would be other numbers.
    quantise(&s, FORMAT_NVFP4);
    slab_of(&s, 0)->rows.dtype = (moxie_dtype){MOXIE_DTYPE_BFLOAT, 16, 1};
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.rows", "want uint8");
    s.row_dims[1] = HIDDEN;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales", "given, but");
    // Scales of 16 columns each would be read, and by expand written, past their end.
    quantise(&s, FORMAT_NVFP4);
    s.limits.hidden = HIDDEN - 8;
    s.row_dims[1] -= 4;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "hidden_size 248", "multiple of 16");
    sample_fini(&s);
}
END_TEST

// ---- What is wrong -----------------------------------------------------------------------------

START_TEST(hostile_headers_are_refused)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_RANK_MAJOR, 2);
    s.rows.layout = 0;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.layout: 0");
    s.rows.layout = 5;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.layout: 5");
    s.rows.layout = -1;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.layout: -1");
    for (int32_t layout = MOXIE_LAYOUT_STANDARD; layout <= MOXIE_LAYOUT_EXPERT_MASKED; layout++) {
        s.rows.layout = layout;
        if (layout == MOXIE_LAYOUT_RANK_MAJOR) continue;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows: 2 slabs", "want 1");
    }
    s.rows.layout = MOXIE_LAYOUT_RANK_MAJOR;
    s.rows.slabs_count = 0;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows: 0 slabs", "1..64");
    s.rows.slabs_count = SLABS + 1;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows: 65 slabs", "1..64");
    s.rows.slabs_count = UINT32_MAX;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows: 4294967295 slabs", "1..64");
    sample_fini(&s);
}
END_TEST

// One dimension too few, one extent too many, for every tensor of every layout.
START_TEST(wrong_shapes_are_refused)
{
    struct sample s;

    for (int32_t layout = MOXIE_LAYOUT_STANDARD; layout <= MOXIE_LAYOUT_EXPERT_MASKED; layout++) {
        int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
        int by_ids = layout <= MOXIE_LAYOUT_RANK_MAJOR;

        sample_init(&s, layout, 1);
        s.row_dims[masked + 1]++;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows", "257", "256");
        s.row_dims[masked + 1]--;
        s.weight_dims[0]++;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.weights");
        s.weight_dims[0]--;
        s.id_dims[1]--;
        if (by_ids)
            SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.ids", "[5, 1]", "[5, 2]");
        s.id_dims[1]++;
        s.count_dims[0]++;
        if (!by_ids) SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.counts", "dimensions");
        s.count_dims[0]--;
        s.rows.counts.data = NULL;
        if (layout != MOXIE_LAYOUT_STANDARD)
            SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.counts", "data is NULL");
        slab_of(&s, 0)->rows.ndim--;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows", "dimensions");
        slab_of(&s, 0)->rows.ndim = 9;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows", "9 dimensions");
        slab_of(&s, 0)->rows.ndim = masked + 2;
        slab_of(&s, 0)->rows.shape = NULL;
        slab_of(&s, 0)->scales.data = s.scales;
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows");
        sample_fini(&s);
    }
}
END_TEST

START_TEST(the_last_slab_is_checked_too)
{
    int64_t strides[2] = {(int64_t)1 << 61, 1};
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_RANK_MAJOR, SLABS);
    slab_of(&s, SLABS - 1)->ids.data = NULL;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.ids", "data is NULL");
    slab_of(&s, SLABS - 1)->ids = slab_of(&s, 0)->ids;
    slab_of(&s, SLABS - 1)->rows.strides = strides;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.rows", "stride");
    sample_fini(&s);
}
END_TEST

START_TEST(masked_experts_follow_each_other)
{
    int64_t row_strides[3] = {CAP * HIDDEN + 64, HIDDEN, 1}, weight_strides[2] = {CAP + 1, 1};
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED, 1);
    slab_of(&s, 0)->rows.strides = row_strides;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.rows", "experts are strided");
    row_strides[0] = CAP * (HIDDEN + 32);
    row_strides[1] = HIDDEN + 32; // a pitch is fine
    ACCEPTED(&s.said, read_rows(&s));
    slab_of(&s, 0)->weights.strides = weight_strides;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.weights", "experts are strided");
    s.row_dims[1] = s.weight_dims[1] = 1; // single places may be
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.slabs[0].row_stride_bytes, row_strides[0] * 4);
    ck_assert_int_eq(s.view.slabs[0].weight_stride_bytes, (CAP + 1) * 4);
    s.row_dims[0] = EXPERTS + 1;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "[4, 1, 256]", "[3, *, 256]");
    sample_fini(&s);
}
END_TEST

START_TEST(more_than_the_plan_is_refused)
{
    int64_t row_dims[2] = {1, HIDDEN}, id_dims[2] = {1, TOP_K};
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    s.limits.rows_max = CAP - 1;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "5 rows", "holds 4", "forward_tokens = 40");
    sample_fini(&s);
    sample_init(&s, MOXIE_LAYOUT_RANK_MAJOR, 3);
    s.limits.rows_max = 3 * CAP - 1;
    s.limits.pairs_max = s.limits.rows_max * TOP_K;
    slab_of(&s, 1)->rows.shape = row_dims; // which fits, but for the largest
    slab_of(&s, 1)->ids.shape = slab_of(&s, 1)->weights.shape = id_dims;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "3 slabs, each counted as of 5 rows", "30", "28",
         "forward_tokens = 40");
    s.limits.pairs_max = 3 * CAP * TOP_K;
    ACCEPTED(&s.said, read_rows(&s));
    sample_fini(&s);
    sample_init(&s, MOXIE_LAYOUT_EXPERT_CONTIGUOUS, 1);
    s.limits.pairs_max = CAP - 1;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "5 rows", "holds 4");
    sample_fini(&s);
}
END_TEST

// Most places of a masked layout are empty, so only an index has to fit them.
START_TEST(masked_places_may_outnumber_the_plan)
{
    int64_t strides[3] = {0, 0, 1};
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED, 1);
    s.limits.pairs_max = 4;
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.pairs_max, 4);
    s.row_dims[1] = s.weight_dims[1] = (int64_t)1 << 30;
    slab_of(&s, 0)->rows.strides = strides;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "3221225472 rows", "2147483647");
    s.row_dims[1] = (int64_t)1 << 40;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "2147483647");
    s.limits.experts_local = 0; // a rank without experts
    s.row_dims[0] = s.weight_dims[0] = 0;
    s.count_dims[0] = 0;
    SAID(&s.said, MOXIE_E_CAPACITY, read_rows(&s), "2147483647");
    s.row_dims[1] = s.weight_dims[1] = CAP;
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.slabs[0].cap, 0);
    sample_fini(&s);
}
END_TEST

START_TEST(no_rows_need_no_memory)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    s.row_dims[0] = s.id_dims[0] = s.weight_dims[0] = 0;
    slab_of(&s, 0)->rows.data = slab_of(&s, 0)->ids.data = slab_of(&s, 0)->weights.data = NULL;
    ACCEPTED(&s.said, read_rows(&s));
    ck_assert_int_eq(s.view.rows_cap, 0);
    ck_assert_int_eq(s.view.pairs_max, 0);
    sample_fini(&s);
}
END_TEST

// ---- Results -----------------------------------------------------------------------------------

static int32_t read_out(struct sample *s, const struct rows_view *in, struct out_view *view)
{
    memset(view, 0xa5, sizeof *view);
    if (in == NULL)
        return rows_out_alone(&s->rows, &s->limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, view,
                              &s->said.error);
    return rows_out(&s->rows, in, &s->limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, view,
                    &s->said.error);
}

START_TEST(results_mirror_the_rows)
{
    struct sample in, out;
    struct out_view view;

    for (int32_t layout = MOXIE_LAYOUT_STANDARD; layout <= MOXIE_LAYOUT_EXPERT_MASKED; layout++) {
        int masked = layout == MOXIE_LAYOUT_EXPERT_MASKED;
        uint32_t slabs = layout == MOXIE_LAYOUT_RANK_MAJOR ? SLABS : 1;

        sample_init(&in, layout, slabs);
        sample_init(&out, layout, slabs);
        in.rows.counts = tensor_make(in.counts, 1, in.count_dims, NULL, TENSOR_INT32);
        ACCEPTED(&in.said, read_rows(&in));
        ACCEPTED(&out.said, read_out(&out, &in.view, &view));
        ck_assert_int_eq(view.slabs_count, (int32_t)slabs);
        ck_assert_int_eq(view.rows_cap, masked ? EXPERTS * CAP : CAP);
        ck_assert_ptr_eq(view.slabs[slabs - 1].rows, slab_of(&out, slabs - 1)->rows.data);
        // A host's own STANDARD rows are written to the end, peers' only as far as they go.
        ck_assert_ptr_eq(view.slabs[slabs - 1].count,
                         layout == MOXIE_LAYOUT_RANK_MAJOR ? in.counts + slabs - 1 : NULL);
        out.row_dims[masked]++;
        SAID(&out.said, MOXIE_E_INVALID, read_out(&out, &in.view, &view), "out.slab.rows", "6",
             "5");
        out.row_dims[masked]--;
        slab_of(&out, slabs - 1)->rows.data = NULL;
        SAID(&out.said, MOXIE_E_INVALID, read_out(&out, &in.view, &view), "out.slab.rows", "NULL");
        sample_fini(&in);
        sample_fini(&out);
    }
}
END_TEST

START_TEST(results_in_another_layout_are_refused)
{
    struct sample in, out;
    struct out_view view;

    sample_init(&in, MOXIE_LAYOUT_RANK_MAJOR, 3);
    sample_init(&out, MOXIE_LAYOUT_RANK_MAJOR, 2);
    ACCEPTED(&in.said, read_rows(&in));
    SAID(&out.said, MOXIE_E_INVALID, read_out(&out, &in.view, &view), "with 2 slabs", "with 3");
    out.rows.layout = MOXIE_LAYOUT_STANDARD;
    out.rows.slabs_count = 1;
    SAID(&out.said, MOXIE_E_INVALID, read_out(&out, &in.view, &view), "layout 1", "has 2");
    out.rows.layout = 17;
    SAID(&out.said, MOXIE_E_UNSUPPORTED, read_out(&out, &in.view, &view), "out.layout: 17");
    sample_fini(&in);
    sample_fini(&out);
}
END_TEST

START_TEST(results_have_places_of_their_own)
{
    int64_t strides[2] = {HIDDEN - 1, 1}, masked_strides[3] = {CAP * HIDDEN + 8, HIDDEN, 1};
    struct sample s;
    struct out_view view;

    sample_init(&s, MOXIE_LAYOUT_STANDARD, 1);
    ACCEPTED(&s.said, read_rows(&s));
    slab_of(&s, 0)->rows.strides = strides;
    SAID(&s.said, MOXIE_E_INVALID, read_out(&s, &s.view, &view), "out.slab.rows", "overlap");
    strides[0] = HIDDEN;
    ACCEPTED(&s.said, read_out(&s, &s.view, &view));
    slab_of(&s, 0)->rows.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_out(&s, &s.view, &view), "out.slab.rows", "float32");
    sample_fini(&s);
    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED, 1);
    ACCEPTED(&s.said, read_rows(&s));
    slab_of(&s, 0)->rows.strides = masked_strides;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_out(&s, &s.view, &view), "experts are strided");
    sample_fini(&s);
}
END_TEST

START_TEST(results_of_nothing_known_fit_the_plan)
{
    struct sample s;
    struct out_view view;

    sample_init(&s, MOXIE_LAYOUT_RANK_MAJOR, 3);
    s.limits.rows_max = 3 * CAP;
    ACCEPTED(&s.said, read_out(&s, NULL, &view));
    ck_assert(view.slabs[2].cap == CAP && view.slabs[2].count == s.counts + 2);
    s.limits.rows_max--;
    SAID(&s.said, MOXIE_E_CAPACITY, read_out(&s, NULL, &view), "3 slabs, each counted as of 5 rows",
         "14 rows");
    s.limits.rows_max = CAP - 1;
    SAID(&s.said, MOXIE_E_CAPACITY, read_out(&s, NULL, &view), "out: 5 rows", "holds 4");
    sample_fini(&s);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, standard_is_one_slab);
    tcase_add_test(tests, rank_major_takes_64_slabs);
    tcase_add_test(tests, experts_have_counts);
    tcase_add_test(tests, ids_are_counted_from_their_space);
    tcase_add_test(tests, strides_are_kept);
    tcase_add_test(tests, quantised_rows_have_scales);
    tcase_add_test(tests, scales_belong_to_their_rows);
    tcase_add_test(tests, hostile_headers_are_refused);
    tcase_add_test(tests, wrong_shapes_are_refused);
    tcase_add_test(tests, the_last_slab_is_checked_too);
    tcase_add_test(tests, masked_experts_follow_each_other);
    tcase_add_test(tests, more_than_the_plan_is_refused);
    tcase_add_test(tests, masked_places_may_outnumber_the_plan);
    tcase_add_test(tests, no_rows_need_no_memory);
    tcase_add_test(tests, results_mirror_the_rows);
    tcase_add_test(tests, results_in_another_layout_are_refused);
    tcase_add_test(tests, results_have_places_of_their_own);
    tcase_add_test(tests, results_of_nothing_known_fit_the_plan);
}

SUITE_MAIN("rows", 20, add)
