// The whole life of a rank on a host that may fail, call by call, through the tables of the ABI.

#ifndef MOXIE_HOST_TESTS_LIFE_H
#define MOXIE_HOST_TESTS_LIFE_H

#include "host_tests/fault_host.h"
#include "host_tests/layer.h"

enum life_step {
    LIFE_OPEN,
    LIFE_VALIDATE,
    LIFE_PLAN,
    LIFE_RUNNER,
    LIFE_DISPATCHER,
    LIFE_BEGIN,
    LIFE_FORWARD,
    LIFE_BEGIN_HALVES,
    LIFE_DISPATCH_SEND,
    LIFE_DISPATCH_RECV,
    LIFE_RUN,
    LIFE_COMBINE_SEND,
    LIFE_COMBINE_RECV,
    LIFE_ACTIVE_RANKS, // not on dispatcher local
    LIFE_BEGIN_AGAIN,
    LIFE_FORWARD_AGAIN, // the last that needs the other ranks
    LIFE_CAPTURED,
    LIFE_STATS,
    LIFE_CLOSE, // destroys first
    LIFE_STEPS  // it went through
};

struct life {
    struct fault_host host;
    const struct layer *layer;
    int32_t ranks, index;
    int64_t parts[MOXIE_RANKS_MAX], first;
    float *y; // [parts[index], hidden]
    int64_t y_bytes;

    const moxie_api *api;
    moxie_instance *instance;
    moxie_runner *runner;
    moxie_dispatcher *dispatcher;
    const moxie_runner_api *runner_api;
    const moxie_dispatcher_api *dispatcher_api;
    const moxie_plan *plan;
    const moxie_rows *in, *out; // between LIFE_DISPATCH_RECV and LIFE_COMBINE_RECV
    // What the calls are given. A test may spoil them, and mend them again.
    struct layer_weights_view view;
    struct layer_batch batch;
    moxie_step step;
    moxie_call call;
    moxie_rows rows_in, rows_out; // copies of *in and *out
    moxie_slab slabs_in[MOXIE_RANKS_MAX];
    moxie_captured captured;
    moxie_stats stats;

    int32_t stopped_at, code; // the first step that failed, LIFE_STEPS when none did
    int32_t blamed;           // error.rank of that
    char text[sizeof((struct mock_host *)0)->text];
};

// One rank. The host is ready for further keys, and to join ranks; call fault_host_arm after.
void life_init(struct life *life, const struct layer *layer, const char *dispatcher,
               const struct fault *fault);
void life_join(struct life *life, struct mock_group *group, int32_t ranks, int32_t index);

// One step. Rows are checked, and so is a failure: a text in words, its code, out pointers NULL.
int32_t life_step(struct life *life, enum life_step step);
const char *life_step_name(enum life_step step);
// Steps from `first` on, until one fails; notes which.
void life_go(struct life *life, enum life_step first);
// Destroys and closes what there is, as often as the host's thread_check wants it, and fails the
// test when anything is left.
void life_end(struct life *life);
const moxie_api *life_api(void);

#endif
