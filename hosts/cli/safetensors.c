// Reads safetensors files.

#include "hosts/cli/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PREFIX_BYTES ((uint64_t)8)

struct word_row {
    const char *name;
    uint64_t bytes;
};

static const struct word_row words[WORD_COUNT] = {
    [WORD_UNKNOWN] = {"unknown", 0}, [WORD_BOOL] = {"BOOL", 1},
    [WORD_U8] = {"U8", 1},           [WORD_I8] = {"I8", 1},
    [WORD_F8_E4M3] = {"F8_E4M3", 1}, [WORD_F8_E8M0] = {"F8_E8M0", 1},
    [WORD_BF16] = {"BF16", 2},       [WORD_F16] = {"F16", 2},
    [WORD_I32] = {"I32", 4},         [WORD_F32] = {"F32", 4},
    [WORD_I64] = {"I64", 8},         [WORD_F64] = {"F64", 8},
};

uint64_t word_bytes(enum word word)
{
    return words[word].bytes;
}

const char *word_name(enum word word)
{
    return words[word].name;
}

static enum word word_from_name(const char *name)
{
    for (int i = WORD_UNKNOWN + 1; i < WORD_COUNT; i++)
        if (strcmp(words[i].name, name) == 0) return (enum word)i;
    return WORD_UNKNOWN;
}

int tensor_same_shape(const struct tensor *a, const struct tensor *b)
{
    return a->ndim == b->ndim && memcmp(a->shape, b->shape, a->ndim * sizeof a->shape[0]) == 0;
}

void tensor_print(const struct tensor *tensor, char *buffer, uint64_t capacity)
{
    uint64_t used = (uint64_t)snprintf(buffer, capacity, "%s [", words[tensor->word].name);

    for (uint32_t i = 0; i < tensor->ndim && used < capacity; i++)
        used += (uint64_t)snprintf(buffer + used, capacity - used, "%s%lld", i > 0 ? ", " : "",
                                   (long long)tensor->shape[i]);
    if (used < capacity) (void)snprintf(buffer + used, capacity - used, "]");
}

static int read_exactly(const struct safetensors *file, uint64_t offset, uint64_t bytes,
                        void *buffer, struct fault *fault)
{
    uint64_t done = 0;

    while (done < bytes) {
        ssize_t got =
            pread(file->descriptor, (char *)buffer + done, bytes - done, (off_t)(offset + done));

        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fault_set(fault, EXIT_TROUBLE, "%s: %s", file->path, strerror(errno));
        if (got == 0)
            return fault_set(fault, EXIT_TROUBLE, "%s: the file shrank while it was read",
                             file->path);
        done += (uint64_t)got;
    }
    return EXIT_OK;
}

// The shape, and how many elements it has.
static int parse_shape(const json_t *shape, struct tensor *tensor, uint64_t *elements)
{
    size_t count = json_array_size(shape);

    if (!json_is_array(shape) || count > SAFETENSORS_DIMS_MAX) return 0;
    *elements = 1;
    tensor->ndim = (uint32_t)count;
    for (size_t i = 0; i < count; i++) {
        const json_t *entry = json_array_get(shape, i);
        json_int_t size = json_integer_value(entry);

        if (!json_is_integer(entry) || size < 0) return 0;
        if (!bytes_mul(*elements, (uint64_t)size, elements)) return 0;
        tensor->shape[i] = size;
    }
    return 1;
}

// data_offsets, relative to the data in the file, into absolute ones.
static int parse_offsets(const json_t *offsets, uint64_t data_first, uint64_t file_bytes,
                         struct tensor *tensor)
{
    const json_t *begin = json_array_get(offsets, 0);
    const json_t *end = json_array_get(offsets, 1);
    json_int_t first = json_integer_value(begin);
    json_int_t last = json_integer_value(end);

    if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end)) return 0;
    if (first < 0 || last < first || (uint64_t)last > file_bytes - data_first) return 0;
    tensor->offset = data_first + (uint64_t)first;
    tensor->bytes = (uint64_t)(last - first);
    return 1;
}

static int parse_tensor(const struct safetensors *file, uint64_t data_first, const json_t *value,
                        struct tensor *tensor, struct fault *fault)
{
    const char *dtype = json_string_value(json_object_get(value, "dtype"));
    uint64_t elements = 0;
    uint64_t bytes = 0;

