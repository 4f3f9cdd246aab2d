// plugin/instance.c: what open decides stands, every reason is told at once, and whatever fails,
// nothing is left.

#include "plugin/instance.h"

#include "host_tests/layer.h"
#include "host_tests/mock_host.h"
#include "host_tests/suite.h"
#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/runner.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define LAYER "qwen3_moe_norenorm"

static const moxie_runner_info runners[] = {
    {.struct_size = sizeof *runners, .name = "first", .device = "cpu"},
    {.struct_size = sizeof *runners, .name = "second", .device = "cpu"}};
static const moxie_dispatcher_info dispatchers[] = {
    {.struct_size = sizeof *dispatchers, .name = "third", .device = "cpu"}};
static const struct registry registry = {runners, dispatchers, 2, 1};

static moxie_instance *open_instance(struct mock_host *mock)
{
    moxie_instance *instance = NULL;

    ck_assert_msg(instance_open(&mock->host, &registry, &instance, &mock->error) == MOXIE_OK, "%s",
                  mock->text);
    ck_assert_ptr_eq(instance_of(instance_handle(instance)), instance);
    return instance;
}

static void close_instance(struct mock_host *mock, moxie_instance *instance)
{
    ck_assert_int_eq(instance_close(instance, &mock->error), MOXIE_OK);
    mock_host_fini(mock);
}

// ---- open --------------------------------------------------------------------------------------

START_TEST(opening_registers_and_takes_no_memory)
{
    struct mock_host mock;
    moxie_instance *instance;

    mock_host_init(&mock);
    instance = open_instance(&mock);
    ck_assert_uint_eq(mock.runners_count, 2);
    ck_assert_ptr_eq(mock.runners[0], &runners[0]);
    ck_assert_ptr_eq(mock.runners[1], &runners[1]);
    ck_assert_uint_eq(mock.dispatchers_count, 1);
    ck_assert_ptr_eq(mock.dispatchers[0], &dispatchers[0]);
    ck_assert_uint_eq(mock.allocate_calls, 0);
    ck_assert(
        mock_logged(&mock, "INFO config: runner moxie_cpu, dispatcher local, forward_tokens"));
    ck_assert_ptr_null(instance_of(NULL));
    close_instance(&mock, instance);
}
END_TEST

static int32_t refuse_dispatcher(void *ctx, const moxie_dispatcher_info *info)
{
    (void)ctx;
    (void)info;
    return 3;
}

START_TEST(a_host_may_refuse_a_backend)
{
    struct mock_host mock;
    moxie_instance *instance = (moxie_instance *)(void *)&mock;

    mock_host_init(&mock);
    mock.register_answer = 7;
    ck_assert_int_eq(instance_open(&mock.host, &registry, &instance, &mock.error),
                     MOXIE_E_UNAVAILABLE);
    ck_assert_ptr_null(instance);
    ck_assert_str_eq(mock.text, "the host's register_runner refused first: 7");
    ck_assert_uint_eq(mock.runners_count, 1);
    mock.register_answer = 0;
    mock.host.register_dispatcher = refuse_dispatcher;
    instance = (moxie_instance *)(void *)&mock;
    ck_assert_int_eq(instance_open(&mock.host, &registry, &instance, &mock.error),
                     MOXIE_E_UNAVAILABLE);
    ck_assert_ptr_null(instance);
    ck_assert_str_eq(mock.text, "the host's register_dispatcher refused third: 3");
    mock_host_fini(&mock);
}
END_TEST

#ifndef MOXIE_HAS_CUDA
START_TEST(a_device_without_kernels_is_planned_for_and_not_run)
{
    struct mock_host mock;
    moxie_instance *instance;

    mock_host_init(&mock);
    mock_set_str(&mock, "device", "sm_90");
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_device(instance, &mock.error), MOXIE_E_UNAVAILABLE);
    ck_assert_ptr_nonnull(strstr(mock.text, "built without sm_90 kernels"));
    close_instance(&mock, instance);
}
END_TEST
#endif

