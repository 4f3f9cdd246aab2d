// Faults of a host.

#include "host_tests/fault_host.h"

#include "host_tests/suite.h"

#include <math.h>
#include <string.h>
#include <time.h>

#define ALLOCATION_BYTES_MAX ((uint64_t)64 << 20) // what a lie may cost this machine

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__real_realloc(void *memory, size_t bytes);
void *__wrap_realloc(void *memory, size_t bytes);
char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text);

static _Thread_local struct fault_host *armed;

// 1 when this call is the one.
static int strikes(struct fault_host *host, enum fault_place place)
{
    if (host->fault.place != (int32_t)place || ++host->calls != host->fault.call) return 0;
    host->struck = 1;
    return 1;
}

// ---- libc --------------------------------------------------------------------------------------

void fault_libc_arm(struct fault_host *host)
{
    armed = host;
}

static int libc_fails(void)
{
    return armed != NULL && !armed->inside && strikes(armed, FAULT_LIBC);
}

void *__wrap_malloc(size_t bytes)
{
    return libc_fails() ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return libc_fails() ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *memory, size_t bytes)
{
    return libc_fails() ? NULL : __real_realloc(memory, bytes);
}

char *__wrap_strdup(const char *text)
{
    return libc_fails() ? NULL : __real_strdup(text);
}

// ---- Callbacks ---------------------------------------------------------------------------------

// The answers that are alike for all three getters. 1: *code is one.
static int getter_code(const struct fault_host *host, int32_t *code)
{
    *code = MOXIE_CONFIG_FOUND;
    if (host->fault.way == FAULT_FAILS) *code = MOXIE_CONFIG_ABSENT;
    if (host->fault.way == GETTER_WRONG_TYPE) *code = MOXIE_CONFIG_WRONG_TYPE;
    if (host->fault.way == GETTER_NO_CODE) *code = -77;
    return *code != MOXIE_CONFIG_FOUND || host->fault.way == GETTER_UNWRITTEN;
}

static int32_t on_get_i64(void *ctx, const char *key, int64_t *value)
{
    struct fault_host *host = ctx;
    int32_t code;

    if (!strikes(host, FAULT_GETTER)) return host->honest.get_i64(ctx, key, value);
    if (getter_code(host, &code)) return code;
    *value = host->fault.way == GETTER_LOWEST    ? INT64_MIN
             : host->fault.way == GETTER_HIGHEST ? INT64_MAX
                                                 : 0;
    return code;
}

static int32_t on_get_f64(void *ctx, const char *key, double *value)
{
    struct fault_host *host = ctx;
    int32_t code;

    if (!strikes(host, FAULT_GETTER)) return host->honest.get_f64(ctx, key, value);
    if (getter_code(host, &code)) return code;
    *value = host->fault.way == GETTER_LOWEST    ? -(double)INFINITY
             : host->fault.way == GETTER_HIGHEST ? (double)INFINITY
                                                 : (double)NAN;
    return code;
}

static int32_t on_get_str(void *ctx, const char *key, char *text, uint64_t capacity,
                          uint64_t *length)
{
    struct fault_host *host = ctx;
    int32_t code;

    if (!strikes(host, FAULT_GETTER)) return host->honest.get_str(ctx, key, text, capacity, length);
    if (getter_code(host, &code)) return code;
    memset(text, 'x', capacity);
    if (host->fault.way == GETTER_LOWEST) text[0] = '\0';
    *length = host->fault.way == GETTER_LOWEST    ? 9
              : host->fault.way == GETTER_HIGHEST ? UINT64_MAX
                                                  : 3;
    return code;
}

// The mock's callbacks assert, and an assertion allocates: that is not the library.
static int32_t honest_allocate(struct fault_host *host, const moxie_allocation *request,
                               void **memory)
{
    int32_t answer;

    host->inside = 1;
    answer = host->honest.allocate(host, request, memory);
    host->inside = 0;
    return answer;
}

static int32_t on_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct fault_host *host = ctx;
    int32_t answer;

    if (request->bytes > ALLOCATION_BYTES_MAX) return -2;
    if (!strikes(host, FAULT_ALLOCATE)) return honest_allocate(host, request, memory);
    *memory = host->fault.way == ALLOCATE_JUNK ? &host->askew : NULL;
    if (host->fault.way != ALLOCATE_ASKEW) return host->fault.way != ALLOCATE_NULL;
    answer = honest_allocate(host, request, memory);
    if (answer == 0) host->askew = *memory = (unsigned char *)*memory + 1;
    return answer;
}

