// What is only so over NCCL: how its library is found and refused, and that nothing waits for a
// rank that does not come, though NCCL does. Layers are test_gpu_ranks.c's.

#include "host_tests/gpu/gpu_crew.h"
#include "host_tests/suite.h"
#include "plugin/transport.h"

#ifdef FAKE_NCCL
#include "host_tests/emulator/fake_nccl_find.h"
#include <dlfcn.h>
#endif

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Until something that should end after GPU_SHORT_MS counts as waiting for ever.
#define PATIENCE_S (10 + 2 * GPU_SHORT_MS / 1000)
#define RANKS_MOST 3
// A stream takes about a thousand launches before it keeps the thread that launches.
#define LAYERS_AHEAD 40

// ---- refusals ----------------------------------------------------------------------------------

#ifdef FAKE_NCCL

struct refusal {
    const char *name, *value; // an environment variable
    const char *lacks;
    int missing;
    int32_t code, rank;
    int32_t names; // that were made for the ranks to join by
    const char *text;
};

static const struct refusal refusals[] = {
    {.missing = 1,
     .code = MOXIE_E_UNAVAILABLE,
     .text = "rank 0: transport nccl: libnccl.so.2 cannot be loaded"},
    {.lacks = "ncclCommFinalize",
     .code = MOXIE_E_UNAVAILABLE,
     .text = "has no function ncclCommFinalize; install NCCL 2.14 or newer"},
    {.name = "FAKE_NCCL_VERSION",
     .value = "21304",
     .code = MOXIE_E_UNAVAILABLE,
     .text = "libnccl.so.2 is NCCL 2.13.4; install 2.14 or newer"},
    {.name = "FAKE_NCCL_VERSION",
     .value = "2708",
     .code = MOXIE_E_UNAVAILABLE,
     .text = "libnccl.so.2 is NCCL before 2.9; install 2.14"},
    {.name = "NCCL_COMM_BLOCKING",
     .value = "1",
     .code = MOXIE_E_UNAVAILABLE,
     .text = "rank 0: transport nccl: NCCL_COMM_BLOCKING is 1, with which NCCL waits for ever for "
             "a rank that does not come; unset it"},
    {.name = "FAKE_NCCL_VERSION_STEP",
     .value = "100",
     .code = MOXIE_E_COLLECTIVE_MISMATCH,
     .rank = 1,
     .text = "rank 1 has NCCL 2."},
    {.name = "FAKE_NCCL_FAIL_RANK",
     .value = "1",
     .code = MOXIE_E_UNAVAILABLE,
     .rank = 1,
     .names = 1,
     .text = "rank 1: NCCL: the ranks cannot be joined: unhandled system error; rank 1 has no "
             "network"},
    {.name = "MOXIE_EMULATOR_SHARING",
     .value = "0",
     .code = MOXIE_E_UNAVAILABLE,
     .names = 1,
     .text = "bytes cannot be made (operation not supported)"},
    {.name = "FAKE_NCCL_FAIL_AFTER",
     .value = "0",
     .code = MOXIE_E_PEER,
     .names = 1,
     .text = "rank 0: NCCL: an exchange failed: remote process exited"},
};

#define REFUSALS (int)(sizeof refusals / sizeof refusals[0])

static void expect_refusal(struct gpu_member *member, int32_t answer)
{
    const struct refusal *refusal = member->crew->arg;
    const struct mock_host *mock = &member->rank.mock;

    ck_assert_msg(answer == refusal->code, "%d: %s", answer, mock->text);
    ck_assert_msg(strstr(mock->text, refusal->text) != NULL, "%s", mock->text);
    ck_assert_msg(mock->error.rank == refusal->rank, "%s", mock->text);
    ck_assert_ptr_null(member->rank.dispatcher);
}

static int32_t names_made(void)
{
    void *handle = dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL);
    const int *names = handle == NULL ? NULL : dlsym(handle, "fake_nccl_names");

    ck_assert_ptr_nonnull(names);
    return *names;
}

