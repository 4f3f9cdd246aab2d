// The instance.

#include "plugin/instance.h"

#include "kernels/cpu/fp_mode.h"
#include "plugin/capture.h"
#include "plugin/log.h"
#include "plugin/memory_available.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INSTANCE_MAGIC 0x4d4f584945494e53u // "MOXIEINS"

uint64_t handle_magic(uint64_t kind)
{
    static const char mark = 0;

    return kind ^ (uint64_t)(uintptr_t)&mark;
}

// ---- open --------------------------------------------------------------------------------------

// A round may hold more than any forward brings: then begin_forward() is what refuses.
static int64_t dispatch_call_tokens(const struct limits *limits)
{
    return limits->tokens_max < limits->forward_tokens_max ? limits->tokens_max
                                                           : limits->forward_tokens_max;
}

static void publish_bounds(moxie_instance *instance)
{
    const struct bounds *bounds = &instance->bounds;
    const struct limits *limits = &instance->plan.limits;
    int planned = instance->plan.buffers_count > 0;

    instance->public_bounds = (moxie_bounds){
        .struct_size = sizeof(moxie_bounds),
        .forward_tokens = bounds->forward_tokens,
        .dominant = bounds_dominant(bounds),
        .prefill = bounds->prefill,
        .decode = bounds->decode,
        .dispatch_required = bounds->dispatch_required,
        .dispatch_tokens = bounds->dispatch_tokens,
        .allgather_rows = bounds->allgather_rows,
        .alltoall_rows = bounds->alltoall_rows,
        .capture_rows = bounds->capture_rows,
        .dispatch_call_tokens_max = planned ? dispatch_call_tokens(limits) : -1,
        .forward_call_tokens_max = planned ? limits->forward_tokens_max : -1,
        .physical_experts = bounds->physical_experts,
        .expert_first = planned ? limits->experts_first : -1,
        .experts_local = planned ? limits->experts_local : -1,
    };
}

static void publish(moxie_instance *instance)
{
    const struct report *report = &instance->report;
    const struct plan *plan = &instance->plan;

    publish_bounds(instance);
    instance->public_report = (moxie_report){.struct_size = sizeof(moxie_report),
                                             .reason_stride = sizeof(moxie_reason),
                                             .reasons_count = report->reasons_count,
                                             .reasons = report->reasons,
                                             .warnings_count = report->warnings_count,
                                             .warnings = report->warnings};
    instance->public_plan = (moxie_plan){.struct_size = sizeof(moxie_plan),
                                         .buffer_stride = sizeof(moxie_buffer),
                                         .bounds = &instance->public_bounds};
    if (report->reasons_count == 0) {
        instance->public_plan.buffers_count = plan->buffers_count;
        instance->public_plan.buffers = plan->buffers;
        instance->public_plan.device_bytes = plan->device_bytes;
        instance->public_plan.symmetric_bytes = plan->symmetric_bytes;
        instance->public_plan.pinned_bytes = plan->pinned_bytes;
        instance->public_plan.host_bytes = plan->host_bytes;
    }
    instance->captured_shape[0] = plan->limits.capture_tokens;
    instance->captured_shape[1] = plan->limits.layers;
    instance->captured_shape[2] = plan->limits.top_k;
    instance->captured_strides[0] = (int64_t)plan->limits.layers * plan->limits.top_k;
    instance->captured_strides[1] = plan->limits.top_k;
    instance->captured_strides[2] = 1;
    instance->load_shape[0] = plan->limits.layers;
    instance->load_shape[1] = instance->load_strides[0] = plan->limits.experts_local;
    instance->load_strides[1] = 1;
    for (int32_t i = 0; i < KEY_COUNT; i++) {
        enum config_key key = (enum config_key)i;
        const char *words = config_words(key);

        config_print(&instance->config, key, instance->printed[i], sizeof instance->printed[i]);
        (void)snprintf(instance->help[i], sizeof instance->help[i], "%s%s%s", config_help(key),
                       words[0] != 0 ? "; one of " : "", words);
    }
    bounds_explain(&instance->bounds, &instance->config, instance->explained,
                   sizeof instance->explained);
}

