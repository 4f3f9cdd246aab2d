// Every slot that a plugin fills, with the thread tag of its comment in abi.h.
// Generated from abi.h by `python3 abi/ledger`; do not edit.

#ifndef MOXIE_HOST_TESTS_ABI_SLOTS_H
#define MOXIE_HOST_TESTS_ABI_SLOTS_H

#include "abi.h"

struct abi_slot {
    const char *table, *slot;
    int32_t thread; // MOXIE_THREAD_*; 0: any
    int32_t handle; // 1: the first argument is an instance, a runner or a dispatcher
};

// clang-format off
static const struct abi_slot abi_slots[] = {
    {"moxie_runner_api", "create", MOXIE_THREAD_INIT, 1},
    {"moxie_runner_api", "run", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_runner_api", "weights_updated", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_runner_api", "destroy", MOXIE_THREAD_INIT, 1},
    {"moxie_dispatcher_api", "create", MOXIE_THREAD_INIT, 1},
    {"moxie_dispatcher_api", "begin_forward", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "dispatch", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "combine", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "dispatch_send", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "dispatch_recv", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "combine_send", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "combine_recv", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "poll_error", 0, 1},
    {"moxie_dispatcher_api", "set_active_ranks", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_dispatcher_api", "destroy", MOXIE_THREAD_INIT, 1},
    {"moxie_api", "layout", 0, 0},
    {"moxie_api", "get_extension", 0, 0},
    {"moxie_api", "probe", 0, 0},
    {"moxie_api", "open", MOXIE_THREAD_INIT, 0},
    {"moxie_api", "config", 0, 1},
    {"moxie_api", "validate", 0, 1},
    {"moxie_api", "plan", 0, 1},
    {"moxie_api", "forward", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_api", "captured", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_api", "stats", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_api", "suspend", MOXIE_THREAD_INIT, 1},
    {"moxie_api", "resume", MOXIE_THREAD_INIT, 1},
    {"moxie_api", "close", MOXIE_THREAD_INIT, 1},
    {"moxie_routing_api", "route", 0, 0},
    {"moxie_expand_api", "expand", MOXIE_THREAD_INSTANCE_SERIAL, 1},
    {"moxie_expand_api", "fold", MOXIE_THREAD_INSTANCE_SERIAL, 1},
};
// clang-format on

#define ABI_SLOTS ((int)(sizeof abi_slots / sizeof abi_slots[0]))

#endif
