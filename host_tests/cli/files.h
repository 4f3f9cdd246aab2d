// Files for the command's suites: written into a folder of the test's own, removed at exit.

#ifndef MOXIE_HOST_TESTS_CLI_FILES_H
#define MOXIE_HOST_TESTS_CLI_FILES_H

#include <stdint.h>

// The path of a file of that name in this process's folder; valid until the next call.
const char *file_path(const char *name);
const char *file_folder(void);

// Writes the bytes and returns the path.
const char *file_write(const char *name, const void *bytes, uint64_t count);
// A safetensors file: the header's length, the header, `data_bytes` bytes 0, 1, 2, ...
const char *file_write_safetensors(const char *name, const char *header, uint64_t data_bytes);
// Reads a whole file. owner: caller
uint8_t *file_read(const char *path, uint64_t *count);

#endif
