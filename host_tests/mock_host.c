// The host for tests.

#include "host_tests/mock_host.h"

#include "host_tests/suite.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define FENCE_BYTES 64
#define FENCE_BYTE  0x5c
#define RANKS_MAX   64

// ---- Configuration -----------------------------------------------------------------------------

static struct mock_value *value_find(struct mock_host *mock, const char *key)
{
    for (uint64_t i = 0; i < mock->values_count; i++) {
        if (strcmp(mock->values[i].key, key) == 0) return &mock->values[i];
    }
    return NULL;
}

static struct mock_value *value_set(struct mock_host *mock, const char *key, enum mock_type type)
{
    struct mock_value *value = value_find(mock, key);

    if (value == NULL) {
        ck_assert_uint_lt(mock->values_count, MOCK_VALUES_MAX);
        value = &mock->values[mock->values_count++];
    }
    memset(value, 0, sizeof *value);
    ck_assert_int_lt(snprintf(value->key, sizeof value->key, "%s", key), (int)sizeof value->key);
    value->type = (int32_t)type;
    return value;
}

void mock_set_i64(struct mock_host *mock, const char *key, int64_t value)
{
    value_set(mock, key, MOCK_I64)->i64 = value;
}

void mock_set_ranks(struct mock_host *mock, int64_t ranks)
{
    mock_set_i64(mock, "dp_size", ranks);
    mock_set_i64(mock, "tp_size", ranks);
    mock_set_i64(mock, "ep_size", ranks);
}

void mock_set_f64(struct mock_host *mock, const char *key, double value)
{
    value_set(mock, key, MOCK_F64)->f64 = value;
}

void mock_set_str(struct mock_host *mock, const char *key, const char *value)
{
    mock_set_raw(mock, key, value, strlen(value), strlen(value));
}

void mock_set_raw(struct mock_host *mock, const char *key, const char *text, uint64_t bytes,
                  uint64_t length)
{
    struct mock_value *row = value_set(mock, key, MOCK_STR);

    ck_assert_uint_lt(bytes, MOCK_TEXT_BYTES);
    memcpy(row->text, text, bytes);
    row->text_length = length;
}

void mock_set_code(struct mock_host *mock, const char *key, int32_t code)
{
    value_set(mock, key, MOCK_I64)->code = code;
}

void mock_unset(struct mock_host *mock, const char *key)
{
    struct mock_value *value = value_find(mock, key);

    if (value != NULL) *value = mock->values[--mock->values_count];
}

// The row of `key` when it is of `type`; else *code says what the getter answers.
static const struct mock_value *value_get(struct mock_host *mock, const char *key,
                                          enum mock_type type, int32_t *code)
{
    const struct mock_value *value = value_find(mock, key);
    int same;

    mock->reads++;
    *code = MOXIE_CONFIG_ABSENT;
    if (value == NULL) return NULL;
    *code = value->code;
    if (value->code != MOXIE_CONFIG_FOUND) return NULL;
    same = value->type == (int32_t)type || (type == MOCK_F64 && value->type == MOCK_I64);
    *code = same ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE;
    return same ? value : NULL;
}

static int32_t on_get_i64(void *ctx, const char *key, int64_t *out)
{
    int32_t code;
    const struct mock_value *value = value_get(ctx, key, MOCK_I64, &code);

    if (value != NULL) *out = value->i64;
    return code;
}

static int32_t on_get_f64(void *ctx, const char *key, double *out)
{
    int32_t code;
    const struct mock_value *value = value_get(ctx, key, MOCK_F64, &code);

    if (value != NULL) *out = value->type == MOCK_I64 ? (double)value->i64 : value->f64;
    return code;
}

static int32_t on_get_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                          uint64_t *length)
{
    int32_t code;
    const struct mock_value *value = value_get(ctx, key, MOCK_STR, &code);
    uint64_t bytes;

    if (value == NULL) return code;
    *length = value->text_length;
    bytes = capacity < MOCK_TEXT_BYTES ? capacity : MOCK_TEXT_BYTES;
    if (bytes == 0) return code;
    memcpy(buffer, value->text, bytes);
    buffer[bytes - 1] = '\0';
    return code;
}

// ---- Memory ------------------------------------------------------------------------------------

