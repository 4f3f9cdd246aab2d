// The door before the plugin: runners of one instance that several threads create and destroy at
// once, as loaders of weights do, callbacks that call the library, a thread that is cancelled,
// and an instance opened on a thread that may not.

#include "host_tests/layer.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <string.h>
#include <unistd.h>

#define THREADS 4
#define ROUNDS  60

struct loader {
    const moxie_runner_api *api;
    moxie_instance *instance;
    struct layer_weights_view weights;
    pthread_barrier_t *start;
    int32_t layer, refused;
};

static void *load(void *ctx)
{
    struct loader *loader = ctx;
    moxie_runner *runner;

    for (int32_t round = 0; round < ROUNDS; round++) {
        (void)pthread_barrier_wait(loader->start);
        loader->refused += loader->api->create(loader->instance, loader->layer,
                                               &loader->weights.weights, &runner, NULL) != MOXIE_OK;
        loader->api->destroy(runner);
    }
    return NULL;
}

static void *nothing(void *ctx)
{
    return ctx;
}

// Once those that have been joined are gone from there, too.
static int32_t threads_left(int32_t wanted)
{
    for (int32_t ms = 0; ms < 300 && names_in("/proc/self/task") != wanted; ms++)
        (void)usleep(1000);
    return names_in("/proc/self/task");
}

static const moxie_request request = {
    .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};

START_TEST(loaders_take_turns)
{
    struct loader loaders[THREADS];
    pthread_t threads[THREADS];
    pthread_barrier_t start;
    const moxie_api *api;
    struct mock_host mock;
    struct layer layer;
    moxie_instance *instance;
    int32_t threads_before;

    // ThreadSanitizer starts one of its own with the first.
    ck_assert_int_eq(pthread_create(&threads[0], NULL, nothing, NULL), 0);
    ck_assert_int_eq(pthread_join(threads[0], NULL), 0);
    threads_before = threads_left(3);
    layer_open(&layer, "mixtral_a");
    mock_host_init(&mock);
    layer_configure(&layer, &mock);
    mock_set_i64(&mock, "num_layers", THREADS);
    mock_set_i64(&mock, "forward_tokens_max", 8);
    ck_assert_int_eq(moxie_get_api_v1(&request, &api, &mock.error), MOXIE_OK);
    ck_assert_msg(api->open(&mock.host, &instance, &mock.error) == MOXIE_OK, "%s", mock.text);
    ck_assert_int_eq(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int32_t i = 0; i < THREADS; i++) {
        loaders[i] = (struct loader){.api = mock_runner(&mock, "moxie_cpu")->api,
                                     .instance = instance,
                                     .start = &start,
                                     .layer = i};
        layer_weights_of(&layer, 0, layer.experts, &loaders[i].weights);
        ck_assert_int_eq(pthread_create(&threads[i], NULL, load, &loaders[i]), 0);
    }
    for (int32_t i = 0; i < THREADS; i++) {
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
        ck_assert_int_eq(loaders[i].refused, 0);
    }
    ck_assert_uint_eq(mock.bytes_live, 0);
    ck_assert_msg(api->close(instance, &mock.error) == MOXIE_OK, "%s", mock.text);
    ck_assert_int_eq(threads_left(threads_before), threads_before);
    (void)pthread_barrier_destroy(&start);
    mock_host_fini(&mock);
    layer_close(&layer);
}
END_TEST

// ---- a callback that comes back ----------------------------------------------------------------

// A host whose allocator calls the library that asks it.
struct visitor {
    struct mock_host mock;
    struct layer layer;
    int32_t (*allocate)(void *ctx, const moxie_allocation *request, void **memory);
    const moxie_api *api;
    const moxie_runner_api *runners;
    moxie_instance *instance;
    moxie_runner *runner; // of layer 0, alive
    moxie_dispatcher *dispatcher;
    struct layer_weights_view weights;
    struct said said;
    int32_t visit; // 1: the next allocation does
    pthread_t closer;
    int32_t answer; // of the runner's create
};

