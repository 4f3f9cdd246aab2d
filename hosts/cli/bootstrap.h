// R processes of this program, started by posix_spawn of itself (never a fork: the library and the
// bench have threads) and joined by socket pairs. The parent is the hub of every all-gather and
// barrier, which it serves in one poll loop with deadlines; results travel over the same sockets. A
// child that dies ends the run with its rank and how it died; an interrupt ends the children.

#ifndef MOXIE_HOSTS_CLI_BOOTSTRAP_H
#define MOXIE_HOSTS_CLI_BOOTSTRAP_H

#include "hosts/cli/fault.h"
#include "hosts/cli/progress.h"

#include <jansson.h>

#define BOOTSTRAP_RANKS_MAX 64
// argv[1] of a child; its socket is descriptor BOOTSTRAP_DESCRIPTOR.
#define BOOTSTRAP_ARGUMENT   "--rank-process"
#define BOOTSTRAP_DESCRIPTOR 3

enum message {
    MESSAGE_JOB = 1,  // parent to child: JSON
    MESSAGE_GATHER,   // child to parent: one part; back: all parts in rank order. A barrier has no
                      // bytes
    MESSAGE_PROGRESS, // child to parent: a double, 0..1
    MESSAGE_ROWS,     // child to parent: f32 rows
    MESSAGE_RESULT,   // child to parent: JSON
    MESSAGE_FAULT,    // child to parent: int32 code, text
    MESSAGE_DONE,     // child to parent: the last message
};

// ---- The parent --------------------------------------------------------------------------------

// Called for MESSAGE_ROWS and MESSAGE_RESULT; a non-zero answer ends the run with that fault.
struct hub_handler {
    void *ctx;
    int (*take)(void *ctx, int rank, enum message message, const void *payload, uint64_t bytes,
                struct fault *fault);
};

struct hub_options {
    int ranks;
    int64_t silence_ms; // a child that says nothing for so long ends the run
    const char *doing;  // for the progress line
};

// Starts the children, gives each `job` with "rank" set, and serves them until every one is done.
// When it returns no child is left.
int hub_run(const struct hub_options *options, json_t *job, const struct hub_handler *handler,
            struct fault *fault);

// ---- A child -----------------------------------------------------------------------------------

struct link {
    int descriptor;
    int rank, ranks;
    int64_t silence_ms;
    int64_t told_ns; // when progress was last told
};

// Takes the job. owner of *job: caller
int link_open(struct link *link, json_t **job, struct fault *fault);

// As moxie_host's; ctx is a struct link.
int32_t link_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes);
int32_t link_barrier(void *ctx);

int link_send(const struct link *link, enum message message, const void *payload, uint64_t bytes,
              struct fault *fault);
// At most ten times a second; a lost one does no harm. ctx is a struct link.
void link_progress(void *ctx, double share);

#endif
