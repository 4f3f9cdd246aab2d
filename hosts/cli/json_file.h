// JSON in and out of files. Everything read here comes from outside.

#ifndef MOXIE_HOSTS_CLI_JSON_FILE_H
#define MOXIE_HOSTS_CLI_JSON_FILE_H

#include "hosts/cli/fault.h"

#include <jansson.h>
#include <limits.h>

// Reads one JSON object; duplicate keys, trailing text and files past 64 MiB are refused. owner:
// caller
int json_file_read(const char *path, json_t **out, struct fault *fault);

// As json_file_read, of a regular file alone: one of a model's folder, which comes from strangers,
// and a pipe there would hold us up, and of at most `bytes_max`: JSON takes many times its bytes in
// memory. Infinity, -Infinity and NaN, which JSON has not and Python
// writes (of mamba's time_step_limit, say), are null. A file that does not exist gives *out = NULL
// and no fault.
int json_file_read_regular(const char *path, size_t bytes_max, json_t **out, struct fault *fault);

// Writes one document and a newline to standard output, and releases it. NULL is out of memory.
// Whether standard output took them is asked once, at the end of the program.
int json_print(json_t *document, struct fault *fault);

// Says on standard output what the fault says, when `as_json` and `st` is EXIT_REFUSED and no
// document has said it (the fault has a text):
// {"ok":false,"reasons":[{"code","key","message"}],"warnings":[...]}, as the library's own
// refusals. warnings: an array, or NULL; released. Returns the outcome.
int json_refusal(int as_json, int st, json_t *warnings, struct fault *fault);

// A string, with U+FFFD for every byte that is not UTF-8: paths are bytes. NULL when out of memory.
json_t *json_text(const char *text);

// A path for another process, whatever its bytes: a character for each. null where there is none;
// NULL when out of memory.
json_t *json_path(const char *path);

// That path, in `path`; NULL where there is none.
const char *json_path_read(const json_t *value, char path[PATH_MAX]);

#define JSON_EXCERPT_BYTES 81

// A value as JSON, for a message: as much of it as `text` holds.
const char *json_excerpt(const json_t *value, char text[JSON_EXCERPT_BYTES]);

// A real, or null when JSON has no word for it (NaN, infinity).
json_t *json_number(double value);

#endif
