// The CPU's two grouped products against a loop of OpenBLAS sgemm over the experts, on the same
// threads and the same routed rows. OpenBLAS gets f32 weights whatever the format here, and is left
// out when it cannot be loaded.
//
//   cpu_gemm H,I,E,K TOKENS THREADS FORMAT [ISA]
//
// FORMAT: f32, bf16, f16; f32_in, bf16_in, f16_in for values [E, K, N]. ISA: scalar, avx2, avx512.
// One JSON object per call: median and least time of the repetitions of each.

#include "bench/measure.h"
#include "kernels/cpu/cpu.h"
#include "kernels/cpu/numbers.h"
#include "kernels/kernels.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define THREADS_MAX     64
#define REPETITIONS_MAX 50
#define BENCH_NS        1500000000

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef void (*sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha,
                         const float *a, int lda, const float *b, int ldb, float beta, float *c,
                         int ldc);

struct pool {
    pthread_barrier_t start, stop;
    void (*task)(void *arg, uint64_t index);
    void *arg;
    uint64_t tasks;
};

struct member {
    struct pool *pool;
    uint64_t index;
};

struct bench {
    int64_t hidden, intermediate, experts, top_k, tokens, pairs;
    int32_t format;
    int32_t rows_in;         // the kernels read [experts, k, n]
    float *w1, *w2;          // what OpenBLAS reads
    void *view_w1, *view_w2; // what the kernels read
    float *x;                // [tokens, hidden]
    float *mid, *pair_out, *y;
    float *gathered, *gate_up; // OpenBLAS' own
    int32_t *ids, *expert_offset, *pair_row, *row_pair;
    float *weights, *pair_weight;
    struct row_slab in;
    struct out_slab out;
    struct cpu_stream stream;
    sgemm_fn sgemm;
};

// ---- Threads

static void *pool_main(void *arg)
{
    struct member *member = arg;
    struct pool *pool = member->pool;

    for (;;) {
        (void)pthread_barrier_wait(&pool->start);
        if (member->index < pool->tasks) pool->task(pool->arg, member->index);
        (void)pthread_barrier_wait(&pool->stop);
    }
    return NULL;
}

static void pool_run(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t index), void *arg)
{
    struct pool *pool = ctx;

    pool->tasks = tasks;
    pool->task = task;
    pool->arg = arg;
    (void)pthread_barrier_wait(&pool->start);
    task(arg, 0);
    (void)pthread_barrier_wait(&pool->stop);
}

// The threads live as long as the process.
static void pool_start(struct pool *pool, struct member *members, int count)
{
    pthread_t thread;

    (void)pthread_barrier_init(&pool->start, NULL, (unsigned)count);
    (void)pthread_barrier_init(&pool->stop, NULL, (unsigned)count);
    for (int i = 1; i < count; i++) {
        members[i] = (struct member){.pool = pool, .index = (uint64_t)i};
        (void)pthread_create(&thread, NULL, pool_main, &members[i]);
    }
}

// ---- Data

static uint32_t next_random(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

static void fill(float *to, int64_t count, float scale, uint32_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        float unit = (float)(next_random(&seed) >> 8) * 0x1p-23f - 1.0f;

        to[i] = bf16_decode(bf16_encode(unit * scale));
    }
}

// Every token chooses top_k experts, each once.
static void choose(struct bench *bench)
{
    uint32_t seed = 7;

    for (int64_t i = 0; i < bench->tokens * bench->top_k; i++) {
        int64_t first = i - i % bench->top_k;
        int32_t id;
        int taken;

        do {
            id = (int32_t)(next_random(&seed) % (uint32_t)bench->experts);
            taken = 0;
            for (int64_t t = first; t < i; t++)
                taken |= bench->ids[t] == id;
        } while (taken);
        bench->ids[i] = id;
        bench->weights[i] = 1.0f / (float)bench->top_k;
    }
}

