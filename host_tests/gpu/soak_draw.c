// What a seed decides. Every rank draws the same for itself and its peers.

#include "host_tests/gpu/soak.h"

#include "host_tests/gpu/gpu_layer.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#define DELAY_US_MAX 20000
#define LATE_US_MAX  200000
#define FORWARDS     8 // of a run in which nobody dies
#define FORWARDS_MIN 4 // of each generation of one in which somebody does

// splitmix64
static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// From low to high.
static int32_t pick(uint64_t *state, int64_t low, int64_t high)
{
    return (int32_t)(low + (int64_t)(draw(state) % (uint64_t)(high - low + 1)));
}

static int one_in(uint64_t *state, int32_t times)
{
    return pick(state, 0, times - 1) == 0;
}

static double fraction(uint64_t *state)
{
    return (double)(draw(state) >> 11) * 0x1p-53;
}

// Microseconds of every magnitude, and at times as late as the rounds of an emulated forward are.
static int32_t pick_delay_us(uint64_t *state)
{
    int32_t most = one_in(state, 3) ? LATE_US_MAX : DELAY_US_MAX;

    return 1 + (int32_t)(most * pow(fraction(state), 3.0));
}

// ---- a run -------------------------------------------------------------------------------------

static struct soak_fate pick_fate(uint64_t *state, const struct soak_run *run)
{
    static const int32_t instants[] = {SOAK_AT_TIME, SOAK_AT_TIME,   SOAK_AT_TIME, SOAK_AT_HALF,
                                       SOAK_AT_HALF, SOAK_AT_GATHER, SOAK_AT_BIRTH};
    struct soak_fate fate = {.rank = pick(state, 0, run->ranks - 1),
                             .instant = instants[pick(state, 0, 6)],
                             .forward = pick(state, 0, FORWARDS_MIN - 1),
                             .delay_us = pick_delay_us(state)};

    if (fate.instant == SOAK_AT_HALF) fate.countdown = pick(state, 0, 5 * run->slots - 1);
    if (fate.instant == SOAK_AT_GATHER)
        fate.countdown = pick(state, 0, 2 * (2 + 3 * run->slots) - 1);
    return fate;
}

// Dies as the first one does, or in what follows that.
static struct soak_fate pick_second(uint64_t *state, const struct soak_run *run)
{
    struct soak_fate fate = {.instant = pick(state, 0, 1) ? SOAK_AT_TIME : SOAK_AT_REGROUP,
                             .forward = pick(state, 0, FORWARDS_MIN - 1),
                             .delay_us = pick_delay_us(state)};

    do
        fate.rank = pick(state, 0, run->ranks - 1);
    while (fate.rank == run->fates[0].rank);
    if (fate.instant == SOAK_AT_TIME) fate.generation = pick(state, 0, 1);
    return fate;
}

static void draw_fates(uint64_t *state, struct soak_run *run)
{
    run->fates[0] = pick_fate(state, run);
    run->fates_count = 1;
    if (run->ranks > 2 && one_in(state, 4))
        run->fates[run->fates_count++] = pick_second(state, run);
    for (int32_t i = 0; i < run->fates_count; i++)
        if (run->fates[i].instant == SOAK_AT_HALF) run->halves = 1;
}

void soak_run_draw(uint64_t seed, int32_t ranks_max, int32_t killed, int32_t timeout_ms,
                   struct soak_run *run)
{
    uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
    int32_t lanes = pick(&state, 0, 3);

