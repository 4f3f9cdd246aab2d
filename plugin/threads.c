// The pool. A job is open from its publication until the caller finds no task left; workers that
// wake up in time join it, and nobody waits for one that does not, so a busy machine costs help,
// never time. Indices are handed out by a counter: no queue, no lock.

#include "plugin/threads.h"

#include "plugin/futex.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORKER_STACK_BYTES ((size_t)2 << 20)

// The state of a job: how many workers are in it, whether more may join, and whether the caller
// sleeps until they left.
#define JOB_OPEN    0x80000000u
#define JOB_AWAITED 0x40000000u
#define JOB_WORKERS 0x3fffffffu

#define PRIVATE 1

struct threads {
    _Atomic uint32_t state; // JOB_*; a futex word: the caller's
    _Atomic uint32_t busy;  // a parallel_for is running
    _Atomic uint32_t bell;  // one more for every job and for the stop; a futex word: the workers'
    _Atomic uint32_t sleepers; // workers about to sleep, or asleep
    _Atomic uint32_t stop;
    _Atomic uint64_t next; // index of the next task
    uint64_t tasks;        // these three change only while the job is closed and empty
    void (*task)(void *arg, uint64_t index);
    void *arg;
    pid_t process; // whose threads these are
    int32_t started;
    pthread_t handles[]; // [started]
};

static void run_tasks(struct threads *threads)
{
    uint64_t index;

    while ((index = atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed)) <
           threads->tasks)
        threads->task(threads->arg, index);
}

// 1 when the worker now counts as part of an open job. The CAS reads the store that opened the job,
// so its fields are visible, also when that is a later job than the one that rang.
static int job_join(struct threads *threads)
{
    uint32_t state = atomic_load_explicit(&threads->state, memory_order_relaxed);

    while ((state & JOB_OPEN) != 0)
        if (atomic_compare_exchange_weak_explicit(&threads->state, &state, state + 1,
                                                  memory_order_acquire, memory_order_relaxed))
            return 1;
    return 0;
}

static void job_leave(struct threads *threads)
{
    uint32_t before = atomic_fetch_sub_explicit(&threads->state, 1, memory_order_acq_rel);

    if (before == (JOB_AWAITED | 1)) futex_wake(&threads->state, 1, PRIVATE);
}

// Closes the job to newcomers and waits for those inside.
static void job_finish(struct threads *threads)
{
    uint32_t state =
        atomic_fetch_and_explicit(&threads->state, ~JOB_OPEN, memory_order_acq_rel) & ~JOB_OPEN;

    for (int look = 0; look < SPIN_LOOKS && state != 0; look++) {
        spin_pause();
        state = atomic_load_explicit(&threads->state, memory_order_acquire);
    }
    if (state == 0) return;
    state =
        atomic_fetch_or_explicit(&threads->state, JOB_AWAITED, memory_order_acq_rel) | JOB_AWAITED;
    while ((state & JOB_WORKERS) != 0) {
        futex_wait(&threads->state, state, NULL, PRIVATE);
        state = atomic_load_explicit(&threads->state, memory_order_acquire);
    }
    atomic_store_explicit(&threads->state, 0, memory_order_relaxed);
}

// The sleeper raises `sleepers` and then looks at the bell; the ringer rings and then looks at
// `sleepers`. All four are sequentially consistent, so one of the two sees the other.
static uint32_t await_bell(struct threads *threads, uint32_t seen)
{
    uint32_t bell = atomic_load_explicit(&threads->bell, memory_order_acquire);

    for (int look = 0; look < SPIN_LOOKS && bell == seen; look++) {
        spin_pause();
        bell = atomic_load_explicit(&threads->bell, memory_order_acquire);
    }
    while (bell == seen) {
        (void)atomic_fetch_add(&threads->sleepers, 1);
        if (atomic_load(&threads->bell) == seen) futex_wait(&threads->bell, seen, NULL, PRIVATE);
        (void)atomic_fetch_sub(&threads->sleepers, 1);
        bell = atomic_load(&threads->bell);
    }
    return bell;
}

static void ring(struct threads *threads, int workers)
{
    (void)atomic_fetch_add(&threads->bell, 1);
    if (atomic_load(&threads->sleepers) != 0) futex_wake(&threads->bell, workers, PRIVATE);
}

