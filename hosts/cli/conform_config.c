// Rules of the configuration: whatever a host answers, open says yes, validate says why not, and
// plan agrees.

#include "hosts/cli/conform_stage.h"
#include "hosts/cli/fault.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define KEYS_MAX 128

// The keys of the snapshot, copied: they must outlive the instance.
struct keys {
    char key[KEYS_MAX][ENGINE_TEXT_BYTES];
    int32_t type[KEYS_MAX]; // enum setting_type
    int count;
};

static int read_keys(struct engine *engine, struct keys *keys)
{
    static const char *const types[] = {"i64", "f64", "str"};
    moxie_config_entry entry = {.struct_size = sizeof entry};
    int st = VERDICT_PASS;

    *keys = (struct keys){.count = 0};
    TRY(expect_status(engine->check, engine_try_open(engine), MOXIE_OK, engine->text));
    check_at(engine->check, "config");
    for (uint64_t i = 0; engine->api->config(engine->instance, i, &entry) == MOXIE_OK; i++) {
        int type = 0;

        if (i >= KEYS_MAX) TRY(broken(engine->check, "more than %d keys", KEYS_MAX));
        if (entry.key == NULL || entry.type == NULL)
            TRY(broken(engine->check, "entry %d has no key or no type", (int)i));
        while (type < 3 && strcmp(types[type], entry.type) != 0)
            type++;
        if (type == 3)
            TRY(broken(engine->check, "%.60s: type is \"%.20s\"", entry.key, entry.type));
        keys->type[i] = type;
        (void)snprintf(keys->key[i], sizeof keys->key[i], "%s", entry.key);
        keys->count = (int)i + 1;
        entry = (moxie_config_entry){.struct_size = sizeof entry};
    }
    TRY(expect_status(engine->check, engine_close(engine), MOXIE_OK, engine->text));
out:
    return st;
}

static const moxie_reason *reason_at(const moxie_report *report, uint64_t index)
{
    const unsigned char *first = (const unsigned char *)report->reasons;

    return (const moxie_reason *)(const void *)(first + index * report->reason_stride);
}

static int has_reason(const struct engine *engine, const char *key)
{
    for (uint64_t i = 0; i < engine->report->reasons_count; i++)
        if (strcmp(reason_at(engine->report, i)->key, key) == 0) return 1;
    return 0;
}

// Every reason can be read, and plan agrees with validate.
static int check_verdict(struct engine *engine)
{
    struct check *check = engine->check;
    const moxie_report *report = engine->report;
    const moxie_plan *plan = NULL;
    int32_t status = MOXIE_OK;

    if (report == NULL) return broken(check, "validate gave no report");
    if (report->struct_size < sizeof *report)
        return broken(check, "report.struct_size is %u", report->struct_size);
    if (report->reasons_count > 0 &&
        (report->reasons == NULL || report->reason_stride < sizeof(moxie_reason)))
        return broken(check, "the report counts reasons and has none");
    for (uint64_t i = 0; i < report->reasons_count; i++) {
        const moxie_reason *reason = reason_at(report, i);

        if (reason->key == NULL || reason->name == NULL || reason->message == NULL ||
            reason->message[0] == '\0')
            return broken(check, "reason %d has no key, name or message", (int)i);
        if (reason->code <= MOXIE_OK || reason->code > MOXIE_E_INTERNAL)
            return broken(check, "the reason against %.60s has code %d", reason->key, reason->code);
    }
    status = engine->api->plan(engine->instance, &plan, engine_error(engine));
    if (report->reasons_count == 0) return expect_status(check, status, MOXIE_OK, engine->text);
    if (status != MOXIE_E_CONFIG)
        return broken(check, "validate has %d reasons, and plan returned %d (%s), not CONFIG",
                      (int)report->reasons_count, status, status_name(status));
    if (plan == NULL || plan->bounds == NULL || plan->buffers_count != 0)
        return broken(check, "a refused plan has bounds, and no buffers");
    return VERDICT_PASS;
}