static int32_t visit_at_once(void *ctx, const moxie_allocation *asked, void **memory)
{
    struct visitor *visitor = ctx;
    moxie_dispatcher *dispatcher = NULL;
    moxie_runner *runner = NULL;

    if (visitor->visit) {
        visitor->visit = 0;
        SAID(&visitor->said, MOXIE_E_INVALID,
             visitor->runners->create(visitor->instance, 1, &visitor->weights.weights, &runner,
                                      &visitor->said.error),
             "within a callback", "return from it first");
        ck_assert_ptr_null(runner);
        SAID(&visitor->said, MOXIE_E_INVALID,
             mock_dispatcher(&visitor->mock, "local")
                 ->api->create(visitor->instance, &dispatcher, &visitor->said.error),
             "within a callback");
        ck_assert_ptr_null(dispatcher);
        SAID(&visitor->said, MOXIE_E_INVALID,
             visitor->api->close(visitor->instance, &visitor->said.error), "within a callback");
        if (visitor->runner != NULL) visitor->runners->destroy(visitor->runner);
        if (visitor->dispatcher != NULL)
            mock_dispatcher(&visitor->mock, "local")->api->destroy(visitor->dispatcher);
    }
    return visitor->allocate(&visitor->mock, asked, memory);
}

static void *close_instance(void *ctx)
{
    struct visitor *visitor = ctx;

    SAID(&visitor->said, MOXIE_E_INVALID,
         visitor->api->close(visitor->instance, &visitor->said.error), "1 runners and dispatchers");
    return NULL;
}

// Long enough for the other thread to come as far as it may.
static int32_t visit_meanwhile(void *ctx, const moxie_allocation *asked, void **memory)
{
    struct visitor *visitor = ctx;

    if (visitor->visit) {
        visitor->visit = 0;
        ck_assert_int_eq(pthread_create(&visitor->closer, NULL, close_instance, visitor), 0);
        (void)usleep(20000);
    }
    return visitor->allocate(&visitor->mock, asked, memory);
}

// And visits while it creates the runner.
static void visitor_open(struct visitor *visitor,
                         int32_t (*allocate)(void *, const moxie_allocation *, void **))
{
    struct mock_host *mock = &visitor->mock;

    memset(visitor, 0, sizeof *visitor);
    layer_open(&visitor->layer, "mixtral_a");
    mock_host_init(mock);
    layer_configure(&visitor->layer, mock);
    mock_set_i64(mock, "num_layers", 2);
    mock_set_i64(mock, "forward_tokens_max", 8);
    mock_set_i64(mock, "capture_routed_experts", 1); // or a dispatcher beside a runner takes none
    said_init(&visitor->said);
    visitor->allocate = mock->host.allocate;
    mock->host.allocate = allocate; // its ctx is the mock's, which the visitor begins with
    ck_assert_int_eq(moxie_get_api_v1(&request, &visitor->api, &mock->error), MOXIE_OK);
    ck_assert_msg(visitor->api->open(&mock->host, &visitor->instance, &mock->error) == MOXIE_OK,
                  "%s", mock->text);
    visitor->runners = mock_runner(mock, "moxie_cpu")->api;
    layer_weights_of(&visitor->layer, 0, visitor->layer.experts, &visitor->weights);
    visitor->visit = 1;
    ck_assert_msg(visitor->runners->create(visitor->instance, 0, &visitor->weights.weights,
                                           &visitor->runner, &mock->error) == MOXIE_OK,
                  "%s", mock->text);
}

static void visitor_close(struct visitor *visitor)
{
    struct mock_host *mock = &visitor->mock;

    visitor->runners->destroy(visitor->runner);
    ck_assert_msg(visitor->api->close(visitor->instance, &mock->error) == MOXIE_OK, "%s",
                  mock->text);
    mock_host_fini(mock);
    layer_close(&visitor->layer);
}

START_TEST(a_callback_that_comes_back_is_refused)
{
    struct visitor visitor;
    struct mock_host *mock = &visitor.mock;
    moxie_dispatcher *dispatcher;
    moxie_runner *runner;

    visitor_open(&visitor, visit_at_once);
    ck_assert_int_eq(visitor.visit, 0);
    ck_assert(mock_logged(mock, "HOST_MISBEHAVING thread: called from within a callback"));
    visitor.visit = 1;
    ck_assert_msg(
        mock_dispatcher(mock, "local")->api->create(visitor.instance, &dispatcher, &mock->error) ==
            MOXIE_OK,
        "%s", mock->text);
    ck_assert_int_eq(visitor.visit, 0);
    // The runner outlived its destruction from there.
    SAID(&visitor.said, MOXIE_E_INVALID, visitor.api->close(visitor.instance, &visitor.said.error),
         "2 runners and dispatchers");
    // And so does the dispatcher, from where a runner is created.
    runner = visitor.runner;
    visitor.runner = NULL;
    visitor.runners->destroy(runner);
    visitor.dispatcher = dispatcher;
    visitor.visit = 1;
    ck_assert_msg(visitor.runners->create(visitor.instance, 0, &visitor.weights.weights,
                                          &visitor.runner, &mock->error) == MOXIE_OK,
                  "%s", mock->text);
    ck_assert_int_eq(visitor.visit, 0);
    SAID(&visitor.said, MOXIE_E_INVALID, visitor.api->close(visitor.instance, &visitor.said.error),
         "2 runners and dispatchers");
    mock_dispatcher(mock, "local")->api->destroy(dispatcher);
    visitor_close(&visitor);
}
END_TEST

