// Rules of the door: what a host sees before it opens an instance. These load the library by hand,
// because the loader refuses what they look for.

#include "hosts/cli/conform_engine.h"
#include "hosts/cli/fault.h"
#include "hosts/cli/host.h"

#include <dlfcn.h>
#include <string.h>

#define PROBES_MAX 32

struct door {
    void *handle;
    moxie_get_api_v1_fn get_api;
};

static int door_open(struct door *door, struct check *check)
{
    void *symbol = NULL;

    check_at(check, "dlopen");
    door->handle = dlopen(check->plugin, RTLD_NOW | RTLD_LOCAL);
    if (door->handle == NULL) {
        const char *why = dlerror();

        return broken(check, "cannot be loaded: %.500s", why != NULL ? why : "no reason given");
    }
    check_at(check, "dlsym");
    symbol = dlsym(door->handle, "moxie_get_api_v1");
    if (symbol == NULL) return broken(check, "has no symbol moxie_get_api_v1");
    memcpy(&door->get_api, &symbol, sizeof door->get_api);
    return VERDICT_PASS;
}

static void door_close(struct door *door)
{
    if (door->handle != NULL) (void)dlclose(door->handle);
}

// The table that this host's version gets; NULL and a skip when there is none.
static int door_enter(struct door *door, struct check *check, const moxie_api **api)
{
    const moxie_request request = {sizeof request, MOXIE_ABI_VERSION, MOXIE_ABI_VERSION, 0,
                                   HOST_NAME};
    int st = door_open(door, check);

    if (st == VERDICT_FAIL) {
        check->verdict = VERDICT_PASS;
        return skipped(check, "it has no door (rule entry)");
    }
    check_at(check, "moxie_get_api_v1");
    if (door->get_api(&request, api, NULL) == MOXIE_OK && *api != NULL) return VERDICT_PASS;
    return skipped(check, "it does not take the ABI of this command (rule negotiation)");
}

int rule_entry(struct check *check)
{
    const moxie_request request = {sizeof request, MOXIE_ABI_VERSION, MOXIE_ABI_VERSION, 0,
                                   HOST_NAME};
    const moxie_api *first = NULL, *second = NULL;
    struct door door = {0};
    int st = VERDICT_PASS;

    TRY(door_open(&door, check));
    check_at(check, "moxie_get_api_v1, twice");
    if (door.get_api(&request, &first, NULL) != MOXIE_OK) goto out; // rule negotiation
    if (door.get_api(&request, &second, NULL) != MOXIE_OK || first != second)
        TRY(broken(check, "the second call answers differently; it must be repeatable"));
out:
    door_close(&door);
    return st;
}

// A request and what must come of it.
struct offer {
    const char *what;
    uint32_t abi_min, abi_max;
    int32_t wanted;
};

static int negotiate(const struct door *door, const struct offer *offer, struct check *check)
{
    const moxie_request request = {sizeof request, offer->abi_min, offer->abi_max, 0,
                                   "conform-host 7.7 (abc123)"};
    char text[1024 + 16] = ""; // ends in zeros whatever the plugin does
    moxie_error error = {sizeof error, MOXIE_OK, -1, 1024, text};
    const moxie_api *api = NULL;
    int32_t status = MOXIE_OK;
    int st = VERDICT_PASS;

    check_at(check, "%s", offer->what);
    status = door->get_api(&request, &api, &error);
    TRY(expect_status(check, status, offer->wanted, text));
    if (status == MOXIE_OK && api == NULL) TRY(broken(check, "returned OK and no table"));
    if (status == MOXIE_E_VERSION && !text_says(text, error.text_bytes, request.host_build))
        TRY(broken(check, "the refusal does not name the host's build: \"%.300s\"", text));
out:
    return st;
}

