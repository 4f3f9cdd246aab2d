// What a model's config.json says, in the words of the configuration.

#ifndef MOXIE_HOSTS_CLI_MODEL_KEYS_H
#define MOXIE_HOSTS_CLI_MODEL_KEYS_H

#include "hosts/cli/model.h"

// Sizes, top-k and activation, and on which side router weights are. owner: caller; NULL when out
// of memory
json_t *model_keys(const struct model *model);

// Of the config.json in a Hugging Face folder, and of a ModelOpt model's hf_quant_config.json: its
// experts' sizes and activation, how many layers may have them, and what weights and rows are
// stored as; of weights that are quantised in a way that has no word weight_format is null. owner:
// caller
int model_keys_read(const char *folder, json_t **keys, struct fault *fault);

#endif
