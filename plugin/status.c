// Codes and texts of failures.

#include "plugin/status.h"

#include <stdarg.h>
#include <stdio.h>

static int32_t fail_args(moxie_error *error, int32_t code, int32_t rank, const char *format,
                         va_list args)
{
    if (error == NULL) return code;
    error->code = code;
    error->rank = rank;
    if (error->text != NULL && error->text_bytes > 0)
        (void)vsnprintf(error->text, error->text_bytes, format, args);
    return code;
}

int32_t fail_with(moxie_error *error, int32_t code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)fail_args(error, code, -1, format, args);
    va_end(args);
    return code;
}

int32_t fail_rank(moxie_error *error, int32_t code, int32_t rank, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)fail_args(error, code, rank, format, args);
    va_end(args);
    return code;
}

const char *status_name(int32_t code)
{
    static const char *const names[] = {
        "OK",       "INVALID",   "UNSUPPORTED",         "UNAVAILABLE", "VERSION", "CONFIG",
        "CAPACITY", "CAPTURING", "COLLECTIVE_MISMATCH", "TIMEOUT",     "PEER",    "MEMORY",
        "DEVICE",   "INTERNAL",
    };

    if (code < 0 || (size_t)code >= sizeof names / sizeof names[0]) return "UNKNOWN";
    return names[code];
}

void text_clean(char *text, size_t bytes)
{
    text[bytes - 1] = '\0';
    for (char *c = text; *c != '\0'; c++)
        if (*c < ' ' || *c > '~') *c = '?';
}
