// The engine's side of the contract.

#include "hosts/cli/host.h"

#include "hosts/cli/json_file.h"

#include <stdio.h>
#include <string.h>

#define KEY_BYTES_MAX           64
#define LOG_BYTES_MAX           4096
#define SUGGESTION_DISTANCE_MAX 4

static int same(const char *a, const char *b)
{
    return strcmp(a, b) == 0;
}

// Looks a key up and remembers that it was asked for.
static const json_t *look_up(void *ctx, const char *key)
{
    struct host *host = ctx;

    (void)json_object_set_new(host->keys_asked, key, json_true());
    return json_object_get(host->config, key);
}

static int32_t wrong_type(void *ctx, const char *key, const json_t *found)
{
    struct host *host = ctx;
    char text[JSON_EXCERPT_BYTES];

    (void)json_object_set_new(host->keys_asked, key, json_string(json_excerpt(found, text)));
    return MOXIE_CONFIG_WRONG_TYPE;
}

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    const json_t *found = look_up(ctx, key);

    if (found == NULL) return MOXIE_CONFIG_ABSENT;
    if (!json_is_integer(found)) return wrong_type(ctx, key, found);
    *value = json_integer_value(found);
    return MOXIE_CONFIG_FOUND;
}

static int32_t get_f64(void *ctx, const char *key, double *value)
{
    const json_t *found = look_up(ctx, key);

    if (found == NULL) return MOXIE_CONFIG_ABSENT;
    if (!json_is_number(found)) return wrong_type(ctx, key, found);
    *value = json_number_value(found);
    return MOXIE_CONFIG_FOUND;
}

static int32_t get_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                       uint64_t *length)
{
    const json_t *found = look_up(ctx, key);
    uint64_t copied = 0;

    if (found == NULL) return MOXIE_CONFIG_ABSENT;
    if (!json_is_string(found)) return wrong_type(ctx, key, found);
    *length = json_string_length(found);
    if (capacity == 0) return MOXIE_CONFIG_FOUND;
    copied = *length < capacity ? *length : capacity - 1;
    memcpy(buffer, json_string_value(found), copied);
    buffer[copied] = '\0';
    return MOXIE_CONFIG_FOUND;
}

static int32_t allocate(void *ctx, const moxie_allocation *request, void **memory)
{
    struct host *host = ctx;
    struct fault fault;
    int st = host->device != NULL ? device_take(host->device, request, memory, &fault)
                                  : device_cpu.allocate(NULL, request, memory, &fault);

    if (st == EXIT_OK) return 0;
    // The library says which buffer failed, and cannot say why.
    (void)fprintf(stderr, "%s: %s\n", host->command, fault.text);
    return 1;
}

static void release(void *ctx, const moxie_allocation *request, void *memory)
{
    struct host *host = ctx;
    struct fault fault;

    if (host->device != NULL)
        device_drop(host->device, request, memory);
    else
        (void)device_cpu.release(NULL, request, memory, &fault);
}

static void log_line(void *ctx, int32_t severity, const char *component, const char *text,
                     uint64_t length)
{
    static const char *const names[] = {
        "debug", "info", "warning", "error", "the host misbehaves", "the library misbehaves",
    };
    const struct host *host = ctx;
    int known = severity >= 0 && (size_t)severity < sizeof names / sizeof names[0];
    char line[LOG_BYTES_MAX + 1];

    if (severity < host->log_from) return;
    if (host->verdict_apart && severity == MOXIE_LOG_ERROR && same(component, "config")) return;
    (void)snprintf(line, sizeof line, "%.*s",
                   (int)(length < LOG_BYTES_MAX ? length : LOG_BYTES_MAX), text);
    make_printable(line);
    (void)fprintf(stderr, "%s: %s: %s: %s\n", host->command, known ? names[severity] : "log",
                  component, line);
}

static int32_t nobody_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    (void)ctx;
    (void)send;
    (void)recv;
    (void)bytes;
    return 1;
}

static int32_t nobody_barrier(void *ctx)
{
    (void)ctx;
    return 1;
}

static int32_t all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    const struct host *host = ctx;

    return host->bootstrap.all_gather(host->bootstrap.ctx, send, recv, bytes);
}

static int32_t barrier(void *ctx)
{
    const struct host *host = ctx;

    return host->bootstrap.barrier(host->bootstrap.ctx);
}

static int32_t register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct host *host = ctx;

    if (host->runners_count == HOST_BACKENDS_MAX) return 1;
    host->runners[host->runners_count++] = runner;
    return 0;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct host *host = ctx;

    if (host->dispatchers_count == HOST_BACKENDS_MAX) return 1;
    host->dispatchers[host->dispatchers_count++] = dispatcher;
    return 0;
}

