// Handles, and what every call does first. A handle is a shell that is never freed, so that one
// that was closed is known for ever; what it stood for is freed with it.

#include "host_tests/mock_plugin/mock.h"

#include <errno.h>
#include <stdlib.h>

struct handle {
    struct handle *next;
    const struct handle *owner; // the instance's; of an instance, itself
    void *body;                 // NULL: closed or destroyed
    int32_t kind;
};

// Every handle this library ever handed out.
static struct handle *handles;
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;

void *handle_make(enum handle_kind kind, void *body, const void *owner)
{
    struct handle *handle = calloc(1, sizeof *handle);

    if (handle == NULL) return NULL;
    *handle = (struct handle){
        .owner = owner != NULL ? owner : handle, .body = body, .kind = (int32_t)kind};
    (void)pthread_mutex_lock(&handles_lock);
    handle->next = handles;
    handles = handle;
    (void)pthread_mutex_unlock(&handles_lock);
    return handle;
}

// The shell at `address`, which may be anything, in `copy`, and its instance while that is open.
static int find(const void *address, struct handle *copy, struct instance **instance)
{
    struct handle *handle;

    (void)pthread_mutex_lock(&handles_lock);
    handle = handles;
    while (handle != NULL && (const void *)handle != address)
        handle = handle->next;
    if (handle != NULL) {
        *copy = *handle;
        *instance = handle->owner->body;
    }
    (void)pthread_mutex_unlock(&handles_lock);
    return handle != NULL;
}

void handle_kill(const void *address)
{
    struct handle *handle;

    (void)pthread_mutex_lock(&handles_lock);
    handle = handles;
    while (handle != NULL && (const void *)handle != address)
        handle = handle->next;
    if (handle != NULL) handle->body = NULL;
    (void)pthread_mutex_unlock(&handles_lock);
}

static int32_t find_body(struct call *call, const void *address, enum handle_kind kind)
{
    static const char *const names[] = {"instance", "runner", "dispatcher"};
    struct handle handle;

    if (address == NULL)
        return fail_with(&call->caller, MOXIE_E_INVALID, "%s is NULL", names[kind]);
    if (!find(address, &handle, &call->instance))
        return fail_with(&call->caller, MOXIE_E_INVALID, "%s: this library made no such handle",
                         names[kind]);
    if (call->instance != NULL) call->caller.host = &call->instance->host;
    if (handle.kind != (int32_t)kind)
        return fail_with(&call->caller, MOXIE_E_INVALID, "%s: the handle is a %s", names[kind],
                         names[handle.kind]);
    if (handle.body == NULL)
        return fail_with(&call->caller, MOXIE_E_INVALID, "%s: it was %s before", names[kind],
                         kind == HANDLE_INSTANCE ? "closed" : "destroyed");
    call->body = handle.body;
    return MOXIE_OK;
}

static int32_t check_thread(struct call *call, int32_t tag)
{
    const moxie_host *host = &call->instance->host;

    if (HAS_FAULT(FAULT_IGNORED_THREAD) || host->thread_check == NULL ||
        host->thread_check(host->ctx, tag) != 0)
        return MOXIE_OK;
    return fail_with(&call->caller, MOXIE_E_INVALID,
                     "the host's thread_check refuses this thread for a slot tagged %s",
                     tag == MOXIE_THREAD_INIT ? "init" : "serial");
}

// A serial call excludes every other; init calls exclude serial ones and follow each other.
static int32_t exclude(struct call *call, int32_t tag)
{
    struct instance *instance = call->instance;
    int before = 0;

    if (tag == MOXIE_THREAD_INSTANCE_SERIAL) {
        if (!atomic_compare_exchange_strong(&instance->calls, &before, -1))
            return fail_with(&call->caller, MOXIE_E_INVALID,
                             "a serial slot was entered while another call of the instance runs");
        call->entered = tag;
        return MOXIE_OK;
    }
    before = atomic_load(&instance->calls);
    do {
        if (before < 0)
            return fail_with(&call->caller, MOXIE_E_INVALID,
                             "an init slot was entered during a step of the instance");
    } while (!atomic_compare_exchange_weak(&instance->calls, &before, before + 1));
    if (HAS_FAULT(FAULT_INIT_AT_ONCE)) {
        call->entered = tag;
        return MOXIE_OK;
    }
    if (pthread_mutex_lock(&instance->in_init) == EDEADLK) {
        (void)atomic_fetch_sub(&instance->calls, 1);
        return fail_with(&call->caller, MOXIE_E_INVALID,
                         "an init slot was entered from a callback of another");
    }
    call->entered = tag;
    return MOXIE_OK;
}

static int32_t enter_found(struct call *call, int32_t tag)
{
    int32_t st = MOXIE_OK;

    if (tag == THREAD_ANY) return MOXIE_OK;
    TRY(check_thread(call, tag));
    TRY(exclude(call, tag));
out:
    return st;
}

int32_t call_enter(struct call *call, const void *handle, enum handle_kind kind, int32_t tag,
                   moxie_error *error)
{
    int32_t st = MOXIE_OK;

    *call = (struct call){.caller = {.error = error_begin(error)}};
    TRY(find_body(call, handle, kind));
    TRY(enter_found(call, tag));
out:
    return st;
}

void call_leave(struct call *call)
{
    if (call->entered == MOXIE_THREAD_INSTANCE_SERIAL) atomic_store(&call->instance->calls, 0);
    if (call->entered == MOXIE_THREAD_INIT) {
        if (!HAS_FAULT(FAULT_INIT_AT_ONCE)) (void)pthread_mutex_unlock(&call->instance->in_init);
        (void)atomic_fetch_sub(&call->instance->calls, 1);
    }
    call->entered = 0;
}