START_TEST(hosts_have_any_name)
{
    struct mock_host mock;
    moxie_instance *instance;
    char *pages = mmap(NULL, 1 << 17, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *name = pages + (1 << 16) - (CONFIG_TEXT_BYTES - 1); // without an end

    mock_host_init(&mock);
    ck_assert_int_eq(munmap(pages + (1 << 16), 1 << 16), 0);
    mock.host.name = memset(name, 'n', CONFIG_TEXT_BYTES - 1);
    instance = open_instance(&mock);
    ck_assert_int_eq(munmap(pages, 1 << 16), 0); // it was copied
    ck_assert_uint_eq(strlen(instance->host.name), CONFIG_TEXT_BYTES - 1);
    ck_assert_int_eq(instance->host.name[0], 'n');
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock.host.name = NULL;
    instance = open_instance(&mock);
    ck_assert_str_eq(instance->host.name, "unnamed host");
    close_instance(&mock, instance);
}
END_TEST

// ---- What was decided --------------------------------------------------------------------------

START_TEST(the_snapshot_reads_back)
{
    struct mock_host mock;
    moxie_instance *instance;
    moxie_config_entry entry, before;
    int32_t seen = 0;

    mock_host_init(&mock);
    mock_set_f64(&mock, "routed_scaling_factor", 2.5);
    instance = open_instance(&mock);
    for (uint64_t i = 0; i < KEY_COUNT; i++) {
        ck_assert_int_eq(instance_config(instance, i, &entry), MOXIE_OK);
        ck_assert_str_eq(entry.key, config_name((enum config_key)i));
        ck_assert_str_ne(entry.help, "");
        if (strcmp(entry.key, "hidden_size") == 0) {
            ck_assert_str_eq(entry.value, "64");
            ck_assert_str_eq(entry.type, "i64");
            ck_assert_int_eq(entry.found, 1);
            seen++;
        } else if (strcmp(entry.key, "routed_scaling_factor") == 0) {
            ck_assert_str_eq(entry.value, "2.5");
            ck_assert_str_eq(entry.type, "f64");
            ck_assert_int_eq(entry.found, 1);
            seen++;
        } else if (strcmp(entry.key, "runner") == 0) {
            ck_assert_str_eq(entry.value, "moxie_cpu"); // what `auto` became
            ck_assert_str_eq(entry.type, "str");
            ck_assert_int_eq(entry.found, 0);
            seen++;
        }
    }
    ck_assert_int_eq(seen, 3);
    before = entry;
    ck_assert_int_eq(instance_config(instance, KEY_COUNT, &entry), MOXIE_E_INVALID);
    ck_assert_int_eq(instance_config(instance, UINT64_MAX, &entry), MOXIE_E_INVALID);
    ck_assert_int_eq(instance_config(instance, (uint64_t)1 << 32, &entry), MOXIE_E_INVALID);
    ck_assert_mem_eq(&entry, &before, sizeof entry);
    close_instance(&mock, instance);
}
END_TEST

START_TEST(the_configuration_is_read_once)
{
    struct mock_host mock;
    moxie_instance *instance;
    const moxie_plan *plan = NULL;
    const moxie_report *report = NULL;
    moxie_config_entry entry;
    uint64_t reads, bytes;

    mock_host_init(&mock);
    instance = open_instance(&mock);
    reads = mock.reads;
    ck_assert_uint_eq(reads, KEY_COUNT);
    ck_assert_int_eq(instance_plan(instance, &plan, &mock.error), MOXIE_OK);
    bytes = plan->device_bytes;
    mock_set_i64(&mock, "hidden_size", 128);
    ck_assert_int_eq(instance_plan(instance, &plan, &mock.error), MOXIE_OK);
    ck_assert_int_eq(instance_validate(instance, &report), MOXIE_OK);
    ck_assert_uint_eq(report->reasons_count, 0);
    ck_assert_int_eq(instance_config(instance, KEY_HIDDEN_SIZE, &entry), MOXIE_OK);
    ck_assert_str_eq(entry.value, "64");
    ck_assert_uint_eq(plan->device_bytes, bytes);
    ck_assert_uint_eq(mock.reads, reads);
    close_instance(&mock, instance);
}
END_TEST

START_TEST(equal_configurations_plan_alike)
{
    struct mock_host mock[2];
    moxie_instance *instance[2];
    const moxie_plan *plan[2];

    for (int32_t i = 0; i < 2; i++) {
        mock_host_init(&mock[i]);
        mock_set_i64(&mock[i], "max_prefill_tokens", 512);
        instance[i] = open_instance(&mock[i]);
        ck_assert_int_eq(instance_plan(instance[i], &plan[i], &mock[i].error), MOXIE_OK);
    }
    ck_assert_uint_gt(plan[0]->buffers_count, 0);
    ck_assert_uint_eq(plan[0]->buffers_count, plan[1]->buffers_count);
    ck_assert_uint_eq(plan[0]->device_bytes, plan[1]->device_bytes);
    ck_assert_uint_eq(plan[0]->host_bytes, plan[1]->host_bytes);
    ck_assert_mem_eq(&instance[0]->plan.limits, &instance[1]->plan.limits,
                     sizeof instance[0]->plan.limits);
    for (uint64_t i = 0; i < plan[0]->buffers_count; i++) {
        ck_assert_str_eq(plan[0]->buffers[i].name, plan[1]->buffers[i].name);
        ck_assert_uint_eq(plan[0]->buffers[i].bytes, plan[1]->buffers[i].bytes);
        ck_assert_str_ne(plan[0]->buffers[i].why, "");
    }
    ck_assert_int_eq(plan[0]->bounds->forward_tokens, 512);
    ck_assert_str_eq(plan[0]->bounds->dominant, "max_prefill_tokens");
    ck_assert_int_eq(plan[0]->bounds->experts_local, 8);
    for (int32_t i = 0; i < 2; i++)
        close_instance(&mock[i], instance[i]);
}
END_TEST

// Both limits of a call hold: a capacity above any forward's tokens is no promise.
START_TEST(a_call_may_bring_no_more_than_a_forward)
{
    static const struct {
        int64_t cap, rounds, dispatch_tokens;
    } rows[] = {{0, 1, 512}, {0, 4, 128}, {200, 4, 200}, {2000, 1, 512}};
    struct mock_host mock;
    moxie_instance *instance;
    const moxie_plan *plan;

    mock_host_init(&mock);
    mock_set_i64(&mock, "max_prefill_tokens", 512);
    mock_set_i64(&mock, "dp_size", 2);
    mock_set_i64(&mock, "tp_size", 2);
    mock_set_i64(&mock, "ep_size", 2);
    mock_set_str(&mock, "dispatcher", "alltoall");
    mock_set_i64(&mock, "max_dispatch_tokens_per_rank", rows[_i].cap);
    mock_set_i64(&mock, "dispatch_rounds_max", rows[_i].rounds);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_plan(instance, &plan, &mock.error), MOXIE_OK);
    ck_assert_int_eq(plan->bounds->dispatch_call_tokens_max, rows[_i].dispatch_tokens);
    ck_assert_int_eq(plan->bounds->forward_call_tokens_max, 512);
    close_instance(&mock, instance);
}
END_TEST

