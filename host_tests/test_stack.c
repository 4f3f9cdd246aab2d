// abi.h says how much stack a call takes: every call of a layer's life, on a stack that is
// measured.

#include "host_tests/layer.h"
#include "host_tests/suite.h"
#include "plugin/tensor.h"

#include <stdlib.h>
#include <string.h>

#define STACK_BYTES ((size_t)1 << 20)
#define TAKEN_MOST  ((size_t)64 << 10) // as abi.h says
#define UNTOUCHED   0x5c
#define PAIRS_MAX   2048
#define RANKS       2

struct life {
    struct layer layer;
    struct mock_host mock;
    struct layer_weights_view weights;
    struct layer_batch batch;
    float *y, *expanded;
    float weight[PAIRS_MAX];
    int32_t counts[64], row_index[PAIRS_MAX];
    const char *dispatcher;
    int64_t experts; // of this rank
    unsigned char *stack;
    uintptr_t top; // of what the calls have of it
    int32_t refused;
};

// Copies of each row for each choice, and back.
static int32_t expand_and_fold(struct life *life, const moxie_api *api, moxie_runner *runner)
{
    const moxie_expand_api *expand = api->get_extension(MOXIE_EXPAND_EXTENSION);
    const struct layer *layer = &life->layer;
    const moxie_batch *batch = &life->batch.batch;
    const moxie_call call = {.struct_size = sizeof call};
    int64_t pairs = layer->tokens * layer->top_k, counts = life->experts + 1;
    int64_t rows_dims[2] = {pairs, layer->hidden}, index_dims[2] = {layer->tokens, layer->top_k};
    moxie_slab from = {
        .struct_size = sizeof from, .rows = batch->x, .ids = batch->ids, .weights = batch->weights};
    moxie_slab result = {.struct_size = sizeof result, .rows = batch->y};
    moxie_slab to = {.struct_size = sizeof to,
                     .rows =
                         tensor_make(life->expanded, 2, rows_dims, NULL, 1u << MOXIE_FORMAT_BF16),
                     .weights = tensor_make(life->weight, 1, &pairs, NULL, 1u << MOXIE_FORMAT_F32)};
    moxie_tensor index = tensor_make(life->row_index, 2, index_dims, NULL, TENSOR_INT32);
    moxie_rows in = {.struct_size = sizeof in,
                     .layout = MOXIE_LAYOUT_STANDARD,
                     .id_space = MOXIE_IDS_GLOBAL,
                     .slabs_count = 1,
                     .slab_stride = sizeof from,
                     .slabs = &from};
    moxie_rows out = in, expanded = in;

    out.slabs = &result;
    expanded.layout = MOXIE_LAYOUT_EXPERT_CONTIGUOUS;
    expanded.slabs = &to;
    expanded.counts = tensor_make(life->counts, 1, &counts, NULL, TENSOR_INT32);
    if (expand->expand(runner, &call, &in, &expanded, &index, &life->mock.error) != MOXIE_OK)
        return 1;
    to.rows = tensor_make(life->expanded, 2, rows_dims, NULL, 1u << MOXIE_FORMAT_F32);
    return expand->fold(runner, &call, &expanded, &index, &out, &life->mock.error) != MOXIE_OK;
}

static int32_t step(struct life *life, const moxie_api *api,
                    const moxie_dispatcher_api *dispatchers, moxie_dispatcher *dispatcher,
                    moxie_runner *runner)
{
    const moxie_step step = {.struct_size = sizeof step, .tokens = life->layer.tokens};
    const moxie_call call = {.struct_size = sizeof call};
    const moxie_runner_api *runners = mock_runner(&life->mock, "moxie_cpu")->api;
    moxie_error *error = &life->mock.error;
    const moxie_rows *in, *out;
    int32_t refused;

    refused = dispatchers->begin_forward(dispatcher, &step, error) != MOXIE_OK;
    refused += dispatchers->dispatch(dispatcher, &life->batch.batch, &in, &out, error) != MOXIE_OK;
    if (refused > 0) return refused;
    refused += runners->run(runner, &call, in, out, error) != MOXIE_OK;
    refused += dispatchers->combine(dispatcher, &life->batch.batch, error) != MOXIE_OK;
    refused += api->forward(dispatcher, runner, &life->batch.batch, error) != MOXIE_OK;
    return refused;
}

