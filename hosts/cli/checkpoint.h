// A set of named tensors: a Hugging Face folder (config.json, one file or a sharded index) or a
// single safetensors file. Shards are opened when a tensor in them is first asked for.

#ifndef MOXIE_HOSTS_CLI_CHECKPOINT_H
#define MOXIE_HOSTS_CLI_CHECKPOINT_H

#include "hosts/cli/safetensors.h"

#include <sys/stat.h>

struct checkpoint {
    char *folder;     // NULL for a single file
    json_t *config;   // config.json, or NULL for a single file
    json_t *shard_of; // object: tensor name -> shard's file name; NULL without an index
    json_t *shards;   // object: shard's file name -> number in files
    struct safetensors *files;
    uint64_t files_count;
};

// A tensor and the file it is in.
struct located {
    const struct safetensors *file;
    const struct tensor *tensor;
};

// A JSON object of a folder; where it is optional and there is none, *out = NULL. owner: caller
int folder_read_json(const char *folder, const char *name, int optional, json_t **out,
                     struct fault *fault);

// Both: on failure nothing is held.
int checkpoint_open_folder(struct checkpoint *checkpoint, const char *folder, struct fault *fault);
int checkpoint_open_file(struct checkpoint *checkpoint, const char *path, struct fault *fault);
// Accepts a zeroed or closed checkpoint.
void checkpoint_close(struct checkpoint *checkpoint);

// 1 when a tensor of that name is promised; opens nothing.
int checkpoint_has(const struct checkpoint *checkpoint, const char *name);
// Opens the shard if need be; a missing tensor is a fault.
int checkpoint_find(struct checkpoint *checkpoint, const char *name, struct located *located,
                    struct fault *fault);

// 1 when that file is one of the checkpoint, be it opened or not.
int checkpoint_is_in(const struct checkpoint *checkpoint, const struct stat *file);

#endif
