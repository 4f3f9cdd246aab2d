// Codes and texts of failures.

#include "plugin/status.h"

#include <stdarg.h>
#include <stdio.h>

#define SIZE_LIMIT ((int64_t)1 << 62)

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

int size_mul(int64_t a, int64_t b, int64_t *out)
{
    int64_t product;

    if (__builtin_mul_overflow(a, b, &product) || product > SIZE_LIMIT) return 0;
    *out = product;
    return 1;
}

int size_add(int64_t a, int64_t b, int64_t *out)
{
    int64_t sum;

    if (__builtin_add_overflow(a, b, &sum) || sum > SIZE_LIMIT) return 0;
    *out = sum;
    return 1;
}

int size_align(int64_t a, int64_t align, int64_t *out)
{
    int64_t sum;

    if (!size_add(a, align - 1, &sum)) return 0;
    *out = sum & ~(align - 1);
    return 1;
}
