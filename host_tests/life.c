// A life, call by call.

#include "host_tests/life.h"

#include "host_tests/suite.h"

#include <string.h>

// What the library allocates while `call` is evaluated is counted.
#define CALL(life, call) (fault_libc_arm(&(life)->host), called(call))

static int32_t called(int32_t answer)
{
    fault_libc_arm(NULL);
    return answer;
}

const moxie_api *life_api(void)
{
    const moxie_request request = {.struct_size = sizeof request,
                                   .abi_min = MOXIE_ABI_VERSION,
                                   .abi_max = MOXIE_ABI_VERSION,
                                   .host_build = "faulty host"};
    const moxie_api *api = NULL;

    ck_assert_int_eq(moxie_get_api_v1(&request, &api, NULL), MOXIE_OK);
    return api;
}

void life_init(struct life *life, const struct layer *layer, const char *dispatcher,
               const struct fault *fault)
{
    struct mock_host *mock = &life->host.mock;

    memset(life, 0, sizeof *life);
    fault_host_init(&life->host, fault);
    layer_configure(layer, mock);
    mock_set_str(mock, "dispatcher", dispatcher);
    mock_set_i64(mock, "forward_tokens_max", layer->tokens);
    mock_set_i64(mock, "capture_routed_experts", 1);
    life->api = life_api();
    life->layer = layer;
    life->ranks = 1;
    life->parts[0] = layer->tokens;
    life->stopped_at = LIFE_STEPS;
    life->step = (moxie_step){.struct_size = sizeof life->step};
    life->call = (moxie_call){.struct_size = sizeof life->call};
    life->captured = (moxie_captured){.struct_size = sizeof life->captured};
    life->stats = (moxie_stats){.struct_size = sizeof life->stats};
    life_join(life, NULL, 1, 0);
}

void life_join(struct life *life, struct mock_group *group, int32_t ranks, int32_t index)
{
    const struct layer *layer = life->layer;

    if (group != NULL) mock_host_join(&life->host.mock, group, index);
    layer_parts(layer, ranks, life->parts);
    mock_set_i64(&life->host.mock, "forward_tokens_max", life->parts[0]);
    life->ranks = ranks;
    life->index = index;
    life->first = layer_part_first(layer->tokens, ranks, index);
    life->y_bytes = life->parts[index] * layer->hidden * (int64_t)sizeof *life->y;
    free(life->y);
    life->y = malloc((size_t)life->y_bytes);
    ck_assert_ptr_nonnull(life->y);
    layer_batch_of(layer, life->first, life->parts[index], life->y, &life->batch);
    life->step.tokens = life->parts[index];
    life->step.rank_tokens = life->parts;
    life->captured.dp_rank = index;
}

static void spoil_y(struct life *life)
{
    memset(life->y, 0xff, (size_t)life->y_bytes);
}

// Every byte of y is `byte`.
static int y_is(const struct life *life, unsigned char byte)
{
    const unsigned char *bytes = (const unsigned char *)life->y;

    for (int64_t i = 0; i < life->y_bytes; i++) {
        if (bytes[i] != byte) return 0;
    }
    return 1;
}

static int32_t step_open(struct life *life)
{
    int32_t answer;

    life->instance = (moxie_instance *)(void *)life;
    answer =
        CALL(life, life->api->open(&life->host.mock.host, &life->instance, &life->host.mock.error));
    ck_assert_int_eq(life->instance == NULL, answer != MOXIE_OK);
    return answer;
}

static int32_t step_validate(struct life *life)
{
    const moxie_report *report = (const moxie_report *)(const void *)life;
    int32_t answer =
        CALL(life, life->api->validate(life->instance, &report, &life->host.mock.error));

    ck_assert_int_eq(report == NULL, answer != MOXIE_OK);
    return answer;
}

// The one failure that hands something out is CONFIG.
static int32_t step_plan(struct life *life)
{
    int32_t answer;

    life->plan = (const moxie_plan *)(const void *)life;
    answer = CALL(life, life->api->plan(life->instance, &life->plan, &life->host.mock.error));
    ck_assert_int_eq(life->plan == NULL, answer != MOXIE_OK && answer != MOXIE_E_CONFIG);
    if (answer == MOXIE_OK)
        layer_weights_of(life->layer, life->plan->bounds->expert_first,
                         life->plan->bounds->experts_local, &life->view);
    return answer;
}

static int32_t step_runner(struct life *life)
{
    const moxie_runner_info *info = mock_runner(&life->host.mock, "moxie_cpu");
    int32_t answer;

    ck_assert_ptr_nonnull(info);
    life->runner_api = info->api;
    life->runner = (moxie_runner *)(void *)life;
    answer = CALL(life, info->api->create(life->instance, 0, &life->view.weights, &life->runner,
                                          &life->host.mock.error));
    ck_assert_int_eq(life->runner == NULL, answer != MOXIE_OK);
    return answer;
}