// No assertion here: it would take stack of its own.
static void *live(void *ctx)
{
    static const moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};
    struct life *life = ctx;
    moxie_error *error = &life->mock.error;
    const moxie_dispatcher_api *dispatchers;
    const moxie_runner_api *runners;
    const moxie_plan *plan;
    const moxie_api *api;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    moxie_stats stats = {.struct_size = sizeof stats};

    life->top = (uintptr_t)__builtin_frame_address(0);
    life->refused = 1;
    if (moxie_get_api_v1(&request, &api, error) != MOXIE_OK ||
        api->open(&life->mock.host, &instance, error) != MOXIE_OK)
        return NULL;
    runners = mock_runner(&life->mock, "moxie_cpu")->api;
    dispatchers = mock_dispatcher(&life->mock, life->dispatcher)->api;
    life->refused = api->plan(instance, &plan, error) != MOXIE_OK;
    if (runners->create(instance, 0, &life->weights.weights, &runner, error) != MOXIE_OK ||
        dispatchers->create(instance, &dispatcher, error) != MOXIE_OK)
        return life;
    life->refused += step(life, api, dispatchers, dispatcher, runner);
    life->refused += expand_and_fold(life, api, runner);
    life->refused += api->stats(instance, &stats, error) != MOXIE_OK;
    runners->destroy(runner);
    dispatchers->destroy(dispatcher);
    life->refused += api->close(instance, error) != MOXIE_OK;
    return NULL;
}

static void life_init(struct life *life, struct mock_group *group, int32_t rank)
{
    struct layer *layer = &life->layer;

    memset(life, 0, sizeof *life);
    layer_open(layer, "mixtral_a");
    mock_host_init(&life->mock);
    layer_configure(layer, &life->mock);
    mock_set_i64(&life->mock, "forward_tokens_max", layer->tokens);
    life->dispatcher = group != NULL ? "alltoall" : "local";
    life->experts = layer->experts / (group != NULL ? RANKS : 1);
    if (group != NULL) mock_host_join(&life->mock, group, rank);
    mock_set_str(&life->mock, "dispatcher", life->dispatcher);
    layer_weights_of(layer, rank * life->experts, life->experts, &life->weights);
    life->y = layer_poisoned(layer);
    ck_assert_int_le(layer->tokens * layer->top_k, PAIRS_MAX);
    ck_assert_int_lt(layer->experts, 64);
    life->expanded = calloc(PAIRS_MAX, (size_t)layer->hidden * sizeof *life->expanded);
    layer_batch_of(layer, 0, layer->tokens, life->y, &life->batch);
    life->stack = aligned_alloc(4096, STACK_BYTES);
    ck_assert(life->expanded != NULL && life->stack != NULL);
    memset(life->stack, UNTOUCHED, STACK_BYTES);
}

static void life_fini(struct life *life)
{
    mock_host_fini(&life->mock);
    layer_close(&life->layer);
    free(life->expanded);
    free(life->y);
    free(life->stack);
}

static void life_begin(struct life *life, pthread_t *thread)
{
    pthread_attr_t attributes;

    ck_assert_int_eq(pthread_attr_init(&attributes), 0);
    ck_assert_int_eq(pthread_attr_setstack(&attributes, life->stack, STACK_BYTES), 0);
    ck_assert_int_eq(pthread_create(thread, &attributes, live, life), 0);
    (void)pthread_attr_destroy(&attributes);
}

static void check_taken(const struct life *life)
{
    size_t left = 0;

    ck_assert_msg(life->refused == 0, "%d calls were refused; the last said: %s", life->refused,
                  life->mock.text);
    while (life->stack[left] == UNTOUCHED)
        left++;
    ck_assert_uint_le(life->top - (uintptr_t)(life->stack + left), TAKEN_MOST);
}

START_TEST(a_call_takes_no_more_than_abi_h_says)
{
    const int32_t ranks = _i == 0 ? 1 : RANKS;
    struct mock_group *group = _i == 0 ? NULL : mock_group_create(RANKS, 20000);
    static struct life lives[RANKS];
    pthread_t threads[RANKS];

    for (int32_t rank = 0; rank < ranks; rank++)
        life_init(&lives[rank], group, rank);
    for (int32_t rank = 0; rank < ranks; rank++)
        life_begin(&lives[rank], &threads[rank]);
    for (int32_t rank = 0; rank < ranks; rank++)
        ck_assert_int_eq(pthread_join(threads[rank], NULL), 0);
    for (int32_t rank = 0; rank < ranks; rank++) {
        check_taken(&lives[rank]);
        life_fini(&lives[rank]);
    }
    if (group != NULL) mock_group_destroy(group);
}
END_TEST

// Sanitizers put room between what lies on it.
static void add(TCase *tests)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    (void)tests;
    (void)a_call_takes_no_more_than_abi_h_says;
#else
    tcase_add_loop_test(tests, a_call_takes_no_more_than_abi_h_says, 0, 2);
#endif
}

SUITE_MAIN("stack", 60, add)