// Every rank hears the words of the one that cannot.
START_TEST(what_is_missing_is_refused_everywhere)
{
    struct refusal refusal = refusals[_i];
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .configure = gpu_member_short_timeout,
                            .created = expect_refusal,
                            .arg = &refusal};
    int64_t began_ns = clock_ns();

    nccl_missing = refusal.missing;
    nccl_lacks = refusal.lacks;
    if (refusal.name != NULL) ck_assert_int_eq(setenv(refusal.name, refusal.value, 1), 0);
    gpu_crew_run(&crew);
    ck_assert_double_le(gpu_seconds_since(began_ns), PATIENCE_S);
    ck_assert_int_eq(names_made(), refusal.names);
    gpu_crew_fini(&crew);
}
END_TEST

START_TEST(the_copy_of_the_process_comes_first)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .scenario = gpu_member_forward};

    ck_assert_ptr_nonnull(dlopen(FAKE_NCCL, RTLD_NOW | RTLD_LOCAL));
    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    ck_assert_int_eq(nccl_loads, 0);
    gpu_crew_fini(&crew);
}
END_TEST

// An exchange that NCCL itself gives up.
static void remote_scenario(struct gpu_member *member)
{
    int64_t began_ns = clock_ns();

    gpu_member_accept(member, gpu_member_begin(member));
    (void)gpu_member_run(member);
    while (gpu_member_poll(member) == MOXIE_OK && gpu_seconds_since(began_ns) < PATIENCE_S)
        (void)usleep(1000);
    ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_PEER);
    ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "NCCL: an exchange failed: remote"));
    ck_assert_int_eq(member->rank.mock.error.rank, -1);
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
}

START_TEST(what_nccl_reports_is_passed_on)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .scenario = remote_scenario};

    ck_assert_int_eq(setenv("FAKE_NCCL_FAIL_AFTER", _i == 0 ? "1" : "2", 1), 0);
    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

#endif

static void another_transport(struct gpu_member *member)
{
    if (member->index == 1) mock_set_str(&member->rank.mock, "transport", "auto");
}

static void expect_mismatch(struct gpu_member *member, int32_t answer)
{
    ck_assert_int_eq(answer, MOXIE_E_COLLECTIVE_MISMATCH);
    ck_assert_ptr_nonnull(
        strstr(member->rank.mock.text, member->index == 1
                                           ? "transport is nccl on rank 0 and nvlink here"
                                           : "transport is nvlink on rank 1 and nccl here"));
}

