// plugin/dispatcher.c: the order of calls, capacities, halves, forwards in flight, ids without an
// expert, and ranks that go silent.

#include "plugin/dispatcher.h"

#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/runner.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

// ---- order -------------------------------------------------------------------------------------

static void order_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;
    moxie_batch other = *batch;

    other.y.data = (unsigned char *)member->y + 64;
    crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_E_INVALID,
                "next is begin_forward");
    crew_begin(member);
    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error),
                MOXIE_E_INVALID, "next is dispatch");
    crew_expect(member, dispatcher_combine_recv(dispatcher, batch, error), MOXIE_E_INVALID, NULL);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_E_INVALID,
                "next is dispatch_recv");
    crew_expect(member, dispatcher_begin_forward(dispatcher, &member->step, error), MOXIE_E_INVALID,
                "inside a layer");
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error), MOXIE_OK,
                NULL);
    crew_expect(member, dispatcher_combine_recv(dispatcher, batch, error), MOXIE_E_INVALID,
                "next is combine or combine_send");
    crew_expect(member, dispatcher_combine_send(dispatcher, &other, error), MOXIE_E_INVALID,
                "not the y of this layer");
    crew_expect(member, runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(dispatcher, batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(dispatcher, batch, error), MOXIE_E_INVALID,
                "next is combine_recv");
    crew_expect(member, dispatcher_combine_recv(dispatcher, batch, error), MOXIE_OK, NULL);
    crew_forward(member);
}

START_TEST(calls_have_an_order)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 1 + 2 * _i,
                        .dispatcher = "alltoall",
                        .scenario = order_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// y is wide. A half with another stride would sum rows that nobody wrote; one with another x would
// compute a rank's own rows of that.
static void one_batch_scenario(struct crew_member *member)
{
    const int64_t hidden = member->crew->layer.hidden, tokens = member->tokens;
    int64_t wide[] = {2 * hidden, 1}, narrow[] = {hidden, 1};
    float *room = calloc((size_t)(2 * tokens * hidden), sizeof *room);
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;
    moxie_batch other;

    ck_assert_ptr_nonnull(room);
    ck_assert_int_gt(tokens, 1);
    batch->y.data = room;
    batch->y.strides = wide;
    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_OK, NULL);
    other = *batch;
    other.x.byte_offset += 2;
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, &other, &in, &out, error),
                MOXIE_E_INVALID, "not the x of this layer");
    other = *batch;
    other.x.strides = wide;
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, &other, &in, &out, error),
                MOXIE_E_INVALID, "not the x of this layer");
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error), MOXIE_OK,
                NULL);
    crew_expect(member, runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(dispatcher, &other, error), MOXIE_OK, NULL);
    other.y.strides = narrow;
    crew_expect(member, dispatcher_combine_recv(dispatcher, &other, error), MOXIE_E_INVALID,
                "not the y of this layer");
    other.y.strides = wide;
    crew_expect(member, dispatcher_combine_recv(dispatcher, &other, error), MOXIE_OK, NULL);
    for (int64_t token = 0; token < tokens; token++)
        memcpy(member->y + token * hidden, room + token * 2 * hidden,
               (size_t)hidden * sizeof *room);
    free(room);
}

START_TEST(halves_are_of_one_batch)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 1 + _i,
                        .dispatcher = "alltoall",
                        .scenario = one_batch_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- capacity ----------------------------------------------------------------------------------

static void capacity_keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank", member->crew->parts[0] - 1);
    mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 2);
}

