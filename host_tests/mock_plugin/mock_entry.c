// The exported symbol, the tables, and the slots that only look.

#include "host_tests/mock_plugin/mock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define VERSION_TEXT "0.1.1"
#define MOCK_RUNNER  "mock_cpu"

// ---- Runner ------------------------------------------------------------------------------------

static int32_t runner_create(moxie_instance *handle, int32_t layer, const moxie_weights *weights,
                             moxie_runner **out, moxie_error *error)
{
    struct runner *runner = NULL;
    struct call call = {.caller = {.error = error_begin(error)}};
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail_with(&call.caller, MOXIE_E_INVALID, "out is NULL");
    if (!HAS_FAULT(FAULT_GARBAGE_OUT)) *out = NULL;
    TRY(call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INIT, error));
    if (!HAS_FAULT(FAULT_CREATES_REFUSED)) TRY(instance_accepted(&call));
    if (layer < 0 || layer >= call.instance->limits.layers)
        TRY(fail_with(&call.caller, MOXIE_E_INVALID, "layer is %d; want 0..%lld", layer,
                      (long long)call.instance->limits.layers - 1));
    runner = calloc(1, sizeof *runner);
    if (runner == NULL) TRY(fail_with(&call.caller, MOXIE_E_MEMORY, "create: no memory"));
    runner->instance = call.instance;
    runner->layer = layer;
    TRY(weights_read(&call, weights, runner));
    runner->digest = weights_digest(runner);
    TRY(memory_take(&call));
    *out = handle_make(HANDLE_RUNNER, runner, handle);
    if (*out == NULL) {
        memory_drop(call.instance);
        TRY(fail_with(&call.caller, MOXIE_E_MEMORY, "create: no memory"));
    }
    runner = NULL;
out:
    free(runner);
    call_leave(&call);
    return st;
}

int32_t rows_read(const struct caller *caller, const char *what, const moxie_rows *given,
                  moxie_rows *rows, moxie_slab slabs[MOXIE_RANKS_MAX])
{
    int32_t st = MOXIE_OK;

    TRY(struct_read(caller, &shape_rows, what, given, rows));
    if (rows->layout < MOXIE_LAYOUT_STANDARD || rows->layout > MOXIE_LAYOUT_EXPERT_MASKED)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s.layout is %d", what, rows->layout));
    if (rows->id_space < MOXIE_IDS_GLOBAL || rows->id_space > MOXIE_IDS_LOCAL)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s.id_space is %d", what, rows->id_space));
    if (rows->slabs == NULL || rows->slabs_count < 1 || rows->slabs_count > MOXIE_RANKS_MAX)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s has %u slabs", what, rows->slabs_count));
    if (rows->slab_stride < shape_slab.first_bytes)
        TRY(fail_with(caller, MOXIE_E_INVALID, "%s.slab_stride is %u", what, rows->slab_stride));
    for (uint32_t i = 0; i < rows->slabs_count; i++) {
        const unsigned char *at =
            (const unsigned char *)rows->slabs + (size_t)i * rows->slab_stride;
        uint32_t declared;

        memcpy(&declared, at, sizeof declared);
        if (declared > rows->slab_stride)
            TRY(fail_with(caller, MOXIE_E_INVALID, "%s.slabs[%u]: struct_size %u, stride %u", what,
                          i, declared, rows->slab_stride));
        TRY(struct_read(caller, &shape_slab, what, at, &slabs[i]));
    }
    rows->slabs = slabs;
out:
    return st;
}

int32_t call_read(const struct call *call, const moxie_call *given)
{
    const struct limits *limits = &call->instance->limits;
    moxie_call copy;
    int32_t st = MOXIE_OK;

    TRY(struct_read(&call->caller, &shape_call, "call", given, &copy));
    if (copy.slot < 0 || copy.slot >= limits->slots)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "call.slot is %d; want 0..%d", copy.slot,
                      limits->slots - 1));
    if (copy.layer < 0 || copy.layer >= limits->layers)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "call.layer is %d; want 0..%lld", copy.layer,
                      (long long)limits->layers - 1));
    if (copy.stream != NULL)
        TRY(fail_with(&call->caller, MOXIE_E_INVALID, "call.stream: want NULL on the CPU"));
out:
    return st;
}

