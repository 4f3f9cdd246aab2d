// Ranks over time, each with a GPU, over windows or, built with GPU_TRANSPORT, over NCCL: graphs
// that replay with other tokens and idle ranks, forwards in flight, and what is seen of a rank that
// is silent.

#include "host_tests/crew.h"
#include "host_tests/gpu/gpu_crew.h"
#include "host_tests/gpu/gpu_layer.h"
#include "host_tests/suite.h"
#include "plugin/transport.h"

#include <stdlib.h>
#include <string.h>

static const char *const dispatchers[] = {"alltoall", "allgather"};

// ---- graphs ------------------------------------------------------------------------------------

// A graph of all tokens on every rank, replayed with tokens_valid: step i is rank i % ranks' alone.
static void graph_scenario(struct gpu_member *member)
{
    const struct gpu_crew *crew = member->crew;
    int32_t *valid = NULL;
    struct gpu_graph captured;

    must(cudaMalloc((void **)&valid, sizeof *valid));
    member->step.tokens_valid = valid;
    for (int32_t rank = 0; rank < crew->ranks; rank++)
        member->rank_tokens[rank] = crew->layer.tokens;
    gpu_member_take(member, 0, crew->layer.tokens);
    gpu_member_capture(member, &captured);
    for (int32_t i = 0; i < 3 * crew->ranks; i++) {
        int32_t tokens = member->index == i % crew->ranks ? (int32_t)crew->layer.tokens : 0;

        must(cudaMemcpy(valid, &tokens, sizeof tokens, cudaMemcpyHostToDevice));
        gpu_member_meet(member);
        must(cudaGraphLaunch(captured.exec, member->stream));
        if (tokens > 0)
            gpu_member_fetch(member);
        else
            must(cudaStreamSynchronize(member->stream));
        if (tokens > 0) ck_assert_double_le(golden_error(crew->y, &crew->layer.want), 5e-3);
        gpu_member_meet(member);
    }
    gpu_graph_free(&captured);
    must(cudaFree(valid));
}

START_TEST(a_graph_replays_with_idle_ranks)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .configure = gpu_member_all_tokens,
                            .scenario = graph_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// What is no part of a graph says so, and has told nobody. The capture may be over then.
static void eager_scenario(struct gpu_member *member)
{
    const uint8_t active[MOXIE_RANKS_MAX] = {1, 1, 1};
    cudaGraph_t graph = NULL;

    must(cudaStreamBeginCapture(member->stream, cudaStreamCaptureModeThreadLocal));
    ck_assert_int_eq(
        dispatcher_set_active_ranks(member->rank.dispatcher, active, &member->rank.mock.error),
        MOXIE_E_CAPTURING);
    if (cudaStreamEndCapture(member->stream, &graph) == cudaSuccess) must(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    gpu_member_forward(member);
}

START_TEST(regrouping_is_eager)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .scenario = eager_scenario};

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- silence -----------------------------------------------------------------------------------

struct loss {
    int32_t rank;     // stops taking part after its first layer
    int32_t captured; // the survivors replay a graph
};

// The layer without the experts of the lost rank, as one rank with their ids taken out computes it.
static int survives(void *arg, int32_t id)
{
    const struct gpu_crew *crew = arg;
    const struct loss *loss = crew->arg;
    int64_t experts = crew->layer.experts;

    return id < experts_first(experts, crew->ranks, loss->rank) ||
           id >= experts_first(experts, crew->ranks, loss->rank + 1);
}

// One layer, by the graph if there is one. A wait that fails may be seen by the call or after it.
static void run_layer(struct gpu_member *member, const struct gpu_graph *captured)
{
    int32_t answer = MOXIE_OK;

    if (captured->exec != NULL)
        must(cudaGraphLaunch(captured->exec, member->stream));
    else
        answer = gpu_member_run(member);
    gpu_member_fetch(member);
    ck_assert_msg(answer == MOXIE_OK || answer == MOXIE_E_PEER, "%s", member->rank.mock.text);
}