static void capacity_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    int64_t cap = member->crew->parts[0], counts[MOXIE_RANKS_MAX];
    moxie_stats stats;

    member->step.tokens = cap + 1;
    crew_expect(member, dispatcher_begin_forward(dispatcher, &member->step, error),
                MOXIE_E_CAPACITY, "forward_tokens_max");
    member->step.tokens = member->tokens;
    memcpy(counts, member->crew->parts, sizeof counts);
    counts[1 - member->index] = cap + 1;
    member->step.rank_tokens = counts;
    crew_expect(member, dispatcher_begin_forward(dispatcher, &member->step, error),
                MOXIE_E_CAPACITY, "rank_tokens");
    counts[1 - member->index] = -1;
    crew_expect(member, dispatcher_begin_forward(dispatcher, &member->step, error), MOXIE_E_INVALID,
                "rank_tokens");
    member->step.rank_tokens = member->crew->parts;
    crew_begin(member);
    // One dispatch holds one token less than the fullest rank has: refused on every rank alike.
    crew_expect(member, dispatcher_dispatch_send(dispatcher, &member->batch.batch, error),
                MOXIE_E_CAPACITY, "forward()");
    ck_assert(member->tokens == 0 || member->y[0] != member->y[0]);
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_eq(stats.refused, 3);
    crew_forward(member);
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_eq(stats.rounds, 2);
}

START_TEST(capacity_is_refused_before_a_write)
{
    struct crew crew = {.layer_name = "mixtral_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = capacity_keys,
                        .scenario = capacity_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- two forwards in flight --------------------------------------------------------------------

static void flight_keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "forwards_in_flight_max", 2);
}

// The part is cut in two batches whose halves interleave.
static void flight_scenario(struct crew_member *member)
{
    const struct layer *layer = &member->crew->layer;
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    const moxie_rows *in[2], *out[2];
    struct layer_batch batches[2];

    for (int32_t slot = 0; slot < 2; slot++) {
        int64_t first = layer_part_first(member->tokens, 2, slot);
        moxie_step step = {.struct_size = sizeof step,
                           .slot = slot,
                           .tokens = layer_part(member->tokens, 2, slot)};

        layer_batch_of(layer, member->first + first, step.tokens, member->y + first * layer->hidden,
                       &batches[slot]);
        batches[slot].batch.slot = slot;
        crew_expect(member, dispatcher_begin_forward(dispatcher, &step, error), MOXIE_OK, NULL);
        crew_expect(member, dispatcher_dispatch_send(dispatcher, &batches[slot].batch, error),
                    MOXIE_OK, NULL);
    }
    for (int32_t slot = 0; slot < 2; slot++)
        crew_expect(member,
                    dispatcher_dispatch_recv(dispatcher, &batches[slot].batch, &in[slot],
                                             &out[slot], error),
                    MOXIE_OK, NULL);
    for (int32_t slot = 0; slot < 2; slot++) {
        moxie_call call = {.struct_size = sizeof call, .slot = slot};

        crew_expect(member, runner_run(member->rank.runner, &call, in[slot], out[slot], error),
                    MOXIE_OK, NULL);
        crew_expect(member, dispatcher_combine_send(dispatcher, &batches[slot].batch, error),
                    MOXIE_OK, NULL);
    }
    for (int32_t slot = 1; slot >= 0; slot--)
        crew_expect(member, dispatcher_combine_recv(dispatcher, &batches[slot].batch, error),
                    MOXIE_OK, NULL);
}

