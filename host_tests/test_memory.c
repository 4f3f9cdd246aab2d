// plugin/memory.c: buffers are made with their first user and given back with the last; whatever
// fails, nothing is left.

#include "plugin/memory.h"

#include "host_tests/layer.h"
#include "host_tests/mock_host.h"
#include "host_tests/said.h"
#include "host_tests/suite.h"
#include "plugin/instance.h"
#include "plugin/runner.h"

#include <stdio.h>
#include <string.h>

#define BIT(id) (1u << (id))
#define ALL     (BIT(BUFFER_COUNT) - 1)

// A plan with every buffer but the window, of 256 * (id + 1) bytes in two slots.
struct sample {
    struct mock_host mock;
    struct plan plan;
    struct memory memory;
    char names[BUFFER_COUNT][32];
    char sizes[BUFFER_COUNT][24]; // as an error tells them
    struct said said;
};

static void sample_init(struct sample *s)
{
    memset(s, 0, sizeof *s);
    mock_host_init(&s->mock);
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        moxie_buffer *buffer = &s->plan.buffers[s->plan.buffers_count];

        if (id == BUFFER_WINDOW) continue;
        (void)snprintf(s->names[id], sizeof s->names[id], "buffer %d", id);
        (void)snprintf(s->sizes[id], sizeof s->sizes[id], "%d bytes", 512 * (id + 1));
        *buffer = (moxie_buffer){.struct_size = sizeof *buffer,
                                 .kind = MOXIE_MEMORY_DEVICE,
                                 .name = s->names[id],
                                 .bytes = 512 * (uint64_t)(id + 1),
                                 .bytes_mapped = 4096 * (uint64_t)(id + 1),
                                 .align = 128};
        s->plan.slot_bytes[id] = 256 * (id + 1);
        s->plan.buffer_ids[s->plan.buffers_count++] = id;
    }
    s->memory = (struct memory){.host = &s->mock.host, .device = &device_cpu, .plan = &s->plan};
    said_init(&s->said);
}

static int32_t take(struct sample *s, uint32_t set)
{
    return memory_take(&s->memory, set, &s->said.error);
}

START_TEST(users_share_buffers)
{
    static const uint32_t runner = BIT(BUFFER_MID) | BIT(BUFFER_CPU_SCRATCH);
    static const uint32_t dispatcher = BIT(BUFFER_CPU_SCRATCH) | BIT(BUFFER_CAPTURE);
    struct sample s;

    sample_init(&s);
    ACCEPTED(&s.said, take(&s, runner));
    ck_assert_uint_eq(s.mock.allocate_calls, 2);
    ACCEPTED(&s.said, take(&s, runner));
    ck_assert_uint_eq(s.mock.allocate_calls, 2);
    ACCEPTED(&s.said, take(&s, dispatcher));
    ck_assert_uint_eq(s.mock.allocate_calls, 3);
    ck_assert_uint_eq(s.mock.bytes_live,
                      512 * (BUFFER_MID + BUFFER_CPU_SCRATCH + BUFFER_CAPTURE + 3));
    ck_assert_uint_eq(s.memory.bytes_held,
                      4096 * (BUFFER_MID + BUFFER_CPU_SCRATCH + BUFFER_CAPTURE + 3));
    memory_drop(&s.memory, runner);
    ck_assert_uint_eq(s.mock.release_calls, 0);
    memory_drop(&s.memory, runner);
    ck_assert_uint_eq(s.mock.release_calls, 1); // mid; the scratch has a user yet
    memory_drop(&s.memory, dispatcher);
    ck_assert_uint_eq(s.mock.release_calls, 3);
    ck_assert_uint_eq(s.memory.bytes_held, 0);
    mock_host_fini(&s.mock);
}
END_TEST

START_TEST(slots_are_pieces)
{
    struct sample s;
    unsigned char *first;

    sample_init(&s);
    ck_assert_ptr_null(memory_slot(&s.memory, BUFFER_MID, 0));
    ACCEPTED(&s.said, take(&s, ALL));
    first = memory_slot(&s.memory, BUFFER_MID, 0);
    ck_assert_ptr_nonnull(first);
    ck_assert_uint_eq((uintptr_t)first % 128, 0);
    ck_assert_ptr_eq(memory_slot(&s.memory, BUFFER_MID, 1), first + 256 * (BUFFER_MID + 1));
    ck_assert_ptr_null(memory_slot(&s.memory, BUFFER_WINDOW, 0)); // not in the plan
    memory_drop(&s.memory, ALL);
    ck_assert_ptr_null(memory_slot(&s.memory, BUFFER_MID, 0));
    mock_host_fini(&s.mock);
}
END_TEST

START_TEST(a_buffer_of_no_bytes_is_none)
{
    struct sample s;

    sample_init(&s);
    s.plan.buffers[0].bytes = 0;
    ACCEPTED(&s.said, take(&s, BIT(s.plan.buffer_ids[0])));
    ck_assert_uint_eq(s.mock.allocate_calls, 0);
    memory_drop(&s.memory, BIT(s.plan.buffer_ids[0]));
    mock_host_fini(&s.mock);
}
END_TEST