int host_init(struct host *host, json_t *config, const char *command,
              const struct host_bootstrap *bootstrap, struct fault *fault)
{
    static const struct host_bootstrap nobody = {NULL, nobody_all_gather, nobody_barrier};

    *host = (struct host){
        .config = config,
        .keys_asked = json_object(),
        .command = command,
        .bootstrap = bootstrap != NULL ? *bootstrap : nobody,
        .log_from = MOXIE_LOG_WARNING,
    };
    if (host->keys_asked == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    return EXIT_OK;
}

void host_fini(struct host *host)
{
    json_decref(host->keys_asked);
    *host = (struct host){0};
}

moxie_host host_table(struct host *host, uint32_t abi_version)
{
    return (moxie_host){
        .struct_size = sizeof(moxie_host),
        .abi_version = abi_version,
        .ctx = host,
        .name = HOST_NAME,
        .get_i64 = get_i64,
        .get_f64 = get_f64,
        .get_str = get_str,
        .allocate = allocate,
        .release = release,
        .log = log_line,
        .all_gather = all_gather,
        .barrier = barrier,
        .register_runner = register_runner,
        .register_dispatcher = register_dispatcher,
    };
}

const moxie_runner_info *host_runner(const struct host *host, const char *name, const char *device)
{
    for (uint32_t i = 0; i < host->runners_count; i++) {
        const moxie_runner_info *runner = host->runners[i];

        if (same(runner->name, name) && (same(device, "") || same(device, runner->device)))
            return runner;
    }
    return NULL;
}

const moxie_dispatcher_info *host_dispatcher(const struct host *host, const char *name,
                                             const char *device)
{
    for (uint32_t i = 0; i < host->dispatchers_count; i++) {
        const moxie_dispatcher_info *dispatcher = host->dispatchers[i];

        if (same(dispatcher->name, name) && (same(device, "") || same(device, dispatcher->device)))
            return dispatcher;
    }
    return NULL;
}

static unsigned least(unsigned a, unsigned b, unsigned c)
{
    unsigned least_of_two = a < b ? a : b;

    return least_of_two < c ? least_of_two : c;
}

// Insertions, deletions and replacements that turn one word into the other.
static unsigned edit_distance(const char *from, const char *to)
{
    unsigned row[KEY_BYTES_MAX + 1];
    size_t from_length = strlen(from);
    size_t to_length = strlen(to);

    if (from_length > KEY_BYTES_MAX || to_length > KEY_BYTES_MAX) return KEY_BYTES_MAX;
    for (unsigned j = 0; j <= to_length; j++)
        row[j] = j;
    for (size_t i = 1; i <= from_length; i++) {
        unsigned diagonal = row[0];

        row[0] = (unsigned)i;
        for (size_t j = 1; j <= to_length; j++) {
            unsigned replaced = diagonal + (from[i - 1] != to[j - 1]);

            diagonal = row[j];
            row[j] = least(replaced, row[j] + 1, row[j - 1] + 1);
        }
    }
    return row[to_length];
}

const char *host_wrong_type(const struct host *host, const char *key)
{
    return json_string_value(json_object_get(host->keys_asked, key));
}

static const char *nearest_key(json_t *keys_asked, const char *key)
{
    const char *candidate = NULL;
    const char *best = NULL;
    json_t *value = NULL;
    unsigned best_distance = SUGGESTION_DISTANCE_MAX + 1;

    json_object_foreach(keys_asked, candidate, value)
    {
        unsigned distance = edit_distance(key, candidate);

        if (distance < best_distance && distance < strlen(candidate) / 2) {
            best = candidate;
            best_distance = distance;
        }
    }
    return best;
}

json_t *host_unknown_keys(const struct host *host)
{
    json_t *warnings = json_array();
    const char *key = NULL;
    json_t *value = NULL;

    json_object_foreach(host->config, key, value)
    {
        const char *nearest = NULL;
        json_t *message = NULL;

        if (json_object_get(host->keys_asked, key) != NULL) continue;
        nearest = nearest_key(host->keys_asked, key);
        message = nearest != NULL
                      ? json_sprintf("no such key; did you mean %s? It is ignored", nearest)
                      : json_sprintf("no such key; it is ignored. `moxie info --keys` lists all");
        if (json_array_append_new(warnings,
                                  json_pack("{s:s, s:o}", "key", key, "message", message)) != 0) {
            json_decref(warnings);
            return NULL;
        }
    }
    return warnings;
}
