// The forwards of a soaking rank.

#include "host_tests/gpu/soak_lane.h"

#include "kernels/types.h"
#include "plugin/plan.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xff

static size_t y_bytes(const struct soak_life *life)
{
    return (size_t)(life->world->layer.tokens * life->world->layer.hidden) * sizeof(float);
}

static size_t pair_count(const struct soak_life *life)
{
    return (size_t)(life->world->layer.tokens * life->world->layer.top_k);
}

static struct soak_at at_of(const struct soak_life *life, const struct soak_lane *lane)
{
    return (struct soak_at){life->seat->applied, life->done, lane->index};
}

// ---- memory ------------------------------------------------------------------------------------

static void *host_memory(struct soak_life *life, size_t bytes)
{
    void *memory = malloc(bytes);

    SOAK_REQUIRE(life, memory != NULL, "out of memory");
    return memory;
}

static void lane_open(struct soak_life *life, struct soak_lane *lane, int32_t index)
{
    const struct layer *layer = &life->world->layer;
    void *y = NULL;

    lane->index = index;
    lane->member = &life->members[index / life->run->slots];
    lane->slot = index % life->run->slots;
    layer_batch_of(layer, 0, layer->tokens, NULL, &lane->batch);
    gpu_upload(&lane->batch.batch.x);
    gpu_upload(&lane->batch.batch.ids);
    gpu_upload(&lane->batch.batch.weights);
    SOAK_DEVICE(life, cudaMalloc(&y, y_bytes(life)));
    SOAK_DEVICE(life, cudaMalloc((void **)&lane->valid, sizeof *lane->valid));
    lane->batch.batch.y.data = y;
    lane->batch.batch.y.device = lane->batch.batch.x.device;
    lane->batch.batch.slot = lane->slot;
    SOAK_DEVICE(life, cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking));
    lane->batch.batch.stream = lane->stream;
    lane->ids = host_memory(life, pair_count(life) * sizeof *lane->ids);
    lane->masked = host_memory(life, pair_count(life) * sizeof *lane->masked);
    lane->weights = host_memory(life, pair_count(life) * sizeof *lane->weights);
    lane->y = host_memory(life, y_bytes(life));
    lane->want = host_memory(life, y_bytes(life));
}

static void graph_free(struct soak_life *life, struct soak_lane *lane)
{
    if (lane->exec == NULL) return;
    SOAK_DEVICE(life, cudaGraphExecDestroy(lane->exec));
    SOAK_DEVICE(life, cudaGraphDestroy(lane->graph));
    lane->exec = NULL;
}

static void lane_close(struct soak_life *life, struct soak_lane *lane)
{
    graph_free(life, lane);
    SOAK_DEVICE(life, cudaStreamDestroy(lane->stream));
    SOAK_DEVICE(life, cudaFree(lane->batch.batch.x.data));
    SOAK_DEVICE(life, cudaFree(lane->batch.batch.ids.data));
    SOAK_DEVICE(life, cudaFree(lane->batch.batch.weights.data));
    SOAK_DEVICE(life, cudaFree(lane->batch.batch.y.data));
    SOAK_DEVICE(life, cudaFree(lane->valid));
    free(lane->ids);
    free(lane->masked);
    free(lane->weights);
    free(lane->y);
    free(lane->want);
}

void soak_lanes_open(struct soak_life *life)
{
    life->lanes_count = life->run->slots * life->run->instances;
    for (int32_t i = 0; i < life->lanes_count; i++)
        lane_open(life, &life->lanes[i], i);
}

void soak_lanes_close(struct soak_life *life)
{
    for (int32_t i = 0; i < life->lanes_count; i++)
        lane_close(life, &life->lanes[i]);
}

// ---- what a forward carries --------------------------------------------------------------------

static void send(struct soak_life *life, struct soak_lane *lane, const moxie_tensor *to,
                 const void *from)
{
    int64_t row_bytes = to == &lane->batch.batch.x ? 2 : 4;

    SOAK_DEVICE(life, cudaMemcpyAsync(to->data, from,
                                      (size_t)(lane->part.tokens * to->shape[1] * row_bytes),
                                      cudaMemcpyHostToDevice, lane->stream));
}

void soak_lane_poison(struct soak_life *life, struct soak_lane *lane)
{
    SOAK_DEVICE(life,
                cudaMemsetAsync(lane->batch.batch.y.data, POISON, y_bytes(life), lane->stream));
}

static void lane_step(struct soak_life *life, struct soak_lane *lane)
{
    lane->step = (moxie_step){.struct_size = sizeof lane->step,
                              .slot = lane->slot,
                              .tokens = lane->part.tokens,
                              .rank_tokens = life->run->listed ? lane->rank_tokens : NULL,
                              .padding = life->run->padding,
                              .tokens_valid = lane->part.masks ? lane->valid : NULL};
    for (int32_t i = 0; i < 4; i++)
        lane->batch.dims[i][0] = lane->part.tokens;
}

