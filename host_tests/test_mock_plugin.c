// The mock plugin's strictness: each thing that a host may not do is refused in words and logged as
// HOST_MISBEHAVING, and a host that does none of them hears nothing.

#include "host_tests/mock_host.h"
#include "host_tests/suite.h"

#include "abi/loader.h"

#include <stdio.h>
#include <string.h>

#define HIDDEN       4
#define INTERMEDIATE 3
#define EXPERTS      2
#define TOKENS       3

struct world {
    struct mock_host mock;
    moxie_library library;
    const moxie_api *api;
    const moxie_runner_api *runners;
    const moxie_dispatcher_api *dispatchers;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    float w1[EXPERTS][2 * INTERMEDIATE][HIDDEN], w2[EXPERTS][HIDDEN][INTERMEDIATE];
    float x[TOKENS][HIDDEN], weights[TOKENS][1], y[TOKENS][HIDDEN];
    int32_t ids[TOKENS][1];
    int64_t w1_shape[3], w2_shape[3], wide[2], choices[2];
    moxie_matrix matrices[2];
    moxie_weights layer;
    moxie_batch batch;
};

static moxie_tensor tensor(void *data, uint8_t code, int32_t ndim, int64_t *shape)
{
    return (moxie_tensor){data, {MOXIE_DEVICE_CPU, 0}, ndim, {code, 32, 1}, shape, NULL, 0};
}

static moxie_matrix matrix(void *values, int32_t order, int64_t *shape)
{
    return (moxie_matrix){.struct_size = sizeof(moxie_matrix),
                          .format = MOXIE_FORMAT_F32,
                          .order = order,
                          .values = tensor(values, MOXIE_DTYPE_FLOAT, 3, shape)};
}

static void describe(struct world *w)
{
    memcpy(w->w1_shape, (int64_t[]){EXPERTS, 2 * INTERMEDIATE, HIDDEN}, sizeof w->w1_shape);
    memcpy(w->w2_shape, (int64_t[]){EXPERTS, HIDDEN, INTERMEDIATE}, sizeof w->w2_shape);
    memcpy(w->wide, (int64_t[]){TOKENS, HIDDEN}, sizeof w->wide);
    memcpy(w->choices, (int64_t[]){TOKENS, 1}, sizeof w->choices);
    w->matrices[0] = matrix(w->w1, MOXIE_ORDER_GATE_UP, w->w1_shape);
    w->matrices[1] = matrix(w->w2, MOXIE_ORDER_PLAIN, w->w2_shape);
    w->layer = (moxie_weights){sizeof w->layer, 0, &w->matrices[0], &w->matrices[1]};
    w->batch = (moxie_batch){.struct_size = sizeof w->batch,
                             .id_space = MOXIE_IDS_GLOBAL,
                             .x = tensor(w->x, MOXIE_DTYPE_FLOAT, 2, w->wide),
                             .ids = tensor(w->ids, MOXIE_DTYPE_INT, 2, w->choices),
                             .weights = tensor(w->weights, MOXIE_DTYPE_FLOAT, 2, w->choices),
                             .y = tensor(w->y, MOXIE_DTYPE_FLOAT, 2, w->wide)};
}

static void world_open(struct world *w)
{
    ck_assert_int_eq(w->api->open(&w->mock.host, &w->instance, &w->mock.error), MOXIE_OK);
    w->runners = mock_runner(&w->mock, "mock_cpu")->api;
    w->dispatchers = mock_dispatcher(&w->mock, "local")->api;
}

static void world_init(struct world *w)
{
    static const char *const formats[] = {"weight_format", "input_format", "output_format"};

    memset(w, 0, sizeof *w);
    mock_host_init(&w->mock);
    mock_set_i64(&w->mock, "hidden_size", HIDDEN);
    mock_set_i64(&w->mock, "intermediate_size", INTERMEDIATE);
    mock_set_i64(&w->mock, "num_experts", EXPERTS);
    mock_set_i64(&w->mock, "top_k", 1);
    mock_set_i64(&w->mock, "forward_tokens_max", TOKENS);
    for (int i = 0; i < 3; i++)
        mock_set_str(&w->mock, formats[i], "f32");
    ck_assert_int_eq(moxie_load(MOCK_LIBRARY, "suite", &w->library, &w->mock.error), MOXIE_OK);
    w->api = w->library.api;
    describe(w);
}

static void world_create(struct world *w)
{
    world_open(w);
    ck_assert_int_eq(w->runners->create(w->instance, 0, &w->layer, &w->runner, &w->mock.error),
                     MOXIE_OK);
    ck_assert_int_eq(w->dispatchers->create(w->instance, &w->dispatcher, &w->mock.error), MOXIE_OK);
}

static int32_t begin(struct world *w)
{
    const moxie_step step = {.struct_size = sizeof step, .tokens = TOKENS};

    return w->dispatchers->begin_forward(w->dispatcher, &step, &w->mock.error);
}

static int32_t forward(struct world *w)
{
    return w->api->forward(w->dispatcher, w->runner, &w->batch, &w->mock.error);
}

