// kernels/cpu/quantise.c and rows.c: known codes, bounds of the error, zeros, odd sizes, canaries.

#include "kernels/quantise.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <math.h>
#include <string.h>

#define ROWS 19

static void run(struct quantise_args *args, int32_t workers)
{
    struct cpu_stream stream;

    stream_init(&stream, workers, CPU_SCALAR);
    ck_assert_int_eq(quantise_cpu(args, &stream), 0);
    stream_fini(&stream);
}

static struct quantise_args row_to_fp8(const float *x, int32_t columns, uint8_t *codes,
                                       float *scales)
{
    return (struct quantise_args){.x = x,
                                  .rows = codes,
                                  .scales = scales,
                                  .x_format = FORMAT_F32,
                                  .format = FORMAT_FP8_BLOCK128,
                                  .rows_count = 1,
                                  .columns = columns};
}

START_TEST(known_codes)
{
    float x[256] = {[0] = 448.0f, [1] = -1.0f, [2] = 0.3f, [128] = 0.0f};
    uint8_t rows[256];
    float scales[2];
    struct quantise_args args = row_to_fp8(x, 256, rows, scales);

    run(&args, 1);
    ck_assert_float_eq(scales[0], 1.0f);
    ck_assert_float_eq(scales[1], 0.0f);
    ck_assert_int_eq(rows[0], 0x7e);
    ck_assert_int_eq(rows[1], 0xb8);
    ck_assert_int_eq(rows[2], e4m3_encode(0.3f));
    for (int i = 128; i < 256; i++)
        ck_assert_int_eq(rows[i], 0);
}
END_TEST

// Of a group whose scale no power of two is: products, not quotients, which round otherwise in 3 of
// these cases.
START_TEST(codes_are_of_products)
{
    float x[128];
    uint8_t rows[128];
    float scale;
    int others = 0;
    struct quantise_args args = row_to_fp8(x, 128, rows, &scale);

    for (int largest = 128; largest < 256; largest++) {
        for (int i = 0; i < 128; i++)
            x[i] = (float)(i == 0 ? largest : i);
        run(&args, 1);
        ck_assert_float_eq(scale, (float)largest / 448.0f);
        for (int i = 0; i < 128; i++) {
            assert_many(rows[i] == e4m3_encode(x[i] * (448.0f / (float)largest)),
                        "largest %d, number %d: %d, not %d", largest, i, rows[i],
                        e4m3_encode(x[i] * (448.0f / (float)largest)));
            others += rows[i] != e4m3_encode(x[i] / scale);
        }
    }
    ck_assert_int_eq(others, 3);
}
END_TEST

START_TEST(the_smallest_scale)
{
    float x[128] = {[5] = -0x1p-100f};
    uint8_t rows[128];
    float scale;
    struct quantise_args args = row_to_fp8(x, 128, rows, &scale);

    run(&args, 1);
    ck_assert_float_eq(scale, 0x1p-100f / 448.0f);
    ck_assert_int_eq(rows[5], 0xfe);
    x[5] = nextafterf(x[5], 0.0f);
    run(&args, 1);
    ck_assert_float_eq(scale, 0.0f);
    ck_assert_int_eq(rows[5] & 0x7f, 0);
}
END_TEST

START_TEST(known_nibbles)
{
    float x[32] = {[0] = 6.0f * 448.0f, [1] = -1344.0f, [2] = 448.0f, [16] = 6.0f, [17] = 0.5f};
    uint8_t rows[16], scales[6];
    struct quantise_args args = {.x = x,
                                 .rows = rows,
                                 .scales = scales,
                                 .x_format = FORMAT_F32,
                                 .format = FORMAT_NVFP4,
                                 .rows_count = 1,
                                 .columns = 32};

    run(&args, 1);
    ck_assert_float_eq(number_load(FORMAT_F32, scales, 0), 1.0f);
    ck_assert_int_eq(scales[4], 0x7e); // 448
    ck_assert_int_eq(scales[5], 0x38); // 1
    ck_assert_int_eq(rows[0], 0xd7);   // 6, -3
    ck_assert_int_eq(rows[1], 0x02);   // 1, 0
    ck_assert_int_eq(rows[8], 0x17);   // 6, 0.5
}
END_TEST

