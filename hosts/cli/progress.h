// One line on a terminal for what takes longer than a second; nothing when standard error is piped.

#ifndef MOXIE_HOSTS_CLI_PROGRESS_H
#define MOXIE_HOSTS_CLI_PROGRESS_H

#include <stdint.h>

struct progress {
    int visible; // standard error is a terminal
    int drawn;   // a line stands there
    int64_t started_ns;
    int64_t drawn_ns;
};

int64_t clock_ns(void); // monotonic

void progress_init(struct progress *progress);
// Redraws at most ten times a second. `share` is 0..1, or negative when unknown.
void progress_show(struct progress *progress, const char *what, double share);
// Takes the line away, so that something else may be printed.
void progress_clear(struct progress *progress);

#endif
