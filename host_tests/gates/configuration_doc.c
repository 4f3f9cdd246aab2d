// docs/configuration.md is the table of keys, printed. Without an argument this program prints it;
// with a path it compares, and says which line differs.

#include "plugin/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DOCUMENT_BYTES 65536

static const char head[] =
    "# Configuration\n"
    "\n"
    "The host answers for each key through `get_i64`, `get_f64` or `get_str`; a JSON file with "
    "the\n"
    "same keys configures the command line tool. Every key is read once, by `open`. A key that is\n"
    "left out has its default. `validate` lists everything that cannot work, each reason with its\n"
    "key and what to set; `plan` lists every buffer.\n"
    "\n"
    "The least that a configuration needs are the required keys and one that bounds a forward:\n"
    "\n"
    "```json\n"
    "{\"hidden_size\": 2048, \"intermediate_size\": 768, \"num_experts\": 128, \"top_k\": 8,\n"
    " \"forward_tokens_max\": 4096}\n"
    "```\n"
    "\n"
    "Every rank must give the same value, except for the keys marked *per rank*.\n"
    "\n"
    "| key | value | default | meaning |\n"
    "| --- | --- | --- | --- |\n";

static const char tail[] =
    "\n"
    "## How large a forward can be\n"
    "\n"
    "```\n"
    "tokens_per_request = speculative_algorithm set ? max(speculative_draft_tokens, 1) : 1\n"
    "chunk              = chunked_prefill_size > 0 ? chunked_prefill_size : 0\n"
    "                     with pipeline_dynamic_chunking: (5 * chunked_prefill_size + 3) / 4\n"
    "prefill            = disaggregation_mode == decode ? 0\n"
    "                   : max(max_prefill_tokens, chunk, chunk == 0 ? context_length : 0,\n"
    "                         disable_prefill_graph ? 0 : prefill_graph_max_tokens)\n"
    "decode             = disaggregation_mode == prefill ? 0\n"
    "                   : max(disable_decode_graph ? 0 : decode_graph_max_batch,\n"
    "                         max_running_requests) * tokens_per_request\n"
    "forward_tokens     = forward_tokens_max > 0 ? forward_tokens_max\n"
    "                   : max(prefill, decode, warmup_tokens_max, 1)\n"
    "\n"
    "dispatch_required  = ceil(forward_tokens / (tp_size / dp_size))     one rank, one forward\n"
    "dispatch_tokens    = max_dispatch_tokens_per_rank > 0 ? max_dispatch_tokens_per_rank\n"
    "                   : ceil(dispatch_required / dispatch_rounds_max)  one rank, one round\n"
    "allgather_rows     = dp_size * forward_tokens\n"
    "alltoall_rows      = ep_size * dispatch_tokens     rows one rank may receive in a round\n"
    "capture_rows       = dp_size * forward_tokens\n"
    "```\n"
    "\n"
    "`forward_tokens` are those of one data-parallel rank. The key that decided it is called "
    "dominant,\n"
    "and every capacity error names it.\n"
    "\n"
    "Where ranks that share a data-parallel rank have unequal shares of its tokens and may pad "
    "them,\n"
    "the capture holds the padding, too: `moxie_captured.ids` has\n"
    "R = ceil(ep_size * dispatch_required / dp_size) rows instead of forward_tokens. Under "
    "`local`,\n"
    "`step.capture_row` counts over all data-parallel ranks, and rank d's rows begin at d * R.\n";

struct document {
    char text[DOCUMENT_BYTES];
    size_t length;
};

static void append(struct document *document, const char *text)
{
    size_t length = strlen(text);

    if (document->length + length >= DOCUMENT_BYTES) {
        (void)fprintf(stderr, "the document outgrew its buffer\n");
        exit(EXIT_FAILURE);
    }
    memcpy(document->text + document->length, text, length + 1);
    document->length += length;
}

// Nothing is found: the snapshot of defaults.
static int32_t absent_i64(void *ctx, const char *key, int64_t *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t absent_f64(void *ctx, const char *key, double *value)
{
    (void)ctx;
    (void)key;
    (void)value;
    return MOXIE_CONFIG_ABSENT;
}

static int32_t absent_str(void *ctx, const char *key, char *buffer, uint64_t capacity,
                          uint64_t *length)
{
    (void)ctx;
    (void)key;
    (void)buffer;
    (void)capacity;
    (void)length;
    return MOXIE_CONFIG_ABSENT;
}

static void append_row(struct document *document, const struct config *defaults,
                       enum config_key key)
{
    char wanted[256], standard[128], line[1024];

    config_wanted(key, wanted, sizeof wanted);
    config_print(defaults, key, standard, sizeof standard);
    (void)snprintf(line, sizeof line, "| `%s` | %s | %s%s%s | %s%s |\n", config_name(key), wanted,
                   config_required(key) ? "" : "`", config_required(key) ? "required" : standard,
                   config_required(key) ? "" : "`", config_help(key),
                   config_shared(key) ? "" : " *(per rank)*");
    append(document, line);
}

static void document_make(struct document *document)
{
    const moxie_host host = {.struct_size = sizeof host,
                             .get_i64 = absent_i64,
                             .get_f64 = absent_f64,
                             .get_str = absent_str};
    struct report report = {0};
    struct config defaults;

    config_read(&defaults, &host, &report);
    report_fini(&report);
    append(document, head);
    for (int32_t key = 0; key < KEY_COUNT; key++)
        append_row(document, &defaults, (enum config_key)key);
    append(document, tail);
}

// The number of the first line in which the texts differ.
static int line_of_difference(const char *a, const char *b)
{
    int line = 1;

    for (; *a != '\0' && *a == *b; a++, b++)
        line += *a == '\n';
    return line;
}

static int compare(const struct document *document, const char *path)
{
    static char seen[DOCUMENT_BYTES];
    FILE *file = fopen(path, "rb");
    size_t length;

    if (file == NULL) {
        perror(path);
        return EXIT_FAILURE;
    }
    length = fread(seen, 1, sizeof seen - 1, file);
    seen[length] = '\0';
    (void)fclose(file);
    if (length == document->length && strcmp(seen, document->text) == 0) return EXIT_SUCCESS;
    (void)fprintf(
        stderr,
        "%s:%d: differs from the table of keys; write it again: gate_configuration_doc > %s\n",
        path, line_of_difference(seen, document->text), path);
    return EXIT_FAILURE;
}

int main(int argc, char **argv)
{
    static struct document document;

    document_make(&document);
    if (argc == 2) return compare(&document, argv[1]);
    return fputs(document.text, stdout) < 0 ? EXIT_FAILURE : EXIT_SUCCESS;
}
