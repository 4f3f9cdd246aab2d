// Codes and texts of failures. Text is written at the origin only, into the caller's moxie_error;
// callers pass the code up with TRY. Nothing is thread-local, nothing crosses the ABI on the heap.

#ifndef MOXIE_PLUGIN_STATUS_H
#define MOXIE_PLUGIN_STATUS_H

#include "abi.h"

// Needs `int32_t st = MOXIE_OK` and a label `out` in the function.
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        st = (expr);                                                                               \
        if (st != MOXIE_OK) goto out;                                                              \
    } while (0)

// Room for the text of a failure among ranks, which is kept or sent on and told again: that of any
// verdict (exchange_verdict.h) is shorter.
#define FAILURE_TEXT_BYTES 512

// Writes the text (cut to the caller's buffer, always terminated) and returns `code`. `error` may
// be NULL.
int32_t fail_with(moxie_error *error, int32_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// As fail_with, naming the rank to blame.
int32_t fail_rank(moxie_error *error, int32_t code, int32_t rank, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

// Where a step writes a failure that may be kept.
static inline moxie_error failure_error(char text[FAILURE_TEXT_BYTES])
{
    text[0] = 0;
    return (moxie_error){.struct_size = sizeof(moxie_error),
                         .rank = -1,
                         .text_bytes = FAILURE_TEXT_BYTES,
                         .text = text};
}

// "CAPACITY" for MOXIE_E_CAPACITY; "UNKNOWN" for a number that is no code.
const char *status_name(int32_t code);

// What another rank wrote is shown to people: it ends within `bytes`, and is printable ASCII.
void text_clean(char *text, size_t bytes);

// Overflow-checked arithmetic on non-negative sizes. On overflow (past SIZE_LIMIT) return 0 and
// leave *out alone.
#define SIZE_LIMIT ((int64_t)1 << 62)

static inline int size_mul(int64_t a, int64_t b, int64_t *out)
{
    int64_t product;

    if (__builtin_mul_overflow(a, b, &product) || product > SIZE_LIMIT) return 0;
    *out = product;
    return 1;
}

static inline int size_add(int64_t a, int64_t b, int64_t *out)
{
    int64_t sum;

    if (__builtin_add_overflow(a, b, &sum) || sum > SIZE_LIMIT) return 0;
    *out = sum;
    return 1;
}

// a rounded up to a multiple of `align` (a power of two).
static inline int size_align(int64_t a, int64_t align, int64_t *out)
{
    int64_t sum;

    if (!size_add(a, align - 1, &sum)) return 0;
    *out = sum & ~(align - 1);
    return 1;
}

// ceil(a / b) for a >= 0, b >= 1, without overflow.
static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

#endif
