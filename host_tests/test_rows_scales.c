// plugin/rows.c: scales of fp8 rows that lie in columns, in the four layouts, and what kernels make
// of them.

#include "host_tests/layer.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "kernels/cpu/rows.h"
#include "plugin/instance.h"
#include "plugin/rows.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <stdlib.h>
#include <string.h>

#define HIDDEN  300 // two groups and a part of one
#define GROUPS  3
#define EXPERTS 4
#define CAP     5
#define PAD     7

// Rows of one slab whose scale of group g is 2^(place % 31 - g), with places for their scales in
// whatever order.
struct sample {
    moxie_rows rows;
    moxie_slab slab;
    int64_t row_dims[3], scale_dims[3], scale_strides[3], weight_dims[2], id_dims[2], count_dim;
    unsigned char values[EXPERTS * CAP * HIDDEN] __attribute__((aligned(16)));
    float scales[EXPERTS * (CAP * GROUPS + PAD)], weights[EXPERTS * CAP];
    int32_t ids[CAP], counts[EXPERTS + 1];
    struct limits limits;
    struct rows_view view;
    struct said said;
    int32_t masked;
    int64_t count; // of rows
};

static float scale_of(int64_t row, int64_t group)
{
    return (float)(1 << (row % 31)) / (float)(1 << group);
}

static int32_t read_rows_on(struct sample *s, int32_t device)
{
    memset(&s->view, 0xa5, sizeof s->view);
    return rows_read(&s->rows, &s->limits, (moxie_device){device, 0}, "forward_tokens = 40",
                     &s->view, &s->said.error);
}

static int32_t read_rows(struct sample *s)
{
    return read_rows_on(s, MOXIE_DEVICE_CPU);
}

static void sample_init(struct sample *s, int32_t layout)
{
    int32_t masked = layout == MOXIE_LAYOUT_EXPERT_MASKED,
            by_ids = layout <= MOXIE_LAYOUT_RANK_MAJOR;

    memset(s, 0, sizeof *s);
    memset(s->values, 0x38, sizeof s->values); // ones
    s->masked = masked;
    s->count = masked ? EXPERTS * CAP : CAP;
    s->limits = (struct limits){.rows_max = CAP,
                                .computes = 1,
                                .pairs_max = EXPERTS * CAP,
                                .experts_local = EXPERTS,
                                .hidden = HIDDEN,
                                .top_k = 1};
    memcpy(s->row_dims, masked ? (int64_t[]){EXPERTS, CAP, HIDDEN} : (int64_t[]){CAP, HIDDEN, 0},
           sizeof s->row_dims);
    memcpy(s->scale_dims, s->row_dims, sizeof s->scale_dims);
    s->scale_dims[masked + 1] = GROUPS;
    memcpy(s->weight_dims, masked ? (int64_t[]){EXPERTS, CAP} : (int64_t[]){CAP, 1},
           sizeof s->weight_dims);
    memcpy(s->id_dims, (int64_t[]){CAP, 1}, sizeof s->id_dims);
    s->count_dim = by_ids ? 1 : EXPERTS + !masked;
    s->rows = (moxie_rows){.struct_size = sizeof s->rows,
                           .id_space = MOXIE_IDS_GLOBAL,
                           .layout = layout,
                           .slabs_count = 1,
                           .slab_stride = sizeof s->slab,
                           .slabs = &s->slab};
    s->slab = (moxie_slab){.struct_size = sizeof s->slab};
    s->slab.rows = tensor_make(s->values, masked + 2, s->row_dims, NULL, TENSOR_E4M3);
    s->slab.scales =
        tensor_make(s->scales, masked + 2, s->scale_dims, s->scale_strides, 1u << MOXIE_FORMAT_F32);
    s->slab.weights = tensor_make(s->weights, layout == MOXIE_LAYOUT_EXPERT_CONTIGUOUS ? 1 : 2,
                                  s->weight_dims, NULL, 1u << MOXIE_FORMAT_F32);
    if (by_ids) s->slab.ids = tensor_make(s->ids, 2, s->id_dims, NULL, TENSOR_INT32);
    s->rows.counts = tensor_make(s->counts, 1, &s->count_dim, NULL, TENSOR_INT32);
    said_init(&s->said);
}

