// Writes safetensors files.

#include "hosts/cli/safetensors.h"

#include "hosts/cli/target.h"

#include <stdlib.h>
#include <string.h>

// The header, padded with spaces so that the data starts at a multiple of 8. owner: caller
static char *header_text(const struct tensor_out *tensor, uint64_t data_bytes, uint64_t *length)
{
    json_t *shape = json_array();
    json_t *header = NULL;
    char *text = NULL;
    char *padded = NULL;

    for (uint32_t i = 0; i < tensor->ndim; i++)
        (void)json_array_append_new(shape, json_integer(tensor->shape[i]));
    header = json_pack("{s:{s:s, s:o, s:[i, I]}}", tensor->name, "dtype", word_name(tensor->word),
                       "shape", shape, "data_offsets", 0, (json_int_t)data_bytes);
    if (header != NULL) text = json_dumps(header, JSON_COMPACT);
    json_decref(header);
    if (text == NULL) return NULL;
    *length = (strlen(text) + 7) / 8 * 8;
    padded = malloc(*length);
    if (padded != NULL) {
        memset(padded, ' ', *length);
        memcpy(padded, text, strlen(text));
    }
    free(text);
    return padded;
}

static int write_header(struct target *target, const char *header, uint64_t length,
                        struct fault *fault)
{
    uint8_t prefix[8];
    int st = EXIT_OK;

    for (unsigned i = 0; i < 8; i++)
        prefix[i] = (uint8_t)(length >> (8 * i));
    TRY(target_write(target, prefix, sizeof prefix, fault));
    TRY(target_write(target, header, length, fault));
out:
    return st;
}

int safetensors_write(const char *path, const struct tensor_out *tensor, struct fault *fault)
{
    uint64_t data_bytes = word_bytes(tensor->word);
    uint64_t length = 0;
    char *header = NULL;
    struct target target;
    int st = EXIT_OK;

    for (uint32_t i = 0; i < tensor->ndim; i++)
        if (!bytes_mul(data_bytes, (uint64_t)tensor->shape[i], &data_bytes))
            return fault_set(fault, EXIT_TROUBLE, "%s: the tensor is too large", path);
    header = header_text(tensor, data_bytes, &length);
    if (header == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "%s: out of memory", path));
    TRY(target_open(&target, path, fault));
    st = write_header(&target, header, length, fault);
    if (st == EXIT_OK) st = target_write(&target, tensor->data, data_bytes, fault);
    st = target_close(&target, st, fault);
out:
    free(header);
    return st;
}
