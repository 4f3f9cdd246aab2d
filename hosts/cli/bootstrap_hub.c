// The parent's side of the bootstrap: starts the rank processes and serves them.

#include "hosts/cli/bootstrap.h"

#include "hosts/cli/interrupts.h"
#include "hosts/cli/wire.h"

#include <errno.h>
#include <poll.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define POLL_MS     100
#define TOGETHER_MS 1000 // of ranks that fall silent together
#define ENDING_MS                                                                                  \
    2000 // how long a child may take to end once it said it is done, or closed its socket

struct child {
    pid_t pid;        // 0: none, or reaped
    int descriptor;   // -1: none
    int done;         // MESSAGE_DONE came
    int gathering;    // its part is in `payload`; it waits for the others
    double share;     // of its loading
    int64_t heard_ns; // when it last said something
    struct wire_header header;
    uint64_t header_got, payload_got;
    uint8_t *payload; // header.bytes
};

struct hub {
    const struct hub_options *options;
    const struct hub_handler *handler;
    struct fault *fault;
    struct progress progress;
    struct child children[BOOTSTRAP_RANKS_MAX];
    struct interrupts interrupts;
    int signals; // descriptor that becomes readable on an interrupt
};

static int spawn_process(const struct hub *hub, int descriptor, pid_t *pid)
{
    char *argv[] = {program_invocation_name, (char[]){BOOTSTRAP_ARGUMENT}, NULL};
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    int failed = posix_spawn_file_actions_init(&actions);

    if (failed != 0) return failed;
    failed = posix_spawnattr_init(&attributes);
    if (failed != 0) {
        (void)posix_spawn_file_actions_destroy(&actions);
        return failed;
    }
    failed = posix_spawn_file_actions_adddup2(&actions, descriptor, BOOTSTRAP_DESCRIPTOR);
    // Nothing that a child prints may stand between the lines of our result.
    if (failed == 0)
        failed = posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
    if (failed == 0) failed = posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
    if (failed == 0) failed = posix_spawnattr_setsigmask(&attributes, &hub->interrupts.mask_before);
    if (failed == 0)
        failed = posix_spawn(pid, "/proc/self/exe", &actions, &attributes, argv, environ);
    (void)posix_spawnattr_destroy(&attributes);
    (void)posix_spawn_file_actions_destroy(&actions);
    return failed;
}

// An interrupt ends it with EINTR.
static int write_to(const struct hub *hub, int rank, const void *data, uint64_t bytes,
                    int64_t deadline_ns)
{
    return wire_write(hub->children[rank].descriptor, data, bytes, deadline_ns, hub->signals);
}

static int send_job(struct hub *hub, int rank, json_t *job)
{
    int64_t deadline_ns = clock_ns() + hub->options->silence_ms * 1000000;
    struct wire_header header = {.message = MESSAGE_JOB};
    char *text = NULL;
    int failed = 0;

    (void)json_object_set_new(job, "rank", json_integer(rank));
    text = json_dumps(job, JSON_COMPACT);
    if (text == NULL) return ENOMEM;
    header.bytes = strlen(text);
    failed = write_to(hub, rank, &header, sizeof header, deadline_ns);
    if (failed == 0) failed = write_to(hub, rank, text, header.bytes, deadline_ns);
    free(text);
    return failed;
}

static int start_child(struct hub *hub, int rank, json_t *job)
{
    struct child *child = &hub->children[rank];
    int ends[2] = {-1, -1};
    int failed = 0;

    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d: no socket: %s%s", rank,
                         strerror(errno), fault_start_remedy(errno));
    child->descriptor = ends[0];
    failed = spawn_process(hub, ends[1], &child->pid);
    (void)close(ends[1]);
    if (failed != 0) {
        child->pid = 0;
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d cannot be started: %s%s", rank,
                         strerror(failed), fault_start_remedy(failed));
    }
    child->heard_ns = clock_ns();
    failed = send_job(hub, rank, job);
    if (failed != 0)
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d does not take its job: %s", rank,
                         strerror(failed));
    return EXIT_OK;
}

// Waits for the process to end, at most `wait_ms`; then kills it. Returns its wait status.
static int reap(struct child *child, int64_t wait_ms)
{
    const struct timespec nap = {.tv_nsec = 2000000};
    int64_t deadline_ns = clock_ns() + wait_ms * 1000000;
    int status = 0;

    while (waitpid(child->pid, &status, WNOHANG) == 0) {
        if (clock_ns() > deadline_ns) (void)kill(child->pid, SIGKILL);
        (void)nanosleep(&nap, NULL);
    }
    child->pid = 0;
    return status;
}

