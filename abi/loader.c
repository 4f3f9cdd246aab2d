// Loading a libmoxie: see loader.h. Written in the common part of C99 and C++11.

#include "loader.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// abi.h as the compiler of this file sees it. Fields that an older library lacks are no mistake; a
// field that lies elsewhere is. Structs may grow at their end, except those that are frozen whole.
struct loader_row {
    const char *structure;
    const char *field; // "": the whole struct
    uint32_t offset;
    uint32_t size;
};

// clang-format off
// NOLINTBEGIN(bugprone-sizeof-expression): of a pointer, the pointer's size is meant
#define FIELD(structure, field)                                                                    \
    {#structure, #field, (uint32_t)offsetof(structure, field),                                     \
     (uint32_t)sizeof(((structure *)0)->field)}
#define WHOLE(structure) {#structure, "", 0, (uint32_t)sizeof(structure)}

static const struct loader_row rows[] = {
    // ---- generated from abi.h by `python3 abi/ledger`; do not edit ----
    FIELD(moxie_error, struct_size), FIELD(moxie_error, code), FIELD(moxie_error, rank),
    FIELD(moxie_error, text_bytes), FIELD(moxie_error, text),
    WHOLE(moxie_device), FIELD(moxie_device, type), FIELD(moxie_device, id),
    WHOLE(moxie_dtype), FIELD(moxie_dtype, code), FIELD(moxie_dtype, bits),
    FIELD(moxie_dtype, lanes),
    WHOLE(moxie_tensor), FIELD(moxie_tensor, data), FIELD(moxie_tensor, device),
    FIELD(moxie_tensor, ndim), FIELD(moxie_tensor, dtype), FIELD(moxie_tensor, shape),
    FIELD(moxie_tensor, strides), FIELD(moxie_tensor, byte_offset),
    FIELD(moxie_allocation, struct_size), FIELD(moxie_allocation, kind),
    FIELD(moxie_allocation, bytes), FIELD(moxie_allocation, align), FIELD(moxie_allocation, name),
    FIELD(moxie_host, struct_size), FIELD(moxie_host, abi_version), FIELD(moxie_host, ctx),
    FIELD(moxie_host, name), FIELD(moxie_host, get_i64), FIELD(moxie_host, get_f64),
    FIELD(moxie_host, get_str), FIELD(moxie_host, allocate), FIELD(moxie_host, release),
    FIELD(moxie_host, log), FIELD(moxie_host, all_gather), FIELD(moxie_host, barrier),
    FIELD(moxie_host, register_runner), FIELD(moxie_host, register_dispatcher),
    FIELD(moxie_host, communicator), FIELD(moxie_host, parallel_for),
    FIELD(moxie_host, thread_check), FIELD(moxie_host, get_extension),
    FIELD(moxie_traits, struct_size), FIELD(moxie_traits, layouts), FIELD(moxie_traits, id_spaces),
    FIELD(moxie_traits, no_expert_id), FIELD(moxie_traits, weights_applied_by),
    FIELD(moxie_traits, scaling_applied_by), FIELD(moxie_traits, output_is_reduced),
    FIELD(moxie_traits, reduction_group), FIELD(moxie_traits, formats), FIELD(moxie_traits, graph),
    FIELD(moxie_traits, row_align_bytes), FIELD(moxie_traits, reserved0),
    FIELD(moxie_probe, struct_size), FIELD(moxie_probe, score), FIELD(moxie_probe, name),
    FIELD(moxie_probe, kind), FIELD(moxie_probe, device), FIELD(moxie_probe, reason),
    FIELD(moxie_config_entry, struct_size), FIELD(moxie_config_entry, found),
    FIELD(moxie_config_entry, key), FIELD(moxie_config_entry, type),
    FIELD(moxie_config_entry, value), FIELD(moxie_config_entry, help),
    FIELD(moxie_reason, struct_size), FIELD(moxie_reason, code), FIELD(moxie_reason, name),
    FIELD(moxie_reason, key), FIELD(moxie_reason, message),
    FIELD(moxie_report, struct_size), FIELD(moxie_report, reason_stride),
    FIELD(moxie_report, reasons_count), FIELD(moxie_report, reasons),
    FIELD(moxie_report, warnings_count), FIELD(moxie_report, warnings),
    FIELD(moxie_bounds, struct_size), FIELD(moxie_bounds, reserved0),
    FIELD(moxie_bounds, forward_tokens), FIELD(moxie_bounds, dominant),
    FIELD(moxie_bounds, prefill), FIELD(moxie_bounds, decode),
    FIELD(moxie_bounds, dispatch_required), FIELD(moxie_bounds, dispatch_tokens),
    FIELD(moxie_bounds, allgather_rows), FIELD(moxie_bounds, alltoall_rows),
    FIELD(moxie_bounds, capture_rows), FIELD(moxie_bounds, dispatch_call_tokens_max),
    FIELD(moxie_bounds, forward_call_tokens_max), FIELD(moxie_bounds, physical_experts),
    FIELD(moxie_bounds, expert_first), FIELD(moxie_bounds, experts_local),
    FIELD(moxie_buffer, struct_size), FIELD(moxie_buffer, kind), FIELD(moxie_buffer, name),
    FIELD(moxie_buffer, bytes), FIELD(moxie_buffer, bytes_mapped), FIELD(moxie_buffer, align),
    FIELD(moxie_buffer, why),
    FIELD(moxie_plan, struct_size), FIELD(moxie_plan, buffer_stride), FIELD(moxie_plan, bounds),
    FIELD(moxie_plan, buffers_count), FIELD(moxie_plan, buffers), FIELD(moxie_plan, device_bytes),
    FIELD(moxie_plan, symmetric_bytes), FIELD(moxie_plan, pinned_bytes),
    FIELD(moxie_plan, host_bytes),
    FIELD(moxie_matrix, struct_size), FIELD(moxie_matrix, format), FIELD(moxie_matrix, order),
    FIELD(moxie_matrix, orientation), FIELD(moxie_matrix, values), FIELD(moxie_matrix, scales),
    FIELD(moxie_matrix, global_scales), FIELD(moxie_matrix, bias),
    FIELD(moxie_matrix, block_offset), FIELD(moxie_matrix, reserved0),
    FIELD(moxie_weights, struct_size), FIELD(moxie_weights, reserved0), FIELD(moxie_weights, w1),
    FIELD(moxie_weights, w2),
    FIELD(moxie_step, struct_size), FIELD(moxie_step, slot), FIELD(moxie_step, tokens),
    FIELD(moxie_step, rank_tokens), FIELD(moxie_step, padding), FIELD(moxie_step, phase),
    FIELD(moxie_step, tokens_valid), FIELD(moxie_step, capture_row),
    FIELD(moxie_batch, struct_size), FIELD(moxie_batch, slot), FIELD(moxie_batch, layer),
    FIELD(moxie_batch, id_space), FIELD(moxie_batch, x), FIELD(moxie_batch, ids),
    FIELD(moxie_batch, weights), FIELD(moxie_batch, y), FIELD(moxie_batch, expert_map),
    FIELD(moxie_batch, stream),
    FIELD(moxie_slab, struct_size), FIELD(moxie_slab, reserved0), FIELD(moxie_slab, rows),
    FIELD(moxie_slab, scales), FIELD(moxie_slab, ids), FIELD(moxie_slab, weights),
    FIELD(moxie_rows, struct_size), FIELD(moxie_rows, layout), FIELD(moxie_rows, id_space),
    FIELD(moxie_rows, slabs_count), FIELD(moxie_rows, slab_stride), FIELD(moxie_rows, reserved0),
    FIELD(moxie_rows, slabs), FIELD(moxie_rows, counts), FIELD(moxie_rows, expert_map),
    FIELD(moxie_call, struct_size), FIELD(moxie_call, slot), FIELD(moxie_call, layer),
    FIELD(moxie_call, reserved0), FIELD(moxie_call, stream),
    FIELD(moxie_runner_api, struct_size), FIELD(moxie_runner_api, reserved0),
    FIELD(moxie_runner_api, create), FIELD(moxie_runner_api, run),
    FIELD(moxie_runner_api, weights_updated), FIELD(moxie_runner_api, destroy),
    FIELD(moxie_runner_info, struct_size), FIELD(moxie_runner_info, reserved0),
    FIELD(moxie_runner_info, name), FIELD(moxie_runner_info, device),
    FIELD(moxie_runner_info, traits), FIELD(moxie_runner_info, api),
    FIELD(moxie_dispatcher_api, struct_size), FIELD(moxie_dispatcher_api, reserved0),
    FIELD(moxie_dispatcher_api, create), FIELD(moxie_dispatcher_api, begin_forward),
    FIELD(moxie_dispatcher_api, dispatch), FIELD(moxie_dispatcher_api, combine),
    FIELD(moxie_dispatcher_api, dispatch_send), FIELD(moxie_dispatcher_api, dispatch_recv),
    FIELD(moxie_dispatcher_api, combine_send), FIELD(moxie_dispatcher_api, combine_recv),
    FIELD(moxie_dispatcher_api, poll_error), FIELD(moxie_dispatcher_api, set_active_ranks),
    FIELD(moxie_dispatcher_api, destroy),
    FIELD(moxie_dispatcher_info, struct_size), FIELD(moxie_dispatcher_info, reserved0),
    FIELD(moxie_dispatcher_info, name), FIELD(moxie_dispatcher_info, device),
    FIELD(moxie_dispatcher_info, traits), FIELD(moxie_dispatcher_info, api),
    FIELD(moxie_build, struct_size), FIELD(moxie_build, abi_min), FIELD(moxie_build, abi_max),
    FIELD(moxie_build, reserved0), FIELD(moxie_build, version), FIELD(moxie_build, source_id),
    FIELD(moxie_build, compiler), FIELD(moxie_build, cuda), FIELD(moxie_build, layout_digest),
    FIELD(moxie_field, struct_size), FIELD(moxie_field, offset), FIELD(moxie_field, size),
    FIELD(moxie_field, reserved0), FIELD(moxie_field, structure), FIELD(moxie_field, field),
    FIELD(moxie_stats, struct_size), FIELD(moxie_stats, reserved0), FIELD(moxie_stats, forwards),
    FIELD(moxie_stats, rounds), FIELD(moxie_stats, dispatches), FIELD(moxie_stats, combines),
    FIELD(moxie_stats, tokens), FIELD(moxie_stats, rows_sent), FIELD(moxie_stats, rows_received),
    FIELD(moxie_stats, refused), FIELD(moxie_stats, peer_failures),
    FIELD(moxie_stats, bytes_allocated),
    FIELD(moxie_captured, struct_size), FIELD(moxie_captured, dp_rank), FIELD(moxie_captured, ids),
    FIELD(moxie_captured, load),
    FIELD(moxie_api, struct_size), FIELD(moxie_api, abi_version), FIELD(moxie_api, build),
    FIELD(moxie_api, layout), FIELD(moxie_api, get_extension), FIELD(moxie_api, probe),
    FIELD(moxie_api, open), FIELD(moxie_api, config), FIELD(moxie_api, validate),
    FIELD(moxie_api, plan), FIELD(moxie_api, forward), FIELD(moxie_api, captured),
    FIELD(moxie_api, stats), FIELD(moxie_api, suspend), FIELD(moxie_api, resume),
    FIELD(moxie_api, close),
    FIELD(moxie_request, struct_size), FIELD(moxie_request, abi_min),
    FIELD(moxie_request, abi_max), FIELD(moxie_request, reserved0),
    FIELD(moxie_request, host_build),
    FIELD(moxie_routing, struct_size), FIELD(moxie_routing, scoring),
    FIELD(moxie_routing, renormalize), FIELD(moxie_routing, groups),
    FIELD(moxie_routing, groups_top), FIELD(moxie_routing, reserved0),
    FIELD(moxie_routing, renormalize_epsilon), FIELD(moxie_routing, scaling_factor),
    FIELD(moxie_routing, correction_bias),
    FIELD(moxie_routing_api, struct_size), FIELD(moxie_routing_api, reserved0),
    FIELD(moxie_routing_api, route),
    FIELD(moxie_expand_api, struct_size), FIELD(moxie_expand_api, reserved0),
    FIELD(moxie_expand_api, expand), FIELD(moxie_expand_api, fold),
    // ---- end of what is generated ----
};
// NOLINTEND(bugprone-sizeof-expression)
// clang-format on

