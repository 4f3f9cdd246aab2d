// plugin/weights.c: every format in every order and orientation, and each shape that is off by one.

#include "plugin/weights.h"

#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <stdio.h>
#include <string.h>

#define EXPERTS      3
#define HIDDEN       192
#define INTERMEDIATE 160 // neither divides by 128
#define REGION       (1 << 20)

static const int32_t formats[] = {
    MOXIE_FORMAT_F32,        MOXIE_FORMAT_BF16,        MOXIE_FORMAT_F16,
    MOXIE_FORMAT_FP8_TENSOR, MOXIE_FORMAT_FP8_CHANNEL, MOXIE_FORMAT_FP8_BLOCK128,
    MOXIE_FORMAT_INT4_G32,   MOXIE_FORMAT_MXFP4,       MOXIE_FORMAT_NVFP4};
#define FORMATS ((int)(sizeof formats / sizeof formats[0]))

// Which tensor of a matrix.
enum part { VALUES, SCALES, GLOBALS, BIAS, PARTS };

static const char *const part_names[2][PARTS] = {
    {"weights.w1.values", "weights.w1.scales", "weights.w1.global_scales", "weights.w1.bias"},
    {"weights.w2.values", "weights.w2.scales", "weights.w2.global_scales", "weights.w2.bias"}};

// The weights of one layer; all zero.
struct sample {
    moxie_weights weights;
    moxie_matrix matrices[2];
    int64_t dims[2][PARTS][3];
    unsigned char *bytes; // [2][PARTS][REGION]
    struct limits limits;
    struct layer_weights out;
    struct said said;
};

static moxie_tensor *part_of(struct sample *s, int32_t matrix, int32_t part)
{
    moxie_matrix *m = &s->matrices[matrix];
    moxie_tensor *parts[PARTS] = {&m->values, &m->scales, &m->global_scales, &m->bias};

    return parts[part];
}

static void put(struct sample *s, int32_t matrix, int32_t part, int32_t ndim,
                const int64_t shape[3], uint32_t type)
{
    int64_t *dims = s->dims[matrix][part];

    memcpy(dims, shape, 3 * sizeof *dims);
    *part_of(s, matrix, part) =
        tensor_make(s->bytes + (size_t)(matrix * PARTS + part) * REGION, ndim, dims, NULL, type);
}

static void put_scales(struct sample *s, int32_t matrix, int64_t n, int64_t k)
{
    int64_t halves = matrix == 0 && s->limits.activation != ACTIVATION_RELU2 ? 2 : 1;
    int64_t half_blocks = ((matrix == 0 ? n / halves : n) + 127) / 128;

    switch (s->limits.weight_format) {
    case MOXIE_FORMAT_FP8_TENSOR:
        put(s, matrix, SCALES, 1, (int64_t[3]){EXPERTS}, 1u << MOXIE_FORMAT_F32);
        break;
    case MOXIE_FORMAT_FP8_CHANNEL:
        put(s, matrix, SCALES, 2, (int64_t[3]){EXPERTS, n}, 1u << MOXIE_FORMAT_F32);
        break;
    case MOXIE_FORMAT_FP8_BLOCK128:
        put(s, matrix, SCALES, 3, (int64_t[3]){EXPERTS, half_blocks * halves, (k + 127) / 128},
            1u << MOXIE_FORMAT_F32);
        break;
    case MOXIE_FORMAT_INT4_G32:
        put(s, matrix, SCALES, 3, (int64_t[3]){EXPERTS, n, k / 32}, 1u << MOXIE_FORMAT_F16);
        break;
    case MOXIE_FORMAT_MXFP4:
        put(s, matrix, SCALES, 3, (int64_t[3]){EXPERTS, n, k / 32}, TENSOR_UINT8);
        break;
    case MOXIE_FORMAT_NVFP4:
        put(s, matrix, SCALES, 3, (int64_t[3]){EXPERTS, n, k / 16}, TENSOR_E4M3);
        put(s, matrix, GLOBALS, 1, (int64_t[3]){EXPERTS}, 1u << MOXIE_FORMAT_F32);
        break;
    default:
        break;
    }
}

static int is_float(int32_t format)
{
    return format >= MOXIE_FORMAT_F32 && format <= MOXIE_FORMAT_F16;
}

static int is_packed(int32_t format)
{
    return format >= MOXIE_FORMAT_INT4_G32 && format <= MOXIE_FORMAT_NVFP4;
}

