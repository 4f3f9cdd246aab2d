// Lines for the host's log callback. Nothing else leaves the library.

#ifndef MOXIE_PLUGIN_LOG_H
#define MOXIE_PLUGIN_LOG_H

#include "plugin/status.h"

// `host->log` may be NULL. Lines are cut at 512 bytes.
void log_line(const moxie_host *host, int32_t severity, const char *component, const char *format,
              ...) __attribute__((format(printf, 4, 5)));

#endif
