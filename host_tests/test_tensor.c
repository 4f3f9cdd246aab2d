// plugin/tensor.c: no tensor that a host can write gets past the check, and none that is fine is
// refused.

#include "plugin/tensor.h"

#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <stdio.h>
#include <string.h>

#define P62 ((int64_t)1 << 62)

// A fine tensor [4, 8] of f32, for a test to spoil.
struct sample {
    moxie_tensor tensor;
    struct tensor_want want;
    int64_t dims[9], strides[9];
    float data[128];
    struct said said;
};

static void sample_init(struct sample *s)
{
    memset(s, 0, sizeof *s);
    s->dims[0] = 4;
    s->dims[1] = 8;
    s->strides[0] = 8;
    s->strides[1] = 1;
    s->tensor = tensor_make(s->data, 2, s->dims, NULL, 1u << MOXIE_FORMAT_F32);
    s->want = (struct tensor_want){.name = "batch.x",
                                   .shape = {4, 8},
                                   .ndim = 2,
                                   .types = TENSOR_FORMATS_FLOAT,
                                   .device = {MOXIE_DEVICE_CPU, 0}};
    said_init(&s->said);
}

static int32_t check(struct sample *s)
{
    return tensor_check(&s->tensor, &s->want, &s->said.error);
}

START_TEST(fine_ones_pass)
{
    struct sample s;

    sample_init(&s);
    ACCEPTED(&s.said, check(&s));
    ck_assert_int_eq(tensor_check(&s.tensor, &s.want, NULL), MOXIE_OK);
    s.tensor.strides = s.strides;
    ACCEPTED(&s.said, check(&s));
    s.strides[0] = 16; // rows with a gap
    ACCEPTED(&s.said, check(&s));
    s.strides[0] = 0; // every row the same one
    ACCEPTED(&s.said, check(&s));
    s.tensor.byte_offset = 64;
    ACCEPTED(&s.said, check(&s));
    s.want.shape[0] = -1;
    s.dims[0] = 3;
    ACCEPTED(&s.said, check(&s));
    s.dims[1] = s.want.shape[1] = 1; // the stride of a single element says nothing
    s.strides[1] = 77;
    ACCEPTED(&s.said, check(&s));
}
END_TEST

// Exporters write any stride where there are not two entries.
START_TEST(the_stride_of_one_entry_is_compact)
{
    struct sample s;

    sample_init(&s);
    s.tensor.strides = s.strides;
    s.strides[1] = 1;
    for (s.dims[0] = s.want.shape[0] = 0; s.dims[0] < 2; s.want.shape[0] = ++s.dims[0]) {
        static const int64_t any[] = {1, 0, -8, INT64_MIN, INT64_MAX};

        for (size_t i = 0; i < sizeof any / sizeof any[0]; i++) {
            s.strides[0] = any[i];
            ACCEPTED(&s.said, check(&s));
            ck_assert_int_eq(tensor_stride_bytes(&s.tensor, 0), 8 * 4);
            ck_assert(tensor_overlap(&s.tensor, &s.tensor) == (s.dims[0] > 0));
        }
    }
    s.strides[0] = 16;
    ACCEPTED(&s.said, check(&s));
    ck_assert_int_eq(tensor_stride_bytes(&s.tensor, 0), 16 * 4);
}
END_TEST

START_TEST(elements_of_a_gpu_are_aligned)
{
    struct sample s;

    sample_init(&s);
    s.tensor = tensor_make(s.data, 2, s.dims, NULL, 1u << MOXIE_FORMAT_BF16);
    s.tensor.byte_offset = 1;
    ACCEPTED(&s.said, check(&s));
    s.tensor.device.type = s.want.device.type = MOXIE_DEVICE_CUDA;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "want a multiple of 2");
    s.tensor.byte_offset = 2;
    ACCEPTED(&s.said, check(&s));
}
END_TEST

