// plugin/forward.c: every golden layer over one or several ranks, with idle ranks, rounds and both
// paddings.

#include "plugin/forward.h"

#include "host_tests/layer.h"
#include "host_tests/suite.h"
#include "plugin/dispatcher.h"
#include "plugin/runner.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *const layers[] = {"deepseek_v3_a",      "gpt_oss_a",   "llama4_a",
                                     "mixtral_a",          "qwen2_moe_a", "qwen3_moe_a",
                                     "qwen3_moe_norenorm", "qwen3_moe_t1"};
static const int32_t ranks_tried[] = {1, 2, 3, 4, 7};
#define LAYERS      ((int)(sizeof layers / sizeof layers[0]))
#define RANKS_TRIED ((int)(sizeof ranks_tried / sizeof ranks_tried[0]))

#define GROUP_TIMEOUT_MS 60000

// One run of a layer over ranks.
struct run {
    struct layer layer;
    struct mock_group *group;
    const char *dispatcher;
    int32_t ranks;
    int32_t rounds; // > 1: the cap is set so that the fullest rank needs this many
    int32_t padding;
    int32_t idle;   // bit r: rank r has no tokens; the others share all
    int32_t listed; // pass rank_tokens
    int32_t steps;
    int64_t cap; // forward_tokens_max; 0: what the fullest rank has
    int64_t parts[MOXIE_RANKS_MAX], firsts[MOXIE_RANKS_MAX];
    float *y;
};

static void split(struct run *run)
{
    int32_t busy = 0, at = 0;

    for (int32_t rank = 0; rank < run->ranks; rank++)
        busy += (run->idle >> rank & 1) == 0;
    for (int32_t rank = 0; rank < run->ranks; rank++) {
        run->parts[rank] = 0;
        run->firsts[rank] = 0;
        if ((run->idle >> rank & 1) != 0) continue;
        run->parts[rank] = layer_part(run->layer.tokens, busy, at);
        run->firsts[rank] = layer_part_first(run->layer.tokens, busy, at);
        at++;
    }
}

static void configure(const struct run *run, struct layer_rank *rank)
{
    int64_t most = 1;

    for (int32_t i = 0; i < run->ranks; i++)
        most = run->parts[i] > most ? run->parts[i] : most;
    if (run->cap > 0) most = run->cap;
    mock_set_i64(&rank->mock, "forward_tokens_max", most);
    mock_set_str(&rank->mock, "dispatcher", run->dispatcher);
    if (run->rounds > 1) {
        mock_set_i64(&rank->mock, "dispatch_rounds_max", run->rounds);
        mock_set_i64(&rank->mock, "max_dispatch_tokens_per_rank", ceil_div(most, run->rounds));
    }
}

static void begin(struct layer_rank *rank, const moxie_step *step)
{
    const int32_t answer = dispatcher_begin_forward(rank->dispatcher, step, &rank->mock.error);

    ck_assert_msg(answer == MOXIE_OK, "%s", rank->mock.text);
}