// The size of a struct in the first published version, by its last field, a pointer.
#define LEAST(structure, last) (offsetof(structure, last) + sizeof(void *))

#define ROWS_COUNT (sizeof rows / sizeof rows[0])

#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
static int32_t
load_fail(moxie_error *error, int32_t code, const char *format, ...)
{
    va_list args;

    if (error == NULL || error->struct_size < LEAST(moxie_error, text)) return code;
    error->code = code;
    error->rank = -1;
    if (error->text != NULL && error->text_bytes > 0) {
        va_start(args, format);
        (void)vsnprintf(error->text, error->text_bytes, format, args);
        va_end(args);
    }
    return code;
}

// The first pointer of `table` that is NULL, among those within its struct_size; NULL when all are
// there. Every table starts with two uint32_t and holds pointers only after them.
static const char *find_null(const char *structure, const void *table)
{
    static const unsigned char null_bytes[sizeof(void *)] = {0};
    const unsigned char *bytes = (const unsigned char *)table;
    uint32_t struct_size;
    size_t i;

    memcpy(&struct_size, bytes, sizeof struct_size);
    for (i = 0; i < ROWS_COUNT; i++) {
        if (strcmp(rows[i].structure, structure) != 0 || rows[i].offset < 2 * sizeof struct_size)
            continue;
        if (rows[i].offset + rows[i].size > struct_size) continue;
        if (memcmp(bytes + rows[i].offset, null_bytes, sizeof null_bytes) == 0)
            return rows[i].field;
    }
    return NULL;
}