START_TEST(two_forwards_in_flight)
{
    static const char *const dispatchers[] = {"alltoall", "allgather"};
    struct crew crew = {.layer_name = "deepseek_v3_a",
                        .ranks = 3,
                        .dispatcher = dispatchers[_i],
                        .configure = flight_keys,
                        .scenario = flight_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- ids without an expert ---------------------------------------------------------------------

// Position 0 of every token is made into something that is no expert, as int64.
static void ids_scenario(struct crew_member *member)
{
    static const int64_t bad[] = {-1, INT64_MIN, INT64_MAX, INT32_MAX, (int64_t)1 << 32};
    const struct layer *layer = &member->crew->layer;
    const int32_t *ids = member->batch.batch.ids.data;
    int64_t *wide = malloc((size_t)(member->tokens * layer->top_k) * sizeof *wide);

    ck_assert_ptr_nonnull(wide);
    for (int64_t i = 0; i < member->tokens * layer->top_k; i++) {
        wide[i] = ids[i];
        if (i % layer->top_k == 0) wide[i] = i % 6 == 5 ? layer->experts : bad[i % 5];
    }
    member->batch.batch.ids.data = wide;
    member->batch.batch.ids.dtype.bits = 64;
    crew_forward(member);
    free(wide);
}

static void first_dropped_scenario(struct crew_member *member)
{
    const struct layer *layer = &member->crew->layer;
    float *weights = malloc((size_t)(member->tokens * layer->top_k) * sizeof *weights);

    ck_assert_ptr_nonnull(weights);
    memcpy(weights, member->batch.batch.weights.data,
           (size_t)(member->tokens * layer->top_k) * sizeof *weights);
    for (int64_t i = 0; i < member->tokens; i++)
        weights[i * layer->top_k] = 0.0f;
    member->batch.batch.weights.data = weights;
    crew_forward(member);
    free(weights);
}

START_TEST(ids_without_an_expert_contribute_zero)
{
    static const char *const dispatchers[] = {"local", "alltoall", "allgather"};
    struct crew want = {.layer_name = "qwen3_moe_a",
                        .ranks = 1,
                        .dispatcher = "local",
                        .scenario = first_dropped_scenario};
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = _i == 0 ? 1 : 4,
                        .dispatcher = dispatchers[_i],
                        .scenario = ids_scenario};

    crew_run(&want);
    crew_run(&crew);
    ck_assert_double_le(crew_difference(crew.y, want.y, crew.layer.tokens * crew.layer.hidden),
                        1e-6);
    crew_fini(&crew);
    crew_fini(&want);
}
END_TEST

// ---- tokens_valid ------------------------------------------------------------------------------

static void valid_keys(struct crew_member *member)
{
    if (member->crew->ranks > 1) {
        mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 2);
        mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank",
                     (member->crew->parts[0] + 1) / 2);
    }
}