// Opens what is set, judges the verdict, and wants a reason against `key` unless it is NULL.
static int refuse(struct engine *engine, const char *key)
{
    int st = VERDICT_PASS;

    TRY(expect_status(engine->check, engine_try_open(engine), MOXIE_OK, engine->text));
    TRY(check_verdict(engine));
    if (key != NULL && !has_reason(engine, key))
        TRY(broken(engine->check, "no reason names %s; there are %d", key,
                   (int)engine->report->reasons_count));
    TRY(expect_status(engine->check, engine_close(engine), MOXIE_OK, engine->text));
out:
    return st;
}

int rule_base_accepted(struct check *check)
{
    struct engine engine;
    struct base base;
    int st = VERDICT_PASS;

    TRY(engine_init(&engine, check));
    TRY(base_find(&engine, &base, 1));
out:
    engine_fini(&engine);
    return st;
}

// ---- Callbacks ---------------------------------------------------------------------------------

int rule_callbacks_required(struct check *check)
{
    static const struct {
        const char *name;
        size_t offset;
    } callbacks[] = {
        {"get_i64", offsetof(moxie_host, get_i64)},
        {"get_f64", offsetof(moxie_host, get_f64)},
        {"get_str", offsetof(moxie_host, get_str)},
        {"register_runner", offsetof(moxie_host, register_runner)},
        {"register_dispatcher", offsetof(moxie_host, register_dispatcher)},
        {"allocate, beside release", offsetof(moxie_host, allocate)},
        {"release, beside allocate", offsetof(moxie_host, release)},
    };
    struct stage stage;
    struct engine *engine = &stage.engine;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (size_t i = 0; i < sizeof callbacks / sizeof callbacks[0]; i++) {
        moxie_host whole = engine->host;

        check_at(check, "open without %s", callbacks[i].name);
        memset((unsigned char *)&engine->host + callbacks[i].offset, 0, sizeof(void *));
        TRY(expect_status(check, engine_try_open(engine), MOXIE_E_INVALID, engine->text));
        engine->host = whole;
    }
    check_at(check, "open with an abi_version that was not agreed");
    engine->host.abi_version++;
    TRY(expect_status(check, engine_try_open(engine), MOXIE_E_VERSION, engine->text));
    engine->host.abi_version--;
    check_at(check, "open, and register_runner answers 5");
    engine->runner_answer = 5;
    if (engine_try_open(engine) == MOXIE_OK) TRY(broken(check, "open goes on"));
    engine->runner_answer = 0;
    check_at(check, "open, and register_dispatcher answers 5");
    engine->dispatcher_answer = 5;
    if (engine_try_open(engine) == MOXIE_OK) TRY(broken(check, "open goes on"));
    engine->dispatcher_answer = 0;
out:
    stage_fini(&stage);
    return st;
}

int rule_callbacks_optional(struct check *check)
{
    struct stage stage;
    moxie_host *host = &stage.engine.host;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    host->allocate = NULL;
    host->release = NULL;
    host->log = NULL;
    host->thread_check = NULL;
    host->name = NULL;
    TRY(stage_start(&stage));
    TRY(stage_compare(&stage));
out:
    stage_fini(&stage);
    return st;
}

// ---- Answers -----------------------------------------------------------------------------------

int rule_config_absent(struct check *check)
{
    static const char *const required[] = {"hidden_size", "intermediate_size", "num_experts",
                                           "top_k"};
    struct stage stage;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (size_t i = 0; i < sizeof required / sizeof required[0]; i++) {
        engine_unset(&stage.engine, required[i]);
        check_at(check, "without %s", required[i]);
        TRY(refuse(&stage.engine, required[i]));
        base_set(&stage.engine, &stage.base);
    }
    stage.engine.settings_count = 0;
    check_at(check, "no key at all");
    TRY(refuse(&stage.engine, NULL));
out:
    stage_fini(&stage);
    return st;
}

