// kernels/cpu/combine.c: combine in slot order, sum in rank order, one rounding, zeros for rows
// without a pair.

#include "kernels/combine.h"

#include "kernels/cpu/numbers.h"

#include "host_tests/stream.h"
#include "host_tests/suite.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#define HIDDEN 531
#define SLABS  2
#define CAP    21
#define TOP_K  3
#define PAIRS  40
#define PITCH  (HIDDEN * 4 + 8)

struct combined {
    float pair_out[PAIRS * HIDDEN];
    float pair_weight[PAIRS];
    int32_t row_pair[SLABS * CAP * TOP_K];
    int32_t counts[SLABS];
    unsigned char out[SLABS][CAP * PITCH];
    struct out_slab slabs[SLABS];
};

static void combined_init(struct combined *combined, int32_t format)
{
    uint32_t seed = 11;

    for (int i = 0; i < PAIRS * HIDDEN; i++)
        combined->pair_out[i] = random_unit(&seed);
    for (int i = 0; i < PAIRS; i++)
        combined->pair_weight[i] = random_unit(&seed);
    for (int i = 0; i < SLABS * CAP * TOP_K; i++)
        combined->row_pair[i] = (int32_t)(random_next(&seed) % PAIRS);
    combined->row_pair[1] = -1;
    combined->row_pair[4] = PAIRS;     // outside
    combined->row_pair[7] = INT32_MIN; // outside
    for (int i = 9; i < 12; i++)
        combined->row_pair[i] = -1; // row 3: no pair at all
    combined->counts[0] = CAP;
    combined->counts[1] = 5;
    for (int s = 0; s < SLABS; s++) {
        memset(combined->out[s], 0xff, sizeof combined->out[s]);
        combined->slabs[s] = (struct out_slab){.rows = combined->out[s],
                                               .count = &combined->counts[s],
                                               .row_stride_bytes = PITCH,
                                               .cap = CAP,
                                               .format = format};
    }
}

static void run_combine(struct combined *combined, const float *pair_weight, int32_t workers)
{
    struct combine_args args = {.pair_out = combined->pair_out,
                                .pair_stride_bytes = HIDDEN * 4,
                                .pairs = PAIRS,
                                .row_pair = combined->row_pair,
                                .pair_weight = pair_weight,
                                .slabs = combined->slabs,
                                .pair_format = FORMAT_F32,
                                .slabs_count = SLABS,
                                .rows_cap = CAP,
                                .hidden = HIDDEN,
                                .top_k = TOP_K,
                                .scale = 2.5f};
    struct cpu_stream stream;

    stream_init(&stream, workers, cpu_isa_best());
    ck_assert_int_eq(combine_cpu(&args, &stream), 0);
    stream_fini(&stream);
}

// The same sum, one rounding to f32 after each step and one to `format` at the end.
static float expected(const struct combined *combined, int flat, int column, int weighted,
                      int32_t format)
{
    unsigned char stored[4];
    float sum = 0.0f;

    for (int t = 0; t < TOP_K; t++) {
        int32_t pair = combined->row_pair[flat * TOP_K + t];
        float weight;

        if (pair < 0 || pair >= PAIRS) continue;
        weight = weighted ? combined->pair_weight[pair] : 1.0f;
        sum += weight * combined->pair_out[pair * HIDDEN + column];
    }
    sum *= 2.5f;
    numbers_encode(format, &sum, 1, stored);
    return number_load(format, stored, 0);
}