static void judge(moxie_instance *instance)
{
    const fp_mode before = fp_mode_begin();

    config_read(&instance->config, &instance->host, &instance->report);
    validate_resolve(&instance->config);
    bounds_compute(&instance->bounds, &instance->config, &instance->report);
    validate_config(&instance->config, &instance->bounds, &instance->report);
    plan_make(&instance->plan, &instance->config, &instance->bounds, &instance->report);
    validate_plan(&instance->config, &instance->plan, &instance->report);
    fp_mode_end(before);
}

static int32_t register_backends(const moxie_instance *instance, const struct registry *registry,
                                 moxie_error *error)
{
    const moxie_host *host = &instance->host;

    for (uint32_t i = 0; i < registry->runners_count; i++) {
        int32_t answer;

        if (device_find(registry->runners[i].device) == NULL) continue;
        answer = host->register_runner(host->ctx, &registry->runners[i]);
        if (answer != 0)
            return fail_with(error, MOXIE_E_UNAVAILABLE,
                             "the host's register_runner refused %s: %d", registry->runners[i].name,
                             answer);
    }
    for (uint32_t i = 0; i < registry->dispatchers_count; i++) {
        int32_t answer;

        if (device_find(registry->dispatchers[i].device) == NULL) continue;
        answer = host->register_dispatcher(host->ctx, &registry->dispatchers[i]);
        if (answer != 0)
            return fail_with(error, MOXIE_E_UNAVAILABLE,
                             "the host's register_dispatcher refused %s: %d",
                             registry->dispatchers[i].name, answer);
    }
    return MOXIE_OK;
}

static void log_verdict(const moxie_instance *instance)
{
    static const enum config_key resolved[] = {KEY_RUNNER, KEY_DISPATCHER, KEY_ACTIVATION_FORMAT};
    const struct report *report = &instance->report;

    for (uint64_t i = 0; i < report->warnings_count; i++)
        log_line(&instance->host, MOXIE_LOG_WARNING, "config", "%s: %s", report->warnings[i].key,
                 report->warnings[i].message);
    if (report->reasons_count > 0) {
        log_line(&instance->host, MOXIE_LOG_ERROR, "config",
                 "refused for %" PRIu64 " reason%s; validate() lists them", report->reasons_count,
                 report->reasons_count == 1 ? "" : "s");
        return;
    }
    for (size_t i = 0; i < sizeof resolved / sizeof resolved[0]; i++) {
        char why[160];

        validate_explain(&instance->config, resolved[i], why, sizeof why);
        if (why[0] != '\0') log_line(&instance->host, MOXIE_LOG_INFO, "config", "%s", why);
    }
    log_line(&instance->host, MOXIE_LOG_INFO, "config", "runner %s, dispatcher %s, %s",
             config_str(&instance->config, KEY_RUNNER),
             config_str(&instance->config, KEY_DISPATCHER), instance->explained);
}

static int32_t check_thread(const moxie_host *host, int32_t tag, moxie_error *error)
{
    const char *tagged = tag == MOXIE_THREAD_INIT ? "[init]" : "[serial]";

    if (host->thread_check == NULL || host->thread_check(host->ctx, tag) != 0) return MOXIE_OK;
    log_line(host, MOXIE_LOG_HOST_MISBEHAVING, "thread",
             "the host's thread_check refused its own thread for a slot tagged %s", tagged);
    return fail_with(error, MOXIE_E_INVALID,
                     "a slot tagged %s, called on a thread that the host's thread_check refuses; "
                     "call it on one that it accepts",
                     tagged);
}

// One that says so to whoever holds it already.
static void init_creating(pthread_mutex_t *creating)
{
    pthread_mutexattr_t attributes;

    (void)pthread_mutexattr_init(&attributes);
    (void)pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    (void)pthread_mutex_init(creating, &attributes);
    (void)pthread_mutexattr_destroy(&attributes);
}

static void free_instance(moxie_instance *instance)
{
    report_fini(&instance->report);
    (void)pthread_mutex_destroy(&instance->creating);
    free(instance->handle);
    free(instance);
}

