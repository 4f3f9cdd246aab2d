// Ids, the count of tokens, the map of experts and the router's weights that another thread writes
// over while kernels read them, as no host should. The numbers may be any, but the forward has to
// end and to leave alone what is neither the batch's nor the instance's, and the next one is right.

#include "host_tests/gpu/gpu_layer.h"

#include "host_tests/suite.h"
#include "kernels/cuda/cuda.h"
#include "plugin/tensor.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define FORWARDS 2

struct batch {
    unsigned char *ids;
    float *weights;
    int32_t *map, *count;
    int64_t choices, id_bytes, tokens, experts;
    uint64_t seed;
    atomic_int stop;
};

static uint64_t draw(struct batch *batch)
{
    batch->seed ^= batch->seed << 13;
    batch->seed ^= batch->seed >> 7;
    batch->seed ^= batch->seed << 17;
    return batch->seed;
}

// What there is half of the time, else anything.
static int64_t draw_number(struct batch *batch, int64_t below)
{
    const int64_t odd[] = {-1, below, INT_MAX, INT_MIN, INT64_MAX, INT64_MIN, (int64_t)1 << 32, -2};
    const uint64_t drawn = draw(batch);

    return drawn & 1 ? (int64_t)(drawn >> 8) % below : odd[drawn >> 1 & 7];
}

static void put_id(const struct batch *batch, int64_t choice, int64_t id)
{
    if (batch->id_bytes == 8)
        __atomic_store_n((int64_t *)(void *)batch->ids + choice, id, __ATOMIC_RELAXED);
    else
        __atomic_store_n((int32_t *)(void *)batch->ids + choice, (int32_t)id, __ATOMIC_RELAXED);
}

static void *spoil(void *arg)
{
    static const uint32_t weights[] = {0x7fc00000, 0xff800000, 0x7f7fffff, 0x3f000000};
    struct batch *batch = arg;

    while (!atomic_load(&batch->stop)) {
        const uint64_t drawn = draw(batch);
        const int64_t choice = (int64_t)(draw(batch) >> 8) % batch->choices;

        if (drawn % 64 == 0) // all alike, which is as many pairs of an expert as there can be
            for (int64_t i = 0, id = draw_number(batch, batch->experts); i < batch->choices; i++)
                put_id(batch, i, id);
        put_id(batch, choice, draw_number(batch, batch->experts));
        __atomic_store_n((uint32_t *)(void *)batch->weights + choice, weights[drawn >> 8 & 3],
                         __ATOMIC_RELAXED);
        __atomic_store_n(&batch->map[(drawn >> 16) % (uint64_t)batch->experts],
                         (int32_t)draw_number(batch, batch->experts), __ATOMIC_RELAXED);
        __atomic_store_n(batch->count,
                         drawn >> 10 & 1 ? (int32_t)draw_number(batch, batch->tokens + 1)
                                         : (int32_t)batch->tokens,
                         __ATOMIC_RELAXED);
    }
    return NULL;
}

// One launch; products that count ids, with and without halves of mid that two blocks exchange, and
// with results in place; route by one cluster, and by many blocks.
static const struct {
    const char *layer;
    struct gpu_options options;
    int32_t id_bytes;
} layers[] = {
    {"qwen3_moe_t1", {.copies = 4}, 8},
    {"qwen3_moe_t1", {.copies = 2, .fp8 = 1}, 4},
    {"qwen3_moe_a", {.copies = 4}, 4},
    {"qwen3_moe_a", {.fp8 = 1}, 4},
    {"qwen3_moe_a", {.mxfp4 = 1}, 8},
    {"mixtral_a", {.copies = 3, .fp8 = 1}, 4},
    {"qwen2_moe_a", {.fp8 = 1}, 4},
    {"llama4_a", {0}, 4},
    {"qwen3_moe_a", {.copies = 20, .fp8 = 1}, 4},
    {"qwen3_moe_a", {.copies = 70}, 8},
};

static struct batch take_batch(struct gpu_layer *gpu, int64_t map_dims[1], int64_t id_bytes)
{
    moxie_batch *own = &gpu->batch.batch;
    struct batch batch = {.choices = gpu->layer.tokens * gpu->layer.top_k,
                          .tokens = gpu->layer.tokens,
                          .experts = gpu->layer.experts,
                          .id_bytes = id_bytes,
                          .seed = 88172645463325252u};
    void *map;

