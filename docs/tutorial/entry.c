// The exported symbol and the table behind it.

#include "docs/tutorial/skeleton.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int32_t api_open(const moxie_host *given, moxie_instance **out, moxie_error *error)
{
    struct instance *instance = NULL;
    moxie_host host;
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail(error, MOXIE_E_INVALID, "out is NULL");
    *out = NULL;
    TAKE(host, given, "host");
    if (host.abi_version != MOXIE_ABI_VERSION)
        TRY(fail(error, MOXIE_E_VERSION, "host.abi_version is not what was agreed"));
    if (host.get_i64 == NULL || host.get_f64 == NULL || host.get_str == NULL ||
        host.register_runner == NULL || host.register_dispatcher == NULL ||
        (host.allocate == NULL) != (host.release == NULL))
        TRY(fail(error, MOXIE_E_INVALID, "host: a required callback is NULL"));
    instance = calloc(1, sizeof *instance);
    if (instance == NULL) TRY(fail(error, MOXIE_E_MEMORY, "no memory for the instance"));
    instance->host = host;
    instance->stats.struct_size = sizeof instance->stats;
    judge(instance);
    if (host.register_runner(host.ctx, &tutorial_runner) != 0 ||
        host.register_dispatcher(host.ctx, &tutorial_dispatcher) != 0)
        TRY(fail(error, MOXIE_E_UNAVAILABLE, "the host refused a registration"));
    enlist(&instance->object, instance, INSTANCE);
    *out = (moxie_instance *)instance;
    return MOXIE_OK;
out:
    free(instance);
    return st;
}

static int32_t api_config(const moxie_instance *handle, uint64_t index,
                          moxie_config_entry *out_entry)
{
    moxie_error *error = NULL;
    moxie_config_entry entry;
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, INSTANCE, 0, &object, error));
    TAKE(entry, out_entry, "entry");
    if (index >= KEYS) return MOXIE_E_INVALID;
    entry.found = object->instance->found[index];
    entry.key = key_name((enum key)index);
    entry.type = key_type((enum key)index);
    entry.value = object->instance->printed[index];
    entry.help = "see docs/configuration.md";
    FILL(out_entry, entry);
out:
    return st;
}

static int32_t api_validate(const moxie_instance *handle, const moxie_report **report,
                            moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    if (report == NULL) return fail(error, MOXIE_E_INVALID, "report is NULL");
    *report = NULL;
    TRY(enter(handle, INSTANCE, 0, &object, error));
    *report = &object->instance->report;
out:
    return st;
}

static int32_t api_plan(const moxie_instance *handle, const moxie_plan **plan, moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    if (plan == NULL) return fail(error, MOXIE_E_INVALID, "plan is NULL");
    *plan = NULL;
    TRY(enter(handle, INSTANCE, 0, &object, error));
    *plan = &object->instance->plan;
    if (object->instance->report.reasons_count > 0)
        TRY(fail(error, MOXIE_E_CONFIG, "the configuration is refused; validate says why"));
out:
    return st;
}

static int32_t api_captured(const moxie_instance *handle, moxie_captured *given, moxie_error *error)
{
    moxie_captured captured;
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    TAKE(captured, given, "captured");
    TRY(fail(error, MOXIE_E_UNAVAILABLE,
             "this plugin accepts neither capture_routed_experts nor count_expert_load"));
out:
    return st;
}

static int32_t api_stats(const moxie_instance *handle, moxie_stats *given, moxie_error *error)
{
    struct object *object;
    moxie_stats stats;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INSTANCE_SERIAL, &object, error));
    TAKE(stats, given, "stats");
    FILL(given, object->instance->stats);
out:
    return st;
}

// And resume: a slot that a backend lacks answers, it is never NULL.
static int32_t api_suspend(moxie_instance *handle, moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INIT, &object, error));
    TRY(fail(error, MOXIE_E_UNSUPPORTED, "there is no memory to give back"));
out:
    return st;
}

static int32_t api_close(moxie_instance *handle, moxie_error *error)
{
    struct object *object;
    int32_t st = MOXIE_OK;

    if (handle == NULL) return MOXIE_OK;
    TRY(enter(handle, INSTANCE, MOXIE_THREAD_INIT, &object, error));
    if (object->instance->users > 0)
        TRY(fail(error, MOXIE_E_INVALID, "destroy its runners and dispatchers first"));
    (void)find(handle, INSTANCE, 1);
    free(object);
out:
    return st;
}

