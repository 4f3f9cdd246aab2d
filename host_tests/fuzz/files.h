// Files that exist in memory alone, for code under test that takes a path.

#ifndef MOXIE_HOST_TESTS_FUZZ_FILES_H
#define MOXIE_HOST_TESTS_FUZZ_FILES_H

#include "host_tests/fuzz/fuzz.h"

struct fuzz_file {
    int descriptor;
    char path[64];
};

// An empty file without a name in any folder; it lives as long as the process.
void fuzz_file_init(struct fuzz_file *file);
// Makes these bytes all that is in the file.
void fuzz_file_write(const struct fuzz_file *file, const void *bytes, size_t count);

#endif
