// kernels/cpu/route.c: pairs by expert, then slab, row and position; ids of no expert fall out.

#include "kernels/route.h"

#include "kernels/cpu/cpu.h"
#include "kernels/cpu/numbers.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <string.h>

#define EXPERTS 5
#define CAP     6
#define TOP_K   3
#define SLABS   2
#define PAIRS   (SLABS * CAP * TOP_K)
#define CANARY  0x5a5a5a5a

struct routed {
    int32_t offset[EXPERTS + 2];
    uint32_t progress[GEMM_PROGRESS_WORDS + EXPERTS + 1];
    int32_t pair_row[PAIRS + 1];
    float pair_weight[PAIRS + 1];
    int32_t row_pair[PAIRS + 1];
};

static void routed_init(struct routed *routed)
{
    memset(routed, 0x5a, sizeof *routed);
}

static struct route_args route_args_of(struct routed *routed, const struct row_slab *slabs)
{
    return (struct route_args){
        .slabs = slabs,
        .expert_offset = routed->offset,
        .progress = routed->progress,
        .pair_row = routed->pair_row,
        .pair_weight = routed->pair_weight,
        .row_pair = routed->row_pair,
        .pairs_max = PAIRS,
        .experts = EXPERTS,
        .slabs_count = SLABS,
        .rows_cap = CAP,
        .top_k = TOP_K,
        .by = ROUTE_BY_IDS,
    };
}

static void run(struct route_args *args)
{
    struct cpu_stream stream = {.workers = 1};

    ck_assert_int_eq(route_cpu(args, &stream), 0);
}

static void canaries_live(const struct routed *routed, int64_t pairs_max)
{
    ck_assert_int_eq(routed->offset[EXPERTS + 1], CANARY);
    for (int i = 0; i < GEMM_PROGRESS_WORDS + EXPERTS; i++)
        ck_assert_uint_eq(routed->progress[i], i == GEMM_PROGRESS_LAUNCH ? CANARY + 2 : 0);
    ck_assert_uint_eq(routed->progress[GEMM_PROGRESS_WORDS + EXPERTS], CANARY);
    ck_assert_int_eq(routed->pair_row[pairs_max], CANARY);
    ck_assert_int_eq(routed->row_pair[PAIRS], CANARY);
}

// The local expert of an id, by the words of route.h.
static int64_t expected_expert(const struct route_args *args, int64_t id)
{
    if (args->expert_map != NULL) id = id >= 0 && id < args->map_count ? args->expert_map[id] : -1;
    id = id < args->expert_first ? -1 : id - args->expert_first;
    return id >= 0 && id < args->experts ? id : -1;
}

// Compares with lists built the slow way. `valid` rows of each slab count.
static void check(const struct route_args *args, const int64_t ids[PAIRS],
                  const int32_t valid[SLABS])
{
    int32_t pairs = 0;

    for (int32_t e = 0; e < EXPERTS; e++) {
        ck_assert_int_eq(args->expert_offset[e], pairs);
        for (int32_t i = 0; i < PAIRS; i++) {
            int32_t row = i / TOP_K % CAP;

            if (row >= valid[i / TOP_K / CAP] || expected_expert(args, ids[i]) != e) continue;
            ck_assert_int_eq(args->row_pair[i], pairs);
            ck_assert_int_eq(args->pair_row[pairs], i / TOP_K);
            ck_assert_float_eq(args->pair_weight[pairs], (float)i * 0.5f);
            pairs++;
        }
    }
    ck_assert_int_eq(args->expert_offset[EXPERTS], pairs);
    for (int32_t i = 0; i < PAIRS; i++) {
        if (i / TOP_K % CAP >= valid[i / TOP_K / CAP] || expected_expert(args, ids[i]) < 0)
            ck_assert_int_eq(args->row_pair[i], -1);
    }
}

struct input {
    int64_t ids[PAIRS];
    int32_t ids32[PAIRS];
    unsigned char weights[PAIRS * 4];
    int32_t counts[SLABS];
    struct row_slab slabs[SLABS];
};

