// The instance: open to close, and the memory it holds.

#include "host_tests/mock_plugin/mock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// ---- Memory ------------------------------------------------------------------------------------

static moxie_allocation request_of(const struct instance *instance, uint64_t index)
{
    const moxie_buffer *buffer = &instance->buffers[index];
    uint64_t more = HAS_FAULT(FAULT_ASKS_FOR_MORE) ? buffer->align : 0;

    return (moxie_allocation){
        .struct_size = sizeof(moxie_allocation),
        .kind = buffer->kind,
        .bytes = buffer->bytes + more,
        .align = buffer->align,
        .name = buffer->name,
    };
}

static void give_back(struct instance *instance, uint64_t index)
{
    moxie_allocation request = request_of(instance, index);
    int32_t buffer = instance->planned[index];

    if (instance->memory[buffer] == NULL) return;
    if (HAS_FAULT(FAULT_LEAK) && buffer == BUFFER_SCRATCH) return;
    if (instance->host.release != NULL)
        instance->host.release(instance->host.ctx, &request, instance->memory[buffer]);
    else
        free(instance->memory[buffer]);
    if (HAS_FAULT(FAULT_DOUBLE_RELEASE) && instance->host.release != NULL)
        instance->host.release(instance->host.ctx, &request, instance->memory[buffer]);
    instance->memory[buffer] = NULL;
    instance->stats.bytes_allocated -= instance->buffers[index].bytes_mapped;
}

// The memory is where it was asked to be, and nobody else's.
static int32_t check_memory(const struct call *call, uint64_t index)
{
    const struct instance *instance = call->instance;
    const moxie_buffer *buffer = &instance->buffers[index];
    uintptr_t first = (uintptr_t)instance->memory[instance->planned[index]];

    if (first % buffer->align != 0)
        return fail_with(&call->caller, MOXIE_E_INVALID,
                         "allocate(%s): the memory is not aligned to %llu bytes", buffer->name,
                         (unsigned long long)buffer->align);
    for (uint64_t i = 0; i < index; i++) {
        uintptr_t other = (uintptr_t)instance->memory[instance->planned[i]];

        if (first < other + instance->buffers[i].bytes && other < first + buffer->bytes)
            return fail_with(&call->caller, MOXIE_E_INVALID,
                             "allocate(%s): the memory overlaps that of %s", buffer->name,
                             instance->buffers[i].name);
    }
    return MOXIE_OK;
}

static int32_t take(const struct call *call, uint64_t index)
{
    struct instance *instance = call->instance;
    moxie_allocation request = request_of(instance, index);
    int32_t buffer = instance->planned[index];
    void *memory = NULL;
    int32_t answer = 0;

    if (instance->host.allocate != NULL)
        answer = instance->host.allocate(instance->host.ctx, &request, &memory);
    else
        memory = aligned_alloc(request.align, request.bytes);
    if (answer != 0 || (memory == NULL && instance->host.allocate == NULL))
        return fail_with(&call->caller, MOXIE_E_MEMORY, "no memory for buffer %s, %llu bytes",
                         request.name, (unsigned long long)request.bytes);
    if (memory == NULL)
        return fail_with(&call->caller, MOXIE_E_INVALID,
                         "allocate(%s) answered 0 and gave no memory", request.name);
    instance->memory[buffer] = memory;
    instance->stats.bytes_allocated += instance->buffers[index].bytes_mapped;
    // Every byte is touched, so that memory smaller than it should be shows here.
    memset(memory, buffer == BUFFER_CAPTURE ? 0xff : 0xa5, instance->buffers[index].bytes);
    return check_memory(call, index);
}