static void lose_scenario(struct gpu_member *member)
{
    const struct loss *loss = member->crew->arg;
    uint8_t active[MOXIE_RANKS_MAX] = {0};
    moxie_error *error = &member->rank.mock.error;
    struct gpu_graph captured = {NULL, NULL};
    int64_t began_ns;

    gpu_member_forward(member);
    if (loss->captured) gpu_member_capture(member, &captured);
    gpu_member_meet(member);
    if (member->index != loss->rank) {
        began_ns = clock_ns();
        run_layer(member, &captured);
        ck_assert_double_le(gpu_seconds_since(began_ns), 4 * GPU_SHORT_MS * 1e-3);
        gpu_member_expect_zero(member);
        ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_PEER);
        ck_assert_msg(error->rank == loss->rank, "%s", member->rank.mock.text);
        ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "sent no rows of epoch 2"));
        ck_assert_int_eq(gpu_member_begin(member), MOXIE_E_PEER);
        for (int32_t rank = 0; rank < member->crew->ranks; rank++)
            active[rank] = rank != loss->rank;
        gpu_member_accept(member,
                          dispatcher_set_active_ranks(member->rank.dispatcher, active, error));
        ck_assert_int_eq(gpu_member_poll(member), MOXIE_OK);
        gpu_member_accept(member, gpu_member_begin(member));
        run_layer(member, &captured);
    }
    gpu_member_meet(member);
    if (member->index == loss->rank) {
        run_layer(member, &captured);
        gpu_member_expect_zero(member);
        ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_PEER);
        ck_assert_msg(strstr(member->rank.mock.text, "has left this rank out") != NULL, "%s",
                      member->rank.mock.text);
    }
    gpu_member_meet(member);
    if (loss->captured) gpu_graph_free(&captured);
}

static void lose(struct loss loss)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = gpu_member_short_timeout,
                            .scenario = lose_scenario,
                            .arg = &loss};
    int64_t first, last, hidden;
    float *want;

    gpu_crew_run(&crew);
    hidden = crew.layer.hidden;
    first = layer_part_first(crew.layer.tokens, crew.ranks, loss.rank);
    last = first + crew.parts[loss.rank];
    want = malloc((size_t)(crew.layer.tokens * hidden) * sizeof *want);
    ck_assert_ptr_nonnull(want);
    crew_reference(crew.layer_name, survives, &crew, want);
    ck_assert_double_le(crew_difference(crew.y, want, first * hidden), 5e-3);
    ck_assert_double_le(crew_difference(crew.y + last * hidden, want + last * hidden,
                                        (crew.layer.tokens - last) * hidden),
                        5e-3);
    free(want);
    gpu_crew_fini(&crew);
}

START_TEST(a_silent_rank_is_named_and_left_out)
{
    lose((struct loss){.rank = _i});
}
END_TEST

START_TEST(a_graph_goes_on_without_a_rank)
{
    lose((struct loss){.rank = _i, .captured = 1});
}
END_TEST

// ---- polling while ranks regroup ---------------------------------------------------------------

static _Thread_local struct gpu_member *polling; // what its dispatcher says while it regroups
static _Thread_local int32_t polls;

static int32_t finish_and_poll(void *stream)
{
    const struct device *device = device_find("sm_90");

    ck_assert_int_eq(gpu_member_poll(polling), MOXIE_E_PEER);
    ck_assert_msg(polling->rank.mock.error.rank == 1, "%s", polling->rank.mock.text);
    polls++;
    return device->stream_finish(stream);
}

// Rank 0 goes on without rank 1, rank 2 hears of it in a wait and follows: all the while it names
// rank 1.
static void follow_scenario(struct gpu_member *member)
{
    static const uint8_t active[MOXIE_RANKS_MAX] = {1, 0, 1};
    struct device device = *device_find("sm_90");
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    const struct gpu_graph none = {NULL, NULL};

    gpu_member_forward(member);
    if (member->index == 0)
        gpu_member_accept(member, dispatcher_set_active_ranks(dispatcher, active, error));
    gpu_member_meet(member);
    if (member->index == 2) {
        run_layer(member, &none);
        polling = member;
        device.stream_finish = finish_and_poll;
        member->rank.instance->device = &device;
        gpu_member_accept(member, dispatcher_set_active_ranks(dispatcher, active, error));
        member->rank.instance->device = device_find("sm_90");
        ck_assert_int_eq(polls, 2);
        ck_assert_int_eq(gpu_member_poll(member), MOXIE_OK);
    }
    gpu_member_meet(member);
}