static int32_t run(moxie_runner *handle, const moxie_call *given, const moxie_rows *given_in,
                   const moxie_rows *given_out, moxie_error *error)
{
    moxie_slab in_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    moxie_rows in, out;
    struct call call;
    int32_t st = MOXIE_OK;

    st = call_enter(&call, handle, HANDLE_RUNNER,
                    HAS_FAULT(FAULT_RUN_ON_ANY_THREAD) ? THREAD_ANY : MOXIE_THREAD_INSTANCE_SERIAL,
                    error);
    if (HAS_FAULT(FAULT_DEAD_RUNNER) && call.body == NULL) return MOXIE_OK;
    TRY(st);
    TRY(call_read(&call, given));
    TRY(rows_read(&call.caller, "in", given_in, &in, in_slabs));
    TRY(rows_read(&call.caller, "out", given_out, &out, out_slabs));
    TRY(runner_run(&call, call.body, &in, &out));
out:
    call_leave(&call);
    return st;
}

static int32_t weights_updated(moxie_runner *handle, const int32_t *ids, uint64_t count,
                               moxie_error *error)
{
    struct runner *runner;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_RUNNER, MOXIE_THREAD_INSTANCE_SERIAL, error));
    runner = call.body;
    if (ids == NULL && count != 0)
        TRY(fail_with(&call.caller, MOXIE_E_INVALID, "ids is NULL and count %llu; want 0",
                      (unsigned long long)count));
    if (ids == NULL) count = (uint64_t)call.instance->limits.experts_local;
    for (uint64_t i = 0; i < count; i++) {
        int64_t expert = ids != NULL ? ids[i] : (int64_t)i;

        if (expert < 0 || expert >= call.instance->limits.experts_local)
            TRY(fail_with(&call.caller, MOXIE_E_INVALID, "ids[%llu] is %lld; no local expert",
                          (unsigned long long)i, (long long)expert));
        TRY(weights_check_expert(&call, runner, expert));
    }
    if (!HAS_FAULT(FAULT_DEAF_TO_UPDATES)) runner->digest = weights_digest(runner);
out:
    call_leave(&call);
    return st;
}

static void runner_destroy(moxie_runner *handle)
{
    struct call call;

    if (handle == NULL) return;
    if (call_enter(&call, handle, HANDLE_RUNNER, MOXIE_THREAD_INIT, NULL) == MOXIE_OK) {
        handle_kill(handle);
        memory_drop(call.instance);
        free(call.body);
    }
    call_leave(&call);
}

static const moxie_runner_api runner_api = {
    .struct_size = sizeof(moxie_runner_api),
    .create = runner_create,
    .run = run,
    .weights_updated = weights_updated,
    .destroy = runner_destroy,
};

static const moxie_traits runner_traits = {
    .struct_size = sizeof(moxie_traits),
    .layouts = MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_STANDARD) | MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_RANK_MAJOR) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_CONTIGUOUS) |
               MOXIE_LAYOUT_BIT(MOXIE_LAYOUT_EXPERT_MASKED),
    .id_spaces = 1u << MOXIE_IDS_GLOBAL | 1u << MOXIE_IDS_PHYSICAL | 1u << MOXIE_IDS_LOCAL,
    .no_expert_id = -1,
    .weights_applied_by = MOXIE_BY_RUNNER,
    .scaling_applied_by = MOXIE_BY_RUNNER,
    .formats = 1u << MOXIE_FORMAT_F32 | 1u << MOXIE_FORMAT_BF16 | 1u << MOXIE_FORMAT_F16 |
               1u << MOXIE_FORMAT_FP8_BLOCK128 | 1u << MOXIE_FORMAT_NVFP4,
    .graph = MOXIE_GRAPH_EAGER_ONLY,
    .row_align_bytes = 1,
};

const moxie_runner_info runner_info = {
    .struct_size = sizeof(moxie_runner_info),
    .name = MOCK_RUNNER,
    .device = "cpu",
    .traits = &runner_traits,
    .api = &runner_api,
};

// ---- What only looks ---------------------------------------------------------------------------

static int32_t config(const moxie_instance *handle, uint64_t index, moxie_config_entry *entry)
{
    moxie_config_entry copy;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_INSTANCE, THREAD_ANY, NULL));
    TRY(struct_read(&call.caller, &shape_config_entry, "entry", entry, &copy));
    if (index >= KEY_COUNT) return MOXIE_E_INVALID; // how a host finds the end
    copy.found = call.instance->values[index].found;
    copy.key = key_name((enum key)index);
    copy.type = key_type((enum key)index);
    copy.value = call.instance->printed[index];
    copy.help = key_help((enum key)index);
    struct_write(&shape_config_entry, &copy, entry);
out:
    return st;
}

static int32_t validate(const moxie_instance *handle, const moxie_report **report,
                        moxie_error *error)
{
    struct call call = {.caller = {.error = error_begin(error)}};
    int32_t st = MOXIE_OK;

    if (report == NULL) return fail_with(&call.caller, MOXIE_E_INVALID, "report is NULL");
    *report = NULL;
    TRY(call_enter(&call, handle, HANDLE_INSTANCE, THREAD_ANY, error));
    *report = &call.instance->report;
out:
    return st;
}