static void expect_refused(struct layer_rank *rank, const moxie_batch *batch, const char *text)
{
    ck_assert_int_eq(forward_run(rank->dispatcher, rank->runner, batch, &rank->mock.error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(rank->mock.text, text));
}

// Rounds read ids and tokens_valid anew: a y over them is refused before anything is sent, and the
// step goes on.
static void expect_apart(struct layer_rank *rank, const moxie_step *step, moxie_batch batch)
{
    moxie_step valid = *step;

    valid.tokens_valid = batch.y.data;
    begin(rank, &valid);
    expect_refused(rank, &batch, "batch.y overlaps step.tokens_valid, which later");
    begin(rank, step);
    batch.y.data = batch.ids.data;
    expect_refused(rank, &batch, "batch.y overlaps batch.ids, which later");
}

static void step(const struct run *run, struct layer_rank *rank, int32_t index)
{
    moxie_step step = {.struct_size = sizeof step,
                       .tokens = run->parts[index],
                       .rank_tokens = run->listed ? run->parts : NULL,
                       .padding = run->padding};
    struct layer_batch batch;
    int32_t answer;

    layer_batch_of(&run->layer, run->firsts[index], run->parts[index],
                   run->y + run->firsts[index] * run->layer.hidden, &batch);
    begin(rank, &step);
    if (run->rounds > 1 && step.tokens > 0) expect_apart(rank, &step, batch.batch);
    answer = forward_run(rank->dispatcher, rank->runner, &batch.batch, &rank->mock.error);
    ck_assert_msg(answer == MOXIE_OK, "%s", rank->mock.text);
}

static void run_rank(void *arg, int32_t index)
{
    const struct run *run = arg;
    struct layer_rank *rank = calloc(1, sizeof *rank);

    ck_assert_ptr_nonnull(rank);
    layer_rank_init(rank, &run->layer, run->ranks > 1 ? run->group : NULL, index);
    configure(run, rank);
    layer_rank_open(rank, &run->layer);
    for (int32_t i = 0; i < run->steps; i++)
        step(run, rank, index);
    layer_rank_close(rank);
    free(rank);
}

// Runs the parts over poisoned outputs. The layer and y stay open.
static void run_parts(struct run *run, const char *name)
{
    layer_open(&run->layer, name);
    if (run->cap == 0) split(run);
    run->y = layer_poisoned(&run->layer);
    run->steps = run->steps > 0 ? run->steps : 2;
    run->group = mock_group_create(run->ranks, GROUP_TIMEOUT_MS);
    mock_ranks_run(run->ranks, run_rank, run);
    mock_group_destroy(run->group);
}

static void run_and_compare(struct run *run, const char *name)
{
    char activation[32];
    double error, bound;

    run_parts(run, name);
    golden_text(&run->layer.golden, "activation", activation, sizeof activation);
    bound = run->ranks > 1 || strcmp(activation, "swigluoai") == 0 ? 2e-6 : 1e-6;
    error = golden_error(run->y, &run->layer.want);
    ck_assert_msg(error <= bound, "%s, %d ranks, %s: relative error %g past %g", name, run->ranks,
                  run->dispatcher, error, bound);
    free(run->y);
    layer_close(&run->layer);
}

// The tokens of one rank against the golden rows; the rows behind them are nobody's.
static void compare_part(const struct run *run, const struct layer *whole, int32_t rank)
{
    int64_t first = run->firsts[rank] * whole->hidden;
    int64_t end = first + run->parts[rank] * whole->hidden;

    for (int64_t i = first; i < end; i++)
        assert_many(fabs((double)run->y[i] - golden_value(&whole->want, i)) <= 1e-5,
                    "number %" PRId64 ": %g, not %g", i, (double)run->y[i],
                    golden_value(&whole->want, i));
    for (int64_t i = end; i < first + run->cap * whole->hidden; i++) {
        if (run->y[i] == run->y[i]) ck_abort_msg("rank %d wrote past its tokens", rank);
    }
}

START_TEST(goldens_over_ranks)
{
    const char *name = layers[_i / RANKS_TRIED];
    int32_t ranks = ranks_tried[_i % RANKS_TRIED];
    struct run alltoall = {.dispatcher = "alltoall", .ranks = ranks, .listed = 1};
    struct run allgather = {.dispatcher = "allgather", .ranks = ranks, .listed = 1};

    if (ranks == 1) alltoall.dispatcher = "local";
    run_and_compare(&alltoall, name);
    if (ranks > 1) run_and_compare(&allgather, name);
}
END_TEST

// Every subset of idle ranks for 2 to 4 ranks, but all of them at once: there is nothing to
// compare.
START_TEST(idle_ranks)
{
    static const char *const dispatchers[] = {"alltoall", "allgather"};
    int32_t ranks = 2 + _i % 3;

    for (int32_t idle = 1; idle < (1 << ranks) - 1; idle++) {
        struct run run = {
            .dispatcher = dispatchers[_i / 3], .ranks = ranks, .idle = idle, .listed = 1};

        run_and_compare(&run, "qwen3_moe_norenorm");
    }
}
END_TEST

START_TEST(rounds_and_padding)
{
    struct run listed = {
        .dispatcher = "alltoall", .ranks = 3, .rounds = 4, .listed = 1, .steps = 3};
    struct run bounded = {.dispatcher = "alltoall", .ranks = 3, .rounds = 3, .steps = 2};
    struct run longest = {.dispatcher = "allgather",
                          .ranks = 4,
                          .padding = MOXIE_PADDING_MAX_LEN,
                          .idle = 4,
                          .listed = 1};
    struct run sum = {.dispatcher = "allgather",
                      .ranks = 4,
                      .padding = MOXIE_PADDING_SUM_LEN,
                      .idle = 1,
                      .listed = 1};

    run_and_compare(&listed, "qwen3_moe_a");
    run_and_compare(&bounded, "deepseek_v3_a");
    run_and_compare(&longest, "mixtral_a");
    run_and_compare(&sum, "qwen2_moe_a");
}
END_TEST

// Every rank has 0, 1, cap - 1 or cap of the tokens that fit, all of them alike and in turn.
START_TEST(tokens_at_the_edges)
{
    static const char *const dispatchers[] = {"alltoall", "allgather"};
    const int64_t cap = 5, counts[] = {0, 1, cap - 1, cap};
    struct run run = {.dispatcher = dispatchers[_i % 2], .ranks = 3, .listed = 1, .cap = cap};
    struct layer whole;

    layer_open(&whole, "qwen3_moe_a");
    for (int32_t mix = 0; mix < 4 * 4 * 4; mix++) {
        for (int32_t rank = 0; rank < 3; rank++) {
            run.parts[rank] = counts[mix >> 2 * rank & 3];
            run.firsts[rank] = cap * rank;
        }
        run_parts(&run, "qwen3_moe_a");
        for (int32_t rank = 0; rank < 3; rank++)
            compare_part(&run, &whole, rank);
        free(run.y);
        layer_close(&run.layer);
    }
    layer_close(&whole);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, tokens_at_the_edges, 0, 2);
    tcase_add_loop_test(tests, goldens_over_ranks, 0, LAYERS * RANKS_TRIED);
    tcase_add_loop_test(tests, idle_ranks, 0, 6);
    tcase_add_test(tests, rounds_and_padding);
}

SUITE_MAIN("forward", 120, add)
