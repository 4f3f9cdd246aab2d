// The engine that a rule plays.

#include "hosts/cli/conform_engine.h"

#include "hosts/cli/conform_memory.h"
#include "hosts/cli/fault.h"
#include "hosts/cli/host.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

// ---- Configuration -----------------------------------------------------------------------------

static struct setting *setting_of(struct engine *engine, const char *key)
{
    for (int i = 0; i < engine->settings_count; i++)
        if (strcmp(engine->settings[i].key, key) == 0) return &engine->settings[i];
    return NULL;
}

static struct setting *setting_new(struct engine *engine, const char *key, enum setting_type type)
{
    struct setting *setting = setting_of(engine, key);

    if (setting == NULL) {
        // More settings than the table holds replace the last one: rules set far fewer.
        int last = ENGINE_SETTINGS_MAX - 1;

        setting =
            &engine->settings[engine->settings_count < last ? engine->settings_count++ : last];
    }
    *setting = (struct setting){.type = (int32_t)type};
    (void)snprintf(setting->key, sizeof setting->key, "%s", key);
    return setting;
}

void engine_set_i64(struct engine *engine, const char *key, int64_t value)
{
    setting_new(engine, key, SETTING_I64)->i64 = value;
}

void engine_set_f64(struct engine *engine, const char *key, double value)
{
    setting_new(engine, key, SETTING_F64)->f64 = value;
}

void engine_set_str(struct engine *engine, const char *key, const char *value)
{
    struct setting *setting = setting_new(engine, key, SETTING_STR);

    (void)snprintf(setting->text, sizeof setting->text, "%s", value);
    setting->length = strlen(value);
}

void engine_set_code(struct engine *engine, const char *key, int32_t code)
{
    setting_new(engine, key, SETTING_I64)->code = code;
}

void engine_unset(struct engine *engine, const char *key)
{
    struct setting *setting = setting_of(engine, key);

    if (setting != NULL) *setting = engine->settings[--engine->settings_count];
}

// The setting when it can answer a getter of `type`; else *code is the answer.
static const struct setting *answer(struct engine *engine, const char *key, enum setting_type type,
                                    int32_t *code)
{
    const struct setting *setting = setting_of(engine, key);
    int fits = 0;

    engine->questions++;
    *code = MOXIE_CONFIG_ABSENT;
    if (setting == NULL) return NULL;
    *code = setting->code;
    if (setting->code != MOXIE_CONFIG_FOUND) return NULL;
    fits = setting->type == (int32_t)type || (type == SETTING_F64 && setting->type == SETTING_I64);
    *code = fits ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE;
    return fits ? setting : NULL;
}

static int32_t get_i64(void *ctx, const char *key, int64_t *value)
{
    int32_t code = 0;
    const struct setting *setting = answer(ctx, key, SETTING_I64, &code);

    if (setting != NULL) *value = setting->i64;
    return code;
}

static int32_t get_f64(void *ctx, const char *key, double *value)
{
    int32_t code = 0;
    const struct setting *setting = answer(ctx, key, SETTING_F64, &code);

    if (setting == NULL) return code;
    *value = setting->type == SETTING_I64 ? (double)setting->i64 : setting->f64;
    return code;
}

static int32_t get_str(void *ctx, const char *key, char *text, uint64_t capacity, uint64_t *length)
{
    int32_t code = 0;
    const struct setting *setting = answer(ctx, key, SETTING_STR, &code);

    if (setting == NULL) return code;
    *length = setting->length;
    if (capacity > 0) (void)snprintf(text, capacity, "%s", setting->text);
    return code;
}

// ---- Log, registration, threads ----------------------------------------------------------------

static void log_line(void *ctx, int32_t severity, const char *component, const char *text,
                     uint64_t length)
{
    struct engine *engine = ctx;
    const char *wrong = NULL;

    if (severity < MOXIE_LOG_DEBUG || severity > MOXIE_LOG_PLUGIN_MISBEHAVING)
        wrong = "its severity is no MOXIE_LOG_*";
    else if (component == NULL || component[0] == '\0')
        wrong = "it has no component";
    else if (text == NULL || memchr(text, '\n', length) != NULL)
        wrong = "its text holds a newline";
    else if (strnlen(text, length + 1) != length)
        wrong = "its length is not that of its text";
    (void)pthread_mutex_lock(&engine->lock);
    engine->log_lines++;
    engine->host_misbehaving += severity == MOXIE_LOG_HOST_MISBEHAVING;
    if (engine->closed) wrong = "it came after close";
    if (wrong != NULL && engine->log_note[0] == '\0')
        (void)snprintf(engine->log_note, sizeof engine->log_note, "line %" PRIu64 ": %s",
                       engine->log_lines, wrong);
    (void)pthread_mutex_unlock(&engine->lock);
}

static int32_t register_runner(void *ctx, const moxie_runner_info *runner)
{
    struct engine *engine = ctx;

    if (engine->runners_count < ENGINE_BACKENDS_MAX)
        engine->runners[engine->runners_count++] = runner;
    return engine->runner_answer;
}

