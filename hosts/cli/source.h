// What `moxie run` works on: a checkpoint and its layer, the model, where the experts are, and the
// inputs.

#ifndef MOXIE_HOSTS_CLI_SOURCE_H
#define MOXIE_HOSTS_CLI_SOURCE_H

#include "hosts/cli/inputs.h"

// As on the command line; either layer_file, or model and input.
struct source_paths {
    const char *layer_file;
    const char *model;
    const char *input; // NULL with layer_file: the layer file itself
    int64_t layer;
};

struct source {
    struct checkpoint checkpoint;
    struct model model;
    struct expert_layout layout;
    struct safetensors input_file; // open only when apart from the layer file
    struct inputs inputs;
};

// Opens and describes everything; reads no weights. Do not move `source`: it points into itself.
int source_open(struct source *source, const struct source_paths *paths, struct fault *fault);
// Accepts a zeroed or half-opened source.
void source_close(struct source *source);

// 1 when that file is one that is read, now or by a rank.
int source_is_in(const struct source *source, const char *path);

#endif