static void input_init(struct input *input, int32_t id_bytes, int32_t weight_format, int hostile)
{
    static const int64_t odd[] = {-1,        EXPERTS, INT32_MAX, INT64_MAX,
                                  INT64_MIN, -7,      1LL << 32, 1000};
    uint32_t seed = 3;

    for (int i = 0; i < PAIRS; i++) {
        float weight = (float)i * 0.5f;

        input->ids[i] = random_next(&seed) % EXPERTS;
        if (hostile && i % 3 == 1) input->ids[i] = odd[random_next(&seed) % 8];
        if (id_bytes == 4) input->ids[i] = (int32_t)input->ids[i];
        input->ids32[i] = (int32_t)input->ids[i];
        numbers_encode(weight_format, &weight, 1, input->weights + i * number_bytes(weight_format));
    }
    for (int s = 0; s < SLABS; s++) {
        int64_t first = s * CAP * TOP_K;

        input->counts[s] = CAP;
        input->slabs[s] = (struct row_slab){
            .ids = id_bytes == 8 ? (const void *)(input->ids + first) : input->ids32 + first,
            .weights = input->weights + first * number_bytes(weight_format),
            .count = &input->counts[s],
            .id_stride_bytes = TOP_K * id_bytes,
            .weight_stride_bytes = TOP_K * number_bytes(weight_format),
            .cap = CAP,
            .id_bytes = id_bytes,
            .weight_format = weight_format,
        };
    }
}

START_TEST(ids_of_any_value)
{
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, _i % 2 == 0 ? 4 : 8, FORMAT_F32 + _i / 2, 1);
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    run(&args);
    check(&args, input.ids, (int32_t[]){CAP, CAP});
    canaries_live(&routed, PAIRS);
}
END_TEST

START_TEST(a_shard_owns_a_range)
{
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, 8, FORMAT_F32, 1);
    for (int i = 0; i < PAIRS; i++)
        input.ids[i] += i % 2 == 0 && input.ids[i] < 1000 ? 100 : 0;
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    args.expert_first = 101;
    run(&args);
    check(&args, input.ids, (int32_t[]){CAP, CAP});
}
END_TEST

START_TEST(maps_of_any_value)
{
    static const int32_t map[] = {4, -1, INT32_MAX, 0, EXPERTS};
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, 4, FORMAT_F32, 1);
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    args.expert_map = map;
    args.map_count = sizeof map / sizeof map[0];
    run(&args);
    check(&args, input.ids, (int32_t[]){CAP, CAP});
}
END_TEST

START_TEST(counts_are_clamped)
{
    static const int32_t counts[][2] = {
        {0, 3}, {-1, INT32_MAX}, {INT32_MIN, CAP + 1}, {CAP - 1, 1}};
    static const int32_t valid[][2] = {{0, 3}, {0, CAP}, {0, CAP}, {CAP - 1, 1}};
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, 4, FORMAT_F32, 0);
    memcpy(input.counts, counts[_i], sizeof input.counts);
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    run(&args);
    check(&args, input.ids, valid[_i]);
}
END_TEST

// A slab with fewer rows than the largest, and a capacity that a liar would overrun.
START_TEST(nothing_past_the_capacity)
{
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, 4, FORMAT_F32, 0);
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    args.pairs_max = 10;
    run(&args);
    canaries_live(&routed, 10);
    ck_assert_int_eq(routed.offset[EXPERTS], 10);
    for (int i = 0; i < PAIRS; i++)
        ck_assert_int_lt(routed.row_pair[i], 10);
    for (int e = 0; e < EXPERTS; e++)
        ck_assert_int_le(routed.offset[e], routed.offset[e + 1]);
    input.slabs[1].cap = 2;
    input.counts[1] = INT32_MAX;
    args.pairs_max = PAIRS;
    run(&args);
    check(&args, input.ids, (int32_t[]){CAP, 2});
}
END_TEST