static void valid_scenario(struct crew_member *member)
{
    int32_t valid = (int32_t)member->tokens / 2;

    member->step.tokens_valid = &valid;
    crew_forward(member);
    for (int64_t i = valid * member->crew->layer.hidden;
         i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_float_eq(member->y[i], 0.0f);
    // Read again by the next launch, as a replayed graph does.
    valid = (int32_t)member->tokens + 5;
    memset(member->y, 0xff,
           (size_t)(member->tokens * member->crew->layer.hidden) * sizeof *member->y);
    crew_forward(member);
}

START_TEST(tokens_valid_is_read_every_time)
{
    struct crew crew = {.layer_name = "qwen2_moe_a",
                        .ranks = 1 + 2 * _i,
                        .dispatcher = _i == 0 ? "local" : "alltoall",
                        .configure = valid_keys,
                        .scenario = valid_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- silent ranks ------------------------------------------------------------------------------

#define SILENT_RANK 2

static _Atomic int32_t survivors_done;

static void silent_keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "timeout_ms", 1500);
}

// What the rank that slept finds when it wakes: the others have moved on.
static void wake_up(struct crew_member *member)
{
    moxie_error *error = &member->rank.mock.error;

    while (atomic_load(&survivors_done) < member->crew->ranks - 1)
        (void)usleep(1000);
    crew_begin(member);
    crew_expect(
        member,
        forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch, error),
        MOXIE_E_PEER, "left this rank out");
    for (int64_t i = 0; i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_float_eq(member->y[i], 0.0f);
}

static void silent_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    const moxie_batch *batch = &member->batch.batch;
    uint8_t active[] = {1, 1, 1, 1};

    crew_forward(member);
    if (member->index == SILENT_RANK) {
        wake_up(member);
        return;
    }
    crew_begin(member);
    crew_expect(member, forward_run(dispatcher, member->rank.runner, batch, error), MOXIE_E_PEER,
                NULL);
    // By its own clock, or because another survivor was faster: the same rank is to blame.
    ck_assert(strstr(member->rank.mock.text, "rank 2 sent no rows") != NULL ||
              strstr(member->rank.mock.text, "rank 2 was left out") != NULL);
    ck_assert_int_eq(error->rank, SILENT_RANK);
    for (int64_t i = 0; i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_float_eq(member->y[i], 0.0f);
    // Sticky until the host acts.
    crew_expect(member, dispatcher_begin_forward(dispatcher, &member->step, error), MOXIE_E_PEER,
                NULL);
    crew_expect(member, dispatcher_poll_error(dispatcher, error), MOXIE_E_PEER, "rank 2");
    active[member->index] = 0;
    crew_expect(member, dispatcher_set_active_ranks(dispatcher, active, error), MOXIE_E_INVALID,
                "of this rank is 0");
    active[member->index] = 1;
    active[SILENT_RANK] = 0;
    crew_expect(member, dispatcher_set_active_ranks(dispatcher, active, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_poll_error(dispatcher, error), MOXIE_OK, NULL);
    for (int32_t i = 0; i < 3; i++)
        crew_forward(member);
    active[SILENT_RANK] = 1;
    crew_expect(member, dispatcher_set_active_ranks(dispatcher, active, error), MOXIE_E_INVALID,
                "cannot return");
    atomic_fetch_add(&survivors_done, 1);
}

static int not_of_rank_2(void *arg, int32_t id)
{
    const struct layer *layer = arg;

    return id < experts_first(layer->experts, 4, SILENT_RANK) ||
           id >= experts_first(layer->experts, 4, SILENT_RANK + 1);
}

START_TEST(survivors_go_on_without_a_silent_rank)
{
    static const char *const dispatchers[] = {"alltoall", "allgather"};
    struct crew crew = {.layer_name = "qwen3_moe_norenorm",
                        .ranks = 4,
                        .dispatcher = dispatchers[_i],
                        .configure = silent_keys,
                        .scenario = silent_scenario};
    int64_t count;
    float *want;

    atomic_store(&survivors_done, 0);
    crew_run(&crew);
    count = crew.layer.tokens * crew.layer.hidden;
    want = malloc((size_t)count * sizeof *want);
    ck_assert_ptr_nonnull(want);
    crew_reference(crew.layer_name, not_of_rank_2, &crew.layer, want);
    for (int32_t rank = 0; rank < 4; rank++) {
        int64_t first = layer_part_first(crew.layer.tokens, 4, rank) * crew.layer.hidden;

        if (rank != SILENT_RANK)
            ck_assert_double_le(
                crew_difference(crew.y + first, want + first, crew.parts[rank] * crew.layer.hidden),
                1e-6);
    }
    free(want);
    crew_fini(&crew);
}
END_TEST

// ---- nobody is gone ----------------------------------------------------------------------------

static void crossed_keys(struct crew_member *member)
{
    flight_keys(member);
    mock_set_i64(&member->rank.mock, "timeout_ms", 1000);
}

static void expect_zero(struct crew_member *member, int32_t answer, int32_t code)
{
    crew_expect(member, answer, code, NULL);
    for (int64_t i = 0; i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_float_eq(member->y[i], 0.0f);
    memset(member->y, 0xff,
           (size_t)(member->tokens * member->crew->layer.hidden) * sizeof *member->y);
}

// Each rank waits in another slot than its peer: both live, and nobody can be blamed.
static void crossed_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_batch *batch = &member->batch.batch;
    uint8_t active[] = {1, 1};
    const moxie_rows *in, *out;
    moxie_host *host = &member->rank.mock.host;

    member->step.slot = batch->slot = member->index;
    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, batch, error), MOXIE_OK, NULL);
    expect_zero(member, dispatcher_dispatch_recv(dispatcher, batch, &in, &out, error),
                MOXIE_E_TIMEOUT);
    // Whoever goes on at once tells its peer before that has run out of time.
    ck_assert_int_eq(host->barrier(host->ctx), 0);
    ck_assert_int_eq(error->rank, -1);
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "the same calls in the same order"));
    // The failure is of both slots, and leaves every y zero that could have been written.
    batch->slot = 1 - member->index;
    expect_zero(member, dispatcher_combine_recv(dispatcher, batch, error), MOXIE_E_TIMEOUT);
    expect_zero(member, forward_run(dispatcher, member->rank.runner, batch, error),
                MOXIE_E_TIMEOUT);
    batch->y.shape = NULL;
    crew_expect(member, dispatcher_combine_send(dispatcher, batch, error), MOXIE_E_TIMEOUT, NULL);
    batch->y.shape = member->batch.dims[3];
    crew_expect(member, dispatcher_set_active_ranks(dispatcher, active, error), MOXIE_OK, NULL);
    member->step.slot = batch->slot = 0;
    crew_forward(member);
}

