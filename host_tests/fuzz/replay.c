// Feeds files to a fuzzer's function, for compilers without libFuzzer: replay FILE_OR_FOLDER...

#include "host_tests/fuzz/fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>

#define INPUT_BYTES_MAX ((size_t)1 << 20)

static int replay_file(const char *path)
{
    static uint8_t buffer[INPUT_BYTES_MAX];
    FILE *file = fopen(path, "rbe");
    uint8_t *input;
    size_t bytes;

    if (file == NULL) return 0;
    bytes = fread(buffer, 1, sizeof buffer, file);
    (void)fclose(file);
    // Of exactly its size, so that a read past it is seen.
    input = malloc(bytes + (bytes == 0));
    if (input == NULL) return 0;
    for (size_t i = 0; i < bytes; i++)
        input[i] = buffer[i];
    (void)LLVMFuzzerTestOneInput(input, bytes);
    free(input);
    return 1;
}

// Returns how many inputs it replayed.
static int replay_folder(const char *folder)
{
    DIR *entries = opendir(folder);
    const struct dirent *entry;
    char path[4096];
    int count = 0;

    if (entries == NULL) return 0;
    while ((entry = readdir(entries)) != NULL) {
        if (entry->d_name[0] == '.') continue;
        (void)snprintf(path, sizeof path, "%s/%s", folder, entry->d_name);
        count += replay_file(path);
    }
    (void)closedir(entries);
    return count;
}

int main(int argc, char **argv)
{
    struct stat info;
    int count = 0;

    for (int i = 1; i < argc; i++) {
        if (stat(argv[i], &info) == 0 && S_ISDIR(info.st_mode))
            count += replay_folder(argv[i]);
        else
            count += replay_file(argv[i]);
    }
    (void)printf("%d inputs\n", count);
    return count > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
