// A process that stands for one rank.

#include "hosts/cli/commands.h"
#include "hosts/cli/rank.h"

#include <string.h>

// The parent prints it, with the rank.
static int report(const struct link *link, const struct fault *trouble)
{
    int32_t code = trouble->code;
    char payload[sizeof code + FAULT_TEXT_BYTES];
    struct fault ignored;
    size_t length = strlen(trouble->text);

    memcpy(payload, &code, sizeof code);
    memcpy(payload + sizeof code, trouble->text, length);
    return link_send(link, MESSAGE_FAULT, payload, sizeof code + length, &ignored);
}

int rank_process(struct fault *fault)
{
    struct link link;
    json_t *job = NULL;
    const char *command = NULL;
    int st = link_open(&link, &job, fault);

    if (st != EXIT_OK) return st;
    command = json_string_value(json_object_get(job, "command"));
    if (command != NULL && strcmp(command, "bench") == 0)
        st = bench_rank(&link, job, fault);
    else
        st = run_rank(&link, job, fault);
    json_decref(job);
    if (st == EXIT_OK) return link_send(&link, MESSAGE_DONE, NULL, 0, fault);
    if (report(&link, fault) == EXIT_OK) fault->text[0] = '\0';
    return st;
}