// Every value is within half a step of its block's scale; what lies past the row is untouched.
static void check_rows(int32_t format, int32_t x_format, int32_t columns, int32_t workers)
{
    int64_t pitch = row_bytes(format, columns) + 5,
            scale_pitch = row_scale_bytes(format, columns) + 3;
    unsigned char *x = poisoned((size_t)(ROWS * columns * 4));
    unsigned char *rows = poisoned((size_t)(ROWS * pitch));
    unsigned char *scales = poisoned((size_t)(ROWS * scale_pitch));
    float *decoded = poisoned((size_t)columns * 4);
    struct quantise_args args = {.x = x,
                                 .rows = rows,
                                 .scales = scales,
                                 .x_stride_bytes = columns * number_bytes(x_format),
                                 .row_stride_bytes = pitch,
                                 .scale_stride_bytes = scale_pitch,
                                 .x_format = x_format,
                                 .format = format,
                                 .rows_count = ROWS,
                                 .columns = columns};
    uint32_t seed = 21;

    for (int64_t i = 0; i < ROWS * (int64_t)columns; i++) {
        float value = random_unit(&seed) * (i % 7 == 0 ? 100.0f : 1.0f);

        numbers_encode(x_format, &value, 1, x + i * number_bytes(x_format));
    }
    run(&args, workers);
    for (int64_t r = 0; r < ROWS; r++) {
        struct row_view view = {
            .values = rows + r * pitch, .scales = scales + r * scale_pitch, .format = format};
        int64_t group = format == FORMAT_NVFP4 ? 16 : 128;
        float largest_of_row = 0.0f;

        for (int64_t k = 0; k < columns; k += ROW_PIECE)
            row_decode(&view, k, min64(columns - k, ROW_PIECE), decoded + k);
        for (int64_t k = 0; k < columns; k++)
            largest_of_row =
                fmaxf(largest_of_row, fabsf(number_load(x_format, x, r * columns + k)));
        for (int64_t k = 0; k < columns; k++) {
            float largest_of_group = 0.0f, value = number_load(x_format, x, r * columns + k);
            float bound;

            for (int64_t j = k / group * group; j < min64(columns, (k / group + 1) * group); j++)
                largest_of_group =
                    fmaxf(largest_of_group, fabsf(number_load(x_format, x, r * columns + j)));
            // e4m3: 2^-4 of the value. e2m1: a step of 2 at most, of a sixth, and the scale's own
            // rounding.
            bound = format == FORMAT_NVFP4
                        ? largest_of_group * (1.0f / 6 + 1.0f / 16) + largest_of_row * 1e-5f
                        : fabsf(value) / 16 + largest_of_group * 1e-5f;
            ck_assert_msg(fabsf(decoded[k] - value) <= bound, "%g became %g", (double)value,
                          (double)decoded[k]);
        }
        for (int64_t i = row_bytes(format, columns); i < pitch; i++)
            ck_assert_int_eq(rows[r * pitch + i], 0xff);
        for (int64_t i = row_scale_bytes(format, columns); i < scale_pitch; i++)
            ck_assert_int_eq(scales[r * scale_pitch + i], 0xff);
    }
    free(x);
    free(rows);
    free(scales);
    free(decoded);
}

START_TEST(errors_are_bounded)
{
    static const int32_t columns[] = {1, 16, 127, 128, 129, 512, 600, 1040, 1537};

    for (size_t i = 0; i < sizeof columns / sizeof columns[0]; i++) {
        check_rows(FORMAT_FP8_BLOCK128, FORMAT_F32 + _i, columns[i], 1 + (int32_t)(i % 3));
        check_rows(FORMAT_NVFP4, FORMAT_F32 + _i, columns[i], 1 + (int32_t)(i % 3));
    }
}
END_TEST

// What is not a number poisons its block, and what is too small for a scale is zero; neither harms
// its neighbours.
START_TEST(odd_values_stay_in_their_block)
{
    float x[512], decoded[512];
    uint8_t rows[512], scales[64];
    struct row_view view = {.values = rows, .scales = scales, .format = FORMAT_FP8_BLOCK128};
    struct quantise_args args = {.x = x,
                                 .rows = rows,
                                 .scales = scales,
                                 .x_format = FORMAT_F32,
                                 .format = FORMAT_FP8_BLOCK128,
                                 .rows_count = 1,
                                 .columns = 512};

    for (int i = 0; i < 512; i++)
        x[i] = i < 256 ? 1.0f : 1e-45f;
    x[3] = NAN;
    run(&args, 1);
    row_decode(&view, 0, 512, decoded);
    ck_assert(isnan(decoded[3]) && isnan(decoded[4]));
    ck_assert_float_eq(decoded[128], 1.0f);
    ck_assert_float_eq(decoded[300], 0.0f);
    x[3] = -INFINITY;
    run(&args, 1);
    row_decode(&view, 0, 512, decoded);
    ck_assert(isnan(decoded[3]) && isnan(decoded[4]));
    ck_assert_float_eq(decoded[128], 1.0f);
    args.format = view.format = FORMAT_NVFP4;
    run(&args, 1);
    row_decode(&view, 0, 512, decoded);
    for (int i = 0; i < 512; i++)
        ck_assert(isnan(decoded[i]));
    memset(x, 0, sizeof x);
    run(&args, 1);
    row_decode(&view, 0, 512, decoded);
    for (int i = 0; i < 512; i++)
        ck_assert_float_eq(decoded[i], 0.0f);
}
END_TEST

