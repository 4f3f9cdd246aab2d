// Progress on a terminal.

#include "hosts/cli/progress.h"

#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define SECOND_NS ((int64_t)1000000000)

int64_t clock_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND_NS + now.tv_nsec;
}

void progress_init(struct progress *progress)
{
    *progress = (struct progress){.visible = isatty(STDERR_FILENO), .started_ns = clock_ns()};
}

void progress_show(struct progress *progress, const char *what, double share)
{
    int64_t now_ns = clock_ns();

    if (!progress->visible || now_ns - progress->started_ns < SECOND_NS) return;
    if (progress->drawn && now_ns - progress->drawn_ns < SECOND_NS / 10) return;
    if (share >= 0)
        (void)fprintf(stderr, "\r\033[K%s %3.0f%%", what, 100 * share);
    else
        (void)fprintf(stderr, "\r\033[K%s ...", what);
    (void)fflush(stderr);
    progress->drawn = 1;
    progress->drawn_ns = now_ns;
}

void progress_clear(struct progress *progress)
{
    if (!progress->drawn) return;
    (void)fprintf(stderr, "\r\033[K");
    (void)fflush(stderr);
    progress->drawn = 0;
}