// A little more for each time that any plan was asked for.
static void grow_plan(struct instance *instance)
{
    static atomic_int asked;
    uint64_t more = instance->buffers[0].align * (uint64_t)atomic_fetch_add(&asked, 1);

    if (instance->plan.buffers_count == 0) return;
    instance->buffers[0].bytes += more;
    instance->buffers[0].bytes_mapped += more;
    instance->plan.device_bytes += more;
}

static int32_t plan(const moxie_instance *handle, const moxie_plan **out, moxie_error *error)
{
    struct call call = {.caller = {.error = error_begin(error)}};
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail_with(&call.caller, MOXIE_E_INVALID, "plan is NULL");
    *out = NULL;
    TRY(call_enter(&call, handle, HANDLE_INSTANCE, THREAD_ANY, error));
    if (HAS_FAULT(FAULT_IMPURE_PLAN)) grow_plan(call.instance);
    *out = &call.instance->plan;
    TRY(instance_accepted(&call));
out:
    return st;
}

static int32_t captured(const moxie_instance *handle, moxie_captured *given, moxie_error *error)
{
    moxie_captured copy;
    struct instance *instance;
    int32_t *ids;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INSTANCE_SERIAL, error));
    instance = call.instance;
    TRY(struct_read(&call.caller, &shape_captured, "captured", given, &copy));
    ids = instance->memory[BUFFER_CAPTURE];
    if (ids == NULL)
        TRY(fail_with(&call.caller, MOXIE_E_UNAVAILABLE,
                      "captured: capture_routed_experts is 0, or no dispatcher lives"));
    if (copy.dp_rank < 0 || copy.dp_rank >= instance->limits.dp_size)
        TRY(fail_with(&call.caller, MOXIE_E_INVALID, "captured.dp_rank is %d; want 0..%d",
                      copy.dp_rank, instance->limits.dp_size - 1));
    ids += copy.dp_rank * instance->limits.capture_tokens * instance->captured_strides[0];
    copy.ids = (moxie_tensor){.data = ids,
                              .device = {MOXIE_DEVICE_CPU, 0},
                              .ndim = 3,
                              .dtype = {MOXIE_DTYPE_INT, 32, 1},
                              .shape = instance->captured_shape,
                              .strides = instance->captured_strides};
    copy.load = (moxie_tensor){.data = NULL};
    struct_write(&shape_captured, &copy, given);
out:
    call_leave(&call);
    return st;
}

static int32_t stats(const moxie_instance *handle, moxie_stats *given, moxie_error *error)
{
    moxie_stats copy;
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INSTANCE_SERIAL, error));
    TRY(struct_read(&call.caller, &shape_stats, "stats", given, &copy));
    struct_write(&shape_stats, &call.instance->stats, given);
out:
    call_leave(&call);
    return st;
}

static int32_t suspend(moxie_instance *handle, moxie_error *error)
{
    struct call call;
    int32_t st = MOXIE_OK;

    TRY(call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INIT, error));
    TRY(fail_with(&call.caller, MOXIE_E_UNSUPPORTED, "plain memory cannot keep its addresses"));
out:
    call_leave(&call);
    return st;
}

static int32_t resume(moxie_instance *handle, moxie_error *error)
{
    int32_t st = suspend(handle, error);

    return HAS_FAULT(FAULT_LONE_RESUME) && st == MOXIE_E_UNSUPPORTED ? MOXIE_OK : st;
}

static int32_t probe_one(const struct caller *caller, int32_t index, void *at, uint32_t stride)
{
    moxie_probe entry;
    uint32_t declared;
    int32_t st;

    memcpy(&declared, at, sizeof declared);
    if (declared > stride)
        return fail_with(caller, MOXIE_E_INVALID, "probe: struct_size %u, stride %u", declared,
                         stride);
    st = struct_read(caller, &shape_probe, "probe", at, &entry);
    if (st != MOXIE_OK) return st;
    entry.score = 1;
    entry.name = index == 0 ? runner_info.name : dispatcher_infos[index - 1].name;
    entry.kind = index == 0 ? "runner" : "dispatcher";
    entry.device = "cpu";
    (void)snprintf(entry.reason, sizeof entry.reason, "%s",
                   HAS_FAULT(FAULT_EMPTY_REASON) ? "" : "a slow reference that runs everywhere");
    struct_write(&shape_probe, &entry, at);
    return MOXIE_OK;
}

