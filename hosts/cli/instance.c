// One opened instance and its verdict.

#include "hosts/cli/instance.h"

#include "hosts/cli/json_file.h"

#include <errno.h>
#include <string.h>

// Entry `index` of an array whose entries may be larger than this host knows.
static const moxie_reason *reason_at(const moxie_reason *first, uint32_t stride, uint64_t index)
{
    return (const moxie_reason *)(const void *)((const char *)first + index * stride);
}

int instance_open(struct instance *instance, const struct instance_request *request,
                  struct fault *fault)
{
    const moxie_api *api = request->plugin->api;
    struct host *host = &instance->host;
    struct library_error error;
    moxie_host table;
    int32_t status = MOXIE_OK;
    int st = EXIT_OK;

    *instance = (struct instance){.api = api};
    TRY(host_init(host, request->config, program_invocation_name, request->bootstrap, fault));
    table = host_table(host, api->abi_version);
    host->log_from = request->verbose ? MOXIE_LOG_INFO : MOXIE_LOG_ERROR;
    host->verdict_apart = !request->verbose;
    status = api->open(&table, &instance->handle, library_error(&error));
    if (status != MOXIE_OK) TRY(fault_from_status(fault, status, "open", error.text));
    status = api->validate(instance->handle, &instance->report, library_error(&error));
    if (status != MOXIE_OK) TRY(fault_from_status(fault, status, "validate", error.text));
    status = api->plan(instance->handle, &instance->plan, library_error(&error));
    if (status != MOXIE_OK && status != MOXIE_E_CONFIG)
        TRY(fault_from_status(fault, status, "plan", error.text));
    host->log_from = request->verbose ? MOXIE_LOG_INFO : MOXIE_LOG_WARNING;
    host->verdict_apart = 0;
    return EXIT_OK;
out:
    if (instance->handle != NULL) (void)api->close(instance->handle, NULL);
    host_fini(host);
    *instance = (struct instance){0};
    return st;
}

int instance_close(struct instance *instance, struct fault *fault)
{
    struct library_error error;
    int32_t status = MOXIE_OK;

    if (instance->handle != NULL)
        status = instance->api->close(instance->handle, library_error(&error));
    host_fini(&instance->host);
    *instance = (struct instance){0};
    if (status != MOXIE_OK) return fault_from_status(fault, status, "close", error.text);
    return EXIT_OK;
}

int instance_finish(struct instance *instance, int st, struct fault *fault)
{
    struct fault closing;
    int closed = instance_close(instance, &closing);

    if (st != EXIT_OK || closed == EXIT_OK) return st;
    *fault = closing;
    return closed;
}

const char *instance_config(const struct instance *instance, const char *key)
{
    moxie_config_entry entry = {.struct_size = sizeof entry};

    for (uint64_t i = 0; instance->api->config(instance->handle, i, &entry) == MOXIE_OK; i++)
        if (strcmp(entry.key, key) == 0) return entry.value;
    return "";
}

json_t *instance_reasons(const struct instance *instance)
{
    const moxie_report *report = instance->report;
    json_t *reasons = json_array();

    for (uint64_t i = 0; i < report->reasons_count; i++) {
        const moxie_reason *reason = reason_at(report->reasons, report->reason_stride, i);
        const char *seen = host_wrong_type(&instance->host, reason->key);

        (void)json_array_append_new(
            reasons,
            json_pack("{s:s, s:s, s:o}", "code", reason->name, "key", reason->key, "message",
                      json_sprintf("%s%s%s%s", reason->message, seen != NULL ? " (it is " : "",
                                   seen != NULL ? seen : "", seen != NULL ? ")" : "")));
    }
    return reasons;
}

json_t *instance_warnings(const struct instance *instance)
{
    const moxie_report *report = instance->report;
    json_t *warnings = NULL;

    if (report == NULL) return json_array();
    warnings = host_unknown_keys(&instance->host);
    for (uint64_t i = 0; i < report->warnings_count; i++) {
        const moxie_reason *warning = reason_at(report->warnings, report->reason_stride, i);

        (void)json_array_append_new(
            warnings, json_pack("{s:s, s:s}", "key", warning->key, "message", warning->message));
    }
    return warnings;
}

json_t *instance_bounds(const struct instance *instance)
{
    const moxie_bounds *bounds = instance->plan != NULL ? instance->plan->bounds : NULL;
    json_t *object = json_object();

    if (bounds == NULL) return object;
    const struct {
        const char *name;
        int64_t value;
    } numbers[] = {
        {"prefill", bounds->prefill},
        {"decode", bounds->decode},
        {"dispatch_required", bounds->dispatch_required},
        {"dispatch_tokens", bounds->dispatch_tokens},
        {"allgather_rows", bounds->allgather_rows},
        {"alltoall_rows", bounds->alltoall_rows},
        {"capture_rows", bounds->capture_rows},
    };

    if (bounds->forward_tokens >= 0)
        (void)json_object_set_new(object, "forward_tokens", json_integer(bounds->forward_tokens));
    if (bounds->forward_tokens >= 0 && bounds->dominant != NULL)
        (void)json_object_set_new(object, "dominant", json_string(bounds->dominant));
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (numbers[i].value >= 0)
            (void)json_object_set_new(object, numbers[i].name, json_integer(numbers[i].value));
    return object;
}

// Keys and words of a configuration are in it.
static const char *printable(const json_t *reason, const char *part, char text[FAULT_TEXT_BYTES])
{
    (void)snprintf(text, FAULT_TEXT_BYTES, "%s", json_string_value(json_object_get(reason, part)));
    make_printable(text);
    return text;
}

void reasons_print(FILE *stream, json_t *reasons)
{
    size_t index = 0;
    json_t *reason = NULL;
    char key[FAULT_TEXT_BYTES], message[FAULT_TEXT_BYTES];

    json_array_foreach(reasons, index, reason)
    {
        (void)fprintf(stream, "  %zu. %s [%s]\n     %s\n", index + 1, printable(reason, "key", key),
                      json_string_value(json_object_get(reason, "code")),
                      printable(reason, "message", message));
    }
}

void warnings_print(FILE *stream, const char *before, json_t *warnings)
{
    size_t index = 0;
    json_t *warning = NULL;
    char key[FAULT_TEXT_BYTES], message[FAULT_TEXT_BYTES];

    json_array_foreach(warnings, index, warning)
    {
        (void)fprintf(stream, "%s warning: %s: %s\n", before, printable(warning, "key", key),
                      printable(warning, "message", message));
    }
}

int instance_refuse(const struct instance *instance, int as_json, int bounds, struct fault *fault)
{
    json_t *reasons = instance_reasons(instance);
    json_t *document = NULL;
    int st = EXIT_OK;

    if (!as_json) {
        (void)fprintf(stderr, "%s: refused, for %zu reason%s:\n", program_invocation_name,
                      json_array_size(reasons), json_array_size(reasons) == 1 ? "" : "s");
        reasons_print(stderr, reasons);
        json_decref(reasons);
        return EXIT_REFUSED;
    }
    document = json_pack("{s:b, s:o, s:o}", "ok", 0, "reasons", reasons, "warnings",
                         instance_warnings(instance));
    if (bounds && document != NULL)
        (void)json_object_set_new(document, "bounds", instance_bounds(instance));
    st = json_print(document, fault);
    return st == EXIT_OK ? EXIT_REFUSED : st;
}
