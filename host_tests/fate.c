// What a seed decides.

#include "host_tests/fate.h"

#include <signal.h>
#include <stddef.h>
#include <stdio.h>

// Long against the pauses of a loaded machine: a rank that lives must not be blamed.
#define TIMEOUT_MS 500

static uint64_t next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// first..last, both included.
static int32_t pick(uint64_t *state, int32_t first, int32_t last)
{
    return first + (int32_t)(next(state) % (uint64_t)(last - first + 1));
}

static struct fate fate_in_forward(uint64_t *state, const struct ordeal *ordeal)
{
    static const int32_t instants[] = {AT_SIGNAL, AT_SIGNAL, AT_SIGNAL, AT_WAIT, AT_TIME, AT_TIME};
    struct fate fate = {.rank = pick(state, 0, ordeal->ranks - 1),
                        .signal = SIGKILL,
                        .instant = instants[pick(state, 0, 5)],
                        .forward = pick(state, 0, 3),
                        .delay_us = 1 << pick(state, 0, 12)};
    int32_t waits = 2 * ordeal->rounds * ordeal->slots;

    fate.countdown =
        pick(state, 0, fate.instant == AT_WAIT ? waits - 1 : waits * (ordeal->ranks - 1) * 2 - 1);
    fate.delay_us += pick(state, 0, fate.delay_us);
    return fate;
}

static void stop_instead(uint64_t *state, struct ordeal *ordeal, struct fate *fate)
{
    fate->signal = SIGSTOP;
    fate->wake = pick(state, WAKE_SOON, WAKE_HARMLESS);
    fate->wake_ms =
        fate->wake == WAKE_HARMLESS ? pick(state, 1, 60) : pick(state, 0, 2 * ordeal->timeout_ms);
    if (fate->wake == WAKE_HARMLESS) ordeal->timeout_ms = 20000;
    if (fate->wake == WAKE_AMID) ordeal->forwards = 60;
}

static struct fate second_fate(uint64_t *state, const struct ordeal *ordeal)
{
    struct fate fate = fate_in_forward(state, ordeal);
    int32_t gone = ordeal->fates[0].signal == SIGKILL;

    while (fate.rank == ordeal->fates[0].rank)
        fate.rank = pick(state, 0, ordeal->ranks - 1);
    // A rank that is stopped must not be the one to notice the other.
    fate.generation = gone ? pick(state, 0, 1) : 1;
    if (pick(state, 0, 2) == 0) {
        fate.instant = pick(state, AT_REGROUP, AT_LOG);
        fate.generation = 0;
        fate.forward = ordeal->fates[0].forward;
        fate.countdown = fate.instant == AT_LOG
                             ? 0
                             : pick(state, 0, ordeal->slots * (ordeal->ranks - 1) * 4 - 1);
    }
    return fate;
}

// Rank 2 of 3 tells rank 0 but not rank 1, which begins to wait late: rank 0 runs out of time
// first, and both others are silent to it.
static void tell_one(uint64_t *state, struct ordeal *ordeal)
{
    static const int32_t countdowns[] = {1, 2, 5, 6};

    ordeal->ranks = 3;
    ordeal->slots = 1;
    ordeal->lag_rank = 1;
    ordeal->lag_ms = pick(state, 10, TIMEOUT_MS / 4);
    ordeal->fates[0].rank = 2;
    ordeal->fates[0].instant = AT_SIGNAL;
    ordeal->fates[0].countdown = countdowns[pick(state, 0, 3)];
    ordeal->lag_combine = ordeal->fates[0].countdown > 4;
}

static struct fate fate_in_create(uint64_t *state, struct ordeal *ordeal)
{
    int32_t gathers = 2 + 3 * ordeal->slots;
    struct fate fate = {.rank = pick(state, 0, ordeal->ranks - 1),
                        .signal = pick(state, 0, 3) == 0 ? SIGSTOP : SIGKILL,
                        .instant = pick(state, 0, 2) == 0 ? AT_MEMORY : AT_GATHER};

    fate.countdown =
        pick(state, 0,
             fate.instant == AT_GATHER ? gathers * 2 - 1 : ordeal->slots * ordeal->ranks * 2 - 1);
    if (fate.signal == SIGSTOP) {
        fate.wake = WAKE_LATE;
        ordeal->gather_timeout_ms = 700;
    }
    return fate;
}

