// A set of named tensors.

#include "hosts/cli/checkpoint.h"

#include "hosts/cli/json_file.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARDS_MAX       ((uint64_t)4096)
#define SINGLE_FILE      "model.safetensors"
#define INDEX_FILE       "model.safetensors.index.json"
#define INDEX_BYTES_MAX  ((size_t)64 << 20)
#define CONFIG_BYTES_MAX ((size_t)16 << 20)

// "folder/name". owner: caller
static char *path_in(const char *folder, const char *name)
{
    char *path = NULL;

    return asprintf(&path, "%s/%s", folder, name) < 0 ? NULL : path;
}

// A shard is a file of the folder itself: an index may not lead anywhere else.
static int shard_name_safe(const char *name)
{
    return name[0] != '\0' && name[0] != '.' && strchr(name, '/') == NULL;
}

int folder_read_json(const char *folder, const char *name, int optional, json_t **out,
                     struct fault *fault)
{
    char *path = path_in(folder, name);
    size_t bytes_max = strcmp(name, INDEX_FILE) == 0 ? INDEX_BYTES_MAX : CONFIG_BYTES_MAX;
    int st = EXIT_OK;

    if (path == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    st = json_file_read_regular(path, bytes_max, out, fault);
    if (st == EXIT_OK && *out == NULL && !optional)
        st = fault_set(fault, EXIT_TROUBLE, "%s: %s", path, strerror(ENOENT));
    free(path);
    return st;
}

// Numbers the shards that the index names, and refuses names that leave the folder.
static int number_shards(struct checkpoint *checkpoint, struct fault *fault)
{
    const char *name = NULL;
    json_t *value = NULL;
    uint64_t count = 0;

    checkpoint->shards = json_object();
    json_object_foreach(checkpoint->shard_of, name, value)
    {
        const char *shard = json_string_value(value);

        if (shard == NULL || !shard_name_safe(shard))
            return fault_set(fault, EXIT_TROUBLE,
                             "%s/" INDEX_FILE ": the shard of %s is not a plain file name",
                             checkpoint->folder, name);
        if (json_object_get(checkpoint->shards, shard) != NULL) continue;
        if (count == SHARDS_MAX)
            return fault_set(fault, EXIT_TROUBLE, "%s/" INDEX_FILE ": more than %d shards",
                             checkpoint->folder, (int)SHARDS_MAX);
        if (json_object_set_new(checkpoint->shards, shard, json_integer((json_int_t)count)) != 0)
            return fault_set(fault, EXIT_TROUBLE, "out of memory");
        count++;
    }
    checkpoint->files_count = count;
    checkpoint->files = calloc(count + 1, sizeof *checkpoint->files);
    if (checkpoint->files == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    return EXIT_OK;
}

static int open_index(struct checkpoint *checkpoint, struct fault *fault)
{
    json_t *index = NULL;
    int st = EXIT_OK;

    TRY(folder_read_json(checkpoint->folder, INDEX_FILE, 1, &index, fault));
    if (index == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "%s holds neither " SINGLE_FILE " nor " INDEX_FILE,
                      checkpoint->folder));
    checkpoint->shard_of = json_incref(json_object_get(index, "weight_map"));
    if (!json_is_object(checkpoint->shard_of))
        TRY(fault_set(fault, EXIT_TROUBLE, "%s/" INDEX_FILE ": no object weight_map",
                      checkpoint->folder));
    st = number_shards(checkpoint, fault);
out:
    json_decref(index);
    return st;
}

static int open_single(struct checkpoint *checkpoint, const char *path, struct fault *fault)
{
    checkpoint->files = calloc(1, sizeof *checkpoint->files);
    if (checkpoint->files == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    checkpoint->files_count = 1;
    return safetensors_open(&checkpoint->files[0], path, fault);
}

int checkpoint_open_folder(struct checkpoint *checkpoint, const char *folder, struct fault *fault)
{
    char *path = NULL;
    struct stat seen; // of a link that leads nowhere, too: a download that was cut short
    int st = EXIT_OK;

    *checkpoint = (struct checkpoint){.folder = strdup(folder)};
    path = path_in(folder, SINGLE_FILE);
    if (checkpoint->folder == NULL || path == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "out of memory"));
    TRY(folder_read_json(folder, "config.json", 1, &checkpoint->config, fault));
    if (checkpoint->config == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE,
                      "%s/config.json is missing; --model wants the folder of a Hugging Face model",
                      folder));
    if (lstat(path, &seen) == 0)
        TRY(open_single(checkpoint, path, fault));
    else
        TRY(open_index(checkpoint, fault));
out:
    free(path);
    if (st != EXIT_OK) checkpoint_close(checkpoint);
    return st;
}

