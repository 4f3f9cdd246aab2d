// Pieces of POSIX shared memory: made under a random name, opened by peers, unlinked by whoever
// knows it. And pieces that no other process shares.

#ifndef MOXIE_PLUGIN_TRANSPORT_SHM_MEMORY_H
#define MOXIE_PLUGIN_TRANSPORT_SHM_MEMORY_H

#include "plugin/transport_meeting.h"

// What `ranks` make of `windows` each.
struct shared_memory_need {
    uint64_t bytes; // of a window
    int32_t ranks, windows;
    int32_t group_ranks; // those of this rank's control group (memory_available.h)
};

// MOXIE_E_MEMORY when all of it together would not fit into /dev/shm or into the memory that is
// available now: the kernel would rather kill processes than refuse pages it has room for on paper.
int32_t shared_memory_check(const struct shared_memory_need *need, moxie_error *error);

// Makes and maps zeroed memory with all its pages there: a full /dev/shm is an error here instead
// of SIGBUS at the first touch. `bytes` is a multiple of TRANSPORT_PAGE_BYTES. After a failure the
// name may exist; unlink it.
int32_t shared_memory_make(const unsigned char token[MEETING_TOKEN_BYTES], uint64_t bytes,
                           void **out, moxie_error *error);

// Maps rank `owner`'s memory, which must have `bytes`.
int32_t shared_memory_open(const unsigned char token[MEETING_TOKEN_BYTES], uint64_t bytes,
                           int32_t owner, void **out, moxie_error *error);

// Takes the name away, if it is there; mappings stay.
void shared_memory_unlink(const unsigned char token[MEETING_TOKEN_BYTES]);

// Makes and maps zeroed memory without a name, in reach of this process's threads alone: they map
// it by *fd, which the caller closes. *fd is -1 after a failure.
int32_t process_memory_make(uint64_t bytes, int *fd, void **out, moxie_error *error);

// Maps it once more, wherever its maker's mapping is. Any number will do for `fd`, and it may be
// closed meanwhile: *out is NULL where it is of no file of that size.
int32_t process_memory_open(int fd, uint64_t bytes, void **out, moxie_error *error);

#endif