static void lane_fill(struct soak_life *life, struct soak_lane *lane)
{
    const struct layer *layer = &life->world->layer;
    struct soak_at at = at_of(life, lane);
    struct layer_batch rows;

    for (int32_t rank = 0; rank < life->run->ranks; rank++) {
        soak_part_draw(life->run, layer->tokens, at, rank, &lane->part);
        lane->rank_tokens[rank] = lane->part.tokens;
    }
    soak_part_draw(life->run, layer->tokens, at, life->index, &lane->part);
    soak_routing_draw(life->run, layer, at, life->index, lane->ids, lane->weights);
    lane_step(life, lane);
    layer_batch_of(layer, lane->part.first, lane->part.tokens, NULL, &rows);
    soak_lane_poison(life, lane);
    send(life, lane, &lane->batch.batch.x, rows.batch.x.data);
    send(life, lane, &lane->batch.batch.ids, lane->ids);
    send(life, lane, &lane->batch.batch.weights, lane->weights);
    SOAK_DEVICE(life, cudaMemcpyAsync(lane->valid, &lane->part.valid, sizeof lane->part.valid,
                                      cudaMemcpyHostToDevice, lane->stream));
}

void soak_lanes_fill(struct soak_life *life)
{
    for (int32_t i = 0; i < life->lanes_count; i++)
        lane_fill(life, &life->lanes[i]);
}

// ---- calls -------------------------------------------------------------------------------------

static void lane_begin(struct soak_life *life, struct soak_lane *lane)
{
    struct layer_rank *rank = &lane->member->rank;
    int32_t st = dispatcher_begin_forward(rank->dispatcher, &lane->step, &rank->mock.error);

    SOAK_REQUIRE(life, st == MOXIE_OK, "begin_forward: %d, %s", st, rank->mock.text);
}

void soak_lanes_begin(struct soak_life *life)
{
    for (int32_t i = 0; i < life->lanes_count; i++)
        if (!life->lanes[i].part.replays) lane_begin(life, &life->lanes[i]);
}

static int32_t lane_forward(struct soak_lane *lane)
{
    struct layer_rank *rank = &lane->member->rank;

    return forward_run(rank->dispatcher, rank->runner, &lane->batch.batch, &rank->mock.error);
}

// Both are captured and replayed with the whole room, whatever a forward carries.
static void lane_capture(struct soak_life *life, struct soak_lane *lane)
{
    int32_t st;

    graph_free(life, lane);
    lane->part = (struct soak_part){.tokens = life->world->layer.tokens, .masks = 1};
    for (int32_t rank = 0; rank < life->run->ranks; rank++)
        lane->rank_tokens[rank] = lane->part.tokens;
    lane_step(life, lane);
    lane_begin(life, lane);
    SOAK_DEVICE(life, cudaStreamBeginCapture(lane->stream, cudaStreamCaptureModeThreadLocal));
    st = lane_forward(lane);
    SOAK_DEVICE(life, cudaStreamEndCapture(lane->stream, &lane->graph));
    SOAK_REQUIRE(life, st == MOXIE_OK, "capture: %d, %s", st, lane->member->rank.mock.text);
    SOAK_DEVICE(life, cudaGraphInstantiate(&lane->exec, lane->graph, 0));
    atomic_fetch_add(&life->world->tally->graphs, 1);
}

void soak_lanes_capture(struct soak_life *life)
{
    for (int32_t i = 0; i < life->lanes_count; i++)
        lane_capture(life, &life->lanes[i]);
}

// One call of a forward by halves.
static int32_t lane_half(struct soak_lane *lane, int32_t half)
{
    struct layer_rank *rank = &lane->member->rank;
    moxie_call call = {
        .struct_size = sizeof call, .slot = lane->slot, .stream = lane->batch.batch.stream};
    moxie_error *error = &rank->mock.error;

    switch (half) {
    case 0:
        return dispatcher_dispatch_send(rank->dispatcher, &lane->batch.batch, error);
    case 1:
        return dispatcher_dispatch_recv(rank->dispatcher, &lane->batch.batch, &lane->in, &lane->out,
                                        error);
    case 2:
        return runner_run(rank->runner, &call, lane->in, lane->out, error);
    case 3:
        return dispatcher_combine_send(rank->dispatcher, &lane->batch.batch, error);
    default:
        return dispatcher_combine_recv(rank->dispatcher, &lane->batch.batch, error);
    }
}

static int32_t call_halves(struct soak_life *life, int32_t *failed)
{
    for (int32_t half = 0; half < 5; half++) {
        for (int32_t i = 0; i < life->lanes_count; i++) {
            int32_t st = lane_half(&life->lanes[i], half);

            *failed = i;
            if (st != MOXIE_OK) return st;
            soak_instant(life, SOAK_AT_HALF);
        }
    }
    *failed = -1;
    return MOXIE_OK;
}

int32_t soak_lanes_call(struct soak_life *life, int32_t *failed)
{
    *failed = -1;
    if (life->run->halves && !life->lanes[0].part.replays) return call_halves(life, failed);
    for (int32_t i = 0; i < life->lanes_count; i++) {
        struct soak_lane *lane = &life->lanes[i];
        int32_t st = MOXIE_OK;

        if (lane->part.replays) {
            SOAK_DEVICE(life, cudaGraphLaunch(lane->exec, lane->stream));
            atomic_fetch_add(&life->world->tally->replays, 1);
        } else {
            st = lane_forward(lane);
        }
        *failed = i;
        if (st != MOXIE_OK) return st;
    }
    *failed = -1;
    return MOXIE_OK;
}

