// Ranks as threads over one golden layer: opens them all, runs a scenario on each, closes them.

#ifndef MOXIE_HOST_TESTS_CREW_H
#define MOXIE_HOST_TESTS_CREW_H

#include "host_tests/layer.h"

struct crew;

struct crew_member {
    struct layer_rank rank;
    struct crew *crew;
    int32_t index;
    int64_t first, tokens; // its part of the layer's tokens
    struct layer_batch batch;
    moxie_step step;
    float *y; // its part of crew.y
};

struct crew {
    const char *layer_name;
    int32_t ranks;
    const char *dispatcher;
    // Sets further keys before open; may be NULL.
    void (*configure)(struct crew_member *member);
    // What each rank does.
    void (*scenario)(struct crew_member *member);
    void *arg;

    struct layer layer;
    struct mock_group *group;
    int64_t parts[MOXIE_RANKS_MAX];
    float *y; // f32 [tokens, hidden], poisoned with NaN before the scenarios start
};

// Runs it all; crew->y and crew->layer stay until crew_fini.
void crew_run(struct crew *crew);
void crew_fini(struct crew *crew);

// Fails the test, with the error's text, on another answer than `code`, or where the text lacks
// `text`, unless that is NULL.
void crew_expect(const struct crew_member *member, int32_t answer, int32_t code, const char *text);

// One whole layer by forward(), failing the test on any error.
void crew_begin(struct crew_member *member);
void crew_forward(struct crew_member *member);

// The layer with every id for which `keep(arg, id)` is 0 made "no expert", on one rank: what is
// left when ranks are gone. `y` is f32 [tokens, hidden].
void crew_reference(const char *layer_name, int (*keep)(void *arg, int32_t id), void *arg,
                    float *y);

// ||a - b|| / ||b||.
double crew_difference(const float *a, const float *b, int64_t count);

#endif