static void put_matrix(struct sample *s, int32_t matrix, int32_t order, int32_t orientation)
{
    int32_t format = s->limits.weight_format;
    int64_t n = matrix == 1 ? HIDDEN : order == MOXIE_ORDER_PLAIN ? INTERMEDIATE : 2 * INTERMEDIATE;
    int64_t k = matrix == 1 ? INTERMEDIATE : HIDDEN;
    int64_t columns = is_packed(format) ? k / 2 : k;
    uint32_t type = is_packed(format) ? TENSOR_UINT8 : TENSOR_E4M3;

    s->matrices[matrix] = (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                                         .format = format,
                                         .order = order,
                                         .orientation = orientation};
    if (orientation == MOXIE_ROWS_IN)
        put(s, matrix, VALUES, 3, (int64_t[3]){EXPERTS, k, n}, 1u << format);
    else
        put(s, matrix, VALUES, 3, (int64_t[3]){EXPERTS, n, columns},
            is_float(format) ? 1u << format : type);
    put_scales(s, matrix, n, k);
    put(s, matrix, BIAS, 2, (int64_t[3]){EXPERTS, n}, 1u << MOXIE_FORMAT_BF16);
}

// `order` PLAIN: relu2, which has no gate.
static void sample_init(struct sample *s, int32_t format, int32_t order, int32_t orientation)
{
    memset(s, 0, sizeof *s);
    s->bytes = calloc(2 * PARTS, REGION);
    ck_assert_ptr_nonnull(s->bytes);
    s->limits = (struct limits){.experts_local = EXPERTS,
                                .hidden = HIDDEN,
                                .intermediate = INTERMEDIATE,
                                .weight_format = format,
                                .activation = order == MOXIE_ORDER_PLAIN ? ACTIVATION_RELU2
                                                                         : ACTIVATION_SILU};
    put_matrix(s, 0, order, orientation);
    put_matrix(s, 1, MOXIE_ORDER_PLAIN, orientation);
    s->weights = (moxie_weights){
        .struct_size = sizeof s->weights, .w1 = &s->matrices[0], .w2 = &s->matrices[1]};
    said_init(&s->said);
}

static void sample_fini(struct sample *s)
{
    free(s->bytes);
}

static int32_t read_weights(struct sample *s)
{
    return weights_read(&s->weights, &s->limits, (moxie_device){MOXIE_DEVICE_CPU, 0}, &s->out,
                        &s->said.error);
}

// ---- What is right -----------------------------------------------------------------------------

static void check_view(struct sample *s, int32_t matrix, const struct weight_view *view)
{
    const moxie_matrix *from = &s->matrices[matrix];
    int64_t row_values = from->values.shape[2];

    ck_assert_int_eq(view->format, from->format);
    ck_assert_int_eq(view->order, from->order);
    ck_assert_int_eq(view->rows_in, from->orientation == MOXIE_ROWS_IN);
    ck_assert_int_eq(view->n, s->dims[matrix][BIAS][1]);
    ck_assert_int_eq(view->k, matrix == 0 ? HIDDEN : INTERMEDIATE);
    ck_assert_ptr_eq(view->values, from->values.data);
    ck_assert_int_eq(view->row_stride_bytes, row_values * (from->values.dtype.bits / 8));
    ck_assert_int_eq(view->expert_stride_bytes, view->row_stride_bytes * from->values.shape[1]);
    ck_assert_ptr_eq(view->scales, from->scales.data);
    ck_assert_ptr_eq(view->globals, from->global_scales.data);
    ck_assert_ptr_eq(view->bias, from->bias.data);
    ck_assert_int_eq(view->bias_format, MOXIE_FORMAT_BF16);
    ck_assert_int_eq(view->bias_expert_stride_bytes, view->n * 2);
    if (from->scales.data == NULL) return;
    ck_assert_int_eq(view->scale_expert_stride_bytes, tensor_stride_bytes(&from->scales, 0));
    if (from->scales.ndim > 1)
        ck_assert_int_eq(view->scale_row_stride_bytes, tensor_stride_bytes(&from->scales, 1));
}

START_TEST(every_order_and_orientation)
{
    struct sample s;

    for (int32_t order = MOXIE_ORDER_PLAIN; order <= MOXIE_ORDER_INTERLEAVED; order++) {
        sample_init(&s, formats[_i], order, MOXIE_ROWS_OUT);
        ACCEPTED(&s.said, read_weights(&s));
        check_view(&s, 0, &s.out.w1);
        check_view(&s, 1, &s.out.w2);
        sample_fini(&s);
        if (!is_float(formats[_i])) continue;
        sample_init(&s, formats[_i], order, MOXIE_ROWS_IN);
        ACCEPTED(&s.said, read_weights(&s));
        check_view(&s, 0, &s.out.w1);
        check_view(&s, 1, &s.out.w2);
        sample_fini(&s);
    }
}
END_TEST

