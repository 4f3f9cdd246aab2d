// Reads the golden files: safetensors whose header and bytes the tests trust. The command line's
// reader is another program: it trusts nothing.

#ifndef MOXIE_HOST_TESTS_GOLDEN_H
#define MOXIE_HOST_TESTS_GOLDEN_H

#include <stddef.h>
#include <stdint.h>

struct golden {
    unsigned char *bytes; // the file
    char *header;         // its JSON, NUL-terminated
    size_t data_offset;   // of the first tensor
};

struct golden_tensor {
    const unsigned char *data;
    char dtype[12];   // as in the file: "F32", "BF16", "I32", "U8", "F8_E4M3"
    int64_t shape[4]; // 1 past ndim
    int32_t ndim;
    int64_t count; // elements
    int64_t bytes;
};

// Opens host_tests/golden/<path>, and fails the test when that is not possible.
void golden_open(struct golden *golden, const char *path);
void golden_close(struct golden *golden);

// 1 when the file has the tensor.
int golden_has(const struct golden *golden, const char *name);
// Fails the test when there is no such tensor. The data lives until golden_close.
struct golden_tensor golden_get(const struct golden *golden, const char *name);
// A value of the metadata, as text: "" when there is none.
void golden_text(const struct golden *golden, const char *key, char *text, size_t capacity);
int64_t golden_int(const struct golden *golden, const char *key);

// Element `index` of an F32, BF16, I32 or U8 tensor.
double golden_value(const struct golden_tensor *tensor, int64_t index);

// ||got - want|| / ||want||, in fp64.
double golden_error(const float *got, const struct golden_tensor *want);

#endif
