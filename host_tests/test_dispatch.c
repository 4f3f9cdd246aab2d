// kernels/cpu/dispatch.c: one row per token and destination, in token order, with its ids and
// weights; hostile ids, full slabs, padding, every wire format; canaries behind every slab.

#include "kernels/dispatch.h"

#include "kernels/cpu/numbers.h"
#include "kernels/cpu/rows.h"
#include "kernels/quantise.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <string.h>

#define RANKS  4
#define RANK   2
#define TOKENS 23
#define CAP    24
#define TOP_K  3
#define HIDDEN 1072 // three pieces, the last one short
#define PITCH  (HIDDEN * 4)
#define SCALES 128

static const int64_t expert_first[RANKS + 1] = {0, 3, 5, 7, 9}; // uneven

struct slab {
    unsigned char rows[CAP * PITCH + 1];
    unsigned char scales[CAP * SCALES + 1];
    int32_t ids[CAP * TOP_K + 1];
    float weights[CAP * TOP_K + 1];
    struct round_count count;
};

struct world {
    float x[TOKENS * HIDDEN];
    int64_t ids[TOKENS * TOP_K];
    int32_t ids32[TOKENS * TOP_K];
    float weights[TOKENS * TOP_K];
    int32_t send_slot[TOKENS * RANKS + 1];
    struct slab slabs[RANKS];
    struct push_slab to[RANKS];
};

static struct world world;

static struct dispatch_args world_init(void)
{
    static const int64_t odd[] = {-1, 9, INT64_MAX, INT64_MIN, 1LL << 32};
    uint32_t seed = 31;

    memset(&world, 0xff, sizeof world);
    for (int i = 0; i < TOKENS * HIDDEN; i++)
        world.x[i] = random_unit(&seed);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        world.ids[i] = i % 5 == 3 ? odd[random_next(&seed) % 5] : random_next(&seed) % 9;
        world.ids32[i] = (int32_t)world.ids[i];
        world.weights[i] = random_unit(&seed);
    }
    for (int r = 0; r < RANKS; r++) {
        struct slab *slab = &world.slabs[r];

        world.to[r] =
            (struct push_slab){slab->rows, slab->scales, slab->ids, slab->weights, &slab->count};
    }
    world.to[RANK] = (struct push_slab){0};
    return (struct dispatch_args){.x = world.x,
                                  .ids = world.ids,
                                  .weights = world.weights,
                                  .to = world.to,
                                  .expert_first = expert_first,
                                  .send_slot = world.send_slot,
                                  .x_stride_bytes = HIDDEN * 4,
                                  .id_stride_bytes = TOP_K * 8,
                                  .weight_stride_bytes = TOP_K * 4,
                                  .row_stride_bytes = PITCH,
                                  .scale_stride_bytes = SCALES,
                                  .x_format = FORMAT_F32,
                                  .wire_format = FORMAT_F32,
                                  .id_bytes = 8,
                                  .weight_format = FORMAT_F32,
                                  .tokens = TOKENS,
                                  .hidden = HIDDEN,
                                  .top_k = TOP_K,
                                  .rows_cap = CAP,
                                  .ranks = RANKS,
                                  .rank = RANK,
                                  .round = 3};
}

static void run(const struct dispatch_args *args, int32_t workers)
{
    struct cpu_stream stream;

    stream_init(&stream, workers, cpu_isa_best());
    ck_assert_int_eq(dispatch_cpu(args, &stream), 0);
    stream_fini(&stream);
    ck_assert_int_eq(world.send_slot[TOKENS * RANKS], -1);
    for (int r = 0; r < RANKS; r++) {
        ck_assert_int_eq(world.slabs[r].rows[CAP * PITCH], 0xff);
        ck_assert_int_eq(world.slabs[r].scales[CAP * SCALES], 0xff);
        ck_assert_int_eq(world.slabs[r].ids[CAP * TOP_K], -1);
    }
}

static int64_t physical(const struct dispatch_args *args, int64_t id)
{
    if (args->expert_map != NULL) id = id >= 0 && id < args->map_count ? args->expert_map[id] : -1;
    return id >= 0 && id < expert_first[RANKS] ? id : -1;
}

static int goes(const struct dispatch_args *args, int token, int rank)
{
    for (int t = 0; t < TOP_K && !args->everywhere; t++) {
        int64_t id = physical(args, world.ids[token * TOP_K + t]);

        if (id >= expert_first[rank] && id < expert_first[rank + 1]) return 1;
    }
    return args->everywhere;
}