void ordeal_from(uint64_t seed, struct ordeal *ordeal)
{
    static const char *const layers[] = {"qwen3_moe_a", "mixtral_a", "deepseek_v3_a",
                                         "qwen3_moe_norenorm"};
    uint64_t state = seed * 0x2545f4914f6cdd1du + 1;
    int32_t kind = (int32_t)(seed % 8);

    *ordeal = (struct ordeal){.seed = seed,
                              .layer = layers[pick(&state, 0, 3)],
                              .dispatcher = pick(&state, 0, 1) ? "alltoall" : "allgather",
                              .ranks = pick(&state, 3, 5),
                              .slots = pick(&state, 1, 2),
                              .rounds = pick(&state, 1, 3),
                              .threads = pick(&state, 1, 2),
                              .timeout_ms = TIMEOUT_MS,
                              .gather_timeout_ms = 20000,
                              .lag_rank = -1,
                              .forwards = 6,
                              .fates_count = kind >= 5 && kind <= 6 ? 2 : 1};
    if (ordeal->slots > 1) ordeal->rounds = 1;
    if (kind == 7) {
        ordeal->fates[0] = fate_in_create(&state, ordeal);
        return;
    }
    if (pick(&state, 0, 2) == 0) {
        ordeal->lag_rank = pick(&state, 0, ordeal->ranks - 1);
        ordeal->lag_ms = pick(&state, 1, TIMEOUT_MS / 4);
        ordeal->lag_combine = pick(&state, 0, 1);
    }
    ordeal->fates[0] = fate_in_forward(&state, ordeal);
    if (kind == 1) tell_one(&state, ordeal);
    if (kind == 2 || kind == 3 || (kind == 5 && pick(&state, 0, 1)))
        stop_instead(&state, ordeal, &ordeal->fates[0]);
    if (ordeal->fates_count == 2) ordeal->fates[1] = second_fate(&state, ordeal);
}

const struct fate *ordeal_fate(const struct ordeal *ordeal, int32_t rank)
{
    for (int32_t i = 0; i < ordeal->fates_count; i++)
        if (ordeal->fates[i].rank == rank) return &ordeal->fates[i];
    return NULL;
}

int ordeal_in_create(const struct ordeal *ordeal)
{
    return ordeal->fates[0].instant == AT_GATHER || ordeal->fates[0].instant == AT_MEMORY;
}

void ordeal_text(const struct ordeal *ordeal, char *text, uint64_t capacity)
{
    static const char *const instants[] = {
        [AT_SIGNAL] = "signal",   [AT_WAIT] = "wait", [AT_TIME] = "time",
        [AT_REGROUP] = "regroup", [AT_LOG] = "log",   [AT_GATHER] = "gather",
        [AT_MEMORY] = "memory"};
    static const char *const wakes[] = {[WAKE_NEVER] = "never",
                                        [WAKE_SOON] = "soon",
                                        [WAKE_AMID] = "amid",
                                        [WAKE_LATE] = "late",
                                        [WAKE_HARMLESS] = "harmless"};
    int length =
        snprintf(text, capacity,
                 "--seed %llu --runs 1: %s, %d ranks, %s, slots %d, rounds %d, rank %d lags %d ms",
                 (unsigned long long)ordeal->seed, ordeal->dispatcher, ordeal->ranks, ordeal->layer,
                 ordeal->slots, ordeal->rounds, ordeal->lag_rank, ordeal->lag_ms);

    for (int32_t i = 0; i < ordeal->fates_count; i++) {
        const struct fate *fate = &ordeal->fates[i];

        if (length < 0 || (uint64_t)length >= capacity) return;
        length +=
            snprintf(text + length, capacity - (uint64_t)length,
                     "; rank %d %s in generation %d forward %d at %s %d (%d us), wake %s %d ms",
                     fate->rank, fate->signal == SIGKILL ? "killed" : "stopped", fate->generation,
                     fate->forward, instants[fate->instant], fate->countdown, fate->delay_us,
                     wakes[fate->wake], fate->wake_ms);
    }
}
