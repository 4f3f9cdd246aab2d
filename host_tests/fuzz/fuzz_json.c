// hosts/cli/json_file.c and host.c: a file of any bytes is refused with its place, or is the
// configuration of a host on which the library itself opens, judges and plans.

#include "hosts/cli/host.h"
#include "hosts/cli/json_file.h"

#include "host_tests/fuzz/files.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TEXT_BYTES 8192

static const moxie_api *api;

// ---- Files -------------------------------------------------------------------------------------

struct text {
    char bytes[TEXT_BYTES];
    size_t used;
};

static void put(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct text *text, const char *format, ...)
{
    size_t left = sizeof text->bytes - text->used;
    va_list args;
    int length;

    va_start(args, format);
    length = vsnprintf(text->bytes + text->used, left, format, args);
    va_end(args);
    if (length > 0 && (size_t)length < left) text->used += (size_t)length;
}

// A string of any characters, escaped where JSON wants it.
static void put_string(struct text *text, struct fuzz_input *input)
{
    uint32_t length = fuzz_below(input, 80);

    put(text, "\"");
    for (uint32_t i = 0; i < length; i++)
        put(text, "\\u%04x", fuzz_u8(input) & 0x7f);
    put(text, "\"");
}

static void put_value(struct text *text, struct fuzz_input *input)
{
    static const char *const words[] = {"cpu",  "sm_90",     "auto", "local",        "alltoall",
                                        "none", "allgather", "silu", "fp8_block128", "nvfp4",
                                        "f32",  "moxie_cpu", "relu2"};
    uint64_t bits;
    double real;

    switch (fuzz_below(input, 6)) {
    case 0:
    case 1:
        put(text, "%lld", (long long)fuzz_i64(input));
        break;
    case 2:
        put(text, "\"%s\"", words[fuzz_below(input, sizeof words / sizeof words[0])]);
        break;
    case 3:
        bits = fuzz_u64(input);
        memcpy(&real, &bits, sizeof real);
        put(text, "%.17g", isfinite(real) ? real : 1e300);
        break;
    case 4:
        put_string(text, input);
        break;
    default:
        put(text, "%s", (const char *const[]){"true", "null", "[1]", "{}"}[fuzz_below(input, 4)]);
        break;
    }
}

// One of the library's keys, with a wrong letter now and then.
static void put_key(struct text *text, struct fuzz_input *input, const moxie_instance *instance)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};
    uint8_t which = fuzz_u8(input), letter;
    size_t at = text->used + 1;

    if (api->config(instance, which & 0x3f, &entry) != MOXIE_OK) entry.key = "";
    put(text, "\"%s\":", entry.key);
    if ((which & 0xc0) != 0xc0) return;
    letter = fuzz_u8(input);
    at += letter % (strlen(entry.key) + 1);
    if (text->bytes[at] != '"') text->bytes[at] = (char)('a' + letter % 26);
}

static void build(struct text *text, struct fuzz_input *input, const moxie_instance *instance)
{
    put(text, "{");
    while (input->left > 0) {
        put_key(text, input, instance);
        put_value(text, input);
        put(text, input->left > 0 ? "," : "}");
    }
    if (text->bytes[text->used - 1] != '}') put(text, "}");
}

// ---- Properties --------------------------------------------------------------------------------

// What a getter may say of a value, by the contract: a type is never converted, but an integer is a
// number.
static void check_getters(const moxie_host *host, const char *key, const json_t *value)
{
    int64_t i64 = 0;
    double f64 = 0;
    uint64_t length = 0;
    char text[16];

    PROPERTY(host->get_i64(host->ctx, key, &i64) ==
             (json_is_integer(value) ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE));
    PROPERTY(!json_is_integer(value) || i64 == json_integer_value(value));
    PROPERTY(host->get_f64(host->ctx, key, &f64) ==
             (json_is_number(value) ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE));
    PROPERTY(!json_is_number(value) || isfinite(f64));
    PROPERTY(host->get_str(host->ctx, key, text, sizeof text, &length) ==
             (json_is_string(value) ? MOXIE_CONFIG_FOUND : MOXIE_CONFIG_WRONG_TYPE));
    if (!json_is_string(value)) return;
    PROPERTY(length == json_string_length(value));
    PROPERTY(text[length < sizeof text ? length : sizeof text - 1] == '\0');
    PROPERTY(memcmp(text, json_string_value(value),
                    length < sizeof text ? length : sizeof text - 1) == 0);
    PROPERTY(host->get_str(host->ctx, key, NULL, 0, &length) == MOXIE_CONFIG_FOUND);
}