int rule_config_wrong_type(struct check *check)
{
    struct stage stage;
    struct keys keys;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(read_keys(&stage.engine, &keys));
    for (int i = 0; i < keys.count; i++) {
        engine_set_code(&stage.engine, keys.key[i], MOXIE_CONFIG_WRONG_TYPE);
        check_at(check, "%s of the wrong type", keys.key[i]);
        TRY(refuse(&stage.engine, keys.key[i]));
        engine_unset(&stage.engine, keys.key[i]);
        base_set(&stage.engine, &stage.base);
    }
out:
    stage_fini(&stage);
    return st;
}

static int try_garbage(struct stage *stage, const char *key, int32_t type)
{
    static const int64_t integers[] = {-1, 0, INT32_MAX, (int64_t)1 << 62, INT64_MAX, INT64_MIN};
    static const double reals[] = {NAN, INFINITY, -INFINITY, 1e308, -0.0, 5e-324};
    static const char *const texts[] = {"", "no such word", "%s%n%s%n", "\x01\x7f\xff",
                                        "auto\nauto"};
    struct engine *engine = &stage->engine;
    int st = VERDICT_PASS;

    for (size_t i = 0; i < sizeof integers / sizeof integers[0]; i++) {
        if (type == SETTING_STR) break;
        engine_set_i64(engine, key, integers[i]);
        check_at(engine->check, "%s = %lld", key, (long long)integers[i]);
        TRY(refuse(engine, NULL));
    }
    for (size_t i = 0; i < sizeof reals / sizeof reals[0]; i++) {
        if (type != SETTING_F64) break;
        engine_set_f64(engine, key, reals[i]);
        check_at(engine->check, "%s = %g", key, reals[i]);
        TRY(refuse(engine, NULL));
    }
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        if (type != SETTING_STR) break;
        engine_set_str(engine, key, texts[i]);
        check_at(engine->check, "%s = \"%s\"", key, texts[i]);
        TRY(refuse(engine, NULL));
    }
    if (type == SETTING_STR) {
        engine_set_str(engine, key, "short");
        engine->settings[engine->settings_count - 1].length = (uint64_t)1 << 40;
        check_at(engine->check, "%s of 2^40 bytes", key);
        TRY(refuse(engine, NULL));
    }
    engine_set_code(engine, key, 77);
    check_at(engine->check, "%s, whose getter answers 77", key);
    TRY(refuse(engine, NULL));
out:
    return st;
}

int rule_config_garbage(struct check *check)
{
    struct stage stage;
    struct keys keys;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(read_keys(&stage.engine, &keys));
    for (int i = 0; i < keys.count; i++) {
        // Last in the table, whatever it was before.
        engine_unset(&stage.engine, keys.key[i]);
        TRY(try_garbage(&stage, keys.key[i], keys.type[i]));
        engine_unset(&stage.engine, keys.key[i]);
        base_set(&stage.engine, &stage.base);
    }
    check_at(check, "open");
    if (stage.engine.allocations != 0)
        TRY(broken(check, "allocated memory of the host, %d times; only create does",
                   (int)stage.engine.allocations));
out:
    stage_fini(&stage);
    return st;
}