static void world_fini(struct world *w)
{
    if (w->dispatcher != NULL) w->dispatchers->destroy(w->dispatcher);
    if (w->runner != NULL) w->runners->destroy(w->runner);
    if (w->instance != NULL) ck_assert_int_eq(w->api->close(w->instance, &w->mock.error), MOXIE_OK);
    moxie_unload(&w->library);
    mock_host_fini(&w->mock);
}

// The call before this one was refused, and `what` is in the text and in the log.
static void breached(struct world *w, int32_t status, const char *what)
{
    char line[1200];

    ck_assert_int_eq(status, MOXIE_E_INVALID);
    ck_assert_int_eq(w->mock.error.code, MOXIE_E_INVALID);
    ck_assert_msg(strstr(w->mock.text, what) != NULL, "\"%s\" lacks \"%s\"", w->mock.text, what);
    (void)snprintf(line, sizeof line, "HOST_MISBEHAVING mock: %s", w->mock.text);
    ck_assert_msg(mock_logged(&w->mock, line), "not logged: %s", line);
}

START_TEST(a_good_host_hears_nothing)
{
    struct world w;

    world_init(&w);
    world_create(&w);
    for (int i = 0; i < 2; i++) {
        ck_assert_int_eq(begin(&w), MOXIE_OK);
        ck_assert_int_eq(forward(&w), MOXIE_OK);
    }
    ck_assert(!mock_logged(&w.mock, "MISBEHAVING"));
    world_fini(&w);
}
END_TEST

START_TEST(dead_handles)
{
    struct world w;
    moxie_instance *closed;
    moxie_dispatcher *destroyed;

    world_init(&w);
    world_create(&w);
    breached(&w, w.api->close(w.instance, &w.mock.error), "2 runners and dispatchers live");
    destroyed = w.dispatcher;
    w.dispatchers->destroy(destroyed);
    w.dispatcher = NULL;
    breached(&w, w.dispatchers->poll_error(destroyed, &w.mock.error), "was destroyed before");
    ck_assert_int_eq(w.dispatchers->create(w.instance, &w.dispatcher, &w.mock.error), MOXIE_OK);
    ck_assert_ptr_ne(w.dispatcher, destroyed);
    w.dispatchers->destroy(destroyed);
    ck_assert_int_eq(w.dispatchers->poll_error(w.dispatcher, &w.mock.error), MOXIE_OK);
    breached(&w, w.dispatchers->poll_error((moxie_dispatcher *)(void *)w.runner, &w.mock.error),
             "is a runner");
    // Of no instance, so that nobody's log can tell.
    ck_assert_int_eq(w.dispatchers->poll_error((moxie_dispatcher *)(void *)&w, &w.mock.error),
                     MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(w.mock.text, "no such handle"));
    world_fini(&w);
    world_init(&w);
    world_open(&w);
    closed = w.instance;
    ck_assert_int_eq(w.api->close(closed, &w.mock.error), MOXIE_OK);
    w.instance = NULL;
    ck_assert_int_eq(w.api->close(closed, &w.mock.error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(w.mock.text, "was closed before"));
    world_fini(&w);
}
END_TEST

START_TEST(calls_have_an_order)
{
    const moxie_rows *in = NULL, *out = NULL;
    struct world w;
    float other[TOKENS][HIDDEN];

    world_init(&w);
    world_create(&w);
    breached(&w, forward(&w), "next is begin_forward");
    ck_assert_int_eq(begin(&w), MOXIE_OK);
    breached(&w, w.dispatchers->combine(w.dispatcher, &w.batch, &w.mock.error), "next is dispatch");
    ck_assert_int_eq(w.dispatchers->dispatch(w.dispatcher, &w.batch, &in, &out, &w.mock.error),
                     MOXIE_OK);
    breached(&w, begin(&w), "inside a layer");
    w.batch.y.data = other;
    breached(&w, w.dispatchers->combine(w.dispatcher, &w.batch, &w.mock.error),
             "not that of the layer's dispatch");
    w.batch.y.data = w.y;
    ck_assert_int_eq(w.dispatchers->combine(w.dispatcher, &w.batch, &w.mock.error), MOXIE_OK);
    world_fini(&w);
}
END_TEST

START_TEST(threads_are_checked)
{
    struct world w;

    world_init(&w);
    mock_host_check_threads(&w.mock, 1);
    world_create(&w);
    ck_assert_int_eq(begin(&w), MOXIE_OK);
    w.mock.thread_answer = 0;
    breached(&w, forward(&w), "thread_check");
    w.mock.thread_answer = 1;
    ck_assert_int_eq(forward(&w), MOXIE_OK);
    world_fini(&w);
}
END_TEST

// ---- Callbacks that misbehave ------------------------------------------------------------------

static struct world *current; // a callback has no other way to the handles

static void run_some(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t i), void *arg)
{
    (void)ctx;
    for (uint64_t i = 1; i < tasks; i++)
        task(arg, i);
}