START_TEST(every_reason_at_once)
{
    static const char *const keys[] = {"hidden_size", "top_k", "activation", "dp_size", "runner"};
    struct mock_host mock;
    moxie_instance *instance;
    const moxie_report *report = NULL;
    const moxie_plan *plan = NULL;
    moxie_runner *runner = (moxie_runner *)(void *)&mock;
    moxie_dispatcher *dispatcher = (moxie_dispatcher *)(void *)&mock;
    moxie_weights weights = {.struct_size = sizeof weights};

    mock_host_init(&mock);
    mock_unset(&mock, "hidden_size");
    mock_set_i64(&mock, "top_k", 33);
    mock_set_str(&mock, "activation", "tanh");
    mock_set_f64(&mock, "dp_size", 1.5);
    mock_set_str(&mock, "runner", "nobody");
    mock_set_i64(&mock, "max_prefill_tokens", 77);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_validate(instance, &report), MOXIE_OK);
    ck_assert_uint_ge(report->reasons_count, 5);
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++) {
        int32_t found = 0;

        for (uint64_t j = 0; j < report->reasons_count; j++)
            found |= strcmp(report->reasons[j].key, keys[i]) == 0;
        ck_assert_msg(found, "no reason for %s", keys[i]);
    }
    ck_assert_int_eq(instance_plan(instance, &plan, &mock.error), MOXIE_E_CONFIG);
    ck_assert_ptr_nonnull(strstr(mock.text, "hidden_size: "));
    ck_assert_uint_eq(plan->buffers_count, 0);
    ck_assert_int_eq(plan->bounds->forward_tokens, 77);
    ck_assert_int_eq(plan->bounds->experts_local, -1);
    ck_assert_int_eq(runner_create(instance, 0, &weights, &runner, &mock.error), MOXIE_E_CONFIG);
    ck_assert_ptr_null(runner);
    ck_assert_int_eq(dispatcher_create(instance, DISPATCHER_LOCAL, &dispatcher, &mock.error),
                     MOXIE_E_CONFIG);
    ck_assert_ptr_null(dispatcher);
    ck_assert_uint_eq(mock.allocate_calls, 0);
    ck_assert(mock_logged(&mock, "ERROR config: refused for "));
    close_instance(&mock, instance);
}
END_TEST

