// Counts what the whole process allocates and frees between two marks, on any thread and in any
// library, libc included. Under a sanitizer its allocator's hooks count, otherwise malloc itself is
// replaced.

#ifndef MOXIE_HOST_TESTS_ALLOC_COUNT_H
#define MOXIE_HOST_TESTS_ALLOC_COUNT_H

#include <stdint.h>

// 1 when aligned allocations count; ThreadSanitizer tells its hooks of their frees only.
#define ALLOC_COUNT_ALIGNED 1
#ifdef __SANITIZE_THREAD__
#undef ALLOC_COUNT_ALIGNED
#define ALLOC_COUNT_ALIGNED 0
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#undef ALLOC_COUNT_ALIGNED
#define ALLOC_COUNT_ALIGNED 0
#endif
#endif

struct alloc_count {
    uint64_t allocations; // malloc, calloc, realloc, aligned_alloc, posix_memalign, memalign
    uint64_t frees;       // free of a pointer that is not NULL
};

// Starts counting from zero. One count at a time.
void alloc_count_begin(void);
// Stops counting.
void alloc_count_end(struct alloc_count *count);

#endif
