// What open() does to a configuration, without an instance: read, resolve, bound, judge, plan. And
// the reader of reasons that holds them to their promise: every change that a message proposes is
// applied and must be accepted.

#ifndef MOXIE_HOST_TESTS_VERDICT_H
#define MOXIE_HOST_TESTS_VERDICT_H

#include "host_tests/mock_host.h"
#include "plugin/validate.h"

struct verdict {
    struct config config;
    struct bounds bounds;
    struct plan plan;
    struct report report;
};

void verdict_make(struct verdict *verdict, struct mock_host *mock);
void verdict_free(struct verdict *verdict);

// The first reason or warning of a key; NULL when there is none.
const moxie_reason *verdict_reason(const struct verdict *verdict, const char *key);
const moxie_reason *verdict_warning(const struct verdict *verdict, const char *key);

// Fail the test unless the configuration is accepted; refused with this code and key in a message
// that contains `text`; accepted with such a warning; accepted or refused without a warning of this
// key.
void assert_accepted(struct mock_host *mock);
void assert_refused(struct mock_host *mock, int32_t code, const char *key, const char *text);
void assert_warned(struct mock_host *mock, const char *key, const char *text);
void assert_not_warned(struct mock_host *mock, const char *key);

// The configuration has exactly one reason; each alternative after "set " in its message ("KEY to
// VALUE [or less] [and KEY to VALUE]", separated by ", or ") is applied to a copy and must be
// accepted. Returns how many there are.
int32_t assert_advice_works(struct mock_host *mock, const char *key);

#endif