static int died(struct hub *hub, int rank, const char *when)
{
    int status = reap(&hub->children[rank], ENDING_MS);

    if (WIFSIGNALED(status))
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d died of signal %d (%s) %s", rank,
                         WTERMSIG(status), strsignal(WTERMSIG(status)), when);
    return fault_set(hub->fault, EXIT_TROUBLE, "rank %d ended with exit code %d %s", rank,
                     WEXITSTATUS(status), when);
}

static int take_fault(struct hub *hub, int rank)
{
    const struct child *child = &hub->children[rank];
    int32_t code = EXIT_TROUBLE;
    int length = 0;

    if (child->header.bytes < sizeof code)
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d failed and gave no reason", rank);
    memcpy(&code, child->payload, sizeof code);
    length = child->header.bytes - sizeof code < FAULT_TEXT_BYTES
                 ? (int)(child->header.bytes - sizeof code)
                 : FAULT_TEXT_BYTES;
    if (code != EXIT_REFUSED) code = EXIT_TROUBLE;
    if (hub->options->ranks == 1)
        return fault_set(hub->fault, code, "%.*s", length,
                         (const char *)child->payload + sizeof code);
    return fault_set(hub->fault, code, "rank %d: %.*s", rank, length,
                     (const char *)child->payload + sizeof code);
}

// A complete message of one child.
static int take_message(struct hub *hub, int rank)
{
    struct child *child = &hub->children[rank];
    enum message message = (enum message)child->header.message;

    switch (message) {
    case MESSAGE_GATHER:
        child->gathering = 1; // the payload stays until every rank's part is here
        return EXIT_OK;
    case MESSAGE_PROGRESS:
        if (child->header.bytes == sizeof child->share)
            memcpy(&child->share, child->payload, sizeof child->share);
        return EXIT_OK;
    case MESSAGE_ROWS:
    case MESSAGE_RESULT:
        return hub->handler->take(hub->handler->ctx, rank, message, child->payload,
                                  child->header.bytes, hub->fault);
    case MESSAGE_FAULT:
        return take_fault(hub, rank);
    case MESSAGE_DONE:
        child->done = 1;
        return EXIT_OK;
    default:
        return fault_set(hub->fault, EXIT_TROUBLE, "rank %d sent an unknown message", rank);
    }
}

static void forget_message(struct child *child)
{
    free(child->payload);
    child->payload = NULL;
    child->header_got = 0;
    child->payload_got = 0;
    child->gathering = 0;
}

// Where the next bytes of the message go; 0 bytes: it is complete.
static uint64_t next_part(struct child *child, uint8_t **to)
{
    if (child->header_got < sizeof child->header) {
        *to = (uint8_t *)&child->header + child->header_got;
        return sizeof child->header - child->header_got;
    }
    *to = child->payload + child->payload_got;
    return child->header.bytes - child->payload_got;
}

static int begin_payload(struct hub *hub, int rank)
{
    struct child *child = &hub->children[rank];

    if (child->header.bytes <= WIRE_PAYLOAD_BYTES_MAX)
        child->payload = malloc(child->header.bytes + 1);
    if (child->payload != NULL) return EXIT_OK;
    return fault_set(hub->fault, EXIT_TROUBLE, "out of memory for %llu bytes from rank %d",
                     (unsigned long long)child->header.bytes, rank);
}

// Reads what is there, up to the end of one message.
static int receive(struct hub *hub, int rank)
{
    struct child *child = &hub->children[rank];
    uint8_t *to = NULL;
    uint64_t wanted = next_part(child, &to);

    while (wanted > 0) {
        ssize_t got = recv(child->descriptor, to, wanted, MSG_DONTWAIT);

        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return EXIT_OK;
        if (got <= 0) return died(hub, rank, "before it was done");
        child->heard_ns = clock_ns();
        if (child->header_got < sizeof child->header)
            child->header_got += (uint64_t)got;
        else
            child->payload_got += (uint64_t)got;
        if (child->header_got == sizeof child->header && child->payload == NULL) {
            int st = begin_payload(hub, rank);

            if (st != EXIT_OK) return st;
        }
        wanted = next_part(child, &to);
    }
    if (take_message(hub, rank) != EXIT_OK) return hub->fault->code;
    if (!child->gathering) forget_message(child);
    return EXIT_OK;
}

