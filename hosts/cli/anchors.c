// The machine's ceilings, by two loops that do nothing else. Built with optimisation in every build
// type.

#include "hosts/cli/machine.h"

#include "hosts/cli/progress.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define READ_BYTES      ((uint64_t)512 << 20)
#define READ_PASSES     4
#define READ_LANES      8
#define PEAK_CHAINS     12 // covers two units of four cycles' latency
#define PEAK_ITERATIONS ((uint64_t)20000000)
#define THREADS_MAX     256

enum gate { GATE_SHUT, GATE_OPEN, GATE_CALLED_OFF };

struct worker {
    pthread_t thread;
    _Atomic int *gate;
    const uint64_t *data; // read: its part
    uint64_t count;
    uint64_t flops; // peak: what it has done
    uint64_t sink_u64;
    float sink_f32;
};

// 1 when the race is on.
static int await_gate(const struct worker *worker)
{
    int gate = GATE_SHUT;

    while ((gate = atomic_load(worker->gate)) == GATE_SHUT)
        (void)sched_yield();
    return gate == GATE_OPEN;
}

static void *read_worker(void *arg)
{
    struct worker *worker = arg;
    const uint64_t *data = worker->data;
    uint64_t sums[READ_LANES] = {0};

    if (!await_gate(worker)) return NULL;
    for (uint64_t i = 0; i + READ_LANES <= worker->count; i += READ_LANES)
        for (unsigned lane = 0; lane < READ_LANES; lane++)
            sums[lane] += data[i + lane];
    for (int lane = 0; lane < READ_LANES; lane++)
        worker->sink_u64 += sums[lane];
    return NULL;
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) static float peak_avx512(uint64_t iterations)
{
    __m512 chains[PEAK_CHAINS];
    __m512 factor = _mm512_set1_ps(0.999f);
    __m512 sum = _mm512_setzero_ps();

    for (int j = 0; j < PEAK_CHAINS; j++)
        chains[j] = _mm512_set1_ps((float)j);
    for (uint64_t i = 0; i < iterations; i++)
        for (int j = 0; j < PEAK_CHAINS; j++)
            chains[j] = _mm512_fmadd_ps(chains[j], factor, factor);
    for (int j = 0; j < PEAK_CHAINS; j++)
        sum = _mm512_add_ps(sum, chains[j]);
    return _mm512_reduce_add_ps(sum);
}

__attribute__((target("avx2,fma"))) static float peak_avx2(uint64_t iterations)
{
    __m256 chains[PEAK_CHAINS];
    __m256 factor = _mm256_set1_ps(0.999f);
    __m256 sum = _mm256_setzero_ps();

    for (int j = 0; j < PEAK_CHAINS; j++)
        chains[j] = _mm256_set1_ps((float)j);
    for (uint64_t i = 0; i < iterations; i++)
        for (int j = 0; j < PEAK_CHAINS; j++)
            chains[j] = _mm256_fmadd_ps(chains[j], factor, factor);
    for (int j = 0; j < PEAK_CHAINS; j++)
        sum = _mm256_add_ps(sum, chains[j]);
    return _mm256_cvtss_f32(sum);
}
#endif

static float peak_scalar(uint64_t iterations)
{
    float chains[PEAK_CHAINS];
    float sum = 0;

    for (int j = 0; j < PEAK_CHAINS; j++)
        chains[j] = (float)j;
    for (uint64_t i = 0; i < iterations; i++)
        for (int j = 0; j < PEAK_CHAINS; j++)
            chains[j] = chains[j] * 0.999f + 0.999f;
    for (int j = 0; j < PEAK_CHAINS; j++)
        sum += chains[j];
    return sum;
}

// The widest loop that this machine can run, and how many numbers a vector of it has.
static float (*widest_peak(uint64_t *lanes))(uint64_t)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f")) {
        *lanes = 16;
        return peak_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        *lanes = 8;
        return peak_avx2;
    }
#endif
    *lanes = 1;
    return peak_scalar;
}

static void *peak_worker(void *arg)
{
    struct worker *worker = arg;
    uint64_t lanes = 0;
    float (*peak)(uint64_t) = widest_peak(&lanes);

    if (!await_gate(worker)) return NULL;
    worker->sink_f32 = peak(PEAK_ITERATIONS);
    worker->flops = 2 * lanes * PEAK_CHAINS * PEAK_ITERATIONS;
    return NULL;
}

// Seconds from the start of all workers until the last is through. Negative when a thread is
// lacking.
static double race(struct worker *workers, int threads, void *(*work)(void *))
{
    _Atomic int gate = GATE_SHUT;
    int64_t started_ns = 0;
    int started = 0;

    for (int i = 0; i < threads; i++) {
        workers[i].gate = &gate;
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) break;
        started++;
    }
    started_ns = clock_ns();
    atomic_store(&gate, started == threads ? GATE_OPEN : GATE_CALLED_OFF);
    for (int i = 0; i < started; i++)
        (void)pthread_join(workers[i].thread, NULL);
    return started == threads ? (double)(clock_ns() - started_ns) / 1e9 : -1;
}

static double measure_read(struct worker *workers, int threads, const uint64_t *data,
                           uint64_t count)
{
    uint64_t part = count / (uint64_t)threads;
    double best_s = -1;

    for (int i = 0; i < threads; i++) {
        workers[i].data = data + (uint64_t)i * part;
        workers[i].count = part;
    }
    for (int pass = 0; pass < READ_PASSES; pass++) {
        double seconds = race(workers, threads, read_worker);

        if (seconds > 0 && (best_s < 0 || seconds < best_s)) best_s = seconds;
    }
    return best_s;
}

int anchors_measure(int threads, struct anchors *anchors)
{
    struct worker *workers = NULL;
    uint64_t bytes = READ_BYTES;
    uint64_t *data = NULL;
    double read_s = -1;
    double peak_s = -1;
    double flops = 0;

    if (threads > THREADS_MAX) threads = THREADS_MAX;
    workers = calloc((size_t)threads, sizeof *workers);
    if (bytes > machine_memory_available() / 4) bytes = machine_memory_available() / 4;
    data = malloc(bytes);
    if (workers != NULL && data != NULL) {
        memset(data, 1, bytes);
        read_s = measure_read(workers, threads, data, bytes / sizeof *data);
        peak_s = race(workers, threads, peak_worker);
    }
    for (int i = 0; peak_s > 0 && i < threads; i++)
        flops += (double)workers[i].flops;
    *anchors = (struct anchors){
        .read_bytes_per_s = (double)bytes / read_s,
        .f32_flops_per_s = flops / peak_s,
    };
    free(data);
    free(workers);
    return read_s > 0 && peak_s > 0;
}