// [experts, n, k] to [experts, k, n].
static float *turned(const float *from, int64_t experts, int64_t n, int64_t k)
{
    float *to = allocate(experts * n * k * 4);

    for (int64_t row = 0; row < experts * n; row++) {
        float *column = to + row / n * n * k + row % n;

        for (int64_t i = 0; i < k; i++)
            column[i * n] = from[row * k + i];
    }
    return to;
}

static void *stored(int32_t format, const float *from, int64_t count)
{
    void *to = allocate(count * number_bytes(format));

    numbers_encode(format, from, count, to);
    return to;
}

static void prepare_weights(struct bench *bench)
{
    int64_t w1 = bench->experts * 2 * bench->intermediate * bench->hidden;
    int64_t w2 = bench->experts * bench->intermediate * bench->hidden;

    bench->w1 = allocate(w1 * 4);
    bench->w2 = allocate(w2 * 4);
    fill(bench->w1, w1, 0.05f, 1);
    fill(bench->w2, w2, 0.05f, 2);
    bench->view_w1 = bench->w1;
    bench->view_w2 = bench->w2;
    if (bench->rows_in) {
        bench->view_w1 = turned(bench->w1, bench->experts, 2 * bench->intermediate, bench->hidden);
        bench->view_w2 = turned(bench->w2, bench->experts, bench->hidden, bench->intermediate);
    }
    if (bench->format == FORMAT_F32) return;
    bench->view_w1 = stored(bench->format, bench->view_w1, w1);
    bench->view_w2 = stored(bench->format, bench->view_w2, w2);
}

static void prepare_rows(struct bench *bench)
{
    int64_t pairs = bench->tokens * bench->top_k;

    bench->pairs = pairs;
    bench->x = allocate(bench->tokens * bench->hidden * 4);
    fill(bench->x, bench->tokens * bench->hidden, 1.0f, 3);
    bench->mid = allocate(pairs * bench->intermediate * 4);
    bench->pair_out = allocate(pairs * bench->hidden * 4);
    bench->y = allocate(bench->tokens * bench->hidden * 4);
    bench->gathered = allocate(pairs * bench->hidden * 4);
    bench->gate_up = allocate(pairs * 2 * bench->intermediate * 4);
    bench->ids = allocate(pairs * 4);
    bench->weights = allocate(pairs * 4);
    bench->expert_offset = allocate((bench->experts + 1) * 4);
    bench->pair_row = allocate(pairs * 4);
    bench->row_pair = allocate(pairs * 4);
    bench->pair_weight = allocate(pairs * 4);
    choose(bench);
    bench->in = (struct row_slab){
        .rows = bench->x,
        .ids = bench->ids,
        .weights = bench->weights,
        .row_stride_bytes = bench->hidden * 4,
        .id_stride_bytes = bench->top_k * 4,
        .weight_stride_bytes = bench->top_k * 4,
        .cap = (int32_t)bench->tokens,
        .format = FORMAT_F32,
        .id_bytes = 4,
        .weight_format = FORMAT_F32,
    };
    bench->out = (struct out_slab){
        .rows = bench->y,
        .row_stride_bytes = bench->hidden * 4,
        .cap = (int32_t)bench->tokens,
        .format = FORMAT_F32,
    };
}

static struct weight_view view_of(const struct bench *bench, const void *values, int64_t n,
                                  int64_t k)
{
    return (struct weight_view){
        .values = values,
        .n = n,
        .k = k,
        .expert_stride_bytes = n * k * number_bytes(bench->format),
        .row_stride_bytes = (bench->rows_in ? n : k) * number_bytes(bench->format),
        .rows_in = bench->rows_in,
        .format = bench->format,
        .order = values == bench->view_w1 ? ORDER_GATE_UP : ORDER_PLAIN,
        .global_stride = 1,
    };
}

// ---- The two contestants

