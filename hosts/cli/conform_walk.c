// One rule in a process of its own.

#include "hosts/cli/conform_walk.h"

#include "hosts/cli/json_file.h"
#include "hosts/cli/progress.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define OUTPUT_BYTES_MAX 65536
#define POLL_MS          100

extern char **environ;

// What a child writes: the verdict on one stream, its trace and whatever the plugin prints on the
// other.
struct stream {
    int descriptor; // -1: ended
    char text[OUTPUT_BYTES_MAX];
    size_t length; // of a trace, that of the last part
};

struct child {
    pid_t pid;
    int verbose;
    struct stream verdict, trace;
    char where[CHECK_WHERE_BYTES];
    int crashed;    // `where` is that of the first thread that crashed, and stands
    char said[200]; // the last other line of the trace, or a sanitizer's summary
};

json_t *walk_row(const struct rule *rule, const struct check *check)
{
    return json_pack("{s:s, s:s, s:o, s:o}", "name", rule->name, "verdict",
                     verdict_name(check->verdict), "where", json_text(check->where), "message",
                     json_text(check->message));
}

static int spawn(const struct walk *walk, const struct rule *rule, struct child *child,
                 const int ends[2])
{
    char *argv[] = {program_invocation_name,
                    (char[]){"conform"},
                    (char[]){"--plugin"},
                    NULL,
                    (char[]){"--rule"},
                    NULL,
                    (char[]){"--json"},
                    (char[]){"--trace"},
                    NULL};
    posix_spawn_file_actions_t actions;
    int failed = posix_spawn_file_actions_init(&actions);

    if (failed != 0) return failed;
    // posix_spawn reads its arguments only, whatever their type says.
    argv[3] = (char *)(uintptr_t)walk->plugin;
    argv[5] = (char *)(uintptr_t)rule->name;
    failed = posix_spawn_file_actions_adddup2(&actions, ends[0], STDOUT_FILENO);
    if (failed == 0) failed = posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    if (failed == 0)
        failed = posix_spawn(&child->pid, "/proc/self/exe", &actions, NULL, argv, environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    return failed;
}

static int start(const struct walk *walk, const struct rule *rule, struct child *child,
                 struct fault *fault)
{
    int verdict[2] = {-1, -1}, trace[2] = {-1, -1};
    int failed = 0;

    if (pipe2(verdict, O_CLOEXEC) != 0 || pipe2(trace, O_CLOEXEC) != 0) {
        failed = errno;
        if (verdict[0] >= 0) {
            (void)close(verdict[0]);
            (void)close(verdict[1]);
        }
        return fault_set(fault, EXIT_TROUBLE, "rule %s: no pipe: %s%s", rule->name,
                         strerror(failed), fault_start_remedy(failed));
    }
    failed = spawn(walk, rule, child, (int[]){verdict[1], trace[1]});
    (void)close(verdict[1]);
    (void)close(trace[1]);
    child->verdict.descriptor = verdict[0];
    child->trace.descriptor = trace[0];
    if (failed == 0) return EXIT_OK;
    (void)close(verdict[0]);
    (void)close(trace[0]);
    return fault_set(fault, EXIT_TROUBLE, "rule %s: no process can be started: %s%s", rule->name,
                     strerror(failed), fault_start_remedy(failed));
}

static void hear_line(struct child *child, char *line)
{
    const char *const marks[] = {TRACE_MARK, CRASH_MARK};

    for (int crash = 0; crash < 2; crash++) {
        size_t length = strlen(marks[crash]);

        if (strncmp(line, marks[crash], length) != 0) continue;
        if (!child->crashed) (void)snprintf(child->where, sizeof child->where, "%s", line + length);
        child->crashed |= crash;
        return;
    }
    if (child->verbose) (void)fprintf(stderr, "%s\n", line);
    if (line[0] == '\0' || strncmp(child->said, "SUMMARY: ", 9) == 0) return;
    (void)snprintf(child->said, sizeof child->said, "%s", line);
}

// Takes whole lines off the front of the trace; a line longer than the buffer is taken as it is.
static void hear(struct child *child)
{
    struct stream *trace = &child->trace;
    char *begin = trace->text, *end = NULL;

    trace->text[trace->length] = '\0';
    while ((end = strchr(begin, '\n')) != NULL) {
        *end = '\0';
        hear_line(child, begin);
        begin = end + 1;
    }
    trace->length = strlen(begin);
    memmove(trace->text, begin, trace->length + 1);
    if (trace->length == sizeof trace->text - 1 || (trace->descriptor < 0 && trace->length > 0)) {
        hear_line(child, trace->text);
        trace->length = 0;
    }
}

// One read. A stream that is full is read on and dropped, so that its writer goes on.
static void drain(struct stream *stream)
{
    char spill[512];
    size_t room = sizeof stream->text - 1 - stream->length;
    ssize_t got = read(stream->descriptor, room > 0 ? stream->text + stream->length : spill,
                       room > 0 ? room : sizeof spill);

    if (got > 0) {
        if (room > 0) stream->length += (size_t)got;
        return;
    }
    if (got < 0 && errno == EINTR) return;
    (void)close(stream->descriptor);
    stream->descriptor = -1;
}

// Reads until the child has closed both streams, or the deadline has passed: then returns 0.
static int listen_to(struct child *child, int64_t deadline_ns)
{
    while (child->verdict.descriptor >= 0 || child->trace.descriptor >= 0) {
        struct pollfd polled[2] = {{.fd = child->verdict.descriptor, .events = POLLIN},
                                   {.fd = child->trace.descriptor, .events = POLLIN}};

        if (clock_ns() > deadline_ns) return 0;
        if (poll(polled, 2, POLL_MS) <= 0) continue;
        if (polled[0].revents != 0) drain(&child->verdict);
        if (polled[1].revents == 0) continue;
        drain(&child->trace);
        hear(child);
    }
    return 1;
}

// Waits for the end of a child that has closed its streams; one that lives on is killed. Returns
// its wait status.
static int reap(struct child *child, int64_t deadline_ns)
{
    int status = 0;

    while (waitpid(child->pid, &status, WNOHANG) == 0) {
        if (clock_ns() > deadline_ns) (void)kill(child->pid, SIGKILL);
        (void)poll(NULL, 0, 1);
    }
    if (child->verdict.descriptor >= 0) (void)close(child->verdict.descriptor);
    if (child->trace.descriptor >= 0) (void)close(child->trace.descriptor);
    return status;
}

// The row that the child has written; 0 when there is none.
static int read_verdict(struct child *child, struct check *check)
{
    json_t *document = NULL, *row = NULL;
    const char *verdict = NULL;
    int known = 0;

    document = json_loadb(child->verdict.text, child->verdict.length, 0, NULL);
    row = json_array_get(json_object_get(document, "rules"), 0);
    verdict = json_string_value(json_object_get(row, "verdict"));
    for (int i = VERDICT_PASS; verdict != NULL && i <= VERDICT_SKIP; i++) {
        if (strcmp(verdict, verdict_name(i)) != 0) continue;
        check->verdict = i;
        known = 1;
    }
    if (known) {
        (void)snprintf(check->where, sizeof check->where, "%s",
                       json_string_value(json_object_get(row, "where")));
        (void)snprintf(check->message, sizeof check->message, "%s",
                       json_string_value(json_object_get(row, "message")));
    }
    json_decref(document);
    return known;
}

static int ended_well(int status)
{
    return WIFEXITED(status) &&
           (WEXITSTATUS(status) == EXIT_OK || WEXITSTATUS(status) == EXIT_REFUSED);
}

static void judge_end(struct child *child, int status, int64_t deadline_s, struct check *check)
{
    const char *before = child->said[0] != '\0' ? "; the last it printed: " : "";

    (void)snprintf(check->where, sizeof check->where, "%s", child->where);
    if (deadline_s > 0)
        (void)broken(check, "hung for %lld s%s%s", (long long)deadline_s, before, child->said);
    else if (WIFSIGNALED(status))
        (void)broken(check, "killed by signal %d (%s)%s%s", WTERMSIG(status),
                     strsignal(WTERMSIG(status)), before, child->said);
    else
        (void)broken(check, "ended the process with exit code %d%s%s", WEXITSTATUS(status), before,
                     child->said);
}

int walk_rule(const struct walk *walk, const struct rule *rule, struct check *check,
              struct fault *fault)
{
    struct child *child = calloc(1, sizeof *child);
    int64_t deadline_ns = clock_ns() + walk->deadline_s * 1000000000;
    int ended = 0, status = 0;
    int st = EXIT_OK;

    *check = (struct check){.plugin = walk->plugin};
    if (child == NULL) return fault_set(fault, EXIT_TROUBLE, "out of memory");
    child->verbose = walk->verbose;
    TRY(start(walk, rule, child, fault));
    ended = listen_to(child, deadline_ns);
    status = reap(child, deadline_ns);
    // A verdict counts only when the process ended well after it: taking the plugin down is part of
    // the rule.
    if (!ended || !ended_well(status) || !read_verdict(child, check))
        judge_end(child, status, ended ? 0 : walk->deadline_s, check);
out:
    free(child);
    return st;
}
