// How the command fails: one text for standard error and one exit code. Written where the trouble
// is seen, passed up with TRY.

#ifndef MOXIE_HOSTS_CLI_FAULT_H
#define MOXIE_HOSTS_CLI_FAULT_H

#include <stdint.h>

enum exit_code {
    EXIT_OK = 0,
    EXIT_TROUBLE = 1,   // usage, files, memory, a rank that died
    EXIT_REFUSED = 2,   // the configuration, or the library, said no
    EXIT_TOLERANCE = 3, // the result is further from the reference than allowed
};

#define FAULT_TEXT_BYTES 2048

struct fault {
    int code; // enum exit_code
    char text[FAULT_TEXT_BYTES];
};

// Needs `int st = EXIT_OK` and a label `out` in the function.
#define TRY(expr)                                                                                  \
    do {                                                                                           \
        st = (expr);                                                                               \
        if (st != EXIT_OK) goto out;                                                               \
    } while (0)

// Puts '?' for what a terminal would obey, control characters and newlines, and for bytes that are
// no UTF-8, some of which an old one obeys. Names and words of files, which come from strangers,
// are in most messages.
void make_printable(char *text);

// Writes the text (cut when longer), made printable, and returns `code`.
int fault_set(struct fault *fault, int code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// Adds such a text as a line of its own.
void fault_add(struct fault *fault, const char *format, ...) __attribute__((format(printf, 2, 3)));

// The fault of a system call on a path, by errno; of a symbolic link it is where that leads.
int fault_from_errno(struct fault *fault, const char *path);

// What to do, behind "; ", about a process that cannot be started, or what it is reached by; empty
// where that is not known.
const char *fault_start_remedy(int os_error);

// The fault of a call into the library that returned `status` and wrote `text`.
int fault_from_status(struct fault *fault, int32_t status, const char *what, const char *text);

// Overflow-checked sizes, limited to 2^62. On overflow return 0 and leave *out alone.
int bytes_mul(uint64_t a, uint64_t b, uint64_t *out);
int bytes_add(uint64_t a, uint64_t b, uint64_t *out);

#endif