int rule_config_snapshot(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    const moxie_step step = {.struct_size = sizeof step, .tokens = 1};
    moxie_config_entry entry = {.struct_size = sizeof entry};
    uint64_t questions = 0;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    check_at(check, "open");
    TRY(expect_status(check, engine_open_alone(engine), MOXIE_OK, engine->text));
    questions = engine->questions;
    check_at(check, "config");
    for (uint64_t i = 0; engine->api->config(engine->instance, i, &entry) == MOXIE_OK; i++) {
        int wanted = 0;

        for (int j = 0; entry.key != NULL && j < engine->settings_count; j++)
            wanted |= strcmp(engine->settings[j].key, entry.key) == 0;
        if (entry.key == NULL || entry.value == NULL || entry.help == NULL)
            TRY(broken(check, "entry %d has no key, value or help", (int)i));
        if (entry.found != wanted)
            TRY(broken(check, "%.60s: found is %d, and the host %s it", entry.key, entry.found,
                       wanted ? "set" : "did not set"));
        if (strcmp(entry.value, "auto") == 0)
            TRY(broken(check, "%.60s: auto is not resolved", entry.key));
        entry = (moxie_config_entry){.struct_size = sizeof entry};
    }
    check_at(check, "config past its end");
    TRY(expect_status(check, engine->api->config(engine->instance, UINT64_MAX, &entry),
                      MOXIE_E_INVALID, ""));
    (void)engine->api->validate(engine->instance, &engine->report, NULL);
    (void)engine->api->plan(engine->instance, &engine->plan, NULL);
    TRY(layer_make(&stage.layer, &stage.layer_spec, check));
    TRY(engine_choose(engine));
    TRY(engine_create(engine, &stage.layer, 1));
    TRY(expect_status(check, engine_begin(engine, &step), MOXIE_OK, engine->text));
    check_at(check, "validate to begin_forward");
    if (engine->questions != questions)
        TRY(broken(check, "the configuration was read again; open reads it once"));
out:
    stage_fini(&stage);
    return st;
}

int rule_validate_all_reasons(struct check *check)
{
    static const char *const keys[] = {"hidden_size", "top_k", "num_layers", "cpu_threads"};
    struct stage stage;
    struct engine *engine = &stage.engine;
    const moxie_report *again = NULL;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        engine_set_i64(engine, keys[i], -3);
    engine_set_str(engine, "activation", "nothing");
    check_at(check, "five keys that cannot work");
    TRY(expect_status(check, engine_try_open(engine), MOXIE_OK, engine->text));
    TRY(check_verdict(engine));
    for (size_t i = 0; i < sizeof keys / sizeof keys[0]; i++)
        if (!has_reason(engine, keys[i]))
            TRY(broken(check, "no reason names %s; all are wanted at once", keys[i]));
    if (!has_reason(engine, "activation"))
        TRY(broken(check, "no reason names activation; all are wanted at once"));
    TRY(expect_status(check, engine->api->validate(engine->instance, &again, engine_error(engine)),
                      MOXIE_OK, engine->text));
    if (again == NULL || again->reasons_count != engine->report->reasons_count)
        TRY(broken(check, "a second validate counts differently"));
out:
    stage_fini(&stage);
    return st;
}

int rule_plan_agrees(struct check *check)
{
    struct stage stage;
    struct engine *engine = &stage.engine;
    moxie_runner *runner = NULL;
    moxie_dispatcher *dispatcher = NULL;
    int st = VERDICT_PASS;

    TRY(stage_init(&stage, check));
    TRY(layer_make(&stage.layer, &stage.layer_spec, check));
    TRY(engine_open(engine));
    TRY(check_verdict(engine));
    TRY(expect_status(check, engine_close(engine), MOXIE_OK, engine->text));
    engine_set_i64(engine, "top_k", 33);
    check_at(check, "a refused configuration");
    TRY(expect_status(check, engine_try_open(engine), MOXIE_OK, engine->text));
    TRY(check_verdict(engine));
    if (engine_accepted(engine)) TRY(broken(check, "top_k 33 is accepted"));
    if (engine->runners_count == 0 || engine->dispatchers_count == 0) goto out; // rule tables
    layer_view_of(&stage.layer, 0, BASE_EXPERTS, &engine->views[0]);
    check_at(check, "runner.create of a refused configuration");
    TRY(expect_status(check,
                      engine->runners[0]->api->create(engine->instance, 0,
                                                      &engine->views[0].weights, &runner,
                                                      engine_error(engine)),
                      MOXIE_E_CONFIG, engine->text));
    check_at(check, "dispatcher.create of a refused configuration");
    TRY(expect_status(
        check,
        engine->dispatchers[0]->api->create(engine->instance, &dispatcher, engine_error(engine)),
        MOXIE_E_CONFIG, engine->text));
out:
    stage_fini(&stage);
    return st;
}
