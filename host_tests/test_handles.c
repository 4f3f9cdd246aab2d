// The door before the plugin: handles of another library of the same process, and of an instance
// that is closed, are refused.

#include "abi/loader.h"
#include "host_tests/layer.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"

#include <stdlib.h>
#include <string.h>

// An instance of the program's own library, and what lives on it.
struct stage {
    struct layer layer;
    struct layer_weights_view weights;
    struct mock_host mock;
    struct said said;
    const moxie_api *api;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
};

static void stage_open(struct stage *stage)
{
    static const moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};
    moxie_error *error = &stage->said.error;

    memset(stage, 0, sizeof *stage);
    said_init(&stage->said);
    layer_open(&stage->layer, "mixtral_a");
    mock_host_init(&stage->mock);
    layer_configure(&stage->layer, &stage->mock);
    mock_set_i64(&stage->mock, "forward_tokens_max", 8);
    layer_weights_of(&stage->layer, 0, stage->layer.experts, &stage->weights);
    ACCEPTED(&stage->said, moxie_get_api_v1(&request, &stage->api, error));
    ACCEPTED(&stage->said, stage->api->open(&stage->mock.host, &stage->instance, error));
    ACCEPTED(&stage->said,
             mock_runner(&stage->mock, "moxie_cpu")
                 ->api->create(stage->instance, 0, &stage->weights.weights, &stage->runner, error));
    ACCEPTED(&stage->said, mock_dispatcher(&stage->mock, "local")
                               ->api->create(stage->instance, &stage->dispatcher, error));
}

static void stage_close(struct stage *stage)
{
    mock_runner(&stage->mock, "moxie_cpu")->api->destroy(stage->runner);
    mock_dispatcher(&stage->mock, "local")->api->destroy(stage->dispatcher);
    ACCEPTED(&stage->said, stage->api->close(stage->instance, &stage->said.error));
    mock_host_fini(&stage->mock);
    layer_close(&stage->layer);
}

START_TEST(handles_of_another_library_are_refused)
{
    struct stage stage;
    struct said *said = &stage.said;
    struct mock_host registered;
    moxie_library other;
    moxie_instance *instance;
    const moxie_dispatcher_api *dispatchers;
    const moxie_runner_api *runners;
    const moxie_step step = {.struct_size = sizeof step};
    const moxie_plan *plan;

    stage_open(&stage);
    ACCEPTED(said, moxie_load(OTHER_LIBRARY, "test", &other, &said->error));
    ck_assert_ptr_ne(other.api, stage.api);
    mock_host_init(&registered);
    ACCEPTED(said, other.api->open(&registered.host, &instance, &said->error));
    runners = mock_runner(&registered, "moxie_cpu")->api;
    dispatchers = mock_dispatcher(&registered, "local")->api;
    SAID(said, MOXIE_E_INVALID, other.api->plan(stage.instance, &plan, &said->error), "instance",
         "another library made it");
    SAID(said, MOXIE_E_INVALID, other.api->close(stage.instance, &said->error),
         "another library made it");
    SAID(said, MOXIE_E_INVALID, runners->weights_updated(stage.runner, NULL, 0, &said->error),
         "runner", "another library made it");
    SAID(said, MOXIE_E_INVALID, dispatchers->begin_forward(stage.dispatcher, &step, &said->error),
         "dispatcher", "another library made it");
    ACCEPTED(said, other.api->close(instance, &said->error));
    mock_host_fini(&registered);
    moxie_unload(&other);
    stage_close(&stage);
}
END_TEST

// Its own pages have gone back to the system with what was freed around it.
START_TEST(a_closed_instance_is_refused)
{
    enum { BLOCKS = 20 };
    void *blocks[BLOCKS];
    struct stage stage;
    struct said *said = &stage.said;
    moxie_instance *closed;
    const moxie_plan *plan;

    stage_open(&stage);
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = malloc(100 << 10);
        ck_assert_ptr_nonnull(blocks[i]);
    }
    ACCEPTED(said, stage.api->open(&stage.mock.host, &closed, &said->error));
    for (int i = 0; i < BLOCKS; i++)
        free(blocks[i]);
    ACCEPTED(said, stage.api->close(closed, &said->error));
    SAID(said, MOXIE_E_INVALID, stage.api->close(closed, &said->error), "closed or destroyed");
    SAID(said, MOXIE_E_INVALID, stage.api->plan(closed, &plan, &said->error), "closed or");
    stage_close(&stage);
}
END_TEST

static void add(TCase *tests)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)a_closed_instance_is_refused; // reading what was freed ends the program there
#else
    tcase_add_test(tests, a_closed_instance_is_refused);
#endif
    tcase_add_test(tests, handles_of_another_library_are_refused);
}

SUITE_MAIN("handles", 60, add)