// Every key wrong: the text has whole reasons, and says how many more the report has.
START_TEST(a_text_of_many_reasons_is_cut)
{
    struct mock_host mock;
    moxie_instance *instance;
    const moxie_report *report = NULL;

    mock_host_init(&mock);
    for (int32_t key = 0; key < KEY_COUNT; key++)
        mock_set_code(&mock, config_name((enum config_key)key), MOXIE_CONFIG_WRONG_TYPE);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_validate(instance, &report), MOXIE_OK);
    ck_assert_uint_ge(report->reasons_count, KEY_COUNT);
    ck_assert_int_eq(instance_accepted(instance, &mock.error), MOXIE_E_CONFIG);
    ck_assert_uint_lt(strlen(mock.text), 1100);
    ck_assert_str_eq(strstr(mock.text, " more, see validate()"), " more, see validate()");
    ck_assert_int_eq(instance_accepted(instance, NULL), MOXIE_E_CONFIG);
    close_instance(&mock, instance);
}
END_TEST

// ---- Users -------------------------------------------------------------------------------------

// A golden layer on one rank, to be created by hand.
struct sample {
    struct mock_host mock; // the first member: ctx of all callbacks
    struct layer layer;
    struct layer_weights_view view;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    uint64_t parallel_calls;
};

// The host's own threads, or one that starts with the last task.
static void backwards(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t i), void *arg)
{
    struct sample *s = ctx;

    s->parallel_calls++;
    while (tasks-- > 0)
        task(arg, tasks);
}

static void sample_init(struct sample *s, int32_t hosts_threads)
{
    memset(s, 0, sizeof *s);
    layer_open(&s->layer, LAYER);
    layer_weights_of(&s->layer, 0, s->layer.experts, &s->view);
    mock_host_init(&s->mock);
    layer_configure(&s->layer, &s->mock);
    mock_set_i64(&s->mock, "forward_tokens_max", s->layer.tokens);
    mock_set_i64(&s->mock, "capture_routed_experts", 1);
    if (hosts_threads) s->mock.host.parallel_for = backwards;
    s->instance = open_instance(&s->mock);
}

static void sample_fini(struct sample *s)
{
    close_instance(&s->mock, s->instance);
    layer_close(&s->layer);
}

static int32_t create(struct sample *s)
{
    int32_t st = runner_create(s->instance, 0, &s->view.weights, &s->runner, &s->mock.error);

    if (st != MOXIE_OK) return st;
    return dispatcher_create(s->instance, DISPATCHER_LOCAL, &s->dispatcher, &s->mock.error);
}

static void destroy(struct sample *s)
{
    dispatcher_destroy(s->dispatcher);
    runner_destroy(s->runner);
    s->dispatcher = NULL;
    s->runner = NULL;
}

static void run_layer(struct sample *s)
{
    moxie_step step = {.struct_size = sizeof step, .tokens = s->layer.tokens};
    float *y = calloc((size_t)(s->layer.tokens * s->layer.hidden), sizeof *y);
    struct layer_batch batch;

    ck_assert_ptr_nonnull(y);
    layer_batch_of(&s->layer, 0, s->layer.tokens, y, &batch);
    ck_assert_int_eq(dispatcher_begin_forward(s->dispatcher, &step, &s->mock.error), MOXIE_OK);
    ck_assert_int_eq(forward_run(s->dispatcher, s->runner, &batch.batch, &s->mock.error), MOXIE_OK);
    ck_assert_double_le(golden_error(y, &s->layer.want), 1e-6);
    free(y);
}

