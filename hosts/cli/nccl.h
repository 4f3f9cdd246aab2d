// NVIDIA's collectives between GPUs, by dlopen, as the driver is: what the rows of a layer take by
// other means. Its types are declared here from the documented ABI.

#ifndef MOXIE_HOSTS_CLI_NCCL_H
#define MOXIE_HOSTS_CLI_NCCL_H

#include <stdint.h>

#define NCCL_UINT8    1
#define NCCL_FLOAT16  6
#define NCCL_BFLOAT16 9
#define NCCL_SUM      0

// Passed by value.
struct nccl_id {
    char bytes[128];
};

// A result of 0: success. Counts are elements.
struct nccl {
    int (*get_id)(struct nccl_id *id);
    int (*comm_create)(void **comm, int ranks, struct nccl_id id, int rank);
    int (*comm_destroy)(void *comm);
    int (*group_start)(void);
    int (*group_end)(void);
    int (*send)(const void *from, uint64_t count, int type, int peer, void *comm, void *stream);
    int (*receive)(void *to, uint64_t count, int type, int peer, void *comm, void *stream);
    int (*all_gather)(const void *from, void *to, uint64_t count, int type, void *comm,
                      void *stream);
    int (*reduce_scatter)(const void *from, void *to, uint64_t count, int type, int operation,
                          void *comm, void *stream);
    const char *(*error_string)(int result);
};

// 1, or 0 and why not in `reason`. The library stays loaded: it has threads of its own.
int nccl_load(struct nccl *nccl, char *reason, uint64_t reason_bytes);

#endif