START_TEST(ranks_choose_the_same_transport)
{
    struct gpu_crew crew = {.layer_name = "mixtral_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .configure = another_transport,
                            .created = expect_mismatch};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- silence -----------------------------------------------------------------------------------

// How a rank finds out that another does not come.
enum notice {
    BY_POLLING,    // the host asks, and synchronises only then
    BY_CALLING,    // it makes its next call, again and again
    BY_GOING_ON,   // it launches layer after layer
    BY_A_WATCHER,  // it waits for the stream while another thread asks
    BY_DESTROYING, // it does not find out
    BY_REPLAYING,  // the layer is a graph, which the library does not see launched
    BY_HALVES,     // the silent rank has sent its rows, and no results
    NOTICES
};

struct silence {
    enum notice notice;
    int32_t rank;
};

static void *watch(void *arg)
{
    struct gpu_member *member = arg;

    while (dispatcher_poll_error(member->rank.dispatcher, NULL) == MOXIE_OK)
        (void)usleep(1000);
    return NULL;
}

// Launches a layer that a rank does not come to, and goes on until that is known.
static void meet_silence(struct gpu_member *member, enum notice notice,
                         const struct gpu_graph *captured)
{
    pthread_t watcher;
    int32_t answer = MOXIE_OK, layers = 0;

    gpu_member_accept(member, gpu_member_begin(member));
    if (notice == BY_REPLAYING)
        must(cudaGraphLaunch(captured->exec, member->stream));
    else
        gpu_member_launch(member);
    if (notice == BY_A_WATCHER) {
        ck_assert_int_eq(pthread_create(&watcher, NULL, watch, member), 0);
        must(cudaStreamSynchronize(member->stream));
        ck_assert_int_eq(pthread_join(watcher, NULL), 0);
    }
    while (answer == MOXIE_OK) {
        if (notice == BY_CALLING)
            answer = gpu_member_begin(member);
        else if (notice == BY_GOING_ON && layers++ < LAYERS_AHEAD)
            answer = gpu_member_run(member);
        else if (notice == BY_GOING_ON)
            ck_abort_msg("rank %d: nothing stopped the launches", member->index);
        else
            answer = gpu_member_poll(member);
        if (notice != BY_GOING_ON) (void)usleep(1000);
    }
}

static void expect_silence(struct gpu_member *member)
{
    uint8_t active[MOXIE_RANKS_MAX] = {1, 1, 1};
    const struct mock_host *mock = &member->rank.mock;
    char silent[128];

    (void)snprintf(silent, sizeof silent,
                   "did not answer within timeout_ms = %d, and NCCL does not say which",
                   GPU_SHORT_MS);
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
    ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_TIMEOUT);
    ck_assert_msg(strstr(mock->text, silent) != NULL, "%s", mock->text);
    ck_assert_int_eq(mock->error.rank, -1);
    memset(member->y, 0xff, (size_t)(member->tokens * member->crew->layer.hidden) * sizeof(float));
    must(cudaMemset(member->batch.batch.y.data, 0xff,
                    (size_t)(member->tokens * member->crew->layer.hidden) * sizeof(float)));
    ck_assert_int_eq(gpu_member_begin(member), MOXIE_E_TIMEOUT);
    ck_assert_int_eq(gpu_member_run(member), MOXIE_E_TIMEOUT);
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
    ck_assert_int_eq(
        dispatcher_set_active_ranks(member->rank.dispatcher, active, &member->rank.mock.error),
        MOXIE_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(mock->text, "create them anew with the ranks that are left"));
    ck_assert_int_eq(gpu_member_poll(member), MOXIE_E_TIMEOUT);
}

static void silence_scenario(struct gpu_member *member)
{
    const struct silence *silence = member->crew->arg;
    moxie_error *error = &member->rank.mock.error;
    struct gpu_graph captured = {NULL, NULL};
    int64_t began_ns;

    gpu_member_forward(member);
    if (silence->notice == BY_REPLAYING) gpu_member_capture(member, &captured);
    gpu_member_meet(member);
    began_ns = clock_ns();
    if (member->index == silence->rank && silence->notice == BY_HALVES) {
        gpu_member_accept(member, gpu_member_begin(member));
        gpu_member_accept(
            member, dispatcher_dispatch_send(member->rank.dispatcher, &member->batch.batch, error));
    }
    if (member->index != silence->rank && silence->notice == BY_DESTROYING) {
        gpu_member_accept(member, gpu_member_begin(member));
        gpu_member_launch(member);
        dispatcher_destroy(member->rank.dispatcher);
        member->rank.dispatcher = NULL;
        ck_assert_double_le(gpu_seconds_since(began_ns), PATIENCE_S);
        gpu_member_fetch(member);
        gpu_member_expect_zero(member);
    } else if (member->index != silence->rank) {
        meet_silence(member, silence->notice, &captured);
        ck_assert_double_ge(gpu_seconds_since(began_ns), 0.9 * GPU_SHORT_MS * 1e-3);
        ck_assert_double_le(gpu_seconds_since(began_ns), PATIENCE_S);
        expect_silence(member);
    }
    gpu_member_meet(member);
    if (captured.exec != NULL) gpu_graph_free(&captured);
}

START_TEST(nobody_waits_for_a_silent_rank)
{
    struct silence silence = {.notice = (enum notice)_i, .rank = _i % gpu_crew_ranks(RANKS_MOST)};
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .configure = gpu_member_short_timeout,
                            .scenario = silence_scenario,
                            .arg = &silence};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- calls that differ -------------------------------------------------------------------------

