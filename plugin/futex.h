// How a thread here waits: a short spin, then the kernel. A futex word is a counter that whoever
// has news increments; a waiter sleeps only while it still holds the value it saw. Private words
// are of one process and one heap object, shared ones lie in memory that several processes map.

#ifndef MOXIE_PLUGIN_FUTEX_H
#define MOXIE_PLUGIN_FUTEX_H

#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2,
               "atomics shared by processes hold no lock");
_Static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint64_t) == 8,
               "atomics are their values");

// Looks at a word before sleeping on it: 1 to 4 us, short against a context switch, so that more
// threads than cores do not starve each other.
#define SPIN_LOOKS 64

static inline void spin_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

// Sleeps while *word == value, until a wake, a signal handler, or `deadline` (CLOCK_MONOTONIC;
// NULL: none).
static inline void futex_wait(_Atomic uint32_t *word, uint32_t value,
                              const struct timespec *deadline, int is_private)
{
    int op = FUTEX_WAIT_BITSET | (is_private ? FUTEX_PRIVATE_FLAG : 0);

    (void)syscall(SYS_futex, word, op, value, deadline, NULL, FUTEX_BITSET_MATCH_ANY);
}

static inline void futex_wake(_Atomic uint32_t *word, int threads, int is_private)
{
    (void)syscall(SYS_futex, word, FUTEX_WAKE | (is_private ? FUTEX_PRIVATE_FLAG : 0), threads);
}

#endif