START_TEST(strides_are_kept)
{
    int64_t strides[3] = {400 * HIDDEN, HIDDEN + 8, 1}, bias_strides[2] = {1000, 1};
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_BF16, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].values.strides = strides;
    s.matrices[0].bias.strides = bias_strides;
    s.matrices[0].bias.dtype = (moxie_dtype){MOXIE_DTYPE_FLOAT, 32, 1};
    memset(&s.matrices[1].bias, 0, sizeof s.matrices[1].bias);
    ACCEPTED(&s.said, read_weights(&s));
    ck_assert_int_eq(s.out.w1.expert_stride_bytes, 800 * HIDDEN);
    ck_assert_int_eq(s.out.w1.row_stride_bytes, 2 * (HIDDEN + 8));
    ck_assert_int_eq(s.out.w1.bias_expert_stride_bytes, 4000);
    ck_assert_int_eq(s.out.w1.bias_format, MOXIE_FORMAT_F32);
    ck_assert_ptr_null(s.out.w2.bias);
    sample_fini(&s);
}
END_TEST

START_TEST(global_scales_may_be_strided)
{
    int64_t strides[2] = {3, 1}; // beside w2's, or one pair for all experts
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_NVFP4, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].global_scales.strides = strides;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, read_weights(&s), "weights.w1.global_scales", "compact");
    put(&s, 0, GLOBALS, 2, (int64_t[3]){EXPERTS, 2}, 1u << MOXIE_FORMAT_F32);
    for (s.matrices[0].global_scales.strides = strides; strides[0] >= 0; strides[0] -= 3) {
        ACCEPTED(&s.said, read_weights(&s));
        ck_assert_int_eq(s.out.w1.global_expert_stride_bytes, 4 * strides[0]);
    }
    sample_fini(&s);
}
END_TEST

START_TEST(gate_and_up_may_have_a_scale_each)
{
    static const int64_t both[3] = {EXPERTS, 2};
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_FP8_TENSOR, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    ACCEPTED(&s.said, read_weights(&s));
    ck_assert_int_eq(s.out.w1.global_stride, 1);
    put(&s, 0, SCALES, 2, both, 1u << MOXIE_FORMAT_F32);
    ACCEPTED(&s.said, read_weights(&s));
    ck_assert_int_eq(s.out.w1.global_stride, 2);
    put(&s, 1, SCALES, 2, both, 1u << MOXIE_FORMAT_F32);
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w2.scales", "[3, 2]", "[3]");
    sample_fini(&s);
    sample_init(&s, MOXIE_FORMAT_FP8_TENSOR, MOXIE_ORDER_PLAIN, MOXIE_ROWS_OUT);
    put(&s, 0, SCALES, 2, both, 1u << MOXIE_FORMAT_F32);
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.scales", "[3, 2]", "[3]");
    sample_fini(&s);
    sample_init(&s, MOXIE_FORMAT_NVFP4, MOXIE_ORDER_UP_GATE, MOXIE_ROWS_OUT);
    put(&s, 0, GLOBALS, 2, both, 1u << MOXIE_FORMAT_F32);
    ACCEPTED(&s.said, read_weights(&s));
    ck_assert_int_eq(s.out.w1.global_stride, 2);
    ck_assert_int_eq(s.out.w2.global_stride, 1);
    put(&s, 1, GLOBALS, 2, both, 1u << MOXIE_FORMAT_F32);
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w2.global_scales", "[3, 2]", "[3]");
    sample_fini(&s);
}
END_TEST

// 160 units after an offset of 100 reach into the third block, in both halves.
START_TEST(a_shard_begins_inside_a_block)
{
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_FP8_BLOCK128, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].block_offset = s.matrices[1].block_offset = 100;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.scales", "[3, 4, 2]", "[3, 6, 2]");
    s.dims[0][SCALES][1] = 6;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w2.scales", "[3, 2, 2]", "[3, 2, 3]");
    s.dims[1][SCALES][2] = 3;
    ACCEPTED(&s.said, read_weights(&s));
    ck_assert_int_eq(s.out.w1.block_offset, 100);
    ck_assert_int_eq(s.out.w2.block_offset, 100);
    s.matrices[1].block_offset = 99;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "block_offset", "100", "99");
    for (int32_t bad = -1; bad <= 128; bad += 129) {
        char number[32];

        (void)snprintf(number, sizeof number, "offset %d", bad);
        s.matrices[0].block_offset = bad;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.values", number, "0..127");
    }
    s.matrices[0].block_offset = INT32_MAX;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "2147483647", "0..127");
    sample_fini(&s);
    sample_init(&s, MOXIE_FORMAT_BF16, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].block_offset = 1;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "block_offset 1", "fp8_block128");
    sample_fini(&s);
}
END_TEST