static void run_and_call(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t i), void *arg)
{
    moxie_stats stats = {.struct_size = sizeof stats};
    moxie_dispatcher *another = NULL;

    (void)ctx;
    for (uint64_t i = 0; i < tasks; i++)
        task(arg, i);
    breached(current, current->api->stats(current->instance, &stats, &current->mock.error),
             "while another call");
    breached(current,
             current->dispatchers->create(current->instance, &another, &current->mock.error),
             "during a step");
    // Polling is for any time.
    ck_assert_int_eq(current->dispatchers->poll_error(current->dispatcher, NULL), MOXIE_OK);
}

START_TEST(parallel_for_runs_every_task)
{
    struct world w;

    world_init(&w);
    w.mock.host.parallel_for = run_some;
    world_create(&w);
    ck_assert_int_eq(begin(&w), MOXIE_OK);
    breached(&w, forward(&w), "task 0 0 times");
    world_fini(&w);
}
END_TEST

START_TEST(a_step_excludes_other_calls)
{
    struct world w;

    world_init(&w);
    w.mock.host.parallel_for = run_and_call;
    current = &w;
    world_create(&w);
    ck_assert_int_eq(begin(&w), MOXIE_OK);
    ck_assert_int_eq(forward(&w), MOXIE_OK);
    world_fini(&w);
}
END_TEST

static unsigned char room[4096] __attribute__((aligned(256)));
static int allocate_how;

static int32_t allocate_badly(void *ctx, const moxie_allocation *request, void **memory)
{
    (void)ctx;
    (void)request;
    *memory = allocate_how == 0 ? NULL : allocate_how == 1 ? room + 64 : room;
    return 0;
}

static void release_nothing(void *ctx, const moxie_allocation *request, void *memory)
{
    (void)ctx;
    (void)request;
    (void)memory;
}

START_TEST(memory_is_what_was_asked_for)
{
    static const char *const texts[] = {"gave no memory", "not aligned", "overlaps that of"};
    struct world w;

    for (allocate_how = 0; allocate_how < 3; allocate_how++) {
        world_init(&w);
        mock_set_i64(&w.mock, "capture_routed_experts", 1);
        w.mock.host.allocate = allocate_badly;
        w.mock.host.release = release_nothing;
        world_open(&w);
        breached(&w, w.dispatchers->create(w.instance, &w.dispatcher, &w.mock.error),
                 texts[allocate_how]);
        ck_assert_ptr_null(w.dispatcher);
        world_fini(&w);
    }
}
END_TEST

START_TEST(weights_change_with_notice)
{
    struct world w;

    world_init(&w);
    world_create(&w);
    ck_assert_int_eq(begin(&w), MOXIE_OK);
    w.w2[1][2][1] = 1.0f;
    breached(&w, forward(&w), "weights_updated");
    ck_assert_int_eq(w.runners->weights_updated(w.runner, NULL, 0, &w.mock.error), MOXIE_OK);
    world_fini(&w);
}
END_TEST

START_TEST(getters_keep_their_contract)
{
    const moxie_report *report = NULL;
    struct world w;

    world_init(&w);
    mock_set_code(&w.mock, "num_layers", 9);
    mock_set_raw(&w.mock, "dispatcher", "local", 6, 3);
    world_open(&w);
    ck_assert(mock_logged(&w.mock, "HOST_MISBEHAVING mock: the configuration's num_layers"));
    ck_assert(mock_logged(&w.mock, "HOST_MISBEHAVING mock: the configuration's dispatcher"));
    ck_assert_int_eq(w.api->validate(w.instance, &report, &w.mock.error), MOXIE_OK);
    ck_assert_uint_eq(report->reasons_count, 2);
    world_fini(&w);
}
END_TEST

START_TEST(structs_have_their_size)
{
    moxie_step step = {.struct_size = sizeof step - 1, .tokens = TOKENS};
    struct world w;

    world_init(&w);
    world_create(&w);
    breached(&w, w.dispatchers->begin_forward(w.dispatcher, &step, &w.mock.error), "struct_size");
    step.struct_size = 5000;
    breached(&w, w.dispatchers->begin_forward(w.dispatcher, &step, &w.mock.error), "struct_size");
    w.layer.reserved0 = 1;
    breached(&w, w.runners->create(w.instance, 0, &w.layer, &(moxie_runner *){NULL}, &w.mock.error),
             "reserved");
    world_fini(&w);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, a_good_host_hears_nothing);
    tcase_add_test(tests, dead_handles);
    tcase_add_test(tests, calls_have_an_order);
    tcase_add_test(tests, threads_are_checked);
    tcase_add_test(tests, parallel_for_runs_every_task);
    tcase_add_test(tests, a_step_excludes_other_calls);
    tcase_add_test(tests, memory_is_what_was_asked_for);
    tcase_add_test(tests, weights_change_with_notice);
    tcase_add_test(tests, getters_keep_their_contract);
    tcase_add_test(tests, structs_have_their_size);
}

SUITE_MAIN("mock_plugin", 60, add)
