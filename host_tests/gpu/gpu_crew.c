#include "host_tests/gpu/gpu_crew.h"

#include "plugin/transport.h"

#include <stdlib.h>
#include <string.h>

#define GROUP_TIMEOUT_MS 60000

void gpu_member_accept(const struct gpu_member *member, int32_t answer)
{
    ck_assert_msg(answer == MOXIE_OK, "rank %d: %s", member->index, member->rank.mock.text);
}

int32_t gpu_member_begin(struct gpu_member *member)
{
    return dispatcher_begin_forward(member->rank.dispatcher, &member->step,
                                    &member->rank.mock.error);
}

int32_t gpu_member_run(struct gpu_member *member)
{
    return forward_run(member->rank.dispatcher, member->rank.runner, &member->batch.batch,
                       &member->rank.mock.error);
}

int32_t gpu_member_poll(struct gpu_member *member)
{
    return dispatcher_poll_error(member->rank.dispatcher, &member->rank.mock.error);
}

void gpu_member_launch(struct gpu_member *member)
{
    size_t bytes =
        (size_t)(member->crew->layer.tokens * member->crew->layer.hidden) * sizeof(float);

    must(cudaMemsetAsync(member->batch.batch.y.data, 0xff, bytes, member->stream));
    gpu_member_accept(member, gpu_member_run(member));
}

void gpu_member_fetch(struct gpu_member *member)
{
    must(cudaMemcpyAsync(member->y, member->batch.batch.y.data,
                         (size_t)(member->batch.dims[3][0] * member->crew->layer.hidden) *
                             sizeof(float),
                         cudaMemcpyDeviceToHost, member->stream));
    must(cudaStreamSynchronize(member->stream));
}

void gpu_member_forward(struct gpu_member *member)
{
    gpu_member_accept(member, gpu_member_begin(member));
    gpu_member_launch(member);
    gpu_member_fetch(member);
}

void gpu_member_meet(struct gpu_member *member)
{
    moxie_host *host = &member->rank.mock.host;

    if (member->crew->ranks > 1 && host->barrier(host->ctx) != 0)
        ck_abort_msg("a rank did not come");
}

void gpu_member_take(struct gpu_member *member, int64_t first, int64_t tokens)
{
    struct layer_batch part;

    layer_batch_of(&member->crew->layer, first, tokens, NULL, &part);
    gpu_refill(&member->batch.batch.x, &part.batch.x);
    gpu_refill(&member->batch.batch.ids, &part.batch.ids);
    gpu_refill(&member->batch.batch.weights, &part.batch.weights);
    for (int32_t i = 0; i < 4; i++)
        member->batch.dims[i][0] = tokens;
    member->first = first;
    member->tokens = tokens;
    member->step.tokens = tokens;
    member->y = member->crew->y + first * member->crew->layer.hidden;
}

void gpu_member_capture(struct gpu_member *member, struct gpu_graph *graph)
{
    gpu_member_accept(member, gpu_member_begin(member));
    must(cudaStreamBeginCapture(member->stream, cudaStreamCaptureModeThreadLocal));
    gpu_member_launch(member);
    must(cudaStreamEndCapture(member->stream, &graph->graph));
    must(cudaGraphInstantiate(&graph->exec, graph->graph, 0));
}

void gpu_graph_free(struct gpu_graph *graph)
{
    must(cudaGraphExecDestroy(graph->exec));
    must(cudaGraphDestroy(graph->graph));
}

void gpu_member_all_tokens(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "forward_tokens_max", member->crew->layer.tokens);
}

void gpu_member_two_slots(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "forwards_in_flight_max", 2);
}

void gpu_member_short_timeout(struct gpu_member *member)
{
    mock_set_i64(&member->rank.mock, "timeout_ms", GPU_SHORT_MS);
}

double gpu_seconds_since(int64_t began_ns)
{
    return (double)(clock_ns() - began_ns) / 1e9;
}

void gpu_member_expect_zero(const struct gpu_member *member)
{
    for (int64_t i = 0; i < member->tokens * member->crew->layer.hidden; i++)
        ck_assert_msg(member->y[i] == 0.0f, "rank %d: y[%lld] is %g", member->index, (long long)i,
                      (double)member->y[i]);
}

void gpu_crew_expect_golden(const struct gpu_crew *crew, double bound)
{
    double error = golden_error(crew->y, &crew->layer.want);

    ck_assert_msg(error <= bound, "%s, %d ranks, %s: %g past %g", crew->layer_name, crew->ranks,
                  crew->dispatcher, error, bound);
}

// ---- one rank ----------------------------------------------------------------------------------

static void member_configure(struct gpu_member *member)
{
    struct gpu_crew *crew = member->crew;
    struct mock_host *mock = &member->rank.mock;

    layer_rank_init(&member->rank, &crew->layer, crew->ranks > 1 ? crew->group : NULL,
                    member->index);
    mock_set_str(mock, "device", "sm_90");
    if (crew->fp8) mock_set_str(mock, "weight_format", "fp8_channel");
    if (crew->mxfp4) mock_set_str(mock, "weight_format", "mxfp4");
    mock_set_i64(mock, "forward_tokens_max", crew->parts[0]);
    mock_set_str(mock, "dispatcher", crew->dispatcher);
    mock_set_str(mock, "transport", GPU_TRANSPORT);
    // Memory is the device's own.
    mock->host.allocate = NULL;
    mock->host.release = NULL;
    if (crew->configure != NULL) crew->configure(member);
}

