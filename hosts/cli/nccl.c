// Finds the functions of NCCL's library.

#include "hosts/cli/nccl.h"

#include <dlfcn.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define LIBRARY "libnccl.so.2"

struct symbol {
    size_t offset;
    const char *name;
};

#define SYMBOL(member, exported)                                                                   \
    {                                                                                              \
        offsetof(struct nccl, member), exported                                                    \
    }

static const struct symbol symbols[] = {
    SYMBOL(get_id, "ncclGetUniqueId"),
    SYMBOL(comm_create, "ncclCommInitRank"),
    SYMBOL(comm_destroy, "ncclCommDestroy"),
    SYMBOL(group_start, "ncclGroupStart"),
    SYMBOL(group_end, "ncclGroupEnd"),
    SYMBOL(send, "ncclSend"),
    SYMBOL(receive, "ncclRecv"),
    SYMBOL(all_gather, "ncclAllGather"),
    SYMBOL(reduce_scatter, "ncclReduceScatter"),
    SYMBOL(error_string, "ncclGetErrorString"),
};

#define SYMBOLS (sizeof symbols / sizeof symbols[0])

_Static_assert(sizeof(struct nccl) == SYMBOLS * sizeof(void *), "every function has a row");

int nccl_load(struct nccl *nccl, char *reason, uint64_t reason_bytes)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);

    if (library == NULL) {
        (void)snprintf(reason, reason_bytes, "%s", dlerror());
        return 0;
    }
    for (size_t i = 0; i < SYMBOLS; i++) {
        void *address = dlsym(library, symbols[i].name);

        if (address == NULL) {
            (void)snprintf(reason, reason_bytes, LIBRARY " has no %s", symbols[i].name);
            return 0;
        }
        // A function's address is no object's in C; POSIX promises that the bits are the same.
        memcpy((char *)nccl + symbols[i].offset, &address, sizeof address);
    }
    return 1;
}