static struct mock_allocation *allocation_find(struct mock_host *mock, const void *memory)
{
    for (uint64_t i = 0; i < MOCK_ALLOCATIONS_MAX; i++) {
        if (mock->allocations[i].memory == memory) return &mock->allocations[i];
    }
    return NULL;
}

static int32_t on_allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct mock_host *mock = ctx;
    struct mock_allocation *entry;
    int32_t answer = -1;
    void *made = NULL;

    *memory = NULL;
    (void)pthread_mutex_lock(&mock->lock);
    mock->allocate_calls++;
    entry = allocation_find(mock, NULL);
    ck_assert_ptr_nonnull(entry);
    ck_assert_uint_gt(request->bytes, 0);
    ck_assert_uint_eq(request->align & (request->align - 1), 0);
    if (mock->allocate_fail_at != 0 && mock->allocate_calls >= mock->allocate_fail_at) goto out;
    if (posix_memalign(&made, request->align < 16 ? 16 : request->align,
                       request->bytes + FENCE_BYTES) != 0)
        goto out;
    memset(made, MOCK_POISON, request->bytes);
    memset((unsigned char *)made + request->bytes, FENCE_BYTE, FENCE_BYTES);
    entry->request = *request;
    entry->memory = made;
    (void)snprintf(entry->name, sizeof entry->name, "%s", request->name);
    mock->bytes_live += request->bytes;
    if (mock->bytes_live > mock->bytes_peak) mock->bytes_peak = mock->bytes_live;
    *memory = made;
    answer = 0;
out:
    (void)pthread_mutex_unlock(&mock->lock);
    return answer;
}

static void on_release(void *ctx, const moxie_allocation *request, void *memory)
{
    struct mock_host *mock = ctx;
    struct mock_allocation *entry;

    ck_assert_ptr_nonnull(memory);
    (void)pthread_mutex_lock(&mock->lock);
    mock->release_calls++;
    entry = allocation_find(mock, memory);
    ck_assert_ptr_nonnull(entry);
    ck_assert_uint_eq(request->bytes, entry->request.bytes);
    ck_assert_uint_eq(request->align, entry->request.align);
    ck_assert_int_eq(request->kind, entry->request.kind);
    ck_assert_str_eq(request->name, entry->name);
    for (uint64_t i = 0; i < FENCE_BYTES; i++)
        assert_many(entry->memory[request->bytes + i] == FENCE_BYTE, "%s was written past its end",
                    entry->name);
    mock->bytes_live -= request->bytes;
    free(memory);
    entry->memory = NULL;
    (void)pthread_mutex_unlock(&mock->lock);
}

// ---- Log, registration, threads ----------------------------------------------------------------

static void on_log(void *ctx, int32_t severity, const char *component, const char *text,
                   uint64_t length)
{
    static const char *const names[] = {
        "DEBUG", "INFO", "WARNING", "ERROR", "HOST_MISBEHAVING", "PLUGIN_MISBEHAVING"};
    struct mock_host *mock = ctx;
    uint64_t room;
    int written;

    ck_assert(severity >= MOXIE_LOG_DEBUG && severity <= MOXIE_LOG_PLUGIN_MISBEHAVING);
    ck_assert_uint_eq(strlen(text), length);
    ck_assert_ptr_null(strchr(text, '\n'));
    (void)pthread_mutex_lock(&mock->lock);
    room = MOCK_LOG_BYTES - mock->log_bytes;
    written = snprintf(mock->log + mock->log_bytes, room, "%s %s: %s\n", names[severity], component,
                       text);
    if (written > 0 && (uint64_t)written < room) mock->log_bytes += (uint64_t)written;
    mock->log_lines++;
    (void)pthread_mutex_unlock(&mock->lock);
}

int mock_logged(struct mock_host *mock, const char *text)
{
    int found;

    (void)pthread_mutex_lock(&mock->lock);
    found = strstr(mock->log, text) != NULL;
    (void)pthread_mutex_unlock(&mock->lock);
    return found;
}

static int32_t on_register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct mock_host *mock = ctx;

    ck_assert_uint_lt(mock->runners_count, MOCK_BACKENDS_MAX);
    mock->runners[mock->runners_count++] = runner;
    return mock->register_answer;
}