static int32_t api_probe(moxie_probe *entries, uint32_t stride, uint64_t capacity, uint64_t *count,
                         moxie_error *error)
{
    static const char *const kinds[] = {"runner", "dispatcher"};
    char *at = (char *)entries;
    int32_t st = MOXIE_OK;

    if (count == NULL) return fail(error, MOXIE_E_INVALID, "count is NULL");
    *count = 0;
    if (capacity > 0 && (entries == NULL || stride < sizeof *entries))
        TRY(fail(error, MOXIE_E_INVALID, "entries is NULL, or the stride %u too small", stride));
    for (uint64_t i = 0; i < COUNT(kinds) && i < capacity; i++, at += stride) {
        moxie_probe entry;

        TAKE(entry, at, "probe");
        if (entry.struct_size > stride) TRY(fail(error, MOXIE_E_INVALID, "stride %u", stride));
        entry.score = 1;
        entry.name = i == 0 ? tutorial_runner.name : tutorial_dispatcher.name;
        entry.kind = kinds[i];
        entry.device = "cpu";
        (void)snprintf(entry.reason, sizeof entry.reason, "plain C, runs everywhere");
        FILL(at, entry);
    }
    *count = COUNT(kinds);
out:
    return st;
}

static const void *api_extension(const char *name)
{
    (void)name;
    return NULL;
}

// ---- Layout: at least the table that a host calls through --------------------------------------

#define FIELD(name)                                                                                \
    {                                                                                              \
        sizeof(moxie_field), offsetof(moxie_api, name), sizeof(((moxie_api *)0)->name), 0,         \
            "moxie_api", #name                                                                     \
    }

static const moxie_field fields[] = {
    {sizeof(moxie_field), 0, sizeof(moxie_api), 0, "moxie_api", ""},
    FIELD(struct_size),
    FIELD(abi_version),
    FIELD(build),
    FIELD(layout),
    FIELD(get_extension),
    FIELD(probe),
    FIELD(open),
    FIELD(config),
    FIELD(validate),
    FIELD(plan),
    FIELD(forward),
    FIELD(captured),
    FIELD(stats),
    FIELD(suspend),
    FIELD(resume),
    FIELD(close),
};

static void api_layout(const moxie_field **rows, uint64_t *count, uint32_t *stride)
{
    *rows = fields;
    *count = COUNT(fields);
    *stride = sizeof fields[0];
}

// ---- Entry -------------------------------------------------------------------------------------

static const moxie_build build = {.struct_size = sizeof(moxie_build),
                                  .abi_min = MOXIE_ABI_VERSION,
                                  .abi_max = MOXIE_ABI_VERSION,
                                  .version = "0.1.0",
                                  .source_id = "tutorial",
                                  .compiler = "unknown",
                                  .cuda = "none",
                                  .layout_digest = 0xb6048c431f5db7e2u}; // FNV-1a of the rows above

static const moxie_api api_table = {.struct_size = sizeof(moxie_api),
                                    .abi_version = MOXIE_ABI_VERSION,
                                    .build = &build,
                                    .layout = api_layout,
                                    .get_extension = api_extension,
                                    .probe = api_probe,
                                    .open = api_open,
                                    .config = api_config,
                                    .validate = api_validate,
                                    .plan = api_plan,
                                    .forward = tutorial_forward,
                                    .captured = api_captured,
                                    .stats = api_stats,
                                    .suspend = api_suspend,
                                    .resume = api_suspend,
                                    .close = api_close};

int32_t moxie_get_api_v1(const moxie_request *given, const moxie_api **api, moxie_error *error)
{
    moxie_request request;
    int32_t st = MOXIE_OK;

    if (api == NULL) return fail(error, MOXIE_E_INVALID, "api is NULL");
    *api = NULL;
    TAKE(request, given, "request");
    if (request.abi_min > request.abi_max || request.reserved0 != 0)
        TRY(fail(error, MOXIE_E_INVALID, "request: abi_min is above abi_max, or reserved0 not 0"));
    if (request.abi_max < build.abi_min || request.abi_min > build.abi_max)
        TRY(fail(error, MOXIE_E_VERSION,
                 "no common ABI: host %.99s speaks %x to %x, tutorial %s speaks %x",
                 request.host_build != NULL ? request.host_build : "unnamed", request.abi_min,
                 request.abi_max, build.version, build.abi_min));
    *api = &api_table;
out:
    return st;
}
