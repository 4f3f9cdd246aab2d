// A host that breaks its word at one place, once: the nth allocation, the nth callback.
//
// The program is linked with --wrap for malloc, calloc, realloc and strdup, and with the library's
// objects: `armed` is the host whose calls may fail, per thread.

#ifndef MOXIE_HOST_TESTS_FAULT_HOST_H
#define MOXIE_HOST_TESTS_FAULT_HOST_H

#include "host_tests/mock_host.h"

// Which calls are counted.
enum fault_place {
    FAULT_NONE,
    FAULT_LIBC,         // malloc and its family, inside the library
    FAULT_ALLOCATE,     // the host's allocator
    FAULT_GETTER,       // get_i64, get_f64 and get_str together
    FAULT_REGISTER,     // register_runner and register_dispatcher together
    FAULT_ALL_GATHER,   //
    FAULT_BARRIER,      //
    FAULT_PARALLEL_FOR, // set when it is the place
    FAULT_THREAD_CHECK, // set when it is the place
    FAULT_PLACES
};

// What happens instead. FAILS answers the failure that the contract knows; the others lie.
enum fault_way {
    FAULT_FAILS,
    GETTER_WRONG_TYPE,
    GETTER_NO_CODE,           // an answer that is none of MOXIE_CONFIG_*
    GETTER_UNWRITTEN,         // FOUND, and nothing is written
    GETTER_LOWEST,            // INT64_MIN, -inf, a text that ends before its length
    GETTER_HIGHEST,           // INT64_MAX, inf, a text without an end of length UINT64_MAX
    GETTER_ODD,               // 0, NaN, a text without an end of length 3
    ALLOCATE_NULL,            // 0, and no memory
    ALLOCATE_JUNK,            // non-zero, and an address that is nobody's
    ALLOCATE_ASKEW,           // 0, and memory one byte off its alignment
    ALL_GATHER_AFTER,         // every rank has everything, and this one fails all the same
    ALL_GATHER_LATE,          // comes `late_ms` late
    PARALLEL_FOR_NO_TASK,     // returns at once
    PARALLEL_FOR_ONE_TASK,    // runs the last task alone
    PARALLEL_FOR_EVERY_TWICE, // runs all of them, again
    PARALLEL_FOR_PAST         // runs tasks that nobody asked for, alone
};

struct fault {
    int32_t place, way; // enum fault_place, enum fault_way
    uint64_t call;      // 1: the first at that place
    int32_t late_ms;
};

struct fault_host {
    struct mock_host mock; // the first member: ctx of all callbacks
    moxie_host honest;     // the mock's callbacks
    struct fault fault;
    uint64_t calls; // at that place
    int32_t struck; // it has happened
    int32_t inside; // a callback: what it allocates is the test's own
    void *askew;    // memory that was handed out one byte off
};

void fault_host_init(struct fault_host *host, const struct fault *fault);
// Before open and after the mock has got all its callbacks: puts the faulty ones in front.
void fault_host_arm(struct fault_host *host);
// From here on allocations of this thread are those of the library on `host`; NULL: the test's own.
void fault_libc_arm(struct fault_host *host);

#endif