START_TEST(duplicates_are_two_pairs_and_weights_are_optional)
{
    struct input input;
    struct routed routed;
    struct route_args args;

    input_init(&input, 4, FORMAT_F32, 0);
    for (int i = 0; i < PAIRS; i++)
        input.ids32[i] = 2;
    input.slabs[0].weights = NULL;
    input.slabs[0].count = NULL;
    routed_init(&routed);
    args = route_args_of(&routed, input.slabs);
    run(&args);
    ck_assert_int_eq(routed.offset[2], 0);
    ck_assert_int_eq(routed.offset[3], PAIRS);
    for (int i = 0; i < PAIRS; i++) {
        ck_assert_int_eq(routed.row_pair[i], i);
        ck_assert_float_eq(routed.pair_weight[i], i < CAP * TOP_K ? 1.0f : (float)i * 0.5f);
    }
}
END_TEST

// Layouts by expert: rows are at prefix[e]..prefix[e + 1], or at e * rows_per_expert.
static void run_by_expert(struct routed *routed, int32_t by, const int32_t *counts, int32_t cap)
{
    static const float weights[] = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    struct row_slab slab = {
        .cap = cap, .weights = weights, .weight_format = FORMAT_F32, .weight_stride_bytes = 4};
    struct route_args args = route_args_of(routed, &slab);

    routed_init(routed);
    args.slabs_count = 1;
    args.rows_cap = cap;
    args.top_k = 1;
    args.by = by;
    args.expert_counts = counts;
    args.rows_per_expert = 2;
    run(&args);
}

START_TEST(contiguous_by_prefix)
{
    static const int32_t prefix[] = {0, 2, 2, 5, 6, 6};
    struct routed routed;

    run_by_expert(&routed, ROUTE_BY_PREFIX, prefix, 10);
    ck_assert_mem_eq(routed.offset, prefix, sizeof prefix);
    for (int i = 0; i < 10; i++) {
        if (i < 6) ck_assert_int_eq(routed.pair_row[i], i);
        if (i < 6) ck_assert_float_eq(routed.pair_weight[i], (float)(9 - i));
    }
}
END_TEST

START_TEST(hostile_prefixes)
{
    static const int32_t prefixes[][EXPERTS + 1] = {
        {-9, 4, 2, 3, INT32_MAX, 7},
        {3, 3, 1, 1, 9, INT32_MIN},
        {INT32_MAX, INT32_MAX, 0, 5, 5, 100},
    };
    struct routed routed;
    int seen[10] = {0};

    run_by_expert(&routed, ROUTE_BY_PREFIX, prefixes[_i], 10);
    ck_assert_int_le(routed.offset[EXPERTS], 10);
    canaries_live(&routed, 10);
    for (int i = 0; i < routed.offset[EXPERTS]; i++) {
        ck_assert_int_ge(routed.pair_row[i], 0);
        ck_assert_int_lt(routed.pair_row[i], 10);
        ck_assert_int_eq(seen[routed.pair_row[i]]++, 0);
    }
}
END_TEST

START_TEST(masked_by_counts)
{
    static const int32_t counts[] = {1, 0, 7, -2, 2};
    static const int32_t rows[] = {0, 4, 5, 8, 9};
    static const int32_t offsets[] = {0, 1, 1, 3, 3, 5};
    struct routed routed;

    run_by_expert(&routed, ROUTE_BY_COUNTS, counts, 10);
    ck_assert_mem_eq(routed.offset, offsets, sizeof offsets);
    ck_assert_mem_eq(routed.pair_row, rows, sizeof rows);
    run_by_expert(&routed, ROUTE_BY_COUNTS, counts, 9);
    ck_assert_int_eq(routed.offset[EXPERTS], 4);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, ids_of_any_value, 0, 6);
    tcase_add_test(tests, a_shard_owns_a_range);
    tcase_add_test(tests, maps_of_any_value);
    tcase_add_loop_test(tests, counts_are_clamped, 0, 4);
    tcase_add_test(tests, nothing_past_the_capacity);
    tcase_add_test(tests, duplicates_are_two_pairs_and_weights_are_optional);
    tcase_add_test(tests, contiguous_by_prefix);
    tcase_add_loop_test(tests, hostile_prefixes, 0, 3);
    tcase_add_test(tests, masked_by_counts);
}

SUITE_MAIN("route", 60, add)