static int answer_gather(struct hub *hub)
{
    int ranks = hub->options->ranks;
    uint64_t bytes = hub->children[0].header.bytes;
    const struct wire_header header = {.message = MESSAGE_GATHER, .bytes = bytes * (uint64_t)ranks};
    int64_t deadline_ns = clock_ns() + hub->options->silence_ms * 1000000;

    for (int to = 0; to < ranks; to++) {
        int failed = write_to(hub, to, &header, sizeof header, deadline_ns);

        for (int from = 0; from < ranks && failed == 0; from++)
            failed = write_to(hub, to, hub->children[from].payload, bytes, deadline_ns);
        if (failed == EINTR) return fault_set(hub->fault, EXIT_TROUBLE, "interrupted");
        if (failed == EPIPE || failed == ECONNRESET) return died(hub, to, "before it was done");
        if (failed != 0)
            return fault_set(hub->fault, EXIT_TROUBLE,
                             "rank %d does not take what it asked for: %s", to, strerror(failed));
    }
    for (int rank = 0; rank < ranks; rank++) {
        forget_message(&hub->children[rank]);
        hub->children[rank].heard_ns = clock_ns();
    }
    return EXIT_OK;
}

// Answers once every rank's part is here.
static int serve_gather(struct hub *hub)
{
    int gathering = 0;
    int done = 0;

    for (int rank = 0; rank < hub->options->ranks; rank++) {
        gathering += hub->children[rank].gathering;
        done += hub->children[rank].done;
    }
    if (gathering > 0 && done > 0)
        return fault_set(hub->fault, EXIT_TROUBLE, "a rank is done while another waits for it");
    if (gathering < hub->options->ranks) return EXIT_OK;
    for (int rank = 1; rank < hub->options->ranks; rank++)
        if (hub->children[rank].header.bytes != hub->children[0].header.bytes)
            return fault_set(hub->fault, EXIT_TROUBLE,
                             "ranks 0 and %d gather %llu and %llu bytes; they have lost step", rank,
                             (unsigned long long)hub->children[0].header.bytes,
                             (unsigned long long)hub->children[rank].header.bytes);
    return answer_gather(hub);
}

// The ranks that have been silent for `least_ms`, as "rank 1" or "ranks 0, 1 and 2"; NULL when
// there is none. owner: caller
static char *silent_ranks(const struct hub *hub, int64_t now_ns, int64_t least_ms)
{
    int silent[BOOTSTRAP_RANKS_MAX];
    int count = 0;
    char *text = NULL;
    size_t length = 0;
    FILE *stream = NULL;

    for (int rank = 0; rank < hub->options->ranks; rank++) {
        const struct child *child = &hub->children[rank];

        if (child->done || child->gathering) continue;
        if ((now_ns - child->heard_ns) / 1000000 > least_ms) silent[count++] = rank;
    }
    if (count == 0) return NULL;
    stream = open_memstream(&text, &length);
    if (stream == NULL) return NULL;
    for (int i = 0; i < count; i++)
        (void)fprintf(stream, "%s%d",
                      i > 0       ? i + 1 < count ? ", " : " and "
                      : count > 1 ? "ranks "
                                  : "rank ",
                      silent[i]);
    (void)fprintf(stream, count > 1 ? " have" : " has");
    return fclose(stream) == 0 ? text : NULL;
}

// Ranks fall silent together when one of them holds the others up, so all that are about as silent
// as the first to pass the deadline are named with it.
static int check_silence(struct hub *hub)
{
    int64_t now_ns = clock_ns();
    int64_t silence_ms = hub->options->silence_ms;
    char *names = silent_ranks(hub, now_ns, silence_ms);
    int st = EXIT_OK;

    if (names == NULL) return EXIT_OK;
    free(names);
    names = silent_ranks(hub, now_ns, silence_ms > TOGETHER_MS ? silence_ms - TOGETHER_MS : 0);
    st = fault_set(hub->fault, EXIT_TROUBLE,
                   "%s been silent for %lld s; --timeout SECONDS waits longer",
                   names != NULL ? names : "a rank has", (long long)silence_ms / 1000);
    free(names);
    return st;
}

