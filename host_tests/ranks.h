// Ranks of a test, as threads of one process, as processes, or as processes of several threads, and
// the bootstrap between them: an all_gather in shared memory, bounded, that can be made to fail or
// to lie.

#ifndef MOXIE_HOST_TESTS_RANKS_H
#define MOXIE_HOST_TESTS_RANKS_H

#include "plugin/transport.h"

#include "host_tests/suite.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define HUB_BYTES_MAX 1024
#define HUB_RANKS_MAX 8
#define NEVER         (-1)

// Rounds alternate between two halves: a rank writes round n + 1 while a slow one still reads round
// n.
struct hub {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int32_t ranks, arrived;
    int32_t broken; // a rank has failed: every round from here on fails
    int32_t timeout_ms;
    uint64_t round;
    unsigned char gathered[2][HUB_RANKS_MAX][HUB_BYTES_MAX];
};

struct rank {
    struct hub *hub;
    struct bootstrap bootstrap;
    int32_t calls;       // all_gathers made
    int32_t fail_before; // the call that fails without reaching anyone, or NEVER
    int32_t fail_after;  // the call that reaches everyone and fails all the same, or NEVER
    void (*tamper)(struct rank *rank, unsigned char *sent);
    void (*body)(struct rank *rank);
    void *arg;
};

static int hub_wait(struct hub *hub, uint64_t round)
{
    struct timespec until;

    (void)clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec += hub->timeout_ms / 1000;
    until.tv_nsec += hub->timeout_ms % 1000 * 1000000;
    until.tv_sec += until.tv_nsec / 1000000000;
    until.tv_nsec %= 1000000000;
    while (hub->round == round && !hub->broken)
        if (pthread_cond_timedwait(&hub->changed, &hub->mutex, &until) != 0) hub->broken = 1;
    return hub->round != round;
}

static int32_t hub_exchange(struct rank *rank, const void *send, void *recv, uint64_t bytes)
{
    struct hub *hub = rank->hub;
    uint64_t round = hub->round;
    int32_t call = rank->calls++;

    if (call == rank->fail_before) hub->broken = 1;
    if (hub->broken) return -1;
    memcpy(hub->gathered[round & 1][rank->bootstrap.rank], send, bytes);
    if (rank->tamper != NULL) rank->tamper(rank, hub->gathered[round & 1][rank->bootstrap.rank]);
    if (++hub->arrived == hub->ranks) {
        hub->arrived = 0;
        hub->round++;
    } else if (!hub_wait(hub, round)) {
        return -1;
    }
    for (int32_t r = 0; r < hub->ranks; r++)
        memcpy((unsigned char *)recv + (uint64_t)r * bytes, hub->gathered[round & 1][r], bytes);
    if (call != rank->fail_after) return 0;
    hub->broken = 1;
    return -1;
}

static int32_t hub_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct rank *rank = ctx;
    int32_t failed;

    ck_assert_uint_le(bytes, HUB_BYTES_MAX);
    (void)pthread_mutex_lock(&rank->hub->mutex);
    failed = hub_exchange(rank, send, recv, bytes);
    (void)pthread_cond_broadcast(&rank->hub->changed);
    (void)pthread_mutex_unlock(&rank->hub->mutex);
    return failed;
}

static int32_t hub_barrier(void *ctx)
{
    unsigned char all[HUB_RANKS_MAX];

    return hub_all_gather(ctx, "", all, 1);
}

static void *shared_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    ck_assert_ptr_ne(memory, MAP_FAILED);
    return memory;
}

static struct hub *hub_create(int32_t ranks)
{
    struct hub *hub = shared_memory(sizeof *hub);
    pthread_mutexattr_t mutex;
    pthread_condattr_t changed;

    (void)pthread_mutexattr_init(&mutex);
    (void)pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    (void)pthread_mutex_init(&hub->mutex, &mutex);
    (void)pthread_condattr_init(&changed);
    (void)pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    (void)pthread_condattr_setclock(&changed, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&hub->changed, &changed);
    hub->ranks = ranks;
    hub->timeout_ms = 60000;
    return hub;
}

// Fills `ranks` entries around a new hub. They end with ranks_fini.
static void ranks_init(struct rank *all, int32_t ranks, void (*body)(struct rank *rank), void *arg)
{
    struct hub *hub = hub_create(ranks);

    ck_assert_int_le(ranks, HUB_RANKS_MAX);
    for (int32_t r = 0; r < ranks; r++)
        all[r] = (struct rank){
            .hub = hub,
            .bootstrap = {.all_gather = hub_all_gather, .ctx = &all[r], .rank = r, .ranks = ranks},
            .fail_before = NEVER,
            .fail_after = NEVER,
            .body = body,
            .arg = arg,
        };
}

static void ranks_fini(struct rank *all)
{
    (void)munmap(all[0].hub, sizeof *all[0].hub);
}

static void *rank_main(void *arg)
{
    struct rank *rank = arg;

    rank->body(rank);
    return NULL;
}

// Runs `count` ranks as threads of this process.
static void ranks_as_threads(struct rank *all, int32_t count)
{
    pthread_t threads[HUB_RANKS_MAX];

    for (int32_t r = 0; r < count; r++)
        ck_assert_int_eq(pthread_create(&threads[r], NULL, rank_main, &all[r]), 0);
    for (int32_t r = 0; r < count; r++)
        (void)pthread_join(threads[r], NULL);
}

// Runs them as processes of `threads` ranks each, forked before this process has a thread, and
// returns how many processes did not end well.
static int32_t ranks_as_processes(struct rank *all, int32_t count, int32_t threads)
{
    pid_t children[HUB_RANKS_MAX];
    int32_t bad = 0;
    int32_t processes = 0;
    int status;

    for (int32_t first = 0; first < count; first += threads, processes++) {
        int32_t here = count - first < threads ? count - first : threads;

        children[processes] = fork();
        ck_assert_int_ge(children[processes], 0);
        if (children[processes] != 0) continue;
        if (here == 1)
            all[first].body(&all[first]);
        else
            ranks_as_threads(&all[first], here);
        exit(EXIT_SUCCESS);
    }
    for (int32_t process = 0; process < processes; process++) {
        ck_assert_int_eq(waitpid(children[process], &status, 0), children[process]);
        bad += !WIFEXITED(status) || WEXITSTATUS(status) != EXIT_SUCCESS;
    }
    return bad;
}

#endif