// Scales by these strides, of experts, of rows and of groups.
static void put_scales(struct sample *s, int64_t expert, int64_t row, int64_t group)
{
    int64_t *strides = s->scale_strides, places = s->scale_dims[s->masked];

    for (size_t i = 0; i < sizeof s->scales / sizeof *s->scales; i++)
        s->scales[i] = -1.0f;
    for (int64_t i = 0; i < s->count; i++)
        for (int64_t g = 0; g < GROUPS; g++)
            s->scales[i / places * expert + i % places * row + g * group] = scale_of(i, g);
    if (s->masked) *strides++ = expert;
    strides[0] = row;
    strides[1] = group;
}

static void check_decoded(const struct sample *s)
{
    float got[HIDDEN];

    for (int64_t i = 0; i < s->count; i++) {
        struct row_view row = slab_row(&s->view.slabs[0], i);

        row_decode(&row, 0, HIDDEN, got);
        for (int64_t k = 0; k < HIDDEN; k++)
            ck_assert_msg(got[k] == scale_of(i, k / 128), "row %lld, %lld: %g", (long long)i,
                          (long long)k, (double)got[k]);
    }
}

START_TEST(scales_lie_in_rows_or_columns)
{
    static const struct {
        int64_t expert, row, group;
    } lies[] = {
        {CAP * GROUPS, GROUPS, 1},       {CAP * GROUPS, 1, CAP},
        {CAP * GROUPS + PAD, GROUPS, 1}, {CAP * GROUPS + PAD, 1, CAP},
        {CAP * GROUPS + 2, 1, CAP + 1},  {GROUPS, EXPERTS * GROUPS, 1},
    };
    struct sample s;

    for (int32_t layout = MOXIE_LAYOUT_STANDARD; layout <= MOXIE_LAYOUT_EXPERT_MASKED; layout++)
        for (size_t i = 0; i < sizeof lies / sizeof lies[0]; i++) {
            sample_init(&s, layout);
            put_scales(&s, lies[i].expert, lies[i].row, lies[i].group);
            ACCEPTED(&s.said, read_rows(&s));
            check_decoded(&s);
        }
}
END_TEST

// Extents of one have any stride.
START_TEST(one_row_an_expert)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED);
    s.row_dims[1] = s.scale_dims[1] = s.weight_dims[1] = 1;
    s.count = EXPERTS;
    put_scales(&s, 10, 77, 3);
    ACCEPTED(&s.said, read_rows(&s));
    check_decoded(&s);
}
END_TEST

// Of no rows the tensors have no data, and the strides of whatever they are views of.
START_TEST(no_rows)
{
    struct sample s;

    for (int32_t at = 0; at < 8; at++) {
        int32_t layout = at / 2 + 1, nvfp4 = at % 2;

        sample_init(&s, layout);
        s.row_dims[s.masked] = s.scale_dims[s.masked] = s.weight_dims[s.masked] = s.id_dims[0] = 0;
        memcpy(s.scale_strides, (int64_t[]){0, 7, 0}, sizeof s.scale_strides);
        if (nvfp4) {
            s.limits.hidden = 256;
            s.row_dims[s.masked + 1] = 128;
            s.scale_dims[s.masked + 1] = 20;
            s.slab.rows.dtype = s.slab.scales.dtype = (moxie_dtype){MOXIE_DTYPE_UINT, 8, 1};
        }
        s.slab.rows.data = s.slab.scales.data = s.slab.weights.data = s.slab.ids.data = NULL;
        ACCEPTED(&s.said, read_rows(&s));
        ck_assert_int_eq(s.view.slabs[0].format, nvfp4 ? FORMAT_NVFP4 : FORMAT_FP8_BLOCK128);
        ck_assert_int_eq(s.view.slabs[0].cap, 0);
        s.scale_dims[s.masked + 1]++; // but shapes still count
        SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales");
    }
}
END_TEST

START_TEST(neither_rows_nor_columns)
{
    struct sample s;

    sample_init(&s, MOXIE_LAYOUT_EXPERT_MASKED);
    put_scales(&s, CAP * GROUPS, 1, CAP);
    s.scale_strides[2] = 0;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.scales", "stride 0");
    s.scale_strides[2] = -1;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "rows.slab.scales, in columns", "stride -1");
    memcpy(s.scale_strides, (int64_t[]){50, 2, 12}, sizeof s.scale_strides);
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows(&s), "rows.slab.scales, in columns", "stride 2");
    put_scales(&s, CAP * GROUPS, 1, CAP);
    s.scale_dims[2]++;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "in columns", "[4, 4, 5]", "[4, 3, 5]");
    s.scale_strides[2] = INT64_MAX / 8;
    s.scale_dims[2]--;
    SAID(&s.said, MOXIE_E_INVALID, read_rows(&s), "in columns", "overflows");
}
END_TEST