static int32_t on_register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct mock_host *mock = ctx;

    ck_assert_uint_lt(mock->dispatchers_count, MOCK_BACKENDS_MAX);
    mock->dispatchers[mock->dispatchers_count++] = dispatcher;
    return mock->register_answer;
}

const moxie_runner_info *mock_runner(const struct mock_host *mock, const char *name)
{
    for (uint64_t i = 0; i < mock->runners_count; i++) {
        if (strcmp(mock->runners[i]->name, name) == 0) return mock->runners[i];
    }
    return NULL;
}

const moxie_dispatcher_info *mock_dispatcher(const struct mock_host *mock, const char *name)
{
    for (uint64_t i = 0; i < mock->dispatchers_count; i++) {
        if (strcmp(mock->dispatchers[i]->name, name) == 0) return mock->dispatchers[i];
    }
    return NULL;
}

static int32_t on_thread_check(void *ctx, int32_t tag)
{
    const struct mock_host *mock = ctx;

    ck_assert(tag == MOXIE_THREAD_INIT || tag == MOXIE_THREAD_INSTANCE_SERIAL);
    return mock->thread_answer;
}

void mock_host_check_threads(struct mock_host *mock, int32_t answer)
{
    mock->thread_answer = answer;
    mock->host.thread_check = on_thread_check;
}

void mock_host_init(struct mock_host *mock)
{
    memset(mock, 0, sizeof *mock);
    ck_assert_int_eq(pthread_mutex_init(&mock->lock, NULL), 0);
    mock->host = (moxie_host){
        .struct_size = sizeof mock->host,
        .abi_version = MOXIE_ABI_VERSION,
        .ctx = mock,
        .name = "mock host",
        .get_i64 = on_get_i64,
        .get_f64 = on_get_f64,
        .get_str = on_get_str,
        .allocate = on_allocate,
        .release = on_release,
        .log = on_log,
        .register_runner = on_register_runner,
        .register_dispatcher = on_register_dispatcher,
    };
    mock->error = (moxie_error){
        .struct_size = sizeof mock->error, .text = mock->text, .text_bytes = sizeof mock->text};
    mock->thread_answer = 1;
    mock_set_i64(mock, "hidden_size", 64);
    mock_set_i64(mock, "intermediate_size", 96);
    mock_set_i64(mock, "num_experts", 8);
    mock_set_i64(mock, "top_k", 2);
}

void mock_host_fini(struct mock_host *mock)
{
    for (uint64_t i = 0; i < MOCK_ALLOCATIONS_MAX; i++)
        ck_assert_msg(mock->allocations[i].memory == NULL, "%s was never released",
                      mock->allocations[i].name);
    ck_assert_uint_eq(mock->bytes_live, 0);
    (void)pthread_mutex_destroy(&mock->lock);
}

// ---- Ranks as threads --------------------------------------------------------------------------

struct mock_group {
    pthread_mutex_t lock;
    pthread_cond_t arrived;
    int32_t ranks, timeout_ms;
    int32_t waiting; // ranks inside the current phase
    uint64_t phase;  // phases completed
    int32_t broken;
    uint64_t bytes; // of the all-gather under way, by the first to arrive
    const void *sent[RANKS_MAX];
};

struct mock_group *mock_group_create(int32_t ranks, int32_t timeout_ms)
{
    struct mock_group *group = calloc(1, sizeof *group);
    pthread_condattr_t attributes;

    ck_assert_ptr_nonnull(group);
    ck_assert(ranks >= 1 && ranks <= RANKS_MAX);
    group->ranks = ranks;
    group->timeout_ms = timeout_ms;
    ck_assert_int_eq(pthread_mutex_init(&group->lock, NULL), 0);
    ck_assert_int_eq(pthread_condattr_init(&attributes), 0);
    ck_assert_int_eq(pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC), 0);
    ck_assert_int_eq(pthread_cond_init(&group->arrived, &attributes), 0);
    (void)pthread_condattr_destroy(&attributes);
    return group;
}

void mock_group_break(struct mock_group *group)
{
    (void)pthread_mutex_lock(&group->lock);
    group->broken = 1;
    (void)pthread_cond_broadcast(&group->arrived);
    (void)pthread_mutex_unlock(&group->lock);
}

