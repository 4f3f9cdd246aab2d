// What the suites of transports put their ranks through: each opens a transport and two windows,
// one of them has a call that fails or says what is not so, and what all of them answer is kept.

#ifndef MOXIE_HOST_TESTS_TRIAL_H
#define MOXIE_HOST_TESTS_TRIAL_H

#include "host_tests/ranks.h"
#include "host_tests/suite.h"

#include <errno.h>

#define RANKS      3
#define CALLS_MAX  64
#define TEXT_BYTES 256

// ---- calls that fail ---------------------------------------------------------------------------

static _Thread_local int32_t calls_left = NEVER; // calls until the one that fails
static _Thread_local int32_t call_failed;        // it has

static inline int call_fails(void)
{
    if (calls_left < 0 || calls_left-- > 0) return 0;
    call_failed = 1;
    errno = EMFILE;
    return 1;
}

// 1 when one has failed; none will any more.
static inline int32_t calls_end(void)
{
    int32_t failed = call_failed;

    calls_left = NEVER;
    call_failed = 0;
    return failed;
}

static inline int32_t files_open(void)
{
    return names_in("/proc/self/fd");
}

// ---- trials ------------------------------------------------------------------------------------

struct outcome {
    int32_t code, rank, failed;
    char text[TEXT_BYTES];
};

// What every rank of a test shares; arguments first.
struct trial {
    uint64_t bytes[RANKS]; // of the second window
    int32_t victim;        // the rank that something happens to
    int32_t call;          // its call that fails, or NEVER
    int32_t window_answer; // of its device for a window; 0: it is made
    int32_t offset, flip;  // of what it sends
    int32_t at_call;       // the all_gather tampered with, or died at; NEVER: all
    int64_t pid;           // rank 0's
    struct outcome outcomes[RANKS];
};

// A size that is refused.
struct trial_size {
    uint64_t bytes;
    int32_t code;
    int32_t alone; // only the victim asks for it
};

struct trial_windows {
    struct transport *transport;
    struct window *windows[2];
};

static inline struct trial *trial_create(uint64_t bytes)
{
    struct trial *trial = shared_memory(sizeof *trial);

    for (int32_t r = 0; r < RANKS; r++)
        trial->bytes[r] = bytes;
    trial->victim = 1;
    trial->call = trial->at_call = NEVER;
    return trial;
}

// Opens one transport and two windows, and keeps the first failure.
static inline void trial_open(const struct transport_ops *ops, const struct rank *rank,
                              const uint64_t bytes[2], struct outcome *outcome,
                              struct trial_windows *opened)
{
    moxie_error error = {
        .struct_size = sizeof error, .text = outcome->text, .text_bytes = TEXT_BYTES, .rank = -9};

    *opened = (struct trial_windows){.transport = NULL};
    outcome->text[0] = '\0';
    outcome->code = ops->create(&rank->bootstrap, &opened->transport, &error);
    for (int i = 0; i < 2 && outcome->code == MOXIE_OK; i++) {
        outcome->code = ops->window_open(opened->transport, bytes[i], &opened->windows[i], &error);
        ck_assert_int_eq(opened->windows[i] == NULL, outcome->code != MOXIE_OK);
    }
    outcome->rank = error.rank;
}

static inline void trial_close(const struct transport_ops *ops, const struct trial_windows *opened)
{
    if (opened->transport == NULL) return;
    ops->window_close(opened->transport, opened->windows[1]);
    ops->window_close(opened->transport, opened->windows[0]);
    ops->destroy(opened->transport);
}

static inline void trial_run(struct trial *trial, void (*body)(struct rank *rank))
{
    struct rank all[HUB_RANKS_MAX];

    ranks_init(all, RANKS, body, trial);
    ranks_as_threads(all, RANKS);
    ranks_fini(all);
}

static inline int32_t trial_failures(const struct trial *trial)
{
    int32_t failures = 0;

    for (int32_t r = 0; r < RANKS; r++)
        failures += trial->outcomes[r].code != MOXIE_OK;
    return failures;
}

// Every rank answers the same code, naming the same rank in the same words.
static inline void trial_alike(const struct trial *trial, int32_t code, int32_t rank)
{
    for (int32_t r = 0; r < RANKS; r++) {
        const struct outcome *outcome = &trial->outcomes[r];

        ck_assert_msg(outcome->code == code, "rank %d: %d %s", r, outcome->code, outcome->text);
        ck_assert_int_eq(outcome->rank, rank);
        ck_assert_str_eq(outcome->text, trial->outcomes[0].text);
        ck_assert_uint_gt(strlen(outcome->text), 20);
    }
}

static inline void trial_refuses(struct trial *trial, const struct trial_size *size,
                                 void (*body)(struct rank *rank))
{
    for (int32_t r = 0; r < RANKS; r++)
        if (r == 1 || !size->alone) trial->bytes[r] = size->bytes;
    trial_run(trial, body);
    trial_alike(trial, size->code, size->alone ? 1 : 0);
}

#endif
