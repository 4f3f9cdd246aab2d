// The door before the plugin: runners of one instance that several threads create and destroy at
// once, as loaders of weights do, and an instance opened on a thread that may not.

#include "host_tests/layer.h"
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
    tcase_add_test(tests, open_reads_nothing_on_a_wrong_thread);
}

SUITE_MAIN("create_threads", 60, add)