static int32_t register_dispatcher(void *ctx, const moxie_dispatcher_info *dispatcher)
{
    struct engine *engine = ctx;

    if (engine->dispatchers_count < ENGINE_BACKENDS_MAX)
        engine->dispatchers[engine->dispatchers_count++] = dispatcher;
    return engine->dispatcher_answer;
}

static int32_t thread_check(void *ctx, int32_t tag)
{
    const struct engine *engine = ctx;

    (void)tag;
    return engine->thread_answer;
}

// ---- Life --------------------------------------------------------------------------------------

moxie_error *engine_error(struct engine *engine)
{
    memset(engine->text, 0, sizeof engine->text);
    engine->error = (moxie_error){.struct_size = sizeof engine->error,
                                  .rank = -1,
                                  .text_bytes = ENGINE_ERROR_BYTES,
                                  .text = engine->text};
    return &engine->error;
}

int engine_init(struct engine *engine, struct check *check)
{
    *engine = (struct engine){.check = check, .thread_answer = 1};
    (void)pthread_mutex_init(&engine->lock, NULL);
    check_at(check, "load");
    if (moxie_load(check->plugin, HOST_NAME, &engine->library, engine_error(engine)) != MOXIE_OK)
        return skipped(check, "no host can load it (rules entry to layout-report): %.300s",
                       engine->text);
    engine->api = engine->library.api;
    engine->host = (moxie_host){
        .struct_size = sizeof engine->host,
        .abi_version = engine->api->abi_version,
        .ctx = engine,
        .name = HOST_NAME,
        .get_i64 = get_i64,
        .get_f64 = get_f64,
        .get_str = get_str,
        .allocate = memory_allocate,
        .release = memory_release,
        .log = log_line,
        .register_runner = register_runner,
        .register_dispatcher = register_dispatcher,
        .thread_check = thread_check,
    };
    return VERDICT_PASS;
}

void engine_fini(struct engine *engine)
{
    if (engine->check == NULL) return;
    if (engine->api != NULL) {
        engine->thread_answer = 1;
        engine_destroy(engine);
        (void)engine_close(engine);
        moxie_unload(&engine->library);
    }
    memory_drop(engine);
    (void)pthread_mutex_destroy(&engine->lock);
    *engine = (struct engine){0};
}

int32_t engine_open_alone(struct engine *engine)
{
    engine->runners_count = engine->dispatchers_count = 0;
    engine->closed = 0;
    return engine->api->open(&engine->host, &engine->instance, engine_error(engine));
}

int32_t engine_try_open(struct engine *engine)
{
    int32_t status = engine_open_alone(engine);

    if (status != MOXIE_OK) return status;
    (void)engine->api->validate(engine->instance, &engine->report, NULL);
    (void)engine->api->plan(engine->instance, &engine->plan, NULL);
    return status;
}

int engine_accepted(const struct engine *engine)
{
    return engine->report != NULL && engine->report->reasons_count == 0 && engine->plan != NULL &&
           engine->plan->bounds != NULL;
}

const char *engine_reason(const struct engine *engine, char *text, uint64_t bytes)
{
    const moxie_reason *reason = engine->report != NULL ? engine->report->reasons : NULL;

    text[0] = '\0';
    if (reason != NULL && engine->report->reasons_count > 0)
        (void)snprintf(text, bytes, "%s: %s", reason->key != NULL ? reason->key : "(no key)",
                       reason->message != NULL ? reason->message : "(no message)");
    return text;
}

int engine_open(struct engine *engine)
{
    struct check *check = engine->check;
    char text[400];
    int32_t status = MOXIE_OK;

    check_at(check, "open");
    status = engine_try_open(engine);
    if (status != MOXIE_OK) return expect_status(check, status, MOXIE_OK, engine->text);
    if (!engine_accepted(engine))
        return broken(check, "the configuration is refused: %s",
                      engine_reason(engine, text, sizeof text));
    return engine_choose(engine);
}

const char *engine_config(const struct engine *engine, const char *key)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};

    for (uint64_t i = 0; engine->api->config(engine->instance, i, &entry) == MOXIE_OK; i++) {
        if (entry.key != NULL && entry.value != NULL && strcmp(entry.key, key) == 0)
            return entry.value;
        entry = (moxie_config_entry){.struct_size = sizeof entry};
    }
    return "";
}

const moxie_runner_info *engine_runner(const struct engine *engine, const char *name)
{
    for (int i = 0; i < engine->runners_count; i++)
        if (strcmp(engine->runners[i]->name, name) == 0) return engine->runners[i];
    return NULL;
}

const moxie_dispatcher_info *engine_dispatcher(const struct engine *engine, const char *name)
{
    for (int i = 0; i < engine->dispatchers_count; i++)
        if (strcmp(engine->dispatchers[i]->name, name) == 0) return engine->dispatchers[i];
    return NULL;
}