START_TEST(one_of_several_gpus)
{
    struct sample s;

    sample_init(&s);
    s.tensor.device = (moxie_device){MOXIE_DEVICE_CUDA, 1};
    s.want.device = (moxie_device){MOXIE_DEVICE_CUDA, 1};
    ACCEPTED(&s.said, check(&s));
    s.tensor.device.id = 2;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "on device 2", "lies on device 1");
    s.tensor.device.type = s.want.device.type = MOXIE_DEVICE_CPU; // of which there is one
    ACCEPTED(&s.said, check(&s));
}
END_TEST

START_TEST(nothing_needs_no_data)
{
    struct sample s;

    sample_init(&s);
    s.tensor.data = NULL;
    s.tensor.device.type = 99;
    s.tensor.byte_offset = 12;
    s.dims[0] = s.want.shape[0] = 0;
    ACCEPTED(&s.said, check(&s));
    ck_assert_ptr_null(tensor_data(&s.tensor));
    s.dims[1] = 7; // but its shape still counts
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "[0, 7]", "[0, 8]");
    s.want.optional = 1;
    s.tensor.ndim = -1;
    s.tensor.shape = NULL;
    ACCEPTED(&s.said, check(&s));
}
END_TEST

// A view of nothing may have the strides of what it is a view of, such as a turned array.
START_TEST(nothing_has_any_strides)
{
    static const int64_t any[] = {1, 0, 5, -8, INT64_MIN, INT64_MAX};
    struct sample s;

    sample_init(&s);
    s.tensor.strides = s.strides;
    s.dims[0] = s.want.shape[0] = 0;
    for (size_t i = 0; i < sizeof any / sizeof any[0] * (sizeof any / sizeof any[0]); i++) {
        s.strides[0] = any[i % 6];
        s.strides[1] = any[i / 6];
        ACCEPTED(&s.said, check(&s));
        ck_assert_int_eq(tensor_stride_bytes(&s.tensor, 0), 8 * 4);
        ck_assert_int_eq(tensor_stride_bytes(&s.tensor, 1), 4);
        ck_assert(!tensor_overlap(&s.tensor, &s.tensor) && !tensor_rows_overlap(&s.tensor));
    }
}
END_TEST

START_TEST(wrong_ranks_are_refused)
{
    static const int32_t ndims[] = {0, 1, 3, 8, 9, -1, INT32_MAX, INT32_MIN};
    struct sample s;
    char seen[48];

    sample_init(&s);
    for (size_t i = 0; i < sizeof ndims / sizeof ndims[0]; i++) {
        s.tensor.ndim = ndims[i];
        (void)snprintf(seen, sizeof seen, "%d dimensions", ndims[i]);
        SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", seen, "[4, 8]");
    }
    s.tensor.ndim = 2;
    s.tensor.shape = NULL;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "want [4, 8]");
}
END_TEST

START_TEST(wrong_extents_are_refused)
{
    struct sample s;

    sample_init(&s);
    s.dims[0] = 5;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "[5, 8]", "[4, 8]");
    s.dims[0] = 4;
    s.dims[1] = 9;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "[4, 9]", "[4, 8]");
    s.dims[1] = 8;
    s.want.shape[0] = -1; // any extent, but no negative one
    s.dims[0] = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "[-1, 8]; want [*, 8]");
    s.dims[0] = INT64_MIN;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "[-9223372036854775808, 8]; want [*, 8]");
}
END_TEST

START_TEST(long_shapes_are_cut)
{
    struct sample s;

    sample_init(&s);
    s.tensor.ndim = 8;
    for (int32_t i = 0; i < 8; i++)
        s.dims[i] = INT64_MAX;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "8 dimensions [9223372036854775807, ");
}
END_TEST