int rule_negotiation(struct check *check)
{
    static const struct offer offers[] = {
        {"a host of this version", MOXIE_ABI_VERSION, MOXIE_ABI_VERSION, MOXIE_OK},
        {"a range around this version", MOXIE_ABI(0, 0), MOXIE_ABI(9, 0), MOXIE_OK},
        {"an older host", MOXIE_ABI(0, 0), MOXIE_ABI(0, 0), MOXIE_E_VERSION},
        {"a newer host", MOXIE_ABI(99, 0), MOXIE_ABI(99, 9), MOXIE_E_VERSION},
        {"the highest numbers there are", UINT32_MAX, UINT32_MAX, MOXIE_E_VERSION},
        {"a range the wrong way round", MOXIE_ABI(0, 9), MOXIE_ABI(0, 0), MOXIE_E_INVALID},
    };
    const moxie_request request = {sizeof request, MOXIE_ABI_VERSION, MOXIE_ABI_VERSION, 0, NULL};
    const moxie_api *api = NULL;
    struct door door = {0};
    int st = VERDICT_PASS;

    if (door_open(&door, check) != VERDICT_PASS) {
        check->verdict = VERDICT_PASS;
        TRY(skipped(check, "it has no door (rule entry)"));
    }
    for (size_t i = 0; i < sizeof offers / sizeof offers[0]; i++)
        TRY(negotiate(&door, &offers[i], check));
    check_at(check, "NULLs");
    if (door.get_api(NULL, &api, NULL) != MOXIE_E_INVALID)
        TRY(broken(check, "a request that is NULL is not INVALID"));
    if (door.get_api(&request, NULL, NULL) != MOXIE_E_INVALID)
        TRY(broken(check, "an api that is NULL is not INVALID"));
    if (door.get_api(&request, &api, NULL) != MOXIE_OK)
        TRY(broken(check, "a host_build that is NULL is refused"));
out:
    door_close(&door);
    return st;
}

int rule_version_stamp(struct check *check)
{
    const moxie_api *api = NULL;
    struct door door = {0};
    int st = VERDICT_PASS;

    TRY(door_enter(&door, check, &api));
    check_at(check, "moxie_api.abi_version");
    if (api->abi_version != MOXIE_ABI_VERSION)
        TRY(broken(check, "is %u.%u; the agreed version is %u.%u", api->abi_version >> 16,
                   api->abi_version & 0xffff, MOXIE_VERSION_MAJOR, MOXIE_VERSION_MINOR));
    check_at(check, "moxie_api.build");
    if (api->build == NULL) TRY(broken(check, "is NULL"));
    check_at(check, "moxie_build");
    if (api->build->struct_size < sizeof *api->build)
        TRY(broken(check, "struct_size is %u, at least %zu are needed", api->build->struct_size,
                   sizeof *api->build));
    if (api->build->abi_min > MOXIE_ABI_VERSION || api->build->abi_max < MOXIE_ABI_VERSION)
        TRY(broken(check, "speaks 0x%x to 0x%x, and agreed on 0x%x", api->build->abi_min,
                   api->build->abi_max, MOXIE_ABI_VERSION));
    if (api->build->version == NULL || api->build->source_id == NULL ||
        api->build->compiler == NULL || api->build->cuda == NULL)
        TRY(broken(check, "version, source_id, compiler or cuda is NULL"));
out:
    door_close(&door);
    return st;
}

// ---- Tables ------------------------------------------------------------------------------------

// A slot by its place in its table.
struct slot {
    const char *name;
    size_t offset;
};

#define SLOT(structure, field)                                                                     \
    {                                                                                              \
#structure "." #field, offsetof(structure, field)                                          \
    }

static const struct slot api_slots[] = {
    SLOT(moxie_api, build),    SLOT(moxie_api, layout), SLOT(moxie_api, get_extension),
    SLOT(moxie_api, probe),    SLOT(moxie_api, open),   SLOT(moxie_api, config),
    SLOT(moxie_api, validate), SLOT(moxie_api, plan),   SLOT(moxie_api, forward),
    SLOT(moxie_api, captured), SLOT(moxie_api, stats),  SLOT(moxie_api, suspend),
    SLOT(moxie_api, resume),   SLOT(moxie_api, close),  {NULL, 0},
};
static const struct slot runner_slots[] = {
    SLOT(moxie_runner_api, create),
    SLOT(moxie_runner_api, run),
    SLOT(moxie_runner_api, weights_updated),
    SLOT(moxie_runner_api, destroy),
    {NULL, 0},
};
static const struct slot dispatcher_slots[] = {
    SLOT(moxie_dispatcher_api, create),        SLOT(moxie_dispatcher_api, begin_forward),
    SLOT(moxie_dispatcher_api, dispatch),      SLOT(moxie_dispatcher_api, combine),
    SLOT(moxie_dispatcher_api, dispatch_send), SLOT(moxie_dispatcher_api, dispatch_recv),
    SLOT(moxie_dispatcher_api, combine_send),  SLOT(moxie_dispatcher_api, combine_recv),
    SLOT(moxie_dispatcher_api, poll_error),    SLOT(moxie_dispatcher_api, set_active_ranks),
    SLOT(moxie_dispatcher_api, destroy),       {NULL, 0},
};
static const struct slot info_slots[] = {
    // Alike for runners and dispatchers.
    {"info.name", offsetof(moxie_runner_info, name)},
    {"info.device", offsetof(moxie_runner_info, device)},
    {"info.traits", offsetof(moxie_runner_info, traits)},
    {"info.api", offsetof(moxie_runner_info, api)},
    {NULL, 0},
};

