// Counts what the whole process allocates, the plugin and its threads included.

#ifndef MOXIE_HOSTS_CLI_CONFORM_MALLOC_H
#define MOXIE_HOSTS_CLI_CONFORM_MALLOC_H

#include <stdint.h>

void malloc_count_begin(void);
// Calls of malloc and its family since then; always 0 where they cannot be seen (under sanitizers,
// or without glibc).
uint64_t malloc_count_end(void);

#endif