// A GPU's kernels count floats in 32 bits. Nothing is read, so that the memory need not be there.
START_TEST(a_gpu_takes_less_than_8_gib_of_a_row)
{
    static const struct {
        int64_t strides[2]; // the most of rows, of groups
        const char *past;
    } lies[] = {{{INT32_MAX, 1}, "8589934592 bytes between rows"},
                {{1, INT32_MAX / 2}, "4294967296 between their 3 scales"}};
    struct sample s;
    moxie_tensor *tensors[] = {&s.slab.rows, &s.slab.scales, &s.slab.weights, &s.slab.ids,
                               &s.rows.counts};

    sample_init(&s, MOXIE_LAYOUT_STANDARD);
    s.limits.operand_format = FORMAT_FP8;
    s.row_dims[1] = s.limits.hidden = 384; // whole 16 bytes
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        tensors[i]->device.type = MOXIE_DEVICE_CUDA;
    for (int32_t i = 0; i < 2; i++) {
        memcpy(s.scale_strides, lies[i].strides, sizeof lies[i].strides);
        ACCEPTED(&s.said, read_rows_on(&s, MOXIE_DEVICE_CUDA));
        s.scale_strides[i]++;
        SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows_on(&s, MOXIE_DEVICE_CUDA), lies[i].past,
             "8 GiB");
    }
}
END_TEST

// A GPU multiplies rows as they come, by weights of 4 bits as by those of 16.
START_TEST(a_gpu_takes_rows_of_its_operands)
{
    struct sample s;
    moxie_tensor *tensors[] = {&s.slab.rows, &s.slab.weights, &s.slab.ids, &s.rows.counts};

    sample_init(&s, MOXIE_LAYOUT_STANDARD);
    s.limits.weight_format = FORMAT_MXFP4;
    s.limits.operand_format = FORMAT_BF16;
    s.row_dims[1] = s.limits.hidden = 128; // in the memory of 300 bytes
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        tensors[i]->device.type = MOXIE_DEVICE_CUDA;
    memset(&s.slab.scales, 0, sizeof s.slab.scales);
    s.slab.rows = tensor_make(s.values, 2, s.row_dims, NULL, 1u << MOXIE_FORMAT_BF16);
    s.slab.rows.device.type = MOXIE_DEVICE_CUDA;
    ACCEPTED(&s.said, read_rows_on(&s, MOXIE_DEVICE_CUDA));
    s.slab.rows.dtype.code = MOXIE_DTYPE_FLOAT;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows_on(&s, MOXIE_DEVICE_CUDA),
         "format f16; with weight_format mxfp4 this device takes rows of format bf16");
    s.slab.rows.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT8_E4M3FN, 8, 1};
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows_on(&s, MOXIE_DEVICE_CUDA),
         "format fp8_block128; with", "takes rows of format bf16");
    s.limits.weight_format = FORMAT_FP8_TENSOR;
    s.limits.operand_format = FORMAT_FP8;
    s.row_dims[1] = s.limits.hidden = 64;
    s.slab.rows = tensor_make(s.values, 2, s.row_dims, NULL, 1u << MOXIE_FORMAT_F32);
    s.slab.rows.device.type = MOXIE_DEVICE_CUDA;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_rows_on(&s, MOXIE_DEVICE_CUDA),
         "format f32; with weight_format fp8_tensor this device takes rows of format fp8_block128, "
         "bf16 or f16");
}
END_TEST

// Scales are not asked of a host whose rows a GPU's expand does not take.
static void expect_format_first(struct layer_rank *rank, const moxie_rows *from,
                                const moxie_rows *to, const moxie_tensor *row_index)
{
    const moxie_call call = {.struct_size = sizeof call};
    struct device device = device_cpu;
    struct limits *limits = &rank->instance->plan.limits;
    moxie_slab in = from->slabs[0], out = to->slabs[0];
    moxie_rows in_rows = *from, out_rows = *to;
    moxie_tensor *tensors[] = {&in.rows,  &in.scales,  &in.ids,      &in.weights,
                               &out.rows, &out.scales, &out.weights, &out_rows.counts};
    const int32_t operand_format = limits->operand_format;

    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        tensors[i]->device.type = MOXIE_DEVICE_CUDA;
    in_rows.slabs = &in;
    out_rows.slabs = &out;
    device.tensor_device = MOXIE_DEVICE_CUDA;
    rank->instance->device = &device;
    limits->operand_format = FORMAT_FP8;
    ck_assert_int_eq(
        runner_expand(rank->runner, &call, &in_rows, &out_rows, row_index, &rank->mock.error),
        MOXIE_E_UNSUPPORTED);
    ck_assert_msg(strstr(rank->mock.text, "format fp8_block128; want all of one format, bf16 or "
                                          "f16 (of a dispatcher's rows: set dispatch_format to "
                                          "input)") != NULL,
                  "%s", rank->mock.text);
    limits->operand_format = operand_format;
    rank->instance->device = &device_cpu;
}

