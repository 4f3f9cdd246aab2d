// What most rules start from: an engine with a plain configuration that the plugin accepts, a
// layer, and tokens.

#ifndef MOXIE_HOSTS_CLI_CONFORM_STAGE_H
#define MOXIE_HOSTS_CLI_CONFORM_STAGE_H

#include "hosts/cli/conform_engine.h"

#define BASE_HIDDEN       256
#define BASE_INTERMEDIATE 128
#define BASE_EXPERTS      4
#define BASE_TOP_K        2
#define BASE_TOKENS_MAX   16 // forward_tokens_max

// The numbers of a plain configuration.
struct base {
    int32_t weight_format, input_format, output_format; // MOXIE_FORMAT_*
};

struct stage {
    struct check *check;
    struct base base;
    struct engine engine;
    struct layer_spec layer_spec;
    struct layer layer;
    struct tokens_spec tokens_spec;
    struct tokens tokens;
};

// Finds the first plain configuration that the plugin accepts, and sets it. With `judge` a plugin
// that accepts none is broken, else the rule is skipped.
int base_find(struct engine *engine, struct base *base, int judge);
// Sets the keys of a plain configuration.
void base_set(struct engine *engine, const struct base *base);

// Loads, finds the base, and fills the specs. Change settings and specs before stage_start.
int stage_init(struct stage *stage, struct check *check);
// The same of a plugin that did so before in this process: what would skip the rule breaks it.
int stage_init_again(struct stage *stage, struct check *check);
// Makes layer and tokens, opens and creates.
int stage_start(struct stage *stage);
// Both.
int stage_open(struct stage *stage, struct check *check);
void stage_fini(struct stage *stage);

// One forward of the stage's tokens, against the reference.
int stage_compare(struct stage *stage);
// How far a row of y may be from the reference, by what the plugin says it multiplies.
double stage_tolerance(const struct engine *engine, int32_t output_format);

// Whether what is set now is accepted. A plugin whose open fails is broken: *accepted is 0.
int stage_try(struct engine *engine, int *accepted);

#endif