START_TEST(rows_are_weighted_sums)
{
    static struct combined combined;
    int32_t format = FORMAT_F32 + _i / 2;
    int weighted = _i % 2;

    combined_init(&combined, format);
    run_combine(&combined, weighted ? combined.pair_weight : NULL, 1 + _i);
    for (int flat = 0; flat < SLABS * CAP; flat++) {
        const unsigned char *row = combined.out[flat / CAP] + flat % CAP * PITCH;

        for (int i = 0; i < HIDDEN && flat % CAP < combined.counts[flat / CAP]; i++)
            assert_many(
                number_load(format, row, i) == expected(&combined, flat, i, weighted, format),
                "row %d, number %d: %g, not %g", flat, i, (double)number_load(format, row, i),
                (double)expected(&combined, flat, i, weighted, format));
        // Neither past the row nor past the count.
        for (int64_t i = HIDDEN * number_bytes(format); i < PITCH; i++)
            assert_many(row[i] == 0xff, "row %d, byte %" PRId64 ": %d", flat, i, row[i]);
        for (int i = 0; i < PITCH && flat % CAP >= combined.counts[flat / CAP]; i++)
            assert_many(row[i] == 0xff, "row %d, byte %d: %d", flat, i, row[i]);
    }
    ck_assert_float_eq(number_load(format, combined.out[0] + 3 * PITCH, HIDDEN - 1), 0.0f);
}
END_TEST

START_TEST(counts_are_clamped_and_slabs_optional)
{
    static struct combined combined;

    combined_init(&combined, FORMAT_F32);
    combined.counts[0] = -4;
    combined.counts[1] = INT32_MAX;
    run_combine(&combined, NULL, 2);
    for (size_t i = 0; i < sizeof combined.out[0]; i++)
        assert_many(combined.out[0][i] == 0xff, "byte %zu: %d", i, combined.out[0][i]);
    ck_assert(!isnan(number_load(FORMAT_F32, combined.out[1] + (CAP - 1) * PITCH, 0)));
    combined_init(&combined, FORMAT_F32);
    combined.slabs[0].rows = NULL;
    combined.slabs[1].count = NULL;
    run_combine(&combined, NULL, 2);
    ck_assert(!isnan(number_load(FORMAT_F32, combined.out[1] + (CAP - 1) * PITCH, 0)));
}
END_TEST

#define RANKS  4
#define TOKENS 37

// Three ranks return rows, one of them is dead; the own rows are in y.
// The layouts by expert: a pair is a row of its own, and rows without one stay as they are.
START_TEST(pairs_are_rows)
{
    struct combined combined;
    int32_t pair_row[] = {4, 0, CAP, -1, 2}, pairs_count = 5;
    struct combine_args args;
    struct cpu_stream stream;

    combined_init(&combined, FORMAT_F32);
    args = (struct combine_args){.pair_out = combined.pair_out,
                                 .pair_stride_bytes = HIDDEN * 4,
                                 .pairs = 5,
                                 .pair_row = pair_row,
                                 .pairs_count = &pairs_count,
                                 .pair_weight = combined.pair_weight,
                                 .slabs = combined.slabs,
                                 .pair_format = FORMAT_F32,
                                 .slabs_count = 1,
                                 .rows_cap = CAP,
                                 .hidden = HIDDEN,
                                 .top_k = 1,
                                 .scale = 2.0f};
    stream_init(&stream, 2, cpu_isa_best());
    ck_assert_int_eq(combine_cpu(&args, &stream), 0);
    stream_fini(&stream);
    for (int row = 0; row < CAP; row++) {
        const float *out = (const float *)(const void *)(combined.out[0] + row * PITCH);
        int pair = row == 4 ? 0 : row == 0 ? 1 : row == 2 ? 4 : -1;

        if (pair < 0)
            ck_assert(out[0] != out[0]);
        else
            ck_assert_float_eq(out[HIDDEN - 1],
                               2.0f * (combined.pair_weight[pair] *
                                       combined.pair_out[pair * HIDDEN + HIDDEN - 1]));
    }
}
END_TEST

