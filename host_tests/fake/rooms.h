// Stand-ins for the rooms behind the door, which record what came through. Two instances exist,
// with a runner and a dispatcher each.

#ifndef MOXIE_HOST_TESTS_FAKE_ROOMS_H
#define MOXIE_HOST_TESTS_FAKE_ROOMS_H

#include "plugin/dispatcher.h"
#include "plugin/instance.h"

struct fake_rooms {
    char trail[256];        // names of the rooms' functions entered, each with a space after it
    int32_t answer;         // what the next calls return
    int32_t thread_answer;  // what instance_check_thread returns
    int32_t thread_tag;     // what it was asked
    int32_t current_answer; // what instance_check_current returns
    int32_t creating;       // instance_begin_create calls without their end
    int32_t out_of_turn;    // creates and destroys outside of them
    int32_t dead;           // 1: no handle is alive
    int32_t kind;           // of dispatcher_create
    int32_t layer;          // of runner_create
    int32_t no_weights;     // 1: runner_create is not handed any
    uint64_t count;         // of runner_weights_updated
    const void *pointer;    // the plain pointer a call passed: experts, active, row_index, stream
    moxie_host host;
    moxie_matrix w1, w2;
    moxie_call call;
    moxie_step step;
    moxie_batch batch;
    moxie_routing routing;
    moxie_rows in, out;
    moxie_slab in_slabs[MOXIE_RANKS_MAX], out_slabs[MOXIE_RANKS_MAX];
    moxie_captured captured;
};

extern struct fake_rooms fake;

extern moxie_instance *const fake_instances[2];
extern moxie_runner *const fake_runners[2];
extern moxie_dispatcher *const fake_dispatchers[2];

#endif