int32_t memory_take(const struct call *call)
{
    struct instance *instance = call->instance;
    const int32_t users = instance->users;
    uint64_t taken = 0;
    int32_t st = MOXIE_OK;

    if (HAS_FAULT(FAULT_INIT_AT_ONCE)) (void)usleep(1000); // another may look meanwhile, and does
    instance->users = users + 1;
    if (users > 0) return MOXIE_OK;
    for (; taken < instance->plan.buffers_count; taken++)
        TRY(take(call, taken));
out:
    if (st == MOXIE_OK) return st;
    instance->users--;
    for (uint64_t i = 0; i < instance->plan.buffers_count; i++)
        give_back(instance, i);
    return st;
}

void memory_drop(struct instance *instance)
{
    if (--instance->users > 0) return;
    for (uint64_t i = 0; i < instance->plan.buffers_count; i++)
        give_back(instance, i);
}

// ---- Open and close ----------------------------------------------------------------------------

static atomic_int instances_open, instances_closed;

int library_is_spent(void)
{
    if (HAS_FAULT(FAULT_ONE_HOST)) return atomic_load(&instances_open) > 0;
    return HAS_FAULT(FAULT_LIVES_ONCE) && atomic_load(&instances_open) == 0 &&
           atomic_load(&instances_closed) > 0;
}

static int32_t check_host(const struct caller *caller, const moxie_host *host)
{
    const char *missing = host->get_i64 == NULL               ? "get_i64"
                          : host->get_f64 == NULL             ? "get_f64"
                          : host->get_str == NULL             ? "get_str"
                          : host->register_runner == NULL     ? "register_runner"
                          : host->register_dispatcher == NULL ? "register_dispatcher"
                                                              : NULL;

    if (HAS_FAULT(FAULT_WANTS_LOG) && host->log == NULL) missing = "log";
    if (host->abi_version != MOXIE_ABI_VERSION)
        return fail_with(caller, MOXIE_E_VERSION,
                         "host.abi_version is %u.%u and %u.%u was agreed; copy api->abi_version",
                         host->abi_version >> 16, host->abi_version & 0xffff, MOXIE_VERSION_MAJOR,
                         MOXIE_VERSION_MINOR);
    if (missing != NULL) return fail_with(caller, MOXIE_E_INVALID, "host.%s is NULL", missing);
    if ((host->allocate == NULL) != (host->release == NULL) && !HAS_FAULT(FAULT_HALF_ALLOCATOR))
        return fail_with(caller, MOXIE_E_INVALID,
                         "host.allocate and host.release: one is NULL; set both or neither");
    if ((host->all_gather == NULL) != (host->barrier == NULL))
        return fail_with(caller, MOXIE_E_INVALID,
                         "host.all_gather and host.barrier: one is NULL; set both or neither");
    return MOXIE_OK;
}

static int32_t register_all(const struct caller *caller)
{
    const moxie_host *host = caller->host;
    int32_t answer = host->register_runner(host->ctx, &runner_info);

    if (answer != 0 && !HAS_FAULT(FAULT_IGNORED_ANSWER))
        return fail_with(caller, MOXIE_E_UNAVAILABLE, "the host's register_runner answered %d",
                         answer);
    for (int32_t i = 0; i < 3; i++) {
        answer = host->register_dispatcher(host->ctx, &dispatcher_infos[i]);
        if (answer != 0)
            return fail_with(caller, MOXIE_E_UNAVAILABLE,
                             "the host's register_dispatcher answered %d for %s", answer,
                             dispatcher_infos[i].name);
    }
    return MOXIE_OK;
}

static void init_lock(pthread_mutex_t *lock)
{
    pthread_mutexattr_t attributes;

    (void)pthread_mutexattr_init(&attributes);
    (void)pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    (void)pthread_mutex_init(lock, &attributes);
    (void)pthread_mutexattr_destroy(&attributes);
}

static void set_captured_shape(struct instance *instance)
{
    const struct limits *limits = &instance->limits;

    instance->captured_shape[0] = limits->capture_tokens;
    instance->captured_shape[1] = limits->layers;
    instance->captured_shape[2] = limits->top_k;
    instance->captured_strides[0] = limits->layers * limits->top_k;
    instance->captured_strides[1] = limits->top_k;
    instance->captured_strides[2] = 1;
}