// ---- What is wrong -----------------------------------------------------------------------------

// Every extent of every tensor, one more and one less.
START_TEST(extents_off_by_one_are_refused)
{
    struct sample s;

    sample_init(&s, formats[_i], MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    for (int32_t at = 0; at < 2 * PARTS * 3 * 2; at++) {
        int32_t matrix = at / 24, part = at / 6 % 4, dim = at / 2 % 3, by = at % 2 == 0 ? 1 : -1;
        const moxie_tensor *tensor = part_of(&s, matrix, part);

        if (tensor->data == NULL || dim >= tensor->ndim) continue;
        s.dims[matrix][part][dim] += by;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), part_names[matrix][part], "want [3");
        s.dims[matrix][part][dim] -= by;
    }
    ACCEPTED(&s.said, read_weights(&s));
    sample_fini(&s);
}
END_TEST

START_TEST(wrong_tensors_are_refused)
{
    struct sample s;

    sample_init(&s, formats[_i], MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    for (int32_t at = 0; at < 2 * PARTS; at++) {
        moxie_tensor *tensor = part_of(&s, at / PARTS, at % PARTS);
        moxie_tensor saved = *tensor;
        const char *name = part_names[at / PARTS][at % PARTS];

        if (tensor->data == NULL) continue;
        tensor->ndim--;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), name, "dimensions");
        *tensor = saved;
        tensor->dtype = (moxie_dtype){MOXIE_DTYPE_INT, 64, 1};
        SAID(&s.said, MOXIE_E_UNSUPPORTED, read_weights(&s), name, "dtype code 0, 64 bits");
        *tensor = saved;
        tensor->device.type = MOXIE_DEVICE_CUDA;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), name, "device type 2", "want 1");
        *tensor = saved;
        tensor->data = NULL;
        if (at % PARTS != BIAS)
            SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), name, "data is NULL");
        *tensor = saved;
    }
    ACCEPTED(&s.said, read_weights(&s));
    sample_fini(&s);
}
END_TEST

START_TEST(another_format_is_refused)
{
    struct sample s;
    char seen[48], wanted[48];

    sample_init(&s, formats[_i], MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    (void)snprintf(wanted, sizeof wanted, "want %d, since the key weight_format is", formats[_i]);
    for (int32_t format = -1; format <= 12; format++) {
        if (format == formats[_i]) continue;
        (void)snprintf(seen, sizeof seen, "format %d (", format);
        s.matrices[0].format = format;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1", seen, wanted);
        s.matrices[0].format = formats[_i];
        s.matrices[1].format = format;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w2", seen, wanted);
        s.matrices[1].format = formats[_i];
    }
    sample_fini(&s);
}
END_TEST

START_TEST(orders_follow_the_activation)
{
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_BF16, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].order = MOXIE_ORDER_PLAIN;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.order: 0", "_INTERLEAVED");
    s.matrices[0].order = 4;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.order: 4", "MOXIE_ORDER_GATE_UP");
    s.matrices[0].order = -1;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.order: -1");
    s.matrices[0].order = MOXIE_ORDER_INTERLEAVED;
    s.matrices[1].order = MOXIE_ORDER_GATE_UP;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w2.order: 1", "MOXIE_ORDER_PLAIN");
    sample_fini(&s);
    sample_init(&s, MOXIE_FORMAT_BF16, MOXIE_ORDER_PLAIN, MOXIE_ROWS_OUT);
    for (int32_t order = MOXIE_ORDER_GATE_UP; order <= MOXIE_ORDER_INTERLEAVED; order++) {
        s.matrices[0].order = order;
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.order", "relu2 has no gate");
    }
    // A gated w1 has twice the rows.
    s.matrices[0].order = MOXIE_ORDER_PLAIN;
    s.limits.activation = ACTIVATION_GELU;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.order: 0");
    s.matrices[0].order = MOXIE_ORDER_GATE_UP;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.values", "160", "320");
    sample_fini(&s);
}
END_TEST