static int check_table(struct check *check, const void *table, const struct slot *slots,
                       size_t bytes)
{
    static const unsigned char null[sizeof(void *)] = {0};
    uint32_t declared = 0;

    if (table == NULL) return broken(check, "is NULL");
    memcpy(&declared, table, sizeof declared);
    if (declared < bytes)
        return broken(check, "struct_size is %u, at least %zu are needed", declared, bytes);
    for (; slots->name != NULL; slots++)
        if (memcmp((const unsigned char *)table + slots->offset, null, sizeof null) == 0)
            return broken(check, "%s is NULL", slots->name);
    return VERDICT_PASS;
}

static int check_traits(struct check *check, const moxie_traits *traits)
{
    if (traits->struct_size < sizeof *traits)
        return broken(check, "traits.struct_size is %u, at least %zu are needed",
                      traits->struct_size, sizeof *traits);
    if (traits->layouts == 0 || traits->id_spaces == 0 || traits->formats == 0)
        return broken(check, "traits name no layout, no id space or no format");
    if (traits->reserved0 != 0) return broken(check, "traits.reserved0 is not 0");
    return VERDICT_PASS;
}

static int check_registered(struct check *check, const struct engine *engine)
{
    int st = VERDICT_PASS;

    for (int i = 0; i < engine->runners_count; i++) {
        check_at(check, "register_runner, call %d", i + 1);
        TRY(check_table(check, engine->runners[i], info_slots, sizeof(moxie_runner_info)));
        check_at(check, "runner %.60s", engine->runners[i]->name);
        TRY(check_table(check, engine->runners[i]->api, runner_slots, sizeof(moxie_runner_api)));
        TRY(check_traits(check, engine->runners[i]->traits));
    }
    for (int i = 0; i < engine->dispatchers_count; i++) {
        check_at(check, "register_dispatcher, call %d", i + 1);
        TRY(check_table(check, engine->dispatchers[i], info_slots, sizeof(moxie_dispatcher_info)));
        check_at(check, "dispatcher %.60s", engine->dispatchers[i]->name);
        TRY(check_table(check, engine->dispatchers[i]->api, dispatcher_slots,
                        sizeof(moxie_dispatcher_api)));
        TRY(check_traits(check, engine->dispatchers[i]->traits));
    }
    check_at(check, "open");
    if (engine->runners_count == 0 || engine->dispatchers_count == 0)
        TRY(broken(check, "registered %d runners and %d dispatchers", engine->runners_count,
                   engine->dispatchers_count));
out:
    return st;
}

int rule_tables(struct check *check)
{
    struct engine engine = {0};
    const moxie_api *api = NULL;
    struct door door = {0};
    int st = VERDICT_PASS;

    TRY(door_enter(&door, check, &api));
    check_at(check, "moxie_api");
    TRY(check_table(check, api, api_slots, sizeof *api));
    TRY(engine_init(&engine, check));
    check_at(check, "open");
    TRY(expect_status(check, engine_try_open(&engine), MOXIE_OK, engine.text));
    TRY(check_registered(check, &engine));
out:
    engine_fini(&engine);
    door_close(&door);
    return st;
}

// ---- Layout ------------------------------------------------------------------------------------

