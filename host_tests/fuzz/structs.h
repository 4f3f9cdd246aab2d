// The structs of abi.h as hosts that get everything wrong would pass them.

#ifndef MOXIE_HOST_TESTS_FUZZ_STRUCTS_H
#define MOXIE_HOST_TESTS_FUZZ_STRUCTS_H

#include "abi.h"

#include "host_tests/fuzz/fuzz.h"

// A struct as some host might pass it: the right one, an older or newer one, a garbled one, and
// nowhere near its alignment. At most struct_size bytes of it are there. NULL now and then.
void *take_struct(struct fuzz_input *input, uint32_t bytes);

// Put a field, a pointer, or a number that no one guesses, at `offset` of such a struct when it is
// long enough to have it.
void set_field(void *at, size_t offset, const void *value, size_t bytes);
void set_pointer(void *at, size_t offset, const void *pointer);
void set_i32(void *at, size_t offset, int32_t value);

// Each in range more often than not; pointers inside lead to what their counts promise.
moxie_rows *take_rows(struct fuzz_input *input);
moxie_call *take_call(struct fuzz_input *input);
moxie_batch *take_batch(struct fuzz_input *input);

#endif