    if (dtype == NULL)
        return fault_set(fault, EXIT_TROUBLE, "%s: tensor %s has no dtype", file->path,
                         tensor->name);
    if (json_object_size(value) > 3)
        return fault_set(fault, EXIT_TROUBLE,
                         "%s: tensor %s has more keys than dtype, shape and data_offsets",
                         file->path, tensor->name);
    tensor->word = word_from_name(dtype);
    if (!parse_shape(json_object_get(value, "shape"), tensor, &elements))
        return fault_set(
            fault, EXIT_TROUBLE,
            "%s: tensor %s: its shape is not at most %d sizes with a product below 2^62",
            file->path, tensor->name, SAFETENSORS_DIMS_MAX);
    if (!parse_offsets(json_object_get(value, "data_offsets"), data_first, file->file_bytes,
                       tensor))
        return fault_set(fault, EXIT_TROUBLE,
                         "%s: tensor %s: data_offsets are not two ascending offsets inside the "
                         "file of %llu bytes; is it cut off?",
                         file->path, tensor->name, (unsigned long long)file->file_bytes);
    if (tensor->word == WORD_UNKNOWN) return EXIT_OK;
    if (!bytes_mul(elements, words[tensor->word].bytes, &bytes) || bytes != tensor->bytes)
        return fault_set(fault, EXIT_TROUBLE,
                         "%s: tensor %s: shape and dtype %s do not take the %llu bytes that "
                         "data_offsets give it",
                         file->path, tensor->name, dtype, (unsigned long long)tensor->bytes);
    return EXIT_OK;
}

static int by_offset(const void *left, const void *right)
{
    const struct tensor *a = left;
    const struct tensor *b = right;

    if (a->offset != b->offset) return a->offset < b->offset ? -1 : 1;
    return (a->bytes > b->bytes) - (a->bytes < b->bytes);
}

static int by_name(const void *left, const void *right)
{
    const struct tensor *a = left;
    const struct tensor *b = right;

    return strcmp(a->name, b->name);
}

// The tensors must cover the data: no overlap, no hole, nothing after the last.
static int check_cover(struct safetensors *file, uint64_t data_first, struct fault *fault)
{
    uint64_t next = data_first;

    qsort(file->tensors, file->count, sizeof *file->tensors, by_offset);
    for (uint64_t i = 0; i < file->count; i++) {
        const struct tensor *tensor = &file->tensors[i];

        if (tensor->offset != next)
            return fault_set(fault, EXIT_TROUBLE, "%s: tensor %s %s", file->path, tensor->name,
                             tensor->offset < next ? "overlaps another"
                                                   : "leaves a hole before its data");
        next += tensor->bytes;
    }
    if (next != file->file_bytes)
        return fault_set(fault, EXIT_TROUBLE, "%s: %llu bytes after the last tensor", file->path,
                         (unsigned long long)(file->file_bytes - next));
    qsort(file->tensors, file->count, sizeof *file->tensors, by_name);
    return EXIT_OK;
}

static int check_metadata(const struct safetensors *file, json_t *metadata, struct fault *fault)
{
    const char *key = NULL;
    json_t *value = NULL;

    if (!json_is_object(metadata))
        return fault_set(fault, EXIT_TROUBLE, "%s: __metadata__ is not an object", file->path);
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return fault_set(fault, EXIT_TROUBLE, "%s: __metadata__ key %s is not a string",
                             file->path, key);
    }
    return EXIT_OK;
}

static int parse_header(struct safetensors *file, uint64_t data_first, json_t *header,
                        struct fault *fault)
{
    const char *name = NULL;
    char *names = NULL;
    json_t *value = NULL;
    size_t names_bytes = 1;
    int st = EXIT_OK;

    json_object_foreach(header, name, value)
    {
        names_bytes += strlen(name) + 1;
    }
    file->tensors = calloc(json_object_size(header) + 1, sizeof *file->tensors);
    file->names = names = malloc(names_bytes);
    if (file->tensors == NULL || names == NULL)
        return fault_set(fault, EXIT_TROUBLE, "%s: out of memory", file->path);
    json_object_foreach(header, name, value)
    {
        if (strcmp(name, "__metadata__") == 0) {
            TRY(check_metadata(file, value, fault));
            file->metadata = json_incref(value);
            continue;
        }
        file->tensors[file->count].name = strcpy(names, name);
        names += strlen(name) + 1;
        TRY(parse_tensor(file, data_first, value, &file->tensors[file->count], fault));
        file->count++;
    }
    st = check_cover(file, data_first, fault);
out:
    return st;
}