static uint64_t hash_bytes(uint64_t hash, const void *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++)
        hash = (hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

static uint64_t hash_u32(uint64_t hash, uint32_t value)
{
    const unsigned char bytes[4] = {(unsigned char)value, (unsigned char)(value >> 8),
                                    (unsigned char)(value >> 16), (unsigned char)(value >> 24)};

    return hash_bytes(hash, bytes, sizeof bytes);
}

// 64-bit FNV-1a over each row: both names with their NUL, offset and size in little endian.
static uint64_t digest_of(const unsigned char *at, uint64_t count, uint32_t stride)
{
    uint64_t hash = 0xcbf29ce484222325u;

    for (uint64_t i = 0; i < count; i++, at += stride) {
        const moxie_field *row = (const moxie_field *)(const void *)at;

        hash = hash_bytes(hash, row->structure, strlen(row->structure) + 1);
        hash = hash_bytes(hash, row->field, strlen(row->field) + 1);
        hash = hash_u32(hash_u32(hash, row->offset), row->size);
    }
    return hash;
}

int rule_layout_report(struct check *check)
{
    const moxie_api *api = NULL;
    const moxie_field *fields = NULL;
    struct engine engine = {0};
    struct door door = {0};
    uint64_t count = 0, digest = 0;
    uint32_t stride = 0;
    int st = VERDICT_PASS;

    TRY(door_enter(&door, check, &api));
    check_at(check, "layout");
    if (api->layout == NULL) TRY(skipped(check, "there is no slot layout (rule tables)"));
    api->layout(&fields, &count, &stride);
    if (fields == NULL || count == 0 || stride < sizeof *fields)
        TRY(broken(check, "reports %llu rows of stride %u", (unsigned long long)count, stride));
    digest = digest_of((const unsigned char *)fields, count, stride);
    check_at(check, "moxie_build.layout_digest");
    if (api->build == NULL || api->build->layout_digest != digest)
        TRY(broken(check, "is 0x%llx; the rows that layout reports give 0x%llx",
                   (unsigned long long)(api->build != NULL ? api->build->layout_digest : 0),
                   (unsigned long long)digest));
    // The loader compares every field with abi.h as it compiled it.
    check_at(check, "layout");
    engine = (struct engine){.check = check};
    if (moxie_load(check->plugin, HOST_NAME, &engine.library, engine_error(&engine)) ==
            MOXIE_E_VERSION &&
        strstr(engine.text, " bytes at offset ") != NULL)
        TRY(broken(check, "%.600s", engine.text));
    moxie_unload(&engine.library);
out:
    door_close(&door);
    return st;
}

// ---- Probe -------------------------------------------------------------------------------------

// Entries of a host whose struct is longer.
struct long_probe {
    moxie_probe probe;
    uint64_t tail;
};

static int check_probe(struct check *check, const moxie_probe *probe, uint64_t index)
{
    check_at(check, "probe, entry %llu", (unsigned long long)index);
    if (probe->name == NULL || probe->kind == NULL || probe->device == NULL)
        return broken(check, "name, kind or device is NULL");
    if (strcmp(probe->kind, "runner") != 0 && strcmp(probe->kind, "dispatcher") != 0)
        return broken(check, "kind is \"%.40s\"", probe->kind);
    if (memchr(probe->reason, '\0', sizeof probe->reason) == NULL)
        return broken(check, "reason has no end");
    if (probe->reason[0] == '\0') return broken(check, "reason is empty; it is always filled");
    if (probe->score < 0) return broken(check, "score is %d", probe->score);
    return VERDICT_PASS;
}

int rule_probe(struct check *check)
{
    struct long_probe entries[PROBES_MAX] = {{.tail = 0}};
    struct engine engine;
    uint64_t count = 0, again = 0;
    int st = VERDICT_PASS;

    TRY(engine_init(&engine, check));
    check_at(check, "probe without room");
    TRY(expect_status(check, engine.api->probe(NULL, 0, 0, &count, engine_error(&engine)), MOXIE_OK,
                      engine.text));
    if (count == 0 || count > PROBES_MAX)
        TRY(broken(check, "%llu backends", (unsigned long long)count));
    for (int i = 0; i < PROBES_MAX; i++)
        entries[i].probe.struct_size = sizeof entries[i];
    check_at(check, "probe");
    TRY(expect_status(check,
                      engine.api->probe(&entries[0].probe, sizeof entries[0], PROBES_MAX, &again,
                                        engine_error(&engine)),
                      MOXIE_OK, engine.text));
    if (again != count) TRY(broken(check, "counts differently with room than without"));
    for (uint64_t i = 0; i < count; i++) {
        TRY(check_probe(check, &entries[i].probe, i));
        if (entries[i].tail != 0) TRY(broken(check, "wrote past its struct"));
        if (entries[i].probe.struct_size != sizeof entries[i])
            TRY(broken(check, "changed struct_size, which the caller sets"));
    }
    check_at(check, "probe with room for one");
    entries[1].probe = (moxie_probe){.struct_size = sizeof entries[1]};
    TRY(expect_status(
        check,
        engine.api->probe(&entries[0].probe, sizeof entries[0], 1, &again, engine_error(&engine)),
        MOXIE_OK, engine.text));
    if (entries[1].probe.name != NULL) TRY(broken(check, "filled more entries than it was given"));
out:
    engine_fini(&engine);
    return st;
}

int rule_extension_names(struct check *check)
{
    static const char *const unknown[] = {"", "moxie.nothing/1", "moxie.routing/999",
                                          "moxie.routing", "\xff\xfe%s%n"};
    struct engine engine;
    int st = VERDICT_PASS;

    TRY(engine_init(&engine, check));
    for (size_t i = 0; i < sizeof unknown / sizeof unknown[0]; i++) {
        check_at(check, "get_extension(\"%s\")", unknown[i]);
        if (engine.api->get_extension(unknown[i]) != NULL)
            TRY(broken(check, "answers with a table for a name that nobody has"));
    }
out:
    engine_fini(&engine);
    return st;
}
