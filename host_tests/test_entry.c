// abi/entry.c: negotiation, the instance's slots, and the tables' completeness.

#include "abi/entry.h"

#include "abi/layout.h"
#include "plugin/backends.h"

#include "host_tests/fake/rooms.h"
#include "host_tests/suite.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

static char text[512];
static moxie_error error;
static const moxie_api *api;

static moxie_instance *instance;
static moxie_runner *live_runner;
static moxie_dispatcher *dispatcher;

static int32_t ask(uint32_t least, uint32_t most)
{
    const moxie_request request = {
        .struct_size = sizeof request, .abi_min = least, .abi_max = most, .host_build = "engine 7"};

    return moxie_get_api_v1(&request, &api, &error);
}

static void setup(void)
{
    memset(&fake, 0, sizeof fake);
    memset(text, 'x', sizeof text);
    error = (moxie_error){.struct_size = sizeof error, .text = text, .text_bytes = sizeof text};
    instance = fake_instances[0];
    live_runner = fake_runners[0];
    dispatcher = fake_dispatchers[0];
    ck_assert_int_eq(ask(MOXIE_ABI_VERSION, MOXIE_ABI_VERSION), MOXIE_OK);
}

// ---- Negotiation ----

START_TEST(versions_agree)
{
    ck_assert_int_eq(ask(MOXIE_ABI(0, 0), MOXIE_ABI(9, 0)), MOXIE_OK);
    ck_assert_uint_eq(api->abi_version, MOXIE_ABI_VERSION);
    ck_assert_int_eq(error.code, MOXIE_OK);
    ck_assert_uint_eq(api->build->abi_min, MOXIE_ABI_VERSION);
    ck_assert_uint_eq(api->build->abi_max, MOXIE_ABI_VERSION);
    ck_assert_uint_eq(api->build->layout_digest, LAYOUT_DIGEST);
    ck_assert_str_eq(api->build->version, "0.1.1");
    ck_assert_str_ne(api->build->cuda, "");
    ck_assert_str_ne(api->build->source_id, "");
    ck_assert_str_ne(api->build->compiler, "unknown");
}
END_TEST

START_TEST(versions_differ)
{
    ck_assert_int_eq(ask(MOXIE_ABI(0, 2), MOXIE_ABI(0, 4)), MOXIE_E_VERSION);
    ck_assert_ptr_null(api);
    ck_assert_ptr_nonnull(strstr(text, "engine 7"));
    ck_assert_ptr_nonnull(strstr(text, "0.2 to 0.4"));
    ck_assert_ptr_nonnull(strstr(text, "0.1 to 0.1"));
    ck_assert_ptr_nonnull(strstr(text, "libmoxie (0.1.1, "));
    ck_assert_int_eq(error.code, MOXIE_E_VERSION);
    ck_assert_int_eq(ask(0, 0), MOXIE_E_VERSION);
    ck_assert_int_eq(ask(MOXIE_ABI(0, 3), MOXIE_ABI(0, 1)), MOXIE_E_INVALID);
    ck_assert_int_eq(ask(MOXIE_ABI_VERSION, UINT32_MAX), MOXIE_OK);
}
END_TEST

START_TEST(bad_requests)
{
    struct {
        moxie_request request;
        uint64_t newer;
    } wide = {.request = {.struct_size = sizeof wide, .abi_max = UINT32_MAX}};

    ck_assert_int_eq(moxie_get_api_v1(NULL, &api, &error), MOXIE_E_INVALID);
    ck_assert_ptr_null(api);
    ck_assert_int_eq(moxie_get_api_v1(&wide.request, NULL, &error), MOXIE_E_INVALID);
    ck_assert_int_eq(moxie_get_api_v1(&wide.request, &api, NULL), MOXIE_OK);
    wide.newer = (uint64_t)1 << 40;
    ck_assert_int_eq(moxie_get_api_v1(&wide.request, &api, &error), MOXIE_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(text, "moxie_request is not zero at offset 29,"));
    wide.request.struct_size = 8;
    ck_assert_int_eq(moxie_get_api_v1(&wide.request, &api, &error), MOXIE_E_INVALID);
    ck_assert_ptr_null(api);
}
END_TEST

