// What `moxie run` works on.

#include "hosts/cli/source.h"

static int open_weights(struct source *source, const struct source_paths *paths,
                        struct fault *fault)
{
    int st = EXIT_OK;

    if (paths->layer_file != NULL) {
        TRY(checkpoint_open_file(&source->checkpoint, paths->layer_file, fault));
        TRY(model_from_layer_file(&source->model, &source->checkpoint.files[0], fault));
    } else {
        TRY(checkpoint_open_folder(&source->checkpoint, paths->model, fault));
        TRY(model_from_config(&source->model, &source->checkpoint, fault));
    }
    TRY(experts_describe(&source->layout, &source->checkpoint, &source->model,
                         paths->layer_file != NULL ? LAYER_FILE : paths->layer, fault));
out:
    return st;
}

int source_open(struct source *source, const struct source_paths *paths, struct fault *fault)
{
    const struct safetensors *file = NULL;
    int st = EXIT_OK;

    *source = (struct source){.layout = {.gate = NULL}};
    TRY(open_weights(source, paths, fault));
    file = &source->checkpoint.files[0];
    if (paths->input != NULL) {
        TRY(safetensors_open(&source->input_file, paths->input, fault));
        file = &source->input_file;
    }
    TRY(inputs_describe(&source->inputs, file, &source->model, fault));
out:
    if (st != EXIT_OK) source_close(source);
    return st;
}

void source_close(struct source *source)
{
    checkpoint_close(&source->checkpoint);
    safetensors_close(&source->input_file);
    *source = (struct source){.layout = {.gate = NULL}};
}

int source_is_in(const struct source *source, const char *path)
{
    struct stat file;

    return stat(path, &file) == 0 && (checkpoint_is_in(&source->checkpoint, &file) ||
                                      safetensors_is(&source->input_file, &file));
}