// The row as the wire has it, made by quantise alone.
static void expected_row(const struct dispatch_args *args, int token, unsigned char *row,
                         unsigned char *scale)
{
    struct cpu_stream stream = {.workers = 1};
    struct quantise_args quantise = {.x = world.x + token * HIDDEN,
                                     .rows = row,
                                     .scales = scale,
                                     .x_format = FORMAT_F32,
                                     .format = args->wire_format,
                                     .rows_count = 1,
                                     .columns = HIDDEN};

    ck_assert_int_eq(quantise_cpu(&quantise, &stream), 0);
}

// `valid` tokens have experts. Checks slots, rows, scales, ids, weights and counts.
static void check(const struct dispatch_args *args, int valid)
{
    static unsigned char row[PITCH], scale[SCALES];

    for (int r = 0; r < RANKS; r++) {
        const struct slab *slab = &world.slabs[r];
        int32_t sent = 0;

        for (int token = 0; token < TOKENS; token++) {
            int32_t slot = world.send_slot[token * RANKS + r];
            int wanted = r != RANK && world.to[r].rows != NULL &&
                         (args->everywhere || (token < valid && goes(args, token, r)));

            ck_assert_int_eq(slot, wanted ? sent : -1);
            if (!wanted) continue;
            sent++;
            expected_row(args, token, row, scale);
            ck_assert_mem_eq(slab->rows + slot * PITCH, row,
                             (size_t)row_bytes(args->wire_format, HIDDEN));
            ck_assert_mem_eq(slab->scales + slot * SCALES, scale,
                             (size_t)row_scale_bytes(args->wire_format, HIDDEN));
            for (int t = 0; t < TOP_K; t++) {
                int64_t id = physical(args, world.ids[token * TOP_K + t]);

                ck_assert_int_eq(slab->ids[slot * TOP_K + t], token < valid ? id : -1);
                ck_assert_float_eq(slab->weights[slot * TOP_K + t],
                                   world.weights[token * TOP_K + t]);
            }
        }
        if (world.to[r].rows != NULL) ck_assert_int_eq(slab->count.round, args->round);
        if (world.to[r].rows != NULL && !args->pad_rows) ck_assert_int_eq(slab->count.rows, sent);
        for (int i = sent * PITCH; i < CAP * PITCH; i++)
            assert_many(slab->rows[i] == 0xff, "rank %d: %d at byte %d", r, slab->rows[i], i);
    }
}

START_TEST(every_wire_format)
{
    static const int32_t formats[] = {FORMAT_F32, FORMAT_BF16, FORMAT_F16, FORMAT_FP8_BLOCK128,
                                      FORMAT_NVFP4};
    struct dispatch_args args = world_init();

    args.wire_format = formats[_i];
    run(&args, 1 + _i % 3);
    check(&args, TOKENS);
}
END_TEST

START_TEST(narrow_ids_through_a_map)
{
    static const int32_t map[] = {8, 0, INT32_MAX, -5, 3, 4, 9};
    struct dispatch_args args = world_init();

    for (int i = 0; i < TOKENS * TOP_K; i++)
        world.ids[i] = world.ids32[i];
    args.ids = world.ids32;
    args.id_bytes = 4;
    args.id_stride_bytes = TOP_K * 4;
    args.expert_map = map;
    args.map_count = sizeof map / sizeof map[0];
    run(&args, 2);
    check(&args, TOKENS);
}
END_TEST

START_TEST(invalid_tokens_go_nowhere)
{
    struct dispatch_args args = world_init();
    int32_t valid = 9;

    args.tokens_valid = &valid;
    run(&args, 2);
    check(&args, 9);
    args = world_init();
    args.tokens_valid = &valid;
    args.everywhere = 1;
    run(&args, 2);
    check(&args, 9);
    valid = INT32_MIN;
    args = world_init();
    args.tokens_valid = &valid;
    run(&args, 2);
    check(&args, 0);
}
END_TEST

START_TEST(dead_ranks_get_nothing)
{
    struct dispatch_args args = world_init();

    world.to[1] = (struct push_slab){0};
    run(&args, 2);
    check(&args, TOKENS);
    ck_assert_int_eq(world.slabs[1].count.rows, -1);
}
END_TEST