// What stands for a file in a repository that was cloned without Git LFS.
static int is_pointer(const struct safetensors *file)
{
    static const char start[] = "version https://git-lfs";
    char seen[sizeof start - 1];
    struct fault none;

    return file->file_bytes >= sizeof seen &&
           read_exactly(file, 0, sizeof seen, seen, &none) == EXIT_OK &&
           memcmp(seen, start, sizeof seen) == 0;
}

static int read_header(struct safetensors *file, struct fault *fault)
{
    uint8_t prefix[PREFIX_BYTES];
    uint64_t length = 0;
    json_error_t error;
    json_t *header = NULL;
    char *text = NULL;
    int st = EXIT_OK;

    if (file->file_bytes < PREFIX_BYTES)
        return fault_set(fault, EXIT_TROUBLE, "%s: %llu bytes are no safetensors file", file->path,
                         (unsigned long long)file->file_bytes);
    TRY(read_exactly(file, 0, PREFIX_BYTES, prefix, fault));
    for (unsigned i = 0; i < PREFIX_BYTES; i++)
        length |= (uint64_t)prefix[i] << (8 * i);
    if (is_pointer(file))
        TRY(fault_set(fault, EXIT_TROUBLE,
                      "%s: a pointer of Git LFS and not the file itself; run `git lfs pull` in its "
                      "repository",
                      file->path));
    if (length > SAFETENSORS_HEADER_BYTES_MAX || length > file->file_bytes - PREFIX_BYTES)
        TRY(fault_set(fault, EXIT_TROUBLE,
                      "%s: the header claims %llu bytes, the file has %llu; is it cut off, or no "
                      "safetensors file?",
                      file->path, (unsigned long long)length,
                      (unsigned long long)file->file_bytes));
    text = malloc(length + 1);
    if (text == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "%s: out of memory", file->path));
    TRY(read_exactly(file, PREFIX_BYTES, length, text, fault));
    header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(header))
        TRY(fault_set(fault, EXIT_TROUBLE, "%s: the header is not a JSON object: %s", file->path,
                      header == NULL ? error.text : "another value stands there"));
    st = parse_header(file, PREFIX_BYTES + length, header, fault);
out:
    json_decref(header);
    free(text);
    return st;
}

int safetensors_open(struct safetensors *file, const char *path, struct fault *fault)
{
    struct stat info;
    int st = EXIT_OK;

    *file = (struct safetensors){.descriptor = -1};
    file->path = strdup(path);
    if (file->path == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "%s: out of memory", path));
    // O_NONBLOCK: a fifo by that name must not hold us up.
    file->descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file->descriptor < 0 || fstat(file->descriptor, &info) != 0)
        TRY(fault_from_errno(fault, path));
    if (!S_ISREG(info.st_mode)) TRY(fault_set(fault, EXIT_TROUBLE, "%s: not a regular file", path));
    file->file_bytes = (uint64_t)info.st_size;
    TRY(read_header(file, fault));
    return EXIT_OK;
out:
    safetensors_close(file);
    return st;
}

void safetensors_close(struct safetensors *file)
{
    if (file->path != NULL && file->descriptor >= 0) (void)close(file->descriptor);
    json_decref(file->metadata);
    free(file->tensors);
    free(file->names);
    free(file->path);
    *file = (struct safetensors){.descriptor = -1};
}

int safetensors_is(const struct safetensors *file, const struct stat *other)
{
    struct stat seen;

    return file->path != NULL && fstat(file->descriptor, &seen) == 0 &&
           seen.st_dev == other->st_dev && seen.st_ino == other->st_ino;
}

const struct tensor *safetensors_find(const struct safetensors *file, const char *name)
{
    struct tensor key = {.name = name};

    if (file->count == 0) return NULL;
    return bsearch(&key, file->tensors, file->count, sizeof key, by_name);
}

const char *safetensors_metadata(const struct safetensors *file, const char *key)
{
    return json_string_value(json_object_get(file->metadata, key));
}

int safetensors_read(const struct safetensors *file, const struct tensor *tensor, uint64_t first,
                     uint64_t bytes, void *buffer, struct fault *fault)
{
    if (first > tensor->bytes || bytes > tensor->bytes - first)
        return fault_set(fault, EXIT_TROUBLE,
                         "%s: tensor %s: bytes %llu + %llu are outside its %llu", file->path,
                         tensor->name, (unsigned long long)first, (unsigned long long)bytes,
                         (unsigned long long)tensor->bytes);
    return read_exactly(file, tensor->offset + first, bytes, buffer, fault);
}
