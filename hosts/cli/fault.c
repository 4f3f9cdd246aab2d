// Faults and checked sizes.

#include "hosts/cli/fault.h"

#include "abi.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#define BYTES_LIMIT ((uint64_t)1 << 62)

// Bytes of the character that the text starts with; 0: it is none, or one that controls.
static size_t printable_bytes(const unsigned char *text)
{
    size_t bytes = text[0] < 0x80 ? 1 : text[0] < 0xe0 ? 2 : text[0] < 0xf0 ? 3 : 4;

    if (text[0] < ' ' || text[0] == 0x7f || (text[0] >= 0x80 && text[0] < 0xc2) || text[0] > 0xf4)
        return 0;
    for (size_t i = 1; i < bytes; i++)
        if ((text[i] & 0xc0) != 0x80) return 0;
    return text[0] == 0xc2 && text[1] < 0xa0 ? 0 : bytes; // U+0080 to U+009F
}

void make_printable(char *text)
{
    while (*text != '\0') {
        size_t bytes = printable_bytes((const unsigned char *)text);

        if (bytes == 0) *text = '?';
        text += bytes > 0 ? bytes : 1;
    }
}

int fault_set(struct fault *fault, int code, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(fault->text, sizeof fault->text, format, args);
    va_end(args);
    make_printable(fault->text);
    fault->code = code;
    return code;
}

void fault_add(struct fault *fault, const char *format, ...)
{
    size_t used = strlen(fault->text);
    va_list args;

    if (used + 1 >= sizeof fault->text) return;
    va_start(args, format);
    (void)vsnprintf(fault->text + used + 1, sizeof fault->text - used - 1, format, args);
    va_end(args);
    fault->text[used] = '\n';
    make_printable(fault->text + used + 1);
}

int fault_from_errno(struct fault *fault, const char *path)
{
    int failed = errno;
    struct stat seen;
    int is_link = lstat(path, &seen) == 0 && S_ISLNK(seen.st_mode);

    return fault_set(fault, EXIT_TROUBLE, "%s: %s%s", path,
                     is_link ? "where the symbolic link leads: " : "", strerror(failed));
}

const char *fault_start_remedy(int os_error)
{
    if (os_error == EMFILE) return "; raise this process's limit of open files (ulimit -n)";
    if (os_error == EAGAIN) return "; raise the limit of processes (ulimit -u, pids.max)";
    return os_error == ENOENT ? "; mount /proc" : ""; // what is started is /proc/self/exe
}

int fault_from_status(struct fault *fault, int32_t status, const char *what, const char *text)
{
    int refused = status == MOXIE_E_INVALID || status == MOXIE_E_UNSUPPORTED ||
                  status == MOXIE_E_UNAVAILABLE || status == MOXIE_E_CONFIG ||
                  status == MOXIE_E_CAPACITY;

    return fault_set(fault, refused ? EXIT_REFUSED : EXIT_TROUBLE, "%s: %s", what,
                     text[0] != '\0' ? text : "the library gave no reason");
}

int bytes_mul(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t product;

    if (__builtin_mul_overflow(a, b, &product) || product > BYTES_LIMIT) return 0;
    *out = product;
    return 1;
}

int bytes_add(uint64_t a, uint64_t b, uint64_t *out)
{
    uint64_t sum;

    if (__builtin_add_overflow(a, b, &sum) || sum > BYTES_LIMIT) return 0;
    *out = sum;
    return 1;
}
