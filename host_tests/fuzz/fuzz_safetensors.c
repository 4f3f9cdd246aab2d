// hosts/cli/safetensors.c: a file of any bytes is refused with a text, or every tensor of it can be
// read and lies where the file says. The first byte of an input says how the rest becomes a file.

#include "hosts/cli/safetensors.h"

#include "host_tests/fuzz/files.h"

#include <string.h>

#define FILE_BYTES_MAX ((size_t)1 << 16)
#define PREFIX_BYTES   ((size_t)8)

enum form { FORM_RAW = 1, FORM_SPLIT = 2 };

// With FORM_RAW the input is the file. Otherwise the header's length is put before it, as no one
// guesses eight bytes: all that is left, or with FORM_SPLIT as much as the second byte says.
static size_t build(struct fuzz_input *input, uint8_t *bytes)
{
    uint8_t form = fuzz_u8(input);
    uint64_t header;
    size_t left;

    if ((form & FORM_RAW) != 0) {
        left = input->left < FILE_BYTES_MAX ? input->left : FILE_BYTES_MAX;
        fuzz_bytes(input, bytes, left);
        return left;
    }
    header = (form & FORM_SPLIT) != 0 ? (uint64_t)fuzz_u8(input) * 4 : UINT64_MAX;
    left =
        input->left < FILE_BYTES_MAX - PREFIX_BYTES ? input->left : FILE_BYTES_MAX - PREFIX_BYTES;
    if (header > left) header = left;
    memcpy(bytes, &header, sizeof header);
    fuzz_bytes(input, bytes + PREFIX_BYTES, left);
    // Data for tensors, as zeros, without an input having to be long.
    left += PREFIX_BYTES;
    if ((form & 4) != 0 && left + (form >> 3) * 4u <= FILE_BYTES_MAX) {
        memset(bytes + left, 0, (size_t)(form >> 3) * 4);
        left += (size_t)(form >> 3) * 4;
    }
    return left;
}

static void check_tensor(const struct safetensors *file, const uint8_t *bytes, size_t count,
                         const struct tensor *tensor)
{
    static uint8_t read[FILE_BYTES_MAX];
    struct fault fault = {.text = ""};
    uint64_t elements = 1;
    char text[24];

    PROPERTY(tensor->name != NULL && tensor->ndim <= SAFETENSORS_DIMS_MAX);
    PROPERTY(tensor->offset <= count && tensor->bytes <= count - tensor->offset);
    for (uint32_t i = 0; i < tensor->ndim; i++) {
        PROPERTY(tensor->shape[i] >= 0);
        elements = fuzz_mul(elements, (uint64_t)tensor->shape[i]);
    }
    if (tensor->word != WORD_UNKNOWN)
        PROPERTY(fuzz_mul(elements, word_bytes(tensor->word)) == tensor->bytes);
    PROPERTY(safetensors_find(file, tensor->name) == tensor);
    PROPERTY(safetensors_read(file, tensor, 0, tensor->bytes, read, &fault) == EXIT_OK);
    PROPERTY(memcmp(read, bytes + tensor->offset, tensor->bytes) == 0);
    PROPERTY(safetensors_read(file, tensor, tensor->bytes, 1, read, &fault) == EXIT_TROUBLE);
    PROPERTY(safetensors_read(file, tensor, 1, UINT64_MAX, read, &fault) == EXIT_TROUBLE);
    tensor_print(tensor, text, sizeof text);
    PROPERTY(memchr(text, 0, sizeof text) != NULL);
}

// The tensors are by name, cover the data, and none is twice.
static void check_file(const struct safetensors *file, const uint8_t *bytes, size_t count)
{
    uint64_t sum = 0, header;

    PROPERTY(count >= PREFIX_BYTES && file->file_bytes == count);
    memcpy(&header, bytes, sizeof header);
    for (uint64_t i = 0; i < file->count; i++) {
        check_tensor(file, bytes, count, &file->tensors[i]);
        PROPERTY(i == 0 || strcmp(file->tensors[i - 1].name, file->tensors[i].name) < 0);
        sum += file->tensors[i].bytes;
    }
    PROPERTY(PREFIX_BYTES + header + sum == count);
    PROPERTY(safetensors_find(file, "") == NULL || file->tensors[0].name[0] == 0);
    (void)safetensors_metadata(file, "format");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fuzz_file on_disk = {.descriptor = -1};
    static uint8_t bytes[FILE_BYTES_MAX];
    struct fuzz_input input = {data, size};
    struct fault fault = {.text = ""};
    struct safetensors file;
    size_t count = build(&input, bytes);
    int st;

    if (on_disk.descriptor < 0) fuzz_file_init(&on_disk);
    fuzz_file_write(&on_disk, bytes, count);
    st = safetensors_open(&file, on_disk.path, &fault);
    if (st == EXIT_OK) {
        check_file(&file, bytes, count);
    } else {
        PROPERTY(st == EXIT_TROUBLE && fault.code == st && fault.text[0] != '\0');
        PROPERTY(memchr(fault.text, 0, sizeof fault.text) != NULL);
        PROPERTY(file.path == NULL && file.descriptor == -1 && file.tensors == NULL);
    }
    safetensors_close(&file);
    return 0;
}
