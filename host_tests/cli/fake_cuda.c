// See fake_cuda.h. FAKE_CUDA_OLD leaves one function out, as an old driver does.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT     __attribute__((visibility("default")))
#define TASKS_MAX  256
#define NAMES_MAX  64
#define NOT_FOUND  500
#define CAPTURING  900
#define BYTES_FREE ((uint64_t)8 << 20)

typedef int result;

struct task {
    void (*run)(const void *arg);
    void *arg;
};

struct graph {
    struct task tasks[TASKS_MAX];
    int count;
};

static struct {
    const char *names[NAMES_MAX];
    int counts[NAMES_MAX];
    int names_count;
    char failing[64];
    int failing_nth, failing_result;
    int live;
    struct graph *captured; // NULL: no capture
    int stream;             // its address is the one stream's
    int context;
} state;

// ---- For the test ------------------------------------------------------------------------------

static int *count_of(const char *name)
{
    int i = 0;

    while (i < state.names_count && strcmp(state.names[i], name) != 0)
        i++;
    if (i == NAMES_MAX) abort();
    if (i == state.names_count) {
        state.names[i] = name;
        state.names_count++;
    }
    return &state.counts[i];
}

EXPORT void fake_cuda_fail(const char *name, int nth, int answer);
EXPORT int fake_cuda_calls(const char *name);
EXPORT int fake_cuda_live(void);
EXPORT void fake_cuda_reset(void);
EXPORT void fake_cuda_launch(void (*task)(const void *arg), const void *arg, unsigned long bytes);

void fake_cuda_fail(const char *name, int nth, int answer)
{
    strncpy(state.failing, name, sizeof state.failing - 1);
    state.failing_nth = nth;
    state.failing_result = answer;
}

int fake_cuda_calls(const char *name)
{
    for (int i = 0; i < state.names_count; i++)
        if (strcmp(state.names[i], name) == 0) return state.counts[i];
    return 0;
}

int fake_cuda_live(void)
{
    return state.live;
}

void fake_cuda_reset(void)
{
    state.names_count = 0;
    memset(state.counts, 0, sizeof state.counts);
    memset(state.failing, 0, sizeof state.failing);
    state.live = 0;
    state.captured = NULL;
}

void fake_cuda_launch(void (*task)(const void *arg), const void *arg, unsigned long bytes)
{
    struct graph *graph = state.captured;

    if (graph == NULL) {
        task(arg);
        return;
    }
    if (graph->count == TASKS_MAX) abort();
    graph->tasks[graph->count].run = task;
    graph->tasks[graph->count].arg = malloc(bytes);
    memcpy(graph->tasks[graph->count].arg, arg, bytes);
    graph->count++;
}

// ---- The driver --------------------------------------------------------------------------------

// What the call of that name must answer; 0: go on.
static result enter(const char *name)
{
    int *count = count_of(name);

    *count += 1;
    return strcmp(state.failing, name) == 0 && *count == state.failing_nth ? state.failing_result
                                                                           : 0;
}

#define FUNCTION(name, ...)                                                                        \
    EXPORT result name(__VA_ARGS__);                                                               \
    result name(__VA_ARGS__)
#define ENTER()                                                                                    \
    do {                                                                                           \
        result answer = enter(__func__);                                                           \
        if (answer != 0) return answer;                                                            \
    } while (0)

static void *make(uint64_t bytes)
{
    void *memory = NULL;

    if (posix_memalign(&memory, 256, bytes) != 0) abort();
    memset(memory, 0xa5, bytes);
    state.live++;
    return memory;
}

// What fails to be released counts as alive, although its memory is gone.
static result drop(const char *name, void *memory)
{
    result answer = enter(name);

    free(memory);
    state.live -= answer == 0;
    return answer;
}

FUNCTION(cuInit, unsigned flags)
{
    ENTER();
    return flags == 0 ? 0 : 1;
}

FUNCTION(cuGetErrorString, result code, const char **text)
{
    ENTER();
    *text = code == 2 ? "out of memory" : code == 77 ? NULL : "the words of the driver";
    return 0;
}

FUNCTION(cuDeviceGetCount, int *count)
{
    *count = 0;
    ENTER();
    *count = state.failing_nth < 0 ? 0 : 1;
    return 0;
}

FUNCTION(cuDeviceGet, int *device, int ordinal)
{
    ENTER();
    *device = ordinal;
    return 0;
}

FUNCTION(cuDeviceGetName, char *name, int capacity, int device)
{
    ENTER();
    (void)device;
    strncpy(name, "a fake GPU", (size_t)capacity);
    return 0;
}

FUNCTION(cuDevicePrimaryCtxRetain, void **context, int device)
{
    ENTER();
    (void)device;
    *context = &state.context;
    state.live++;
    return 0;
}

FUNCTION(cuDevicePrimaryCtxRelease_v2, int device)
{
    ENTER();
    (void)device;
    state.live--;
    return 0;
}

FUNCTION(cuCtxSetCurrent, void *context)
{
    ENTER();
    (void)context;
    return 0;
}

FUNCTION(cuMemGetInfo_v2, size_t *available, size_t *total)
{
    ENTER();
    *available = BYTES_FREE;
    *total = 2 * BYTES_FREE;
    return 0;
}

