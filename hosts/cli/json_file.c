// JSON in and out of files.

#include "hosts/cli/json_file.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONFIGURATION_BYTES_MAX ((size_t)64 << 20)
#define READ_CHUNK_BYTES        ((size_t)64 << 10)

struct json_source {
    const char *path;
    int descriptor;
    size_t bytes_max;
    int python; // may have its words
};

// Reads to the end; a pipe has no size to ask for first.
static int read_all(const struct json_source *source, char **text, size_t *length,
                    struct fault *fault)
{
    const char *path = source->path;
    char *buffer = NULL;
    size_t used = 0;
    ssize_t got = 1;

    while (got != 0) {
        char *grown = NULL;

        if (used > source->bytes_max) {
            free(buffer);
            return fault_set(fault, EXIT_TROUBLE,
                             "%s: more than %zu MiB; this is no such JSON file", path,
                             source->bytes_max >> 20);
        }
        grown = realloc(buffer, used + READ_CHUNK_BYTES);
        if (grown == NULL) {
            free(buffer);
            return fault_set(fault, EXIT_TROUBLE, "%s: out of memory", path);
        }
        buffer = grown;
        got = read(source->descriptor, buffer + used, READ_CHUNK_BYTES);
        if (got < 0 && errno != EINTR) {
            free(buffer);
            return fault_set(fault, EXIT_TROUBLE, "%s: %s", path, strerror(errno));
        }
        used += got > 0 ? (size_t)got : 0;
    }
    *text = buffer;
    *length = used;
    return EXIT_OK;
}

// Bytes of the word that the text starts with; 0: it is not one of those that JSON has not.
static size_t python_word(const char *text, size_t length)
{
    static const char *const words[] = {"Infinity", "-Infinity", "NaN"};

    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strlen(words[i]) <= length && memcmp(text, words[i], strlen(words[i])) == 0)
            return strlen(words[i]);
    return 0;
}

// Puts null for such words outside strings. Lines stay, and columns but those behind a NaN, which
// is a character shorter.
static int null_python_words(char **text, size_t *length)
{
    const char *from = *text, *end = *text + *length;
    char *out = malloc(*length + *length / 3 + 1), *to = out;
    int in_string = 0;

    if (out == NULL) return 0;
    while (from < end) {
        size_t word = in_string ? 0 : python_word(from, (size_t)(end - from));
        size_t taken = in_string && *from == '\\' && end - from > 1 ? 2 : 1;

        if (word > 0) {
            memset(to, ' ', word);
            memcpy(to, "null", 4);
            to += word > 4 ? word : 4;
            from += word;
            continue;
        }
        in_string ^= *from == '"' && taken == 1;
        memcpy(to, from, taken);
        to += taken;
        from += taken;
    }
    free(*text);
    *text = out;
    *length = (size_t)(to - out);
    return 1;
}

static int parse(const struct json_source *source, json_t **out, struct fault *fault)
{
    const char *path = source->path;
    char *text = NULL;
    size_t length = 0;
    json_error_t error;
    json_t *value = NULL;
    int st = EXIT_OK;

    TRY(read_all(source, &text, &length, fault));
    if (source->python && !null_python_words(&text, &length))
        TRY(fault_set(fault, EXIT_TROUBLE, "%s: out of memory", path));
    value = json_loadb(text, length, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &error);
    if (value == NULL)
        TRY(fault_set(fault, EXIT_TROUBLE, "%s:%d:%d: malformed JSON: %s", path, error.line,
                      error.column, error.text));
    if (!json_is_object(value))
        TRY(fault_set(fault, EXIT_TROUBLE, "%s: not a JSON object; write {\"key\": value, ...}",
                      path));
    *out = json_incref(value);
out:
    json_decref(value);
    free(text);
    return st;
}

int json_file_read(const char *path, json_t **out, struct fault *fault)
{
    const struct json_source source = {path, open(path, O_RDONLY | O_CLOEXEC),
                                       CONFIGURATION_BYTES_MAX, 0};
    int st = EXIT_OK;

    *out = NULL;
    if (source.descriptor < 0)
        return fault_set(fault, EXIT_TROUBLE, "%s: %s", path, strerror(errno));
    st = parse(&source, out, fault);
    (void)close(source.descriptor);
    return st;
}