// The one that the configuration chose, which a lie may have changed.
static const char *chosen_dispatcher(const struct life *life)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};

    for (uint64_t i = 0; life->api->config(life->instance, i, &entry) == MOXIE_OK; i++) {
        if (strcmp(entry.key, "dispatcher") == 0) return entry.value;
    }
    ck_abort_msg("no key dispatcher");
}

static int32_t step_dispatcher(struct life *life)
{
    const moxie_dispatcher_info *info = mock_dispatcher(&life->host.mock, chosen_dispatcher(life));
    int32_t answer;

    ck_assert_ptr_nonnull(info);
    life->dispatcher_api = info->api;
    life->dispatcher = (moxie_dispatcher *)(void *)life;
    answer =
        CALL(life, info->api->create(life->instance, &life->dispatcher, &life->host.mock.error));
    ck_assert_int_eq(life->dispatcher == NULL, answer != MOXIE_OK);
    return answer;
}

static int32_t step_begin(struct life *life)
{
    spoil_y(life);
    return CALL(life, life->dispatcher_api->begin_forward(life->dispatcher, &life->step,
                                                          &life->host.mock.error));
}

static int32_t step_forward(struct life *life)
{
    int32_t answer = CALL(life, life->api->forward(life->dispatcher, life->runner,
                                                   &life->batch.batch, &life->host.mock.error));

    if (answer == MOXIE_E_INVALID) ck_assert(y_is(life, 0xff));
    return answer;
}

static int32_t step_dispatch_send(struct life *life)
{
    return CALL(life, life->dispatcher_api->dispatch_send(life->dispatcher, &life->batch.batch,
                                                          &life->host.mock.error));
}

static int32_t step_dispatch_recv(struct life *life)
{
    int32_t answer;

    life->in = life->out = (const moxie_rows *)(const void *)life;
    answer = CALL(life, life->dispatcher_api->dispatch_recv(life->dispatcher, &life->batch.batch,
                                                            &life->in, &life->out,
                                                            &life->host.mock.error));
    ck_assert_int_eq(life->in == NULL, answer != MOXIE_OK);
    ck_assert_int_eq(life->out == NULL, answer != MOXIE_OK);
    if (answer != MOXIE_OK) return answer;
    life->rows_in = *life->in;
    life->rows_out = *life->out;
    ck_assert_uint_le(life->in->slabs_count, MOXIE_RANKS_MAX);
    memcpy(life->slabs_in, life->in->slabs, life->in->slabs_count * sizeof life->slabs_in[0]);
    life->rows_in.slabs = life->slabs_in;
    return answer;
}

static int32_t step_run(struct life *life)
{
    return CALL(life, life->runner_api->run(life->runner, &life->call, &life->rows_in,
                                            &life->rows_out, &life->host.mock.error));
}

static int32_t step_combine_send(struct life *life)
{
    return CALL(life, life->dispatcher_api->combine_send(life->dispatcher, &life->batch.batch,
                                                         &life->host.mock.error));
}

static int32_t step_combine_recv(struct life *life)
{
    return CALL(life, life->dispatcher_api->combine_recv(life->dispatcher, &life->batch.batch,
                                                         &life->host.mock.error));
}

// The ranks meet first: one that is still inside a layer takes a new generation for a failure.
static int32_t step_active_ranks(struct life *life)
{
    uint8_t active[MOXIE_RANKS_MAX];

    memset(active, 1, sizeof active);
    if (strcmp(chosen_dispatcher(life), "local") == 0) return MOXIE_OK;
    if (life->ranks > 1) (void)life->host.honest.barrier(&life->host);
    return CALL(life, life->dispatcher_api->set_active_ranks(life->dispatcher, active,
                                                             &life->host.mock.error));
}

static int32_t step_captured(struct life *life)
{
    return CALL(life, life->api->captured(life->instance, &life->captured, &life->host.mock.error));
}

static int32_t step_stats(struct life *life)
{
    return CALL(life, life->api->stats(life->instance, &life->stats, &life->host.mock.error));
}

// A destroy that the host's thread_check refuses has done nothing, and is made again.
static void destroy_both(struct life *life)
{
    int32_t struck = life->host.struck;

    if (life->dispatcher != NULL) life->dispatcher_api->destroy(life->dispatcher);
    if (life->dispatcher != NULL && life->host.struck != struck)
        life->dispatcher_api->destroy(life->dispatcher);
    life->dispatcher = NULL;
    struck = life->host.struck;
    if (life->runner != NULL) life->runner_api->destroy(life->runner);
    if (life->runner != NULL && life->host.struck != struck)
        life->runner_api->destroy(life->runner);
    life->runner = NULL;
}