// Every key that the library did not ask for is warned of, once.
static void check_unknown(const struct host *host)
{
    json_t *warnings = host_unknown_keys(host);
    size_t unknown = 0;
    const char *key;
    json_t *value;

    json_object_foreach(host->config, key, value)
    {
        unknown += json_object_get(host->keys_asked, key) == NULL;
    }
    PROPERTY(json_array_size(warnings) == unknown);
    for (size_t i = 0; i < unknown; i++) {
        value = json_array_get(warnings, i);
        PROPERTY(json_string_length(json_object_get(value, "message")) > 0);
        key = json_string_value(json_object_get(value, "key"));
        PROPERTY(json_object_get(host->config, key) != NULL);
    }
    json_decref(warnings);
}

static void open_on(const moxie_host *host)
{
    const moxie_report *report = NULL;
    const moxie_plan *plan = NULL;
    moxie_instance *instance = NULL;

    PROPERTY(api->open(host, &instance, NULL) == MOXIE_OK);
    PROPERTY(api->validate(instance, &report, NULL) == MOXIE_OK);
    PROPERTY((api->plan(instance, &plan, NULL) == MOXIE_OK) == (report->reasons_count == 0));
    PROPERTY(api->close(instance, NULL) == MOXIE_OK);
}

static void play_host(json_t *config)
{
    struct fault fault = {.text = ""};
    struct host host;
    moxie_host table;
    const char *key;
    json_t *value;

    PROPERTY(host_init(&host, config, "fuzz", NULL, &fault) == EXIT_OK);
    host.log_from = INT32_MAX;
    table = host_table(&host, MOXIE_ABI_VERSION);
    open_on(&table);
    PROPERTY(host_runner(&host, "moxie_cpu", "cpu") != NULL &&
             host_dispatcher(&host, "local", "") != NULL);
    check_unknown(&host);
    json_object_foreach(config, key, value)
    {
        check_getters(&table, key, value);
    }
    host_fini(&host);
}

static void check_path(const struct fuzz_file *file)
{
    struct fault fault = {.text = ""};
    json_t *config = NULL;
    int st = json_file_read(file->path, &config, &fault);

    PROPERTY((st == EXIT_OK) == (config != NULL));
    if (config != NULL) {
        PROPERTY(json_is_object(config));
        play_host(config);
    } else {
        PROPERTY(st == EXIT_TROUBLE && strstr(fault.text, file->path) == fault.text);
    }
    json_decref(config);
}

// An instance of an empty configuration, which knows the keys.
static const moxie_instance *begin(struct host *host, json_t *nothing)
{
    const moxie_request request = {
        .struct_size = sizeof request, .abi_min = MOXIE_ABI_VERSION, .abi_max = MOXIE_ABI_VERSION};
    struct fault fault;
    moxie_instance *instance = NULL;
    moxie_host table;

    PROPERTY(moxie_get_api_v1(&request, &api, NULL) == MOXIE_OK);
    PROPERTY(host_init(host, nothing, "fuzz", NULL, &fault) == EXIT_OK);
    host->log_from = INT32_MAX;
    table = host_table(host, MOXIE_ABI_VERSION);
    PROPERTY(api->open(&table, &instance, NULL) == MOXIE_OK);
    return instance;
}

// With an even first byte the rest is the file, else a file is made of keys and values.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fuzz_file file = {.descriptor = -1};
    static const moxie_instance *instance;
    static struct host host;
    static json_t *nothing;
    static struct text text;
    struct fuzz_input input = {data, size};

    if (file.descriptor < 0) {
        fuzz_file_init(&file);
        nothing = json_object();
        instance = begin(&host, nothing);
    }
    if ((fuzz_u8(&input) & 1) == 0) {
        fuzz_file_write(&file, input.at, input.left);
    } else {
        text.used = 0;
        build(&text, &input, instance);
        fuzz_file_write(&file, text.bytes, text.used);
    }
    check_path(&file);
    return 0;
}