START_TEST(sum_in_rank_order)
{
    static unsigned char y[TOKENS * PITCH], parts[RANKS][CAP * PITCH];
    static float before[TOKENS][HIDDEN];
    int32_t send_slot[TOKENS * RANKS];
    const void *rows[RANKS] = {parts[0], NULL, parts[2], parts[3]};
    int32_t format = FORMAT_F32 + _i;
    const uint64_t now = 7; // decides where it is given
    struct sum_args args = {.y = y,
                            .y_stride_bytes = PITCH,
                            .parts = rows,
                            .part_stride_bytes = PITCH,
                            .send_slot = send_slot,
                            .active_now = _i == 0 ? NULL : &now,
                            .active = _i == 0 ? now : ~now,
                            .format = format,
                            .tokens = TOKENS,
                            .hidden = HIDDEN,
                            .ranks = RANKS,
                            .rank = 1,
                            .rows_cap = CAP};
    struct cpu_stream stream;
    uint32_t seed = 77;

    memset(y, 0xff, sizeof y);
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        float value = random_unit(&seed);

        numbers_encode(format, &value, 1,
                       y + i / HIDDEN * PITCH + i % HIDDEN * number_bytes(format));
        before[i / HIDDEN][i % HIDDEN] = number_load(format, y + i / HIDDEN * PITCH, i % HIDDEN);
    }
    for (int i = 0; i < RANKS * CAP * HIDDEN; i++) {
        float value = random_unit(&seed) * 1e3f;

        numbers_encode(format, &value, 1,
                       parts[i / HIDDEN / CAP] + i / HIDDEN % CAP * PITCH +
                           i % HIDDEN * number_bytes(format));
    }
    for (int i = 0; i < TOKENS * RANKS; i++)
        send_slot[i] = (int32_t)(random_next(&seed) % (CAP + 4)) - 2;
    stream_init(&stream, 3, CPU_SCALAR);
    ck_assert_int_eq(sum_cpu(&args, &stream), 0);
    stream_fini(&stream);
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++) {
            int32_t first = send_slot[t * RANKS], third = send_slot[t * RANKS + 2];
            unsigned char stored[4];
            float sum = 0.0f;

            if (first >= 0 && first < CAP) sum += number_load(format, parts[0] + first * PITCH, i);
            sum += before[t][i];
            if (third >= 0 && third < CAP) sum += number_load(format, parts[2] + third * PITCH, i);
            numbers_encode(format, &sum, 1, stored);
            assert_many(number_load(format, y + t * PITCH, i) == number_load(format, stored, 0),
                        "row %d, number %d: %g, not %g", t, i,
                        (double)number_load(format, y + t * PITCH, i),
                        (double)number_load(format, stored, 0));
        }
        ck_assert_int_eq(y[t * PITCH + HIDDEN * number_bytes(format)], 0xff);
    }
}
END_TEST

// Bytes of a y that was all NaN: zeros when the group failed, the own row otherwise; so are the
// rows of earlier rounds.
START_TEST(a_failed_group_sums_to_zero)
{
    unsigned char y[2 * TOKENS * PITCH];
    int32_t send_slot[TOKENS * RANKS];
    const void *parts[RANKS] = {NULL};
    uint32_t failed = _i == 0;
    struct sum_args args = {.y = y + TOKENS * PITCH,
                            .y_earlier = y,
                            .y_stride_bytes = PITCH,
                            .parts = parts,
                            .part_stride_bytes = PITCH,
                            .send_slot = send_slot,
                            .failed = &failed,
                            .active = 15,
                            .format = FORMAT_F32,
                            .tokens = TOKENS,
                            .hidden = HIDDEN,
                            .ranks = RANKS,
                            .rank = 1,
                            .rows_cap = CAP,
                            .tokens_earlier = TOKENS};
    struct cpu_stream stream;

    memset(y, 0xff, sizeof y);
    memset(send_slot, 0, sizeof send_slot);
    stream_init(&stream, 3, CPU_SCALAR);
    ck_assert_int_eq(sum_cpu(&args, &stream), 0);
    stream_fini(&stream);
    for (int t = 0; t < 2 * TOKENS; t++)
        for (int i = 0; i < PITCH; i++)
            assert_many(y[t * PITCH + i] == (failed && i < HIDDEN * 4 ? 0 : 0xff),
                        "row %d, byte %d: %d", t, i, y[t * PITCH + i]);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, rows_are_weighted_sums, 0, 6);
    tcase_add_test(tests, counts_are_clamped_and_slabs_optional);
    tcase_add_test(tests, pairs_are_rows);
    tcase_add_loop_test(tests, sum_in_rank_order, 0, 3);
    tcase_add_loop_test(tests, a_failed_group_sums_to_zero, 0, 2);
}

SUITE_MAIN("combine", 60, add)