START_TEST(types_are_told_apart)
{
    static const uint32_t types[] = {1u << MOXIE_FORMAT_F32,
                                     1u << MOXIE_FORMAT_BF16,
                                     1u << MOXIE_FORMAT_F16,
                                     TENSOR_E4M3,
                                     TENSOR_INT32,
                                     TENSOR_INT64,
                                     TENSOR_UINT8};
    static const char *const names[] = {"float32", "bfloat16", "float16", "float8_e4m3fn",
                                        "int32",   "int64",    "uint8"};
    const int32_t count = (int32_t)(sizeof types / sizeof types[0]);
    struct sample s;

    sample_init(&s);
    for (int32_t i = 0; i < count; i++) {
        for (int32_t j = 0; j < count; j++) {
            s.tensor = tensor_make(s.data, 2, s.dims, NULL, types[i]);
            s.want.types = types[j];
            // Bytes stand for e4m3, as most checkpoints' readers have no dtype for it.
            if (i == j || (types[i] == TENSOR_UINT8 && types[j] == TENSOR_E4M3))
                ACCEPTED(&s.said, check(&s));
            else
                SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "batch.x", "want", names[j]);
        }
    }
}
END_TEST

START_TEST(hostile_types_are_refused)
{
    static const moxie_dtype types[] = {{0, 0, 0},   {2, 32, 0},    {2, 32, 2}, {2, 32, 65535},
                                        {2, 64, 1},  {255, 255, 1}, {2, 31, 1}, {4, 32, 1},
                                        {10, 16, 1}, {2, 0, 1}};
    struct sample s;

    sample_init(&s);
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        s.tensor.dtype = types[i];
        SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "batch.x", "want float32, bfloat16, float16");
    }
    s.tensor.dtype = (moxie_dtype){2, 64, 3};
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "dtype code 2, 64 bits, 3 lanes");
}
END_TEST

START_TEST(hostile_strides_are_refused)
{
    struct sample s;

    sample_init(&s);
    s.tensor.strides = s.strides;
    s.strides[0] = -8;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "stride -8 of dimension 0; want 0 or");
    s.strides[0] = INT64_MIN;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "dimension 0");
    s.strides[0] = P62; // times four bytes
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "stride 4611686018427387904");
    s.strides[0] = INT64_MAX;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "dimension 0");
    s.strides[0] = P62 / 8; // a stride that fits, three of which do not
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "overflows");
    s.strides[0] = 8;
    s.strides[1] = 2;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "batch.x", "stride 2", "want 1");
    s.strides[1] = 0;
    SAID(&s.said, MOXIE_E_UNSUPPORTED, check(&s), "batch.x", "stride 0", "want 1");
    s.strides[1] = -1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "stride -1 of dimension 1");
}
END_TEST

START_TEST(sizes_past_62_bits_are_refused)
{
    struct sample s;

    sample_init(&s);
    s.want.shape[0] = s.want.shape[1] = -1;
    s.dims[0] = s.dims[1] = (int64_t)1 << 40;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "overflows");
    s.dims[0] = INT64_MAX;
    s.dims[1] = 1;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "overflows");
    s.dims[0] = 0; // none of them is there, and still no product may wrap
    s.dims[1] = INT64_MAX;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "overflows");
    s.dims[0] = 4;
    s.dims[1] = 8;
    s.tensor.byte_offset = (uint64_t)P62 + 4;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "overflows");
    s.tensor.byte_offset = UINT64_MAX;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "byte_offset of 18446744073709551615",
         "want 2^62");
}
END_TEST

START_TEST(data_must_be_there)
{
    struct sample s;

    sample_init(&s);
    s.tensor.data = NULL;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "data is NULL");
    sample_init(&s);
    s.tensor.device.type = MOXIE_DEVICE_CUDA;
    SAID(&s.said, MOXIE_E_INVALID, check(&s),
         "batch.x: on device type 2, a GPU's memory; want 1, the CPU's memory", "the key device");
    s.tensor.device.type = 10;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x: on device type 10; want 1, the CPU's");
    s.tensor.device.type = MOXIE_DEVICE_CUDA;
    s.want.device.type = MOXIE_DEVICE_CUDA;
    ACCEPTED(&s.said, check(&s));
}
END_TEST

