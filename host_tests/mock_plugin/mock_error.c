// Errors and the log.

#include "host_tests/mock_plugin/mock.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX 512

moxie_error *error_begin(moxie_error *error)
{
    if (error == NULL || error->struct_size < sizeof *error) return NULL;
    error->code = MOXIE_OK;
    error->rank = -1;
    if (error->text != NULL && error->text_bytes > 0) error->text[0] = '\0';
    return error;
}

static void write_text(moxie_error *error, const char *text)
{
    size_t length = strlen(text);

    if (error->text == NULL || error->text_bytes == 0) return;
    if (length >= error->text_bytes) length = error->text_bytes - 1;
    memcpy(error->text, text, length);
    error->text[length] = '\0';
    if (HAS_FAULT(FAULT_EMPTY_TEXT)) error->text[0] = '\0';
    if (HAS_FAULT(FAULT_UNTERMINATED_TEXT)) memset(error->text, 'x', error->text_bytes);
    if (HAS_FAULT(FAULT_TEXT_OVERRUN)) error->text[error->text_bytes] = '\0';
}

void log_line(const moxie_host *host, int32_t severity, const char *format, ...)
{
    char text[TEXT_MAX] = "";
    va_list args;

    if (host == NULL || host->log == NULL) return;
    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (HAS_FAULT(FAULT_LOG_NEWLINE) && text[0] != '\0') text[strlen(text) - 1] = '\n';
    host->log(host->ctx, severity, "mock", text, strlen(text));
}

static void explain(const struct caller *caller, int32_t code, int32_t rank, const char *text)
{
    moxie_error *error = caller->error;

    if (code == MOXIE_E_INVALID) log_line(caller->host, MOXIE_LOG_HOST_MISBEHAVING, "%s", text);
    if (error == NULL) return;
    error->code = code;
    error->rank = rank;
    write_text(error, text);
}

int32_t fail_with(const struct caller *caller, int32_t code, const char *format, ...)
{
    char text[TEXT_MAX] = "";
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    explain(caller, code, -1, text);
    return code;
}

int32_t fail_rank(const struct caller *caller, int32_t code, int32_t rank, const char *format, ...)
{
    char text[TEXT_MAX] = "";
    va_list args;

    va_start(args, format);
    (void)vsnprintf(text, sizeof text, format, args);
    va_end(args);
    explain(caller, code, rank, text);
    return code;
}