START_TEST(a_poll_while_ranks_regroup_names_the_same)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = 3,
                            .dispatcher = "alltoall",
                            .configure = gpu_member_short_timeout,
                            .scenario = follow_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- rounds ------------------------------------------------------------------------------------

// Two rounds each, of tokens by the bound.
static void two_rounds(struct gpu_member *member)
{
    int64_t most = member->crew->parts[0];

    gpu_member_short_timeout(member);
    mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank", (most + 1) / 2);
    mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 2);
}

// The first round alone, by halves.
static void one_round(struct gpu_member *member)
{
    struct layer_rank *rank = &member->rank;
    moxie_error *error = &rank->mock.error;
    const moxie_batch *batch = &member->batch.batch;
    moxie_call call = {.struct_size = sizeof call, .stream = member->stream};
    const moxie_rows *in, *out;

    gpu_member_take(member, member->first, member->tokens / 2);
    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_accept(member, dispatcher_dispatch_send(rank->dispatcher, batch, error));
    gpu_member_accept(member, dispatcher_dispatch_recv(rank->dispatcher, batch, &in, &out, error));
    gpu_member_accept(member, runner_run(rank->runner, &call, in, out, error));
    gpu_member_accept(member, dispatcher_combine_send(rank->dispatcher, batch, error));
    gpu_member_accept(member, dispatcher_combine_recv(rank->dispatcher, batch, error));
    gpu_member_fetch(member);
}

static void second_round_scenario(struct gpu_member *member)
{
    const struct loss *loss = member->crew->arg;
    struct gpu_graph captured = {NULL, NULL};

    member->step.rank_tokens = NULL;
    if (member->index == 1) gpu_member_take(member, member->first, 1);
    if (loss->captured) gpu_member_capture(member, &captured);
    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_meet(member);
    if (member->index == 0) {
        one_round(member);
    } else {
        run_layer(member, &captured);
        gpu_member_expect_zero(member);
        ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_PEER);
    }
    gpu_member_meet(member);
    if (loss->captured) gpu_graph_free(&captured);
}

// Rank 0 is silent in the second round, in which rank 1 has no tokens: nobody keeps the rows of the
// first one.
START_TEST(no_round_outlives_a_failure)
{
    struct loss loss = {.captured = _i};
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = two_rounds,
                            .scenario = second_round_scenario,
                            .arg = &loss};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// Rank 1 has a token, and believes that the others fit in a round: when they are in their second
// one, it is in the next forward.
static void other_rounds_scenario(struct gpu_member *member)
{
    const int64_t most = member->rank.instance->plan.limits.tokens_max;
    const int64_t believed[] = {most, 1, most};

    member->step.rank_tokens = NULL;
    if (member->index == 1) {
        gpu_member_take(member, member->first, 1);
        member->step.rank_tokens = believed;
        gpu_member_forward(member);
    }
    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_accept(member, gpu_member_run(member));
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
    ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_COLLECTIVE_MISMATCH);
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text,
                                 member->index == 1
                                     ? "rank 0 sends round 1 of its layer, and this rank round 0"
                                     : "rank 1 sends round 0 of its layer, and this rank round 1"));
}

START_TEST(rows_of_another_round_are_none)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = "alltoall",
                            .configure = two_rounds,
                            .scenario = other_rounds_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// Rank 1 believes that nobody has more than a token, which few rows would be, and sends words where
// the others wait for slabs.
static void other_ways_scenario(struct gpu_member *member)
{
    static const int64_t believed[] = {1, 1, 1};

    member->step.rank_tokens = NULL;
    if (member->index == 1) {
        gpu_member_take(member, member->first, 1);
        member->step.rank_tokens = believed;
    }
    ck_assert_int_gt(member->rank.instance->plan.limits.tokens_max,
                     member->rank.instance->plan.window.ll_rows);
    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_accept(member, gpu_member_run(member));
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
    ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_COLLECTIVE_MISMATCH);
    if (member->index == 1) // all others differ from it, and it is told of whom it saw first
        ck_assert_int_ne(member->rank.mock.error.rank, 1);
    else
        ck_assert_int_eq(member->rank.mock.error.rank, 1);
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "has other rank_tokens"));
}

static void all_tokens_in_time(struct gpu_member *member)
{
    gpu_member_all_tokens(member);
    gpu_member_short_timeout(member);
}