int engine_choose(struct engine *engine)
{
    struct check *check = engine->check;
    const char *runner = engine_config(engine, "runner");
    const char *dispatcher = engine_config(engine, "dispatcher");

    for (int i = 0; i < engine->runners_count; i++)
        if (moxie_verify_runner(engine->runners[i], engine_error(engine)) != MOXIE_OK)
            return skipped(check, "no host can use its tables (rule tables): %.300s", engine->text);
    for (int i = 0; i < engine->dispatchers_count; i++)
        if (moxie_verify_dispatcher(engine->dispatchers[i], engine_error(engine)) != MOXIE_OK)
            return skipped(check, "no host can use its tables (rule tables): %.300s", engine->text);
    engine->runner_info = engine_runner(engine, runner);
    engine->dispatcher_info = engine_dispatcher(engine, dispatcher);
    if (engine->runner_info != NULL && engine->dispatcher_info != NULL) return VERDICT_PASS;
    return broken(check,
                  "accepted, with runner \"%.60s\" and dispatcher \"%.60s\" in its snapshot, which "
                  "it did not register",
                  runner, dispatcher);
}

int engine_create_runner(struct engine *engine, const struct layer *layer, int index)
{
    const moxie_bounds *bounds = engine->plan->bounds;
    struct layer_view *view = &engine->views[index];

    layer_view_of(layer, bounds->expert_first, bounds->experts_local, view);
    check_at(engine->check, "runner.create of layer %d", index);
    return expect_status(engine->check,
                         engine->runner_info->api->create(engine->instance, index, &view->weights,
                                                          &engine->runners_made[index],
                                                          engine_error(engine)),
                         MOXIE_OK, engine->text);
}

int engine_create_dispatcher(struct engine *engine)
{
    check_at(engine->check, "dispatcher.create");
    return expect_status(engine->check,
                         engine->dispatcher_info->api->create(engine->instance, &engine->dispatcher,
                                                              engine_error(engine)),
                         MOXIE_OK, engine->text);
}

int engine_create(struct engine *engine, const struct layer *layer, int layers)
{
    int st = VERDICT_PASS;

    for (int i = 0; i < layers; i++)
        TRY(engine_create_runner(engine, layer, i));
    TRY(engine_create_dispatcher(engine));
out:
    return st;
}

void engine_destroy(struct engine *engine)
{
    if (engine->dispatcher != NULL) engine->dispatcher_info->api->destroy(engine->dispatcher);
    engine->dispatcher = NULL;
    for (int i = 0; i < ENGINE_LAYERS_MAX; i++) {
        if (engine->runners_made[i] != NULL)
            engine->runner_info->api->destroy(engine->runners_made[i]);
        engine->runners_made[i] = NULL;
    }
}

int32_t engine_close(struct engine *engine)
{
    int32_t status = MOXIE_OK;

    if (engine->instance == NULL) return MOXIE_OK;
    status = engine->api->close(engine->instance, engine_error(engine));
    if (status != MOXIE_OK) return status;
    engine->instance = NULL;
    engine->report = NULL;
    engine->plan = NULL;
    engine->closed = 1;
    return MOXIE_OK;
}

int32_t engine_begin(struct engine *engine, const moxie_step *step)
{
    check_at(engine->check, "begin_forward");
    return engine->dispatcher_info->api->begin_forward(engine->dispatcher, step,
                                                       engine_error(engine));
}

int32_t engine_run(struct engine *engine, struct tokens *tokens)
{
    check_at(engine->check, "forward of %lld tokens", (long long)tokens->spec.count);
    return engine->api->forward(engine->dispatcher, engine->runners_made[tokens->batch.layer],
                                &tokens->batch, engine_error(engine));
}

int engine_forward(struct engine *engine, struct tokens *tokens)
{
    const moxie_step step = {
        .struct_size = sizeof step, .slot = tokens->batch.slot, .tokens = tokens->spec.count};
    int st = VERDICT_PASS;

    TRY(expect_status(engine->check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    TRY(expect_status(engine->check, engine_run(engine, tokens), MOXIE_OK, engine->text));
out:
    return st;
}

void engine_print_plan(const struct engine *engine, char *text, uint64_t bytes)
{
    const moxie_plan *plan = engine->plan;
    const unsigned char *at = (const unsigned char *)plan->buffers;
    uint64_t used = (uint64_t)snprintf(
        text, bytes,
        "device %" PRIu64 " symmetric %" PRIu64 " pinned %" PRIu64 " host %" PRIu64 "\n",
        plan->device_bytes, plan->symmetric_bytes, plan->pinned_bytes, plan->host_bytes);

    for (uint64_t i = 0; i < plan->buffers_count && used < bytes; i++, at += plan->buffer_stride) {
        const moxie_buffer *buffer = (const moxie_buffer *)(const void *)at;

        used += (uint64_t)snprintf(
            text + used, bytes - used,
            "%s kind %d bytes %" PRIu64 " mapped %" PRIu64 " align %" PRIu64 "\n", buffer->name,
            buffer->kind, buffer->bytes, buffer->bytes_mapped, buffer->align);
    }
}
