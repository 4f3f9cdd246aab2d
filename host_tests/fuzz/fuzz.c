// Values and memory made from an input.

#include "host_tests/fuzz/fuzz.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef __has_feature
#if __has_feature(address_sanitizer)
#define POISONS 1
#endif
#endif
#ifdef __SANITIZE_ADDRESS__
#define POISONS 1
#endif

#ifdef POISONS
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(at, bytes)   ((void)(at), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(at, bytes) ((void)(at), (void)(bytes))
#endif

#define ARENA_BYTES ((size_t)512 << 10)
#define PITCH       ((size_t)64)
#define GAP_BYTES   ((size_t)64) // between two pieces

static _Alignas(64) unsigned char arena[ARENA_BYTES];
static size_t arena_used;
static int arena_fresh = 1;

// Read by the sanitizers before main: an allocation that no machine has is answered with NULL, as
// malloc does. A small quarantine keeps the memory of the last inputs in the cache.
const char *__asan_default_options(void);

const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1:quarantine_size_mb=1";
}

_Noreturn void fuzz_broken(const char *property, const char *file, int line)
{
    (void)fprintf(stderr, "%s:%d: broken: %s\n", file, line, property);
    abort();
}

// ---- Values ------------------------------------------------------------------------------------

void fuzz_bytes(struct fuzz_input *input, void *to, size_t bytes)
{
    size_t taken = bytes < input->left ? bytes : input->left;

    if (taken > 0) memcpy(to, input->at, taken);
    if (taken < bytes) memset((unsigned char *)to + taken, 0, bytes - taken);
    input->at += taken;
    input->left -= taken;
}

uint8_t fuzz_u8(struct fuzz_input *input)
{
    if (input->left == 0) return 0;
    input->left--;
    return *input->at++;
}

uint32_t fuzz_u32(struct fuzz_input *input)
{
    uint32_t value;

    fuzz_bytes(input, &value, sizeof value);
    return value;
}

uint64_t fuzz_u64(struct fuzz_input *input)
{
    uint64_t value;

    fuzz_bytes(input, &value, sizeof value);
    return value;
}

uint32_t fuzz_below(struct fuzz_input *input, uint32_t count)
{
    return fuzz_u8(input) % count;
}

int64_t fuzz_i64(struct fuzz_input *input)
{
    static const int64_t edges[] = {-1,
                                    INT32_MAX,
                                    (int64_t)INT32_MAX + 1,
                                    INT32_MIN,
                                    UINT32_MAX,
                                    (int64_t)1 << 40,
                                    INT64_MAX,
                                    INT64_MIN,
                                    (int64_t)1 << 62,
                                    INT64_MAX / 2,
                                    INT64_MAX / 8,
                                    (int64_t)1 << 20};
    uint8_t first = fuzz_u8(input);

    if (first < 192) return first;
    if (first < 240) return edges[first % (sizeof edges / sizeof edges[0])];
    if (first < 248) return (int64_t)(fuzz_u32(input) & 0xffffff);
    return (int64_t)fuzz_u64(input);
}

uint64_t fuzz_add(uint64_t a, uint64_t b)
{
    return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

uint64_t fuzz_mul(uint64_t a, uint64_t b)
{
    return b != 0 && a > UINT64_MAX / b ? UINT64_MAX : a * b;
}

// ---- Memory ------------------------------------------------------------------------------------

void fuzz_reset(void)
{
    size_t dirty = arena_fresh ? ARENA_BYTES : arena_used;

    ASAN_POISON_MEMORY_REGION(arena, dirty);
    arena_fresh = 0;
    arena_used = GAP_BYTES;
}

void *fuzz_place(size_t bytes, size_t offset)
{
    unsigned char *at = arena + arena_used + offset;
    size_t taken = (offset + bytes + GAP_BYTES + PITCH - 1) & ~(PITCH - 1);

    PROPERTY(offset < PITCH && bytes <= ARENA_BYTES && taken <= ARENA_BYTES - arena_used);
    arena_used += taken;
    if (bytes == 0) return at;
    ASAN_UNPOISON_MEMORY_REGION(at, bytes);
    return at;
}

void *fuzz_taken(struct fuzz_input *input, size_t bytes)
{
    void *at = fuzz_place(bytes, 0);

    if (bytes > 0) fuzz_bytes(input, at, bytes);
    return at;
}

char *fuzz_text(struct fuzz_input *input, size_t bytes)
{
    size_t length = input->left < bytes ? input->left : bytes;
    const void *end = length > 0 ? memchr(input->at, 0, length) : NULL;
    char *text;

    if (end != NULL) length = (size_t)((const uint8_t *)end - input->at);
    text = fuzz_place(length + 1, 0);
    fuzz_bytes(input, text, length);
    text[length] = '\0';
    (void)fuzz_u8(input); // the NUL
    return text;
}

size_t fuzz_room(void)
{
    return ARENA_BYTES - arena_used > 2 * GAP_BYTES ? ARENA_BYTES - arena_used - 2 * GAP_BYTES : 0;
}
