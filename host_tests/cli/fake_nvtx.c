// See fake_nvtx.h. FAKE_NVTX_HALF leaves the popping out.

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT     __attribute__((visibility("default")))
#define NAME_BYTES 128
#define EVENTS_MAX 512
#define DEPTH_MAX  8

static struct {
    char events[EVENTS_MAX][NAME_BYTES];
    int events_count;
    char open[DEPTH_MAX][NAME_BYTES];
    int depth;
} state;

EXPORT int fake_nvtx_depth(void);
EXPORT const char *fake_nvtx_event(int index);
EXPORT void fake_nvtx_reset(void);
EXPORT int nvtxRangePushA(const char *name);

int fake_nvtx_depth(void)
{
    return state.depth;
}

const char *fake_nvtx_event(int index)
{
    return index < state.events_count ? state.events[index] : "";
}

void fake_nvtx_reset(void)
{
    state.events_count = 0;
    state.depth = 0;
}

// What no longer fits is not written down, but counted in the depth.
static void write_down(char what, const char *name)
{
    char *event = state.events[state.events_count % EVENTS_MAX];

    if (state.events_count == EVENTS_MAX) return;
    event[0] = what;
    event[NAME_BYTES - 1] = '\0';
    strncpy(event + 1, name, NAME_BYTES - 2);
    state.events_count++;
}

int nvtxRangePushA(const char *name)
{
    if (state.depth == DEPTH_MAX) abort();
    (void)snprintf(state.open[state.depth], NAME_BYTES, "%s", name);
    write_down('+', name);
    return state.depth++;
}

#ifndef FAKE_NVTX_HALF
EXPORT int nvtxRangePop(void);

int nvtxRangePop(void)
{
    if (state.depth == 0) abort();
    state.depth--;
    write_down('-', state.open[state.depth]);
    return state.depth;
}
#endif
