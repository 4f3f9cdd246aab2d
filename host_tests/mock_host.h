// A host for tests: its configuration is a table, its memory is counted, poisoned and fenced, its
// log is kept, and its ranks are threads of this process with a bootstrap that never waits for
// ever.
//
//     struct mock_host mock;
//     mock_host_init(&mock);                        // a small layer: every required key is set
//     mock_set_i64(&mock, "top_k", 4);
//     api->open(&mock.host, &instance, &mock.error); // mock.text says why it failed
//     mock_host_fini(&mock);                        // fails the test when memory was left or
//     written past

#ifndef MOXIE_HOST_TESTS_MOCK_HOST_H
#define MOXIE_HOST_TESTS_MOCK_HOST_H

#include "abi.h"

#include <pthread.h>

#define MOCK_VALUES_MAX      96
#define MOCK_KEY_BYTES       64
#define MOCK_TEXT_BYTES      256
#define MOCK_ALLOCATIONS_MAX 64
#define MOCK_LOG_BYTES       65536
#define MOCK_BACKENDS_MAX    16
#define MOCK_POISON          0xa5

enum mock_type { MOCK_I64, MOCK_F64, MOCK_STR };

// One key. The getter of another type answers WRONG_TYPE; get_f64 takes integers, as the contract
// says.
struct mock_value {
    char key[MOCK_KEY_BYTES];
    int32_t type; // enum mock_type
    int32_t code; // MOXIE_CONFIG_FOUND, or whatever the getters shall answer instead
    int64_t i64;
    double f64;
    char text[MOCK_TEXT_BYTES];
    uint64_t text_length; // what get_str reports; bytes past MOCK_TEXT_BYTES are never written
};

struct mock_allocation {
    moxie_allocation request;
    char name[MOCK_KEY_BYTES];
    unsigned char *memory;
};

struct mock_group;

struct mock_host {
    moxie_host host;   // what open() gets; set or clear callbacks at will
    moxie_error error; // for calls: text points into `text`
    char text[1024];

    struct mock_value values[MOCK_VALUES_MAX];
    uint64_t values_count;
    uint64_t reads; // calls of all getters

    pthread_mutex_t lock;                                     // of what follows
    struct mock_allocation allocations[MOCK_ALLOCATIONS_MAX]; // live ones; memory NULL: free entry
    uint64_t allocate_calls, release_calls;
    uint64_t bytes_live, bytes_peak;
    uint64_t
        allocate_fail_at; // this call of allocate (1 = the first) and all later ones fail; 0: none
    char log[MOCK_LOG_BYTES]; // "SEVERITY component: text\n", cut when full
    uint64_t log_bytes, log_lines;

    const moxie_runner_info *runners[MOCK_BACKENDS_MAX];
    const moxie_dispatcher_info *dispatchers[MOCK_BACKENDS_MAX];
    uint64_t runners_count, dispatchers_count;
    int32_t register_answer; // what register_* return

    struct mock_group *group;
    int32_t rank;
    int32_t thread_answer; // what thread_check returns once mock_host_check_threads was called; 1
                           // at first
};

// A host with every callback but parallel_for, thread_check, get_extension and the bootstrap, and
// with the keys hidden_size 64, intermediate_size 96, num_experts 8, top_k 2.
void mock_host_init(struct mock_host *mock);
// Aborts the test when an allocation is still held.
void mock_host_fini(struct mock_host *mock);

void mock_set_i64(struct mock_host *mock, const char *key, int64_t value);
void mock_set_f64(struct mock_host *mock, const char *key, double value);
void mock_set_str(struct mock_host *mock, const char *key, const char *value);
// get_str writes `bytes` of `text` (up to its capacity, NULs included) and reports `length`.
void mock_set_raw(struct mock_host *mock, const char *key, const char *text, uint64_t bytes,
                  uint64_t length);
// dp_size, tp_size and ep_size: ranks with tokens of their own each.
void mock_set_ranks(struct mock_host *mock, int64_t ranks);
// The getters answer `code` for this key, whatever is asked.
void mock_set_code(struct mock_host *mock, const char *key, int32_t code);
void mock_unset(struct mock_host *mock, const char *key);

// 1 when a log line contains `text`.
int mock_logged(struct mock_host *mock, const char *text);
// The registered table of that name, or NULL.
const moxie_runner_info *mock_runner(const struct mock_host *mock, const char *name);
const moxie_dispatcher_info *mock_dispatcher(const struct mock_host *mock, const char *name);
void mock_host_check_threads(struct mock_host *mock, int32_t answer);

// ---- Ranks as threads --------------------------------------------------------------------------

// The bootstrap of `ranks` threads. Once a rank does not come within timeout_ms, sends another size
// than the others, or mock_group_break was called, every call answers non-zero for ever.
struct mock_group *mock_group_create(int32_t ranks, int32_t timeout_ms);
void mock_group_break(struct mock_group *group);
void mock_group_destroy(struct mock_group *group);

// Sets all_gather and barrier, and the keys dp_size, tp_size, ep_size and ep_rank: every rank is a
// DP rank.
void mock_host_join(struct mock_host *mock, struct mock_group *group, int32_t rank);

// Runs body(arg, 0..ranks-1), each on a thread of its own, and returns when all have returned.
void mock_ranks_run(int32_t ranks, void (*body)(void *arg, int32_t rank), void *arg);

#endif
