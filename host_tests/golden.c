// The golden files' reader, see golden.h.

#include "host_tests/golden.h"

#include "host_tests/suite.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void golden_open(struct golden *golden, const char *path)
{
    char full[1024];
    uint64_t header_bytes;
    long size;
    FILE *file;

    (void)snprintf(full, sizeof full, "%s/%s", MOXIE_GOLDEN_DIR, path);
    file = fopen(full, "rb");
    ck_assert_msg(file != NULL, "cannot open %s", full);
    ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
    size = ftell(file);
    ck_assert_int_gt(size, 8);
    rewind(file);
    golden->bytes = malloc((size_t)size);
    ck_assert_ptr_nonnull(golden->bytes);
    ck_assert_uint_eq(fread(golden->bytes, 1, (size_t)size, file), (size_t)size);
    (void)fclose(file);

    memcpy(&header_bytes, golden->bytes, sizeof header_bytes);
    ck_assert_uint_lt(header_bytes, (uint64_t)size - 8);
    golden->header = malloc(header_bytes + 1);
    ck_assert_ptr_nonnull(golden->header);
    memcpy(golden->header, golden->bytes + 8, header_bytes);
    golden->header[header_bytes] = '\0';
    golden->data_offset = 8 + header_bytes;
}

void golden_close(struct golden *golden)
{
    free(golden->bytes);
    free(golden->header);
    memset(golden, 0, sizeof *golden);
}

// The text after `"name":`, or NULL.
static const char *value_of(const char *json, const char *name)
{
    char quoted[256];
    const char *found;

    (void)snprintf(quoted, sizeof quoted, "\"%s\":", name);
    found = strstr(json, quoted);
    return found == NULL ? NULL : found + strlen(quoted);
}

int golden_has(const struct golden *golden, const char *name)
{
    return value_of(golden->header, name) != NULL;
}

struct golden_tensor golden_get(const struct golden *golden, const char *name)
{
    struct golden_tensor tensor = {.shape = {1, 1, 1, 1}, .count = 1};
    const char *entry = value_of(golden->header, name);
    int64_t begin, end;
    const char *at;
    char *rest;

    ck_assert_msg(entry != NULL, "no tensor %s", name);
    at = value_of(entry, "dtype");
    ck_assert_ptr_nonnull(at);
    ck_assert_int_eq(sscanf(at, " \"%11[A-Z0-9_]\"", tensor.dtype), 1);
    at = strchr(value_of(entry, "shape"), '[') + 1;
    while (*at != ']') {
        ck_assert_int_lt(tensor.ndim, 4);
        tensor.shape[tensor.ndim] = strtoll(at, &rest, 10);
        at = rest;
        tensor.count *= tensor.shape[tensor.ndim++];
        at += strspn(at, ", ");
    }
    at = value_of(entry, "data_offsets");
    ck_assert_ptr_nonnull(at);
    ck_assert_int_eq(sscanf(at, " [ %" SCNd64 " , %" SCNd64, &begin, &end), 2);
    tensor.data = golden->bytes + golden->data_offset + begin;
    tensor.bytes = end - begin;
    return tensor;
}

void golden_text(const struct golden *golden, const char *key, char *text, size_t capacity)
{
    const char *at = value_of(golden->header, "__metadata__");
    size_t length;

    ck_assert_uint_gt(capacity, 0);
    text[0] = '\0';
    at = at == NULL ? NULL : value_of(at, key);
    if (at == NULL || strchr(at, '"') == NULL) return;
    at = strchr(at, '"') + 1;
    length = strcspn(at, "\"");
    if (length >= capacity) length = capacity - 1;
    memcpy(text, at, length);
    text[length] = '\0';
}

int64_t golden_int(const struct golden *golden, const char *key)
{
    char text[64];

    golden_text(golden, key, text, sizeof text);
    return strtoll(text, NULL, 10);
}

double golden_value(const struct golden_tensor *tensor, int64_t index)
{
    float number;
    int32_t integer;
    uint16_t half;
    uint32_t bits;

    assert_many(index < tensor->count, "number %" PRId64 " of %" PRId64, index, tensor->count);
    if (strcmp(tensor->dtype, "F32") == 0) {
        memcpy(&number, tensor->data + 4 * index, 4);
        return (double)number;
    }
    if (strcmp(tensor->dtype, "BF16") == 0) {
        memcpy(&half, tensor->data + 2 * index, 2);
        bits = (uint32_t)half << 16;
        memcpy(&number, &bits, 4);
        return (double)number;
    }
    if (strcmp(tensor->dtype, "I32") == 0) {
        memcpy(&integer, tensor->data + 4 * index, 4);
        return integer;
    }
    assert_many(strcmp(tensor->dtype, "U8") == 0, "numbers of %s", tensor->dtype);
    return tensor->data[index];
}

double golden_error(const float *got, const struct golden_tensor *want)
{
    double difference = 0, norm = 0;

    for (int64_t i = 0; i < want->count; i++) {
        double value = golden_value(want, i);

        difference += ((double)got[i] - value) * ((double)got[i] - value);
        norm += value * value;
    }
    return sqrt(difference) / sqrt(norm);
}