START_TEST(the_plan_is_what_is_taken)
{
    struct sample s;
    const moxie_plan *plan = NULL;
    moxie_stats stats;
    uint64_t bytes = 0;

    sample_init(&s, 0);
    ck_assert_int_eq(instance_plan(s.instance, &plan, &s.mock.error), MOXIE_OK);
    for (uint64_t i = 0; i < plan->buffers_count; i++)
        bytes += plan->buffers[i].bytes;
    ck_assert_int_eq(create(&s), MOXIE_OK);
    ck_assert_uint_eq(s.mock.allocate_calls, plan->buffers_count);
    ck_assert_uint_eq(s.mock.bytes_live, bytes);
    instance_stats(s.instance, &stats);
    ck_assert_uint_eq(stats.bytes_allocated, plan->device_bytes + plan->symmetric_bytes +
                                                 plan->pinned_bytes + plan->host_bytes);
    run_layer(&s);
    run_layer(&s);
    ck_assert_uint_eq(s.mock.allocate_calls, plan->buffers_count);
    instance_stats(s.instance, &stats);
    ck_assert_uint_eq(stats.forwards, 2);
    ck_assert_uint_eq(stats.struct_size, sizeof stats);
    destroy(&s);
    instance_stats(s.instance, &stats);
    ck_assert_uint_eq(stats.bytes_allocated, 0);
    ck_assert_int_eq(create(&s), MOXIE_OK); // again, on the same instance
    run_layer(&s);
    destroy(&s);
    sample_fini(&s);
}
END_TEST

// The nth call of the host's allocator fails, for every n that create makes.
START_TEST(whatever_allocation_fails_nothing_is_left)
{
    struct sample s;
    int32_t answer = MOXIE_E_MEMORY;
    uint64_t n = 0;

    sample_init(&s, 0);
    for (n = 1; answer != MOXIE_OK; n++) {
        s.mock.allocate_fail_at = n;
        s.mock.allocate_calls = 0;
        answer = create(&s);
        if (answer == MOXIE_OK) break;
        ck_assert_int_eq(answer, MOXIE_E_MEMORY);
        ck_assert_ptr_nonnull(strstr(s.mock.text, "host's allocator could not give"));
        ck_assert(s.runner == NULL || s.dispatcher == NULL);
        destroy(&s);
        ck_assert_uint_eq(s.mock.bytes_live, 0);
        ck_assert_int_eq(s.instance->users, 0);
        ck_assert_uint_eq(s.instance->memory.bytes_held, 0);
    }
    ck_assert_uint_gt(n, 7);
    s.mock.allocate_fail_at = 0;
    run_layer(&s);
    destroy(&s);
    sample_fini(&s);
}
END_TEST