static void on_release(void *ctx, const moxie_allocation *request, void *memory)
{
    struct fault_host *host = ctx;

    if (memory == host->askew) {
        memory = (unsigned char *)memory - 1;
        host->askew = NULL;
    }
    host->inside = 1;
    host->honest.release(ctx, request, memory);
    host->inside = 0;
}

static void on_log(void *ctx, int32_t severity, const char *component, const char *text,
                   uint64_t length)
{
    struct fault_host *host = ctx;

    host->inside = 1;
    host->honest.log(ctx, severity, component, text, length);
    host->inside = 0;
}

static int32_t on_register_runner(void *ctx, const moxie_runner_info *info)
{
    struct fault_host *host = ctx;
    int32_t answer;

    if (strikes(host, FAULT_REGISTER)) return 7;
    host->inside = 1;
    answer = host->honest.register_runner(ctx, info);
    host->inside = 0;
    return answer;
}

static int32_t on_register_dispatcher(void *ctx, const moxie_dispatcher_info *info)
{
    struct fault_host *host = ctx;
    int32_t answer;

    if (strikes(host, FAULT_REGISTER)) return 7;
    host->inside = 1;
    answer = host->honest.register_dispatcher(ctx, info);
    host->inside = 0;
    return answer;
}

static int32_t on_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct fault_host *host = ctx;
    struct timespec late = {.tv_nsec = host->fault.late_ms * 1000000L};
    int strikes_now = strikes(host, FAULT_ALL_GATHER);
    int32_t answer;

    if (strikes_now && host->fault.way == FAULT_FAILS) return -1;
    if (strikes_now && host->fault.way == ALL_GATHER_LATE) (void)nanosleep(&late, NULL);
    answer = host->honest.all_gather(ctx, send, recv, bytes);
    return strikes_now && host->fault.way == ALL_GATHER_AFTER ? -1 : answer;
}

static int32_t on_barrier(void *ctx)
{
    struct fault_host *host = ctx;

    return strikes(host, FAULT_BARRIER) ? -1 : host->honest.barrier(ctx);
}

static void on_parallel_for(void *ctx, uint64_t tasks, void (*task)(void *arg, uint64_t i),
                            void *arg)
{
    struct fault_host *host = ctx;
    int32_t way = strikes(host, FAULT_PARALLEL_FOR) ? host->fault.way : FAULT_FAILS;
    uint64_t first = way == PARALLEL_FOR_ONE_TASK ? tasks - 1 : 0;
    int32_t turns = way == PARALLEL_FOR_NO_TASK ? 0 : way == PARALLEL_FOR_EVERY_TWICE ? 2 : 1;

    if (way == PARALLEL_FOR_PAST) {
        task(arg, UINT64_MAX);
        task(arg, tasks);
        return;
    }
    for (; turns > 0; turns--) {
        for (uint64_t i = first; i < tasks; i++)
            task(arg, i);
    }
}

static int32_t on_thread_check(void *ctx, int32_t tag)
{
    struct fault_host *host = ctx;

    return strikes(host, FAULT_THREAD_CHECK) ? 0 : host->honest.thread_check(ctx, tag);
}

void fault_host_init(struct fault_host *host, const struct fault *fault)
{
    memset(host, 0, sizeof *host);
    mock_host_init(&host->mock);
    host->fault = *fault;
}

void fault_host_arm(struct fault_host *host)
{
    moxie_host *table = &host->mock.host;

    if (host->fault.place == FAULT_THREAD_CHECK) mock_host_check_threads(&host->mock, 1);
    host->honest = *table;
    table->get_i64 = on_get_i64;
    table->get_f64 = on_get_f64;
    table->get_str = on_get_str;
    table->allocate = on_allocate;
    table->release = on_release;
    table->log = on_log;
    table->register_runner = on_register_runner;
    table->register_dispatcher = on_register_dispatcher;
    if (table->all_gather != NULL) table->all_gather = on_all_gather;
    if (table->barrier != NULL) table->barrier = on_barrier;
    if (table->thread_check != NULL) table->thread_check = on_thread_check;
    if (host->fault.place == FAULT_PARALLEL_FOR) table->parallel_for = on_parallel_for;
}