START_TEST(ranks_that_wait_for_each_other_are_not_blamed)
{
    struct crew crew = {.layer_name = "mixtral_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = crossed_keys,
                        .scenario = crossed_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// Rank 1 starts a new generation with everybody; the others hear of it, and follow.
static void ahead_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    uint8_t active[] = {1, 1, 1};

    if (member->index != 1) {
        crew_begin(member);
        crew_expect(member,
                    forward_run(dispatcher, member->rank.runner, &member->batch.batch, error),
                    MOXIE_E_PEER, "has moved on to generation 1 with the same ranks");
        // Nobody is gone: none may be named that a host would leave out.
        ck_assert_int_eq(error->rank, -1);
    }
    crew_expect(member, dispatcher_set_active_ranks(dispatcher, active, error), MOXIE_OK, NULL);
    crew_forward(member);
}

START_TEST(a_rank_ahead_is_followed)
{
    struct crew crew = {.layer_name = "mixtral_a",
                        .ranks = 3,
                        .dispatcher = "allgather",
                        .scenario = ahead_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- create ------------------------------------------------------------------------------------

static void alone_scenario(struct crew_member *member)
{
    const uint8_t active[] = {1};

    crew_expect(
        member,
        dispatcher_set_active_ranks(member->rank.dispatcher, active, &member->rank.mock.error),
        MOXIE_E_UNSUPPORTED, "no peers");
    crew_forward(member);
}

START_TEST(local_has_no_peers_to_leave_out)
{
    struct crew crew = {
        .layer_name = "qwen3_moe_a", .ranks = 1, .dispatcher = "local", .scenario = alone_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

static void wrong_kind_scenario(struct crew_member *member)
{
    moxie_dispatcher *other = NULL;

    crew_expect(member,
                dispatcher_create(member->rank.instance, DISPATCHER_ALLGATHER, &other,
                                  &member->rank.mock.error),
                MOXIE_E_INVALID, "alltoall");
    ck_assert_ptr_null(other);
}

START_TEST(the_configured_dispatcher_is_the_one)
{
    struct crew crew = {.layer_name = "qwen3_moe_t1",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .scenario = wrong_kind_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, calls_have_an_order, 0, 2);
    tcase_add_loop_test(tests, halves_are_of_one_batch, 0, 2);
    tcase_add_test(tests, capacity_is_refused_before_a_write);
    tcase_add_loop_test(tests, two_forwards_in_flight, 0, 2);
    tcase_add_loop_test(tests, ids_without_an_expert_contribute_zero, 0, 3);
    tcase_add_loop_test(tests, tokens_valid_is_read_every_time, 0, 2);
    tcase_add_loop_test(tests, survivors_go_on_without_a_silent_rank, 0, 2);
    tcase_add_test(tests, ranks_that_wait_for_each_other_are_not_blamed);
    tcase_add_test(tests, a_rank_ahead_is_followed);
    tcase_add_test(tests, local_has_no_peers_to_leave_out);
    tcase_add_test(tests, the_configured_dispatcher_is_the_one);
}

SUITE_MAIN("dispatcher", 120, add)
