// Faults and checked sizes.

#include "hosts/cli/fault.h"

#include "abi.h"

#include <stdarg.h>
#include <stdio.h>

#define BYTES_LIMIT ((uint64_t)1 << 62)

int fault_set(struct fault *fault, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(fault->text, sizeof fault->text, format, args);
    va_end(args);
    fault->code = code;
    return code;
}

int fault_from_status(struct fault *fault, int32_t status, const char *what, const char *text)
{
    int refused = status == MOXIE_E_INVALID || status == MOXIE_E_UNSUPPORTED ||
                  status == MOXIE_E_UNAVAILABLE || status == MOXIE_E_CONFIG ||
                  status == MOXIE_E_CAPACITY;

    return fault_set(fault, refused ? EXIT_REFUSED : EXIT_TROUBLE, "%s: %s", what,
                     text[0] != '\0' ? text : "the library gave no reason");
}

int bytes_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;

    if (__builtin_mul_overflow(a, b, &product) || product > BYTES_LIMIT) return 0;
    *out = product;
    return 1;
}

int bytes_add(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t sum;

    if (__builtin_add_overflow(a, b, &sum) || sum > BYTES_LIMIT) return 0;
    *out = sum;
    return 1;
}
