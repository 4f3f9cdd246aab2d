// The one exported symbol, the table behind it, and who made this library.

#include "abi/entry.h"

#include "abi/decode.h"
#include "abi/layout.h"
#include "plugin/backends.h"
#include "plugin/dispatcher.h"
#include "plugin/forward.h"
#include "plugin/routing.h"
#include "plugin/runner.h"

#include <string.h>

#ifndef MOXIE_SOURCE_ID
#define MOXIE_SOURCE_ID "unknown"
#endif
#ifndef MOXIE_COMPILER
#define MOXIE_COMPILER "unknown"
#endif
#ifndef MOXIE_CUDA
#define MOXIE_CUDA "none"
#endif

#define TEXT_OF(number) #number
#define TEXT(number)    TEXT_OF(number)
#define VERSION_TEXT                                                                               \
    TEXT(MOXIE_VERSION_MAJOR) "." TEXT(MOXIE_VERSION_MINOR) "." TEXT(MOXIE_VERSION_PATCH)

// ABI 0.N speaks with 0.N alone.
#define ABI_MIN MOXIE_ABI_VERSION
#define ABI_MAX MOXIE_ABI_VERSION

#define ABI_FORMAT        "%u.%u"
#define ABI_WORDS(number) (number) >> 16, (number)&0xffff

// ---- What every slot does first ----

int32_t check_pointer(const void *pointer, const char *what, moxie_error *error)
{
    if (pointer != NULL) return MOXIE_OK;
    return fail_with(error, MOXIE_E_INVALID, "%s is NULL", what);
}

static int32_t fail_dead(const char *what, moxie_error *error)
{
    return fail_with(
        error, MOXIE_E_INVALID,
        "%s is no living handle of this library: it was closed or destroyed before, or "
        "another library made it",
        what);
}

// An instance, or what lives on it.
static int32_t enter_as(const moxie_instance *instance, int32_t tag, moxie_error *error)
{
    const int32_t thread = tag == ENTER_STEP ? MOXIE_THREAD_INSTANCE_SERIAL : tag;
    int32_t st = MOXIE_OK;

    if (tag != ENTER_ANY) TRY(instance_check_thread(instance, thread, error));
    if (tag == ENTER_STEP) TRY(instance_check_current(instance, error));
out:
    return st;
}

int32_t enter_instance(const moxie_instance *handle, int32_t tag, moxie_instance **out,
                       moxie_error *error)
{
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(check_pointer(handle, "instance", error));
    *out = instance_of(handle);
    if (*out == NULL) TRY(fail_dead("instance", error));
    TRY(enter_as(*out, tag, error));
out:
    return st;
}

int32_t enter_runner(const moxie_runner *runner, int32_t tag, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(check_pointer(runner, "runner", error));
    if (!runner_is_live(runner)) TRY(fail_dead("runner", error));
    TRY(enter_as(runner_instance(runner), tag, error));
out:
    return st;
}

int32_t enter_dispatcher(const moxie_dispatcher *dispatcher, int32_t tag, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(check_pointer(dispatcher, "dispatcher", error));
    if (!dispatcher_is_live(dispatcher)) TRY(fail_dead("dispatcher", error));
    TRY(enter_as(dispatcher_instance(dispatcher), tag, error));
out:
    return st;
}

// ---- Slots without an instance ----

static void slot_layout(const moxie_field **fields, uint64_t *count, uint32_t *stride)
{
    uint64_t rows_count;
    const moxie_field *rows = layout_rows(&rows_count);

    if (fields != NULL) *fields = rows;
    if (count != NULL) *count = rows_count;
    if (stride != NULL) *stride = sizeof(moxie_field);
}

static int32_t slot_route(const moxie_routing *routing, const moxie_tensor *logits,
                          const moxie_tensor *ids, const moxie_tensor *weights, void *stream,
                          moxie_error *error)
{
    moxie_routing decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(decode_routing(&decoded, routing, error));
    TRY(check_pointer(logits, "logits", error));
    TRY(check_pointer(ids, "ids", error));
    TRY(check_pointer(weights, "weights", error));
    TRY(routing_route(&decoded, logits, ids, weights, stream, error));
out:
    return st;
}

const moxie_routing_api routing_api = {
    .struct_size = sizeof(moxie_routing_api),
    .route = slot_route,
};