int json_file_read_regular(const char *path, size_t bytes_max, json_t **out, struct fault *fault)
{
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    const struct json_source source = {path, descriptor, bytes_max, 1};
    struct stat seen;
    int st = EXIT_OK;

    *out = NULL;
    if (descriptor < 0 && errno == ENOENT && lstat(path, &seen) != 0) return EXIT_OK;
    if (descriptor < 0 || fstat(descriptor, &seen) != 0) TRY(fault_from_errno(fault, path));
    if (!S_ISREG(seen.st_mode)) TRY(fault_set(fault, EXIT_TROUBLE, "%s: not a regular file", path));
    st = parse(&source, out, fault);
out:
    if (descriptor >= 0) (void)close(descriptor);
    return st;
}

int json_print(json_t *document, struct fault *fault)
{
    if (document == NULL)
        return fault_set(fault, EXIT_TROUBLE,
                         "no JSON document: out of memory, or text that is not UTF-8");
    (void)json_dumpf(document, stdout, JSON_COMPACT);
    (void)fputc('\n', stdout);
    json_decref(document);
    return EXIT_OK;
}

int json_refusal(int as_json, int st, json_t *warnings, struct fault *fault)
{
    int printed = EXIT_OK;

    if (!as_json || st != EXIT_REFUSED || fault->text[0] == '\0') {
        json_decref(warnings);
        return st;
    }
    if (warnings == NULL) warnings = json_array();
    printed = json_print(json_pack("{s:b, s:[{s:s, s:s, s:o}], s:o}", "ok", 0, "reasons", "code",
                                   "REFUSED", "key", "", "message", json_text(fault->text),
                                   "warnings", warnings),
                         fault);
    return printed != EXIT_OK ? printed : st;
}

// Bytes of the UTF-8 character that the text starts with; 0: it is none.
static size_t character_bytes(const char *text, size_t length)
{
    for (size_t bytes = 1; bytes <= 4 && bytes <= length; bytes++) {
        json_t *one = json_stringn(text, bytes);

        json_decref(one);
        if (one != NULL) return bytes;
    }
    return 0;
}

json_t *json_text(const char *text)
{
    json_t *whole = json_string(text);
    size_t length = strlen(text);
    char *clean = NULL;
    char *to = NULL;

    if (whole != NULL) return whole;
    clean = malloc(3 * length + 1);
    if (clean == NULL) return NULL;
    to = clean;
    for (size_t i = 0; i < length;) {
        size_t bytes = character_bytes(text + i, length - i);

        memcpy(to, bytes > 0 ? text + i : "\xef\xbf\xbd", bytes > 0 ? bytes : 3);
        to += bytes > 0 ? bytes : 3;
        i += bytes > 0 ? bytes : 1;
    }
    *to = '\0';
    whole = json_string(clean);
    free(clean);
    return whole;
}

json_t *json_path(const char *path)
{
    unsigned char *text = NULL, *to = NULL;
    json_t *whole = NULL;

    if (path == NULL) return json_null();
    to = text = malloc(2 * strlen(path) + 1);
    if (text == NULL) return NULL;
    for (const unsigned char *at = (const unsigned char *)path; *at != '\0'; at++) {
        if (*at >= 0x80) *to++ = (unsigned char)(0xc0 | *at >> 6);
        *to++ = (unsigned char)(*at >= 0x80 ? 0x80 | (*at & 0x3f) : *at);
    }
    *to = '\0';
    whole = json_string((char *)text);
    free(text);
    return whole;
}

const char *json_path_read(const json_t *value, char path[PATH_MAX])
{
    const char *text = json_string_value(value);
    size_t used = 0;

    if (text == NULL) return NULL;
    for (; *text != '\0' && used < PATH_MAX - 1; text++) {
        if ((*text & 0xc0) == 0xc0 && text[1] != '\0') {
            path[used++] = (char)((*text & 3) << 6 | (text[1] & 0x3f));
            text++;
        } else {
            path[used++] = *text;
        }
    }
    path[used] = '\0';
    return path;
}

const char *json_excerpt(const json_t *value, char text[JSON_EXCERPT_BYTES])
{
    char *whole = json_dumps(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_ENSURE_ASCII);

    (void)snprintf(text, JSON_EXCERPT_BYTES, "%s", whole != NULL ? whole : "");
    free(whole);
    return text;
}

json_t *json_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}
