// A rank process's side of the bootstrap.

#include "hosts/cli/bootstrap.h"

#include "hosts/cli/wire.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define JOB_BYTES_MAX ((uint64_t)16 << 20)
#define FIRST_WORD_MS ((int64_t)60000)

static int64_t deadline_after(int64_t timeout_ms)
{
    return clock_ns() + timeout_ms * 1000000;
}

// Reads the job's text and parses it.
static int read_job(const struct link *link, json_t **job, struct fault *fault)
{
    int64_t deadline_ns = deadline_after(FIRST_WORD_MS);
    struct wire_header header;
    char *text = NULL;
    int st = EXIT_OK;

    if (wire_read(link->descriptor, &header, sizeof header, deadline_ns) != 0 ||
        header.message != MESSAGE_JOB || header.bytes > JOB_BYTES_MAX)
        return fault_set(fault, EXIT_TROUBLE, "no job came from the parent process");
    text = malloc(header.bytes + 1);
    if (text == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    if (wire_read(link->descriptor, text, header.bytes, deadline_ns) != 0)
        TRY(fault_set(fault, EXIT_TROUBLE, "the job from the parent process was cut off"));
    *job = json_loadb(text, header.bytes, 0, NULL);
    if (*job == NULL) TRY(fault_set(fault, EXIT_TROUBLE, "the job is not JSON"));
out:
    free(text);
    return st;
}

int link_open(struct link *link, json_t **job, struct fault *fault)
{
    int type = 0;
    socklen_t length = sizeof type;
    int rank = 0;
    int ranks = 0;
    json_int_t silence_ms = 0;
    int st = EXIT_OK;

    *job = NULL;
    *link = (struct link){.descriptor = BOOTSTRAP_DESCRIPTOR};
    // The kernel ends this process when the parent dies; one that died before this line has closed
    // the socket.
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getsockopt(link->descriptor, SOL_SOCKET, SO_TYPE, &type, &length) != 0)
        return fault_set(fault, EXIT_TROUBLE,
                         BOOTSTRAP_ARGUMENT
                         " is for `moxie run` and `moxie bench` alone, which start their ranks so");
    TRY(read_job(link, job, fault));
    if (json_unpack(*job, "{s:i, s:i, s:I}", "rank", &rank, "ranks", &ranks, "silence_ms",
                    &silence_ms) != 0 ||
        ranks < 1 || ranks > BOOTSTRAP_RANKS_MAX || rank < 0 || rank >= ranks)
        TRY(fault_set(fault, EXIT_TROUBLE, "the job has no rank"));
    link->rank = rank;
    link->ranks = ranks;
    link->silence_ms = silence_ms;
out:
    if (st != EXIT_OK) {
        json_decref(*job);
        *job = NULL;
    }
    return st;
}

// One message, whole.
static int send_message(const struct link *link, enum message message, const void *payload,
                        uint64_t bytes)
{
    const struct wire_header header = {.message = (uint32_t)message, .bytes = bytes};
    int64_t deadline_ns = deadline_after(link->silence_ms);
    int failed = wire_write(link->descriptor, &header, sizeof header, deadline_ns, -1);

    return failed != 0 ? failed : wire_write(link->descriptor, payload, bytes, deadline_ns, -1);
}

int link_send(const struct link *link, enum message message, const void *payload, uint64_t bytes,
              struct fault *fault)
{
    int failed = send_message(link, message, payload, bytes);

    if (failed == 0) return EXIT_OK;
    return fault_set(fault, EXIT_TROUBLE, "the parent process cannot be reached: %s",
                     strerror(failed));
}

int32_t link_all_gather(void *ctx, const void *send, void *recv, uint64_t bytes)
{
    const struct link *link = ctx;
    uint64_t all_bytes = bytes * (uint64_t)link->ranks;
    struct wire_header header;
    // The parent bounds this wait: it answers, or ends every rank and says which one was silent.
    const int64_t deadline_ns = INT64_MAX;

    if (bytes > WIRE_PAYLOAD_BYTES_MAX / BOOTSTRAP_RANKS_MAX) return EMSGSIZE;
    if (send_message(link, MESSAGE_GATHER, send, bytes) != 0) return EPIPE;
    if (wire_read(link->descriptor, &header, sizeof header, deadline_ns) != 0) return EPIPE;
    if (header.message != MESSAGE_GATHER || header.bytes != all_bytes) return EPROTO;
    return wire_read(link->descriptor, recv, all_bytes, deadline_ns);
}

int32_t link_barrier(void *ctx)
{
    return link_all_gather(ctx, NULL, NULL, 0);
}

void link_progress(void *ctx, double share)
{
    struct link *link = ctx;
    int64_t now_ns = clock_ns();

    if (now_ns - link->told_ns < 100000000) return;
    link->told_ns = now_ns;
    (void)send_message(link, MESSAGE_PROGRESS, &share, sizeof share);
}
