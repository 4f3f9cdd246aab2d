// Two ways to see every allocation of the process. Plain builds define malloc and its family here,
// which the dynamic linker then gives to every library as well, and pass on to glibc's own names
// for them. The sanitizers have replaced malloc already, and offer hooks. (-Wl,--wrap would miss
// what libc and dlopen'ed libraries allocate.)

#include "host_tests/alloc_count.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>

static atomic_int counting;
static atomic_uint_fast64_t allocations;
static atomic_uint_fast64_t frees;

static void count_allocation(void)
{
    if (atomic_load_explicit(&counting, memory_order_relaxed)) atomic_fetch_add(&allocations, 1);
}

static void count_free(const volatile void *memory)
{
    if (memory != NULL && atomic_load_explicit(&counting, memory_order_relaxed))
        atomic_fetch_add(&frees, 1);
}

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define ALLOC_COUNT_HOOKS 1
#endif
#elif defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define ALLOC_COUNT_HOOKS 1
#endif

#ifdef ALLOC_COUNT_HOOKS

// As in <sanitizer/allocator_interface.h>, which gcc does not install.
int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void *, size_t),
                                              void (*free_hook)(const volatile void *));

static void malloc_hook(const volatile void *memory, size_t bytes)
{
    (void)memory;
    (void)bytes;
    count_allocation();
}

__attribute__((constructor)) static void install_hooks(void)
{
    if (__sanitizer_install_malloc_and_free_hooks(malloc_hook, count_free) == 0) abort();
}

#else

// Seen by the other libraries, whatever -fvisibility says.
#pragma GCC visibility push(default)

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t align, size_t bytes);
void __libc_free(void *memory);
void *memalign(size_t align, size_t bytes);

void *malloc(size_t bytes)
{
    count_allocation();
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    count_allocation();
    return __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    count_allocation();
    return __libc_realloc(memory, bytes);
}

void *memalign(size_t align, size_t bytes)
{
    count_allocation();
    return __libc_memalign(align, bytes);
}

void *aligned_alloc(size_t align, size_t bytes)
{
    return memalign(align, bytes);
}

int posix_memalign(void **memory, size_t align, size_t bytes)
{
    void *made;

    if (align % sizeof(void *) != 0 || (align & (align - 1)) != 0 || align == 0) return EINVAL;
    made = memalign(align, bytes);
    if (made == NULL) return ENOMEM;
    *memory = made;
    return 0;
}

void free(void *memory)
{
    count_free(memory);
    __libc_free(memory);
}

#pragma GCC visibility pop

#endif

void alloc_count_begin(void)
{
    atomic_store(&allocations, 0);
    atomic_store(&frees, 0);
    atomic_store(&counting, 1);
}

void alloc_count_end(struct alloc_count *count)
{
    atomic_store(&counting, 0);
    count->allocations = atomic_load(&allocations);
    count->frees = atomic_load(&frees);
}
