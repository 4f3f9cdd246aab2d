// Tensors of any shape, stride, type and alignment. Each has exactly the bytes that it claims, so
// that whatever a room lets through is read and written inside them.

#ifndef MOXIE_HOST_TESTS_FUZZ_TENSORS_H
#define MOXIE_HOST_TESTS_FUZZ_TENSORS_H

#include "abi.h"

#include "host_tests/fuzz/fuzz.h"

struct maker {
    struct fuzz_input *input;
    // 1: some tensor claims more bytes than an input can have. They are not there, and nothing may
    // follow its data.
    int absent;
    uint32_t plain; // bit i: the i-th tensor is the right one, whatever the input says
    int32_t made;   // tensors so far
    int32_t odd;    // those of them that need not be right
};

enum type { F32, BF16, F16, E4M3, U8, I32, I64, TYPES_COUNT };

// The right tensor of this shape and type, or one that is wrong in any way; `right` is [ndim].
moxie_tensor take_tensor(struct maker *maker, const int64_t *right, int32_t ndim, enum type type);
moxie_tensor no_tensor(void);

#endif