int32_t instance_open(const moxie_host *host, const struct registry *registry, moxie_instance **out,
                      moxie_error *error)
{
    moxie_instance *instance = NULL;
    int32_t st = MOXIE_OK;

    *out = NULL;
    TRY(check_thread(host, MOXIE_THREAD_INIT, error));
    instance = calloc(1, sizeof *instance);
    if (instance == NULL) TRY(fail_with(error, MOXIE_E_MEMORY, "open: no memory for the instance"));
    init_creating(&instance->creating);
    instance->handle = calloc(1, sizeof *instance->handle);
    if (instance->handle == NULL)
        TRY(fail_with(error, MOXIE_E_MEMORY, "open: no memory for the handle"));
    instance->host = *host;
    (void)snprintf(instance->host_name, sizeof instance->host_name, "%.*s", CONFIG_TEXT_BYTES - 1,
                   host->name != NULL ? host->name : "unnamed host");
    instance->host.name = instance->host_name;
    instance->stats.struct_size = sizeof instance->stats;
    judge(instance);
    instance->device = device_find(config_str(&instance->config, KEY_DEVICE));
    instance->memory = (struct memory){
        .host = &instance->host, .device = instance->device, .plan = &instance->plan};
    if (instance->report.memory_failed)
        TRY(fail_with(error, MOXIE_E_MEMORY, "open: no memory for the verdict"));
    publish(instance);
    TRY(register_backends(instance, registry, error));
    log_verdict(instance);
    *instance->handle =
        (struct instance_handle){.magic = handle_magic(INSTANCE_MAGIC), .instance = instance};
    *out = instance;
    instance = NULL;
out:
    if (instance != NULL) free_instance(instance);
    return st;
}

int32_t instance_begin_create(moxie_instance *instance, moxie_error *error)
{
    static const char why[] = "called from within a callback of a create or destroy of the same "
                              "instance, which waits for it; return from it first";
    int before;

    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    if (pthread_mutex_lock(&instance->creating) == 0) {
        instance->cancel_before = before;
        return MOXIE_OK;
    }
    (void)pthread_setcancelstate(before, NULL);
    log_line(&instance->host, MOXIE_LOG_HOST_MISBEHAVING, "thread", "%s", why);
    return fail_with(error, MOXIE_E_INVALID, "%s", why);
}

void instance_end_create(moxie_instance *instance)
{
    const int before = instance->cancel_before;

    (void)pthread_mutex_unlock(&instance->creating);
    (void)pthread_setcancelstate(before, NULL);
}

int32_t instance_close(moxie_instance *instance, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(instance_begin_create(instance, error));
    if (instance->users > 0)
        st = fail_with(error, MOXIE_E_INVALID,
                       "close: %d runners and dispatchers of this instance still live; destroy "
                       "them first",
                       instance->users);
    if (st == MOXIE_OK) {
        instance->handle->magic = 0;
        threads_destroy(instance->threads);
    }
    // Where a cancellation that came meanwhile may end the thread again: nothing of it waits below.
    instance_end_create(instance);
    if (st == MOXIE_OK) free_instance(instance);
out:
    return st;
}

moxie_instance *instance_handle(const moxie_instance *instance)
{
    return (moxie_instance *)(void *)instance->handle;
}

moxie_instance *instance_of(const moxie_instance *handle)
{
    const struct instance_handle *own = (const struct instance_handle *)(const void *)handle;

    return own != NULL && own->magic == handle_magic(INSTANCE_MAGIC) ? own->instance : NULL;
}

int32_t instance_check_thread(const moxie_instance *instance, int32_t tag, moxie_error *error)
{
    return check_thread(&instance->host, tag, error);
}

// ---- what was decided --------------------------------------------------------------------------

int32_t instance_config(const moxie_instance *instance, uint64_t index, moxie_config_entry *entry)
{
    static const char *const types[] = {"i64", "f64", "str"};
    enum config_key key = (enum config_key)index;

    if (index >= KEY_COUNT) return MOXIE_E_INVALID;
    entry->key = config_name(key);
    entry->type = types[config_type_of(key)];
    entry->value = instance->printed[key];
    entry->help = instance->help[key];
    entry->found = config_found(&instance->config, key);
    return MOXIE_OK;
}

int32_t instance_validate(const moxie_instance *instance, const moxie_report **report)
{
    *report = &instance->public_report;
    return MOXIE_OK;
}