static void member_weights(struct gpu_member *member, const moxie_plan *plan)
{
    struct layer_weights_view packed;

    layer_weights_of(&member->crew->layer, plan->bounds->expert_first, plan->bounds->experts_local,
                     &member->weights);
    if (member->crew->mxfp4) gpu_pack_weights(&member->weights, member->packed_dims);
    packed = member->weights;
    gpu_upload_weights(&member->weights, member->crew->fp8 ? member->scale_dims : NULL);
    if (member->crew->mxfp4) gpu_free_quantised(&packed);
}

// The batch is the rank's part, in tensors that have room for all tokens of the layer.
static void member_batch(struct gpu_member *member)
{
    const struct layer *layer = &member->crew->layer;
    moxie_tensor *tensors[] = {&member->batch.batch.x, &member->batch.batch.ids,
                               &member->batch.batch.weights};
    struct layer_batch part;
    void *y = NULL;

    layer_batch_of(layer, 0, layer->tokens, NULL, &member->batch);
    layer_batch_of(layer, member->first, member->tokens, NULL, &part);
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        gpu_upload(tensors[i]);
    gpu_refill(&member->batch.batch.x, &part.batch.x);
    gpu_refill(&member->batch.batch.ids, &part.batch.ids);
    gpu_refill(&member->batch.batch.weights, &part.batch.weights);
    for (int32_t i = 0; i < 4; i++)
        member->batch.dims[i][0] = member->tokens;
    must(cudaMalloc(&y, (size_t)(layer->tokens * layer->hidden) * sizeof(float)));
    member->batch.batch.y.data = y;
    member->batch.batch.y.device = member->batch.batch.x.device;
    must(cudaStreamCreateWithFlags(&member->stream, cudaStreamNonBlocking));
    member->batch.batch.stream = member->stream;
    member->step = (moxie_step){.struct_size = sizeof member->step,
                                .tokens = member->tokens,
                                .rank_tokens = member->rank_tokens};
    memcpy(member->rank_tokens, member->crew->parts, sizeof member->rank_tokens);
}

static void member_open(struct gpu_member *member)
{
    static const struct registry none;
    struct layer_rank *rank = &member->rank;
    moxie_error *error = &rank->mock.error;
    const moxie_plan *plan = NULL;
    int32_t answer;

    gpu_member_accept(member, instance_open(&rank->mock.host, &none, &rank->instance, error));
    gpu_member_accept(member, instance_plan(rank->instance, &plan, error));
    member_weights(member, plan);
    gpu_member_accept(
        member, runner_create(rank->instance, 0, &member->weights.weights, &rank->runner, error));
    member_batch(member);
    answer = dispatcher_create(rank->instance,
                               (enum dispatcher_kind)rank->instance->plan.limits.dispatcher,
                               &rank->dispatcher, error);
    if (member->crew->created != NULL)
        member->crew->created(member, answer);
    else
        gpu_member_accept(member, answer);
}

static void member_close(struct gpu_member *member)
{
    layer_rank_close(&member->rank);
    must(cudaStreamDestroy(member->stream));
    gpu_free_weights(&member->weights);
    must(cudaFree(member->batch.batch.x.data));
    must(cudaFree(member->batch.batch.ids.data));
    must(cudaFree(member->batch.batch.weights.data));
    must(cudaFree(member->batch.batch.y.data));
}

static void member_run(void *arg, int32_t index)
{
    struct gpu_crew *crew = arg;
    struct gpu_member *member = calloc(1, sizeof *member);

    ck_assert_ptr_nonnull(member);
    must(cudaSetDevice(index));
    member->crew = crew;
    member->index = index;
    member->first = layer_part_first(crew->layer.tokens, crew->ranks, index);
    member->tokens = crew->parts[index];
    member->y = crew->y + member->first * crew->layer.hidden;
    member_configure(member);
    member_open(member);
    // Memory that one rank takes or gives back waits for the device, and so for ranks that share
    // it.
    if (crew->created == NULL) {
        gpu_member_meet(member);
        crew->scenario(member);
        must(cudaStreamSynchronize(member->stream));
        gpu_member_meet(member);
    }
    member_close(member);
    free(member);
}

// ---- all of them -------------------------------------------------------------------------------

int32_t gpu_crew_ranks(int32_t most)
{
    int devices = 0;

    must(cudaGetDeviceCount(&devices));
    return devices < most ? devices : most;
}

void gpu_crew_run(struct gpu_crew *crew)
{
    layer_open(&crew->layer, crew->layer_name);
    layer_parts(&crew->layer, crew->ranks, crew->parts);
    crew->y = layer_poisoned(&crew->layer);
    crew->group = mock_group_create(crew->ranks, GROUP_TIMEOUT_MS);
    mock_ranks_run(crew->ranks, member_run, crew);
    mock_group_destroy(crew->group);
}

void gpu_crew_fini(struct gpu_crew *crew)
{
    free(crew->y);
    layer_close(&crew->layer);
}