static void run_products(struct bench *bench)
{
    struct gate_up_args gate_up = {
        .slabs = &bench->in,
        .expert_offset = bench->expert_offset,
        .pair_row = bench->pair_row,
        .w1 = view_of(bench, bench->view_w1, 2 * bench->intermediate, bench->hidden),
        .mid = bench->mid,
        .mid_stride_bytes = bench->intermediate * 4,
        .mid_format = FORMAT_F32,
        .experts = (int32_t)bench->experts,
        .slabs_count = 1,
        .rows_cap = (int32_t)bench->tokens,
        .hidden = (int32_t)bench->hidden,
        .intermediate = (int32_t)bench->intermediate,
        .operand_format = FORMAT_F32,
    };
    struct down_args down = {
        .expert_offset = bench->expert_offset,
        .mid = bench->mid,
        .mid_stride_bytes = bench->intermediate * 4,
        .w2 = view_of(bench, bench->view_w2, bench->hidden, bench->intermediate),
        .pair_out = bench->pair_out,
        .pair_stride_bytes = bench->hidden * 4,
        .mid_format = FORMAT_F32,
        .pair_format = FORMAT_F32,
        .experts = (int32_t)bench->experts,
        .operand_format = FORMAT_F32,
    };

    (void)gate_up_cpu(&gate_up, &bench->stream);
    (void)down_cpu(&down, &bench->stream);
}

static void run_kernels(struct bench *bench)
{
    struct route_args route = {
        .slabs = &bench->in,
        .expert_offset = bench->expert_offset,
        .pair_row = bench->pair_row,
        .pair_weight = bench->pair_weight,
        .row_pair = bench->row_pair,
        .pairs_max = bench->pairs,
        .experts = (int32_t)bench->experts,
        .slabs_count = 1,
        .rows_cap = (int32_t)bench->tokens,
        .top_k = (int32_t)bench->top_k,
    };
    struct combine_args combine = {
        .pair_out = bench->pair_out,
        .pair_stride_bytes = bench->hidden * 4,
        .pairs = bench->pairs,
        .row_pair = bench->row_pair,
        .pair_weight = bench->pair_weight,
        .slabs = &bench->out,
        .pair_format = FORMAT_F32,
        .slabs_count = 1,
        .rows_cap = (int32_t)bench->tokens,
        .hidden = (int32_t)bench->hidden,
        .top_k = (int32_t)bench->top_k,
        .scale = 1.0f,
    };

    (void)kernels_cpu.route(&route, &bench->stream);
    run_products(bench);
    (void)kernels_cpu.combine(&combine, &bench->stream);
}

static void run_expert(struct bench *bench, int64_t expert)
{
    int64_t first = bench->expert_offset[expert];
    int rows = (int)(bench->expert_offset[expert + 1] - first);
    int hidden = (int)bench->hidden, intermediate = (int)bench->intermediate;
    const float *w1 = bench->w1 + expert * 2 * intermediate * hidden;
    const float *w2 = bench->w2 + expert * intermediate * hidden;

    for (int row = 0; row < rows; row++)
        memcpy(bench->gathered + (int64_t)row * hidden,
               bench->x + (int64_t)bench->pair_row[first + row] * hidden, (size_t)hidden * 4);
    bench->sgemm(ROW_MAJOR, NO_TRANS, TRANS, rows, 2 * intermediate, hidden, 1.0f, bench->gathered,
                 hidden, w1, hidden, 0.0f, bench->gate_up, 2 * intermediate);
    for (int64_t i = 0; i < (int64_t)rows * intermediate; i++) {
        const float *row = bench->gate_up + i / intermediate * 2 * intermediate + i % intermediate;

        bench->mid[i] = row[0] / (1.0f + expf(-row[0])) * row[intermediate];
    }
    bench->sgemm(ROW_MAJOR, NO_TRANS, TRANS, rows, hidden, intermediate, 1.0f, bench->mid,
                 intermediate, w2, intermediate, 0.0f, bench->pair_out, hidden);
    for (int row = 0; row < rows; row++) {
        float *y = bench->y + (int64_t)bench->pair_row[first + row] * hidden;

        for (int i = 0; i < hidden; i++)
            y[i] += bench->pair_weight[first + row] * bench->pair_out[(int64_t)row * hidden + i];
    }
}