int32_t instance_plan(const moxie_instance *instance, const moxie_plan **plan, moxie_error *error)
{
    *plan = &instance->public_plan;
    return instance_accepted(instance, error);
}

// As many reasons as there is room for, each whole, and how many more there are.
static void say_reasons(const struct report *report, char *text, size_t capacity)
{
    size_t used = 0;

    text[0] = 0;
    for (uint64_t i = 0; i < report->reasons_count; i++) {
        const char *key = report->reasons[i].key, *message = report->reasons[i].message;
        char more[64];
        size_t tail = (size_t)snprintf(more, sizeof more, "%s%" PRIu64 " more, see validate()",
                                       i > 0 ? "; " : "", report->reasons_count - i);
        size_t length = strlen(key) + strlen(message) + sizeof ";  : ";

        if (used + length + (i + 1 < report->reasons_count ? sizeof more : 0) > capacity) {
            if (used + tail < capacity) memcpy(text + used, more, tail + 1);
            return;
        }
        used += (size_t)snprintf(text + used, capacity - used, "%s%s: %s", i > 0 ? "; " : "", key,
                                 message);
    }
}

int32_t instance_accepted(const moxie_instance *instance, moxie_error *error)
{
    const struct report *report = &instance->report;
    char text[1024];

    if (report->reasons_count == 0) return MOXIE_OK;
    say_reasons(report, text, sizeof text);
    return fail_with(error, MOXIE_E_CONFIG, "configuration refused for %" PRIu64 " reason%s: %s",
                     report->reasons_count, report->reasons_count == 1 ? "" : "s", text);
}

int32_t instance_captured(const moxie_instance *instance, moxie_captured *captured,
                          moxie_error *error)
{
    return capture_view(instance, captured, error);
}

// Kernels may be adding meanwhile; each number is written by one of them at a time.
void instance_count(const struct flag_report *report, moxie_stats *stats)
{
    for (int32_t slot = 0; slot < KERNEL_SLOTS_MAX; slot++) {
        stats->rows_sent += __atomic_load_n(&report->rows_sent[slot], __ATOMIC_RELAXED);
        stats->rows_received += __atomic_load_n(&report->rows_received[slot], __ATOMIC_RELAXED);
    }
}

void instance_stats(const moxie_instance *instance, moxie_stats *stats)
{
    *stats = instance->stats;
    for (const struct report_link *link = instance->reports; link != NULL; link = link->next)
        instance_count(link->report, stats);
    stats->bytes_allocated += instance->memory.bytes_held;
}

// ---- what runners and dispatchers share --------------------------------------------------------

int32_t instance_device(moxie_instance *instance, moxie_error *error)
{
    const char *device = config_str(&instance->config, KEY_DEVICE);
    int32_t st = MOXIE_OK;

    if (instance->device == NULL)
        return fail_with(
            error, MOXIE_E_UNAVAILABLE,
            "this library was built without %s kernels; load one that has them, or set "
            "device to cpu",
            device);
    TRY(instance->device->prepare(error));
    if (instance->users == 0) {
        instance->ordinal = instance->device->ordinal();
        if (instance->device->kernels->gather_units != NULL)
            instance->gather_units = instance->device->kernels->gather_units();
    }
    TRY(instance_check_current(instance, error));
out:
    return st;
}

int32_t instance_check_current(const moxie_instance *instance, moxie_error *error)
{
    const int32_t current = instance->device->ordinal();

    if (current == instance->ordinal) return MOXIE_OK;
    return fail_with(
        error, MOXIE_E_INVALID,
        "device %d is current, but what this instance has lies on device %d; make that "
        "one current, or open an instance for each device",
        current, instance->ordinal);
}

static int32_t start_threads(moxie_instance *instance, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    if (instance->stream.workers > 0) return st;
    if (instance->host.parallel_for == NULL) {
        TRY(threads_create(instance->plan.limits.threads, &instance->threads, error));
        instance->stream.parallel_for = threads_parallel_for;
        instance->stream.ctx = instance->threads;
    } else {
        instance->stream.parallel_for = instance->host.parallel_for;
        instance->stream.ctx = instance->host.ctx;
    }
    instance->stream.isa = (int32_t)cpu_isa_best();
    instance->stream.workers = instance->plan.limits.threads;
out:
    return st;
}

