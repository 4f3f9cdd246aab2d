// kernels/cpu/expand.c: rows by expert, contiguous and masked, quantised and not; what does not fit
// is left out.

#include "kernels/expand.h"

#include "kernels/cpu/rows.h"
#include "kernels/route.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <string.h>

#define EXPERTS 3
#define SLABS   2
#define CAP     20
#define TOP_K   2
#define PAIRS   (SLABS * CAP * TOP_K)
#define HIDDEN  48
#define PITCH   (HIDDEN * 4)
#define SCALES  8
#define MASKED  7

struct expanded {
    unsigned char in_rows[SLABS][CAP * PITCH], in_scales[SLABS][CAP * SCALES];
    int32_t ids[SLABS][CAP * TOP_K];
    float in_weights[SLABS][CAP * TOP_K];
    struct row_slab slabs[SLABS];
    int32_t expert_offset[EXPERTS + 1], pair_row[PAIRS], row_pair[PAIRS];
    float pair_weight[PAIRS];
    unsigned char rows[PAIRS * PITCH], scales[PAIRS * SCALES];
    float weights[PAIRS];
    int32_t counts[EXPERTS + 2], row_index[PAIRS + 1];
};

static struct expanded world;

static void world_init(int32_t format)
{
    struct cpu_stream stream = {.workers = 1};
    struct route_args route = {.slabs = world.slabs,
                               .expert_offset = world.expert_offset,
                               .pair_row = world.pair_row,
                               .pair_weight = world.pair_weight,
                               .row_pair = world.row_pair,
                               .pairs_max = PAIRS,
                               .experts = EXPERTS,
                               .slabs_count = SLABS,
                               .rows_cap = CAP,
                               .top_k = TOP_K};
    uint32_t seed = 41;

    memset(&world, 0xff, sizeof world);
    for (int s = 0; s < SLABS; s++) {
        for (size_t i = 0; i < sizeof world.in_rows[s]; i++)
            world.in_rows[s][i] = (unsigned char)random_next(&seed);
        for (size_t i = 0; i < sizeof world.in_scales[s]; i++)
            world.in_scales[s][i] = (unsigned char)random_next(&seed);
        for (int i = 0; i < CAP * TOP_K; i++) {
            world.ids[s][i] = (int32_t)(random_next(&seed) % (EXPERTS + 1)) - 1;
            world.in_weights[s][i] = random_unit(&seed);
        }
        world.slabs[s] =
            (struct row_slab){.rows = world.in_rows[s],
                              .scales = format > FORMAT_F16 ? world.in_scales[s] : NULL,
                              .ids = world.ids[s],
                              .weights = world.in_weights[s],
                              .row_stride_bytes = PITCH,
                              .scale_stride_bytes = SCALES,
                              .id_stride_bytes = TOP_K * 4,
                              .weight_stride_bytes = TOP_K * 4,
                              .cap = CAP,
                              .format = format,
                              .id_bytes = 4,
                              .weight_format = FORMAT_F32};
    }
    ck_assert_int_eq(route_cpu(&route, &stream), 0);
    memset(world.rows, 0xff, sizeof world.rows);
}

static void run(int32_t rows_per_expert, int scaled)
{
    struct expand_args args = {.slabs = world.slabs,
                               .expert_offset = world.expert_offset,
                               .pair_row = world.pair_row,
                               .pair_weight = world.pair_weight,
                               .row_pair = world.row_pair,
                               .rows = world.rows,
                               .scales = scaled ? world.scales : NULL,
                               .weights = world.weights,
                               .counts = world.counts,
                               .row_index = world.row_index,
                               .row_stride_bytes = PITCH,
                               .scale_stride_bytes = SCALES,
                               .experts = EXPERTS,
                               .slabs_count = SLABS,
                               .rows_cap = CAP,
                               .rows_per_expert = rows_per_expert,
                               .masked = rows_per_expert > 0,
                               .hidden = HIDDEN,
                               .top_k = TOP_K};
    struct cpu_stream stream;

    stream_init(&stream, 3, CPU_SCALAR);
    ck_assert_int_eq(expand_cpu(&args, &stream), 0);
    stream_fini(&stream);
    ck_assert_int_eq(world.row_index[PAIRS], -1);
}

// The row of every position is a copy of its slab's; positions of one expert are numbered in order.
static void check(int32_t rows_per_expert, int32_t format)
{
    int32_t next[EXPERTS] = {0};

    for (int i = 0; i < PAIRS; i++) {
        int s = i / TOP_K / CAP, row = i / TOP_K % CAP;
        int32_t expert = world.ids[s][i % (CAP * TOP_K)];
        int32_t to, at;

        if (expert < 0) {
            ck_assert_int_eq(world.row_index[i], -1);
            continue;
        }
        at = next[expert]++;
        to =
            rows_per_expert == 0 ? world.expert_offset[expert] + at : expert * rows_per_expert + at;
        if (rows_per_expert > 0 && at >= rows_per_expert) to = -1;
        ck_assert_int_eq(world.row_index[i], to);
        if (to < 0) continue;
        ck_assert_mem_eq(world.rows + to * PITCH, world.in_rows[s] + row * PITCH,
                         (size_t)row_bytes(format, HIDDEN));
        if (format > FORMAT_F16)
            ck_assert_mem_eq(world.scales + to * SCALES, world.in_scales[s] + row * SCALES,
                             (size_t)row_scale_bytes(format, HIDDEN));
        ck_assert_float_eq(world.weights[to], world.in_weights[s][i % (CAP * TOP_K)]);
    }
    for (int e = 0; e < EXPERTS; e++) {
        if (rows_per_expert == 0)
            ck_assert_int_eq(world.counts[e + 1] - world.counts[e], next[e]);
        else
            ck_assert_int_eq(world.counts[e],
                             next[e] < rows_per_expert ? next[e] : rows_per_expert);
    }
    ck_assert_int_eq(world.counts[rows_per_expert == 0 ? EXPERTS + 1 : EXPERTS], -1);
}

START_TEST(contiguous)
{
    static const int32_t formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_FP8_BLOCK128, FORMAT_NVFP4};

    world_init(formats[_i]);
    run(0, formats[_i] > FORMAT_F16);
    check(0, formats[_i]);
    ck_assert_int_eq(world.counts[0], 0);
}
END_TEST

START_TEST(masked)
{
    world_init(FORMAT_FP8_BLOCK128);
    run(PAIRS / EXPERTS, 1);
    check(PAIRS / EXPERTS, FORMAT_FP8_BLOCK128);
    world_init(FORMAT_BF16);
    run(MASKED, 0);
    check(MASKED, FORMAT_BF16);
    for (size_t i = EXPERTS * MASKED * PITCH; i < sizeof world.rows; i++)
        ck_assert_int_eq(world.rows[i], 0xff);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, contiguous, 0, 4);
    tcase_add_test(tests, masked);
}

SUITE_MAIN("expand", 60, add)
