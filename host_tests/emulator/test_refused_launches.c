// Launches that the device refuses to one rank, first or in the middle of its layer. Where nothing
// of the layer has run, as in a capture, the rank begins anew, and its peers know of nothing.

#include "host_tests/emulator/refuse.h"
#include "host_tests/gpu/gpu_crew.h"
#include "plugin/transport.h"

#include <string.h>

#define OUT_OF_MEMORY 2
#define INVALIDATED   901
#define LAUNCHES_MOST 200 // of one layer

static const char *const dispatchers[] = {"alltoall", "allgather", "local"};

static void few_rows_a_round(struct gpu_member *member)
{
    gpu_member_short_timeout(member);
    mock_set_i64(&member->rank.mock, "max_dispatch_tokens_per_rank", 3);
    mock_set_i64(&member->rank.mock, "dispatch_rounds_max", 64);
}

// The rows of the second go as words, where NCCL does not carry them.
static const struct {
    const char *layer;
    void (*configure)(struct gpu_member *);
} draws[] = {
    {"mixtral_a", gpu_member_short_timeout},
    {"qwen3_moe_t1", gpu_member_short_timeout},
    {"mixtral_a", few_rows_a_round},
};
#define DRAWS 3

// Of each dispatcher all draws.
static void run_crew(int32_t ranks, int draw, void (*scenario)(struct gpu_member *), void *arg)
{
    struct gpu_crew crew = {.layer_name = draws[draw % DRAWS].layer,
                            .ranks = gpu_crew_ranks(ranks),
                            .dispatcher = dispatchers[draw / DRAWS],
                            .configure = draws[draw % DRAWS].configure,
                            .scenario = scenario,
                            .arg = arg};

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}

static uint64_t peer_failures(const struct gpu_member *member)
{
    moxie_stats stats = {0};

    instance_stats(member->rank.instance, &stats);
    return stats.peer_failures;
}

static void begin_capture(struct gpu_member *member)
{
    gpu_member_accept(member, gpu_member_begin(member));
    must(cudaStreamBeginCapture(member->stream, cudaStreamCaptureModeThreadLocal));
}

// Without what was captured.
static void end_capture(struct gpu_member *member)
{
    cudaGraph_t graph = NULL;

    emulator_refuse_launches(0, 0);
    if (cudaStreamEndCapture(member->stream, &graph) == cudaSuccess) must(cudaGraphDestroy(graph));
}

static void expect_nothing_stuck(struct gpu_member *member)
{
    gpu_member_accept(member, gpu_member_poll(member));
    ck_assert_uint_eq(peer_failures(member), 0);
}

// ---- in a capture ------------------------------------------------------------------------------

// What the captured forward answers whose launches behind the first `after` are refused.
static int32_t capture_in_vain(struct gpu_member *member, int after, int code)
{
    int32_t answer;

    begin_capture(member);
    emulator_refuse_launches(after, code);
    answer = gpu_member_run(member);
    end_capture(member);
    return answer;
}

static void capture_scenario(struct gpu_member *member)
{
    const int code = *(const int *)member->crew->arg;
    const int32_t wanted = code == INVALIDATED ? MOXIE_E_CAPTURING : MOXIE_E_MEMORY;
    int after = 0;

    gpu_member_forward(member);
    gpu_member_meet(member);
    for (; member->index == 0 && after < LAUNCHES_MOST; after++) {
        int32_t answer = capture_in_vain(member, after, code);

        if (answer == MOXIE_OK) break;
        ck_assert_msg(answer == wanted, "after %d: %d, %s", after, answer, member->rank.mock.text);
        expect_nothing_stuck(member);
    }
    if (member->index == 0) ck_assert_int_gt(after, 0);
    ck_assert_int_lt(after, LAUNCHES_MOST);
    gpu_member_meet(member);
    // The step that was begun for the capture goes on.
    if (member->index != 0) gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_launch(member);
    gpu_member_fetch(member);
    expect_nothing_stuck(member);
}

START_TEST(a_capture_that_fails_is_begun_anew)
{
    int code = _i % 2 == 0 ? INVALIDATED : OUT_OF_MEMORY;

    run_crew(_i / 2 / DRAWS == 2 ? 1 : 3, _i / 2, capture_scenario, &code);
}
END_TEST

// ---- halves ------------------------------------------------------------------------------------