START_TEST(orientations_are_two)
{
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_F16, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    s.matrices[0].orientation = 2;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1", "orientation 2");
    s.matrices[0].orientation = -1;
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1", "orientation -1");
    s.matrices[0].orientation = MOXIE_ROWS_IN; // [E, N, K] is not [E, K, N]
    SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), "weights.w1.values", "[3, 320, 192]",
         "[3, 192, 320]");
    sample_fini(&s);
    for (int32_t i = 0; i < FORMATS; i++) {
        if (is_float(formats[i])) continue;
        sample_init(&s, formats[i], MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
        s.matrices[1].orientation = MOXIE_ROWS_IN;
        SAID(&s.said, MOXIE_E_UNSUPPORTED, read_weights(&s), "weights.w2.values", "MOXIE_ROWS_OUT");
        sample_fini(&s);
    }
}
END_TEST

START_TEST(scales_nobody_reads_are_refused)
{
    struct sample s;

    for (int32_t i = 0; i < FORMATS; i++) {
        int32_t part = is_float(formats[i]) ? SCALES : GLOBALS;

        if (formats[i] == MOXIE_FORMAT_NVFP4) continue;
        sample_init(&s, formats[i], MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
        put(&s, 1, part, 1, (int64_t[3]){EXPERTS}, 1u << MOXIE_FORMAT_F32);
        SAID(&s.said, MOXIE_E_INVALID, read_weights(&s), part_names[1][part], "given, but");
        sample_fini(&s);
    }
}
END_TEST

// ---- On a GPU ----------------------------------------------------------------------------------

// Weights that a GPU has, by addresses with nothing behind them.
static int32_t read_on_gpu(struct sample *s)
{
    for (int32_t at = 0; at < 2 * PARTS; at++) {
        moxie_tensor *tensor = part_of(s, at / PARTS, at % PARTS);

        if (tensor->data == NULL) continue;
        tensor->data = (void *)(uintptr_t)0x1000;
        tensor->device.type = MOXIE_DEVICE_CUDA;
    }
    return weights_read(&s->weights, &s->limits, (moxie_device){MOXIE_DEVICE_CUDA, 0}, &s->out,
                        &s->said.error);
}

START_TEST(device_memory_is_not_touched)
{
    struct sample s;

    sample_init(&s, MOXIE_FORMAT_MXFP4, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
    ACCEPTED(&s.said, read_on_gpu(&s));
    sample_fini(&s);
}
END_TEST

// Its kernels count the scales of an expert in 32 bits.
START_TEST(a_gpu_takes_less_than_8_gib_of_block_rows)
{
    static const char *const past[2] = {"2863311532 bytes between the 4",
                                        "8589934592 bytes between the 2"};
    struct sample s;

    for (int32_t matrix = 0; matrix < 2; matrix++) {
        int64_t strides[3] = {8, matrix == 0 ? INT32_MAX / 3 : INT32_MAX, 1};

        sample_init(&s, MOXIE_FORMAT_FP8_BLOCK128, MOXIE_ORDER_GATE_UP, MOXIE_ROWS_OUT);
        s.matrices[matrix].scales.strides = strides;
        ACCEPTED(&s.said, read_on_gpu(&s));
        strides[1]++;
        SAID(&s.said, MOXIE_E_UNSUPPORTED, read_on_gpu(&s), part_names[matrix][SCALES],
             past[matrix], "8 GiB");
        sample_fini(&s);
    }
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_order_and_orientation, 0, FORMATS);
    tcase_add_test(tests, strides_are_kept);
    tcase_add_test(tests, global_scales_may_be_strided);
    tcase_add_test(tests, gate_and_up_may_have_a_scale_each);
    tcase_add_test(tests, a_shard_begins_inside_a_block);
    tcase_add_loop_test(tests, extents_off_by_one_are_refused, 0, FORMATS);
    tcase_add_loop_test(tests, wrong_tensors_are_refused, 0, FORMATS);
    tcase_add_loop_test(tests, another_format_is_refused, 0, FORMATS);
    tcase_add_test(tests, orders_follow_the_activation);
    tcase_add_test(tests, orientations_are_two);
    tcase_add_test(tests, scales_nobody_reads_are_refused);
    tcase_add_test(tests, device_memory_is_not_touched);
    tcase_add_test(tests, a_gpu_takes_less_than_8_gib_of_block_rows);
}

SUITE_MAIN("weights", 20, add)