// expand copies the scales of a row as they lie, to places of their own.
START_TEST(expand_wants_compact_scales)
{
    const moxie_call call = {.struct_size = sizeof call};
    moxie_slab in = {.struct_size = sizeof in}, out = in;
    moxie_rows from = {.struct_size = sizeof from,
                       .layout = MOXIE_LAYOUT_STANDARD,
                       .id_space = MOXIE_IDS_GLOBAL,
                       .slabs_count = 1,
                       .slab_stride = sizeof in,
                       .slabs = &in};
    moxie_rows to = from;
    moxie_tensor row_index;
    struct layer layer;
    struct layer_rank rank;
    unsigned char *memory;

    layer_open(&layer, "qwen2_moe_a");
    layer_rank_init(&rank, &layer, NULL, 0);
    layer_rank_open(&rank, &layer);
    int64_t groups = (layer.hidden + 127) / 128, x[] = {1, layer.hidden}, scales[] = {1, groups};
    int64_t ids[] = {1, layer.top_k}, y[] = {layer.experts, layer.top_k, layer.hidden};
    int64_t y_scales[] = {layer.experts, layer.top_k, groups};
    int64_t apart[] = {layer.top_k * groups + 1, groups, 1};
    memory = calloc((size_t)(layer.experts * 2), (size_t)layer.hidden * 4);
    ck_assert_ptr_nonnull(memory);
    in.rows = tensor_make(memory, 2, x, NULL, TENSOR_E4M3);
    in.scales = tensor_make(memory, 2, scales, NULL, 1u << MOXIE_FORMAT_F32);
    in.ids = row_index = tensor_make(memory, 2, ids, NULL, TENSOR_INT32);
    in.weights = tensor_make(memory, 2, ids, NULL, 1u << MOXIE_FORMAT_F32);
    out.rows = tensor_make(memory, 3, y, NULL, TENSOR_E4M3);
    out.scales = tensor_make(memory, 3, y_scales, apart, 1u << MOXIE_FORMAT_F32);
    out.weights = tensor_make(memory, 2, y_scales, NULL, 1u << MOXIE_FORMAT_F32);
    to.layout = MOXIE_LAYOUT_EXPERT_MASKED;
    to.slabs = &out;
    to.counts = tensor_make(memory, 1, y_scales, NULL, TENSOR_INT32);
    ck_assert_int_eq(runner_expand(rank.runner, &call, &from, &to, &row_index, &rank.mock.error),
                     MOXIE_E_UNSUPPORTED);
    ck_assert_msg(strstr(rank.mock.text, "expand: slab 0: scales in columns") != NULL, "%s",
                  rank.mock.text);
    expect_format_first(&rank, &from, &to, &row_index);
    for (int64_t stride = 0; stride <= groups + 1; stride += groups + 1) {
        apart[0] = layer.top_k * stride;
        apart[1] = stride;
        ck_assert_int_eq(
            runner_expand(rank.runner, &call, &from, &to, &row_index, &rank.mock.error),
            MOXIE_E_UNSUPPORTED);
        ck_assert_msg(strstr(rank.mock.text, "out.slab.scales") != NULL &&
                          strstr(rank.mock.text, "want them compact") != NULL,
                      "%s", rank.mock.text);
    }
    for (int64_t i = 0; i < layer.experts * 2 * layer.hidden * 4; i++)
        ck_assert_int_eq(memory[i], 0);
    free(memory);
    layer_rank_close(&rank);
    layer_close(&layer);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, scales_lie_in_rows_or_columns);
    tcase_add_test(tests, one_row_an_expert);
    tcase_add_test(tests, no_rows);
    tcase_add_test(tests, neither_rows_nor_columns);
    tcase_add_test(tests, a_gpu_takes_less_than_8_gib_of_a_row);
    tcase_add_test(tests, a_gpu_takes_rows_of_its_operands);
    tcase_add_test(tests, expand_wants_compact_scales);
}

SUITE_MAIN("rows_scales", 20, add)