START_TEST(whatever_fails_nothing_is_left)
{
    struct sample s;
    uint64_t failures = 0;

    for (uint64_t n = 1; n < BUFFER_COUNT + 1; n++) {
        sample_init(&s);
        s.mock.allocate_fail_at = n;
        if (n == BUFFER_COUNT) {
            ACCEPTED(&s.said, take(&s, ALL)); // one buffer is not in the plan
            memory_drop(&s.memory, ALL);
        } else {
            SAID(&s.said, MOXIE_E_MEMORY, take(&s, ALL), s.plan.buffers[n - 1].name,
                 "host's allocator", "answer -1");
            failures++;
        }
        ck_assert_uint_eq(s.mock.bytes_live, 0);
        ck_assert_uint_eq(s.memory.bytes_held, 0);
        ck_assert_uint_eq(s.mock.release_calls, n - 1);
        for (int32_t id = 0; id < BUFFER_COUNT; id++)
            ck_assert_int_eq(s.memory.buffers[id].users, 0);
        s.mock.allocate_fail_at = 0; // and it can be tried again
        ACCEPTED(&s.said, take(&s, ALL));
        memory_drop(&s.memory, ALL);
        mock_host_fini(&s.mock);
    }
    ck_assert_uint_eq(failures, BUFFER_COUNT - 1);
}
END_TEST

START_TEST(a_failure_leaves_other_users_alone)
{
    struct sample s;
    void *mid;

    sample_init(&s);
    ACCEPTED(&s.said, take(&s, BIT(BUFFER_MID)));
    mid = memory_slot(&s.memory, BUFFER_MID, 0);
    s.mock.allocate_fail_at = 2;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, BIT(BUFFER_MID) | BIT(BUFFER_PAIR_OUT)),
         s.names[BUFFER_PAIR_OUT], s.sizes[BUFFER_PAIR_OUT]);
    ck_assert_ptr_eq(memory_slot(&s.memory, BUFFER_MID, 0), mid);
    ck_assert_uint_eq(s.mock.release_calls, 0);
    memory_drop(&s.memory, BIT(BUFFER_MID));
    mock_host_fini(&s.mock);
}
END_TEST

// A host whose allocator is off by eight bytes, or forgets to say where.
struct careless {
    unsigned char memory[8192];
    int32_t nowhere, released, blamed;
    int32_t answer; // beside the memory
};

static void careless_log(void *ctx, int32_t severity, const char *component, const char *text,
                         uint64_t length)
{
    struct careless *careless = ctx;

    (void)component;
    (void)text;
    (void)length;
    careless->blamed += severity == MOXIE_LOG_HOST_MISBEHAVING;
}

static int32_t careless_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct careless *careless = ctx;

    (void)request;
    *memory =
        careless->nowhere ? NULL : (void *)(((uintptr_t)careless->memory + 127) / 128 * 128 + 8);
    return careless->answer;
}

static void careless_release(void *ctx, const moxie_allocation *request, void *memory)
{
    struct careless *careless = ctx;

    (void)request;
    (void)memory;
    careless->released++;
}

START_TEST(careless_allocators_are_refused)
{
    struct careless careless = {.nowhere = 0};
    struct sample s;

    sample_init(&s);
    s.mock.host.ctx = &careless;
    s.mock.host.allocate = careless_allocate;
    s.mock.host.release = careless_release;
    s.mock.host.log = careless_log;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, BIT(BUFFER_MID)), s.names[BUFFER_MID], "alignment 128");
    ck_assert_int_eq(careless.released, 1);
    ck_assert_int_eq(careless.blamed, 1);
    ck_assert_uint_eq(s.memory.bytes_held, 0);
    careless.nowhere = 1;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, BIT(BUFFER_MID)), s.names[BUFFER_MID],
         s.sizes[BUFFER_MID], "answer 0, and no memory");
    ck_assert_int_eq(careless.released, 1);
    ck_assert_int_eq(careless.blamed, 2);
    careless.nowhere = 0; // what a call that failed has written is nothing
    careless.answer = 7;
    s.plan.buffers[BUFFER_MID].align = 8;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, BIT(BUFFER_MID)), s.names[BUFFER_MID], "answer 7");
    ck_assert_ptr_null(memory_slot(&s.memory, BUFFER_MID, 0));
    ck_assert_int_eq(careless.released, 1);
    ck_assert_int_eq(careless.blamed, 2);
    mock_host_fini(&s.mock);
}
END_TEST

static int32_t fill_failing(void *memory, int32_t byte, int64_t bytes)
{
    (void)memory;
    (void)byte;
    (void)bytes;
    return 7;
}