// The rows of all ranks are added to what is there.
START_TEST(rows_sent_adds_up)
{
    struct dispatch_args args = world_init();
    uint64_t rows_sent = 1000, rows_told = 0;

    args.rows_sent = &rows_sent;
    args.rows_told = &rows_told;
    run(&args, 2);
    check(&args, TOKENS);
    ck_assert_uint_eq(rows_sent, 1000 + (uint64_t)world.slabs[0].count.rows +
                                     (uint64_t)world.slabs[1].count.rows +
                                     (uint64_t)world.slabs[3].count.rows);
    ck_assert_uint_gt(rows_sent, 1000);
    ck_assert_uint_eq(rows_told, rows_sent);
    args = world_init();
    rows_sent = 0;
    args.rows_sent = &rows_sent;
    args.everywhere = 1;
    args.pad_rows = CAP;
    world.to[1] = (struct push_slab){0};
    run(&args, 2);
    ck_assert_uint_eq(rows_sent, 2 * CAP);
}
END_TEST

START_TEST(a_failed_group_sends_nothing)
{
    struct dispatch_args args = world_init();
    struct slab *own = &world.slabs[RANK];
    uint32_t failed = _i == 2 ? 0 : 3;
    uint64_t rows_sent = 5;

    world.to[RANK] = (struct push_slab){.ids = own->ids, .weights = own->weights};
    memset(own->ids, 0, TOKENS * TOP_K * sizeof own->ids[0]);
    args.failed = &failed;
    args.rows_sent = &rows_sent;
    args.everywhere = _i == 1;
    args.pad_rows = CAP;
    run(&args, 2);
    for (int i = 0; i < TOKENS * TOP_K; i++) {
        int32_t wanted = failed ? -1 : (int32_t)physical(&args, world.ids[i]);

        ck_assert_int_eq(own->ids[i], wanted);
        ck_assert_float_eq(own->weights[i], world.weights[i]);
    }
    if (!failed) {
        check(&args, TOKENS);
        return;
    }
    ck_assert_uint_eq(rows_sent, 5);
    for (int i = 0; i < TOKENS * RANKS; i++)
        ck_assert_int_eq(world.send_slot[i], -1);
    for (int r = 0; r < RANKS; r++) {
        const unsigned char *bytes = (const unsigned char *)&world.slabs[r];

        for (size_t i = 0; i < sizeof world.slabs[r] && r != RANK; i++)
            assert_many(bytes[i] == 0xff, "rank %d: %d at byte %zu", r, bytes[i], i);
    }
}
END_TEST

START_TEST(padding_is_reported_without_experts)
{
    struct dispatch_args args = world_init();

    args.everywhere = 1;
    args.pad_rows = CAP + 100; // clamped
    run(&args, 2);
    check(&args, TOKENS);
    for (int t = 0; t < TOP_K; t++) {
        ck_assert_int_eq(world.slabs[0].ids[TOKENS * TOP_K + t], -1);
        ck_assert_float_eq(world.slabs[0].weights[TOKENS * TOP_K + t], 0.0f);
    }
    ck_assert_int_eq(world.slabs[0].count.rows, CAP);
    args = world_init();
    args.everywhere = 1;
    args.pad_rows = 3;
    args.tokens = 0;
    run(&args, 2);
    ck_assert_int_eq(world.slabs[3].count.rows, 3);
}
END_TEST

START_TEST(a_full_slab_takes_no_more)
{
    struct dispatch_args args = world_init();

    args.rows_cap = 4;
    args.everywhere = 1;
    run(&args, 2);
    ck_assert_int_eq(world.slabs[0].count.rows, 4);
    ck_assert_int_eq(world.send_slot[4 * RANKS], -1);
    for (int i = 4 * PITCH; i < CAP * PITCH; i++)
        assert_many(world.slabs[0].rows[i] == 0xff, "%d at byte %d", world.slabs[0].rows[i], i);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, every_wire_format, 0, 5);
    tcase_add_test(tests, narrow_ids_through_a_map);
    tcase_add_test(tests, invalid_tokens_go_nowhere);
    tcase_add_test(tests, dead_ranks_get_nothing);
    tcase_add_test(tests, rows_sent_adds_up);
    tcase_add_loop_test(tests, a_failed_group_sends_nothing, 0, 3);
    tcase_add_test(tests, padding_is_reported_without_experts);
    tcase_add_test(tests, a_full_slab_takes_no_more);
}

SUITE_MAIN("dispatch", 60, add)