static void show_progress(struct hub *hub)
{
    double sum = 0;

    for (int rank = 0; rank < hub->options->ranks; rank++)
        sum += hub->children[rank].share;
    progress_show(&hub->progress, hub->options->doing, sum / hub->options->ranks);
}

// One round of the loop. *left is how many children are not done.
static int serve(struct hub *hub, int *left)
{
    struct pollfd entries[BOOTSTRAP_RANKS_MAX + 1];
    int ranks = hub->options->ranks;
    int st = EXIT_OK;

    *left = 0;
    for (int rank = 0; rank < ranks; rank++) {
        const struct child *child = &hub->children[rank];

        // Of one that waits for the others, only its end is of interest.
        entries[rank] = (struct pollfd){
            .fd = child->done ? -1 : child->descriptor,
            .events = child->gathering ? 0 : POLLIN,
        };
        *left += !child->done;
    }
    entries[ranks] = (struct pollfd){.fd = hub->signals, .events = POLLIN};
    if (*left == 0) return EXIT_OK;
    if (poll(entries, (nfds_t)ranks + 1, POLL_MS) < 0 && errno != EINTR)
        return fault_set(hub->fault, EXIT_TROUBLE, "poll: %s", strerror(errno));
    if (entries[ranks].revents != 0) return fault_set(hub->fault, EXIT_TROUBLE, "interrupted");
    for (int rank = 0; rank < ranks; rank++) {
        if (entries[rank].revents == 0) continue;
        if (hub->children[rank].gathering) TRY(died(hub, rank, "while it waited for the others"));
        TRY(receive(hub, rank));
    }
    TRY(serve_gather(hub));
    TRY(check_silence(hub));
    show_progress(hub);
out:
    return st;
}

// Lets children end that are done, kills the others. A child that fails after its work is a fault
// too.
static int stop(struct hub *hub, int st)
{
    for (int rank = 0; rank < hub->options->ranks; rank++) {
        struct child *child = &hub->children[rank];

        if (child->pid != 0 && st != EXIT_OK) (void)kill(child->pid, SIGKILL);
        if (child->descriptor >= 0) (void)close(child->descriptor);
        child->descriptor = -1;
    }
    for (int rank = 0; rank < hub->options->ranks; rank++) {
        struct child *child = &hub->children[rank];
        int status = child->pid != 0 ? reap(child, ENDING_MS) : 0;

        forget_message(child);
        if (st == EXIT_OK && status != 0)
            st = fault_set(hub->fault, EXIT_TROUBLE, "rank %d ended badly after its work: %s %d",
                           rank, WIFSIGNALED(status) ? "signal" : "exit code",
                           WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
    }
    return st;
}

// Interrupts come as readable bytes from here on, so that no child outlives this process.
static int listen_for_interrupts(struct hub *hub)
{
    interrupts_hold(&hub->interrupts);
    hub->signals = signalfd(-1, &hub->interrupts.held, SFD_CLOEXEC | SFD_NONBLOCK);
    if (hub->signals >= 0) return EXIT_OK;
    return fault_set(hub->fault, EXIT_TROUBLE, "signalfd: %s%s", strerror(errno),
                     fault_start_remedy(errno));
}

static void deliver_interrupts(struct hub *hub)
{
    if (hub->signals >= 0) (void)close(hub->signals);
    interrupts_deliver(&hub->interrupts);
}

int hub_run(const struct hub_options *options, json_t *job, const struct hub_handler *handler,
            struct fault *fault)
{
    struct hub *hub = calloc(1, sizeof *hub);
    int left = options->ranks;
    int st = EXIT_OK;

    if (hub == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    hub->options = options;
    hub->handler = handler;
    hub->fault = fault;
    progress_init(&hub->progress);
    for (int rank = 0; rank < options->ranks; rank++)
        hub->children[rank].descriptor = -1;
    (void)json_object_set_new(job, "ranks", json_integer(options->ranks));
    (void)json_object_set_new(job, "silence_ms", json_integer(options->silence_ms));
    TRY(listen_for_interrupts(hub));
    for (int rank = 0; rank < options->ranks; rank++)
        TRY(start_child(hub, rank, job));
    while (left > 0)
        TRY(serve(hub, &left));
out:
    st = stop(hub, st);
    progress_clear(&hub->progress);
    deliver_interrupts(hub);
    free(hub);
    return st;
}
