// Lines for the host's log callback.

#include "plugin/log.h"

#include <stdarg.h>
#include <stdio.h>

void log_line(const moxie_host *host, int32_t severity, const char *component, const char *format,
              ...)
{
    char text[512];
    va_list args;
    int length;

    if (host->log == NULL) return;
    va_start(args, format);
    length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (length < 0) return;
    if ((size_t)length >= sizeof text) length = (int)sizeof text - 1;
    // A host's own words may hold a newline; a line must not.
    for (int i = 0; i < length; i++) {
        if ((unsigned char)text[i] < ' ') text[i] = ' ';
    }
    host->log(host->ctx, severity, component, text, (uint64_t)length);
}