// `least` is the table's size in the first published version.
static int32_t check_table(const char *what, const char *structure, const void *table, size_t least,
                           moxie_error *error)
{
    uint32_t struct_size;
    const char *field;

    if (table == NULL) {
        (void)load_fail(error, MOXIE_E_INTERNAL, "%s: no %s; the library is broken", what,
                        structure);
        return MOXIE_E_INTERNAL;
    }
    memcpy(&struct_size, table, sizeof struct_size);
    if (struct_size < least)
        return load_fail(error, MOXIE_E_INTERNAL,
                         "%s: %s has %u bytes, at least %u are needed; the library is broken", what,
                         structure, struct_size, (uint32_t)least);
    field = find_null(structure, table);
    if (field != NULL)
        return load_fail(error, MOXIE_E_INTERNAL, "%s: %s.%s is NULL; the library is broken", what,
                         structure, field);
    return MOXIE_OK;
}

int32_t moxie_verify_runner(const moxie_runner_info *runner, moxie_error *error)
{
    int32_t st = check_table("register_runner", "moxie_runner_info", runner,
                             LEAST(moxie_runner_info, api), error);

    if (st != MOXIE_OK) return st;
    return check_table(runner->name, "moxie_runner_api", runner->api,
                       LEAST(moxie_runner_api, destroy), error);
}