// Whatever a host's memory holds, and again when it is made again.
START_TEST(what_is_counted_begins_at_zero)
{
    static const enum buffer_id ids[] = {BUFFER_LAYER_TURNS, BUFFER_LAYER_MID};
    const enum buffer_id id = ids[_i];
    struct careless careless = {.nowhere = 0};
    struct device device = device_cpu;
    struct sample s;

    sample_init(&s);
    s.mock.host.ctx = &careless;
    s.mock.host.allocate = careless_allocate;
    s.mock.host.release = careless_release;
    s.mock.host.log = careless_log;
    s.memory.device = &device;
    s.plan.buffers[id].align = 8;
    for (int32_t i = 0; i < 2; i++) {
        const unsigned char *counts;

        memset(careless.memory, 0xff, sizeof careless.memory);
        ACCEPTED(&s.said, take(&s, BIT(id)));
        counts = memory_slot(&s.memory, id, 0);
        for (size_t at = 0; at < s.plan.buffers[id].bytes; at++)
            ck_assert_uint_eq(counts[at], 0);
        memory_drop(&s.memory, BIT(id));
    }
    device.fill = fill_failing;
    SAID(&s.said, MOXIE_E_DEVICE, take(&s, BIT(id)), s.names[id], "(7)");
    ck_assert_int_eq(careless.released, 3);
    ck_assert_uint_eq(s.memory.bytes_held, 0);
    mock_host_fini(&s.mock);
}
END_TEST

START_TEST(without_an_allocator_the_device_gives)
{
    struct sample s;

    sample_init(&s);
    s.mock.host.allocate = NULL;
    s.mock.host.release = NULL;
    ACCEPTED(&s.said, take(&s, ALL));
    for (int32_t id = 0; id < BUFFER_COUNT; id++) {
        if (id == BUFFER_WINDOW) continue;
        memset(memory_slot(&s.memory, (enum buffer_id)id, 0), 1, 512 * ((size_t)id + 1));
    }
    memory_drop(&s.memory, ALL);
    s.plan.buffers[0].bytes = (uint64_t)1 << 61;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, ALL), "buffer 0", "the device could not give",
         "2305843009213693952 bytes (out of memory)", "set device_memory_budget_bytes");
    s.plan.buffers[0].kind = MOXIE_MEMORY_HOST;
    SAID(&s.said, MOXIE_E_MEMORY, take(&s, ALL), "(out of memory); set cpu_threads lower");
    ck_assert_uint_eq(s.memory.bytes_held, 0);
    mock_host_fini(&s.mock);
}
END_TEST

static int32_t synchronize(void)
{
    return 0;
}

static int32_t allocate_failing(const moxie_allocation *request, void **memory)
{
    (void)request;
    *memory = NULL;
    return 7;
}

// A device that tells so late, and of whatever it is asked for.
START_TEST(what_failed_before_is_no_want_of_memory)
{
    struct device device = device_cpu;
    struct sample s;

    sample_init(&s);
    s.mock.host.allocate = NULL;
    s.mock.host.release = NULL;
    s.memory.device = &device;
    device.synchronize = synchronize;
    device.allocate = allocate_failing;
    SAID(&s.said, MOXIE_E_DEVICE, take(&s, ALL), "the device could not give",
         "refused its arguments); work that was launched before this may have failed");
    device.allocate = device_cpu.allocate;
    device.fill = fill_failing;
    SAID(&s.said, MOXIE_E_DEVICE, take(&s, ALL), "(7); work that was launched before");
    ck_assert_uint_eq(s.memory.bytes_held, 0);
    mock_host_fini(&s.mock);
}
END_TEST

static const struct mock_host *watched;
static uint64_t releases_when_waited;

static int32_t note_wait(void)
{
    releases_when_waited = watched->release_calls;
    return 0;
}

// Of a device that computes on while the host goes on.
START_TEST(runners_give_back_behind_what_uses_it)
{
    struct layer layer;
    struct layer_rank rank;
    struct device device;

    layer_open(&layer, "qwen3_moe_a");
    layer_rank_init(&rank, &layer, NULL, 0);
    layer_rank_open(&rank, &layer);
    device = *rank.instance->device;
    device.synchronize = note_wait;
    rank.instance->device = &device;
    watched = &rank.mock;
    releases_when_waited = UINT64_MAX;
    runner_destroy(rank.runner);
    rank.runner = NULL;
    ck_assert_uint_eq(releases_when_waited, 0);
    ck_assert_uint_gt(watched->release_calls, 0);
    layer_rank_close(&rank);
    layer_close(&layer);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_test(tests, users_share_buffers);
    tcase_add_test(tests, slots_are_pieces);
    tcase_add_test(tests, a_buffer_of_no_bytes_is_none);
    tcase_add_test(tests, whatever_fails_nothing_is_left);
    tcase_add_test(tests, a_failure_leaves_other_users_alone);
    tcase_add_test(tests, careless_allocators_are_refused);
    tcase_add_loop_test(tests, what_is_counted_begins_at_zero, 0, 2);
    tcase_add_test(tests, without_an_allocator_the_device_gives);
    tcase_add_test(tests, what_failed_before_is_no_want_of_memory);
    tcase_add_test(tests, runners_give_back_behind_what_uses_it);
}

SUITE_MAIN("memory", 10, add)