START_TEST(accessors)
{
    static const uint32_t types[] = {1u << MOXIE_FORMAT_F32, 1u << MOXIE_FORMAT_BF16,
                                     1u << MOXIE_FORMAT_F16, TENSOR_E4M3,
                                     TENSOR_INT32,           TENSOR_INT64};
    static const int64_t bytes[] = {4, 2, 2, 1, 4, 8};
    static const int32_t formats[] = {
        MOXIE_FORMAT_F32, MOXIE_FORMAT_BF16, MOXIE_FORMAT_F16, MOXIE_FORMAT_FP8_TENSOR, 0, 0};
    int64_t dims[3] = {2, 3, 5}, strides[3] = {100, 10, 1};
    unsigned char data[64];
    moxie_tensor tensor;

    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        tensor = tensor_make(data, 3, dims, NULL, types[i]);
        ck_assert_int_eq(tensor_element_bytes(&tensor), bytes[i]);
        ck_assert_int_eq(tensor_format(&tensor), formats[i]);
        ck_assert_int_eq(tensor_stride_bytes(&tensor, 0), 15 * bytes[i]);
        ck_assert_int_eq(tensor_stride_bytes(&tensor, 1), 5 * bytes[i]);
        ck_assert_int_eq(tensor_stride_bytes(&tensor, 2), bytes[i]);
        tensor.strides = strides;
        ck_assert_int_eq(tensor_stride_bytes(&tensor, 0), 100 * bytes[i]);
        ck_assert_int_eq(tensor_stride_bytes(&tensor, 1), 10 * bytes[i]);
    }
    ck_assert_int_eq(tensor.device.type, MOXIE_DEVICE_CPU);
    ck_assert_int_eq(tensor.dtype.lanes, 1);
    tensor.byte_offset = 9;
    ck_assert_ptr_eq(tensor_data(&tensor), data + 9);
    ck_assert_int_eq(tensor_columns(&tensor), 5);
    tensor.ndim = 9;
    ck_assert_int_eq(tensor_columns(&tensor), -1);
    tensor.ndim = 0;
    ck_assert_int_eq(tensor_columns(&tensor), -1);
    tensor.ndim = 1;
    ck_assert_int_eq(tensor_columns(&tensor), 2);
    tensor.shape = NULL;
    ck_assert_int_eq(tensor_columns(&tensor), -1);
}
END_TEST

START_TEST(overlap_is_a_shared_byte)
{
    int64_t dims[2] = {4, 8}, none[2] = {0, 8};
    float data[96];
    moxie_tensor a = tensor_make(data, 2, dims, NULL, 1u << MOXIE_FORMAT_F32);
    moxie_tensor b = tensor_make(data + 32, 2, dims, NULL, 1u << MOXIE_FORMAT_F32);

    ck_assert(tensor_overlap(&a, &a));
    ck_assert(!tensor_overlap(&a, &b) && !tensor_overlap(&b, &a)); // one ends where one begins
    b.data = data + 31;
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
    b.byte_offset = 4;
    ck_assert(!tensor_overlap(&a, &b));
    b = a;
    b.shape = none;
    ck_assert(!tensor_overlap(&a, &b) && !tensor_overlap(&b, &a));
    b.shape = dims;
    b.data = NULL;
    b.shape = none;
    ck_assert(!tensor_overlap(&a, &b));
}
END_TEST

START_TEST(columns_of_one_array_do_not_overlap)
{
    int64_t dims[2] = {3, 8}, strides[2] = {16, 1}, wide[2] = {3, 9};
    float data[64];
    moxie_tensor a = tensor_make(data, 2, dims, strides, 1u << MOXIE_FORMAT_F32);
    moxie_tensor b = tensor_make(data + 8, 2, dims, strides, 1u << MOXIE_FORMAT_F32);

    ck_assert(!tensor_overlap(&a, &b) && !tensor_overlap(&b, &a));
    b.data = data + 24; // a row later
    ck_assert(!tensor_overlap(&a, &b) && !tensor_overlap(&b, &a));
    b.data = data + 7;
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
    b.data = data + 9; // its last column is the next row's first
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
    b.data = data + 8;
    b.shape = wide;
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
    b.shape = dims;
    b.strides = NULL;
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
}
END_TEST

