// Counts allocations. The dynamic linker gives the definitions of a program to every library that
// it loads, so that those of the plugin are seen too; glibc's own do the work.

#include "hosts/cli/conform_malloc.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

static atomic_int counting;
static atomic_uint_fast64_t calls;

void malloc_count_begin(void)
{
    atomic_store(&calls, 0);
    atomic_store(&counting, 1);
}

uint64_t malloc_count_end(void)
{
    atomic_store(&counting, 0);
    return atomic_load(&calls);
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define MALLOC_IS_TAKEN 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__GLIBC__)
#define MALLOC_IS_TAKEN 1
#endif

#ifndef MALLOC_IS_TAKEN

// Seen by the libraries, whatever -fvisibility says.
#pragma GCC visibility push(default)

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void *memalign(size_t align, size_t bytes);

static void count(void)
{
    if (atomic_load_explicit(&counting, memory_order_relaxed)) atomic_fetch_add(&calls, 1);
}

void *malloc(size_t bytes)
{
    count();
    return __libc_malloc(bytes);
}

void *calloc(size_t items, size_t bytes)
{
    count();
    return __libc_calloc(items, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    count();
    return __libc_realloc(memory, bytes);
}

void *memalign(size_t align, size_t bytes)
{
    count();
    return __libc_memalign(align, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return memalign(align, bytes);
}

int posix_memalign(void **memory, size_t align, size_t bytes)
{
    void *made = NULL;

    if (align == 0 || align % sizeof(void *) != 0 || (align & (align - 1)) != 0) return EINVAL;
    made = memalign(align, bytes);
    if (made == NULL) return ENOMEM;
    *memory = made;
    return 0;
}

#pragma GCC visibility pop

#endif
