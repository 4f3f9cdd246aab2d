// Reads safetensors files, which come from strangers: the header's length, its JSON, every dtype,
// shape and offset is checked before a tensor can be read, and data is read with pread, so that a
// file that shrinks under us is an error and not a SIGBUS. As the reference implementation, it
// wants tensors that cover the data without holes or overlaps. Of the header no more is kept than
// that: each rank has it.

#ifndef MOXIE_HOSTS_CLI_SAFETENSORS_H
#define MOXIE_HOSTS_CLI_SAFETENSORS_H

#include "hosts/cli/fault.h"

#include <jansson.h>
#include <sys/stat.h>

#define SAFETENSORS_DIMS_MAX         8
#define SAFETENSORS_HEADER_BYTES_MAX ((uint64_t)100000000) // the reference implementation's limit

enum word {
    WORD_UNKNOWN, // tolerated in a file, not loadable
    WORD_BOOL,
    WORD_U8,
    WORD_I8,
    WORD_F8_E4M3,
    WORD_F8_E8M0,
    WORD_BF16,
    WORD_F16,
    WORD_I32,
    WORD_F32,
    WORD_I64,
    WORD_F64,
    WORD_COUNT
};

struct tensor {
    const char *name; // lives as long as the file
    enum word word;
    uint32_t ndim;
    int64_t shape[SAFETENSORS_DIMS_MAX];
    uint64_t offset; // from the start of the file
    uint64_t bytes;
};

struct safetensors {
    int descriptor;
    uint32_t reserved;
    char *path;
    uint64_t file_bytes;
    char *names;            // of all tensors
    json_t *metadata;       // object of strings, or NULL
    struct tensor *tensors; // by name
    uint64_t count;
};

// On failure *file is closed. The path is copied.
int safetensors_open(struct safetensors *file, const char *path, struct fault *fault);
// Accepts a zeroed or closed file.
void safetensors_close(struct safetensors *file);

const struct tensor *safetensors_find(const struct safetensors *file, const char *name);
// The text of a metadata key; NULL when absent.
const char *safetensors_metadata(const struct safetensors *file, const char *key);

// Reads `bytes` of the tensor from byte `first` on.
int safetensors_read(const struct safetensors *file, const struct tensor *tensor, uint64_t first,
                     uint64_t bytes, void *buffer, struct fault *fault);

// 1 when that is the file; a closed one is none.
int safetensors_is(const struct safetensors *file, const struct stat *other);

uint64_t word_bytes(enum word word); // 0 for WORD_UNKNOWN
const char *word_name(enum word word);

int tensor_same_shape(const struct tensor *a, const struct tensor *b);

// Prints "BF16 [3, 4]".
void tensor_print(const struct tensor *tensor, char *buffer, uint64_t capacity);

// One tensor to be written.
struct tensor_out {
    const char *name;
    enum word word;
    uint32_t ndim;
    int64_t shape[SAFETENSORS_DIMS_MAX];
    const void *data;
};

// Writes a file with one tensor, complete or not at all, as target.h says.
int safetensors_write(const char *path, const struct tensor_out *tensor, struct fault *fault);

#endif