static const void *slot_get_extension(const char *name)
{
    if (name == NULL) return NULL;
    if (strcmp(name, MOXIE_ROUTING_EXTENSION) == 0) return &routing_api;
    if (strcmp(name, MOXIE_EXPAND_EXTENSION) == 0) return &expand_api;
    return NULL;
}

// Every entry that is going to be written can be.
static int32_t check_entries(const moxie_probe *entries, uint32_t stride, uint64_t filled,
                             moxie_error *error)
{
    const unsigned char *at = (const unsigned char *)entries;
    moxie_probe entry;
    uint32_t declared;

    if (filled == 0) return MOXIE_OK;
    if (entries == NULL) return check_pointer(NULL, "entries", error);
    if (stride < V1_moxie_probe)
        return fail_with(error, MOXIE_E_INVALID, "stride is %u; set it to sizeof(moxie_probe)",
                         stride);
    for (uint64_t i = 0; i < filled; i++, at += stride) {
        int32_t st;

        memcpy(&declared, at, sizeof declared);
        if (declared > stride)
            return fail_with(error, MOXIE_E_INVALID,
                             "probe.entries[%llu]: struct_size is %u, and stride only %u",
                             (unsigned long long)i, declared, stride);
        st = decode_struct(&entry, at, &shape_probe, "probe", (int64_t)i, error);
        if (st != MOXIE_OK) return st;
    }
    return MOXIE_OK;
}

static int32_t slot_probe(moxie_probe *entries, uint32_t stride, uint64_t capacity, uint64_t *count,
                          moxie_error *error)
{
    const uint64_t filled = capacity < backends_count ? capacity : backends_count;
    unsigned char *at = (unsigned char *)entries;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(count, "count", error));
    *count = 0;
    TRY(check_entries(entries, stride, filled, error));
    for (uint64_t i = 0; i < filled; i++, at += stride) {
        const struct backend *backend = &backends[i];
        moxie_probe entry = {
            .name = backend->name,
            .kind = backend->kind == BACKEND_RUNNER ? "runner" : "dispatcher",
            .device = backend->device,
        };

        entry.score = backend_probe(backend, entry.reason);
        encode_struct(at, &entry, &shape_probe);
    }
    *count = backends_count;
out:
    return st;
}

// ---- Slots of the instance ----

static int32_t slot_open(const moxie_host *host, moxie_instance **out, moxie_error *error)
{
    const struct registry registry = {
        .runners = runner_infos,
        .runners_count = runner_infos_count,
        .dispatchers = dispatcher_infos,
        .dispatchers_count = dispatcher_infos_count,
    };
    moxie_host decoded;
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(out, "out", error));
    *out = NULL;
    TRY(decode_host(&decoded, host, error));
    TRY(instance_open(&decoded, &registry, &instance, error));
    *out = instance_handle(instance);
out:
    return st;
}

static int32_t slot_config(const moxie_instance *handle, uint64_t index, moxie_config_entry *entry)
{
    moxie_config_entry decoded;
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    TRY(enter_instance(handle, ENTER_ANY, &instance, NULL));
    TRY(decode_struct(&decoded, entry, &shape_config_entry, "entry", 0, NULL));
    TRY(instance_config(instance, index, &decoded));
    encode_struct(entry, &decoded, &shape_config_entry);
out:
    return st;
}

static int32_t slot_validate(const moxie_instance *handle, const moxie_report **report,
                             moxie_error *error)
{
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(report, "report", error));
    *report = NULL;
    TRY(enter_instance(handle, ENTER_ANY, &instance, error));
    TRY(instance_validate(instance, report));
out:
    return st;
}

static int32_t slot_plan(const moxie_instance *handle, const moxie_plan **plan, moxie_error *error)
{
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(plan, "plan", error));
    *plan = NULL;
    TRY(enter_instance(handle, ENTER_ANY, &instance, error));
    TRY(instance_plan(instance, plan, error));
out:
    return st;
}

static int32_t slot_forward(moxie_dispatcher *dispatcher, moxie_runner *runner,
                            const moxie_batch *batch, moxie_error *error)
{
    moxie_batch decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_dispatcher(dispatcher, ENTER_STEP, error));
    TRY(enter_runner(runner, ENTER_ANY, error));
    if (runner_instance(runner) != dispatcher_instance(dispatcher))
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "runner and dispatcher are of two instances; create both from one"));
    TRY(decode_batch(&decoded, batch, error));
    TRY(forward_run(dispatcher, runner, &decoded, error));
