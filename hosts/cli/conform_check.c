// Verdicts: the first one stands, and knows its place.

#include "hosts/cli/conform.h"
#include "hosts/cli/fault.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

const char *verdict_name(int verdict)
{
    static const char *const names[] = {"pass", "fail", "skip"};

    return names[verdict];
}

const struct rule *rule_find(const char *name)
{
    for (int i = 0; i < conform_rules_count; i++)
        if (strcmp(conform_rules[i].name, name) == 0) return &conform_rules[i];
    return NULL;
}

// What a crash of this thread writes; a copy, because the check may be gone by then. Threads of the
// plugin's own have none.
static _Thread_local char crash_line[sizeof CRASH_MARK + CHECK_WHERE_BYTES];
static _Thread_local int crash_length;

static const int fatal_signals[] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};

#define FATAL_SIGNALS ((int)(sizeof fatal_signals / sizeof fatal_signals[0]))

// Who was there before: a sanitizer, or nobody.
static struct sigaction handlers_before[FATAL_SIGNALS];

static void crashed(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (crash_length > 0 && write(STDERR_FILENO, crash_line, (size_t)crash_length) < 0)
        crash_length = 0;
    for (int i = 0; i < FATAL_SIGNALS; i++)
        if (fatal_signals[i] == number) (void)sigaction(number, &handlers_before[i], NULL);
    // A fault of the processor comes again by itself, with its address; what was sent does not.
    if (info->si_code <= 0) (void)raise(number);
}

void trace_crashes(void)
{
    // On the other stack, where there is one: this one may have overflowed.
    struct sigaction action = {.sa_sigaction = crashed, .sa_flags = SA_SIGINFO | SA_ONSTACK};

    (void)sigemptyset(&action.sa_mask);
    for (int i = 0; i < FATAL_SIGNALS; i++)
        (void)sigaction(fatal_signals[i], &action, &handlers_before[i]);
}

void check_at(struct check *check, const char *format, ...)
{
    char line[sizeof TRACE_MARK + CHECK_WHERE_BYTES];
    va_list args;
    int length = 0;

    if (check->verdict != VERDICT_PASS) return;
    va_start(args, format);
    (void)vsnprintf(check->where, sizeof check->where, format, args);
    va_end(args);
    make_printable(check->where); // one line of the trace, whatever a host answers
    if (!check->trace) return;
    crash_length = snprintf(crash_line, sizeof crash_line, CRASH_MARK "%s\n", check->where);
    // One write, past stdio: the next thing may be a crash, and ranks are threads.
    length = snprintf(line, sizeof line, TRACE_MARK "%s\n", check->where);
    if (length > 0 && write(STDERR_FILENO, line, (size_t)length) < 0) check->trace = 0;
}

static int judge(struct check *check, int verdict, const char *format, va_list args)
{
    if (check->verdict != VERDICT_PASS) return check->verdict;
    (void)vsnprintf(check->message, sizeof check->message, format, args);
    make_printable(check->message);
    make_printable(check->where);
    check->verdict = verdict;
    return verdict;
}

int broken(struct check *check, const char *format, ...)
{
    va_list args;
    int verdict = VERDICT_FAIL;

    va_start(args, format);
    verdict = judge(check, VERDICT_FAIL, format, args);
    va_end(args);
    return verdict;
}

int skipped(struct check *check, const char *format, ...)
{
    va_list args;
    int verdict = VERDICT_SKIP;

    va_start(args, format);
    verdict = judge(check, VERDICT_SKIP, format, args);
    va_end(args);
    return verdict;
}

const char *status_name(int32_t status)
{
    static const char *const names[] = {
        "OK",        "INVALID",    "UNSUPPORTED", "UNAVAILABLE", "VERSION", "CONFIG", "CAPACITY",
        "CAPTURING", "COLLECTIVE", "TIMEOUT",     "PEER",        "MEMORY",  "DEVICE", "INTERNAL"};

    if (status < 0 || (size_t)status >= sizeof names / sizeof names[0]) return "no status";
    return names[status];
}

int text_says(const char *text, uint64_t capacity, const char *wanted)
{
    return text[0] == '\0' || memchr(text, '\0', capacity) == NULL || strstr(text, wanted) != NULL;
}

int expect_status(struct check *check, int32_t status, int32_t wanted, const char *text)
{
    if (status == wanted) return VERDICT_PASS;
    return broken(check, "returned %d (%s), want %d (%s)%s%.400s", status, status_name(status),
                  wanted, status_name(wanted), text[0] != '\0' ? "; it said: " : "", text);
}