// Each valid row of the slabs to each of its places, scales by group; what is e4m3 already is
// copied.
START_TEST(slabs_go_where_their_pairs_are)
{
    static const int32_t count = 1;
    static const int32_t row_pair[6][2] = {{3, -1}, {0, 0},  {6, INT32_MAX},
                                           {1, 4},  {2, -1}, {0, 5}};
    static const float wanted[6][2] = {{2, 4}, {7, 8}, {1, 3}, {1, 3}, {7, 8}, {2, 4}};
    float x[2][256], copied[2][2] = {{5, 6}, {7, 8}}, scales[2][8] = {{0}};
    uint8_t codes[2][256], rows[6][256] = {{0}};
    const struct row_slab slabs[] = {
        {.rows = x, .count = &count, .row_stride_bytes = 1024, .cap = 2, .format = FORMAT_F32},
        {.rows = codes,
         .scales = copied,
         .row_stride_bytes = 256,
         .scale_stride_bytes = 8,
         .cap = 2,
         .format = FORMAT_FP8_BLOCK128},
        {.rows = x, .row_stride_bytes = 1024, .cap = 2, .format = FORMAT_F32}};
    struct quantise_args args = {.slabs = slabs,
                                 .row_pair = row_pair[0],
                                 .rows = rows,
                                 .scales = scales,
                                 .row_stride_bytes = 256,
                                 .scale_stride_bytes = 4,
                                 .group_stride_bytes = 32,
                                 .format = FORMAT_FP8_BLOCK128,
                                 .slabs_count = 3,
                                 .rows_cap = 2,
                                 .top_k = 2,
                                 .rows_count = 6,
                                 .columns = 256};

    for (int i = 0; i < 256; i++) {
        x[0][i] = 448.0f * (i < 128 ? 1 : 3);
        x[1][i] = 448.0f * (i < 128 ? 2 : 4);
        codes[0][i] = codes[1][i] = 0x11;
    }
    run(&args, 2);
    for (int row = 0; row < 6; row++) {
        ck_assert_float_eq(scales[0][row], wanted[row][0]);
        ck_assert_float_eq(scales[1][row], wanted[row][1]);
        ck_assert_int_eq(rows[row][0], wanted[row][0] == 7 ? 0x11 : 0x7e);
        ck_assert_int_eq(rows[row][255], rows[row][0]);
    }
    ck_assert_float_eq(scales[0][6], 0.0f);
}
END_TEST

// The same rows, each from where its pair says.
START_TEST(rows_come_from_slabs)
{
    static const int32_t count = 3, x_row[4] = {2, 1, 2, 0};
    float x[128], copied[2] = {5, 6}, scales[4] = {0};
    uint8_t codes[2][128], rows[4][128] = {{0}};
    const struct row_slab slabs[] = {
        {.rows = codes,
         .scales = copied,
         .row_stride_bytes = 128,
         .scale_stride_bytes = 4,
         .cap = 2,
         .format = FORMAT_FP8_BLOCK128},
        {.rows = x, .row_stride_bytes = 512, .cap = 1, .format = FORMAT_F32}};
    struct quantise_args args = {.slabs = slabs,
                                 .x_row = x_row,
                                 .count = &count,
                                 .rows = rows,
                                 .scales = scales,
                                 .row_stride_bytes = 128,
                                 .scale_stride_bytes = 4,
                                 .format = FORMAT_FP8_BLOCK128,
                                 .slabs_count = 2,
                                 .rows_cap = 2,
                                 .rows_count = 4,
                                 .columns = 128};

    for (int i = 0; i < 128; i++) {
        x[i] = 448.0f;
        codes[0][i] = codes[1][i] = 0x11;
    }
    run(&args, 2);
    ck_assert_float_eq(scales[0], 1.0f);
    ck_assert_float_eq(scales[1], 6.0f);
    ck_assert_float_eq(scales[2], 1.0f);
    ck_assert_float_eq(scales[3], 0.0f);
    ck_assert_int_eq(rows[0][127], 0x7e);
    ck_assert_int_eq(rows[1][127], 0x11);
    ck_assert_int_eq(rows[3][127], 0);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, known_codes);
    tcase_add_test(tests, codes_are_of_products);
    tcase_add_test(tests, the_smallest_scale);
    tcase_add_test(tests, known_nibbles);
    tcase_add_loop_test(tests, errors_are_bounded, 0, 3);
    tcase_add_test(tests, odd_values_stay_in_their_block);
    tcase_add_test(tests, slabs_go_where_their_pairs_are);
    tcase_add_test(tests, rows_come_from_slabs);
}

SUITE_MAIN("quantise", 60, add)