// Every pointer of every table is set, found through the library's own layout report.
static void assert_complete(const char *structure, const void *table)
{
    const moxie_field *rows;
    uint64_t count, seen = 0;
    uint32_t stride;
    const void *pointer;

    api->layout(&rows, &count, &stride);
    ck_assert_uint_eq(stride, sizeof *rows);
    for (uint64_t i = 0; i < count; i++) {
        if (strcmp(rows[i].structure, structure) != 0 || rows[i].offset < 8) continue;
        memcpy(&pointer, (const char *)table + rows[i].offset, sizeof pointer);
        ck_assert_msg(pointer != NULL, "%s.%s", structure, rows[i].field);
        seen++;
    }
    ck_assert_uint_gt(seen, 0);
}

START_TEST(tables_are_complete)
{
    ck_assert_uint_eq(api->struct_size, sizeof *api);
    assert_complete("moxie_api", api);
    assert_complete("moxie_routing_api", api->get_extension("moxie.routing/1"));
    assert_complete("moxie_expand_api", api->get_extension("moxie.expand/1"));
    for (uint32_t i = 0; i < runner_infos_count; i++) {
        assert_complete("moxie_runner_info", &runner_infos[i]);
        assert_complete("moxie_runner_api", runner_infos[i].api);
    }
    for (uint32_t i = 0; i < dispatcher_infos_count; i++) {
        assert_complete("moxie_dispatcher_info", &dispatcher_infos[i]);
        assert_complete("moxie_dispatcher_api", dispatcher_infos[i].api);
    }
    api->layout(NULL, NULL, NULL);
    ck_assert_ptr_null(api->get_extension("moxie.routing/2"));
    ck_assert_ptr_null(api->get_extension(""));
    ck_assert_ptr_null(api->get_extension(NULL));
}
END_TEST

// The door's tables and plugin/backends.h's table say the same.
START_TEST(every_backend_is_registered)
{
    uint32_t next_runner = 0, next_dispatcher = 0;

    for (uint32_t i = 0; i < backends_count; i++) {
        const struct backend *backend = &backends[i];

        if (backend->kind == BACKEND_RUNNER) {
            const moxie_runner_info *info = &runner_infos[next_runner++];

            ck_assert_uint_le(next_runner, runner_infos_count);
            ck_assert_str_eq(info->name, backend->name);
            ck_assert_str_eq(info->device, backend->device);
            ck_assert_ptr_eq(info->traits, backend->traits);
        } else {
            const moxie_dispatcher_info *info = &dispatcher_infos[next_dispatcher++];

            ck_assert_uint_le(next_dispatcher, dispatcher_infos_count);
            ck_assert_str_eq(info->name, backend->name);
            ck_assert_str_eq(info->device, backend->device);
            ck_assert_ptr_eq(info->traits, backend->traits);
            ck_assert_int_eq(info->api->create(instance, &dispatcher, &error), MOXIE_OK);
            ck_assert_int_eq(fake.kind, backend->id);
        }
    }
    ck_assert_uint_eq(next_runner, runner_infos_count);
    ck_assert_uint_eq(next_dispatcher, dispatcher_infos_count);
}
END_TEST

// ---- Slots of the instance ----

START_TEST(outputs)
{
    struct {
        moxie_stats stats;
        uint64_t newer;
    } wide = {.stats = {.struct_size = sizeof wide, .reserved0 = 7}};
    moxie_captured captured = {.struct_size = sizeof captured, .dp_rank = 2};
    moxie_config_entry entry = {.struct_size = sizeof entry};
    const moxie_plan *plan;

    ck_assert_int_eq(api->stats(instance, &wide.stats, &error), MOXIE_OK);
    ck_assert_uint_eq(wide.stats.struct_size, sizeof wide);
    ck_assert_uint_eq(wide.stats.forwards, 7);
    ck_assert_uint_eq(wide.stats.bytes_allocated, 1024);
    ck_assert_uint_eq(wide.newer, 0);
    ck_assert_int_eq(api->captured(instance, &captured, &error), MOXIE_OK);
    ck_assert_int_eq(fake.captured.dp_rank, 2);
    ck_assert_int_eq(captured.ids.ndim, 3);
    ck_assert_int_eq(api->config(instance, 1, &entry), MOXIE_OK);
    ck_assert_str_eq(entry.value, "moxie_cpu");
    ck_assert_int_eq(api->config(instance, 2, &entry), MOXIE_E_INVALID);
    fake.answer = MOXIE_E_CONFIG; // the one failure that still hands something out
    ck_assert_int_eq(api->plan(instance, &plan, &error), MOXIE_E_CONFIG);
    ck_assert_int_eq(plan->bounds->forward_tokens, 17);
}
END_TEST