void mock_group_destroy(struct mock_group *group)
{
    if (group == NULL) return;
    (void)pthread_cond_destroy(&group->arrived);
    (void)pthread_mutex_destroy(&group->lock);
    free(group);
}

static struct timespec deadline_in(int32_t timeout_ms)
{
    struct timespec deadline;

    (void)clock_gettime(CLOCK_MONOTONIC, &deadline);
    deadline.tv_sec += timeout_ms / 1000;
    deadline.tv_nsec += (long)(timeout_ms % 1000) * 1000000;
    if (deadline.tv_nsec >= 1000000000) {
        deadline.tv_sec++;
        deadline.tv_nsec -= 1000000000;
    }
    return deadline;
}

// Returns 0 once every rank is here. The lock is held on entry and on return.
static int32_t meet(struct mock_group *group)
{
    struct timespec deadline = deadline_in(group->timeout_ms);
    uint64_t phase = group->phase;

    if (group->broken) return -1;
    if (++group->waiting == group->ranks) {
        group->waiting = 0;
        group->phase++;
        (void)pthread_cond_broadcast(&group->arrived);
        return 0;
    }
    while (group->phase == phase && !group->broken) {
        if (pthread_cond_timedwait(&group->arrived, &group->lock, &deadline) == ETIMEDOUT &&
            group->phase == phase)
            group->broken = 1;
    }
    if (group->phase == phase) (void)pthread_cond_broadcast(&group->arrived);
    return group->phase == phase ? -1 : 0;
}

static int32_t on_barrier(void *ctx)
{
    struct mock_host *mock = ctx;
    int32_t answer;

    (void)pthread_mutex_lock(&mock->group->lock);
    answer = meet(mock->group);
    (void)pthread_mutex_unlock(&mock->group->lock);
    return answer;
}

// The senders' buffers are read in place: the second meeting keeps them alive until everyone has
// copied.
static int32_t on_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    struct mock_host *mock = ctx;
    struct mock_group *group = mock->group;
    int32_t answer;

    (void)pthread_mutex_lock(&group->lock);
    if (group->waiting == 0) group->bytes = bytes;
    if (group->bytes != bytes) {
        group->broken = 1;
        (void)pthread_cond_broadcast(&group->arrived);
    }
    group->sent[mock->rank] = send;
    answer = meet(group);
    if (group->broken) answer = -1; // a rank may have left, and its buffer with it
    if (answer != 0) goto out;
    for (int32_t rank = 0; rank < group->ranks; rank++)
        memmove((unsigned char *)recv + (uint64_t)rank * bytes, group->sent[rank], bytes);
    answer = meet(group);
out:
    (void)pthread_mutex_unlock(&group->lock);
    return answer;
}

void mock_host_join(struct mock_host *mock, struct mock_group *group, int32_t rank)
{
    ck_assert(rank >= 0 && rank < group->ranks);
    mock->group = group;
    mock->rank = rank;
    mock->host.all_gather = on_all_gather;
    mock->host.barrier = on_barrier;
    mock_set_ranks(mock, group->ranks);
    mock_set_i64(mock, "ep_rank", rank);
}

struct rank_thread {
    pthread_t thread;
    void (*body)(void *arg, int32_t rank);
    void *arg;
    int32_t rank;
};

static void *rank_main(void *arg)
{
    struct rank_thread *self = arg;

    self->body(self->arg, self->rank);
    return NULL;
}

void mock_ranks_run(int32_t ranks, void (*body)(void *arg, int32_t rank), void *arg)
{
    struct rank_thread threads[RANKS_MAX];

    ck_assert(ranks >= 1 && ranks <= RANKS_MAX);
    for (int32_t rank = 0; rank < ranks; rank++) {
        threads[rank] = (struct rank_thread){.body = body, .arg = arg, .rank = rank};
        // No assertion that holds: it would allocate beside a rank that counts allocations.
        if (pthread_create(&threads[rank].thread, NULL, rank_main, &threads[rank]) != 0)
            ck_abort_msg("rank %d got no thread", rank);
    }
    for (int32_t rank = 0; rank < ranks; rank++) {
        if (pthread_join(threads[rank].thread, NULL) != 0) ck_abort_msg("rank %d is lost", rank);
    }
}