int32_t moxie_verify_dispatcher(const moxie_dispatcher_info *dispatcher, moxie_error *error)
{
    int32_t st = check_table("register_dispatcher", "moxie_dispatcher_info", dispatcher,
                             LEAST(moxie_dispatcher_info, api), error);

    if (st != MOXIE_OK) return st;
    return check_table(dispatcher->name, "moxie_dispatcher_api", dispatcher->api,
                       LEAST(moxie_dispatcher_api, destroy), error);
}

// What the library reports, walked by its own stride.
struct reported {
    const unsigned char *fields;
    uint64_t count;
    uint32_t stride;
};

static const moxie_field *find_field(const struct reported *reported, const char *structure,
                                     const char *field)
{
    uint64_t i;

    for (i = 0; i < reported->count; i++) {
        const void *at = reported->fields + i * reported->stride;
        const moxie_field *row = (const moxie_field *)at;

        if (strcmp(row->structure, structure) == 0 && strcmp(row->field, field) == 0) return row;
    }
    return NULL;
}

// Non-zero when the library's field lies where this file expects it, or is newer than the library.
static int row_agrees(const struct loader_row *row, const struct reported *reported,
                      const moxie_field **seen)
{
    const moxie_field *whole = find_field(reported, row->structure, "");

    *seen = find_field(reported, row->structure, row->field);
    if (*seen != NULL) return (*seen)->offset == row->offset && (*seen)->size == row->size;
    return whole == NULL || row->offset >= whole->size;
}

