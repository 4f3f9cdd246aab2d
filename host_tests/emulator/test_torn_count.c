// A count of tokens that another thread changes while kernels read it, as no host should: blocks
// then have unequal tiles, and somebody waits for numbers that nobody makes. The numbers may be
// any, but the wait has to end.

#include "host_tests/gpu/gpu_layer.h"

#include "host_tests/suite.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define FORWARDS 3

struct count {
    int32_t tokens, most;
    atomic_int stop;
};

static void *change(void *arg)
{
    struct count *count = arg;

    while (!atomic_load(&count->stop)) {
        __atomic_store_n(&count->tokens, count->tokens == 0 ? count->most : 0, __ATOMIC_RELAXED);
        (void)usleep(50);
    }
    return NULL;
}

// Four tokens, which one launch computes, and more, whose tiles the products count.
static const struct {
    const char *layer;
    struct gpu_options options;
} rows[] = {
    {"qwen3_moe_t1", {.copies = 4}}, {"qwen3_moe_a", {0}},
    {"qwen3_moe_a", {.fp8 = 1}},     {"qwen3_moe_a", {.mxfp4 = 1}},
    {"qwen3_moe_a", {.copies = 20}}, {"qwen3_moe_a", {.copies = 20, .fp8 = 1}},
};

START_TEST(a_count_that_changes_ends_the_wait)
{
    struct gpu_layer gpu;
    struct count count = {0};
    pthread_t thread;

    gpu_layer_open(&gpu, rows[_i].layer, rows[_i].options);
    count.most = (int32_t)gpu.layer.tokens;
    gpu.step.tokens_valid = &count.tokens;
    ck_assert_int_eq(pthread_create(&thread, NULL, change, &count), 0);
    for (int32_t i = 0; i < FORWARDS; i++) {
        gpu_launch(&gpu);
        must(cudaStreamSynchronize(gpu.stream));
    }
    atomic_store(&count.stop, 1);
    ck_assert_int_eq(pthread_join(thread, NULL), 0);
    gpu.step.tokens_valid = NULL;
    gpu_forward(&gpu);
    ck_assert_double_le(golden_error(gpu.y, &gpu.layer.want), gpu.bound);
    gpu_layer_close(&gpu);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_loop_test(tests, a_count_that_changes_ends_the_wait, 0,
                        (int)(sizeof rows / sizeof rows[0]));
}

SUITE_MAIN("torn_count", 240, add)