static struct instance *make_instance(const moxie_host *host)
{
    struct instance *instance = calloc(1, sizeof *instance);

    if (instance == NULL) return NULL;
    instance->host = *host;
    (void)snprintf(instance->host_name, sizeof instance->host_name, "%s",
                   host->name != NULL ? host->name : "a host without a name");
    instance->host.name = instance->host_name;
    instance->stats.struct_size = sizeof instance->stats;
    init_lock(&instance->in_init);
    return instance;
}

static void free_instance(struct instance *instance)
{
    if (instance == NULL) return;
    (void)pthread_mutex_destroy(&instance->in_init);
    free(instance);
}

int32_t slot_open(const moxie_host *host, moxie_instance **out, moxie_error *error)
{
    struct caller caller = {.error = error_begin(error)};
    struct instance *instance = NULL;
    moxie_host copy;
    int32_t st = MOXIE_OK;

    if (out == NULL) return fail_with(&caller, MOXIE_E_INVALID, "out is NULL");
    if (!HAS_FAULT(FAULT_GARBAGE_OUT)) *out = NULL;
    TRY(struct_read(&caller, &shape_host, "host", host, &copy));
    caller.host = &copy;
    TRY(check_host(&caller, &copy));
    instance = make_instance(&copy);
    if (instance == NULL) return fail_with(&caller, MOXIE_E_MEMORY, "open: no memory");
    caller.host = &instance->host;
    config_read(&instance->host, instance->values, &instance->verdict);
    judge(instance);
    set_captured_shape(instance);
    TRY(register_all(&caller));
    instance->handle = handle_make(HANDLE_INSTANCE, instance, NULL);
    if (instance->handle == NULL) TRY(fail_with(&caller, MOXIE_E_MEMORY, "open: no memory"));
    if (HAS_FAULT(FAULT_PRINTS) ||
        (HAS_FAULT(FAULT_BANNER) &&
         atomic_load(&instances_open) + atomic_load(&instances_closed) == 0))
        (void)fprintf(stderr, "moxie mock: open\n");
    *out = instance->handle;
    instance = NULL;
    (void)atomic_fetch_add(&instances_open, 1);
out:
    free_instance(instance);
    return st;
}

int32_t slot_close(moxie_instance *handle, moxie_error *error)
{
    struct instance *instance;
    struct call call;
    int32_t st = MOXIE_OK;

    if (handle == NULL) return MOXIE_OK;
    st = call_enter(&call, handle, HANDLE_INSTANCE, MOXIE_THREAD_INIT, error);
    if (HAS_FAULT(FAULT_DEAD_HANDLE) && call.body == NULL) return MOXIE_OK;
    if (st != MOXIE_OK) return st;
    instance = call.instance;
    if (instance->users > 0 && !HAS_FAULT(FAULT_CLOSE_TOO_EARLY))
        st = fail_with(&call.caller, MOXIE_E_INVALID,
                       "close: %d runners and dispatchers live; destroy them first",
                       instance->users);
    call_leave(&call);
    // Without the check the body must stay: its runners point to it.
    if (st != MOXIE_OK || instance->users > 0) return st;
    handle_kill(handle);
    free_instance(instance);
    (void)atomic_fetch_sub(&instances_open, 1);
    (void)atomic_fetch_add(&instances_closed, 1);
    return MOXIE_OK;
}

int32_t instance_accepted(const struct call *call)
{
    const struct verdict *verdict = &call->instance->verdict;

    if (verdict->count == 0) return MOXIE_OK;
    return fail_with(&call->caller, MOXIE_E_CONFIG,
                     "the configuration is refused for %llu reason%s; the first is %s: %s",
                     (unsigned long long)verdict->count, verdict->count == 1 ? "" : "s",
                     verdict->reasons[0].key, verdict->reasons[0].message);
}
