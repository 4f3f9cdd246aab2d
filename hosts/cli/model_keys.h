// What a model's config.json says, in the words of the configuration.

#ifndef MOXIE_HOSTS_CLI_MODEL_KEYS_H
#define MOXIE_HOSTS_CLI_MODEL_KEYS_H

#include "hosts/cli/model.h"

// Sizes, top-k and activation, and on which side router weights are. owner: caller; NULL when out
// of memory
json_t *model_keys(const struct model *model);

// What a folder says. owner: caller; model_said_free, after any outcome
struct model_said {
    json_t *keys;   // of the configuration
    json_t *unread; // {key: {"code": an exit code, "text": why}}, of those that it does not say, or
                    // not in words of the configuration
};

// Of the config.json in a Hugging Face folder, and of a ModelOpt model's hf_quant_config.json: its
// experts' sizes and activation, how many layers have them, and what weights and rows are stored
// as.
int model_keys_read(const char *folder, struct model_said *said, struct fault *fault);
void model_said_free(struct model_said *said);

#endif