    *run = (struct soak_run){.seed = seed,
                             .dispatcher = pick(&state, 0, 1) ? "alltoall" : "allgather",
                             .ranks = pick(&state, 2, ranks_max),
                             .slots = lanes == 1 ? 2 : 1,
                             // A wait that one instance's call is stuck in keeps the other from
                             // its peers, who cannot hear that: see docs/failures.md.
                             .instances = lanes == 2 && !killed ? 2 : 1,
                             .rounds = pick(&state, 1, 3),
                             .halves = pick(&state, 0, 1),
                             .fp8 = pick(&state, 0, 2),
                             .padding = pick(&state, MOXIE_PADDING_NONE, MOXIE_PADDING_SUM_LEN),
                             .listed = pick(&state, 0, 1),
                             .graphs = pick(&state, 0, 1),
                             .recaptures = pick(&state, 0, 1),
                             .timeout_ms = timeout_ms,
                             .forwards = killed ? pick(&state, FORWARDS_MIN, 6) : FORWARDS};
    run->layer = gpu_layers[pick(&state, 0, (run->fp8 ? GPU_LAYERS_FP8 : GPU_LAYERS) - 1)];
    if (killed) draw_fates(&state, run);
    if (run->halves) run->rounds = 1;
}

const struct soak_fate *soak_fate_of(const struct soak_run *run, int32_t rank)
{
    for (int32_t i = 0; i < run->fates_count; i++)
        if (run->fates[i].rank == rank) return &run->fates[i];
    return NULL;
}

int soak_in_create(const struct soak_fate *fate)
{
    return fate->instant == SOAK_AT_GATHER || fate->instant == SOAK_AT_BIRTH;
}

void soak_run_text(const struct soak_run *run, char *text, uint64_t capacity)
{
    static const char *const instants[] = {[SOAK_AT_TIME] = "in a forward",
                                           [SOAK_AT_HALF] = "between halves",
                                           [SOAK_AT_GATHER] = "at an all_gather of create",
                                           [SOAK_AT_BIRTH] = "in create",
                                           [SOAK_AT_REGROUP] = "in set_active_ranks"};
    static const char *const formats[] = {"rows of 16 bits", "fp8 weights", "fp8 weights and rows"};
    int length = snprintf(text, capacity,
                          "%s, %d ranks, %s, %s, slots %d, instances %d, %s, rounds %d, padding "
                          "%d, tokens %s, graphs %d",
                          run->dispatcher, run->ranks, run->layer, formats[run->fp8], run->slots,
                          run->instances, run->halves ? "by halves" : "forward()", run->rounds,
                          run->padding, run->listed ? "listed" : "by the bound",
                          run->graphs + (run->graphs && run->recaptures));

    for (int32_t i = 0; i < run->fates_count; i++) {
        const struct soak_fate *fate = &run->fates[i];

        if (length < 0 || (uint64_t)length >= capacity) return;
        length += snprintf(text + length, capacity - (uint64_t)length,
                           "; rank %d killed %s (generation %d, forward %d, instant %d, %d us)",
                           fate->rank, instants[fate->instant], fate->generation, fate->forward,
                           fate->countdown, fate->delay_us);
    }
}

// ---- a forward ---------------------------------------------------------------------------------

enum shape { SHAPE_ANY, SHAPE_EVEN, SHAPE_ONE, SHAPE_FEW, SHAPE_IDLE };

// What is the same on all ranks comes from this, what is a rank's own from one number more.
static uint64_t state_of(const struct soak_run *run, struct soak_at at, uint64_t salt)
{
    uint64_t state = run->seed ^ salt << 60;

    state = draw(&state) ^
            ((uint64_t)at.generation << 48 | (uint64_t)at.forward << 16 | (uint64_t)at.lane);
    return draw(&state);
}

static uint64_t state_of_rank(const struct soak_run *run, struct soak_at at, int32_t rank,
                              uint64_t salt)
{
    uint64_t state = state_of(run, at, salt) + (uint64_t)rank + 1;

    return draw(&state);
}

static int64_t tokens_of(enum shape shape, int64_t layer_tokens, const struct soak_run *run,
                         int32_t chosen, int32_t rank, uint64_t *state)
{
    switch (shape) {
    case SHAPE_ANY:
        return one_in(state, 4) ? 0 : pick(state, 0, layer_tokens);
    case SHAPE_EVEN:
        return layer_part(layer_tokens, run->ranks, rank);
    case SHAPE_ONE:
        return rank == chosen ? layer_tokens : 0;
    case SHAPE_FEW:
        return pick(state, 0, layer_tokens < 2 ? layer_tokens : 2);
    default:
        return 0;
    }
}