START_TEST(suspend_is_unsupported)
{
    ck_assert_int_eq(api->suspend(instance, &error), MOXIE_E_UNSUPPORTED);
    ck_assert_int_eq(api->resume(instance, &error), MOXIE_E_UNSUPPORTED);
    ck_assert_int_eq(api->resume(NULL, &error), MOXIE_E_INVALID);
    ck_assert_int_eq(api->close(NULL, &error), MOXIE_OK);
}
END_TEST

START_TEST(a_bad_error_is_no_error)
{
    error.struct_size = 3;
    ck_assert_int_eq(runner_infos[0].api->create(NULL, 0, NULL, &live_runner, &error),
                     MOXIE_E_INVALID);
    ck_assert_int_eq(text[sizeof text - 1], 'x');
    ck_assert_int_eq(text[0], '\0'); // of the negotiation in setup
}
END_TEST

// ---- The host's struct ----

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_f64(void *ctx, const char *key, double *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t get_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                       uint64_t *length)
{
    (void)ctx;
    (void)key;
    (void)buffer;
    (void)capacity;
    (void)length;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    (void)ctx;
    (void)request;
    (void)memory;
    return 1;
}

static void give_back(void *ctx, const moxie_allocation *request, void *memory)
{
    (void)ctx;
    (void)request;
    (void)memory;
}

static int32_t all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    (void)ctx;
    (void)send;
    (void)recv;
    (void)bytes;
    return 1;
}

static int32_t barrier(void *ctx)
{
    (void)ctx;
    return 1;
}

static char registered[256];

static int32_t register_runner(void *ctx, const moxie_runner_info *info)
{
    (void)ctx;
    (void)strncat(registered, info->name, 32);
    (void)strncat(registered, " ", 2);
    return 0;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *info)
{
    (void)ctx;
    (void)strncat(registered, info->name, 32);
    (void)strncat(registered, " ", 2);
    return 0;
}

static const moxie_host whole_host = {
    .struct_size = sizeof whole_host,
    .abi_version = MOXIE_ABI_VERSION,
    .name = "engine 7",
    .get_i64 = get_i64,
    .get_f64 = get_f64,
    .get_str = get_str,
    .allocate = allocate,
    .release = give_back,
    .all_gather = all_gather,
    .barrier = barrier,
    .register_runner = register_runner,
    .register_dispatcher = register_dispatcher,
};

START_TEST(open_registers)
{
    moxie_host least = whole_host;

    registered[0] = '\0';
    instance = NULL;
    ck_assert_int_eq(api->open(&whole_host, &instance, &error), MOXIE_OK);
    ck_assert_ptr_eq(instance, fake_instances[0]);
    ck_assert_str_eq(registered,
                     "moxie_cpu moxie_cuda local allgather alltoall local allgather alltoall ");
    ck_assert_str_eq(fake.host.name, "engine 7");
    least.allocate = NULL;
    least.release = NULL;
    least.all_gather = NULL;
    least.barrier = NULL;
    least.name = NULL;
    ck_assert_int_eq(api->open(&least, &instance, &error), MOXIE_OK);
    fake.answer = MOXIE_E_MEMORY;
    ck_assert_int_eq(api->open(&least, &instance, &error), MOXIE_E_MEMORY);
    ck_assert_ptr_null(instance);
    ck_assert_int_eq(api->open(&least, NULL, &error), MOXIE_E_INVALID);
}
END_TEST

START_TEST(open_refuses_half_a_host)
{
    static const struct {
        size_t offset;
        const char *name;
    } required[] = {
        {offsetof(moxie_host, get_i64), "get_i64"},
        {offsetof(moxie_host, get_f64), "get_f64"},
        {offsetof(moxie_host, get_str), "get_str"},
        {offsetof(moxie_host, allocate), "allocate"},
        {offsetof(moxie_host, release), "release"},
        {offsetof(moxie_host, all_gather), "all_gather"},
        {offsetof(moxie_host, barrier), "barrier"},
        {offsetof(moxie_host, register_runner), "register_runner"},
        {offsetof(moxie_host, register_dispatcher), "register_dispatcher"},
    };

    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
        moxie_host host = whole_host;
        char wanted[64];

        memset((char *)&host + required[i].offset, 0, sizeof(void *));
        instance = fake_instances[0];
        ck_assert_int_eq(api->open(&host, &instance, &error), MOXIE_E_INVALID);
        ck_assert_ptr_null(instance);
        (void)snprintf(wanted, sizeof wanted, "%s is NULL", required[i].name);
        ck_assert_msg(strstr(text, wanted) != NULL, "%s", text);
    }
    ck_assert_str_eq(fake.trail, "");
}
END_TEST

