// plugin/dispatcher.c: what hosts may do with handles and memory around a layer: empty tensors that
// say nothing, shapes that hold for one call, two dispatchers of one instance, polls of other
// threads, and kernels and a create that fail.

#include "plugin/dispatcher.h"

#include "host_tests/crew.h"
#include "host_tests/suite.h"
#include "plugin/backends.h"
#include "plugin/forward.h"
#include "plugin/instance.h"
#include "plugin/runner.h"
#include "plugin/tensor.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

// ---- an idle rank ------------------------------------------------------------------------------

// An empty tensor of a host that fills in its shape alone.
static void say_nothing(moxie_tensor *tensor)
{
    tensor->data = NULL;
    tensor->device = (moxie_device){0, 0};
}

static void idle_scenario(struct crew_member *member)
{
    moxie_batch *batch = &member->batch.batch;

    if (member->tokens == 0) {
        say_nothing(&batch->x);
        say_nothing(&batch->ids);
        say_nothing(&batch->weights);
        say_nothing(&batch->y);
    }
    crew_forward(member);
}

START_TEST(an_idle_rank_says_nothing_of_its_tensors)
{
    struct crew crew = {.layer_name = "qwen3_moe_t1",
                        .ranks = 3,
                        .dispatcher = _i == 0 ? "alltoall" : "allgather",
                        .scenario = idle_scenario};

    crew_run(&crew);
    ck_assert_int_eq(crew.parts[2], 0);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

static void no_tokens_scenario(struct crew_member *member)
{
    const int32_t valid = 0;

    member->tokens = member->step.tokens = 0;
    member->step.tokens_valid = &valid;
    for (int32_t i = 0; i < 4; i++)
        member->batch.dims[i][0] = 0;
    idle_scenario(member);
}

START_TEST(local_without_tokens_says_nothing_either)
{
    struct crew crew = {.layer_name = "qwen3_moe_t1",
                        .ranks = 1,
                        .dispatcher = "local",
                        .scenario = no_tokens_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- shapes ------------------------------------------------------------------------------------

// The batch of each half has its shapes elsewhere, and those of the half before are gone.
static void stack_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_batch batch = member->batch.batch;
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;
    int64_t dims[5][2], map_dim = member->crew->layer.experts;
    int32_t map[64];

    for (int32_t id = 0; id < map_dim; id++)
        map[id] = id;
    batch.expert_map = batch.ids;
    batch.expert_map.data = map;
    batch.expert_map.ndim = 1;
    memcpy(dims, member->batch.dims, sizeof member->batch.dims);
    dims[4][0] = map_dim;
    batch.x.shape = dims[0];
    batch.ids.shape = dims[1];
    batch.weights.shape = dims[2];
    batch.y.shape = dims[3];
    batch.expert_map.shape = dims[4];
    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, &batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, &batch, &in, &out, error), MOXIE_OK,
                NULL);
    memset(dims, 0x5a, sizeof dims);
    memset(&batch, 0x5a, sizeof batch);
    crew_expect(member, runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(dispatcher, &member->batch.batch, error), MOXIE_OK,
                NULL);
    crew_expect(member, dispatcher_combine_recv(dispatcher, &member->batch.batch, error), MOXIE_OK,
                NULL);
}

START_TEST(shapes_hold_for_one_call)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 1 + 2 * _i,
                        .dispatcher = _i == 0 ? "local" : "alltoall",
                        .scenario = stack_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- alignment ---------------------------------------------------------------------------------