START_TEST(arrays_of_three_dimensions_overlap_by_their_extents)
{
    int64_t dims[3] = {2, 3, 8}, strides[3] = {48, 16, 1};
    float data[128];
    moxie_tensor a = tensor_make(data, 3, dims, strides, 1u << MOXIE_FORMAT_F32);
    moxie_tensor b = tensor_make(data + 88, 3, dims, strides, 1u << MOXIE_FORMAT_F32);

    ck_assert(!tensor_overlap(&a, &b) && !tensor_overlap(&b, &a));
    b.data = data + 87;
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
    b.data = data + 8; // other columns: not looked at
    ck_assert(tensor_overlap(&a, &b) && tensor_overlap(&b, &a));
}
END_TEST

START_TEST(rows_overlap)
{
    int64_t dims[3] = {2, 3, 8}, strides[3] = {24, 8, 1};
    float data[64];
    moxie_tensor tensor = tensor_make(data, 3, dims, NULL, 1u << MOXIE_FORMAT_F32);

    ck_assert(!tensor_rows_overlap(&tensor));
    tensor.strides = strides;
    ck_assert(!tensor_rows_overlap(&tensor));
    strides[0] = 23;
    ck_assert(tensor_rows_overlap(&tensor));
    strides[0] = 0;
    ck_assert(tensor_rows_overlap(&tensor));
    dims[0] = 1;
    ck_assert(!tensor_rows_overlap(&tensor));
    strides[1] = 7;
    ck_assert(tensor_rows_overlap(&tensor));
    dims[1] = 0;
    ck_assert(!tensor_rows_overlap(&tensor));
}
END_TEST

START_TEST(words_must_be_aligned)
{
    struct sample s;

    sample_init(&s);
    s.tensor.byte_offset = 2;
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "want a multiple of 4");
    s.tensor = tensor_make(s.data, 2, s.dims, NULL, TENSOR_INT64);
    s.want.types = TENSOR_INT64;
    s.tensor.data = (unsigned char *)(((uintptr_t)s.data + 7) / 8 * 8 + 4);
    SAID(&s.said, MOXIE_E_INVALID, check(&s), "batch.x", "want a multiple of 8");
    s.tensor.dtype = (moxie_dtype){MOXIE_DTYPE_BFLOAT, 16, 1};
    s.want.types = 1u << MOXIE_FORMAT_BF16;
    s.tensor.byte_offset = 1; // a checkpoint as it was mapped
    ACCEPTED(&s.said, check(&s));
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, fine_ones_pass);
    tcase_add_test(tests, the_stride_of_one_entry_is_compact);
    tcase_add_test(tests, elements_of_a_gpu_are_aligned);
    tcase_add_test(tests, one_of_several_gpus);
    tcase_add_test(tests, nothing_needs_no_data);
    tcase_add_test(tests, nothing_has_any_strides);
    tcase_add_test(tests, wrong_ranks_are_refused);
    tcase_add_test(tests, wrong_extents_are_refused);
    tcase_add_test(tests, long_shapes_are_cut);
    tcase_add_test(tests, types_are_told_apart);
    tcase_add_test(tests, hostile_types_are_refused);
    tcase_add_test(tests, hostile_strides_are_refused);
    tcase_add_test(tests, sizes_past_62_bits_are_refused);
    tcase_add_test(tests, data_must_be_there);
    tcase_add_test(tests, accessors);
    tcase_add_test(tests, overlap_is_a_shared_byte);
    tcase_add_test(tests, columns_of_one_array_do_not_overlap);
    tcase_add_test(tests, arrays_of_three_dimensions_overlap_by_their_extents);
    tcase_add_test(tests, rows_overlap);
    tcase_add_test(tests, words_must_be_aligned);
}

SUITE_MAIN("tensor", 10, add)