void soak_lanes_fetch(struct soak_life *life)
{
    for (int32_t i = 0; i < life->lanes_count; i++) {
        struct soak_lane *lane = &life->lanes[i];

        SOAK_DEVICE(life, cudaMemcpyAsync(lane->y, lane->batch.batch.y.data, y_bytes(life),
                                          cudaMemcpyDeviceToHost, lane->stream));
        SOAK_DEVICE(life, cudaStreamSynchronize(lane->stream));
    }
}

// ---- what must come out ------------------------------------------------------------------------

static int is_lost(const struct soak_life *life, int32_t id)
{
    int64_t experts = life->world->layer.experts;

    for (int32_t i = 0; i < life->seat->applied; i++) {
        int32_t rank = board_lost_rank(life->board, i);

        if (id >= experts_first(experts, life->run->ranks, rank) &&
            id < experts_first(experts, life->run->ranks, rank + 1))
            return 1;
    }
    return 0;
}

static void compute_want(struct soak_life *life, struct soak_lane *lane)
{
    const struct layer *layer = &life->world->layer;
    struct layer_rank *cpu = &life->reference.rank;
    moxie_step step = {.struct_size = sizeof step, .tokens = lane->part.tokens};
    struct layer_batch batch;

    for (int64_t i = 0; i < lane->part.tokens * layer->top_k; i++) {
        int masked = lane->part.masks && i / layer->top_k >= lane->part.valid;

        lane->masked[i] = masked || is_lost(life, lane->ids[i]) ? -1 : lane->ids[i];
    }
    layer_batch_of(layer, lane->part.first, lane->part.tokens, lane->want, &batch);
    batch.batch.ids.data = lane->masked;
    batch.batch.weights.data = lane->weights;
    SOAK_REQUIRE(life,
                 dispatcher_begin_forward(cpu->dispatcher, &step, &cpu->mock.error) == MOXIE_OK &&
                     forward_run(cpu->dispatcher, cpu->runner, &batch.batch, &cpu->mock.error) ==
                         MOXIE_OK,
                 "the reference: %s", cpu->mock.text);
}

static double norm(const float *row, const float *minus, int64_t count)
{
    double sum = 0;

    for (int64_t i = 0; i < count; i++) {
        double value = (double)row[i] - (minus != NULL ? (double)minus[i] : 0.0);

        sum += value * value;
    }
    return sqrt(sum);
}

static int is_poison(const float *row, int64_t count)
{
    const unsigned char *bytes = (const unsigned char *)row;

    for (size_t i = 0; i < (size_t)count * sizeof *row; i++)
        if (bytes[i] != POISON) return 0;
    return 1;
}

// All of y within `bound` of what is wanted, twice that where it is one row; each row within three
// times that, of the larger of its own and the mean norm. A row of nobody's is exactly zero, and
// what follows the tokens untouched.
int soak_lane_is_right(struct soak_life *life, struct soak_lane *lane, char *text,
                       uint64_t capacity)
{
    int64_t hidden = life->world->layer.hidden, tokens = lane->part.tokens;
    double bound = life->run->fp8 ? 8e-2 : 5e-3, whole, off;
    int64_t rows = 0;

    compute_want(life, lane);
    whole = norm(lane->want, NULL, tokens * hidden);
    off = norm(lane->y, lane->want, tokens * hidden);
    for (int64_t token = 0; token < tokens; token++) {
        const float *row = lane->y + token * hidden, *want = lane->want + token * hidden;
        double size = norm(want, NULL, hidden), difference = norm(row, want, hidden);
        double allowed = size > 0 ? 3 * bound * fmax(size, whole / sqrt((double)tokens)) : 0;

        rows += size > 0;
        if (difference <= allowed) continue;
        (void)snprintf(text, capacity, "row %lld of %lld (valid %d) is off by %g, its norm is %g",
                       (long long)token, (long long)tokens, lane->part.valid, difference, size);
        return 0;
    }
    (void)snprintf(text, capacity, "y is off by %g of %g", off, whole);
    if (!(off <= bound * (1 + 1 / sqrt((double)(rows < 1 ? 1 : rows))) * whole)) return 0;
    (void)snprintf(text, capacity, "something was written past the %lld tokens", (long long)tokens);
    return is_poison(lane->y + tokens * hidden, (life->world->layer.tokens - tokens) * hidden);
}

int soak_lane_is_zero(const struct soak_life *life, const struct soak_lane *lane)
{
    int64_t hidden = life->world->layer.hidden, tokens = lane->part.tokens;

    for (int64_t i = 0; i < tokens * hidden; i++)
        if (lane->y[i] != 0.0f) return 0;
    return is_poison(lane->y + tokens * hidden, (life->world->layer.tokens - tokens) * hidden);
}
