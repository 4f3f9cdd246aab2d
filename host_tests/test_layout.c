// abi/layout.c: the table is complete, without gaps, and what the compiler and DLPack say too.

#include "abi/layout.h"

#include "host_tests/suite.h"

#include <stddef.h>
#include <string.h>

#if defined(__has_include)
#if __has_include(<dlpack/dlpack.h>)
#include <dlpack/dlpack.h>
#define HAVE_DLPACK 1
#endif
#endif

// No struct has implicit padding, so every offset is the sum of the sizes before it, and the last
// one ends the struct: a field that the table forgot leaves a gap.
START_TEST(rows_fill_their_structs)
{
    uint64_t count;
    const moxie_field *rows = layout_rows(&count);
    uint32_t expected = 0, whole = 0;

    for (uint64_t i = 0; i < count; i++) {
        ck_assert_uint_eq(rows[i].struct_size, sizeof(moxie_field));
        if (rows[i].field[0] == '\0') {
            ck_assert_uint_eq(expected, whole);
            whole = rows[i].size;
            expected = 0;
            continue;
        }
        ck_assert_str_eq(rows[i].structure, rows[i - 1].structure);
        ck_assert_msg(rows[i].offset == expected, "%s.%s at %u, fields before it end at %u",
                      rows[i].structure, rows[i].field, rows[i].offset, expected);
        expected += rows[i].size;
    }
    ck_assert_uint_eq(expected, whole);
}
END_TEST

// Every struct but DLPack's starts with struct_size.
START_TEST(struct_size_is_first)
{
    uint64_t count;
    const moxie_field *rows = layout_rows(&count);

    for (uint64_t i = 0; i < count; i++) {
        const char *name = rows[i].structure;
        int dlpack = strcmp(name, "moxie_device") == 0 || strcmp(name, "moxie_dtype") == 0 ||
                     strcmp(name, "moxie_tensor") == 0;

        if (rows[i].field[0] != '\0' || dlpack) continue;
        ck_assert_str_eq(rows[i + 1].field, "struct_size");
        ck_assert_uint_eq(rows[i + 1].offset, 0);
        ck_assert_uint_eq(rows[i + 1].size, 4);
    }
}
END_TEST

START_TEST(no_row_twice)
{
    uint64_t count;
    const moxie_field *rows = layout_rows(&count);

    for (uint64_t i = 0; i < count; i++)
        for (uint64_t j = 0; j < i; j++)
            ck_assert(strcmp(rows[i].structure, rows[j].structure) != 0 ||
                      strcmp(rows[i].field, rows[j].field) != 0);
}
END_TEST

START_TEST(digest)
{
    const moxie_field one = {sizeof one, 0x01020304, 0x05060708, 0, "a", ""};
    const moxie_field two = {sizeof two, 0x01020304, 0x05060708, 0, "", "a"};
    const moxie_field three = {sizeof three, 0x01020304, 0x05060709, 0, "a", ""};
    uint64_t count;
    const moxie_field *rows = layout_rows(&count);

    ck_assert_uint_eq(layout_digest(rows, 0), 0xcbf29ce484222325ull); // FNV-1a's offset basis
    // bytes 61 00 00 04 03 02 01 08 07 06 05, hashed by another program
    ck_assert_uint_eq(layout_digest(&one, 1), 0x6c49195ba0adcef4ull);
    ck_assert_uint_ne(layout_digest(&one, 1), layout_digest(&two, 1));
    ck_assert_uint_ne(layout_digest(&one, 1), layout_digest(&three, 1));
    ck_assert_msg(layout_digest(rows, count) == LAYOUT_DIGEST,
                  "the layout changed: set LAYOUT_DIGEST to 0x%llxull",
                  (unsigned long long)layout_digest(rows, count));
}
END_TEST

// The numbers are asserted also where the installed dlpack.h is too old to know them.
START_TEST(tensor_is_dlpack)
{
    ck_assert_uint_eq(sizeof(moxie_tensor), 48);
    ck_assert_int_eq(MOXIE_DEVICE_CPU, 1);
    ck_assert_int_eq(MOXIE_DEVICE_CUDA, 2);
    ck_assert_int_eq(MOXIE_DTYPE_INT, 0);
    ck_assert_int_eq(MOXIE_DTYPE_UINT, 1);
    ck_assert_int_eq(MOXIE_DTYPE_FLOAT, 2);
    ck_assert_int_eq(MOXIE_DTYPE_BFLOAT, 4);
    ck_assert_int_eq(MOXIE_DTYPE_FLOAT8_E4M3FN, 10); // since DLPack 1.1
#ifdef HAVE_DLPACK
#define SAME(ours, field, theirs, their_field)                                                     \
    ck_assert_uint_eq(offsetof(ours, field), offsetof(theirs, their_field));                       \
    ck_assert_uint_eq(sizeof(((ours *)0)->field), sizeof(((theirs *)0)->their_field))
    ck_assert_uint_eq(sizeof(moxie_tensor), sizeof(DLTensor));
    ck_assert_uint_eq(sizeof(moxie_device), sizeof(DLDevice));
    ck_assert_uint_eq(sizeof(moxie_dtype), sizeof(DLDataType));
    SAME(moxie_tensor, data, DLTensor, data);
    SAME(moxie_tensor, device, DLTensor, device);
    SAME(moxie_tensor, ndim, DLTensor, ndim);
    SAME(moxie_tensor, dtype, DLTensor, dtype);
    SAME(moxie_tensor, shape, DLTensor, shape);
    SAME(moxie_tensor, strides, DLTensor, strides);
    SAME(moxie_tensor, byte_offset, DLTensor, byte_offset);
    SAME(moxie_device, type, DLDevice, device_type);
    SAME(moxie_device, id, DLDevice, device_id);
    SAME(moxie_dtype, code, DLDataType, code);
    SAME(moxie_dtype, bits, DLDataType, bits);
    SAME(moxie_dtype, lanes, DLDataType, lanes);
    ck_assert_int_eq(MOXIE_DEVICE_CPU, kDLCPU);
    ck_assert_int_eq(MOXIE_DEVICE_CUDA, kDLCUDA);
    ck_assert_int_eq(MOXIE_DTYPE_INT, kDLInt);
    ck_assert_int_eq(MOXIE_DTYPE_UINT, kDLUInt);
    ck_assert_int_eq(MOXIE_DTYPE_FLOAT, kDLFloat);
    ck_assert_int_eq(MOXIE_DTYPE_BFLOAT, kDLBfloat);
#endif
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, rows_fill_their_structs);
    tcase_add_test(tests, struct_size_is_first);
    tcase_add_test(tests, no_row_twice);
    tcase_add_test(tests, digest);
    tcase_add_test(tests, tensor_is_dlpack);
}

SUITE_MAIN("layout", 30, add)
