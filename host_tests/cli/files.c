// Files for the command's suites.

#include "host_tests/cli/files.h"

#include "host_tests/suite.h"

#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static char folder[64];
static pid_t folder_owner;

// Each test runs in a process of its own, which must not remove another's folder.
static void remove_folder(void)
{
    DIR *entries = NULL;
    struct dirent *entry = NULL;

    if (folder_owner != getpid()) return;
    entries = opendir(folder);
    while (entries != NULL && (entry = readdir(entries)) != NULL)
        if (entry->d_name[0] != '.') (void)unlink(file_path(entry->d_name));
    if (entries != NULL) (void)closedir(entries);
    (void)rmdir(folder);
}

const char *file_folder(void)
{
    if (folder_owner == getpid()) return folder;
    (void)snprintf(folder, sizeof folder, "/tmp/moxie-test-XXXXXX");
    ck_assert_ptr_nonnull(mkdtemp(folder));
    folder_owner = getpid();
    ck_assert_int_eq(atexit(remove_folder), 0);
    return folder;
}

const char *file_path(const char *name)
{
    static char path[PATH_MAX];

    (void)snprintf(path, sizeof path, "%s/%s", file_folder(), name);
    return path;
}

const char *file_write(const char *name, const void *bytes, uint64_t count)
{
    const char *path = file_path(name);
    FILE *file = fopen(path, "wb");

    ck_assert_ptr_nonnull(file);
    ck_assert_uint_eq(fwrite(bytes, 1, count, file), count);
    ck_assert_int_eq(fclose(file), 0);
    return path;
}

const char *file_write_safetensors(const char *name, const char *header, uint64_t data_bytes)
{
    uint64_t length = strlen(header);
    uint64_t count = 8 + length + data_bytes;
    uint8_t *bytes = malloc(count);
    const char *path = NULL;

    ck_assert_ptr_nonnull(bytes);
    for (unsigned i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(length >> (8 * i));
    memcpy(bytes + 8, header, length);
    for (uint64_t i = 0; i < data_bytes; i++)
        bytes[8 + length + i] = (uint8_t)i;
    path = file_write(name, bytes, count);
    free(bytes);
    return path;
}

uint8_t *file_read(const char *path, uint64_t *count)
{
    FILE *file = fopen(path, "rb");
    uint8_t *bytes = NULL;

    ck_assert_ptr_nonnull(file);
    ck_assert_int_eq(fseek(file, 0, SEEK_END), 0);
    *count = (uint64_t)ftell(file);
    rewind(file);
    bytes = malloc(*count + 1);
    ck_assert_ptr_nonnull(bytes);
    ck_assert_uint_eq(fread(bytes, 1, *count, file), *count);
    (void)fclose(file);
    return bytes;
}