START_TEST(close_waits_for_what_is_being_created)
{
    struct visitor visitor;

    visitor_open(&visitor, visit_meanwhile);
    ck_assert_int_eq(pthread_join(visitor.closer, NULL), 0);
    visitor_close(&visitor);
}
END_TEST

static int32_t visit_cancelled(void *ctx, const moxie_allocation *asked, void **memory)
{
    struct visitor *visitor = ctx;

    if (visitor->visit > 1) {
        visitor->visit = 0;
        (void)pthread_cancel(pthread_self());
        pthread_testcancel();
    }
    return visitor->allocate(&visitor->mock, asked, memory);
}

static void *create_runner(void *ctx)
{
    struct visitor *visitor = ctx;

    visitor->answer = visitor->runners->create(visitor->instance, 0, &visitor->weights.weights,
                                               &visitor->runner, NULL);
    pthread_testcancel();
    return NULL;
}

START_TEST(a_thread_that_is_cancelled_creates_to_the_end)
{
    struct visitor visitor;
    pthread_t thread;
    void *end;

    visitor_open(&visitor, visit_cancelled);
    visitor.runners->destroy(visitor.runner);
    visitor.visit = 2;
    visitor.answer = -1;
    ck_assert_int_eq(pthread_create(&thread, NULL, create_runner, &visitor), 0);
    ck_assert_int_eq(pthread_join(thread, &end), 0);
    ck_assert_ptr_eq(end, PTHREAD_CANCELED);
    ck_assert_int_eq(visitor.answer, MOXIE_OK);
    visitor_close(&visitor);
}
END_TEST

static void *close_cancelled(void *ctx)
{
    struct visitor *visitor = ctx;

    (void)pthread_cancel(pthread_self());
    visitor->answer = visitor->api->close(visitor->instance, NULL);
    pthread_testcancel();
    return NULL;
}

// Which waits for the instance's threads.
START_TEST(a_thread_that_is_cancelled_closes_to_the_end)
{
    struct visitor visitor;
    pthread_t thread;
    void *end;

    visitor_open(&visitor, visit_cancelled);
    visitor.runners->destroy(visitor.runner);
    visitor.answer = -1;
    ck_assert_int_eq(pthread_create(&thread, NULL, close_cancelled, &visitor), 0);
    ck_assert_int_eq(pthread_join(thread, &end), 0);
    ck_assert_ptr_eq(end, PTHREAD_CANCELED);
    ck_assert_int_eq(visitor.answer, MOXIE_OK);
    mock_host_fini(&visitor.mock);
    layer_close(&visitor.layer);
}
END_TEST

START_TEST(open_reads_nothing_on_a_wrong_thread)
{
    const moxie_api *api;
    struct mock_host mock;
    moxie_instance *instance;

    mock_host_init(&mock);
    mock_host_check_threads(&mock, 0);
    ck_assert_int_eq(moxie_get_api_v1(&request, &api, &mock.error), MOXIE_OK);
    ck_assert_int_eq(api->open(&mock.host, &instance, &mock.error), MOXIE_E_INVALID);
    ck_assert_ptr_null(instance);
    ck_assert_ptr_nonnull(strstr(mock.text, "thread_check"));
    ck_assert(mock_logged(&mock, "HOST_MISBEHAVING thread: "));
    ck_assert(mock_logged(&mock, "tagged [init]\n"));
    ck_assert_uint_eq(mock.reads + mock.runners_count, 0);
    mock_host_fini(&mock);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, loaders_take_turns);
    tcase_add_test(tests, a_callback_that_comes_back_is_refused);
    tcase_add_test(tests, close_waits_for_what_is_being_created);
    tcase_add_test(tests, a_thread_that_is_cancelled_creates_to_the_end);
    tcase_add_test(tests, a_thread_that_is_cancelled_closes_to_the_end);
    tcase_add_test(tests, open_reads_nothing_on_a_wrong_thread);
}

SUITE_MAIN("create_threads", 60, add)
