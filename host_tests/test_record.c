// kernels/cpu/record.c: what is an expert, what is none, and which rows are written.

#include "kernels/record.h"

#include "host_tests/suite.h"

#include <string.h>

#define TOKENS  3
#define TOP_K   2
#define STRIDE  5 // of an output row
#define EXPERTS 8

static const int32_t narrow[TOKENS * TOP_K] = {0, 7, EXPERTS, -1, INT32_MIN, 3};

static struct record_args args_for(int32_t *out)
{
    memset(out, 0x55, TOKENS * STRIDE * sizeof *out);
    return (struct record_args){.ids = narrow,
                                .id_stride_bytes = TOP_K * 4,
                                .out = out,
                                .out_stride = STRIDE,
                                .id_bytes = 4,
                                .tokens = TOKENS,
                                .top_k = TOP_K,
                                .experts = EXPERTS};
}

static void check(const int32_t *out, const int32_t *want)
{
    for (int32_t i = 0; i < TOKENS * STRIDE; i++)
        ck_assert_int_eq(out[i],
                         i % STRIDE < TOP_K ? want[i / STRIDE * TOP_K + i % STRIDE] : 0x55555555);
}

START_TEST(ids_out_of_range_are_none)
{
    static const int32_t want[] = {0, 7, -1, -1, -1, 3};
    int32_t out[TOKENS * STRIDE];
    struct record_args args = args_for(out);

    ck_assert_int_eq(record_cpu(&args, NULL), 0);
    check(out, want);
}
END_TEST

START_TEST(wide_ids_are_read_whole)
{
    static const int64_t wide[] = {(int64_t)1 << 32, 7, INT64_MAX, -1, INT64_MIN, 3};
    static const int32_t want[] = {-1, 7, -1, -1, -1, 3};
    int32_t out[TOKENS * STRIDE];
    struct record_args args = args_for(out);

    args.ids = wide;
    args.id_bytes = 8;
    args.id_stride_bytes = TOP_K * 8;
    ck_assert_int_eq(record_cpu(&args, NULL), 0);
    check(out, want);
}
END_TEST

START_TEST(maps_are_followed)
{
    static const int32_t map[] = {5, -1, EXPERTS, 0, 1, 1, 1, 6}, want[] = {5, 6, -1, -1, -1, 0};
    int32_t out[TOKENS * STRIDE];
    struct record_args args = args_for(out);

    args.expert_map = map;
    args.map_count = 8;
    ck_assert_int_eq(record_cpu(&args, NULL), 0);
    check(out, want);
}
END_TEST

START_TEST(padding_is_none)
{
    static const int32_t some[] = {0, 7, -1, -1, -1, -1}, none[] = {-1, -1, -1, -1, -1, -1};
    int32_t out[TOKENS * STRIDE], valid = 5;
    struct record_args args = args_for(out);

    args.tokens_valid = &valid;
    args.token_first = 4;
    ck_assert_int_eq(record_cpu(&args, NULL), 0);
    check(out, some);
    valid = INT32_MIN;
    ck_assert_int_eq(record_cpu(&args, NULL), 0);
    check(out, none);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, ids_out_of_range_are_none);
    tcase_add_test(tests, wide_ids_are_read_whole);
    tcase_add_test(tests, maps_are_followed);
    tcase_add_test(tests, padding_is_none);
}

SUITE_MAIN("record", 20, add)