START_TEST(words_are_no_slabs)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .configure = all_tokens_in_time,
                            .scenario = other_ways_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- forwards in flight ------------------------------------------------------------------------

// Two forwards by halves, the second begun inside the first.
static void overlapped_scenario(struct gpu_member *member)
{
    struct layer_rank *rank = &member->rank;
    moxie_error *error = &rank->mock.error;
    const moxie_rows *in[2], *out[2];
    moxie_batch batches[2] = {member->batch.batch, member->batch.batch};
    size_t bytes = (size_t)(member->tokens * member->crew->layer.hidden) * sizeof(float);
    void *other = gpu_poisoned(bytes), *second = malloc(bytes);

    ck_assert_ptr_nonnull(second);
    batches[1].slot = 1;
    batches[1].y.data = other;
    for (int32_t slot = 0; slot < 2; slot++) {
        member->step.slot = slot;
        gpu_member_accept(member, gpu_member_begin(member));
        gpu_member_accept(member,
                          dispatcher_dispatch_send(rank->dispatcher, &batches[slot], error));
    }
    for (int32_t slot = 0; slot < 2; slot++) {
        moxie_call call = {.struct_size = sizeof call, .slot = slot, .stream = member->stream};

        gpu_member_accept(member, dispatcher_dispatch_recv(rank->dispatcher, &batches[slot],
                                                           &in[slot], &out[slot], error));
        gpu_member_accept(member, runner_run(rank->runner, &call, in[slot], out[slot], error));
        gpu_member_accept(member, dispatcher_combine_send(rank->dispatcher, &batches[slot], error));
    }
    for (int32_t slot = 0; slot < 2; slot++)
        gpu_member_accept(member, dispatcher_combine_recv(rank->dispatcher, &batches[slot], error));
    gpu_member_fetch(member);
    must(cudaMemcpy(second, other, bytes, cudaMemcpyDeviceToHost));
    ck_assert_mem_eq(second, member->y, bytes);
    must(cudaFree(other));
    free(second);
}

START_TEST(two_forwards_in_flight)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(3),
                            .dispatcher = dispatchers[_i],
                            .configure = gpu_member_two_slots,
                            .scenario = overlapped_scenario};

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

// What it has lies on one device, whichever is current later.
START_TEST(an_instance_has_one_device)
{
    struct gpu_layer gpu;
    moxie_captured captured = {.struct_size = sizeof captured};
    moxie_runner *runner = NULL;

    gpu_layer_open(&gpu, gpu_layers[0], (struct gpu_options){.capture = 1});
    must(cudaSetDevice(1));
    ck_assert_int_eq(runner_create(gpu.instance, 0, &gpu.weights.weights, &runner, &gpu.mock.error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(gpu.mock.text, "device 1 is current, but what this instance has"));
    ck_assert_ptr_null(runner);
    gpu_accept(&gpu, instance_captured(gpu.instance, &captured, &gpu.mock.error));
    ck_assert_int_eq(captured.ids.device.id, 0);
    must(cudaSetDevice(0));
    gpu_layer_close(&gpu);
}
END_TEST

static void tests(TCase *cases)
{
    const int devices = gpu_devices();

    tcase_add_loop_test(cases, a_graph_replays_with_idle_ranks, 0, 2);
    tcase_add_loop_test(cases, two_forwards_in_flight, 0, 2);
    // NCCL knows no other ranks than those it began with, and does not say who is silent.
    if (strcmp(GPU_TRANSPORT, "nccl") == 0) return;
    tcase_add_test(cases, an_instance_has_one_device);
    tcase_add_test(cases, regrouping_is_eager);
    tcase_add_loop_test(cases, a_silent_rank_is_named_and_left_out, 0, devices < 3 ? devices : 3);
    tcase_add_loop_test(cases, a_graph_goes_on_without_a_rank, 1, 2);
    if (devices >= 3) tcase_add_test(cases, a_poll_while_ranks_regroup_names_the_same);
    tcase_add_loop_test(cases, no_round_outlives_a_failure, 0, 2);
    tcase_add_test(cases, rows_of_another_round_are_none);
    tcase_add_loop_test(cases, words_are_no_slabs, 0, 2);
}

int main(void)
{
    return gpu_suite("gpu_peers", 2, tests);
}
