// The list of reasons and warnings. It owns its messages; names and keys are static.

#include "plugin/config.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MESSAGE_BYTES 1024

struct list {
    moxie_reason **entries;
    uint64_t *count, *capacity;
};

// Appends the formatted entry; 0 when there is no memory for it.
static int append(struct list list, int32_t code, enum config_key key, const char *format,
                  va_list args)
{
    uint64_t capacity = *list.capacity == 0 ? 16 : 2 * *list.capacity;
    char text[MESSAGE_BYTES];
    moxie_reason *grown;
    char *message;

    if (*list.count == *list.capacity) {
        grown = realloc(*list.entries, capacity * sizeof *grown);
        if (grown == NULL) return 0;
        *list.entries = grown;
        *list.capacity = capacity;
    }
    (void)vsnprintf(text, sizeof text, format, args);
    message = strdup(text);
    if (message == NULL) return 0;
    (*list.entries)[(*list.count)++] = (moxie_reason){
        .struct_size = sizeof(moxie_reason),
        .code = code,
        .name = code == MOXIE_OK ? "WARNING" : status_name(code),
        .key = config_name(key),
        .message = message,
    };
    return 1;
}

void report_reason(struct report *report, int32_t code, enum config_key key, const char *format,
                   ...)
{
    struct list list = {&report->reasons, &report->reasons_count, &report->reasons_capacity};
    va_list args;

    va_start(args, format);
    if (!append(list, code, key, format, args)) report->memory_failed = 1;
    va_end(args);
}

void report_warning(struct report *report, enum config_key key, const char *format, ...)
{
    struct list list = {&report->warnings, &report->warnings_count, &report->warnings_capacity};
    va_list args;

    va_start(args, format);
    if (!append(list, MOXIE_OK, key, format, args)) report->memory_failed = 1;
    va_end(args);
}

static void entries_free(moxie_reason *entries, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        free((char *)(uintptr_t)entries[i].message);
    free(entries);
}

void report_fini(struct report *report)
{
    entries_free(report->reasons, report->reasons_count);
    entries_free(report->warnings, report->warnings_count);
    memset(report, 0, sizeof *report);
}
