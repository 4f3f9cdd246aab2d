// A file that the command writes, complete or not at all: to a neighbour of its own name first,
// renamed once whole. Only a regular file is ever replaced; a symbolic link stays, and the file
// that it leads to is. Between open and close interrupts are held back, so that no neighbour stays
// behind.

#ifndef MOXIE_HOSTS_CLI_TARGET_H
#define MOXIE_HOSTS_CLI_TARGET_H

#include "hosts/cli/fault.h"
#include "hosts/cli/interrupts.h"

#include <stdio.h>

struct target {
    char *path; // behind symbolic links
    char *part; // its neighbour
    FILE *file; // the neighbour, open for writing
    struct interrupts interrupts;
};

// On failure nothing is held, and no neighbour is left.
int target_open(struct target *target, const char *path, struct fault *fault);
// Writes to the neighbour; an interrupt ends it with a fault.
int target_write(struct target *target, const void *data, uint64_t bytes, struct fault *fault);
// Ends what target_open began: the neighbour takes the name when `st` is EXIT_OK and everything was
// written, and is removed otherwise. Returns the outcome, unless an interrupt was held back.
int target_close(struct target *target, int st, struct fault *fault);

// Whether target_open would succeed now; leaves nothing.
int target_check(const char *path, struct fault *fault);

#endif
