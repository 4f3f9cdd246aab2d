// A libnccl.so.2 that moves nothing and writes each call down, as "RANK NAME COUNT TYPE PEER", in
// the file that FAKE_NCCL_LOG names. FAKE_NCCL_FAIL is "RANK NAME": that call fails there.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT      __attribute__((visibility("default")))
#define NO_PEER     -1
#define NAME_BYTES  64
#define WRONG_PLACE 5
#define PLANTED     3

struct id {
    char bytes[128];
};

static int own_rank; // of the one communicator of a process

static int called(const char *name, uint64_t count, int type, int peer)
{
    const char *path = getenv("FAKE_NCCL_LOG");
    const char *failing = getenv("FAKE_NCCL_FAIL");
    FILE *log = path != NULL ? fopen(path, "a") : NULL;
    char here[NAME_BYTES];

    if (log != NULL) {
        (void)fprintf(log, "%d %s %llu %d %d\n", own_rank, name, (unsigned long long)count, type,
                      peer);
        (void)fclose(log);
    }
    (void)snprintf(here, sizeof here, "%d %s", own_rank, name);
    return failing != NULL && strcmp(failing, here) == 0 ? PLANTED : 0;
}

#define FUNCTION(name, ...)                                                                        \
    EXPORT int name(__VA_ARGS__);                                                                  \
    int name(__VA_ARGS__)

EXPORT const char *ncclGetErrorString(int result);
const char *ncclGetErrorString(int result)
{
    return result == PLANTED ? "the planted failure" : "called at the wrong place";
}

FUNCTION(ncclGetUniqueId, struct id *id)
{
    (void)snprintf(id->bytes, sizeof id->bytes, "the id");
    return called(__func__, 0, 0, NO_PEER);
}

FUNCTION(ncclCommInitRank, void **comm, int ranks, struct id id, int rank)
{
    own_rank = rank;
    *comm = &own_rank;
    if (strcmp(id.bytes, "the id") != 0) return WRONG_PLACE;
    return called(__func__, (uint64_t)ranks, 0, NO_PEER);
}

FUNCTION(ncclCommDestroy, void *comm)
{
    return comm == &own_rank ? called(__func__, 0, 0, NO_PEER) : WRONG_PLACE;
}

static int is_grouped;

FUNCTION(ncclGroupStart, void)
{
    if (is_grouped) return WRONG_PLACE;
    is_grouped = 1;
    return called(__func__, 0, 0, NO_PEER);
}

FUNCTION(ncclGroupEnd, void)
{
    if (!is_grouped) return WRONG_PLACE;
    is_grouped = 0;
    return called(__func__, 0, 0, NO_PEER);
}

// With a stream that is not the first one's default, and inside a group where `grouped`.
static int moved(const char *name, uint64_t count, int type, int peer, const void *stream)
{
    if (stream == NULL || is_grouped != (peer != NO_PEER)) return WRONG_PLACE;
    return called(name, count, type, peer);
}

FUNCTION(ncclSend, const void *from, uint64_t count, int type, int peer, void *comm, void *stream)
{
    return from != NULL && comm == &own_rank ? moved(__func__, count, type, peer, stream)
                                             : WRONG_PLACE;
}

FUNCTION(ncclRecv, void *to, uint64_t count, int type, int peer, void *comm, void *stream)
{
    return to != NULL && comm == &own_rank ? moved(__func__, count, type, peer, stream)
                                           : WRONG_PLACE;
}

FUNCTION(ncclAllGather, const void *from, void *to, uint64_t count, int type, void *comm,
         void *stream)
{
    return from != to && comm == &own_rank ? moved(__func__, count, type, NO_PEER, stream)
                                           : WRONG_PLACE;
}

FUNCTION(ncclReduceScatter, const void *from, void *to, uint64_t count, int type, int operation,
         void *comm, void *stream)
{
    if (operation != 0) return WRONG_PLACE;
    return from != to && comm == &own_rank ? moved(__func__, count, type, NO_PEER, stream)
                                           : WRONG_PLACE;
}