static int32_t refuse_available(const moxie_instance *instance, uint64_t wanted, uint64_t available,
                                int is_group, moxie_error *error)
{
    const struct plan *plan = &instance->plan;
    const uint64_t of_keys = plan->device_bytes + plan->symmetric_bytes;
    const fp_mode before = fp_mode_begin();
    char advice[256];

    validate_advise(&instance->config, (int64_t)available - (int64_t)(wanted - of_keys), advice,
                    sizeof advice);
    fp_mode_end(before);
    return fail_with(error, MOXIE_E_MEMORY,
                     "the plan's device %" PRIu64 " + symmetric %" PRIu64 " + host %" PRIu64
                     " bytes are more than the %" PRIu64 " bytes of memory available (%s): %s%s%s",
                     plan->device_bytes, plan->symmetric_bytes, wanted - of_keys, available,
                     is_group ? MEMORY_OF_GROUP : MEMORY_OF_MACHINE,
                     advice[0] != '\0' ? "set " : "", advice,
                     is_group ? "raise that limit" : "free memory");
}

// Before the first of the plan is taken: the kernel gives what is there on paper, and kills the
// process in the forward that first touches pages it does not have.
static int32_t check_available(const moxie_instance *instance, moxie_error *error)
{
    const struct plan *plan = &instance->plan;
    const uint64_t wanted =
        plan->device_bytes + plan->symmetric_bytes + plan->pinned_bytes + plan->host_bytes;
    struct memory_available available;
    uint64_t group;

    if (instance->users > 0 || instance->host.allocate != NULL ||
        instance->device->tensor_device != MOXIE_DEVICE_CPU)
        return MOXIE_OK;
    available = memory_available();
    group = available.group < available.above ? available.group : available.above;
    if (wanted > group && group <= available.machine)
        return refuse_available(instance, wanted, group, 1, error);
    if (wanted > available.machine)
        return refuse_available(instance, wanted, available.machine, 0, error);
    return MOXIE_OK;
}

int32_t instance_take(moxie_instance *instance, uint32_t set, moxie_error *error)
{
    int32_t st = MOXIE_OK;

    TRY(check_available(instance, error));
    TRY(memory_take(&instance->memory, set, error));
    // Last, because they are kept until close.
    if (instance->device->tensor_device == MOXIE_DEVICE_CPU) st = start_threads(instance, error);
    if (st != MOXIE_OK) {
        memory_drop(&instance->memory, set);
        goto out;
    }
    instance->stream.scratch = memory_slot(&instance->memory, BUFFER_CPU_SCRATCH, 0);
    instance->users++;
out:
    return st;
}

// A host's pool may give the memory to another stream at once.
static void wait_for_device(const moxie_instance *instance)
{
    const struct device *device = instance->device;

    if (device->synchronize == NULL || device->status(device->synchronize()) != MOXIE_E_CAPTURING)
        return;
    log_line(&instance->host, MOXIE_LOG_HOST_MISBEHAVING, "capture",
             "destroy, or a create that failed, while a graph was captured on device %d, which has "
             "to be waited for: the capture is spoilt, and memory of this instance may be lost; "
             "call it before the capture, or after",
             instance->ordinal);
}

void instance_drop(moxie_instance *instance, uint32_t set)
{
    wait_for_device(instance);
    memory_drop(&instance->memory, set);
    instance->users--;
}

int32_t instance_visit(const moxie_instance *instance, struct device_visit *visit)
{
    *visit = (struct device_visit){NULL, -1};
    // Before anything is taken the thread is the one that creates it.
    if (instance->users == 0 || instance->device->visit == NULL) return 0;
    return instance->device->visit(instance->ordinal, visit);
}

void instance_leave(const moxie_instance *instance, const struct device_visit *visit)
{
    if (visit->ordinal >= 0) instance->device->leave(visit);
}

void *instance_stream(moxie_instance *instance, void *host_stream)
{
    if (instance->device->tensor_device == MOXIE_DEVICE_CPU) return &instance->stream;
    return host_stream;
}

int32_t instance_launched(const moxie_instance *instance, int32_t answer, const char *kernel,
                          moxie_error *error)
{
    return device_check(instance->device, answer, kernel, error);
}