out:
    return st;
}

static int32_t slot_captured(const moxie_instance *handle, moxie_captured *captured,
                             moxie_error *error)
{
    moxie_captured decoded;
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_instance(handle, MOXIE_THREAD_INSTANCE_SERIAL, &instance, error));
    TRY(decode_struct(&decoded, captured, &shape_captured, "captured", 0, error));
    TRY(instance_captured(instance, &decoded, error));
    encode_struct(captured, &decoded, &shape_captured);
out:
    return st;
}

static int32_t slot_stats(const moxie_instance *handle, moxie_stats *stats, moxie_error *error)
{
    moxie_stats decoded;
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_instance(handle, MOXIE_THREAD_INSTANCE_SERIAL, &instance, error));
    TRY(decode_struct(&decoded, stats, &shape_stats, "stats", 0, error));
    instance_stats(instance, &decoded);
    encode_struct(stats, &decoded, &shape_stats);
out:
    return st;
}

// No device of this build can unmap memory and keep its addresses.
static int32_t slot_suspend(moxie_instance *handle, moxie_error *error)
{
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(enter_instance(handle, MOXIE_THREAD_INIT, &instance, error));
    st = fail_with(error, MOXIE_E_UNSUPPORTED,
                   "no device of this build can give memory back and keep its addresses; close "
                   "the instance instead");
out:
    return st;
}

static int32_t slot_close(moxie_instance *handle, moxie_error *error)
{
    moxie_instance *instance;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    if (handle == NULL) return MOXIE_OK;
    TRY(enter_instance(handle, MOXIE_THREAD_INIT, &instance, error));
    TRY(instance_close(instance, error));
out:
    return st;
}

// ---- Entry ----

static const moxie_build build = {
    .struct_size = sizeof(moxie_build),
    .abi_min = ABI_MIN,
    .abi_max = ABI_MAX,
    .version = VERSION_TEXT,
    .source_id = MOXIE_SOURCE_ID,
    .compiler = MOXIE_COMPILER,
    .cuda = MOXIE_CUDA,
    .layout_digest = LAYOUT_DIGEST,
};

static const moxie_api table = {
    .struct_size = sizeof(moxie_api),
    .abi_version = MOXIE_ABI_VERSION,
    .build = &build,
    .layout = slot_layout,
    .get_extension = slot_get_extension,
    .probe = slot_probe,
    .open = slot_open,
    .config = slot_config,
    .validate = slot_validate,
    .plan = slot_plan,
    .forward = slot_forward,
    .captured = slot_captured,
    .stats = slot_stats,
    .suspend = slot_suspend,
    .resume = slot_suspend,
    .close = slot_close,
};

int32_t moxie_get_api_v1(const moxie_request *request, const moxie_api **api, moxie_error *error)
{
    moxie_request decoded;
    int32_t st = MOXIE_OK;

    error = error_enter(error);
    TRY(check_pointer(api, "api", error));
    *api = NULL;
    TRY(decode_struct(&decoded, request, &shape_request, "request", 0, error));
    if (decoded.abi_min > decoded.abi_max)
        TRY(fail_with(error, MOXIE_E_INVALID,
                      "request.abi_min " ABI_FORMAT " is above abi_max " ABI_FORMAT,
                      ABI_WORDS(decoded.abi_min), ABI_WORDS(decoded.abi_max)));
    if (decoded.abi_max < ABI_MIN || decoded.abi_min > ABI_MAX)
        TRY(fail_with(error, MOXIE_E_VERSION,
                      "no common ABI: the host (%.200s) speaks " ABI_FORMAT " to " ABI_FORMAT
                      ", libmoxie (%s, %s, %s) speaks " ABI_FORMAT " to " ABI_FORMAT
                      "; use a libmoxie of the host's version",
                      decoded.host_build == NULL ? "unnamed" : decoded.host_build,
                      ABI_WORDS(decoded.abi_min), ABI_WORDS(decoded.abi_max), build.version,
                      build.source_id, build.compiler, ABI_WORDS(build.abi_min),
                      ABI_WORDS(build.abi_max)));
    *api = &table;
out:
    return st;
}
