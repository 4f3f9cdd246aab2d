// What the kernels' suites share, see stream.h.

#include "host_tests/stream.h"

#include "host_tests/suite.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define CANARY_BYTES 64

struct call {
    void (*task)(void *arg, uint64_t index);
    void *arg;
    uint64_t index;
};

static void *call_main(void *arg)
{
    struct call *call = arg;

    call->task(call->arg, call->index);
    return NULL;
}

static void spawn_for(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t index), void *arg)
{
    pthread_t threads[64];
    struct call calls[64];

    (void)ctx;
    ck_assert_uint_le(tasks, 64);
    for (uint64_t i = 0; i < tasks; i++) {
        calls[i] = (struct call){.task = task, .arg = arg, .index = i};
        ck_assert_int_eq(pthread_create(&threads[i], NULL, call_main, &calls[i]), 0);
    }
    for (uint64_t i = 0; i < tasks; i++)
        ck_assert_int_eq(pthread_join(threads[i], NULL), 0);
}

void *poisoned(size_t bytes)
{
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);

    ck_assert_ptr_nonnull(memory);
    memset(memory, 0xff, bytes);
    return memory;
}

void stream_init(struct cpu_stream *stream, int32_t workers, enum cpu_isa isa)
{
    size_t bytes = (size_t)workers * CPU_SCRATCH_BYTES;

    *stream = (struct cpu_stream){
        .parallel_for = spawn_for,
        .scratch = poisoned(bytes + CANARY_BYTES),
        .workers = workers,
        .isa = (int32_t)isa,
    };
}

void stream_fini(struct cpu_stream *stream)
{
    size_t bytes = (size_t)stream->workers * CPU_SCRATCH_BYTES;

    for (size_t i = bytes; i < bytes + CANARY_BYTES; i++)
        assert_many(stream->scratch[i] == 0xff, "%d at byte %zu, past the scratch",
                    stream->scratch[i], i - bytes);
    free(stream->scratch);
    stream->scratch = NULL;
}

uint32_t random_next(uint32_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 17;
    *state ^= *state << 5;
    return *state;
}

float random_unit(uint32_t *state)
{
    return (float)(random_next(state) >> 8) * 0x1p-23f - 1.0f;
}