static int32_t check_layout(const char *path, const moxie_api *api, moxie_error *error)
{
    const moxie_field *fields = NULL, *seen = NULL, *seen_first = NULL;
    const struct loader_row *first = NULL;
    struct reported reported = {NULL, 0, 0};
    uint32_t seen_size = 0, seen_offset = 0;
    unsigned differ = 0;
    size_t i;

    api->layout(&fields, &reported.count, &reported.stride);
    reported.fields = (const unsigned char *)fields;
    if (fields == NULL || reported.stride < LEAST(moxie_field, field) ||
        find_field(&reported, "moxie_api", "") == NULL)
        return load_fail(error, MOXIE_E_INTERNAL,
                         "%s: the library reports no layout; the library is broken", path);
    for (i = 0; i < ROWS_COUNT; i++) {
        if (row_agrees(&rows[i], &reported, &seen)) continue;
        if (differ++ == 0) {
            first = &rows[i];
            seen_first = seen;
        }
    }
    if (first == NULL) return MOXIE_OK;
    if (seen_first != NULL) {
        seen_size = seen_first->size;
        seen_offset = seen_first->offset;
    }
    return load_fail(error, MOXIE_E_VERSION,
                     "%s: %s.%s is %u bytes at offset %u in this host's abi.h, and %u at %u in the "
                     "library (%s, %s), as %u more fields differ; build the host with the abi.h of "
                     "that library",
                     path, first->structure, first->field, first->size, first->offset, seen_size,
                     seen_offset, api->build->version, api->build->source_id, differ - 1);
}

static int32_t negotiate(const char *path, const char *host_build, void *handle,
                         const moxie_api **api, moxie_error *error)
{
    char text[512] = "";
    moxie_error inner;
    moxie_request request;
    moxie_get_api_v1_fn get_api;
    void *symbol = dlsym(handle, "moxie_get_api_v1");
    int32_t st;

    if (symbol == NULL)
        return load_fail(error, MOXIE_E_UNSUPPORTED,
                         "%s has no symbol moxie_get_api_v1: it is no Moxie plugin; check the path",
                         path);
    memcpy(&get_api, &symbol, sizeof get_api); // ISO C has no cast from an object to a function
    memset(&inner, 0, sizeof inner);           // fields that are appended later are 0 too
    inner.struct_size = sizeof inner;
    inner.text_bytes = sizeof text;
    inner.text = text;
    memset(&request, 0, sizeof request);
    request.struct_size = sizeof request;
    request.abi_min = request.abi_max = MOXIE_ABI_VERSION;
    request.host_build = host_build;
    st = get_api(&request, api, &inner);
    if (st != MOXIE_OK) return load_fail(error, st, "%s: %s", path, text);
    st = check_table(path, "moxie_api", *api, LEAST(moxie_api, close), error);
    if (st != MOXIE_OK) return st;
    if ((*api)->abi_version != MOXIE_ABI_VERSION)
        return load_fail(error, MOXIE_E_VERSION,
                         "%s answered with ABI %u.%u, asked was %u.%u; the library is broken", path,
                         (*api)->abi_version >> 16, (*api)->abi_version & 0xffff,
                         MOXIE_VERSION_MAJOR, MOXIE_VERSION_MINOR);
    return check_layout(path, *api, error);
}

int32_t moxie_load(const char *path, const char *host_build, moxie_library *library,
                   moxie_error *error)
{
    const moxie_api *api = NULL;
    void *handle;
    int32_t st;

    (void)load_fail(error, MOXIE_OK, "%s", ""); // what an earlier call said is over
    if (library == NULL) return load_fail(error, MOXIE_E_INVALID, "library is NULL");
    library->handle = NULL;
    library->api = NULL;
    if (path == NULL || path[0] == '\0') /* which dlopen takes for the program itself */
        return load_fail(error, MOXIE_E_INVALID, "path is %s; pass the path of libmoxie.so",
                         path == NULL ? "NULL" : "empty");
    handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        const char *why = dlerror();

        return load_fail(error, MOXIE_E_UNAVAILABLE,
                         "%s cannot be loaded: %s; check the path and the libraries it needs", path,
                         why == NULL ? "no reason given" : why);
    }
    st = negotiate(path, host_build, handle, &api, error);
    if (st != MOXIE_OK) {
        (void)dlclose(handle);
        return st;
    }
    library->handle = handle;
    library->api = api;
    return MOXIE_OK;
}

void moxie_unload(moxie_library *library)
{
    if (library == NULL || library->handle == NULL) return;
    (void)dlclose(library->handle);
    library->handle = NULL;
    library->api = NULL;
}