START_TEST(open_refuses_another_version)
{
    moxie_host host = whole_host;

    host.abi_version = MOXIE_ABI(0, 7);
    ck_assert_int_eq(api->open(&host, &instance, &error), MOXIE_E_VERSION);
    ck_assert_ptr_nonnull(strstr(text, "0.7"));
    host.abi_version = MOXIE_ABI_VERSION;
    host.struct_size = sizeof host - 1;
    ck_assert_int_eq(api->open(&host, &instance, &error), MOXIE_E_INVALID);
}
END_TEST

// ---- Probe ----

struct wide_probe {
    moxie_probe probe;
    uint64_t newer;
};

START_TEST(probe)
{
    struct wide_probe entries[8];
    uint64_t count = 99;

    memset(entries, 0, sizeof entries);
    for (int i = 0; i < 8; i++)
        entries[i].probe.struct_size = sizeof entries[0];
    ck_assert_int_eq(api->probe(NULL, 0, 0, &count, &error), MOXIE_OK);
    ck_assert_uint_eq(count, backends_count);
    ck_assert_int_eq(api->probe(&entries[0].probe, sizeof entries[0], 2, &count, &error), MOXIE_OK);
    ck_assert_uint_eq(count, backends_count);
    ck_assert_str_eq(entries[1].probe.name, "moxie_cuda");
    ck_assert_ptr_null(entries[2].probe.name);
    ck_assert_int_eq(api->probe(&entries[0].probe, sizeof entries[0], 8, &count, &error), MOXIE_OK);
    ck_assert_str_eq(entries[0].probe.name, "moxie_cpu");
    ck_assert_str_eq(entries[0].probe.kind, "runner");
    ck_assert_str_eq(entries[0].probe.device, "cpu");
    ck_assert_str_ne(entries[0].probe.reason, "");
    ck_assert_int_gt(entries[0].probe.score, 0);
    ck_assert_str_eq(entries[4].probe.name, "alltoall");
    ck_assert_str_eq(entries[3].probe.kind, "dispatcher");
    ck_assert_uint_eq(entries[3].probe.struct_size, sizeof entries[0]);
}
END_TEST

START_TEST(probe_refuses)
{
    struct wide_probe entries[4];
    moxie_probe *first = &entries[0].probe;
    uint64_t count = 99;

    memset(entries, 0, sizeof entries);
    for (int i = 0; i < 4; i++)
        entries[i].probe.struct_size = sizeof entries[0];
    ck_assert_int_eq(api->probe(first, sizeof entries[0], 4, NULL, &error), MOXIE_E_INVALID);
    ck_assert_int_eq(api->probe(NULL, sizeof entries[0], 4, &count, &error), MOXIE_E_INVALID);
    ck_assert_uint_eq(count, 0);
    ck_assert_int_eq(api->probe(first, sizeof *first - 8, 4, &count, &error), MOXIE_E_INVALID);
    ck_assert_ptr_nonnull(strstr(text, "stride is 184; set it to sizeof(moxie_probe)"));
    entries[2].probe.struct_size++;
    ck_assert_int_eq(api->probe(first, sizeof entries[0], 4, &count, &error), MOXIE_E_INVALID);
    entries[2].probe.struct_size--;
    entries[2].newer = 1;
    ck_assert_int_eq(api->probe(first, sizeof entries[0], 4, &count, &error), MOXIE_E_UNSUPPORTED);
    ck_assert_ptr_nonnull(strstr(text, "probe.entries[2]"));
    ck_assert_ptr_null(first->name); // bad input has written nothing
    ck_assert_int_eq(api->probe(first, sizeof entries[0], 2, &count, &error), MOXIE_OK);
}
END_TEST

static void add(TCase *tests)
{
    tcase_add_checked_fixture(tests, setup, NULL);
    tcase_add_test(tests, versions_agree);
    tcase_add_test(tests, versions_differ);
    tcase_add_test(tests, bad_requests);
    tcase_add_test(tests, tables_are_complete);
    tcase_add_test(tests, every_backend_is_registered);
    tcase_add_test(tests, outputs);
    tcase_add_test(tests, suspend_is_unsupported);
    tcase_add_test(tests, a_bad_error_is_no_error);
    tcase_add_test(tests, open_registers);
    tcase_add_test(tests, open_refuses_half_a_host);
    tcase_add_test(tests, open_refuses_another_version);
    tcase_add_test(tests, probe);
    tcase_add_test(tests, probe_refuses);
}

SUITE_MAIN("entry", 30, add)