FUNCTION(cuMemAlloc_v2, uint64_t *memory, size_t bytes)
{
    ENTER();
    if (bytes == 0) return 1;
    if (state.captured != NULL) return CAPTURING;
    *memory = (uint64_t)(uintptr_t)make(bytes);
    return 0;
}

FUNCTION(cuMemFree_v2, uint64_t memory)
{
    return drop(__func__, (void *)(uintptr_t)memory);
}

FUNCTION(cuMemAllocHost_v2, void **memory, size_t bytes)
{
    ENTER();
    *memory = make(bytes);
    return 0;
}

FUNCTION(cuMemFreeHost, void *memory)
{
    return drop(__func__, memory);
}

FUNCTION(cuMemcpyHtoD_v2, uint64_t to, const void *from, size_t bytes)
{
    ENTER();
    if (state.captured != NULL) return CAPTURING;
    memcpy((void *)(uintptr_t)to, from, bytes);
    return 0;
}

FUNCTION(cuMemcpyDtoH_v2, void *to, uint64_t from, size_t bytes)
{
    ENTER();
    if (state.captured != NULL) return CAPTURING;
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

FUNCTION(cuMemcpyDtoDAsync_v2, uint64_t to, uint64_t from, size_t bytes, void *stream)
{
    ENTER();
    if (stream != &state.stream || state.captured != NULL) return NOT_FOUND;
    memcpy((void *)(uintptr_t)to, (const void *)(uintptr_t)from, bytes);
    return 0;
}

FUNCTION(cuMemsetD8Async, uint64_t memory, unsigned char byte, size_t bytes, void *stream)
{
    ENTER();
    if (stream != &state.stream || state.captured != NULL) return NOT_FOUND;
    memset((void *)(uintptr_t)memory, byte, bytes);
    return 0;
}

FUNCTION(cuStreamCreate, void **stream, unsigned flags)
{
    ENTER();
    *stream = flags == 0 ? &state.stream : NULL;
    state.live++;
    return 0;
}

FUNCTION(cuStreamDestroy_v2, void *stream)
{
    ENTER();
    state.live--;
    return stream == &state.stream ? 0 : NOT_FOUND;
}

FUNCTION(cuStreamSynchronize, void *stream)
{
    ENTER();
    if (state.captured != NULL) return CAPTURING;
    return stream == &state.stream ? 0 : NOT_FOUND;
}

FUNCTION(cuStreamBeginCapture_v2, void *stream, int mode)
{
    ENTER();
    if (stream != &state.stream || mode != 1 || state.captured != NULL) return CAPTURING;
    state.captured = make(sizeof *state.captured);
    state.captured->count = 0;
    return 0;
}

static result drop_graph(const char *name, struct graph *graph)
{
    for (int i = 0; i < graph->count; i++)
        free(graph->tasks[i].arg);
    return drop(name, graph);
}

// A capture is over also when ending it fails.
FUNCTION(cuStreamEndCapture, void *stream, void **graph)
{
    struct graph *captured = state.captured;
    result answer = enter(__func__);

    (void)stream;
    *graph = NULL;
    state.captured = NULL;
    if (captured == NULL) return CAPTURING;
    if (answer != 0)
        (void)drop_graph("", captured);
    else
        *graph = captured;
    return answer;
}

#ifndef FAKE_CUDA_OLD
FUNCTION(cuGraphInstantiateWithFlags, void **exec, void *graph, unsigned long long flags)
{
    const struct graph *from = graph;
    struct graph *to = NULL;

    ENTER();
    if (flags != 0) return NOT_FOUND;
    to = make(sizeof *to);
    to->count = 0;
    // The arguments change owner: the graph goes, its instance stays.
    *to = *from;
    ((struct graph *)graph)->count = 0;
    *exec = to;
    return 0;
}
#endif

FUNCTION(cuGraphDestroy, void *graph)
{
    return drop_graph(__func__, graph);
}

FUNCTION(cuGraphLaunch, void *exec, void *stream)
{
    const struct graph *graph = exec;

    ENTER();
    if (stream != &state.stream) return NOT_FOUND;
    for (int i = 0; i < graph->count; i++)
        graph->tasks[i].run(graph->tasks[i].arg);
    return 0;
}

FUNCTION(cuGraphExecDestroy, void *exec)
{
    return drop_graph(__func__, exec);
}

FUNCTION(cuEventCreate, void **event, unsigned flags)
{
    ENTER();
    if (flags != 0) return NOT_FOUND;
    *event = make(1);
    return 0;
}

FUNCTION(cuEventRecord, void *event, void *stream)
{
    ENTER();
    return event != NULL && stream == &state.stream ? 0 : NOT_FOUND;
}

// The event remembers how much the graph holds so far.
FUNCTION(cuEventRecordWithFlags, void *event, void *stream, unsigned flags)
{
    ENTER();
    if (flags != 1 || event == NULL || state.captured == NULL) return NOT_FOUND;
    *(uint8_t *)event = (uint8_t)state.captured->count;
    return event != NULL && stream == &state.stream ? 0 : NOT_FOUND;
}

// Two events are 200 ms apart, and 100 more for each task between them in a graph.
FUNCTION(cuEventElapsedTime, float *milliseconds, void *from, void *to)
{
    ENTER();
    *milliseconds =
        from == to ? 0.0f : 200.0f + 100.0f * (float)(*(uint8_t *)to - *(uint8_t *)from);
    return 0;
}

FUNCTION(cuEventDestroy_v2, void *event)
{
    return drop(__func__, event);
}