static int is_halved_then(const struct soak_run *run, struct soak_at at)
{
    for (int32_t i = 0; i < run->fates_count; i++)
        if (run->fates[i].instant == SOAK_AT_HALF && run->fates[i].generation == at.generation &&
            run->fates[i].forward == at.forward)
            return 1;
    return 0;
}

// Ranks need not all replay, where each has its rounds from the bound and its calls in one order.
static int is_replay(const struct soak_run *run, struct soak_at at, uint64_t *own)
{
    int alike = run->listed || (run->halves && run->slots * run->instances > 1);
    // All lanes alike, since those of halves are one sequence of calls.
    uint64_t all = state_of(run, (struct soak_at){at.generation, at.forward, 0}, 3);

    if (!run->graphs || is_halved_then(run, at)) return 0;
    return alike ? (int)(all & 1) : pick(own, 0, 1);
}

void soak_part_draw(const struct soak_run *run, int64_t layer_tokens, struct soak_at at,
                    int32_t rank, struct soak_part *part)
{
    uint64_t common = state_of(run, at, 0), state = state_of_rank(run, at, rank, 1);
    int32_t chosen = pick(&common, 0, run->ranks - 1);
    // All idle together is rare.
    enum shape shape = one_in(&common, 16) ? SHAPE_IDLE : (enum shape)pick(&common, 0, SHAPE_FEW);

    memset(part, 0, sizeof *part);
    part->tokens = tokens_of(shape, layer_tokens, run, chosen, rank, &state);
    part->masks = one_in(&state, 3);
    part->replays = is_replay(run, at, &state);
    if (one_in(&state, 3)) part->delay_us = pick(&state, 0, DELAY_US_MAX);
    part->valid = pick(&state, 0, part->tokens + 1);
    if (one_in(&state, 8)) part->valid = pick(&state, 0, 1) ? INT32_MIN : INT32_MAX;
    if (part->replays) {
        if (!part->masks) part->valid = (int32_t)part->tokens;
        part->masks = 1;
        part->tokens = layer_tokens;
    }
    part->first = pick(&state, 0, layer_tokens - part->tokens);
}

static int32_t pick_nobody(uint64_t *state, int64_t experts)
{
    static const int32_t others[] = {INT32_MAX, INT32_MIN, -2};

    return one_in(state, 2) ? -1 : one_in(state, 2) ? (int32_t)experts : others[pick(state, 0, 2)];
}

static int is_among(const int32_t *ids, int64_t count, int32_t id)
{
    for (int64_t i = 0; i < count; i++)
        if (ids[i] == id) return 1;
    return 0;
}

void soak_routing_draw(const struct soak_run *run, const struct layer *layer, struct soak_at at,
                       int32_t rank, int32_t *ids, float *weights)
{
    uint64_t common = state_of(run, at, 2), state = state_of_rank(run, at, rank, 4);
    double power = 1.0 + 5.0 * fraction(&common);
    int32_t hot = pick(&common, 0, layer->experts - 1);
    int32_t holes = one_in(&common, 8) ? 2 : 16; // one in so many is of no expert

    for (int64_t token = 0; token < layer->tokens; token++) {
        int32_t *row = ids + token * layer->top_k;

        for (int64_t k = 0; k < layer->top_k; k++) {
            int32_t id = (int32_t)((double)layer->experts * pow(fraction(&state), power));

            id = (int32_t)((id + hot) % layer->experts);
            while (is_among(row, k, id))
                id = (int32_t)((id + 1) % layer->experts);
            row[k] = one_in(&state, holes) ? pick_nobody(&state, layer->experts) : id;
            weights[token * layer->top_k + k] = (float)(0.02 + fraction(&state));
        }
    }
}