static int32_t step_close(struct life *life)
{
    int32_t answer;

    destroy_both(life);
    answer = life->api->close(life->instance, &life->host.mock.error);
    if (answer == MOXIE_OK) life->instance = NULL;
    return answer;
}

static const struct {
    const char *name;
    int32_t (*take)(struct life *life);
} steps[LIFE_STEPS] = {
    [LIFE_OPEN] = {"open", step_open},
    [LIFE_VALIDATE] = {"validate", step_validate},
    [LIFE_PLAN] = {"plan", step_plan},
    [LIFE_RUNNER] = {"runner create", step_runner},
    [LIFE_DISPATCHER] = {"dispatcher create", step_dispatcher},
    [LIFE_BEGIN] = {"begin_forward", step_begin},
    [LIFE_FORWARD] = {"forward", step_forward},
    [LIFE_BEGIN_HALVES] = {"begin_forward of the halves", step_begin},
    [LIFE_DISPATCH_SEND] = {"dispatch_send", step_dispatch_send},
    [LIFE_DISPATCH_RECV] = {"dispatch_recv", step_dispatch_recv},
    [LIFE_RUN] = {"run", step_run},
    [LIFE_COMBINE_SEND] = {"combine_send", step_combine_send},
    [LIFE_COMBINE_RECV] = {"combine_recv", step_combine_recv},
    [LIFE_ACTIVE_RANKS] = {"set_active_ranks", step_active_ranks},
    [LIFE_BEGIN_AGAIN] = {"begin_forward again", step_begin},
    [LIFE_FORWARD_AGAIN] = {"forward again", step_forward},
    [LIFE_CAPTURED] = {"captured", step_captured},
    [LIFE_STATS] = {"stats", step_stats},
    [LIFE_CLOSE] = {"close", step_close},
};

const char *life_step_name(enum life_step step)
{
    return step < LIFE_STEPS ? steps[step].name : "nothing";
}

// A failure among the ranks sticks, and has made y zero.
static void check_sticky(struct life *life, enum life_step step, int32_t code)
{
    if (code != MOXIE_E_PEER && code != MOXIE_E_TIMEOUT) return;
    if (step < LIFE_BEGIN || step > LIFE_FORWARD_AGAIN) return;
    ck_assert_int_eq(life->dispatcher_api->poll_error(life->dispatcher, NULL), code);
    ck_assert_msg(y_is(life, 0), "y is not zero after %s", steps[step].name);
    ck_assert_int_eq(life->api->forward(life->dispatcher, life->runner, &life->batch.batch, NULL),
                     code);
}

// Of a configuration that nobody spoiled, every y is the layer's.
static void check_rows(const struct life *life, enum life_step step)
{
    struct golden_tensor want = life->layer->want;
    int64_t row_bytes = want.bytes / want.shape[0];

    if (step != LIFE_FORWARD && step != LIFE_COMBINE_RECV && step != LIFE_FORWARD_AGAIN) return;
    if (life->host.fault.place == FAULT_GETTER) return;
    want.data += life->first * row_bytes;
    want.shape[0] = life->parts[life->index];
    want.count = want.shape[0] * life->layer->hidden;
    want.bytes = want.shape[0] * row_bytes;
    ck_assert_double_le(golden_error(life->y, &want), 1e-6);
}

int32_t life_step(struct life *life, enum life_step step)
{
    struct mock_host *mock = &life->host.mock;
    int32_t code;

    mock->text[0] = '\0';
    mock->error.code = -1;
    code = steps[step].take(life);
    if (code == MOXIE_OK) {
        check_rows(life, step);
        return code;
    }
    ck_assert_msg(code > MOXIE_OK && code < MOXIE_E_INTERNAL, "%s: %d", steps[step].name, code);
    ck_assert_int_eq(mock->error.code, code);
    ck_assert_msg(strlen(mock->text) > 20, "%s says \"%s\"", steps[step].name, mock->text);
    memcpy(life->text, mock->text, sizeof life->text);
    life->blamed = mock->error.rank;
    check_sticky(life, step, code);
    return code;
}

void life_go(struct life *life, enum life_step first)
{
    life->stopped_at = LIFE_STEPS;
    life->code = MOXIE_OK;
    for (int32_t step = (int32_t)first; step < LIFE_STEPS; step++) {
        life->code = life_step(life, (enum life_step)step);
        if (life->code == MOXIE_OK) continue;
        life->stopped_at = step;
        return;
    }
}

void life_end(struct life *life)
{
    struct mock_host *mock = &life->host.mock;

    destroy_both(life);
    if (life->instance != NULL && life->api->close(life->instance, &mock->error) != MOXIE_OK)
        ck_assert_msg(life->api->close(life->instance, &mock->error) == MOXIE_OK, "%s", mock->text);
    life->instance = NULL;
    ck_assert_uint_eq(mock->bytes_live, 0);
    mock_host_fini(mock);
    free(life->y);
    life->y = NULL;
}