START_TEST(closing_waits_for_users)
{
    struct sample s;

    sample_init(&s, 0);
    ck_assert_int_eq(create(&s), MOXIE_OK);
    ck_assert_int_eq(instance_close(s.instance, &s.mock.error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(s.mock.text, "2 runners and dispatchers"));
    ck_assert_ptr_eq(instance_of(instance_handle(s.instance)), s.instance);
    run_layer(&s); // refused means unharmed
    runner_destroy(s.runner);
    ck_assert_int_eq(instance_close(s.instance, &s.mock.error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(s.mock.text, "1 runners and dispatchers"));
    dispatcher_destroy(s.dispatcher);
    sample_fini(&s);
}
END_TEST

START_TEST(two_instances_share_nothing)
{
    struct sample a, b;

    sample_init(&a, 0);
    sample_init(&b, 0);
    ck_assert_int_eq(create(&a), MOXIE_OK);
    ck_assert_int_eq(create(&b), MOXIE_OK);
    run_layer(&a);
    destroy(&a);
    sample_fini(&a);
    run_layer(&b);
    destroy(&b);
    sample_fini(&b);
}
END_TEST

// ---- The host's threads ------------------------------------------------------------------------

START_TEST(tasks_run_on_own_threads_or_the_hosts)
{
    struct sample s;

    for (int32_t hosts = 0; hosts < 2; hosts++) {
        sample_init(&s, hosts);
        ck_assert_ptr_null(s.instance->threads);
        ck_assert_int_eq(create(&s), MOXIE_OK);
        ck_assert_int_eq(s.instance->threads == NULL, hosts);
        run_layer(&s);
        ck_assert_int_eq(s.parallel_calls > 0, hosts);
        destroy(&s);
        sample_fini(&s);
    }
}
END_TEST

START_TEST(threads_are_checked)
{
    struct mock_host mock;
    moxie_instance *instance;

    mock_host_init(&mock);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_check_thread(instance, MOXIE_THREAD_INIT, &mock.error), MOXIE_OK);
    ck_assert_int_eq(instance_close(instance, &mock.error), MOXIE_OK);
    mock_host_check_threads(&mock, 1);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_check_thread(instance, MOXIE_THREAD_INIT, &mock.error), MOXIE_OK);
    ck_assert(!mock_logged(&mock, "HOST_MISBEHAVING"));
    mock.thread_answer = 0;
    ck_assert_int_eq(instance_check_thread(instance, MOXIE_THREAD_INIT, &mock.error),
                     MOXIE_E_INVALID);
    ck_assert(mock_logged(&mock, "HOST_MISBEHAVING thread: "));
    ck_assert(mock_logged(&mock, "tagged [init]\n"));
    ck_assert_int_eq(instance_check_thread(instance, MOXIE_THREAD_INSTANCE_SERIAL, &mock.error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(mock.text, "thread_check"));
    ck_assert(mock_logged(&mock, "tagged [serial]\n"));
    close_instance(&mock, instance);
}
END_TEST

// ---- Odds and ends -----------------------------------------------------------------------------

START_TEST(ranks_need_a_bootstrap)
{
    struct mock_host mock;
    moxie_instance *instance;
    moxie_dispatcher *dispatcher = (moxie_dispatcher *)(void *)&mock;

    mock_host_init(&mock);
    mock_set_i64(&mock, "dp_size", 2);
    mock_set_i64(&mock, "tp_size", 2);
    mock_set_i64(&mock, "ep_size", 2);
    mock_set_str(&mock, "dispatcher", "alltoall");
    instance = open_instance(&mock); // to judge and to plan, no peers are needed
    ck_assert_int_eq(instance_accepted(instance, &mock.error), MOXIE_OK);
    ck_assert_int_eq(dispatcher_create(instance, DISPATCHER_ALLTOALL, &dispatcher, &mock.error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_null(dispatcher);
    ck_assert_ptr_nonnull(strstr(mock.text, "ep_size is 2, but the host has no all_gather"));
    close_instance(&mock, instance);
}
END_TEST

START_TEST(a_kernels_answer_is_told)
{
    struct mock_host mock;
    moxie_instance *instance;

    mock_host_init(&mock);
    instance = open_instance(&mock);
    ck_assert_int_eq(instance_launched(instance, 22, "route", &mock.error), MOXIE_E_DEVICE);
    ck_assert_str_eq(mock.text, "route: a CPU kernel refused its arguments (22)");
    ck_assert_int_eq(instance_launched(instance, 12, "x", &mock.error), MOXIE_E_MEMORY); // ENOMEM
    ck_assert_ptr_eq(instance_stream(instance, NULL), &instance->stream);
    close_instance(&mock, instance);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, opening_registers_and_takes_no_memory);
    tcase_add_test(tests, a_host_may_refuse_a_backend);
    tcase_add_test(tests, hosts_have_any_name);
    tcase_add_test(tests, the_snapshot_reads_back);
    tcase_add_test(tests, the_configuration_is_read_once);
    tcase_add_test(tests, equal_configurations_plan_alike);
    tcase_add_loop_test(tests, a_call_may_bring_no_more_than_a_forward, 0, 4);
    tcase_add_test(tests, every_reason_at_once);
    tcase_add_test(tests, a_text_of_many_reasons_is_cut);
    tcase_add_test(tests, the_plan_is_what_is_taken);
    tcase_add_test(tests, whatever_allocation_fails_nothing_is_left);
    tcase_add_test(tests, closing_waits_for_users);
    tcase_add_test(tests, two_instances_share_nothing);
    tcase_add_test(tests, tasks_run_on_own_threads_or_the_hosts);
    tcase_add_test(tests, threads_are_checked);
#ifndef MOXIE_HAS_CUDA
    tcase_add_test(tests, a_device_without_kernels_is_planned_for_and_not_run);
#endif
    tcase_add_test(tests, ranks_need_a_bootstrap);
    tcase_add_test(tests, a_kernels_answer_is_told);
}

SUITE_MAIN("instance", 30, add)
