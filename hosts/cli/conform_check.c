// Verdicts: the first one stands, and knows its place.

#include "hosts/cli/conform.h"

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

void check_at(struct check *check, const char *format, ...)
{
    char line[sizeof TRACE_MARK + CHECK_WHERE_BYTES];
    va_list args;
    int length = 0;

    if (check->verdict != VERDICT_PASS) return;
    va_start(args, format);
    (void)vsnprintf(check->where, sizeof check->where, format, args);
    va_end(args);
    if (!check->trace) return;
    // One write, past stdio: the next thing may be a crash, and ranks are threads.
    length = snprintf(line, sizeof line, TRACE_MARK "%s\n", check->where);
    if (length > 0 && write(STDERR_FILENO, line, (size_t)length) < 0) check->trace = 0;
}

// What a plugin says goes into JSON and onto a terminal.
static void make_printable(char *text)
{
    for (; *text != '\0'; text++)
        if (*text < ' ' || *text > '~') *text = '?';
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