int checkpoint_open_file(struct checkpoint *checkpoint, const char *path, struct fault *fault)
{
    int st = EXIT_OK;

    *checkpoint = (struct checkpoint){.folder = NULL};
    st = open_single(checkpoint, path, fault);
    if (st != EXIT_OK) checkpoint_close(checkpoint);
    return st;
}

void checkpoint_close(struct checkpoint *checkpoint)
{
    for (uint64_t i = 0; i < checkpoint->files_count && checkpoint->files != NULL; i++)
        safetensors_close(&checkpoint->files[i]);
    free(checkpoint->files);
    free(checkpoint->folder);
    json_decref(checkpoint->config);
    json_decref(checkpoint->shard_of);
    json_decref(checkpoint->shards);
    *checkpoint = (struct checkpoint){.folder = NULL};
}

int checkpoint_has(const struct checkpoint *checkpoint, const char *name)
{
    if (checkpoint->shard_of != NULL) return json_object_get(checkpoint->shard_of, name) != NULL;
    return safetensors_find(&checkpoint->files[0], name) != NULL;
}

// The file that the index gives a tensor to, opened. NULL and no fault when the index does not know
// it.
static int shard_of(struct checkpoint *checkpoint, const char *name, struct safetensors **out,
                    struct fault *fault)
{
    const char *shard = json_string_value(json_object_get(checkpoint->shard_of, name));
    char *path = NULL;
    int st = EXIT_OK;

    *out = NULL;
    if (shard == NULL) return EXIT_OK;
    *out = &checkpoint->files[json_integer_value(json_object_get(checkpoint->shards, shard))];
    if ((*out)->path != NULL) return EXIT_OK;
    path = path_in(checkpoint->folder, shard);
    if (path == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    st = safetensors_open(*out, path, fault);
    free(path);
    return st;
}

int checkpoint_find(struct checkpoint *checkpoint, const char *name, struct located *located,
                    struct fault *fault)
{
    struct safetensors *file = &checkpoint->files[0];

    *located = (struct located){NULL, NULL};
    if (checkpoint->shard_of != NULL) {
        int st = shard_of(checkpoint, name, &file, fault);

        if (st != EXIT_OK) return st;
    }
    if (file != NULL) located->tensor = safetensors_find(file, name);
    located->file = file;
    if (located->tensor != NULL) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "%s: no tensor %s",
                     file != NULL ? file->path : checkpoint->folder, name);
}

static int is_file(const struct stat *file, const char *folder, const char *name)
{
    char *path = path_in(folder, name);
    struct stat seen;
    int same = path != NULL && stat(path, &seen) == 0 && seen.st_dev == file->st_dev &&
               seen.st_ino == file->st_ino;

    free(path);
    return same;
}

int checkpoint_is_in(const struct checkpoint *checkpoint, const struct stat *file)
{
    const char *name = NULL;
    json_t *number = NULL;

    for (uint64_t i = 0; i < checkpoint->files_count; i++)
        if (safetensors_is(&checkpoint->files[i], file)) return 1;
    json_object_foreach(checkpoint->shards, name, number)
    {
        if (is_file(file, checkpoint->folder, name)) return 1;
    }
    return checkpoint->folder != NULL && (is_file(file, checkpoint->folder, "config.json") ||
                                          is_file(file, checkpoint->folder, INDEX_FILE));
}