static void wait_for_failure(struct gpu_member *member)
{
    int64_t began_ns = clock_ns();
    int32_t answer;

    do {
        (void)usleep(1000);
        answer = gpu_member_poll(member);
    } while (answer == MOXIE_OK && gpu_seconds_since(began_ns) < PATIENCE_S);
    ck_assert_msg(answer == MOXIE_E_TIMEOUT || answer == MOXIE_E_PEER, "%d", answer);
    gpu_member_fetch(member);
    gpu_member_expect_zero(member);
}

#ifdef FAKE_NCCL

// One rank gives no list, and so sends as many rows as there may ever be. The real library does not
// look at that.
static void sizes_scenario(struct gpu_member *member)
{
    if (member->index == 1) member->step.rank_tokens = NULL;
    gpu_member_accept(member, gpu_member_begin(member));
    (void)gpu_member_run(member);
    wait_for_failure(member);
    if (gpu_member_poll(member) == MOXIE_E_PEER)
        ck_assert_ptr_nonnull(strstr(member->rank.mock.text, "another number of bytes"));
}

static void short_and_wide(struct gpu_member *member)
{
    gpu_member_short_timeout(member);
    gpu_member_all_tokens(member);
}

START_TEST(sizes_that_differ)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .configure = short_and_wide,
                            .scenario = sizes_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

#endif

static void short_with_two_slots(struct gpu_member *member)
{
    gpu_member_short_timeout(member);
    gpu_member_two_slots(member);
}

// Rank 1 goes on with another slot, which has not come as far.
static void order_scenario(struct gpu_member *member)
{
    gpu_member_forward(member);
    if (member->index == 1) member->step.slot = member->batch.batch.slot = 1;
    gpu_member_accept(member, gpu_member_begin(member));
    (void)gpu_member_run(member);
    wait_for_failure(member);
    if (gpu_member_poll(member) == MOXIE_E_PEER)
        ck_assert_ptr_nonnull(
            strstr(member->rank.mock.text, "the ranks have made different calls"));
}

START_TEST(an_order_that_differs)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .configure = short_with_two_slots,
                            .scenario = order_scenario};

    gpu_crew_run(&crew);
    gpu_crew_fini(&crew);
}
END_TEST

// ---- far ahead ---------------------------------------------------------------------------------

// More layers than may be launched before the first is done, and then no wait for any.
static void ahead_scenario(struct gpu_member *member)
{
    gpu_member_accept(member, gpu_member_begin(member));
    for (int32_t i = 0; i < 20; i++)
        gpu_member_launch(member);
    dispatcher_destroy(member->rank.dispatcher);
    member->rank.dispatcher = NULL;
    gpu_member_fetch(member);
}

START_TEST(what_is_launched_is_done_when_destroyed)
{
    struct gpu_crew crew = {.layer_name = "qwen3_moe_a",
                            .ranks = gpu_crew_ranks(RANKS_MOST),
                            .dispatcher = "alltoall",
                            .scenario = ahead_scenario};

    gpu_crew_run(&crew);
    gpu_crew_expect_golden(&crew, 5e-3);
    gpu_crew_fini(&crew);
}
END_TEST

static void tests(TCase *cases)
{
#ifdef FAKE_NCCL
    tcase_add_loop_test(cases, what_is_missing_is_refused_everywhere, 0, REFUSALS);
    tcase_add_test(cases, the_copy_of_the_process_comes_first);
    tcase_add_loop_test(cases, what_nccl_reports_is_passed_on, 0, 2);
    tcase_add_test(cases, sizes_that_differ);
#endif
    tcase_add_test(cases, ranks_choose_the_same_transport);
    tcase_add_loop_test(cases, nobody_waits_for_a_silent_rank, 0, NOTICES);
    tcase_add_test(cases, an_order_that_differs);
    tcase_add_test(cases, what_is_launched_is_done_when_destroyed);
}

int main(void)
{
    return gpu_suite("gpu_nccl", 2, tests);
}