static int32_t run_half(struct gpu_member *member, int half, const moxie_rows **in,
                        const moxie_rows **out)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    const moxie_batch *batch = &member->batch.batch;
    moxie_error *error = &member->rank.mock.error;
    const moxie_call call = {.struct_size = sizeof call, .stream = batch->stream};

    switch (half) {
    case 0:
        return dispatcher_dispatch_send(dispatcher, batch, error);
    case 1:
        return dispatcher_dispatch_recv(dispatcher, batch, in, out, error);
    case 2:
        return runner_run(member->rank.runner, &call, *in, *out, error);
    case 3:
        return dispatcher_combine_send(dispatcher, batch, error);
    default:
        return dispatcher_combine_recv(dispatcher, batch, error);
    }
}

// The capture becomes invalid before that half; the dispatcher hears of it then, or behind run.
static void halves_scenario(struct gpu_member *member)
{
    const moxie_rows *in = NULL, *out = NULL;

    for (int spoilt = 0; member->index == 0 && spoilt < 5; spoilt++) {
        begin_capture(member);
        for (int half = 0; half < spoilt; half++)
            gpu_member_accept(member, run_half(member, half, &in, &out));
        emulator_refuse_launches(0, INVALIDATED);
        ck_assert_int_eq(run_half(member, spoilt, &in, &out), MOXIE_E_CAPTURING);
        if (spoilt == 2) ck_assert_int_eq(run_half(member, 3, &in, &out), MOXIE_E_CAPTURING);
        end_capture(member);
        expect_nothing_stuck(member);
    }
    gpu_member_meet(member);
    gpu_member_forward(member);
}

START_TEST(halves_that_fail_in_a_capture_are_begun_anew)
{
    run_crew(3, _i / 2 * DRAWS + _i % 2, halves_scenario, NULL);
}
END_TEST

// ---- eagerly -----------------------------------------------------------------------------------

// Its peers have launched what waits for it.
static void first_scenario(struct gpu_member *member)
{
    gpu_member_accept(member, gpu_member_begin(member));
    if (member->index == 0) {
        emulator_refuse_launches(0, OUT_OF_MEMORY);
        ck_assert_int_eq(gpu_member_run(member), MOXIE_E_MEMORY);
        ck_assert_msg(strstr(member->rank.mock.text, "out of memory") != NULL, "%s",
                      member->rank.mock.text);
        emulator_refuse_launches(0, 0);
    }
    gpu_member_launch(member);
    gpu_member_fetch(member);
    expect_nothing_stuck(member);
}

START_TEST(the_first_launch_may_be_refused)
{
    run_crew(3, _i, first_scenario, NULL);
}
END_TEST

// Peers that there might be wait for the rest of it.
static void later_scenario(struct gpu_member *member)
{
    const uint8_t active[MOXIE_RANKS_MAX] = {1};
    moxie_error *error = &member->rank.mock.error;
    int after = 2;

    for (;; after++) {
        int32_t answer;

        gpu_member_accept(member, gpu_member_begin(member));
        emulator_refuse_launches(after, OUT_OF_MEMORY);
        answer = gpu_member_run(member);
        emulator_refuse_launches(0, 0);
        must(cudaStreamSynchronize(member->stream));
        if (answer == MOXIE_OK) break;
        ck_assert_int_eq(answer, MOXIE_E_MEMORY);
        ck_assert_int_ne(gpu_member_begin(member), MOXIE_OK);
        gpu_member_accept(member,
                          dispatcher_set_active_ranks(member->rank.dispatcher, active, error));
    }
    ck_assert_int_gt(after, 2);
    gpu_member_forward(member);
}

START_TEST(a_layer_that_went_out_in_part_is_not_begun_anew)
{
    run_crew(1, _i, later_scenario, NULL);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, a_capture_that_fails_is_begun_anew, 0, 2 * 3 * DRAWS);
    tcase_add_loop_test(tests, halves_that_fail_in_a_capture_are_begun_anew, 0, 4);
    tcase_add_loop_test(tests, the_first_launch_may_be_refused, 0, 2 * DRAWS);
    // Over NCCL set_active_ranks is refused.
    if (strcmp(GPU_TRANSPORT, "nccl") != 0)
        tcase_add_loop_test(tests, a_layer_that_went_out_in_part_is_not_begun_anew, 0, 2 * DRAWS);
}

int main(void)
{
    return gpu_suite("refused_launches", 1, add);
}
