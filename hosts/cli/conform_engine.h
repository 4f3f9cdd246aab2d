// The engine that a rule plays: a configuration in a table, memory that is fenced, poisoned and
// counted, tables that were registered, and a note of what the plugin did wrong, for the rule that
// judges it.

#ifndef MOXIE_HOSTS_CLI_CONFORM_ENGINE_H
#define MOXIE_HOSTS_CLI_CONFORM_ENGINE_H

#include "abi/loader.h"
#include "hosts/cli/conform_layer.h"

#include <pthread.h>

#define ENGINE_SETTINGS_MAX 96
#define ENGINE_BLOCKS_MAX   128
#define ENGINE_BACKENDS_MAX 16
#define ENGINE_LAYERS_MAX   2
#define ENGINE_TEXT_BYTES   64
#define ENGINE_NOTE_BYTES   256
#define ENGINE_ERROR_BYTES  1024

enum setting_type { SETTING_I64, SETTING_F64, SETTING_STR };

struct setting {
    char key[ENGINE_TEXT_BYTES];
    int32_t type; // enum setting_type
    int32_t code; // what the getters answer: MOXIE_CONFIG_FOUND as a rule
    int64_t i64;
    double f64;
    char text[ENGINE_TEXT_BYTES];
    uint64_t length; // that get_str tells
};

// One allocation that the plugin holds.
struct block {
    moxie_allocation request;
    char name[ENGINE_TEXT_BYTES];
    unsigned char *base;   // what was allocated; NULL: a free entry
    unsigned char *memory; // what the plugin got
    uint64_t bytes;        // of memory
};

struct seat; // one of several ranks: conform_crew.h

struct engine {
    struct check *check;
    moxie_library library;
    const moxie_api *api;
    struct seat *seat; // NULL: the only rank
    moxie_host host;   // what open gets: change it before engine_open
    moxie_error error;
    char text[ENGINE_ERROR_BYTES + 16]; // ends in zeros whatever the plugin does

    struct setting settings[ENGINE_SETTINGS_MAX];
    int settings_count;
    uint64_t questions; // calls of the getters

    pthread_mutex_t lock; // of what follows, up to the notes
    struct block blocks[ENGINE_BLOCKS_MAX];
    uint64_t allocations, bytes_live;
    uint64_t allocation_fails;           // this one (1 = the first) and all later ones; 0: none
    int closed;                          // no callback is allowed any more
    char memory_note[ENGINE_NOTE_BYTES]; // the first misuse of allocate and release
    char fence_note[ENGINE_NOTE_BYTES];  // the first write outside of a buffer
    char log_note[ENGINE_NOTE_BYTES];    // the first malformed line, or late callback
    uint64_t log_lines, host_misbehaving;
    int32_t thread_answer;                    // what thread_check says
    int32_t runner_answer, dispatcher_answer; // what register_runner and register_dispatcher say

    const moxie_runner_info *runners[ENGINE_BACKENDS_MAX];
    const moxie_dispatcher_info *dispatchers[ENGINE_BACKENDS_MAX];
    int runners_count, dispatchers_count;

    moxie_instance *instance;
    const moxie_report *report;
    const moxie_plan *plan;
    const moxie_runner_info *runner_info;         // the chosen one
    const moxie_dispatcher_info *dispatcher_info; // the chosen one
    moxie_runner *runners_made[ENGINE_LAYERS_MAX];
    moxie_dispatcher *dispatcher;
    struct layer_view views[ENGINE_LAYERS_MAX];
};

// Loads the plugin. A plugin that no host can load skips the rule: another one says why.
int engine_init(struct engine *engine, struct check *check);
// Takes everything down, whatever state it is in; judges nothing.
void engine_fini(struct engine *engine);

void engine_set_i64(struct engine *engine, const char *key, int64_t value);
void engine_set_f64(struct engine *engine, const char *key, double value);
void engine_set_str(struct engine *engine, const char *key, const char *value);
// The getters answer `code` for this key.
void engine_set_code(struct engine *engine, const char *key, int32_t code);
void engine_unset(struct engine *engine, const char *key);

// A fresh error for a call.
moxie_error *engine_error(struct engine *engine);

// open alone, by its status.
int32_t engine_open_alone(struct engine *engine);
// open, validate and plan, as they come: the status of open.
int32_t engine_try_open(struct engine *engine);
// As engine_try_open; anything but an accepted configuration is broken.
int engine_open(struct engine *engine);
int engine_accepted(const struct engine *engine);
// "KEY: MESSAGE" of the first reason.
const char *engine_reason(const struct engine *engine, char *text, uint64_t bytes);

// The value of a key of the snapshot; "" when there is none.
const char *engine_config(const struct engine *engine, const char *key);
const moxie_runner_info *engine_runner(const struct engine *engine, const char *name);
const moxie_dispatcher_info *engine_dispatcher(const struct engine *engine, const char *name);
// Finds the tables that the configuration chose. A plugin that registered none is broken.
int engine_choose(struct engine *engine);

// A runner per layer 0..layers-1, all of `layer`, and the dispatcher.
int engine_create(struct engine *engine, const struct layer *layer, int layers);
int engine_create_runner(struct engine *engine, const struct layer *layer, int index);
int engine_create_dispatcher(struct engine *engine);
void engine_destroy(struct engine *engine);
// The status of close; the instance is gone when it is OK.
int32_t engine_close(struct engine *engine);

// begin_forward of a step, and then forward of one layer, by their statuses.
int32_t engine_begin(struct engine *engine, const moxie_step *step);
int32_t engine_run(struct engine *engine, struct tokens *tokens);
// Both; anything but OK is broken.
int engine_forward(struct engine *engine, struct tokens *tokens);

// Looks at every fence of what is allocated, and notes the first that was written over.
void engine_check_fences(struct engine *engine);

// The plan as text, with every field of every buffer.
void engine_print_plan(const struct engine *engine, char *text, uint64_t bytes);

#endif