static int32_t probe(moxie_probe *entries, uint32_t stride, uint64_t capacity, uint64_t *count,
                     moxie_error *error)
{
    const struct caller caller = {.error = error_begin(error)};
    unsigned char *at = (unsigned char *)entries;
    int32_t st = MOXIE_OK;

    if (count == NULL) return fail_with(&caller, MOXIE_E_INVALID, "count is NULL");
    *count = 0;
    if (capacity > 0 && entries == NULL)
        TRY(fail_with(&caller, MOXIE_E_INVALID, "entries is NULL"));
    if (capacity > 0 && stride < shape_probe.first_bytes)
        TRY(fail_with(&caller, MOXIE_E_INVALID, "stride is %u", stride));
    for (int32_t i = 0; i < 4 && (uint64_t)i < capacity; i++, at += stride)
        TRY(probe_one(&caller, i, at, stride));
    *count = 4;
out:
    return st;
}

static const void *get_extension(const char *name)
{
    size_t length = strlen(MOXIE_ROUTING_EXTENSION) + 1; // its NUL included

    if (name != NULL && strcmp(name, MOXIE_EXPAND_EXTENSION) == 0) return &expand_api;
    if (HAS_FAULT(FAULT_ANY_VERSION_OF_AN_EXTENSION)) length -= 2;
    return name != NULL && strncmp(name, MOXIE_ROUTING_EXTENSION, length) == 0 ? &routing_api
                                                                               : NULL;
}

static void layout(const moxie_field **fields, uint64_t *count, uint32_t *stride)
{
    if (fields != NULL) *fields = layout_fields;
    if (count != NULL) *count = layout_fields_count;
    if (stride != NULL) *stride = sizeof layout_fields[0];
}

// ---- Entry -------------------------------------------------------------------------------------

// Complete once layout_digest is computed.
static moxie_build build = {
    .struct_size = sizeof(moxie_build),
    .abi_min = MOXIE_ABI_VERSION,
    .abi_max = MOXIE_ABI_VERSION,
    .version = VERSION_TEXT,
    .source_id = "mock",
    .compiler = "unknown",
    .cuda = "none",
};
static pthread_once_t build_completed = PTHREAD_ONCE_INIT;

static void complete_build(void)
{
    build.layout_digest = layout_digest();
}

static const moxie_api api_table = {
    .struct_size = sizeof(moxie_api),
    .abi_version = TABLE_HAS_FAULT(FAULT_WRONG_VERSION) ? MOXIE_ABI(0, 9) : MOXIE_ABI_VERSION,
    .build = &build,
    .layout = layout,
    .get_extension = get_extension,
    .probe = probe,
    .open = slot_open,
    .config = config,
    .validate = validate,
    .plan = plan,
    .forward = slot_forward,
    .captured = captured,
    .stats = TABLE_HAS_FAULT(FAULT_NULL_SLOT) ? NULL : stats,
    .suspend = suspend,
    .resume = resume,
    .close = slot_close,
};

// Another copy of the table than the first that was handed out.
static const moxie_api *second_table(void)
{
    static moxie_api copy;
    static atomic_int asked;

    copy = api_table;
    return atomic_fetch_add(&asked, 1) == 0 ? &api_table : &copy;
}

int32_t moxie_get_api_v1(const moxie_request *given, const moxie_api **api, moxie_error *error)
{
    const struct caller caller = {.error = error_begin(error)};
    moxie_request request;
    int32_t st = MOXIE_OK;

    if (api == NULL) return fail_with(&caller, MOXIE_E_INVALID, "api is NULL");
    *api = NULL;
    (void)pthread_once(&build_completed, complete_build);
    TRY(struct_read(&caller, &shape_request, "request", given, &request));
    if (library_is_spent()) TRY(fail_with(&caller, MOXIE_E_UNAVAILABLE, "no more hosts, please"));
    if (request.abi_min > request.abi_max)
        TRY(fail_with(&caller, MOXIE_E_INVALID, "request.abi_min is above abi_max"));
    if ((request.abi_max < build.abi_min || request.abi_min > build.abi_max) &&
        !HAS_FAULT(FAULT_NO_NEGOTIATION))
        TRY(fail_with(&caller, MOXIE_E_VERSION,
                      "no common ABI: the host (%.200s) speaks %u.%u to %u.%u, the mock plugin "
                      "(" VERSION_TEXT ", mock) speaks %u.%u alone",
                      request.host_build != NULL ? request.host_build : "unnamed",
                      request.abi_min >> 16, request.abi_min & 0xffff, request.abi_max >> 16,
                      request.abi_max & 0xffff, build.abi_min >> 16, build.abi_min & 0xffff));
    *api = HAS_FAULT(FAULT_SECOND_TABLE) ? second_table() : &api_table;
out:
    return st;
}