    must(cudaMalloc(&map, (size_t)batch.experts * 4));
    batch.map = map;
    must(cudaMalloc(&map, 4));
    batch.count = map;
    map_dims[0] = batch.experts;
    own->expert_map = tensor_make(batch.map, 1, map_dims, NULL, TENSOR_INT32);
    own->expert_map.device = own->x.device;
    if (id_bytes == 8) {
        must(cudaFree(own->ids.data));
        must(cudaMalloc(&own->ids.data, (size_t)batch.choices * 8));
        own->ids.dtype.bits = 64;
    }
    batch.ids = own->ids.data;
    batch.weights = own->weights.data;
    gpu->step.tokens_valid = batch.count;
    return batch;
}

static void mend(const struct batch *batch, const struct gpu_layer *gpu)
{
    for (int64_t i = 0; i < batch->choices; i++)
        put_id(batch, i, ((const int32_t *)(const void *)gpu->layer.ids.data)[i]);
    memcpy(batch->weights, gpu->layer.weights.data, (size_t)batch->choices * 4);
    for (int32_t e = 0; e < batch->experts; e++)
        batch->map[e] = e;
    *batch->count = (int32_t)batch->tokens;
}

START_TEST(a_batch_that_is_written_over)
{
    struct gpu_layer gpu;
    struct batch batch;
    pthread_t thread;
    int64_t map_dims[1];

    gpu_layer_open(&gpu, layers[_i].layer, layers[_i].options);
    batch = take_batch(&gpu, map_dims, layers[_i].id_bytes);
    mend(&batch, &gpu);
    {
        ck_assert_int_eq(pthread_create(&thread, NULL, spoil, &batch), 0);
        for (int32_t i = 0; i < FORWARDS; i++) {
            gpu_launch(&gpu);
            must(cudaStreamSynchronize(gpu.stream));
        }
        atomic_store(&batch.stop, 1);
        ck_assert_int_eq(pthread_join(thread, NULL), 0);
        mend(&batch, &gpu);
        gpu_forward(&gpu);
        ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    }
    must(cudaFree(batch.map));
    must(cudaFree(batch.count));
    gpu_layer_close(&gpu);
}
END_TEST

// ---- Rows by expert ----------------------------------------------------------------------------

#define PREFIX_EXPERTS 512
#define PREFIX_ROWS    (1 << 23)
#define PREFIX_PAIRS   64

struct prefix {
    int32_t ends[PREFIX_EXPERTS + 1];
    atomic_int stop;
};

// All rows are the first expert's, or the last one's.
static void *move_rows(void *arg)
{
    struct prefix *prefix = arg;

    for (int32_t end = 0; !atomic_load(&prefix->stop); end ^= PREFIX_ROWS) {
        for (int32_t e = 0; e <= PREFIX_EXPERTS; e++)
            __atomic_store_n(&prefix->ends[e], end, __ATOMIC_RELAXED);
        (void)usleep(30);
    }
    return NULL;
}

START_TEST(a_prefix_that_is_written_over)
{
    static struct prefix prefix;
    const struct row_slab slab = {.cap = PREFIX_ROWS};
    int32_t offset[PREFIX_EXPERTS + 1], pair_row[PREFIX_PAIRS];
    float pair_weight[PREFIX_PAIRS];
    const struct route_args args = {.slabs = &slab,
                                    .expert_counts = prefix.ends,
                                    .expert_offset = offset,
                                    .pair_row = pair_row,
                                    .pair_weight = pair_weight,
                                    .pairs_max = PREFIX_PAIRS,
                                    .experts = PREFIX_EXPERTS,
                                    .slabs_count = 1,
                                    .rows_cap = PREFIX_ROWS,
                                    .top_k = 1,
                                    .by = ROUTE_BY_PREFIX};
    pthread_t thread;

    must((cudaError_t)route_cuda_load());
    ck_assert_int_eq(pthread_create(&thread, NULL, move_rows, &prefix), 0);
    for (int32_t i = 0; i < 40; i++) {
        must((cudaError_t)route_cuda(&args, NULL));
        ck_assert_int_eq(offset[0], 0);
        for (int32_t e = 0; e < PREFIX_EXPERTS; e++)
            assert_many(offset[e] <= offset[e + 1] && offset[e + 1] <= PREFIX_PAIRS,
                        "expert %d ends at pair %d, behind %d", e, offset[e + 1], offset[e]);
        for (int32_t pair = 0; pair < offset[PREFIX_EXPERTS]; pair++)
            assert_many(pair_row[pair] >= 0 && pair_row[pair] < PREFIX_ROWS, "row %d",
                        pair_row[pair]);
    }
    atomic_store(&prefix.stop, 1);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, a_prefix_that_is_written_over);
    tcase_add_loop_test(tests, a_batch_that_is_written_over, 0,
                        (int)(sizeof layers / sizeof layers[0]));
}

SUITE_MAIN("torn_batch", 240, add)