static void *worker_main(void *arg)
{
    struct threads *threads = arg;
    uint32_t seen = 0;

    for (;;) {
        seen = await_bell(threads, seen);
        if (atomic_load_explicit(&threads->stop, memory_order_acquire) != 0) return NULL;
        if (job_join(threads)) {
            run_tasks(threads);
            job_leave(threads);
        }
    }
}

void threads_parallel_for(void *pool, uint64_t tasks, void (*task)(void *arg, uint64_t index),
                          void *arg)
{
    struct threads *threads = pool;

    if (tasks <= 1 || threads->started == 0 ||
        atomic_exchange_explicit(&threads->busy, 1, memory_order_acquire) != 0) {
        for (uint64_t index = 0; index < tasks; index++)
            task(arg, index);
        return;
    }
    threads->tasks = tasks;
    threads->task = task;
    threads->arg = arg;
    atomic_store_explicit(&threads->next, 0, memory_order_relaxed);
    atomic_store_explicit(&threads->state, JOB_OPEN, memory_order_release);
    ring(threads, tasks > INT_MAX ? INT_MAX : (int)tasks - 1);
    run_tasks(threads);
    job_finish(threads);
    atomic_store_explicit(&threads->busy, 0, memory_order_release);
}

// Starts one more of the workers - 1.
static int32_t start_worker(struct threads *threads, const pthread_attr_t *attributes,
                            int32_t workers, moxie_error *error)
{
    pthread_t *handle = &threads->handles[threads->started];
    int32_t number = threads->started + 1;
    char name[24];
    int os_error = pthread_create(handle, attributes, worker_main, threads);

    if (os_error != 0)
        return fail_with(
            error, os_error == ENOMEM ? MOXIE_E_MEMORY : MOXIE_E_UNAVAILABLE,
            "worker thread %d of %d cannot be started (%s); set cpu_threads to %d%s, "
            "or raise the limit of processes (ulimit -u, pids.max) or of memory (ulimit -v)",
            number, workers - 1, strerror(os_error), number, number == 1 ? "" : " or less");
    threads->started = number;
    (void)snprintf(name, sizeof name, "moxie-%d", number);
    (void)pthread_setname_np(*handle, name);
    return MOXIE_OK;
}

// All that no instruction raises: a fault of a worker's own is the host's to handle, which may
// bring in pages of weights on demand, and what is blocked then ends the process instead.
static void fill_blocked(sigset_t *blocked)
{
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS};

    (void)sigfillset(blocked);
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        (void)sigdelset(blocked, faults[i]);
}

// The mask is inherited, so that no signal sent to the host is ever handled on a worker.
static int32_t start_workers(struct threads *threads, int32_t workers, moxie_error *error)
{
    pthread_attr_t attributes;
    sigset_t blocked, before;
    int32_t st = MOXIE_OK;
    int os_error = pthread_attr_init(&attributes);

    if (os_error != 0)
        return fail_with(error, MOXIE_E_MEMORY, "thread attributes: %s", strerror(os_error));
    (void)pthread_attr_setstacksize(&attributes, WORKER_STACK_BYTES);
    fill_blocked(&blocked);
    (void)pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (threads->started < workers - 1)
        TRY(start_worker(threads, &attributes, workers, error));
out:
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    (void)pthread_attr_destroy(&attributes);
    return st;
}

int32_t threads_create(int32_t workers, struct threads **out, moxie_error *error)
{
    struct threads *threads = NULL;
    int32_t st = MOXIE_OK;

    *out = NULL;
    if (workers < 1 || workers > THREADS_WORKERS_MAX)
        TRY(fail_with(error, MOXIE_E_INVALID, "%d threads; a pool has 1 to %d", workers,
                      THREADS_WORKERS_MAX));
    threads = calloc(1, sizeof *threads + (size_t)(workers - 1) * sizeof threads->handles[0]);
    if (threads == NULL)
        TRY(fail_with(error, MOXIE_E_MEMORY, "a pool of %d threads: out of memory", workers));
    threads->process = getpid();
    TRY(start_workers(threads, workers, error));
    *out = threads;
    threads = NULL;
out:
    threads_destroy(threads);
    return st;
}

void threads_destroy(struct threads *threads)
{
    if (threads == NULL) return;
    if (threads->process == getpid()) {
        atomic_store_explicit(&threads->stop, 1, memory_order_release);
        ring(threads, INT_MAX);
        for (int32_t worker = 0; worker < threads->started; worker++)
            (void)pthread_join(threads->handles[worker], NULL);
    }
    free(threads);
}
