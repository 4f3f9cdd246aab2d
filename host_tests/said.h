// What a call that must fail has to say: its code, and words that its text must hold.

#ifndef MOXIE_HOST_TESTS_SAID_H
#define MOXIE_HOST_TESTS_SAID_H

#include "abi.h"
#include "host_tests/suite.h"

#include <string.h>

struct said {
    moxie_error error; // hand this to the call
    char text[1024];
};

static inline void said_init(struct said *said)
{
    memset(said, 0, sizeof *said);
    said->error = (moxie_error){
        .struct_size = sizeof said->error, .text = said->text, .text_bytes = sizeof said->text};
}

// `words` ends with NULL.
static inline void said_check(struct said *said, int32_t answer, int32_t code,
                              const char *const *words)
{
    ck_assert_msg(answer == code, "answered %d, want %d: %s", answer, code, said->text);
    ck_assert_int_eq(said->error.code, code);
    for (; *words != NULL; words++)
        ck_assert_msg(strstr(said->text, *words) != NULL, "\"%s\" is not in \"%s\"", *words,
                      said->text);
    said->text[0] = '\0';
    said->error.code = MOXIE_OK;
}

// SAID(&said, CODE, call(..., &said.error), "key", "17", "16"): the call answers CODE, and its text
// has every word.
#define SAID(said, code, call, ...)                                                                \
    said_check(said, call, code, (const char *const[]){__VA_ARGS__, NULL})

// The call answers MOXIE_OK.
#define ACCEPTED(said, call)                                                                       \
    do {                                                                                           \
        int32_t accepted_answer = (call);                                                          \
                                                                                                   \
        ck_assert_msg(accepted_answer == MOXIE_OK, "%d: %s", accepted_answer, (said)->text);       \
    } while (0)

#endif