// x begins an element past the alignment, and so does every row after it.
static void apart_scenario(struct crew_member *member)
{
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_batch batch = member->batch.batch;
    const int64_t element = batch.x.dtype.bits / 8, hidden = batch.x.shape[1];
    int64_t strides[2] = {128 / element + hidden + 1, 1};
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;
    unsigned char *rows = aligned_alloc(128, 128 * (size_t)((member->tokens + 1) * strides[0]));

    ck_assert_ptr_nonnull(rows);
    for (int64_t token = 0; token < member->tokens; token++)
        memcpy(rows + element * (1 + token * strides[0]),
               (unsigned char *)batch.x.data + batch.x.byte_offset +
                   (size_t)(element * token * hidden),
               (size_t)(element * hidden));
    batch.x.data = rows + element;
    batch.x.byte_offset = 0;
    batch.x.strides = strides;
    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_send(dispatcher, &batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_dispatch_recv(dispatcher, &batch, &in, &out, error), MOXIE_OK,
                NULL);
    for (uint32_t i = 0; i < in->slabs_count; i++)
        ck_assert_uint_eq(((uintptr_t)tensor_data(&in->slabs[i].rows) |
                           (uintptr_t)tensor_stride_bytes(&in->slabs[i].rows, 0)) %
                              traits_push.row_align_bytes,
                          0);
    crew_expect(member, runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(dispatcher, &batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_recv(dispatcher, &batch, error), MOXIE_OK, NULL);
    free(rows);
}

START_TEST(rows_are_aligned_as_the_traits_say)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = _i == 0 ? "alltoall" : "allgather",
                        .scenario = apart_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- two dispatchers ---------------------------------------------------------------------------

static void two_keys(struct crew_member *member)
{
    mock_set_i64(&member->rank.mock, "forwards_in_flight_max", 2);
}

static void two_scenario(struct crew_member *member)
{
    moxie_dispatcher *first = member->rank.dispatcher, *second = NULL;
    moxie_error *error = &member->rank.mock.error;
    moxie_batch *batch = &member->batch.batch;
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_rows *in, *out;

    crew_expect(member,
                dispatcher_create(member->rank.instance, DISPATCHER_ALLTOALL, &second, error),
                MOXIE_OK, NULL);
    crew_begin(member);
    crew_expect(member, dispatcher_begin_forward(second, &member->step, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_dispatch_send(first, batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_dispatch_send(second, batch, error), MOXIE_E_INVALID,
                "another dispatcher of this instance");
    crew_expect(member, forward_run(second, member->rank.runner, batch, error), MOXIE_E_INVALID,
                "forwards_in_flight_max");
    crew_expect(member, dispatcher_dispatch_recv(first, batch, &in, &out, error), MOXIE_OK, NULL);
    crew_expect(member, runner_run(member->rank.runner, &call, in, out, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_send(first, batch, error), MOXIE_OK, NULL);
    crew_expect(member, dispatcher_combine_recv(first, batch, error), MOXIE_OK, NULL);
    crew_expect(member, forward_run(second, member->rank.runner, batch, error), MOXIE_OK, NULL);
    // One that ends inside a layer leaves the slot to the other.
    crew_expect(member, dispatcher_dispatch_send(second, batch, error), MOXIE_OK, NULL);
    dispatcher_destroy(second);
    crew_forward(member);
}

START_TEST(two_dispatchers_take_a_slot_by_turns)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = two_keys,
                        .scenario = two_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// set_active_ranks in the middle of a layer, where nothing has failed, ends it.
static void regroup_scenario(struct crew_member *member)
{
    moxie_dispatcher *first = member->rank.dispatcher;
    moxie_error *error = &member->rank.mock.error;
    moxie_host *host = &member->rank.mock.host;
    const uint8_t active[] = {1, 1};

    crew_begin(member);
    crew_expect(member, dispatcher_dispatch_send(first, &member->batch.batch, error), MOXIE_OK,
                NULL);
    ck_assert_int_eq(host->barrier(host->ctx), 0);
    crew_expect(member, dispatcher_set_active_ranks(first, active, error), MOXIE_OK, NULL);
    crew_forward(member);
}

START_TEST(a_layer_that_new_ranks_end_leaves_its_slot)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .scenario = regroup_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// The ranks wait in different slots and fail; the failure is the first dispatcher's alone.
static void apart_failure_scenario(struct crew_member *member)
{
    moxie_dispatcher *first = member->rank.dispatcher, *second = NULL;
    moxie_error *error = &member->rank.mock.error;
    moxie_batch *batch = &member->batch.batch;
    moxie_host *host = &member->rank.mock.host;

    crew_expect(member,
                dispatcher_create(member->rank.instance, DISPATCHER_ALLTOALL, &second, error),
                MOXIE_OK, NULL);
    member->step.slot = batch->slot = member->index;
    crew_begin(member);
    crew_expect(member, forward_run(first, member->rank.runner, batch, error), MOXIE_E_TIMEOUT,
                NULL);
    ck_assert_int_eq(host->barrier(host->ctx), 0);
    for (int32_t slot = 0; slot < 2; slot++) {
        member->step.slot = batch->slot = slot;
        crew_expect(member, dispatcher_begin_forward(second, &member->step, error), MOXIE_OK, NULL);
        crew_expect(member, forward_run(second, member->rank.runner, batch, error), MOXIE_OK, NULL);
    }
    dispatcher_destroy(second);
}

static void apart_failure_keys(struct crew_member *member)
{
    two_keys(member);
    mock_set_i64(&member->rank.mock, "timeout_ms", 1000);
}

START_TEST(a_layer_that_fails_leaves_its_slot)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = apart_failure_keys,
                        .scenario = apart_failure_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- kernels that fail -------------------------------------------------------------------------

static int32_t no_gemms(const struct gemms_args *args, void *stream)
{
    (void)args;
    (void)stream;
    return 7;
}

// Without peers a layer that fails is over: the step may be run again.
static void broken_scenario(struct crew_member *member)
{
    struct kernels kernels = kernels_cpu;
    struct device device = device_cpu;
    moxie_instance *instance = member->rank.instance;

    kernels.gemms = no_gemms;
    device.kernels = &kernels;
    instance->device = &device;
    crew_begin(member);
    crew_expect(member,
                forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch,
                            &member->rank.mock.error),
                MOXIE_E_DEVICE, "gemms");
    instance->device = &device_cpu;
    crew_expect(member,
                forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch,
                            &member->rank.mock.error),
                MOXIE_OK, NULL);
}

START_TEST(local_runs_a_step_again_that_failed)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 1,
                        .dispatcher = "local",
                        .scenario = broken_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

// ---- bytes -------------------------------------------------------------------------------------

// A runner and a dispatcher hold all that was planned, the windows of every slot among it.
static void bytes_scenario(struct crew_member *member)
{
    const moxie_plan *plan;
    moxie_stats stats;

    crew_expect(member, instance_plan(member->rank.instance, &plan, &member->rank.mock.error),
                MOXIE_OK, NULL);
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_gt(plan->symmetric_bytes, 0);
    ck_assert_uint_eq(stats.bytes_allocated, plan->device_bytes + plan->symmetric_bytes +
                                                 plan->pinned_bytes + plan->host_bytes);
}

START_TEST(all_that_is_planned_is_counted)
{
    struct crew crew = {.layer_name = "qwen3_moe_t1",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = two_keys,
                        .scenario = bytes_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- a layer that fails ------------------------------------------------------------------------

// y is the left half of wider rows: a failure makes that half zero, and is no failure of the other.
// Each is counted once, however often it is told.
static void wide_failure_scenario(struct crew_member *member)
{
    const int64_t hidden = member->crew->layer.hidden, count = 2 * hidden * member->tokens;
    int64_t wide[] = {2 * hidden, 1};
    moxie_dispatcher *dispatcher = member->rank.dispatcher;
    moxie_batch *batch = &member->batch.batch;
    moxie_host *host = &member->rank.mock.host;
    float *room = malloc((size_t)count * sizeof *room);
    moxie_stats stats;

    ck_assert_ptr_nonnull(room);
    for (int64_t i = 0; i < count; i++)
        room[i] = 1.0f;
    crew_forward(member);
    batch->y.data = room;
    batch->y.strides = wide;
    member->step.slot = batch->slot = member->index;
    crew_begin(member);
    for (int32_t turn = 0; turn < 2; turn++)
        crew_expect(member,
                    forward_run(dispatcher, member->rank.runner, batch, &member->rank.mock.error),
                    MOXIE_E_TIMEOUT, NULL);
    ck_assert_int_eq(host->barrier(host->ctx), 0);
    for (int64_t i = 0; i < count; i++)
        ck_assert_float_eq(room[i], i % (2 * hidden) < hidden ? 0.0f : 1.0f);
    ck_assert(mock_logged(&member->rank.mock, "ERROR dispatcher: the ranks 0x"));
    instance_stats(member->rank.instance, &stats);
    ck_assert_uint_eq(stats.forwards, 2);
    ck_assert_uint_eq(stats.dispatches, 2);
    ck_assert_uint_eq(stats.combines, 1);
    ck_assert_uint_eq(stats.tokens, 2 * (uint64_t)member->tokens);
    ck_assert_uint_eq(stats.peer_failures, 1);
    free(room);
}

START_TEST(a_failure_is_counted_and_zeroes_y_alone)
{
    struct crew crew = {.layer_name = "qwen3_moe_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = apart_failure_keys,
                        .scenario = wide_failure_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- a create that fails -----------------------------------------------------------------------

static _Thread_local int32_t gathers_left;
static _Thread_local int32_t (*gather)(void *ctx, const void *mine, void *all, uint64_t bytes);

static int32_t failing_gather(void *ctx, const void *mine, void *all, uint64_t bytes)
{
    return gathers_left-- > 0 ? gather(ctx, mine, all, bytes) : 1;
}

// A refused configuration is what a host hears of, whatever else it lacks.
START_TEST(a_refused_configuration_comes_first)
{
    static const struct registry nobody = {NULL, NULL, 0, 0};
    struct mock_host mock;
    moxie_instance *instance = NULL;
    moxie_dispatcher *dispatcher = NULL;

    mock_host_init(&mock);
    mock.host.all_gather = NULL;
    mock.host.barrier = NULL;
    mock_set_i64(&mock, "ep_size", 2);
    mock_set_i64(&mock, "tp_size", 1);
    ck_assert_int_eq(instance_open(&mock.host, &nobody, &instance, &mock.error), MOXIE_OK);
    ck_assert_int_eq(dispatcher_create(instance, DISPATCHER_ALLTOALL, &dispatcher, &mock.error),
                     MOXIE_E_CONFIG);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_fini(&mock);
}
END_TEST

// Every rank's n-th all_gather fails, until one n is more than create asks for.
static void failing_scenario(struct crew_member *member)
{
    moxie_instance *instance = member->rank.instance;
    moxie_dispatcher *other = NULL;
    moxie_stats before, after;
    int32_t failures = 0;

    instance_stats(instance, &before);
    instance->host.all_gather = failing_gather;
    for (gathers_left = 0; failures < 64; gathers_left = ++failures) {
        if (dispatcher_create(instance, DISPATCHER_ALLTOALL, &other, &member->rank.mock.error) ==
            MOXIE_OK)
            break;
        instance_stats(instance, &after);
        ck_assert_uint_eq(after.bytes_allocated, before.bytes_allocated);
    }
    ck_assert_int_gt(failures, 4);
    ck_assert_ptr_nonnull(other);
    dispatcher_destroy(other);
    instance_stats(instance, &after);
    ck_assert_uint_eq(after.bytes_allocated, before.bytes_allocated);
}

static void failing_keys(struct crew_member *member)
{
    two_keys(member);
    gather = member->rank.mock.host.all_gather;
}

START_TEST(a_create_that_fails_leaves_the_count_of_bytes)
{
    struct crew crew = {.layer_name = "qwen3_moe_t1",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = failing_keys,
                        .scenario = failing_scenario};

    crew_run(&crew);
    crew_fini(&crew);
}
END_TEST

// ---- polls -------------------------------------------------------------------------------------

struct poller {
    moxie_dispatcher *dispatcher;
    _Atomic int32_t stop;
    _Atomic int32_t seen;
};

static void *poll_on(void *arg)
{
    struct poller *poller = arg;
    char text[256];

    while (!atomic_load(&poller->stop)) {
        moxie_error error = {.struct_size = sizeof error, .text_bytes = sizeof text, .text = text};

        (void)sched_yield(); // or ranks that share a core with this have no time to say that they
                             // wait
        if (dispatcher_poll_error(poller->dispatcher, &error) == MOXIE_OK) continue;
        ck_assert_msg(strstr(text, "the same calls in the same order") != NULL, "%s", text);
        atomic_fetch_add(&poller->seen, 1);
    }
    return NULL;
}

// Ranks that wait in different slots fail, twice, while another thread polls.
static void polled_scenario(struct crew_member *member)
{
    struct poller poller = {.dispatcher = member->rank.dispatcher};
    moxie_error *error = &member->rank.mock.error;
    moxie_batch *batch = &member->batch.batch;
    moxie_host *host = &member->rank.mock.host;
    const uint8_t active[] = {1, 1};
    pthread_t thread;

    ck_assert_int_eq(pthread_create(&thread, NULL, poll_on, &poller), 0);
    for (int32_t turn = 0; turn < 2; turn++) {
        member->step.slot = batch->slot = member->index;
        crew_begin(member);
        crew_expect(member, forward_run(member->rank.dispatcher, member->rank.runner, batch, error),
                    MOXIE_E_TIMEOUT, NULL);
        while (atomic_load(&poller.seen) <= turn)
            (void)sched_yield();
        ck_assert_int_eq(host->barrier(host->ctx), 0);
        crew_expect(member, dispatcher_set_active_ranks(member->rank.dispatcher, active, error),
                    MOXIE_OK, NULL);
    }
    atomic_store(&poller.stop, 1);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    member->step.slot = batch->slot = 0;
    crew_forward(member);
}

static void polled_keys(struct crew_member *member)
{
    two_keys(member);
    mock_set_i64(&member->rank.mock, "timeout_ms", 1000);
}

START_TEST(another_thread_polls_while_failures_come_and_go)
{
    struct crew crew = {.layer_name = "mixtral_a",
                        .ranks = 2,
                        .dispatcher = "alltoall",
                        .configure = polled_keys,
                        .scenario = polled_scenario};

    crew_run(&crew);
    ck_assert_double_le(golden_error(crew.y, &crew.layer.want), 2e-6);
    crew_fini(&crew);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, an_idle_rank_says_nothing_of_its_tensors, 0, 2);
    tcase_add_test(tests, local_without_tokens_says_nothing_either);
    tcase_add_loop_test(tests, shapes_hold_for_one_call, 0, 2);
    tcase_add_loop_test(tests, rows_are_aligned_as_the_traits_say, 0, 2);
    tcase_add_test(tests, two_dispatchers_take_a_slot_by_turns);
    tcase_add_test(tests, a_layer_that_new_ranks_end_leaves_its_slot);
    tcase_add_test(tests, a_layer_that_fails_leaves_its_slot);
    tcase_add_test(tests, local_runs_a_step_again_that_failed);
    tcase_add_test(tests, all_that_is_planned_is_counted);
    tcase_add_test(tests, a_failure_is_counted_and_zeroes_y_alone);
    tcase_add_test(tests, a_refused_configuration_comes_first);
    tcase_add_test(tests, a_create_that_fails_leaves_the_count_of_bytes);
    tcase_add_test(tests, another_thread_polls_while_failures_come_and_go);
}

SUITE_MAIN("dispatcher_hosts", 120, add)