static void run_openblas(struct bench *bench)
{
    memset(bench->y, 0, (size_t)(bench->tokens * bench->hidden) * 4);
    for (int64_t expert = 0; expert < bench->experts; expert++) {
        if (bench->expert_offset[expert + 1] > bench->expert_offset[expert])
            run_expert(bench, expert);
    }
}

// ---- Measuring

static void measure(struct bench *bench, const char *name, void (*run)(struct bench *))
{
    int64_t times[REPETITIONS_MAX];
    int64_t begin = now_ns();
    int count = 0;

    run(bench);
    while (count < 3 || (count < REPETITIONS_MAX && now_ns() - begin < BENCH_NS)) {
        int64_t start = now_ns();

        run(bench);
        times[count++] = now_ns() - start;
    }
    sort_times(times, count);
    (void)printf(", \"%s_ms\": {\"median\": %.3f, \"least\": %.3f}", name,
                 (double)times[count / 2] * 1e-6, (double)times[0] * 1e-6);
}

static void load_openblas(struct bench *bench, int threads)
{
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    void (*set_threads)(int) = NULL;

    if (library == NULL) return;
    *(void **)&bench->sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&set_threads = dlsym(library, "openblas_set_num_threads");
    if (set_threads != NULL) set_threads(threads);
}

static double difference(const struct bench *bench, const float *other)
{
    double error = 0, norm = 0;

    for (int64_t i = 0; i < bench->tokens * bench->hidden; i++) {
        double d = (double)bench->y[i] - (double)other[i];

        error += d * d;
        norm += (double)other[i] * (double)other[i];
    }
    return sqrt(error / norm);
}

static int word(const char *text, const char *const *words, int count)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(text, words[i]) == 0) return i;
    }
    (void)fprintf(stderr, "cpu_gemm: unknown word %s\n", text);
    exit(1);
}

int main(int argc, char **argv)
{
    static const char *const formats[] = {"", "f32",    "bf16",    "f16",
                                          "", "f32_in", "bf16_in", "f16_in"};
    static const char *const isas[] = {"scalar", "avx2", "avx512"};
    static struct pool pool;
    static struct member members[THREADS_MAX];
    struct bench bench = {0};
    long long h, i, e, k;
    int threads;
    float *ours;

    if (argc < 5 || sscanf(argv[1], "%lld,%lld,%lld,%lld", &h, &i, &e, &k) != 4) {
        (void)fprintf(stderr, "usage: cpu_gemm H,I,E,K TOKENS THREADS FORMAT [ISA]\n");
        return 1;
    }
    bench = (struct bench){.hidden = h, .intermediate = i, .experts = e, .top_k = k};
    bench.tokens = strtoll(argv[2], NULL, 10);
    threads = (int)strtol(argv[3], NULL, 10);
    if (threads < 1 || threads > THREADS_MAX) threads = 1;
    bench.format = word(argv[4], formats, 8) % 4;
    bench.rows_in = strstr(argv[4], "_in") != NULL;
    bench.stream = (struct cpu_stream){
        .parallel_for = pool_run,
        .ctx = &pool,
        .scratch = allocate(threads * (int64_t)CPU_SCRATCH_BYTES),
        .workers = threads,
        .isa = argc > 5 ? word(argv[5], isas, 3) : (int)cpu_isa_best(),
    };
    prepare_weights(&bench);
    prepare_rows(&bench);
    pool_start(&pool, members, threads);
    (void)printf(
        "{\"shape\": \"%s\", \"tokens\": %s, \"threads\": %d, \"format\": \"%s\", \"isa\": \"%s\"",
        argv[1], argv[2], threads, argv[4], isas[bench.stream.isa]);
    measure(&bench, "moxie", run_kernels);
    ours = stored(FORMAT_F32, bench.y, bench.tokens * bench.hidden);
    load_openblas(&bench, threads);
    if (bench.sgemm != NULL) {
        measure(&bench, "openblas", run_openblas);
        (void)printf(", \"difference\": %.1e", difference(&bench, ours));
    }
    (void)printf("}\n");
    return 0;
}
